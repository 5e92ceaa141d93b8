# SPDX-License-Identifier: Apache-2.0
"""What the hybrid-parallel layers are compared with: bags of ids and a model of one process, in NumPy."""

from typing import Any

import numpy as np

DENSE = {"single": 1, "column": 1, "dense": 3}
"""Kinds of dense inputs: [b], [b, 1] and [b, 3]."""

TABLES = [(20, 4), (7, 4), (30, 6), (11, 5), (16, 4), (9, 8)]


def random_ids(rng, kind, rows, batch):
    """A list of bags."""
    if kind in DENSE:
        return [rng.integers(0, rows, DENSE[kind]).tolist() for _ in range(batch)]
    lengths = rng.integers(0, 4, batch)
    if not batch:
        return []
    lengths[-1] = batch - lengths[:-1].sum() if lengths[:-1].sum() < batch else 0  # as many ids as rows, if it can be
    return [rng.integers(0, rows, n).tolist() for n in lengths]


def pooled(table, bags, combiner):
    result = np.zeros((len(bags), table.shape[1]))
    for i, bag in enumerate(bags):
        if bag:
            result[i] = table[bag].sum(0) / (len(bag) if combiner == "mean" else 1)
    return result


def add_gradient(gradient, bags, upstream, combiner):
    for bag, row in zip(bags, upstream, strict=True):
        for i in bag:
            gradient[i] += row / (len(bag) if combiner == "mean" else 1)


def shares(batch, num_ranks, equal):
    """The samples of each rank: [first, end)."""
    if equal:
        cuts = np.linspace(0, batch, num_ranks + 1).astype(int)
    else:  # the first rank has none
        cuts = np.array([0, *np.linspace(0, batch, num_ranks).astype(int)]) if num_ranks > 1 else np.array([0, batch])
    return list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))


KINDS = ("ragged", "single", "dense", "sparse")


ALL_KINDS: dict[str, Any] = {
    "combiners": ["sum", "mean"] * 3,
    "kinds": [KINDS[i % 4] for i in range(6)] + [KINDS[(i + 2) % 4] for i in range(6)],
    "tables_of": [0, 1, 2, 3, 4, 5, 2, 3, 0, 1, 5, 4],
    "strategy": "memory_balanced",
    "data_parallel_threshold": 28,
    "row_slice_threshold": 180,
    "column_slice_threshold": 40,
}
"""Replicated, whole, column- and row-sliced tables in one layer, each with every kind of input, some shared."""

PLANNED = {
    0: {"choices": ["columns"]},
    1: {"choices": ["replicated"]},
    2: {"choices": ["rows"]},
    3: {"choices": ["whole"]},
    4: {"choices": ["rows"], "on_host": True},
    5: {"choices": ["columns"], "on_host": True},
}
"""Constraints of TABLES, by which a plan has everything that there is."""


def check_report(layer, num_ranks, **options):
    """What a layer of TABLES says of itself: all of its bytes, beside as many that were measured."""
    report = layer.report(**options)
    replicated = sum(TABLES[t][0] * TABLES[t][1] for t in layer.strategy.table_groups[0])
    elements = sum(rows * width for rows, width in TABLES) + (num_ranks - 1) * replicated
    measured = sum(report.measured["device_bytes"]) + sum(report.measured["host_bytes"])
    assert measured == 4 * elements
    estimated = sum(report.costs.device_bytes["weights"]) + sum(report.costs.host_bytes["weights"])
    np.testing.assert_allclose(estimated, measured)
    assert ("lookup" in report.measured) == ("inputs" in options) == ("lookup" in str(report).split(" measured")[1])
    return report


class Case:
    """Random ids and upstream gradients of a global batch, this rank's share of them, and what comes out.

    Elements are small multiples of 1/8, so that sums are exact. `upstream` is that of the sum of the ranks' losses.
    """

    def __init__(self, tables, combiners, kinds, tables_of, rank, num_ranks, equal=True, batch=None):
        rng = np.random.default_rng(len(tables) + 7 * len(kinds))
        if batch is None:
            batch = 12 if equal else 11
        self.tables, self.combiners, self.tables_of, self.num_ranks = tables, combiners, tables_of, num_ranks
        self.start = [_eighths(rng, shape).astype(np.float32) for shape in tables]
        self.bags = [random_ids(rng, kind, tables[t][0], batch) for kind, t in zip(kinds, tables_of, strict=True)]
        inner = [
            (3,) if kind == "dense" and combiners[t] is None else () for kind, t in zip(kinds, tables_of, strict=True)
        ]
        self.upstream = [_eighths(rng, (batch, *n, tables[t][1])) for n, t in zip(inner, tables_of, strict=True)]
        self.share = slice(*shares(batch, num_ranks, equal)[rank])

    def check_outputs(self, outputs):
        """Of this rank's share."""
        for i, (t, output) in enumerate(zip(self.tables_of, outputs, strict=True)):
            wanted = pooled(self.start[t], self._flat(i, self.share), self.combiners[t])
            output = np.reshape(output, wanted.shape)
            np.testing.assert_allclose(output, wanted, rtol=1e-6, atol=1e-6, err_msg=f"output {i}")

    def check_tables(self, tables, rate, adagrad=False):
        """After a step of SGD of the mean of the ranks' losses, or of Adagrad whose sums of squares start at 0.1."""
        for t, (got, gradient) in enumerate(zip(tables, self._gradients(), strict=True)):
            wanted = self.start[t] - rate * gradient / (np.sqrt(0.1 + gradient**2) if adagrad else 1)
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6, err_msg=f"table {t}")

    def check_norm(self, norm):
        """Of the gradients of all tables, each element once, however the tables lie."""
        wanted = np.sqrt(sum(np.square(gradient).sum() for gradient in self._gradients()))
        np.testing.assert_allclose(norm, wanted, rtol=1e-6)

    def _gradients(self):
        """Of whole tables, of the mean of the ranks' losses."""
        gradients = [np.zeros(shape) for shape in self.tables]
        for i, t in enumerate(self.tables_of):
            upstream = self.upstream[i].reshape(-1, self.tables[t][1]) / self.num_ranks
            add_gradient(gradients[t], self._flat(i, slice(None)), upstream, self.combiners[t])
        return gradients

    def _flat(self, i, share):
        """The bags of samples of an input; without a combiner one of each id."""
        bags = self.bags[i][share]
        return bags if self.combiners[self.tables_of[i]] else [[key] for bag in bags for key in bag]


def _eighths(rng, shape):
    return rng.integers(-16, 17, shape) / 8
