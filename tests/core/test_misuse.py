# SPDX-License-Identifier: Apache-2.0
"""What no binding would send: NULL pointers, wrong struct sizes, enum numbers that do not exist, sizes that overflow,
and views that lie about their shape. Each is an error with a message, and never a crash."""

import ctypes

import harness
import numpy as np
import pytest
from world import FUNCTIONS, HUGE, INVALID, World, bad_views, is_pointer

from sparse_operation_kit import core
from sparse_operation_kit.core import _abi, _arrays, _library
from sparse_operation_kit.core import lookup as core_lookup


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_arguments_are_right(function):
    assert set(FUNCTIONS) == set(World().arguments())
    assert World().call(function) == 0, _abi.library().sok_last_error_message()


# The indices; the choice of pooling; the messages of a call that pools nothing at the owner.
MAY_BE_NULL = {("sok_locate", 3), ("sok_route", 5), ("sok_combine", 5), ("sok_weight_gradient_of_rows", 6)}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_null_pointers(function):
    kinds = _abi.PROTOTYPES[function][1]
    for position, kind in enumerate(kinds):
        if is_pointer(kind) and (function, position) not in MAY_BE_NULL:
            world = World()
            arguments = world.arguments()[function]
            arguments[position] = None
            world.fails(function, words=["NULL"], arguments=arguments)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_absent_views(function):
    kinds = _abi.PROTOTYPES[function][1]
    optional = [2] if function == "sok_initialize" else []
    for position, kind in enumerate(kinds):
        if kind is _abi.Tensor and position not in optional:
            world = World()
            arguments = world.arguments()[function]
            arguments[position] = _arrays.absent()
            world.fails(function, arguments=arguments)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_views(function):
    right = World().arguments()[function]
    views = [i for i, kind in enumerate(_abi.PROTOTYPES[function][1]) if kind is _abi.Tensor and right[i].data]
    for position in views:
        for what, view in bad_views(right[position]):
            # Any number of rows is right for initialize, of exchanged elements for the gradient of weights, and of
            # flags, if there is the memory.
            free = {
                "sok_initialize": ("size 4", "columns 0"),
                "sok_weight_gradient_of_rows": ("size 9",),
                "sok_error_record_flag": ("size 4",),
            }
            if what in free.get(function, ()):
                continue
            world = World()
            arguments = world.arguments()[function]
            arguments[position] = view
            world.fails(function, arguments=arguments)


@pytest.mark.parametrize(
    ("function", "field"),
    [
        *(("sok_gather_combine", field) for field in ("slots", "row_splits", "weights", "output")),
        *(("sok_route", field) for field in ("keys", "row_splits", "weights")),
        *(("sok_combine", field) for field in ("keys", "row_splits", "weights", "output")),
        *(("sok_spread", field) for field in ("keys", "row_splits", "weights")),
        *(("sok_locate", field) for field in ("keys", "slots")),
    ],
)
def test_bad_views_in_lookups(function, field):
    for what, view in bad_views(getattr(World().lookups[0], field)):
        # Stages after route only count the keys.
        if field == "keys" and function in ("sok_combine", "sok_spread") and what in ("data", "alignment"):
            continue
        # Nothing else that route is given tells the number of bags: it would believe this one and read past the end.
        if (function, field, what) == ("sok_route", "row_splits", f"size {World().lookups[0].row_splits.shape[0] + 1}"):
            continue
        world = World()
        setattr(world.lookups[0], field, view)
        # The number of bags is that of the row splits: another array may be the one that does not fit.
        fits = field == "row_splits" and what.startswith("size")
        world.fails(function, words=["mine"] if fits else ["mine", "lookups[0]"])


@pytest.mark.parametrize("field", ["slots", "values", "row_splits", "weights"])
@pytest.mark.parametrize("function", ["sok_reduce", "sok_apply"])
def test_bad_views_in_gradients(function, field):
    for _, view in bad_views(getattr(World().gradients[0], field)):
        world = World()
        setattr(world.gradients[0], field, view)
        world.fails(function, words=["mine", "gradients[0]"])


