# SPDX-License-Identifier: Apache-2.0
"""The cases that every suite runs: a table of named calls (CASES) and Hypothesis strategies (`calls`, `lookups`, ...).

A `Call` is a batch for several tables, in plain NumPy; a suite turns it into its framework's tensors. Structure
(sizes, keys, bag lengths, options) is drawn and shrinks; numbers (rows, gradients) follow from the call's seed, which
Hypothesis prints with the failing example.

Weights are multiples of 1/8, so that sums of weights are exact in float32 and "the divisor is 0" means the same
everywhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import reference
from hypothesis import strategies as st

KEY_DTYPES = (np.int32, np.int64)
DIMENSIONS = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    32,
    33,
    48,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    255,
    256,
    257,
    1000,
    1024,
    2048,
)


@dataclasses.dataclass(frozen=True)
class Table:
    """owner -1: distributed over the ranks; else the rank (modulo the number of ranks) that holds the table whole."""

    num_rows: int
    dimension: int
    owner: int = -1

    def placement(self, num_ranks=1):
        owner = self.owner % num_ranks if self.owner >= 0 else -1
        return reference.Placement(self.num_rows, self.dimension, owner, num_ranks)

    def mode(self, num_ranks=1):
        """The `mode` argument of sok.Variable."""
        return f"localized:{self.owner % num_ranks}" if self.owner >= 0 else "distributed"


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """A batch of bags for one table. row_splits None: each key is a bag of its own (no combiner)."""

    table: int
    keys: np.ndarray
    row_splits: np.ndarray | None = None
    weights: np.ndarray | None = None
    combiner: str = "sum"

    @property
    def num_bags(self):
        return len(self.keys) if self.row_splits is None else len(self.row_splits) - 1

    @property
    def splits(self):
        return reference.bag_splits(self.keys, self.row_splits)

    def bags(self, begin, end):
        """The lookup of bags [begin, end) only."""
        splits = self.splits
        first, last = splits[begin], splits[end]
        return dataclasses.replace(
            self,
            keys=self.keys[first:last],
            row_splits=None if self.row_splits is None else (splits[begin : end + 1] - first),
            weights=None if self.weights is None else self.weights[first:last],
        )

    def coordinates(self, shuffle=None):
        """(indices [n, 2] of (bag, position in the bag), permutation [n]): keys[permutation] belong to `indices`.

        shuffle: a seed; entries then come in a random order, as an unsorted sparse tensor has them.
        """
        splits = self.splits
        lengths = np.diff(splits)
        bag = np.repeat(np.arange(len(lengths)), lengths)
        indices = np.stack([bag, np.arange(len(self.keys)) - np.repeat(splits[:-1], lengths)], axis=1)
        permutation = np.arange(len(self.keys))
        if shuffle is not None:
            permutation = np.random.default_rng(shuffle).permutation(len(self.keys))
        return indices[permutation].astype(np.int64), permutation

    @property
    def dense_shape(self):
        """Shape of the sparse tensor that `coordinates` describes; at least one column."""
        return (self.num_bags, max(1, int(np.max(np.diff(self.splits), initial=0))))

    def __repr__(self):
        splits = None if self.row_splits is None else self.row_splits.tolist()
        weights = None if self.weights is None else self.weights.tolist()
        return (
            f"Lookup(table={self.table}, keys={self.keys.tolist()} {self.keys.dtype}, row_splits={splits}, "
            f"weights={weights}, combiner={self.combiner!r})"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of lookup_sparse: tables, lookups that name them by position, and the seed of all numbers."""

    tables: tuple[Table, ...]
    lookups: tuple[Lookup, ...]
    seed: int = 0
    name: str = ""

    def rows(self, table):
        """[num_rows, dimension] float32: the initial rows of a table."""
        t = self.tables[table]
        rng = np.random.default_rng((self.seed, 1, table))
        return rng.uniform(-1, 1, (t.num_rows, t.dimension)).astype(np.float32)

    def output_gradient(self, lookup):
        """[bags, dimension] float32: the gradient of a lookup's output."""
        item = self.lookups[lookup]
        rng = np.random.default_rng((self.seed, 2, lookup))
        return rng.uniform(-1, 1, (item.num_bags, self.tables[item.table].dimension)).astype(np.float32)

    def output(self, lookup, absolute=False):
        """The reference's output of a lookup, float64."""
        item = self.lookups[lookup]
        return reference.pool(self.rows(item.table), item.keys, item.row_splits, item.weights, item.combiner, absolute)

    def row_gradient(self, table, absolute=False):
        """The reference's gradient of a table under the output gradients, float64, summed over its lookups."""
        t = self.tables[table]
        total = np.zeros((t.num_rows, t.dimension))
        for i, item in enumerate(self.lookups):
            if item.table == table:
                args = (item.keys, item.row_splits, item.weights, item.combiner)
                total += reference.row_gradient(self.output_gradient(i), t.num_rows, *args, absolute=absolute)
        return total

    def weight_gradient(self, lookup, absolute=False):
        """The reference's gradient of a lookup's weights, float64."""
        item = self.lookups[lookup]
        args = (item.keys, item.row_splits, item.weights, item.combiner)
        return reference.weight_gradient(self.rows(item.table), self.output_gradient(lookup), *args, absolute=absolute)

    def touched(self, table):
        """The keys of a table that the batch names, ascending."""
        keys = [item.keys.astype(np.int64) for item in self.lookups if item.table == table]
        return np.unique(np.concatenate([*keys, np.zeros(0, np.int64)]))

    def split(self, num_ranks, seed=0):
        """One Call a rank, whose batches joined are this one: uneven cuts, alike for all lookups of equal batch size.

        Returns (calls, cuts) with cuts[lookup] = bag numbers [num_ranks + 1]; slice output gradients by these cuts.
        """
        fractions = np.sort(np.random.default_rng((self.seed, seed, 3)).random(num_ranks - 1))
        cuts = [np.r_[0, np.floor(fractions * (x.num_bags + 1)), x.num_bags].astype(int) for x in self.lookups]
        ranks = []
        for rank in range(num_ranks):
            parts = [x.bags(c[rank], c[rank + 1]) for x, c in zip(self.lookups, cuts, strict=True)]
            ranks.append(dataclasses.replace(self, lookups=tuple(parts)))
        return ranks, cuts


