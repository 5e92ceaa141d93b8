# SPDX-License-Identifier: Apache-2.0
"""The shared cases as tensors, and tf.nn.embedding_lookup_sparse in float64 as the oracle of the forward pass."""

import numpy as np
import reference
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok

KINDS = ("ragged", "sparse", "unsorted")


def tables(call, num_ranks=1, **options):
    """The tables of a call as variables."""
    return [
        sok.Variable(call.rows(t), mode=table.mode(num_ranks), name=f"table{t}", **options)
        for t, table in enumerate(call.tables)
    ]


def order_of(item, kind):
    """[n]: which of the lookup's entries each value of its tensor is."""
    return item.coordinates(shuffle=5)[1] if kind == "unsorted" else np.arange(len(item.keys))


def ids(item, kind="ragged"):
    """A lookup's ids; "unsorted" is a sparse tensor in random order."""
    if kind == "ragged":
        return tf.RaggedTensor.from_row_splits(item.keys, np.asarray(item.splits, np.int64))
    indices, order = item.coordinates(shuffle=5 if kind == "unsorted" else None)
    return tf.SparseTensor(indices, item.keys[order], item.dense_shape)


def weight_values(item, kind="ragged"):
    """A lookup's weights as a plain tensor in the order of its ids, or None."""
    return None if item.weights is None else tf.constant(item.weights[order_of(item, kind)])


def with_values(like, values):
    """`values` in the structure of `like`, or None."""
    if values is None:
        return None
    return like.with_values(values)


def lookup(call, variables, kind="ragged", values=None):
    """lookup_sparse over a call. `values`: weights as `weight_values` gives them."""
    inputs = [ids(item, kind) for item in call.lookups]
    values = [weight_values(item, kind) for item in call.lookups] if values is None else values
    return sok.lookup_sparse(
        [variables[item.table] for item in call.lookups],
        inputs,
        [with_values(like, value) for like, value in zip(inputs, values, strict=True)],
        [item.combiner for item in call.lookups],
    )


def weighted_sum(call, outputs):
    """A loss whose gradient in output i is call.output_gradient(i)."""
    return tf.add_n([tf.reduce_sum(o * call.output_gradient(i)) for i, o in enumerate(outputs)])


def touched(gradient, table):
    """The keys of the rows that a gradient of a table is of, in its order."""
    return table.held().keys(gradient.indices.numpy())


def dense(gradient, table):
    """The gradient of a whole table as a matrix, after checking that slots are distinct and ascending."""
    slots = gradient.indices.numpy()
    assert (np.diff(slots) > 0).all(), f"slots are not ascending: {slots}"
    result = np.zeros(table.global_shape)
    result[touched(gradient, table)] = gradient.values.numpy()
    return result


def by_key(gradient, table):
    """The rows of the gradient of a whole table, as the tensor that it becomes, by key."""
    return tf.convert_to_tensor(gradient).numpy()[table.held().slots(np.arange(table.global_shape[0]))]


def finished(function, *arguments):
    """function(*arguments), and whatever a GPU found wrong in it."""
    result = function(*arguments)
    sok.check_errors()
    return result


def oracle(table, item):
    """tf.nn.embedding_lookup_sparse in float64; zeros for the bags that it gives NaN or leaves out."""
    like = ids(item, "sparse")
    result = np.zeros((item.num_bags, table.shape[1]))
    if not len(item.keys):
        return result
    weights = None if item.weights is None else like.with_values(tf.constant(item.weights, tf.float64))
    rows = tf.nn.embedding_lookup_sparse(tf.constant(table, tf.float64), like, weights, combiner=item.combiner).numpy()
    result[: len(rows)] = rows
    factors = reference.entry_weights(item.keys, item.weights)
    for bag, (begin, end) in enumerate(zip(item.splits[:-1], item.splits[1:], strict=True)):
        if reference.divisor(item.combiner, factors[begin:end]) == 0:
            result[bag] = 0
    return result


def exported(table):
    """(keys, rows) of a table as arrays, the keys ascending."""
    keys, rows = (np.asarray(part) for part in sok.export(table))
    order = np.argsort(keys)
    return keys[order], rows[order]
