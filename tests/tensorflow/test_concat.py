# SPDX-License-Identifier: Apache-2.0
"""lookup_sparse(concat=True): the bits that tf.concat of the list has, forward, backward and after a step."""

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_harness as harness
import tf_keras
from hypothesis import given
from hypothesis import strategies as st

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow.embedding import layer_class

SAME_BATCH = [call for call in cases.CASES if len({item.num_bags for item in call.lookups}) == 1]
OPTIMIZERS = {
    "fused": lambda: keras.optimizers.Adagrad(0.1),
    "not fused": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
}


def train(call, concat, make=OPTIMIZERS["fused"], kind="ragged", compiled=False, **options):
    """(vectors side by side, tables, gradients of the weights) after two steps."""
    variables = harness.tables(call, **options)
    used = [variables[t] for t in sorted({item.table for item in call.lookups})]
    optimizer = sok.OptimizerWrapper(make())
    inputs = [harness.ids(item, kind) for item in call.lookups]
    values = [harness.weight_values(item, kind) for item in call.lookups]
    incoming = tf.concat([call.output_gradient(i) for i in range(len(call.lookups))], 1)

    def step(inputs, values):
        watched = [value for value in values if value is not None]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            given = [harness.with_values(like, value) for like, value in zip(inputs, values, strict=True)]
            outputs = sok.lookup_sparse(
                [variables[item.table] for item in call.lookups],
                inputs,
                given,
                [item.combiner for item in call.lookups],
                concat=concat,
            )
            outputs = outputs if concat else tf.concat(outputs, 1)
            loss = tf.reduce_sum(outputs * incoming)
        gradients = tape.gradient(loss, used + watched)
        optimizer.apply_gradients(zip(gradients[: len(used)], used, strict=True))
        return outputs, gradients[len(used) :]

    run = tf.function(step) if compiled else step
    for _ in range(2):
        outputs, of_weights = run(inputs, values)
    return outputs.numpy(), [table.numpy() for table in variables], [np.asarray(g) for g in of_weights]


def check(call, **options):
    apart, whole = train(call, False, **options), train(call, True, **options)
    np.testing.assert_array_equal(apart[0], whole[0])
    for a, b in zip(apart[1], whole[1], strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(apart[2], whole[2], strict=True):
        # A sum over columns; on a GPU its order is that of the widest loads that the stride allows.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("call", SAME_BATCH, ids=lambda call: call.name)
def test_named_cases(call, compiled):
    check(call, compiled=compiled)


@given(
    cases.calls(same_batch=True, max_tables=6, max_dimension=64),
    st.sampled_from(list(OPTIMIZERS)),
    st.sampled_from(harness.KINDS),
)
def test_any_call(call, name, kind):
    check(call, make=OPTIMIZERS[name], kind=kind)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda dtype: dtype.name)
def test_narrow_rows(dtype):
    check(SAME_BATCH[0], dtype=dtype)


def tables(*dimensions):
    return [
        sok.Variable(np.arange(10.0 * d, dtype=np.float32).reshape(10, d), name=f"t{i}")
        for i, d in enumerate(dimensions)
    ]


def ids(*rows):
    return tf.ragged.constant(rows, dtype=tf.int64, ragged_rank=1)


def test_shapes_and_columns():
    first, second = tables(3, 4)
    output = sok.lookup_sparse([first, second, first], [ids([1], [2, 3])] * 3, combiners="sum", concat=True)
    assert output.shape == (2, 10) and output.dtype == tf.float32
    np.testing.assert_array_equal(output[:, 3:7], sok.lookup_sparse(second, ids([1], [2, 3]), combiners="sum"))

    @tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.int64, 1)])
    def traced(keys):
        outputs = sok.lookup_sparse([first, second], [keys, keys], concat=True)
        assert outputs.shape.as_list() == [None, 7]
        return outputs

    assert traced(ids([1], [2, 3])).shape == (2, 7)


def test_one_op_gives_and_takes_one_tensor():
    """However many tables there are: that is what it is for."""
    several = tables(*[4] * 8)
    optimizer = sok.OptimizerWrapper(sok.SGD(0.1))

    @tf.function
    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(several, [keys] * 8, concat=True) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, several), several, strict=True))

    operations = step.get_concrete_function(ids([1], [2, 3])).graph.get_operations()
    (pooled,) = [op for op in operations if op.type == "SokGatherCombine"]
    (apply,) = [op for op in operations if op.type == "SokApply"]
    assert len(pooled.outputs) == 1 and apply.get_attr("num_values") == 1
    assert not [op for op in operations if op.type in ("ConcatV2", "Split", "SplitV", "Slice", "StridedSlice")]


