# SPDX-License-Identifier: Apache-2.0
"""The op library itself: documentation, shape functions, statuses, what happens to buffers."""

import gc
import os

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.python.framework import kernels, op_def_registry
from tensorflow_harness import finished

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit import core
from sparse_operation_kit.core import _library
from sparse_operation_kit.tensorflow import errors
from sparse_operation_kit.tensorflow._ops import PATH, ops


def op_defs():
    functions = [name for name in dir(ops) if name.startswith("sok_") and not name.endswith("_eager_fallback")]
    names = ["".join(part.capitalize() for part in name.split("_")) for name in functions]
    return [op_def_registry.get(name) for name in names]


def test_every_op_is_here_and_documented():
    """Summary, description of each input and output, on every op."""
    defs = op_defs()
    assert {d.name for d in defs} >= {"SokGatherCombine", "SokRoute", "SokSpread", "SokReduce", "SokApply", "SokBags"}
    text = PATH.read_bytes()
    for definition in defs:
        # TensorFlow strips documentation from the registry of op libraries; it is in the library itself.
        assert definition.name.encode() in text
    sources = (PATH.parent / "csrc").glob("*.cc")
    registered = 0
    for source in sources:
        for block in source.read_text().split("REGISTER_OP(")[1:]:
            registered += 1
            name = block.split('"')[1]
            registration = block.split(";\n\n")[0]
            assert ".SetShapeFn(" in block, f"{name} has no shape function"
            assert ".Doc(" in block, f"{name} has no documentation"
            assert len(registration) > 100
    assert registered == len(defs), "an op is registered twice or not loaded"


HOST_ALONE = {"SokBags", "SokRestoreOrder", "SokIndexedTable", "SokRequire"}
"""Ids come from input pipelines, in host memory; what these ops give is copied to the tables. Indices of others than
the core, and exchanges by TensorFlow's collectives, are on the CPU.
"""


GPU_ALONE = {"SokAllReduce", "SokAllToAll", "SokShareErrors", "SokSwapCounts"}
"""Horovod moves what is in host memory."""


def test_every_op_has_a_gpu_kernel():
    """In a build with CUDA; such a library serves GPUs also where it was built without one."""
    for definition in op_defs():
        devices = {kernel.device_type for kernel in kernels.get_registered_kernels_for_op(definition.name).kernel}
        expected = set() if definition.name in GPU_ALONE else {"CPU"}
        if core.built_with_cuda() and definition.name not in HOST_ALONE:
            expected.add("GPU")
        assert devices == expected, definition.name


def test_sizes_and_numbers_are_in_host_memory():
    """What kernels read on the host must not be fetched from a GPU at every step."""
    expected = {
        "SokApply": {"hyperparameters", "gradient_scale", "exchanged_counts", "generations"},
        "SokCheckUpdates": {"hyperparameters", "gradient_scale", "exchanged_counts", "generations", "failed"},
        "SokRaiseTogether": {"received"},
        "SokReduce": {"exchanged_counts", "generations"},
        "SokInitialize": {"parameters"},
        "SokLocate": {"counts", "failed", "generations"},
        "SokAgreed": {"counts", "failed", "received"},
        "SokShareErrors": {"communicator", "failed"},
        "SokInsert": {"generations"},
        "SokGatherCombine": {"generations"},
        "SokGather": {"counts", "generations"},
        "SokDynamicTable": {"parameters", "policy"},
        "SokColumn": {"added"},
        "SokTableCounts": {"counts"},
        "SokHeld": {"first_slot", "num_slots"},
        "SokScores": {"slots", "scores"},
        "SokSetEpoch": {"epoch"},
        "SokCombine": {"requests"},
        "SokSpread": {"requests"},
        "SokWeightGradient": {"requests", "generations"},
        "SokAllReduce": {"communicator"},
        "SokAllToAll": {"communicator", "send_splits", "receive_splits"},
        "SokCopyToGpu": {"values"},
        "SokSwapCounts": {"communicator", "sent", "received"},
        "SokReadNumber": {"number"},
    }
    for name, arguments in expected.items():
        for kernel in kernels.get_registered_kernels_for_op(name).kernel:
            assert set(kernel.host_memory_arg) == arguments, (name, kernel.device_type)
    for kernel in kernels.get_registered_kernels_for_op("SokExchangeSizes").kernel:
        definition = op_def_registry.get("SokExchangeSizes")
        numbers = {a.name for a in [*definition.input_arg, *definition.output_arg] if a.type != types_pb2.DT_STRING}
        assert set(kernel.host_memory_arg) == numbers - {"unique_keys", "bag_keys", "bag_splits", "keys"}


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int64])
def test_a_variable_as_a_number(dtype):
    """Whatever changes it, also where the number was kept."""
    variable = tf.Variable(3, dtype=dtype, trainable=False)
    other = tf.Variable(7, dtype=dtype)
    read = lambda: ops.sok_read_number([variable.handle])  # noqa: E731
    compiled = tf.function(read)

    def check(expected):
        for _ in range(2):
            assert read().dtype == tf.float32 and float(read()) == expected == float(compiled())
            assert float(ops.sok_read_number([other.handle])) == 7

    check(3)
    for i in range(12):
        variable.assign(tf.cast(i, dtype))
        check(i)
        variable.assign_add(tf.ones([], dtype))
        check(i + 1)
    tf.raw_ops.AssignSubVariableOp(resource=variable.handle, value=tf.ones([], dtype))
    check(11)
    held = variable.read_value()
    variable.assign_add(tf.ones([], dtype))
    check(12)
    assert float(held) == 11


