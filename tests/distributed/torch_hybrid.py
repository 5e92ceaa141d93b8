# SPDX-License-Identifier: Apache-2.0
"""Checks of dist_model_parallel for torch_worker.py: DistributedEmbedding beside a model of one process."""

import json
import pathlib
import tempfile
from typing import Any

import following
import hybrid_examples
import numpy as np
import torch
from hybrid_model import ALL_KINDS, DENSE, PLANNED, TABLES, Case, check_report

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import dist_model_parallel as dmp
from sparse_operation_kit.torch import runtime
from sparse_operation_kit.torch.errors import PeerError
from sparse_operation_kit.torch.group import Group


def as_input(kind, bags):
    if kind == "single":
        return torch.tensor([bag[0] for bag in bags], dtype=torch.int64)
    if kind in DENSE:
        return torch.tensor(bags, dtype=torch.int32).reshape(len(bags), DENSE[kind])
    values = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
    offsets = torch.tensor([0, *np.cumsum([len(bag) for bag in bags]).tolist()])
    if kind == "ragged":
        return torch.nested.nested_tensor_from_jagged(values, offsets) if len(values) else (values, offsets)
    rows = torch.tensor([i for i, bag in enumerate(bags) for _ in bag], dtype=torch.int64)
    columns = torch.tensor([j for bag in bags for j in range(len(bag))], dtype=torch.int64)
    return torch.sparse_coo_tensor(torch.stack([rows, columns]), values, [len(bags), 9], check_invariants=True)


def _compare(
    tables, combiners, kinds, tables_of, *, dp_input=True, equal=True, batch=None, step="", compiled=False, **options
):
    rank, num_ranks = sok.rank(), sok.num_ranks()
    case = Case(tables, combiners, kinds, tables_of, rank, num_ranks, equal, batch)
    shapes = [(*shape, c) for shape, c in zip(tables, combiners, strict=True)]
    if "constraints" in options:
        options["strategy"] = dmp.plan(shapes, batch_size=64, input_table_map=tables_of, **options)
        del options["constraints"]
    layer = dmp.DistributedEmbedding(
        shapes, input_table_map=tables_of, dp_input=dp_input, name=f"first_{len(tables)}", **options
    )
    for t, rows in enumerate(layer.get_weights(True)):
        np.testing.assert_array_equal(rows, hybrid_examples.first_rows(f"{layer.name}/{t}", *tables[t]))
    layer.set_weights(case.start, chunk=5)
    for got, wanted in zip(layer.get_weights(True), case.start, strict=True):
        np.testing.assert_array_equal(got, wanted)
    if dp_input:
        inputs = [as_input(kind, each[case.share]) for kind, each in zip(kinds, case.bags, strict=True)]
    else:
        inputs = [as_input(kinds[i], case.bags[i]) for i in layer.strategy.input_ids_list[rank]]
    outputs = (torch.compile(layer, backend="aot_eager") if compiled else layer)(inputs)
    case.check_outputs([output.detach().cpu() for output in outputs])
    upstream = [torch.from_numpy(each[case.share]).to(outputs[0].device) for each in case.upstream]
    loss = sum((o * u.reshape(o.shape)).sum() for o, u in zip(outputs, upstream, strict=True))
    loss.backward()
    adagrad = step == "adagrad"
    parameters = list(layer.parameters())
    if adagrad:
        optimizer = torch.optim.Adagrad(parameters, 0.5, initial_accumulator_value=0.1)
    else:
        optimizer = torch.optim.SGD(parameters, 0.5)
    optimizer = dmp.DistributedOptimizer(optimizer)
    optimizer.synchronize()
    case.check_norm(sok.clip_grad_norm_(parameters, 1e9).item())
    optimizer.step()
    case.check_tables(layer.get_weights(True), 0.5, adagrad)
    return layer


def hybrid_compiled():
    """The module under torch.compile, whose graph breaks at lookups: outputs and a step."""
    _compare(TABLES, **ALL_KINDS, compiled=True)


def hybrid_at_random():
    """Tables, maps, thresholds, strategies, plans and kinds of inputs, at random."""
    hybrid_examples.run(lambda *arguments, compiled, **options: _compare(*arguments, **options), Group())


def hybrid_models():
    """Replicated, whole, column- and row-sliced tables in one layer, each with every kind of input, some shared."""
    for equal in (True, False):
        layer = _compare(TABLES, **ALL_KINDS, equal=equal)
        if sok.num_ranks() > 1:
            assert layer.strategy.table_groups == [[1], [0, 3, 4, 5], [2]]


