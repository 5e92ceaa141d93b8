# SPDX-License-Identifier: Apache-2.0
"""state_dict, copies, pickles of modules and optimizers with dynamic tables: keys, rows, states, order of eviction."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch_harness import has_slots

import sparse_operation_kit.torch as sok
from sparse_operation_kit import dynamic
from sparse_operation_kit.placement import Placement
from sparse_operation_kit.torch.keyed_shard import KeyedShard

OPTIMIZERS = {
    "adam": lambda p: sok.OptimizerWrapper(torch.optim.Adam(p, lr=0.1)),
    "adagrad": lambda p: sok.OptimizerWrapper(torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5)),
    "momentum": lambda p: sok.OptimizerWrapper(torch.optim.SGD(p, 0.1, momentum=0.9)),
    "row-wise": lambda p: sok.RowWiseAdagrad(0.1, 0.5).attach(p),
    "not fused": lambda p: sok.OptimizerWrapper(torch.optim.RAdam(p, lr=0.1)),
}
DTYPES = [torch.float32, torch.float16]


class Model(torch.nn.Module):
    """A bare dynamic table, one beside a static one in a collection, and a dense layer."""

    def __init__(self, dtype=torch.float32, capacity=6, **options):
        super().__init__()
        self.table = sok.DynamicVariable(4, "normal", name="bare", max_capacity=capacity, dtype=dtype, **options)
        users = sok.DynamicVariable(3, "normal", name="users", max_capacity=9, dtype=dtype)
        items = sok.Variable(shape=(70, 3), initializer="normal", name="items", dtype=dtype)
        self.collection = sok.EmbeddingBagCollection({"users": users, "items": items}, combiners="sum")
        self.dense = torch.nn.Linear(4, 2)

    def forward(self, *keys):
        ids = (torch.tensor(keys), torch.tensor([0, 1, len(keys)]))
        pooled = self.collection({"users": ids, "items": ids})
        return self.dense(sok.lookup_sparse(self.table, ids)).sum() + sum((p**2).sum() for p in pooled.values())


def train(model, optimizer, *keys):
    optimizer.zero_grad()
    model(*keys).backward()
    optimizer.step()


def trained(name, dtype=torch.float32):
    """A table with free slots between those in use and after them."""
    model = Model(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    for keys in ((5, 6, 7, 8), (9, 6, 5), (11, 5)):
        train(model, optimizer, *keys)
    assert model.table.erase([11, 8, 6]) == 3 and model.collection.tables["users"].erase([11]) == 1
    train(model, optimizer, 10, 5)
    assert model.table._core.held()[1].tolist() == [0, 1, 2, 4] and has_slots(model.table, 6)
    return model, optimizer


def content(model, optimizer):
    """{table: {key: its row and states}}, and what is dense."""
    found = {}
    for table in (model.table, model.collection.tables["users"]):
        keys, slots = table._core.held()
        states = [v for _, v in sorted(optimizer.state[table].items()) if isinstance(v, torch.Tensor) and v.dim()]
        columns = [c[slots].float().flatten(1) if c.dim() > 1 else c[slots, None] for c in (table.detach(), *states)]
        found[table.name] = dict(zip(keys.tolist(), torch.cat(columns, dim=1).tolist(), strict=True))
    return found, [p.tolist() for p in (model.dense.weight, model.collection.tables["items"].detach())]


def order(table):
    """{key: its score}."""
    keys, slots = table._core.held()
    return dict(zip(keys.tolist(), table._core.scores()[slots].tolist(), strict=True))


def assert_goes_on(first, second):
    """Trains both, by more keys than the tables hold."""
    for keys in ((5, 11, 5), (12, 13, 14), (15, 5, 16, 17), (6, 7, 20)):
        for model, optimizer in (first, second):
            train(model, optimizer, *keys)
        assert content(*first) == content(*second)


def saved(model, optimizer):
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_torch_save_and_load(name, dtype, optimizer_first):
    model, optimizer = trained(name, dtype)
    loaded = saved(model, optimizer)
    assert isinstance(loaded["model"]["table"], KeyedShard)
    other = Model(dtype)
    again = OPTIMIZERS[name](other.parameters())
    train(other, again, 70 - 1, 68, 5)  # has other keys at these slots
    if optimizer_first:
        again.load_state_dict(loaded["optimizer"])
        other.load_state_dict(loaded["model"])
    else:
        other.load_state_dict(loaded["model"])
        again.load_state_dict(loaded["optimizer"])
    assert sorted(other.table.indices.tolist()) == [5, 7, 9, 10] and order(other.table) == order(model.table)
    assert_goes_on((model, optimizer), (other, again))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_saved_before_the_next_step(name, tmp_path):
    """state_dict() and dump() of what load_state_dict() brought."""
    model, optimizer = trained(name)
    loaded = saved(model, optimizer)
    other = Model()
    again = OPTIMIZERS[name](other.parameters())
    other.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["optimizer"])
    third = Model()
    last = OPTIMIZERS[name](third.parameters())
    second = saved(other, again)
    third.load_state_dict(second["model"])
    last.load_state_dict(second["optimizer"])
    tables = [m.table for m in (other, third)]
    sok.dump(tmp_path / "d", tables[0], again)
    fourth = Model()
    dumped = OPTIMIZERS[name](fourth.parameters())
    sok.load(tmp_path / "d", fourth.table, dumped)
    assert content(fourth, dumped)[0]["bare"] == content(model, optimizer)[0]["bare"]
    assert_goes_on((model, optimizer), (third, last))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_that_changed_since(name):
    """States find their keys also where the table was loaded without the slots that it had."""
    model, optimizer = trained(name)
    states = copy.deepcopy(optimizer.state_dict())
    other = Model()
    again = OPTIMIZERS[name](other.parameters())
    for table, from_ in zip(other.parameters(), model.parameters(), strict=True):
        if isinstance(table, sok.DynamicVariable):
            keys, rows = sok.export(from_)
            sok.assign(table, keys.flip(0), rows.flip(0))
        else:
            table.data.copy_(from_.data)
    again.load_state_dict(states)
    for each in ((model, optimizer), (other, again)):
        train(*each, 5, 7, 5)
    assert content(model, optimizer) == content(other, again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_copies(name, how, dtype, monkeypatch):
    """Tables with more keys than a call takes, too."""
    monkeypatch.setattr(dynamic, "KEYS_OF_CALL", 3)
    model, optimizer = trained(name, dtype)
    other, again = how((model, optimizer))
    assert content(other, again) == content(model, optimizer) and order(other.table) == order(model.table)
    assert_goes_on((model, optimizer), (other, again))


def test_a_gradient_given_to_a_copy():
    """The table has been changed more often than the copy."""
    table = sok.DynamicVariable(4, "normal", name="bare", var_type="hbm")
    for key in range(5):
        sok.lookup_sparse(table, (torch.tensor([key]), torch.tensor([0, 1])))
    copied = copy.deepcopy(table)
    outputs = [sok.lookup_sparse(each, (torch.tensor([3, 4]), torch.tensor([0, 1, 2]))) for each in (table, copied)]
    outputs[0].sum().backward()
    copied.grad = table.grad
    for each in (table, copied):
        OPTIMIZERS["adam"]([each]).step()
    assert torch.equal(table.detach(), copied.detach())


def test_a_whole_module_is_saved():
    model, _ = trained("adam")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert torch.equal(other(5, 9, 33, 5), model(5, 9, 33, 5)) and order(other.table) == order(model.table)


def test_a_state_dict_is_of_its_moment():
    model, optimizer = trained("adam")
    state, before = model.state_dict(), content(model, optimizer)[0]["bare"]
    train(model, optimizer, 5, 20, 21)
    shard = state["table"]
    assert dict(zip(shard.held.keys.tolist(), shard.tolist(), strict=True)) == {k: v[:4] for k, v in before.items()}
    assert type(shard + 1) is torch.Tensor and "of dynamic table 'bare', of 4 keys" in repr(shard)
    for kept in (shard.clone(), shard.to(torch.float64), copy.deepcopy(shard), shard.detach()):
        assert isinstance(kept, KeyedShard) and kept.held.keys is shard.held.keys and torch.equal(kept, shard.to(kept))
    kept = model.state_dict(keep_vars=True)
    assert kept["table"] is model.table
    other = Model()
    other.load_state_dict(kept)
    assert torch.equal(sok.export(other.table)[1], sok.export(model.table)[1])
    model.load_state_dict(kept)
    other.load_state_dict(state, assign=True)
    assert isinstance(other.table, sok.DynamicVariable) and sorted(other.table.indices.tolist()) == [5, 7, 9, 10]


def shard(keys=(1, 2), rank=0, ranks=1, owner=-1, dimension=4):
    """As a rank would have saved it."""
    table = sok.DynamicVariable(dimension, "ones", name="bare")
    sok.all2all_dense_embedding(table, torch.tensor(keys))
    table._placement = Placement(-1, dimension, owner, ranks, rank)
    return KeyedShard.of(table)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda: shard(rank=1, ranks=2),
            r"rank 0 of 1\): the state_dict has rows of rank 1 of 2, distributed.*sok.dump",
        ),
        (lambda: shard(range(7)), "holds at most 6 rows, the state_dict has 7"),
        (lambda: shard(dimension=3), r"has 4 elements a row, the state_dict \[3\]"),
        (lambda: shard([2**31]), "has keys of torch.int32, the state_dict larger ones"),
        (lambda: torch.ones(2, 4), "has a Tensor without keys"),
        (lambda: sok.Variable(shape=(3, 4)).detach(), "has a TableShard without keys.*sok.dump"),
    ],
)
def test_other_rows_are_refused(given, message):
    model = Model(key_type=torch.int32)
    sok.assign(model.table, torch.tensor([3], dtype=torch.int32), torch.ones(1, 4))
    with pytest.raises(RuntimeError, match=rf"table: dynamic table 'bare' .*{message}|table: dynamic.*{message}"):
        model.load_state_dict({**model.state_dict(), "table": given()})
    assert model.table.indices.tolist() == [3]
    wide = sok.DynamicVariable(4, name="bare", max_capacity=6, admission_threshold=2)
    sok.lookup_sparse(wide, (torch.tensor([2**32 + 3]), torch.tensor([0, 1])))  # waits
    narrow = sok.DynamicVariable(4, name="bare", max_capacity=6, admission_threshold=2, key_type=torch.int32)
    with pytest.raises(RuntimeError, match=r"has keys of torch\.int32, the state_dict larger ones"):
        torch.nn.ParameterDict({"t": narrow}).load_state_dict(torch.nn.ParameterDict({"t": wide}).state_dict())
    rows_alone = sok.DynamicVariable(4, name="bare", max_capacity=6, key_type=torch.int32)
    torch.nn.ParameterDict({"t": rows_alone}).load_state_dict(torch.nn.ParameterDict({"t": wide}).state_dict())
    static = torch.nn.Module()
    static.table = sok.Variable(shape=(2, 4), name="bare")
    before = static.table.data.clone()
    with pytest.raises(RuntimeError, match=r"table 'bare'.*rows of dynamic table"):
        static.load_state_dict({"table": shard()})
    assert torch.equal(static.table.data, before)


def test_the_rows_of_a_rank_alone():
    """One process's rows are loaded by each of several."""
    model = Model()
    model.table._placement = Placement(-1, 4, -1, 3, 1)
    state = model.state_dict()
    model.load_state_dict({**state, "table": shard([3, 1, -2, 5, 4])})
    assert model.table.indices.tolist() == [1, -2, 4]
    model.load_state_dict({**state, "table": shard([3, 1], owner=2, rank=2, ranks=4)})
    assert model.table.indices.tolist() == [1]


