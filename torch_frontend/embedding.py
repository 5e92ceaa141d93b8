# SPDX-License-Identifier: Apache-2.0
"""EmbeddingBagCollection: tables and the features that look into them, as a module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.arguments import check_features, check_one_batch, of_table, stacked_features, stacks_of
from sparse_operation_kit.torch import runtime, saving
from sparse_operation_kit.torch.compiling import is_exporting
from sparse_operation_kit.torch.feature_bags import FlatBags, flat_bags, keyed_bags
from sparse_operation_kit.torch.keyed_vectors import KeyedVectors
from sparse_operation_kit.torch.lookup import lookup_sparse, tell_peers
from sparse_operation_kit.torch.table_parameter import TableParameter
from sparse_operation_kit.torch.table_stack import Described, Exported, Selection, TableStack
from sparse_operation_kit.torch.variable import Variable


class _Tables(torch.nn.Module):
    """A mapping from names to tables, in an order of their own. Unlike torch.nn.ParameterDict it takes any name,
    "items" or "type" too. Its parameters are tables and stacks of them; in state_dict() each table stands by itself.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self._stack_of: dict[str, str | None] = dict.fromkeys(names)  # by table: the parameter, where it is a stack
        self._described: dict[str, Described] = {}  # by parameter
        self.register_state_dict_post_hook(_members_apart)
        self.register_load_state_dict_pre_hook(_members_together)

    def __setitem__(self, name: str, table: TableParameter) -> None:
        self._parameters[name] = table
        self._described[name] = Described.of(table)
        saving.guard(self)

    def add_stack(self, stack: TableStack) -> None:
        """Takes the stack as a parameter; its members are tables."""
        self[stack.name] = stack
        self._stack_of.update(dict.fromkeys(stack._members, stack.name))

    def stack(self, name: str) -> TableStack | None:
        """The stack that the table is in."""
        parameter = self._stack_of[name]
        if parameter is None:
            return None
        stack = self._parameters[parameter]
        if not isinstance(stack, TableStack):
            raise TypeError(
                f"'{parameter}' of an EmbeddingBagCollection must be a sok.TableStack, got {type(stack).__name__}: "
                "functional_call takes tables, or copy.deepcopy of them, in place of tables"
            )
        return stack

    def exported(self, name: str) -> Any:
        """What a lookup in this table is made in under torch.export."""
        parameter = self._stack_of[name] or name
        rows: Any = self._parameters[parameter]
        return Exported(self._described[parameter], rows)

    def __getitem__(self, name: str) -> Any:
        stack = self.stack(name)
        return self._parameters[name] if stack is None else stack.member(name)

    def __contains__(self, name: object) -> bool:
        return name in self._stack_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._stack_of)

    def __len__(self) -> int:
        return len(self._stack_of)


def _stacks(module: torch.nn.Module) -> dict[str, TableStack]:
    return {name: value for name, value in module._parameters.items() if isinstance(value, TableStack)}


