# SPDX-License-Identifier: Apache-2.0
"""Checks of torch_worker.py about dynamic tables on several ranks."""

import shutil
from typing import Any

import faults
import torch
from dict_store import DictStore
from torch_saving import shared_folder

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch.errors import PeerError

ROWS = (40, 15, 9)
DIMENSIONS = (8, 3, 5)


def _modes():
    return [None, f"localized:{sok.num_ranks() - 1}", "localized:0"]


def _tables(is_dynamic):
    return [
        sok.DynamicVariable(dimension, name=f"t{i}", mode=mode, max_capacity=100)
        if is_dynamic[i]
        else sok.Variable(shape=(rows, dimension), name=f"t{i}", mode=mode)
        for i, (rows, dimension, mode) in enumerate(zip(ROWS, DIMENSIONS, _modes(), strict=True))
    ]


def _batch(step):
    """The ids of this rank: new keys come with the steps; some lookups have one long bag, some have none."""
    generator = torch.Generator().manual_seed(1000 * step + sok.rank())
    result = []
    for rows, lengths in zip((ROWS[0], *ROWS), ([3, 0, 4], [20, 15], [2], [0, 5, 1, 0]), strict=True):
        most, splits = max(1, rows * (step + 1) // 7), torch.tensor([0, *lengths]).cumsum(0)
        keys = torch.randint(0, most, (sum(lengths),), generator=generator, device="cpu")
        result.append((keys.to(splits.device), splits))
    return result


def _train(is_dynamic, make):
    """What lookups and weights' gradients are over some steps, and the tables."""
    tables = _tables(is_dynamic)
    optimizer = sok.OptimizerWrapper(make(tables))
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        for micro in range(2):
            ids = _batch(step + micro)
            weight = torch.linspace(0.5, 2.0, len(ids[0][0]), requires_grad=True)
            given, weights = [tables[0], *tables], [weight, None, None, None]
            outputs = sok.lookup_sparse(given, ids, weights, ["mean", "sum", "sqrtn", "mean"])
            sum(output.square().sum() for output in outputs).backward()
            seen += [*(output.detach() for output in outputs), weight.grad]
        optimizer.step()
    return seen, tables


def _rows(table, num_rows):
    """Of the keys [0, num_rows), those that nobody has trained too."""
    with torch.no_grad():
        return sok.all2all_dense_embedding(table, torch.arange(num_rows))


def _check_same(values, wanted, *, what):
    """Bit for bit on CPUs. On a GPU the order in which a row's entries are summed may depend on its slot."""
    for place, (each, other) in enumerate(zip(values, wanted, strict=True)):
        is_same = torch.equal(each, other) if each.is_cpu else torch.allclose(each, other, rtol=1e-5, atol=1e-6)
        assert is_same, (what, place, float((each - other).abs().max()))


def dynamic_tables():
    """They train as static ones of the same rows, alone and beside these; evaluation inserts nothing."""
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.RAdam(p, lr=0.01),
    ):
        wanted, static = _train((False, False, False), make)
        for kinds in ((True, True, True), (True, False, True), (False, True, False)):
            seen, tables = _train(kinds, make)
            _check_same(seen, wanted, what=kinds)
            sizes = [len(sok.export(table)[0]) for table in tables]
            pairs = zip(tables, static, ROWS, strict=True)
            rows = [(_rows(table, num_rows), _rows(other, num_rows)) for table, other, num_rows in pairs]
            _check_same(*zip(*rows, strict=True), what=kinds)
            held = [sok.export(table)[0] for table in tables]
            assert sizes == list(map(len, held))
            assert all(table.placement.mine(keys).all() for table, keys in zip(tables, held, strict=True))


def dynamic_table_io():
    """Keys of this rank are assigned, those of another refused; a rank that is full tells the others at the step."""
    n, rank = sok.num_ranks(), sok.rank()
    table = sok.DynamicVariable(2, "zeros", name="items", max_capacity=4, evict_strategy=None)
    other = sok.DynamicVariable(2, "ones", name="users", mode=f"localized:{n - 1}")
    sok.assign(table, [rank, rank - 5 * n], torch.full((2, 2), float(rank)))
    assert sorted(table.indices.tolist()) == sorted([rank, rank - 5 * n])
    if n > 1:
        foreign = (rank + 1) % n
        try:
            sok.assign(table, [rank + n, foreign], torch.ones(2, 2))
            raise AssertionError("a key of another rank was assigned")
        except IndexError as error:
            assert "items" in str(error)
    assert table.size == 2
    with torch.no_grad():
        keys = torch.arange(n)
        assert torch.equal(sok.all2all_dense_embedding(table, keys)[:, 0], keys.float())
        assert torch.equal(sok.all2all_dense_embedding(other, keys - 3), torch.ones(n, 2)) and other.size == 0
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table, other], lr=1.0))
    before = sok.export(table)
    keys = torch.arange(1, 6) * n  # five keys of rank 0, which has room for two
    ids = (keys, torch.tensor([0, 5]))
    try:
        output = sok.lookup_sparse([table, other], [ids, ids])  # raises where there is one rank
        sum(x.sum() for x in output).backward()
        optimizer.step()
        raise AssertionError("the step was taken")
    except (torch.OutOfMemoryError, PeerError) as error:
        assert isinstance(error, PeerError) == (rank != 0)
        assert ("no room for the new ones" if rank == 0 else "rank 0") in str(error)
    assert all(map(torch.equal, sok.export(table), before))
    optimizer.zero_grad()
    sok.lookup_sparse(table, (torch.tensor([rank]), torch.tensor([0, 1]))).sum().backward()
    optimizer.step()
    assert table.detach()[0].tolist() == [rank - 1.0] * 2


