# SPDX-License-Identifier: Apache-2.0
"""export_for_serving of static and dynamic tables; the files are what tests/format/test_serving.py says."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import sparse_operation_kit.torch as sok


def hps(folder, dimension):
    """{key: row} of a table's folder."""
    keys = np.fromfile(folder / "key", np.int64)
    rows = np.fromfile(folder / "emb_vector", np.float32).reshape(len(keys), dimension)
    return dict(zip(keys.tolist(), rows.tolist(), strict=True))


def train(table, optimizer, keys):
    optimizer.zero_grad()
    sok.lookup_sparse(table, (torch.tensor(keys), torch.tensor([0, len(keys)])), combiners="sum").sum().backward()
    optimizer.step()


def held(table):
    keys, rows = sok.export(table)
    return dict(zip(keys.tolist(), rows.float().tolist(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_static_and_dynamic_tables(tmp_path, dtype):
    static = sok.Variable(shape=(7, 3), initializer="normal", name="static", dtype=dtype)
    dynamic = sok.DynamicVariable(3, "normal", name="dynamic", dtype=dtype)
    train(dynamic, sok.OptimizerWrapper(torch.optim.Adam([dynamic])), [5, -3, 2**40, 5])
    before = held(dynamic)
    assert sok.export_for_serving(tmp_path / "m", [static, dynamic]) == {"static": 7, "dynamic": 3}
    assert hps(tmp_path / "m" / "static", 3) == held(static)
    assert hps(tmp_path / "m" / "dynamic", 3) == before == held(dynamic)
    assert sok.export_for_serving(tmp_path / "m.safetensors", dynamic, dtype="float16") == {"dynamic": 3}
    found = load_file(tmp_path / "m.safetensors")
    rows = torch.tensor([before[key] for key in found["dynamic/key"].tolist()]).half()
    np.testing.assert_array_equal(found["dynamic/emb_vector"], rows.numpy())


def test_rows_that_were_used_often(tmp_path):
    table = sok.DynamicVariable(2, name="t", evict_strategy="lfu", max_capacity=100)
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=0.1))
    for keys in ([1, 2, 3, 3], [2, 3], [3, -9]):
        train(table, optimizer, keys)
    assert sok.export_for_serving(tmp_path / "m", table, min_score=2) == {"t": 2}
    assert hps(tmp_path / "m" / "t", 2) == {key: held(table)[key] for key in (2, 3)}


def test_errors(tmp_path):
    table = sok.Variable(shape=(7, 3), name="t")
    with pytest.raises(TypeError, match=r"vars\[1\] must be a sok.Variable"):
        sok.export_for_serving(tmp_path / "m", [table, torch.zeros(3)])
    with pytest.raises(ValueError, match="none of the tables keeps scores"):
        sok.export_for_serving(tmp_path / "m", table, min_score=1)
    assert not (tmp_path / "m").exists()
