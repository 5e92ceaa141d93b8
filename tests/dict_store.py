# SPDX-License-Identifier: Apache-2.0
"""A RowStore of the tests' own, which fails when it is told to."""

import numpy as np

from sparse_operation_kit.row_store import RowStore


class DictStore(RowStore):
    """A user's own store. `fails`: the method that raises, or None for any, and after how many calls; `called`: is told
    the methods that are called."""

    def __init__(self):
        self.records = {}
        self.fails = None
        self.called = None

    def _call(self, method):
        if self.called is not None:
            self.called(method)
        if self.fails is not None and self.fails[0] in (method, None):
            self.fails = (self.fails[0], self.fails[1] - 1)
            if self.fails[1] < 0:
                raise ConnectionError("the store is away")

    def read(self, keys):
        self._call("read")
        found = np.array([key in self.records for key in keys.tolist()], np.bool_)
        records = [self.records[key] for key in keys[found].tolist()]
        return found, np.stack(records) if records else np.zeros((0, 0), np.uint8)

    def write(self, keys, records):
        self._call("write")
        assert records.dtype == np.uint8 and len(set(keys.tolist())) == len(keys) == len(records)
        self.records.update(zip(keys.tolist(), records.copy(), strict=True))

    def erase(self, keys):
        self._call("erase")
        for key in keys.tolist():
            self.records.pop(key, None)

    def keys(self, size):
        self._call("keys")
        keys = np.array(sorted(self.records, reverse=True), np.int64)
        return (keys[first : first + size] for first in range(0, len(keys), size))

    def size(self):
        self._call("size")
        return len(self.records)
