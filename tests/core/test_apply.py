# SPDX-License-Identifier: Apache-2.0
"""apply: each fused optimizer against the reference, and what must not change."""

import dataclasses

import cases
import harness
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_operation_kit import core

ROWS = 12


def name_of(optimizer):
    default = reference.Optimizer(optimizer.kind)
    changed = {k: v for k, v in dataclasses.asdict(optimizer).items() if v != getattr(default, k) and k != "kind"}
    return "-".join([optimizer.kind, *(f"{k}={v}" for k, v in changed.items() if k != "learning_rate")])


class Pair:
    """A table and its states twice: float32 for the core, float64 for the reference."""

    def __init__(self, optimizer, num_rows, dimension, seed=0):
        rng = np.random.default_rng((seed, dimension))
        self.weight = rng.uniform(-1, 1, (num_rows, dimension)).astype(np.float32)
        self.states = [s.astype(np.float32) for s in optimizer.initial_states(num_rows, dimension)]
        self.expected_weight = self.weight.astype(np.float64)
        self.expected_states = [s.astype(np.float64) for s in self.states]

    def check(self, tolerance=1e-6):
        reference.assert_close(self.weight, self.expected_weight, tolerance, message="weight")
        for i, (state, expected) in enumerate(zip(self.states, self.expected_states, strict=True)):
            reference.assert_close(state, expected, tolerance, message=f"state {i}")


def random_parts(rng, num_rows, dimension):
    """Parts of a gradient of each kind, and their sum as the reference sees it: (rows, gradient)."""
    total = np.zeros((num_rows, dimension))
    named = []
    made = []
    for kind in rng.permutation(["plain", "unique", "bags"])[: rng.integers(1, 4)]:
        n = int(rng.integers(1, 9))
        slots = rng.integers(0, num_rows, n)
        if kind == "unique":
            slots = rng.permutation(num_rows)[:n]
        slots = slots.astype(rng.choice([np.int32, np.int64]))
        named += slots.tolist()
        if kind == "bags":
            splits = np.sort(np.r_[0, rng.integers(0, n + 1, 3), n])
            weights = cases.random_weights(rng, n) if rng.random() < 0.5 else None
            combiner = str(rng.choice(reference.COMBINERS))
            values = rng.uniform(-1, 1, (4, dimension)).astype(np.float32)
            made.append(core.Gradient(slots, values, splits, weights, combiner))
            total += reference.row_gradient(values, num_rows, slots, splits, weights, combiner)
        else:
            weights = cases.random_weights(rng, len(slots)) if rng.random() < 0.5 else None
            combiner = str(rng.choice(reference.COMBINERS))
            values = rng.uniform(-1, 1, (len(slots), dimension)).astype(np.float32)
            made.append(core.Gradient(slots, values, None, weights, combiner, unique=kind == "unique"))
            total += reference.row_gradient(values, num_rows, slots, None, weights, combiner)
    rows = np.unique(named)
    return made, rows, total[rows]


@pytest.mark.every_isa
@pytest.mark.parametrize("dimension", [1, 19, 64])
@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS, ids=name_of)
def test_many_steps(optimizer, dimension):
    steps = 10 if harness.under_compute_sanitizer() else 100
    rng = np.random.default_rng(dimension)
    pair = Pair(optimizer, ROWS, dimension)
    table = core.Table(pair.weight)
    for t in range(steps):
        now = dataclasses.replace(optimizer, learning_rate=optimizer.learning_rate / (1 + 0.01 * t))
        gradients, rows, gradient = random_parts(rng, ROWS, dimension)
        untouched = np.setdiff1d(np.arange(ROWS), rows)
        before = [array[untouched].copy() for array in (pair.weight, *pair.states)]
        core.apply([core.Update(table, harness.optimizer(now), gradients, pair.states)])
        reference.step(now, pair.expected_weight, pair.expected_states, rows, gradient)
        after = [array[untouched] for array in (pair.weight, *pair.states)]
        assert harness.same_bytes(before, after), "rows that no gradient names were changed"
    pair.check()


