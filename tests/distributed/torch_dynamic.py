# SPDX-License-Identifier: Apache-2.0
"""Checks of torch_worker.py about dynamic tables on several ranks."""

import shutil

import torch
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
        keys = torch.randint(0, max(1, rows * (step + 1) // 7), (sum(lengths),), generator=generator)
        result.append((keys, torch.tensor([0, *lengths]).cumsum(0)))
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


def dynamic_tables():
    """They train as static ones of the same rows, bit for bit, alone and beside these; evaluation inserts nothing."""
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.RAdam(p, lr=0.01),
    ):
        wanted, static = _train((False, False, False), make)
        for kinds in ((True, True, True), (True, False, True), (False, True, False)):
            seen, tables = _train(kinds, make)
            assert all(map(torch.equal, seen, wanted)), kinds
            sizes = [table.shape for table in tables]
            for table, other, num_rows in zip(tables, static, ROWS, strict=True):
                assert torch.equal(_rows(table, num_rows), _rows(other, num_rows)), (kinds, table.name)
            assert sizes == [table.shape for table in tables]
            for table in tables:
                keys, _ = sok.export(table)
                assert table.placement.mine(keys).all()


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
