# SPDX-License-Identifier: Apache-2.0
"""global_norm and clip_by_global_norm in a process alone, with float64 sums of NumPy and TensorFlow's own functions as
the oracle; several ranks are in tests/distributed/tensorflow_clipping.py.
"""

import math

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_harness as harness

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import runtime
from sparse_operation_kit.tensorflow.gradient import PendingGradient, mark, scaled

COUNTS = np.array([0, 1, 3, 0, 0, 1])
RNG = np.random.default_rng(0)
START = RNG.random((6, 4)).astype(np.float32)
FACTORS = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
ROWS = COUNTS[:, None] * FACTORS.astype(np.float64)
DENSE = RNG.normal(size=(4, 3)).astype(np.float32)
SLICES = RNG.normal(size=(2, 4)).astype(np.float32)


@pytest.fixture(params=["eager", "function"])
def run(request):
    """Calls a function of no arguments as it is, or as a tf.function."""
    return (lambda function: function()) if request.param == "eager" else lambda function: tf.function(function)()


def make_table(**options):
    return sok.Variable(START, name="clipped", **options)


def make_dynamic():
    table = sok.DynamicVariable(dimension=4, initializer="zeros", name="clipped")
    sok.assign(table, np.arange(6), START)
    return table


def make_stack():
    stack = sok.TableStack({"a": (3, 4), "b": (3, 4)})
    for member, rows in (("a", START[:3]), ("b", START[3:])):
        sok.assign(stack.member(member), np.arange(3), rows)
    return stack


def rows_of(table):
    """[6, 4] float64, by key or member."""
    if isinstance(table, sok.TableStack):
        return np.concatenate([sok.export(table.member(name))[1] for name in "ab"]).astype(np.float64)
    return harness.exported(table)[1].astype(np.float64)


def look_up(table):
    if isinstance(table, sok.TableStack):
        ids = tf.ragged.constant([[1, 2], [], [2, 2], [], [], [2]], dtype=tf.int64)
        return tf.reshape(sok.lookup_sparse(table, ids, combiners="sum"), [-1, 4])
    ids = tf.RaggedTensor.from_row_splits(tf.constant([1, 2, 2, 2, 5], tf.int64), [0, 2, 2, 5])
    return sok.lookup_sparse(table, ids, combiners="sum")


def gradient_of(table, factor=1.0, tape=tf.GradientTape):
    with tape() as recorded:
        loss = factor * tf.reduce_sum(look_up(table) * FACTORS)
    return recorded.gradient(loss, table)


def others():
    """A dense gradient, one as slices, none."""
    return [tf.constant(DENSE), None, tf.IndexedSlices(tf.constant(SLICES), tf.constant([0, 0]), tf.constant([9, 4]))]


def squares(*arrays):
    return sum(np.sum(np.asarray(array, np.float64) ** 2) for array in arrays)


TABLES = {
    "distributed": make_table,
    "localized": lambda: make_table(mode="localized:0"),
    "float16": lambda: make_table(dtype=tf.float16),
    "dynamic": make_dynamic,
    "stack": make_stack,
}


@pytest.mark.parametrize("clip_norm", [1e9, 0.5])
@pytest.mark.parametrize("kind", TABLES)
def test_as_numpy(kind, clip_norm, run):
    """The norm, what is clipped, and the step that is taken with it."""
    table = TABLES[kind]()
    optimizer = sok.OptimizerWrapper(sok.SGD(1.0))
    before = rows_of(table)

    def step():
        gradients = [gradient_of(table), *others()]
        seen = sok.global_norm(gradients)
        clipped, norm = sok.clip_by_global_norm(gradients, clip_norm)
        assert isinstance(clipped[0], PendingGradient) and clipped[2] is None
        assert isinstance(clipped[3], tf.IndexedSlices) and not isinstance(clipped[3], PendingGradient)
        again = sok.global_norm(clipped)
        optimizer.apply_gradients([(clipped[0], table)])
        return seen, norm, again, clipped[0].indices, clipped[0].values, clipped[1], clipped[3].values

    seen, norm, again, slots, values, dense, slices = run(step)
    wanted = math.sqrt(squares(ROWS, DENSE, SLICES))
    factor = min(1.0, clip_norm / wanted)
    assert seen == norm and norm.dtype == tf.float32 and norm.shape == ()
    np.testing.assert_allclose([norm, again], [wanted, wanted * factor], rtol=1e-6)
    assert (np.diff(slots) > 0).all() and len(values) == 3
    np.testing.assert_allclose(np.sort(values, 0), np.sort(factor * ROWS[COUNTS > 0], 0), rtol=1e-6)
    np.testing.assert_allclose(dense, factor * DENSE, rtol=1e-6)
    np.testing.assert_allclose(slices, factor * SLICES, rtol=1e-6)
    close = 4e-3 if kind == "float16" else 1e-6
    np.testing.assert_allclose(rows_of(table), before - factor * ROWS, rtol=close, atol=close)


