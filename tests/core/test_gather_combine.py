# SPDX-License-Identifier: Apache-2.0
"""gather_combine against the reference."""

import cases
import harness
import numpy as np
import pytest
import reference
import table_kinds
from hypothesis import given

from sparse_operation_kit import core


def check(call, kind, context=None):
    tables = harness.tables(call, kind=kind)
    outputs = core.gather_combine(tables, table_kinds.located(tables, harness.lookups(call)), context=context)
    for i, output in enumerate(outputs):
        assert output.dtype == np.float32
        reference.assert_close(output, call.output(i), magnitude=call.output(i, absolute=True), message=f"lookup {i}")
        empty = reference.scales(*[getattr(call.lookups[i], x) for x in ("keys", "row_splits", "weights", "combiner")])
        for bag, (begin, end) in enumerate(zip(call.lookups[i].splits[:-1], call.lookups[i].splits[1:], strict=True)):
            if not empty[begin:end].any():
                assert not output[bag].any(), f"lookup {i}, bag {bag} must be zeros"


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
@pytest.mark.parametrize("call", [harness.LARGE, cases.CASES[0]], ids=lambda call: call.name)
def test_workers_do_not_change_a_bit(call, pools):
    alone = core.gather_combine(harness.tables(call), harness.lookups(call))
    for context in pools:
        for _ in range(3):
            outputs = core.gather_combine(harness.tables(call), harness.lookups(call), context=context)
            assert harness.same_bytes(outputs, alone)


@pytest.mark.every_isa
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("num_keys", [17, 1000, 100_003])
def test_long_bags_are_as_exact_as_short_ones(combiner, num_keys):
    """Rounding errors of equal terms do not cancel: added up one by one, 100,000 would lose three digits."""
    table = core.Table(np.full((3, 37), 0.073, np.float32))
    weights = np.full(num_keys, 0.31, np.float32)
    for given_weights in (None, weights):
        lookup = core.Lookup(
            np.arange(num_keys) % 3,
            row_splits=np.array([0, num_keys]),
            weights=given_weights,
            combiner=combiner,
        )
        each, row = np.float64(1.0 if given_weights is None else weights[0]), np.float64(table.weight[0, 0])
        divisor = {"sum": 1.0, "mean": num_keys * each, "sqrtn": np.sqrt(num_keys * each**2)}[combiner]
        (output,) = core.gather_combine([table], [lookup])
        reference.assert_close(output, np.full((1, 37), num_keys * each * row / divisor))


@pytest.mark.every_isa
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 31, 32, 500, 999])
def test_what_is_not_finite_stays_in_a_long_bag(value, place):
    weight = np.ones((2, 6), np.float32)
    weight[1, 2:4] = value
    keys = np.zeros(1000, np.int64)
    keys[place] = 1
    (output,) = core.gather_combine([core.Table(weight)], [core.Lookup(keys, row_splits=[0, 1000])])
    assert np.array_equal(output, [[1000, 1000, value, value, 1000, 1000]], equal_nan=True)


def test_a_bag_does_not_depend_on_its_neighbours():
    call = harness.LARGE
    whole = core.gather_combine(harness.tables(call), harness.lookups(call))
    parts, cuts = call.split(3)
    for rank, part in enumerate(parts):
        outputs = core.gather_combine(harness.tables(part), harness.lookups(part))
        for i, cut in enumerate(cuts):
            assert harness.same_bytes(outputs[i], whole[i][cut[rank] : cut[rank + 1]])


def test_rows_that_are_not_read_may_hold_anything():
    weight = np.full((4, 5), np.nan, np.float32)
    weight[2] = 1
    lookup = core.Lookup([2, 2], row_splits=[0, 0, 2, 2], combiner="mean")
    (output,) = core.gather_combine([core.Table(weight)], [lookup])
    assert np.array_equal(output, [[0] * 5, [1] * 5, [0] * 5])


def test_localized_table_whole_on_one_rank():
    weight = np.arange(6, dtype=np.float32).reshape(3, 2)
    (output,) = core.gather_combine([core.Table(weight, owner=0)], [core.Lookup([2, 0])])
    assert np.array_equal(output, weight[[2, 0]])


def test_no_lookups():
    assert core.gather_combine([core.Table(np.zeros((1, 1), np.float32))], []) == []
    assert core.gather_combine([], []) == []


@pytest.mark.parametrize("dtype", cases.KEY_DTYPES)
@pytest.mark.parametrize("key", [-1, 10, 2**31 - 1, -(2**31)])
def test_key_out_of_range(dtype, key, pools):
    weight = np.ones((10, 3), np.float32)
    good = core.Lookup(np.array([0, 9], dtype))
    bad = core.Lookup(np.array([1, key, 2], dtype), table=1, row_splits=[0, 1, 3])
    tables = [core.Table(weight, name="good"), core.Table(weight.copy(), name="user_id")]
    for context in [None, *pools]:
        with pytest.raises(IndexError) as error:
            core.gather_combine(tables, [good, bad], context=context)
        message = str(error.value)
        assert "user_id" in message
        assert str(key) in message
        assert "[0, 10)" in message


def test_the_first_bad_key_is_named_whatever_the_workers(pools):
    rng = np.random.default_rng(5)
    keys = rng.integers(0, 100, 50_000)
    keys[[12_345, 31_000, 49_999]] = 1001, 1002, 1003
    table = core.Table(np.ones((100, 8), np.float32))
    lookups = [core.Lookup(keys, row_splits=np.arange(0, 50_001, 10))]
    for context in [None, *pools]:
        with pytest.raises(IndexError, match="1001"):
            core.gather_combine([table], lookups, context=context)


@pytest.mark.parametrize("key", [2**31, -(2**31) - 1, 2**62, -(2**63), 2**63 - 1])
def test_key_beyond_int32(key):
    with pytest.raises(IndexError, match=str(key)):
        core.gather_combine([core.Table(np.ones((10, 3), np.float32))], [core.Lookup(np.array([key], np.int64))])
