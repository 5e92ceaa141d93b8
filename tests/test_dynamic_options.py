# SPDX-License-Identifier: Apache-2.0
"""The arguments of DynamicVariable, and where any keys live: the same for both frontends."""

import dataclasses

import numpy as np
import pytest

from sparse_operation_kit import dynamic
from sparse_operation_kit.dynamic import DynamicOptions, Statistics, check_options
from sparse_operation_kit.placement import ANY_KEY, Initializer, Placement, parse_initializer


def test_defaults():
    assert check_options("hybrid", {}, "t") == DynamicOptions("hybrid", 0, 1 << 26, None, "lru")
    assert check_options(" HBM ", {}, "t") == DynamicOptions("hbm", 0, None, None, None)


def test_options_of_sok():
    given = {
        "init_capacity": np.int64(1024),
        "max_capacity": 4096,
        "max_hbm_for_vectors": 2,
        "max_load_factor": 0.5,
        "max_bucket_size": 128,
        "block_size": 1024,
        "device_id": 1,
        "io_by_cpu": False,
        "evict_strategy": "kEpochLfu",
        "filter_ratio": 1,
    }
    options = DynamicOptions("hybrid", 1024, 4096, 2.0, "epoch_lfu", device_id=1)
    assert check_options("hybrid", given, "t") == options
    assert check_options("hbm", dict.fromkeys(given), "t") == DynamicOptions("hbm", evict_strategy=None)
    assert check_options("hybrid", {"evict_strategy": None}, "t").evict_strategy is None
    assert check_options("hbm", {"device_id": -1}, "t").device_id is None


@pytest.mark.parametrize("spelling", ["lru", "kLru", "LRU", " kCustomized ", "epoch_lru", "kEpochLru", "EpochLru"])
def test_spellings_of_strategies(spelling):
    plain = spelling.strip().removeprefix("k").lower().replace("_", "")
    options = check_options("hbm", {"evict_strategy": spelling}, "t")
    assert options.evict_strategy.replace("_", "") == plain
    assert options.eviction == {"lru": 1, "epochlru": 3, "customized": 5}[plain]  # sok_eviction


def test_policies():
    assert check_options("hbm", {}, "t").policy(64) == (0, 0, 0, 0, 1, 0, 0)
    given = {"half_life": 9, "admission_threshold": 3, "admission_candidates": 50, "filter_ratio": 0.5}
    options = check_options("hybrid", {"evict_strategy": "lfu", "time_to_live": 60, **given}, "t")
    assert options.policy(64) == (2, 9, 3, 50, 0.5, 60, 0)


def test_rows_on_the_device():
    """max_hbm_for_vectors is of "hybrid" tables: in whole rows, one at least; without it, and with 0, all."""
    assert check_options("hybrid", {"max_hbm_for_vectors": 0.5}, "t").device_rows(96) == 2**29 // 96
    assert check_options("hybrid", {"max_hbm_for_vectors": 0.5}, "t").policy(96).device_rows == 2**29 // 96
    assert check_options("hybrid", {"max_hbm_for_vectors": 1e-9}, "t").device_rows(96) == 1
    for kind, options in (("hybrid", {}), ("hybrid", {"max_hbm_for_vectors": 0}), ("hbm", {"max_hbm_for_vectors": 1})):
        assert check_options(kind, options, "t").device_rows(96) == 0


def test_capacity():
    assert check_options("hybrid", {"max_capacity": 7}, "t").capacity(256, 1 << 40) == 7
    assert check_options("hybrid", {"init_capacity": 1 << 30}, "t").capacity(256, 1) == 1 << 30
    # All of the memory, with what the index takes of it; never less than what is asked for at once.
    assert check_options("hbm", {}, "t").capacity(100, 128_000) == 1000
    assert check_options("hbm", {"init_capacity": 5000}, "t").capacity(100, 128_000) == 5000
    assert check_options("hbm", {"max_capacity": 9}, "t").capacity(100, 128_000) == 9
    assert check_options("hbm", {}, "t").capacity(100, 5) == 1
    assert check_options("hbm", {}, "t").capacity(4, 1 << 62) == 1 << 40
    assert dynamic.host_memory_bytes() > 1 << 20


