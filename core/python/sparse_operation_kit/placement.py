# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a table live, and what they are at the start. Arithmetic only; shared by the frontends."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

DISTRIBUTED = -1
"""The `owner` of a table whose rows are dealt out over all ranks."""

ANY_KEY = -1
"""The `num_rows` of a table whose keys are any integers: it has an index, so its slots are no arithmetic."""

_LOCALIZED = re.compile(r"localized:(\d+)")

# The numbers of sok_initializer_kind (core/include/sok/initialize.h).
CONSTANT, UNIFORM, NORMAL, TRUNCATED_NORMAL = range(4)


def parse_mode(mode: str | None, num_ranks: int) -> int:
    """The owner that `mode` names: DISTRIBUTED for None or "distributed", g for "localized:g".

    Raises TypeError for another type and ValueError for another string or a rank outside [0, num_ranks).
    """
    if mode is None:
        return DISTRIBUTED
    if not isinstance(mode, str):
        raise TypeError(f'mode must be a string ("distributed" or "localized:RANK") or None, got {mode!r}')
    text = mode.strip().lower()
    if text == "distributed":
        return DISTRIBUTED
    match = _LOCALIZED.fullmatch(text)
    if match is None:
        raise ValueError(
            f'unknown mode {mode!r}: it must be "distributed" or "localized:RANK" with RANK in [0, {num_ranks})'
        )
    owner = int(match.group(1))
    if owner >= num_ranks:
        raise ValueError(
            f"mode {mode!r} names rank {owner}, but there are {num_ranks} ranks: it must be in [0, {num_ranks})"
        )
    return owner


def mode_of(owner: int) -> str:
    """The canonical name of the mode by which rank `owner` has a table, or by which all have rows (DISTRIBUTED)."""
    return "distributed" if owner == DISTRIBUTED else f"localized:{owner}"


