# SPDX-License-Identifier: Apache-2.0
"""What NVIDIA's profilers see: a range for each stage, by its name."""

import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from sparse_operation_kit import core

FAKES = pathlib.Path(__file__).parent / "fakes"


STAGES = ["gather_combine", "reduce", "apply", "route", "locate", "combine", "spread"]


def run_stages():
    weight = np.ones((10, 4), np.float32)
    tables, lookups = [core.Table(weight)], [core.Lookup([1, 2], row_splits=[0, 2])]
    core.gather_combine(tables, lookups)
    gradient = core.Gradient(np.array([1, 2]), np.ones((2, 4), np.float32))
    core.reduce(tables[0], [gradient])
    core.apply([core.Update(tables[0], core.Optimizer("sgd", 0.1), [gradient])])

    tables, lookups = [core.Table(np.ones((5, 4), np.float32), num_rows=10, num_ranks=2)], [core.Lookup([0, 2, 2])]
    routing = core.route(tables, lookups)
    core.locate(tables, routing.keys[:2], routing.counts)
    core.combine(tables, lookups, routing.inverse, np.ones(8, np.float32))
    core.spread(tables, lookups, [np.ones((3, 4), np.float32)], routing)


def fail():
    with pytest.raises(IndexError):
        core.gather_combine([core.Table(np.ones((3, 4), np.float32))], [core.Lookup([7])])


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    """The path of a library that NVTX takes for a tool."""
    if not core.built_with_cuda():
        pytest.skip("the core was built without CUDA")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        homes.insert(0, str(pathlib.Path(nvcc).resolve().parents[1]))
    includes = [pathlib.Path(home) / "include" for home in homes if home]
    include = next((folder for folder in includes if (folder / "nvtx3" / "nvToolsExt.h").exists()), None)
    if include is None:
        pytest.skip("there is no CUDA toolkit with the headers of NVTX")
    made = tmp_path_factory.mktemp("nvtx") / "tool.so"
    command = [shutil.which("c++"), "-std=c++20", "-shared", "-fPIC", "-isystem", str(include), "-o", str(made)]
    subprocess.run([*command, str(FAKES / "nvtx_tool.cc")], check=True)
    return made


@pytest.mark.parametrize(("function", "stages"), [("run_stages", STAGES), ("fail", ["gather_combine"])])
def test_ranges(tool, tmp_path, function, stages):
    """Each is closed before the next one begins, also where the stage fails."""
    folder, log = str(FAKES.parent), tmp_path / "log"
    program = f"import sys; sys.path.insert(0, {folder!r}); import test_profiling; test_profiling.{function}()"
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(tool), "NVTX_TOOL_FILE": str(log)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert log.read_text().splitlines() == [line for stage in stages for line in (f"sok {stage}", "sok")]


def test_ranges_of_exchanges(libraries, tmp_path):
    """Of a communicator of one rank, over fakes."""
    program = """
import ctypes
import numpy as np
from sparse_operation_kit import core
from sparse_operation_kit.core import _library
fake = _library.load()
fake.fake_stream_create.restype, fake.fake_ranges.restype = ctypes.c_void_p, ctypes.c_char_p
sent, received = np.arange(3), np.zeros(3, np.int64)
with core.Communicator(0, core.Communicator.make_id(), 1, 0) as ranks:
    stream = fake.fake_stream_create()
    ranks.exchange(stream, sent.ctypes.data, [3], received.ctypes.data, [3], 8)
    ranks.swap_counts(np.ones((1, 2), np.int64), context=core.Context(device=0, stream=stream, empty=np.empty))
print(fake.fake_ranges().decode())
"""
    fake_core, nccl = libraries
    names = {"SOK_CORE_LIBRARY": str(fake_core), "SOK_NCCL_LIBRARY": str(nccl), "FAKE_NCCL_FOLDER": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **names}, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["exchange(", ")", "swap_counts(", ")"], done.stderr
