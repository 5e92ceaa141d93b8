# SPDX-License-Identifier: Apache-2.0
"""What test_tensorflow_hybrid.py runs on every rank: DistributedEmbedding beside a model of one process.

`horovodrun -np N python tensorflow_hybrid.py CHECK ...`; with TF_USE_LEGACY_KERAS=1 the layers are tf_keras's. Nobody
calls hvd.init() or sok.init() before the layer, unless SOK_TEST_DEVICE=gpu gives each rank a GPU of its own.
"""

import json
import os
import pathlib
import sys
import tempfile
import warnings
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow_support import restart, start_anew, take_own_gpu  # loads what tests share

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import dist_model_parallel as dmp
from sparse_operation_kit.tensorflow import distributed
from sparse_operation_kit.tensorflow.group import Group

import checking  # isort: skip
import following  # isort: skip
import hybrid_examples  # isort: skip
from tensorflow_hybrid_files import Custom, changes, keras_files, wrong_inputs  # isort: skip  # noqa: F401
from tensorflow_hybrid_files import wrong_inputs_of_own_classes  # isort: skip  # noqa: F401
from tensorflow_hybrid_ranks import ranks_without_tables_to_train, regularized  # isort: skip  # noqa: F401
from hybrid_model import ALL_KINDS, DENSE, PLANNED, TABLES, Case, check_report  # isort: skip


def as_input(kind, bags, dtype=tf.int64):
    if kind == "single":
        return tf.constant([bag[0] for bag in bags], dtype, [len(bags)])
    if kind in DENSE:
        return tf.constant(bags, tf.int32, [len(bags), DENSE[kind]])
    ragged = tf.RaggedTensor.from_row_lengths(
        tf.constant([i for bag in bags for i in bag], dtype), [len(bag) for bag in bags]
    )
    return ragged if kind == "ragged" else ragged.to_sparse()


