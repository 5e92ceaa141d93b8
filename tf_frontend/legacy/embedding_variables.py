# SPDX-License-Identifier: Apache-2.0
"""DeepRec's get_embedding_variable and its options, over `sok.DynamicVariable`."""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit.tensorflow.checkpoint import expire
from sparse_operation_kit.tensorflow.dynamic_variable import DynamicVariable
from sparse_operation_kit.tensorflow.legacy.initialize import ready
from sparse_operation_kit.tensorflow.legacy.keys import graph_of_variables


@dataclasses.dataclass(frozen=True)
class InitializerOption:
    """How rows of new keys begin.

    initializer: as of `sok.DynamicVariable`. default_value_dim: without effect, since each key has a draw of its own,
    where DeepRec took one of so many. default_value_no_permission: without effect: a key that is not admitted reads the
    row that it would begin with.
    """

    initializer: Any = None
    default_value_dim: int = 4096
    default_value_no_permission: float = 0.0


@dataclasses.dataclass(frozen=True)
class CounterFilter:
    """A key gets a row in the lookup that is its filter_freq-th; counted exactly."""

    filter_freq: int = 0


@dataclasses.dataclass(frozen=True)
class CBFFilter:
    """As CounterFilter, which is meant; counted for max_element_size keys at most. The others are without effect: these
    counts are exact where DeepRec's counting Bloom filter was not.
    """

    filter_freq: int = 0
    max_element_size: int = 0
    false_positive_probability: float = -1.0
    counter_type: Any = tf.uint64


@dataclasses.dataclass(frozen=True)
class GlobalStepEvict:
    """A dump, and `EmbeddingVariable.evict`, give up rows that no lookup in training has used for so many steps."""

    steps_to_live: int | None = None


@dataclasses.dataclass(frozen=True)
class L2WeightEvict:
    """A dump, and `EmbeddingVariable.evict`, give up rows of a smaller L2 norm."""

    l2_weight_threshold: float = -1.0


class StorageType(enum.Enum):
    """Where rows are kept."""

    INVALID = 0
    DRAM = 1
    PMEM_MEMKIND = 2
    PMEM_LIBPMEM = 3
    SSDHASH = 4
    LEVELDB = 5
    HBM = 6
    DRAM_PMEM = 11
    DRAM_SSDHASH = 12
    HBM_DRAM = 13
    DRAM_LEVELDB = 14
    HBM_DRAM_SSDHASH = 101


@dataclasses.dataclass(frozen=True)
class StorageOption:
    """storage_type: HBM, HBM_DRAM (the first storage_size bytes of rows in device memory) or DRAM. Others are without
    effect; a full table of HBM_DRAM or DRAM gives up the rows that were used longest ago.
    """

    storage_type: StorageType | None = None
    storage_path: str | None = None
    storage_size: Sequence[int] = (1 << 30,)
    cache_strategy: Any = None
    layout: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage_size", tuple(self.storage_size))  # columns are hashed


@dataclasses.dataclass(frozen=True)
class EmbeddingVariableOption:
    """The options of `get_embedding_variable`. ht_type, ht_partition_num and ckpt are without effect."""

    ht_type: str = ""
    ht_partition_num: int = 1000
    evict_option: Any = None
    ckpt: Any = None
    filter_option: Any = None
    storage_option: StorageOption = dataclasses.field(default_factory=StorageOption)
    init_option: InitializerOption = dataclasses.field(default_factory=InitializerOption)


OPTIONS = (
    InitializerOption,
    CounterFilter,
    CBFFilter,
    GlobalStepEvict,
    L2WeightEvict,
    StorageOption,
    EmbeddingVariableOption,
)


class EmbeddingVariable(DynamicVariable):
    """What `get_embedding_variable` gives."""

    evict_option: Any = None
    made: Mapping[str, Any]
    """What it was made with, by argument."""

    def total_count(self) -> tf.Tensor:
        """[rows that this rank holds, dimension] int64."""
        return tf.stack([tf.cast(self.statistics().size, tf.int64), self.dimension])

    def evict(self) -> Any:
        """Gives up this rank's rows that the table's evict_option names, as `sok.dump` does before it writes, which is
        when DeepRec did. Returns their keys, [n] int64. As `sok.expire`, which has more to choose from.
        """
        option = self.evict_option
        if isinstance(option, GlobalStepEvict) and option.steps_to_live:
            return expire(self, max_idle=option.steps_to_live)
        if isinstance(option, L2WeightEvict) and option.l2_weight_threshold > 0:
            return expire(self, min_norm=option.l2_weight_threshold)
        return np.zeros(0, np.int64)

    def begin_dump(self) -> None:
        self.evict()


