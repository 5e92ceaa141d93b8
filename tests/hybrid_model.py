# SPDX-License-Identifier: Apache-2.0
"""What the hybrid-parallel layers are compared with: bags of ids and a model of one process, in NumPy."""

import numpy as np

TABLES = [(20, 4), (7, 4), (30, 6), (11, 5), (16, 4), (9, 8)]


def random_ids(rng, kind, rows, batch):
    """A list of bags, and whether they are all of one length."""
    if kind == "single":
        return [rng.integers(0, rows, 1).tolist() for _ in range(batch)]
    if kind == "dense":
        return [rng.integers(0, rows, 3).tolist() for _ in range(batch)]
    lengths = rng.integers(0, 4, batch)
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


def random_plan(seed, num_ranks):
    """(tables, table of each input, options of the layer) at random."""
    rng = np.random.default_rng([seed, num_ranks])
    number = int(rng.integers(2, 6))
    tables = [(int(rng.integers(4, 30)), int(rng.integers(3, 9))) for _ in range(number)]
    tables_of = [int(t) for t in rng.permutation([*range(number), *rng.integers(0, number, 2)])]
    options = {"strategy": str(rng.choice(["basic", "memory_balanced", "memory_optimized"]))}
    if rng.random() < 0.5:
        options["data_parallel_threshold"] = 40
    if rng.random() < 0.5:
        options["row_slice_threshold"] = 120
    options["column_slice_threshold"] = None if rng.random() < 0.5 else int(rng.integers(10, 60))
    if options["column_slice_threshold"] and number < 2 * num_ranks:
        options["column_slice_threshold"] = 8
    combiners = [str(rng.choice(["sum", "mean"])) for _ in tables]
    return tables, combiners, [str(rng.choice(KINDS)) for _ in tables_of], tables_of, options


ALL_KINDS = {
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
    """Random ids and upstream gradients of a global batch, this rank's share of them, and what comes out."""

    def __init__(self, tables, combiners, kinds, tables_of, rank, num_ranks, equal=True):
        rng = np.random.default_rng(len(tables) + 7 * len(kinds))
        batch = 12 if equal else 11
        self.tables, self.combiners, self.tables_of, self.num_ranks = tables, combiners, tables_of, num_ranks
        self.start = [rng.normal(size=shape).astype(np.float32) for shape in tables]
        self.bags = [random_ids(rng, kind, tables[t][0], batch) for kind, t in zip(kinds, tables_of, strict=True)]
        self.upstream = [rng.normal(size=(batch, tables[t][1])) for t in tables_of]
        self.share = slice(*shares(batch, num_ranks, equal)[rank])

    def check_outputs(self, outputs):
        """Of this rank's share."""
        for i, (t, output) in enumerate(zip(self.tables_of, outputs, strict=True)):
            wanted = pooled(self.start[t], self.bags[i][self.share], self.combiners[t])
            np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-6, err_msg=f"output {i}")

    def check_tables(self, tables, rate):
        """After a step of SGD of the mean of the ranks' losses."""
        wanted = [table.astype(np.float64) for table in self.start]
        for i, t in enumerate(self.tables_of):
            gradient = np.zeros(self.tables[t])
            add_gradient(gradient, self.bags[i], self.upstream[i], self.combiners[t])
            wanted[t] -= rate * gradient / self.num_ranks
        for t, (got, expected) in enumerate(zip(tables, wanted, strict=True)):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6, err_msg=f"table {t}")