# --- the table of named cases ---------------------------------------------------------------------------------------


def random_weights(rng, n, signed=False):
    """[n] float32 multiples of 1/8 in (0, 2], or [-2, 2] with zeros among them."""
    return (rng.integers(-16 if signed else 1, 17, n) / 8).astype(np.float32)


def random_lookup(
    rng, table, num_rows, num_bags, mean_length=3, dtype=np.int64, combiner="sum", weighted=False, skew=1.0
):
    """Bags of geometric length (many empty ones) with keys from a power law."""
    lengths = rng.geometric(1 / (mean_length + 1), num_bags) - 1
    splits = np.r_[0, np.cumsum(lengths)].astype(np.int64)
    keys = (num_rows * rng.random(splits[-1]) ** skew).astype(dtype)
    weights = random_weights(rng, splits[-1]) if weighted else None
    return Lookup(table, keys, splits, weights, combiner)


def _lookup(table, bags, weights=None, combiner="sum", dtype=np.int64):
    keys = np.array([key for bag in bags for key in bag], dtype)
    splits = np.r_[0, np.cumsum([len(bag) for bag in bags])].astype(np.int64)
    return Lookup(table, keys, splits, None if weights is None else np.asarray(weights, np.float32), combiner)


def _every_option(table, num_rows, num_bags, rng):
    """Lookups of one table with each combiner, key dtype, and with and without weights."""
    return [
        random_lookup(rng, table, num_rows, num_bags, dtype=dtype, combiner=combiner, weighted=weighted)
        for dtype in KEY_DTYPES
        for combiner in reference.COMBINERS
        for weighted in (False, True)
    ]


