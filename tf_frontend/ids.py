# SPDX-License-Identifier: Apache-2.0
"""Any accepted id input -> keys, row splits and weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow import devices
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.table_variable import TableVariable

_NO_SPLITS: list[int] = []


@dataclasses.dataclass
class Batch:
    """One lookup's input: keys [n] int32 or int64, row_splits [bags + 1] int64, weights [n] float32 or None.

    row_splits of shape [0]: each key is a bag of its own.
    """

    keys: tf.Tensor
    row_splits: tf.Tensor
    weights: tf.Tensor | None = None


def prepare(
    tables: Sequence[TableVariable],
    ids: Sequence[Any],
    weights: Sequence[Any],
    *,
    defer_errors: bool,
    names: Sequence[str] | None = None,
) -> tuple[list[Batch], tf.Tensor | None]:
    """Batches of the lookups of one call; sparse tensors are turned into row splits by one op for all of them.

    defer_errors: what is found wrong only when it runs becomes a message instead of an error. names: of the lookups in
    errors; None: their numbers and tables.

    Returns:
      The batches, and a string scalar: empty, or why the call cannot be made. None: there was nothing to find out.

    Raises:
      TypeError: ids that are neither sparse nor ragged tensors of integers, weights of another kind than the ids or not
        floating.
      ValueError: not two dimensions, weights of another static shape than the ids.
      tf.errors.InvalidArgumentError: the same, where shapes are known only when it runs.
    """
    batches: list[Batch | None] = []
    checks = _Checks()
    for i, (table, item, weight) in enumerate(zip(tables, ids, weights, strict=True)):
        where = f"lookup {i} (table '{table.table_name}')" if names is None else names[i]
        if isinstance(item, tf.SparseTensor):
            _check_sparse(table, where, item, weight)
            checks.sparse.append((i, where, item, weight))
            batches.append(None)
        elif isinstance(item, tf.RaggedTensor):
            batches.append(_ragged(table, where, item, weight, checks))
        else:
            raise TypeError(
                f"{where}: sp_ids must be a tf.SparseTensor or tf.RaggedTensor of two dimensions, got "
                f"{_described(item)}"
            )
    message = None
    if checks.sparse or checks.ragged:
        message = checks.run(batches, defer_errors)
    return [batch for batch in batches if batch is not None], message


@dataclasses.dataclass
class _Checks:
    """What one SokBags op does for a call: sparse tensors to convert, ragged weights to compare."""

    sparse: list[tuple[int, str, tf.SparseTensor, Any]] = dataclasses.field(default_factory=list)
    ragged: list[tuple[str, Batch, tf.Tensor]] = dataclasses.field(default_factory=list)
    _no_splits: tf.Tensor | None = None

    def no_splits(self) -> tf.Tensor:
        """The row splits of all lookups whose keys are bags of their own: one constant for the call."""
        if self._no_splits is None:
            self._no_splits = tf.constant(_NO_SPLITS, tf.int64)
        return self._no_splits

    def run(self, batches: list[Batch | None], defer_errors: bool) -> tf.Tensor:
        """Fills in the batches of the sparse tensors and returns the op's message."""
        items = [item for _, _, item, _ in self.sparse]
        given = [weight for _, _, _, weight in self.sparse if weight is not None]
        with tf.device(devices.HOST):  # where input pipelines leave ids; what comes out goes to the tables' device
            result = ops.sok_bags(
                indices=[item.indices for item in items],
                dense_shapes=[item.dense_shape for item in items],
                keys=[item.values for item in items],
                weights=[tf.cast(weight.values, tf.float32) for weight in given],
                weight_indices=[weight.indices for weight in given],
                ragged_splits=[batch.row_splits for _, batch, _ in self.ragged],
                ragged_weight_splits=[splits for _, _, splits in self.ragged],
                weighted=[weight is not None for _, _, _, weight in self.sparse],
                names=[where for _, where, _, _ in self.sparse],
                ragged_names=[where for where, _, _ in self.ragged],
                defer_errors=defer_errors,
            )
        values = iter(result.sorted_weights)
        for j, (i, _, _, weight) in enumerate(self.sparse):
            own = None if weight is None else next(values)
            batches[i] = Batch(result.sorted_keys[j], result.row_splits[j], own)
        for (_, batch, _), splits in zip(self.ragged, result.checked_splits, strict=True):
            batch.row_splits = splits  # the same, but not before the check has been made
        return result.message


