# SPDX-License-Identifier: Apache-2.0
"""state_dict of modules and optimizers with tables, in a process alone; several ranks are in tests/distributed."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch_harness as harness
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import sparse_operation_kit.torch as sok
from sparse_operation_kit.placement import Placement
from sparse_operation_kit.torch.planner import LoadPlanner
from sparse_operation_kit.torch.saving import Layout, TableShard, pad_like


class Model(torch.nn.Module):
    """A bare table, tables of a collection (one called "items"), and a dense layer."""

    def __init__(self, rows=11):
        super().__init__()
        self.table = sok.Variable(shape=(rows, 4), initializer="normal", name="bare")
        tables = {name: sok.Variable(shape=(7, 3), initializer="normal", name=name) for name in ("items", "users")}
        self.collection = sok.EmbeddingBagCollection(tables, combiners="sum")
        self.dense = torch.nn.Linear(4, 2)

    def forward(self):
        ids = (torch.tensor([1, 2, 6]), torch.tensor([0, 1, 3]))
        pooled = self.collection({"items": ids, "users": ids})
        return self.dense(sok.lookup_sparse(self.table, ids)).sum() + sum((p**2).sum() for p in pooled.values())


OPTIMIZERS = {
    "adam": lambda parameters: sok.OptimizerWrapper(torch.optim.Adam(parameters)),
    "amsgrad": lambda parameters: sok.OptimizerWrapper(torch.optim.Adam(parameters, amsgrad=True)),
    "row-wise": lambda parameters: sok.RowWiseAdagrad(0.1, 0.5).attach(parameters),
    "momentum": lambda parameters: sok.OptimizerWrapper(torch.optim.SGD(parameters, 0.1, momentum=0.9)),
}


def train(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


def tensors(model, optimizer):
    """Everything that training changes."""
    states = [
        harness.by_key(p, value) if isinstance(value, torch.Tensor) and value.dim() else torch.as_tensor(value)
        for p in model.parameters()
        for _, value in sorted(optimizer.state[p].items())
    ]
    return [harness.by_key(p, p.data) for p in model.parameters()] + states


def assert_equal(first, second):
    assert len(first) == len(second)
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_save_and_load(name):
    model = Model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    other = Model()
    with torch.no_grad():
        other.table.zero_()
    again = OPTIMIZERS[name](other.parameters())
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded["model"]["table"], TableShard)
    other.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["optimizer"])
    assert_equal(tensors(model, optimizer), tensors(other, again))
    assert all(type(value) is torch.Tensor for value in again.state[other.table].values())
    # Training goes on alike, and the two do not share memory.
    train(model, optimizer)
    train(other, again)
    assert_equal(tensors(model, optimizer), tensors(other, again))


@pytest.mark.parametrize("planner", [None, LoadPlanner])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_distributed_checkpoint(name, planner, tmp_path):
    model = Model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer)
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=tmp_path)
    other = Model()
    again = OPTIMIZERS[name](other.parameters())
    state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(other, again), strict=True))
    dcp.load(state, checkpoint_id=tmp_path, planner=planner and planner())
    set_state_dict(other, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_equal(tensors(model, optimizer), tensors(other, again))


def test_a_shard_is_a_tensor():
    table = sok.Variable(torch.arange(6.0).view(3, 2), name="t")
    shard = table.detach()
    assert shard.data_ptr() == table.data_ptr() and shard.shape == (3, 2) and not shard.requires_grad
    assert type(shard + 1) is torch.Tensor and shard.size(0) == 3
    for kept in (shard.clone(), shard.cpu(), shard.to(torch.float64), copy.deepcopy(shard), shard.detach()):
        assert (
            isinstance(kept, TableShard) and kept.held == Layout("t", 3, -1, 1, 0) and torch.equal(kept, shard.to(kept))
        )
    assert "rank 0 of 1, distributed, of 3 rows" in repr(shard)


def sizes_agree(state):
    for name, value in state.items():
        assert type(value.size()) is torch.Size and value.size() == value.shape == value.to_dense().shape, name
        assert [value.size(i) for i in range(value.dim())] == list(value.shape), name
        assert value.new_empty(value.size()).shape == value.shape, name


def test_sizes_of_what_is_saved(tmp_path):
    model = Model()
    model.stacked = sok.EmbeddingBagCollection({"a": (5, 3), "b": (6, 3)})
    optimizer = sok.OptimizerWrapper(torch.optim.Adam(model.parameters()))
    train(model, optimizer)
    state = model.state_dict()
    assert state["table"].size() == (11, 4) and state["stacked.tables.b"].size() == (6, 3)
    states = {
        f"{number}.{key}": value for number, of in optimizer.state_dict()["state"].items() for key, value in of.items()
    }
    dcp.save(state, checkpoint_id=tmp_path)
    for given in (state, states, copy.deepcopy(state)):
        sizes_agree(given)
    model.load_state_dict(state)
    dcp.load(state, checkpoint_id=tmp_path)
    sizes_agree(model.state_dict())
    assert model.table.size() == (11, 4)
    shard = shard_of(1, 2)
    assert shard.size() == shard.shape == (5, 4)


def test_tables_themselves_in_a_distributed_checkpoint(tmp_path):
    model, other = Model(), Model()
    dcp.save(model.state_dict(keep_vars=True), checkpoint_id=tmp_path)
    dcp.load(other.state_dict(keep_vars=True), checkpoint_id=tmp_path)
    assert torch.equal(model.table, other.table)


def shard_of(rank, ranks, rows=11, owner=-1, fill=None, name="bare"):
    place = Placement(rows, 4, owner, ranks, rank)
    data = torch.full(place.local_shape, float(rank if fill is None else fill))
    return TableShard.wrap(data, Layout.of(name, place))


def test_rows_of_other_ranks_are_refused():
    model = Model()
    before = copy.deepcopy(model.state_dict())
    state = {**model.state_dict(), "table": shard_of(0, 2), "dense.bias": torch.ones(2)}
    with pytest.raises(RuntimeError, match=r"table: table 'bare' \(rank 0 of 1.*rank 0 of 2.*LoadPlanner") as info:
        model.load_state_dict(state)
    assert "size mismatch" not in str(info.value) and "Missing" not in str(info.value)
    assert torch.equal(harness.rows_of(model.table), before["table"].plain)
    with pytest.raises(RuntimeError, match=r"the state_dict has a tensor, \[6, 4\]"):
        model.load_state_dict({**before, "table": torch.ones(6, 4)})
    optimizer = sok.OptimizerWrapper(torch.optim.Adagrad([model.table]))
    train(model, optimizer, 1)
    states = optimizer.state_dict()
    states["state"][0]["sum"] = shard_of(1, 2)
    with pytest.raises(ValueError, match=r"rank 1 of 2.*torch.distributed.checkpoint"):
        optimizer.load_state_dict(states)


def test_a_whole_table_is_taken():
    model = Model()
    whole = torch.rand(11, 4)
    model.load_state_dict({**model.state_dict(), "table": whole})
    assert torch.equal(harness.rows_of(model.table), whole)
    model.load_state_dict({**model.state_dict(), "table": shard_of(1, 3, owner=1, fill=5)})
    assert (harness.rows_of(model.table) == 5).all()


def test_load_by_assignment_keeps_tables():
    model, other = Model(), Model()
    other.load_state_dict(model.state_dict(), assign=True)
    assert isinstance(other.table, sok.Variable) and other.table.name == "bare" and other.table.requires_grad
    assert torch.equal(other.table, model.table)


def test_copies_of_modules_check_too():
    model = copy.deepcopy(Model())
    with pytest.raises(RuntimeError, match="rank 0 of 2"):
        model.load_state_dict({**model.state_dict(), "table": shard_of(0, 2)})


def save_as(path, ranks, rows=11, owner=-1, chunk=None, monkeypatch=None):
    """A checkpoint as `ranks` ranks would save it together, of a table whose elements are its keys."""
    shards = []
    for rank in range(ranks):
        shard = shard_of(rank, ranks, rows, owner)
        place = shard.held.placement
        shard.copy_(place.global_keys(torch.arange(place.local_rows))[:, None].expand(-1, 4))
        shards.append(shard)

    class Together(torch.Tensor):
        """All ranks' shards as one value of a state_dict."""

        __torch_function__: Any = torch._C._disabled_torch_function_impl

        def __create_write_items__(self, fqn, value):
            return [item for shard in shards for item in shard.__create_write_items__(fqn, shard)]

        def __get_tensor_shard__(self, index):
            return shards[index.offset[1] if owner < 0 else owner].__get_tensor_shard__(index)

    dcp.save({"table": torch.Tensor._make_subclass(Together, torch.empty(0))}, checkpoint_id=path)


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 48])
@pytest.mark.parametrize("owner", [-1, 0])
@pytest.mark.parametrize("rows", [11, 12, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_ranks_to_any_ranks(tmp_path, monkeypatch, ranks, rows, owner, chunk_bytes):
    monkeypatch.setattr("sparse_operation_kit.torch.saving.CHUNK_BYTES", chunk_bytes)
    save_as(tmp_path, ranks, rows, owner)
    for readers in (1, 2, 3, 4):
        for reader in range(readers):
            shard = shard_of(reader, readers, rows, fill=-1)
            dcp.load({"table": shard}, checkpoint_id=tmp_path, planner=LoadPlanner())
            place = shard.held.placement
            expected = place.global_keys(torch.arange(place.local_rows)).float()[:, None].expand(-1, 4)
            assert torch.equal(shard.plain, expected)


def test_the_default_planner_refuses_other_ranks(tmp_path):
    save_as(tmp_path, 2)
    shard = shard_of(0, 1, fill=-1)
    with pytest.raises(dcp.api.CheckpointException, match=r"Size mismatch .*LoadPlanner\(\)"):
        dcp.load({"table": shard}, checkpoint_id=tmp_path)
    assert (shard.plain == -1).all()


@pytest.mark.parametrize("saved", [10, 12, 30])
@pytest.mark.parametrize("reader", [0, 1])
def test_another_number_of_rows(tmp_path, saved, reader):
    save_as(tmp_path, 3, saved)
    shard = shard_of(reader, 1, 11, fill=-1) if reader == 0 else shard_of(1, 3, 11, fill=-1)
    with pytest.raises(dcp.api.CheckpointException, match=r"than the 11 rows|has 11 rows"):
        dcp.load({"table": shard}, checkpoint_id=tmp_path, planner=LoadPlanner())


def test_another_number_of_rows_is_seen_when_the_module_loads():
    """With PyTorch's own planner, which reads a row that is none as if it were one."""
    model = Model(11)
    shard = model.state_dict()["table"]
    pad_like(shard.plain[-1:])
    with pytest.raises(RuntimeError, match="fewer than the 11 rows"):
        model.load_state_dict({**model.state_dict(), "table": shard})


def test_other_shapes_and_dtypes(tmp_path):
    dcp.save({"table": torch.ones(11, 4)}, checkpoint_id=tmp_path)
    with pytest.raises(dcp.api.CheckpointException, match="holds no table"):
        dcp.load({"table": shard_of(0, 1)}, checkpoint_id=tmp_path, planner=LoadPlanner())
    save_as(tmp_path / "other", 2)
    double = TableShard.wrap(torch.ones(11, 4, dtype=torch.float64), Layout("bare", 11, -1, 1, 0))
    narrow = TableShard.wrap(torch.ones(11, 3), Layout("bare", 11, -1, 1, 0))
    for shard, message in ((double, "holds torch.float32"), (narrow, r"of shape \[4\]")):
        with pytest.raises(dcp.api.CheckpointException, match=message):
            dcp.load({"table": shard}, checkpoint_id=tmp_path / "other", planner=LoadPlanner())


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_states_are_the_same_whichever_way_a_step_took(make):
    """One call for both tables, one each, a gradient that was read, and an optimizer of rows in PyTorch."""

    def of_one_call(tables, batch):
        sum(output.sum() for output in sok.lookup_sparse(tables, [batch] * 2)).backward()

    def of_two_calls(tables, batch):
        for table in tables:
            sok.lookup_sparse(table, batch).sum().backward()

    def that_is_read(tables, batch):
        of_one_call(tables, batch)
        assert tables[0].grad is not None

    batch = (torch.tensor([1, 2, 2]), torch.tensor([0, 1, 3]))
    keys = []
    for way in (of_one_call, of_two_calls, that_is_read):
        towers = torch.nn.ParameterList([sok.Variable(torch.ones(6, 2), name=f"tower{i}") for i in range(2)])
        optimizer = sok.OptimizerWrapper(make(towers.parameters(), lr=0.1))
        for _ in range(2):
            optimizer.zero_grad()
            way(list(towers), batch)
            optimizer.step()
        keys.append({number: set(state) for number, state in optimizer.state_dict()["state"].items()})
        states = get_state_dict(towers, optimizer)
        set_state_dict(towers, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
        way(list(towers), batch)
        optimizer.step()
    assert keys[0] == keys[1] == keys[2]
