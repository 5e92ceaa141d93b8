# SPDX-License-Identifier: Apache-2.0
"""What the core tests share: cases as the binding's objects, guards on memory, all ranks simulated in one process."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import os

import cases
import hypothesis
import numpy as np
import reference
import table_kinds

from sparse_operation_kit import core

LARGE = cases.Call(
    (cases.Table(3000, 32), cases.Table(500, 7, 1), cases.Table(50, 64, 0)),
    tuple(
        cases.random_lookup(
            np.random.default_rng(t), t % 3, (3000, 500, 50)[t % 3], 700, 9, dtype, combiner, t % 2 == 0, 3
        )
        for t, (dtype, combiner) in enumerate([(d, c) for d in cases.KEY_DTYPES for c in reference.COMBINERS])
    ),
    seed=7,
    name="enough work for several threads",
)


def tables(call, num_ranks=1, rank=0, names="table", kind=table_kinds.STATIC):
    """The tables of a call as `rank` sees them, with fresh copies of its rows; kind: of table_kinds.KINDS."""
    result = []
    for t, table in enumerate(call.tables):
        placement = table.placement(num_ranks)
        rows = call.rows(t)[placement.keys_of(rank)]
        shape = (table.num_rows, table.dimension)
        result.append(core.Table(rows, *shape, f"{names}{t}", placement.owner, num_ranks, rank))
    return list(map(table_kinds.MAKERS[kind], result))


def rounded(tables, dtypes):
    """Copies of tables with their rows in dtypes[0], dtypes[1], ... in turn."""
    return [
        dataclasses.replace(table, weight=reference.rounded(table.weight, dtypes[t % len(dtypes)]))
        for t, table in enumerate(tables)
    ]


def widened(tables):
    """Copies of tables with the same rows in float32."""
    return [dataclasses.replace(table, weight=reference.widened(table.weight)) for table in tables]


def lookups(call):
    """The lookups of a call."""
    return [core.Lookup(x.keys, x.table, x.row_splits, x.weights, x.combiner) for x in call.lookups]


def parts(call, number, table=None):
    """The gradient of a table, not spread: one part a lookup. table: the table itself, where it has an index."""
    found = [(i, x) for i, x in enumerate(lookups(call)) if x.table == number]
    if table is not None:
        found = [(i, *table_kinds.located({number: table}, [x])) for i, x in found]
    return [
        core.Gradient(
            x.keys if x.slots is None else x.slots, call.output_gradient(i), x.row_splits, x.weights, x.combiner
        )
        for i, x in found
    ]


def under_compute_sanitizer():
    """Whether long tests make fewer calls: a call on a GPU takes 100 times as long there, and more. By what
    tools/gpu_ci.py sets.
    """
    return os.environ.get("SOK_TEST_GPU") == "1" and hypothesis.settings().max_examples < 10


def optimizer(settings):
    """A reference.Optimizer as the binding's."""
    return core.Optimizer(**dataclasses.asdict(settings))


@contextlib.contextmanager
def unchanged(*arrays):
    """Checks that the block changes no byte of the arrays."""
    before = [array.tobytes() for array in arrays]
    yield
    for i, (array, was) in enumerate(zip(arrays, before, strict=True)):
        assert array.tobytes() == was, f"array {i} was changed"