@dataclasses.dataclass(frozen=True)
class Placement:
    """The part of a table that one rank holds: every `num_ranks`-th key, or all of them, or none.

    The slots of keys, and what is counted by them, are those of a static table; ValueError where num_rows is ANY_KEY.
    contents: 0 for a table by itself; what lies in a variable of a layer is in no other that has this number.
    stacked: the rows of the tables of a stack; none of a table by itself.
    """

    num_rows: int
    dimension: int
    owner: int = DISTRIBUTED
    num_ranks: int = 1
    rank: int = 0
    contents: int = dataclasses.field(default=0, compare=False)
    stacked: tuple[int, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.num_ranks and DISTRIBUTED <= self.owner < self.num_ranks):
            raise ValueError(f"no such placement: {self}")

    def _check_arithmetic(self) -> None:
        if self.num_rows == ANY_KEY:
            raise ValueError("the keys of a dynamic table are any integers: its index says which slots they have")

    @property
    def may_hold_rows(self) -> bool:
        """Whether this rank is one that has rows of the table."""
        return self.owner in (DISTRIBUTED, self.rank)

    @property
    def holds_everything(self) -> bool:
        """Whether this rank holds every key."""
        return self.num_ranks == 1 or self.owner == self.rank

    @property
    def mode(self) -> str:
        """The mode's canonical name."""
        return mode_of(self.owner)

    @property
    def first_key(self) -> int:
        """The global key of slot 0 of this rank."""
        self._check_arithmetic()
        return self.rank if self.owner == DISTRIBUTED else 0

    @property
    def key_stride(self) -> int:
        """How far the keys of neighbouring slots lie apart."""
        self._check_arithmetic()
        return self.num_ranks if self.owner == DISTRIBUTED else 1

    @property
    def local_rows(self) -> int:
        """How many rows this rank holds."""
        self._check_arithmetic()
        if self.owner == DISTRIBUTED:
            return max(0, -(-(self.num_rows - self.rank) // self.num_ranks))
        return self.num_rows if self.owner == self.rank else 0

    @property
    def local_shape(self) -> tuple[int, int]:
        """[rows of this rank, dimension]."""
        return (self.local_rows, self.dimension)

    @property
    def rows(self) -> slice:
        """Selects this rank's rows from an array of the whole table."""
        self._check_arithmetic()
        if self.owner == DISTRIBUTED:
            return slice(self.rank, None, self.num_ranks)
        return slice(0, self.num_rows if self.owner == self.rank else 0)

    def key_map(self, keys: Any) -> Any:
        """Global keys (numbers, arrays or tensors) -> slots on the rank that owns them."""
        self._check_arithmetic()
        return keys // self.num_ranks if self.owner == DISTRIBUTED else keys

    def owner_of(self, keys: Any) -> Any:
        """Global keys -> owning ranks."""
        return keys % self.num_ranks if self.owner == DISTRIBUTED else keys * 0 + self.owner

    def mine(self, keys: Any) -> Any:
        """Which global keys this rank holds."""
        return self.owner_of(keys) == self.rank

    def global_keys(self, slots: Any) -> Any:
        """Slots of this rank -> global keys."""
        return slots * self.key_stride + self.first_key

    def elsewhere(self, owner: int, num_ranks: int, rank: int) -> Placement:
        """What another rank, of another number, holds of the same table or stack."""
        place = Placement(self.num_rows, self.dimension, owner, num_ranks, rank)
        return _stack(self.stacked, place)[0] if self.stacked else place

    def tables(self) -> list[tuple[slice, Placement]]:
        """The slots of each table on this rank, and its placement by itself: one unless this is a stack."""
        if not self.stacked:
            return [(slice(0, self.local_rows), self)]
        members = (Member("", first, place) for first, place in _stack(self.stacked, self)[1])
        return [(member.slots, member.placement) for member in members]


@dataclasses.dataclass(frozen=True)
class Member:
    """A table within a stack: key k of it is key `first_key` + k of the stack.

    placement: that of a table by itself; its slots on this rank follow one another in the stack, from `first_slot` on.
    """

    name: str
    first_key: int
    placement: Placement

    @property
    def first_slot(self) -> int:
        """The slot in the stack of the member's slot 0 on this rank."""
        return self.first_key // self.placement.key_stride if self.placement.local_rows else 0

    @property
    def slots(self) -> slice:
        """The member's slots among those of the stack on this rank."""
        return slice(self.first_slot, self.first_slot + self.placement.local_rows)


def stack(
    rows: Mapping[str, int], dimension: int, owner: int = DISTRIBUTED, num_ranks: int = 1, rank: int = 0
) -> tuple[Placement, dict[str, Member]]:
    """Where several tables lie that are one to the stages: the stack, and its members by name.

    Members of a distributed stack begin at multiples of num_ranks, so that each rank holds of a member what it would
    hold of a table by itself; a rank whose part of a member is a row shorter than the first rank's leaves a slot empty.
    """
    whole, places = _stack(tuple(rows.values()), Placement(0, dimension, owner, num_ranks, rank))
    return whole, {name: Member(name, *each) for name, each in zip(rows, places, strict=True)}


def _stack(rows: tuple[int, ...], like: Placement) -> tuple[Placement, list[tuple[int, Placement]]]:
    """`stack` of tables of so many rows, placed like `like`; of each its first key and its own placement."""
    multiple = like.num_ranks if like.owner == DISTRIBUTED else 1
    members: list[tuple[int, Placement]] = []
    end = 0
    for num_rows in rows:
        first_key = -(-end // multiple) * multiple
        members.append((first_key, Placement(num_rows, like.dimension, like.owner, like.num_ranks, like.rank)))
        end = first_key + num_rows
    return Placement(end, like.dimension, like.owner, like.num_ranks, like.rank, stacked=rows), members


class Placed:
    """What a frontend's table says about where its rows live."""

    _placement: Placement

    @property
    def placement(self) -> Placement:
        """Which rows this rank holds."""
        return self._placement

    @property
    def mode(self) -> str:
        """ "distributed" or "localized:g"."""
        return self._placement.mode

    @property
    def target_gpu(self) -> int:
        """The rank that holds the whole table, or -1 when it is distributed."""
        return self._placement.owner

    @property
    def num_gpus(self) -> int:
        """The number of ranks that the table was made for."""
        return self._placement.num_ranks

    @property
    def global_gpu_id(self) -> int:
        """The rank that the table was made on."""
        return self._placement.rank

    def key_map(self, keys: Any) -> Any:
        """Global keys (a number, array or tensor) -> their slots on the rank that holds them."""
        return self._placement.key_map(keys)


@dataclasses.dataclass(frozen=True)
class Initializer:
    """How sok_initialize fills a table: kind and its two numbers, and a seed of this initializer's own,
    if it has one.
    """

    kind: int
    a: float = 0.0
    b: float = 0.0
    seed: int | None = None


_NAMED_INITIALIZERS = {
    "zeros": Initializer(CONSTANT, 0.0),
    "ones": Initializer(CONSTANT, 1.0),
    "uniform": Initializer(UNIFORM, -0.05, 0.05),
    "random": Initializer(UNIFORM, -0.05, 0.05),
    "random_uniform": Initializer(UNIFORM, -0.05, 0.05),
    "normal": Initializer(NORMAL, 0.0, 0.05),
    "random_normal": Initializer(NORMAL, 0.0, 0.05),
    "truncated_normal": Initializer(TRUNCATED_NORMAL, 0.0, 0.05),
}


def initializer_names() -> list[str]:
    """The strings that `parse_initializer` knows."""
    return sorted([*_NAMED_INITIALIZERS, "glorot_uniform"])


def parse_initializer(initializer: str | float, num_rows: int, dimension: int) -> Initializer:
    """The initializer that a string or number means, for a table of [num_rows, dimension].

    "uniform" and "random" are uniform in [-0.05, 0.05), "normal" has mean 0 and standard deviation 0.05, as in Keras;
    "glorot_uniform" is uniform within sqrt(6 / (num_rows + dimension)); a number, or a string that is one, is a
    constant. Raises ValueError for an unknown string, and for "glorot_uniform" where num_rows is ANY_KEY.
    """
    if isinstance(initializer, (int, float)) and not isinstance(initializer, bool):
        return Initializer(CONSTANT, float(initializer))
    text = str(initializer).strip().lower()
    if text in _NAMED_INITIALIZERS:
        return _NAMED_INITIALIZERS[text]
    if text == "glorot_uniform":
        if num_rows == ANY_KEY:
            raise ValueError('initializer "glorot_uniform" takes the number of rows, which a dynamic table lacks')
        limit = (6.0 / (num_rows + dimension)) ** 0.5
        return Initializer(UNIFORM, -limit, limit)
    try:
        return Initializer(CONSTANT, float(text))
    except ValueError:
        raise ValueError(
            f"unknown initializer {initializer!r}: it must be a number, an initializer object or one of "
            f"{initializer_names()}"
        ) from None


def table_name(name: str | None, counter: Iterator[int], kind: str = "static_Variable") -> str:
    """`name` without TensorFlow's output suffix, or for None the next name of this process's creation order, as SOK 2.x
    numbers tables, whose dumps name them so; `kind`: "static_Variable" or "dynamic_Variable".

    Raises TypeError for what is neither, ValueError for a text that UTF-8 cannot encode.
    """
    if name is None:
        return f"sok_{kind}_{next(counter)}"
    if not isinstance(name, str):
        raise TypeError(f"the name of a table must be a string, got {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the name of a table must be valid Unicode, got {name!r}") from None
    return name.split(":", 1)[0]


def name_counter() -> Iterator[int]:
    """Counts the tables that were made without a name; tables are made in the same order on every rank."""
    return itertools.count()


def table_seed(seed: int, name: str) -> int:
    """The seed of a table's initial rows: 64 bits of BLAKE2b over init's seed and the table's name.

    It is the same in both frontends, for every world size and on every run.
    """
    digest = hashlib.blake2b(f"{int(seed)}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def as_signed(seed: int) -> int:
    """A seed of 64 bits as the frontends' ops take it, whose integers are signed where the core's seeds are not."""
    return seed - 2**64 if seed >= 2**63 else seed
