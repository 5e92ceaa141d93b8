# SPDX-License-Identifier: Apache-2.0
"""dump and load of dynamic tables with their optimizers' states, to and from static tables, and changed rows."""

import datetime

import pytest
import torch
from torch_harness import has_slots

import sparse_operation_kit.torch as sok

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "row-wise adagrad": lambda p: sok.RowWiseAdagrad(0.1).attach(p),
    "not fused": lambda p: torch.optim.RAdam(p, lr=0.1),
}
KEYS = (torch.tensor([5, -3, 2**40, 5, 0]), torch.tensor([0, 2, 5]))
MORE = (torch.tensor([7, -3, 11, 12]), torch.tensor([0, 4]))


def wrap(optimizer):
    return optimizer if isinstance(optimizer, sok.RowWiseAdagrad) else sok.OptimizerWrapper(optimizer)


def train(table, optimizer, ids):
    optimizer.zero_grad()
    sok.lookup_sparse(table, ids).square().sum().backward()
    optimizer.step()


def content(table, optimizer):
    """{key: its row and states}."""
    keys, slots = table._core.held()
    states = [value for value in optimizer.state[table].values() if isinstance(value, torch.Tensor) and value.dim()]
    columns = [
        column[slots].flatten(1) if column.dim() > 1 else column[slots, None] for column in (table.detach(), *states)
    ]
    return dict(zip(keys.tolist(), torch.cat([c.float() for c in columns], dim=1).tolist(), strict=True))


def make(kind, dtype=torch.float32, **options):
    table = sok.DynamicVariable(3, "normal", name="t", dtype=dtype, max_capacity=50, **options)
    return table, wrap(OPTIMIZERS[kind]([table]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on(kind, dtype, tmp_path):
    table, optimizer = make(kind, dtype)
    train(table, optimizer, KEYS)
    sok.dump(tmp_path / "d", table, optimizer)
    other, restored = make(kind, dtype)
    train(other, restored, MORE)
    sok.load(tmp_path / "d", other, restored)
    assert content(other, restored) == content(table, optimizer) and has_slots(other, 4)
    for each, wrapped in ((table, optimizer), (other, restored)):
        train(each, wrapped, MORE)
    assert content(other, restored) == content(table, optimizer) and has_slots(other, 7)


def test_to_and_from_static_tables(tmp_path):
    static = sok.Variable(shape=(20, 3), initializer="normal", name="t")
    sok.dump(tmp_path / "static", static)
    table = sok.DynamicVariable(3, "zeros", name="t", key_type=torch.int32)
    sok.load(tmp_path / "static", table)
    keys, rows = sok.export(table)
    assert torch.equal(rows, static.detach().cpu()[keys]) and sorted(keys.tolist()) == list(range(20))
    sok.assign(table, torch.tensor([7], dtype=torch.int32), torch.ones(1, 3))
    sok.dump(tmp_path / "dynamic", table)
    sok.load(tmp_path / "dynamic", static)
    assert torch.equal(static.detach().cpu()[keys], sok.export(table)[1]) and static.detach()[7].tolist() == [1, 1, 1]


def test_more_rows_than_the_capacity_change_nothing(tmp_path):
    table, optimizer = make("adam")
    train(table, optimizer, KEYS)
    sok.dump(tmp_path / "d", table)
    small = sok.DynamicVariable(3, name="t", max_capacity=3)
    sok.assign(small, [1], torch.ones(1, 3))
    with pytest.raises(ValueError, match="has 4 rows for this rank"):
        sok.load(tmp_path / "d", small)
    assert small.indices.tolist() == [1]


def test_the_order_of_eviction_survives(tmp_path):
    tables = [sok.DynamicVariable(2, "ones", name="t", max_capacity=4) for _ in range(2)]
    optimizers = [sok.OptimizerWrapper(torch.optim.SGD([table], lr=0.1)) for table in tables]
    for key in (1, 2, 3, 4, 1, 3):
        train(tables[0], optimizers[0], (torch.tensor([key]), torch.tensor([0, 1])))
    sok.dump(tmp_path / "d", tables[0])
    sok.load(tmp_path / "d", tables[1])
    for table, optimizer in zip(tables, optimizers, strict=True):
        for key in (5, 6):
            train(table, optimizer, (torch.tensor([key]), torch.tensor([0, 1])))
        assert sorted(table.indices.tolist()) == [1, 3, 5, 6]


def test_changed_rows(tmp_path):
    table, optimizer = make("adam")
    train(table, optimizer, KEYS)
    sok.track_changes(table)
    start = datetime.datetime.now(datetime.UTC)
    train(table, optimizer, MORE)
    sok.assign(table, [99], torch.ones(1, 3))
    with torch.no_grad():
        sok.lookup_sparse(table, KEYS)
    keys, rows = sok.incremental_model_dump(table, start)
    assert sorted(keys[0].tolist()) == [-3, 7, 11, 12, 99]
    held = {key: row[:3] for key, row in content(table, optimizer).items()}
    assert all(held[key] == row.tolist() for key, row in zip(keys[0].tolist(), rows[0], strict=True))


def test_a_dump_whose_manifest_is_lost_loads_where_keys_wait(tmp_path):
    table = sok.DynamicVariable(4, name="waits", admission_threshold=2)
    for keys in ([1, 2], [2, 3]):
        sok.lookup_sparse(table, (torch.tensor(keys), torch.tensor([0, 2])), combiners="sum")
    sok.dump(tmp_path / "d", table)
    (tmp_path / "d" / "sok_manifest.json").unlink()
    other = sok.DynamicVariable(4, name="waits", admission_threshold=2)
    sok.load(tmp_path / "d", other)
    assert other.indices.tolist() == [2]
