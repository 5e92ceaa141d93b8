# SPDX-License-Identifier: Apache-2.0
"""Both frontends export the same names with the same parameters and defaults."""

import importlib.util
import json
import subprocess
import sys

import pytest

FRONTENDS = {"tensorflow": "tensorflow", "torch": "torch"}
# A GradientTape is TensorFlow's own idea; PyTorch's counterpart is backward() itself.
TENSORFLOW_ONLY = {"DistributedGradientTape"}
# PyTorch copies on a stream of the user's.
TENSORFLOW_ONLY |= {"copy_to_gpu"}
# Names that scripts of SOK 2.x have, all of TensorFlow.
TENSORFLOW_ONLY |= {"DistributedVariable", "LocalizedVariable", "set_comm_tool"}
TENSORFLOW_ONLY |= {
    f"communication.{name}"
    for name in ("rank", "num_ranks", "local_rank", "id_in_rank", "num_gpu_per_rank", "num_gpus", "global_gpu_id")
}
# Clipping by the norm of all gradients: each after its framework's own functions.
TENSORFLOW_ONLY |= {"clip_by_global_norm", "global_norm"}
TORCH_ONLY = {"clip_grad_norm_", "get_total_norm"}
# As TorchRec's KeyedTensor.
TORCH_ONLY |= {"KeyedVectors"}
# What names a framework's own thing: its parameters follow the framework.
FRAMEWORK_SHAPED = {"DistributedOptimizer", "EmbeddingBagCollection", "OptimizerWrapper"}

# Parameters that only one framework has a meaning for.
FRAMEWORK_PARAMETERS = {"device"}

# Each frontend is described by a process of its own, which never loads the other framework.
DESCRIBE = """
import importlib, inspect, json, sys
package = importlib.import_module(f"sparse_operation_kit.{sys.argv[1]}")
def default(value):
    if value is inspect.Parameter.empty:
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return str(getattr(value, "name", value)).split(".")[-1].strip("<>'")  # tf.int64, torch.int64 -> int64
def parameters(value):
    # Of a class by __init__ or __new__, whichever names them: the frameworks' metaclasses hide both.
    functions = [inspect.unwrap(f) for f in ((value.__init__, value.__new__) if inspect.isclass(value) else (value,))]
    functions = [f for f in functions if inspect.isfunction(f) or inspect.ismethod(f)]
    lists = [[p for p in inspect.signature(f).parameters.values()] for f in functions]
    lists = [[[p.name, str(p.kind), default(p.default)] for p in l if p.name not in ("self", "cls")] for l in lists]
    return max(lists, key=len, default=[])
names = {}
for name in package.__all__:
    value = getattr(package, name)
    if inspect.ismodule(value):
        for inner in value.__all__:
            names[f"{name}.{inner}"] = parameters(getattr(value, inner))
    elif callable(value):
        names[name] = parameters(value)
for method in ("erase", "clear", "set_epoch", "scores", "set_scores", "statistics"):
    if hasattr(package.DynamicVariable, method):
        names[f"DynamicVariable.{method}"] = parameters(getattr(package.DynamicVariable, method))
print("SIGNATURES " + json.dumps(names))
"""


def describe(frontend):
    run = subprocess.run([sys.executable, "-c", DESCRIBE, frontend], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    line = next(line for line in run.stdout.splitlines() if line.startswith("SIGNATURES "))
    return json.loads(line.removeprefix("SIGNATURES "))


@pytest.fixture(scope="module")
def signatures():
    for framework in FRONTENDS.values():
        if importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed")
    return {frontend: describe(frontend) for frontend in FRONTENDS}


def test_same_names(signatures):
    tensorflow, torch = (set(signatures[frontend]) for frontend in ("tensorflow", "torch"))
    assert tensorflow - TENSORFLOW_ONLY == torch - TORCH_ONLY


def test_same_parameters(signatures):
    tensorflow, torch = signatures["tensorflow"], signatures["torch"]
    compared = sorted((set(tensorflow) & set(torch)) - FRAMEWORK_SHAPED)
    assert "lookup_sparse" in compared and "Variable" in compared and "init" in compared
    different = {}
    for name in compared:
        # A trailing **options of one framework's base class is not a parameter of the contract.
        ours, theirs = (
            [p for p in s[name] if p[1] != "VAR_KEYWORD" and p[0] not in FRAMEWORK_PARAMETERS]
            for s in (tensorflow, torch)
        )
        if ours != theirs:
            different[name] = {"tensorflow": ours, "torch": theirs}
    assert not different, json.dumps(different, indent=2)


def test_the_contract(signatures):
    """The parameters that docs and existing scripts rely on, in order."""
    expected = {
        "init": ["comm_tool", "use_legacy_optimizer", "gradient", "exchange", "seed"],
        "lookup_sparse": [
            *("params", "sp_ids", "sp_weights", "combiners", "use_low_frequency_filter", "training", "concat"),
        ],
        "all2all_dense_embedding": ["param", "indices"],
        "assign": ["var", "indices", "values"],
        "export": ["var"],
        "filter_variables": ["vars"],
        "sparse_read_and_evict": ["var", "indices"],
        "DynamicVariable.erase": ["keys"],
        "DynamicVariable.clear": [],
        "DynamicVariable.set_epoch": ["epoch"],
        "DynamicVariable.scores": ["keys"],
        "DynamicVariable.set_scores": ["keys", "scores"],
        "DynamicVariable.statistics": [],
        "broadcast_variables": ["vars", "root_rank"],
        "dump": ["path", "vars", "optimizer", "step", "extra", "progress"],
        "dump_async": ["path", "vars", "optimizer", "step", "extra", "progress"],
        "load": ["path", "vars", "optimizer", "verify", "progress"],
    }
    for frontend, names in signatures.items():
        for name, parameters in expected.items():
            assert [p[0] for p in names[name] if p[1] != "VAR_KEYWORD"] == parameters, (frontend, name)
        variable = [p[0] for p in names["Variable"]]
        assert variable[:7] == ["initial_value", "shape", "initializer", "dtype", "mode", "name", "trainable"], frontend