def _cases():
    rng = np.random.default_rng(20240229)
    one = Table(10, 4)
    yield Call((one,), tuple(_every_option(0, 10, 8, rng)), name="every option on one table")
    one_key = Lookup(0, rng.integers(0, 1000, 500), np.arange(501))
    yield Call((Table(1000, 16),), (one_key,), name="one key a bag")
    yield Call((Table(50, 8),), (Lookup(0, rng.integers(0, 50, 33).astype(np.int32)),), name="no bags")
    for combiner in reference.COMBINERS:
        tables = tuple(Table(7, dimension) for dimension in DIMENSIONS)
        items = tuple(
            random_lookup(rng, t, 7, 3, 2, combiner=combiner, weighted=t % 2 == 0) for t in range(len(tables))
        )
        yield Call(tables, items, name=f"all dimensions, {combiner}")
    tables = tuple(Table(20 + 3 * t, (4, 8, 16, 3)[t % 4], -1 if t % 3 else t) for t in range(30))
    items = tuple(
        random_lookup(rng, t, x.num_rows, 9, 2, KEY_DTYPES[t % 2], reference.COMBINERS[t % 3], t % 5 == 0)
        for t, x in enumerate(tables)
    )
    yield Call(tables, items, name="thirty tables")
    shared = [*_every_option(1, 40, 6, rng), *_every_option(0, 30, 6, rng)]
    yield Call((Table(30, 8), Table(40, 8, 1)), tuple(shared), name="two tables many times")
    yield Call((one, Table(5, 3, 0)), (_lookup(0, []), _lookup(1, [], [], "mean")), name="empty batch")
    empty = tuple(_lookup(0, [[], [], []], w, c) for c in reference.COMBINERS for w in (None, []))
    yield Call((one,), empty, name="empty bags only")
    mixed = tuple(_lookup(0, [[], [3], [], [], [3, 9, 3], []], None, c) for c in reference.COMBINERS)
    yield Call((one,), mixed, name="empty bags among others")
    same = tuple(_lookup(0, [[7] * 40, [7] * 25, []], random_weights(rng, 65), c) for c in reference.COMBINERS)
    yield Call((one,), same, name="one key only")
    zero = [
        _lookup(0, [[1, 2], [3, 4], [5], [6, 6]], [0, 0, 1, -1, 0, 0.5, 0.25], combiner)
        for combiner in reference.COMBINERS
    ]
    yield Call((one,), tuple(zero), name="weights that are or add up to zero")
    signed = [
        Lookup(0, rng.integers(0, 10, 60), np.arange(0, 61, 6), random_weights(rng, 60, signed=True), combiner)
        for combiner in reference.COMBINERS
    ]
    yield Call((one,), tuple(signed), name="signed weights")
    long = tuple(
        Lookup(0, rng.integers(0, 300, 3000), np.array([0, 0, 2900, 3000]), w, c)
        for c, w in zip(reference.COMBINERS, (None, random_weights(rng, 3000), None), strict=True)
    )
    yield Call((Table(300, 12),), long, name="long bags")
    yield Call((Table(1, 6), Table(1, 5, 2)), (_lookup(0, [[0], [0, 0], []]), _lookup(1, [[0, 0, 0]])), name="one row")
    tables = (Table(100, 16), Table(64, 16, 0), Table(33, 7, 3), Table(5, 32))
    items = [random_lookup(rng, t, tables[t].num_rows, 40, 4, combiner="mean", skew=3.0) for t in (0, 1, 2, 3, 0, 2)]
    yield Call(tables, tuple(items), name="distributed and localized")


CASES = tuple(_cases())
"""The named calls. In pytest: @pytest.mark.parametrize("call", cases.CASES, ids=lambda call: call.name)."""


# --- Hypothesis strategies ------------------------------------------------------------------------------------------


def dimensions(most=2048):
    """Row widths: mostly around the widths of vector registers, any other now and then."""
    return st.sampled_from([d for d in DIMENSIONS if d <= most]) | st.integers(1, most)


@st.composite
def lookups(
    draw, table, num_rows, num_bags=None, dtypes=KEY_DTYPES, combiners=reference.COMBINERS, weighted=None, bagless=False
):
    """A Lookup of `table`. num_bags None: drawn. weighted None: drawn. bagless: row_splits may be None."""
    dtype = draw(st.sampled_from(dtypes))
    if bagless and num_bags is None and draw(st.booleans()):
        keys = draw(st.lists(st.integers(0, num_rows - 1), max_size=20))
        weights = None
        if draw(st.booleans()) if weighted is None else weighted:
            rng = np.random.default_rng(draw(st.integers(0, 2**16)))
            weights = random_weights(rng, len(keys), signed=draw(st.booleans()))
        return Lookup(table, np.array(keys, dtype), None, weights, draw(st.sampled_from(combiners)))
    if num_bags is None:
        num_bags = draw(st.integers(0, 9))
    longest = draw(st.sampled_from([1, 4, 30]))
    lengths = draw(st.lists(st.integers(0, longest), min_size=num_bags, max_size=num_bags))
    n = sum(lengths)
    # Few distinct keys make duplicates; Hypothesis draws the first dozen, the rest follow from a seed.
    distinct = draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=12))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    keys = np.array(distinct, dtype)[rng.integers(0, len(distinct), n)] if n else np.zeros(0, dtype)
    weights = None
    if draw(st.booleans()) if weighted is None else weighted:
        weights = random_weights(rng, n, signed=draw(st.booleans()))
    splits = np.r_[0, np.cumsum(lengths)].astype(np.int64)
    return Lookup(table, keys, splits, weights, draw(st.sampled_from(combiners)))