def hybrid_planned():
    """Plans with everything that there is, and without any wish; the same on all ranks."""
    ranks = sok.num_ranks()
    kinds, combiners = ["ragged", "dense", "sparse", "single", "dense", "ragged", "dense"], ["sum", "mean"] * 3
    tables_of = [1, 0, 2, 3, 4, 5, 2]
    shapes = [(*shape, c) for shape, c in zip(TABLES, combiners, strict=True)]
    made = dmp.plan(shapes, constraints=PLANNED, input_table_map=tables_of, batch_size=12, optimizer="adam")
    if ranks > 1:
        assert made.strategy.table_groups == [[1], [0, 3, 5], [2, 4]]
    layer = _compare(TABLES, combiners, kinds, tables_of, strategy=made, equal=False)
    assert check_report(layer, ranks).request.optimizer == "Adam"
    layer = _compare(TABLES, combiners, kinds, tables_of, strategy="planned")
    inputs = [torch.tensor([[1, 2]])] * len(tables_of)
    report = check_report(layer, ranks, inputs=inputs, repeats=1)
    assert report.request.batch_size == ranks and set(report.request.hotness) == {2.0}
    layer = dmp.DistributedEmbedding([(5, 2)] * 2 * ranks, strategy="planned")
    assert {tuple(o.shape) for o in layer([torch.tensor([[1], [2], [3]])] * 2 * ranks)} == {(3, 1, 2)}
    plain = json.dumps([made.to_config(), layer.strategy.assignment.columns, layer.strategy.table_groups])
    assert len(set(Group().allgather(plain.encode()))) == 1
    _compare(TABLES, combiners, kinds, tables_of, strategy="planned", dp_input=False)
    one_rank = {0: {"choices": ["whole"]}, 1: {"choices": ["replicated"]}}  # the others have a step of no table
    _compare([(15, 1), (5, 2)], ["sum"] * 2, ["dense"] * 2, [0, 1], constraints=one_rank)


def hybrid_own_inputs():
    """dp_input=False; slices of unequal widths; gradients that are divided once after init(gradient="mean")."""
    for strategy in ("basic", "memory_optimized"):
        kinds = ["ragged", "dense", "sparse", "single", "dense", "ragged", "dense"]
        _compare(TABLES, ["sum"] * 6, kinds, [1, 0, 2, 3, 4, 5, 2], dp_input=False, strategy=strategy)
    merged = {"strategy": "memory_optimized", "column_slice_threshold": 18}
    _compare([(4, 10), (5, 3)], ["sum"] * 2, ["dense"] * 2, [0, 1], **merged)
    shared = {"strategy": "memory_balanced", "column_slice_threshold": 8}
    _compare([(5, 2), (5, 2)], ["sum"] * 2, ["single"] * 2, [1, 0], **shared)
    runtime.shutdown()
    sok.init(gradient="mean")
    _compare(TABLES[:4], ["sum"] * 4, ["dense"] * 4, [0, 1, 2, 3])
    runtime.shutdown()
    sok.init()


