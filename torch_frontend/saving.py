# SPDX-License-Identifier: Apache-2.0
"""Tables and their optimizer states in state_dict(): rows that know whose they are.

Each rank saves its rows and loads them again with as many ranks (``torch.save``, ``torch.load``), or all ranks save one
checkpoint together (torch.distributed.checkpoint) and load it with any number of them; see `planner.LoadPlanner`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_operation_kit.placement import Placement, mode_of
from sparse_operation_kit.torch import keyed_shard

CHUNK_BYTES = 64 << 20
_PAD = 0xFF  # each byte of a row that is none: NaN in every float format
_KEPT = ("clone", "contiguous", "cpu", "cuda", "detach", "new_empty", "pin_memory", "to")

OTHER_RANKS = (
    "rows saved by torch.save load on the same rank of as many ranks; for another number save with "
    "torch.distributed.checkpoint and load with planner=sparse_operation_kit.torch.planner.LoadPlanner(), or use "
    "sok.dump and sok.load"
)
OTHERWISE = (
    "a layer of which tables lie otherwise on the ranks, or none: only sok.dump and sok.load go from one to another"
)


class Layout(NamedTuple):
    """Which rows of which table a shard holds."""

    table: str
    num_rows: int
    owner: int
    num_ranks: int
    rank: int
    contents: int = 0

    @classmethod
    def of(cls, name: str, place: Placement) -> Layout:
        """The layout of a table's shard."""
        return cls(name, place.num_rows, place.owner, place.num_ranks, place.rank, place.contents)

    @property
    def placement(self) -> Placement:
        """Without the dimension, which states need not share."""
        return Placement(self.num_rows, 1, self.owner, self.num_ranks, self.rank)

    @property
    def columns(self) -> int:
        """The ranks that share the rows: all of them, or the one that holds the table."""
        return self.num_ranks if self.owner < 0 else 1

    @property
    def column(self) -> int:
        """This rank's number among those that share the rows."""
        return self.rank if self.owner < 0 else 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.num_ranks}, {mode_of(self.owner)}, of {self.num_rows} rows"


