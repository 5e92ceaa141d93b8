# SPDX-License-Identifier: Apache-2.0
"""plan(): for each table the place at which a step costs least, within the memory that ranks have.

Candidates are made in some dozens: which tables are replicated, cut into columns or by rows; what lies on one rank is
dealt out from the most expensive down, each to the rank with the least so far on which it fits. The costs of all are
estimated as a whole, those of the named strategies too, and the cheapest that fits is taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..placement import DISTRIBUTED
from . import costs, dealing, slicing
from .costs import REPLICATED, Costs, Pieces
from .request import CHOICES, Request, name_of
from .strategy import Assignment, Config
from .topology import Array

_WHOLE = 1  # of the numbers of columns that a candidate cuts tables into; others are REPLICATED and DISTRIBUTED
_TIMES = 12  # that a candidate is changed until it fits
_ROOM = 0.995  # of memory is filled: dealing counts what a rank asks for as the same everywhere


class PlanError(ValueError):
    """No place was found for some tables."""


def assign(configs: Sequence[Config], request: Request) -> Assignment:
    """Where each table is to lie. Raises PlanError where they do not fit."""
    search = _Search(configs, request)
    best: tuple[tuple[float, ...], Pieces] | None = None
    for pieces in search.candidates():
        found = costs.costs_of(search.work, pieces, request.topology)
        if not search.fits(found):
            continue
        rank = (found.step, sum(float(each.max()) for each in found.seconds.values()), len(pieces.table))
        if best is None or rank < best[0]:
            best = rank, pieces
    if best is None:
        raise PlanError(search.refused() or search.shortage())
    return _assignment(best[1], request.world_size)


def _assignment(pieces: Pieces, num_ranks: int) -> Assignment:
    columns: list[dict[int, int]] = [{} for _ in range(num_ranks)]
    replicated, by_rows = [], []
    order = np.argsort(pieces.table, kind="stable")
    for table, number, owner in zip(
        *(each[order].tolist() for each in (pieces.table, pieces.columns, pieces.owner)), strict=True
    ):
        if owner == REPLICATED:
            replicated.append(table)
        elif owner == DISTRIBUTED:
            by_rows.append(table)
        else:
            columns[owner][table] = columns[owner].get(table, 0) + number
    on_host = frozenset(pieces.table[pieces.on_host].tolist())
    return Assignment(tuple(replicated), tuple(by_rows), tuple(columns), on_host)


class _Search:
    """Candidates for the tables of a request."""

    def __init__(self, configs: Sequence[Config], request: Request) -> None:
        self._configs, self._request = configs, request
        self.work = request.workload(configs)
        self._num_ranks, self._topology = request.world_size, request.topology
        may = {choice: np.array([choice in each.choices for each in request.constraints], bool) for choice in CHOICES}
        if self._num_ranks == 1:
            self._may_whole = may["whole"] | may["columns"] | may["rows"]
            self._may_rows, self._may_replicate = np.zeros(len(configs), bool), ~self._may_whole
            self._most_columns = np.ones(len(configs), np.int64)
        else:
            # What is called with a rank's own inputs needs tables that lie on single ranks.
            self._may_rows = may["rows"] & request.dp_input
            self._may_replicate = may["replicated"] & request.dp_input
            self._may_whole = may["whole"]
            narrow = np.array([each.min_columns for each in request.constraints])
            most = np.clip(self.work.width // narrow, 1, self._num_ranks)
            self._most_columns = np.where(may["columns"], most, 1)
        self._host_only = np.array([each.on_host is True for each in request.constraints], bool)
        self._device_only = np.array([each.on_host is False for each in request.constraints], bool)
        tables = np.arange(len(configs))
        whole = Pieces(tables, self.work.width, np.zeros_like(tables), np.zeros(len(tables), bool))
        alone = costs.Lookup(self.work, whole, self._topology, on_host=False)
        self._seconds, self._bytes = alone.owner_seconds(), alone.owner_bytes()
        self._failed: set[int] = set()

    # --- memory -------------------------------------------------------------------------------------------------------

    @property
    def _device_room(self) -> float:
        return self._topology.device_memory - self._topology.reserved

    def fits(self, found: Costs) -> bool:
        """Whether each rank has room for what it would hold."""
        on_device = found.device_memory.max(initial=0.0) <= self._device_room
        return bool(on_device and found.host_memory.max(initial=0.0) <= self._topology.host_memory)

    def refused(self) -> str:
        """Which constraint cannot be met; empty: each can, by itself."""
        own_inputs = " with dp_input=False" * (not self._request.dp_input)
        nowhere = np.flatnonzero(self._allowed(np.full(len(self._configs), _WHOLE)) == 0)
        if len(nowhere):
            table = int(nowhere[0])
            constraint = self._request.constraints[table]
            narrowest = f", of {constraint.min_columns} at least" * ("columns" in constraint.choices)
            return (
                f"{name_of(self._configs[table], table)} cannot lie as its constraints say: "
                f"{', '.join(constraint.choices)}{narrowest}, on {self._num_ranks} ranks{own_inputs}"
            )
        most = int(self._most_columns.sum())
        if own_inputs and most < self._num_ranks:
            return (
                f"with dp_input=False each rank has a table or columns of one, and there are {most} for "
                f"{self._num_ranks} ranks"
            )
        return ""

    def shortage(self) -> str:
        """What is missing."""
        rows, width, work = self.work.rows.astype(float), self.work.width, self.work
        states = work.trained * costs.FLOAT * (work.states * rows * width + work.row_states * rows)
        weights = rows * width * work.itemsize
        held = np.where(self._host_only, 0.0, weights + states)
        host = (weights + states)[~self._device_only].sum()
        room, host_room = self._device_room * self._num_ranks, self._topology.host_memory * self._num_ranks
        largest = sorted(self._failed or range(len(rows)), key=lambda table: -float((weights + states)[table]))[:5]
        names = ", ".join(
            f"{name_of(self._configs[table], table)} ({int(rows[table])} x {int(width[table])}, "
            f"{(weights + states)[table] / 1e9:.3g} GB)"
            for table in largest
        )
        missing = max(weights.sum() + states.sum() - room - min(host, host_room), 0.0) / self._num_ranks
        more = f" Missing: at least {missing / 1e9:.3g} GB a rank." if missing else ""
        topology = self._topology
        return (
            f"the tables do not fit {self._num_ranks} rank(s) of '{topology.name}': they take {held.sum() / 1e9:.4g} "
            f"GB, of which {states.sum() / 1e9:.4g} GB are states of {self._request.optimizer}, and buffers; each rank "
            f"has {self._device_room / 1e9:.4g} GB on its device ({topology.reserved / 1e9:.4g} GB are reserved) and "
            f"{topology.host_memory / 1e9:.4g} GB in its host's memory.{more} The largest that found no place: {names}."
            " More ranks, an optimizer with fewer states, rows of 16 bits, or constraints that allow more help."
        )

    # --- candidates ---------------------------------------------------------------------------------------------------

    def candidates(self) -> Iterator[Pieces]:
        """Pieces that may fit."""
        seen = set()
        for ways in self._ways():
            ways = self._allowed(ways)
            if ways.tobytes() not in seen:
                seen.add(ways.tobytes())
                made = self._deal(ways)
                if made is not None:
                    yield made
        yield from self._named()

    def _ways(self) -> Iterator[Array]:
        """What is done with each table: REPLICATED, DISTRIBUTED, or cut into so many columns; [tables]."""
        number, ranks = len(self._configs), self._num_ranks
        whole = np.full(number, _WHOLE)
        yield whole
        if ranks == 1:
            return
        share = self._seconds.sum() / ranks
        small: list[Array] = [np.zeros(number, bool)]
        size = self.work.rows * self.work.width * costs.FLOAT
        small += [size <= limit for limit in (1 << 16, 1 << 20, 1 << 24) if (size <= limit).any()]
        for replicated in small:
            rest = self._seconds.sum() - self._seconds[replicated].sum()
            for part in (np.inf, 1.0, 0.5, 0.25):
                large = (self._seconds > part * max(rest, 1e-12) / ranks) & ~replicated
                pieces = np.ceil(self._seconds / max(part * share, 1e-12)) if part < np.inf else np.ones(number)
                columns = np.where(large, np.minimum(pieces, ranks), _WHOLE).astype(np.int64)
                yield np.where(replicated, REPLICATED, columns)
                yield np.where(replicated, REPLICATED, np.where(large, DISTRIBUTED, _WHOLE))
            yield np.where(replicated, REPLICATED, DISTRIBUTED)
        yield np.full(number, REPLICATED)

    def _allowed(self, ways: Array) -> Array:
        """The same as far as constraints allow it."""
        columns = np.clip(ways, 1, self._most_columns)
        refused = (columns == 1) & ~self._may_whole
        columns = np.where(refused, np.where(self._most_columns > 1, 2, 0), columns)
        columns = np.where((columns == 0) & self._may_rows, DISTRIBUTED, columns)
        columns = np.where((columns == 0) & self._may_replicate, REPLICATED, columns)
        result = np.where((ways == DISTRIBUTED) & self._may_rows, DISTRIBUTED, columns)
        replicated = (ways == REPLICATED) & self._may_replicate & ~self._host_only
        return np.where(replicated, REPLICATED, result)

    def _named(self) -> Iterator[Pieces]:
        """What the named strategies would do."""
        if self._num_ranks == 1 or self._host_only.any():
            return
        shapes = list(zip(self.work.rows.tolist(), self.work.width.tolist(), strict=True))
        for rule in dealing.RULES:
            ranks, cut = dealing.deal_columns(shapes, self._num_ranks, rule, None)
            whole = np.ones(len(shapes), bool)
            whole[list(cut)] = False
            narrow = any(
                columns < self._request.constraints[table].min_columns
                for each in ranks
                for table, columns in each.items()
            )
            if narrow or (whole & ~self._may_whole).any() or (~whole & (self._most_columns == 1)).any():
                continue
            if self._request.dp_input or all(ranks):
                yield Pieces.of([(t, c, rank, False) for rank, each in enumerate(ranks) for t, c in each.items()])

    # --- dealing ------------------------------------------------------------------------------------------------------

    def _deal(self, ways: Array) -> Pieces | None:
        """Gives each slice a rank; cuts and moves to host memory what does not fit. None: it does not."""
        if (ways == 0).any():
            return None
        on_host = self._offloaded(ways)
        for _ in range(_TIMES):
            pieces = self._pieces(ways, on_host)
            failed = self._give_ranks(pieces)
            if not failed and (self._request.dp_input or self._num_ranks == 1):
                return pieces
            if not failed:  # each rank is called with inputs of its own
                if len(np.unique(pieces.owner)) == self._num_ranks:
                    return pieces
                failed = {int(np.argmax(np.where(ways < self._most_columns, self._seconds, -1)))}
            self._failed = failed
            ways, changed = self._cut_more(ways, on_host, failed)
            if not changed:
                return None
        return None

    def _offloaded(self, ways: Array) -> Array:
        """[tables]: what goes to host memory, where not all have room on devices: what is used least for its bytes."""
        on_host = self._host_only.copy()
        on_device = ~on_host & (ways != REPLICATED)
        asked = 0.0
        for each in (False, True):
            asked += self._asked_bytes(ways, on_host == each)
        room = _ROOM * (self._device_room * self._num_ranks - asked * self._num_ranks)
        replicated = ways == REPLICATED
        room -= self._bytes[replicated].sum() * self._num_ranks
        used = self._bytes[on_device].sum()
        order = np.argsort(np.where(on_device & ~self._device_only, self._seconds / self._bytes, np.inf))
        for table in order.tolist():
            if used <= room or not on_device[table] or self._device_only[table]:
                break
            on_host[table] = True
            used -= self._bytes[table]
        return on_host

    def _asked_bytes(self, ways: Array, chosen: Array) -> float:
        """What each rank needs for its own lookups."""
        chosen = chosen & (ways != REPLICATED)
        tables = np.flatnonzero(chosen)
        if not len(tables):
            return 0.0
        owner = np.where(ways[tables] == DISTRIBUTED, DISTRIBUTED, 0)
        pieces = Pieces(tables, self.work.width[tables], owner, np.zeros(len(tables), bool))
        return float(costs.Lookup(self.work, pieces, self._topology, on_host=False).asked_bytes().sum())

    def _pieces(self, ways: Array, on_host: Array) -> Pieces:
        """All slices; those of single ranks have no owner yet, but 0."""
        rows = []
        for table, (way, width) in enumerate(zip(ways.tolist(), self.work.width.tolist(), strict=True)):
            host = bool(on_host[table])
            if way < 0:
                rows.append((table, width, way, host))
            else:
                rows += [(table, columns, 0, host) for columns in slicing.even_parts(width, min(way, width))]
        return Pieces.of(rows)

    def _give_ranks(self, pieces: Pieces) -> set[int]:
        """Sets `owner` of the slices of single ranks; returns the tables that found no room."""
        failed: set[int] = set()
        for on_host in (False, True):
            own = (pieces.owner != REPLICATED) & (pieces.on_host == on_host)
            if not own.any():
                continue
            lookup = costs.Lookup(self.work, pieces.where(own), self._topology, on_host)
            seconds, held = lookup.owner_seconds(), lookup.owner_bytes()
            spread = pieces.owner[own] == DISTRIBUTED
            room = self._topology.host_memory if on_host else self._device_room
            room = _ROOM * (room - float(lookup.asked_bytes().sum())) - held[spread].sum() / self._num_ranks
            if not on_host:
                whole = pieces.table[pieces.owner == REPLICATED]
                room -= float(self._bytes[whole].sum())
            places = np.flatnonzero(own)[~spread]
            if room < 0 and (spread.any() or len(places)):
                failed |= set(pieces.table[own].tolist())
                continue
            load = seconds[spread].sum() / self._num_ranks
            owners, missed = _least_first(seconds[~spread], held[~spread], self._num_ranks, load, room)
            pieces.owner[places] = owners
            failed |= set(pieces.table[places[missed]].tolist())
        return failed

    def _cut_more(self, ways: Array, on_host: Array, failed: Iterable[int]) -> tuple[Array, bool]:
        """Tables that did not fit in more columns, or by rows; then those that may go to host memory."""
        ways, changed = ways.copy(), False
        for table in failed:
            if 1 <= ways[table] < self._most_columns[table]:
                ways[table] = min(2 * ways[table], self._most_columns[table])
            elif ways[table] >= 1 and self._may_rows[table]:
                ways[table] = DISTRIBUTED
            elif not on_host[table] and not self._device_only[table]:
                on_host[table] = True
            else:
                continue
            changed = True
        return ways, changed


def _least_first(seconds: Array, held: Array, num_ranks: int, load: float, room: float) -> tuple[Array, Array]:
    """(rank of each slice, which found no room): from the most expensive down, each to the rank with the least."""
    owners, missed = np.zeros(len(seconds), np.int64), np.zeros(len(seconds), bool)
    ranks = [(load, 0.0, rank) for rank in range(num_ranks)]
    for i in np.lexsort((-held, -seconds)).tolist():
        full = []
        while ranks and ranks[0][1] + held[i] > room:
            full.append(heapq.heappop(ranks))
        if ranks:
            spent, used, rank = ranks[0]
            heapq.heapreplace(ranks, (spent + float(seconds[i]), used + float(held[i]), rank))
            owners[i] = rank
        else:
            missed[i] = True
        for each in full:
            heapq.heappush(ranks, each)
    return owners, missed
