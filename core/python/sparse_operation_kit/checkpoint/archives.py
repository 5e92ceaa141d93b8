# SPDX-License-Identifier: Apache-2.0
"""Arrays in one file, `.npz` or `.safetensors`, written and read as streams.

Own code, because NumPy's and safetensors' writers want each array whole in memory. Both formats are a list of named
arrays, uncompressed on writing; nothing of them is ever unpickled.
"""

import contextlib
import json
import math
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from . import header, strict_json
from .errors import FormatError, SizeError, storage_errors
from .files import byte_view
from .source import Array

METADATA = "sok_manifest"
_SAFETENSORS = {
    "I8": "|i1",
    "I32": "<i4",
    "I64": "<i8",
    "U32": "<u4",
    "U64": "<u8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
}
_SAFETENSORS_NAMES = {np.dtype(dtype).name: name for name, dtype in _SAFETENSORS.items()}
_MAX_HEADER = 100_000_000  # the limit of the safetensors format
_METADATA_DTYPE = np.dtype(np.uint8)


@dataclass(frozen=True)
class Description:
    """What an array is called, and how large it is."""

    name: str
    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Stream:
    """An array: `pieces(rows)` yields it along its first axis, about `rows` rows at a time."""

    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]
    pieces: Callable[[int], Iterator[Array]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(path: str, arrays: Mapping[str, Stream], metadata: bytes, advance: Callable[[int], None]) -> None:
    """Writes `path`, .npz or .safetensors by its ending; it appears whole or not at all."""
    temporary = f"{path}.sok-tmp-{secrets.token_hex(8)}"
    try:
        with storage_errors(path, "write"), open(temporary, "xb") as file:
            (_write_npz if path.endswith(".npz") else _write_safetensors)(file, arrays, metadata, advance)
            file.flush()
            os.fsync(file.fileno())
        with storage_errors(path, "replace"):
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _copy(out: IO[bytes], stream: Stream, advance: Callable[[int], None]) -> None:
    rows = max(1, (8 << 20) // max(1, math.prod(stream.shape[1:]) * stream.dtype.itemsize))
    for piece in stream.pieces(rows):
        out.write(byte_view(np.ascontiguousarray(piece)))
        advance(piece.nbytes)


def _write_npz(file: IO[bytes], arrays: Mapping[str, Stream], metadata: bytes, advance: Callable[[int], None]) -> None:
    data = np.frombuffer(metadata, np.uint8)
    everything = {METADATA: Stream(_METADATA_DTYPE, (len(data),), lambda _: iter([data])), **arrays}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, stream in everything.items():
            with archive.open(zipfile.ZipInfo(name + ".npy"), "w", force_zip64=True) as out:
                description = {"descr": stream.dtype.str, "fortran_order": False, "shape": stream.shape}
                np.lib.format.write_array_header_1_0(out, description)
                _copy(out, stream, advance)


def _write_safetensors(
    file: IO[bytes], arrays: Mapping[str, Stream], metadata: bytes, advance: Callable[[int], None]
) -> None:
    described = [Description(name, stream.dtype, stream.shape) for name, stream in arrays.items()]
    file.write(safetensors_header(described, {METADATA: metadata.decode("ascii")}))
    for stream in arrays.values():
        _copy(file, stream, advance)


def safetensors_header(arrays: Sequence[Description], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a .safetensors file, a multiple of 8 bytes, which the arrays follow one after another."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for array in arrays:
        end = offset + array.nbytes
        document[array.name] = {
            "dtype": _SAFETENSORS_NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(document, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Archive:
    """An archive open for reading: `arrays` by name; `metadata`, or None where this package did not write it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.arrays: dict[str, Stream] = {}
        self.metadata: bytes | None = None
        self._zip: zipfile.ZipFile | None = None
        with storage_errors(path, "open"):
            self._file = open(path, "rb")  # noqa: SIM115
        try:
            self._open_npz() if path.endswith(".npz") else self._open_safetensors()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._zip is not None:
            self._zip.close()
        self._file.close()

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_npz(self) -> None:
        try:
            self._zip = zipfile.ZipFile(self._file)
        except zipfile.BadZipFile as error:
            raise FormatError(f"is no zip file: {error}", file=self.path, expected="an .npz file") from error
        for entry in self._zip.infolist():
            name = entry.filename.removesuffix(".npy")
            with self._zip.open(entry) as member:
                dtype, shape, _ = self._npy_header(member, name)
            if name == METADATA:
                if dtype != _METADATA_DTYPE or len(shape) != 1 or shape[0] > strict_json.MAX_BYTES:
                    raise FormatError(f"{METADATA} is no text", file=self.path, expected="a vector of uint8")
                pieces = self._npy_pieces(entry, name, dtype, shape)(shape[0])
                self.metadata = b"".join(piece.tobytes() for piece in pieces)
            else:
                self.arrays[name] = Stream(dtype, shape, self._npy_pieces(entry, name, dtype, shape))

    def _npy_header(self, member: IO[bytes], name: str) -> "tuple[np.dtype[Any], tuple[int, ...], int]":
        try:
            version = np.lib.format.read_magic(member)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, fortran, dtype = read(member)
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise FormatError(f"{name} is no .npy file: {error}", file=self.path) from error
        if name != METADATA and (fortran or dtype.str not in _SAFETENSORS.values()):
            raise FormatError(
                f"{name} is {dtype} in {'Fortran' if fortran else 'C'} order",
                file=self.path,
                expected="numbers in C order, little-endian",
            )
        return dtype, tuple(int(length) for length in shape), member.tell()

    def _npy_pieces(
        self, entry: zipfile.ZipInfo, name: str, dtype: "np.dtype[Any]", shape: tuple[int, ...]
    ) -> Callable[[int], Iterator[Array]]:
        def pieces(rows: int) -> Iterator[Array]:
            assert self._zip is not None
            try:
                with self._zip.open(entry) as member:
                    self._npy_header(member, name)
                    yield from self._pieces(member, name, dtype, shape, rows)
                    if member.read(1):
                        raise SizeError(f"{name} is longer than its shape says", file=self.path)
            except zipfile.BadZipFile as error:
                raise FormatError(f"{name} is damaged: {error}", file=self.path) from error

        return pieces

    def _pieces(
        self, member: IO[bytes], name: str, dtype: "np.dtype[Any]", shape: tuple[int, ...], rows: int
    ) -> Iterator[Array]:
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        for first in range(0, shape[0] if shape else 0, max(rows, 1)):
            count = min(rows, shape[0] - first)
            data = member.read(count * row_bytes)
            if len(data) != count * row_bytes:
                raise SizeError(f"{name} ends early", file=self.path, expected=f"an array of {list(shape)}")
            yield np.frombuffer(data, dtype).reshape(count, *shape[1:])

    def _open_safetensors(self) -> None:
        total = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if total < 8 or length > min(total - 8, _MAX_HEADER):
            raise SizeError("is too short for its header", file=self.path, expected="a .safetensors file")
        try:
            document = strict_json.loads(self._file.read(length))
        except ValueError as error:
            raise FormatError(f"its header is not strict JSON: {error}", file=self.path) from error
        if not isinstance(document, dict):
            raise FormatError("its header is no object", file=self.path)
        metadata = document.pop("__metadata__", {})
        if isinstance(metadata, dict) and isinstance(metadata.get(METADATA), str):
            self.metadata = metadata[METADATA].encode("utf-8")
        for name, entry in document.items():
            self.arrays[name] = self._tensor(name, entry, 8 + length, total)

    def _tensor(self, name: str, entry: Any, start: int, total: int) -> Stream:
        problem = FormatError(f"{name[:200]!r} is not described as a tensor of a checkpoint", file=self.path)
        if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str) or entry["dtype"] not in _SAFETENSORS:
            raise problem
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
        for numbers, limit in ((shape, 2), (offsets, 2)):
            if not isinstance(numbers, list) or not 1 <= len(numbers) <= limit:
                raise problem
            if not all(type(number) is int and 0 <= number <= total for number in numbers):
                raise problem
        assert isinstance(shape, list) and isinstance(offsets, list)
        dtype = np.dtype(_SAFETENSORS[entry["dtype"]])
        if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
            raise problem
        if start + offsets[1] > total:
            needed = f"{start + offsets[1]} bytes"
            raise SizeError(f"ends before the tensor {name!r} does", file=self.path, expected=needed)

        def pieces(rows: int) -> Iterator[Array]:
            with open(self.path, "rb") as member:
                member.seek(start + offsets[0])
                yield from self._pieces(member, name, dtype, tuple(shape), rows)

        return Stream(dtype, tuple(shape), pieces)


def allowed(stream: Stream, dtypes: Sequence[str]) -> bool:
    """Whether a stream's dtype is one of the format's names."""
    return stream.dtype.name in dtypes and stream.dtype == header.DTYPES[stream.dtype.name]