def _members_apart(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    del local_metadata
    for name, stack in _stacks(module).items():
        if state_dict.pop(prefix + name, None) is not None:
            state_dict.update({prefix + each: member.as_shard() for each, member in stack.members.items()})


def _members_together(
    module: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Copies the rows of members, and lets PyTorch copy a stack to itself."""
    replaced = local_metadata.get("assign_to_params_buffers", False)
    for name, stack in _stacks(module).items():
        found: dict[str, Tensor] = {}
        for each, member in stack.members.items():
            given = state_dict.pop(prefix + each, None)
            if given is None:
                missing_keys.append(prefix + each)
                continue
            layout = saving.Layout.of(each, member.placement)
            try:
                found[each] = saving.rows_for(given.detach(), layout, tuple(member.shape))
            except ValueError as error:
                error_msgs.append(f"{prefix}{each}: {error}")
        if replaced and found:  # by one where the given rows are, for this one may be on the meta device
            first = next(iter(found.values()))
            rows = torch.zeros(stack.shape, dtype=first.dtype, device=first.device)
            stack = stack.with_rows(rows if stack.is_meta else rows.copy_(Tensor.detach(stack)))
        with torch.no_grad():
            for each, rows in found.items():
                stack.member(each).weight.copy_(rows)
        state_dict[prefix + name] = stack


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
      keyed: whether that tensor comes as :class:`KeyedVectors`, which knows the features' columns, as TorchRec's
        KeyedTensor does.
      stack: whether new tables of one dimension and dtype become a :class:`TableStack`, one parameter: many small
        tables cost the host what one does then. False: every table is a parameter, and has gradients, of its own.

    Call it with a mapping from every feature's name to its ids: what lookup_sparse takes, or a dense integer tensor
    [batch] or [batch, k] whose rows are bags of k keys; and, as `weights`, a mapping from some or all features to
    weights of the same kind. Or with all in one, as TorchRec's KeyedJaggedTensor has them: an object whose ``keys()``
    are names of features, ``values()`` the ids of the first, then of the second, ..., and ``offsets()`` [features *
    batch + 1]; its ``weights_or_none()`` are the weights. It returns a dict, in the order of `features`, from feature
    to [batch, dimension] float32; with `concat` one tensor [batch, sum of dimensions], the features side by side in
    that order, or `KeyedVectors` of it with `keyed`.

    ``collection.tables[name]`` are the tables, or the members of stacks, which are parameters of the module.
    state_dict() has an entry for each table, stacked or not. Ids in one tensor, of the features in their order, cost a
    stack least; in a mapping the batches of its features are joined first.

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
        keyed: bool = False,
        stack: bool = True,
    ) -> None:
        super().__init__()
        self.concat, self.keyed = concat or keyed, keyed
        self.feature_tables, self.combiners = check_features(tables, features, combiners)
        self.tables = _Tables(tables)
        new = {name: shape for name, shape in tables.items() if not isinstance(shape, TableParameter)}
        options: dict[str, Any] = {"initializer": initializer, "mode": mode}
        for names in stacks_of(new, table_dtype) if stack else []:
            shapes = {name: new.pop(name) for name in names}
            dtype = of_table(table_dtype, names[0])
            name = f"{names[0]} to {names[-1]}"
            while name in tables:
                name += "_"
            self.tables.add_stack(TableStack(shapes, dtype=dtype, name=name, **options))
        for name, table in tables.items():
            if isinstance(table, TableParameter):
                self.tables[name] = table
            elif name in new:
                self.tables[name] = Variable(shape=table, dtype=of_table(table_dtype, name), name=name, **options)
        stacks = {name: self.tables.stack(name) for name in tables}
        self._lookups = stacked_features(self.feature_tables, self.combiners, stacks)
        self._selected: list[Selection | None] = [None] * len(self._lookups)
        order = [feature for features in self._lookups for feature in features]
        self._in_order = order == list(self.feature_tables)
        dimensions = {
            name: table.placement.dimension if isinstance(table, TableParameter) else int(table[1])
            for name, table in tables.items()
        }
        self._dimensions = {feature: dimensions[table] for feature, table in self.feature_tables.items()}

    def forward(self, ids: Any, weights: Mapping[str, Any] | None = None) -> Any:
        """See the class. Raises KeyError for a feature without ids; otherwise as lookup_sparse."""
        vectors = self._look_up(ids, weights)
        return KeyedVectors(self._dimensions, vectors) if self.keyed else vectors

    def _look_up(self, ids: Any, weights: Mapping[str, Any] | None) -> Any:
        params = [self._table(number) for number in range(len(self._lookups))]
        try:
            inputs = self._bags_of(ids, weights)
        except Exception:
            tell_peers(runtime.get(), params)
            raise
        none_weighted = all(flat.weights is None for flat in inputs)
        concat = self.concat and self._in_order
        outputs = lookup_sparse(
            params,
            [flat.ids for flat in inputs],
            None if none_weighted else [flat.weights for flat in inputs],
            [self.combiners[features[0]] for features in self._lookups],
            training=self.training,
            concat=concat,
        )
        return outputs if concat else self._by_feature(inputs, outputs)

    def _bags_of(self, ids: Any, weights: Mapping[str, Any] | None) -> list[FlatBags]:
        """What each lookup takes."""
        if not isinstance(ids, Mapping):
            if weights is not None:
                raise TypeError("the weights of ids in one tensor are its own: weights_or_none()")
            return [keyed_bags(ids, features) for features in self._lookups]
        inputs = [flat_bags(ids, weights or {}, features) for features in self._lookups]
        if self.concat:
            check_one_batch(self._lookups, [flat.sizes for flat in inputs])
        return inputs

    def reset_parameters(self) -> None:
        """Gives all tables their initial rows anew; see :meth:`Variable.reset_parameters`. Dynamic ones are emptied."""
        tables: Iterable[Any] = self.tables.parameters()
        for table in tables:
            table.reset_parameters()

    def _table(self, number: int) -> Any:
        """What a lookup is made in."""
        tables = [self.feature_tables[feature] for feature in self._lookups[number]]
        if is_exporting():
            return self._exported(tables)
        stack = self.tables.stack(tables[0])
        if stack is None:
            return self.tables[tables[0]]
        selected = self._selected[number]
        if selected is None or selected.stack is not stack:  # another parameter may have taken its place
            selected = self._selected[number] = stack.choose(tables)
        return selected

    def _exported(self, tables: Sequence[str]) -> Any:
        found = self.tables.exported(tables[0])
        return found.choose(tables) if found.members else found

    def _by_feature(self, inputs: Sequence[FlatBags], outputs: Sequence[Tensor]) -> Any:
        found: dict[str, Tensor] = {}
        for features, flat, output in zip(self._lookups, inputs, outputs, strict=True):
            # Nobody else sees `output`, so what is made in place of its parts is nobody else's either.
            parts = torch.unsafe_chunk(output, len(features), dim=1) if len(features) > 1 else (output,)
            if flat.sizes is not None:
                parts = tuple(part[:size] for part, size in zip(parts, flat.sizes, strict=True))
            found.update(zip(features, parts, strict=True))
        in_order = {feature: found[feature] for feature in self.feature_tables}
        return torch.cat(list(in_order.values()), dim=1) if self.concat else in_order

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_selected": [None] * len(self._lookups)}  # of the copy's own stacks

    def extra_repr(self) -> str:
        return ", ".join(
            f"{feature}: {table} ({self.combiners[feature]})" for feature, table in self.feature_tables.items()
        )
