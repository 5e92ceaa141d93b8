# SPDX-License-Identifier: Apache-2.0
"""Rows written by any number of ranks are read by any number, bit for bit."""

import dataclasses
import itertools
import os
import shutil

import checkpoint_cases as cases
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparse_operation_kit.checkpoint as ck

WORLDS = list(itertools.product((1, 2, 3, 4), (1, 2, 3, 4)))


@pytest.mark.parametrize(("writers", "readers"), WORLDS)
@pytest.mark.parametrize("mode", ["distributed", "localized:1"])
def test_world_sizes_optimizers_dimensions(tmp_path, writers, readers, mode):
    for (optimizer, states), dimension in itertools.product(cases.OPTIMIZERS.items(), (1, 3, 64)):
        held = cases.model(rows=29, dimension=dimension, optimizer=optimizer, mode=mode)
        path = tmp_path / f"{optimizer}{dimension}"
        cases.results(cases.dump(path, [held], writers, chunk_bytes=512))
        cases.check(cases.load(path, [held], readers), [held])
        files = {"sok_manifest.json", "table0_0-key", "table0_0-weight"}
        assert set(os.listdir(path)) == files | {f"table0_0-{optimizer}-{slot}" for slot in states}


@pytest.mark.parametrize(("writers", "readers"), WORLDS)
@pytest.mark.parametrize("verify", ["before", "during"])
def test_many_tables(tmp_path, writers, readers, verify):
    held = [
        cases.model("one:0", 40, 8),
        cases.model("two:0", 17, 1, mode="localized:0"),
        cases.model("three:0", 31, 5, kind="dynamic"),
        cases.model("four:0", 12, 2, kind="dynamic", key_dtype="int32", mode="localized:2"),
        cases.model("rows fewer than ranks", 2, 3),
        cases.model("no rows", 0, 3, kind="dynamic"),
    ]
    cases.results(cases.dump(tmp_path / "d", held, writers, shuffle=1, chunk_bytes=64))
    cases.check(cases.load(tmp_path / "d", held, readers, verify=verify), held)