def test_unknown_options_list_the_known_ones():
    with pytest.raises(TypeError, match=r"table 't': DynamicVariable has no option 'max_capcity'.*max_capacity.*io_by"):
        check_options("hbm", {"max_capcity": 5}, "t")


@pytest.mark.parametrize(
    ("error", "var_type", "options", "message"),
    [
        (ValueError, "hmb", {}, "unknown var_type 'hmb'"),
        (ValueError, 3, {}, "unknown var_type 3"),
        (TypeError, "hbm", {"init_capacity": 1.5}, "init_capacity must be an integer"),
        (TypeError, "hbm", {"max_capacity": True}, "max_capacity must be an integer"),
        (ValueError, "hbm", {"max_capacity": 0}, "max_capacity must be in"),
        (ValueError, "hbm", {"max_capacity": (1 << 40) + 1}, "max_capacity must be in"),
        (ValueError, "hybrid", {"max_capacity": 5, "init_capacity": 6}, "init_capacity 6 is above max_capacity 5"),
        (TypeError, "hybrid", {"max_hbm_for_vectors": "2"}, "max_hbm_for_vectors must be a number"),
        (ValueError, "hybrid", {"max_hbm_for_vectors": float("nan")}, "max_hbm_for_vectors must be in"),
        (ValueError, "hybrid", {"max_load_factor": 1.5}, "max_load_factor must be in"),
        (TypeError, "hybrid", {"io_by_cpu": 1}, "io_by_cpu must be True or False"),
        (ValueError, "hybrid", {"evict_strategy": "mru"}, "evict_strategy 'mru'.*'lru'"),
        (TypeError, "hybrid", {"evict_strategy": 1}, "evict_strategy must be a string"),
        (ValueError, "hybrid", {"filter_ratio": 1.5}, "filter_ratio must be in"),
        (ValueError, "hybrid", {"half_life": 5}, "half_life is for 'lfu' and 'epoch_lfu', evict_strategy is 'lru'"),
        (ValueError, "hybrid", {"admission_threshold": -1}, "admission_threshold must be in"),
        (ValueError, "hybrid", {"admission_candidates": 5}, "for an admission_threshold of 2 or more"),
        (ValueError, "hybrid", {"time_to_live": float("inf")}, "time_to_live must be in"),
        (TypeError, "hybrid", {"time_to_live": "1h"}, "time_to_live must be a number"),
    ],
)
def test_wrong_options(error, var_type, options, message):
    with pytest.raises(error, match=message):
        check_options(var_type, options, "t")


def test_key_types():
    for given in (None, "int64", np.int64, np.dtype("int64")):
        assert dynamic.check_key_type(given, "t") == "int64"
    assert dynamic.check_key_type("torch.int32", "t") == "int32"
    for given in ("uint64", float, 3, np.int16):
        with pytest.raises(TypeError, match="table 't': key_type must be int32 or int64"):
            dynamic.check_key_type(given, "t")


def test_dimensions():
    assert dynamic.check_dimension(np.int32(3), "t") == 3
    with pytest.raises(ValueError, match="the dimension of table 't' must be in"):
        dynamic.check_dimension(0, "t")
    for given in (True, 2.0, None):
        with pytest.raises(TypeError, match="the dimension of table 't' must be an integer"):
            dynamic.check_dimension(given, "t")


