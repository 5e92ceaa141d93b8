# SPDX-License-Identifier: Apache-2.0
"""lookup_sparse and all2all_dense_embedding against the reference and TensorFlow's own lookup, with all gradients."""

import cases
import numpy as np
import pytest
import reference
import tensorflow as tf
import tensorflow_harness as harness
from hypothesis import given
from hypothesis import strategies as st

import sparse_operation_kit.tensorflow as sok


def check(call, kind, in_function=False):
    """Outputs and all gradients of a call."""
    variables = harness.tables(call)
    weights = [harness.weight_values(item, kind) for item in call.lookups]
    used = sorted({item.table for item in call.lookups})
    weighted = [i for i, item in enumerate(call.lookups) if item.weights is not None]

    def run():
        with tf.GradientTape() as tape:
            tape.watch([weights[i] for i in weighted])
            outputs = harness.lookup(call, variables, kind, weights)
            loss = harness.weighted_sum(call, outputs)
        return outputs, tape.gradient(loss, [variables[t] for t in used] + [weights[i] for i in weighted])

    outputs, gradients = (tf.function(run) if in_function else run)()
    for i, (item, output) in enumerate(zip(call.lookups, outputs, strict=True)):
        assert output.dtype == tf.float32
        reference.assert_close(output, call.output(i), magnitude=call.output(i, True), message=f"output {i}")
        expected = harness.oracle(call.rows(item.table), item)
        reference.assert_close(output, expected, magnitude=call.output(i, True), message=f"output {i} of TensorFlow")
    for t, gradient in zip(used, gradients[: len(used)], strict=True):
        assert isinstance(gradient, tf.IndexedSlices)
        actual = harness.dense(gradient, variables[t])
        reference.assert_close(actual, call.row_gradient(t), magnitude=call.row_gradient(t, True), message=f"table {t}")
        np.testing.assert_array_equal(np.sort(harness.touched(gradient, variables[t])), call.touched(t))
    for i, gradient in zip(weighted, gradients[len(used) :], strict=True):
        actual = np.empty(len(call.lookups[i].keys))
        actual[harness.order_of(call.lookups[i], kind)] = gradient.numpy()
        terms = call.weight_gradient(i, True)
        reference.assert_close(actual, call.weight_gradient(i), 1e-6, magnitude=terms, message=f"weights {i}")


@pytest.mark.parametrize("kind", harness.KINDS)
@pytest.mark.parametrize("call", cases.CASES, ids=lambda call: call.name)
def test_cases(call, kind):
    check(call, kind)


@pytest.mark.parametrize("call", cases.CASES[::4], ids=lambda call: call.name)
def test_cases_in_a_function(call):
    check(call, "sparse", in_function=True)


@given(cases.calls(), st.sampled_from(harness.KINDS))
def test_any_call(call, kind):
    check(call, kind)


@given(cases.calls(max_tables=3, max_dimension=33), st.sampled_from(harness.KINDS))
def test_any_call_in_a_function(call, kind):
    check(call, kind, in_function=True)


def test_single_table_gives_a_tensor_and_lists_give_lists():
    table = sok.Variable(np.eye(4, dtype=np.float32))
    ids = tf.ragged.constant([[1], [2, 3]])
    alone = sok.lookup_sparse(table, ids)
    np.testing.assert_array_equal(alone, [[0, 1, 0, 0], [0, 0, 0.5, 0.5]])
    listed = sok.lookup_sparse([table], [ids], combiners="SUM")
    assert isinstance(listed, list)
    np.testing.assert_array_equal(listed[0], [[0, 1, 0, 0], [0, 0, 1, 1]])


def test_combiners_in_any_case_and_default_mean():
    table = sok.Variable(np.ones((4, 2), np.float32))
    ids = tf.ragged.constant([[0, 1, 2, 3]])
    results = sok.lookup_sparse([table] * 4, [ids] * 4, combiners=["Sum", "MEAN", "sqrtN", None])
    assert [float(r[0, 0]) for r in results] == [4, 1, 2, 1]


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 0, 3), (1, 2, 2, 2)])
def test_dense_embedding(dtype, shape):
    rows = np.random.default_rng(1).random((11, 3)).astype(np.float32)
    table = sok.Variable(rows)
    indices = np.random.default_rng(2).integers(0, 11, shape)
    with tf.GradientTape() as tape:
        output = sok.all2all_dense_embedding(table, tf.constant(indices, dtype))
        loss = tf.reduce_sum(output * 2)
    assert output.shape == (*shape, 3)
    np.testing.assert_array_equal(output, rows[indices])
    expected = np.zeros((11, 3))
    np.add.at(expected, indices.reshape(-1), 2.0)
    np.testing.assert_allclose(harness.dense(tape.gradient(loss, table), table), expected)


