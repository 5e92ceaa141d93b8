# SPDX-License-Identifier: Apache-2.0
"""plan(): where tables lie so that a step costs least, and what that costs."""

from __future__ import annotations

import dataclasses
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..checkpoint.group import Group, agree
from ..core import DeviceProperties
from ..dynamic import host_memory_bytes
from .report import Report, report_of
from .request import BATCH_SIZE, PerInput, Request
from .search import assign
from .strategy import PLANNED, Assignment, Config, DistEmbeddingStrategy, check_thresholds, configs_of
from .topology import CPU, Topology, topology_of_gpu

_RESERVED = 0.1
"""The part of a GPU's memory that is kept for the rest of a model."""

_OF_HOST = 0.8
"""The part of a host's memory that its ranks may take."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `plan` found. Give it to a DistributedEmbedding as its `strategy`.

    strategy: where everything lies. request: what it was made for.
    """

    strategy: DistEmbeddingStrategy
    request: Request

    def report(self) -> Report:
        """What each rank will hold, and how long the stages of a step will take."""
        return report_of(self.strategy, self.request)

    def of_layer(
        self, embeddings: Sequence[Any], world_size: int, tables_of: Sequence[int] | None, dp_input: bool
    ) -> Plan:
        """The same for a layer of these tables. Raises ValueError where it was made for others."""
        if self.request.world_size != world_size:
            raise ValueError(f"the plan is for {self.request.world_size} ranks, and there are {world_size}: plan again")
        if tables_of is not None and tuple(tables_of) != self.request.tables_of:
            raise ValueError("the plan is for another input_table_map")
        if self.request.dp_input and not dp_input:
            raise ValueError("the plan is for dp_input=True")
        configs = configs_of(embeddings)
        mine = [_shape(config) for config in self.strategy.global_configs]
        if [_shape(config) for config in configs] != mine:
            raise ValueError(f"the plan is for {len(mine)} tables of other sizes than these {len(configs)}")
        return _plan_of(configs, self.request, self.strategy.assignment)

    def to_config(self) -> dict[str, Any]:
        """Plain data, of which `from_config` makes it again."""
        assignment = self.strategy.assignment
        assert assignment is not None
        return {"assignment": _plain(assignment), "request": self.request.to_config()}

    @staticmethod
    def from_config(config: Mapping[str, Any], embeddings: Sequence[Any], world_size: int) -> Plan:
        """What `to_config` gave; planned anew where there is another number of ranks."""
        configs = configs_of(embeddings)
        request = Request.from_config(config["request"])
        if request.world_size == world_size:
            return _plan_of(configs, request, _assignment(config["assignment"]))
        request = dataclasses.replace(request, world_size=world_size)
        return _plan_of(configs, request, assign(configs, request))


def plan(
    embeddings: Sequence[Any],
    world_size: int,
    *,
    batch_size: int = BATCH_SIZE,
    hotness: PerInput = 1.0,
    skew: PerInput = 0.0,
    samples: Sequence[Any] | None = None,
    optimizer: Any = None,
    topology: Topology | str | Mapping[str, Any] | None = None,
    constraints: Mapping[int | str, Any] | None = None,
    input_table_map: Sequence[int] | None = None,
    dp_input: bool = True,
) -> Plan:
    """Plans where tables lie: each replicated, on one rank, in columns on some, by rows on all, and on the device or in
    host memory, so that the estimate of a training step is least and each rank has room for what it holds, the states
    of the optimizer among it.

    Args:
      embeddings: as of `DistEmbeddingStrategy`.
      world_size: the number of ranks.
      batch_size: samples of a step, of all ranks together.
      hotness: ids of a sample, for all inputs or for each: the mean length of a bag.
      skew: how unequal ids are, for all inputs or for each: the exponent of a power law, 0 for uniform ids; 1.05 is
        usual of clicks. samples: instead, for each input some ids (an array, or None), of which it is estimated; take
        those of a batch.
      optimizer: of the tables: a class by name ("adam"), an optimizer, or how many float32 it keeps for an element.
        None: SGD.
      topology: what ranks run on: a `Topology`, a name ("h200", "h100", "cpu"), or a mapping of what differs from
        it, as {"name": "h100", "device_memory": 94e9}. None: "h200".
      constraints: table (its number, or the name in its config) -> `Constraint`, or a mapping of its fields.
      input_table_map: the table of each input; None: one input a table.
      dp_input: as of DistributedEmbedding. False: tables are neither replicated nor cut by rows, and each rank has one.

    Raises:
      PlanError (a ValueError): the tables do not fit, or not where `constraints` say; it says what is missing.
      ValueError, TypeError: arguments of another number or kind.
    """
    configs = configs_of(embeddings)
    request = Request.of(
        configs,
        world_size,
        batch_size=batch_size,
        hotness=hotness,
        skew=skew,
        samples=samples,
        optimizer=optimizer,
        topology=topology,
        constraints=constraints,
        input_table_map=input_table_map,
        dp_input=dp_input,
    )
    return _plan_of(configs, request, assign(configs, request))


