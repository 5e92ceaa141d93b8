# SPDX-License-Identifier: Apache-2.0
"""Builds what tests of the communicator and of reserved ranges run against where there is no GPU: the core's own code
with a device that is host memory (fakes/device.cc, fakes/virtual_memory.cc), and a libnccl.so.2 (fakes/nccl.cc)."""

import os
import pathlib
import shutil
import subprocess

from sparse_operation_kit.core import _library

TESTS = pathlib.Path(__file__).parent
CORE = TESTS.parents[1] / "core"
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-pthread"]
FLAGS += os.environ.get("CXXFLAGS", "").split()  # those of a sanitizer: tools/sanitize.py
WITH_CUDA = ["src/api/communicator.cc", *sorted(f"src/nccl/{path.name}" for path in (CORE / "src/nccl").glob("*.cc"))]
WITH_CUDA += ["src/api/batch_memory.cc", "src/cuda/batch_memory.cu"]
WITH_CUDA += ["src/api/reserved_range.cc", "src/cuda/reserved_range.cu", "src/table/reserved_range.cc"]
PLAIN = ["src/api/error_record.cc", "src/common/call.cc", "src/common/status.cc", "src/common/tensor.cc"]
PLAIN += ["src/cpu/reserved_range.cc"]
FAKES = ["device.cc", "virtual_memory.cc"]


def build(folder):
    """(core, nccl): paths of the two libraries."""
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "a C++ compiler is needed"
    include = [f"-I{CORE / 'include'}", f"-I{CORE / 'src'}", f"-I{TESTS / 'fakes'}"]
    sources = [(CORE / name, ["-DSOK_WITH_CUDA=1"]) for name in WITH_CUDA]
    sources += [(CORE / name, []) for name in PLAIN] + [(TESTS / "fakes" / name, []) for name in FAKES]
    objects = [str(folder / f"{number}.o") for number in range(len(sources))]
    jobs = [
        [compiler, *FLAGS, *define, *include, "-c", "-x", "c++", str(source), "-o", made]
        for (source, define), made in zip(sources, objects, strict=True)
    ]
    core, nccl = folder / "libsok_fake.so", folder / "libnccl.so.2"
    name = ["-Wl,-soname,libnccl.so.2", "-Wl,--no-undefined"]
    jobs.append([compiler, *FLAGS, "-shared", str(TESTS / "fakes" / "nccl.cc"), "-o", str(nccl), *name])
    running = []
    for job in jobs:
        running.append(subprocess.Popen(job))
        if len(running) >= (os.cpu_count() or 1):
            assert running.pop(0).wait() == 0
    assert all(process.wait() == 0 for process in running)
    # Functions that are not in it are found in the real core, which it needs.
    real = [
        "-Wl,--no-as-needed",
        str(_library.path()),
        f"-Wl,-rpath,{_library.path().parent}",
        "-Wl,--no-undefined",
        "-ldl",
    ]
    subprocess.run([compiler, *FLAGS, "-shared", *objects, "-o", str(core), *real], check=True)
    return core, nccl
