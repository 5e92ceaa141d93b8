# SPDX-License-Identifier: Apache-2.0
"""weight_gradient, read straight from the tables, against the reference and against finite differences."""

import cases
import harness
import numpy as np
import pytest
import reference
import table_kinds
from hypothesis import given

from sparse_operation_kit import core


def check(call, context=None, kind=table_kinds.STATIC):
    incoming = [call.output_gradient(i) for i in range(len(call.lookups))]
    tables = harness.tables(call, kind=kind)
    lookups = table_kinds.located(tables, harness.lookups(call))
    gradients = core.weight_gradient(tables, lookups, incoming, context=context)
    for i, (lookup, gradient) in enumerate(zip(call.lookups, gradients, strict=True)):
        if lookup.weights is None:
            assert gradient is None
            continue
        size = call.weight_gradient(i, absolute=True)
        reference.assert_close(gradient, call.weight_gradient(i), magnitude=size, message=f"lookup {i}")
    return gradients


@pytest.mark.every_isa
@pytest.mark.parametrize("call", [*cases.CASES, harness.LARGE], ids=lambda call: call.name)
@pytest.mark.parametrize("kind", table_kinds.KINDS)
def test_cases(call, kind):
    check(call, kind=kind)


@pytest.mark.parametrize("kind", table_kinds.KINDS)
@given(call=cases.calls(weighted=True))
def test_any_call(call, kind):
    check(call, kind=kind)


@pytest.mark.every_isa
def test_workers_do_not_change_a_bit(pools):
    def weighted(gradients):
        return [gradient for gradient in gradients if gradient is not None]

    alone = weighted(check(harness.LARGE))
    assert alone
    for context in pools:
        assert harness.same_bytes(weighted(check(harness.LARGE, context)), alone)


@pytest.mark.parametrize("combiner", reference.COMBINERS)
def test_reference_is_the_derivative(combiner):
    """The formula that everything is measured against, checked by central differences."""
    rng = np.random.default_rng(0)
    table, keys, splits = rng.random((5, 3)), rng.integers(0, 5, 7), np.array([0, 3, 3, 7])
    weights, incoming = rng.uniform(0.5, 2, 7), rng.random((3, 3))
    expected = reference.weight_gradient(table, incoming, keys, splits, weights, combiner)
    for i in range(7):
        step = np.zeros(7)
        step[i] = 1e-5
        up = reference.pool(table, keys, splits, weights + step, combiner)
        down = reference.pool(table, keys, splits, weights - step, combiner)
        assert abs(np.sum((up - down) * incoming) / 2e-5 - expected[i]) < 1e-8


def test_absent_output_gradients_are_zeros():
    call = cases.CASES[0]
    nothing = core.weight_gradient(harness.tables(call), harness.lookups(call), [None] * len(call.lookups))
    assert all(gradient is None or not gradient.any() for gradient in nothing)


def test_key_out_of_range():
    table = core.Table(np.ones((4, 2), np.float32), name="prices")
    lookup = core.Lookup([0, 4], weights=np.ones(2, np.float32), row_splits=[0, 2])
    with pytest.raises(IndexError) as error:
        core.weight_gradient([table], [lookup], [np.ones((1, 2), np.float32)])
    assert "prices" in str(error.value)
    assert "4" in str(error.value)
