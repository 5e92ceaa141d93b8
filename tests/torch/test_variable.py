# SPDX-License-Identifier: Apache-2.0
"""Tables as parameters: how they are made, copied, saved, moved and listed."""

import copy
import io
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import runtime, saving


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12, dtype=torch.float32).view(4, 3),
        np.arange(12, dtype=np.float32).reshape(4, 3),
        [[0.0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]],
        torch.arange(12, dtype=torch.float32).view(3, 4).T.contiguous().T.reshape(4, 3),
    ],
)
def test_initial_value(value):
    table = sok.Variable(value)
    assert isinstance(table, torch.nn.Parameter) and table.requires_grad and table.is_leaf
    assert torch.equal(table.detach(), torch.arange(12, dtype=torch.float32).view(4, 3))
    assert table.global_shape == (4, 3) and table.mode == "distributed"
    assert table.target_gpu == -1 and table.num_gpus == 1


def test_initial_value_is_copied():
    value = torch.ones(4, 3)
    table = sok.Variable(value)
    value.zero_()
    assert torch.equal(table.detach(), torch.ones(4, 3))


def test_dtype_converts_on_demand():
    assert sok.Variable(np.ones((2, 2)), dtype=torch.float32).dtype == torch.float32
    assert sok.Variable(torch.ones(2, 2).half(), dtype=torch.float32).dtype == torch.float32
    assert sok.Variable(torch.ones(2, 2), dtype=torch.bfloat16).dtype == torch.bfloat16
    assert sok.Variable(np.ones((2, 2), np.float16)).dtype == torch.float16


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "either initial_value or shape"),
        ({"initial_value": torch.ones(2, 2), "shape": (2, 2)}, ValueError, "either initial_value or shape"),
        ({"initial_value": torch.ones(2, 2), "initializer": "ones"}, ValueError, "initializer goes with shape"),
        ({"initial_value": torch.ones(4)}, ValueError, "two dimensions"),
        ({"initial_value": torch.ones(0, 4)}, ValueError, "no rows"),
        ({"shape": (0, 4)}, ValueError, "no rows"),
        ({"shape": (4, 0)}, ValueError, "no elements"),
        ({"shape": (2**40, 2**30)}, ValueError, r"2\^63 bytes"),
        ({"shape": (2**64, 1)}, ValueError, r"2\^63 bytes"),
        ({"shape": (4,)}, ValueError, "two dimensions"),
        ({"shape": (4.5, 2)}, TypeError, "integers"),
        (
            {"initial_value": torch.ones(2, 2).double()},
            TypeError,
            "must be float32 or float16 or bfloat16, got float64",
        ),
        ({"initial_value": np.ones((2, 2))}, TypeError, "must be float32 or float16 or bfloat16, got float64"),
        ({"initial_value": torch.ones(2, 2).long()}, TypeError, "got int64"),
        ({"shape": (2, 2), "dtype": torch.float64}, TypeError, "must be float32 or float16 or bfloat16, got float64"),
        ({"shape": (2, 2), "dtype": torch.complex64}, TypeError, "got complex64"),
        ({"shape": (2, 2), "mode": "localized:7"}, ValueError, r"rank 7.*1 ranks.*\[0, 1\)"),
        ({"shape": (2, 2), "mode": "localized"}, ValueError, "unknown mode"),
        ({"shape": (2, 2), "mode": 3}, TypeError, "string"),
        ({"shape": (2, 2), "name": 5}, TypeError, "name of a table must be a string, got 5"),
        ({"shape": (2, 2), "name": "a\udcff"}, ValueError, "valid Unicode"),
        ({"shape": (2, 2), "initializer": "zeroes"}, ValueError, "unknown initializer 'zeroes'.*zeros"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        sok.Variable(**{"name": "items", **options})


def test_before_init():
    runtime.shutdown()
    with pytest.raises(RuntimeError, match=r"sok\.init\(\)"):
        sok.Variable(shape=(2, 2))


def test_named_initializers():
    def make(initializer, name="a", **options):
        return sok.Variable(shape=(1000, 20), initializer=initializer, name=name, **options).detach()

    uniform, normal = make(None), make("normal")
    assert uniform.min() >= -0.05 and uniform.max() < 0.05 and abs(uniform.mean()) < 1e-3
    assert abs(uniform.std() - 0.1 / 12**0.5) < 1e-3
    assert abs(normal.mean()) < 2e-3 and abs(normal.std() - 0.05) < 2e-3 and abs(normal).max() > 0.12
    assert abs(make("truncated_normal")).max() <= 0.1
    assert torch.equal(make("zeros"), torch.zeros(1000, 20)) and torch.equal(make(1.5), torch.full((1000, 20), 1.5))
    assert torch.equal(make("uniform"), uniform) and torch.equal(make("random"), uniform)
    assert not torch.equal(make("uniform", name="b"), uniform)
    assert torch.equal(make("uniform", mode="localized:0"), uniform)
    runtime.shutdown()
    sok.init(seed=1)
    assert not torch.equal(make("uniform"), uniform)


def test_initializer_function():
    table = sok.Variable(shape=(50, 4), initializer=torch.nn.init.xavier_uniform_)
    assert table.requires_grad and len(table.detach().unique()) > 100


def test_names():
    assert sok.Variable(shape=(2, 2), name="items").name == "items"
    first, second = sok.Variable(shape=(2, 2)), sok.Variable(shape=(2, 2))
    assert first.name != second.name
    assert "items" in repr(sok.Variable(shape=(2, 2), name="items"))


def test_key_map():
    table = sok.Variable(shape=(10, 2))
    assert table.key_map(7) == 7
    assert torch.equal(table.key_map(torch.tensor([3, 9])), torch.tensor([3, 9]))


def same(a, b):
    assert type(a) is type(b) is sok.Variable
    assert torch.equal(a.detach(), b.detach()) and a.data_ptr() != b.data_ptr()
    assert (a.name, a.placement, a.requires_grad) == (b.name, b.placement, b.requires_grad)


@pytest.mark.parametrize("trainable", [True, False])
def test_copies(trainable):
    table = sok.Variable(shape=(5, 3), name="items", trainable=trainable)
    same(table, copy.deepcopy(table))
    same(table, pickle.loads(pickle.dumps(table)))
    module = sok.EmbeddingBagCollection({"items": table})
    twin = copy.deepcopy(module)
    same(module.tables["items"], twin.tables["items"])
    pair = copy.deepcopy([table, table])
    assert pair[0] is pair[1]


def test_saved_whole_and_as_state_dict():
    module = sok.EmbeddingBagCollection({"items": (5, 3), "users": (7, 2)})
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert sorted(state) == ["tables.items", "tables.users"]
    assert all(type(value) is saving.TableShard for value in state.values())
    other = sok.EmbeddingBagCollection({"items": (5, 3), "users": (7, 2)}, initializer="zeros")
    other.load_state_dict(state)
    same(module.tables["items"], other.tables["items"])
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    same(module.tables["users"], torch.load(buffer, weights_only=False).tables["users"])


def test_module_moves():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    module.table = sok.Variable(shape=(5, 3), name="items")
    table = module.table
    module.to("cpu").to(torch.float64)
    assert module.table is table and table.dtype == torch.float64
    module.float()
    assert module.table is table and type(table) is sok.Variable and table.name == "items"
    assert [type(parameter) for parameter in module.parameters()].count(sok.Variable) == 1
    module.requires_grad_(False)
    assert not table.requires_grad


def test_filter_variables():
    table, weight = sok.Variable(shape=(5, 3)), torch.nn.Parameter(torch.ones(2))
    assert sok.filter_variables([weight, table]) == ([table], [weight])
    assert sok.filter_variables(p for p in [table]) == ([table], [])


def test_shard_is_made_in_bounded_memory():
    # 200 MB of table, in a process of its own; a second copy of it, even a passing one, would double the peak.
    # Not by getrusage: its peak is inherited from the process that started this one.
    code = """
import pathlib, re
import sparse_operation_kit.torch as sok
sok.init()
sok.Variable(shape=(100, 4))
def kibibytes(name):
    return int(re.search(name + r":\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])
before = kibibytes("VmRSS")
table = sok.Variable(shape=(1_000_000, 50), initializer="normal")
print(kibibytes("VmHWM") - before)
"""
    grown = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert 150_000 < grown < 300_000  # KiB