def test_numbers_are_scalars_of_known_types():
    for value, message in ((tf.ones(2), r"not of shape \[2\]"), (tf.constant(1, tf.uint8), "not uint8")):
        variable = tf.Variable(value)
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            ops.sok_read_number([variable.handle])


def test_check_errors_finds_nothing():
    assert sok.check_errors() is None
    with tf.Graph().as_default():
        assert isinstance(sok.check_errors(), tf.Operation)


@pytest.mark.parametrize("code", range(8))
def test_every_status_becomes_its_error(code):
    if code == _library.OK:
        ops.sok_fail(code=code, message="fine")
        return
    with pytest.raises(errors.EXCEPTIONS[code], match="the message") as caught:
        ops.sok_fail(code=code, message="the message")
    assert type(caught.value) is errors.EXCEPTIONS[code]


def test_an_unknown_status_is_an_internal_error():
    with pytest.raises(tf.errors.InternalError, match="unknown status 99"):
        ops.sok_fail(code=99, message="the message")


def test_shape_functions_refuse_what_cannot_fit():
    table = sok.Variable(np.ones((4, 3), np.float32))
    attributes = {"table_names": ["t"], "num_rows": [4], "dimensions": [3], "owners": [-1], "num_ranks": 1, "rank": 0}
    lookup = {"lookup_tables": [0], "combiners": [0], "weighted": [False], "weights": [], "num_outputs": 1}
    lookup["generations"] = []

    @tf.function
    def build(keys, row_splits, **changes):
        arguments = {**attributes, **lookup, **changes}
        return ops.sok_gather_combine(tables=[table.handle], keys=[keys], row_splits=[row_splits], **arguments)

    good = build(tf.constant([1, 2]), tf.constant([0, 2], tf.int64))
    np.testing.assert_array_equal(good[0], [[2, 2, 2]])
    with pytest.raises(ValueError, match="rank 1"):
        build(tf.constant([[1, 2]]), tf.constant([0, 2], tf.int64))
    with pytest.raises(ValueError, match="table 5 of 1"):
        build(tf.constant([1, 2]), tf.constant([0, 2], tf.int64), lookup_tables=[5])
    with pytest.raises(ValueError, match="num_outputs must be 1 or 1, not 2"):
        build(tf.constant([1, 2]), tf.constant([0, 2], tf.int64), num_outputs=2)


