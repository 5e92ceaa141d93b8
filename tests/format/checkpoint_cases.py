# SPDX-License-Identifier: Apache-2.0
"""Shared by the format suite: ranks as threads, tables with known contents, dumps laid out by hand as SOK 2.x does."""

import dataclasses
import pathlib
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import sparse_operation_kit.checkpoint as ck
from sparse_operation_kit.placement import Placement

# Optimizer -> states and whether a state has one column a row.
OPTIMIZERS = {
    "SGD": {"momentum": False},
    "Adam": {"m": False, "v": False},
    "AdamW": {"m": False, "v": False},
    "Adamax": {"m": False, "v": False},
    "Adadelta": {"accum_grad": False, "accum_var": False},
    "Adagrad": {"accumulator": False},
    "RowWiseAdagrad": {"accumulator": True},
    "Ftrl": {"accumulator": False, "linear": False},
    "RMSprop": {"rms": False, "mg": False, "momentum": False},
}


class ArrayColumn:
    """An array as a frontend's column (held.Column)."""

    def __init__(self, array):
        self.array = array

    def read(self, slots):
        return self.array[slots]

    def write(self, slots, values):
        self.array[slots] = values


class ThreadGroup:
    """One rank of several that run as threads of this process."""

    def __init__(self, rank, size, shared):
        self.rank, self.size, self._shared = rank, size, shared

    def allgather(self, data):
        slots, barrier = self._shared
        slots[self.rank] = bytes(data)
        barrier.wait(60)
        result = list(slots)
        barrier.wait(60)
        return result

    def alltoall(self, values, splits):
        ends = np.cumsum(splits)
        parts = [values[end - size : end].astype(np.float32) for size, end in zip(splits, ends, strict=True)]
        sizes = np.frombuffer(b"".join(self.allgather(np.array(splits, np.int64).tobytes())), np.int64)
        sizes = sizes.reshape(self.size, self.size)
        came = [np.frombuffer(each, np.float32) for each in self.allgather(np.concatenate(parts).tobytes())]
        firsts = [int(sizes[rank, : self.rank].sum()) for rank in range(self.size)]
        return np.concatenate(
            [c[f : f + sizes[r, self.rank]] for r, (c, f) in enumerate(zip(came, firsts, strict=True))]
        )


def on_ranks(size, function):
    """[function(group) of each rank]; a rank's exception takes the place of its result."""
    shared = ([b""] * size, threading.Barrier(size))

    def run(rank):
        try:
            return function(ThreadGroup(rank, size, shared))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def results(outcomes):
    """The results of on_ranks; raises the first exception among them, other ranks' PeerErrors last."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    errors.sort(key=lambda error: isinstance(error, ck.PeerError))
    if errors:
        raise errors[0]
    return outcomes


@dataclasses.dataclass
class Model:
    """A table in full: `table`, keys [rows] int64 and their weights and states."""

    table: ck.Table
    keys: np.ndarray
    weights: np.ndarray
    states: dict

    @property
    def owner(self):
        return self.table.owner

    def source(self, rank, size, shuffle=None):
        """This rank's rows as a Source; `shuffle` is a Generator that orders them and cuts odd pieces."""
        owner = self.owner % size if self.owner >= 0 else self.owner
        mine = Placement(0, 1, owner, size, rank).mine(self.keys)
        rows = np.flatnonzero(mine)
        if shuffle is not None:
            shuffle.shuffle(rows)
        keys = self.keys[rows].astype(self.table.key_type)
        states = {slot: array[rows] for slot, array in self.states.items()}
        source = ck.from_arrays(self.table, keys, self.weights[rows], states)
        if shuffle is None:
            return source

        def odd(_):
            first = 0
            while first < len(rows):
                end = first + int(shuffle.integers(1, 8))
                part = slice(first, end)
                yield ck.Rows(keys[part], self.weights[rows][part], {s: a[part] for s, a in states.items()})
                first = end

        return ck.Source(self.table, len(rows), odd)


def model(
    name="table0:0",
    rows=23,
    dimension=4,
    *,
    optimizer="Adam",
    mode="distributed",
    kind="static",
    seed=0,
    value_dtype="float32",
    key_dtype=None,
):
    """A table whose every element is distinct and whose bits are hard to confuse (NaNs and -0 among them)."""
    rng = np.random.default_rng([seed, rows, dimension])

    def values(columns):
        array = rng.standard_normal((rows, columns)).astype(value_dtype)
        if array.size > 3:
            array.reshape(-1)[:3] = (np.nan, -0.0, np.inf)
        return array

    states = {}
    if optimizer is not None:
        for slot, single in OPTIMIZERS[optimizer].items():
            states[slot] = values(1 if single else dimension)
    if kind == "static":
        keys = np.arange(rows, dtype=np.int64)
    else:
        limits = np.iinfo(key_dtype or "int64")
        keys = rng.choice(np.arange(-4 * rows - 8, 4 * rows + 8), rows, replace=False).astype(np.int64)
        keys[:2] = [limits.min, limits.max][:rows]
    table = ck.Table(
        name,
        dimension,
        value_dtype,
        kind=kind,
        mode=mode,
        key_dtype=key_dtype,
        seed=2**64 - 1,
        initializer={"kind": "uniform", "a": -0.05, "b": 0.05},
        optimizer=optimizer,
        states={slot: ck.State(array.dtype.name, array.shape[1]) for slot, array in states.items()},
    )
    return Model(table, keys, values(dimension), states)


