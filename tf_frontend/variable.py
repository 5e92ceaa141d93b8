# SPDX-License-Identifier: Apache-2.0
"""A table as a variable: this rank's shard, and where its rows stand in the whole table."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sparse_operation_kit import placement as _placement
from sparse_operation_kit.arguments import check_initial_values, check_table_dtype, check_table_shape
from sparse_operation_kit.placement import Initializer, Placement
from sparse_operation_kit.tensorflow import devices, initializers, runtime, saving, stamps
from sparse_operation_kit.tensorflow.saving import StateVariable
from sparse_operation_kit.tensorflow.table_variable import WRITERS, TableVariable

_names = _placement.name_counter()


class Variable(TableVariable):
    """A 2-D embedding table sharded over the ranks; a `tf.Variable` of this rank's rows.

    Args:
      initial_value: the whole table [rows, dimension]: a tensor, array, nested list, or a function of no arguments
        that returns one. [dimension] is a table of one row. Each rank keeps its rows.
      shape: (rows, dimension) of the whole table, with `initializer`, instead of `initial_value`.
      initializer: "uniform" (in [-0.05, 0.05)), "normal" (standard deviation 0.05), "zeros", "ones", "glorot_uniform",
        ..., a number, or an initializer object of Keras, tf_keras or tf.compat.v1. None is "uniform". Constant,
        uniform, normal, truncated normal and variance scaling ones are drawn by this package: the rows depend on the
        seed of init() (or the object's own), the table's name, key and column alone, are the same for every number of
        ranks and in both frontends, and only the shard is ever in memory. Any other object is called for the whole
        table, of which the shard is kept.
      dtype: tf.float32, tf.float16 or tf.bfloat16. None: that of `initial_value`, else float32; float64 and integers,
        which tables are not made of, become float32.
      mode: None or "distributed": rank g of N holds rows g, g + N, ...; "localized:g": rank g holds all, the others
        none.
      name: names the table in messages, checkpoints and its initial rows. None: numbered in creation order.
      trainable: whether tapes watch the table.
      **options: as of `tf.Variable` (collections, caching_device, ...). A constraint is applied by a plain optimizer
        of Keras; a step of this package's optimizers raises NotImplementedError for a table that has one.

    Its class is `DistributedVariable` or `LocalizedVariable`, as the mode says.

    The variable's own shape is that of the shard, [local rows, dimension]; `global_shape` is the table's. Row k is slot
    `key_map(k)` of the rank that holds it. Reading the variable as a tensor copies the shard.

    A table that is an attribute of a layer or model of Keras, or in a list or dict of one, is one of its weights, in
    Keras 3 too: `fit` trains it, and it is saved with the rows that this rank has. One that Keras cannot find (a layer
    looks up in it, or gets it when it is built already) warns once.

    Rows of float16 and bfloat16 halve the memory of the table and what a step reads and writes of it. All arithmetic is
    in float32: looked-up vectors are float32 (cast them where the model wants another dtype), so are gradients and
    optimizer states, and a step rounds each changed row once, to nearest. Initial rows are drawn in float32, then
    rounded. Steps smaller than half the distance between neighbouring numbers (2^-11 of a float16, 2^-8 of a bfloat16)
    change nothing.

    Raises:
      RuntimeError: before init().
      ValueError: neither or both of `initial_value` and `shape`; not two dimensions; no rows; a mode that names a rank
        that is not there.
      TypeError: another dtype than these three.
    """

    def __new__(cls, *args: Any, mode: str | None = None, **options: Any) -> Variable:
        if cls is Variable:
            owner = _placement.parse_mode(mode, runtime.get().num_ranks)
            cls = DistributedVariable if owner == _placement.DISTRIBUTED else LocalizedVariable
        return object.__new__(cls)

    def __init__(
        self,
        initial_value: Any = None,
        *,
        shape: Sequence[int] | tf.TensorShape | None = None,
        initializer: Any = None,
        dtype: Any = None,
        mode: str | None = None,
        name: str | None = None,
        trainable: bool = True,
        **options: Any,
    ) -> None:
        state = runtime.get_in_strategy()
        if (initial_value is None) == (shape is None):
            raise ValueError("a table needs either initial_value or shape (with initializer)")
        owner = _placement.parse_mode(mode, state.num_ranks)
        table_name = _placement.table_name(name, _names)
        if dtype is not None:
            check_table_dtype(tf.as_dtype(dtype), table_name)
        if initial_value is not None:
            if initializer is not None:
                raise ValueError(f"table '{table_name}': initializer goes with shape, not with initial_value")
            whole = _whole_table(initial_value, dtype)
            num_rows, dimension = check_table_shape(_sizes(whole.shape), table_name)
            check_table_dtype(tf.as_dtype(whole.dtype), table_name)
            dtype = whole.dtype
        else:
            num_rows, dimension = check_table_shape(_sizes(shape), table_name)
        place = Placement(num_rows, dimension, owner, state.num_ranks, state.rank)
        table_dtype = tf.float32 if dtype is None else tf.as_dtype(dtype)

        first_rows: Callable[[], tf.Tensor]
        if initial_value is not None:
            first_rows = lambda: _own_rows(whole, place)  # noqa: E731
        else:
            chosen = "uniform" if initializer is None else initializer
            seed = state.arguments.seed
            first_rows = lambda: initial_rows(chosen, place, seed, table_name, table_dtype)  # noqa: E731
        super().__init__(
            table_name,
            place,
            initial_value=first_rows,
            trainable=trainable,
            dtype=table_dtype,
            shape=tf.TensorShape(place.local_shape),
            **options,
        )

    @property
    def global_shape(self) -> tf.TensorShape:
        """[rows, dimension] of the whole table."""
        return tf.TensorShape([self._placement.num_rows, self._placement.dimension])

    def exported(self) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.device(devices.HOST):
            keys = self.placement.global_keys(tf.range(self.placement.local_rows, dtype=tf.int64))
        return keys, self.read_value()

    def new_state(self, name: str, initial: float, rowwise: bool) -> StateVariable:
        place = self.placement
        constant = Initializer(_placement.CONSTANT, initial)
        if rowwise:
            narrow = Placement(place.num_rows, 1, place.owner, place.num_ranks, place.rank)
            first = lambda: tf.reshape(initializers.initialize(constant, narrow, 0), [-1])  # noqa: E731
        else:
            first = lambda: initializers.initialize(constant, place, 0)  # noqa: E731
        shape = [place.local_rows] if rowwise else list(place.local_shape)
        return StateVariable(
            name=name, place=place, initial_value=first, trainable=False, dtype=tf.float32, shape=shape
        )

    def new_stamps(self, **options: Any) -> stamps.Stamps:
        return stamps.Stamps(self.placement.local_rows, **options)

    def _lazy_read(self, op: Any) -> Any:
        """What follows a change, also one that functions of tf.compat.v1 make (tf.compat.v1.scatter_update, ...)."""
        if not getattr(_noted, "writing", 0) and not stamps.unseen(self):
            with tf.control_dependencies([] if op is None else [op]):
                op = stamps.mark_all(self) or op
        unread = super()._lazy_read(op)
        unread.__class__, unread._sok_table = _Unread, self
        return unread

    # tf.Variable would copy and unpickle a table as a variable like any other, of which nobody knows whose rows it has.

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        if not tf.executing_eagerly():
            raise NotImplementedError("tables can be copied in eager mode only")
        return _rebuild(type(self), self.read_value(), self._placement, self._sok_name, self.trainable)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if not tf.executing_eagerly():
            raise NotImplementedError("tables can be pickled in eager mode only")
        return _rebuild, (type(self), self.numpy(), self._placement, self._sok_name, self.trainable)


class DistributedVariable(Variable):
    """A table of which rank g of N holds rows g, g + N, .... Arguments as of `Variable`.

    SOK 2.x's `global_gpu_id` and `num_gpus` may be given too; they must be this rank and the number of ranks.
    """

    def __init__(
        self, *args: Any, mode: str | None = None, global_gpu_id: Any = None, num_gpus: Any = None, **options: Any
    ) -> None:
        _check_place(global_gpu_id, num_gpus)
        if _placement.parse_mode(mode, runtime.get().num_ranks) != _placement.DISTRIBUTED:
            raise ValueError(f"mode {mode!r} is that of a LocalizedVariable")
        super().__init__(*args, mode=mode, **options)


class LocalizedVariable(Variable):
    """A table that rank `target_gpu` holds whole. Arguments as of `Variable`.

    `target_gpu` says what `mode` says too; one of them is enough. SOK 2.x's `global_gpu_id` may be given; it must be
    this rank.
    """

    def __init__(
        self, *args: Any, mode: str | None = None, target_gpu: Any = None, global_gpu_id: Any = None, **options: Any
    ) -> None:
        _check_place(global_gpu_id)
        if mode is None:
            mode = f"localized:{target_gpu}"
        owner = _placement.parse_mode(mode, runtime.get().num_ranks)
        if owner == _placement.DISTRIBUTED or target_gpu not in (None, owner):
            raise ValueError(f"mode {mode!r} and target_gpu {target_gpu!r} must name one rank")
        super().__init__(*args, mode=mode, **options)


def _check_place(rank: Any, num_ranks: Any = None) -> None:
    """Raises ValueError for another rank than this, or another number of ranks than there is; None is either."""
    state = runtime.get()
    if rank not in (None, state.rank) or num_ranks not in (None, state.num_ranks):
        raise ValueError(
            f"global_gpu_id={rank!r} and num_gpus={num_ranks!r} must be this rank, {state.rank}, and the number of "
            f"ranks, {state.num_ranks}"
        )


def _rebuild(cls: type[Variable], rows: Any, place: Placement, name: str, trainable: bool) -> Variable:
    """The table of these rows of this rank."""
    shape = (place.num_rows, place.dimension)
    table = cls(shape=shape, initializer="zeros", dtype=rows.dtype, mode=place.mode, name=name, trainable=trainable)
    saving.check_pickled("table", name, table, place)
    table._placement = place
    table.assign(rows)
    return table


_noted = threading.local()
"""`writing`: how many methods of tables this thread is in that have marked what they are about to change."""


def _rows_of(name: str, table: Variable, arguments: tuple[Any, ...]) -> Any:
    """The slots [n] that a call of a method of tf.Variable writes to, or None: it may be all of them."""
    value = arguments[0]
    if name == "_strided_slice_assign":
        begin, end, strides, _, _, begin_mask, end_mask, ellipsis_mask, new_axis_mask, shrink_axis_mask = arguments
        if (ellipsis_mask | new_axis_mask) & 1:
            return None
        masks = {"begin_mask": begin_mask & 1, "end_mask": end_mask & 1, "shrink_axis_mask": shrink_axis_mask & 1}
        slots = tf.range(table.placement.local_rows, dtype=tf.int64)
        return tf.reshape(tf.strided_slice(slots, begin[:1], end[:1], strides[:1], **masks), [-1])
    if name.startswith("scatter_nd"):
        return tf.reshape(tf.convert_to_tensor(value)[..., 0], [-1])
    if not isinstance(value, tf.IndexedSlices) or value.indices.shape.rank != 1:
        return None
    return value.indices


def _stamped(name: str) -> Callable[..., Any]:
    """The method `name` of tf.Variable, which also marks the rows that it changes."""
    inherited = getattr(resource_variable_ops.ResourceVariable, name)
    names = list(inspect.signature(inherited).parameters)[1:]

    @functools.wraps(inherited)
    def method(self: Variable, *args: Any, **options: Any) -> Any:
        if stamps.unseen(self):
            return inherited(self, *args, **options)
        given = (*args, *(options[each] for each in names[len(args) :] if each in options))
        slots = _rows_of(name, self, given)
        marked = stamps.mark_all(self) if slots is None else stamps.mark(self, slots)
        _noted.writing = getattr(_noted, "writing", 0) + 1
        try:
            with tf.control_dependencies([] if marked is None else [marked]):
                return inherited(self, *args, **options)
        finally:
            _noted.writing -= 1

    return method


def _of_table(name: str) -> Callable[..., Any]:
    """The method `name` of the table, after what was done to it before."""

    def method(self: _Unread, *args: Any, **options: Any) -> Any:
        with tf.control_dependencies([self._parent_op]):
            return getattr(self._sok_table, name)(*args, **options)

    return method


class _Unread(resource_variable_ops._UnreadVariable):  # type: ignore[misc]
    """What methods that write give in a graph: the table, after they have run."""

    _sok_table: Variable


for _method in WRITERS:
    setattr(Variable, _method, _stamped(_method))
    setattr(_Unread, _method, _of_table(_method))


def _sizes(shape: Any) -> Any:
    return shape.as_list() if isinstance(shape, tf.TensorShape) and shape.rank is not None else shape


def _whole_table(value: Any, dtype: Any) -> Any:
    """The initial value as a NumPy array or a tensor, of two dimensions where it has one."""
    if callable(value) and not isinstance(value, (tf.Variable, tf.Tensor)):
        value = value()
    if isinstance(value, (tf.Tensor, tf.Variable)):
        value = tf.convert_to_tensor(value)
    elif not isinstance(value, np.ndarray):
        value = tf.convert_to_tensor(value, dtype=dtype)
        constant = tf.get_static_value(value)
        value = value if constant is None else constant
    given = tf.as_dtype(value.dtype)
    if dtype is None and (given.is_integer or given == tf.float64):
        dtype = tf.float32
    if dtype is not None and given != dtype:
        value = tf.cast(value, dtype) if tf.is_tensor(value) else value.astype(tf.as_dtype(dtype).as_numpy_dtype)
    return value[tf.newaxis] if value.ndim == 1 and value.shape[0] else value


def _own_rows(whole: Any, place: Placement) -> tf.Tensor:
    rows = whole[place.rows]
    if isinstance(rows, np.ndarray):
        # TensorFlow may use an array's memory as it is, and updates happen in place: the caller's array must not
        # change.
        return tf.constant(np.array(rows))
    return rows if rows is not whole else tf.identity(rows)


def initial_rows(initializer: Any, place: Placement, seed: int, name: str, dtype: tf.DType) -> tf.Tensor:
    """This rank's rows of table `name` at the start."""
    spec = initializers.as_spec(initializer, place)
    if spec is None:
        whole = tf.convert_to_tensor(initializer((place.num_rows, place.dimension), dtype="float32"))
        return tf.cast(_own_rows(whole, place), dtype)
    check_initial_values(spec, dtype, name)
    return initializers.initialize(
        spec, place, _placement.table_seed(seed if spec.seed is None else spec.seed, name), dtype
    )