def compare(
    tables,
    combiners,
    kinds,
    tables_of,
    *,
    dp_input=True,
    equal=True,
    batch=None,
    compiled=False,
    step="tape",
    **options,
):
    """Outputs, and tables after a step of SGD of the mean of the ranks' losses, beside one process."""
    rank = hvd.rank()
    case = Case(tables, combiners, kinds, tables_of, rank, hvd.size(), equal, batch)
    embeddings = [dmp.Embedding(*shape, combiner=c) for shape, c in zip(tables, combiners, strict=True)]
    if "constraints" in options:
        options["strategy"] = dmp.plan(embeddings, batch_size=64, input_table_map=tables_of, **options)
        del options["constraints"]
    layer = dmp.DistributedEmbedding(
        embeddings, input_table_map=tables_of, dp_input=dp_input, name=f"first_{len(tables)}", **options
    )
    layer.build()
    for t, rows in enumerate(layer.get_weights(True)):
        np.testing.assert_array_equal(rows, hybrid_examples.first_rows(f"{layer.name}/{t}", *tables[t]))
    layer.set_weights(case.start, chunk=5)
    for got, wanted in zip(layer.get_weights(True), case.start, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert len(layer.get_weights()) == (len(tables) if rank == 0 else 0)
    if dp_input:
        inputs = [as_input(kind, each[case.share]) for kind, each in zip(kinds, case.bags, strict=True)]
    else:
        inputs = [as_input(kinds[i], case.bags[i]) for i in layer.strategy.input_ids_list[rank]]
    forward = tf.function(lambda x: layer(x), input_signature=[list(map(unknown, inputs))]) if compiled else layer
    with tf.GradientTape() as tape:
        outputs = forward(inputs)
        upstream = [tf.constant(each[case.share], tf.float32) for each in case.upstream]
        products = [tf.reduce_sum(o * tf.reshape(u, tf.shape(o))) for o, u in zip(outputs, upstream, strict=True)]
        loss = tf.add_n(products)
    case.check_outputs(outputs)
    variables = layer.trainable_variables
    if step == "tape":
        gradients = dmp.DistributedGradientTape(tape).gradient(loss, variables)
        case.check_norm(sok.global_norm(gradients))
        pairs = [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]
        assert all(isinstance(gradient, tf.IndexedSlices) for gradient, _ in pairs)  # of replicated tables too
        if pairs:
            tf.keras.optimizers.SGD(0.5).apply_gradients(pairs)
    else:
        of = {"optimizer": tf.keras.optimizers.SGD, "adagrad": tf.keras.optimizers.Adagrad}[step]
        optimizer = dmp.DistributedOptimizer(of(0.5))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    case.check_tables(layer.get_weights(True), 0.5, step == "adagrad")
    return layer


def unknown(value):
    """A specification that says nothing of sizes that an input may have."""
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec([None, None], value.dtype)
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec([None, None], value.dtype)
    return tf.TensorSpec([None, *value.shape[1:]], value.dtype)


# --- checks -----------------------------------------------------------------------------------------------------------


def random_models():
    """Tables, maps, thresholds, strategies, plans and kinds of inputs at random; eager and compiled, all steps."""
    hybrid_examples.run(compare, Group())


def all_groups_and_kinds():
    """Replicated, whole, column- and row-sliced tables in one layer, each with every kind of input, some shared."""
    for compiled, equal in ((False, True), (True, False)):
        layer = compare(TABLES, **ALL_KINDS, compiled=compiled, equal=equal)
        if hvd.size() > 1:
            assert layer.strategy.table_groups == [[1], [0, 3, 4, 5], [2]]


def own_inputs():
    """dp_input=False: a rank gives its own inputs, all samples of them."""
    for strategy in ("basic", "memory_optimized"):
        for compiled in (False, True):
            tables_of = [1, 0, 2, 3, 4, 5, 2]
            kinds = ["ragged", "dense", "sparse", "single", "dense", "ragged", "dense"]
            compare(TABLES, ["sum"] * 6, kinds, tables_of, dp_input=False, strategy=strategy, compiled=compiled)
    layer = dmp.DistributedEmbedding([dmp.Embedding(*shape) for shape in TABLES], dp_input=False)
    number = len(layer.strategy.input_ids_list[hvd.rank()])
    for size, message in ((1, f"Expect .* inputs, got {number - 1}"), (hvd.size() + 1, "not divisible")):
        given = [tf.zeros([size], tf.int64)] * (number - 1 if "Expect" in message else number)
        if hvd.size() > 1:
            raises(ValueError, message, lambda given=given: layer(given))


def planned():
    """Plans with everything that there is, and without any wish; the same on all ranks."""
    ranks = hvd.size()
    kinds, combiners = ["ragged", "dense", "sparse", "single", "dense", "ragged", "dense"], ["sum", "mean"] * 3
    tables_of = [1, 0, 2, 3, 4, 5, 2]
    shapes = [dmp.Embedding(*shape, combiner=c) for shape, c in zip(TABLES, combiners, strict=True)]
    made = dmp.plan(shapes, constraints=PLANNED, input_table_map=tables_of, batch_size=12, optimizer="adam")
    if ranks > 1:
        assert made.strategy.table_groups == [[1], [0, 3, 5], [2, 4]]
    for compiled in (False, True):
        layer = compare(TABLES, combiners, kinds, tables_of, strategy=made, equal=False, compiled=compiled)
    assert check_report(layer, ranks).request.optimizer == "Adam"
    again = dmp.DistributedEmbedding.from_config(layer.get_config())
    assert again.strategy.local_maps == layer.strategy.local_maps
    layer = compare(TABLES, combiners, kinds, tables_of, strategy="planned", step="optimizer")
    inputs = [tf.constant([[1, 2]])] * len(tables_of)
    report = check_report(layer, ranks, inputs=inputs, repeats=1)
    assert report.request.batch_size == ranks and set(report.request.hotness) == {2.0}
    layer = dmp.DistributedEmbedding([dmp.Embedding(5, 2)] * 2 * ranks, strategy="planned")
    assert {tuple(o.shape) for o in layer([tf.constant([[1], [2], [3]])] * 2 * ranks)} == {(3, 1, 2)}
    assert {tuple(s) for s in layer.compute_output_shape([(3, 1)] * 2 * ranks)} == {(3, 1, 2)}
    plain = json.dumps([made.to_config(), layer.strategy.assignment.columns, layer.strategy.table_groups])
    assert len(set(Group().allgather(plain.encode()))) == 1
    compare(TABLES, combiners, kinds, tables_of, strategy="planned", dp_input=False)
    one_rank = {0: {"choices": ["whole"]}, 1: {"choices": ["replicated"]}}
    for step in ("tape", "adagrad"):
        compare([(15, 1), (5, 2)], ["sum"] * 2, ["dense"] * 2, [0, 1], step=step, constraints=one_rank)


def unequal_columns():
    """Slices of a table that met on a rank are wider than the others (a fault of distributed-embeddings)."""
    compare(
        [(4, 10), (5, 3)], ["sum"] * 2, ["dense"] * 2, [0, 1], strategy="memory_optimized", column_slice_threshold=18
    )
    if hvd.size() in (1, 3):
        shared = {"strategy": "memory_balanced", "column_slice_threshold": 8}
        compare([(5, 2), (5, 2)], ["sum"] * 2, ["single"] * 2, [1, 0], **shared)


def gradient_of_means():
    """With init(gradient="mean") tables are not divided twice."""
    restart(gradient="mean")
    try:
        for step in ("tape", "optimizer"):
            compare(TABLES[:4], ["sum"] * 4, ["dense"] * 4, [0, 1, 2, 3], step=step)
    finally:
        restart()


def raises(kind, message, call):
    import re

    try:
        call()
    except kind as error:
        assert re.search(message, str(error)), error
    else:
        raise AssertionError(f"no error: {message}")


def wrong_ids():
    """An id outside its table is an error on all ranks, also where the row would be another table's of a variable."""
    layer = dmp.DistributedEmbedding([dmp.Embedding(5, 2, combiner="sum") for _ in range(2 * hvd.size())])
    layer.build()
    before = layer.get_weights(True)
    for key in (5, 6, -1, -4):
        for table in range(len(before)):
            mine = key if hvd.rank() == 0 else 1
            inputs = [tf.constant([[1], [mine if t == table else 2]]) for t in range(len(before))]
            raises((tf.errors.InvalidArgumentError, tf.errors.OpError), "outside|rank 0", lambda i=inputs: layer(i))
    for old, now in zip(before, layer.get_weights(True), strict=True):
        np.testing.assert_array_equal(old, now)
    raises(ValueError, "list of inputs", lambda: layer(tf.constant([1])))
    raises(
        ValueError, "same batchsize", lambda: layer([tf.zeros([2 + (i == 0), 1], tf.int32) for i in range(len(before))])
    )
    raises(ValueError, "Expect", lambda: layer([tf.zeros([2, 1], tf.int32)]))


def first_rows():
    """Tables of one variable keep their own initial values, which are the same at any number of ranks and wherever
    their columns lie; what is not alike is not one variable.
    """
    shapes, kinds = [(6, 4)] * 4, ["zeros", "uniform", "uniform", "ones"]
    wanted = None
    for options in ({}, {"column_slice_threshold": 6}, {"row_slice_threshold": 1}, {"data_parallel_threshold": 99}):
        layer = dmp.DistributedEmbedding(
            [dmp.Embedding(*s, k, combiner="sum") for s, k in zip(shapes, kinds, strict=True)], name="first", **options
        )
        found = layer.get_weights(True)
        assert (found[0] == 0).all() and (found[3] == 1).all() and (found[1] != found[2]).all()
        alone = [sok.Variable(shape=(6, 4), initializer="uniform", name=f"first/{t}") for t in (1, 2)]
        wanted = wanted or [whole(variable) for variable in alone]
        np.testing.assert_array_equal(found[1:3], wanted)
    frozen = [dmp.Embedding(6, 4, combiner="sum", trainable=t % 2 == 0) for t in range(4 * hvd.size())]
    layer = dmp.DistributedEmbedding(frozen, name="frozen")
    dense = tf.Variable(2.0)  # with two ranks, one of them trains no table
    with tf.GradientTape() as tape:
        loss = dense * tf.add_n([tf.reduce_sum(o) for o in layer([tf.constant([[1]])] * len(frozen))])
    before = layer.get_weights(True)
    variables = [*layer.trainable_variables, dense]
    gradients = dmp.DistributedGradientTape(tape).gradient(loss, variables)
    sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0)).apply_gradients(zip(gradients, variables, strict=True))
    for t, (old, new) in enumerate(zip(before, layer.get_weights(True), strict=True)):
        assert (old[1] == new[1]).all() == bool(t % 2), t


