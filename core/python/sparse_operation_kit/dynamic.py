# SPDX-License-Identifier: Apache-2.0
"""What `DynamicVariable` is called with, checked once for both frontends. No framework is imported here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from sparse_operation_kit.placement import ANY_KEY, Initializer, parse_initializer
from sparse_operation_kit.row_store import RowStore

VAR_TYPES = ("hbm", "hybrid")
KEY_TYPES = ("int32", "int64")
EVICT_STRATEGIES = ("lru", "lfu", "epoch_lru", "epoch_lfu", "customized")

HYBRID_CAPACITY = 1 << 26
"""Rows a rank of a "hybrid" table that names no max_capacity, as in SparseOperationKit 2.x."""

MOST_ROWS = 1 << 40
"""The largest capacity there is (sok_hash_index_config)."""

MOST_DEVICE_ROWS = 2**32 - 1
"""On a GPU the most slots of a table that evicts, and the most rows in its memory where others are in the host's
(sok_dynamic_table_config).
"""

KEYS_OF_CALL = 1 << 30
"""Of all keys of a table at once: the core takes fewer than 2^31 in a call."""

_INDEX_BYTES = 28  # a row, in an index of 77 entries in use of 100

MOST_SCORE = 2**31 - 2
"""The largest rank that a user may give a row, 0 being the least."""

MOST_EPOCH = {"epoch_lru": MOST_SCORE, "epoch_lfu": 2046}
"""The last epoch of the strategies that have epochs."""

_LAST_USE = 1 << 32  # sok_dynamic_table_scores: so many times the rank, and the generation of the last use

NUMBERED_LOWER = 1 << 30
"""By how much the numbers of generations are lower, 0 at least, once they would not fit (sok/dynamic_table.h)."""


class Policy(NamedTuple):
    """What of sok_dynamic_table_config says which rows stay and where, in the order in which the frontends' C++ reads
    it; the admission_... are those of sok_admission, device_rows is 0 where all rows are in one memory.
    """

    eviction: float
    half_life: float
    admission_threshold: float
    admission_candidates: float
    filter_ratio: float
    time_to_live: float
    device_rows: float


@dataclasses.dataclass(frozen=True)
class DynamicOptions:
    """The keywords of `DynamicVariable` that say how large it grows and what it does then.

    var_type:             "hybrid" has a capacity, of 2^26 rows without max_capacity; "hbm" then grows as memory allows
    init_capacity:        so many rows a rank have memory from the beginning
    max_capacity:         the most rows that a rank may hold; None: as many as memory holds
    max_hbm_for_vectors:  GB (2^30 bytes) of device memory a rank for the rows of a "hybrid" table on a GPU, and for
                          each state of theirs; those beyond are in the host's memory. None or 0: all are the device's
    evict_strategy:       one of EVICT_STRATEGIES, "lru" by default for "hybrid"; None: a full table refuses new keys
    half_life:            of the strategies by frequency: lookups after which their counts are halved; 0: never
    admission_threshold:  a new key gets a row in so many lookups, the first ones read its initial value; 0, 1: at once
    admission_candidates: the most keys a rank whose lookups are counted for that; 0: as many as the capacity
    filter_ratio:         the probability that a new key gets a row in a lookup with use_low_frequency_filter=True
    time_to_live:         seconds after which rows go that no lookup in training has used; 0: never
    device_id:            the GPU that the table is on, or None: where the framework would put it
    store:                a RowStore for the rows that would be evicted, which come back when they are looked up; with
                          evict_strategy "lru", "lfu", "epoch_lru" or "epoch_lfu", without time_to_live. None: they go
    """

    var_type: str = "hybrid"
    init_capacity: int = 0
    max_capacity: int | None = None
    max_hbm_for_vectors: float | None = None
    evict_strategy: str | None = "lru"
    half_life: int = 0
    admission_threshold: int = 0
    admission_candidates: int = 0
    filter_ratio: float = 1.0
    time_to_live: float = 0.0
    device_id: int | None = None
    store: RowStore | None = None

    def policy(self, row_bytes: int) -> Policy:
        """Of a table of rows of `row_bytes`."""
        admission = (self.admission_threshold, self.admission_candidates, self.filter_ratio)
        where = self.device_rows(row_bytes)
        return Policy(*map(float, (self.eviction, self.half_life, *admission, self.time_to_live, where)))

    def device_rows(self, row_bytes: int) -> int:
        """How many rows of `row_bytes` are in the memory of a GPU that the table is on; 0: all."""
        if self.var_type != "hybrid" or not self.max_hbm_for_vectors:
            return 0
        return min(MOST_DEVICE_ROWS, max(1, int(self.max_hbm_for_vectors * 2**30) // row_bytes))

    @property
    def has_scores(self) -> bool:
        """Whether the table keeps for each row when it was used last, and what it is evicted by."""
        return self.evict_strategy is not None or self.time_to_live > 0

    @property
    def counts_uses(self) -> bool:
        """Whether rows are evicted by how often they were used."""
        return self.evict_strategy in ("lfu", "epoch_lfu")

    @property
    def most_candidates(self) -> int | None:
        """How many keys may wait for a row; 0: none, None: as many as the capacity."""
        return (self.admission_candidates or None) if self.admission_threshold > 1 else 0

    @property
    def eviction(self) -> int:
        """The number of sok_eviction (core/include/sok/dynamic_table.h)."""
        return 0 if self.evict_strategy is None else 1 + EVICT_STRATEGIES.index(self.evict_strategy)

    def capacity(self, row_bytes: int, memory_bytes: int) -> int:
        """The keys that a rank's index reserves addresses for, where rows of `row_bytes` lie in memory of so many
        bytes in all.
        """
        if self.max_capacity is not None:
            return self.max_capacity
        most = MOST_ROWS
        if self.evict_strategy is not None:
            has_guests = self.admission_threshold > 1 or self.filter_ratio < 1
            most = MOST_DEVICE_ROWS // 2 if has_guests else MOST_DEVICE_ROWS  # guests have slots too
        return min(most, max(1, self.init_capacity, memory_bytes // (row_bytes + _INDEX_BYTES)))


def check_options(var_type: str, options: Mapping[str, Any], name: str) -> DynamicOptions:
    """The options of the dynamic table `name`, from the keywords that DynamicVariable does not name itself.

    Known are those of DynamicOptions, and what SparseOperationKit 2.x has besides, which changes nothing here, because
    the index finds its own layout: max_load_factor, max_bucket_size, block_size, io_by_cpu. None stands for an
    option's default. evict_strategy also has SOK's spellings, as in "kLru"; None means None there.

    Raises:
      TypeError: an option of another name or type; it lists the options.
      ValueError: a value that is out of range, an unknown var_type or evict_strategy; half_life for a strategy that
        counts nothing; admission_candidates without an admission_threshold; a store for a table that it cannot serve.
    """
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise TypeError(
            f"table '{name}': DynamicVariable has no option {', '.join(map(repr, unknown))}; its options are "
            f"{', '.join(_OPTIONS)}"
        )
    kind = var_type.strip().lower() if isinstance(var_type, str) else var_type
    if kind not in VAR_TYPES:
        raise ValueError(f"table '{name}': unknown var_type {var_type!r}: it must be one of {list(VAR_TYPES)}")
    given: dict[str, Any] = {
        key: _OPTIONS[key](f"table '{name}': {key}", value) for key, value in options.items() if value is not None
    }
    initial = given.get("init_capacity", 0)
    largest = given.get("max_capacity")
    if largest is None and kind == "hybrid":
        largest = max(HYBRID_CAPACITY, initial)
    if largest is not None and initial > largest:
        raise ValueError(f"table '{name}': init_capacity {initial} is above max_capacity {largest}")
    strategy = given.get("evict_strategy", None if kind == "hbm" or "evict_strategy" in options else "lru")
    if given.get("half_life") and strategy not in ("lfu", "epoch_lfu"):
        raise ValueError(f"table '{name}': half_life is for 'lfu' and 'epoch_lfu', evict_strategy is {strategy!r}")
    if given.get("admission_candidates") and given.get("admission_threshold", 0) < 2:
        raise ValueError(f"table '{name}': admission_candidates is for an admission_threshold of 2 or more")
    if given.get("store") is not None:
        _check_store(given, strategy, name)
    device = given.pop("device_id", -1)
    given.update(var_type=kind, init_capacity=initial, max_capacity=largest, evict_strategy=strategy)
    known = {field.name for field in dataclasses.fields(DynamicOptions)}
    options = {key: value for key, value in given.items() if key in known}
    return DynamicOptions(**options, device_id=device if device >= 0 else None)


def _check_store(given: Mapping[str, Any], strategy: str | None, name: str) -> None:
    if strategy is None or strategy == "customized":
        raise ValueError(
            f"table '{name}': a store takes the rows that evict_strategy 'lru', 'lfu', 'epoch_lru' or 'epoch_lfu' "
            f"would evict; it is {strategy!r}"
        )
    if given.get("time_to_live"):
        raise ValueError(f"table '{name}': rows in a store do not expire by time_to_live; call sok.expire")
    if given.get("max_hbm_for_vectors") and strategy in ("lfu", "epoch_lfu"):
        raise ValueError(f"table '{name}': with a store and max_hbm_for_vectors evict_strategy is 'lru' or 'epoch_lru'")


def refuse_store(stored: object, name: str, what: str) -> None:
    """Raises NotImplementedError where a table has a store, whose rows `what` does not know."""
    if stored is not None:
        raise NotImplementedError(f"table '{name}' has rows in a store, and {what} does not know them")


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What a rank's part of a dynamic table holds, and what has happened to it since it was made.

    size:        keys that it holds
    capacity:    the most that it may hold
    load_factor: size / capacity
    lookups:     keys looked up by calls that insert (lookups that train, `assign`, `sparse_read_and_evict`, `load`),
                 each as often as it came; with several ranks those that reached this one
    hits:        how many of these had a row
    misses:      how many had none
    insertions:  rows made
    evictions:   rows given up for others; not those that were erased
    refusals:    keys that had no row and got none, each once a lookup (admission_threshold, filter_ratio)
    expirations: rows that time_to_live has ended
    device_hits, host_hits: with max_hbm_for_vectors on a GPU: how many of the lookups had their rows in its memory, and
                 how many in the host's; 0 elsewhere
    moves:       rows that came from there
    host_bytes:  what of the table is there
    """

    size: int
    capacity: int
    load_factor: float
    lookups: int
    hits: int
    misses: int
    insertions: int
    evictions: int
    refusals: int
    expirations: int
    device_hits: int = 0
    host_hits: int = 0
    moves: int = 0
    host_bytes: int = 0

    @classmethod
    def of(
        cls,
        size: int,
        capacity: int,
        lookups: int,
        insertions: int,
        evictions: int,
        refusals: int,
        expirations: int,
        device_hits: int = 0,
        host_hits: int = 0,
        moves: int = 0,
        host_bytes: int = 0,
    ) -> Statistics:
        """From the counts of the core (sok_dynamic_table_get_counts), and sok_dynamic_table_host_bytes. A key that
        comes again in a lookup counts as one that has a row.
        """
        misses = insertions + refusals
        held = (size, capacity, size / capacity)
        happened = (lookups, lookups - misses, misses, insertions, evictions, refusals, expirations)
        return cls(*held, *happened, device_hits, host_hits, moves, host_bytes)


def check_epoch(epoch: Any, strategy: str | None, name: str) -> int:
    """`epoch` as an int. TypeError where it is none; ValueError for an evict_strategy without epochs, and for one that
    is out of its range.
    """
    if strategy not in MOST_EPOCH:
        raise ValueError(f"table '{name}' has no epochs: evict_strategy is {strategy!r}, not one of {list(MOST_EPOCH)}")
    return _integer(f"the epoch of table '{name}'", epoch, 0, MOST_EPOCH[strategy])


def check_has_scores(strategy: str | None, name: str) -> None:
    """Raises ValueError where rows have no ranks that a user gave them."""
    if strategy != "customized":
        raise ValueError(
            f"the rows of table '{name}' have no scores of yours: evict_strategy is {strategy!r}, not 'customized'"
        )


def ranks_in(scores: Any) -> Any:
    """The ranks in scores of the core (sok_dynamic_table_scores), an array or tensor of int64."""
    return scores // _LAST_USE


def uses_in(scores: Any) -> Any:
    """The generations of last uses in scores of the core."""
    return scores % _LAST_USE


def lowered(scores: Any) -> Any:
    """Scores of before the core numbered generations anew, as they are since then; generations alone too."""
    return scores - np.minimum(uses_in(scores), NUMBERED_LOWER)


def times_of(scores: Any, use_times: Any, now: int) -> Any:
    """When rows were used last, in nanoseconds of UTC since 1970, [n] int64: by their scores, and what the table knows
    of its generations (sok_dynamic_table_use_times), [m, 2].
    """
    generations, times = np.append(use_times[:, 0], np.iinfo(np.int64).max), np.append(use_times[:, 1], now)
    return times[np.searchsorted(generations, uses_in(scores))]


def with_times(use_times: Any, scores: Any, times: Any) -> Any:
    """What a table is to know of its generations so that rows with these scores were used at these times, or later."""
    last_uses, places = np.unique(np.append(use_times[:, 0], uses_in(scores)), return_inverse=True)
    latest = np.zeros(len(last_uses), np.int64)
    np.maximum.at(latest, places, np.append(use_times[:, 1], times))
    return np.stack([last_uses, np.maximum.accumulate(latest)], axis=1)


def most_wanted(candidates: Any, most: int) -> Any:
    """Of keys that wait and their scores, [n, 2], so many, those that were asked for most."""
    return candidates[np.argsort(-candidates[:, 1], kind="stable")[:most]]


def with_ranks(scores: Any, ranks: Any) -> Any:
    """The scores with other ranks, all int64; the rows' last use stays."""
    return ranks * _LAST_USE + scores % _LAST_USE


