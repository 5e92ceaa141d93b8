#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds Horovod 0.28.1 for the TensorFlow of this Python environment and installs it.

Horovod's last release does not compile against TensorFlow >= 2.16 as published. Two edits make it:

1. `xla_mpi_ops.cc` is left out: TensorFlow no longer ships the XLA headers that it includes. (It only adds XLA
   versions of the collectives; the ordinary ones are complete without it.)
2. `mpi_ops.cc` takes the CUDA stream from `stream_executor::Stream` itself instead of through `AsGpuStreamValue`,
   which TensorFlow no longer exports. (Compiled for GPUs only.)

The source is taken from the package index pip is configured with, or from --sdist. Usage:

    python tools/install_horovod.py                 # CPU: Gloo
    python tools/install_horovod.py --cuda          # GPU: NCCL
    python tools/install_horovod.py --reuse         # nothing to do when it is already there
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
RUNTIME_REQUIREMENTS = ("cloudpickle", "psutil", "pyyaml", "packaging")
SYSTEM_PACKAGES = {"cmake": "cmake", "make": "make", "g++": "g++"}

CMAKE_FILE = "horovod/tensorflow/CMakeLists.txt"
CMAKE_LINE = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n'

OPS_FILE = "horovod/tensorflow/mpi_ops.cc"
STREAM_DECLARATION = """\
// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
#if TENSORFLOW_VERSION >= 2011000000
#include "tensorflow/compiler/xla/stream_executor/stream.h"
#else
#include "tensorflow/stream_executor/stream.h"
#endif // TENSORFLOW_VERSION >= 2011000000
"""
STREAM_DEFINITION = """\
#include "xla/stream_executor/stream.h"

static inline GpuStreamHandle HorovodGpuStream(stream_executor::Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
"""
STREAM_CALL = "stream_executor::gpu::AsGpuStreamValue("
STREAM_CALLS = 12


class InstallError(Exception):
    """Something the person at the terminal can mend; the message says how."""


def replace_exactly(text: str, old: str, new: str, count: int, where: str) -> str:
    """Replaces `old`, which must occur exactly `count` times."""
    found = text.count(old)
    if found != count:
        raise InstallError(
            f"{where} is not the source of Horovod {VERSION}: expected {count} time(s), found {found}:\n{old.strip()}\n"
            f"Use the unmodified sdist of Horovod {VERSION}."
        )
    return text.replace(old, new)


def edit_source(source: Path) -> None:
    """Makes the two edits in an unpacked source tree; leaves it alone when either does not fit."""
    edited = {}
    for name in (CMAKE_FILE, OPS_FILE):
        path = source / name
        if not path.is_file():
            raise InstallError(f"{name} is missing: this is not the source of Horovod {VERSION}.")
        edited[name] = path.read_text(encoding="utf-8")
    edited[CMAKE_FILE] = replace_exactly(edited[CMAKE_FILE], CMAKE_LINE, "", 1, CMAKE_FILE)
    ops = replace_exactly(edited[OPS_FILE], STREAM_DECLARATION, STREAM_DEFINITION, 1, OPS_FILE)
    edited[OPS_FILE] = replace_exactly(ops, STREAM_CALL, "HorovodGpuStream(", STREAM_CALLS, OPS_FILE)
    for name, text in edited.items():
        (source / name).write_text(text, encoding="utf-8")


def run(command: list[str], *, env: dict[str, str] | None = None, hint: str = "") -> None:
    """Runs a command with its output on the terminal."""
    print("+", " ".join(command), flush=True)
    code = subprocess.run(command, env=env, check=False).returncode
    if code:
        raise InstallError(f"`{' '.join(command)}` ended with status {code}." + (f"\n{hint}" if hint else ""))


def find_nccl(home: str | None) -> tuple[Path, Path]:
    """(include folder, library folder) of NCCL: --nccl-home, the nvidia-nccl wheel, or the system."""
    candidates: list[tuple[Path, Path]] = []
    if home:
        candidates.append((Path(home) / "include", Path(home) / "lib"))
    else:
        for folder in map(Path, sys.path):
            candidates.append((folder / "nvidia/nccl/include", folder / "nvidia/nccl/lib"))
        candidates.append((Path("/usr/include"), Path("/usr/lib/x86_64-linux-gnu")))
        candidates.append((Path("/usr/local/cuda/include"), Path("/usr/local/cuda/lib64")))
    for include, library in candidates:
        if (include / "nccl.h").is_file() and any(library.glob("libnccl.so*")):
            return include, library
    raise InstallError(
        "--cuda needs NCCL's header and library and finds neither. Install `libnccl-dev`, or the wheel "
        "`nvidia-nccl-cu12` or `nvidia-nccl-cu13`, or name the folder that holds include/ and lib/ with --nccl-home."
    )


def cuda_home() -> str:
    """The CUDA toolkit's folder: CUDA_HOME, or what nvcc says of itself (it may be a link or a script elsewhere)."""
    if os.environ.get("CUDA_HOME"):
        return os.environ["CUDA_HOME"]
    command = ["nvcc", "--dryrun", "-x", "cu", os.devnull, "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    top = re.search(r"^#\$ TOP=(.*)$", said, re.MULTILINE)
    if top is None:
        raise InstallError("nvcc does not say where its toolkit is; name the folder with CUDA_HOME.")
    return str(Path(top[1]).resolve())


@contextmanager
def linkable_nccl(library: Path) -> Iterator[Path]:
    """A folder with `libnccl.so`: NCCL's wheel has only `libnccl.so.2`, which a linker does not look for."""
    if (library / "libnccl.so").exists():
        yield library
        return
    with tempfile.TemporaryDirectory(prefix="nccl-link-") as folder:
        (Path(folder) / "libnccl.so").symlink_to(next(iter(sorted(library.glob("libnccl.so*")))))
        yield Path(folder)


def build_environment(jobs: int, local_version: str) -> dict[str, str]:
    """The variables that make Horovod's setup.py build what we want (Gloo and TensorFlow only)."""
    env = dict(os.environ)
    env.update(
        CMAKE_POLICY_VERSION_MINIMUM="3.5",
        HOROVOD_WITH_GLOO="1",
        HOROVOD_WITHOUT_MPI="1",
        HOROVOD_WITH_TENSORFLOW="1",
        HOROVOD_WITHOUT_PYTORCH="1",
        HOROVOD_WITHOUT_MXNET="1",
        HOROVOD_LOCAL_VERSION=local_version,
        MAKEFLAGS=f"-j{jobs}",
        TF_CPP_MIN_LOG_LEVEL="3",
    )
    return env


def default_jobs() -> int:
    """One compiler for each CPU this process may use, but no more than memory allows (each takes about 1.5 GB)."""
    if "MAX_JOBS" in os.environ:
        return max(1, int(os.environ["MAX_JOBS"]))
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(gigabytes / 1.5)))


def installed_tensorflow() -> str:
    """The version of the TensorFlow in this environment, whatever its distribution is called."""
    for name in ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise InstallError(
        f"TensorFlow is not installed for {sys.executable}; Horovod is compiled against it.\n"
        "Install it first: python -m pip install 'tensorflow-cpu==2.21.*'  (or `tensorflow` for GPUs)"
    )


def check_tools(cuda: bool) -> None:
    """Says what to install when a tool that the build needs is missing."""
    missing = [package for tool, package in SYSTEM_PACKAGES.items() if shutil.which(tool) is None]
    if missing:
        raise InstallError(
            f"Missing build tools. On Debian or Ubuntu: sudo apt-get install {' '.join(missing)}\n"
            "Elsewhere: install a C++17 compiler, CMake 3.13 or newer, and GNU make."
        )
    if cuda and shutil.which("nvcc") is None:
        raise InstallError("--cuda needs nvcc on PATH. Install the CUDA toolkit and add its bin folder to PATH.")
    absent = []
    for module in ("setuptools", "wheel", "pip"):
        try:
            importlib.metadata.version(module)
        except importlib.metadata.PackageNotFoundError:
            absent.append(module)
    if absent:
        raise InstallError(
            f"Missing in this environment: python -m ensurepip && python -m pip install {' '.join(absent)}"
        )


def working_backend() -> str | None:
    """What the installed Horovod was built with ("gloo", "gloo nccl"), or None when it does not run."""
    program = (
        "import horovod.tensorflow as hvd; hvd.init(); assert hvd.size() == 1 and hvd.gloo_built();"
        "print('backend: gloo' + (' nccl' if hvd.nccl_built() else ''))"
    )
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    found = re.search(r"^backend: (.*)$", done.stdout, re.MULTILINE)
    return found.group(1) if done.returncode == 0 and found else None


def get_sdist(given: Path | None, folder: Path) -> Path:
    """The published source archive, downloaded unless --sdist names one."""
    if given is not None:
        if not given.is_file():
            raise InstallError(f"--sdist: no such file: {given}")
        return given
    # Not `pip download`: it would build metadata of the sdist, whose setup.py wants its own requirements first.
    run(
        [
            sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod",
            "--dest", str(folder), f"horovod=={VERSION}",
        ],
        hint=f"pip could not fetch Horovod {VERSION}. Without a network, pass the archive with --sdist.",
    )  # fmt: skip
    return folder / f"horovod-{VERSION}.tar.gz"


