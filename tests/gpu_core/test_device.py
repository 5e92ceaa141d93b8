# SPDX-License-Identifier: Apache-2.0
"""What only a device does: deferred errors, CUDA graphs, streams, hot rows over many blocks, the same bits again."""

import ctypes
import re
from typing import Any

import cases
import harness
import numpy as np
import pytest
import reference
from gpu_suite import fetched

from sparse_operation_kit import core
from sparse_operation_kit.core import _abi, _arrays, _library


def context_of(cupy, errors=None, stream=0):
    return core.Context(device=0, empty=cupy.empty, errors=errors, stream=stream)


def on_cpu_and_device(cupy, updates, context=None):
    """Runs the updates on the CPU in place, and on copies on the device; returns the copies' (weight, states)."""
    copies = []
    results = []
    for update in updates:
        weight = cupy.asarray(update.table.weight)
        states = [cupy.asarray(s) for s in update.states]
        gradients = [
            core.Gradient(
                cupy.asarray(g.slots),
                cupy.asarray(g.values),
                None if g.row_splits is None else cupy.asarray(g.row_splits),
                None if g.weights is None else cupy.asarray(g.weights),
                combiner=g.combiner,
                unique=g.unique,
            )
            for g in update.gradients
        ]
        copies.append(core.Update(core.Table(weight, name=update.table.name), update.optimizer, gradients, states))
        results.append([weight, *states])
    core.apply(copies, context=context or context_of(cupy))
    core.apply(updates)
    return results


class OnDevice:
    """A copy of a NumPy array in device memory; also of bfloat16, which CuPy lacks."""

    def __init__(self, cupy, array):
        is_bfloat16 = array.dtype == core.BFLOAT16
        self.dtype = array.dtype
        self.shape = array.shape
        self.bits = cupy.asarray(array.view(np.uint16) if is_bfloat16 else array)
        self.__cuda_array_interface__ = dict(self.bits.__cuda_array_interface__)
        if is_bfloat16:
            self.__cuda_array_interface__["typestr"] = "|V2"

    def get(self):
        return self.bits.get().view(self.dtype)


def power_law(rng, rows, n):
    rank = ((rng.random(n) * ((rows + 1.0) ** -0.05 - 1.0) + 1.0) ** -20.0).astype(np.int64) - 1
    return np.clip(rank, 0, rows - 1) * 7_368_787 % rows


