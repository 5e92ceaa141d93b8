# SPDX-License-Identifier: Apache-2.0
"""A step count that Keras keeps on a GPU: known on the host as long as nobody but the step changes it.

Hosts without a GPU take every variable for one on a GPU here: the ops do the same on both, but for the copy.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import devices, keras_compat, step_count
from sparse_operation_kit.tensorflow._ops import ops

K, T, L = keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy
ROWS, DIMENSION = 9, 4
IDS = tf.ragged.constant([[1, 5], [3], [5, 5]], dtype=tf.int64)


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(devices, "is_on_gpu", lambda value: isinstance(value, tf.Variable))


def schedule(library):
    return library.optimizers.schedules.ExponentialDecay(0.05, 10, 0.9)


class OwnSchedule(K.schedules.LearningRateSchedule):
    """Needs the dtype of Keras's own count."""

    def __call__(self, step):
        count = tf.convert_to_tensor(keras_compat.raw(step))
        return 0.1 / (1.0 + tf.cast(tf.math.floormod(count, tf.constant(3, tf.int64)), tf.float32))


OPTIMIZERS = {
    "keras Adam": lambda: K.Adam(0.1),
    "keras AdamW, scheduled": lambda: K.AdamW(schedule(keras), weight_decay=0.01),
    "keras Adamax": lambda: K.Adamax(0.1),
    "keras SGD, scheduled": lambda: K.SGD(schedule(keras), momentum=0.9),
    "keras Adam, own schedule": lambda: K.Adam(OwnSchedule()),
    "tf_keras Adam, scheduled": lambda: T.Adam(schedule(tf_keras), jit_compile=False),
    "tf_keras legacy Adam": lambda: L.Adam(schedule(tf_keras)),
}


# --- the ops ----------------------------------------------------------------------------------------------------------


def read(variable, dtype=tf.float32):
    return ops.sok_read_number([variable.handle], dtype=dtype).numpy()


def test_a_counted_step_is_not_fetched():
    """What SokCountStep was told counts, even where it is not true."""
    count = tf.Variable(5, dtype=tf.int64, trainable=False)
    assert read(count) == 5
    count.assign(42)
    ops.sok_count_step([count.handle])
    assert read(count) == 6 and read(count, tf.int64) == 6
    count.assign(43)
    assert read(count) == 43


def test_counts_beyond_float32():
    count = tf.Variable(2**24 + 1, dtype=tf.int64, trainable=False)
    for step in range(2**24 + 1, 2**24 + 9):
        assert read(count, tf.int64) == step and read(count) == np.float32(step)
        count.assign_add(1)
        ops.sok_count_step([count.handle])


def test_nothing_is_counted_where_nothing_is_known():
    count = tf.Variable(5, dtype=tf.int64, trainable=False)
    ops.sok_count_step([count.handle])
    assert read(count) == 5, "never read before"
    ops.sok_count_step([count.handle])
    assert read(count) == 5, "not written to"


def test_a_count_that_is_written_in_place():
    count = tf.Variable([5], dtype=tf.int64, trainable=False)
    assert read(count) == 5
    tf.raw_ops.ResourceGather(resource=count.handle, indices=[0], dtype=tf.int64)  # makes dense reads copy it
    for step in range(6, 9):
        count.assign_add([1])
        ops.sok_count_step([count.handle])
        assert read(count) == step
        count.assign([step])


def test_counts_are_scalars_of_int64():
    for value in (tf.ones(2, tf.int64), tf.constant(1.0)):
        variable = tf.Variable(value)
        with pytest.raises(tf.errors.InvalidArgumentError, match="scalar of int64"):
            ops.sok_count_step([variable.handle])
    with pytest.raises(tf.errors.InvalidArgumentError, match="float is no int64"):
        ops.sok_read_number([tf.Variable(1.0).handle], dtype=tf.int64)


# --- which steps are counted ------------------------------------------------------------------------------------------


def add(variable, number, stale=None):
    variable.assign((variable if stale is None else stale) + tf.constant(number, tf.int64))


def nested(variable):
    tf.function(lambda: variable.assign_add(1))()


