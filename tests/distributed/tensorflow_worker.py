# SPDX-License-Identifier: Apache-2.0
"""What test_tensorflow.py runs on every rank: `horovodrun -np N python tensorflow_worker.py CHECK ...`, or with
SOK_TEST_ENGINE=tensorflow `python examples/workers.py -np N python tensorflow_worker.py CHECK ...`.

Each check is a function of this module or of one that is named at its end. All ranks run all of them in the same order,
as `checking` says. With SOK_TEST_DEVICE=gpu each rank has a GPU of its own, on which is what the checks make.
"""

import contextlib
import dataclasses
import importlib
import os
import sys
import time

import numpy as np
import tensorflow as tf
import tensorflow_support
from tensorflow_support import gathered, ids_of, own_rows, restart, start_anew, tables_of, take_own_gpu

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.nccl import NcclUnavailable
from sparse_operation_kit.tensorflow import runtime
from sparse_operation_kit.tensorflow.exchange import EngineExchange, NcclExchange

# After tensorflow_support, which loads them.
import cases  # isort: skip
import checking  # isort: skip
import reference  # isort: skip

ON_GPU = os.environ.get("SOK_TEST_DEVICE") == "gpu"

# --- checks ----------------------------------------------------------------------------------------------------------


def lookups():
    """Forward pass and gradients of every case, from uneven batches, against the reference on the joined batch."""
    for number, call in enumerate(cases.CASES):
        kind = ("ragged", "sparse", "unsorted")[number % 3]
        parts, cuts = call.split(sok.num_ranks())
        part = parts[sok.rank()]
        tables = tables_of(call)
        inputs = [ids_of(lookup, kind) for lookup in part.lookups]
        weights = [None if w is None else tf.convert_to_tensor(w.values) for _, w in inputs]
        combiners = [lookup.combiner for lookup in part.lookups]

        with tf.GradientTape() as tape:
            tape.watch([w for w in weights if w is not None])
            given = [
                None
                if w is None
                else (ids.with_values(w) if kind == "ragged" else tf.SparseTensor(ids.indices, w, ids.dense_shape))
                for (ids, _), w in zip(inputs, weights, strict=True)
            ]
            outputs = sok.lookup_sparse(
                [tables[x.table] for x in part.lookups], [ids for ids, _ in inputs], given, combiners
            )
            loss = 0.0
            for i, output in enumerate(outputs):
                begin, end = cuts[i][sok.rank()], cuts[i][sok.rank() + 1]
                reference.assert_close(
                    output,
                    call.output(i)[begin:end],
                    magnitude=call.output(i, True)[begin:end],
                    message=f"{call.name} {i}",
                )
                loss += tf.reduce_sum(output * call.output_gradient(i)[begin:end])
        used = sorted({lookup.table for lookup in part.lookups})
        wanted = [w for w in weights if w is not None]
        gradients = tape.gradient(loss, [tables[t] for t in used] + wanted)
        for t, gradient in zip(used, gradients[: len(used)], strict=True):
            assert isinstance(gradient, tf.IndexedSlices)
            slots = gradient.indices.numpy()
            assert (np.diff(slots) > 0).all(), "slots are not ascending"
            actual = np.zeros(tables[t].shape)
            actual[slots] = gradient.values.numpy()
            expected, terms = (own_rows(tables[t], call.row_gradient(t, absolute)) for absolute in (False, True))
            reference.assert_close(actual, expected, magnitude=terms, message=f"{call.name}, gradient of table {t}")
        weighted = [i for i, w in enumerate(weights) if w is not None]
        for i, gradient in zip(weighted, gradients[len(used) :], strict=True):
            first = call.lookups[i].splits[cuts[i][sok.rank()]]
            rows = slice(first, first + len(part.lookups[i].keys))
            expected, terms = (call.weight_gradient(i, absolute)[rows] for absolute in (False, True))
            actual = np.empty(len(expected))
            actual[
                np.arange(len(expected))
                if kind == "ragged"
                else part.lookups[i].coordinates(5 if kind == "unsorted" else None)[1]
            ] = np.asarray(gradient)
            reference.assert_close(actual, expected, 2e-6, magnitude=terms, message=f"{call.name}, weights of {i}")