def test_as_tensorflow(run):
    """Names of arguments, what is given back, and a norm that is given, on all kinds of entries."""
    table = make_table()

    def both():
        gradients = (gradient_of(table), *others())
        results = []
        for module, norm_of in ((tf, tf.linalg.global_norm), (sok, sok.global_norm)):
            norm = norm_of(t_list=gradients, name="norm")
            clipped, used = module.clip_by_global_norm(t_list=gradients, clip_norm=2, use_norm=norm * 2, name="clip")
            assert type(clipped) is list and used.dtype == tf.float32
            results.append([norm, used, *[tf.convert_to_tensor(each) for each in clipped if each is not None]])
        return results

    for theirs, ours in zip(*run(both), strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=1e-6)
    limit = tf.Variable(2.0)
    np.testing.assert_allclose(sok.clip_by_global_norm([tf.constant([3.0, 4.0])], limit)[0][0], [1.2, 1.6], rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_norms_that_are_no_numbers(bad, run):
    table = make_table()

    def clip():
        results = []
        for module in (tf, sok):
            (clipped, dense), norm = module.clip_by_global_norm([gradient_of(table, bad), tf.ones([2])], 1.0)
            results.append((clipped.values, dense, norm))
        return results

    for theirs, ours in zip(*run(clip), strict=True):
        np.testing.assert_array_equal(theirs, ours)
    assert np.isnan(run(clip)[1][0].numpy()[:, 0]).all()


def test_norms_of_nothing(run):
    (norm, of_none, zero, (kept, clipped)) = run(
        lambda: (
            sok.global_norm([]),
            sok.global_norm([None]),
            sok.global_norm([tf.zeros([3]), tf.zeros([0, 2])]),
            (*sok.clip_by_global_norm([tf.zeros([3])], 1.0)[0], *sok.clip_by_global_norm([tf.ones([4])], 1)[0]),
        )
    )
    assert norm == of_none == zero == 0
    np.testing.assert_array_equal(kept, np.zeros(3))
    np.testing.assert_array_equal(clipped, np.full(4, 0.5))
    assert sok.clip_by_global_norm([None], 1.0)[0] == [None]


def test_dtypes():
    """Norms of narrow gradients are float32, those of wide ones float64; gradients keep their dtypes."""
    for dtype, wanted in ((tf.float16, tf.float32), (tf.bfloat16, tf.float32), (tf.float64, tf.float64)):
        gradients = [tf.fill([4], tf.constant(300.0, dtype)), tf.ones([2])]
        (first, second), norm = sok.clip_by_global_norm(gradients, 1.0)
        assert norm.dtype == wanted and first.dtype == dtype and second.dtype == tf.float32
        value = float(gradients[0][0])  # squares overflow float16
        np.testing.assert_allclose(norm, math.sqrt(4 * value**2 + 2), rtol=1e-6)
        np.testing.assert_allclose(tf.cast(first, tf.float32), np.full(4, value / norm.numpy()), rtol=1e-2)


def test_gradients_that_are_scaled(run):
    """By init(gradient="mean") or a tape; one that is given twice counts twice, as in TensorFlow."""
    table = make_table()

    def clip():
        gradient = scaled(gradient_of(table), 0.25)
        other = gradient_of(table)
        (first, second, third), norm = sok.clip_by_global_norm([gradient, gradient, other], 1.0)
        return first.values, scaled(second, 4.0).values, third.values, norm

    first, second, third, norm = run(clip)
    wanted = math.sqrt(squares(ROWS / 4, ROWS / 4, ROWS))
    np.testing.assert_allclose(norm, wanted, rtol=1e-6)
    np.testing.assert_allclose(first * 4, third, rtol=1e-6)
    np.testing.assert_allclose(second, third, rtol=1e-6)


def test_what_becomes_of_gradients(run):
    """Sums of several lookups have a row in parts: its sum counts. What arithmetic made is known too."""
    table = make_table()

    def sums():
        with tf.GradientTape() as tape:
            loss = sum(factor * tf.reduce_sum(look_up(table) * FACTORS) for factor in (1.0, 2.0))
        return tape.gradient(loss, table)

    def clip():
        result = []
        for gradient in (sums(), -sums(), tf.clip_by_norm(sums(), 1e9)):
            assert not isinstance(gradient, PendingGradient)
            (clipped,), norm = sok.clip_by_global_norm([gradient], 1.0)
            assert isinstance(clipped, PendingGradient)
            result.append((norm, clipped.values, clipped.indices))
        return result

    for sign, (norm, values, slots) in zip((1, -1, 1), run(clip), strict=True):
        np.testing.assert_allclose(norm, 3 * math.sqrt(squares(ROWS)), rtol=1e-6)
        assert len(slots) == 3
        np.testing.assert_allclose(np.linalg.norm(values), 1, rtol=1e-6)
        assert np.sign(values[0, 0]) == sign


def test_gradients_that_left_a_function():
    """The tape of this package knows whose they are; dense ones stay tensors."""
    table = make_table()
    compiled = tf.function(lambda: 2 * tf.reduce_sum(look_up(table) * FACTORS))

    def tape():
        return sok.DistributedGradientTape(tf.GradientTape())

    with tape() as recorded:
        loss = compiled()
    gradient = recorded.gradient(loss, table)
    assert isinstance(gradient, tf.IndexedSlices) and not isinstance(gradient, PendingGradient)
    (clipped,), norm = sok.clip_by_global_norm([gradient], 1.0)
    np.testing.assert_allclose(norm, 2 * math.sqrt(squares(ROWS)), rtol=1e-6)
    np.testing.assert_allclose(harness.dense(clipped, table), ROWS / math.sqrt(squares(ROWS)), rtol=1e-6)

    with tape() as recorded:
        loss = tf.reduce_sum(look_up(table) * FACTORS) + tf.reduce_sum(tf.convert_to_tensor(table))
    gradient = recorded.gradient(loss, table)
    (clipped,), norm = sok.clip_by_global_norm([gradient], 1.0)
    np.testing.assert_allclose(norm, math.sqrt(squares(ROWS + 1)), rtol=1e-6)
    assert isinstance(clipped, tf.Tensor)
    np.testing.assert_allclose(sok.global_norm([clipped]), 1, rtol=1e-6)
    assert mark(None, None) is None


def test_steps_are_as_of_unclipped_gradients():
    """An optimizer with states, fused or run on rows, does the same with a clipped gradient as with a smaller loss."""
    import keras

    for make in (
        lambda: keras.optimizers.Adagrad(0.1),
        lambda: keras.optimizers.Adam(0.1, amsgrad=True),  # not fused
    ):
        tables = [make_table(), make_table()]
        for table, clips in zip(tables, (True, False), strict=True):
            optimizer = sok.OptimizerWrapper(make())
            for _ in range(3):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.square(look_up(table)) * FACTORS)
                gradient = tape.gradient(loss, table)
                gradient = (
                    sok.clip_by_global_norm([gradient], 0.3)[0][0]
                    if clips
                    else scaled(gradient, 0.3 / float(np.linalg.norm(gradient.values)))
                )
                optimizer.apply_gradients([(gradient, table)])
        np.testing.assert_allclose(tables[0], tables[1], rtol=1e-5)