def whole(table):
    rows = np.zeros(table.global_shape.as_list(), np.float32)
    rows[table.placement.rows] = table.numpy()
    return hvd.allreduce(rows, op=hvd.Sum, name="whole").numpy()


def files():
    """set_weights takes arrays and paths in any mixture; what is wrong with one is found before anything is written."""
    layer = dmp.DistributedEmbedding(
        [dmp.Embedding(*shape, combiner="sum") for shape in TABLES],
        data_parallel_threshold=28,
        row_slice_threshold=180,
        column_slice_threshold=40,
    )
    raises(ValueError, "expecting 0 weights.*build", lambda: layer.set_weights([np.zeros(s) for s in TABLES]))
    layer.build()
    rng = np.random.default_rng(4)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in TABLES]
    with tempfile.TemporaryDirectory() as folder:
        given: list[Any] = list(arrays)
        for t in (0, 1, 2):
            np.save(pathlib.Path(folder) / f"{t}.npy", arrays[t])
            given[t] = pathlib.Path(folder) / f"{t}.npy" if t else f"{folder}/{t}.npy"
        layer.set_weights(given, chunk=3, use_lock=True)
    for got, wanted in zip(layer.get_weights(all_ranks=True), arrays, strict=True):
        np.testing.assert_array_equal(got, wanted)
    bad = [*(array + 1 for array in arrays[:-1]), np.zeros((3, 3))]
    raises(ValueError, r"weights\[5\].*\[3, 3\]", lambda: layer.set_weights(bad))
    one = bad if hvd.rank() == hvd.size() - 1 else [array + 1 for array in arrays]
    raises((ValueError, RuntimeError), "", lambda: layer.set_weights(one))
    raises(ValueError, "expecting 6", lambda: layer.set_weights(arrays[:-1]))
    for got, wanted in zip(layer.get_weights(all_ranks=True), arrays, strict=True):
        np.testing.assert_array_equal(got, wanted)


