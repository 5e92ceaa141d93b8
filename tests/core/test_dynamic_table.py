# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables: what a slot holds when a key gets it, columns that grow in place, errors that change nothing, and a
training step beside that of a static table."""

from typing import Any

import harness
import hash_keys
import numpy as np
import pytest
import range_memory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sparse_operation_kit import core

UNIFORM = core.Initializer("uniform", -1.0, 1.0, seed=11)
DTYPES = (np.float32, np.float16, core.BFLOAT16)


def insert(table, keys, context=None):
    """The slots of keys, which the table holds afterwards."""
    return core.locate([table.table()], keys, [[len(keys)]], insert=True, context=context)


def initial_rows(keys, dimension, dtype=np.float32, initializer=UNIFORM):
    return core.initialize(initializer, len(keys), dimension, keys=np.asarray(keys, np.int64), dtype=dtype)


keys_of_any_kind = st.lists(
    st.one_of(st.sampled_from(hash_keys.EXTREMES), st.integers(-9, 9), st.integers(-(2**63), 2**63 - 1)), max_size=30
).map(lambda keys: np.array(keys, np.int64))


class Machine(RuleBasedStateMachine):
    """A table of three columns and its model, a dictionary of what each key has there."""

    DIMENSION, CAPACITY = 3, 60

    @initialize(dtype=st.sampled_from((np.float32, np.float16)), early=st.booleans())
    def make(self, dtype, early):
        self.model, self.dtype = {}, dtype
        self.make_table()
        if not early:
            self.insert(np.arange(5))
        self.add_columns()

    def make_table(self):
        self.table = core.DynamicTable(self.CAPACITY, self.DIMENSION, dtype=self.dtype, initializer=UNIFORM)

    def add_columns(self):
        assert self.table.add_column(self.DIMENSION, initial=0.5) == 1
        assert self.table.add_column(1, np.int64) == 2

    @rule(keys=keys_of_any_kind)
    def insert(self, keys):
        if len(self.model.keys() | set(keys.tolist())) > self.CAPACITY:
            with pytest.raises(MemoryError, match="no room for the new ones"):
                insert(self.table, keys)
            return
        insert(self.table, keys)
        for key, row in zip(keys.tolist(), initial_rows(keys, self.DIMENSION, self.dtype), strict=True):
            self.model.setdefault(key, [row, np.full(self.DIMENSION, 0.5, np.float32), np.zeros(1, np.int64)])

    @rule(keys=keys_of_any_kind, value=st.integers(1, 100))
    def write(self, keys, value):
        slots = self.table.index.find(keys)
        for key, slot in zip(keys.tolist(), slots.tolist(), strict=True):
            assert (slot >= 0) == (key in self.model)
            if slot >= 0:
                for number, held in enumerate(self.model[key]):
                    self.table.column(number)[slot] = value + number
                    held[:] = value + number

    @rule(keys=keys_of_any_kind)
    def erase(self, keys):
        self.table.erase(keys)
        for key in keys.tolist():
            self.model.pop(key, None)

    @rule()
    def shrink(self):
        self.table.shrink()
        assert self.table.index.num_slots == len(self.model)

    @rule()
    def dump_and_load(self):
        """Keys and columns, as checkpoints have them, into another table."""
        keys, slots, count = self.table.index.export()
        keys, slots = keys[: count[0]], slots[: count[0]]
        columns = [self.table.column(number)[slots] for number in range(3)]
        self.table.close()
        self.make_table()
        self.add_columns()
        places = insert(self.table, keys)
        for number, values in enumerate(columns):
            self.table.column(number)[places] = values

    @rule(keys=keys_of_any_kind)
    def read(self, keys):
        before = self.table.index.size()
        wanted = initial_rows(keys, self.DIMENSION, self.dtype)
        for i, key in enumerate(keys.tolist()):
            if key in self.model:
                wanted[i] = self.model[key][0]
        assert harness.same_bytes([self.table.read(keys)], [wanted])
        assert self.table.index.size() == before

    @invariant()
    def holds_what_the_model_does(self):
        if not hasattr(self, "model"):
            return
        keys, slots, count = self.table.index.export()
        assert count[0] == len(self.model)
        for key, slot in zip(keys[: count[0]].tolist(), slots[: count[0]].tolist(), strict=True):
            for number, held in enumerate(self.model[key]):
                if number < self.num_columns():
                    assert self.table.column(number)[slot].tobytes() == held.tobytes()

    def num_columns(self):
        try:
            self.table.column(2)
        except IndexError:
            return 1
        return 3

    def teardown(self):
        if hasattr(self, "table"):
            self.table.close()


def test_calls_in_any_order():
    """Random sequences of calls; Hypothesis prints the one that fails."""
    Machine.TestCase.settings = settings(stateful_step_count=30, deadline=None)
    Machine.TestCase().runTest()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_initial_rows_are_those_of_the_keys(dtype, pools):
    keys = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 5000)
    for context in (None, *pools):
        with core.DynamicTable(10_000, 17, dtype=dtype, initializer=UNIFORM) as table:
            wanted = initial_rows(keys, 17, dtype)
            assert harness.same_bytes([table.read(keys, context=context)], [wanted])
            slots = insert(table, keys, context)
            assert harness.same_bytes([table.column(0)[slots], table.read(keys, context=context)], [wanted, wanted])


def test_a_slot_used_again_is_as_new():
    with core.DynamicTable(8, 4, initializer=UNIFORM) as table:
        state = table.add_column(4, initial=0.25)
        (slot,) = insert(table, [7])
        table.column(0)[slot] = table.column(state)[slot] = 9.0
        assert table.erase([7]).tolist() == [slot]
        assert insert(table, [-7]) == [slot]
        assert harness.same_bytes([table.column(0)[slot : slot + 1]], [initial_rows([-7], 4)])
        assert (table.column(state)[slot] == 0.25).all()


def test_columns_stay_where_they_are_while_they_grow():
    with core.DynamicTable(1 << 30, 16, initializer=UNIFORM) as table:
        state = table.add_column(16)
        insert(table, np.arange(10))
        table.column(state)[:] = np.arange(160).reshape(10, 16)
        addresses = [table.column(number).ctypes.data for number in (0, state)]
        before = table.num_bytes
        for first in range(10, 200_000, 50_000):
            insert(table, np.arange(first, first + 50_000))
        assert [table.column(number).ctypes.data for number in (0, state)] == addresses
        assert table.num_bytes > before + 200_000 * 128
        assert (table.column(state)[:10] == np.arange(160).reshape(10, 16)).all()
        assert (table.column(state)[10:] == 0).all()
        keys = np.arange(0, 200_000, 997)
        assert harness.same_bytes([table.read(keys)], [initial_rows(keys, 16)])


def test_where_there_is_no_memory_nothing_changes():
    memory = range_memory.Host()
    with core.DynamicTable(1 << 34, 256, initializer=UNIFORM, name="user") as table:
        insert(table, np.arange(100))
        before = table.column(0).copy()
        with memory.limited(1 << 30), pytest.raises(MemoryError, match="table 'user': no memory for"):
            insert(table, np.arange(50, 4_000_000))
        assert table.index.size() == 100 and table.index.num_slots == 100
        assert harness.same_bytes([table.column(0)], [before])
        assert insert(table, [100]) == [100]


def test_one_table_twice_and_two_in_a_call():
    with core.DynamicTable(100, 2, initializer=UNIFORM) as one, core.DynamicTable(50, 3, initializer=UNIFORM) as other:
        tables = [one.table(), other.table()]
        keys = np.array([5, 6, 5, 9, 6, 7, 9, 9])
        slots = core.locate(tables, keys, [[3, 1], [2, 2]], insert=True)
        assert slots.tolist() == [0, 1, 0, 0, 1, 2, 0, 0]
        assert one.index.size() == 3 and other.index.size() == 1
        assert harness.same_bytes([one.column(0), other.column(0)], [initial_rows([5, 6, 7], 2), initial_rows([9], 3)])
        assert core.locate(tables, np.array([5, 8, 9]), [[2, 1]]).tolist() == [0, -1, 0]
        assert one.index.size() == 3


def sgd(table, slots, generation):
    gradient = core.Gradient(slots, np.ones((len(slots), 4), np.float32), generation=generation)
    core.apply([core.Update(table.table(), core.Optimizer("sgd", learning_rate=1.0), [gradient])])


@pytest.mark.parametrize("how", ("erase", "erase and insert", "clear"))
def test_a_gradient_of_an_erased_row_is_refused(how):
    with core.DynamicTable(8, 4, name="mine") as table:
        slots = insert(table, [1, 2, 3])
        located = table.generation
        sgd(table, slots, located)
        if how == "clear":
            table.clear()
        else:
            assert table.erase([2]).tolist() == [1]
        if how == "erase and insert":
            assert insert(table, [9]).tolist() == [1]
        before = table.column(0).copy()
        with pytest.raises(RuntimeError, match=r"table 'mine': a row .* erased or evicted .*slot [01]"):
            sgd(table, slots, located)
        with pytest.raises(RuntimeError, match="erased or evicted"):
            gradient = core.Gradient(slots, np.ones((3, 4), np.float32), generation=located)
            core.reduce(table.table(), [gradient])
        weighted = core.Lookup(slots=slots, weights=np.ones(3, np.float32), row_splits=[0, 3], generation=located)
        with pytest.raises(RuntimeError, match="erased or evicted"):
            core.weight_gradient([table.table()], [weighted], [np.ones((1, 4), np.float32)])
        assert harness.same_bytes([table.column(0)], [before])
        if how != "clear":
            sgd(table, slots[[0, 2]], located)  # these rows are as they were
            weighted = core.Lookup(slots=slots[[0, 2]], weights=np.ones(2, np.float32), generation=located)
            (found,) = core.weight_gradient([table.table()], [weighted], [np.ones((2, 4), np.float32)])
            assert found.tolist() == [-8, -8]
            assert (table.read([1, 3]) == -2).all()
        slots = insert(table, [1, 2, 3])
        sgd(table, slots, table.generation)


OPTIMIZERS = {
    "sgd": (core.Optimizer("sgd", learning_rate=0.1), 0),
    "adagrad": (core.Optimizer("adagrad", learning_rate=0.1, epsilon=1e-7), 1),
    "adam": (core.Optimizer("adam", learning_rate=0.1, beta1=0.9, beta2=0.99, epsilon=1e-7), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_as_a_static_table_does(name):
    optimizer, num_states = OPTIMIZERS[name]
    rows, dimension, rng = 300, 8, np.random.default_rng(17)
    names = rng.integers(-(2**63), 2**63 - 1, rows)  # of the static table's rows in the other
    weight = initial_rows(names, dimension)
    static = core.Table(weight)
    static_states = [np.zeros((rows, dimension), np.float32) for _ in range(num_states)]
    with core.DynamicTable(rows, dimension, initializer=UNIFORM) as table:
        states = [table.add_column(dimension) for _ in range(num_states)]
        for _ in range(4):
            ids = rng.integers(0, rows, 400)
            splits = np.sort(np.append(rng.integers(0, 401, 49), [0, 400]))
            slots = insert(table, names[ids])
            dynamic = table.table()
            outputs = []
            for each, keys in ((static, ids), (dynamic, slots)):
                outputs += core.gather_combine([each], [core.Lookup(keys, row_splits=splits, combiner="mean")])
            assert harness.same_bytes(outputs[:1], outputs[1:])
            gradient = rng.standard_normal(outputs[0].shape, np.float32)
            parts = [core.Gradient(keys, gradient, row_splits=splits, combiner="mean") for keys in (ids, slots)]
            held = [table.column(number) for number in states]
            core.apply(
                [
                    core.Update(static, optimizer, parts[:1], static_states),
                    core.Update(dynamic, optimizer, parts[1:], held),
                ]
            )
        assert table.index.size() > 200  # brings what a device's host knows of its slots up to date
        keys, slots, _ = table.index.export()
        place = np.argsort(names)[np.searchsorted(np.sort(names), keys)]
        arrays = [table.column(number)[slots] for number in (0, *states)]
        assert harness.same_bytes(arrays, [array[place] for array in (weight, *static_states)])


def test_bad_arguments():
    right: dict[str, Any] = {"capacity": 10, "dimension": 4}
    for options, message in (
        ({"capacity": 0}, "capacity is 0"),
        ({"dimension": 0}, "dimension is 0"),
        ({"initial_rows": 11}, "initial_rows is 11"),
        ({"dtype": np.float64}, "dtype is"),
        ({"initializer": core.Initializer("uniform", 2.0, 1.0)}, "is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            core.DynamicTable(**right | options)
    with pytest.raises(MemoryError, match="address space"):
        core.DynamicTable(1 << 40, 1 << 30)
    with core.DynamicTable(10, 4) as table:
        for arguments, message in (((0,), "width is 0"), ((4, np.float64), "dtype"), ((1, np.int64, 2.0), "must be 0")):
            with pytest.raises(ValueError, match=message):
                table.add_column(*arguments)
        with pytest.raises(IndexError, match="no column 1"):
            table.column(1)
        with pytest.raises(ValueError, match="keys"):
            table.read(np.zeros(3))