@given(cases.optimizers(), cases.dimensions(300), st.integers(0, 2**16), st.sampled_from([1.0, 0.5, 0.25]))
def test_any_setting(optimizer, dimension, seed, scale):
    rng = np.random.default_rng(seed)
    pair = Pair(optimizer, ROWS, dimension, seed)
    for _ in range(3):
        gradients, rows, gradient = random_parts(rng, ROWS, dimension)
        core.apply([core.Update(core.Table(pair.weight), harness.optimizer(optimizer), gradients, pair.states, scale)])
        reference.step(optimizer, pair.expected_weight, pair.expected_states, rows, gradient * scale)
    pair.check()


@given(cases.calls(bagless=True))
@settings(max_examples=20)
def test_gradients_of_any_call(call):
    """SGD with rate 1 shows the summed gradient of lookups as they are, not spread."""
    tables = harness.tables(call)
    sgd = core.Optimizer("sgd", learning_rate=1.0)
    core.apply([core.Update(table, sgd, harness.parts(call, t)) for t, table in enumerate(tables)])
    for t, table in enumerate(tables):
        expected = call.rows(t) - call.row_gradient(t)
        reference.assert_close(table.weight, expected, magnitude=call.row_gradient(t, absolute=True))


@pytest.mark.every_isa
@pytest.mark.parametrize("call", [*cases.CASES, harness.LARGE], ids=lambda call: call.name)
def test_gradients_of_cases(call):
    tables = harness.tables(call)
    sgd = core.Optimizer("sgd", learning_rate=0.5)
    core.apply([core.Update(table, sgd, harness.parts(call, t)) for t, table in enumerate(tables)])
    for t, table in enumerate(tables):
        expected = call.rows(t) - 0.5 * call.row_gradient(t)
        reference.assert_close(table.weight, expected, magnitude=call.row_gradient(t, absolute=True))


@pytest.mark.every_isa
@pytest.mark.parametrize("kind", reference.KINDS)
def test_workers_do_not_change_a_bit(kind, pools):
    call = harness.LARGE
    optimizer = reference.Optimizer(kind, momentum=0.9)

    def run(context):
        tables = harness.tables(call)
        states = [[s.astype(np.float32) for s in optimizer.initial_states(*table.shape)] for table in tables]
        updates = [
            core.Update(table, harness.optimizer(optimizer), harness.parts(call, t), states[t])
            for t, table in enumerate(tables)
        ]
        for _ in range(2):
            core.apply(updates, context=context)
        return [[table.weight for table in tables], *states]

    alone = run(None)
    for context in pools:
        assert harness.same_bytes(run(context), alone)


