# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables that are restored, copied or shrunk, in both frontends."""

import time
from typing import Any

import numpy as np
from dynamic_policies import Calls

from sparse_operation_kit.checkpoint import writer


class Kept(Calls):
    """Admission, expiry and epochs go on where a table is restored, copied or shrunk; beside Calls. `ways` are a
    frontend's.
    """

    before: Any = None
    """Called with a table that is restored, before it is."""

    def another(self, options):
        table = self.make(**options)
        if self.before is not None:
            self.before(table)
        return table

    def ways(self, tmp_path):
        """name -> a function of (a table, options of such a table) that gives another with what it has."""

        def dumped(table, options):
            self.sok.dump(tmp_path / "d", table)
            other = self.another(options)
            self.assign(other, [77])
            self.sok.load(tmp_path / "d", other)
            return other

        def shrunk(table, options):
            table.shrink()
            return table

        return {"dump": dumped, "shrink": shrunk, **self.copies(tmp_path)}

    def copies(self, tmp_path):
        """Those of the framework."""
        raise NotImplementedError

    def test_counts_of_keys_that_wait(self, tmp_path):
        options = {"admission_threshold": 3, "evict_strategy": "lfu"}
        for name, way in self.ways(tmp_path).items():
            table = self.make(**options)
            for keys in ([1, 2], [1], [9], [9], [9]):
                self.train(table, keys)
            assert self.held(table) == {9}
            other = way(table, options)
            assert self.held(other) == {9}, name
            self.train(other, [2])
            assert self.held(other) == {9}, name
            self.train(other, [1])
            self.train(other, [2])
            assert self.held(other) == {1, 2, 9}, name

    def test_times_of_last_use(self, tmp_path):
        options = {"time_to_live": 64.0}
        for name, way in self.ways(tmp_path).items():
            table = self.make(**options)
            self.train(table, [1])
            self.train(table, [2])
            held = self.sok.checkpoint._frontend.held(table)
            hour = 3600 * 10**9
            held.set_use_times(np.array([[1, time.time_ns() - hour], [2, time.time_ns()]]))  # 1 was used an hour ago
            other = way(table, options)
            assert self.sok.expire(other, max_age=2 * 3600).tolist() == [], name
            self.train(other, [3])
            assert self.held(other) == {2, 3} and other.statistics().expirations == 1, name

    def test_generations_are_numbered_anew_in_a_load(self, tmp_path, monkeypatch):
        """Rows come in several pieces, and stay in the order, and of the age, that the dump has."""
        monkeypatch.setattr(writer, "chunk_rows", lambda *_: 2)
        options = {"evict_strategy": "lru", "time_to_live": 10_000.0}
        table, other = self.make(**options), self.make(**options)
        most, now, keys = 2**31 - 3, time.time_ns(), np.arange(8)
        self.train(table, keys.tolist())
        held = self.sok.checkpoint._frontend.held(table)
        # Late ones are at both ends: where the first pieces have them, the later ones come after the last number.
        uses = np.array([most - 1, most - 2, 2**30 + 5, most - 4, 7, most - 6, 2**30 + 1, most])
        held.kept["score"].write(held.find(keys), uses)
        ages = np.arange(8) * 100 * 10**9  # of these, ascending, from the last on
        held.set_use_times(np.stack([np.sort(uses), np.sort(now - ages)], axis=1))
        self.sok.dump(tmp_path / "d", table)
        self.sok.load(tmp_path / "d", other)
        loaded = self.sok.checkpoint._frontend.held(other)
        slots = loaded.find(keys)
        scores = loaded.kept["score"].read(slots)
        np.testing.assert_array_equal(scores, np.maximum(uses - 2**30, 0))
        last_uses = loaded.kept["used"].read(slots)
        wanted = np.sort(now - ages)[np.argsort(np.argsort(uses))]
        begun = uses > 2**30  # of what is 0 nothing is known
        assert np.abs(last_uses - wanted)[begun].max() <= 10**9, (last_uses - wanted) / 1e9

    def test_over_rows_that_are_idle(self, tmp_path):
        """What a table has that is restored would expire with the next keys that come."""
        hour = 3600 * 10**9

        def before(other):
            self.assign(other, [2, 5, 6])
            times = np.array([[1, time.time_ns() - hour], [2, time.time_ns()]])
            self.sok.checkpoint._frontend.held(other).set_use_times(times)

        self.before = before
        options = {"time_to_live": 64.0}
        for name, way in self.ways(tmp_path).items():
            table = self.make(**options)
            self.train(table, [1, 2, 3])
            assert self.held(way(table, options)) == {1, 2, 3}, name

    def test_the_epoch(self, tmp_path):
        """It is that of the newest row, also where the table was in a later one."""
        self.before = lambda other: other.set_epoch(5)
        options = {"evict_strategy": "epoch_lru", "max_capacity": 2}
        for name, way in self.ways(tmp_path).items():
            table = self.make(**options)
            for epoch in (2, 3):
                table.set_epoch(epoch)
                self.train(table, [epoch], self.optimizer("sgd", [table], 0.0))
            other = way(table, options)
            optimizer = self.optimizer("sgd", [other], 0.0)
            self.train(other, [4], optimizer)
            assert self.held(other) == {3, 4}, name
            other.set_epoch(4)
            self.train(other, [3], optimizer)
            self.train(other, [5], optimizer)
            assert self.held(other) == {3, 5}, name

    def test_the_epoch_of_rows_without_an_order(self, tmp_path):
        """It is the table's own, which stays. Checkpoints of TensorFlow have an order where the table does."""
        self.before = lambda other: other.set_epoch(5)
        for name, way in self.ways(tmp_path).items():
            if name not in ("dump", "state_dict"):
                continue
            table = self.make(var_type="hbm")
            self.train(table, [1, 2])
            other = way(table, {"evict_strategy": "epoch_lru"})
            self.train(other, [3])
            held = self.sok.checkpoint._frontend.held(other)
            keys = np.array([1, 2, 3])
            assert [*held.kept["score"].read(held.find(keys)) >> 32] == [5, 5, 5], name
