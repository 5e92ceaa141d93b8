# SPDX-License-Identifier: Apache-2.0
"""The gradient of a table, not materialised until somebody looks at it.

The gradient ops of this package give each table a `PendingGradient`: a `tf.IndexedSlices` that only knows the output
gradients of the lookups and which keys they belong to. The optimizers of this package hand that to one op for all
tables. Anything else that reads `values` or `indices` (another optimizer, clipping, a user) makes the `reduce` op run,
and then it is an ordinary tf.IndexedSlices: one row for each distinct slot, in ascending order.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.ops import colocate_with

from sparse_operation_kit.tensorflow import horovod_functions
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.call import Tables
from sparse_operation_kit.tensorflow.table_variable import TableVariable

Generation = tuple[tf.Tensor, int]
"""A number of a vector that SokInsert or SokLocate gave: by it a gradient is refused whose slots have lost keys."""


@dataclasses.dataclass(frozen=True, eq=False)
class Summand:
    """One that comes from a lookup of this process: entry j adds its share of the gradient of its bag to slots[j].

    row_splits of shape [0]: entry j adds values[j]. column: where the summand's columns begin in `values`, which other
    summands share; -1: they are its own. generation: of the slots where there is an index. members: of a stack, whose
    vectors lie side by side in `values`; 0: the table is none.
    """

    slots: tf.Tensor
    values: tf.Tensor
    row_splits: tf.Tensor
    weights: tf.Tensor | None = None
    combiner: int = 0
    unique: bool = False
    column: int = -1
    generation: Generation | None = None
    members: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Exchanged:
    """What came to this rank in the backward pass of one call, for all its tables.

    Gradients of rows and of sums of rows; the counts say what is which. lookup_tables: positions among `dimensions`.
    """

    slots: tf.Tensor
    values: tf.Tensor
    splits: tf.Tensor
    counts: tf.Tensor
    dimensions: tuple[int, ...]
    lookup_tables: tuple[int, ...]
    generations: tuple[Generation | None, ...]


class PendingGradient(tf.IndexedSlices):  # type: ignore[misc]
    """The gradient of one table on this rank, in terms of its local rows (slots).

    Attributes:
      values: [u, dimension] float32 whatever the table's dtype is, summed over the entries of the batch.
      indices: [u] int64, distinct and ascending slots of this rank's shard.
      dense_shape: [2] int64, the shape of the shard.
      scale: what the summands are still to be multiplied with. The fused update does it on its way, for nothing.
    """

    # The base class keeps its parts in _values, _indices and _dense_shape and is not told of them here: they are
    # properties that make the op when they are first read.

    def __init__(
        self,
        handle: Any,
        tables: Tables,
        summands: Sequence[Summand] = (),
        exchanged: Sequence[tuple[Exchanged, int]] = (),
        scale: float = 1.0,
    ) -> None:
        self.scale = scale
        self._sok_handle = handle
        self._sok_tables = tables
        self._sok_summands = tuple(summands)
        self._sok_exchanged = tuple(exchanged)
        self._sok_graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._sok_reduced: tuple[Any, Any] | None = None
        self._capture()

    def _capture(self) -> None:
        """Lets the function that is being built know at once which tensors from outside it will need.

        When TensorFlow builds the backward function of a tf.function it asks which tensors of the forward function the
        gradients use before it reads the gradients, and afterwards is too late.
        """
        capture = getattr(self._sok_graph, "capture", None)
        if capture is None:
            return
        tensors = [self._sok_handle]
        for summand in self._sok_summands:
            tensors += [summand.slots, summand.values, summand.row_splits]
            tensors += [] if summand.weights is None else [summand.weights]
            tensors += [] if summand.generation is None else summand.generation[:1]
        for group, _ in self._sok_exchanged:
            tensors += [group.slots, group.values, group.splits, group.counts]
            tensors += [generation[0] for generation in group.generations if generation is not None]
        for tensor in tensors:
            if getattr(tensor, "graph", None) is not self._sok_graph:
                capture(tensor)

    def scaled(self, factor: float) -> PendingGradient:
        """The same, times a number."""
        made = copy.copy(self)
        made.scale, made._sok_reduced = self.scale * factor, None
        return made

    def multiplied(self, factor: tf.Tensor) -> PendingGradient:
        """The same, times a number that is known when it runs. Its rows are made, so that each is there once."""
        slots, values = self._reduced()
        with colocate_with(values):
            values = values * tf.cast(factor, values.dtype)
        of_summands = [summand.generation for summand in self._sok_summands]
        of_groups = [group.generations[position] for group, position in self._sok_exchanged]
        generation = next((each for each in (*of_summands, *of_groups) if each is not None), None)  # all from one op
        summand = Summand(slots, values, tf.constant([], tf.int64), unique=True, generation=generation)
        made = PendingGradient(self._sok_handle, self._sok_tables, [summand])
        if generation is None:  # otherwise whoever reads the rows later hears of those that went meanwhile
            made._sok_reduced = slots, values
        return made

    @property
    def located(self) -> list[tf.Tensor]:
        """What lookups found: the slots, or keys, of all summands."""
        return [summand.slots for summand in self._sok_summands] + [group.slots for group, _ in self._sok_exchanged]

    @property
    def summands(self) -> tuple[Summand, ...]:
        """Summands from lookups of this process alone."""
        return self._sok_summands

    @property
    def exchanged(self) -> tuple[tuple[Exchanged, int], ...]:
        """Summands that came by exchange, each with the table's position in that exchange."""
        return self._sok_exchanged

    def _scope(self) -> Any:
        # Whoever reads the values may stand in another graph (a branch, a loop) than the one the gradient belongs to.
        return contextlib.nullcontext() if self._sok_graph is None else self._sok_graph.as_default()

    def _reduced(self) -> tuple[Any, Any]:
        horovod_functions.refuse_reduction(self._sok_tables.names[0], self._sok_tables.num_ranks)
        if self._sok_reduced is None:
            with self._scope():
                self._sok_reduced = reduce(self._sok_handle, self._sok_tables, [self])
        return self._sok_reduced

    @property
    def _indices(self) -> Any:
        return self._reduced()[0]

    @property
    def _values(self) -> Any:
        return self._reduced()[1]

    @property
    def _dense_shape(self) -> Any:
        shape = self.shape
        with self._scope():
            if shape.is_fully_defined():
                result = tf.constant(shape.as_list(), tf.int64)
            else:
                result = tf.raw_ops.VariableShape(input=self._sok_handle, out_type=tf.int64)
        setattr(result, _OWNER, (self._sok_handle, self._sok_tables))
        return result

    @property
    def dtype(self) -> tf.DType:
        return tf.float32

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape(self._sok_tables.local_shape(0))

    # TensorFlow asks for these to log and to place; the base class would make the op to answer.

    @property
    def name(self) -> str:
        return f"gradient_of_{self._sok_tables.names[0]}"

    @property
    def device(self) -> str:
        device: str = self._sok_handle.device
        return device

    @property
    def graph(self) -> Any:
        return self._sok_graph if self._sok_graph is not None else self.values.graph

    def __repr__(self) -> str:
        return f"<PendingGradient of table '{self._sok_tables.names[0]}', shape {self.shape}>"

    __str__ = __repr__


def of_every_row(table: TableVariable) -> PendingGradient:
    """A gradient of zero for every row that a rank has of a table: a step with it reaches rows that no lookup named.

    It takes 8 bytes a row.
    """
    rows = tf.raw_ops.VariableShape(input=table.handle, out_type=tf.int64)[0]
    splits = tf.stack([tf.zeros_like(rows), rows])
    summand = Summand(tf.range(rows), tf.zeros([1, table.placement.dimension]), splits, unique=True)
    return PendingGradient(table.handle, Tables.of([table]), [summand])


class GradientByKey(PendingGradient):
    """The gradient of rows that were read by key. Where a row is now is looked up when the gradient is used: in between
    it may have been evicted, and another key may have its slot. A key without a row is refused then.
    """

    def __init__(self, handle: Any, tables: Tables, keys: tf.Tensor, values: tf.Tensor) -> None:
        self._sok_keys = keys
        super().__init__(handle, tables, [Summand(keys, values, tf.constant([], tf.int64))])

    @property
    def summands(self) -> tuple[Summand, ...]:
        with self._scope():
            slots = ops.sok_find(keys=self._sok_keys, tables=[self._sok_handle], **self._sok_tables.attributes())
        return tuple(dataclasses.replace(summand, slots=slots) for summand in self._sok_summands)

    def multiplied(self, factor: tf.Tensor) -> GradientByKey:
        """See the base class; rows are still known by their keys."""
        (summand,) = self._sok_summands
        values = summand.values * tf.cast(factor, summand.values.dtype)
        made = GradientByKey(self._sok_handle, self._sok_tables, self._sok_keys, values)
        made.scale = self.scale
        return made