class _Job:
    """A table that has room for four rows on each rank, beside others, and its optimizer."""

    def __init__(self, strategy, culprit):
        self.tables: list[Any] = [
            sok.DynamicVariable(3, name="items", max_capacity=4, evict_strategy=strategy),
            sok.DynamicVariable(2, name="users", mode=f"localized:{culprit}"),
            sok.Variable(shape=(50, 2), name="static"),
        ]
        self.optimizer = sok.OptimizerWrapper(torch.optim.Adagrad(self.tables, lr=0.1))

    def look(self, keys):
        """Keys of "items", in bags of three; others have keys of their own."""
        ids = [keys, torch.arange(4) + sok.rank(), torch.arange(4) + sok.rank()]
        bags = [(x, torch.arange(0, len(x) + 3, 3).clamp(max=len(x))) for x in ids]
        weights = torch.linspace(0.5, 1.0, len(keys), requires_grad=True)
        outputs = sok.lookup_sparse(
            [*self.tables, self.tables[0]], [*bags, bags[0]], [None, None, None, weights], "sum"
        )
        return sum(output.square().sum() for output in outputs)

    def step(self, keys):
        self.optimizer.zero_grad()
        self.look(keys).backward()
        self.optimizer.step()

    def content(self):
        """Rows and states of the keys that this rank holds."""
        found = []
        for table in self.tables[:2]:
            keys, slots = table._core.held()
            columns = torch.cat([table.detach()[slots], self.optimizer.state[table]["sum"][slots]], dim=1)
            found.append(dict(zip(keys.tolist(), columns.tolist(), strict=True)))
        return found, self.tables[2].tolist(), self.optimizer.state[self.tables[2]]["sum"].tolist()


def full_tables():
    """A table is full on one of the ranks: all raise, with that step or the lookup after it, no row changes on any, and
    the next steps are those of a job without it."""
    n, rank = sok.num_ranks(), sok.rank()
    usual = torch.arange(2 * n)  # two of each rank
    for strategy in (None, "lru"):
        for culprit in range(n):
            job, undisturbed = (_Job(strategy, culprit) for _ in range(2))
            job.step(usual)
            undisturbed.step(usual)
            for asker in {0, n - 1}:
                for ends_with in (job.step, job.look):
                    before = job.content()
                    too_many = culprit + n * torch.arange(9)
                    error = faults.error_of(ends_with, too_many if rank == asker else usual)
                    if ends_with == job.look and n > 1:
                        assert error is None, repr(error)
                        error = faults.error_of(job.look, usual)
                    where = f"{strategy}, rank {culprit} of {n} is full, asked by {asker}: {error!r}"
                    if rank == culprit:
                        assert isinstance(error, torch.OutOfMemoryError) and "'items'" in str(error), where
                    else:
                        assert isinstance(error, PeerError) and f"rank {culprit}" in str(error), where
                    assert job.content() == before, where
                    for each in (job, undisturbed):
                        each.step(usual)
                    assert job.content() == undisturbed.content(), where


class _Model(torch.nn.Module):
    """A table, of which single ids are looked up too, and a dense layer."""

    def __init__(self, is_dynamic, dtype, key_type):
        super().__init__()
        torch.manual_seed(0)
        self.table: sok.DynamicVariable | sok.Variable
        if is_dynamic:
            self.table = sok.DynamicVariable(4, name="a", dtype=dtype, key_type=key_type)
        else:
            self.table = sok.Variable(shape=(ROWS[0], 4), name="a", dtype=dtype)
        self.dense = torch.nn.Linear(4, 3)

    def forward(self, keys, splits):
        pooled = sok.lookup_sparse(self.table, (keys, splits), combiners="mean")
        single = sok.all2all_dense_embedding(self.table, keys.view(-1, 1))
        return self.dense(pooled).sum() + self.dense(single).square().sum()