@pytest.mark.parametrize("dimension", [3, 4, 16, 64, 100, 128, 256, 300])
@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_hot_rows(cupy, dimension, combiner):
    """Keys of a power law and one key for a third of all entries: runs over many chunks, several levels of sums."""
    rng = np.random.default_rng(dimension)
    n = 40_000 if dimension >= 100 else 150_000
    optimizer = core.Optimizer("rowwise_adagrad", 0.1, epsilon=1e-6)
    updates = []
    for t, rows in enumerate((5_000, 300_000)):
        slots = power_law(rng, rows, n)
        slots[rng.random(n) < 0.3] = 17
        splits = np.r_[0, np.sort(rng.integers(0, n + 1, n // 5)), n].astype(np.int64)
        values = rng.uniform(-1, 1, (len(splits) - 1, dimension)).astype(np.float32)
        weight = rng.uniform(-1, 1, (rows, dimension)).astype(np.float32)
        gradient = core.Gradient(slots, values, splits, combiner=combiner)
        updates.append(
            core.Update(core.Table(weight, name=f"t{t}"), optimizer, [gradient], [np.ones(rows, np.float32)])
        )
    results = on_cpu_and_device(cupy, updates)
    for update, (weight, state) in zip(updates, results, strict=True):
        reference.assert_close(weight.get(), update.table.weight, 2e-6, message="weight")
        reference.assert_close(state.get(), update.states[0], 2e-5, message="state")


@pytest.mark.parametrize("dimension", [3, 4, 16, 100, 128, 256, 300])
@pytest.mark.parametrize("dtype", reference.HALVES, ids=["float16", "bfloat16"])
def test_hot_rows_of_16_bits(cupy, dtype, dimension):
    """As above: sums in another order than the CPU's may round to the neighbour, no further."""
    rng = np.random.default_rng(dimension)
    rows, n = 5_000, 40_000
    slots = power_law(rng, rows, n)
    slots[rng.random(n) < 0.3] = 17
    values = rng.uniform(-1, 1, (n, dimension)).astype(np.float32)
    weight = reference.rounded(rng.uniform(-1, 1, (rows, dimension)), dtype)
    state = np.ones(rows, np.float32)
    optimizer = core.Optimizer("rowwise_adagrad", 0.1, epsilon=1e-6)
    copy: Any = OnDevice(cupy, weight)
    state_copy = cupy.asarray(state)
    part = core.Gradient(cupy.asarray(slots), cupy.asarray(values))
    core.apply([core.Update(core.Table(copy), optimizer, [part], [state_copy])], context=context_of(cupy))
    core.apply([core.Update(core.Table(weight), optimizer, [core.Gradient(slots, values)], [state])])
    expected = reference.widened(weight).astype(np.float64)
    error = abs(reference.widened(copy.get()).astype(np.float64) - expected)
    assert (error <= reference.spacing(expected, dtype)).all()
    assert np.count_nonzero(error) < 0.01 * error.size
    reference.assert_close(state_copy.get(), state, 2e-5, message="state")


@pytest.mark.parametrize("combiner", reference.COMBINERS)
@pytest.mark.parametrize("dimension", [1, 4, 10, 16, 64, 128, 129, 512])
@pytest.mark.parametrize("dtype", reference.HALVES, ids=["float16", "bfloat16"])
def test_many_bags_of_16_bits(cupy, dtype, dimension, combiner):
    """Short bags and long ones, of tables with other dtypes in one call."""
    rng = np.random.default_rng(dimension)
    tables, lookups, device_tables, device_lookups = [], [], [], []
    for t, (rows, bags, length) in enumerate(((2000, 70_000, 2), (50, 3_000, 20), (10_000, 1, 2), (700, 5_000, 3))):
        lookup = cases.random_lookup(rng, t, rows, bags, length, combiner=combiner, weighted=t == 1)
        weight = rng.uniform(-1, 1, (rows, dimension)).astype(np.float32)
        if t < 3:
            weight = reference.rounded(weight, dtype)
        tables.append(core.Table(weight))
        lookups.append(core.Lookup(lookup.keys, t, lookup.row_splits, lookup.weights, combiner))
        copy: Any = OnDevice(cupy, weight)
        device_tables.append(core.Table(copy))
        arrays = (lookup.keys, lookup.row_splits, lookup.weights)
        keys, splits, weights = (None if x is None else cupy.asarray(x) for x in arrays)
        device_lookups.append(core.Lookup(keys, t, splits, weights, combiner))
    expected = core.gather_combine(tables, lookups)
    outputs = core.gather_combine(device_tables, device_lookups, context=context_of(cupy))
    for output, wanted in zip(outputs, expected, strict=True):
        reference.assert_close(fetched(output), wanted, 1e-6)


@pytest.mark.parametrize("combiner", reference.COMBINERS)
@pytest.mark.parametrize("dimension", [1, 4, 10, 16, 32, 64, 128, 129, 512])
def test_many_bags(cupy, dimension, combiner):
    """Enough bags that groups of threads take several each."""
    rng = np.random.default_rng(dimension)
    tables, lookups, device_tables, device_lookups = [], [], [], []
    for t, (rows, bags) in enumerate(((2000, 70_000), (50, 3_000), (10_000, 1))):
        lookup = cases.random_lookup(rng, t, rows, bags, 2, combiner=combiner, weighted=t == 1)
        weight = rng.uniform(-1, 1, (rows, dimension)).astype(np.float32)
        tables.append(core.Table(weight))
        lookups.append(core.Lookup(lookup.keys, t, lookup.row_splits, lookup.weights, combiner))
        device_tables.append(core.Table(cupy.asarray(weight)))
        arrays = (lookup.keys, lookup.row_splits, lookup.weights)
        keys, splits, weights = (None if x is None else cupy.asarray(x) for x in arrays)
        device_lookups.append(core.Lookup(keys, t, splits, weights, combiner))
    expected = core.gather_combine(tables, lookups)
    outputs = core.gather_combine(device_tables, device_lookups, context=context_of(cupy))
    for output, wanted in zip(outputs, expected, strict=True):
        reference.assert_close(fetched(output), wanted, 1e-6)


def test_the_same_bits_again(cupy):
    rng = np.random.default_rng(5)
    weight = rng.uniform(-1, 1, (1000, 32)).astype(np.float32)
    slots = cupy.asarray(power_law(rng, 1000, 100_000))
    values = cupy.asarray(rng.uniform(-1, 1, (100_000, 32)).astype(np.float32))
    first = None
    for _ in range(5):
        copy = cupy.asarray(weight)
        table = core.Table(copy)
        core.apply(
            [core.Update(table, core.Optimizer("sgd", 0.1), [core.Gradient(slots, values)])], context=context_of(cupy)
        )
        first = copy if first is None else first
        assert bool((copy.view(np.int32) == first.view(np.int32)).all())


def test_a_wrong_key_is_reported_later(cupy, record):
    context = context_of(cupy, record)
    weight = cupy.ones((10, 4), np.float32)
    table = core.Table(weight, name="item")
    good, bad = cupy.asarray(np.array([1, 2])), cupy.asarray(np.array([1, 10]))
    core.gather_combine([table], [core.Lookup(good)], context=context)
    cupy.cuda.Stream.null.synchronize()
    record.check()
    core.gather_combine([table], [core.Lookup(bad)], context=context)
    values = cupy.ones((2, 4), np.float32)
    update = core.Update(table, core.Optimizer("sgd", 0.1), [core.Gradient(good, values)])
    core.apply([update], context=context)  # refused: the batch was wrong
    core.assign(table, good, values, context=context)
    cupy.cuda.Stream.null.synchronize()
    assert bool((weight == 1).all())
    with pytest.raises(IndexError, match=r"key 10 is outside \[0, 10\)"):
        record.check()
    record.check()  # once only
    core.apply([update], context=context)
    cupy.cuda.Stream.null.synchronize()
    record.check()
    assert bool((weight[1:3] != 1).all())


@pytest.mark.parametrize("slots", [[0, 10], [-1, 3], [2**40, 1]])
def test_a_wrong_slot_changes_nothing(cupy, record, slots):
    context = context_of(cupy, record)
    weights = [cupy.ones((10, 4), np.float32) for _ in range(2)]
    slot_arrays = [cupy.asarray(np.array(x)) for x in ([1, 2], slots)]
    updates = [
        core.Update(core.Table(w), core.Optimizer("sgd", 0.1), [core.Gradient(s, cupy.ones((2, 4), np.float32))])
        for w, s in zip(weights, slot_arrays, strict=True)
    ]
    core.apply(updates, context=context)
    cupy.cuda.Stream.null.synchronize()
    with pytest.raises(IndexError, match="slot"):
        record.check()
    assert all(bool((w == 1).all()) for w in weights)


@pytest.mark.parametrize("slot", [3, 10])
def test_what_is_recorded_while_the_caller_is_asked_stops_the_step(cupy, record, slot):
    """The slots have been read at this point of the stream: a wrong one is in the record."""
    context = context_of(cupy, record)
    weight, flags = cupy.ones((10, 4), np.float32), cupy.zeros(1, np.int64)
    part = core.Gradient(cupy.asarray(np.array([slot, 1])), cupy.ones((2, 4), np.float32))
    update = core.Update(core.Table(weight, name="item"), core.Optimizer("sgd", 0.1), [part])

    def agree():
        _library.check(_abi.library().sok_error_record_flag(ctypes.byref(context.struct), _arrays.view(flags)))
        core.gather_combine([update.table], [core.Lookup(cupy.asarray(np.array([11])))], context=context)

    core.apply([update], context=context, agree=agree)
    cupy.cuda.Stream.null.synchronize()
    with pytest.raises(IndexError, match="slot 10" if slot == 10 else "key 11"):
        record.check()
    assert int(flags[0]) == (slot == 10) and bool((weight == 1).all())


@pytest.mark.parametrize(
    "splits", [[0, 5, 3, 6], [1, 2, 3, 6], [0, 2, 3, 5], [0, 2, 3, 7], [0, -1, 3, 6], [0, 2**40, 3, 6]]
)
def test_wrong_row_splits(cupy, splits):
    table = core.Table(cupy.ones((10, 4), np.float32), name="item")
    keys, row_splits = cupy.asarray(np.arange(6)), cupy.asarray(np.array(splits))
    with pytest.raises(ValueError, match="row_splits"):
        core.gather_combine([table], [core.Lookup(keys, row_splits=row_splits)], context=context_of(cupy))
    gradient = core.Gradient(keys, cupy.ones((3, 4), np.float32), row_splits)
    with pytest.raises(ValueError, match="row_splits"):
        core.apply([core.Update(table, core.Optimizer("sgd", 0.1), [gradient])], context=context_of(cupy))
    assert bool((table.weight == 1).all())


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("num_keys", [0, 6, 3000])
@pytest.mark.parametrize("what", ["begins", "descends", "ends early", "ends late", "is negative", "is far"])
def test_route_refuses_row_splits(cupy, record, pooled, num_keys, what):
    """Before anything is sent: other ranks learn of them with the counts. Also of a batch that has no key."""
    right = np.linspace(0, num_keys, 1001).astype(np.int64)
    wrong = right.copy()
    place, value = {
        "begins": (0, 1),
        "descends": (500, num_keys + 1),
        "ends early": (1000, num_keys - 1),
        "ends late": (1000, num_keys + 1),
        "is negative": (3, -1),
        "is far": (999, 2**40),
    }[what]
    wrong[place] = value
    names = ("distributed", "localized")
    tables = [
        core.Table(num_rows=10, dimension=4, num_ranks=2, owner=owner, name=name)
        for owner, name in zip((-1, 1), names, strict=True)
    ]
    keys = cupy.asarray(np.arange(num_keys) % 10)
    context, flags = context_of(cupy, record), cupy.zeros(1, np.int64)
    for position in range(2):
        splits = [cupy.asarray(wrong if i == position else right) for i in range(2)]
        core.route(tables, [core.Lookup(keys, i, splits[i]) for i in range(2)], pooled=[pooled] * 2, context=context)
        context.flag_errors(flags)
        assert flags.get().tolist() == [1]
        message = f"table '{names[position]}': row_splits .* to the number of keys, {num_keys}"
        with pytest.raises(ValueError, match=message):
            record.check()
    lookups = [core.Lookup(keys, i, cupy.asarray(right)) for i in range(2)]
    core.route(tables, lookups, pooled=[pooled] * 2, context=context)
    cupy.cuda.Stream.null.synchronize()
    record.check()


def test_of_many_wrong_keys_one_is_named(cupy, record):
    tables = [core.Table(cupy.ones((100, d), np.float32), name=f"table{t}") for t, d in enumerate((8, 3, 8))]
    wrong = [np.arange(100 + 10_000 * t, 5_100 + 10_000 * t) for t in range(3)]
    lookups = [core.Lookup(cupy.asarray(keys), t) for t, keys in enumerate(wrong)]
    for errors in (None, record):
        with pytest.raises(IndexError) as error:
            core.gather_combine(tables, lookups, context=context_of(cupy, errors))
            cupy.cuda.Stream.null.synchronize()
            record.check()
        found = re.fullmatch(r"table 'table(\d)': key (\d+) is outside \[0, 100\)", str(error.value))
        assert int(found[2]) in wrong[int(found[1])]


def test_a_check_waits_for_what_must_meet_the_error(cupy, record):
    """An update that was enqueued before the error was raised changes nothing, however late it runs."""
    late = cupy.cuda.Stream(non_blocking=True)
    weight, values = cupy.ones((10, 4), np.float32), cupy.ones((1, 4), np.float32)
    table, slots = core.Table(weight, name="item"), cupy.asarray(np.array([1]))
    source = "__global__ void spin(long long n) { for (long long t = clock64(); clock64() - t < n;); }"
    spin = cupy.RawKernel(f'extern "C" {source}', "spin")
    cupy.cuda.Device().synchronize()
    with late:
        spin((1,), (1,), (2_000_000_000,))
    core.gather_combine([table], [core.Lookup(cupy.asarray(np.array([10])))], context=context_of(cupy, record))
    update = core.Update(table, core.Optimizer("sgd", 0.1), [core.Gradient(slots, values)])
    core.apply([update], context=context_of(cupy, record, late.ptr))
    cupy.cuda.Stream.null.synchronize()
    with pytest.raises(IndexError, match="key 10"):
        record.check()
    late.synchronize()
    assert bool((weight == 1).all())


def test_a_step_in_a_graph(cupy, record):
    """gather_combine and apply are captured once and replayed with other keys."""
    rng = np.random.default_rng(1)
    rows, n, dimension = 500, 3000, 16
    start = rng.uniform(-1, 1, (rows, dimension)).astype(np.float32)
    weight, keys = cupy.asarray(start), cupy.zeros(n, np.int64)
    splits = cupy.asarray(np.arange(0, n + 1, 3))
    values = rng.uniform(-1, 1, (n // 3, dimension)).astype(np.float32)
    output, gradient = cupy.zeros((n // 3, dimension), np.float32), cupy.asarray(values)
    stream = cupy.cuda.Stream(non_blocking=True)
    context = core.Context(device=0, stream=stream.ptr, errors=record, empty=lambda shape, dtype: output)
    table = core.Table(weight)
    update = core.Update(table, core.Optimizer("sgd", 0.1), [core.Gradient(keys, gradient, splits)])

    def step():
        core.gather_combine([table], [core.Lookup(keys, row_splits=splits)], context=context)
        core.apply([update], context=context)

    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    with stream:
        step()
    graph = stream.end_capture()
    expected = start.astype(np.float64)
    for seed in range(3):
        batch = np.random.default_rng(seed).integers(0, rows, n)
        keys.set(batch)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        record.check()
        row_splits = np.arange(0, n + 1, 3)
        reference.assert_close(output.get(), reference.pool(expected, batch, row_splits), 1e-5)
        expected -= 0.1 * reference.row_gradient(values, rows, batch, row_splits)
        reference.assert_close(weight.get(), expected, 1e-5)


@pytest.mark.parametrize("n", [0, 1, 255, 257, 100_000])
def test_flags_follow_the_record_in_stream_order(cupy, record, n):
    """0 before the wrong call, 1 after it, without a wait in between; 0 again once the record was checked."""
    stream = cupy.cuda.Stream(non_blocking=True)
    context = context_of(cupy, record, stream.ptr)
    table = core.Table(cupy.ones((10, 4), np.float32), name="item")
    bad = cupy.asarray(np.array([1, 10]))
    before, after, again = (cupy.full(n, 7, np.int64) for _ in range(3))
    cupy.cuda.Device().synchronize()
    context.flag_errors(before)
    core.gather_combine([table], [core.Lookup(bad)], context=context)
    context.flag_errors(after)
    stream.synchronize()
    with pytest.raises(IndexError, match="key 10"):
        record.check()
    context.flag_errors(again)
    stream.synchronize()
    assert [before.get().tolist(), after.get().tolist(), again.get().tolist()] == [[0] * n, [1] * n, [0] * n]


def test_flags_in_a_column(cupy, record):
    matrix, table = cupy.full((300, 4), 7, np.int64), core.Table(cupy.ones((10, 4), np.float32))
    context = context_of(cupy, record)
    core.gather_combine([table], [core.Lookup(cupy.asarray(np.array([10])))], context=context)
    flags = _arrays.view(matrix)
    flags.data, flags.shape[1], flags.row_stride = matrix.data.ptr + 24, 1, 4
    _library.check(_abi.library().sok_error_record_flag(ctypes.byref(context.struct), flags))
    assert matrix.get().tolist() == [[7, 7, 7, 1]] * 300
    with pytest.raises(IndexError):
        record.check()


def test_flags_without_a_record(cupy):
    flags = cupy.full(300, 7, np.int64)
    context_of(cupy).flag_errors(flags)
    cupy.cuda.Device().synchronize()
    assert not flags.any()


def test_flags_in_a_graph(cupy, record):
    """Captured once; each replay reads the record anew."""
    stream = cupy.cuda.Stream(non_blocking=True)
    context = context_of(cupy, record, stream.ptr)
    table = core.Table(cupy.ones((10, 4), np.float32), name="item")
    flags, bad = cupy.full(3, 7, np.int64), cupy.asarray(np.array([10]))
    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    context.flag_errors(flags)
    graph = stream.end_capture()
    seen = []
    for wrong in (False, True):
        if wrong:
            core.gather_combine([table], [core.Lookup(bad)], context=context)
        graph.launch(stream)
        stream.synchronize()
        seen.append(flags.get().tolist())
    assert seen == [[0] * 3, [1] * 3]
    with pytest.raises(IndexError, match="key 10"):
        record.check()


def test_without_a_record_a_capture_is_refused(cupy):
    stream = cupy.cuda.Stream(non_blocking=True)
    table = core.Table(cupy.ones((10, 4), np.float32))
    keys = cupy.asarray(np.array([1, 2]))
    context = context_of(cupy, stream=stream.ptr)
    stream.begin_capture()
    with pytest.raises(RuntimeError, match="captured"):
        core.gather_combine([table], [core.Lookup(keys)], context=context)
    stream.end_capture()


def test_large_tables_have_wide_keys(cupy):
    """More rows than 32 bits number: keys of 64 bits are sorted."""
    free, _ = cupy.cuda.runtime.memGetInfo()
    rows = 2**32 + 1000
    if free < rows * 4 + 2**30:
        pytest.skip(f"{free >> 30} GiB of device memory are free, 17 are needed")
    weight = cupy.zeros((rows, 1), np.float32)
    slots = np.array([0, rows - 1, 2**32, 5, rows - 1])
    values = cupy.asarray(np.arange(1, 6, dtype=np.float32).reshape(5, 1))
    update = core.Update(core.Table(weight), core.Optimizer("sgd", 1.0), [core.Gradient(cupy.asarray(slots), values)])
    core.apply([update], context=context_of(cupy))
    assert weight[cupy.asarray(slots[:4]), 0].get().tolist() == [-1.0, -7.0, -3.0, -4.0]
    outputs = core.gather_combine([core.Table(weight)], [core.Lookup(cupy.asarray(slots))], context=context_of(cupy))
    assert fetched(outputs[0])[:, 0].tolist() == [-1.0, -7.0, -3.0, -4.0, -7.0]
    narrow = core.Table(cupy.zeros((10, 40), np.float32))
    state = cupy.zeros(10, np.float32)
    settings = core.Optimizer("rowwise_adagrad", 1.0, epsilon=0.0)
    values = cupy.asarray(np.full((2, 40), 3, np.float32))
    other = core.Update(narrow, settings, [core.Gradient(cupy.asarray(np.array([7, 2])), values)], [state])
    core.apply([update, other], context=context_of(cupy))
    assert state.get().tolist() == [0, 0, 9, 0, 0, 0, 0, 9, 0, 0]
    assert fetched(narrow.weight)[[2, 7]].tolist() == [[-1.0] * 40] * 2
    assert weight[cupy.asarray(slots[:4]), 0].get().tolist() == [-2.0, -14.0, -6.0, -8.0]
    del weight, update
    cupy.get_default_memory_pool().free_all_blocks()


def test_large_call_on_simulated_ranks():
    """The harness' large case goes through route, locate, gather, combine, spread on the device as on the CPU."""
    import mirror

    ranks, gradients, _ = harness.simulate(harness.LARGE, 3)
    harness.forward(ranks)
    expected = [rank.outputs for rank in ranks]
    expected_parts = harness.backward(ranks, gradients)
    with mirror.installed():
        harness.forward(ranks)
        parts = harness.backward(ranks, gradients)
    for rank, outputs in zip(ranks, expected, strict=True):
        for output, wanted in zip(rank.outputs, outputs, strict=True):
            reference.assert_close(output, wanted, 3e-6)
    for rank_parts, wanted_parts in zip(parts, expected_parts, strict=True):
        for table, wanted in zip(rank_parts, wanted_parts, strict=True):
            for part, other in zip(table, wanted, strict=True):
                reference.assert_close(part.values, other.values, 3e-6)