_OWNER = "_sok_owner"
"""Of a gradient that one rank alone has: (handle, Tables) of a table, () of another variable. The tensor has it, or the
dense_shape of tf.IndexedSlices, which arithmetic and TensorFlow's sums of gradients hand on.
"""


def _bearer(gradient: Any) -> Any:
    return gradient.dense_shape if isinstance(gradient, tf.IndexedSlices) else gradient


def mark(gradient: Any, table: TableVariable | None) -> Any:
    """The gradient, as one that this rank alone has; table: None: of another variable than a table."""
    if gradient is None or isinstance(gradient, PendingGradient):
        return gradient
    if not isinstance(gradient, tf.IndexedSlices):
        gradient = tf.identity(gradient)  # which may be another variable's gradient too
    if _bearer(gradient) is not None:
        setattr(_bearer(gradient), _OWNER, () if table is None else (table.handle, Tables.of([table])))
    return gradient


def of_this_rank(gradient: Any) -> Any:
    """The gradient, if this rank alone has it, as far as that can be told; else None. tf.IndexedSlices of a table
    become a PendingGradient, since a row may be in them in parts.
    """
    if isinstance(gradient, PendingGradient):
        return gradient
    owner = getattr(_bearer(gradient), _OWNER, None)
    if not owner or not isinstance(gradient, tf.IndexedSlices):
        return None if owner is None else gradient
    handle, tables = owner
    slots, values = tf.cast(gradient.indices, tf.int64), tf.cast(gradient.values, tf.float32)
    return PendingGradient(handle, tables, [Summand(slots, values, tf.constant([], tf.int64))])


def scaled_values(gradient: Any, factor: tf.Tensor) -> Any:
    """The gradient times a number that is known when it runs, and of this rank alone where it was."""
    own = of_this_rank(gradient)
    if isinstance(own, PendingGradient):
        return own.multiplied(factor)
    is_slices = isinstance(gradient, tf.IndexedSlices)
    values = tf.convert_to_tensor(gradient.values if is_slices else gradient)
    with colocate_with(values):
        product = values * tf.cast(factor, values.dtype)
    if is_slices:
        return tf.IndexedSlices(product, gradient.indices, gradient.dense_shape)
    if own is not None:
        setattr(product, _OWNER, getattr(gradient, _OWNER))
    return product