def _batches(tables, steps, seed):
    rng = np.random.default_rng(seed)
    for step in range(steps):
        items = [
            cases.random_lookup(
                rng, t, table.num_rows, 12, 2, combiner=reference.COMBINERS[(t + step) % 3], weighted=t == 1
            )
            for t, table in enumerate(tables)
        ]
        yield cases.Call(tuple(tables), (*items, cases.random_lookup(rng, 0, tables[0].num_rows, 5)), seed + step)


def training():
    """Tables after several steps of several optimizers equal the reference's on the joined batches."""
    import keras

    tables = (cases.Table(40, 8), cases.Table(17, 5, 1), cases.Table(9, 16))
    settings = [
        (keras.optimizers.SGD(0.1), reference.Optimizer("sgd", 0.1)),
        (keras.optimizers.Adagrad(0.1), reference.Optimizer("adagrad", 0.1, epsilon_inside=True)),
        (keras.optimizers.Adam(0.01), reference.Optimizer("adam", 0.01)),
        (sok.RowWiseAdagrad(0.1, 0.1, 1e-7), reference.Optimizer("rowwise_adagrad", 0.1)),
    ]
    for wrapped, plain in settings:
        calls = list(_batches(tables, 6, 100))
        variables = tables_of(calls[0])
        optimizer = sok.OptimizerWrapper(wrapped)
        weights = [calls[0].rows(t).astype(np.float64) for t in range(3)]
        states = [plain.initial_states(t.num_rows, t.dimension) for t in tables]

        @tf.function(reduce_retracing=True)
        def train(variables, optimizer, ids, weights, gradients, combiners):
            with tf.GradientTape() as tape:
                outputs = sok.lookup_sparse([variables[t] for t in (0, 1, 2, 0)], ids, weights, combiners)
                loss = tf.add_n([tf.reduce_sum(o * g) for o, g in zip(outputs, gradients, strict=True)])
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        for number, call in enumerate(calls):
            parts, cuts = call.split(sok.num_ranks(), seed=number)
            part = parts[sok.rank()]
            inputs = [ids_of(lookup, "ragged") for lookup in part.lookups]
            gradients = [
                tf.constant(call.output_gradient(i)[cuts[i][sok.rank()] : cuts[i][sok.rank() + 1]])
                for i in range(len(part.lookups))
            ]
            # Outside tf.function the mix of combiners need not be traced again.
            arguments = ([i for i, _ in inputs], [w for _, w in inputs], gradients, [x.combiner for x in part.lookups])
            train.python_function(variables, optimizer, *arguments) if number % 2 else train(
                variables, optimizer, *arguments
            )
            rate = plain.learning_rate
            if plain.kind == "adam":
                rate *= np.sqrt(1 - plain.beta2 ** (number + 1)) / (1 - plain.beta1 ** (number + 1))
            now = dataclasses.replace(plain, learning_rate=rate)
            for t in range(3):
                touched = call.touched(t)
                reference.step(now, weights[t], states[t], touched, call.row_gradient(t)[touched])
        for t, variable in enumerate(variables):
            reference.assert_close(variable, own_rows(variable, weights[t]), 2e-6, message=f"{plain.kind}, table {t}")
            for (name, state), expected in zip(optimizer.slots(variable).items(), states[t], strict=True):
                reference.assert_close(state, own_rows(variable, expected), 3e-5, message=f"{plain.kind} {name}")


def initial_rows():
    """Initial rows do not depend on the number of ranks, and a localized table is on its rank alone."""
    for mode in ("distributed", f"localized:{sok.num_ranks() - 1}"):
        table = sok.Variable(shape=(23, 5), initializer="normal", mode=mode, name="same everywhere")
        alone = dataclasses.replace(table.placement, owner=-1, num_ranks=1, rank=0)
        from sparse_operation_kit.placement import parse_initializer, table_seed
        from sparse_operation_kit.tensorflow.initializers import initialize

        whole = initialize(parse_initializer("normal", 23, 5), alone, table_seed(0, "same everywhere")).numpy()
        np.testing.assert_array_equal(table.numpy(), own_rows(table, whole))
        assert len(gathered(len(table.numpy()))) == sok.num_ranks()
        assert gathered(len(table.numpy())).sum() == 23