def plan_together(embeddings: Sequence[Any], group: Group, *, gpu: DeviceProperties | None, **options: Any) -> Plan:
    """As `plan`, for the ranks of a group, each of which calls it: the first one plans, the others take what it found.

    gpu: as of `topology_here`, which is the topology where `options`, those of `plan`, have none.

    Raises as `plan`, on all ranks.
    """
    configs = configs_of(embeddings)
    if options.get("topology") is None:
        options["topology"] = topology_here(group, gpu)

    def first() -> Any:
        return plan(configs, group.size, **options).to_config() if group.rank == 0 else None

    return Plan.from_config(agree(group, first)[0], configs, group.size)


def topology_here(group: Group, gpu: DeviceProperties | None) -> Topology:
    """The topology of the ranks of a group: memory as it is, the least of any rank, speeds as of the slowest GPU.

    gpu: this rank's; None: tables live on the CPU. Called by every rank.
    """
    own = [socket.gethostname(), host_memory_bytes(), *((gpu.total_memory, gpu.name) if gpu is not None else (0, ""))]
    ranks = agree(group, lambda: own)
    hosts = [host for host, *_ in ranks]
    most = max(map(hosts.count, hosts))
    on_host = _OF_HOST * min(memory for _, memory, _, _ in ranks) / most
    near = None if len(set(hosts)) == 1 else most
    device = min(memory for _, _, memory, _ in ranks)
    if not device:
        return CPU.replace(device_memory=on_host, host_memory=on_host, ranks_per_host=near)
    slowest = min((topology_of_gpu(name) for *_, name in ranks), key=lambda each: each.device.stream)
    return slowest.replace(device_memory=device, reserved=_RESERVED * device, host_memory=on_host, ranks_per_host=near)


def plan_layer(
    embeddings: Sequence[Any],
    strategy: str | Plan | Mapping[str, Any],
    column_slice_threshold: float | None,
    row_slice_threshold: float | None,
    dp_input: bool,
    input_table_map: Sequence[int] | None,
    data_parallel_threshold: float | None,
    gpu_embedding_size: float | None,
    *,
    group: Group,
    gpu: DeviceProperties | None,
    constraints: Mapping[int | str, Any] | None = None,
) -> tuple[DistEmbeddingStrategy, Request | None]:
    """Where the tables of a DistributedEmbedding lie, and, where that was planned, what it was planned for.

    strategy: as of the layer; a mapping is what `Plan.to_config` gave. The thresholds for rows and for replication
    count only with several ranks and `dp_input`. group, gpu: as of `topology_here`. constraints: of the
    framework's, for "planned".

    Called by every rank. Raises ValueError where a rank would hold nothing, or with dp_input=False have no input, and
    otherwise as `DistEmbeddingStrategy` and `plan`.
    """
    limits = column_slice_threshold, row_slice_threshold, data_parallel_threshold, gpu_embedding_size
    check_thresholds(limits)  # also those that do not count
    if strategy == PLANNED or isinstance(strategy, (Plan, Mapping)):
        if any(limit is not None for limit in limits):
            raise ValueError("a planned strategy takes no thresholds and sizes: give plan() constraints, or a topology")
        if isinstance(strategy, Plan):
            made = strategy.of_layer(embeddings, group.size, input_table_map, dp_input)
        elif isinstance(strategy, Mapping):
            made = Plan.from_config(strategy, embeddings, group.size)
        else:
            options = {"constraints": constraints, "input_table_map": input_table_map, "dp_input": dp_input}
            made = plan_together(embeddings, group, gpu=gpu, **options)
        _check_inputs(made.strategy, dp_input)
        return made.strategy, made.request
    both = group.size > 1 and dp_input
    named = DistEmbeddingStrategy(
        embeddings,
        group.size,
        strategy,
        input_table_map,
        column_slice_threshold,
        row_slice_threshold if both else None,
        data_parallel_threshold if both else None,
        gpu_embedding_size,
    )
    if named.table_groups[1] and not all(named.local_configs):
        raise ValueError(
            "Not enough table after slicing to run on all worker.Try decrease column_slice_threshold or decrease "
            "worker count"
        )
    _check_inputs(named, dp_input)
    return named, None


