# SPDX-License-Identifier: Apache-2.0
"""A serving copy follows training over several ranks, and what is exported for servers is what all hold: the checks of
both frontends' workers.
"""

import contextlib
import datetime
import shutil
import tempfile

import hybrid_model
import numpy as np

from sparse_operation_kit.checkpoint import open_dump

TABLES = {"items": (37, 4, None), "users": (11, 3, "localized:1"), "tiny": (2, 5, None)}


def now():
    return datetime.datetime.now(datetime.timezone.utc)


@contextlib.contextmanager
def shared_folder(group):
    """A folder that all ranks see, for the time of the block."""
    made = tempfile.mkdtemp() if group.rank == 0 else ""
    folder = group.allgather(made.encode())[0].decode()
    yield folder
    group.allgather(b"")
    if group.rank == 0:
        shutil.rmtree(folder)


def follow(sok, make_step, rows_of, path):
    """Steps with other keys on each rank, deltas as arrays and through `path`, and a bad one.

    Args:
      make_step(tables): step(keys): one update of the rows that keys[t] names on this rank.
      rows_of(table): this rank's rows as NumPy has them.
      path: a directory that all ranks see.
    """
    rank, ranks = sok.rank(), sok.num_ranks()

    def tables():
        modes = {name: mode if ranks > 1 else None for name, (_, _, mode) in TABLES.items()}
        return [
            sok.Variable(shape=shape[:2], initializer="normal", mode=modes[name], name=name)
            for name, shape in TABLES.items()
        ]

    trained, copy = tables(), tables()
    step = make_step(trained)
    sok.track_changes(trained)
    meet(sok)
    rng = np.random.default_rng(5)
    for turn in range(3):
        batches = rng.integers(0, [[shape[0]] for shape in TABLES.values()], (ranks, len(TABLES), 6))
        if turn == 2:
            batches = batches[..., :0]
        since = now()
        step(list(batches[rank]))
        delta = sok.incremental_model_dump(trained, since)
        for t, keys in enumerate(delta[0]):
            # The ranks share a clock here, and have met since the turn before.
            np.testing.assert_array_equal(keys, np.unique(batches[:, t]))
        if turn == 1:
            if rank == 0:
                sok.save_incremental(path, trained, *delta)
            meet(sok)
            delta = path
        sok.load_incremental(delta, copy)
        for ours, theirs in zip(trained, copy, strict=True):
            np.testing.assert_array_equal(rows_of(ours), rows_of(theirs))
    # One rank is wrong: nothing changes anywhere.
    before = [rows_of(table).copy() for table in copy]
    keys = [np.array([1 if rank else 37]), np.array([0]), np.array([0])]
    values = [np.full((1, shape[1]), 9, np.float32) for shape in TABLES.values()]
    for call in (
        lambda: sok.load_incremental((keys, values), copy),
        lambda: sok.incremental_model_dump(trained, now() if rank else datetime.datetime.now()),
    ):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            wanted = ("rank 0 failed",) if rank else ("key 37 is outside", "no time zone")
            assert any(text in str(error) for text in wanted), error
        else:
            raise AssertionError("no error")
    for table, rows in zip(copy, before, strict=True):
        np.testing.assert_array_equal(rows_of(table), rows)
    check_served(sok, trained, rows_of, f"{path}-served")
    follow_by_increments(sok, f"{path}-increments")


def follow_by_increments(sok, path):
    """A copy of a dynamic table holds the keys of the table, each rank its own. It refuses a gap on all ranks, and what
    one of them has no room for.
    """
    table, copy = (
        sok.DynamicVariable(4, name="followed", max_capacity=capacity, evict_strategy=None) for capacity in (1000, 100)
    )
    changes, following = sok.increments(table), sok.increments(copy)
    for number in (1, 2, 3):
        keys = np.arange(-7, 10 * number)
        keys = keys[table.placement.mine(keys)]
        sok.assign(table, keys, np.repeat(keys[:, None], 4, axis=1).astype(np.float32) * number)
        if number > 1:
            table.erase(keys[:2])
        assert changes.save(f"{path}-{number}") == number
        if number == 2:
            continue
        if number == 3:
            try:
                following.load(f"{path}-3")
            except (ValueError, RuntimeError) as error:
                assert "increment 3, which follows 2" in str(error) or "rank 0 failed" in str(error), error
            else:
                raise AssertionError("no error")
            assert following.load(f"{path}-2")
        assert following.load(f"{path}-{number}")
        held, rows = (np.asarray(part) for part in sok.export(table))
        order = np.argsort(held)
        others, copies = (np.asarray(part) for part in sok.export(copy))
        assert sorted(others.tolist()) == held[order].tolist() and len(held)
        np.testing.assert_array_equal(copies[np.argsort(others)], rows[order])
    before = [np.asarray(part) for part in sok.export(copy)]
    if sok.rank() == 0:
        keys = np.arange(1000, 1200) * sok.num_ranks()
        sok.assign(table, keys, np.ones((len(keys), 4), np.float32))
    else:
        table.erase(np.asarray(table.indices)[:3])
    changes.save(f"{path}-4")
    try:
        following.load(f"{path}-4")
    except (ValueError, RuntimeError) as error:
        wanted = "rank 0 failed" if sok.rank() else "rows on this rank; expected at most 100"
        assert wanted in str(error), error
    else:
        raise AssertionError("no error")
    for after, then in zip(sok.export(copy), before, strict=True):
        np.testing.assert_array_equal(np.asarray(after), then)


