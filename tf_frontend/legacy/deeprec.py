# SPDX-License-Identifier: Apache-2.0
"""DeepRec's names: group lookups and the collective strategy. Embedding variables: embedding_variables.py; feature
columns: feature_columns.py.

    import sparse_operation_kit as sok

    sok.enable_distributed_strategy("collective")
    outputs = sok.group_embedding_lookup_sparse(tables, ids, ["sum"] * len(tables))

`sok.deeprec.install()` puts the names where DeepRec's TensorFlow has them: tf.nn.group_embedding_lookup_sparse, ....
"""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import variables as tf_variables

from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.legacy import embedding_variables, feature_columns
from sparse_operation_kit.tensorflow.legacy.dense import look_up
from sparse_operation_kit.tensorflow.legacy.initialize import ready
from sparse_operation_kit.tensorflow.lookup import lookup_sparse, together
from sparse_operation_kit.tensorflow.table_variable import is_table

_log = logging.getLogger(__name__)
_COMBINERS = ("mean", "sum")


def enable_distributed_strategy(strategy: str = "collective") -> None:
    """hvd.init() and sok.init(); a second call does nothing.

    Raises:
      ValueError: another strategy than "collective".
      ImportError: there is no Horovod for TensorFlow.
    """
    if strategy != "collective":
        raise ValueError(f'strategy must be "collective", got {strategy!r}')
    import horovod.tensorflow as hvd

    hvd.init()
    ready()


@as_written
def group_embedding_lookup_sparse(
    params: Any,
    sp_ids: Any,
    combiners: Any,
    partition_strategy: Any = "mod",
    sp_weights: Any = None,
    name: str | None = None,
    *,
    is_sequence: bool = False,
    params_num_per_group: int | None = None,
) -> list[tf.Tensor]:
    """Looks up and pools the ids of all tables together. New code: `sok.lookup_sparse`.

    Args:
      params: a table (`sok.Variable`, `sok.get_embedding_variable`) or a list of them.
      sp_ids: for each a tf.SparseTensor or tf.RaggedTensor of two dimensions.
      combiners: for each "mean" or "sum"; None: "mean" for all.
      partition_strategy: "mod". Where something else than a string stands here it is taken for sp_weights, which newer
        versions of DeepRec have in this place.
      sp_weights: for each None or the weights of its ids. DeepRec ignored them under its collective strategy.
      name: of the operations.
      is_sequence: True: one vector for each id instead, [batch, longest bag, dimension], zeros behind shorter bags.
      params_num_per_group: without effect.

    Returns:
      A list of [batch, dimension] float32.

    Raises:
      TypeError: an ordinary tf.Variable, or a PartitionedVariable.
      ValueError: lists of different lengths, another combiner or partition_strategy, weights with is_sequence.
        Otherwise as `sok.lookup_sparse`.
    """
    del params_num_per_group
    if not isinstance(partition_strategy, str):
        other = sp_weights if isinstance(sp_weights, str) else "mod"
        partition_strategy, sp_weights = other, partition_strategy
    _check_strategy(partition_strategy)
    tables, ids = _tables(params), _listed(sp_ids)
    if combiners is None:
        _log.warning('combiners of group_embedding_lookup_sparse: "mean" for all, since none are given')
    chosen = ["mean"] * len(tables) if combiners is None else _listed(combiners)
    weights = [None] * len(tables) if sp_weights is None else _listed(sp_weights)
    ready()
    with together(tables):
        for what, given in (("sp_ids", ids), ("combiners", chosen), ("sp_weights", weights)):
            if len(given) != len(tables):
                raise ValueError(f"{len(tables)} params have {len(given)} {what}")
        if is_sequence and any(each is not None for each in weights):
            raise ValueError("sp_weights weigh what is pooled, and with is_sequence nothing is")
        for combiner in chosen:
            if combiner not in _COMBINERS:
                raise ValueError(f"combiners must be one of {', '.join(_COMBINERS)}, got {combiner!r}")
    with tf.name_scope(name or "group_embedding_lookup_sparse"):
        if not is_sequence:
            outputs: list[tf.Tensor] = lookup_sparse(tables, ids, weights, chosen)
            return outputs
        with together(tables):
            bags = [_ragged(each) for each in ids]
        rows = look_up(tables, [bag.values for bag in bags])
        return [bag.with_values(each).to_tensor() for bag, each in zip(bags, rows, strict=True)]


@as_written
def group_embedding_lookup(
    params: Any, ids: Any, partition_strategy: str = "mod", name: str | None = None
) -> list[tf.Tensor]:
    """Looks up one row for each id, of all tables together. New code: `sok.all2all_dense_embedding`.

    Args:
      params: a table or a list of them.
      ids: for each a dense integer tensor of any shape.
      partition_strategy: "mod".
      name: of the operations.

    Returns:
      A list of tensors, the shape of the ids + [dimension], float32.

    Raises as `group_embedding_lookup_sparse` does.
    """
    _check_strategy(partition_strategy)
    tables = _tables(params)
    ready()
    with together(tables):
        listed = [tf.convert_to_tensor(each) for each in _listed(ids)]
        if len(listed) != len(tables):
            raise ValueError(f"{len(tables)} params have {len(listed)} ids")
    with tf.name_scope(name or "group_embedding_lookup"):
        return look_up(tables, listed)


def _ragged(ids: Any) -> Any:
    return tf.RaggedTensor.from_sparse(tf.sparse.reorder(ids)) if isinstance(ids, tf.SparseTensor) else ids


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _tables(params: Any) -> list[Any]:
    tables = [params] if isinstance(params, tf_variables.PartitionedVariable) else _listed(params)
    for table in tables:
        if isinstance(table, tf_variables.PartitionedVariable):
            raise TypeError("params must not be partitioned: a sok.Variable is sharded over the ranks by itself")
        if not is_table(table):
            raise TypeError(
                f"params must be tables, got a {type(table).__name__}: sok.Variable(tensor) makes one of a tensor"
            )
    return tables


def _check_strategy(strategy: Any) -> None:
    if strategy != "mod":
        raise ValueError(f'partition_strategy must be "mod", got {strategy!r}')


def install() -> None:
    """Puts DeepRec's names into TensorFlow's modules, `tensorflow` and `tensorflow.compat.v1`, where it has them."""
    for root in (tf, tf.compat.v1):
        for module, names in (
            (root.nn, (group_embedding_lookup_sparse, group_embedding_lookup)),
            (
                root.feature_column,
                (feature_columns.group_embedding_column_scope, feature_columns.categorical_column_with_embedding),
            ),
            (root.config.experimental, (enable_distributed_strategy,)),
            (root, (embedding_variables.get_embedding_variable, *embedding_variables.OPTIONS)),
        ):
            for value in names:
                setattr(module, value.__name__, value)