@pytest.mark.parametrize("function", ["sok_assign", "sok_gather_combine", "sok_reduce", "sok_apply"])
def test_bad_weights(function):
    for what, view in bad_views(World().columns[0].weight):
        if what == "size 11":
            continue  # the weight alone says how many slots there are
        world = World()
        world.columns[0].weight = view
        world.fails(function, words=["mine", "weight"])


@pytest.mark.parametrize("function", ["sok_assign", "sok_gather_combine", "sok_reduce", "sok_apply"])
def test_rows_of_tables_do_not_lie_apart(function):
    world = World()
    world.columns[0].weight.row_stride = 4
    assert world.call(function) == 0
    world.columns[0].weight.row_stride = 5
    world.fails(function, words=["mine", "weight.row_stride is 5", "contiguous"])


@pytest.mark.parametrize("field", ["keys", "counts", "inverse", "order", "unique_splits"])
def test_bad_views_in_routing(field):
    for _, view in bad_views(getattr(World().routing, field)):
        world = World()
        setattr(world.routing, field, view)
        world.fails("sok_route", words=["routing", field])
        if field in ("order", "unique_splits"):
            world.fails("sok_spread", words=["routing", field])


def test_bad_views_of_bags_in_routing():
    table, lookup = core.Table(np.ones((10, 4), np.float32)), core.Lookup(np.array([1, 9, 1]), 0, np.array([0, 2, 3]))
    for field in ("counts", "bag_keys", "bag_splits"):
        routing = core.route([table], [lookup], pooled=[True])
        for what, view in bad_views(getattr(routing.struct(), field)):
            if (field, what) == ("counts", "columns 4"):
                continue  # more are right
            struct, batch, pooled = routing.struct(), core_lookup.Batch([table], [lookup]), (ctypes.c_int32 * 1)(1)
            setattr(struct, field, view)
            arguments = (core.Context().struct, *batch.arguments, pooled, struct)
            assert _abi.library().sok_route(*arguments) == INVALID, what
            assert field in _abi.library().sok_last_error_message().decode()


@pytest.mark.parametrize("value", [0, 8, 10_000])
def test_struct_sizes(value):
    def world_with(get):
        world = World()
        get(world).struct_size = value
        return world

    for function in FUNCTIONS:
        world_with(lambda w: w.context).fails(function, words=["struct_size"])
        kinds = _abi.PROTOTYPES[function][1]
        for kind, get in {
            ctypes.POINTER(_abi.Placement): lambda w: w.placements[0],
            ctypes.POINTER(_abi.Columns): lambda w: w.columns[0],
            ctypes.POINTER(_abi.Lookup): lambda w: w.lookups[0],
            ctypes.POINTER(_abi.Routing): lambda w: w.routing,
            ctypes.POINTER(_abi.Batch): lambda w: w.batch,
            ctypes.POINTER(_abi.Messages): lambda w: w.messages,
            ctypes.POINTER(_abi.Gradient): lambda w: w.gradients[0],
            ctypes.POINTER(_abi.Update): lambda w: w.updates[0],
            ctypes.POINTER(_abi.Initializer): lambda w: w.initializer,
        }.items():
            if kind in kinds:
                world_with(get).fails(function, words=["struct_size"])
    world_with(lambda w: w.optimizer).fails("sok_apply", words=["struct_size"])
    world_with(lambda w: w.gradients[0]).fails("sok_apply", words=["struct_size"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("owner", -2),
        ("owner", 1),
        ("num_ranks", 0),
        ("num_ranks", -5),
        ("rank", -1),
        ("rank", 1),
        ("num_rows", 0),
        ("num_rows", -2),
        ("dimension", 0),
        ("dimension", -3),
        ("dimension", HUGE),
    ],
)
def test_bad_placements(field, value):
    for function in FUNCTIONS:
        if ctypes.POINTER(_abi.Placement) in _abi.PROTOTYPES[function][1]:
            world = World()
            setattr(world.placements[0], field, value)
            world.fails(function, words=["mine", field if field != "num_ranks" else "rank"])


