# SPDX-License-Identifier: Apache-2.0
"""The tests' own kind of table (`permutation`) as a variable of this frontend, in place of `sok.Variable`."""

import contextlib
import ctypes
from typing import Any

import numpy as np
import permutation
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.placement import Placement
from sparse_operation_kit.tensorflow import embedding, held, lookup, saving, stamps
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.saving import StateVariable
from sparse_operation_kit.tensorflow.table_variable import WRITERS, TableVariable

Static = sok.Variable
Plain = resource_variable_ops.ResourceVariable


class Held(permutation.HeldByPlaces, held.Table):
    def __init__(self, table):
        super().__init__(table)
        self.places = table.places


class ByKey:
    """A column of such a table as a static one has it, [local rows, ...], for what is saved."""

    def __init__(self, column, places, place):
        self._column, self._places = column, places
        self._sok_name, self._placement = column._sok_name, place
        self.shape, self.dtype = tf.TensorShape([len(places), *column.shape[1:]]), column.dtype

    def value(self):
        return tf.gather(Plain.read_value(self._column), self._places)

    def numpy(self):
        return self.value().numpy()

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.numpy(), dtype)

    def assign(self, rows):
        return self._column.write_slots(tf.constant(self._places), tf.cast(tf.convert_to_tensor(rows), self.dtype))


class Kept:
    """A column in checkpoints of TensorFlow."""

    by_key: ByKey
    _placement: Placement

    def _serialize_to_tensors(self):
        return {saving.VALUE: self.by_key.value(), saving.LAYOUT: tf.constant(saving.layout(self._placement))}

    def _restore_from_tensors(self, restored):
        saving.prepare(self.by_key, {name: np.asarray(value) for name, value in restored.items()})()
        return tf.no_op()

    def numpy(self):
        return self.by_key.numpy()

    def assign(self, rows, **_):
        self.by_key.assign(rows)
        return self


class State(Kept, StateVariable):
    def __init__(self, table, name, initial, rowwise):
        shape = table.shape[:1] if rowwise else table.shape
        super().__init__(
            name=name,
            place=table.placement,
            initial_value=lambda: tf.fill(shape, tf.constant(initial, tf.float32)),
            trainable=False,
            dtype=tf.float32,
            shape=shape,
        )
        self.by_key = ByKey(self, table.places, table.placement)


class Permuted(Kept, Static):
    """As sok.Variable, with an index. `places`: the slot of each slot of a static table."""

    places: np.ndarray
    has_index = True
    _lazy_read = Plain._lazy_read  # changes are marked by write_slots

    def __new__(cls, *args, **options):
        return object.__new__(cls)

    def __init__(self, *args, **options):
        with tf.init_scope():
            static = Static(*args, **options)
            self._begin(static.numpy(), static.placement, static.table_name, static.trainable, static.dtype)

    def _begin(self, rows, place, name, trainable, dtype):
        self.places, num_slots = permutation.places_of(*place.local_shape)
        index = permutation.index(self.places, place.owner, place.num_ranks)
        memory = permutation.column((num_slots, place.dimension), np.float32 if dtype.size == 4 else np.int16, 0)
        self._kept = index, memory
        TableVariable.__init__(
            self,
            name,
            place,
            initial_value=lambda: tf.zeros([num_slots, place.dimension], dtype),
            trainable=trainable,
            dtype=dtype,
            shape=[num_slots, place.dimension],
        )
        ops.sok_indexed_table(
            variable=self.handle,
            index=ctypes.addressof(index.struct),
            rows=memory.ctypes.data,
            num_slots=num_slots,
            dimension=place.dimension,
            dtype=dtype,
        )
        self.by_key = ByKey(self, self.places, place)
        every = tf.range(num_slots, dtype=tf.int64)
        Plain.scatter_update(self, tf.IndexedSlices(tf.cast(tf.fill(self.shape, permutation.FREE), dtype), every))
        Plain.scatter_update(self, tf.IndexedSlices(tf.constant(rows, dtype), self.places))

    def exported(self):
        return tf.constant(self.placement.global_keys(np.arange(len(self.places)))), self.by_key.value()

    def held(self):
        return Held(self)

    def content(self, column):
        return super().content(column.by_key)

    def prepare(self, column, saved):
        return super().prepare(column.by_key, saved)

    def new_state(self, name, initial, rowwise):
        return State(self, name, initial, rowwise)

    def new_stamps(self, **options):
        return stamps.Stamps(int(self.shape[0]), **options)

    def sparse_read(self, indices, name=None):
        return tf.cast(lookup.own_rows(self, indices), self.dtype)

    def read_slots(self, slots):
        return Plain.sparse_read(self, slots)

    def write_slots(self, slots, rows):
        written = Plain.scatter_update(self, tf.IndexedSlices(rows, slots))
        with tf.control_dependencies([] if tf.executing_eagerly() else [written.op]):
            return stamps.mark(self, slots)

    def __deepcopy__(self, memo):
        return _rebuild(self.by_key.numpy(), self.placement, self.table_name, self.trainable, self.dtype.name)

    def __reduce_ex__(self, protocol):
        return _rebuild, (self.by_key.numpy(), self.placement, self.table_name, self.trainable, self.dtype.name)


def _refused(name):
    def method(self, *args, **options):
        raise NotImplementedError(f"{name} writes by slot")

    return method


for _method in WRITERS:
    if _method != "assign":
        setattr(Permuted, _method, _refused(_method))


def _rebuild(rows, place, name, trainable, dtype):
    table = object.__new__(Permuted)
    table._begin(rows, place, name, trainable, tf.as_dtype(dtype))
    return table


@contextlib.contextmanager
def installed():
    """`sok.Variable` is this kind, for the tests within."""
    modules: tuple[Any, ...] = (sok, embedding)
    try:
        for module in modules:
            module.Variable = Permuted
        yield
    finally:
        for module in modules:
            module.Variable = Static