def custom_layers():
    """They are called where their tables are, under mixed precision too, and their gradients are local."""
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        tables = [(6, 4), (7, 4), (5, 3), (8, 2)]
        layer = dmp.DistributedEmbedding([Custom(*shape) for shape in tables])
        layer.build()
        assert all(hasattr(v, "de_local") for v in layer.trainable_variables)
        start = [np.random.default_rng(t).normal(size=s).astype(np.float32) for t, s in enumerate(tables)]
        layer.set_weights(start)
        sok.track_changes(layer)
        following.meet(sok)
        since = following.now()
        ids = np.arange(4 * hvd.size()) % 5
        mine = ids[4 * hvd.rank() : 4 * hvd.rank() + 4]
        with tf.GradientTape() as tape:
            outputs = layer([tf.constant(mine)] * 4)
            loss = tf.add_n([tf.reduce_sum(tf.cast(o, tf.float32)) for o in outputs])
        for output, table in zip(outputs, start, strict=True):
            assert output.dtype == tf.float16
            np.testing.assert_allclose(output, 2 * table[mine], rtol=2e-3, atol=2e-3)
        variables = layer.trainable_variables
        gradients = dmp.DistributedGradientTape(tape).gradient(loss, variables)
        tf.keras.optimizers.SGD(1.0).apply_gradients(zip(gradients, variables, strict=True))
        tables = layer.get_weights(True)
        for got, table in zip(tables, start, strict=True):
            wanted = table - 2 * np.bincount(ids, minlength=len(table))[:, None] / hvd.size()
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
        for keys, rows, table in zip(*sok.incremental_model_dump(layer, since), tables, strict=True):
            np.testing.assert_array_equal(keys, np.unique(ids))
            np.testing.assert_array_equal(rows, table[keys])
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