@pytest.mark.parametrize("bags", [False, True])
def test_so_many_slots_that_workers_sort_together(bags, pools):
    """More entries of one table than a worker's share, most of them of one row."""
    n = 200_000
    rng = np.random.default_rng(2)
    slots = np.where(rng.random(n) < 0.8, 3, rng.integers(0, 5000, n))
    values = rng.uniform(-1, 1, (n // 2 if bags else n, 4)).astype(np.float32)
    part = core.Gradient(slots, values, np.arange(0, n + 1, 2), None, "mean") if bags else core.Gradient(slots, values)
    each = np.repeat(values.astype(np.float64) / 2, 2, axis=0) if bags else values.astype(np.float64)
    expected, size = np.zeros((5000, 4)), np.zeros((5000, 4))
    np.add.at(expected, slots, each)
    np.add.at(size, slots, abs(each))
    results = []
    for context in [None, *pools]:
        table = core.Table(np.zeros((5000, 4), np.float32))
        small = core.Table(np.zeros((3, 2), np.float32))
        sgd = core.Optimizer("sgd", learning_rate=1.0)
        other = core.Update(small, sgd, [core.Gradient([2, 2], np.ones((2, 2), np.float32))])
        core.apply([other, core.Update(table, sgd, [part])], context=context)
        results.append(table.weight)
        reference.assert_close(-table.weight, expected, magnitude=size)
        assert small.weight.tolist() == [[0, 0], [0, 0], [-2, -2]]
        found, sums = core.reduce(table, [part], context=context)
        assert np.array_equal(found, np.unique(slots))
        assert harness.same_bytes(np.ascontiguousarray(-sums), np.ascontiguousarray(table.weight[found]))
    assert all(harness.same_bytes(result, results[0]) for result in results)


def test_a_vouched_unique_part_changes_nothing():
    rng = np.random.default_rng(0)
    slots, values = rng.permutation(50), rng.random((50, 8), np.float32)
    weights = []
    for unique in (False, True):
        table = core.Table(np.ones((60, 8), np.float32))
        adam = core.Optimizer("adam", 0.1, beta1=0.9, beta2=0.99, epsilon=1e-7)
        states = [np.zeros((60, 8), np.float32) for _ in range(2)]
        core.apply([core.Update(table, adam, [core.Gradient(slots, values, unique=unique)], states)])
        weights.append([table.weight, *states])
    assert harness.same_bytes(*weights)


def test_no_gradient_changes_nothing():
    weight = np.ones((5, 3), np.float32)
    states = [np.ones((5, 3), np.float32)]
    empty = core.Gradient(np.zeros(0, np.int64), np.zeros((0, 3), np.float32))
    no_bags = core.Gradient(np.zeros(0, np.int64), np.zeros((2, 3), np.float32), row_splits=[0, 0, 0], combiner="mean")
    adagrad = core.Optimizer("adagrad", 0.1, weight_decay=0.1)
    for gradients in ([], [empty], [no_bags], [empty, no_bags, empty]):
        with harness.unchanged(weight, *states):
            core.apply([core.Update(core.Table(weight), adagrad, gradients, states)])
    core.apply([])


def test_bags_whose_divisor_is_zero_have_no_gradient_but_are_touched():
    """As a dense zero gradient would: momentum moves the row on."""
    weight, momentum = np.ones((3, 2), np.float32), np.ones((3, 2), np.float32)
    part = core.Gradient([0, 1], np.ones((1, 2), np.float32), [0, 2], np.array([1, -1], np.float32), "mean")
    sgd = core.Optimizer("momentum", 0.5, momentum=0.5)
    core.apply([core.Update(core.Table(weight), sgd, [part], [momentum])])
    assert np.array_equal(momentum, [[0.5, 0.5], [0.5, 0.5], [1.0, 1.0]])
    assert np.array_equal(weight, [[0.75, 0.75], [0.75, 0.75], [1.0, 1.0]])


# --- errors: everything is checked before the first row changes -----------------------------------------------------


class Step:
    """Two tables ready for a step; `break_` changes one thing, `fails` checks that nothing else changes then."""

    def __init__(self, kind="adam", count=2):
        self.weights = [np.ones((20, 4), np.float32) for _ in range(count)]
        self.states = [[np.ones((20, 4), np.float32) for _ in range(2)] for _ in range(count)]
        optimizer = core.Optimizer(kind, 0.1, beta1=0.9, beta2=0.9, epsilon=1e-7)
        self.updates = [
            core.Update(
                core.Table(weight, name=name),
                optimizer,
                [core.Gradient([1, 2, 19], np.ones((3, 4), np.float32))],
                states,
            )
            for weight, states, name in zip(self.weights, self.states, ["first", "second"], strict=False)
        ]

    def fails(self, exception, *words, context=None, agree=None):
        arrays = [*self.weights, *(s for states in self.states for s in states)]
        with harness.unchanged(*arrays), pytest.raises(exception) as error:
            core.apply(self.updates, context=context, agree=agree)
        for word in words:
            assert word in str(error.value), f"{word!r} is not in the message {error.value}"


def test_the_step_of_the_error_tests_is_right():
    step = Step()
    core.apply(step.updates)
    assert all((weight[19] < 1).all() for weight in step.weights)


def test_the_caller_is_asked_before_a_row_changes():
    step, asked = Step(), []

    def agree():
        asked.append([weight.copy() for weight in step.weights])

    core.apply(step.updates, agree=agree)
    ((first, second),) = asked
    assert (first == 1).all() and (second == 1).all() and all((weight[19] < 1).all() for weight in step.weights)
    core.apply([], agree=agree)
    core.apply([core.Update(core.Table(np.ones((5, 4), np.float32)), core.Optimizer("sgd", 0.1), [])], agree=agree)
    assert len(asked) == 3


def test_the_caller_stops_the_step():
    def agree():
        raise KeyError("another rank has failed")

    step = Step()
    step.fails(KeyError, "another rank has failed", agree=agree)
    core.apply(step.updates)


def test_the_caller_is_not_asked_where_arguments_are_wrong():
    step, asked = Step(), []
    step.updates[1].states = step.updates[1].states[:1]
    step.fails(ValueError, "state", agree=lambda: asked.append(1))
    assert not asked


def test_the_caller_is_not_asked_where_the_cpu_finds_wrong_contents():
    for part in (
        core.Gradient([0, 20, 3], np.ones((3, 4), np.float32)),
        core.Gradient([0, 20, 3], np.ones((3, 4), np.float32), unique=True),
        core.Gradient([0, 2, 3], np.ones((3, 4), np.float32), [0, 2, 1, 3]),
    ):
        step, asked = Step(), []
        step.updates[1].gradients = [part]
        step.fails((IndexError, ValueError), "second", agree=lambda asked=asked: asked.append(1))
        assert not asked


@pytest.mark.parametrize("slot", [-1, 20, 2**31, -(2**40)])
def test_slot_out_of_range(slot, pools):
    for context in [None, *pools]:
        step = Step()
        step.updates[1].gradients = [core.Gradient(np.array([0, slot, 3]), np.ones((3, 4), np.float32))]
        step.fails(IndexError, "second", str(slot), "20", context=context)


def test_slot_out_of_range_in_bags():
    step = Step()
    part = core.Gradient(np.array([0, 20, 3], np.int32), np.ones((1, 4), np.float32), [0, 3], None, "mean")
    step.updates[1].gradients = [*step.updates[0].gradients, part]
    step.fails(IndexError, "second", "20")


@pytest.mark.parametrize("place", [120_000, 199_000])
def test_slot_out_of_range_in_a_large_step(place, pools):
    """Of several the CPU names the first (test_first_error.py), a device any."""
    slots = np.zeros(200_000, np.int64)
    slots[place] = 21
    for context in [None, *pools]:
        step = Step()
        step.updates[1].gradients = [core.Gradient(slots, np.ones((200_000, 4), np.float32))]
        step.fails(IndexError, "second", "21", context=context)


def test_table_named_twice():
    step = Step()
    step.updates[1].table = step.updates[0].table
    step.fails(ValueError, "first", "once")


def test_a_memory_named_twice():
    step = Step()
    step.updates[1].table = core.Table(step.weights[0], name="second")
    step.fails(ValueError, "second", "share memory")


@pytest.mark.parametrize(
    "state",
    [
        np.ones((19, 4), np.float32),
        np.ones((20, 3), np.float32),
        np.ones(20, np.float32),
        np.ones((20, 4), np.float64),
        np.ones((20, 4), np.int32),
    ],
    ids=lambda state: f"{state.dtype}{list(state.shape)}",
)
def test_state_that_does_not_fit(state):
    step = Step()
    step.updates[1].states = [step.states[1][0], state]
    step.fails(ValueError, "second", "state")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_wrong_number_of_states(count):
    step = Step()
    step.updates[1].states = [np.ones((20, 4), np.float32) for _ in range(count)]
    step.fails(ValueError, "second", "states", "2")


@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS, ids=name_of)
def test_every_kind_checks_its_states(optimizer):
    states = [np.ones_like(s, np.float32) for s in optimizer.initial_states(20, 4)]
    weight = np.ones((20, 4), np.float32)
    part = core.Gradient([1, 5], np.ones((2, 4), np.float32))
    wrong = [[*states, np.ones((20, 4), np.float32)]] if len(states) < 3 else []
    if states:
        wrong += [states[:-1], [*states[:-1], np.ones((3, 4), np.float32)]]
    if optimizer.kind == "rmsprop" and not optimizer.momentum:
        wrong = wrong[1:]  # a momentum state may be there and rest
    for given_states in wrong:
        with harness.unchanged(weight, *given_states), pytest.raises(ValueError, match="state"):
            core.apply([core.Update(core.Table(weight), harness.optimizer(optimizer), [part], given_states)])


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (core.Gradient([1, 2], np.ones((3, 4), np.float32)), ["values"]),
        (core.Gradient([1, 2], np.ones((2, 3), np.float32)), ["values"]),
        (core.Gradient([1, 2], np.ones((2, 4), np.float64)), ["values", "float64"]),
        (core.Gradient([1.0, 2.0], np.ones((2, 4), np.float32)), ["slots", "float64"]),
        (core.Gradient([[1], [2]], np.ones((2, 4), np.float32)), ["slots"]),
        (core.Gradient([1, 2], np.ones((1, 4), np.float32), [0, 1]), ["row_splits"]),
        (core.Gradient([1, 2], np.ones((1, 4), np.float32), [0, 3]), ["row_splits"]),
        (core.Gradient([1, 2], np.ones((1, 4), np.float32), [1, 2]), ["row_splits"]),
        (core.Gradient([1, 2], np.ones((3, 4), np.float32), [0, 2, 1, 2]), ["row_splits"]),
        (core.Gradient([1, 2], np.ones((2, 4), np.float32), [0, 2]), ["values"]),
        (core.Gradient([1, 2], np.ones((0, 4), np.float32), np.zeros(0, np.int64)), ["row_splits"]),
        (core.Gradient([1, 2], np.ones((1, 4), np.float32), np.array([0, 2], np.int32)), ["row_splits", "int32"]),
        (core.Gradient([1, 2], np.ones((2, 4), np.float32), None, np.ones(3, np.float32)), ["weights"]),
        (core.Gradient([1, 2], np.ones((1, 4), np.float32), [0, 2], np.ones(1, np.float32)), ["weights"]),
        (core.Gradient([1, 2], np.ones((1, 4), np.float32), [0, 2], np.ones(2)), ["weights", "float64"]),
    ],
)
def test_gradient_that_does_not_fit(part, words):
    step = Step()
    step.updates[1].gradients = [part]
    step.fails(ValueError, "second", *words)