def test_unknown_batch_size_in_a_function():
    table = sok.Variable(np.ones((10, 4), np.float32))

    @tf.function(
        input_signature=[
            tf.SparseTensorSpec([None, None], tf.int64),
            tf.RaggedTensorSpec([None, None], tf.int32, 1, tf.int32),
        ]
    )
    def run(sparse, ragged):
        outputs = sok.lookup_sparse([table, table], [sparse, ragged], combiners="sum")
        assert [o.shape.as_list() for o in outputs] == [[None, 4], [None, 4]]
        return outputs

    sparse = tf.SparseTensor([[2, 0]], tf.constant([7], tf.int64), [4, 1])
    first, second = run(sparse, tf.ragged.constant([[1, 2, 3], []], dtype=tf.int32, row_splits_dtype=tf.int32))
    np.testing.assert_array_equal(first[:, 0], [0, 0, 1, 0])
    np.testing.assert_array_equal(second[:, 0], [3, 0])
    assert sum(op.type == "SokGatherCombine" for op in run.get_concrete_function().graph.get_operations()) == 1


def test_weights_of_other_float_types():
    table = sok.Variable(np.ones((10, 4), np.float32))
    ids = tf.ragged.constant([[1, 2], [3]])
    for dtype in (tf.float16, tf.bfloat16, tf.float64):
        values = tf.constant([0.5, 0.25, 2.0], dtype)
        with tf.GradientTape() as tape:
            tape.watch(values)
            output = sok.lookup_sparse(table, ids, ids.with_values(values), "sum")
            loss = tf.reduce_sum(output)
        np.testing.assert_array_equal(output[:, 0], [0.75, 2])
        gradient = tape.gradient(loss, values)
        assert gradient.dtype == dtype
        np.testing.assert_array_equal(tf.cast(gradient, tf.float32), [4, 4, 4])


def test_ragged_weights_with_other_but_equal_row_splits():
    table = sok.Variable(np.ones((10, 4), np.float32))
    ids = tf.ragged.constant([[1, 2], [3]])
    weights = tf.ragged.constant([[1.0, 2.0], [3.0]])
    run = tf.function(lambda: sok.lookup_sparse(table, ids, weights, "sum"))
    for output in (sok.lookup_sparse(table, ids, weights, "sum"), run()):
        np.testing.assert_array_equal(output[:, 0], [3, 3])


def test_bags_of_one_key_take_no_row_splits():
    """Known before it runs: dense ids of one key a bag, as EmbeddingBagCollection makes them."""
    table = sok.Variable(np.arange(40, dtype=np.float32).reshape(10, 4))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def run(keys):
        bags = tf.RaggedTensor.from_uniform_row_length(keys, 1)
        with tf.GradientTape() as tape:
            output = sok.lookup_sparse(table, bags, combiners="mean")
            loss = tf.reduce_sum(output * 2)
        return output, tape.gradient(loss, table)

    output, gradient = run(tf.constant([3, 3, 1], tf.int64))
    np.testing.assert_array_equal(output[:, 0], [12, 12, 4])
    np.testing.assert_array_equal(harness.by_key(gradient, table)[:4, 0], [0, 2, 0, 4])
    assert run(tf.constant([], tf.int64))[0].shape == (0, 4)
    lookup = next(op for op in run.get_concrete_function().graph.get_operations() if op.type == "SokGatherCombine")
    assert lookup.inputs[2].shape == (0,)


@pytest.mark.parametrize("in_function", [False, True])
def test_single_ids_of_several_tables(in_function):
    items = sok.Variable(np.random.default_rng(3).normal(size=(10, 4)).astype(np.float32), name="items")
    users = sok.Variable(np.random.default_rng(4).normal(size=(6, 2)).astype(np.float32), name="users")
    dynamic = sok.DynamicVariable(3, initializer="2.0")
    indices = [tf.constant([[1, 2, 1], [9, 0, 3]]), tf.constant(5, tf.int32), tf.constant([4, 4])]
    given = [*indices, tf.constant([-7]), tf.zeros([0, 2], tf.int64)]

    def run():
        with tf.GradientTape() as tape:
            outputs = sok.all2all_dense_embedding([items, users, items, dynamic, users], given)
            loss = tf.add_n([tf.reduce_sum(output) for output in outputs])
        return outputs, tape.gradient(loss, [items, users])

    outputs, gradients = (tf.function(run) if in_function else run)()
    for output, table, index in zip(outputs, (items, users, items), indices, strict=False):
        np.testing.assert_array_equal(output, table.numpy()[index.numpy()])
    assert (outputs[3].numpy() == np.full((1, 3), 2.0)).all() and outputs[4].shape == (0, 2, 2)
    assert harness.dense(gradients[0], items)[:, 0].tolist() == [1, 2, 1, 1, 2, 0, 0, 0, 0, 1]
    assert harness.dense(gradients[1], users)[:, 0].tolist() == [0, 0, 0, 0, 0, 1]
    (alone,) = sok.all2all_dense_embedding((items,), (indices[0],))
    np.testing.assert_array_equal(alone, outputs[0])
    for tables, ids, error, message in (
        ([items, users], indices[:1], ValueError, "indices has 1 entries, but param has 2 tables"),
        ([], [], ValueError, "param has 0 tables"),
        ([items], indices[0], TypeError, "param is a list, so indices must be one, got EagerTensor"),
        ([items, users], [indices[0], tf.constant([6])], tf.errors.InvalidArgumentError, r"'users'.* 6 .*\[0, 6\)"),
    ):
        with pytest.raises(error, match=message):
            harness.finished(sok.all2all_dense_embedding, tables, ids)
