# SPDX-License-Identifier: Apache-2.0
"""The stages between the exchanges, one process standing for all: what they do with each kind of message and refuse."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_harness import finished

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow._ops import ops

ROWS = {"first": (10, 2), "second": (6, 3)}
TABLES = {
    "table_names": list(ROWS),
    "num_rows": [rows for rows, _ in ROWS.values()],
    "dimensions": [dimension for _, dimension in ROWS.values()],
    "owners": [-1, 0],
    "num_ranks": 1,
    "rank": 0,
}
LOOKUPS = {"lookup_tables": [0, 1, 0, 1], "combiners": [0, 1, 2, 0], "weighted": [False, False, True, False]}
NO_SPLITS = tf.constant([], tf.int64)


def variables():
    return [
        sok.Variable(np.arange(rows * width, dtype=np.float32).reshape(rows, width), name=name)
        for name, (rows, width) in ROWS.items()
    ]


def batch():
    """Two lookups that can be pooled at the owner, one with weights, and one without bags."""
    keys = [[1, 9, 1, 4], [5, 0, 0], [3, 3, 2], [2, 5]]
    splits = [[0, 3, 3, 4], [0, 1, 3], [0, 1, 3]]
    return {
        "keys": [tf.constant(k, tf.int64 if i % 2 else tf.int32) for i, k in enumerate(keys)],
        "row_splits": [*(tf.constant(s, tf.int64) for s in splits), NO_SPLITS],
        "weights": [tf.constant([2.0, 1.0, 0.5])],
        **LOOKUPS,
    }


def looked_up(changes=None):
    """Through the stages of several ranks -> (outputs, everything that the ops take, by stage)."""
    handles, lookups = [table.handle for table in variables()], batch()
    routed = ops.sok_route(**lookups, batch_messages=[], table=handles[0], num_tables=2, **TABLES)
    arguments = {
        "sizes": {
            **{name: getattr(routed, name) for name in ("message", "unique_keys", "bag_keys", "bag_splits")},
            "sent": routed.counts,
            "received": routed.counts,
            "dimensions": TABLES["dimensions"],
            "lookup_tables": LOOKUPS["lookup_tables"],
            "rank": 0,
        }
    }

    def run(stage, op, **given):
        arguments[stage] = {**given, **arguments.get(stage, {}), **(changes or {}).get(stage, {})}
        return op(**arguments[stage])

    sizes = run("sizes", ops.sok_exchange_sizes)
    common = {"counts": arguments["sizes"]["received"], "lookup_tables": LOOKUPS["lookup_tables"], **TABLES}
    located = run("locate", ops.sok_locate, keys=sizes.keys, indexed_tables=[], num_tables=2, **common)
    rows = run(
        "gather",
        ops.sok_gather,
        tables=handles,
        slots=located.slots,
        bag_splits=located.bag_splits,
        generations=[],
        **common,
    )
    outputs = run(
        "combine",
        ops.sok_combine,
        rows=rows,
        requests=routed.counts,
        num_tables=2,
        num_outputs=4,
        **{name: getattr(routed, name) for name in ("inverse", "order", "unique_splits")},
        **lookups,
        **TABLES,
    )
    return outputs, arguments


@pytest.mark.parametrize("pooling", ["owner", "requester"])
def test_as_in_one_pass(monkeypatch, pooling):
    monkeypatch.setenv("SOK_POOLING", pooling)
    outputs, arguments = looked_up()
    splits = arguments["sizes"]["sent"].numpy()[0, 6:10].tolist()
    assert splits == ([4, 3, 0, 0] if pooling == "owner" else [0] * 4)
    handles = [table.handle for table in variables()]
    one_pass = ops.sok_gather_combine(tables=handles, generations=[], num_outputs=4, **batch(), **TABLES)
    for output, expected in zip(outputs, one_pass, strict=True):
        np.testing.assert_allclose(output, expected, rtol=1e-6)


def test_pooling_is_checked_where_all_ranks_fail(monkeypatch):
    monkeypatch.setenv("SOK_POOLING", "sometimes")
    with pytest.raises(tf.errors.InvalidArgumentError, match="SOK_POOLING is 'sometimes'"):
        finished(looked_up)


def numbers(values):
    return tf.constant(values, tf.int64)


# Two tables, four lookups: unique keys (2), keys of bags (4), row splits (4).
COUNTS = [2, 2, 4, 3, 0, 0, 4, 3, 0, 0]


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        ("sizes", {"bag_splits": numbers([0] * 6)}, "bag_splits has 6 elements, must have 7"),
        ("sizes", {"bag_keys": numbers([0])}, "bag_keys has 1 elements, must have 4"),
        ("sizes", {"unique_keys": numbers([0])}, "keys has 1 elements, must have 2"),
        ("sizes", {"received": numbers([[*COUNTS[:-1], -1, 0]])}, r"in \[0, 2\^31\), not -1"),
        ("sizes", {"received": numbers([[2**31, *COUNTS[1:], 0]])}, r"in \[0, 2\^31\), not 2147483648"),
        ("sizes", {"received": numbers([[*COUNTS[:4], 1, *COUNTS[5:], 0]])}, "lookup 2 has 1 keys, but no row splits"),
        ("sizes", {"received": numbers([[*COUNTS, 1]])}, "rank 0 could not"),
        ("locate", {"keys": numbers([0] * 17)}, "cannot be"),
        ("locate", {"counts": numbers([COUNTS])}, r"\[num_ranks, 11\]"),
        ("locate", {"keys": numbers([10, *[0] * 17])}, "first"),
        ("locate", {"keys": numbers([*[0] * 9, 6, *[0] * 8])}, "second"),
        ("gather", {"slots": numbers([0] * 17)}, "slots"),
        ("gather", {"slots": numbers([*[0] * 10, 6, *[0] * 7])}, "second"),
        ("gather", {"bag_splits": numbers([*[0] * 11, 0, 4, 3, 4, 0, 1, 3])}, "row_splits"),
        ("gather", {"bag_splits": numbers([0] * 17)}, "keys"),
        ("combine", {"rows": tf.zeros(3)}, "floats"),
        ("combine", {"requests": numbers([COUNTS])}, r"\[num_ranks, 11\]"),
        ("combine", {"requests": numbers([[*COUNTS[:6], 3, *COUNTS[7:], 0]])}, "2 bags of lookup 0, which has 3"),
    ],
)
def test_what_does_not_fit(monkeypatch, stage, changes, message):
    monkeypatch.setenv("SOK_POOLING", "owner")
    _, arguments = looked_up()
    assert arguments["sizes"]["sent"].numpy().tolist() == [[*COUNTS, 0]]
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        finished(lambda: looked_up({stage: changes}))
