# SPDX-License-Identifier: Apache-2.0
"""Which rows a dynamic table gives up, said by a dictionary: the model of the state machines beside tables."""

from __future__ import annotations

STRATEGIES = ("lru", "lfu", "epoch_lru", "epoch_lfu", "customized")


class Model:
    """What a table holds: {key: [rank, generation of the last use, slot]}. Every eviction looks at all rows, as a table
    of fewer than 128 rows does."""

    def __init__(self, strategy, capacity, half_life=0):
        self.strategy, self.capacity, self.half_life = strategy, capacity, half_life
        self.rows, self.free, self.next_slot = {}, [], 0
        self.generation = self.begun = self.step = self.epoch = self.evicted = 0
        self.step_is_over = True

    def rank(self, rank):
        if self.strategy == "lfu":
            return rank + 1
        if self.strategy == "epoch_lru":
            return self.epoch
        if self.strategy == "epoch_lfu":
            return (self.epoch << 20) + (rank & 0xFFFFF) + 1
        return rank

    def newest_epoch(self):
        """Of its rows: where a table that was loaded begins."""
        most = max((rank for rank, _, _ in self.rows.values()), default=0)
        return {"epoch_lru": most, "epoch_lfu": most >> 20}.get(self.strategy, 0)

    def score(self, key):
        rank, used, slot = self.rows[key]
        return rank, used, slot

    def insert(self, keys, guests=frozenset(), beside=False):
        """Whether the keys fit, of which guests get no row; else nothing but their ranks has changed. beside: it begins
        no step, as an assignment.
        """
        if not keys:
            return True
        unique = [key for key in dict.fromkeys(keys) if key not in guests]
        new = [key for key in unique if key not in self.rows]
        self.generation += 1
        before, self.begun = self.begun, self.generation
        self.step_is_over = self.step_is_over and beside
        if self.half_life and self.generation // self.half_life > before // self.half_life:
            mask = 0xFFFFF if self.strategy == "epoch_lfu" else -1
            for row in self.rows.values():
                row[0] = (row[0] & ~mask) | (row[0] & mask) >> 1
        for key in unique:
            if key in self.rows:
                row = self.rows[key]
                row[0], row[1] = self.rank(row[0]), self.generation
        if len(unique) > self.capacity or (self.strategy is None and len(self.rows) + len(new) > self.capacity):
            return False
        for key in new:
            if len(self.rows) < self.capacity:
                slot = self.free.pop() if self.free else self.next_slot
                self.next_slot = max(self.next_slot, slot + 1)
            else:
                for last in (self.step, self.generation - 1):
                    candidates = [other for other in self.rows if self.rows[other][1] <= last]
                    if candidates:
                        break
                gone = min(candidates, key=self.score)
                slot = self.rows.pop(gone)[2]
                self.evicted += 1
            self.rows[key] = [self.rank(0), self.generation, slot]
        if self.step_is_over:
            self.end_step()
        return True

    def erase(self, keys):
        """How many of the keys it held."""
        self.generation += 1
        held = [key for key in dict.fromkeys(keys) if key in self.rows]
        for key in held:
            self.free.append(self.rows.pop(key)[2])
        return len(held)

    def clear(self):
        self.generation += 1
        self.rows, self.free, self.next_slot = {}, [], 0

    def compact(self):
        """Slots follow one another, in the order that they had."""
        for slot, row in enumerate(sorted(self.rows.values(), key=lambda row: row[2])):
            row[2] = slot
        self.free, self.next_slot = [], len(self.rows)

    def end_step(self):
        self.step = self.generation
        self.step_is_over = True
