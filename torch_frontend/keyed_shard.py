# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables and their optimizers' states in state_dict() and in copies: rows that know their keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit import dynamic
from sparse_operation_kit.placement import Placement
from sparse_operation_kit.torch.turns import alone

REFUSED = "state_dict() (use sok.dump and sok.load)"

_KEPT = ("clone", "contiguous", "cpu", "cuda", "detach", "pin_memory", "to")


@dataclasses.dataclass(frozen=True)
class Held:
    """The keys that this rank holds of a dynamic table at some moment.

    table:      its name
    place:      where keys live
    num_slots:  of the table, in use and free
    keys:       [n] int64
    slots:      [n] int64, ascending
    scores:     [n] int64, what rows are evicted by (sok_dynamic_table_scores); None: nothing is kept of uses
    use_times:  [m, 2] int64, generations and when they began, in host memory; None: as scores
    candidates: [k, 2] int64, keys that wait for rows and their scores, in host memory; None: none wait
    """

    table: str
    place: Placement
    num_slots: int
    keys: Tensor
    slots: Tensor
    scores: Tensor | None
    use_times: Tensor | None = None
    candidates: Tensor | None = None

    @classmethod
    def by(cls, table: Any) -> Held:
        """What the table holds now, where it is."""
        dynamic.refuse_store(table._stored, table._sok_name, REFUSED)
        core = table._core
        keys, slots = core.held()
        scores = core.scores()
        times = None if scores is None else core.use_times()
        kept = None if scores is None else scores[slots]
        candidates = core.candidates() if table.most_candidates > 0 else None
        return cls(table._sok_name, table._placement, len(table), keys, slots, kept, times, candidates)

    def on_host(self) -> Held:
        """The same in host memory."""
        scores = None if self.scores is None else self.scores.cpu()
        return dataclasses.replace(self, keys=self.keys.cpu(), slots=self.slots.cpu(), scores=scores)

    def plain(self) -> tuple[Any, ...]:
        """Its fields, as torch.load(weights_only=True) takes them."""
        kept = (self.scores, self.use_times, self.candidates)
        return (self.table, dataclasses.astuple(self.place), self.num_slots, self.keys, self.slots, *kept)


class KeyedShard(Tensor):
    """This rank's rows of a dynamic table, or of a state of its optimizer, [keys, ...], with the keys that they belong
    to. A copy of the moment when it was made, unlike an ordinary table's entry in a state_dict.

    Results of operations are plain tensors. ``torch.load(weights_only=True)`` knows the type once this package is
    imported. torch.distributed.checkpoint does not take it: a rank cannot know how many keys it is to read.
    """

    # Operations see a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    held: Held

    @staticmethod
    def wrap(rows: Tensor, held: Held) -> KeyedShard:
        """`rows`, one for each key of `held`; the memory is shared."""
        shard = torch.Tensor._make_subclass(KeyedShard, rows)
        shard.held = held
        return shard

    @classmethod
    def of(cls, table: Any) -> KeyedShard:
        """The rows of a table, where it is."""
        with alone([table]):
            held = Held.by(table)
            return cls.wrap(Tensor.detach(table)[held.slots], held)

    @property
    def plain(self) -> Tensor:
        """The same memory as an ordinary tensor."""
        return Tensor.detach(self)

    def of_place(self, place: Placement) -> KeyedShard:
        """Those of the keys that a rank holds, at slots that follow one another."""
        held, which = self.held, place.mine(self.held.keys)
        keys, waiting = held.keys[which], held.candidates
        if waiting is not None:
            waiting = waiting[place.mine(waiting[:, 0])]
        scores = None if held.scores is None else held.scores[which]
        slots = torch.arange(len(keys), device=keys.device)
        some = dataclasses.replace(held, num_slots=len(keys), keys=keys, slots=slots, scores=scores, candidates=waiting)
        return self.wrap(self.plain[which.to(self.device)], some)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyedShard:
        if id(self) not in memo:
            memo[id(self)] = self.wrap(self.plain.clone(), self.held)
        copied: KeyedShard = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self.plain, self.held.plain())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"KeyedShard of dynamic table '{self.held.table}', of {len(self)} keys:\n{self.plain!r}"

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        raise not_distributed(self.held.table)

    def __create_chunk_list__(self) -> list[Any]:
        raise not_distributed(self.held.table)