def test_states_of_other_rows_are_refused():
    _, optimizer = trained("adam")
    other = Model()
    again = OPTIMIZERS["adam"](other.parameters())
    states = copy.deepcopy(optimizer.state_dict())
    states["state"][0]["exp_avg"] = torch.ones(4, 4)
    with pytest.raises(ValueError, match=r"dynamic table 'bare'.*has a Tensor without keys"):
        again.load_state_dict(states)
    states["state"][0]["exp_avg"] = shard(rank=1, ranks=2)
    with pytest.raises(ValueError, match="the state_dict has rows of rank 1 of 2"):
        again.load_state_dict(states)
    assert not again.state


def test_distributed_checkpoint(tmp_path):
    """get_state_dict and set_state_dict work; torch.distributed.checkpoint's own files have no place for keys."""
    model, optimizer = trained("adam")
    states = get_state_dict(model, optimizer)
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other = Model()
    again = OPTIMIZERS["adam"](other.parameters())
    set_state_dict(other, again, model_state_dict=loaded[0], optim_state_dict=loaded[1])
    assert_goes_on((model, optimizer), (other, again))
    with pytest.raises(dcp.api.CheckpointException, match=r"dynamic table 'bare'.*sok\.dump"):
        dcp.save({"model": states[0]}, checkpoint_id=tmp_path / "a")
    static = torch.nn.ParameterDict({"table": sok.Variable(shape=(4, 4), name="bare")})
    dcp.save(static.state_dict(), checkpoint_id=tmp_path / "b")
    for state in ({"table": states[0]["table"]}, {"table": model.table}):
        with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
            dcp.load(state, checkpoint_id=tmp_path / "b")
    shard = KeyedShard.of(model.table)
    dcp.save({"table": torch.ones(shard.shape)}, checkpoint_id=tmp_path / "c")
    for state in ({"table": shard}, {"table": model.table}):
        with pytest.raises(dcp.api.CheckpointException, match=r"dynamic table 'bare'.*sok\.dump"):
            dcp.load(state, checkpoint_id=tmp_path / "c")
    with pytest.raises(dcp.api.CheckpointException, match=r"dynamic table 'bare'.*sok\.dump"):
        dcp.save({"table": model.table}, checkpoint_id=tmp_path / "d")


# Sends a table to processes that start, as their argument, and changes it when they have.
_SEND = """
import sys
import multiprocessing
import torch.multiprocessing
import sparse_operation_kit.torch as sok

def tell(sent, queue):
    sok.init()
    queue.put([part.tolist() for part in sok.export(sent["table"])])

if __name__ == "__main__":
    sok.init()
    for library in (multiprocessing, torch.multiprocessing):
        context = library.get_context(sys.argv[1])
        table = sok.DynamicVariable(3, "normal", name="t", max_capacity=50)
        sok.assign(table, torch.arange(10, 40), torch.randn(30, 3))
        table.erase([12, 13])
        held = [part.tolist() for part in sok.export(table)]
        queue = context.Queue()
        process = context.Process(target=tell, args=({"table": table, "again": [table]}, queue))
        process.start()
        table.clear()
        assert queue.get(timeout=60) == held and len(held[0]) == 28
        process.join(60)
        assert process.exitcode == 0
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_sent_to_a_process_that_starts(tmp_path, method):
    (tmp_path / "send.py").write_text(_SEND)
    command = [sys.executable, str(tmp_path / "send.py"), method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