def test_gradients_by_key_and_of_evicted_rows():
    table = sok.DynamicVariable(dimension=2, initializer="ones", max_capacity=4, evict_strategy="lru", name="small")
    keys = tf.constant([1, 2, 1], tf.int64)
    with tf.GradientTape() as tape:
        rows, *_ = sok.sparse_read_and_evict(table, keys)
        loss = tf.reduce_sum(rows)
    gradients, norm = sok.clip_by_global_norm([tape.gradient(loss, table)], 1.0)
    np.testing.assert_allclose(norm, math.sqrt(2 * (4 + 1)), rtol=1e-6)
    sok.OptimizerWrapper(sok.SGD(1.0)).apply_gradients([(gradients[0], table)])
    found, rows = (each.numpy() for each in sok.export(table))
    np.testing.assert_allclose(rows[np.argsort(found)][:, 0], 1 - np.array([2, 1]) / norm, rtol=1e-6)

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse(table, tf.ragged.constant([[1, 2]], dtype=tf.int64)))
    clipped, _ = sok.clip_by_global_norm([tape.gradient(loss, table)], 1e-3)
    sok.lookup_sparse(table, tf.ragged.constant([[3, 4, 5, 6]], dtype=tf.int64))  # 1 and 2 go
    with pytest.raises(tf.errors.FailedPreconditionError, match="erased or evicted"):
        harness.finished(lambda: sok.OptimizerWrapper(sok.SGD(1.0)).apply_gradients([(clipped[0], table)]))