def _check_inputs(strategy: DistEmbeddingStrategy, dp_input: bool) -> None:
    without = [rank for rank, numbers in enumerate(strategy.input_ids_list) if not numbers]
    if without and not dp_input and strategy.world_size > 1:
        raise ValueError(
            "with dp_input=False ranks know the number of samples from their own inputs, and "
            f"ranks {without} have none: give each of their tables an input, leave them out, or take dp_input=True"
        )


def report_layer(
    strategy: DistEmbeddingStrategy,
    request: Request | None,
    measured: Mapping[str, Any],
    look_up: Callable[[], Any] | None,
    repeats: int,
    *,
    group: Group,
    gpu: DeviceProperties | None,
    **options: Any,
) -> Report:
    """The report of a layer that exists. Called by every rank.

    request: what it was planned for, which `options`, those of `plan`, change; None: nothing, and they say all.
    measured: of this rank, as of `Report`, each a number; "keys" and "samples" are of its batch, from which batch_size
    and hotness follow where `options` lack them. look_up: a lookup of this rank, which ends when it is done; it is
    timed, `repeats` times after one that is not.
    """
    if look_up is not None:
        measured = {**measured, "lookup": _median_seconds(look_up, repeats)}
    ranks = agree(group, lambda: dict(measured))
    together: dict[str, Any] = {name: [each[name] for each in ranks] for name in ("device_bytes", "host_bytes")}
    if "lookup" in measured:
        together["lookup"] = max(each["lookup"] for each in ranks)
    if "keys" in measured:
        samples = sum(each["samples"] for each in ranks)
        options.setdefault("batch_size", max(1, samples))
        keys = np.sum([each["keys"] for each in ranks], 0)
        options.setdefault("hotness", (keys / max(1, samples)).tolist())
    given = request.changes(options) if request is not None else {}
    options = {"topology": None, **given, **options}
    if options["topology"] is None:
        options["topology"] = topology_here(group, gpu)
    made = Request.of(strategy.global_configs, strategy.world_size, input_table_map=strategy.tables_of, **options)
    return dataclasses.replace(report_of(strategy, made), measured=together)


def _median_seconds(call: Callable[[], Any], repeats: int) -> float:
    seconds = []
    for _ in range(max(1, repeats) + 1):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _plan_of(configs: Sequence[Config], request: Request, assignment: Assignment | None) -> Plan:
    assert assignment is not None
    return Plan(DistEmbeddingStrategy(configs, request.world_size, assignment, request.tables_of), request)


def _shape(config: Config) -> tuple[int, int]:
    return config["input_dim"], config["output_dim"]


def _plain(assignment: Assignment) -> dict[str, Any]:
    return {
        "replicated": list(assignment.replicated),
        "by_rows": list(assignment.by_rows),
        "columns": [[[table, number] for table, number in each.items()] for each in assignment.columns],
        "on_host": sorted(assignment.on_host),
    }


def _assignment(plain: Mapping[str, Any]) -> Assignment:
    columns = tuple(dict(each) for each in plain["columns"])
    return Assignment(tuple(plain["replicated"]), tuple(plain["by_rows"]), columns, frozenset(plain["on_host"]))
