# SPDX-License-Identifier: Apache-2.0
"""The exchange over NCCL as far as graphs show it; it runs in tests/distributed, on GPUs."""

import itertools
import types
import unittest.mock
from typing import Any

import pytest
import tensorflow as tf

from sparse_operation_kit.tensorflow import agreement, exchange, runtime
from sparse_operation_kit.tensorflow._ops import ops


def inputs():
    """(handle, values, send_splits, receive_splits) of a graph."""
    placeholder = tf.compat.v1.placeholder
    return (
        placeholder(tf.resource, []),
        placeholder(tf.float32, [None, 3]),
        placeholder(tf.int32, [2]),
        placeholder(tf.int32, [2]),
    )


def test_shapes():
    with tf.Graph().as_default():
        handle, values, send, receive = inputs()
        received = exchange.all_to_all(handle, values, send, receive)
        assert received.dtype == tf.float32 and received.shape.as_list() == [None, 3]
        counts = tf.compat.v1.placeholder(tf.int64, [2, 5])
        for output in ops.sok_swap_counts(communicator=handle, counts=counts):
            assert output.dtype == tf.int64 and output.shape.as_list() == [2, 5]
        for bad in (
            {"values": tf.constant(1.0)},
            {"values": tf.constant(["text"])},
            {"send_splits": tf.constant([[1, 1]])},
            {"send_splits": tf.constant([1, 1, 1])},
        ):
            arguments = {"communicator": handle, "values": values, "send_splits": send, "receive_splits": receive}
            with pytest.raises((ValueError, TypeError)):
                ops.sok_all_to_all(**{**arguments, **bad})


def test_the_gradient_is_the_way_back():
    with tf.Graph().as_default():
        handle, values, send, receive = inputs()
        received = exchange.all_to_all(handle, values, send, receive)
        (gradient,) = tf.gradients(received, values)
        op = gradient.op
        assert op.type == "SokAllToAll"
        assert [op.inputs[i] is x for i, x in enumerate((handle, None, receive, send)) if x is not None] == [True] * 3
        assert gradient.shape.as_list() == [None, 3]


def test_exchanges_of_a_graph_run_in_one_order():
    """Also those of gradients, which share no data."""
    with tf.Graph().as_default() as graph:
        pairs = []
        for _ in range(3):
            handle, values, send, receive = inputs()
            pairs.append((values, exchange.all_to_all(handle, values, send, receive)))
        tf.gradients([received for _, received in pairs], [values for values, _ in pairs])
        exchanges = [op for op in graph.get_operations() if op.type == "SokAllToAll"]
        assert len(exchanges) == 6
        for before, after in itertools.pairwise(exchanges):
            assert before in after.control_inputs


def test_functions_keep_the_order_too():
    seen = []

    @tf.function
    def step(handle, values, splits):
        with tf.GradientTape() as tape:
            tape.watch(values)
            first = exchange.all_to_all(handle, values, splits, splits)
            second = exchange.all_to_all(handle, 2 * values, splits, splits)
            loss = tf.reduce_sum(first * second)
        gradient = tape.gradient(loss, values)
        seen.extend(op for op in tf.compat.v1.get_default_graph().get_operations() if op.type == "SokAllToAll")
        return gradient

    step.get_concrete_function(tf.TensorSpec([], tf.resource), tf.TensorSpec([None, 3]), tf.TensorSpec([2], tf.int32))
    assert len(seen) == 4
    for before, after in itertools.pairwise(seen):
        assert before in after.control_inputs


class Silent:
    """Of two ranks, which sends nothing and keeps the names of the calls."""

    rank, size, local_rank = 0, 2, 0

    def __init__(self):
        self.calls = []

    def all_to_all(self, tensor, splits, name, alike=False):
        self.calls.append(name)
        return tensor

    def all_reduce(self, tensors, op, name):
        self.calls.append((op, len(tensors)))
        return tensors


def silent() -> Any:
    """As far as these tests need an `engine.Engine`."""
    return Silent()


