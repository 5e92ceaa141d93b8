# SPDX-License-Identifier: Apache-2.0
"""Arguments of every function of the C interface, all of them right, and ways to make a view wrong: for test_misuse."""

import ctypes

import harness
import numpy as np

from sparse_operation_kit import core
from sparse_operation_kit.core import _abi, _arrays, _library

INVALID = _library.INVALID_ARGUMENT
HUGE = 2**62


class World:
    """Arguments of every function for one small table, all of them right."""

    def __init__(self):
        self.weight = np.ones((10, 4), np.float32)
        self.state = np.ones((10, 4), np.float32)
        self.context = core.Context().struct
        table = core.Table(self.weight, name="mine")
        self.placements, self.columns = (_abi.Placement * 1)(table.placement()), (_abi.Columns * 1)(table.columns())
        keys, splits = np.array([1, 9, 1]), np.array([0, 2, 3])
        weights, self.output = np.ones(3, np.float32), np.zeros((2, 4), np.float32)
        lookup = _abi.Lookup(ctypes.sizeof(_abi.Lookup), 0, _abi.MEAN)
        lookup.keys, lookup.row_splits, lookup.weights = map(_arrays.view, (keys, splits, weights))
        located = keys.copy()
        lookup.slots, lookup.output = _arrays.view(located), _arrays.view(self.output)
        self.lookups = (_abi.Lookup * 1)(lookup)
        routing = core.route([table], [core.Lookup(keys, 0, splits, weights, "mean")])
        self.routing = routing.struct()
        self.messages_of = routing.messages([table])
        self.messages = self.messages_of.struct
        self.pooled = (ctypes.c_int32 * 1)(0)
        self.batch = _abi.Batch(ctypes.sizeof(_abi.Batch), self.pooled)
        joined = np.zeros(2, np.int64)
        self.joined = _arrays.view(joined)
        rows, slots = np.zeros(8, np.float32), np.array([1, 9])
        incoming, weight_gradient = np.ones((2, 4), np.float32), np.zeros(3, np.float32)
        self.output_gradients = _arrays.views([incoming])
        self.weight_gradients = _arrays.views([weight_gradient])
        self.slots, self.rows = _arrays.view(slots), _arrays.view(rows)
        gradient = _abi.Gradient(ctypes.sizeof(_abi.Gradient), _abi.MEAN, 0)
        gradient.slots, gradient.values = _arrays.view(keys), _arrays.view(incoming)
        gradient.row_splits, gradient.weights = _arrays.view(splits), _arrays.view(weights)
        self.gradients = (_abi.Gradient * 1)(gradient)
        self.optimizer = core.Optimizer("adagrad", 0.1).struct()
        update = _abi.Update(ctypes.sizeof(_abi.Update), self.columns, ctypes.pointer(self.optimizer), 1.0, 1, 1)
        update.states[0], update.gradients = _arrays.view(self.state), self.gradients
        self.updates = (_abi.Update * 1)(update)
        self.initializer = core.Initializer("uniform", 0.0, 1.0, 7).struct()
        n_slots, n_values, count = np.zeros(3, np.int64), np.zeros((3, 4), np.float32), np.zeros(1, np.int64)
        self.unique = tuple(_arrays.view(array) for array in (n_slots, n_values, count))
        bag_rows, bag_splits = np.array([1, 0, 1]), np.zeros(3, np.int64)
        order, is_sorted = np.zeros(3, np.int64), np.zeros(1, np.int32)
        self.flags = np.zeros(3, np.int64)
        self.bags = tuple(map(_arrays.view, (bag_rows, bag_splits, order, is_sorted)))
        self.assigned = np.full((2, 4), 5, np.float32)
        self.initial = np.zeros((3, 4), np.float32)
        self._alive = [
            table, keys, splits, weights, located, routing, joined, rows, slots,
            incoming, weight_gradient, n_slots, n_values, count, bag_rows, bag_splits, order, is_sorted,
        ]  # fmt: skip

    def arguments(self):
        """{function: its arguments}."""
        batch, located = (1, self.placements, 1, self.lookups), (1, self.columns, 1, self.lookups)
        none = _arrays.absent()
        return {
            "sok_assign": [
                self.context,
                self.columns,
                self.slots,
                _arrays.view(self.assigned),
                _arrays.view(self.weight),
            ],
            "sok_error_record_flag": [self.context, _arrays.view(self.flags)],
            "sok_bags_from_coordinates": [self.context, self.bags[0], 2, *self.bags[1:]],
            "sok_split_batch": [self.context, *batch, self.batch],
            "sok_route": [self.context, *batch, self.pooled, self.routing],
            "sok_join_keys": [self.context, self.messages, self.routing, self.joined],
            "sok_locate": [self.context, *batch[:2], None, *batch[2:], 0],
            "sok_combine": [self.context, *batch, self.messages, self.routing.inverse, self.rows],
            "sok_gather_combine": [self.context, *located],
            "sok_spread": [self.context, *batch, self.output_gradients, self.messages, self.routing, self.rows],
            "sok_weight_gradient": [self.context, *located, self.output_gradients, self.weight_gradients],
            "sok_weight_gradient_of_rows": [
                self.context,
                *batch,
                self.output_gradients,
                self.messages,
                self.routing.inverse,
                self.rows,
                self.weight_gradients,
            ],
            "sok_reduce": [self.context, self.columns, 1, self.gradients, *self.unique],
            "sok_apply": [self.context, 1, self.updates, _abi.AGREE(), None],
            "sok_initialize": [self.context, self.initializer, none, 0, 1, _arrays.view(self.initial)],
        }

    def call(self, function, arguments=None):
        """The status of a call."""
        return getattr(_abi.library(), function)(*(arguments or self.arguments()[function]))

    def fails(self, function, status=INVALID, words=(), arguments=None):
        with harness.unchanged(self.weight, self.state):
            assert self.call(function, arguments) == status
        message = _abi.library().sok_last_error_message().decode()
        assert message
        for word in words:
            assert word in message, f"{word!r} is not in the message {message!r}"