def check_dimension(dimension: Any, name: str) -> int:
    """`dimension` as an int. TypeError where it is none, ValueError outside [1, 2^31)."""
    return _integer(f"the dimension of table '{name}'", dimension, 1, 2**31 - 1)


def check_key_type(key_type: Any, name: str) -> str:
    """One of KEY_TYPES, for anything whose str ends in it; None is "int64". TypeError for another."""
    text = "int64" if key_type is None else getattr(key_type, "__name__", None) or getattr(key_type, "name", key_type)
    text = str(text).rsplit(".", 1)[-1]
    if text not in KEY_TYPES:
        raise TypeError(f"table '{name}': key_type must be {' or '.join(KEY_TYPES)}, got {text}")
    return text


def check_initializer(initializer: Any, dimension: int, name: str) -> Initializer:
    """How rows of new keys begin: a name or number as of `parse_initializer`, or an Initializer. None is "uniform".

    Raises TypeError for anything else: a row's initial value has to be a function of its key and column. ValueError for
    an unknown name, and for one whose scale depends on the number of rows.
    """
    if initializer is None:
        initializer = "uniform"
    if isinstance(initializer, Initializer):
        return initializer
    if isinstance(initializer, bool) or not isinstance(initializer, (str, int, float)):
        raise TypeError(
            f"table '{name}': the initializer of a dynamic table must be a name or a number, got {initializer!r}: the "
            "rows of new keys are drawn by seed, key and column"
        )
    return parse_initializer(initializer, ANY_KEY, dimension)


def host_memory_bytes() -> int:
    """The memory of this host, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _integer(what: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} must be an integer, got {value!r}")
    number: int = value.__index__()
    if not least <= number <= most:
        raise ValueError(f"{what} must be in [{least}, {most}], got {number}")
    return number


def _number(what: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} must be a number, got {value!r}")
    if not least <= float(value) <= most:
        raise ValueError(f"{what} must be in [{least}, {most}], got {value}")
    return float(value)


def _boolean(what: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, got {value!r}")
    return value


def _store(what: str, value: Any) -> RowStore:
    if not isinstance(value, RowStore):
        raise TypeError(f"{what} must be a sok.RowStore, such as sok.DiskStore(path), got {type(value).__name__}")
    return value


def _strategy(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string or None, got {value!r}")
    text = value.strip()
    plain = text[1:] if text[:1] == "k" and text[1:2].isupper() else text  # kEpochLru
    for strategy in EVICT_STRATEGIES:
        if plain.lower().replace("_", "") == strategy.replace("_", ""):
            return strategy
    raise ValueError(f"unknown {what} {value!r}: it must be one of {list(EVICT_STRATEGIES)} or None")


_OPTIONS: dict[str, Callable[[str, Any], Any]] = {
    "init_capacity": lambda what, value: _integer(what, value, 0, MOST_ROWS),
    "max_capacity": lambda what, value: _integer(what, value, 1, MOST_ROWS),
    "max_hbm_for_vectors": lambda what, value: _number(what, value, 0.0, float("inf")),
    "max_load_factor": lambda what, value: _number(what, value, 0.0, 1.0),
    "max_bucket_size": lambda what, value: _integer(what, value, 1, MOST_ROWS),
    "evict_strategy": _strategy,
    "half_life": lambda what, value: _integer(what, value, 0, 2**31 - 1),
    "admission_threshold": lambda what, value: _integer(what, value, 0, 2**31 - 2),
    "admission_candidates": lambda what, value: _integer(what, value, 0, MOST_ROWS),
    "time_to_live": lambda what, value: _number(what, value, 0.0, 1e12),
    "filter_ratio": lambda what, value: _number(what, value, 0.0, 1.0),
    "block_size": lambda what, value: _integer(what, value, 1, MOST_ROWS),
    "device_id": lambda what, value: _integer(what, value, -1, 2**15),
    "io_by_cpu": _boolean,
    "store": _store,
}