def test_gradients_that_are_read():
    first, second = tables(3, 4)
    with tf.GradientTape() as tape:
        output = sok.lookup_sparse([first, second, first], [ids([1], [2, 3])] * 3, combiners="sum", concat=True)
        loss = tf.reduce_sum(output * tf.reshape(tf.range(20.0), [2, 10]))
    gradients = tape.gradient(loss, [first, second])
    expected = [[[7, 9, 11], [27, 29, 31], [27, 29, 31]], [[3, 4, 5, 6], [13, 14, 15, 16], [13, 14, 15, 16]]]
    for gradient, rows in zip(gradients, expected, strict=True):
        np.testing.assert_array_equal(gradient.indices, [1, 2, 3])
        np.testing.assert_array_equal(gradient.values, rows)


def test_empty_batch():
    first, second = tables(3, 4)
    none = tf.RaggedTensor.from_row_splits(tf.zeros([0], tf.int64), [0])
    with tf.GradientTape() as tape:
        output = sok.lookup_sparse([first, second], [none, none], concat=True)
        loss = tf.reduce_sum(output)
    assert output.shape == (0, 7)
    for gradient in tape.gradient(loss, [first, second]):
        assert gradient.values.shape[0] == 0


def test_one_table():
    (table,) = tables(3)
    alone = sok.lookup_sparse(table, ids([1], [2, 3]))
    np.testing.assert_array_equal(sok.lookup_sparse(table, ids([1], [2, 3]), concat=True), alone)
    np.testing.assert_array_equal(sok.lookup_sparse([table], [ids([1], [2, 3])], concat=True), alone)


def test_unequal_batches():
    first, second = tables(3, 4)
    batches = ids([1], [2, 3]), ids([1, 2])
    message = "lookup 1 has 1 and lookup 0 has 2"
    for inputs in (batches, [batch.to_sparse() for batch in batches]):
        with pytest.raises(ValueError, match=message):
            sok.lookup_sparse([first, second], list(inputs), concat=True)

    @tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.int64, 1)] * 2)
    def traced(one, other):
        return sok.lookup_sparse([first, second], [one, other], concat=True)

    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        traced(*batches)
    assert traced(batches[1], batches[1]).shape == (1, 7)
    with pytest.raises(ValueError, match="lookup 2 has 3 and lookup 0 has 2"):
        sok.lookup_sparse([first] * 3, [batches[0], batches[0], ids([1], [2], [3])], concat=True)


def test_in_a_graph_of_tf1():
    first, second = (table.numpy() for table in tables(3, 4))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        graph_tables = [sok.Variable(rows, name=f"g{i}") for i, rows in enumerate((first, second))]
        keys = tf.compat.v1.sparse_placeholder(tf.int64, [None, None])
        output = sok.lookup_sparse(graph_tables, [keys, keys], combiners="sum", concat=True)
        optimizer = sok.OptimizerWrapper(tf.compat.v1.train.GradientDescentOptimizer(1.0))
        step = optimizer.minimize(tf.reduce_sum(output), var_list=graph_tables)
        session.run(tf.compat.v1.global_variables_initializer())
        feed = {keys: tf.compat.v1.SparseTensorValue([[0, 0], [1, 0]], [3, 5], [2, 1])}
        np.testing.assert_array_equal(session.run(output, feed), np.concatenate([first, second], 1)[[3, 5]])
        session.run(step, feed)
        np.testing.assert_array_equal(session.run(graph_tables[1])[[3, 5, 6]], second[[3, 5, 6]] - [[1], [1], [0]])


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_collection(library):
    start = [table.numpy() for table in tables(3, 4)]
    results = []
    for concat in (True, False):
        made = {name: sok.Variable(rows, name=name) for name, rows in zip("ab", start, strict=True)}
        layer = layer_class(library)(made, {"x": "a", "y": "b", "z": "a"}, combiners="sum", concat=concat)
        inputs = {name: library.Input((2,), dtype="int64", name=name) for name in "xyz"}
        vectors = layer(inputs)
        if not concat:
            vectors = library.layers.Concatenate()(list(vectors.values()))
        assert tuple(vectors.shape) == (None, 10)
        model = library.Model(inputs, library.layers.Dense(1, kernel_initializer="ones")(vectors))
        model.compile(sok.DistributedOptimizer(library.optimizers.Adagrad(0.1)), "mse")
        features = {name: np.arange(16).reshape(8, 2) % (9 - i) for i, name in enumerate("xyz")}
        model.fit(features, np.arange(8.0)[:, None], batch_size=4, epochs=2, shuffle=False, verbose=0)
        results.append([table.numpy() for table in made.values()])
        again = type(layer).from_config(layer.get_config())
        assert again.concat == concat
    for whole, apart in zip(*results, strict=True):
        np.testing.assert_array_equal(whole, apart)