def test_epochs():
    assert dynamic.check_epoch(np.int64(3), "epoch_lfu", "t") == 3
    assert dynamic.check_epoch(2**31 - 2, "epoch_lru", "t") == 2**31 - 2
    for epoch, strategy in ((2**31 - 1, "epoch_lru"), (2047, "epoch_lfu"), (-1, "epoch_lru")):
        with pytest.raises(ValueError, match=r"the epoch of table 't' must be in \[0, "):
            dynamic.check_epoch(epoch, strategy, "t")
    with pytest.raises(TypeError, match="the epoch of table 't' must be an integer"):
        dynamic.check_epoch(1.0, "epoch_lru", "t")
    for strategy in ("lru", "lfu", "customized", None):
        with pytest.raises(ValueError, match=rf"table 't' has no epochs: evict_strategy is {strategy!r}"):
            dynamic.check_epoch(1, strategy, "t")


def test_scores():
    dynamic.check_has_scores("customized", "t")
    for strategy in ("lru", "epoch_lfu", None):
        with pytest.raises(ValueError, match=rf"table 't' have no scores of yours: evict_strategy is {strategy!r}"):
            dynamic.check_has_scores(strategy, "t")
    ranks, uses = np.array([0, 7, dynamic.MOST_SCORE]), np.array([5, 2**31 - 3, 0])
    scores = dynamic.with_ranks(uses, ranks)
    assert scores.tolist() == [rank * 2**32 + use for rank, use in zip(ranks.tolist(), uses.tolist(), strict=True)]
    assert dynamic.ranks_in(scores).tolist() == ranks.tolist() and (scores < 2**63 - 2**32).all()
    again = dynamic.with_ranks(scores, ranks[::-1])
    assert dynamic.ranks_in(again).tolist() == ranks[::-1].tolist() and (again % 2**32 == uses).all()


def test_statistics():
    counts = {"insertions": 5, "evictions": 2, "refusals": 1, "expirations": 3}
    statistics = Statistics.of(3, 4, 10, **counts)
    assert statistics == Statistics(size=3, capacity=4, load_factor=0.75, lookups=10, hits=4, misses=6, **counts)
    moved = {"device_hits": 7, "host_hits": 3, "moves": 2, "host_bytes": 640}
    assert dataclasses.asdict(Statistics.of(3, 4, 10, **counts, **moved)).items() >= moved.items()
    with pytest.raises(AttributeError):
        statistics.size = 1  # type: ignore[misc]


def test_initializers():
    assert dynamic.check_initializer(None, 4, "t") == parse_initializer("uniform", 10, 4)
    for given in ("random", "normal", "uniform", "ones", "zeros", 0.5, "0.5"):
        assert dynamic.check_initializer(given, 4, "t") == parse_initializer(given, 10, 4)
    own = Initializer(2, 0.0, 1.0, 7)
    assert dynamic.check_initializer(own, 4, "t") is own
    for given in (lambda rows: None, True, [1.0]):
        with pytest.raises(TypeError, match="table 't': the initializer of a dynamic table must be"):
            dynamic.check_initializer(given, 4, "t")
    with pytest.raises(ValueError, match="takes the number of rows"):
        dynamic.check_initializer("glorot_uniform", 4, "t")
    with pytest.raises(ValueError, match="unknown initializer 'gauss'"):
        dynamic.check_initializer("gauss", 4, "t")


def test_placement_of_any_keys():
    keys = np.array([0, 1, -1, -4, 2**63 - 1, -(2**63)])
    place = Placement(ANY_KEY, 4, num_ranks=3, rank=2)
    assert place.owner_of(keys).tolist() == [int(key) % 3 for key in keys]
    assert place.mine(keys).tolist() == [int(key) % 3 == 2 for key in keys]
    assert Placement(ANY_KEY, 4, 1, 3, 1).mine(keys).all()
    for name in ("first_key", "key_stride", "local_rows", "local_shape", "rows"):
        with pytest.raises(ValueError, match="the keys of a dynamic table are any integers"):
            getattr(place, name)
    for method in (place.key_map, place.global_keys):
        with pytest.raises(ValueError, match="the keys of a dynamic table are any integers"):
            method(keys)
