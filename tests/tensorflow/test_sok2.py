# SPDX-License-Identifier: Apache-2.0
"""Names, keywords and habits of scripts that were written for SOK 2.x."""

import datetime
import os
import subprocess
import sys
import textwrap
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sparse_operation_kit as sok
from sparse_operation_kit.tensorflow import runtime

sok2: Any = sok  # with the keywords of 2.x, which signatures do not have
LEGACY = tf_keras.optimizers.legacy
V1 = tf.compat.v1
INVALID = tf.errors.InvalidArgumentError


def rows(first=0.0):
    return (np.arange(24, dtype=np.float32) + first).reshape(6, 4)


def step(optimizer, tables, keys, *args, **options):
    """One step with the gradient 1 for each of these keys of each table."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(sok.all2all_dense_embedding(table, keys)) for table in tables])
    optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True), *args, **options)


# --- names and init() -------------------------------------------------------------------------------------------------


def test_names():
    assert sok.tf_version == [int(part) for part in tf.__version__.split(".")]
    sok.set_comm_tool("horovod")  # what init() has said already
    with pytest.raises(ValueError, match='this frontend has "horovod"'):
        sok.set_comm_tool("MPI")
    found = {name: getattr(sok.communication, name)() for name in ("rank", "local_rank", "id_in_rank", "global_gpu_id")}
    assert set(found.values()) == {0}
    assert [getattr(sok.communication, n)() for n in ("num_ranks", "num_gpus", "num_gpu_per_rank")] == [1, 1, 1]


def test_alone():
    """Dynamic tables ask for no ranks: neither need they init(). "single" is alone whatever was started."""
    runtime.shutdown()
    table = sok.DynamicVariable(dimension=4, initializer="13")
    assert table.num_gpus == 1 and table.global_gpu_id == 0
    sok.init()  # is no other call than that which was not made
    runtime.shutdown()
    sok.init("single")
    assert sok.num_ranks() == 1
    with pytest.raises(ValueError, match="called before"):
        sok.init()


def test_use_legacy_optimizer():
    """Under tf_keras optimizers become legacy ones, which train several sets of variables; a new one refuses to."""
    script = """
        import numpy as np, tensorflow as tf, sparse_operation_kit as sok
        new = tf.keras.optimizers.SGD
        sok.dist_model_parallel.DistributedGradientTape(tf.GradientTape())  # scripts of distributed-embeddings
        assert tf.keras.optimizers.SGD is new
        sok.Init()  # of 1.x
        assert tf.keras.optimizers.SGD is new
        sok.init(use_legacy_optimizer=False)
        assert tf.keras.optimizers.SGD is tf.optimizers.SGD is new
        sok.init()
        legacy = tf.keras.optimizers.SGD
        assert legacy is tf.optimizers.SGD and legacy is not new and hasattr(legacy(1.0), "_slots")
        table = sok.Variable(np.ones((4, 2)))
        dense = [tf.Variable([2.0, 2.0]), tf.Variable([3.0])]
        optimizer = tf.keras.optimizers.SGD(learning_rate=0.5)
        for variables in ([table], dense[:1], dense[1:]):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(tf.gather(v, [0])) for v in variables])
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        assert [float(np.ravel(v)[0]) for v in (table, *dense)] == [0.5, 1.5, 2.5]
    """
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    before = keras.optimizers.SGD
    sok.init()
    assert tf.keras.optimizers.SGD is before is keras.optimizers.SGD


# --- tables -----------------------------------------------------------------------------------------------------------


def test_classes():
    spread, local = sok.Variable(rows()), sok.Variable(rows(), mode="localized:0")
    assert type(spread) is sok.DistributedVariable and type(local) is sok.LocalizedVariable
    assert isinstance(spread, sok.Variable) and isinstance(local, sok.Variable)
    direct = sok.DistributedVariable(rows(), global_gpu_id=0, num_gpus=1, name="direct")
    named = sok.LocalizedVariable(rows(), target_gpu=0, global_gpu_id=0)
    assert (direct.target_gpu, named.target_gpu, named.global_gpu_id) == (-1, 0, 0)
    np.testing.assert_array_equal(direct, rows())
    for refused in (
        lambda: sok.DistributedVariable(rows(), global_gpu_id=1),
        lambda: sok.DistributedVariable(rows(), num_gpus=2),
        lambda: sok.DistributedVariable(rows(), mode="localized:0"),
        lambda: sok.LocalizedVariable(rows(), target_gpu=1),
        lambda: sok.LocalizedVariable(rows()),
        lambda: sok.LocalizedVariable(rows(), mode="localized:0", target_gpu=1),
    ):
        with pytest.raises(ValueError):
            refused()
    assert sok.filter_variables([tf.Variable([1]), spread, local])[0] == [spread, local]


def test_names_of_tables_without_names():
    """They are those of SOK 2.x, by which its dumps know tables."""
    names = [sok.Variable(rows()).table_name, sok.Variable(rows(), mode="localized:0").table_name]
    numbers = [int(name.removeprefix("sok_static_Variable_")) for name in names]
    assert numbers[1] == numbers[0] + 1
    assert sok.DynamicVariable(dimension=2).table_name.startswith("sok_dynamic_Variable_")


@pytest.mark.parametrize(
    "value",
    [[[3, 4, 5]], [3, 4, 5], np.array([[3.0, 4.0, 5.0]]), tf.constant([[3, 4, 5]], tf.int64), tf.constant([3.0, 4, 5])],
    ids=["integers", "one dimension", "float64", "int64 tensor", "tensor of one dimension"],
)
def test_initial_values(value):
    table = sok.Variable(value)
    assert table.dtype == tf.float32 and table.global_shape == [1, 3]
    np.testing.assert_array_equal(table, [[3, 4, 5]])
    with pytest.raises(TypeError, match="'narrow' must be float32 or float16 or bfloat16, got float64"):
        sok.Variable(value, dtype=tf.float64, name="narrow")


def test_size_is_also_a_shape():
    table = sok.DynamicVariable(dimension=3, var_type="hbm")
    sok.assign(table, tf.constant([5, -7], tf.int64), np.ones((2, 3), np.float32))
    size = table.size
    assert (size[0], size[1]) == (2, 3) and size == 2 and isinstance(size, int)
    assert tf.constant(size).shape == () and tf.range(size).shape == (2,)


def test_dynamic_tables_are_read_by_key():
    """tf.nn.embedding_lookup: 2^40 is no slot. It inserts, it trains, and what it reads is the row of the key."""
    table = sok.DynamicVariable(dimension=3, initializer="13", var_type="hbm")
    optimizer = sok.OptimizerWrapper(LEGACY.SGD(1.0))
    keys = tf.constant([0, 2**40, -5], tf.int64)
    sok.assign(table, keys[1:2], np.full((1, 3), 7.0, np.float32))
    with tf.GradientTape() as tape:
        read = tf.nn.embedding_lookup(table, keys)
        loss = tf.reduce_sum(read * [[1.0], [2.0], [3.0]])
    np.testing.assert_array_equal(read[:, 0], [13, 7, 13])
    optimizer.apply_gradients(zip(tape.gradient(loss, [table]), [table], strict=True))
    np.testing.assert_array_equal(tf.gather(table, tf.reverse(keys, [0]))[:, 0], [10, 5, 12])
    assert tf.nn.embedding_lookup(table, [[0, 1]]).shape == (1, 2, 3) and table.size == 4
    with pytest.raises(TypeError, match="must be int32 or int64"):
        tf.gather(table, [1.0])

    @tf.function
    def in_function(keys):
        return tf.nn.embedding_lookup(table, keys)

    np.testing.assert_array_equal(in_function(keys)[:, 0], [12, 5, 10])


def test_rows_that_evict_others_train():
    """The gradient of what sparse_read_and_evict read reaches the rows; of one that has gone since it is refused."""
    table = sok.DynamicVariable(dimension=2, initializer="11", var_type="hybrid", init_capacity=8, max_capacity=8)
    optimizer = sok.OptimizerWrapper(LEGACY.SGD(1.0))
    evicted = []
    for begin in range(0, 24, 8):
        with tf.GradientTape() as tape:
            read, keys, values = sok.sparse_read_and_evict(table, tf.range(begin, begin + 8, dtype=tf.int64))
            loss = tf.reduce_sum(read)
        gradient = tape.gradient(loss, table)
        optimizer.apply_gradients([(gradient, table)])
        np.testing.assert_array_equal(values, np.full((len(keys), 2), 10.0))
        evicted += keys.numpy().tolist()
    assert sorted(evicted) == list(range(16))
    np.testing.assert_array_equal(sok.export(table)[1], np.full((8, 2), 10.0))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.sparse_read_and_evict(table, tf.constant([100], tf.int64))[0])
    gradient = tape.gradient(loss, table)
    table.erase([100])
    before = sok.export(table)[1].numpy()
    with pytest.raises(INVALID):
        optimizer.apply_gradients([(gradient, table)])
        sok.check_errors()
    np.testing.assert_array_equal(sok.export(table)[1], before)


# --- lookups ----------------------------------------------------------------------------------------------------------


def test_lists_beside_single_values():
    table, ids = sok.Variable(rows()), tf.ragged.constant([[0, 1], [2]], dtype=tf.int64)
    weights = ids.with_values(tf.constant([1.0, 2.0, 3.0]))
    plain = sok.lookup_sparse(table, ids, combiners="sum")
    weighted = sok.lookup_sparse(table, ids, weights, "sum")
    for found in (sok.lookup_sparse(table, ids, combiners=["sum"]), sok.lookup_sparse([table], ids, combiners=["sum"])):
        np.testing.assert_array_equal(found, plain)
    for found in (
        sok.lookup_sparse(table, [ids], combiners=["sum"]),
        sok.lookup_sparse((table,), (ids,), combiners="SUM"),
        sok2.lookup_sparse([table], [ids], combiners="sum", use_filter=True),
    ):
        assert len(found) == 1
        np.testing.assert_array_equal(found[0], plain)
    np.testing.assert_array_equal(sok.lookup_sparse([table], [ids], sp_weights=weights, combiners="sum")[0], weighted)
    with pytest.raises(ValueError, match="sp_ids has 2 entries, but params has 1"):
        sok.lookup_sparse(table, [ids, ids])
    with pytest.raises(TypeError, match="got both use_filter and use_low_frequency_filter"):
        sok2.lookup_sparse(table, ids, use_filter=True, use_low_frequency_filter=True)


# --- optimizers -------------------------------------------------------------------------------------------------------


def test_sgd():
    table, optimizer, counted = sok.Variable(rows()), sok.SGD(lr=1.0), tf.Variable(0)
    step(optimizer, [table], [0])
    optimizer.lr.assign(0.5)
    step(optimizer, [table], [0], global_step=counted)
    optimizer.lr = 0.25
    step(optimizer, [table], [0], counted)
    assert counted == 2 and optimizer.get_slot_names() == []
    np.testing.assert_allclose(table[0], rows()[0] - 1.75)

    @tf.function
    def compiled():
        step(optimizer, [table], [0])

    compiled()
    optimizer.lr.assign(8.0)
    compiled()
    np.testing.assert_allclose(table[0], rows()[0] - 10.0)


@pytest.mark.parametrize("make", [sok.SGD, sok.RowWiseAdagrad, sok.Ftrl])
@pytest.mark.parametrize("counts", [False, True])
def test_own_optimizers_in_a_graph(make, counts, device):
    """What apply_gradients gives steps tables and dense variables, as eagerly."""
    if device == "gpu":
        pytest.skip("a session of its own places what it likes")

    def train(optimizer, table, dense, counted):
        loss = tf.reduce_sum(sok.all2all_dense_embedding(table, [1, 3])) + tf.reduce_sum(dense)
        pairs = zip(tf.gradients(loss, [table, dense]), [table, dense], strict=True)
        return optimizer.apply_gradients(pairs, counted) if counts else optimizer.apply_gradients(pairs)

    with tf.Graph().as_default(), V1.Session() as session:
        variables = sok.Variable(rows()), tf.Variable([1.0, 2.0]), tf.Variable(0)
        optimizer = make(0.5)
        step_of = train(optimizer, *variables)
        read = [tf.convert_to_tensor(v) for v in (*variables, optimizer.iterations)]
        session.run(V1.global_variables_initializer())
        for _ in range(2):
            session.run(step_of)
        *found, count, iterations = session.run(read)
    assert (count, iterations) == (2 * counts, 2)
    table, dense, optimizer = sok.Variable(rows()), tf.Variable([1.0, 2.0]), make(0.5)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.all2all_dense_embedding(table, [1, 3])) + tf.reduce_sum(dense)
        optimizer.apply_gradients(zip(tape.gradient(loss, [table, dense]), [table, dense], strict=True))
    np.testing.assert_array_equal(found[0], table)
    np.testing.assert_array_equal(found[1], dense)
    assert (found[0] != rows()).any(1).tolist() == [False, True, False, True, False, False]


@pytest.mark.parametrize("module", [keras.optimizers, tf_keras.optimizers, LEGACY, V1.train], ids=lambda m: m.__name__)
def test_slots_and_global_step(module):
    table, dense, counted = sok.Variable(rows()), tf.Variable([1.0]), tf.Variable(0)
    optimizer = sok.OptimizerWrapper((module.AdamOptimizer if module is V1.train else module.Adam)(0.1))
    assert optimizer.get_slot_names() == ["m", "v"] and optimizer.get_slot(table, "m") is None
    step(optimizer, [table], [1], counted)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.all2all_dense_embedding(table, [1])) + tf.reduce_sum(dense)
    variables = [table, dense]
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True), global_step=counted)
    assert counted == 2
    np.testing.assert_allclose(optimizer.get_slot(table, "m")[1], np.full(4, 0.19), rtol=1e-5)
    if module in (LEGACY, V1.train):
        np.testing.assert_allclose(optimizer.get_slot(dense, "m"), [0.1], rtol=1e-5)


@pytest.mark.parametrize("module", [keras.optimizers, LEGACY, V1.train], ids=lambda m: m.__name__)
def test_states_of_dynamic_tables_are_exported_and_assigned_by_key(module):
    table = sok.DynamicVariable(dimension=2, initializer="13", var_type="hbm", name="d")
    optimizer = sok.OptimizerWrapper((module.AdamOptimizer if module is V1.train else module.Adam)(0.1))
    step(optimizer, [table], [7, 2**40])
    state = optimizer.get_slot(table, "m")
    keys, values = sok.export(state)
    assert keys.numpy().tolist() == sok.export(table)[0].numpy().tolist() and keys.dtype == tf.int64
    np.testing.assert_allclose(values, np.full((2, 2), 0.1), rtol=1e-5)
    before = sok.export(table)[1].numpy()
    assert sok.assign(state, [2**40, 7], [[1.0, 2.0], [3.0, 4.0]]) is state
    found = dict(zip(*(each.numpy().tolist() for each in sok.export(state)), strict=True))
    assert found == {2**40: [1, 2], 7: [3, 4]}
    sok.assign(state, *sok.export(state))
    np.testing.assert_array_equal(sok.export(table)[1], before)
    for arguments, error, said in (
        (([7, 8], np.ones((2, 2), np.float32)), INVALID, "'d'.*hold the keys"),
        (([7], np.ones((2, 2), np.float32)), INVALID, "values, one a key"),
        (([7], [[1, 2]]), TypeError, "floating"),
    ):
        with pytest.raises(error, match=rf"(?s){said}"):
            sok.assign(state, *arguments)
    assert dict(zip(*(each.numpy().tolist() for each in sok.export(state)), strict=True)) == found
    assert table.size == 2


CLASSES = {
    "Keras 3 Adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "Keras 3 Nadam": lambda: keras.optimizers.Nadam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "tf_keras Adam": lambda: tf_keras.optimizers.Adam(tf_keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "legacy Adamax": lambda: LEGACY.Adamax(tf_keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "legacy Adam": lambda: LEGACY.Adam(0.1, decay=0.5),
}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_one_optimizer_for_tables_and_for_the_rest(name, compiled):
    """Tables go to the wrapper, dense variables to the optimizer itself: each count of steps is its own, or bias
    corrections and schedules would run at double speed.
    """
    make = CLASSES[name]
    shared, apart = make(), [make(), make()]
    results = []
    for of_dense, of_tables in ((shared, sok.OptimizerWrapper(shared)), (apart[0], sok.OptimizerWrapper(apart[1]))):
        table, dense = sok.Variable(rows(), name="table"), tf.Variable(rows())

        def train(table=table, dense=dense, of_dense=of_dense, of_tables=of_tables):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(sok.all2all_dense_embedding(table, [0, 1])) + tf.reduce_sum(dense**2)
            variables = [table, dense]
            pairs = list(zip(tape.gradient(loss, variables), variables, strict=True))
            of_tables.apply_gradients(pairs[:1])
            of_dense.apply_gradients(pairs[1:])

        train = tf.function(train) if compiled else train
        for _ in range(4):
            train()
        assert int(of_tables.iterations) == int(of_dense.iterations) == 4
        results.append((table.numpy(), dense.numpy()))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


# --- dump and load ----------------------------------------------------------------------------------------------------

PLAIN = {
    "SGD": lambda: LEGACY.SGD(0.5),
    "momentum": lambda: LEGACY.SGD(0.5, momentum=0.9),
    "Adam": lambda: LEGACY.Adam(0.5),
    "amsgrad": lambda: LEGACY.Adam(0.5, amsgrad=True),
    "Adamax": lambda: LEGACY.Adamax(0.5),
    "Adadelta": lambda: LEGACY.Adadelta(0.5),
    "Adagrad": lambda: LEGACY.Adagrad(0.5),
    "RMSprop": lambda: LEGACY.RMSprop(0.5, momentum=0.9),
    "Ftrl": lambda: LEGACY.Ftrl(0.5),
}


def pair(first=0.0):
    return [sok.Variable(rows(first), name="a"), sok.Variable(rows(first)[:4, :2], name="b")]


def same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_legacy_optimizers(name, tmp_path, device):
    """They update static tables without a wrapper; dump and load take their slots and their count, and training goes
    on as if it had not stopped.
    """
    if device == "gpu" and name == "RMSprop":
        pytest.skip("TensorFlow has no kernel of ResourceSparseApplyRMSProp for GPUs")
    tables, optimizer = pair(), PLAIN[name]()
    for _ in range(3):
        step(optimizer, tables, [1, 3, 3])
    sok2.dump(str(tmp_path / "d"), dump_vars=tables, optimizer=optimizer)
    others, other = pair(99.0), PLAIN[name]()
    sok2.load(str(tmp_path / "d"), load_vars=others, optimizer=other)
    assert int(other.iterations) == 3
    for _ in range(2):
        step(optimizer, tables, [1, 2])
        step(other, others, [1, 2])
    same(tables, others)
    for slot in optimizer.get_slot_names():
        same(*([o.get_slot(t, slot) for t in of] for o, of in ((optimizer, tables), (other, others))))
    if name not in ("SGD", "amsgrad"):  # the same states as a wrapper's
        wrapped = sok.OptimizerWrapper(PLAIN[name]())
        thirds = pair(99.0)
        sok.load(tmp_path / "d", thirds, wrapped)
        sok.load(tmp_path / "d", others, other)
        same([other.get_slot(t, n) for t in others for n in wrapped.get_slot_names()],
             [wrapped.get_slot(t, n) for t in thirds for n in wrapped.get_slot_names()])  # fmt: skip


def test_plain_optimizers_have_no_dynamic_tables(tmp_path):
    table = sok.DynamicVariable(dimension=2, name="d")
    with pytest.raises(TypeError, match=r"table 'd' is dynamic.*OptimizerWrapper"):
        sok.dump(tmp_path / "d", table, LEGACY.Adam())
    with pytest.raises(TypeError, match="has no states of tables"):
        sok.dump(tmp_path / "d", sok.Variable(rows()), keras.optimizers.Adam())
    assert not (tmp_path / "d").exists()


def test_sok_wrote_adamax_as_adam(tmp_path):
    tables, optimizer = pair(), LEGACY.Adamax(0.5)
    step(optimizer, tables, [1])
    sok.dump(tmp_path / "d", tables, optimizer)
    (tmp_path / "d" / "sok_manifest.json").unlink()
    for file in (tmp_path / "d").glob("*-Adamax-*"):
        file.rename(str(file).replace("-Adamax-", "-Adam-"))
    others, other = pair(99.0), LEGACY.Adamax(0.5)
    sok.load(tmp_path / "d", others, other)
    same(tables, others)
    same([optimizer.get_slot(t, "v") for t in tables], [other.get_slot(t, "v") for t in others])


def test_the_wrapped_optimizer_stands_for_its_wrapper(tmp_path):
    inner = LEGACY.Adam(0.5)
    tables, wrapper = pair(), sok.OptimizerWrapper(inner)
    step(wrapper, tables, [1])
    sok.dump(tmp_path / "d", tables, inner)
    others, other = pair(99.0), sok.OptimizerWrapper(LEGACY.Adam(0.5))
    sok.load(tmp_path / "d", others, other)
    same([wrapper.get_slot(t, "m") for t in tables], [other.get_slot(t, "m") for t in others])


@pytest.mark.parametrize("wrap", [sok.OptimizerWrapper, lambda optimizer: optimizer], ids=["wrapped", "plain"])
def test_an_optimizer_for_each_table(wrap, tmp_path):
    tables, optimizers = pair(), [wrap(LEGACY.Adam(0.5)), wrap(LEGACY.Adam(0.25))]
    for count, table, optimizer in zip((3, 1), tables, optimizers, strict=True):
        for _ in range(count):
            step(optimizer, [table], [1])
    sok.dump(tmp_path / "d", tables, optimizers)
    others, made = pair(99.0), [wrap(LEGACY.Adam(0.5)), wrap(LEGACY.Adam(0.25))]
    sok.load(tmp_path / "d", others, made)
    assert [int(optimizer.iterations) for optimizer in made] == [3, 1]
    for of, by in ((tables, optimizers), (others, made)):
        for table, optimizer in zip(of, by, strict=True):
            step(optimizer, [table], [1, 2])
    same(tables, others)
    for wrong, message in ((optimizers[:1], "a list of 1"), ([optimizers[0], wrap(LEGACY.Ftrl())], "one class")):
        with pytest.raises(ValueError, match=message):
            sok.dump(tmp_path / "e", tables, wrong)
    assert not (tmp_path / "e").exists()


def test_a_threshold_for_each_table():
    tables = pair()
    sok.track_changes(tables)
    now = datetime.datetime.now(datetime.timezone.utc)
    sok.assign(tables[0], [2], np.ones((1, 4), np.float32))
    sok.assign(tables[1], [3], np.ones((1, 2), np.float32))
    later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=1)
    for thresholds, found in (([now, later], [[2], []]), ([now], [[2], [3]]), ((now, now), [[2], [3]])):
        keys, _ = sok2.incremental_model_dump(sok_vars=tables, time_threshold=thresholds)
        assert [each.tolist() for each in keys] == found
    with pytest.raises(ValueError, match="3 entries, but there are 2 tables"):
        sok.incremental_model_dump(tables, [now] * 3)


def test_a_session():
    """A tf.compat.v1 graph from initial values to changed rows, with the session as an argument."""
    with tf.Graph().as_default():
        table = sok.DynamicVariable(dimension=2, initializer="13", var_type="hybrid", init_capacity=64)
        keys = V1.placeholder(tf.int64, [None])
        rows_read = tf.nn.embedding_lookup(table, keys)
        optimizer = sok.OptimizerWrapper(V1.train.AdagradOptimizer(1.0))
        gradients = tf.gradients(tf.reduce_sum(rows_read), [table])
        train = optimizer.apply_gradients(zip(gradients, [table], strict=True))
        with V1.Session() as session:
            session.run(V1.global_variables_initializer())
            begin = datetime.datetime.now(datetime.timezone.utc)
            session.run(train, {keys: [7, 2**40]})
            now = session.run(rows_read, {keys: [7]})
            assert (now < 13).all()
        session = V1.Session()
        session.run(V1.global_variables_initializer())
        with session.as_default():
            sok.track_changes(table)
        session.run(train, {keys: [7, 9]})
        found, values = sok2.incremental_model_dump([table], begin, sess=session)
        assert found[0].tolist() == [7, 9]
        assert sok2.incremental_model_dump([table], begin, session)[0][0].tolist() == [7, 9]
        np.testing.assert_array_equal(values[0][:1], now)
