# SPDX-License-Identifier: Apache-2.0
"""A table without a vocabulary: any integer is a key, and rows appear when keys are first trained."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sparse_operation_kit import dynamic
from sparse_operation_kit import placement as _placement
from sparse_operation_kit.arguments import check_initial_values, check_table_dtype
from sparse_operation_kit.placement import ANY_KEY, Placement
from sparse_operation_kit.tensorflow import devices, dynamic_saving, initializers, lookup, runtime, stored
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.call import Lookups, Tables
from sparse_operation_kit.tensorflow.dynamic_column import DynamicStamps, DynamicState
from sparse_operation_kit.tensorflow.table_variable import WRITERS, TableVariable

_names = _placement.name_counter()


class Size(int):
    """How many keys a table holds. As SOK 2.x has it, it is also the table's shape: (keys, dimension) by index."""

    def __new__(cls, keys: int, dimension: int) -> Size:
        size = super().__new__(cls, keys)
        size._shape = (keys, dimension)
        return size

    _shape: tuple[int, int]

    def __getitem__(self, index: int) -> int:
        return self._shape[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        del copy  # or TensorFlow would take it for a sequence
        return np.array(int(self), np.int64 if dtype is None else dtype)


class DynamicVariable(dynamic_saving.SavedTable, TableVariable):
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
      constraint: must be None: only this package writes rows, and it applies no constraint.
      trainable: whether tapes watch the table.
      key_type: tf.int64, or tf.int32: then keys of 64 bits are refused.
      dtype: tf.float32, tf.float16 or tf.bfloat16, as of `sok.Variable`.
      mode: None or "distributed": key k belongs to rank k mod N (never negative); "localized:g": all to rank g.
      seed: of the initial rows. None: the initializer object's own, else that of init().
      **options: init_capacity, so many rows a rank have memory from the beginning; max_capacity, the most rows that a
        rank may hold (2^26 for "hybrid", else as many as memory holds); evict_strategy; admission_threshold,
        filter_ratio, time_to_live, ...: see `sparse_operation_kit.dynamic.DynamicOptions`; device_id, the GPU that it
        is on. Others that SOK 2.x knows are accepted.

    The variable's own shape is [slots, dimension], where slots are as many as keys were held at once. It is read like
    any other variable, but written by `sok.assign` and optimizers of this package alone. `tf.gather` and
    `tf.nn.embedding_lookup` take keys, of this rank's part, and insert those that it lacks.

    Raises:
      RuntimeError: before init().
      TypeError: an unknown option, a constraint, another dtype or key_type, an initializer that draws no element by
        itself.
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
        state = runtime.get_or_begin()
        table_name = _placement.table_name(name, _names, "dynamic_Variable")
        if constraint is not None:
            raise TypeError(
                f"table '{table_name}': rows of dynamic tables are written by optimizers of this package alone, which "
                "apply no constraint: constraint must be None"
            )
        width = dynamic.check_dimension(dimension, table_name)
        self._options = dynamic.check_options(var_type, options, table_name)
        self._key_type = tf.as_dtype(dynamic.check_key_type(key_type, table_name))
        table_dtype = tf.as_dtype(tf.float32 if dtype is None else dtype)
        check_table_dtype(table_dtype, table_name)
        place = Placement(ANY_KEY, width, _placement.parse_mode(mode, state.num_ranks), state.num_ranks, state.rank)
        chosen = "uniform" if initializer is None else initializer
        spec = dynamic.check_initializer(initializers.as_spec(chosen, place) or chosen, width, table_name)
        check_initial_values(spec, table_dtype, table_name)
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
            )
        if seed is None:
            seed = state.arguments.seed if spec.seed is None else spec.seed
        self._capacity = self._options.capacity(width * table_dtype.size, devices.memory_bytes(self))
        with tf.init_scope(), devices.beside(self):
            made = ops.sok_dynamic_table(
                variable=self.handle,
                table_name=table_name,
                dimension=width,
                capacity=self._capacity,
                initial_rows=self._options.init_capacity,
                policy=tf.constant(self._options.policy(width * table_dtype.size), tf.float64),
                dtype=table_dtype,
                **initializers.arguments(spec, _placement.table_seed(seed, table_name)),
            )
        self.made = {
            "dimension": width,
            "initializer": spec,
            "var_type": var_type,
            "name": table_name,
            "trainable": trainable,
            "key_type": self._key_type.name,
            "dtype": table_dtype.name,
            "mode": place.mode,
            "seed": seed,
            **options,
        }
        """What another table of the same rows is made with."""
        self.restored: bytes | None = None
        """dynamic_saving.digest of the keys that the table was last restored with."""
        self._states: list[weakref.ref[DynamicState]] = []
        self.readers: list[DynamicVariable] = []  # of graphs, which do not keep variables alive
        store = self._options.store
        if store is not None and not tf.executing_eagerly() and not tf.inside_function():
            raise NotImplementedError(f"table '{table_name}': tables with a store are not for graphs of tf.compat.v1")
        self.stored_rows = stored.begin(store, table_name, self._options.counts_uses)
        if made is not None:  # a tf.compat.v1 graph
            self._initializer_op = made

    has_index = True

    @property
    def size(self) -> Any:
        """How many keys this rank holds: an int (see `Size`), in a tf.function an int64 scalar, in a tf.compat.v1 graph
        [keys, dimension] int64, as SOK 2.x has it. On a GPU it waits.
        """
        count = self._counts()[0]
        if tf.executing_eagerly():
            return Size(count, self.dimension)
        return count if tf.inside_function() else tf.stack([count, self.dimension])

    @property
    def stored(self) -> int:
        """How many rows are in its store; `size` does not count them. In a tf.function those of when it is traced."""
        return 0 if self.stored_rows is None else self.stored_rows.size

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
    def capacity(self) -> int:
        """The most keys that this rank may hold."""
        return self._capacity

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

    def _arguments(self) -> dict[str, Any]:
        """Of an op that takes this table alone."""
        return {"tables": [self.handle], **Tables.of([self]).attributes()}

    def _counts(self) -> list[Any]:
        counts = ops.sok_table_counts(**self._arguments())
        return counts.numpy().tolist() if tf.executing_eagerly() else tf.unstack(counts)

    def _keys(self, keys: Any) -> tf.Tensor:
        found = tf.convert_to_tensor(keys)
        where = f"table '{self.table_name}'"
        self.check_keys(found.dtype, where, "keys")
        if found.shape.rank not in (1, None):
            raise ValueError(f"{where}: keys must be [n], got {found.shape.as_list()}")
        return found

    @as_written
    def erase(self, keys: Any) -> Any:
        """Gives rows of this rank up, with all that belongs to them. A gradient for one of them is refused from now on.

        Args:
          keys: [n] int32 or int64; those that this rank does not hold are passed over.

        Returns:
          How many it held: an int, in a graph an int64 scalar. On a GPU it waits.
        """
        stored.check_eager(self, "erase")
        return stored.erase(self, self._keys(keys))

    @as_written
    def clear(self) -> Any:
        """Gives up all rows of this rank, as `erase` does. Keeps their memory. In a tf.compat.v1 graph the operation to
        run.
        """
        stored.check_eager(self, "clear")
        with stored.alone([self]):
            stored.clear(self)
            return _to_run(ops.sok_clear(**self._arguments()))

    @as_written
    def shrink(self) -> Any:
        """Gives memory back that no row uses, after many were erased or expired: rows move together, and the index is
        made anew. A gradient of a lookup before is refused from now on. On a GPU it waits. Until it is done memory is
        needed for the new index, and 16 bytes a row.

        Returns:
          How many bytes: an int, in a graph an int64 scalar.
        """
        with stored.alone([self]):
            freed = ops.sok_shrink(**self._arguments())
        return int(freed) if tf.executing_eagerly() else freed

    @as_written
    def set_epoch(self, epoch: int) -> Any:
        """The epoch of what is used from now on: rows of the oldest epoch are evicted first. It begins at 0, or at the
        newest of the rows that were loaded. In a tf.compat.v1 graph the operation to run.

        Raises ValueError where evict_strategy is neither "epoch_lru" nor "epoch_lfu", and outside [0, 2^31 - 2], with
        "epoch_lfu" [0, 2046].
        """
        return self.begin_epoch(dynamic.check_epoch(epoch, self._options.evict_strategy, self.table_name))

    def begin_epoch(self, number: int) -> Any:
        """As `set_epoch`, also of a table without epochs, to which it means nothing."""
        return _to_run(ops.sok_set_epoch(epoch=np.int64(number), **self._arguments()))

    @as_written
    def scores(self, keys: Any) -> tf.Tensor:
        """The ranks of rows where evict_strategy is "customized": 0, or as `set_scores` gave them.

        Args:
          keys: [n] int32 or int64.

        Returns:
          [n] int64 where the table is, -1 of keys that this rank does not hold.

        Raises ValueError for another evict_strategy.
        """
        _, scores = self._scores_of(self._keys(keys))
        return dynamic.ranks_in(scores)

    @as_written
    def set_scores(self, keys: Any, scores: Any) -> Any:
        """Ranks rows where evict_strategy is "customized": of the lowest the one goes first that was used longest ago.
        In a tf.compat.v1 graph the operation to run.

        Args:
          keys: [n] int32 or int64, each once; those that this rank does not hold are passed over.
          scores: [n] integers in [0, 2^31 - 2].

        Raises:
          ValueError, tf.errors.InvalidArgumentError: another evict_strategy, another shape, a score out of range.
            Nothing has changed.
          TypeError: scores that are no integers.
        """
        where = f"table '{self.table_name}'"
        found = self._keys(keys)
        slots, before = self._scores_of(found)
        ranks = tf.convert_to_tensor(scores)
        if not ranks.dtype.is_integer:
            raise TypeError(f"{where}: scores must be integers, got {ranks.dtype.name}")
        ranks = tf.cast(ranks, tf.int64)
        if not ranks.shape.is_compatible_with(found.shape):
            raise ValueError(f"{where}: scores must be {found.shape.as_list()}, one a key, got {ranks.shape.as_list()}")
        message = f"{where}: scores must be in [0, {dynamic.MOST_SCORE}], one a key"
        checks = [
            tf.debugging.assert_equal(tf.shape(ranks), tf.shape(found), message),
            tf.debugging.assert_non_negative(ranks, message),
            tf.debugging.assert_less_equal(ranks, tf.constant(dynamic.MOST_SCORE, tf.int64), message),
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            ranked = tf.where(slots < 0, tf.zeros_like(before), dynamic.with_ranks(before, ranks))
            return _to_run(self.write_scores(slots, ranked))

    def _scores_of(self, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """(slots, scores as the core has them); -1 and -1 of keys that it does not hold."""
        dynamic.check_has_scores(self._options.evict_strategy, self.table_name)
        slots = self.find(keys)
        return slots, self.scores_at(slots)

    @property
    def device_rows(self) -> int:
        """With max_hbm_for_vectors: how many rows are in the memory of a GPU that it is on; 0: all."""
        return self._options.device_rows(self.dimension * self.dtype.size)

    def statistics(self) -> dynamic.Statistics:
        """What this rank's part holds, and what has happened to it since it was made; in a graph of tensors. On a GPU
        it waits.
        """
        size, *counts = self._counts()
        return dynamic.Statistics.of(size, self.capacity, *counts)

    def config(self) -> dict[str, Any]:
        self.refuse_store("the configuration of a layer")
        spec: _placement.Initializer = self.made["initializer"]
        return {**self.made, "initializer": dataclasses.asdict(spec)}

    # What dump, load, checkpoints and changed rows need, by slot.

    def held(self) -> Any:
        from sparse_operation_kit.tensorflow.held import DynamicTable

        return DynamicTable(self)

    def check_plain(self, optimizer: Any) -> None:
        raise TypeError(
            f"table '{self.table_name}' is dynamic: {type(optimizer).__name__} by itself cannot update it and has no "
            "states of it; use sok.OptimizerWrapper"
        )

    def begin_dump(self) -> None:
        """Before `sok.dump` counts its rows."""

    @property
    def has_scores(self) -> bool:
        """Whether it knows of each row when it was used last, and what it is evicted by."""
        return self._options.has_scores

    def num_slots(self) -> tf.Tensor:
        """All keys have slots below it."""
        return tf.raw_ops.VariableShape(input=self.handle, out_type=tf.int64)[0]

    def held_among(self, first_slot: Any, num_slots: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """(keys, slots), both [n] int64, that are held among `num_slots` slots from the first on, ascending by slot."""
        found = ops.sok_held(first_slot=first_slot, num_slots=num_slots, **self._arguments())
        return found.keys, found.slots

    def erased(self, keys: Any) -> tf.Tensor:
        """Gives up keys [n]. Returns the slots that they had, -1 of those that this rank did not hold."""
        return ops.sok_erase(keys=keys, **self._arguments())

    def find(self, keys: Any) -> tf.Tensor:
        """The slots [n] of keys [n]; -1 where this rank does not hold one."""
        return ops.sok_find(keys=keys, **self._arguments())

    def insert(self, keys: Any) -> tf.Tensor:
        """The slots [n] of keys [n] that belong to this rank, which it holds afterwards."""
        lookups = Lookups([keys], [tf.zeros([0], tf.int64)], [], [0], [0], [False])
        located = ops.sok_insert(
            indexed_tables=[self.handle],
            concat=False,
            **lookups.arguments(),
            **Tables.of([self]).counted_attributes(),
        )
        return located.slots[0]

    @property
    def most_candidates(self) -> int:
        """How many keys may wait for a row; 0: none."""
        most = self._options.most_candidates
        return self.capacity if most is None else most

    def candidates(self) -> tf.Tensor:
        """[n, 2] int64 in host memory: the keys that wait for rows, and their scores."""
        return ops.sok_pairs(what="candidates", **self._arguments())

    def set_candidates(self, candidates: Any) -> Any:
        """Replaces them. Returns the operation in a graph."""
        return ops.sok_set_pairs(what="candidates", pairs=candidates, **self._arguments())

    def use_times(self) -> tf.Tensor:
        """[n, 2] int64 in host memory: generations, and when they began."""
        return ops.sok_pairs(what="use_times", **self._arguments())

    def set_use_times(self, times: Any) -> Any:
        """Replaces them. Returns the operation in a graph."""
        return ops.sok_set_pairs(what="use_times", pairs=times, **self._arguments())

    def generations(self, seconds: Any) -> tf.Tensor:
        """[3] by which scores say when rows were used last: the generation of now, the last that is known to have begun
        so long ago, and the last before the running step.
        """
        return ops.sok_generations(seconds=tf.cast(seconds, tf.float64), **self._arguments())

    def scores_at(self, slots: tf.Tensor) -> tf.Tensor:
        """What rows are evicted by, [n] int64 as the core has it; -1 where the slot is."""
        return ops.sok_scores(slots=slots, **self._arguments())

    def write_scores(self, slots: tf.Tensor, scores: tf.Tensor) -> Any:
        """Gives rows scores that `scores_at` gave. Returns the operation in a graph."""
        return ops.sok_set_scores(slots=slots, scores=scores, **self._arguments())

    def exported(self) -> tuple[tf.Tensor, tf.Tensor]:
        stored.check_eager(self, "export")
        with stored.alone([self]):
            keys, rows = ops.sok_export(dtype=self.dtype, **self._arguments())
            keys, rows = stored.with_stored(self, keys, rows)
        return tf.cast(keys, self._key_type), rows

    def refuse_store(self, what: str) -> None:
        """Raises NotImplementedError where it has a store, whose rows `what` does not know."""
        dynamic.refuse_store(self.stored_rows, self.table_name, what)

    def new_state(self, name: str, initial: float, rowwise: bool) -> DynamicState:
        state = DynamicState(self, name, initial, rowwise)
        self._states.append(weakref.ref(state))
        return state

    def states(self) -> list[DynamicState]:
        """The optimizer states that there are of it."""
        return [state for reference in self._states if (state := reference()) is not None]

    def new_stamps(self, **options: Any) -> DynamicStamps:
        return DynamicStamps(self, **options)

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """What tf.gather and tf.nn.embedding_lookup read: rows by key, of this rank's part alone, as `lookup_sparse` in
        training gives them: keys that it lacks are inserted, and it has a gradient.
        """
        del name
        return tf.cast(lookup.own_rows(self, indices), self.dtype)

    def read_slots(self, slots: tf.Tensor) -> tf.Tensor:
        return resource_variable_ops.ResourceVariable.sparse_read(self, slots)

    def end_step(self) -> Any:
        return ops.sok_end_step(**self._arguments())

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        return super()._read_variable_op()  # without a copy a tensor would lie on the table's memory


def _to_run(operation: Any) -> Any:
    """What a call gives that only does something: in a tf.compat.v1 graph the operation, else None."""
    return None if tf.inside_function() else operation


def _refused(name: str) -> Callable[..., Any]:
    def method(self: DynamicVariable, *args: Any, **options: Any) -> Any:
        raise TypeError(
            f"table '{self.table_name}' is dynamic, so its rows have no places of their own to be written to by "
            f"{name.strip('_')}: use sok.assign(table, keys, rows)"
        )

    return method


for _method in WRITERS:
    setattr(DynamicVariable, _method, _refused(_method))