def check_bags_are_as_many(batches: Sequence[Batch], message: tf.Tensor | None, members: Sequence[int] = ()) -> None:
    """Raises ValueError unless all batches have as many bags, as far as that is known before it runs.

    message: of `prepare`. What is wrong with a batch itself comes first: such a batch has no bags. members: of the
    stacks that the batches are for, 0 where it is none; bags are those of each member.
    """
    numbers = [num_bags(batch) for batch in batches]
    for i, count in enumerate(members):
        number = numbers[i]
        numbers[i] = number // count if count and number is not None else number
    first = next((i for i, number in enumerate(numbers) if number is not None), 0)
    for i, number in enumerate(numbers):
        if number is None or number == numbers[first]:
            continue
        if message is not None and tf.executing_eagerly() and message.numpy():
            return
        raise ValueError(
            f"concat=True puts vectors of as many bags side by side, but lookup {i} has {number} and lookup {first} "
            f"has {numbers[first]}"
        )


def num_bags(batch: Batch) -> int | None:
    """How many bags it has, as far as that is known before it runs."""
    splits = batch.row_splits.shape[0]
    if splits is None:
        return None
    count: int | None = splits - 1 if splits else batch.keys.shape[0]
    return count


def dense(table: TableVariable, indices: Any) -> tuple[Batch, tf.Tensor]:
    """The batch of indices of any shape, each a bag of its own, and the shape of the indices.

    Raises TypeError when they are not int32 or int64.
    """
    if isinstance(indices, (tf.SparseTensor, tf.RaggedTensor)):
        raise TypeError(f"table '{table.table_name}': indices must be a dense tensor, got {_described(indices)}")
    indices = tf.convert_to_tensor(indices)
    table.check_keys(indices.dtype, f"table '{table.table_name}'", "indices")
    return Batch(tf.reshape(indices, [-1]), tf.constant(_NO_SPLITS, tf.int64)), indices


def _check_weight_dtype(where: str, dtype: tf.DType) -> None:
    if not dtype.is_floating:
        raise TypeError(f"{where}: sp_weights must be floating, got {dtype.name}")


def _check_rank(where: str, shape: tf.TensorShape) -> None:
    if shape.rank is not None and shape.rank != 2:
        raise ValueError(
            f"{where}: sp_ids must have two dimensions [batch, ids], got {shape.rank}: the shape is {shape}"
        )


def _check_sparse(table: TableVariable, where: str, item: tf.SparseTensor, weight: Any) -> None:
    table.check_keys(item.dtype, where, "sp_ids")
    _check_rank(where, item.shape)
    if weight is None:
        return
    if not isinstance(weight, tf.SparseTensor):
        raise TypeError(
            f"{where}: sp_weights must be a tf.SparseTensor as sp_ids is, or None, got {_described(weight)}"
        )
    _check_weight_dtype(where, weight.dtype)
    if not (weight.shape.is_compatible_with(item.shape) and weight.values.shape.is_compatible_with(item.values.shape)):
        raise ValueError(
            f"{where}: sp_weights must have the shape and indices of sp_ids: {weight.values.shape} weights in "
            f"{weight.shape}, {item.values.shape} ids in {item.shape}"
        )


def _ragged(table: TableVariable, where: str, item: tf.RaggedTensor, weight: Any, checks: _Checks) -> Batch:
    table.check_keys(item.dtype, where, "sp_ids")
    if item.ragged_rank != 1 or item.values.shape.rank not in (None, 1):
        _check_rank(where, item.shape)
        raise ValueError(f"{where}: sp_ids must have two dimensions [batch, ids], the second ragged, got {item.shape}")
    if weight is None and _keys_are_bags(item):
        return Batch(item.values, checks.no_splits())
    row_splits = _as_int64(item.row_splits)
    if weight is None:
        return Batch(item.values, row_splits)
    if not isinstance(weight, tf.RaggedTensor):
        raise TypeError(
            f"{where}: sp_weights must be a tf.RaggedTensor as sp_ids is, or None, got {_described(weight)}"
        )
    _check_weight_dtype(where, weight.dtype)
    if not weight.values.shape.is_compatible_with(item.values.shape):
        raise ValueError(
            f"{where}: sp_weights must have the shape of sp_ids: {weight.values.shape} weights, {item.values.shape} ids"
        )
    values = tf.cast(weight.values, tf.float32)
    batch = Batch(item.values, row_splits, values)
    if weight.row_splits is not item.row_splits:
        checks.ragged.append((where, batch, _as_int64(weight.row_splits)))
    return batch


def _as_int64(splits: tf.Tensor) -> tf.Tensor:
    return splits if splits.dtype == tf.int64 else tf.cast(splits, tf.int64)  # asking is cheaper than tf.cast


def _keys_are_bags(item: tf.RaggedTensor) -> bool:
    """Whether it is known before it runs that each bag has one key: then there are no row splits to make and read."""
    return item.uniform_row_length is not None and tf.get_static_value(item.uniform_row_length) == 1


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {shape}" if shape is not None else "")
