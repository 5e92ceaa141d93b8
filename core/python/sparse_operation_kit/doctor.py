# SPDX-License-Identifier: Apache-2.0
"""Says what of this package was built, what this machine has, and how to mend what is missing.

    python -m sparse_operation_kit.doctor            # a minute's reading for people
    python -m sparse_operation_kit.doctor --run      # also imports each frontend, in processes of their own
    python -m sparse_operation_kit.doctor --json     # the same for programs and bug reports

Frameworks are looked up, not imported, unless --run asks. The exit status is 1 when the core or the frontend of an
installed framework cannot be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import sparse_operation_kit
from sparse_operation_kit import core
from sparse_operation_kit.core import _library

_PACKAGE = Path(sparse_operation_kit.__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report: `ok` is None when the thing is absent and need not be there."""

    subject: str
    ok: bool | None
    text: str
    remedy: str = ""


def _rebuild(part: str) -> str:
    """The command that builds a part again, for a checkout or an installed package."""
    checkout = _PACKAGE.parents[2]
    if (checkout / "tools" / "build.py").is_file():
        return f"{sys.executable} {checkout / 'tools' / 'build.py'} {part}"
    return f"{sys.executable} -m pip install --force-reinstall --no-deps --no-build-isolation PATH_OF_THE_SOURCES"


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_core() -> Finding:
    """Whether libsok_core.so is there, loads and speaks this package's version of the C interface."""
    try:
        _library.load()
        return Finding("core", True, f"{core.build_info()} ({_library.path()})")
    except (ImportError, OSError) as error:
        return Finding("core", False, str(error), _rebuild("core"))


def check_cpu() -> Finding:
    """Cores this process may use and the instruction set that the core chose."""
    cores = len(os.sched_getaffinity(0))
    return Finding("CPU", True, f"{cores} core(s), instruction set in use: {core.device_properties().name}")


def _driver_has_gpus() -> bool:
    """Whether the NVIDIA driver shows a GPU; asks the file system, so that nothing is started."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*"))


def check_gpus() -> Finding:
    """The GPUs that the core can use."""
    if not core.built_with_cuda():
        if _driver_has_gpus():
            return Finding(
                "GPU", None, "there are GPUs, but the core was built without CUDA",
                f"install the CUDA toolkit (nvcc), then: SOK_WITH_CUDA=1 {_rebuild('all')}",
            )  # fmt: skip
        return Finding("GPU", None, "none; the core was built without CUDA and runs on the CPU")
    try:
        count = core.cuda_device_count()
        devices = [core.device_properties(index) for index in range(count)]
    except OSError as error:
        return Finding("GPU", None, str(error), "nvidia-smi shows whether the driver works; reboot or reinstall it")
    if not devices and _driver_has_gpus():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        text = "the driver has GPUs, but CUDA shows none to this process"
        remedy = "unset CUDA_VISIBLE_DEVICES" if hidden is not None else "nvidia-smi shows whether the driver works"
        return Finding("GPU", None, text, remedy)
    if not devices:
        return Finding("GPU", None, "none found; the core was built with CUDA and runs on the CPU here")
    names = "; ".join(f"{d.name}, {d.total_memory >> 30} GiB, sm {d.compute_capability}" for d in devices)
    return Finding("GPU", True, names)


def check_nccl() -> Finding:
    """The NCCL that exchange="auto" uses between GPUs; CPU ranks need none."""
    try:
        found = core.nccl_properties()
    except NotImplementedError:
        return Finding("NCCL", None, "not used: the core was built without CUDA")
    except OSError as error:
        text = f"{error}. Without it several GPU ranks exchange through Horovod or torch.distributed, which is slower"
        cuda = re.search(r"CUDA (\d+)", core.build_info())
        remedy = f"{sys.executable} -m pip install nvidia-nccl-cu{cuda[1] if cuda else 13}"
        return Finding("NCCL", None, text, remedy if _driver_has_gpus() else "")
    return Finding("NCCL", True, f"{found.version_text} ({found.path})")


def check_frontend(name: str, title: str, version: str | None, run: bool) -> Finding:
    """Whether a framework is installed and its ops were built; with `run`, whether they load."""
    if version is None:
        return Finding(title, None, "not installed")
    spec = importlib.util.find_spec(f"sparse_operation_kit.{name}")
    folder = Path(spec.origin).parent if spec and spec.origin else _PACKAGE / name
    if not (folder / f"libsok_{name}.so").is_file():
        return Finding(title, False, f"{version}, but its ops were not built", _rebuild(name))
    if run:
        error = _import_error(f"import sparse_operation_kit.{name} as sok; sok.init()")
        if error:
            return Finding(title, False, f"{version}; the frontend does not load: {error}", _rebuild(name))
    return Finding(title, True, f"{version}, ops built" + (" and loaded" if run else ""))


_REBUILD_HOROVOD = "python tools/install_horovod.py{} (in the sources of this package)"

# A class of Horovod's that only a build with the library has, as its binary spells the class in its type information.
_HOROVOD_LIBRARIES = {
    "NCCL": b"N7horovod6common13NCCLAllreduceE",
    "Gloo": b"N7horovod6common13GlooAllreduceE",
    "MPI": b"N7horovod6common12MPIAllreduceE",
}


def _horovod_binary() -> Path | None:
    """Horovod's ops for TensorFlow, found without importing either."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent / "tensorflow").glob("mpi_lib*.so"), None)


def horovod_libraries(binary: Path) -> list[str]:
    """What a build of Horovod can communicate with, of NCCL, Gloo and MPI."""
    with binary.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return [name for name, mark in _HOROVOD_LIBRARIES.items() if content.find(mark) >= 0]


def check_horovod(tensorflow: str | None, run: bool) -> Finding:
    """Horovod starts the processes of the TensorFlow frontend; one process needs none."""
    version = _version("horovod")
    remedy = _REBUILD_HOROVOD.format("") if tensorflow else ""
    if version is None:
        return Finding("Horovod", None, "not installed; needed only by several TensorFlow processes", remedy)
    if run:
        error = _import_error("import horovod.tensorflow as hvd; hvd.init()")
        if error:
            return Finding("Horovod", False, f"{version} does not load: {error}", remedy)
    binary = _horovod_binary()
    if binary is None:
        ok = None if tensorflow is None else False
        return Finding("Horovod", ok, f"{version}, but its ops for TensorFlow were not built", remedy)
    libraries = horovod_libraries(binary)
    text = f"{version}, built with {', '.join(libraries) or 'none of ' + ', '.join(_HOROVOD_LIBRARIES)}"
    if not {"Gloo", "MPI"} & set(libraries):
        return Finding("Horovod", False, f"{text}: its processes cannot find each other", remedy)
    if "NCCL" not in libraries and _driver_has_gpus():
        text += (
            ". Without NCCL its own exchanges of GPU tensors (its tapes, sok.init(exchange='engine')) travel through "
            "host memory, which is slow"
        )
        return Finding("Horovod", None, text, _REBUILD_HOROVOD.format(" --cuda") if tensorflow else "")
    return Finding("Horovod", True, text)


def _import_error(program: str) -> str:
    """The last line that a program in a process of its own wrote when it failed, or ""."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]


def examine(run: bool = False) -> list[Finding]:
    """Every finding, in the order of the report."""
    tensorflow = _version("tensorflow", "tensorflow-cpu", "tf-nightly")
    findings = [check_core()]
    if findings[0].ok:
        checks: list[Callable[[], Finding]] = [check_cpu, check_gpus, check_nccl]
        findings += [check() for check in checks]
    findings.append(check_frontend("tensorflow", "TensorFlow", tensorflow, run))
    findings.append(check_horovod(tensorflow, run))
    findings.append(check_frontend("torch", "PyTorch", _version("torch"), run))
    return findings


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_operation_kit.doctor", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--run", action="store_true", help="import each frontend, in a process of its own")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    findings = examine(args.run)
    failed = any(finding.ok is False for finding in findings)
    about = {
        "package": sparse_operation_kit.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    if args.json:
        print(json.dumps({**about, "findings": [dataclasses.asdict(finding) for finding in findings]}, indent=2))
        return int(failed)
    print(f"sparse_operation_kit {about['package']}, Python {about['python']}, {about['platform']}")
    marks = {True: "ok", False: "FAIL", None: "-"}
    for finding in findings:
        print(f"  {marks[finding.ok]:4} {finding.subject:10} {finding.text}")
        if finding.remedy:
            print(f"       {'':10} mend: {finding.remedy}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
