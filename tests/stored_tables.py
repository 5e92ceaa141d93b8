# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables whose rows go to a store and come back, in both frontends; beside tables without a bound."""

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from dict_store import DictStore
from dynamic_policies import DIMENSION, Calls

from sparse_operation_kit import checkpoint

CAPACITY, KEYS = 40, 300
WITHOUT_BOUND = {"var_type": "hbm", "max_capacity": None, "evict_strategy": None}


class Stored(Calls):
    """Beside Calls; `eager` also says whether a frontend has compiled steps."""

    def pair(self, store, **options):
        """A table with a store, and one without a bound, of the same rows."""
        whole = {**options, **WITHOUT_BOUND, "half_life": None}
        return self.make(**{"max_capacity": CAPACITY, **options}, store=store), self.make(**whole)

    def content(self, table):
        keys, rows = (np.asarray(part) for part in self.sok.export(table))
        assert len(set(keys.tolist())) == len(keys)
        return {key: row.tobytes() for key, row in zip(keys.tolist(), rows.astype(np.float32), strict=True)}

    def ids(self, keys):
        """As lookup_sparse takes them, each a bag of its own."""
        raise NotImplementedError

    def lookups(self, table, batches):
        """A loss of several lookups, in calls of their own, and a step of "sgd" by 1."""
        raise NotImplementedError

    def copies(self, table):
        """Calls of the framework that copy or save a table."""
        raise NotImplementedError

    def fill(self, *tables):
        """With the keys 0 to 29."""
        for table in tables:
            for first in range(0, 30, 6):
                self.assign(table, range(first, first + 6))

    def rng(self):
        seed = int.from_bytes(os.urandom(4))
        print("seed", seed)
        return np.random.default_rng(seed)

    def batches(self, rng, count):
        """(keys, row splits, weights); some keys come again and again."""
        for _ in range(count):
            n = int(rng.integers(1, CAPACITY - 5))
            keys = np.where(rng.random(n) < 0.3, rng.integers(0, 10, n), rng.integers(-KEYS // 2, KEYS // 2, n))
            yield keys.tolist(), [0, n // 3, n // 3, n], rng.normal(size=n).astype(np.float32)

    @pytest.mark.parametrize(
        ("kind", "options"),
        (
            ("adam", {}),
            ("sgd", {"evict_strategy": "lfu", "dtype": "float16"}),
            ("adagrad", {"evict_strategy": "epoch_lfu", "half_life": 5}),
            ("adam", {"evict_strategy": "epoch_lru", "admission_threshold": 2, "admission_candidates": 1000}),
        ),
    )
    def test_trains_like_a_table_without_a_bound(self, kind, options, tmp_path):
        rng = self.rng()
        store = self.sok.DiskStore(tmp_path / "s")
        tables = self.pair(store, **self.options(options))
        optimizers = [self.optimizer(kind, [table], 0.1) for table in tables]
        batches = list(self.batches(rng, 40))
        for step, (keys, splits, weights) in enumerate(batches):
            results = [
                self.step([table], keys, splits, weights, ["mean"], optimizer)
                for table, optimizer in zip(tables, optimizers, strict=True)
            ]
            for (outputs, gradient), (wanted, wanted_gradient) in [results]:
                np.testing.assert_array_equal(outputs[0], wanted[0])
                np.testing.assert_array_equal(gradient, wanted_gradient)
            if step % 3 == 0 and step + 1 < len(batches):
                self.sok.prefetch(tables[0], self.ids(batches[step + 1][0]))
            if step % 5 == 0:
                before = (
                    self.content(tables[0]),
                    set(np.concatenate([*store.keys(1000), np.zeros(0, np.int64)]).tolist()),
                )
                asked = rng.integers(-KEYS, KEYS, 50).tolist()
                np.testing.assert_array_equal(*(self.read(table, asked) for table in tables))
                after = (
                    self.content(tables[0]),
                    set(np.concatenate([*store.keys(1000), np.zeros(0, np.int64)]).tolist()),
                )
                assert before == after
            assert int(tables[0].size) <= CAPACITY and int(tables[0].size) + tables[0].stored == int(tables[1].size)
        assert self.content(tables[0]) == self.content(tables[1]) and tables[0].stored > 50
        assert self.held(tables[0]) == self.held(tables[1])
        statistics = tables[0].statistics()
        assert statistics.evictions == 0 and statistics.insertions > 2 * CAPACITY

    @pytest.mark.parametrize("strategy", ("lru", "lfu"))
    @pytest.mark.parametrize("numbered_anew", (False, True))
    def test_rows_of_the_running_step_stay(self, strategy, numbered_anew):
        """Several lookups before a step, with a prefetch between them; also where generations are numbered anew before
        or after any of them.
        """
        rng, store = self.rng(), DictStore()
        tables = self.pair(store, evict_strategy=strategy)
        for number in range(24 if numbered_anew else 12):
            if numbered_anew:
                times = np.array([[2**31 - 3 - number // 2, time.time_ns()]])
                self.sok.checkpoint._frontend.held(tables[0]).set_use_times(times)
            parts = [rng.choice(KEYS, 12, replace=False).tolist() for _ in range(3)]
            for table in tables:
                self.lookups(table, parts)
        assert self.content(tables[0]) == self.content(tables[1]) and store.size() > CAPACITY

    def test_a_dump_after_generations_were_numbered_anew(self, tmp_path):
        """Rows that went to the store before are older than those that the table has, as they were."""
        table, other = (
            self.make(store=DictStore(), max_capacity=4, evict_strategy="lru"),
            self.make(evict_strategy="lru"),
        )
        held, loaded = (self.sok.checkpoint._frontend.held(each) for each in (table, other))
        most, hour, now = 2**31 - 3, 3600 * 10**9, time.time_ns()
        held.set_use_times(np.array([[most - 20, now - 2 * hour]]))
        self.assign(table, [1, 2, 3, 4])
        self.assign(table, [5, 6])
        assert table.stored == 2
        held.set_use_times(np.array([[most - 1, now - hour], [most, now]]))
        self.assign(table, [7, 8])
        assert held.generations(0.0)[0] < most and table.stored == 4
        self.sok.dump(tmp_path / "d", table)
        self.sok.load(tmp_path / "d", other)
        here = held.export(0, held.num_slots)[0]
        slots, stored = loaded.find(here), loaded.find(np.setdiff1d(np.arange(1, 9), here))
        assert loaded.kept["score"].read(stored).max() < loaded.kept["score"].read(slots).min()
        assert loaded.kept["used"].read(stored).max() <= now - hour + 10**9

    def test_one_row_of_16_bits_comes_back(self):
        """Its record has a length that is no multiple of 4, and states of 4 bytes."""
        assert DIMENSION % 2 == 1
        tables = self.pair(DictStore(), max_capacity=2, **self.options({"dtype": "float16"}))
        optimizers = [self.optimizer("adam", [table], 0.1) for table in tables]
        for key in (1, 2, 3, 1, 2, 3, 1):
            for table, optimizer in zip(tables, optimizers, strict=True):
                self.step([table], [key], [0, 1], None, ["sum"], optimizer)
        assert tables[0].stored == 1 and self.content(tables[0]) == self.content(tables[1])

    def test_dump_and_load(self, tmp_path):
        """To a table without a bound, and to one with less room and a store; both go on as the one that was dumped."""
        rng = self.rng()
        table, _ = self.pair(DictStore())
        optimizer = self.optimizer("adam", [table], 0.1)
        batches = list(self.batches(rng, 20))
        for keys, splits, weights in batches[:12]:
            self.step([table], keys, splits, weights, ["sum"], optimizer)
        self.sok.dump(tmp_path / "d", table, optimizer)
        with checkpoint.open_dump(tmp_path / "d") as opened:
            assert sum(stored.rows for stored in opened.tables.values()) == int(table.size) + table.stored
        others = [self.make(**WITHOUT_BOUND), self.make(max_capacity=CAPACITY - 4, store=DictStore())]
        optimizers = [self.optimizer("adam", [other], 0.1) for other in others]
        for other, own in zip(others, optimizers, strict=True):
            self.step([other], [7, 8, 100_000], [0, 3], np.ones(3, np.float32), ["sum"], own)
            self.sok.load(tmp_path / "d", other, own)
            assert self.content(other) == self.content(table)
        assert int(others[1].size) == CAPACITY - 4
        for keys, splits, weights in batches[12:]:
            for each, own in ((table, optimizer), *zip(others, optimizers, strict=True)):
                self.step([each], keys, splits, weights, ["sum"], own)
        assert self.content(table) == self.content(others[0]) == self.content(others[1])
        # Without the optimizer, whose states begin again then.
        self.sok.load(tmp_path / "d", others[1])
        counts = self.sok.export_for_serving(tmp_path / "serving", others[1])
        assert list(counts.values()) == [int(others[1].size) + others[1].stored]

    def test_what_belongs_to_rows_that_are_away(self):
        """assign, erase, expire, clear, and states that a second optimizer makes while rows are in the store."""
        store = DictStore()
        table, whole = self.pair(store, max_capacity=8)
        self.fill(table, whole)
        assert (int(table.size), table.stored) == (8, 22) and self.content(table) == self.content(whole)
        for each in (table, whole):
            optimizers = [self.optimizer(kind, [each], 0.1) for kind in ("adam", "adagrad")]
            for step in range(12):
                keys = [step, step + 3, step + 9]
                self.step([each], keys, [0, 3], np.ones(3, np.float32), ["sum"], optimizers[step % 4 // 2])
            self.assign(each, [2, 29])
            assert each.erase(np.array([0, 7, 29, 999])) == 3
            gone = self.sok.expire(each, predicate=lambda keys, rows, scores: keys % 5 == 0)
            assert sorted(gone.tolist()) == [5, 10, 15, 20, 25]
        assert self.content(table) == self.content(whole) and store.size() > 8
        assert set(self.sok.expire(table, min_norm=30.0 * 3**0.5).tolist()) == self.held(whole)
        self.fill(table)
        table.clear()
        assert (int(table.size), table.stored, store.records) == (0, 0, {})

    def test_a_store_that_fails_loses_nothing(self):
        """Whatever it cannot do: the call raises, rows are as before, and it goes on when the store is back."""
        rng, store = self.rng(), DictStore()
        tables = self.pair(store)
        optimizers = [self.optimizer("adam", [table], 0.1) for table in tables]
        failures = 0
        for step, (keys, splits, weights) in enumerate(self.batches(rng, 36)):
            store.fails = (("read", "write", "erase")[step % 3], 0)
            if step % 2:
                self.sok.prefetch(tables[0], self.ids(keys))
            before = self.content(tables[1])
            try:
                self.step([tables[0]], keys, splits, None, ["sum"])
            except Exception as error:
                assert "the store is away" in str(error)
                failures += 1
            store.fails = None
            if step % 2:
                assert self.content(tables[0]).items() >= before.items()
            for table, optimizer in zip(tables, optimizers, strict=True):
                self.step([table], keys, splits, weights, ["sum"], optimizer)
        assert self.content(tables[0]) == self.content(tables[1]) and failures > 10

    def test_a_store_that_fails_at_any_call(self, tmp_path):
        """Its n-th, for each n: rows are as before, and the call again does what it is to do."""
        rng, store = self.rng(), DictStore()
        tables = self.pair(store, max_capacity=8)
        self.fill(*tables)
        dumped = self.make(**WITHOUT_BOUND)
        self.assign(dumped, range(20, 60))
        self.sok.dump(tmp_path / "d", dumped)
        calls = {
            "assign": lambda table, keys, _: self.assign(table, keys),
            "step": lambda table, keys, own: self.step([table], keys, [0, 6], np.ones(6, np.float32), ["sum"], own),
            "evaluation": lambda table, keys, _: self.read(table, keys),
            "erase": lambda table, keys, _: table.erase(np.array(keys)),
            "expire": lambda table, keys, _: self.sok.expire(table, predicate=lambda k, r, s: np.isin(k, keys)),
            "load": lambda table, keys, _: self.sok.load(tmp_path / "d", table),
            "clear": lambda table, keys, _: table.clear(),
        }
        failures = 0
        for name, call in calls.items():
            n, failed = 0, True
            while failed:
                if name == "clear":
                    self.fill(*tables)
                # The states of an optimizer of an earlier round are gone, so records are rewritten.
                owns = [self.optimizer(("adam", "adagrad")[n % 2], [table], 0.1) for table in tables]
                for table, own in zip(tables, owns, strict=True):
                    self.step([table], [0, 1], [0, 2], np.ones(2, np.float32), ["sum"], own)
                keys, before = rng.choice(40, 6, replace=False).tolist(), self.content(tables[1])
                store.fails, failed = (None, n), False
                try:
                    call(tables[0], keys, owns[0])
                except Exception as error:
                    assert "the store is away" in str(error)
                    failed = True
                store.fails = None
                if failed and name != "load":
                    # Nothing, unless it has done all and cannot count it.
                    done = {key: row for key, row in before.items() if name != "erase" or key not in keys}
                    assert self.content(tables[0]) in (before, done), (name, n)
                if failed:
                    call(tables[0], keys, owns[0])
                call(tables[1], keys, owns[1])
                assert self.content(tables[0]) == self.content(tables[1]), (name, n)
                n, failures = n + 1, failures + failed
        assert failures > 20 and store.size() == 0

    @pytest.mark.parametrize("method", ["read", "write", "erase", "keys"])
    def test_an_optimizer_goes_during_a_call(self, method):
        """Python collects it whenever it likes: records have the states that the call began with."""
        store, going = DictStore(), []
        table = self.make(max_capacity=8, store=store)

        def collect(called):
            if called == method and going:
                going.clear()
                gc.collect()  # once: it looks at all objects of a framework

        for first in range(0, 48, 6):
            kind = ("adam", "adagrad")[first // 6 % 2]
            going.append(self.optimizer(kind, [table], 0.1))
            self.step([table], [0, 1], [0, 2], np.ones(2, np.float32), ["sum"], going[0])
            store.called = collect
            self.assign(table, range(first, first + 6))
            store.called = None
            assert sorted(self.content(table)) == list(range(first + 6))
            going.clear()

    def lookups_of(self, table):
        """Functions of keys -> their rows."""
        return [lambda keys: self.train(table, keys), lambda keys: self.read(table, keys)]

    def test_threads(self):
        """Several use one table, and no row is lost."""
        table = self.make(max_capacity=64, store=DictStore())
        lookups = self.lookups_of(table)
        optimizer = self.optimizer("sgd", [table], 1.0)

        def work(me):
            rng = np.random.default_rng(me)
            for first in range(me * 1000, me * 1000 + 160, 8):
                self.assign(table, range(first, first + 8))
                keys = rng.integers(me * 1000, first + 8, 8).tolist()
                for read in lookups:
                    np.testing.assert_array_equal(read(keys), np.repeat(np.float32(keys), DIMENSION).reshape(8, -1))
                if me == 0:  # a step's rows may have gone to the store, and it is refused
                    before = self.read(table, [5000])
                    try:
                        self.train(table, [5000], optimizer)
                        before -= 1
                    except Exception as error:
                        assert "lookup" in str(error), repr(error)
                    np.testing.assert_array_equal(self.read(table, [5000]), before)
                assert table.erase(np.array(keys[:1])) == 1
                self.assign(table, keys[:1])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        keys = [me * 1000 + key for me in range(4) for key in range(160)]
        content = self.content(table)
        del content[5000]
        assert content == {key: np.full(DIMENSION, key, np.float32).tobytes() for key in keys}

    def test_more_keys_than_the_capacity(self):
        """An error, as without a store."""
        table, whole = self.pair(DictStore())
        for each in (table, whole):
            self.assign(each, range(100, 130))
            self.assign(each, range(130, 160))
        before = self.content(table)
        for keys in (range(CAPACITY + 1), range(110, 111 + CAPACITY)):
            with pytest.raises(Exception, match=rf"'t'.*{CAPACITY}"):
                self.train(table, list(keys))
        assert self.content(table) == before == self.content(whole)

    def test_refusals(self, tmp_path):
        """What a store cannot be used for is an error that says why."""
        store = DictStore()
        for options, error, message in (
            ({"evict_strategy": None}, ValueError, "a store takes the rows that evict_strategy.*None"),
            ({"evict_strategy": "customized"}, ValueError, "'customized'"),
            ({"time_to_live": 3.0}, ValueError, "do not expire by time_to_live"),
            ({"evict_strategy": "lfu", "max_hbm_for_vectors": 1.0}, ValueError, "'lru' or 'epoch_lru'"),
            ({"store": str(tmp_path)}, TypeError, r"must be a sok\.RowStore.*got str"),
        ):
            with pytest.raises(error, match=message):
                self.make(**{"store": store, **options})
        with pytest.raises(Exception, match="t: no memory"):
            self.make(store=store, max_capacity=1 << 40, init_capacity=1 << 39)
        table = self.make(store=store, max_capacity=4)
        with pytest.raises(ValueError, match="has the rows of table 't'; each has its own"):
            self.make(store=store)
        used = DictStore()
        used.write(np.array([3]), np.zeros((1, 20), np.uint8))
        with pytest.raises(ValueError, match="has 1 rows already, whose table is gone"):
            self.make(store=used)
        for key in range(9):
            self.assign(table, [key])
        refused = "has rows in a store, and .* does not know them"
        for call in (
            lambda: self.sok.sparse_read_and_evict(table, np.array([1])),
            lambda: self.sok.track_changes(table),
            lambda: self.sok.increments(table),
            lambda: self.sok.dump_async(tmp_path / "d", [table]),
            *self.copies(table),
        ):
            with pytest.raises(NotImplementedError, match=refused):
                call()
        assert len(self.content(table)) == 9 and np.array_equal(self.read(table, [5]), [[5.0] * DIMENSION])