def row_dtypes():
    """Tables of one dtype and of several: each step is that of float32 tables with the same rows, rounded."""
    shapes = (cases.Table(40, 8), cases.Table(17, 5, 1), cases.Table(9, 16))
    for dtypes in ([tf.float16], [tf.bfloat16], [tf.float32, tf.float16, tf.bfloat16]):
        calls = list(_batches(shapes, 4, 200))
        wide = tables_of(calls[0])
        narrow = [
            sok.Variable(calls[0].rows(t), dtype=dtypes[t % len(dtypes)], mode=table.mode, name=f"narrow{t}")
            for t, table in enumerate(wide)
        ]
        optimizers = [sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1)) for _ in range(2)]
        for number, call in enumerate(calls):
            for table, rounded in zip(wide, narrow, strict=True):
                table.assign(tf.cast(rounded.read_value(), tf.float32))
            parts, cuts = call.split(sok.num_ranks(), seed=number)
            rank, part = sok.rank(), parts[sok.rank()]
            ids, weights = zip(*(ids_of(lookup, "ragged") for lookup in part.lookups), strict=True)
            results = []
            for tables, optimizer in zip((wide, narrow), optimizers, strict=True):
                with tf.GradientTape() as tape:
                    outputs = sok.lookup_sparse(
                        [tables[x.table] for x in part.lookups], ids, weights, [x.combiner for x in part.lookups]
                    )
                    terms = [
                        tf.reduce_sum(output * call.output_gradient(i)[cuts[i][rank] : cuts[i][rank + 1]])
                        for i, output in enumerate(outputs)
                    ]
                optimizer.apply_gradients(zip(tape.gradient(tf.add_n(terms), tables), tables, strict=True))
                results.append(outputs)
            for output, wanted in zip(results[1], results[0], strict=True):
                np.testing.assert_array_equal(output, wanted)
            for table, rounded in zip(wide, narrow, strict=True):
                np.testing.assert_array_equal(
                    tf.cast(rounded.read_value(), tf.float32),
                    tf.cast(tf.cast(table.read_value(), rounded.dtype), "float32"),
                )


def raise_together():
    """A bad batch on one rank is an error on all: with its message there, with its number elsewhere."""
    table = sok.Variable(np.arange(20, dtype=np.float32).reshape(10, 2), name="items")
    before = table.numpy()
    bad = sok.num_ranks() - 1
    for key in (10, -1, 2**40):
        mine = key if sok.rank() == bad else 3
        try:
            sok.lookup_sparse(table, tf.ragged.constant([[1, mine]], dtype=tf.int64))
        except tf.errors.InvalidArgumentError as error:
            if sok.rank() == bad:
                assert f"key {key} is outside [0, 10)" in str(error) and "'items'" in str(error), error
            else:
                assert f"rank {bad}" in str(error), error
        else:
            raise AssertionError("no error")
    np.testing.assert_array_equal(table.numpy(), before)
    output = sok.lookup_sparse(table, tf.ragged.constant([[9]], dtype=tf.int64))
    np.testing.assert_array_equal(output, [[18, 19]])