def test_bad_indices():
    world = World()
    arguments = world.arguments()["sok_locate"]
    index = core.Index(lambda keys, insert: keys)
    arguments[3] = (ctypes.POINTER(_abi.Index) * 1)(ctypes.pointer(index.struct))
    assert world.call("sok_locate", arguments) == 0
    index.struct.struct_size += 8
    world.fails("sok_locate", words=["mine", "struct_size"], arguments=arguments)
    index.struct.struct_size -= 8
    index.struct.locate = _abi.LOCATE()
    world.fails("sok_locate", words=["mine", "locate is NULL"], arguments=arguments)


def test_any_key():
    """It needs an index."""
    world = World()
    world.placements[0].num_rows = core.ANY_KEY
    world.fails("sok_locate", words=["mine", "index"])


@pytest.mark.parametrize("combiner", [-1, 3, 2**31 - 1])
def test_unknown_combiner(combiner):
    batches = [name for name in FUNCTIONS if ctypes.POINTER(_abi.Lookup) in _abi.PROTOTYPES[name][1]]
    assert len(batches) == 8
    for function in batches:
        world = World()
        world.lookups[0].combiner = combiner
        world.fails(function, words=["combiner", "mine"])
    for function in ("sok_reduce", "sok_apply"):
        world = World()
        world.gradients[0].combiner = combiner
        world.fails(function, words=["combiner", "mine"])


@pytest.mark.parametrize("table", [-1, 1, 2**31 - 1])
def test_lookup_of_a_table_that_is_not_there(table):
    batches = [name for name in FUNCTIONS if ctypes.POINTER(_abi.Lookup) in _abi.PROTOTYPES[name][1]]
    assert len(batches) == 8
    for function in batches:
        world = World()
        world.lookups[0].table = table
        world.fails(function, words=["lookups[0].table", str(table)])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_negative_numbers_of_things(function):
    kinds = _abi.PROTOTYPES[function][1]
    for position, kind in enumerate(kinds):
        if kind is ctypes.c_int32:
            world = World()
            arguments = world.arguments()[function]
            arguments[position] = -1
            world.fails(function, arguments=arguments)


def test_flags_that_do_not_exist():
    world = World()
    arguments = world.arguments()["sok_locate"]
    arguments[-1] = 128
    world.fails("sok_locate", words=["flags"], arguments=arguments)
    world.gradients[0].flags = 64
    world.fails("sok_apply", words=["flags"])
    world = World()
    world.optimizer.flags = 1 << 30
    world.fails("sok_apply", words=["flags"])


@pytest.mark.parametrize("kind", [-1, 9, 2**31 - 1])
def test_unknown_kinds(kind):
    world = World()
    world.optimizer.kind = kind
    world.fails("sok_apply", words=["kind"])
    world = World()
    world.initializer.kind = kind
    world.fails("sok_initialize", words=["kind"])


@pytest.mark.parametrize("number", [-1, 2, 77])
def test_unknown_device(number):
    for function in FUNCTIONS:
        world = World()
        world.context.device.type = number
        world.fails(function, words=["device"])


@pytest.mark.parametrize("number", [0, -1])
def test_no_workers(number):
    for function in FUNCTIONS:
        world = World()
        world.context.executor.num_workers = number
        world.fails(function, words=["num_workers"])


@pytest.mark.parametrize(
    "splits",
    [[1, 2, 3], [0, 2, 4], [0, 2, 2], [0, 3, 2], [0, -1, 3], [0, 100, 3], [-1, 2, 3], [0, 2**62, 3], [0, -(2**63), 3]],
    ids=str,
)
def test_row_splits(splits):
    array = np.array(splits)
    for function in (
        "sok_gather_combine",
        "sok_combine",
        "sok_spread",
        "sok_weight_gradient",
        "sok_weight_gradient_of_rows",
    ):
        world = World()
        world.lookups[0].row_splits = _arrays.view(array)
        world.fails(function, words=["row_splits", "mine"])
    for function in ("sok_reduce", "sok_apply"):
        world = World()
        world.gradients[0].row_splits = _arrays.view(array)
        world.fails(function, words=["row_splits", "mine"])