def _keeping(name: str) -> Any:
    def method(self: KeyedShard, *args: Any, **options: Any) -> Tensor:
        return KeyedShard.wrap(getattr(Tensor, name)(self, *args, **options), self.held)

    method.__name__, method.__doc__ = name, f"As torch.Tensor.{name}; the result still knows its keys."
    return method


for _name in _KEPT:
    setattr(KeyedShard, _name, _keeping(_name))


def not_distributed(table: str) -> NotImplementedError:
    """What torch.distributed.checkpoint gets for a table."""
    return NotImplementedError(
        f"torch.distributed.checkpoint cannot hold the rows of dynamic table '{table}', whose keys are any integers; "
        "use sok.dump and sok.load, or torch.save on each rank"
    )


def _rebuild(rows: Tensor, held: tuple[Any, ...]) -> KeyedShard:
    table, place, *others = held
    read = Held(table, Placement(*place), *others)
    # torch.load(map_location=...) has moved all tensors.
    on_host = [None if each is None else each.cpu() for each in (read.use_times, read.candidates)]
    return KeyedShard.wrap(rows, dataclasses.replace(read, use_times=on_host[0], candidates=on_host[1]))


torch.serialization.add_safe_globals([_rebuild])


# --- tables -----------------------------------------------------------------------------------------------------------


def on_host(table: Any) -> KeyedShard:
    """The rows of a table as state_dict() has them."""
    shard = KeyedShard.of(table)
    return KeyedShard.wrap(shard.plain.cpu(), shard.held.on_host())


def for_table(given: Any, table: Any) -> KeyedShard:
    """What a dynamic table takes from its entry in a state_dict: that entry, or this rank's keys of one that has all.

    Raises ValueError, with the reason, for any other.
    """
    name, shard = table._sok_name, _of_rank(given, table)
    dynamic.refuse_store(table._stored, name, REFUSED)
    if shard.shape[1:] != table.shape[1:]:
        raise ValueError(
            f"dynamic table '{name}' has {table.shape[1]} elements a row, the state_dict {list(shard.shape[1:])}"
        )
    if len(shard) > table.capacity:
        raise ValueError(f"dynamic table '{name}' holds at most {table.capacity} rows, the state_dict has {len(shard)}")
    waiting = shard.held.candidates if table.most_candidates > 0 else None
    keys = shard.held.keys if waiting is None else torch.cat([shard.held.keys.cpu(), waiting[:, 0]])
    if not torch.equal(keys, keys.to(table.key_type).to(torch.int64)):
        raise ValueError(f"dynamic table '{name}' has keys of {table.key_type}, the state_dict larger ones")
    return shard


def _of_rank(given: Any, table: Any) -> KeyedShard:
    name, place = table._sok_name, table._placement
    if not isinstance(given, KeyedShard):
        raise ValueError(
            f"dynamic table '{name}' takes rows with their keys, as state_dict() has them; this one has a "
            f"{type(given).__name__} without keys. Between static and dynamic tables use sok.dump and sok.load"
        )
    saved = given.held.place
    if dataclasses.replace(saved, dimension=place.dimension) == place:
        return given
    if not saved.holds_everything:
        raise ValueError(
            f"dynamic table '{name}' ({place.mode}, rank {place.rank} of {place.num_ranks}): the state_dict has rows "
            f"of rank {saved.rank} of {saved.num_ranks}, {saved.mode}; load it on the same rank of as many ranks, or "
            "use sok.dump and sok.load"
        )
    return given.of_place(place)


@torch.no_grad()
def fill(table: Any, shard: KeyedShard) -> None:
    """Makes `shard` all that the table holds: each key at the slot that it had, if the table may have so many."""
    with alone([table]):
        _fill(table, shard)


