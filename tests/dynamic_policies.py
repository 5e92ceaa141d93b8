# SPDX-License-Identifier: Apache-2.0
"""Which keys of dynamic tables get rows, and which rows stay, in both frontends: admission, expiry, fading counts."""

import os
import pathlib
import time
from typing import Any

import numpy as np
import pytest

from sparse_operation_kit import checkpoint, dynamic, expiry

DIMENSION = 3


def resident_bytes():
    """Memory that this process has."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Calls:
    """How a frontend is called: it derives from it. Everything given and returned is NumPy's."""

    sok: Any = None

    def make(self, **options):
        return self.sok.DynamicVariable(DIMENSION, name="t", initializer="normal", **{"max_capacity": 100, **options})

    def static(self, rows):
        """A `sok.Variable` of these, named "static"."""
        raise NotImplementedError

    def optimizer(self, kind, tables, rate):
        """ "sgd" or "adagrad"."""
        raise NotImplementedError

    def step(self, tables, keys, splits, weights, combiners, optimizer=None, **options):
        """(outputs, gradient of the weights) of the sum of lookups of the same keys in tables, of which the first has
        the weights; a step follows where there is an optimizer.
        """
        raise NotImplementedError

    def read(self, table, keys):
        """Rows as evaluation reads them, float32."""
        raise NotImplementedError

    def train(self, table, keys, optimizer=None, **options):
        """The rows that a lookup reads, each trained by -1 where a step follows."""
        outputs, _ = self.step([table], keys, range(len(keys) + 1), None, ["sum"], optimizer, **options)
        return outputs[0]

    def initial(self, keys):
        """Rows of an untouched table of the same name."""
        return self.read(self.make(), keys)

    def held(self, table):
        return set(np.asarray(table.indices).tolist())

    def assign(self, table, keys):
        self.sok.assign(table, np.array(keys), np.array([[key] * DIMENSION for key in keys], np.float32))

    def options(self, options):
        """With the framework's dtypes."""
        return options


