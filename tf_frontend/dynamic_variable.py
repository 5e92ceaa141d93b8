# SPDX-License-Identifier: Apache-2.0
"""A table without a vocabulary: any integer is a key, and rows appear when keys are first trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sparse_operation_kit import dynamic
from sparse_operation_kit import placement as _placement
from sparse_operation_kit.arguments import check_table_dtype
from sparse_operation_kit.placement import ANY_KEY, Placement
from sparse_operation_kit.tensorflow import devices, initializers, runtime
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.call import Tables
from sparse_operation_kit.tensorflow.saving import StateVariable
from sparse_operation_kit.tensorflow.table_variable import WRITERS, TableVariable

_names = _placement.name_counter()


class DynamicVariable(TableVariable):
    """A hash table from keys to rows, sharded over the ranks; a `tf.Variable` of this rank's rows.

    Any int32 or int64 is a key. A lookup in training inserts the keys that the table lacks, with their initial rows;
    a lookup with training=False reads these and inserts nothing. It grows in place, without copying rows and without
    tracing functions again.

    Args:
      dimension: elements a row.
      initializer: of the rows of new keys: None ("uniform"), "random", "normal", "uniform", "ones", "zeros", a number,
        or an initializer object that draws each element by itself, as of `sok.Variable`. A row depends on the seed, the
        table's name, its key and the column alone.
      var_type: "hbm" grows as long as there is memory, "hybrid" has a capacity.
      name: names the table in messages and its initial rows. None: numbered in creation order.
      constraint: as of `tf.Variable`.
      trainable: whether tapes watch the table.
      key_type: tf.int64, or tf.int32: then keys of 64 bits are refused.
      dtype: tf.float32, tf.float16 or tf.bfloat16, as of `sok.Variable`.
      mode: None or "distributed": key k belongs to rank k mod N (never negative); "localized:g": all to rank g.
      seed: of the initial rows. None: that of init().
      **options: init_capacity, so many rows a rank have memory from the beginning; max_capacity, the most rows that a
        rank may hold (2^26 for "hybrid", else as many as memory holds); evict_strategy; max_hbm_for_vectors; device_id,
        the GPU that it is on. Others that SOK 2.x knows are accepted.

    The variable's own shape is [slots, dimension], where slots are as many as keys were held at once. It is read like
    any other variable, but written by `sok.assign` and optimizers of this package alone.

    Raises:
      RuntimeError: before init().
      TypeError: an unknown option, another dtype or key_type, an initializer that draws no element by itself.
      ValueError: a value out of range.
      tf.errors.ResourceExhaustedError: there is no memory for init_capacity rows.

    Example::

        table = sok.DynamicVariable(dimension=16, initializer="random", var_type="hbm", name="users")
        ids = tf.ragged.constant([[-7], [2**40, 3]], dtype=tf.int64)
        sok.lookup_sparse(table, ids, combiners="sum")  # [2, 16]
        table.size  # 3
    """

    def __init__(
        self,
        dimension: int,
        initializer: Any = None,
        var_type: str = "hybrid",
        name: str | None = None,
        constraint: Any = None,
        trainable: bool = True,
        key_type: Any = tf.int64,
        dtype: Any = tf.float32,
        mode: str | None = None,
        *,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        state = runtime.get()
        table_name = _placement.table_name(name, _names, "DynamicVariable")
        width = dynamic.check_dimension(dimension, table_name)
        self._options = dynamic.check_options(var_type, options, table_name)
        self._key_type = tf.as_dtype(dynamic.check_key_type(key_type, table_name))
        table_dtype = tf.as_dtype(tf.float32 if dtype is None else dtype)
        check_table_dtype(table_dtype, table_name)
        place = Placement(ANY_KEY, width, _placement.parse_mode(mode, state.num_ranks), state.num_ranks, state.rank)
        chosen = "uniform" if initializer is None else initializer
        spec = dynamic.check_initializer(initializers.as_spec(chosen, place) or chosen, width, table_name)
        device = self._options.device_id
        on_gpu = device is not None and bool(tf.config.list_logical_devices("GPU"))
        with tf.device(f"GPU:{device}") if on_gpu else contextlib.nullcontext():
            super().__init__(
                table_name,
                place,
                initial_value=lambda: tf.zeros([0, width], table_dtype),
                shape=tf.TensorShape([None, width]),
                dtype=table_dtype,
                trainable=trainable,
                constraint=constraint,
            )
        drawn_with = state.arguments.seed if seed is None else seed
        row_bytes = width * table_dtype.size
        with tf.init_scope(), devices.beside(self):
            made = ops.sok_dynamic_table(
                variable=self.handle,
                table_name=table_name,
                dimension=width,
                capacity=self._options.capacity(row_bytes, dynamic.host_memory_bytes()),
                initial_rows=self._options.init_capacity,
                eviction=self._options.eviction,
                dtype=table_dtype,
                **initializers.arguments(
                    spec, _placement.table_seed(drawn_with if spec.seed is None else spec.seed, table_name)
                ),
            )
        if made is not None:  # a tf.compat.v1 graph
            self._initializer_op = made

    @property
    def size(self) -> Any:
        """How many keys this rank holds: an int, in a graph an int64 scalar. On a GPU it waits."""
        size = ops.sok_table_size(tables=[self.handle], **Tables.of([self]).attributes())
        return int(size) if tf.executing_eagerly() else size

    @property
    def dimension(self) -> int:
        """Elements a row."""
        return self.placement.dimension

    @property
    def key_type(self) -> tf.DType:
        """tf.int32 or tf.int64."""
        return self._key_type

    @property
    def backend_type(self) -> str:
        """ "hbm" or "hybrid"."""
        return self._options.var_type

    @property
    def capacity(self) -> int | None:
        """The most keys that a rank may hold; None: as many as memory holds."""
        return self._options.max_capacity

    @property
    def indices(self) -> tf.Tensor:
        """The keys that this rank holds, [size] of key_type in host memory, in the order of `sok.export`."""
        keys, _ = self.exported()
        with tf.device(devices.HOST):
            return tf.identity(keys)

    def check_keys(self, dtype: tf.DType, where: str, what: str) -> None:
        super().check_keys(dtype, where, what)
        if dtype == tf.int64 and self._key_type == tf.int32:
            raise TypeError(f"{where}: {what} must be int32, the key_type of table '{self.table_name}', got int64")

    def exported(self) -> tuple[tf.Tensor, tf.Tensor]:
        keys, rows = ops.sok_export(tables=[self.handle], dtype=self.dtype, **Tables.of([self]).attributes())
        return tf.cast(keys, self._key_type), rows

    def mark_keys(self, keys: tf.Tensor) -> Any:
        return None

    def new_state(self, name: str, initial: float, rowwise: bool) -> StateVariable:
        return DynamicState(self, name, initial, rowwise)

    def write_slots(self, slots: tf.Tensor, rows: tf.Tensor) -> None:
        resource_variable_ops.ResourceVariable.scatter_update(self, tf.IndexedSlices(rows, slots))

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        return super()._read_variable_op()  # without a copy a tensor would lie on the table's memory

    def _serialize_to_tensors(self) -> dict[str, Any]:
        raise _not_saved(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicVariable:
        raise NotImplementedError(f"table '{self.table_name}' is dynamic and cannot be copied")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        raise NotImplementedError(f"table '{self.table_name}' is dynamic and cannot be pickled")


class DynamicState(StateVariable):
    """An optimizer state of a dynamic table: a column of it, [slots, dimension], or [slots] where it is rowwise."""

    def __init__(self, table: DynamicVariable, name: str, initial: float, rowwise: bool) -> None:
        shape = [None] if rowwise else [None, table.dimension]
        super().__init__(
            name=name,
            place=table.placement,
            initial_value=lambda: tf.zeros([0, *shape[1:]]),
            trainable=False,
            shape=tf.TensorShape(shape),
        )
        self._sok_table = table
        self._sok_column = {"width": 0 if rowwise else table.dimension, "initial": initial}
        if tf.executing_eagerly():
            self.show()

    def show(self) -> Any:
        """Gives the variable the shape that the column has now; at first the column itself."""
        return ops.sok_column(table=self._sok_table.handle, variable=self.handle, **self._sok_column)

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        shown = self.show()
        with tf.control_dependencies([] if shown is None else [shown]):
            yield

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        with self._shown():
            return super()._read_variable_op()

    def sparse_read(self, *args: Any, **options: Any) -> Any:
        with self._shown():
            return super().sparse_read(*args, **options)

    def scatter_update(self, *args: Any, **options: Any) -> Any:
        with self._shown():
            return super().scatter_update(*args, **options)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        raise _not_saved(self._sok_table)


def _not_saved(table: DynamicVariable) -> NotImplementedError:
    return NotImplementedError(f"table '{table.table_name}' is dynamic: TensorFlow's checkpoints cannot hold it")


def _refused(name: str) -> Callable[..., Any]:
    def method(self: DynamicVariable, *args: Any, **options: Any) -> Any:
        raise TypeError(
            f"table '{self.table_name}' is dynamic, so its rows have no places of their own to be written to by "
            f"{name.strip('_')}: use sok.assign(table, keys, rows)"
        )

    return method


for _method in WRITERS:
    setattr(DynamicVariable, _method, _refused(_method))
