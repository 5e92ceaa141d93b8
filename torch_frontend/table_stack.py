# SPDX-License-Identifier: Apache-2.0
"""TableStack: several tables that are one parameter, and so cost the host what one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from sparse_operation_kit import placement as _placement
from sparse_operation_kit.arguments import check_stack, check_table_dtype, of_table
from sparse_operation_kit.placement import Placement
from sparse_operation_kit.torch import runtime, saving
from sparse_operation_kit.torch.table_parameter import TableParameter, TableRows
from sparse_operation_kit.torch.variable import Initial, Variable, fill

_names = _placement.name_counter()


class Member(TableRows):
    """A table of a stack: this rank's rows of it [local rows, dimension], a tensor over the stack's memory.

    `dump`, `load`, `assign`, `export`, `track_changes` and the functions of changed rows and of serving take it as they
    take a :class:`Variable`. Gradients are the stack's.

    Attributes:
      stack: the TableStack, the parameter.
      placement, mode, key_map: those of the table by itself; `slots` are its rows among those of the stack.
    """

    # Operations see a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    stack: TableStack
    slots: slice

    @staticmethod
    def of(stack: TableStack, place: _placement.Member) -> Member:
        """The member as the stack's memory is now."""
        self = torch.Tensor._make_subclass(Member, Tensor.detach(stack)[place.slots])
        self.stack, self.slots = stack, place.slots
        self._sok_name, self._placement = place.name, place.placement
        return self

    @property
    def whole(self) -> TableStack:
        """See TableRows."""
        return self.stack

    def slots_of(self, keys: Tensor) -> Tensor:
        """See TableRows; among those of the stack."""
        return super().slots_of(keys) + self.slots.start

    @property
    def global_shape(self) -> torch.Size:
        """[rows, dimension] of the whole table."""
        return torch.Size((self._placement.num_rows, self._placement.dimension))

    @property
    def weight(self) -> Tensor:
        """This rank's rows as a plain tensor, the same memory."""
        return Tensor.detach(self)

    def as_shard(self) -> saving.TableShard:
        """As state_dict() gives a table by itself."""
        return saving.TableShard.wrap(self.weight, saving.Layout.of(self._sok_name, self._placement))


class Selection:
    """What :meth:`TableStack.choose` gives: some tables of a stack, for :func:`lookup_sparse` to look up in."""

    def __init__(self, stack: TableParameter | Exported, members: Sequence[_placement.Member]) -> None:
        self.stack = stack
        self.members = tuple(members)

    @property
    def _sok_name(self) -> str:
        return self.stack._sok_name


