# SPDX-License-Identifier: Apache-2.0
"""The whole flow over 1 to 4 ranks, simulated in one process, against the one-process path and the reference."""

import cases
import harness
import numpy as np
import pytest
import reference
import table_kinds
from hypothesis import given
from hypothesis import strategies as st

from sparse_operation_kit import core

ADAGRAD = reference.Optimizer("adagrad")


def run(call, num_ranks, seed, context=None, kind=table_kinds.STATIC):
    """One step on simulated ranks. Returns (ranks, cuts, reduced gradients [rank][table])."""
    ranks, output_gradients, cuts = harness.simulate(call, num_ranks, seed, kind)
    harness.forward(ranks, context)
    parts = harness.backward(ranks, output_gradients, context)
    reduced = harness.reduce(ranks, parts, context)
    for r, rank in enumerate(ranks):
        updates = []
        for t, table in enumerate(rank.tables):
            states = [s.astype(np.float32) for s in ADAGRAD.initial_states(*table.weight.shape)]
            updates.append(core.Update(table, harness.optimizer(ADAGRAD), parts[r][t], states))
        core.apply(updates, context=context)
    return ranks, cuts, reduced


def check(call, num_ranks, seed, kind):
    ranks, cuts, reduced = run(call, num_ranks, seed, kind=kind)
    harness.check_step(call, ranks, cuts, reduced)
    return ranks


@pytest.mark.every_isa
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("call", cases.CASES, ids=lambda call: call.name)
@pytest.mark.parametrize("kind", table_kinds.KINDS)
def test_cases(call, num_ranks, kind):
    ranks = check(call, num_ranks, 1, kind)
    one = harness.tables(call)
    updates = []
    for t, table in enumerate(one):
        states = [s.astype(np.float32) for s in ADAGRAD.initial_states(*table.shape)]
        updates.append(core.Update(table, harness.optimizer(ADAGRAD), harness.parts(call, t), states))
    core.apply(updates)
    for t, table in enumerate(one):
        reference.assert_close(harness.joined(call, ranks, t), table.weight, message=f"table {t}")


@pytest.mark.parametrize("kind", table_kinds.KINDS)
@given(
    call=cases.calls(max_tables=8, max_dimension=300, bagless=True), num_ranks=st.integers(1, 4), seed=st.integers(0, 5)
)
def test_any_call(call, num_ranks, seed, kind):
    check(call, num_ranks, seed, kind)


@pytest.mark.every_isa
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_workers_do_not_change_a_bit(num_ranks, pools):
    alone, *_ = run(harness.LARGE, num_ranks, seed=0)
    for context in pools:
        other, *_ = run(harness.LARGE, num_ranks, seed=0, context=context)
        for a, b in zip(alone, other, strict=True):
            assert harness.same_bytes(a.outputs, b.outputs)
            assert harness.same_bytes([t.weight for t in a.tables], [t.weight for t in b.tables])


def test_ranks_with_nothing():
    """All keys of the batch on one rank, all rows of a table on another."""
    lookup = cases.Lookup(0, np.array([4, 2, 4]), np.array([0, 2, 3]), None, "mean")
    call = cases.Call((cases.Table(6, 3, 2), cases.Table(2, 2)), (lookup,))
    ranks, gradients, _ = harness.simulate(call, 4)
    busy = next(r for r, rank in enumerate(ranks) if len(rank.lookups[0].keys))
    for r, rank in enumerate(ranks):
        if r != busy:
            rank.lookups = [core.Lookup(np.zeros(0, np.int64), row_splits=[0], combiner="mean")]
            gradients[r] = [np.zeros((0, 3), np.float32)]
    ranks[busy].lookups = harness.lookups(call)
    gradients[busy] = [call.output_gradient(0)]
    harness.forward(ranks)
    reference.assert_close(ranks[busy].outputs[0], call.output(0))
    parts = harness.backward(ranks, gradients)
    for r, rank in enumerate(ranks):
        slots, values = core.reduce(rank.tables[0], parts[r][0])
        assert slots.tolist() == ([2, 4] if r == 2 else [])
        if r == 2:
            reference.assert_close(values, call.row_gradient(0)[[2, 4]])