@st.composite
def calls(draw, /, max_tables=30, max_dimension=2048, same_batch=False, **options):
    """A Call of 1 to max_tables tables, some of them looked up several times or not at all.

    same_batch: all lookups have one number of bags. options: as of `lookups`.
    """
    num_tables = draw(st.integers(1, max_tables) if draw(st.booleans()) else st.integers(1, min(3, max_tables)))
    widest = min(max_dimension, 2048 if num_tables <= 3 else 64)
    tables = []
    for _ in range(num_tables):
        num_rows = draw(st.integers(1, 40))
        owner = draw(st.just(-1) | st.integers(0, 3))
        tables.append(Table(num_rows, draw(dimensions(widest)), owner))
    used = draw(st.lists(st.integers(0, num_tables - 1), min_size=1, max_size=max(3, num_tables)))
    num_bags = draw(st.integers(0, 9)) if same_batch else None
    items = [draw(lookups(t, tables[t].num_rows, num_bags, **options)) for t in used]
    return Call(tuple(tables), tuple(items), draw(st.integers(0, 2**16)))


FLAGS = {
    "momentum": ("nesterov", "learning_rate_in_momentum"),
    "adagrad": ("epsilon_inside",),
    "rowwise_adagrad": ("epsilon_inside",),
    "adamax": ("epsilon_inside",),
    "rmsprop": ("epsilon_inside", "centered", "learning_rate_in_momentum"),
}
"""The flags that an optimizer kind reads, besides decoupled_weight_decay, which each does."""


@st.composite
def optimizers(draw, kinds=reference.KINDS):
    """A reference.Optimizer of any kind with any of the flags that it reads."""
    kind = draw(st.sampled_from(kinds))
    rates = st.floats(1e-3, 0.2)
    flags = {flag: draw(st.booleans()) for flag in (*FLAGS.get(kind, ()), "decoupled_weight_decay")}
    return reference.Optimizer(
        kind,
        learning_rate=draw(rates),
        learning_rate_of_decay=draw(rates),
        weight_decay=draw(st.sampled_from([0.0, 0.0, 0.01])),
        momentum=draw(st.sampled_from([0.5, 0.9] if kind == "momentum" else [0.0, 0.5, 0.9])),
        beta1=draw(st.sampled_from([0.5, 0.9])),
        beta2=draw(st.sampled_from([0.9, 0.999])),
        rho=draw(st.sampled_from([0.8, 0.95])),
        epsilon=draw(st.sampled_from([1e-7, 1e-3])),
        l1=draw(st.sampled_from([0.0, 0.01])),
        l2=draw(st.sampled_from([0.0, 0.01])),
        l2_shrinkage=draw(st.sampled_from([0.0, 0.01])),
        beta=draw(st.sampled_from([0.0, 0.1])),
        learning_rate_power=draw(st.sampled_from([-0.5, -0.3])),
        **flags,
    )


_VARIANTS: dict[str, list[dict[str, Any]]] = {
    "sgd": [{}, {"weight_decay": 0.01}],
    "momentum": [
        {"momentum": 0.9, "nesterov": nesterov, "learning_rate_in_momentum": keras, "learning_rate": 0.02}
        for nesterov in (False, True)
        for keras in (False, True)
    ],
    "adagrad": [{"epsilon_inside": inside} for inside in (False, True)],
    "rowwise_adagrad": [{"epsilon_inside": inside} for inside in (False, True)],
    "adam": [{"learning_rate": 0.01}, {"learning_rate": 0.01, "weight_decay": 0.02}],
    "adamax": [{"epsilon_inside": inside, "learning_rate": 0.01} for inside in (False, True)],
    "adadelta": [{"rho": 0.95}],
    "rmsprop": [
        {
            "epsilon_inside": inside,
            "centered": centered,
            "momentum": momentum,
            "learning_rate_in_momentum": keras,
            "learning_rate": 0.005,
            "epsilon": 1e-5,
        }
        for inside in (False, True)
        for centered in (False, True)
        for momentum, keras in ((0.0, False), (0.9, False), (0.9, True))
    ],
    "ftrl": [
        {},
        {"l1": 0.02, "l2": 0.01, "beta": 0.1},
        {"l2_shrinkage": 0.01, "learning_rate_power": -0.3, "l1": 0.01},
        {"learning_rate_power": 0.0, "l2": 0.1},
    ],
}

OPTIMIZERS = tuple(
    reference.Optimizer(kind, **flags)
    for kind, variants in _VARIANTS.items()
    for flags in [
        *variants,
        {**variants[0], "weight_decay": 0.05, "learning_rate_of_decay": 0.1, "decoupled_weight_decay": True},
    ]
)
"""Every optimizer kind with each combination of the flags that it reads."""