def build_wheel(args: argparse.Namespace, wheel_dir: Path, local_version: str) -> Path:
    """Unpacks, edits and compiles; returns the wheel."""
    with tempfile.TemporaryDirectory(prefix="horovod-") as temporary:
        folder = Path(temporary)
        sdist = get_sdist(args.sdist, folder)
        if hashlib.sha256(sdist.read_bytes()).hexdigest() != SHA256:
            raise InstallError(f"{sdist.name} is not the published archive of Horovod {VERSION}: its SHA-256 differs.")
        shutil.unpack_archive(sdist, folder)
        source = folder / f"horovod-{VERSION}"
        edit_source(source)
        env = build_environment(args.jobs, local_version)
        command = [
            sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir",
            "--wheel-dir", str(folder / "wheel"), str(source),
        ]  # fmt: skip
        if args.verbose:
            command.insert(4, "-v")
        hint = "The compiler's own message is above (run again with --verbose to see all of it)."
        if args.cuda:
            include, library = find_nccl(args.nccl_home)
            with linkable_nccl(library) as link:
                env.update(
                    HOROVOD_CUDA_HOME=cuda_home(),
                    HOROVOD_GPU="CUDA",
                    HOROVOD_GPU_OPERATIONS="NCCL",
                    HOROVOD_NCCL_LINK="SHARED",
                    HOROVOD_NCCL_INCLUDE=str(include),
                    HOROVOD_NCCL_LIB=str(link),
                )
                run(command, env=env, hint=hint)
        else:
            run(command, env=env, hint=hint)
        built = next((folder / "wheel").glob("horovod-*.whl"))
        wheel_dir.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(built, wheel_dir / built.name))


def find_wheel(wheel_dir: Path, local_version: str) -> Path | None:
    """A wheel of an earlier run for this Python and this TensorFlow."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return next(iter(sorted(wheel_dir.glob(f"horovod-{VERSION}+{local_version}-{python}-*.whl"))), None)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cuda", action="store_true", help="build with CUDA and NCCL (default: CPU with Gloo)")
    parser.add_argument("--nccl-home", metavar="DIR", help="folder with NCCL's include/ and lib/ (default: looked for)")
    parser.add_argument("--sdist", type=Path, metavar="FILE", help=f"horovod-{VERSION}.tar.gz instead of a download")
    parser.add_argument("--wheel-dir", type=Path, metavar="DIR", help="keep the wheel here (default: not kept)")
    parser.add_argument("--reuse", action="store_true", help="use what is installed or in --wheel-dir when it fits")
    parser.add_argument("--no-install", action="store_true", help="build the wheel only (needs --wheel-dir)")
    parser.add_argument(
        "--jobs", type=int, default=default_jobs(), help="compilers at once (default: MAX_JOBS or CPUs)"
    )
    parser.add_argument("--verbose", action="store_true", help="show the whole build")
    args = parser.parse_args(argv)
    if args.no_install and args.wheel_dir is None:
        parser.error("--no-install needs --wheel-dir")
    return args


def install(args: argparse.Namespace) -> None:
    """Does what the command line asks."""
    tensorflow = installed_tensorflow()
    local_version = f"tf{tensorflow.replace('-', '.')}" + (".cuda" if args.cuda else "")
    wanted = "gloo nccl" if args.cuda else "gloo"

    if args.reuse and not args.no_install:
        try:
            installed = importlib.metadata.version("horovod")
        except importlib.metadata.PackageNotFoundError:
            installed = ""
        if installed == f"{VERSION}+{local_version}" and working_backend() == wanted:
            print(f"Horovod {installed} is installed and works ({wanted}).")
            return

    wheel = find_wheel(args.wheel_dir, local_version) if args.reuse and args.wheel_dir else None
    with tempfile.TemporaryDirectory(prefix="horovod-wheel-") as temporary:
        if wheel is None:
            check_tools(args.cuda)
            print(
                f"Building Horovod {VERSION} for TensorFlow {tensorflow} with {args.jobs} job(s): about 4 CPU minutes."
            )
            wheel = build_wheel(args, args.wheel_dir or Path(temporary), local_version)
        if args.no_install:
            print(f"Wheel: {wheel}")
            return
        run([sys.executable, "-m", "pip", "install", *RUNTIME_REQUIREMENTS])
        run([sys.executable, "-m", "pip", "install", "--no-deps", "--force-reinstall", str(wheel)])
    backend = working_backend()
    if backend is None:
        raise InstallError(
            "Horovod was installed but does not start. Run\n"
            f"  {sys.executable} -c 'import horovod.tensorflow as hvd; hvd.init()'\nfor the reason."
        )
    print(f"Horovod {VERSION} for TensorFlow {tensorflow} is installed and works ({backend}).")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        install(args)
    except InstallError as error:
        print(f"\ninstall_horovod: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