def test_micro_batches_whose_rows_went(run):
    """Parts that are clipped one by one, then summed as TABLES.md does: rows that the second lookup evicts count."""
    table = sok.DynamicVariable(1, max_capacity=4, initializer="zeros", name="clipped")
    optimizer = sok.SGD(1.0)

    def part(keys):
        with tf.GradientTape() as tape:
            ids = tf.RaggedTensor.from_row_lengths(tf.constant(keys, tf.int64), [len(keys)])
            loss = tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum"))
        return sok.clip_by_global_norm([tape.gradient(loss, table)], 1e9)[0][0]

    def step(batches):
        parts = [part(keys) for keys in batches]
        values, indices = (tf.concat([getattr(p, of) for p in parts], 0) for of in ("values", "indices"))
        optimizer.apply_gradients([(tf.IndexedSlices(values, indices, parts[0].dense_shape), table)])

    def held():
        keys, rows = (each.numpy().ravel().tolist() for each in sok.export(table))
        return dict(zip(keys, rows, strict=True))

    run(lambda: step([[1, 2], [2, 3]]))
    assert held() == {1: -1.0, 2: -2.0, 3: -1.0}
    with pytest.raises(tf.errors.FailedPreconditionError, match="erased or evicted"):
        harness.finished(lambda: run(lambda: step([[1, 2, 3], [4, 5, 6]])))
    assert {key: row for key, row in held().items() if key > 3} == {4: 0.0, 5: 0.0, 6: 0.0}


def test_in_a_branch():
    """A gradient of the function may be clipped in one of its branches."""
    table = make_table()
    optimizer = sok.OptimizerWrapper(sok.SGD(1.0))

    @tf.function
    def step(clips):
        gradient = gradient_of(table)
        if clips:
            (clipped,), _ = sok.clip_by_global_norm([gradient], 1.0)
            optimizer.apply_gradients([(clipped, table)])

    step(tf.constant(False))
    np.testing.assert_array_equal(table, START)
    step(tf.constant(True))
    np.testing.assert_allclose(table, START - ROWS / math.sqrt(squares(ROWS)), rtol=1e-5)


def test_in_a_graph_of_tensorflow_1():
    with tf.Graph().as_default():
        table, dense = make_table(), tf.compat.v1.get_variable("dense", initializer=DENSE)
        loss = tf.reduce_sum(look_up(table) * FACTORS * tf.reduce_sum(dense, axis=1))  # no product that rounds to TF32
        gradients = tf.compat.v1.gradients(loss, [table, dense])
        clipped, norm = sok.clip_by_global_norm(gradients, 0.5)
        theirs = tf.linalg.global_norm(gradients)
        train = sok.OptimizerWrapper(tf.compat.v1.train.GradientDescentOptimizer(1.0)).apply_gradients(
            zip(clipped, [table, dense], strict=True)
        )
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            values, norm, theirs, _ = session.run([clipped[0].values, norm, theirs, train])
            after = session.run(table)
    np.testing.assert_allclose(norm, theirs, rtol=1e-6)
    expected = ROWS * DENSE.sum(1) * 0.5 / norm
    np.testing.assert_allclose(values, expected[COUNTS > 0], rtol=1e-5)
    np.testing.assert_allclose(after, START - expected, rtol=1e-5)


def test_errors():
    for call in (lambda t: sok.global_norm(t), lambda t: sok.clip_by_global_norm(t, 1.0)):
        for wrong in ("gradients", iter([tf.ones([2])]), tf.ones([2])):
            with pytest.raises(TypeError, match="t_list must be a list"):
                call(wrong)
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError, TypeError)):
            call([tf.ones([2], tf.int32)])
    runtime.shutdown()
    with pytest.raises(RuntimeError, match="init"):
        sok.global_norm([tf.ones([2])])
