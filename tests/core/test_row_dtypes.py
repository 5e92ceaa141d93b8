# SPDX-License-Identifier: Apache-2.0
"""Rows of float16 and bfloat16: what is read is exact, arithmetic is that of float32 rows, what is written is rounded.

So most tests compare bit for bit with the same stage on float32 tables that hold the same numbers; the others measure
against the float64 reference.
"""

import dataclasses

import cases
import harness
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_operation_kit import core

HALVES = reference.HALVES
MIXED = (np.dtype(np.float32), *HALVES)
WIDTHS = [1, 2, 3, 4, 7, 8, 16, 24, 31, 64, 100, 256, 300]


def name_of(dtype):
    return "bfloat16" if dtype == core.BFLOAT16 else str(dtype)


each_half = pytest.mark.parametrize("dtype", HALVES, ids=name_of)


def bits(array):
    return array.view(np.uint16)


def assert_same_numbers(actual, expected, message=""):
    """Bit for bit, but any NaN for a NaN."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    word = np.uint32 if actual.dtype == np.float32 else np.uint16
    nan = np.isnan(reference.widened(expected))
    assert np.array_equal(np.isnan(reference.widened(actual)), nan), message
    different = (actual.view(word) != expected.view(word)) & ~nan
    assert not different.any(), f"{message} {actual[different][:5]}, expected {expected[different][:5]}"


# --- conversion -----------------------------------------------------------------------------------------------------


def every_number(dtype):
    """[2^16]: each number of a dtype of 16 bits, infinities and NaN too."""
    return np.arange(2**16, dtype=np.uint16).view(dtype)


def rounding_cases(dtype):
    """float32 numbers around every number of `dtype`: itself, the middle to its neighbour, and next to that middle."""
    exact = reference.widened(np.arange(2**15, dtype=np.uint16).view(dtype))
    exact = exact[np.isfinite(exact)]
    top = np.float32(2.0**16) if dtype == np.float16 else np.finfo(np.float32).max
    beyond = np.append(exact[1:], top)
    middle = ((exact.astype(np.float64) + beyond.astype(np.float64)) / 2).astype(np.float32)
    near = [exact, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    random = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    special = np.array([0, 1e-45, 1e-40, 65504, 65519.996, 65520, 65536, 3.4e38, np.inf, np.nan], np.float32)
    positive = np.concatenate([*near, special])
    return np.concatenate([positive, -positive, random])


def in_rows(numbers, dimension):
    """[rows, dimension], cut off."""
    return np.ascontiguousarray(numbers[: len(numbers) // dimension * dimension].reshape(-1, dimension))


@each_half
def test_the_reference_rounds_to_nearest(dtype):
    """No number of the dtype is nearer, and of two that are as near the even one is taken."""
    values = rounding_cases(dtype)
    values = values[np.isfinite(values)].astype(np.float64)
    nearest = reference.rounded(values, dtype)
    numbers = reference.widened(every_number(dtype))
    numbers = np.unique(numbers[np.isfinite(numbers)]).astype(np.float64)
    finite = np.isfinite(reference.widened(nearest))
    found = reference.widened(nearest).astype(np.float64)[finite]
    at = np.searchsorted(numbers, values[finite])
    around = [numbers[np.clip(at - 1, 0, len(numbers) - 1)], numbers[np.clip(at, 0, len(numbers) - 1)]]
    best = np.minimum(*(abs(x - values[finite]) for x in around))
    assert np.array_equal(abs(found - values[finite]), best)
    is_tie = abs(around[0] - values[finite]) == abs(around[1] - values[finite])
    assert np.count_nonzero(is_tie) > 30_000
    assert not (bits(nearest)[finite][is_tie & (around[0] != around[1])] & 1).any()


@pytest.mark.every_isa
@pytest.mark.parametrize("dimension", WIDTHS)
@each_half
def test_every_number_is_read_exactly(dtype, dimension):
    weight = in_rows(every_number(dtype), dimension)
    slots = np.arange(len(weight))
    rows = core.gather([core.Table(weight)], slots, [[len(slots)]])
    assert_same_numbers(rows + 0, reference.widened(weight).ravel() + 0)  # either zero: some kernels add to 0


@pytest.mark.every_isa
@pytest.mark.parametrize("dimension", WIDTHS)
@each_half
def test_assign_rounds_to_nearest(dtype, dimension):
    values = in_rows(rounding_cases(dtype), dimension)
    table = core.Table(np.zeros(values.shape, dtype))
    core.assign(table, np.arange(len(values)), values)
    assert_same_numbers(table.weight, reference.rounded(values, dtype))
    other = core.Table(np.zeros(values.shape, dtype))
    core.assign(other, np.arange(len(values)), table.weight)
    assert other.weight.tobytes() == table.weight.tobytes(), "rows of the table's own dtype are copied"


@pytest.mark.every_isa
@pytest.mark.parametrize("dimension", [1, 4, 19, 64, 256])
@each_half
def test_apply_rounds_to_nearest(dtype, dimension):
    """SGD that replaces a row of zeros by the gradient, so that every kind of number is written."""
    values = in_rows(rounding_cases(dtype), dimension)
    table = core.Table(np.zeros(values.shape, dtype))
    sgd = core.Optimizer("sgd", learning_rate=-1.0)
    core.apply([core.Update(table, sgd, [core.Gradient(np.arange(len(values)), values, unique=True)])])
    values[values == 0] = 0  # 0 - -1 * -0 is 0
    assert_same_numbers(table.weight, reference.rounded(values, dtype))


@pytest.mark.every_isa
@pytest.mark.parametrize("kind", ["constant", "uniform", "normal", "truncated_normal"])
@each_half
def test_initial_values_are_those_of_float32_rounded(dtype, kind, pools):
    for dimension in (1, 19, 64):
        initializer = core.Initializer(kind, 0.1, 0.7, 5)
        wide = core.initialize(initializer, 501, dimension, first_key=1, key_stride=3)
        for context in [None, *pools]:
            rows = core.initialize(initializer, 501, dimension, first_key=1, key_stride=3, dtype=dtype, context=context)
            assert_same_numbers(rows, reference.rounded(wide, dtype))
    assert core.initialize(core.Initializer(kind, 0.1, 0.7, 5), 0, 4, dtype=dtype).shape == (0, 4)


# --- forward --------------------------------------------------------------------------------------------------------


def check_forward(call, dtypes):
    """Outputs are those of float32 tables with the same numbers, bit for bit, and near the reference."""
    tables = harness.rounded(harness.tables(call), dtypes)
    wide = harness.widened(tables)
    outputs = core.gather_combine(tables, harness.lookups(call))
    expected = core.gather_combine(wide, harness.lookups(call))
    for i, item in enumerate(call.lookups):
        assert_same_numbers(outputs[i], expected[i], f"lookup {i}")
        args = (wide[item.table].weight, item.keys, item.row_splits, item.weights, item.combiner)
        reference.assert_close(outputs[i], reference.pool(*args), magnitude=reference.pool(*args, absolute=True))
    incoming = [call.output_gradient(i) for i in range(len(call.lookups))]
    gradients = core.weight_gradient(tables, harness.lookups(call), incoming)
    check_weight_gradients(gradients, harness.lookups(call), [table.weight for table in wide], incoming)


def check_weight_gradients(gradients, lookups, rows, incoming):
    """rows: of each table, whole."""
    for gradient, item, output_gradient in zip(gradients, lookups, incoming, strict=True):
        assert (gradient is None) == (item.weights is None)
        if gradient is not None:
            args = (rows[item.table], output_gradient, item.keys, item.row_splits, item.weights, item.combiner)
            size = reference.weight_gradient(*args, absolute=True)
            reference.assert_close(gradient, reference.weight_gradient(*args), magnitude=size)


@pytest.mark.every_isa
@pytest.mark.parametrize("call", [*cases.CASES, harness.LARGE], ids=lambda call: call.name)
def test_forward_of_cases(call):
    for dtypes in [HALVES[:1], HALVES[1:], MIXED]:
        check_forward(call, dtypes)


@given(cases.calls(bagless=True), st.lists(st.sampled_from(MIXED), min_size=1, max_size=5))
def test_forward_of_any_call(call, dtypes):
    check_forward(call, dtypes)


def test_workers_do_not_change_a_bit(pools):
    tables = harness.rounded(harness.tables(harness.LARGE), MIXED)
    alone = core.gather_combine(tables, harness.lookups(harness.LARGE))
    for context in pools:
        assert harness.same_bytes(core.gather_combine(tables, harness.lookups(harness.LARGE), context=context), alone)


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
@pytest.mark.parametrize("dimension", [3, 4, 8, 64])
@each_half
def test_rows_at_any_address(dtype, dimension, offset):
    """Rows need no more alignment than their elements."""
    memory = np.zeros(offset + 20 * dimension, dtype)
    weight = memory[offset:].reshape(20, dimension)
    values = np.random.default_rng(offset).uniform(-1, 1, weight.shape).astype(np.float32)
    core.assign(core.Table(weight), np.arange(20), values)
    assert_same_numbers(weight, reference.rounded(values, dtype))
    wide = reference.widened(weight)
    slots = np.array([3, 19, 0, 3])
    (output,) = core.gather_combine([core.Table(weight)], [core.Lookup(slots, row_splits=[0, 1, 4])])
    reference.assert_close(output, reference.pool(wide, slots, [0, 1, 4]))
    rows = core.gather([core.Table(weight)], slots, [[4]])
    assert_same_numbers(rows, np.ascontiguousarray(wide[slots]).ravel())
    sgd = core.Optimizer("sgd", 0.5)
    core.apply([core.Update(core.Table(weight), sgd, [core.Gradient(slots, values[:4])])])
    expected = wide.astype(np.float64)
    np.add.at(expected, slots, -0.5 * values[:4].astype(np.float64))
    error = abs(reference.widened(weight).astype(np.float64) - expected)
    assert (error <= 0.5 * reference.spacing(expected, dtype) + 1e-6).all()
    assert not memory[:offset].view(np.uint16).any()


# --- several ranks --------------------------------------------------------------------------------------------------


def check_ranks(call, num_ranks, dtypes):
    """The outputs of simulated ranks are those of float32 tables; weight gradients from exchanged rows too."""
    ranks, gradients, _ = harness.simulate(call, num_ranks)
    wide, _, _ = harness.simulate(call, num_ranks)
    for rank, other in zip(ranks, wide, strict=True):
        rank.tables = harness.rounded(rank.tables, dtypes)
        other.tables = harness.widened(rank.tables)
    whole = harness.widened(harness.rounded(harness.tables(call), dtypes))
    rows = [table.weight for table in whole]
    harness.forward(ranks)
    harness.forward(wide)
    for rank, other, incoming in zip(ranks, wide, gradients, strict=True):
        for output, expected in zip(rank.outputs, other.outputs, strict=True):
            assert_same_numbers(output, expected)
        made = core.weight_gradient(rank.tables, rank.lookups, incoming, inverse=rank.routing.inverse, rows=rank.rows)
        check_weight_gradients(made, rank.lookups, rows, incoming)


@pytest.mark.every_isa
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("call", cases.CASES, ids=lambda call: call.name)
def test_ranks_of_cases(call, num_ranks):
    for dtype in HALVES:
        check_ranks(call, num_ranks, [dtype])
    check_ranks(call, num_ranks, MIXED)


@given(cases.calls(max_tables=6, max_dimension=300, bagless=True), st.integers(1, 4), st.sampled_from(HALVES))
@settings(max_examples=20)
def test_ranks_of_any_call(call, num_ranks, dtype):
    check_ranks(call, num_ranks, [dtype])


# --- apply ----------------------------------------------------------------------------------------------------------


def optimizer_name(optimizer):
    default = reference.Optimizer(optimizer.kind)
    changed = {k: v for k, v in dataclasses.asdict(optimizer).items() if v != getattr(default, k) and k != "kind"}
    return "-".join([optimizer.kind, *(f"{k}={v}" for k, v in changed.items() if k != "learning_rate")])


def random_gradient(rng, num_rows, dimension):
    """Parts of a gradient with duplicate slots, and their rows and float64 sums."""
    slots = rng.integers(0, num_rows, 9)
    splits, weights = np.array([0, 2, 2, 5, 9]), cases.random_weights(rng, 9)
    pooled = rng.uniform(-1, 1, (4, dimension)).astype(np.float32)
    plain = rng.uniform(-1, 1, (9, dimension)).astype(np.float32)
    total = reference.row_gradient(pooled, num_rows, slots, splits, weights, "mean")
    total += reference.row_gradient(plain, num_rows, slots[::-1])
    parts = [core.Gradient(slots, pooled, splits, weights, "mean"), core.Gradient(slots[::-1].copy(), plain)]
    rows = np.unique(slots)
    return parts, rows, total[rows]


def check_steps(optimizer, dimension, dtype, steps, seed=0):
    """Each step from the same rows: near the reference's, and the float32 table's rounded; states bit for bit."""
    num_rows = 12
    rng = np.random.default_rng((seed, dimension))
    weight = reference.rounded(rng.uniform(-1, 1, (num_rows, dimension)), dtype)
    states = [s.astype(np.float32) for s in optimizer.initial_states(num_rows, dimension)]
    for t in range(steps):
        now = dataclasses.replace(optimizer, learning_rate=optimizer.learning_rate / (1 + 0.01 * t))
        parts, rows, gradient = random_gradient(rng, num_rows, dimension)
        before, wide = weight.copy(), reference.widened(weight)
        wide_states = [s.copy() for s in states]
        exact, exact_states = wide.astype(np.float64), [s.astype(np.float64) for s in states]
        core.apply([core.Update(core.Table(weight), harness.optimizer(now), parts, states)])
        core.apply([core.Update(core.Table(wide), harness.optimizer(now), parts, wide_states)])
        reference.step(now, exact, exact_states, rows, gradient)
        assert_same_numbers(weight, reference.rounded(wide, dtype), f"step {t}")
        assert harness.same_bytes(states, wide_states)
        others = np.setdiff1d(np.arange(num_rows), rows)
        assert weight[others].tobytes() == before[others].tobytes()
        # Half a unit for the rounding, and what float32 may be off before it.
        error = abs(reference.widened(weight).astype(np.float64) - exact)
        bound = 0.5 * reference.spacing(exact, dtype) + 1e-5 * np.maximum(abs(exact), 0.1)
        assert (error <= bound)[rows].all(), f"step {t}: {(error / bound)[rows].max():.3f} of the bound"


@pytest.mark.every_isa
@pytest.mark.parametrize("dimension", [1, 19, 64])
@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS, ids=optimizer_name)
@each_half
def test_steps(dtype, optimizer, dimension):
    check_steps(optimizer, dimension, dtype, steps=10)


@given(cases.optimizers(), cases.dimensions(300), st.sampled_from(HALVES), st.integers(0, 2**16))
def test_steps_of_any_setting(optimizer, dimension, dtype, seed):
    check_steps(optimizer, dimension, dtype, steps=2, seed=seed)


@pytest.mark.every_isa
def test_tables_of_several_dtypes_in_one_call(pools):
    call = harness.LARGE
    adagrad = reference.Optimizer("adagrad", weight_decay=0.01)

    def run(tables, context=None):
        states = [[s.astype(np.float32) for s in adagrad.initial_states(*table.shape)] for table in tables]
        updates = [
            core.Update(table, harness.optimizer(adagrad), harness.parts(call, t), states[t])
            for t, table in enumerate(tables)
        ]
        core.apply(updates, context=context)
        return [table.weight for table in tables], states

    start = harness.rounded(harness.tables(call), MIXED)
    wide, wide_states = run(harness.widened(start))
    for context in [None, *pools]:
        rows, states = run([dataclasses.replace(t, weight=t.weight.copy()) for t in start], context)
        for weight, wanted in zip(rows, wide, strict=True):
            assert_same_numbers(
                weight, wanted if weight.dtype == np.float32 else reference.rounded(wanted, weight.dtype)
            )
        assert all(harness.same_bytes(a, b) for a, b in zip(states, wide_states, strict=True))


@each_half
def test_specials_in_rows(dtype):
    """Infinities and NaN stay in their column; a step beyond the largest number gives an infinity."""
    largest = np.float32(65504) if dtype == np.float16 else np.float32(2.0**127 * (2 - 2.0**-7))
    smallest = np.float32(2.0**-24 if dtype == np.float16 else 2.0**-133)
    start = np.array([[np.inf, -np.inf, np.nan, largest, -largest, smallest, 1, 0]], np.float32)
    table = core.Table(reference.rounded(start, dtype))
    (output,) = core.gather_combine([table], [core.Lookup([0])])
    assert np.array_equal(output, start, equal_nan=True)
    table = core.Table(reference.rounded(start[:, 2:], dtype))
    gradient = np.array([[1, -largest, largest, 0, 0, smallest]], np.float32)
    core.apply([core.Update(table, core.Optimizer("sgd", 1.0), [core.Gradient([0], gradient)])])
    expected = np.array([[np.nan, np.inf, -np.inf, smallest, 1, -smallest]], np.float32)
    assert np.array_equal(reference.widened(table.weight), expected, equal_nan=True)


@each_half
def test_infinities_stay(dtype):
    table = core.Table(reference.rounded(np.array([[np.inf, -np.inf]], np.float32), dtype))
    part = core.Gradient([0], np.ones((1, 2), np.float32))
    core.apply([core.Update(table, core.Optimizer("sgd", 1.0), [part])])
    assert reference.widened(table.weight).tolist() == [[np.inf, -np.inf]]


# --- what does not fit ----------------------------------------------------------------------------------------------


@each_half
def test_what_does_not_fit(dtype):
    other = HALVES[1 - HALVES.index(dtype)]
    table = core.Table(np.zeros((5, 3), dtype), name="item")
    with harness.unchanged(table.weight), pytest.raises(ValueError, match="values"):
        core.assign(table, [0], np.zeros((1, 3), other))
    wrong = np.zeros((5, 3), other)
    with harness.unchanged(wrong), pytest.raises(ValueError, match="target"):
        core.assign(table, [0], np.ones((1, 3), np.float32), target=wrong)
    state = np.zeros((5, 3), np.float32)
    core.assign(table, [2], np.ones((1, 3), np.float32), target=state)
    assert state.sum() == 3
    adagrad = core.Optimizer("adagrad", 0.1)
    part = core.Gradient([1], np.ones((1, 3), np.float32))
    with harness.unchanged(table.weight), pytest.raises(ValueError, match="states"):
        core.apply([core.Update(table, adagrad, [part], [np.zeros((5, 3), dtype)])])
    with harness.unchanged(table.weight), pytest.raises(ValueError, match="values"):
        core.apply([core.Update(table, core.Optimizer("sgd", 0.1), [core.Gradient([1], np.ones((1, 3), dtype))])])
    with pytest.raises(ValueError, match="weight"):
        core.gather_combine([core.Table(np.zeros((5, 3), np.float64))], [core.Lookup([1])])


@each_half
def test_tables_that_share_memory(dtype):
    """Tables that lie side by side do not overlap; two views of one do."""
    memory = np.zeros((10, 4), dtype)
    sgd = core.Optimizer("sgd", 1.0)
    part = core.Gradient([1], np.ones((1, 4), np.float32))
    core.apply([core.Update(core.Table(memory[:5]), sgd, [part]), core.Update(core.Table(memory[5:]), sgd, [part])])
    assert np.flatnonzero(reference.widened(memory).any(axis=1)).tolist() == [1, 6]
    with harness.unchanged(memory), pytest.raises(ValueError, match="share memory"):
        core.apply([core.Update(core.Table(memory[:6]), sgd, [part]), core.Update(core.Table(memory[5:]), sgd, [part])])


def test_binding_takes_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    weight = np.array([[1.5, -2.0]], ml_dtypes.bfloat16)
    (output,) = core.gather_combine([core.Table(weight)], [core.Lookup([0, 0])])
    assert output.tolist() == [[1.5, -2.0]] * 2
    core.assign(core.Table(weight), [0], np.array([[3.0, 4.0]], np.float32))
    assert weight.astype(np.float32).tolist() == [[3.0, 4.0]]