def test_tensors_on_the_cpu_go_by_the_engine():
    engine = silent()
    nccl = exchange.NcclExchange(engine, required=True)
    with tf.device("CPU:0"):
        tensor = tf.zeros([2, 2])
    nccl.all_to_all(tensor, [1, 1], [1, 1], "a")
    nccl.swap_counts(tensor, "b")
    nccl.all_reduce([tensor, tensor], "max", "d")
    assert engine.calls == ["a", "b", ("max", 2)]
    engine.calls.clear()
    with tf.Graph().as_default(), tf.device("GPU:0"):  # a tf.compat.v1 graph
        nccl.swap_counts(tf.zeros([2, 2]), "c")
    assert engine.calls[-1] == "c"
    nccl.close()


def test_handles():
    """Of a communicator that is gone: ops say so. The handle itself works on any device."""
    with tf.device("CPU:0"):
        handle = ops.sok_communicator_handle(address=4096)
        ops.sok_communicator_close(communicator=handle)
        assert int(ops.sok_gpu_index()) == -1
    assert handle.dtype == tf.resource


@pytest.fixture
def connected():
    """An exchange of two ranks that has a handle, of a communicator that is gone."""
    with tf.device("CPU:0"):
        handle = ops.sok_communicator_handle(address=4096)
        ops.sok_communicator_close(communicator=handle)
    nccl = exchange.NcclExchange(silent(), required=True)
    nccl._handle, nccl._gpu = handle, "GPU:0"
    communicator: Any = types.SimpleNamespace(prepare_all_reduce=lambda: None, close=lambda: None)
    nccl._communicator = communicator
    return nccl


def test_splits_that_are_not_given_are_found_without_the_values(connected):
    """On the host TensorFlow would copy a tensor of a GPU there, to see its shape."""

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def run(values):
        with tf.device("GPU:0"):
            return connected.all_to_all(tf.identity(values))

    operations = run.get_concrete_function().graph.get_operations()  # is not run
    (moved,) = [op for op in operations if op.type == "SokAllToAll"]
    (swapped,) = [op for op in operations if op.type == "SokSwapCounts"]
    values = moved.inputs[1]
    users = [op for op in operations if any(each is values for each in op.inputs)]
    assert {op.type for op in users} == {"Shape", "SokAllToAll"}
    for op in (*users, swapped):
        assert "GPU:0" in op.device, op
    for splits in moved.inputs[2:]:
        assert "CPU:0" in splits.op.device, splits


def test_gradients_of_dense_variables_are_reduced_together(connected, monkeypatch):
    """Those of one dtype by one op, after the exchanges of the step, where the variables are; others by the engine."""
    prepared = []
    connected._communicator = types.SimpleNamespace(prepare_all_reduce=lambda: prepared.append(1))
    float32, float64 = tf.TensorSpec([None, 3]), tf.TensorSpec([], tf.float64)

    @tf.function(input_signature=[float32, float32, float64, tf.TensorSpec([2], tf.int32)])
    def run(first, second, third, whole):
        with tf.device("GPU:0"):
            connected.all_to_all(tf.identity(first))
        return connected.all_reduce([first, whole, second, third], "average", "name", "GPU:0")

    traced = run.get_concrete_function()
    reductions = [op for op in traced.graph.get_operations() if op.type == "SokAllReduce"]
    assert [len(op.inputs) for op in reductions] == [3, 2] and prepared == [1]
    assert all(op.device.endswith("GPU:0") and op.get_attr("reduction") == 1 for op in reductions)
    last = next(op for op in traced.graph.get_operations() if op.type == "SokAllToAll")
    assert last in reductions[0].control_inputs and reductions[0] in reductions[1].control_inputs
    assert connected.engine.calls == [("average", 1)]
    assert [spec.dtype for spec in traced.structured_outputs] == [tf.float32, tf.int32, tf.float32, tf.float64]