class TableShard(Tensor):
    """This rank's rows of a table, or of a state of its optimizer, as state_dict() gives them.

    A tensor [local rows, ...] over the memory of the table; results of operations are plain tensors. To
    torch.distributed.checkpoint it is a part of a tensor [slots, ranks, ...] (`whole_size`): key k is at
    [k // ranks, k % ranks]. Ranks with a row less than others fill up with a row of NaN. A localized table has one
    column, which its rank holds.

    ``torch.load(weights_only=True)`` knows the type once this package is imported.
    """

    # Operations see a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    held: Layout
    _pad: Tensor | None

    @staticmethod
    def wrap(rows: Tensor, layout: Layout) -> TableShard:
        """`rows` [local rows, ...] as a shard; the memory is shared."""
        shard = torch.Tensor._make_subclass(TableShard, rows)
        shard.held = layout
        shard._pad = None
        return shard

    @property
    def plain(self) -> Tensor:
        """The same memory as an ordinary tensor."""
        return Tensor.detach(self)

    def whole_size(self) -> torch.Size:
        """Of the tensor in a distributed checkpoint that this is a part of."""
        columns = self.held.columns
        return torch.Size((-(-self.held.num_rows // columns), columns, *self.shape[1:]))

    def __deepcopy__(self, memo: dict[int, Any]) -> TableShard:
        if id(self) not in memo:
            memo[id(self)] = self.wrap(self.plain.clone(), self.held)
        copied: TableShard = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self.plain, tuple(self.held))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TableShard of table '{self.held.table}' ({self.held}):\n{self.plain!r}"

    # What torch.distributed.checkpoint asks of a tensor that is a part of another.

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        size, properties = self.whole_size(), TensorProperties.create_from_tensor(self.plain)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if self.held.owner not in (-1, self.held.rank):
            return []
        rest = self.shape[1:]
        at_once = max(1, CHUNK_BYTES // max(1, self.element_size() * rest.numel()))
        bounds = [*range(0, self.shape[0], at_once), self.shape[0]]
        pieces = list(itertools.pairwise(bounds))
        if self.shape[0] < self.whole_size()[0]:
            pieces.append((self.shape[0], self.shape[0] + 1))
        column, zeros = self.held.column, (0,) * len(rest)
        return [
            ChunkStorageMetadata(torch.Size((first, column, *zeros)), torch.Size((end - first, 1, *rest)))
            for first, end in pieces
            if end > first
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        chunk = next((c for c in self.__create_chunk_list__() if c.offsets == index.offset), None)
        if chunk is None:
            raise ValueError(f"table '{self.held.table}' ({self.held}) has no chunk at {index.offset}")
        first, count = chunk.offsets[0], chunk.sizes[0]
        if first == self.shape[0]:
            if self._pad is None:
                self._pad = pad_like(self.plain.new_empty((1, *self.shape[1:])))
            return self._pad.unsqueeze(1)
        return self.plain[first : first + count].unsqueeze(1)

    def problem(self) -> str | None:
        """What a distributed checkpoint of another table, which has nearly as many rows, leaves behind."""
        padded = self.shape[0] < self.whole_size()[0]
        if padded and self._pad is not None and not is_pad(self._pad):
            return f"the checkpoint has more than the {self.held.num_rows} rows of table '{self.held.table}'"
        if not padded and self.shape[0] and is_pad(self.plain[-1:]):
            return f"the checkpoint has fewer than the {self.held.num_rows} rows of table '{self.held.table}'"
        return None


def _keeping(name: str) -> Any:
    def method(self: TableShard, *args: Any, **options: Any) -> Tensor:
        return TableShard.wrap(getattr(Tensor, name)(self, *args, **options), self.held)

    method.__name__, method.__doc__ = name, f"As torch.Tensor.{name}; the result still knows whose rows it holds."
    return method


for _name in _KEPT:
    setattr(TableShard, _name, _keeping(_name))


def _rebuild(rows: Tensor, layout: tuple[Any, ...]) -> TableShard:
    return TableShard.wrap(rows, Layout(*layout))


torch.serialization.add_safe_globals([_rebuild])


def pad_like(rows: Tensor) -> Tensor:
    """Fills contiguous `rows` as rows that are none."""
    rows.view(-1).view(torch.uint8).fill_(_PAD)
    return rows


def is_pad(rows: Tensor) -> bool:
    """Whether all of `rows` are none."""
    return bool((rows.contiguous().view(-1).view(torch.uint8) == _PAD).all())


def rows_for(given: Tensor, layout: Layout, local_shape: tuple[int, ...]) -> Tensor:
    """What a table or state [local rows, ...] takes from an entry of a state_dict.

    That is the entry where this rank saved it, or this rank's rows of an entry that is the whole table. Raises
    ValueError, with the reason, for any other.
    """
    name, rest = layout.table, local_shape[1:]
    if isinstance(given, keyed_shard.KeyedShard):
        raise ValueError(
            f"table '{name}' ({layout}): the state_dict has rows of dynamic table '{given.held.table}'; sok.dump and "
            "sok.load take dynamic tables into static ones"
        )
    saved = getattr(given, "held", None)
    if isinstance(given, TableShard):
        problem = given.problem()
        if problem is not None:
            raise ValueError(problem)
        given = given.plain
    shape = tuple(given.shape)
    if isinstance(saved, Layout):
        if saved.contents != layout.contents:
            raise ValueError(f"table '{name}' ({layout}) and those of the state_dict ({saved}): {OTHERWISE}")
        if saved[1:] == layout[1:] and shape == local_shape:
            return given
        whole = saved.placement.local_rows == layout.num_rows
        origin = f"rows of {saved}"
    else:
        if shape == local_shape:
            return given
        whole = True
        origin = "a tensor"
    if whole and shape == (layout.num_rows, *rest):
        return given[layout.placement.rows]
    raise ValueError(
        f"table '{name}' ({layout}) takes {list(local_shape)}, the state_dict has {origin}, "
        f"{list(shape)}; {OTHER_RANKS}"
    )


def guard(module: torch.nn.Module) -> None:
    """Makes load_state_dict check what it gives to the tables that are parameters of `module`."""
    if not getattr(module, "_sok_guarded", False):
        module._sok_guarded = True  # type: ignore[assignment]
        module.register_state_dict_post_hook(_share_tables)
        module.register_load_state_dict_pre_hook(_check_tables)


def _share_tables(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any]
) -> None:
    del local_metadata
    tables: Mapping[str, Any] = module._parameters
    for name, table in tables.items():
        if hasattr(table, "_sok_name") and state_dict.get(prefix + name, table) is not table:  # not keep_vars
            state_dict[prefix + name] = table.shared()


def _check_tables(
    module: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    tables: Mapping[str, Any] = module._parameters
    for name, table in tables.items():
        given = state_dict.get(prefix + name)
        if strict and given is None and hasattr(table, "_sok_name") and table._placement.contents:
            error_msgs.append(f"{prefix}{name}: the state_dict has no such table: {OTHERWISE}")
        if not hasattr(table, "_sok_name") or not isinstance(given, Tensor) or given is table:
            continue
        try:
            state_dict[prefix + name] = table.taken(given, local_metadata.get("assign_to_params_buffers", False))
        except ValueError as error:
            error_msgs.append(f"{prefix}{name}: {error}")
            state_dict[prefix + name] = table  # loading goes on with what is there


def _on_registration(module: torch.nn.Module, name: str, parameter: Any) -> None:
    if hasattr(parameter, "_sok_name"):
        guard(module)


torch.nn.modules.module.register_module_parameter_registration_hook(_on_registration)


# --- optimizers -------------------------------------------------------------------------------------------------------


def _tables_by_number(groups: Iterable[Mapping[str, Any]]) -> dict[int, Any]:
    """The tables among the parameters, by their numbers in a state_dict."""
    parameters = (parameter for group in groups for parameter in group["params"])
    return {number: table for number, table in enumerate(parameters) if hasattr(table, "_sok_name")}


def _is_per_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 1


def share(state: Mapping[str, Any], layout: Layout, num_slots: int) -> dict[str, Any]:
    """`optimizer.state[table]` of a table of this layout, with what has rows as TableShard."""
    return {
        key: TableShard.wrap(value, layout) if _is_per_row(value) and value.shape[0] == num_slots else value
        for key, value in state.items()
    }


def take(state: Mapping[str, Any], layout: Layout, num_slots: int) -> dict[str, Any]:
    """The same with plain tensors of this rank's rows. ValueError where they are not."""
    return {
        key: rows_for(value, layout, (num_slots, *value.shape[1:])) if _is_per_row(value) else value
        for key, value in state.items()
    }


def share_states(state_dict: dict[str, Any], groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """An optimizer's state_dict with the states of tables as a state_dict has them."""
    states = dict(state_dict["state"])
    for number, table in _tables_by_number(groups).items():
        if number in states:
            states[number] = table.share_states(states[number])
    return {**state_dict, "state": states}


def take_states(state_dict: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A state_dict with the states of tables as optimizers take them. ValueError where they are not those of them."""
    states = dict(state_dict["state"])
    for number, table in _tables_by_number(groups).items():
        if number in states:
            states[number] = table.take_states(states[number])
    return {**state_dict, "state": states}