class Policies(Calls):
    """What tables do by themselves: admission, expiry, counts that fade; beside Calls."""

    @pytest.mark.parametrize("options", ({}, {"evict_strategy": "lfu"}, {"dtype": "float16"}))
    def test_a_key_gets_a_row_in_the_lookup_of_the_threshold(self, options):
        table = self.make(admission_threshold=3, **self.options(options))
        optimizer = self.optimizer("adagrad", [table], 1.0)
        wanted = self.initial([5, 7, 5])
        if "dtype" in options:
            wanted = wanted.astype(np.float16).astype(np.float32)
        for step in range(3):
            rows = self.train(table, [5, 7, 5][: 3 - step % 2], optimizer)
            np.testing.assert_array_equal(rows, wanted[: 3 - step % 2])
            assert self.held(table) == ({5, 7} if step == 2 else set())
        counts = table.statistics()
        assert (counts.insertions, counts.refusals, counts.size) == (2, 4, 2)
        assert counts.hits + counts.misses == counts.lookups == 8 and counts.misses == 6
        assert not np.array_equal(self.read(table, [5]), wanted[:1])  # trained once, in its third lookup
        keys, rows = self.sok.export(table)
        assert sorted(np.asarray(keys).tolist()) == [5, 7] and tuple(rows.shape) == (2, DIMENSION)

    def test_assign_and_the_candidates_of_a_bounded_number(self):
        table = self.make(admission_threshold=2, admission_candidates=1)
        self.assign(table, [1])
        assert self.held(table) == {1}
        for keys in ([2], [3], [2], [2]):  # 3 took the place of 2
            self.train(table, keys)
        assert self.held(table) == {1, 2}

    def test_the_filter_is_for_lookups_that_ask_for_it(self):
        table = self.make(filter_ratio=0.25, max_capacity=10_000)
        keys = list(range(4000))
        rows = self.train(table, keys, use_low_frequency_filter=True)
        np.testing.assert_array_equal(rows, self.initial(keys))
        once = self.held(table)
        assert abs(len(once) / 4000 - 0.25) < 0.05
        again = self.make(filter_ratio=0.25, max_capacity=10_000)
        self.train(again, keys, use_low_frequency_filter=True)
        assert self.held(again) == once
        self.train(again, keys[:100])
        assert self.held(again) == once | set(keys[:100])
        self.train(again, [9999], use_low_frequency_filter=True, training=False)
        assert 9999 not in self.held(again)

    def test_a_static_table_beside_one_that_admits_late(self):
        """Weights, mean and a table that trains each key, in one call."""
        dynamic, static = (
            self.make(admission_threshold=2),
            self.static(np.arange(30.0, dtype=np.float32).reshape(10, 3)),
        )
        optimizer = self.optimizer("sgd", [dynamic, static], 1.0)
        weights = np.array([1.0, 2.0, 3.0], np.float32)
        rows = self.initial([1, 2])
        for step in range(2):
            (first, _), gradient = self.step(
                [dynamic, static], [1, 2, 2], [0, 1, 3], weights, ["mean", "sum"], optimizer
            )
            np.testing.assert_allclose(first, rows, rtol=1e-6)
            np.testing.assert_allclose(gradient, np.zeros(3), atol=1e-6)  # a mean of equal rows
            assert self.held(dynamic) == ({1, 2} if step == 1 else set())
        np.testing.assert_allclose(self.read(static, [1])[0], np.arange(3.0, 6.0) - 2)
        np.testing.assert_allclose(self.read(dynamic, [1, 2]), rows - 1, rtol=1e-6)

    def test_rows_that_nothing_uses_expire(self):
        table = self.make(time_to_live=1.0, evict_strategy=None)  # a step of a busy machine takes less
        self.train(table, [1, 2, 3])
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            self.train(table, [2])
            self.train(table, [1], training=False)
            time.sleep(0.02)
        assert self.held(table) == {2} and table.statistics().expirations == 2

    def test_counts_fade(self):
        """What was used often long ago goes before what is used now."""
        for half_life, stays in ((0, 1), (2, 2)):
            table = self.make(max_capacity=2, evict_strategy="lfu", half_life=half_life)
            optimizer = self.optimizer("sgd", [table], 0.0)
            for keys in [[1]] * 8 + [[2]] * 5 + [[3]]:
                self.train(table, keys, optimizer)
            assert self.held(table) == {stays, 3}, half_life

    @pytest.mark.parametrize("steps", (400, pytest.param(10_000, marks=pytest.mark.slow)))
    def test_churn_takes_no_more_memory(self, steps):
        """Most keys of a step are new, and rows go for them with their states."""
        capacity, batch, rng = 1000, 200, np.random.default_rng(2)
        table = self.sok.DynamicVariable(64, name="t", max_capacity=capacity, evict_strategy="lru")
        optimizer = self.optimizer("adagrad", [table], 0.1)
        for step in range(steps):
            self.train(table, (step * 140 + rng.integers(0, 1000, batch)).tolist(), optimizer)
            if step == 100:
                before = resident_bytes()
        assert table.statistics().evictions > steps * 100 and len(self.held(table)) == capacity
        # Rows, states and the index would be 550 bytes a key.
        assert resident_bytes() - before < 8 << 20

    def test_old_rows_go_on_call(self):
        table = self.make(time_to_live=6.4)
        self.train(table, [1, 2])
        time.sleep(1.0)
        self.train(table, [2])
        assert self.sok.expire(table, max_age=100.0).tolist() == []
        assert self.sok.expire(table, max_age=0.9).tolist() == [1] and self.held(table) == {2}