def raise_together_about_batches():
    """The same for batches that cannot be converted, eagerly and in a function, and for arguments of a wrong type."""
    table = sok.Variable(np.ones((10, 2), np.float32), name="items")
    bad = sok.rank() == sok.num_ranks() - 1
    good_ids = tf.SparseTensor([[0, 0], [1, 0]], tf.constant([1, 2], tf.int64), [2, 2])
    good = good_ids, good_ids.with_values([1.0, 2.0])
    ragged = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)
    equal = tf.ragged.constant([[1.0, 1.0], [1.0]])
    batches = (
        ((tf.SparseTensor([[0, 0], [2, 0]], good_ids.values, [2, 2]), None), (good_ids, None), "items"),
        ((good_ids, tf.SparseTensor([[0, 0], [1, 1]], [1.0, 2.0], [2, 2])), good, "indices of sp_ids"),
        ((ragged, tf.ragged.constant([[1.0], [1.0, 1.0]])), (ragged, equal), "row splits of sp_ids"),
    )
    run = tf.function(lambda ids, weights: sok.lookup_sparse(table, ids, weights))
    for call in (lambda ids, weights: sok.lookup_sparse(table, ids, weights), run):
        for wrong, right, message in batches:
            try:
                call(*(wrong if bad else right))
            except tf.errors.InvalidArgumentError as error:
                assert (message if bad else f"rank {sok.num_ranks() - 1}") in str(error), error
            else:
                raise AssertionError("no error")
            assert call(*right).shape[1] == 2
    for wrong, kind in ((tf.ragged.constant([[1.0]]), TypeError), ([ragged, ragged], ValueError), (None, TypeError)):
        try:
            sok.lookup_sparse(table, wrong if bad else ragged)
        except (kind, tf.errors.InvalidArgumentError) as error:
            assert isinstance(error, kind) == bad, error
        else:
            raise AssertionError("no error")
    other, none = sok.Variable(np.ones((4, 2), np.float32)), tf.Variable(tf.ones([4, 2]))
    try:
        sok.lookup_sparse([table, none if bad else other, table], [ragged] * 3)
    except (TypeError, tf.errors.InvalidArgumentError) as error:
        assert isinstance(error, TypeError) == bad, error
    else:
        raise AssertionError("no error")
    assert sok.lookup_sparse(table, ragged).shape == (2, 2)


def across_functions():
    """A gradient through a compiled forward pass, materialised by a plain optimizer."""
    table = sok.Variable(np.ones((5, 2), np.float32), name="across")
    forward = tf.function(lambda ids: tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum")))
    with tf.GradientTape() as tape:
        loss = forward(tf.ragged.constant([[1, 2, 2]]))
    gradient = tape.gradient(loss, table)
    expected = np.zeros((5, 2))
    expected[[1, 2]] = [[sok.num_ranks()] * 2, [2 * sok.num_ranks()] * 2]
    np.testing.assert_array_equal(tf.convert_to_tensor(gradient), own_rows(table, expected))

    @tf.function
    def several_calls(ids):
        with tf.GradientTape() as tape:
            loss = sum(factor * tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum")) for factor in (1, 2, 4))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    optimizer = sok.OptimizerWrapper(sok.SGD(0.5))
    several_calls(tf.ragged.constant([[1, 2, 2]]))
    np.testing.assert_allclose(table, own_rows(table, 1 - 0.5 * 7 * expected))


def arguments():
    """Errors that name the number of ranks."""
    n = sok.num_ranks()
    for mode in (f"localized:{n}", "localized:7"):
        try:
            sok.Variable(shape=(4, 4), mode=mode)
        except ValueError as error:
            assert f"[0, {n})" in str(error), error
        else:
            raise AssertionError("no error")
    try:
        sok.broadcast_variables([], root_rank=n)
    except ValueError as error:
        assert f"[0, {n})" in str(error)
    else:
        raise AssertionError("no error")


def exchanges():
    """Which exchange init() makes of each name; on the CPU all move the same."""
    outputs = []
    engine = runtime.get().arguments.comm_tool
    for name in ("auto", engine, "engine"):
        restart(exchange=name)
        state = runtime.get()
        if sok.num_ranks() > 1:
            assert isinstance(state.exchange, NcclExchange if name == "auto" else EngineExchange)
            assert state.arguments.exchange == ("auto" if name == "auto" else engine)
        with tf.device("CPU:0"):
            table = sok.Variable(shape=(20, 4), initializer="uniform", name="exchanged")
            outputs.append(
                sok.lookup_sparse(
                    table, tf.RaggedTensor.from_row_lengths([1, 2, 3], [1, sok.rank() % 3, 2 - sok.rank() % 3])
                )
            )
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0], other)
    if sok.num_ranks() > 1 and not tf.config.list_physical_devices("GPU"):
        runtime.shutdown()
        try:
            sok.init(exchange="nccl")
        except NcclUnavailable as error:
            assert "needs a GPU" in str(error)
        else:
            raise AssertionError("no error")
    restart()


