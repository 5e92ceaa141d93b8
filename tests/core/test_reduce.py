# SPDX-License-Identifier: Apache-2.0
"""reduce: distinct slots, ascending, with their summed gradients."""

import cases
import harness
import numpy as np
import pytest
import reference
import table_kinds
from hypothesis import given

from sparse_operation_kit import core


def check(call, kind, context=None):
    for t, table in enumerate(harness.tables(call, kind=kind)):
        with harness.unchanged(table.weight):
            slots, values = core.reduce(table, harness.parts(call, t, table), context=context)
        assert slots.dtype == np.int64
        assert (np.diff(slots) > 0).all()
        slots, values = table_kinds.as_static(table, slots, values)
        assert np.array_equal(slots, call.touched(t))
        size = call.row_gradient(t, absolute=True)[slots]
        reference.assert_close(values, call.row_gradient(t)[slots], magnitude=size, message=f"table {t}")


@pytest.mark.every_isa
@pytest.mark.parametrize("call", [*cases.CASES, harness.LARGE], ids=lambda call: call.name)
@pytest.mark.parametrize("kind", table_kinds.KINDS)
def test_cases(call, kind):
    check(call, kind)


@pytest.mark.parametrize("kind", table_kinds.KINDS)
@given(call=cases.calls(bagless=True))
def test_any_call(call, kind):
    check(call, kind)


@pytest.mark.every_isa
def test_workers_do_not_change_a_bit(pools):
    for t, table in enumerate(harness.tables(harness.LARGE)):
        alone = core.reduce(table, harness.parts(harness.LARGE, t))
        for context in pools:
            assert harness.same_bytes(core.reduce(table, harness.parts(harness.LARGE, t), context=context), alone)


@pytest.mark.every_isa
@pytest.mark.parametrize("count", [17, 44, 1000, 100_003])
def test_hot_rows_are_as_exact_as_others(count):
    """Rounding errors of equal terms do not cancel: added up one by one, 100,000 would lose three digits."""
    values = np.full((count, 37), 0.073, np.float32)
    _, (total,) = core.reduce(core.Table(np.zeros((2, 37), np.float32)), [core.Gradient(np.ones(count, int), values)])
    reference.assert_close(total, np.full(37, count * np.float64(values[0, 0])))


@pytest.mark.every_isa
def test_reduce_then_apply_is_apply():
    """The materialised gradient gives the very bits of the unmaterialised one."""
    call = harness.LARGE
    sgd = core.Optimizer("sgd", learning_rate=0.3)
    for t, (one, two) in enumerate(zip(harness.tables(call), harness.tables(call), strict=True)):
        core.apply([core.Update(one, sgd, harness.parts(call, t))])
        slots, values = core.reduce(two, harness.parts(call, t))
        core.apply([core.Update(two, sgd, [core.Gradient(slots, values, unique=True)])])
        reference.assert_close(one.weight, two.weight, 1e-7)


def test_unique_parts_that_share_slots():
    a = core.Gradient([5, 1, 3], np.ones((3, 2), np.float32), unique=True)
    b = core.Gradient(np.array([3, 0], np.int32), np.full((2, 2), 2, np.float32), unique=True)
    table = core.Table(np.zeros((6, 2), np.float32))
    slots, values = core.reduce(table, [a, b])
    assert slots.tolist() == [0, 1, 3, 5]
    assert values[:, 0].tolist() == [2, 1, 3, 1]
    slots, values = core.reduce(table, [a])
    assert slots.tolist() == [1, 3, 5]


def test_nothing():
    slots, values = core.reduce(core.Table(np.zeros((6, 2), np.float32)), [])
    assert slots.shape == (0,)
    assert values.shape == (0, 2)


@pytest.mark.parametrize("slot", [-1, 6, 2**33])
@pytest.mark.parametrize("unique", [False, True])
def test_slot_out_of_range(slot, unique):
    part = core.Gradient(np.array([1, slot]), np.ones((2, 2), np.float32), unique=unique)
    with pytest.raises(IndexError, match=str(slot)):
        core.reduce(core.Table(np.zeros((6, 2), np.float32), name="t"), [part])


def test_gradient_that_does_not_fit():
    table = core.Table(np.zeros((6, 2), np.float32), name="small")
    with pytest.raises(ValueError, match=r"small.*values"):
        core.reduce(table, [core.Gradient([1], np.ones((1, 3), np.float32))])
    with pytest.raises(ValueError, match=r"small.*row_splits"):
        core.reduce(table, [core.Gradient([1], np.ones((2, 2), np.float32), row_splits=[0, 2, 1])])