def dynamic_models():
    """Under DistributedDataParallel, and compiled, a model with a dynamic table trains and evaluates as one with a
    static table of the same rows.
    """
    ways = {
        "ddp": torch.nn.parallel.DistributedDataParallel,
        "compiled": lambda model: torch.compile(model, backend="aot_eager"),
    }
    for dtype, key_type in ((torch.float32, torch.int64), (torch.bfloat16, torch.int32)):
        for way, wrap in ways.items():
            found = []
            for is_dynamic in (False, True):
                torch._dynamo.reset()
                model = _Model(is_dynamic, dtype, key_type)
                run = wrap(model)
                optimizer = sok.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
                losses = []
                for step in range(4):
                    keys, splits = _batch(step)[0]
                    optimizer.zero_grad()
                    losses.append(run(keys.to(key_type), splits))
                    losses[-1].backward()
                    optimizer.step()
                size = len(model.table)
                with torch.no_grad():
                    losses.append(run(torch.arange(ROWS[0], dtype=key_type), torch.tensor([0, ROWS[0]])))
                    rows = sok.all2all_dense_embedding(model.table, torch.arange(ROWS[0], dtype=key_type))
                assert len(model.table) == size
                found.append([*(loss.detach() for loss in losses), rows, model.dense.weight.detach()])
            assert all(map(torch.equal, *found)), (way, dtype)
    torch._dynamo.reset()


def dynamic_dump():
    """What all ranks dump they load again, and each rank alone has the rows of its keys."""
    folder = shared_folder()
    _, tables = _train((True, False, True), lambda p: torch.optim.Adam(p, lr=0.01))
    sok.dump(f"{folder}/d", tables)
    loaded = _tables((True, True, False))
    sok.load(f"{folder}/d", loaded)
    for table, other, num_rows in zip(tables, loaded, ROWS, strict=True):
        assert torch.equal(_rows(table, num_rows), _rows(other, num_rows)), table.name
        assert table.placement.mine(sok.export(other)[0]).all()
    torch.distributed.barrier()
    if sok.rank() == 0:
        shutil.rmtree(folder)


def dynamic_store():
    """Each rank's rows go to a store of its own and come back, as of a table without a bound. What one rank's store
    cannot do is an error on all, and so is what one rank refuses; the next lookup goes on.
    """
    store = DictStore()
    tables = [
        sok.DynamicVariable(3, "normal", name="stored", max_capacity=14, store=store),
        sok.DynamicVariable(3, "normal", name="stored", var_type="hbm"),
    ]
    optimizers = [sok.OptimizerWrapper(torch.optim.Adam([table], lr=0.1)) for table in tables]
    generator = torch.Generator().manual_seed(sok.rank())

    def step(table, optimizer, keys, following):
        optimizer.zero_grad()
        rows = sok.lookup_sparse(table, (keys, torch.arange(len(keys) + 1)), combiners="sum")
        rows.square().sum().backward()
        sok.prefetch(table, (following, torch.arange(len(following) + 1)))
        optimizer.step()
        with torch.no_grad():
            return rows, sok.all2all_dense_embedding(table, following)

    for number in range(16):
        keys, following = (torch.randint(-100, 100, (size,), generator=generator) for size in (number % 7, 5))
        if number % 5 == 4:
            store.fails = ("read", 0) if sok.rank() == number % sok.num_ranks() else None
            everything = (torch.arange(-100, -92), torch.arange(9))
            error = faults.error_of(lambda ids=everything: sok.lookup_sparse(tables[0], ids))
            assert isinstance(error, PeerError if store.fails is None else ConnectionError), repr(error)
            store.fails = None
            wrong = sok.rank() == number % sok.num_ranks()
            ids = (torch.zeros(8), torch.arange(9)) if wrong else everything
            given = [tables[0]] * 2, [everything, ids]
            for call, *arguments in (
                (sok.lookup_sparse, *given),
                (sok.prefetch, *given),
                (sok.all2all_dense_embedding, tables[0], ids[0]),
            ):
                error = faults.error_of(call, *arguments)
                assert isinstance(error, TypeError if wrong else PeerError), repr(error)
        found = [step(*each, keys, following) for each in zip(tables, optimizers, strict=True)]
        assert all(map(torch.equal, *found)), number
    # Each rank has ids of a dtype of its own.
    size, dtype = (9, torch.int32) if sok.rank() == 0 else (0, torch.int64)
    keys, following = (torch.arange(first, first + size, dtype=dtype) for first in (-100, 50))
    found = [step(*each, keys, following) for each in zip(tables, optimizers, strict=True)]
    assert all(map(torch.equal, *found))
    keys = [sorted(sok.export(table)[0].tolist()) for table in tables]
    assert keys[0] == keys[1] and store.size() > 0 and tables[0].placement.mine(sok.export(tables[0])[0]).all()
