# SPDX-License-Identifier: Apache-2.0
"""EmbeddingBagCollection: tables and the features that look into them, as a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from sparse_operation_kit.arguments import check_features, dtype_of_table
from sparse_operation_kit.torch import saving
from sparse_operation_kit.torch.lookup import lookup_sparse
from sparse_operation_kit.torch.table_parameter import TableParameter
from sparse_operation_kit.torch.variable import Variable


class _Tables(torch.nn.Module):
    """A mapping from names to tables. Unlike torch.nn.ParameterDict it takes any name, "items" or "type" too."""

    def __setitem__(self, name: str, table: TableParameter) -> None:
        self._parameters[name] = table
        saving.guard(self)

    def __getitem__(self, name: str) -> TableParameter:
        return cast(TableParameter, self._parameters[name])

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


class EmbeddingBagCollection(torch.nn.Module):
    """Sharded tables and the features that are looked up in them, all with one lookup_sparse.

    Args:
      tables: table name -> a :class:`Variable` or :class:`DynamicVariable`, or (rows, dimension) for a new one.
      features: feature name -> table name; several features may share a table. None: every table is a feature of its
        name.
      combiners: "sum", "mean" or "sqrtn" for all features, or feature name -> one of them. None: "mean".
      initializer, mode: of the new tables; see :class:`Variable`.
      table_dtype: of the new tables: one for all, or table name -> dtype; None: float32.
      concat: whether the vectors of all features come as one tensor; see :func:`lookup_sparse`.

    Call it with a mapping from every feature's name to its ids: what lookup_sparse takes, or a dense integer tensor
    [batch] or [batch, k] whose rows are bags of k keys; and, as `weights`, a mapping from some or all features to
    weights of the same kind. It returns a dict, in the order of `features`, from feature to [batch, dimension] float32;
    with `concat` one tensor [batch, sum of dimensions], the features side by side in that order.

    The tables are parameters of the module, ``collection.tables[name]``.

    Raises:
      ValueError: a feature of a table that is not there, a feature without combiner, an unknown combiner.
      KeyError: a call without the ids of a feature.
      Otherwise as :class:`Variable` and :func:`lookup_sparse`.
    """

    def __init__(
        self,
        tables: Mapping[str, TableParameter | Sequence[int]],
        features: Mapping[str, str] | None = None,
        combiners: str | Mapping[str, str] | None = None,
        *,
        initializer: Any = None,
        mode: str | None = None,
        table_dtype: Any = None,
        concat: bool = False,
    ) -> None:
        super().__init__()
        self.concat = concat
        self.tables = _Tables()
        for name, table in tables.items():
            if not isinstance(table, TableParameter):
                dtype = dtype_of_table(table_dtype, name)
                table = Variable(shape=table, initializer=initializer, dtype=dtype, mode=mode, name=name)
            self.tables[name] = table
        self.feature_tables, self.combiners = check_features(tables, features, combiners)

    def forward(self, ids: Mapping[str, Any], weights: Mapping[str, Any] | None = None) -> Any:
        """See the class. Raises KeyError for a feature without ids; otherwise as lookup_sparse."""
        given = {} if weights is None else weights
        inputs = [_as_bags(ids[feature], given.get(feature), feature) for feature in self.feature_tables]
        outputs = lookup_sparse(
            [self.tables[table] for table in self.feature_tables.values()],
            [bags for bags, _ in inputs],
            None if weights is None else [flat for _, flat in inputs],
            [self.combiners[feature] for feature in self.feature_tables],
            training=self.training,
            concat=self.concat,
        )
        if self.concat:
            return outputs
        return dict(zip(self.feature_tables, outputs, strict=True))

    def extra_repr(self) -> str:
        return ", ".join(
            f"{feature}: {table} ({self.combiners[feature]})" for feature, table in self.feature_tables.items()
        )


def _as_bags(ids: Any, weights: Any, feature: str) -> tuple[Any, Any]:
    """Dense ids [batch] or [batch, k], and weights of the same shape, as bags of k; anything else as it is."""
    if not _is_dense(ids) or ids.dim() not in (1, 2):
        return ids, weights
    if _is_dense(weights):
        if weights.shape != ids.shape:
            raise ValueError(
                f"feature '{feature}': weights have shape {list(weights.shape)}, ids have shape {list(ids.shape)}"
            )
        weights = weights.reshape(-1)
    batch, length = ids.shape[0], ids.shape[1] if ids.dim() == 2 else 1
    return (ids.reshape(-1), torch.arange(batch + 1, device=ids.device) * length), weights


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested
