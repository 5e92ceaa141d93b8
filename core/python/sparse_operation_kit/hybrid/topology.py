# SPDX-License-Identifier: Apache-2.0
"""What ranks run on: how much their memory holds and what it and the links between them do in a second.

The figures of `H200` and `H100` were measured (docs/PERFORMANCE.md); those of `CPU` are of two cores of a server. Take
the nearest and change what is known to differ:

    topology = H100.replace(device_memory=94e9)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Accesses:
    """Accesses a second at random places of a memory, by the bytes of one: `rates[i]` of `sizes[i]` bytes each.

    Between sizes it is interpolated; beyond the last one bytes count, below the first one accesses do.
    """

    sizes: tuple[float, ...]
    rates: tuple[float, ...]

    def seconds(self, size: Array) -> Array:
        """Of one access of `size` bytes."""
        sizes, each = np.array(self.sizes), 1 / np.array(self.rates)
        beyond = np.maximum(np.asarray(size, float) / sizes[-1], 1.0)
        return np.asarray(np.interp(size, sizes, each) * beyond)


@dataclasses.dataclass(frozen=True)
class Memory:
    """What works on tables in one memory.

    read, update: rows at random, an update reads and writes. cached: rows that were read a moment ago. stream: bytes a
    second, one after another. sort: entries a second in a pass of 8 bits. reached: which part of these speeds the
    stages reach together.
    """

    read: Accesses
    update: Accesses
    stream: float
    cached: Accesses
    sort: float
    reached: float = 1.0


@dataclasses.dataclass(frozen=True)
class Topology:
    """What each rank has, and what lies between ranks. Bytes, seconds, bytes a second.

    Attributes:
      name: for reports.
      device_memory, host_memory: of a rank; of the host's memory its share.
      reserved: of the device's memory, what is kept for the rest of the model and for the framework.
      device, host: how fast tables are there.
      link: what a rank sends to the others of its host, and as much receives at the same time. link_latency: of one
        exchange.
      ranks_per_host: None: all are on one host. network, network_latency: the same between hosts, for one rank.
      host_link, host_latency: of exchanges of tables in host memory.
      pcie: between host memory and the device.
      step, lookup: what a step costs the host's processor, and each table or part of one that it looks up.
      launch: what each stage costs beside the bytes that it moves. agree: the exchange of counts, for which the host
        waits, and for the host the device.
      replicated: what each replicated table costs, looked up and stepped by operations of the framework.
    """

    name: str
    device_memory: float
    host_memory: float
    device: Memory
    host: Memory
    reserved: float = 0.0
    link: float = 332e9
    link_latency: float = 33e-6
    ranks_per_host: int | None = None
    network: float = 25e9
    network_latency: float = 50e-6
    host_link: float = 2e9
    host_latency: float = 2e-3
    pcie: float = 25e9
    step: float = 250e-6
    lookup: float = 7e-6
    launch: float = 10e-6
    agree: float = 450e-6
    replicated: float = 60e-6

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> Topology:
        """What `dataclasses.asdict` gave."""

        def memory(figures: Mapping[str, Any]) -> Memory:
            made: dict[str, Any] = dict(figures)
            for name in ("read", "update", "cached"):
                made[name] = Accesses(tuple(figures[name]["sizes"]), tuple(figures[name]["rates"]))
            return Memory(**made)

        return Topology(**{**config, "device": memory(config["device"]), "host": memory(config["host"])})

    def replace(self, **changes: Any) -> Topology:
        """The same but for some attributes. ValueError for one that there is not or that is negative, TypeError
        for what is no number.
        """
        known = {field.name for field in dataclasses.fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ValueError(f"a topology has no {', '.join(unknown)}: it has {', '.join(sorted(known))}")
        for name, value in changes.items():
            if name in ("name", "device", "host") or (name == "ranks_per_host" and value is None):
                continue
            if not hasattr(value, "__float__"):
                raise TypeError(f"{name} of a topology must be a number, got {value!r}")
            if not value >= 0:
                raise ValueError(f"{name} of a topology must not be negative, got {value}")
        return dataclasses.replace(self, **changes)


_SERVER = Memory(
    read=Accesses((64, 256, 512), (60e6, 40e6, 25e6)),
    update=Accesses((64, 256, 512), (40e6, 25e6, 15e6)),
    stream=10e9,
    cached=Accesses((64, 256, 512), (150e6, 100e6, 60e6)),
    sort=100e6,
)

H200 = Topology(
    name="h200",
    device_memory=141e9,
    host_memory=200e9,
    device=Memory(
        read=Accesses((32, 128, 256, 512), (31e9, 32e9, 17.2e9, 8.6e9)),
        update=Accesses((32, 64, 128, 256, 512), (15e9, 14.8e9, 12.8e9, 7.6e9, 3.8e9)),
        stream=4.28e12,
        cached=Accesses((32, 64, 256, 512), (220e9, 140e9, 40e9, 20e9)),
        sort=95e9,
        reached=0.93,
    ),
    host=_SERVER,
    reserved=14e9,
)

H100 = H200.replace(  # the same multiprocessors, cache and links
    name="h100",
    device_memory=80e9,
    device=dataclasses.replace(
        H200.device,
        read=Accesses((64, 128, 256, 512), (29.5e9, 21.3e9, 11.5e9, 5.9e9)),
        update=Accesses((64, 128, 256, 512), (12.1e9, 9.7e9, 5.3e9, 2.7e9)),
        stream=3.01e12,
        sort=67e9,  # an H200's, by the speed of memory
    ),
    reserved=8e9,
)

CPU = Topology(
    name="cpu",
    device_memory=16e9,
    host_memory=16e9,
    device=_SERVER,
    host=_SERVER,
    link=2e9,
    link_latency=0.5e-3,
    network=1e9,
    network_latency=1e-3,
    pcie=10e9,
    launch=5e-6,
    agree=1e-3,
    replicated=100e-6,
)

TOPOLOGIES: Mapping[str, Topology] = {each.name: each for each in (H200, H100, CPU)}
"""Those that are known by name."""


def topology_of_gpu(name: str) -> Topology:
    """The one of a GPU by its own name, as "NVIDIA H100 80GB HBM3"; "h200" for those that are not known."""
    return next((each for each in TOPOLOGIES.values() if each.name in name.lower()), H200)


def topology_of(given: Topology | str | Mapping[str, Any] | None) -> Topology:
    """A topology, its name, or a mapping of what differs from the one of which it has the `name` (or from "h200").

    None: "h200". Raises ValueError for another name or another attribute, TypeError for what is none of these.
    """
    if isinstance(given, Topology):
        return given
    changes: dict[str, Any] = {}
    if isinstance(given, Mapping):
        changes = dict(given)
        given = changes.pop("name", None)
    name = H200.name if given is None else given
    if not isinstance(name, str):
        raise TypeError(f"a topology is a Topology, a name or a mapping, got a {type(given).__name__}")
    if name.lower() not in TOPOLOGIES:
        raise ValueError(f"unknown topology {name!r}: it must be one of {', '.join(TOPOLOGIES)}")
    for part in set(changes) & {"device", "host"}:
        raise ValueError(f"the {part} of a topology is no number: make a Topology in Python")
    return TOPOLOGIES[name.lower()].replace(**changes)
