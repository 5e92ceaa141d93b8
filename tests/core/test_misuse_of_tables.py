# SPDX-License-Identifier: Apache-2.0
"""As test_misuse, for functions of hash indices and dynamic tables."""

import ctypes

import numpy as np
import pytest
from world import INVALID, bad_views, is_pointer

from sparse_operation_kit import core
from sparse_operation_kit.core import _abi, _arrays

REQUESTS = ("sok_hash_index_find", "sok_hash_index_find_or_insert", "sok_hash_index_erase")


class Tables:
    """A table with keys, and right arguments of every function that has a context."""

    def __init__(self):
        self.table = core.DynamicTable(10, 4, eviction="lru", name="mine")
        core.locate([self.table.table()], np.arange(3), [[3]], insert=True)
        self.keys, self.slots, self.rows = np.array([1, 9, 1]), np.zeros(3, np.int64), np.zeros((3, 4), np.float32)
        self.is_new, self.count = np.zeros(3, np.uint8), np.zeros(1, np.int64)
        views = list(map(_arrays.view, (self.keys, self.slots, self.is_new)))
        self.requests = (_abi.HashIndexRequest * 1)(_abi.HashIndexRequest(self.table.index.handle, *views))
        self.size, self.number = ctypes.c_int64(), ctypes.c_int32()

    def arguments(self):
        context, index, table = core.Context().struct, self.table.index.handle, self.table.handle
        exported = map(_arrays.view, (self.keys, self.slots, self.count))
        keys = _arrays.view(self.keys)
        return {
            **{function: [context, 1, self.requests] for function in REQUESTS},
            "sok_hash_index_reserve": [context, index, 5],
            "sok_hash_index_clear": [context, index],
            "sok_hash_index_size": [context, index, ctypes.pointer(self.size)],
            "sok_hash_index_export": [context, index, 0, *exported],
            "sok_dynamic_table_erase": [context, table, keys, _arrays.view(self.slots)],
            "sok_dynamic_table_clear": [context, table],
            "sok_dynamic_table_prefetch": [context, 1, (ctypes.c_void_p * 1)(table), (_abi.Tensor * 1)(keys)],
            "sok_dynamic_table_shrink": [context, table, ctypes.pointer(self.size)],
            "sok_dynamic_table_set_scores": [context, table, _arrays.view(self.slots), _arrays.view(self.slots)],
            "sok_dynamic_table_add_column": [context, table, _abi.FLOAT32, 4, 0.0, ctypes.pointer(self.number)],
            "sok_dynamic_table_read_and_evict": [
                *(context, table, _arrays.view(self.keys), _arrays.view(self.rows), _arrays.view(self.slots)),
                *(_arrays.view(np.zeros((3, 4), np.float32)), ctypes.pointer(self.size)),
            ],
            "sok_dynamic_table_read": [context, table, _arrays.view(self.keys), _arrays.view(self.rows)],
        }

    def fails(self, function, arguments=None):
        before = self.table.index.export()[0].tolist()
        assert getattr(_abi.library(), function)(*(arguments or self.arguments()[function])) == INVALID
        assert _abi.library().sok_last_error_message()
        assert self.table.index.export()[0].tolist() == before


FUNCTIONS = [
    name
    for name, (_, kinds) in _abi.PROTOTYPES.items()
    if ctypes.POINTER(_abi.Context) in kinds and name.startswith(("sok_hash_index_", "sok_dynamic_table_"))
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_null_pointers_and_bad_views(function):
    assert set(FUNCTIONS) == set(Tables().arguments())
    assert getattr(_abi.library(), function)(*Tables().arguments()[function]) == 0
    for position, kind in enumerate(_abi.PROTOTYPES[function][1]):
        if is_pointer(kind) or kind is ctypes.c_void_p:
            tables = Tables()
            arguments = tables.arguments()[function]
            arguments[position] = None
            tables.fails(function, arguments)
        if kind is _abi.Tensor:
            for _, view in bad_views(Tables().arguments()[function][position]):
                tables = Tables()
                arguments = tables.arguments()[function]
                arguments[position] = view
                tables.fails(function, arguments)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_call_on_another_device(function):
    tables = Tables()
    arguments = tables.arguments()[function]
    arguments[0].device = _abi.Device(_abi.CUDA, 0)
    tables.fails(function, arguments)
    assert "another device" in _abi.library().sok_last_error_message().decode()


@pytest.mark.parametrize("function", REQUESTS)
def test_bad_requests(function):
    for field in ("keys", "slots", "is_new"):
        if field == "is_new" and not function.endswith("insert"):
            continue
        for what, view in bad_views(getattr(Tables().requests[0], field)):
            if field == "is_new" and what == "alignment":
                continue  # bytes lie anywhere
            tables = Tables()
            setattr(tables.requests[0], field, view)
            tables.fails(function)
    tables = Tables()
    tables.requests[0].index = None
    tables.fails(function)
    arguments = tables.arguments()[function]
    arguments[1] = -1
    tables.fails(function, arguments)


def test_configs():
    for create, make in (
        ("sok_hash_index_create", lambda: _hash_config()),
        ("sok_dynamic_table_create", lambda: _table_config()),
    ):
        function, handle = getattr(_abi.library(), create), ctypes.c_void_p()
        assert function(ctypes.byref(make()), None) == INVALID
        assert function(None, ctypes.byref(handle)) == INVALID
        for change in ("struct_size", "device"):
            config = make()
            if change == "device":
                (config.index if hasattr(config, "index") else config).device = _abi.Device(7, 0)
            else:
                config.struct_size += 8
            assert function(ctypes.byref(config), ctypes.byref(handle)) == INVALID
            assert change in _abi.library().sok_last_error_message().decode()
    assert not handle


def _hash_config():
    return _abi.HashIndexConfig(ctypes.sizeof(_abi.HashIndexConfig), _abi.Device(_abi.CPU, 0), 10, 0, b"mine")


def _table_config():
    initial = core.Initializer().struct()
    return _abi.DynamicTableConfig(ctypes.sizeof(_abi.DynamicTableConfig), _hash_config(), 4, _abi.FLOAT32, initial)
