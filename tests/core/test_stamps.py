# SPDX-License-Identifier: Apache-2.0
"""Change stamps: apply sets them for the rows that the gradients name, and for no others."""

import cases
import harness
import numpy as np
import pytest
import table_kinds

from sparse_operation_kit import core

OLD, NOW = -7, 1_700_000_000_000_000_123


def updates_of(call, tables, stamped, stamp=NOW):
    """SGD updates of a call; `stamped`: table -> its stamps."""
    sgd = core.Optimizer("sgd", learning_rate=0.5)
    return [
        core.Update(table, sgd, harness.parts(call, t, table), stamps=stamped.get(t), stamp=stamp)
        for t, table in enumerate(tables)
    ]


@pytest.mark.every_isa
@pytest.mark.parametrize("call", [*cases.CASES, harness.LARGE], ids=lambda call: call.name)
@pytest.mark.parametrize("kind", table_kinds.KINDS)
def test_named_rows_are_stamped(call, kind):
    """Of every second table; the rows themselves become what they become without stamps."""
    plain, tables = harness.tables(call, kind=kind), harness.tables(call, kind=kind)
    stamps = {t: np.full(len(table.weight), OLD, np.int64) for t, table in enumerate(tables) if t % 2 == 0}
    core.apply(updates_of(call, plain, {}))
    core.apply(updates_of(call, tables, stamps))
    for t, table in enumerate(tables):
        assert harness.same_bytes(table.weight, plain[t].weight)
        if t in stamps:
            named = [np.asarray(lookup.keys) for lookup in call.lookups if lookup.table == t]
            expected = np.full(len(table.weight), OLD)
            keys = np.concatenate([*named, np.zeros(0, np.int64)]).astype(np.int64)
            expected[table_kinds.places_of(table)[keys]] = NOW
            np.testing.assert_array_equal(stamps[t], expected)


@pytest.mark.parametrize("settings", cases.OPTIMIZERS, ids=lambda settings: settings.kind)
def test_every_optimizer(settings):
    weight = np.ones((9, 5), np.float32)
    states = [s.astype(np.float32) for s in settings.initial_states(9, 5)]
    stamps = np.full(9, OLD, np.int64)
    slots = np.array([3, 0, 3, 7], np.int32)
    gradient = core.Gradient(slots, np.ones((4, 5), np.float32))
    optimizer = harness.optimizer(settings)
    core.apply([core.Update(core.Table(weight), optimizer, [gradient], states, stamps=stamps, stamp=NOW)])
    assert stamps.tolist() == [NOW, OLD, OLD, NOW, OLD, OLD, OLD, NOW, OLD]


def test_unique_slots_and_a_table_without_gradients():
    tables = [core.Table(np.ones((50, 3), np.float32), name=f"t{t}") for t in range(2)]
    stamps = [np.full(50, OLD, np.int64) for _ in tables]
    sgd = core.Optimizer("sgd", learning_rate=1.0)
    unique = core.Gradient(np.arange(49, -1, -7), np.ones((8, 3), np.float32), unique=True)
    core.apply(
        [
            core.Update(tables[0], sgd, [unique], stamps=stamps[0], stamp=NOW),
            core.Update(tables[1], sgd, [], stamps=stamps[1], stamp=NOW),
        ]
    )
    assert np.flatnonzero(stamps[0] == NOW).tolist() == list(range(0, 50, 7))
    assert (stamps[1] == OLD).all()


def test_a_bad_slot_stamps_nothing():
    table = core.Table(np.ones((5, 2), np.float32))
    stamps = np.full(5, OLD, np.int64)
    gradient = core.Gradient(np.array([1, 5]), np.ones((2, 2), np.float32))
    with harness.unchanged(table.weight, stamps), pytest.raises(IndexError, match="5"):
        core.apply([core.Update(table, core.Optimizer("sgd", learning_rate=1.0), [gradient], stamps=stamps, stamp=NOW)])


@pytest.mark.parametrize(
    ("stamps", "message"),
    [
        (np.zeros(4, np.int64), r"stamps has shape \[4\], must have \[5\]"),
        (np.zeros((5, 1), np.int64), "stamps has rank 2"),
        (np.zeros(5, np.int32), "stamps is int32, must be int64"),
    ],
)
def test_stamps_that_do_not_fit(stamps, message):
    table = core.Table(np.ones((5, 2), np.float32))
    gradient = core.Gradient(np.array([1]), np.ones((1, 2), np.float32))
    with harness.unchanged(table.weight, stamps), pytest.raises(ValueError, match=message):
        core.apply([core.Update(table, core.Optimizer("sgd", learning_rate=1.0), [gradient], stamps=stamps, stamp=NOW)])


def test_two_tables_cannot_share_stamps():
    tables = [core.Table(np.ones((5, 2), np.float32), name=name) for name in ("a", "b")]
    stamps = np.zeros(5, np.int64)
    with pytest.raises(ValueError, match="share memory"):
        core.apply(
            [core.Update(t, core.Optimizer("sgd", learning_rate=1.0), [], stamps=stamps, stamp=NOW) for t in tables]
        )
