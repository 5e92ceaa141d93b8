# SPDX-License-Identifier: Apache-2.0
"""Changed rows in a process alone: everything that changes a row is noticed, and a copy follows."""

import datetime

import numpy as np
import pytest
import torch
import torch_harness as harness

import sparse_operation_kit.torch as sok


def now():
    return datetime.datetime.now(datetime.timezone.utc)


def table_of(rows=10, name="items", dtype=None):
    return sok.Variable(torch.arange(rows * 2.0).view(rows, 2), name=name, dtype=dtype)


def step(table, optimizer, keys):
    optimizer.zero_grad()
    pair = (torch.tensor(keys, dtype=torch.int64), torch.tensor([0, len(keys)]))
    sok.lookup_sparse(table, pair, combiners="sum").sum().backward()
    optimizer.step()


def changed_by(table, change):
    """The keys that a change of a tracked table is seen to change."""
    since = now()
    change()
    (keys,), (rows,) = sok.incremental_model_dump([table], since)
    held = harness.rows_of(table)
    held = held.float() if table.dtype == torch.bfloat16 else held
    assert rows.dtype == held.numpy().dtype
    np.testing.assert_array_equal(rows, held.numpy()[keys])
    return keys.tolist()


def test_the_first_call_gives_every_row():
    table = table_of()
    since = now()
    keys, rows = sok.incremental_model_dump(table, since)
    assert [key.tolist() for key in keys] == [list(range(10))] and keys[0].dtype == np.int64
    np.testing.assert_array_equal(rows[0], harness.rows_of(table))
    assert changed_by(table, lambda: None) == []
    # Rows of before are found when asked for.
    assert len(sok.incremental_model_dump(table, since)[0][0]) == 10


OPTIMIZERS = {
    "fused": lambda table: sok.OptimizerWrapper(torch.optim.Adam([table])),
    "own": lambda table: sok.SGD(0.1).attach([table]),
    "row-wise": lambda table: sok.RowWiseAdagrad(0.1).attach([table]),
    "on rows": lambda table: sok.OptimizerWrapper(torch.optim.Adam([table], amsgrad=True)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps(kind):
    table = table_of()
    optimizer = OPTIMIZERS[kind](table)
    step(table, optimizer, [1, 2])
    sok.track_changes(table)
    assert changed_by(table, lambda: step(table, optimizer, [7, 3, 7])) == [3, 7]
    assert changed_by(table, lambda: step(table, optimizer, [0])) == [0]


def test_only_tracked_tables_are_asked():
    tracked, other = table_of(), table_of(4, "other")
    sok.track_changes([tracked])
    optimizer = sok.SGD(0.1).attach([other, tracked])
    optimizer.zero_grad()
    pairs = [(torch.tensor([1]), torch.tensor([0, 1])), (torch.tensor([2]), torch.tensor([0, 1]))]
    sum(output.sum() for output in sok.lookup_sparse([other, tracked], pairs)).backward()
    assert changed_by(tracked, optimizer.step) == [2]


def test_other_changes():
    table = table_of()
    sok.track_changes(table)
    sok.track_changes(table)
    assert changed_by(table, lambda: sok.assign(table, [4, 1, 4], torch.ones(3, 2))) == [1, 4]
    with pytest.raises(IndexError):
        sok.assign(table, [3, 99], torch.ones(2, 2))
    assert changed_by(table, lambda: None) == []
    everything = list(range(10))
    module = torch.nn.ParameterDict({"t": table})
    assert changed_by(table, lambda: module.load_state_dict({"t": torch.zeros(10, 2)})) == everything

    def fill():
        with torch.no_grad():
            table.fill_(3.0)

    assert changed_by(table, fill) == everything
    # A change that nobody announced is not forgotten by a step that comes after it.
    optimizer = sok.SGD(0.1).attach([table])
    assert changed_by(table, lambda: (fill(), step(table, optimizer, [2]))) == everything


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["arrays", "file"])
def test_a_copy_follows(tmp_path, way, dtype):
    table, copy = table_of(dtype=dtype), table_of(dtype=dtype)
    optimizer = sok.OptimizerWrapper(torch.optim.Adagrad([table], lr=0.3))
    sok.track_changes([table, copy])
    for keys in ([1, 2], [2, 9], []):
        since = now()
        step(table, optimizer, keys)
        delta = sok.incremental_model_dump([table], since)
        if way == "file":
            sok.save_incremental(tmp_path / "delta", [table], *delta, step=5)
            delta = tmp_path / "delta"
        # A copy that others follow stamps what it takes.
        assert changed_by(copy, lambda delta=delta: sok.load_incremental(delta, [copy])) == keys
        assert torch.equal(table, copy)


def test_errors():
    table = table_of()
    with pytest.raises(ValueError, match="no time zone"):
        sok.incremental_model_dump(table, datetime.datetime.now())
    with pytest.raises(TypeError, match="datetime"):
        sok.incremental_model_dump(table, 0)  # type: ignore[arg-type]
    for call in (sok.track_changes, lambda x: sok.incremental_model_dump(x, now())):
        with pytest.raises(TypeError, match=r"vars\[1\] must be a sok.Variable, got Parameter"):
            call([table, torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match="key 10 is outside"):
        sok.load_incremental(([np.array([10])], [np.zeros((1, 2), np.float32)]), [table])