STEPS = {
    "added": (lambda v, _: add(v, 1), True),
    "added in place": (lambda v, _: v.assign_add(1), True),
    "added from the left": (lambda v, _: v.assign(tf.constant(1, tf.int64) + v), True),
    "read too": (lambda v, _: (v.assign_add(1), v.read_value()), True),
    "not": (lambda v, _: None, False),
    "two": (lambda v, _: add(v, 2), False),
    "two in place": (lambda v, _: v.assign_add(2), False),
    "twice": (lambda v, _: (add(v, 1), add(v, 1)), False),
    "subtracted": (lambda v, _: v.assign_sub(1), False),
    "assigned": (lambda v, _: v.assign(1), False),
    "added to what it was before": (lambda v, stale: add(v, 1, stale), False),
    "an unknown number": (lambda v, _: v.assign_add(tf.random.uniform([], 1, 2, tf.int64)), False),
    "in a function of its own": (lambda v, _: nested(v), False),
    "perhaps": (lambda v, _: tf.cond(tf.random.uniform([]) < 2, lambda: v.assign_add(1), lambda: v), False),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_counts_as_a_step(on_gpu, name):
    change, counts = STEPS[name]
    count = tf.Variable(5, dtype=tf.int64, trainable=False)

    @tf.function(autograph=False)
    def step():
        stale = count.read_value()
        with step_count.followed(count):
            seen = ops.sok_read_number([count.handle])
            change(count, stale)
        return seen

    types = [op.type for op in step.get_concrete_function().graph.get_operations()]
    assert ("SokCountStep" in types) is counts
    for _ in range(5):
        before = int(count)
        assert int(step()) == before


def test_a_count_that_nobody_asked_for(on_gpu):
    count = tf.Variable(5, dtype=tf.int64, trainable=False)

    @tf.function(autograph=False)
    def late():
        with step_count.followed(count):
            count.assign_add(1)
            return ops.sok_read_number([count.handle])

    assert int(late()) == 6
    assert "SokCountStep" not in [op.type for op in late.get_concrete_function().graph.get_operations()]


# --- training ---------------------------------------------------------------------------------------------------------


class Training:
    """A table, a dense variable and an optimizer; compiled and eager steps."""

    def __init__(self, make, with_dense=True, wrap=sok.OptimizerWrapper):
        self.table = sok.Variable(tf.ones([ROWS, DIMENSION]))
        self.dense = [tf.Variable(tf.ones([DIMENSION, 1]))] if with_dense else []
        self.plain = make()
        self.optimizer = wrap(self.plain)
        self.compiled = tf.function(self.eager, autograph=False)

    def eager(self):
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse(self.table, IDS, combiners="sum")
            loss = tf.reduce_sum(tf.matmul(rows, self.dense[0]) if self.dense else rows * rows)
        variables = [self.table, *self.dense]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def steps_in_a_loop(self, steps):
        @tf.function
        def run():
            for _ in tf.range(steps):
                self.eager()

        run()

    def op_types(self):
        return [op.type for op in self.compiled.get_concrete_function().graph.get_operations()]

    @property
    def iterations(self):
        return keras_compat.raw(self.optimizer.iterations)

    def run(self, tmp_path):
        """All that may happen to a count between steps."""
        for _ in range(3):
            self.compiled()
        checkpoint = tf.train.Checkpoint(count=self.iterations)
        path = checkpoint.write(str(tmp_path / "count"))
        self.eager()
        self.compiled()
        self.iterations.assign(17)
        self.compiled()
        self.compiled()
        self.iterations.assign_add(5)
        self.compiled()
        checkpoint.read(path)
        for _ in range(2):
            self.compiled()
        self.steps_in_a_loop(3)
        again = tf.function(self.eager, autograph=False)
        again()
        self.compiled()
        again()
        return [self.table.numpy(), *(x.numpy() for x in self.dense), int(self.iterations)]


@pytest.mark.parametrize("with_dense", [False, True], ids=["tables", "tables and dense"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_as_without(monkeypatch, tmp_path, name, with_dense):
    expected = Training(OPTIMIZERS[name], with_dense).run(tmp_path)
    monkeypatch.setattr(devices, "is_on_gpu", lambda value: isinstance(value, tf.Variable))
    training = Training(OPTIMIZERS[name], with_dense)
    found = training.run(tmp_path)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert found[-1] == 3 + 2 + 3 + 3
    types = training.op_types()
    if "SokReadNumber" in types:
        assert types.count("SokCountStep") == 1


def test_a_distributed_optimizer(monkeypatch, tmp_path):
    expected = Training(lambda: K.Adam(0.1), wrap=sok.DistributedOptimizer).run(tmp_path)
    monkeypatch.setattr(devices, "is_on_gpu", lambda value: isinstance(value, tf.Variable))
    training = Training(lambda: K.Adam(0.1), wrap=sok.DistributedOptimizer)
    for a, b in zip(training.run(tmp_path), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert training.op_types().count("SokCountStep") == 1


def test_a_step_that_counts_otherwise(on_gpu):
    """An optimizer that somebody taught to count in twos is asked at every step."""
    training = Training(lambda: K.Adam(0.1))
    apply = training.plain.apply

    def twice(*args, **options):
        apply(*args, **options)
        training.iterations.assign_add(1)

    training.plain.apply = twice
    seen = []
    for _ in range(3):
        training.compiled()
        seen.append(read(training.iterations))
    assert seen == [2, 4, 6] and "SokCountStep" not in training.op_types()


def test_where_it_is_needed(device):
    training = Training(lambda: K.Adam(0.1))
    training.compiled()
    for op_type in ("SokReadNumber", "SokCountStep"):
        assert (op_type in training.op_types()) is (device == "gpu")