def hybrid_rows():
    """Initial rows, files, ids outside their table, what other ranks' tables keep."""
    wanted = [whole(sok.Variable(shape=(6, 4), initializer="uniform", name=f"first/{t}")) for t in range(4)]
    made = [dmp.Embedding(6, 4, combiner="sum", device="meta") for _ in range(4)]
    each: list[dict[str, Any]] = [
        {},
        {"column_slice_threshold": 6},
        {"row_slice_threshold": 1},
        {"data_parallel_threshold": 99},
    ]
    for options in each:
        layer = dmp.DistributedEmbedding(made, name="first", **options)
        np.testing.assert_array_equal(layer.get_weights(True), wanted)
    rng = np.random.default_rng(4)
    arrays = [rng.normal(size=(6, 4)).astype(np.float32) for _ in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        np.save(pathlib.Path(folder) / "0.npy", arrays[0])
        layer.set_weights([pathlib.Path(folder) / "0.npy", torch.from_numpy(arrays[1]), *arrays[2:]], 3, True)
    np.testing.assert_array_equal(layer.get_weights(True), arrays)
    last = sok.rank() == sok.num_ranks() - 1
    for given in (arrays[:3], [*arrays[:3], np.zeros((3, 3)) if last else arrays[3]]):
        try:
            layer.set_weights(given)
        except (ValueError, RuntimeError):
            continue
        raise AssertionError("no error")
    layer = dmp.DistributedEmbedding([(5, 2, "sum")] * (2 * sok.num_ranks()))
    for key in (5, -1):
        inputs = [torch.tensor([[1], [key if sok.rank() == 0 and t == 1 else 2]]) for t in range(2 * sok.num_ranks())]
        try:
            layer(inputs)
            sok.check_errors()  # a GPU finds it later
        except (IndexError, PeerError):
            continue
        raise AssertionError("no error")
    for _ in range(3):
        torch.stack(layer([torch.tensor([[1]])] * 2 * sok.num_ranks())).sum().backward()
    layer([torch.tensor([[1]])] * 2 * sok.num_ranks())
    assert all(v.grad is None for i, v in enumerate(layer._tables.variables) if i not in layer._own)


def hybrid_wrong_inputs():
    """What a layer refuses on one rank, before it looks anything up, is a PeerError of the others. The first table is
    replicated, where there are several ranks.
    """
    last = sok.num_ranks() - 1
    shapes = [(4, 2, "sum"), *[(20, 4, "sum")] * (2 * sok.num_ranks())]
    for dp_input in (True, False):
        layer = dmp.DistributedEmbedding(shapes, dp_input=dp_input, data_parallel_threshold=8)
        numbers = list(range(len(shapes))) if dp_input else layer.strategy.input_ids_list[sok.rank()]
        good = [torch.ones(last + 1, 1, dtype=torch.int64)] * len(numbers)
        calls = [
            (good[0], ValueError),
            (good[1:], ValueError),
            ([torch.ones(2 * last + 2, 1, dtype=torch.int64), *good[1:]], ValueError),
            ([*good[1:], None], TypeError),
        ]
        if layer.strategy.table_groups[0]:
            calls.append(([good[0] + 3, *good[1:]], IndexError))
        if not (dp_input or last == 0):
            calls.append(([torch.ones(last + 2, 1, dtype=torch.int64)] * len(numbers), ValueError))
        for inputs, kind in calls:
            try:
                layer(inputs if sok.rank() == last else good)
            except (kind, PeerError) as caught:
                own = sok.rank() == last
                assert isinstance(caught, kind if own else PeerError), repr(caught)
                assert f"rank {last}" not in str(caught) if own else f"rank {last}" in str(caught), repr(caught)
                assert not (own and kind is IndexError) or OUTSIDE.format(layer.name, 4) in str(caught), repr(caught)
            else:
                raise AssertionError("no error")
        assert len(layer(good)) == len(shapes)
    if last:
        own = len(layer.strategy.input_ids_list[sok.rank()])
        other = torch.ones((last + 1) * (1 + (sok.rank() == last)), 1, dtype=torch.int64)  # divides well on each rank
        try:
            layer([other] * own)
        except ValueError as caught:
            assert "same batchsize" in str(caught), caught
        else:
            raise AssertionError("no error")
        assert [tuple(each.shape) for each in layer([other[:0]] * own)] == [(0, shape[1]) for shape in shapes]
        _ids_outside_tables_that_are_all_replicated()


OUTSIDE = "table '{}/0': key {} is outside [0, 4)"


def _ids_outside_tables_that_are_all_replicated():
    """No exchange tells the other ranks: the one that has them raises, with the table's name, and the others go on."""
    for combiner in (None, "mean"):
        layer = dmp.DistributedEmbedding([(4, 2, combiner), (5, 1, combiner)], data_parallel_threshold=8)
        assert layer.strategy.table_groups[0] == [0, 1]
        good = torch.tensor([[1, 2], [0, 3]], dtype=torch.int32)
        for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
            for key in (4, 9, -1):
                bad = good.masked_fill(good == 2, key) if sok.rank() == sok.num_ranks() - 1 else good
                for ids in (bad, as_input("ragged", bad.tolist())):
                    try:
                        call([ids, good])
                    except IndexError as caught:
                        assert bad is not good and OUTSIDE.format(layer.name, key) in str(caught), caught
                    else:
                        assert bad is good, "no error"
            expected = layer.get_parameter("table_0")[good].detach()
            expected = expected if combiner is None else expected.mean(1)
            torch.testing.assert_close(call([good, good])[0].detach(), expected)


def hybrid_changes():
    """What changes reaches layers of other placements."""

    def make(**options):
        return dmp.DistributedEmbedding([(*shape, "sum") for shape in TABLES], name="layer", **options)

    def step(layer, ids):
        layer.zero_grad()
        torch.cat(layer([torch.from_numpy(each) for each in ids]), 1).sum().backward()
        dmp.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 0.5)).step()

    def first_of(layer):
        return next(iter(sok.filter_variables(layer.parameters())[0]), None)

    with following.shared_folder(Group()) as folder:
        following.follow_layer(sok, make, step, first_of, f"{folder}/one")


def whole(table):
    rows = torch.zeros(tuple(table.global_shape))
    rows[table.placement.rows] = table.detach().as_subclass(torch.Tensor)
    return sok.communication.allreduce(rows).cpu().numpy()
