# SPDX-License-Identifier: Apache-2.0
"""Checks of tensorflow_worker.py: stacks of tables on several ranks."""

import datetime
import functools
import types

import numpy as np
import stacked
import tensorflow as tf
from tensorflow_saving import barrier, shared_folder

import sparse_operation_kit.tensorflow as sok


def _made(mode, initializer="normal"):
    shapes = {name: (rows, stacked.DIMENSION) for name, rows in stacked.ROWS.items()}
    options = {"initializer": initializer, "mode": mode}
    return sok.TableStack(shapes, **options), [sok.Variable(shape=s, name=n, **options) for n, s in shapes.items()]


def _check_rows(stack, tables):
    for member, table in zip(stack.members.values(), tables, strict=True):
        np.testing.assert_allclose(member.numpy(), table.numpy(), rtol=2e-6, atol=2e-6)
        for mine, own in zip(sok.export(member), sok.export(table), strict=True):
            np.testing.assert_allclose(mine, own, rtol=2e-6, atol=2e-6)


def _ragged(values, splits):
    return tf.RaggedTensor.from_row_splits(tf.constant(values), tf.constant(splits))


def stacks():
    """Outputs, steps, dumps and changed rows of a stack are those of its tables by themselves."""
    rank = sok.rank()
    for mode, combiner in zip(stacked.modes(sok.num_ranks()), stacked.COMBINERS, strict=False):
        stack, tables = _made(mode)
        _check_rows(stack, tables)
        optimizers = [sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1)) for _ in range(2)]
        for step in range(3):
            keys, lengths = stacked.batch(rank, step)
            flat = _ragged(*stacked.flat(keys, lengths))
            each = [_ragged(keys[name], stacked.splits(lengths[name])) for name in keys]
            with tf.GradientTape(persistent=True) as tape:
                output = sok.lookup_sparse(stack, flat, combiners=combiner)
                expected = tf.concat(sok.lookup_sparse(tables, each, combiners=combiner), axis=1)
                loss = stacked.loss_weights(rank, step, tuple(output.shape))
                sums = [tf.reduce_sum(vectors * loss) for vectors in (output, expected)]
            np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
            for optimizer, total, variables in zip(optimizers, sums, ([stack], tables), strict=True):
                optimizer.apply_gradients(zip(tape.gradient(total, variables), variables, strict=True))
        _check_rows(stack, tables)
        folder = shared_folder()
        sok.dump(f"{folder}/stack", stack, optimizers[0], progress=False)
        new_stack, new_tables = _made(mode, "zeros")
        sok.load(f"{folder}/stack", new_tables, progress=False)
        sok.dump(f"{folder}/tables", new_tables, progress=False)
        sok.load(f"{folder}/tables", new_stack, progress=False)
        np.testing.assert_array_equal(new_stack.numpy(), stack.numpy())
        sok.track_changes(stack)
        barrier("tracked")  # by all before the earliest threshold
        since = datetime.datetime.now(datetime.timezone.utc)
        member = stack.member("large")
        mine = np.arange(40)[member.placement.mine(np.arange(40))]
        sok.assign(member, mine, np.full((len(mine), stacked.DIMENSION), 2.0, np.float32))
        changed, rows = sok.incremental_model_dump(stack, since)
        assert [len(each) for each in changed] == [0, 0, 40, 0], (changed, since)
        assert (rows[2] == 2).all(), rows[2]
        sok.load_incremental((changed, rows), new_stack)
        assert (new_stack.member("large").numpy() == 2).all()
        np.testing.assert_array_equal(new_stack.member("last").numpy(), stack.member("last").numpy())


def wrong_keys_of_members():
    """A key outside its member on one rank is an error of all, which names the member and the rank."""
    stack, _ = _made(None)
    last = sok.num_ranks() - 1
    before = stack.numpy()
    good = _ragged([0, 0, 39, 1], range(5))
    for ids, message in (
        (_ragged([0, 1, 39, 1], range(5)), "table 'one': key 1 is outside [0, 1)"),
        (_ragged([0, 1, 2, 3, 4], range(6)), "5 bags, and the stack has 4 tables"),
    ):
        try:
            sok.lookup_sparse(stack, ids if sok.rank() == last else good)
        except tf.errors.InvalidArgumentError as caught:
            assert (message if sok.rank() == last else f"rank {last}") in str(caught), str(caught)
        else:
            raise AssertionError("no error")
    assert sok.lookup_sparse(stack, good).shape == (1, 16)
    np.testing.assert_array_equal(stack.numpy(), before)


def _keyed(names, values, offsets):
    return types.SimpleNamespace(
        keys=lambda: names,
        values=lambda: tf.convert_to_tensor(values),
        offsets=lambda: tf.convert_to_tensor(offsets),
    )