def custom_layers_of_known_batches():
    """In a function whose sizes are known, with another number of inputs on each rank."""
    shapes = [(6, 4), (7, 4), (5, 3), (8, 2), (4, 2)]
    layer = dmp.DistributedEmbedding([Custom(*shape) for shape in shapes])
    layer.build()
    start = [np.random.default_rng(t).normal(size=s).astype(np.float32) for t, s in enumerate(shapes)]
    layer.set_weights(start)
    mine = (np.arange(4) + hvd.rank()) % 4
    for output, table in zip(tf.function(layer)([tf.constant(mine)] * 5), start, strict=True):
        np.testing.assert_array_equal(output, 2 * table[mine])


class Model(tf.keras.Model):
    def __init__(self, tables, **options):
        super().__init__()
        self.embedding = dmp.DistributedEmbedding([dmp.Embedding(*s, combiner="mean") for s in tables], **options)
        self.dense = tf.keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(tf.concat(self.embedding(list(inputs)), 1))


def fit():
    """fit with Adam trains the same model at any number of ranks; the callback makes replicated states alike."""
    warnings.filterwarnings("error", ".*is not a weight of any layer")  # nor is one of another rank's tables
    rng = np.random.default_rng(5)
    tables, samples = TABLES[:4], 24
    ids = [rng.integers(0, rows, (samples, 2)) for rows, _ in tables]
    labels = rng.random((samples, 1)).astype(np.float32)
    start = [rng.normal(size=s).astype(np.float32) for s in tables]
    results = []
    for strategy in ("basic", "memory_optimized"):
        tf.keras.utils.set_random_seed(10 + hvd.rank())
        model = Model(tables, strategy=strategy, data_parallel_threshold=28)
        optimizer = dmp.DistributedOptimizer(tf.keras.optimizers.Adam(0.05))
        model.compile(optimizer, "mse", run_eagerly=False)
        callback = dmp.BroadcastGlobalVariablesCallback(0)
        share = slice(hvd.rank(), None, hvd.size())
        data = tf.data.Dataset.from_tensor_slices((tuple(i[share] for i in ids), labels[share])).batch(12 // hvd.size())
        model.fit(data, epochs=1, steps_per_epoch=1, callbacks=[callback], verbose=0)
        model.embedding.set_weights(start)
        for weight in model.dense.weights:
            weight.assign(tf.ones_like(tf.convert_to_tensor(weight)) / 3)
        model.compile(dmp.DistributedOptimizer(tf.keras.optimizers.Adam(0.05)), "mse")
        model.fit(data, epochs=3, verbose=0, shuffle=False)
        results.append([*model.embedding.get_weights(True), *(np.asarray(w) for w in model.dense.weights)])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    wanted = hvd.broadcast_object(results[0], root_rank=0)
    for mine, root in zip(results[0], wanted, strict=True):
        np.testing.assert_array_equal(mine, root)


def mixed_precision():
    """Under mixed_float16 vectors are float16 and tables float32; fit, which scales the loss in a branch, trains what
    it trains in float32 but for rounding. Ranks have other tables, and so other graphs around the branch.
    """
    rng = np.random.default_rng(6)
    tables = [(50, 4), (30, 6), (20, 8), (5, 4)]  # on two ranks one has two and the other one; the last is replicated
    ids = [rng.integers(0, rows, (24, 2)) for rows, _ in tables]
    labels = rng.random((24, 1)).astype(np.float32) / 4
    start = [rng.normal(scale=0.1, size=s).astype(np.float32) for s in tables]
    share, results = slice(hvd.rank(), None, hvd.size()), []
    for policy in ("float32", "mixed_float16"):
        tf.keras.mixed_precision.set_global_policy(policy)
        try:
            model = Model(tables, strategy="memory_balanced", data_parallel_threshold=20)
            vectors = model.embedding([i[share] for i in ids])
            assert {each.dtype.name for each in vectors} == {"float16" if policy == "mixed_float16" else "float32"}
            model(tuple(i[share] for i in ids))
            assert {tf.as_dtype(weight.dtype) for weight in model.trainable_variables} == {tf.float32}
            model.embedding.set_weights(start)
            for weight in model.dense.weights:
                weight.assign(tf.ones_like(tf.convert_to_tensor(weight)) / 3)
            model.compile(dmp.DistributedOptimizer(tf.keras.optimizers.Adagrad(0.05)), "mse")
            data = tf.data.Dataset.from_tensor_slices((tuple(i[share] for i in ids), labels[share]))
            model.fit(data.batch(12 // hvd.size()), epochs=3, verbose=0, shuffle=False)
            results.append([*model.embedding.get_weights(True), *(np.asarray(w) for w in model.dense.weights)])
        finally:
            tf.keras.mixed_precision.set_global_policy("float32")
    for exact, rounded, first in zip(*results, [*start, 0, 0], strict=True):
        np.testing.assert_allclose(rounded, exact, atol=4e-3)
        assert np.abs(exact - first).max() > 0.005, "it has trained"


def plain_optimizers():
    """Any optimizer of Keras applies the gradients, states and all; the callback leaves local states alone."""
    model = Model(TABLES, column_slice_threshold=40)
    ids = [tf.constant([[1, 2], [3, 1]])] * len(TABLES)
    model.compile(tf.keras.optimizers.Adam(0.1), "mse")
    assert model(ids) is not None
    before = model.embedding.get_weights(True)
    defaults = hvd.broadcast.__defaults__
    callback = dmp.BroadcastGlobalVariablesCallback(0)
    data = tf.data.Dataset.from_tensors((tuple(ids), tf.ones([2, 1])))
    model.fit(data, epochs=2, callbacks=[callback], verbose=0)
    kernel = hvd.allgather(tf.convert_to_tensor(model.dense.kernel)[None], name="kernel").numpy()
    assert callback.broadcast_done and kernel.shape[0] == hvd.size() and hvd.broadcast.__defaults__ == defaults
    for old, new in zip(before, model.embedding.get_weights(True), strict=True):
        changed = (old != new).any(1)
        assert changed[1:4].all() and not changed[4:].any()
    assert not any(distributed.is_local(v) for v in model.dense.variables)


def without_combiner():
    """Ids without a combiner: [b] and [b, 1] give [b, width], [b, k] one vector an id."""
    layer = dmp.DistributedEmbedding(
        [tf.keras.layers.Embedding(*shape) for shape in TABLES], row_slice_threshold=180, data_parallel_threshold=28
    )
    layer.build()
    tables = layer.get_weights(True)
    rng = np.random.default_rng([6, hvd.rank()])
    for inner in ((), (1,), (3,), (2, 2)):
        ids = [rng.integers(0, rows, (5, *inner)) for rows, _ in TABLES]
        for call in (layer, tf.function(lambda x: layer(x), reduce_retracing=True)):
            for t, output in enumerate(call([tf.constant(i) for i in ids])):
                wanted = tables[t][ids[t]]
                if inner == (1,) and hvd.size() > 1 and t in layer.strategy.table_groups[1]:
                    wanted = wanted[:, 0]
                np.testing.assert_array_equal(output, wanted)
    ragged = tf.ragged.constant([[1], [], [2, 3, 1]])
    for t, output in enumerate(layer([ragged] * len(TABLES))):
        for row, wanted in zip(output, ragged.to_list(), strict=True):
            np.testing.assert_array_equal(row, tables[t][wanted].reshape(-1, TABLES[t][1]))


CHECKS = (
    "all_groups_and_kinds",
    "random_models",
    "own_inputs",
    "planned",
    "unequal_columns",
    "gradient_of_means",
    "wrong_ids",
    "wrong_inputs",
    "wrong_inputs_of_own_classes",
    "first_rows",
    "files",
    "custom_layers",
    "ranks_without_tables_to_train",
    "regularized",
    "custom_layers_of_known_batches",
    "fit",
    "mixed_precision",
    "plain_optimizers",
    "without_combiner",
    "changes",
    "keras_files",
)


def main():
    if os.environ.get("SOK_TEST_DEVICE") == "gpu":
        hvd.init()
        take_own_gpu(hvd.local_rank())
    dmp.DistributedEmbedding([dmp.Embedding(8, 8)])  # initialises both
    if not checking.run(sys.argv[1:], globals().__getitem__, hvd.rank(), hvd.size(), start_anew):
        sys.exit(1)


if __name__ == "__main__":
    main()
