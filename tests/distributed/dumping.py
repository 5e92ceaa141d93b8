# SPDX-License-Identifier: Apache-2.0
"""Tables of all kinds are dumped while they are trained: the checks of both frontends' workers."""

import pathlib
import unittest.mock
import warnings
from typing import Any

import following
import hybrid_model
import numpy as np

from sparse_operation_kit import frontend
from sparse_operation_kit.checkpoint import PeerError, writer

STATIC, MEMBERS, DIMENSION = 37, {"large": (9, 4), "small": (3, 4)}, 4
DYNAMIC: dict[str, Any] = {
    "evict_strategy": "lru",
    "admission_threshold": 2,
    "admission_candidates": 200,
}
LAYER = {name: value for name, value in hybrid_model.ALL_KINDS.items() if "threshold" in name or name == "strategy"}


def tables_of(sok, static_dtype):
    """A distributed table, one of 16 bits on the last rank, a stack, and one that evicts and admits."""
    return [
        sok.Variable(shape=(STATIC, DIMENSION), initializer="normal", name="whole"),
        sok.Variable(
            shape=(11, 3),
            initializer="normal",
            name="last",
            dtype=static_dtype,
            mode=f"localized:{sok.num_ranks() - 1}",
        ),
        sok.TableStack(MEMBERS, initializer="normal"),
        # Half of the keys or fewer fit into it, on however many ranks.
        sok.DynamicVariable(DIMENSION, "normal", name="keys", max_capacity=80 // max(2, sok.num_ranks()), **DYNAMIC),
    ]


def keys_of(sok, turn):
    """This rank's of the static tables, the stack's two members in one, and the dynamic table, four each; those of the
    last change with every turn.
    """
    rng = np.random.default_rng((turn, sok.rank()))
    rows = [STATIC, 11, *(rows for rows, _ in MEMBERS.values())]
    found = [rng.integers(0, number, 4) for number in rows]
    return [found[0], found[1], np.concatenate(found[2:]), np.tile(np.arange(20) + 20 * (turn // 2), 2)]


def content(path):
    return {file.name: file.read_bytes() for file in pathlib.Path(path).iterdir()}


def while_training(sok, group, given, step, table, optimizer):
    """given: what is dumped; step(turn): a step on all of it; table: the dynamic one."""
    options = {"step": 7, "extra": {"note": [1]}, "progress": False}

    def meet():
        group.allgather(b"")

    def raises(kinds, text, call):
        try:
            call()
        except kinds as error:
            assert text in str(error), error
        else:
            raise AssertionError("no error")
        meet()

    with following.shared_folder(group) as folder:
        path, wanted, later = (f"{folder}/{name}" for name in ("path", "wanted", "later"))
        for turn in range(8):
            step(turn)
        assert not sok.has_dump(path)
        meet()
        sok.dump(path, given, optimizer, **options)
        with unittest.mock.patch.object(frontend, "has_dump", lambda of: sok.rank() > 0 and of == path):
            assert sok.has_dump(path) == (sok.num_ranks() > 1)  # where one rank sees it all load, or say why not
        assert sok.has_dump(path)
        old = content(path)
        step(8)
        with unittest.mock.patch("time.time_ns", lambda: 10**18):  # rows of the running step were used "now"
            sok.dump(wanted, given, optimizer, **options)
            pending = sok.dump_async(path, given, optimizer, **options)
        wanted = content(wanted)
        # Rows of the first table change, and all keys of the dynamic one.
        evicted = table.statistics().evictions
        for turn in range(9, 17):
            step(turn)
        meet()
        assert evicted < table.statistics().evictions, (evicted, table.statistics())
        assert content(path) == old
        for begin in (sok.dump, sok.dump_async):
            raises(RuntimeError, "call its wait()", lambda begin=begin: begin(path, given, optimizer, **options))
        other = sok.dump_async(later, given, optimizer, **options)
        meet()
        assert not pathlib.Path(later).exists()
        pending.wait()
        meet()
        assert pending.done() and pending.path == path and content(path) == wanted
        other.wait()
        meet()
        found = content(later)
        assert found.keys() == wanted.keys()
        for name in ("whole_0-weight", "last_0-weight", "large_0-weight", "keys_0-key", "layer_2_0-weight"):
            assert found[name] != wanted[name], name

        # A rank that cannot write: nothing changes, and the next one is written.
        store = writer._Part._store

        def full(self, *arguments):
            if sok.rank() == sok.num_ranks() - 1:
                raise OSError(28, "no space for this")
            store(self, *arguments)

        with unittest.mock.patch.object(writer._Part, "_store", full):
            pending = sok.dump_async(path, given, optimizer, **options)
            raises((OSError, PeerError), "no space for this", pending.wait)
        assert content(path) == wanted
        pending = sok.dump_async(path, given, optimizer, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del pending
            meet()
        assert [str(each.message) for each in caught if "given up" in str(each.message)], caught
        assert content(path) == wanted
        assert sorted(each.name for each in pathlib.Path(folder).iterdir()) == ["later", "path", "wanted"]
        raises((TypeError, PeerError), "vars[0]", lambda: sok.dump_async(path, [3 if group.rank == 0 else given[0]]))
        meet()
        sok.dump_async(path, given, optimizer, **options).wait()
        meet()
        assert {name: data for name, data in content(path).items() if "used" not in name and "json" not in name} == {
            name: data for name, data in found.items() if "used" not in name and "json" not in name
        }