class Expiry(Calls):
    """What goes on call; beside Calls."""

    def expired(self, table, **options):
        """What goes, which is what is returned and nothing else."""
        before = self.held(table)
        gone = self.sok.expire(table, **options)
        assert gone.dtype == np.int64 and len(set(gone.tolist())) == len(gone)
        assert self.held(table) == before - set(gone.tolist())
        return set(gone.tolist())

    def test_rows_go_on_call(self):
        table = self.make(evict_strategy="lfu", max_capacity=10_000)
        keys = list(range(1, 9))
        self.assign(table, keys)  # row k has the norm k sqrt(3), and each has been used once
        for _ in range(3):
            self.train(table, [2, 8])
        assert self.expired(table, min_norm=3 * 3**0.5) == {1, 2}
        assert self.expired(table, min_norm=0.0) == set()
        assert self.expired(table, min_score=2) == {3, 4, 5, 6, 7}
        self.assign(table, [10, 11])
        self.train(table, [10])
        assert self.expired(table, max_idle=2) == {8} and self.expired(table, max_idle=0) == {10, 11}

    def test_rows_that_a_function_names_go(self, monkeypatch):
        """It is asked for some rows at a time."""
        monkeypatch.setattr(expiry, "_CHUNK_BYTES", 1000 * 4 * DIMENSION)
        monkeypatch.setattr(dynamic, "KEYS_OF_CALL", 300)
        table = self.make(evict_strategy="customized", max_capacity=4000)
        keys = np.arange(3500)
        self.sok.assign(table, keys, np.repeat(keys.astype(np.float32)[:, None], DIMENSION, 1))
        table.set_scores(np.array([5, 6]), np.array([7, 8]))
        sizes = []

        def choose(keys, rows, scores):
            sizes.append(len(keys))
            np.testing.assert_array_equal(rows, np.repeat(keys.astype(np.float32)[:, None], DIMENSION, 1))
            goes = (keys % 2 == 0) | (scores == 7)
            keys[:], rows[:], scores[:] = 0, 0, 0  # its own
            return goes

        gone = self.expired(table, predicate=choose)
        assert gone == {5, *range(0, 3500, 2)} and sizes == [1000, 1000, 1000, 500]
        gone = self.expired(table, predicate=lambda keys, rows, scores: keys == 7, min_norm=5.0)
        assert gone == {1, 7}

    def test_what_goes_takes_its_states_along(self):
        table = self.make()
        optimizer = self.optimizer("adagrad", [table], 1.0)
        for _ in range(3):
            rows = self.train(table, [1, 2], optimizer)
        assert self.expired(table, predicate=lambda keys, rows, scores: keys == 1) == {1}
        again = [self.train(table, [1], optimizer) for _ in range(2)]
        np.testing.assert_array_equal(again[0], self.initial([1]))
        fresh = self.make()
        other = self.optimizer("adagrad", [fresh], 1.0)
        wanted = [self.train(fresh, [1], other) for _ in range(2)]
        np.testing.assert_array_equal(again[1], wanted[1])
        assert not np.array_equal(rows[:1], wanted[1])

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        (
            ({}, ValueError, "say which rows are to go"),
            ({"min_norm": -1.0}, ValueError, "min_norm must not be negative"),
            ({"min_norm": float("nan")}, ValueError, "min_norm must not be negative"),
            ({"max_age": "long"}, TypeError, "max_age must be a number"),
            ({"predicate": 3}, TypeError, "predicate must be a function"),
            ({"predicate": lambda keys, rows, scores: [True]}, ValueError, r"must return booleans \[2\]"),
            ({"predicate": lambda keys, rows, scores: keys}, ValueError, r"must return booleans \[2\]"),
            ({"predicate": lambda keys, rows, scores: 1 / 0}, ZeroDivisionError, "division"),
        ),
    )
    def test_misuse_of_expire(self, options, error, message):
        table = self.make(max_capacity=300_000)
        self.assign(table, [1, 2])
        with pytest.raises(error, match=message):
            self.sok.expire(table, **options)
        assert self.held(table) == {1, 2}

    def test_expire_wants_a_dynamic_table_that_knows_what_is_asked(self):
        with pytest.raises(TypeError, match="is static"):
            self.sok.expire(self.static(np.zeros((2, 3), np.float32)), min_norm=1.0)
        with pytest.raises(TypeError, match="must be a sok"):
            self.sok.expire(3, min_norm=1.0)
        table = self.make(evict_strategy=None)
        self.assign(table, [1, 2])
        for option in ("min_score", "max_age", "max_idle"):
            with pytest.raises(
                ValueError, match=rf"'t' does not keep how its rows were used.*{option}.*a time_to_live"
            ):
                self.sok.expire(table, **{option: 1})
        without = self.expired(table, predicate=lambda keys, _, scores: np.array([scores is None] * len(keys)))
        assert without == {1, 2}