class GradientInputs:
    """Collects the gradients of several tables as inputs of a `reduce` or `apply` op.

    Attributes:
      scales: what the op, or whoever uses its result, has to multiply the gradients of each table with.
    """

    def __init__(self, num_tables: int) -> None:
        self._scales: list[float | None] = [None] * num_tables
        self._summands: list[tuple[int, Summand]] = []
        self._groups: list[Exchanged] = []
        self._columns: list[list[int]] = []

    def add(self, table: int, gradient: Any) -> None:
        """Adds a PendingGradient, tf.IndexedSlices or dense tensor [rows, dimension] to the table at a position."""
        factor = self._factor(table, gradient.scale if isinstance(gradient, PendingGradient) else 1.0)
        if factor != 1.0:
            gradient = _multiplied(gradient, factor)
        if isinstance(gradient, PendingGradient):
            self._summands.extend((table, summand) for summand in gradient.summands)
            for group, column in gradient.exchanged:
                self._group_columns(group)[column] = table
            return
        empty = tf.constant([], tf.int64)
        if isinstance(gradient, tf.IndexedSlices):
            slots = gradient.indices
            if slots.dtype not in (tf.int32, tf.int64):
                slots = tf.cast(slots, tf.int64)
            self._summands.append((table, Summand(slots, tf.cast(gradient.values, tf.float32), empty)))
            return
        dense = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
        slots = tf.range(tf.shape(dense, tf.int64)[0])
        self._summands.append((table, Summand(slots, dense, empty, unique=True)))

    @property
    def scales(self) -> list[float]:
        """See the class."""
        return [1.0 if scale is None else scale for scale in self._scales]

    def _factor(self, table: int, scale: float) -> float:
        """What a gradient with a scale is multiplied with, so that one scale is left for all of its table's."""
        known = self._scales[table]
        if known is None:
            known = self._scales[table] = scale or 1.0  # of a scale of 0 nothing could be taken back
        return scale / known

    def _group_columns(self, group: Exchanged) -> list[int]:
        for known, columns in zip(self._groups, self._columns, strict=True):
            if known is group:
                return columns
        self._groups.append(group)
        self._columns.append([-1] * len(group.dimensions))
        return self._columns[-1]

    def arguments(self) -> dict[str, Any]:
        """The inputs and attributes of the op."""
        summands = [summand for _, summand in self._summands]
        values = {id(summand.values): summand.values for summand in summands}
        places = {key: place for place, key in enumerate(values)}
        of_summands = [summand.generation for summand in summands]
        members = [summand.members for summand in summands]
        of_columns = [generation for group in self._groups for generation in group.generations]
        given = {id(each[0]): each[0] for each in (*of_summands, *of_columns) if each is not None}
        return {
            "slots": [summand.slots for summand in summands],
            "values": list(values.values()),
            "row_splits": [summand.row_splits for summand in summands],
            "weights": [summand.weights for summand in summands if summand.weights is not None],
            "exchanged_slots": [group.slots for group in self._groups],
            "exchanged_values": [group.values for group in self._groups],
            "exchanged_splits": [group.splits for group in self._groups],
            "exchanged_counts": [group.counts for group in self._groups],
            "summand_tables": [table for table, _ in self._summands],
            "summand_values": [places[id(summand.values)] for summand in summands],
            "summand_columns": [summand.column for summand in summands],
            "summand_combiners": [summand.combiner for summand in summands],
            "summand_weighted": [summand.weights is not None for summand in summands],
            "summand_unique": [summand.unique for summand in summands],
            "group_sizes": [len(group.dimensions) for group in self._groups],
            "column_tables": [table for columns in self._columns for table in columns],
            "column_dimensions": [size for group in self._groups for size in group.dimensions],
            "group_lookups": [len(group.lookup_tables) for group in self._groups],
            "lookup_columns": [table for group in self._groups for table in group.lookup_tables],
            "generations": list(given.values()),
            "summand_members": members if any(members) else [],
            "summand_generations": _places(of_summands, given),
            "column_generations": _places(of_columns, given),
        }


def _places(generations: Sequence[Generation | None], given: dict[int, tf.Tensor]) -> list[int]:
    """Where each is among all numbers of the vectors, -1 for None; [] where all are None."""
    if not given:
        return []
    ends = itertools.accumulate((int(vector.shape[0]) for vector in given.values()), initial=0)
    first = dict(zip(given, ends, strict=False))
    return [-1 if each is None else first[id(each[0])] + each[1] for each in generations]


def reduce(handle: Any, table: Tables, gradients: Sequence[Any]) -> tuple[tf.Tensor, tf.Tensor]:
    """(slots [u] int64, distinct and ascending; values [u, dimension] float32) of a table's gradients together."""
    inputs = GradientInputs(1)
    for gradient in gradients:
        inputs.add(0, gradient)
    slots, values = ops.sok_reduce(tables=[handle], **inputs.arguments(), **table.attributes())
    scale = inputs.scales[0]
    return slots, values if scale == 1.0 else values * scale


def scaled(gradient: Any, factor: float) -> Any:
    """The gradient times `factor`; that of a table is not materialised."""
    if factor == 1.0:
        return gradient
    if isinstance(gradient, PendingGradient):
        return gradient.scaled(factor)
    return _multiplied(gradient, factor)


def _multiplied(gradient: Any, factor: float) -> Any:
    """The gradient with its summands multiplied."""
    if isinstance(gradient, PendingGradient):
        with gradient._scope():
            summands = [dataclasses.replace(summand, values=summand.values * factor) for summand in gradient.summands]
            exchanged = [
                (dataclasses.replace(group, values=group.values * factor), position)
                for group, position in gradient.exchanged
            ]
        return PendingGradient(gradient._sok_handle, gradient._sok_tables, summands, exchanged)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return tf.convert_to_tensor(gradient) * factor