def test_what_has_no_device_in_a_function_is_on_the_gpu(connected):
    """Unless the scope around says something else. int32 tensors lie on the host."""
    float32, int32 = tf.TensorSpec([2, 3]), tf.TensorSpec([2], tf.int32)

    @tf.function(input_signature=[float32, int32])
    def run(values, whole):
        reduced = connected.all_reduce([2 * values, whole], "sum", "reduced")
        moved = connected.all_to_all(values, tf.constant([1, 1]), None, "moved")
        with tf.device("CPU:0"):
            on_host = connected.all_reduce([values], "max", "on_host")
            return *reduced, moved, connected.all_to_all(values, None, None, "host_moved"), *on_host

    operations = run.get_concrete_function().graph.get_operations()
    (reduction,) = [op for op in operations if op.type == "SokAllReduce"]
    (movement,) = [op for op in operations if op.type == "SokAllToAll"]
    for op in (reduction, movement, reduction.inputs[1].op, movement.inputs[1].op):
        assert op.device.endswith("GPU:0"), op
    assert connected.engine.calls == [("sum", 1), ("max", 1), "host_moved"]


@pytest.mark.parametrize(("seen", "unusable"), [(0, False), (2, False), (1, True)])
def test_what_has_no_device_where_no_gpu_is_known(seen, unusable, monkeypatch):
    """The rank sees none, or several and has exchanged on none of them, or the ranks have no communicator."""
    engine = silent()
    nccl = exchange.NcclExchange(engine, required=False)
    nccl._unusable = unusable
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind] * seen)
    run = tf.function(lambda values: nccl.all_reduce([values], "sum", "n"))
    assert run(tf.constant([1.0, 2.0]))[0].numpy().tolist() == [1, 2]
    assert engine.calls == [("sum", 1)]


def test_the_only_gpu_is_where_a_communicator_is_made(monkeypatch):
    nccl, asked = exchange.NcclExchange(silent(), required=False), []
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind])
    monkeypatch.setattr(nccl, "_find_handle", asked.append)
    tf.function(lambda values: nccl.all_reduce([values], "sum", "n")).get_concrete_function(tf.TensorSpec([2]))
    assert [device.endswith("GPU:0") for device in asked] == [True]


def test_the_gradient_of_a_reduction():
    with tf.Graph().as_default():
        handle, values, _, _ = inputs()
        for op in ("sum", "average"):
            (gradient,) = tf.gradients(exchange.all_reduce(handle, [values], op), values)
            assert gradient.op.type == "SokAllReduce" and gradient.op.get_attr("reduction") == (op == "average")
        with pytest.raises(LookupError, match="max"):
            tf.gradients(exchange.all_reduce(handle, [values], "max"), values)


def test_an_update_tells_the_other_ranks_over_nccl(connected):
    """Where the tables' exchange is by the engine, an all-reduce of it does: SokApply takes no communicator."""
    table: Any = types.SimpleNamespace(
        placement=types.SimpleNamespace(num_ranks=2, owner=-1), handle=types.SimpleNamespace(device="GPU:0")
    )
    for exchanged, count in ((connected, 1), (exchange.EngineExchange(silent()), 0)):
        with unittest.mock.patch.object(runtime, "get", lambda one=exchanged: types.SimpleNamespace(exchange=one)):
            asked = agreement.Agreement([table])
            assert asked.update(len) == count and asked.update(len) == 0


def test_an_exchange_that_runs_eagerly_knows_its_handle(connected, monkeypatch):
    """By the device of what is sent; until it is closed."""
    asked = []
    monkeypatch.setattr(connected, "_find_handle", lambda device: asked.append(device) or connected._handle)
    values, splits = tf.zeros([2]), tf.constant([1, 1])
    for _ in range(3):
        with pytest.raises(tf.errors.OpError):  # there is no kernel, or no communicator
            connected.all_to_all(values, splits, splits)
    assert asked == [values.device]
    handle = connected._handle
    connected.close()
    connected._handle = handle
    with pytest.raises(tf.errors.OpError):
        connected.swap_counts(tf.zeros([2, 1], tf.int64))
    assert len(asked) == 2