def test_row_splits_in_a_large_batch(pools):
    splits = np.arange(0, 40_001, 4)
    splits[5000] = 1
    keys = np.zeros(40_000, np.int64)
    table = core.Table(np.ones((10, 8), np.float32), name="mine")
    for context in [None, *pools]:
        with pytest.raises(ValueError, match=r"mine.*row_splits"):
            core.gather_combine([table], [core.Lookup(keys, row_splits=splits)], context=context)
        part = core.Gradient(keys, np.ones((10_000, 8), np.float32), row_splits=splits)
        with harness.unchanged(table.weight), pytest.raises(ValueError, match=r"mine.*row_splits"):
            core.apply([core.Update(table, core.Optimizer("sgd", 0.1), [part])], context=context)


def test_more_entries_than_32_bits_count():
    """Views of 2^31 entries are refused before anything is read (there is no such memory here)."""
    world = World()
    lookup = world.lookups[0]
    lookup.keys.shape[0] = lookup.slots.shape[0] = lookup.weights.shape[0] = 2**31
    for function in ("sok_gather_combine", "sok_route", "sok_locate"):
        world.fails(function, words=["2^31"])
    two = (_abi.Lookup * 2)(lookup, lookup)
    for each in two:
        each.keys.shape[0] = each.slots.shape[0] = each.weights.shape[0] = 2**30 + 1
    arguments = [world.context, 1, world.columns, 2, two]
    world.fails("sok_gather_combine", words=["2^31"], arguments=arguments)
    world.fails("sok_locate", words=["2^31"], arguments=[world.context, 1, world.placements, None, 2, two, 0])


@pytest.mark.parametrize("make", [lambda: core.HashIndex(10), lambda: core.DynamicTable(10, 4)], ids=["index", "table"])
@pytest.mark.parametrize("flags", [0, 1], ids=["find", "insert"])
def test_more_keys_than_32_bits_count(make, flags):
    """As a frontend asks an index, by requests that have fewer each."""
    with make() as index:
        request = _abi.IndexRequest(ctypes.pointer(index.struct), _abi.Tensor(), None)
        request.keys.dtype, request.keys.rank, request.keys.shape[0] = _abi.INT64, 1, 2**30
        requests = (_abi.IndexRequest * 2)(request, request)
        assert index.struct.locate(ctypes.byref(core.Context().struct), 2, requests, flags) != 0
        assert b"2147483648 keys; a call takes fewer than 2^31" in _abi.library().sok_last_error_message()


@pytest.mark.parametrize(
    ("order", "splits"),
    [
        ([0, 2, 3], [0, 2, 3, 0]),
        ([0, -1, 1], [0, 2, 3, 0]),
        ([0, 2, 1], [0, 5, 3, 0]),
        ([0, 2, 1], [0, -1, 3, 0]),
        ([0, 2, 1], [0, 2, 2**31 - 1, 0]),
        ([2**31 - 1, 2, 1], [0, 2, 3, 0]),
    ],
)
def test_routing_that_lies(order, splits):
    world = World()
    order, splits = np.array(order, np.int32), np.array(splits, np.int32)
    world.routing.order, world.routing.unique_splits = _arrays.view(order), _arrays.view(splits)
    with harness.unchanged(world.weight):
        status = world.call("sok_spread")
    assert status in (INVALID, _library.OUT_OF_RANGE)


@pytest.mark.parametrize("count", [-1, 1, 3, HUGE])
def test_counts_that_lie(count):
    world = World()
    world.messages.counts[0] = count
    world.fails("sok_spread")


def test_bad_initializers():
    for kind, a, b in [
        ("uniform", 2.0, 1.0),
        ("normal", 0.0, -1.0),
        ("truncated_normal", 0.0, -1.0),
        ("uniform", float("nan"), 1.0),
        ("normal", 0.0, float("inf")),
    ]:
        with pytest.raises(ValueError, match="initializer"):
            core.initialize(core.Initializer(kind, a, b), 2, 2)
    with pytest.raises(ValueError, match="expected one of constant"):
        core.initialize(core.Initializer("orthogonal"), 2, 2)
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="seed"):
            core.initialize(core.Initializer("constant", seed=seed), 2, 2)
    with pytest.raises(ValueError, match="keys"):
        core.initialize(core.Initializer("constant"), 2, 2, keys=[1, 2, 3])
    with pytest.raises(ValueError, match="rows"):
        core.initialize(core.Initializer("constant"), 2, 2, out=np.zeros((2, 2)))