_stores: weakref.WeakKeyDictionary[Any, dict[str, EmbeddingVariable]] = weakref.WeakKeyDictionary()


def get_embedding_variable(
    name: str,
    embedding_dim: int,
    key_dtype: Any = tf.int64,
    value_dtype: Any = None,
    initializer: Any = None,
    trainable: bool = True,
    collections: Any = None,
    partitioner: Any = None,
    custom_getter: Any = None,
    ev_option: EmbeddingVariableOption | None = None,
) -> EmbeddingVariable:
    """The dynamic table of that name in the current graph, or in eager mode, made the first time. New code:
    `sok.DynamicVariable`.

    Args:
      name, embedding_dim, key_dtype, value_dtype, initializer, trainable: the table's; as of `sok.DynamicVariable`.
      collections: accepted; without effect.
      ev_option: what becomes of new and old keys, and where rows are.

    Raises:
      TypeError: a partitioner or custom_getter: tables are sharded over the ranks.
      ValueError: the name is that of a table for which something else was given: another dimension, or of what is
        given here (a key_dtype that is not int64, trainable=False) another key_dtype, value_dtype, initializer,
        trainable or ev_option.
      NotImplementedError: storage on disk or in persistent memory.
      Otherwise as `sok.DynamicVariable`.
    """
    del collections
    if partitioner is not None or custom_getter is not None:
        raise TypeError("partitioner and custom_getter must be None: tables are sharded over the ranks by themselves")
    ready()
    option = EmbeddingVariableOption() if ev_option is None else ev_option
    store = _stores.setdefault(graph_of_variables(), {})
    chosen = option.init_option.initializer if initializer is None else initializer
    options = _options(option)
    made = {
        "embedding_dim": embedding_dim,
        "key_dtype": tf.as_dtype(key_dtype).name,
        "value_dtype": tf.as_dtype(value_dtype or tf.float32).name,
        "initializer": _described(chosen),
        "trainable": bool(trainable),
        "ev_option": {**options, "evict_option": option.evict_option},
    }
    table = store.get(name)
    if table is not None:
        left = {
            "key_dtype": made["key_dtype"] == "int64",
            "value_dtype": value_dtype is None,
            "initializer": chosen is None,
            "trainable": trainable,
            "ev_option": ev_option is None,
        }
        for what, value in made.items():
            if value != table.made[what] and not left.get(what):
                raise ValueError(f"table '{name}' has the {what} {table.made[what]} already, got {value}")
        return table
    table = store[name] = EmbeddingVariable(
        embedding_dim,
        chosen,
        name=name,
        trainable=trainable,
        key_type=key_dtype,
        dtype=tf.float32 if value_dtype is None else value_dtype,
        **options,
    )
    table.evict_option, table.made = option.evict_option, made
    return table


def _described(initializer: Any) -> str:
    """What tells one initializer from another, as far as that can be said."""
    if hasattr(initializer, "get_config"):
        return f"{type(initializer).__name__} {initializer.get_config()}"
    return type(initializer).__name__ if callable(initializer) else repr(initializer)


def _options(option: EmbeddingVariableOption) -> dict[str, Any]:
    """Those of sok.DynamicVariable."""
    options = {**_storage(option.storage_option), **_admission(option.filter_option)}
    if isinstance(option.evict_option, GlobalStepEvict):
        options["evict_strategy"] = "lru"  # which knows when rows were used
    return options


def _storage(option: StorageOption) -> dict[str, Any]:
    kind = option.storage_type
    if kind in (None, StorageType.HBM):
        return {"var_type": "hbm"}
    if kind in (StorageType.DRAM, StorageType.HBM_DRAM):
        on_gpu = 0.0 if kind is StorageType.DRAM else option.storage_size[0] / 2**30
        return {"var_type": "hybrid", "max_hbm_for_vectors": on_gpu}
    raise NotImplementedError(f"storage_type {kind} is not there: rows are kept in device and host memory (HBM_DRAM)")


def _admission(option: Any) -> dict[str, Any]:
    if option is None or not option.filter_freq:
        return {}
    counted = getattr(option, "max_element_size", 0)
    return {"admission_threshold": option.filter_freq, **({"admission_candidates": counted} if counted else {})}