class TableStack(Variable):
    """Several tables of one dimension, dtype and mode, all in one ``torch.nn.Parameter``: to PyTorch, to an optimizer
    and to the host a hundred small tables are one.

    Its members keep what they would have by themselves: names, the range of their keys and the error for one outside
    it, initial rows, the rows that each rank holds, and their files in a dump, so that a dump of a stack loads into
    separate tables and the reverse. What an optimizer keeps is one state and one count of steps for all of them.

    :func:`lookup_sparse` takes flat ids for it, as TorchRec's KeyedJaggedTensor has them: keys of all members one after
    another, and offsets [members * batch + 1], those of the first member's bags first. It gives [batch, members *
    dimension], the members' vectors side by side.

    Args:
      tables: name -> (rows, dimension); the dimension is the same for all.
      initializer: as of :class:`Variable`: one for all, or name -> one.
      dtype, mode, trainable, device: as of :class:`Variable`, of all members.
      name: names the stack in messages that are about no single member. None: numbered in creation order.

    The parameter's shape is [local rows of all members, dimension]. With several ranks a member begins on all of them
    at the same slot, so a rank may hold a row that is none's.

    Raises:
      ValueError: no tables, different dimensions, and as :class:`Variable`, which see otherwise.
    """

    _members: dict[str, _placement.Member]

    def __new__(
        cls,
        tables: Mapping[str, Sequence[int]],
        *,
        initializer: Any = None,
        dtype: torch.dtype | None = None,
        mode: str | None = None,
        name: str | None = None,
        trainable: bool = True,
        device: torch.device | str | None = None,
    ) -> TableStack:
        state = runtime.get()
        owner = _placement.parse_mode(mode, state.num_ranks)
        text = _placement.table_name(name, _names, "TableStack")
        rows, dimension = check_stack(tables, text)
        if dtype is not None:
            check_table_dtype(dtype, text)
        place, members = _placement.stack(rows, dimension, owner, state.num_ranks, state.rank)
        shard = torch.zeros(place.local_shape, dtype=dtype or torch.float32, device=device)
        self = cls._of(shard, place, text, trainable, members)
        self._initial = Initial(initializer, state.arguments.seed)
        self.reset_parameters()
        return self

    def _fill(self, rows: Tensor, initial: Initial) -> None:
        rows.zero_()  # those that are no member's too
        for member in self._members.values():
            own = of_table(initial.initializer, member.name)
            fill(rows[member.slots], member.placement, "uniform" if own is None else own, initial.seed, member.name)

    def with_rows(self, rows: Tensor) -> Self:
        """See TableParameter."""
        stack = super().with_rows(rows)
        stack._members = self._members
        return stack

    @classmethod
    def _of(
        cls, rows: Tensor, place: Placement, name: str, trainable: bool, members: dict[str, _placement.Member]
    ) -> TableStack:
        self = cls._wrap(rows, place, name, trainable)
        self._members = members
        return self

    @property
    def members(self) -> dict[str, Member]:
        """The tables by name, in the order in which they were given."""
        return {name: Member.of(self, place) for name, place in self._members.items()}

    def member(self, name: str) -> Member:
        """One of them. KeyError for another name."""
        return Member.of(self, self._members[name])

    def choose(self, names: Sequence[str]) -> Selection:
        """What :func:`lookup_sparse` takes in place of the stack to look up some members, in any order, some several
        times: flat ids have as many bags for each of `names` then, and the output their vectors.

        KeyError for a name that is no member's, ValueError for no names.
        """
        if not names:
            raise ValueError(f"stack '{self._sok_name}': no members are named")
        return Selection(self, [self._members[name] for name in names])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(self)._of, (self.data, self._placement, self._sok_name, self.requires_grad, self._members)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        place = self._placement
        sizes = ", ".join(f"'{member.name}' {member.placement.num_rows}" for member in self._members.values())
        return (
            f"sok.TableStack '{self._sok_name}' of [rows, {place.dimension}] {self.mode}, rank {place.rank} of "
            f"{place.num_ranks}, rows: {sizes}\n{self.data!r}"
        )


class Described(NamedTuple):
    """What is known of a table without its memory."""

    name: str
    placement: Placement
    members: Sequence[_placement.Member]
    indexed: bool

    @classmethod
    def of(cls, table: TableParameter) -> Described:
        """A table or a stack."""
        return cls(table._sok_name, table._placement, members_of(table), table._index is not None)


class Exported:
    """A table to torch.export, which puts a plain tensor, `rows`, in the place of the parameter.

    Raises NotImplementedError for a dynamic table.
    """

    def __init__(self, described: Described, rows: Tensor) -> None:
        if described.indexed:
            raise NotImplementedError(
                f"dynamic table '{described.name}' cannot be in a program of torch.export: its rows have keys that "
                "change; sok.export_for_serving writes keys and rows"
            )
        self._sok_name, self._placement, self.members = described.name, described.placement, described.members
        self.rows = rows

    def choose(self, names: Sequence[str]) -> Selection:
        """As of a stack."""
        members = {member.name: member for member in self.members}
        return Selection(self, [members[name] for name in names])


def table_of(param: Any) -> Any:
    """The parameter that a lookup's `param` is about."""
    return param.stack if isinstance(param, Selection) else param


def members_of(param: Any) -> Sequence[_placement.Member]:
    """The members of a stack that a lookup's `param` names, in order; none where it is no stack."""
    if isinstance(param, Selection):
        return param.members
    return tuple(param._members.values()) if isinstance(param, TableStack) else ()


def refuse_stack(var: Any, function: str) -> None:
    """Raises TypeError for a stack, where a function takes one table."""
    if isinstance(var, (TableStack, Selection)):
        raise TypeError(f"{function} takes one table: a member of the stack, stack.members[name]")