def same_bytes(a, b):
    """Whether two arrays, or sequences of them, are bit-identical."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return len(a) == len(b) and all(same_bytes(x, y) for x, y in zip(a, b, strict=True))


class CountingAllocator:
    """Hands out memory full of garbage, fails at allocation number `fail_at` (from 0), keeps what is not returned."""

    def __init__(self, fail_at=None):
        self.fail_at, self.count, self.live = fail_at, 0, {}
        self.context = core.Context(allocate=self._allocate, release=self._release)

    def _allocate(self, size):
        assert size > 0
        number, self.count = self.count, self.count + 1
        if number == self.fail_at:
            return 0
        memory = ctypes.create_string_buffer(size + 64)
        address = ctypes.addressof(memory)
        address += -address % 64
        ctypes.memset(address, 0xAB, size)
        self.live[address] = memory
        return address

    def _release(self, address):
        del self.live[address]


# --- all ranks in one process ---------------------------------------------------------------------------------------


def _pieces(flat, sizes):
    return np.split(flat, np.cumsum(sizes)[:-1])


def exchange(send, sizes):
    """All-to-all: send[r] is cut into sizes[r][0], sizes[r][1], ...; rank d receives piece d of each rank in turn."""
    cut = [_pieces(buffer, size) for buffer, size in zip(send, sizes, strict=True)]
    return [np.concatenate([cut[source][rank] for source in range(len(send))]) for rank in range(len(send))]


@dataclasses.dataclass
class Rank:
    """One simulated rank: its tables, its part of the batch, and what the stages made."""

    tables: list[core.Table]
    lookups: list[core.Lookup]
    routing: core.Routing | None = None
    asked: core.Messages | None = None
    came: core.Messages | None = None
    counts: np.ndarray | None = None
    keys: np.ndarray | None = None
    slots: np.ndarray | None = None
    rows: np.ndarray | None = None
    outputs: list[np.ndarray] | None = None


def forward(ranks, context=None, pooled=None):
    """route, exchange, locate, gather, exchange, combine on every rank; fills in the rest of ranks[r].

    pooled: [rank][lookup] whether it is pooled at the owner; None: none is.
    """
    for r, rank in enumerate(ranks):
        choice = None if pooled is None else pooled[r]
        rank.routing = core.route(rank.tables, rank.lookups, pooled=choice, context=context)
        rank.asked = rank.routing.messages(rank.tables)
    widths = [table.shape[1] for table in ranks[0].tables]
    messages = [core.join_keys(rank.tables, rank.routing, context=context) for rank in ranks]
    keys = exchange(messages, [rank.asked.keys for rank in ranks])
    floats = []
    for r, rank in enumerate(ranks):
        rank.counts = np.stack([other.routing.counts[r] for other in ranks])
        rank.came = core.Messages(rank.counts, widths, rank.routing.tables)
        rank.keys = keys[r]
        rank.slots = core.locate(rank.tables, rank.keys, rank.came, context=context)
        floats.append(core.gather(rank.tables, rank.slots, rank.came, keys=rank.keys, context=context))
    received = exchange(floats, [rank.came.floats for rank in ranks])
    for rank, buffer in zip(ranks, received, strict=True):
        rank.rows = buffer
        arguments = (rank.tables, rank.lookups, rank.routing.inverse, buffer)
        rank.outputs = core.combine(*arguments, messages=rank.asked, context=context)


def backward(ranks, output_gradients, context=None):
    """spread and exchange on every rank -> the parts of each table's gradient on each rank: [rank][table] lists."""
    spread = [
        core.spread(rank.tables, rank.lookups, incoming, rank.routing, context=context)
        for rank, incoming in zip(ranks, output_gradients, strict=True)
    ]
    received = exchange(spread, [rank.asked.floats for rank in ranks])
    return [
        core.owner_gradients(rank.came, rank.keys, rank.slots, flat) for rank, flat in zip(ranks, received, strict=True)
    ]


def simulate(call, num_ranks, seed=0, kind=table_kinds.STATIC):
    """(ranks, output_gradients, cuts): a call split over simulated ranks."""
    split, cuts = call.split(num_ranks, seed)
    ranks = [Rank(tables(call, num_ranks, r, kind=kind), lookups(part)) for r, part in enumerate(split)]
    gradients = [[call.output_gradient(i)[cut[r] : cut[r + 1]] for i, cut in enumerate(cuts)] for r in range(num_ranks)]
    return ranks, gradients, cuts


def reduce(ranks, parts, context=None):
    """The parts of each table's gradient on each rank -> (slots, values): [rank][table]."""
    return [
        [core.reduce(table, parts[r][t], context=context) for t, table in enumerate(rank.tables)]
        for r, rank in enumerate(ranks)
    ]


def check_step(call, ranks, cuts, reduced):
    """Compares outputs and reduced gradients of all ranks with the reference."""
    for i, cut in enumerate(cuts):
        output = np.concatenate([rank.outputs[i] for rank in ranks])
        reference.assert_close(output, call.output(i), magnitude=call.output(i, absolute=True), message=f"lookup {i}")
        for rank, (begin, end) in zip(ranks, itertools.pairwise(cut), strict=True):
            assert len(rank.outputs[i]) == end - begin
    for t, table in enumerate(call.tables):
        gradient, size = call.row_gradient(t), call.row_gradient(t, absolute=True)
        for r in range(len(ranks)):
            keys = table.placement(len(ranks)).keys_of(r)
            slots, values = table_kinds.as_static(ranks[r].tables[t], *reduced[r][t])
            assert np.array_equal(slots, np.flatnonzero(np.isin(keys, call.touched(t))))
            reference.assert_close(values, gradient[keys[slots]], magnitude=size[keys], message=f"table {t}")


def joined(call, ranks, table):
    """[num_rows, dimension]: a table put together from the ranks' shards."""
    placement = call.tables[table].placement(len(ranks))
    whole = np.empty((placement.num_rows, placement.dimension), np.float32)
    for r, rank in enumerate(ranks):
        whole[placement.keys_of(r)] = table_kinds.rows_of(rank.tables[table])
    return whole