def test_settings_that_make_no_sense():
    step = Step("ftrl")
    step.updates[1].optimizer = core.Optimizer("ftrl", 0.1, learning_rate_power=0.5)
    step.fails(ValueError, "second", "learning_rate_power", "0.5")
    for rate in (0.0, 1e-60, -0.1):  # of which the second is 0 in float32; rows became NaN
        step.updates[1].optimizer = core.Optimizer("ftrl", rate)
        step.fails(ValueError, "second", "learning_rate is", "more than 0")
    step = Step()
    step.updates[1].optimizer = core.Optimizer("adam", 0.1, nesterov=True)
    step.fails(ValueError, "second", "flags", "Adam")


def test_binding_refuses_arrays_it_cannot_change_in_place():
    part = core.Gradient([1], np.ones((1, 2), np.float32))
    sgd = core.Optimizer("sgd", 0.1)
    frozen = np.ones((5, 2), np.float32)
    frozen.flags.writeable = False
    for weight in (frozen, np.ones((2, 5), np.float32).T, np.ones((5, 4), np.float32)[:, ::2]):
        with pytest.raises(ValueError, match="in place"):
            core.apply([core.Update(core.Table(weight), sgd, [part])])
    with pytest.raises(ValueError, match="4 states"):
        core.apply([core.Update(core.Table(np.ones((5, 2), np.float32)), sgd, [part], [frozen] * 4)])
    with pytest.raises(ValueError, match="expected one of sgd"):
        core.apply([core.Update(core.Table(np.ones((5, 2), np.float32)), core.Optimizer("lion", 0.1), [part])])
