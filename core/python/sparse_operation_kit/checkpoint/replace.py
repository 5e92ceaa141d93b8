# SPDX-License-Identifier: Apache-2.0
"""A dump appears whole or not at all.

A dump to DIR/NAME is built in DIR/.NAME.sok-tmp-<random> and takes the place of DIR/NAME in one step:

- nothing at NAME, or an empty directory: rename(2);
- a directory at NAME: renameat2(2) with RENAME_EXCHANGE; then the old dump has the temporary name and is removed;
- where the file system cannot exchange: NAME is renamed to .NAME.sok-old-<random>, then the new dump to NAME, under a
  lock on DIR. A crash in between leaves no NAME; `find` then gives the old dump, and the next dump puts it back
  (`recover`).

Whoever builds a dump holds flock(2) on its temporary directory. The kernel drops the lock with the process, so a
leftover is a temporary directory whose lock is free, and only such are removed. Files that are no part of a dump are
never removed: those that lay in a replaced directory move to the new one.
"""

import ctypes
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from . import header, names
from .errors import CheckpointError, StorageError, storage_errors

_TEMPORARY, _OLD = ".sok-tmp-", ".sok-old-"
_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def exchange(parent: int, first: str, second: str) -> bool:
    """Swaps two names of one directory atomically; False where kernel or file system cannot."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(parent, os.fsencode(first), parent, os.fsencode(second), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), second)


class Replacement:
    """The temporary directory of one dump, made on rank 0; `commit` puts it at `path`, `close` removes what is left."""

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)
        folder, self._name = os.path.split(self.path)
        if not self._name:
            raise StorageError(
                "cannot be replaced by a dump", file=self.path, expected="a directory that is not the root"
            )
        with storage_errors(self.path, "create the directory"):
            _check_target(self.path)
            _make_folder(folder)
            self._parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with storage_errors(self.path, "prepare a temporary directory"):
                recover(self._parent, self._name)
                self.name, self.fd = self._create()
        except BaseException:
            os.close(self._parent)
            raise

    @property
    def temporary_path(self) -> str:
        return os.path.join(os.path.dirname(self.path), self.name)

    def _create(self) -> tuple[str, int]:
        while True:
            name = f".{self._name}{_TEMPORARY}{secrets.token_hex(8)}"
            os.mkdir(name, dir_fd=self._parent)
            try:
                fd = os.open(name, _DIRECTORY, dir_fd=self._parent)
            except FileNotFoundError:
                continue  # another dump's cleaning took it for a leftover before it was locked
            if _lock(fd) is not False and _same(self._parent, name, fd):
                return name, fd
            os.close(fd)

    def commit(self) -> None:
        """Makes the temporary directory the dump at `path`. Every file in it must be synced; its entries are synced
        here.
        """
        with storage_errors(self.path, "replace the dump"):
            os.fsync(self.fd)
            while not self._place():
                pass
            os.fsync(self._parent)

    def _place(self) -> bool:
        """One attempt; False when another process changed what is at the path meanwhile."""
        if self._rename():
            return True
        _keep_mode(self._parent, self._name, self.fd)
        link_strangers(self._parent, self._name, self.fd)
        os.fsync(self.fd)
        try:
            if exchange(self._parent, self.name, self._name):
                return True
        except FileNotFoundError:
            return False
        return self._place_in_two_steps()

    def _rename(self) -> bool:
        """Moves the dump to its path; False when a directory with something in it is there."""
        try:
            os.rename(self.name, self._name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        return True

    def _place_in_two_steps(self) -> bool:
        old = self.name.replace(_TEMPORARY, _OLD)
        with _locked(self._parent):
            try:
                os.rename(self._name, old, src_dir_fd=self._parent, dst_dir_fd=self._parent)
            except FileNotFoundError:
                return False
            placed = self._rename()
            retire(self._parent, old, self._name)
        return placed

    def close(self) -> None:
        """Removes the replaced dump, or the temporary directory when `commit` did not happen."""
        if self._parent < 0:
            return
        try:
            retire(self._parent, self.name, self._name)
        except OSError:
            pass  # the next dump to this path tries again
        finally:
            os.close(self.fd)
            os.close(self._parent)
            self._parent = -1


def find(path: str) -> str:
    """The directory to read for `path`: itself, or the old dump that an interrupted two-step replacement left."""
    target = os.path.realpath(path)
    if os.path.lexists(target):
        return path
    folder, name = os.path.split(target)
    try:
        left = [entry for entry in os.listdir(folder) if entry.startswith(f".{name}{_OLD}")]
        left.sort(key=lambda entry: os.stat(os.path.join(folder, entry)).st_mtime_ns)
    except OSError:
        return path
    return os.path.join(folder, left[-1]) if left else path


def recover(parent: int, name: str) -> None:
    """Cleans up after dumps to `name` that died: puts an old dump back where none is, removes unlocked temporaries."""
    entries = os.listdir(parent)
    old = [entry for entry in entries if entry.startswith(f".{name}{_OLD}")]
    if old:
        with _locked(parent):
            for entry in old:
                try:
                    if name in os.listdir(parent):
                        retire(parent, entry, name)
                    else:
                        os.rename(entry, name, src_dir_fd=parent, dst_dir_fd=parent)
                except FileNotFoundError:
                    pass
    for entry in entries:
        if not entry.startswith(f".{name}{_TEMPORARY}"):
            continue
        try:
            fd = os.open(entry, _DIRECTORY, dir_fd=parent)
        except OSError:
            continue
        try:
            if _lock(fd) is True and _same(parent, entry, fd):
                retire(parent, entry, name)
        except OSError:
            pass  # not ours to remove
        finally:
            os.close(fd)


def retire(parent: int, entry: str, heir: str) -> None:
    """Removes the dump in directory `entry`; what is no part of a dump moves to directory `heir`, if that has no such
    name.
    """
    try:
        fd = os.open(entry, _DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        return
    try:
        target = _open_or_none(parent, heir)
        try:
            for item in os.listdir(fd):
                _retire_item(fd, item, target)
        finally:
            if target is not None:
                os.close(target)
    finally:
        os.close(fd)
    try:
        os.rmdir(entry, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def _retire_item(fd: int, item: str, target: int | None) -> None:
    try:
        if is_dump_file(fd, item):
            os.unlink(item, dir_fd=fd)
            return
        if target is None:
            return
        try:
            there = os.lstat(item, dir_fd=target)
        except FileNotFoundError:
            os.rename(item, item, src_dir_fd=fd, dst_dir_fd=target)
            return
        if os.path.samestat(there, os.lstat(item, dir_fd=fd)):
            os.unlink(item, dir_fd=fd)  # link_strangers gave it this second name
    except FileNotFoundError:
        pass


def link_strangers(parent: int, name: str, target: int) -> None:
    """Gives the regular files of directory `name` that are no part of a dump a second name in `target`.

    So they stay in place while the directories change theirs. Other entries follow after (`retire`).
    """
    fd = _open_or_none(parent, name)
    if fd is None:
        return
    try:
        for item in os.listdir(fd):
            try:
                if stat.S_ISREG(os.lstat(item, dir_fd=fd).st_mode) and not is_dump_file(fd, item):
                    os.link(item, item, src_dir_fd=fd, dst_dir_fd=target, follow_symlinks=False)
            except OSError:
                pass  # no hard links here, or it is gone: `retire` moves what there is
    finally:
        os.close(fd)


def _keep_mode(parent: int, name: str, target: int) -> None:
    """Gives directory `target` the permissions of the one it will replace."""
    with suppress(OSError):
        os.fchmod(target, stat.S_IMODE(os.stat(name, dir_fd=parent).st_mode))


def is_dump_file(fd: int, name: str) -> bool:
    """Whether the entry `name` of directory `fd` was written by a dump: by its name and its header, not by name
    alone.
    """
    if name == names.MANIFEST:
        return stat.S_ISREG(os.lstat(name, dir_fd=fd).st_mode)
    stems = (names.parse_key_file(name), names.parse_weight_file(name), names.parse_state_file(name))
    if all(stem is None for stem in stems):
        return False
    if not stat.S_ISREG(os.lstat(name, dir_fd=fd).st_mode):
        return False
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=fd)
    try:
        data = os.pread(file, header.SIZE, 0)
    finally:
        os.close(file)
    if not data:
        return True  # a dump that died before its first byte
    try:
        header.decode(data, name)
    except CheckpointError:
        return False
    return True


def _make_folder(path: str) -> None:
    """Like os.makedirs, but what it makes survives a power failure."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    _make_folder(above)
    with suppress(FileExistsError):
        os.mkdir(path)
    fd = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_target(path: str) -> None:
    """Refuses paths that must not change their directory."""
    if os.path.lexists(path) and not os.path.isdir(path):
        raise StorageError("is a file", file=path, expected="a directory, or nothing", number=errno.ENOTDIR)
    try:
        here = os.getcwd()
    except OSError:
        return
    if os.path.commonpath([here, path]) == path:
        raise StorageError(
            "holds the working directory of this process and cannot be replaced",
            file=path,
            expected="a directory of its own for the dump",
            number=errno.EBUSY,
        )


def _open_or_none(parent: int, name: str) -> int | None:
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _same(parent: int, name: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(name, dir_fd=parent, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def _lock(fd: int) -> bool | None:
    """Takes the lock without waiting: True, or False when another holds it, or None where there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


@contextmanager
def _locked(parent: int) -> Iterator[None]:
    """Holds the lock of the directory that contains the dumps, where there are locks."""
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