def _fill(table: Any, shard: KeyedShard) -> None:
    core, held = table._core, shard.held
    scores = None if core.scores() is None else held.scores
    core.clear()
    if scores is not None:
        core.set_epoch(0)
    slots = _insert(core, held.keys.to(table.device), held.slots.to(table.device), held.num_slots, table.capacity)
    Tensor.detach(table)[slots] = shard.plain.to(table.device, table.dtype)
    if scores is not None:
        core.set_scores(slots, scores.to(table.device))
        if held.use_times is not None:
            core.set_use_times(held.use_times)
    if held.candidates is not None and table.most_candidates > 0:
        waiting = dynamic.most_wanted(held.candidates.numpy(), table.most_candidates)
        core.set_candidates(torch.from_numpy(waiting))


def _insert(core: Any, keys: Tensor, slots: Tensor, num_slots: int, capacity: int) -> Tensor:
    """Inserts keys into an empty table at these slots, others of which are free afterwards, so that who keeps states
    by slot finds them again; where the table has fewer, at any. Returns the slots.
    """
    if len(keys) == num_slots or num_slots > capacity:
        return _located(core, keys)
    candidates = torch.arange(num_slots, device=keys.device)
    free, unknown = torch.ones(2, num_slots, dtype=torch.bool, device=keys.device)
    unknown[keys[(keys >= 0) & (keys < num_slots)]] = False
    others = candidates[unknown][: num_slots - len(keys)]
    free[slots] = False
    everything = torch.empty_like(candidates)
    everything[~free], everything[free] = keys, others
    _located(core, everything)
    for piece in others.flip(0).split(dynamic.KEYS_OF_CALL):
        core.erase(piece)
    return slots


def _located(core: Any, keys: Tensor) -> Tensor:
    return torch.cat([core.locate(piece, True) for piece in keys.split(dynamic.KEYS_OF_CALL)])


# --- states of optimizers ---------------------------------------------------------------------------------------------


def share(table: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """`optimizer.state[table]` with what there is one of for each slot as KeyedShard, in host memory."""
    held: Held | None = None
    result = dict(state)
    with alone([table]):
        for key, value in state.items():
            if is_by_slot(value) and not isinstance(value, KeyedShard) and len(value) == len(table):
                if held is None:
                    held = dataclasses.replace(Held.by(table).on_host(), scores=None, use_times=None, candidates=None)
                result[key] = KeyedShard.wrap(value[held.slots.to(value.device)].cpu(), held)
    return result


def take(table: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """What `share` gave, for a table as it is placed now. ValueError for states of other rows, and without keys."""
    if int(state.get("step", 1)) == 0:  # nothing is in the states yet
        return dict(state)
    dynamic.refuse_store(table._stored, table._sok_name, REFUSED)
    return {key: _of_rank(value, table) if is_by_slot(value) else value for key, value in state.items()}


def is_by_slot(value: Any) -> bool:
    """Whether a state of an optimizer is one of those that there is one of for each slot."""
    return isinstance(value, Tensor) and value.dim() >= 1


def can_settle(table: Any, state: Mapping[str, Any]) -> bool:
    """Whether some states are no columns of a table, and it holds all keys of these."""
    if int(state.get("step", 1)) == 0:
        return False
    brought = [value for value in state.values() if is_by_slot(value) and not table.has_column(value)]
    keys = [value.held.keys for value in brought if isinstance(value, KeyedShard)]
    return bool(brought) and all(bool((table._core.locate(k.to(table.device), False) >= 0).all()) for k in keys)


def fill_column(table: Any, column: Tensor, values: Tensor) -> Tensor:
    """Puts a state of a dynamic table that load_state_dict or a copy brought into a new column, which it returns. What
    has no keys is by slot, of a table that may have had fewer.
    """
    if not isinstance(values, KeyedShard):
        if len(values) > len(column):
            raise ValueError(
                f"a state of dynamic table '{table._sok_name}' has {len(values)} slots, the table {len(column)}"
            )
        column[: len(values)] = values
        return column
    with alone([table]):
        slots = table._core.locate(values.held.keys.to(table.device), False)
        there = slots >= 0
        column[slots[there]] = values.plain.to(column.device, column.dtype)[there]
    return column