# What needs a communicator is in test_communicator, a range in test_reserved_range_use, an index or a table in
# test_misuse_of_tables.
_OF_HANDLES = (
    "sok_all_reduce",
    "sok_all_to_all",
    "sok_swap_counts",
    "sok_share_errors",
    "sok_reserved_range_",
    "sok_hash_index_",
    "sok_dynamic_table_",
)
FUNCTIONS = [
    name
    for name, (_, kinds) in _abi.PROTOTYPES.items()
    if ctypes.POINTER(_abi.Context) in kinds and not name.startswith(_OF_HANDLES)
]


def is_pointer(kind):
    return hasattr(kind, "contents")


def bad_views(view):
    """A right view made wrong in every way that the view itself can show: (what, view)."""

    def changed(**fields):
        other = _abi.Tensor.from_buffer_copy(view)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    yield "dtype", changed(dtype=_abi.FLOAT64)
    yield "dtype number", changed(dtype=77)
    yield "dtype number", changed(dtype=-1)
    yield "rank", changed(rank=3 - view.rank)
    yield "rank number", changed(rank=99)
    yield "rank number", changed(rank=-1)
    yield "data", changed(data=None)
    yield "alignment", changed(data=view.data + 1)
    for stride in (-1, HUGE, view.shape[1] - 1 or -2 if view.rank == 2 else 5):
        yield f"row stride {stride}", changed(row_stride=stride)
    for size in (-1, HUGE, -(2**63), 2**63 - 1, view.shape[0] + 1):
        other = changed()
        other.shape = (ctypes.c_int64 * 2)(size, view.shape[1])
        yield f"size {size}", other
    if view.rank == 2:
        for size in (-1, HUGE, 0):
            other = changed()
            other.shape = (ctypes.c_int64 * 2)(view.shape[0], size)
            yield f"columns {size}", other
        other = changed()
        other.shape = (ctypes.c_int64 * 2)(2**33, 2**33)
        yield "size that overflows", other