class Follow(Calls):
    """A copy follows by increments, which say what went; beside Calls."""

    def content(self, table):
        keys, rows = (np.asarray(part) for part in self.sok.export(table))
        return {key: row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)}

    def pair(self, **options):
        """(dynamic, static)"""
        return self.make(**options), self.static(np.arange(30.0, dtype=np.float32).reshape(10, 3))

    def test_copies_hold_what_the_tables_hold(self, tmp_path):
        """Whatever takes rows: eviction, erase, expire, clear; and rows that came back before anybody looked."""
        tables, copies, late = (self.pair(max_capacity=capacity) for capacity in (12, 100, 100))
        optimizer = self.optimizer("adagrad", tables, 1.0)
        rng = np.random.default_rng(4)
        changes = self.sok.increments(tables)
        following, other = self.sok.increments(copies), self.sok.increments(late)
        for number in range(1, 9):
            for _ in range(3):
                keys = rng.integers(0, 10, 4).tolist()
                self.step(tables, keys, range(5), None, ["sum", "sum"], optimizer)
                self.train(tables[0], rng.integers(10, 40, 3).tolist(), optimizer)
            if number == 3:
                tables[0].erase(np.array(keys))
            if number == 4:
                self.sok.expire(tables[0], predicate=lambda keys, rows, scores: keys % 3 == 0)
            if number == 5:
                tables[0].clear()
            if number == 6:
                gone = next(iter(self.held(tables[0])))
                tables[0].erase(np.array([gone]))
                self.train(tables[0], [gone, 77])  # made, but not stepped
            assert changes.save(tmp_path / str(number), step=number, extra={"mine": number}) == number
            assert following.load(tmp_path / str(number)) and following.number == number
            for table, copy in zip(tables, copies, strict=True):
                assert self.content(copy) == self.content(table), number
            assert not following.load(tmp_path / str(number))
            if number % 4 == 0:  # at another pace
                for earlier in range(number - 3, number + 1):
                    assert other.load(tmp_path / str(earlier))
                for table, copy in zip(tables, late, strict=True):
                    assert self.content(copy) == self.content(table)
        last = changes.save(tmp_path / "none")
        with checkpoint.open_dump(tmp_path / "none") as opened:
            assert all(stored.rows == 0 for stored in opened.tables.values()) and last == 9
        with checkpoint.open_dump(tmp_path / "2") as opened:
            assert (opened.step, opened.extra["sok_increment"]["extra"]) == (2, {"mine": 2})
        # After a restart.
        again = self.sok.increments(copies, number=following.number, series=following.series)
        assert again.load(tmp_path / "none") and again.number == 9

    def test_a_gap_is_refused(self, tmp_path):
        table, copy = self.make(), self.make()
        changes, following = self.sok.increments(table), self.sok.increments(copy)
        for number in (1, 2, 3):
            self.assign(table, [number])
            changes.save(tmp_path / str(number))
        following.load(tmp_path / "1")
        with pytest.raises(checkpoint.MismatchError, match=r"is increment 3, which follows 2.*expected increment 2"):
            following.load(tmp_path / "3")
        assert self.held(copy) == {1} and following.number == 1
        self.sok.dump(tmp_path / "whole", table)
        with pytest.raises(checkpoint.MismatchError, match="is no increment"):
            following.load(tmp_path / "whole")
        stranger = self.sok.increments(table)
        stranger.save(tmp_path / "other")
        with pytest.raises(checkpoint.MismatchError, match="of another training"):
            following.load(tmp_path / "other")
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError):
            changes.save(tmp_path / "file" / "4")
        assert changes.number == 3
        changes.save(tmp_path / "4")
        # After a restart from a dump that is older than an increment: copies may have applied that one.
        again = self.sok.increments(table, number=3, series=changes.series)
        with pytest.raises(checkpoint.StorageError, match=r"4: exists already; expected a new path"):
            again.save(tmp_path / "4")
        assert again.number == 3
        # A copy of a later dump begins with its number.
        begun = self.sok.increments(self.make(), number=3)
        assert begun.load(tmp_path / "4")

    def followers(self, **options):
        """(static, dynamic)"""
        return self.pair(**options)[::-1]

    def test_no_room_changes_nothing(self, tmp_path):
        """A table that evicts nothing is full; the table before it keeps its rows too."""
        tables = self.followers()
        full, evicting, small, delta = (
            self.followers(max_capacity=capacity, evict_strategy=strategy)
            for capacity, strategy in ((4, None), (4, "lru"), (2, "lru"), (4, None))
        )
        changes = self.sok.increments(tables)
        following, *others = (self.sok.increments(copies) for copies in (full, evicting, small))
        turns = [([], [1, 2, 3, 4]), ([1], [2, 3, 7]), ([2], [3, 8, 9])]  # keys that go and that come or change
        for number, (gone, keys) in enumerate(turns, 1):
            tables[1].erase(np.array(gone, np.int64))
            self.assign(tables[0], [number])
            self.assign(tables[1], keys)
            changes.save(tmp_path / str(number))
            for other in others:
                assert other.load(tmp_path / str(number))
            if number < 3:
                assert following.load(tmp_path / str(number))
                assert [self.content(copy) for copy in full] == [self.content(table) for table in tables]
        before = [self.content(copy) for copy in full]
        with pytest.raises(ValueError, match=r"'t' would hold 5 rows on this rank.*at most 4"):
            following.load(tmp_path / "3")
        assert [self.content(copy) for copy in full] == before and following.number == 2
        assert self.held(evicting[1]) >= {3, 8, 9} and evicting[1].size == 4 and self.held(small[1]) < {3, 8, 9}

        rows = [np.ones((1, DIMENSION), np.float32), np.ones((3, DIMENSION), np.float32)]
        self.assign(delta[1], [1, 2])
        self.sok.load_incremental(([np.array([5]), np.array([1, 3, 4])], rows), delta)  # 1 needs no other row
        before = [self.content(copy) for copy in delta]
        more = [np.array([6]), np.array([1, 3, 5])]
        self.sok.save_incremental(tmp_path / "delta", delta, more, rows)
        for source in ((more, rows), tmp_path / "delta"):
            with pytest.raises(ValueError, match=r"'t' would hold 5 rows on this rank.*at most 4"):
                self.sok.load_incremental(source, delta)
            assert [self.content(copy) for copy in delta] == before

    def test_keys_that_are_no_keys_change_nothing(self, tmp_path):
        """Keys of 64 bits where a copy has 32, and a static copy of fewer rows."""
        tables = self.followers()
        changes = self.sok.increments(tables)
        self.assign(tables[0], [9])
        self.assign(tables[1], [2**40 + 7])
        changes.save(tmp_path / "1")
        narrow, short = self.followers(key_type="int32"), [self.make(), self.static(np.zeros((9, 3), np.float32))]
        self.sok.assign(narrow[1], np.array([7], np.int32), np.ones((1, DIMENSION), np.float32))
        for copies, message in ((narrow, r"expected keys in \[-2147483648"), (short, r"key 9 is outside \[0, 9\)")):
            before = [self.content(copy) for copy in copies]
            following = self.sok.increments(copies)
            with pytest.raises(checkpoint.KeysError, match=message):
                following.load(tmp_path / "1")
            with pytest.raises(checkpoint.KeysError, match=message):
                self.sok.load_incremental(tmp_path / "1", copies)
            assert [self.content(copy) for copy in copies] == before