def dump_in_background(*arguments, **options):
    """dump_async and what ends it."""
    ck.dump_async(*arguments, **options).wait()


def dump(path, models, size=1, *, shuffle=None, write=ck.dump, **options):
    """Dumps `models` from `size` ranks; returns on_ranks' outcomes. write: what writes them."""
    name = next((model.table.optimizer for model in models if model.table.optimizer), None)
    optimizer = None if name is None else ck.Optimizer(name, 17, {"learning_rate": 0.1, "nested": {"a": [1, None]}})
    options = {"optimizer": optimizer, "step": 5, "extra": {"note": "é"}, "progress": False, **options}

    def run(group):
        rng = None if shuffle is None else np.random.default_rng([shuffle, group.rank])
        sources = [model.source(group.rank, group.size, rng) for model in models]
        return write(path, sources, group=group, **options)

    return on_ranks(size, run)


class Loaded:
    """What one rank got of one table."""

    def __init__(self, model, owner):
        self.model, self.owner = model, owner
        self.parts = []

    def target(self, **changes):
        table = self.model.table
        options = {
            "name": table.name,
            "dimension": table.dimension,
            "value_dtype": table.value_dtype,
            "rows": len(self.model.keys) if table.kind == "static" else None,
            "owner": self.owner,
            "states": table.states,
            "assign": self._assign,
        }
        return ck.Target(**{**options, **changes})

    def _assign(self, rows):
        self.parts.append(
            (rows.keys.copy(), rows.weights.copy(), {slot: array.copy() for slot, array in rows.states.items()})
        )


def load(path, models, size=1, *, owner=None, optimizer="same", **options):
    """Loads on `size` ranks; returns on_ranks' outcomes, each a list of Loaded."""

    def run(group):
        held = []
        for entry in models:
            where = entry.owner if owner is None else owner
            held.append(Loaded(entry, where % size if where >= 0 else where))
        name = next((entry.table.optimizer for entry in models if entry.table.optimizer), None)
        chosen = name if optimizer == "same" else optimizer
        targets = [entry.target() for entry in held]
        ck.load(path, targets, optimizer=chosen, group=group, progress=False, **options)
        return held

    return on_ranks(size, run)


def check(outcomes, models):
    """That the ranks together hold exactly the rows of `models`, each on its owner, bit for bit."""
    ranks = results(outcomes)
    for index, expected in enumerate(models):
        places = {int(key): row for row, key in enumerate(expected.keys)}
        seen = set()
        for rank, held in enumerate(ranks):
            placement = Placement(0, 1, held[index].owner, len(ranks), rank)
            for keys, weights, states in held[index].parts:
                assert placement.mine(keys.astype(np.int64)).all()
                rows = [places[int(key)] for key in keys]
                assert len(set(rows)) == len(rows) and not seen & set(rows)
                seen |= set(rows)
                same_bits(weights, expected.weights[rows])
                assert set(states) == set(expected.states)
                for slot, array in states.items():
                    same_bits(array, expected.states[slot][rows])
        assert len(seen) == len(expected.keys)


def same_bits(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


def write_legacy(folder, model, ranks=1, optimizer_name=None, stem=None):
    """Lays out a dump by hand as SOK 2.x does: no manifest; the ranks' rows one rank after another.

    Written from the table of the format, not with this package's code.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    codes = {"int32": 0, "int64": 1, "uint32": 2, "uint64": 3, "float16": 4, "float32": 5, "float64": 6}

    def write(name, kind, state, array):
        head = (
            b" " * 256 + struct.pack(">I", kind) + state.encode().rjust(32) + struct.pack(">I", codes[array.dtype.name])
        )
        assert len(head) == 296
        (folder / name).write_bytes(head + array.tobytes())

    order = np.concatenate([np.flatnonzero(model.keys % ranks == rank) for rank in range(ranks)])
    key_dtype = "int64"
    if model.owner >= 0:
        order, key_dtype = np.arange(len(model.keys)), "uint64"
    if model.table.kind == "dynamic":
        key_dtype = model.table.key_type
    stem = stem or model.table.name.replace(":", "_")
    write(f"{stem}-key", 0, "", model.keys[order].astype(key_dtype))
    write(f"{stem}-weight", 1, "", model.weights[order])
    for slot, array in model.states.items():
        write(f"{stem}-{optimizer_name or model.table.optimizer}-{slot}", 2, slot, array[order])