def test_kernels_check_what_shape_functions_cannot():
    table = sok.Variable(np.ones((4, 3), np.float32), name="t")
    attributes = {"table_names": ["t"], "num_rows": [4], "dimensions": [3], "owners": [-1], "num_ranks": 1, "rank": 0}
    lookup = {"lookup_tables": [0], "combiners": [0], "weights": [], "generations": [], "num_outputs": 1}
    keys, splits = tf.constant([1, 2]), tf.constant([0, 2], tf.int64)

    def run(**changes):
        arguments = dict(
            tables=[table.handle], keys=[keys], row_splits=[splits], weighted=[False], **attributes, **lookup
        )
        return ops.sok_gather_combine(**{**arguments, **changes})

    run()
    for changes, message in (
        ({"row_splits": [tf.constant([0, 3], tf.int64)]}, "row_splits"),
        ({"row_splits": [tf.constant([1, 2], tf.int64)]}, "row_splits"),
        ({"row_splits": [tf.constant([0, 2, 1, 2], tf.int64)]}, "row_splits"),
        ({"dimensions": [4]}, r"\[4,3\]"),
        ({"num_rows": [5]}, r"\[4,3\]"),
        ({"combiners": [9]}, "combiner"),
        ({"weighted": [True], "weights": [tf.ones(3)]}, "2 ids"),
        ({"weighted": [True]}, "do not fit"),
        ({"num_rows": [4, 4]}, "num_tables"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            finished(lambda: run(**changes))  # noqa: B023 - called at once


def buffers_of(variable):
    return variable.read_value().numpy()


def test_whoever_holds_a_read_keeps_it():
    """Updates are in place, and a dense read taken before stays as it was."""
    table = sok.Variable(np.zeros((6, 2), np.float32), name="held")
    optimizer = sok.OptimizerWrapper(sok.SGD(1.0))

    def train():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(table, tf.ragged.constant([[1, 3]]), combiners="sum"))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    reads = []
    for _ in range(4):
        reads.append(table.read_value())
        train()
    for step, read in enumerate(reads):
        np.testing.assert_array_equal(read[1], [-step, -step])
    np.testing.assert_array_equal(table.numpy()[3], [-4, -4])
    table.assign(np.full((6, 2), 7, np.float32))
    read = table.read_value()
    train()
    np.testing.assert_array_equal(read, np.full((6, 2), 7))
    np.testing.assert_array_equal(table.numpy()[[0, 1]], [[7, 7], [6, 6]])


def test_the_array_a_table_was_made_from_stays():
    for rows in (64, 65):
        array = np.zeros((rows, 16), np.float32)
        tensor = tf.constant(array)
        optimizer = sok.OptimizerWrapper(sok.SGD(1.0))
        for value in (array, tensor, tf.Variable(array)):
            table = sok.Variable(value)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(sok.lookup_sparse(table, tf.ragged.constant([[1]])))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
            assert table.numpy().sum() == -16
            assert np.asarray(value).sum() == 0
        gc.collect()
        assert array.sum() == 0


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16, tf.int64])
@pytest.mark.parametrize("width", [None, 1, 5])
def test_write_slots(dtype, width):
    """Every bit pattern arrives, and of equal slots the last one counts."""
    seed = int.from_bytes(os.urandom(4))
    print("seed", seed)
    rng, sizes = np.random.default_rng(seed), [] if width is None else [width]
    bits = rng.integers(0, 256, [60, *sizes, dtype.size], np.uint8)
    rows = tf.bitcast(bits, dtype)
    variable = tf.Variable(tf.zeros([50, *sizes], dtype))
    slots = rng.integers(0, 50, 60)
    ops.sok_write_slots(variable=variable.handle, slots=slots, rows=rows, table_name="t")
    expected = np.zeros([50, *sizes, dtype.size], np.uint8)
    expected[slots] = bits
    np.testing.assert_array_equal(tf.bitcast(variable, tf.uint8), expected)


@pytest.mark.parametrize("rows", [[[1.0], [2.0]], [[1.0, 2.0, 3.0]], [[[1.0, 2.0]]]], ids=["number", "width", "rank"])
def test_write_slots_of_other_shapes(rows):
    variable = tf.Variable(tf.ones([4, 2]))
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="table 't'"):
        ops.sok_write_slots(variable=variable.handle, slots=tf.constant([0], tf.int64), rows=rows, table_name="t")
    np.testing.assert_array_equal(variable, np.ones([4, 2]))


@pytest.mark.parametrize("slot", [-1, 4, 2**31, 2**40])
def test_write_slots_outside(slot):
    variable = tf.Variable(tf.ones([4, 2]))
    rows = tf.zeros([2, 2])
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"table 't'.*{slot}"):
        ops.sok_write_slots(variable=variable.handle, slots=tf.constant([0, slot], tf.int64), rows=rows, table_name="t")
        sok.check_errors()
    np.testing.assert_array_equal(variable, np.ones([4, 2]))