def follow_layer(sok, make, step, first_of, path):
    """A layer of another placement follows one as arrays, through a directory and by increments: whole tables, whatever
    ranks hold of them.

    make(**options): a layer "layer" of hybrid_model.TABLES. step(layer, ids): one of SGD whose loss reads ids[t] of
    each table on this rank. first_of(layer): one of its variables on this rank, or None.
    """
    rank, ranks, shapes = sok.rank(), sok.num_ranks(), hybrid_model.TABLES
    options = {name: value for name, value in hybrid_model.ALL_KINDS.items() if "threshold" in name}
    trained, copy, other = (
        make(strategy="memory_balanced", **options),
        make(strategy="memory_optimized", column_slice_threshold=30),
        make(row_slice_threshold=1),
    )
    start = trained.get_weights(True)
    for layer in (copy, other):
        layer.set_weights(start)
    named = first_of(trained)
    sok.track_changes(trained if named is None else [named])  # any of its tables stands for all
    changes, following = sok.increments(trained), sok.increments(other)
    meet(sok)
    rng = np.random.default_rng(3)
    for turn in range(1, 4):
        ids = [rng.integers(0, rows, (ranks, 4)) for rows, _ in shapes]
        since = now()
        step(trained, [each[rank] for each in ids])
        delta = sok.incremental_model_dump(trained, since)
        tables = trained.get_weights(True)
        for keys, rows, wanted, table in zip(*delta, ids, tables, strict=True):
            np.testing.assert_array_equal(keys, np.unique(wanted))
            np.testing.assert_array_equal(rows, table[keys])
        if turn == 2:
            if rank == 0:
                sok.save_incremental(path, trained, *delta)
            meet(sok)
            delta = path
        sok.load_incremental(delta, copy)
        assert changes.save(f"{path}-{turn}") == turn
        with open_dump(f"{path}-{turn}") as dump:
            assert sorted(dump.tables) == [f"layer_{t}_0" for t in range(len(shapes))]
            found = [dump.tables[f"layer_{t}_0"] for t in range(len(shapes))]
            counts = [sum(len(keys) for _, keys in table.key_chunks()) for table in found]
        if turn > 1:  # the first has all rows: it is not known which changed before
            assert counts == [len(np.unique(each)) for each in ids]
        assert following.load(f"{path}-{turn}")
        for layer in (copy, other):
            for got, wanted in zip(layer.get_weights(True), tables, strict=True):
                np.testing.assert_array_equal(got, wanted)
    counts = sok.export_for_serving(f"{path}-served", trained)
    assert counts == {f"layer/{t}": rows for t, (rows, _) in enumerate(shapes)}
    for t, table in enumerate(tables):
        keys = np.fromfile(f"{path}-served/layer_{t}/key", np.int64)
        served = np.fromfile(f"{path}-served/layer_{t}/emb_vector", np.float32).reshape(table.shape)
        np.testing.assert_array_equal(served, table[keys])
    try:
        sok.expire(trained, min_norm=1.0)
    except TypeError as error:
        assert "table 'layer/0' is static" in str(error)
    else:
        raise AssertionError("no error")


def check_served(sok, tables, rows_of, path):
    """Exports tables and finds this rank's rows there."""
    counts = sok.export_for_serving(path, tables)
    assert counts == {name: rows for name, (rows, _, _) in TABLES.items()}
    for table, (name, (rows, dimension, _)) in zip(tables, TABLES.items(), strict=True):
        keys = np.fromfile(f"{path}/{name}/key", np.int64)
        served = np.fromfile(f"{path}/{name}/emb_vector", np.float32).reshape(-1, dimension)
        assert sorted(keys) == list(range(rows))
        mine = table.placement.mine(keys)
        np.testing.assert_array_equal(served[mine], rows_of(table)[table.placement.key_map(keys[mine])])


def meet(sok):
    """Returns when all ranks have called it."""
    sok.incremental_model_dump([], now())