def wrong_inputs_of_a_collection():
    """What a layer refuses on one rank, before it looks anything up, is an error of all."""
    last = sok.num_ranks() - 1
    good = _keyed(["b", "a"], [0, 1], [0, 1, 2])
    for stack in (True, False):
        layer = sok.EmbeddingBagCollection({"a": (5, 4), "b": (30, 4)}, stack=stack)
        for ids, kind in (
            (_keyed(["b", "a"], [0, 1, 2], [0, 1, 2, 3]), ValueError),
            (_keyed(["b", "c"], [0, 1], [0, 1, 2]), KeyError),
            ({"a": tf.zeros([1, 1, 1], tf.int64), "b": [0]}, ValueError),
            ({"a": tf.zeros([1, 1], tf.int64), "b": [0.0]}, TypeError),
            ({"a": [0]}, KeyError),
        ):
            try:
                layer.call(ids if sok.rank() == last else good)
            except (kind, tf.errors.InvalidArgumentError) as caught:
                told = isinstance(caught, kind) if sok.rank() == last else f"rank {last}" in str(caught)
                assert told, str(caught)
            else:
                raise AssertionError("no error")
        assert layer.call(good)["a"].shape == (1, 4)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.int64)])
        def step(values, offsets, layer=layer):
            return layer.call(_keyed(["b", "a"], values, offsets))["a"]

        try:
            step(tf.range(3, dtype=tf.int64), tf.range(4 if sok.rank() == last else 3, dtype=tf.int64))
        except tf.errors.InvalidArgumentError as error:
            assert ("offsets of 4 entries" if sok.rank() == last else f"rank {last}") in str(error), error
        else:
            raise AssertionError("no error")


def features_of_other_batches():
    """Features that have batches of different sizes, or ids of another kind, on all ranks or on one alone."""
    last, rank = sok.num_ranks() - 1, sok.rank()
    made = [sok.EmbeddingBagCollection({"a": (5, 4), "b": (30, 4)}, stack=stack) for stack in (True, False)]
    optimizers = [sok.OptimizerWrapper(sok.SGD(0.5)) for _ in made]
    for sizes in ([(2, 2)] * last + [(2, 3)], [(0, 1)] + [(1, 1)] * last, [(i, 2 * i + 1) for i in range(last + 1)]):
        ids = {f: (tf.range(n, dtype=tf.int64)[:, None] + rank) % 5 for f, n in zip("ab", sizes[rank], strict=True)}
        weights = {"b": tf.range(1.0, sizes[rank][1] + 1)[:, None]}
        sparse = tf.sparse.from_dense(ids["a"] + 1).with_values(tf.reshape(ids["a"], [-1]))
        mixed = {**ids, "a": sparse} if rank == last else ids

        def step(layer, optimizer, ids=ids, weights=weights):
            with tf.GradientTape() as tape:
                output = layer.call(ids, weights)
                loss = sum(tf.reduce_sum(vectors * (i + 2.0)) for i, vectors in enumerate(output.values()))
            variables = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return output

        for run in (functools.partial(step, ids=mixed), tf.function(step)):
            outputs = [run(layer, optimizer) for layer, optimizer in zip(made, optimizers, strict=True)]
            for feature, size in zip("ab", sizes[rank], strict=True):
                assert outputs[0][feature].shape == (size, 4)
                np.testing.assert_array_equal(*(each[feature] for each in outputs))
            for table in "ab":
                stacked_rows, rows = (each.tables[table].numpy() for each in made)
                np.testing.assert_allclose(stacked_rows, rows, rtol=1e-6)
    of_unknown_sizes = tf.function(
        made[0].call, input_signature=[dict.fromkeys("ab", tf.TensorSpec([None, 2], tf.int64))]
    )
    assert of_unknown_sizes(dict.fromkeys("ab", tf.ones([3, 2], tf.int64)))["b"].shape == (3, 4)
    try:
        of_unknown_sizes({f: tf.ones([n, 2], tf.int64) for f, n in (("a", 1), ("b", 2 if rank == last else 1))})
    except tf.errors.InvalidArgumentError as error:
        assert "there are [1, 2] bags" in str(error) if rank == last else f"rank {last}" in str(error), error
    else:
        raise AssertionError("no error")
    layer = sok.EmbeddingBagCollection({"a": (5, 4), "b": (30, 4)}, concat=True)
    good = {"a": tf.constant([[0]]), "b": tf.constant([[1]])}
    try:
        layer.call({**good, "b": tf.constant([[1], [2]])} if rank == last else good)
    except (ValueError, tf.errors.InvalidArgumentError) as caught:
        assert "['a', 'b'] have [1, 2]" in str(caught) if rank == last else f"rank {last}" in str(caught), caught
    else:
        raise AssertionError("no error")
    assert layer.call(good).shape == (1, 8)
