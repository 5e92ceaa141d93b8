# SPDX-License-Identifier: Apache-2.0
"""What a plan costs, for people and programs: bytes and seconds of each rank, as text, JSON and a picture."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..placement import DISTRIBUTED
from . import costs
from .costs import KINDS, REPLICATED, STAGES, Costs, Pieces
from .request import Request, itemsize_of, name_of
from .strategy import DistEmbeddingStrategy
from .topology import Array

_SHOWN_RANKS = 16
_SHOWN_TABLES = 20
_COLORS = ("#012a4a", "#2a6f97", "#61a5c2", "#a9d6e5", "#bc6c25", "#dda15e", "#e9c46a", "#7f4f24", "#b8bcc2")


def pieces_of(strategy: DistEmbeddingStrategy) -> Pieces:
    """What lies where."""
    found = [
        (table, config["output_dim"], REPLICATED, False)
        for table, config in zip(strategy.table_groups[0], strategy.dp_configs, strict=True)
    ]
    for rank, pieces in enumerate(strategy.local_pieces):
        variables = strategy.local_configs[rank]
        found += [(p.table, p.columns, rank, variables[p.variable]["cpu_offload"]) for p in pieces]
    for table, config in zip(strategy.table_groups[2], strategy.row_sliced_configs[0], strict=True):
        found.append((table, config["output_dim"], DISTRIBUTED, config.get("cpu_offload", False)))
    return Pieces.of(found)


def report_of(strategy: DistEmbeddingStrategy, request: Request) -> Report:
    """What a step of this strategy costs."""
    pieces = pieces_of(strategy)
    configs = strategy.global_configs
    tables = []
    order = np.argsort(pieces.table, kind="stable")
    ends = np.searchsorted(pieces.table[order], np.arange(len(configs) + 1))
    for table, config in enumerate(configs):
        own = pieces.where(order[ends[table] : ends[table + 1]])
        size = config["input_dim"] * config["output_dim"] * itemsize_of(config)
        tables.append(
            TableRow(
                table,
                name_of(config, table),
                config["input_dim"],
                config["output_dim"],
                size,
                tuple(own.owner.tolist()),
                tuple(own.columns.tolist()),
                bool(own.on_host.any()),
            )
        )
    found = costs.costs_of(request.workload(configs), pieces, request.topology)
    return Report(strategy.strategy, request, found, tuple(tables))


@dataclasses.dataclass(frozen=True)
class TableRow:
    """Where a table lies. owners, columns: of its pieces, as in `Pieces`. size: bytes of its rows."""

    number: int
    name: str
    rows: int
    width: int
    size: int
    owners: tuple[int, ...]
    columns: tuple[int, ...]
    on_host: bool

    @property
    def where(self) -> str:
        """In words."""
        if self.owners == (REPLICATED,):
            text = "replicated"
        elif self.owners == (DISTRIBUTED,):
            text = "rows on all ranks"
        elif len(self.owners) == 1:
            text = f"rank {self.owners[0]}"
        else:
            parts = [f"{columns} on {owner}" for columns, owner in zip(self.columns, self.owners, strict=True)]
            text = "columns: " + ", ".join(parts[:6]) + (f", ... ({len(parts)} ranks)" if len(parts) > 6 else "")
        return text + (", in host memory" if self.on_host else "")


@dataclasses.dataclass(frozen=True)
class Report:
    """What a strategy costs. `print` it; `to_json()`; `picture(path)`.

    strategy: its name. request: what it was estimated for. costs: the estimate. measured: of a layer that exists, what
    was measured beside it: "device_bytes" and "host_bytes", [ranks], of its tables; "lookup", seconds.
    """

    strategy: str
    request: Request
    costs: Costs
    tables: tuple[TableRow, ...]
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def step(self) -> float:
        """Estimated seconds of a step, the tables' part of it."""
        return self.costs.step

    @property
    def lookup(self) -> float:
        """Estimated seconds of a lookup."""
        stages = "route", "exchange of keys", "gather", "exchange of rows", "combine"
        return sum(float(self.costs.seconds[stage].max()) for stage in stages)

    @property
    def fits(self) -> bool:
        """Whether each rank has room for what it would hold."""
        return not self.shortages()

    def shortages(self) -> list[str]:
        """What is missing, rank by rank."""
        topology = self.request.topology
        found = []
        for what, held, room in (
            ("on its device", self.costs.device_memory, topology.device_memory - topology.reserved),
            ("in host memory", self.costs.host_memory, topology.host_memory),
        ):
            for rank in np.flatnonzero(held > room).tolist():
                found.append(
                    f"rank {rank} lacks {_size(held[rank] - room)} {what}: {_size(held[rank])} of {_size(room)}"
                )
        return found

    @property
    def balance(self) -> dict[str, float]:
        """The mean of the ranks over their maximum, 1.0 where all have as much: of "time" and of "memory"."""
        time = np.asarray(sum(self.costs.seconds.values()))
        return {"time": _balance(time), "memory": _balance(self.costs.device_memory)}

    # --- for programs -------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data. Seconds and bytes."""
        request, found = self.request, self.costs
        ranks = [
            {
                "device_bytes": {kind: float(found.device_bytes[kind][rank]) for kind in KINDS},
                "host_bytes": {kind: float(found.host_bytes[kind][rank]) for kind in KINDS},
                "seconds": {stage: float(found.seconds[stage][rank]) for stage in STAGES},
            }
            for rank in range(request.world_size)
        ]
        tables = [
            {
                "table": row.number,
                "name": row.name,
                "rows": row.rows,
                "width": row.width,
                "bytes": row.size,
                "where": row.where,
                "pieces": [
                    {"rank": owner if owner >= 0 else "all", "columns": columns}
                    for owner, columns in zip(row.owners, row.columns, strict=True)
                ],
                "on_host": row.on_host,
            }
            for row in self.tables
        ]
        return {
            "strategy": self.strategy,
            "world_size": request.world_size,
            "batch_size": request.batch_size,
            "optimizer": request.optimizer,
            "topology": request.topology.name,
            "step_seconds": self.step,
            "host_seconds": found.host_seconds,
            "fits": self.fits,
            "shortages": self.shortages(),
            "balance": self.balance,
            "ranks": ranks,
            "tables": tables,
            "measured": {key: np.asarray(value).tolist() for key, value in self.measured.items()},
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1)

    # --- for people ---------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        request, topology = self.request, self.request.topology
        yield (
            f"Strategy '{self.strategy}': {len(self.tables)} tables on {request.world_size} rank(s) of "
            f"'{topology.name}', batch {request.batch_size}, {request.optimizer}"
        )
        balance = self.balance
        yield (
            f"Estimated: {_milliseconds(self.step)} a step, {request.batch_size / self.step / 1e6:.3g} million "
            f"samples/s; balance of time {balance['time']:.2f}, of memory {balance['memory']:.2f}"
        )
        yield from self.shortages()[:_SHOWN_RANKS]
        yield ""
        yield from self._rank_lines()
        yield ""
        yield from self._stage_lines()
        yield ""
        yield from self._table_lines()
        if self.measured:
            yield ""
            yield from self._measured_lines()

    def _rank_lines(self) -> Iterator[str]:
        found = self.costs
        time = np.asarray(sum(found.seconds.values()))
        total = found.device_memory
        room = self.request.topology.device_memory - self.request.topology.reserved
        columns: list[tuple[str, Array, Any]] = [
            *((kind, found.device_bytes[kind], _size) for kind in KINDS),
            ("device", total, _size),
            ("of room", total / room if room else total * 0, lambda part: f"{100 * part:.0f}%"),
            ("in host memory", found.host_memory, _size),
            ("time", time, _milliseconds),
        ]
        rows = [["rank", *(name for name, _, _ in columns)]]
        ranks = range(self.request.world_size)
        shown: Sequence[int] = ranks
        if len(ranks) > _SHOWN_RANKS:
            shown = sorted(np.argsort(-time, kind="stable")[: _SHOWN_RANKS // 2].tolist())
        rows += [[str(rank), *(write(values[rank]) for _, values, write in columns)] for rank in shown]
        if len(ranks) > len(shown):
            rows.append(["...", *([""] * len(columns))])
        for name, of in (("least", np.min), ("mean", np.mean), ("most", np.max)):
            if len(ranks) > 1:
                rows.append([name, *(write(of(values)) for _, values, write in columns)])
        yield from _columns(rows)

    def _stage_lines(self) -> Iterator[str]:
        rows = [["stage", "mean", "slowest rank"]]
        for stage in STAGES:
            each = self.costs.seconds[stage]
            if each.any():
                rows.append(
                    [stage, _milliseconds(each.mean()), f"{_milliseconds(each.max())} (rank {int(each.argmax())})"]
                )
        rows.append(["the host, beside", "", _milliseconds(self.costs.host_seconds)])
        yield from _columns(rows)

    def _table_lines(self) -> Iterator[str]:
        rows = [["table", "rows x width", "bytes", "where"]]
        order = sorted(self.tables, key=lambda row: -row.size)
        for row in order[:_SHOWN_TABLES]:
            rows.append([row.name, f"{row.rows} x {row.width}", _size(row.size), row.where])
        yield from _columns(rows)
        if len(order) > _SHOWN_TABLES:
            yield f"... and {len(order) - _SHOWN_TABLES} smaller ones (to_dict has all)"

    def _measured_lines(self) -> Iterator[str]:
        rows = [["", "estimated", "measured"]]
        for key, values, what in (
            ("device_bytes", self.costs.device_bytes, "on the device"),
            ("host_bytes", self.costs.host_bytes, "in host memory"),
        ):
            if key in self.measured:
                most = _size(values["weights"].max())
                rows.append([f"tables {what}, the rank with the most", most, _size(np.max(self.measured[key]))])
        if "lookup" in self.measured:
            rows.append(["lookup", _milliseconds(self.lookup), _milliseconds(self.measured["lookup"])])
        yield from _columns(rows)

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draws bytes and time of each rank; the suffix of the path says in which format. Needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        ranks = np.arange(self.request.world_size)
        found, topology = self.costs, self.request.topology
        memory = {f"{kind}": found.device_bytes[kind] / 1e9 for kind in KINDS}
        if found.host_memory.any():
            memory["in host memory"] = found.host_memory / 1e9
        _bars(left, ranks, memory, "GB a rank", "Memory")
        room = (topology.device_memory - topology.reserved) / 1e9
        top = max(float(found.device_memory.max()), float((found.device_memory + found.host_memory).max())) / 1e9
        if room < 3 * top:
            left.axhline(room, color="#9b2226", linewidth=1, linestyle="--", label="room on the device")
        left.set_ylim(0, 1.35 * max(top, room if room < 3 * top else 0.0, 1e-9))
        stages = {stage: each * 1e3 for stage, each in found.seconds.items() if each.any()}
        _bars(right, ranks, stages, "ms a step", f"Time, together {_milliseconds(self.step)}")
        right.set_ylim(0, 1.5 * max(float(sum(found.seconds.values()).max()) * 1e3, 1e-9))  # type: ignore[union-attr]
        for axis in (left, right):
            axis.legend(fontsize=7, ncols=3, loc="upper left", frameon=False)
        figure.suptitle(
            f"'{self.strategy}': {len(self.tables)} tables on {self.request.world_size} rank(s) of '{topology.name}', "
            f"batch {self.request.batch_size}, {self.request.optimizer} (estimated)",
            fontsize=10,
        )
        figure.savefig(os.fspath(path), dpi=150)


def _bars(axis: Any, ranks: Array, parts: Mapping[str, Array], label: str, title: str) -> None:
    below = np.zeros(len(ranks))
    for (name, values), color in zip(parts.items(), _COLORS, strict=False):
        axis.bar(ranks, values, 0.8, bottom=below, label=name, color=color)
        below = below + values
    axis.set_xlabel("rank")
    axis.set_ylabel(label)
    axis.set_title(title, fontsize=10)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.spines[["top", "right"]].set_visible(False)


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        last = len(row) - 1
        texts = [
            each.ljust(widths[0]) if i == 0 else each if i == last and not each[:1].isdigit() else each.rjust(widths[i])
            for i, each in enumerate(row)
        ]
        yield "  ".join(texts).rstrip()


def _balance(values: Array) -> float:
    return float(values.mean() / values.max()) if values.max() > 0 else 1.0


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