def table_io():
    """assign and export by global key; a key of another rank is refused."""
    table = sok.Variable(shape=(11, 3), initializer="zeros", name="io")
    mine = np.arange(sok.rank(), 11, sok.num_ranks())
    sok.assign(table, mine, np.repeat(mine[:, None], 3, axis=1).astype(np.float32))
    keys, values = sok.export(table)
    np.testing.assert_array_equal(keys, mine)
    np.testing.assert_array_equal(values, np.repeat(mine[:, None], 3, axis=1))
    np.testing.assert_array_equal(table.key_map(mine), np.arange(len(mine)))
    if sok.num_ranks() > 1:
        other = (sok.rank() + 1) % sok.num_ranks()
        try:
            sok.assign(table, [mine[0], other], np.ones((2, 3), np.float32))
        except tf.errors.InvalidArgumentError as error:
            assert str(other) in str(error), error
        else:
            raise AssertionError("no error")
        np.testing.assert_array_equal(sok.export(table)[1], values)
    output = sok.all2all_dense_embedding(table, tf.constant([[0, 10], [sok.rank(), 5]]))
    np.testing.assert_array_equal(output[..., 0], [[0, 10], [sok.rank(), 5]])


def collectives():
    """The module `communication`, broadcast_variables and DistributedGradientTape."""
    n, rank = sok.num_ranks(), sok.rank()
    np.testing.assert_array_equal(sok.communication.allreduce([float(rank)]), [n * (n - 1) / 2])
    np.testing.assert_array_equal(sok.communication.allreduce([float(rank)], "average"), [(n - 1) / 2])
    np.testing.assert_array_equal(
        sok.communication.allgather(np.full(rank, rank)), np.repeat(np.arange(n), np.arange(n))
    )
    np.testing.assert_array_equal(sok.communication.broadcast([rank], n - 1), [n - 1])
    np.testing.assert_array_equal(sok.communication.alltoall([rank] * n), np.arange(n))
    table = sok.Variable(shape=(8, 2), initializer=float(rank), name="mine")
    dense = tf.Variable([float(rank)])
    sok.broadcast_variables([table, dense], n - 1)
    assert dense.numpy() == n - 1 and (table.numpy() == rank).all()
    with sok.DistributedGradientTape(tf.GradientTape()) as tape:
        rows = sok.lookup_sparse(table, tf.ragged.constant([[0, 1]]), combiners="sum")
        loss = tf.reduce_sum(rows) + dense * float(rank)
    table_gradient, dense_gradient = tape.gradient(loss, [table, dense])
    np.testing.assert_allclose(dense_gradient, [(n - 1) / 2])
    assert (table_gradient.values.numpy() == n).all(), "tables are summed"


def graph_session():
    """A tf.compat.v1 graph trained in a Session; the workers of a strategy refuse it."""
    if runtime.get().arguments.comm_tool == "tensorflow":
        with tf.Graph().as_default(), tf.device("CPU:0"):
            table = sok.Variable(np.ones((4, 2), np.float32), name="graph")
            try:
                sok.all2all_dense_embedding(table, tf.constant([1]))
            except NotImplementedError as error:
                assert "Horovod" in str(error)
                return
            raise AssertionError("no error")
    rng = np.random.default_rng(7)
    initial = rng.random((12, 4)).astype(np.float32)
    batches = [rng.integers(0, 12, (sok.num_ranks(), 6)) for _ in range(3)]
    with tf.Graph().as_default():
        table = sok.Variable(initial, name="graph")
        ids = tf.compat.v1.sparse_placeholder(tf.int64, [None, None])
        loss = tf.reduce_sum(tf.square(sok.lookup_sparse(table, ids, combiners="sum")))
        gradients = tf.compat.v1.gradients(loss, [table])
        optimizer = sok.OptimizerWrapper(tf.compat.v1.train.GradientDescentOptimizer(0.1))
        train = optimizer.apply_gradients(zip(gradients, [table], strict=True))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for batch in batches:
                indices = np.stack([np.arange(6), np.zeros(6, int)], axis=1)
                session.run(train, {ids: tf.compat.v1.SparseTensorValue(indices, batch[sok.rank()], [6, 1])})
            actual = session.run(table)
    expected = initial.astype(np.float64)
    for batch in batches:
        gradient = np.zeros_like(expected)
        np.add.at(gradient, batch.reshape(-1), 2 * expected[batch.reshape(-1)])
        expected -= 0.1 * gradient
    reference.assert_close(actual, own_rows(table, expected), 1e-6)


