# SPDX-License-Identifier: Apache-2.0
"""What tables cost where they lie: seconds of each stage of a training step and bytes, for each rank.

The stages are those of docs/ARCHITECTURE.md. A rank's time of a stage follows from the rows that it reads and writes
at random, the bytes that it streams and sends, and the figures of a `Topology`. Between exchanges ranks wait for each
other, so a stage lasts as long as it does on the slowest one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..placement import DISTRIBUTED
from . import distinct
from .topology import Memory, Topology

Array = np.ndarray[Any, Any]

REPLICATED = -2
"""The `owner` of a table that each rank holds whole."""

STAGES = (
    "route",
    "exchange of keys",
    "gather",
    "exchange of rows",
    "combine",
    "spread",
    "exchange of gradients",
    "apply",
    "replicated",
)
"""What a step consists of, in this order; "spread" is the weight gradient's way back from bags to rows."""

KINDS = ("weights", "states", "buffers")
"""What memory is for: tables, what optimizers keep for them, and what a step needs beside them."""

_KEY = 8  # bytes
FLOAT = 4  # rows travel as float32, and states are


@dataclasses.dataclass(frozen=True)
class Workload:
    """Tables, and what a step asks of them; arrays [tables].

    rows, width, itemsize: of the tables. keys, bags: of a rank's batch, for all inputs of a table. exponents: of the
    power law of the ids. trained: 0 or 1. states: float32 that the optimizer keeps for an element; row_states: for a
    row. num_ranks.
    """

    rows: Array
    width: Array
    itemsize: Array
    keys: Array
    bags: Array
    exponents: Array
    trained: Array
    states: float
    row_states: float
    num_ranks: int

    def __post_init__(self) -> None:
        own = distinct.expected_rows(self.rows, self.keys, self.exponents)
        together = (
            own
            if self.num_ranks == 1
            else distinct.expected_rows(self.rows, self.keys * self.num_ranks, self.exponents)
        )
        object.__setattr__(self, "distinct", own)
        object.__setattr__(self, "distinct_of_all", together)

    distinct: Array = dataclasses.field(init=False)
    """Different rows that a rank's batch names."""
    distinct_of_all: Array = dataclasses.field(init=False)
    """Different rows that the batches of all ranks name."""


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What lies where; arrays [pieces]: the table, the columns, the owner (a rank, DISTRIBUTED or REPLICATED), and
    whether it is in host memory.
    """

    table: Array
    columns: Array
    owner: Array
    on_host: Array

    @staticmethod
    def of(rows: Sequence[tuple[int, int, int, bool]]) -> Pieces:
        """Of (table, columns, owner, on_host)."""
        table, columns, owner, on_host = np.array(rows, np.int64).reshape(-1, 4).T
        return Pieces(table, columns, owner, on_host.astype(bool))

    def where(self, chosen: Array) -> Pieces:
        """Some of them."""
        return Pieces(self.table[chosen], self.columns[chosen], self.owner[chosen], self.on_host[chosen])


@dataclasses.dataclass(frozen=True)
class Costs:
    """seconds: stage -> [ranks]. device_bytes, host_bytes: kind -> [ranks]. host_seconds: what the host's processor
    takes for a step, beside the device.
    """

    seconds: dict[str, Array]
    device_bytes: dict[str, Array]
    host_bytes: dict[str, Array]
    host_seconds: float

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return max(sum(float(each.max()) for each in self.seconds.values()), self.host_seconds)

    @property
    def device_memory(self) -> Array:
        """Bytes of each rank."""
        return np.asarray(sum(self.device_bytes.values()))

    @property
    def host_memory(self) -> Array:
        """Bytes of each rank."""
        return np.asarray(sum(self.host_bytes.values()))


def costs_of(work: Workload, pieces: Pieces, topology: Topology) -> Costs:
    """What a step costs, and what is held."""
    ranks = work.num_ranks
    seconds = {stage: np.zeros(ranks) for stage in STAGES}
    device_bytes = {kind: np.zeros(ranks) for kind in KINDS}
    host_bytes = {kind: np.zeros(ranks) for kind in KINDS}
    whole = pieces.owner == REPLICATED
    for on_host in (False, True):
        own = pieces.where(~whole & (pieces.on_host == on_host))
        if len(own.table):
            each = Lookup(work, own, topology, on_host)
            each.add_seconds(seconds)
            each.add_bytes(host_bytes if on_host else device_bytes)
    if whole.any():
        _add_replicated(work, pieces.where(whole), topology, seconds, device_bytes)
    lookups = np.count_nonzero(~whole)
    host_seconds = topology.step + topology.lookup * lookups + topology.replicated * np.count_nonzero(whole)
    return Costs(seconds, device_bytes, host_bytes, host_seconds)


class Lookup:
    """The tables of one lookup: those of the device, or those in host memory."""

    def __init__(self, work: Workload, pieces: Pieces, topology: Topology, on_host: bool) -> None:
        self._topology, self._on_host, self._ranks = topology, on_host, work.num_ranks
        self._memory: Memory = topology.host if on_host else topology.device
        table = pieces.table
        self._owner, self._all = pieces.owner, pieces.owner == DISTRIBUTED
        self._rows, self._itemsize = work.rows[table].astype(float), work.itemsize[table]
        self._columns = pieces.columns.astype(float)
        self._keys, self._bags = work.keys[table], work.bags[table]
        self._distinct, self._together = work.distinct[table], work.distinct_of_all[table]
        self._trained = work.trained[table]
        self._states, self._row_states = work.states, work.row_states
        self._wide = FLOAT * self._columns  # of a row that travels, or of a pooled vector
        parts = self._bags * np.where(self._all, self._ranks, 1)
        # As sok_split_batch decides.
        bytes_of_parts = _KEY * self._keys + parts * (_KEY + 2 * self._wide)
        bytes_of_rows = np.minimum(self._keys, self._rows) * (_KEY + 2 * self._wide)
        self._pooled = (bytes_of_parts < 0.5 * bytes_of_rows) & (self._ranks > 1)
        # What a rank asks of all owners of a piece: keys, and vectors that come back.
        self._asked = np.where(self._pooled, self._keys + parts, self._distinct)
        self._vectors = np.where(self._pooled, parts, self._distinct)
        sent = np.where(self._pooled | (self._ranks == 1), self._keys, self._distinct)
        self._came = sent * self._ranks  # of all ranks, to the owners of a piece
        self._row = self._itemsize * self._columns

    def _by_owner(self, amounts: Array) -> Array:
        """[ranks]: sums of amounts [pieces] at their owners; of those on all ranks each has its share."""
        own = ~self._all
        each = np.bincount(self._owner[own], amounts[own], self._ranks)
        return np.asarray(each + amounts[self._all].sum() / self._ranks)

    def _exchange(self, amounts: Array) -> Array:
        """Seconds for bytes that each rank exchanges with the owners of the pieces, [pieces], in one direction."""
        at_owner = self._by_owner(amounts)
        served = at_owner * (self._ranks - 1)  # between an owner and the other ranks
        asked = at_owner.sum() - at_owner  # between a rank and the other owners
        most = np.maximum(served, asked)
        topology = self._topology
        near = min(topology.ranks_per_host or self._ranks, self._ranks)
        far = (self._ranks - near) / max(self._ranks - 1, 1)
        link, latency = topology.link, topology.link_latency
        if self._on_host:
            link, latency = min(link, topology.host_link), topology.host_latency
        seconds = latency + (1 - far) * most / link
        if near < self._ranks:
            seconds = seconds + topology.network_latency + far * most / topology.network
        return np.asarray(seconds)

    def _pool(self, keys: Array, distinct: Array, row: Array, out: Array) -> Array:
        """Reading rows of `keys`, of which `distinct` differ, and writing `out` bytes."""
        memory = self._memory
        again = np.maximum(keys - distinct, 0)
        at_random = distinct * memory.read.seconds(row) + again * memory.cached.seconds(row)
        return np.asarray(at_random + (_KEY * keys + out) / memory.stream) / memory.reached

    def _sort(self, keys: Array) -> Array:
        passes = np.ceil(np.log2(max(self._rows.sum(), 2)) / 8)
        return np.asarray(keys * passes / self._memory.sort) / self._memory.reached

    def add_seconds(self, seconds: dict[str, Array]) -> None:
        """Adds the seconds of each stage and rank."""
        memory, topology = self._memory, self._topology
        launch = topology.launch
        if self._ranks == 1:
            pooled = self._pool(self._keys, self._distinct, self._row, self._wide * self._bags)
            seconds["gather"] += launch + self._by_owner(pooled)
        else:
            # All ranks ask alike: what happens at the requester is the same on each.
            sorted_keys = np.where(self._pooled, 0.4, 1.0) * self._sort(self._keys)
            moved = (48 * self._keys + _KEY * self._asked) / memory.stream
            seconds["route"] += topology.agree + 3 * launch + (sorted_keys + moved).sum()
            seconds["exchange of keys"] += self._exchange(_KEY * self._asked)
            seconds["gather"] += 2 * launch + self._by_owner(self._gather())
            seconds["exchange of rows"] += self._exchange(self._wide * self._vectors)
            streamed = (self._vectors + self._bags) * self._wide / memory.stream
            apart = self._pool(self._keys, self._distinct, self._wide, self._wide * self._bags)
            combine = launch + np.where(self._pooled, streamed, apart).sum()
            seconds["combine"] += combine
            seconds["spread"] += combine
            seconds["exchange of gradients"] += self._exchange(self._wide * self._vectors)
        seconds["apply"] += 3 * launch + self._by_owner(self._apply())
        if self._on_host:
            there = (self._wide * self._bags + _KEY * self._keys).sum() / topology.pcie
            seconds["combine"] += there
            seconds["spread"] += there

    def _gather(self) -> Array:
        """What came of all ranks, pooled or as rows; [pieces], at their owners together."""
        out = self._wide * self._vectors * self._ranks
        return self._pool(self._came, np.minimum(self._together, self._came), self._row, out)

    def _apply(self) -> Array:
        """Gradients summed by row, and the rows and states stepped; [pieces], at their owners together."""
        memory = self._memory
        sums = self._sort(self._came) + 32 * self._came / memory.stream
        gradients = np.minimum(self._bags if self._ranks == 1 else self._vectors * self._ranks, self._came)
        sums = sums + self._pool(self._came, gradients, self._wide, np.zeros_like(self._came))
        steps = memory.update.seconds(self._row) + self._states * memory.update.seconds(self._wide)
        steps = steps + self._row_states * memory.update.seconds(np.full_like(self._row, 32.0))
        changed = np.minimum(self._together, self._came)
        return np.asarray(self._trained * (sums + changed * steps / memory.reached))

    def owner_seconds(self) -> Array:
        """[pieces]: what a step costs their owners, exchanges included."""
        link = min(self._topology.link, self._topology.host_link) if self._on_host else self._topology.link
        served = 2 * (self._ranks - 1) * self._wide * self._vectors / link
        return np.asarray(self._gather() + served + self._apply())

    def owner_bytes(self) -> Array:
        """[pieces]: what their owners hold of them."""
        weights, states = self._held()
        return np.asarray(weights + states + self._buffers()[1])

    def asked_bytes(self) -> Array:
        """[pieces]: what each rank that looks up needs for them."""
        return self._buffers()[0]

    def _held(self) -> tuple[Array, Array]:
        elements = self._rows * self._columns
        states = self._states * elements + self._row_states * self._rows
        return elements * self._itemsize, FLOAT * states * self._trained

    def _buffers(self) -> tuple[Array, Array]:
        """[pieces]: of each rank that asks, and of owners."""
        at_requester = 48 * self._keys + 2 * self._wide * self._bags
        at_owner = 32 * self._came
        if self._ranks > 1:
            at_requester = at_requester + 2 * self._wide * self._vectors
            at_owner = at_owner + 2 * self._wide * self._vectors * self._ranks
        return at_requester, at_owner

    def add_bytes(self, held: dict[str, Array]) -> None:
        """Adds what each rank holds."""
        weights, states = self._held()
        held["weights"] += self._by_owner(weights)
        held["states"] += self._by_owner(states)
        at_requester, at_owner = self._buffers()
        held["buffers"] += at_requester.sum() + self._by_owner(at_owner)


def _add_replicated(
    work: Workload, pieces: Pieces, topology: Topology, seconds: dict[str, Array], held: dict[str, Array]
) -> None:
    """Tables that the framework looks up by itself, with gradients as large as they are, which are averaged."""
    table, ranks, memory = pieces.table, work.num_ranks, topology.device
    size = (work.rows[table] * work.width[table]).astype(float)
    keys, bags, wide = work.keys[table], work.bags[table], FLOAT * work.width[table].astype(float)
    read = memory.cached.seconds(wide) * keys + (wide * bags + _KEY * keys) / memory.stream
    trained = work.trained[table]
    gradient = FLOAT * size * trained
    step = (4 + 2 * work.states) * gradient / memory.stream
    hosts = ranks > (topology.ranks_per_host or ranks)
    link = min(topology.link, topology.network) if hosts else topology.link
    averaged = 2 * (ranks - 1) / ranks * gradient.sum() / link
    seconds["gather"] += read.sum()
    seconds["replicated"] += (trained * (2 * read + step)).sum() + averaged
    held["weights"] += (size * work.itemsize[table]).sum()
    held["states"] += (gradient * work.states).sum() + (FLOAT * work.rows[table] * trained).sum() * work.row_states
    held["buffers"] += (gradient + 2 * wide * bags).sum()