@pytest.mark.parametrize("value_dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("key_dtype", ["int32", "int64", "uint32", "uint64"])
def test_dtypes(tmp_path, value_dtype, key_dtype):
    held = cases.model(value_dtype=value_dtype, key_dtype=key_dtype)
    cases.results(cases.dump(tmp_path / "d", [held], 2))
    cases.check(cases.load(tmp_path / "d", [held], 3), [held])


@pytest.mark.parametrize("owner", [-1, 0, 1])
@pytest.mark.parametrize("mode", ["distributed", "localized:0"])
def test_reader_places_rows_by_its_own_mode(tmp_path, mode, owner):
    held = cases.model(mode=mode)
    cases.results(cases.dump(tmp_path / "d", [held], 2))
    cases.check(cases.load(tmp_path / "d", [held], 3, owner=owner), [held])


NARROW = {"float16": (65519.0, 65520.0), "bfloat16": (3.3961e38, 3.3962e38)}


@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("verify", ["before", "during"])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_row_that_a_narrower_table_does_not_hold(tmp_path, readers, dtype, verify, legacy):
    """One element alone is too large; infinities and NaN stay what they are, and so does what rounds to a number."""
    held, path = cases.model("t:0", 301, 4), tmp_path / "d"
    most, beyond = NARROW[dtype]
    held.weights[:] = 1
    held.weights[:5, 0] = np.array([np.inf, -np.inf, np.nan, most, -most])
    for place, value in ((3, None), (17, beyond), (200, -beyond)):
        weights = held.weights.copy()
        if value is not None:
            weights[place, 2] = value
        changed = dataclasses.replace(held, weights=weights)
        if legacy:
            cases.write_legacy(path, changed)
        else:
            cases.results(cases.dump(path, [changed], 2, shuffle=1, chunk_bytes=256))
        found: list[ck.Rows] = []

        def run(group, found=found):
            target = ck.Target("t:0", 4, found.append, rows=301, row_dtype=dtype)
            return ck.load(path, [target], group=group, verify=verify, progress=False)

        outcomes = cases.on_ranks(readers, run)
        if value is None:
            cases.results(outcomes)
            assert sum(len(rows.keys) for rows in found) == 301
            continue
        refused = [outcome for outcome in outcomes if isinstance(outcome, ck.MismatchError)]
        assert refused and all(isinstance(each, (ck.MismatchError, ck.PeerError)) for each in outcomes)
        number = str(np.float32(value))
        assert f"weight: the row of key {held.keys[place]} has the element {number}" in str(refused[0])
        assert f"what {dtype} holds, the dtype of 't:0'" in str(refused[0])
        assert verify == "during" or not found
        shutil.rmtree(path)


def test_rows_of_bfloat16_are_not_looked_at_for_bfloat16(tmp_path):
    """They fit; of a dump that says something else than it holds nothing is known."""
    held = cases.model("t:0", 9, 4)
    held.table = dataclasses.replace(held.table, row_dtype="bfloat16")
    held.weights[1, 1] = NARROW["bfloat16"][1]
    cases.results(cases.dump(tmp_path / "d", [held]))
    for dtype in ("bfloat16", "float32", None):
        ck.load(tmp_path / "d", [ck.Target("t:0", 4, lambda rows: None, rows=9, row_dtype=dtype)], progress=False)
    with pytest.raises(ck.MismatchError, match="float16 holds"):
        ck.load(tmp_path / "d", [ck.Target("t:0", 4, lambda rows: None, rows=9, row_dtype="float16")], progress=False)


def test_metadata_comes_back(tmp_path):
    held = cases.model()
    cases.results(cases.dump(tmp_path / "d", [held], 3, frontend="test 1"))
    with ck.open_dump(tmp_path / "d") as dump:
        assert (dump.world_size, dump.step, dump.extra) == (3, 5, {"note": "é"})
        assert dump.optimizer == ck.Optimizer("Adam", 17, {"learning_rate": 0.1, "nested": {"a": [1, None]}})
        stored = dump.table("table0:0")
        assert stored.table == held.table.__class__(**{**held.table.__dict__, "key_dtype": "int64"})
        assert stored.layout.parts == (8, 8, 7)
        assert dump.manifest.writer["frontend"] == "test 1"


def test_weights_alone(tmp_path):
    """A dump with states loads without them."""
    held = cases.model()
    cases.results(cases.dump(tmp_path / "d", [held], 2))
    loaded = cases.Loaded(held, -1)
    ck.load(tmp_path / "d", [loaded.target(states={})])
    assert [states for _, _, states in loaded.parts] == [{}] * len(loaded.parts)
    assert sum(len(keys) for keys, _, _ in loaded.parts) == len(held.keys)


def test_some_tables(tmp_path):
    held = [cases.model("a"), cases.model("b")]
    cases.results(cases.dump(tmp_path / "d", held, 2))
    cases.check(cases.load(tmp_path / "d", held[1:], 2), held[1:])


def test_a_rank_reads_only_what_it_needs(tmp_path, monkeypatch):
    """At the same world size every rank reads its own part of the weights and nothing else of them."""
    held = cases.model(rows=4000, dimension=16, optimizer=None)
    cases.results(cases.dump(tmp_path / "d", [held], 4, chunk_bytes=4096))
    total = []
    original = os.preadv

    def counted(fd, buffers, offset):
        count = original(fd, buffers, offset)
        if os.readlink(f"/proc/self/fd/{fd}").endswith("-weight") and offset >= 296:
            total.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counted)
    cases.check(cases.load(tmp_path / "d", [held], 4, verify="during"), [held])
    assert sum(total) == 4000 * 16 * 4
    total.clear()
    cases.check(cases.load(tmp_path / "d", [held], 4), [held])
    assert sum(total) == 2 * 4000 * 16 * 4  # once for the digests, once for the rows


@given(
    rows=st.integers(0, 60),
    dimension=st.integers(1, 9),
    writers=st.integers(1, 4),
    readers=st.integers(1, 4),
    chunk_bytes=st.integers(1, 600),
    kind=st.sampled_from(["static", "dynamic"]),
    optimizer=st.sampled_from([None, *cases.OPTIMIZERS]),
    mode=st.sampled_from(["distributed", "localized:0", "localized:3"]),
    shuffle=st.one_of(st.none(), st.integers(0, 100)),
)
def test_any_dump_comes_back(
    tmp_path_factory, rows, dimension, writers, readers, chunk_bytes, kind, optimizer, mode, shuffle
):
    held = cases.model(rows=rows, dimension=dimension, kind=kind, optimizer=optimizer, mode=mode)
    path = tmp_path_factory.mktemp("any") / "d"
    cases.results(cases.dump(path, [held], writers, chunk_bytes=chunk_bytes, shuffle=shuffle))
    cases.check(cases.load(path, [held], readers), [held])