def unlooked():
    """A rank whose batch is empty takes part; different batch sizes do too."""
    table = sok.Variable(np.ones((6, 3), np.float32), name="u")
    for size in (sok.rank(), sok.num_ranks() - 1 - sok.rank(), 0):
        ids = tf.RaggedTensor.from_row_splits(np.arange(size, dtype=np.int64) % 6, np.arange(size + 1))
        with tf.GradientTape() as tape:
            output = sok.lookup_sparse(table, ids)
            loss = tf.reduce_sum(output)
        assert output.shape == (size, 3) and (output.numpy() == 1).all()
        gradient = tape.gradient(loss, table)
        total = sok.communication.allreduce(tf.reduce_sum(gradient.values), name="total")
        assert total == 3 * sum(gathered(size))


def compiled_op_names():
    """A tf.function holds one op a stage, whatever the number of tables."""
    tables = [sok.Variable(shape=(9, 4), name=f"many{i}") for i in range(5)]
    optimizer = sok.OptimizerWrapper(sok.SGD(0.1))

    @tf.function
    def train(ids):
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse(tables, [ids] * 5)
            loss = tf.add_n([tf.reduce_sum(output) for output in outputs])
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))

    graph = train.get_concrete_function(tf.ragged.constant([[1, 2]])).graph
    exchange = ("SokAllToAll", "SokSwapCounts")  # that of GPUs; Horovod's has other names
    types = [op.type for op in graph.get_operations()]
    names = sorted(name for name in types if name.startswith("Sok") and name not in exchange)
    stages = ["SokApply", "SokGatherCombine"]
    if sok.num_ranks() > 1:
        stages = ["SokApply", "SokCombine", "SokExchangeSizes", "SokGather", "SokLocate", "SokRoute", "SokSpread"]
        stages = sorted([*stages, *([] if ON_GPU else ["SokCheckUpdates", "SokRaiseTogether"])])
    assert names == stages, names


def crash():
    """The last rank raises while the others wait in a lookup; the job must end by itself."""
    table = sok.Variable(shape=(10, 4), name="crash")
    for step in range(1000):
        if sok.rank() == sok.num_ranks() - 1 and step == 3:
            time.sleep(1)
            raise ValueError("the reader of the last rank found no file")
        sok.lookup_sparse(table, tf.ragged.constant([[1, 2]]))


def find(name):
    """The function of a check, and a last look for what a GPU found wrong in it."""
    names = "clipping control_flow dynamic faults horovod keras legacy pooling saving stack strategy"
    modules = (importlib.import_module(f"tensorflow_{name}") for name in names.split())
    check = globals().get(name) or next(found for module in modules if (found := vars(module).get(name)))

    def run():
        with tf.device("GPU:0") if ON_GPU else contextlib.nullcontext():
            check()
        sok.check_errors()

    return run


def main():
    if os.environ.get("SOK_TEST_ENGINE") == "tensorflow":
        if ON_GPU:
            take_own_gpu(0)  # of those that the launcher has left this rank
        tensorflow_support.strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        import horovod.tensorflow as hvd

        hvd.init()
        if ON_GPU:
            take_own_gpu(hvd.local_rank())
    sok.init()
    if not checking.run(sys.argv[1:], find, sok.rank(), sok.num_ranks(), start_anew):
        sys.exit(1)


if __name__ == "__main__":
    main()