def test_absent_output_gradients_are_zeros():
    call = cases.CASES[0]
    ranks, gradients, _ = harness.simulate(call, 2)
    harness.forward(ranks)
    for rank, given_gradients in zip(ranks, gradients, strict=True):
        zeros = [np.zeros_like(g) for g in given_gradients]
        some = [g if i % 2 else None for i, g in enumerate(given_gradients)]
        same = [g if i % 2 else z for i, (g, z) in enumerate(zip(given_gradients, zeros, strict=True))]
        assert np.array_equal(
            core.spread(rank.tables, rank.lookups, some, rank.routing),
            core.spread(rank.tables, rank.lookups, same, rank.routing),
        )
        nothing = core.spread(rank.tables, rank.lookups, [None] * len(zeros), rank.routing)
        assert not nothing.any()


def test_weight_gradients_from_exchanged_rows():
    for call in (cases.CASES[0], harness.LARGE):
        ranks, gradients, _ = harness.simulate(call, 3)
        harness.forward(ranks)
        made = [
            core.weight_gradient(rank.tables, rank.lookups, g, inverse=rank.routing.inverse, rows=rank.rows)
            for rank, g in zip(ranks, gradients, strict=True)
        ]
        for i, lookup in enumerate(call.lookups):
            if lookup.weights is None:
                assert all(m[i] is None for m in made)
                continue
            whole = np.concatenate([m[i] for m in made])
            reference.assert_close(whole, call.weight_gradient(i), magnitude=call.weight_gradient(i, absolute=True))


@pytest.mark.parametrize("stage", ["combine", "spread", "weight_gradient"])
def test_buffers_that_do_not_fit(stage):
    call = cases.CASES[0]
    ranks, gradients, _ = harness.simulate(call, 2)
    harness.forward(ranks)
    rank = max(ranks, key=lambda r: len(r.rows))
    inverse, rows, mine = rank.routing.inverse, rank.rows, gradients[ranks.index(rank)]

    def run(inverse=inverse, rows=rows, mine=mine):
        if stage == "combine":
            return core.combine(rank.tables, rank.lookups, inverse, rows)
        if stage == "spread":
            return core.spread(rank.tables, rank.lookups, mine, rank.routing)
        return core.weight_gradient(rank.tables, rank.lookups, mine, inverse=inverse, rows=rows)

    run()
    if stage != "spread":
        with pytest.raises(ValueError, match="inverse"):
            run(inverse=inverse[:-1])
        with pytest.raises(ValueError, match="inverse"):
            run(inverse=inverse.astype(np.int32))
        with pytest.raises(ValueError, match="floats"):
            run(rows=rows.astype(np.float64))
        with pytest.raises(ValueError, match="floats"):
            run(rows=rows.reshape(-1, 1))
    if stage != "combine":
        with pytest.raises(ValueError, match="output_gradients"):
            run(mine=[*mine[:-1], mine[-1][:, :-1]])
        with pytest.raises(ValueError, match="output_gradients"):
            run(mine=[mine[0].astype(np.float64), *mine[1:]])
        with pytest.raises(ValueError, match="output_gradients"):
            run(mine=mine[:-1])


@pytest.mark.parametrize("stage", ["combine", "weight_gradient"])
@pytest.mark.parametrize("offset", [-4, 10**6])
def test_inverse_that_points_outside(stage, offset):
    call = cases.CASES[0]
    ranks, gradients, _ = harness.simulate(call, 2)
    harness.forward(ranks)
    rank = max(ranks, key=lambda r: len(r.rows))
    weighted = [lookup.weights is not None for lookup in rank.lookups for _ in lookup.keys]
    inverse = rank.routing.inverse.copy()
    inverse[np.flatnonzero(weighted)[7]] = offset  # weight_gradient reads no others
    with pytest.raises((IndexError, ValueError), match="inverse"):
        if stage == "combine":
            core.combine(rank.tables, rank.lookups, inverse, rank.rows)
        else:
            mine = gradients[ranks.index(rank)]
            core.weight_gradient(rank.tables, rank.lookups, mine, inverse=inverse, rows=rank.rows)
