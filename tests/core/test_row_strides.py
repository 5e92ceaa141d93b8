# SPDX-License-Identifier: Apache-2.0
"""Pooled vectors and gradients that are columns of a wider array: the same numbers, and nothing else is touched."""

import dataclasses

import cases
import harness
import numpy as np
import pytest
import reference

from sparse_operation_kit import core

CALLS = [*cases.CASES, harness.LARGE]
UNTOUCHED = -7.25


def by_name(call):
    return call.name


def side_by_side(arrays, gap=0):
    """Views of the same numbers as columns of wider arrays, one for each number of rows; and those arrays."""
    wide, views = {}, []
    for rows in {len(array) for array in arrays}:
        width = sum(array.shape[1] + gap for array in arrays if len(array) == rows)
        wide[rows] = (np.full((rows, width), UNTOUCHED, np.float32), [0])
    for array in arrays:
        whole, place = wide[len(array)]
        views.append(whole[:, place[0] : place[0] + array.shape[1]])
        views[-1][...] = array
        place[0] += array.shape[1] + gap
    return views, [whole for whole, _ in wide.values()]


def check_gaps(views, wholes):
    """That a wide array holds UNTOUCHED wherever no view is."""
    for view in views:
        view[...] = UNTOUCHED
    assert all((whole == UNTOUCHED).all() for whole in wholes)


@pytest.mark.every_isa
@pytest.mark.parametrize("gap", [0, 1, 4])
@pytest.mark.parametrize("call", CALLS, ids=by_name)
def test_outputs_side_by_side(call, gap):
    tables, lookups = harness.tables(call), harness.lookups(call)
    expected = core.gather_combine(tables, lookups)
    views, wholes = side_by_side([np.full_like(array, 9) for array in expected], gap)
    assert core.gather_combine(tables, lookups, out=views) == views
    assert harness.same_bytes([np.ascontiguousarray(view) for view in views], expected)
    check_gaps(views, wholes)


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("call", CALLS, ids=by_name)
def test_outputs_of_several_ranks(call, gap):
    ranks, _, _ = harness.simulate(call, 3)
    harness.forward(ranks)
    for rank in ranks:
        views, wholes = side_by_side(rank.outputs, gap)
        core.combine(rank.tables, rank.lookups, rank.routing.inverse, rank.rows, out=views)
        assert harness.same_bytes([np.ascontiguousarray(view) for view in views], rank.outputs)
        check_gaps(views, wholes)


@pytest.mark.every_isa
@pytest.mark.parametrize("gap", [0, 1, 4])
@pytest.mark.parametrize("call", CALLS, ids=by_name)
def test_gradients_side_by_side(call, gap):
    """apply, reduce and weight_gradient."""
    dense = [call.output_gradient(i) for i in range(len(call.lookups))]
    views, _ = side_by_side(dense, gap)
    expected, tables = harness.tables(call), harness.tables(call)
    adagrad = harness.optimizer(reference.Optimizer("adagrad"))
    for gradients, stepped in ((dense, expected), (views, tables)):
        updates = []
        for t, table in enumerate(stepped):
            parts = [
                core.Gradient(x.keys, gradients[i], x.row_splits, x.weights, x.combiner)
                for i, x in enumerate(call.lookups)
                if x.table == t
            ]
            updates.append(core.Update(table, adagrad, parts, [np.full(table.shape, 0.1, np.float32)]))
        reduced = [core.reduce(update.table, update.gradients) for update in updates]
        core.apply(updates)
        if stepped is expected:
            first = reduced
    assert harness.same_bytes([t.weight for t in tables], [t.weight for t in expected])
    assert all(harness.same_bytes(a, b) for a, b in zip(reduced, first, strict=True))
    weights = [
        core.weight_gradient(harness.tables(call), harness.lookups(call), gradients) for gradients in (dense, views)
    ]
    for expected, given in zip(*weights, strict=True):
        assert (expected is None) == (given is None)
        if expected is not None:  # a sum over columns, whose order is that of the widest loads that the stride allows
            np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("call", CALLS, ids=by_name)
def test_gradients_of_several_ranks(call, gap):
    """spread, and the stages that pool at the owner."""
    ranks, gradients, _ = harness.simulate(call, 3)
    harness.forward(ranks)
    for rank, dense in zip(ranks, gradients, strict=True):
        views, _ = side_by_side(dense, gap)
        spread = [core.spread(rank.tables, rank.lookups, given, rank.routing) for given in (dense, views)]
        assert harness.same_bytes(*spread)
        lookups = [dataclasses.replace(x, weights=None) for x in rank.lookups]
        routing = core.route(rank.tables, lookups, pooled=[True] * len(lookups))
        sums = [core.spread(rank.tables, lookups, given, routing) for given in (dense, views)]
        assert harness.same_bytes(*sums)
        arguments = (rank.tables, lookups, routing.inverse, sums[0])
        messages = routing.messages(rank.tables)
        expected = core.combine(*arguments, messages=messages)
        views, wholes = side_by_side(expected, gap)
        core.combine(*arguments, messages=messages, out=views)
        assert harness.same_bytes([np.ascontiguousarray(view) for view in views], expected)
        check_gaps(views, wholes)
