# SPDX-License-Identifier: Apache-2.0
"""What an import loads and what it leaves alone; each in a process of its own."""

import importlib.metadata
import subprocess
import sys

import pytest

import sparse_operation_kit


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Hides a framework as if it were not installed.
HIDE = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
def find(name, path=None, target=None):
    return None if name.split(".")[0] in {hidden!r} else find_spec(name, path, target)
PathFinder.find_spec = find
"""
LOADED = "import sys; print(*sorted({'tensorflow', 'torch', 'keras', 'horovod'} & set(sys.modules)))"
# /dev/nvidia* and the driver's library are opened by whatever starts CUDA.
CUDA = "assert 'libcuda.so' not in open('/proc/self/maps').read(), 'CUDA was started'"


@pytest.mark.parametrize(
    "module",
    [
        "sparse_operation_kit",
        "sparse_operation_kit.core",
        "sparse_operation_kit.arguments",
        "sparse_operation_kit.checkpoint",
        "sparse_operation_kit.doctor",
        "sparse_operation_kit.hybrid",
        "sparse_operation_kit.optimizers",
        "sparse_operation_kit.placement",
    ],
)
def test_framework_free_module_loads_no_framework(module):
    assert run(f"import {module}\n{LOADED}\n{CUDA}").split() == []


def test_torch_frontend_does_not_load_tensorflow():
    assert run(f"import sparse_operation_kit.torch\n{LOADED}").split() == ["torch"]


def test_torch_frontend_works_where_tensorflow_is_absent():
    hide = HIDE.format(hidden={"tensorflow", "keras", "horovod"})
    run(f"{hide}\nimport sparse_operation_kit.torch as sok\nsok.init()\nassert sok.num_ranks() == 1")


def test_tensorflow_frontend_does_not_load_torch():
    assert "torch" not in run(f"import sparse_operation_kit.tensorflow\n{LOADED}").split()


def test_tensorflow_frontend_works_where_torch_and_horovod_are_absent():
    hide = HIDE.format(hidden={"torch", "horovod"})
    run(f"{hide}\nimport sparse_operation_kit.tensorflow as sok\nsok.init()\nassert sok.num_ranks() == 1")


@pytest.mark.parametrize("frontend", ["tensorflow", "torch"])
def test_import_does_not_start_cuda(frontend):
    # The frameworks may open the driver's library to look for GPUs; what must not exist is a context, which would show
    # as the device file mapped into the process.
    run(f"import sparse_operation_kit.{frontend}\nassert '/dev/nvidia' not in open('/proc/self/maps').read()")


def test_root_forwards_to_tensorflow_at_first_use():
    program = """
import sys
import sparse_operation_kit as sok
assert "tensorflow" not in sys.modules
lookup = sok.lookup_sparse
import sparse_operation_kit.tensorflow as frontend
assert lookup is frontend.lookup_sparse
for name in frontend.__all__:
    assert getattr(sok, name) is getattr(frontend, name), name
    assert name in dir(sok), name
"""
    run(program)


def test_root_gives_its_submodules_without_tensorflow():
    program = f"import sparse_operation_kit as sok\nfrom sparse_operation_kit import torch\nsok.core.Table\n{LOADED}"
    assert run(program).split() == ["torch"]


def test_root_without_tensorflow_says_what_to_do():
    program = f"""{HIDE.format(hidden={"tensorflow"})}
import sparse_operation_kit as sok
try:
    sok.lookup_sparse
except ModuleNotFoundError as error:
    print(error)
"""
    message = run(program)
    assert "import sparse_operation_kit.torch as sok" in message and "pip install tensorflow" in message


def test_unknown_name_of_the_root():
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        sparse_operation_kit.no_such_name  # noqa: B018


def test_private_names_do_not_load_tensorflow():
    program = f"import sparse_operation_kit as sok\nassert not hasattr(sok, '__wrapped__')\ndir(sok)\n{LOADED}"
    assert run(program).split() == []


def test_version():
    installed = importlib.metadata.version("sparse-operation-kit")
    assert sparse_operation_kit.__version__ == installed.partition("+")[0]  # then come the frameworks of its ops


def test_paths_of_sok_1_load_tensorflow_when_a_name_is_asked_for():
    pytest.importorskip("tensorflow")
    program = f"""
import importlib, numpy
import sparse_operation_kit as sok
from sparse_operation_kit import core, legacy_paths
paths = [f"sparse_operation_kit.{{path}}" for path in legacy_paths.PATHS]
modules = [importlib.import_module(path) for path in paths]
assert core.initialize(core.Initializer("constant", 2.0), 1, 3).tolist() == [[2.0] * 3]
from sparse_operation_kit import experiment, optimizers
assert callable(optimizers.from_keras)
{LOADED}
from sparse_operation_kit.core.initialize import Init
assert core.initialize.Init is sok.Init is Init
assert sok.embeddings.distributed_embedding.DistributedEmbedding is sok.DistributedEmbedding
assert experiment.lookup_sparse is sok.lookup_sparse and sok.kit_lib.in_tensorflow2()
for path, module in zip(legacy_paths.PATHS, modules, strict=True):
    assert set(legacy_paths.PATHS[path]) <= set(dir(module)) or path == "optimizers", path
    for name in legacy_paths.PATHS[path]:
        assert getattr(module, name) is not None
try:
    sok.embeddings.nothing
except AttributeError:
    print("refused")
"""
    assert run(program).split() == ["refused"]
