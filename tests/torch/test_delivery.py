# SPDX-License-Identifier: Apache-2.0
"""Tables are found again from call to call, and get the gradients of a call in one piece, whatever happens between."""

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import call
from sparse_operation_kit.torch.gradient import PendingGradient

IDS = (torch.tensor([1, 2, 2, 7]), torch.tensor([0, 3, 4]))
COUNTS = torch.bincount(IDS[0], minlength=10).float().unsqueeze(1).expand(10, 4)


@pytest.fixture
def tables():
    return [sok.Variable(torch.randn(10, 4), name=f"table{i}") for i in range(3)]


def lookup(tables):
    return sok.lookup_sparse(tables, [IDS] * len(tables), combiners="sum")


def total(tables):
    return sum(output.sum() for output in lookup(tables))


def test_tables_are_freed_with_their_last_reference(tables):
    optimizer = sok.OptimizerWrapper(torch.optim.SGD(tables, lr=0.1))
    gc.collect()
    gc.disable()
    try:
        total(tables).backward()
        optimizer.step()
        optimizer.zero_grad()
        total(tables).backward()  # its gradients stay with the tables
        gone = [weakref.ref(table) for table in tables]
        del optimizer
        tables.clear()
        assert [reference() for reference in gone] == [None] * 3
    finally:
        gc.enable()


def test_a_new_table_in_the_place_of_another():
    places = set()
    for rows in range(1, 1000):
        table = sok.Variable(torch.full((rows, 2), float(rows)), name=f"of{rows}")
        last = (torch.tensor([rows - 1]), torch.tensor([0, 1]))
        assert sok.lookup_sparse(table, last).tolist() == [[rows, rows]]
        if id(table) in places:
            with pytest.raises(IndexError, match=rf"'of{rows}': key {rows} is outside \[0, {rows}\)"):
                sok.lookup_sparse(table, (torch.tensor([rows]), torch.tensor([0, 1])))
            return
        places.add(id(table))
        del table
    raise AssertionError("no table was made in the place of another")


def test_only_so_many_calls_are_remembered():
    tables = [sok.Variable(torch.zeros(10, 4)) for _ in range(call._KEPT + 3)]
    for table in tables:
        lookup([table])
        assert len(call._described) <= call._KEPT


def test_rows_in_other_memory(tables):
    lookup(tables)
    for dtype in (torch.float32, torch.bfloat16):
        for table in tables:
            table.data = torch.randn(10, 4).to(dtype)
        for table, output in zip(tables, lookup(tables), strict=True):
            wanted = torch.stack([table.detach()[[1, 2, 2]].float().sum(0), table.detach()[7].float()])
            torch.testing.assert_close(output, wanted)


def test_tables_on_several_devices(tables):
    tables.append(sok.Variable(torch.zeros(10, 4, device="meta"), name="elsewhere", device="meta"))
    optimizer = sok.OptimizerWrapper(torch.optim.SGD(tables, lr=1.0))
    for _ in range(2):
        before = [table.detach().clone() for table in tables]
        optimizer.zero_grad()
        total(tables[:3]).backward()
        optimizer.step()
        for table, old in zip(tables[:3], before, strict=False):
            torch.testing.assert_close(table.detach(), old - COUNTS)
        with pytest.raises(ValueError, match="'table0' is on cpu, 'elsewhere' on meta"):
            lookup(tables)
    assert call.distinct(tables)[1] is call.distinct(tables)[1]


def test_tables_in_use_do_not_swap(tables):
    lookup(tables)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(tables[0], tables[1])
    assert [table.name for table in tables] == ["table0", "table1", "table2"]


def test_requires_grad_switched_off_and_on(tables):
    for wanted in ([True] * 3, [True, False, True], [False] * 3, [False, True, False], [True] * 3):
        for table, flag in zip(tables, wanted, strict=True):
            table.grad = None
            table.requires_grad_(flag)
        loss = total(tables)
        assert loss.requires_grad == any(wanted)
        if any(wanted):
            loss.backward()
        for table, flag in zip(tables, wanted, strict=True):
            assert (table.grad is not None) == flag
            assert not flag or torch.equal(table.grad.to_dense(), COUNTS)
    with torch.no_grad():
        assert not total(tables).requires_grad


def test_copies_are_tables_of_their_own(tables):
    copies = copy.deepcopy(tables)
    total([*tables, *copies, copies[0]]).backward()
    for i in range(3):
        assert torch.equal(tables[i].grad.to_dense(), COUNTS)
        assert torch.equal(copies[i].grad.to_dense(), COUNTS * (2 if i == 0 else 1))


def test_backward_with_inputs(tables):
    total(tables).backward(inputs=[tables[1]])
    assert [table.grad is None for table in tables] == [True, False, True]
    assert isinstance(tables[1].grad, PendingGradient)
    assert torch.equal(tables[1].grad.to_dense(), COUNTS)
    gradients = torch.autograd.grad(total(tables), [tables[2], tables[0]])
    for gradient in gradients:
        assert isinstance(gradient, PendingGradient) and torch.equal(gradient.to_dense(), COUNTS)
    assert tables[0].grad is None and tables[2].grad is None


def test_a_hook_on_one_of_the_tables(tables):
    seen: list[Any] = []
    loss = total(tables)
    handle = tables[1].register_hook(lambda gradient: seen.append(type(gradient)) or gradient * 3)
    leaf = tables[2].expand_as(tables[2]).grad_fn.next_functions[0][0]
    leaf.register_prehook(lambda gradients: seen.append("leaf") or gradients)
    loss.backward()
    assert sorted(map(str, seen)) == sorted(map(str, [PendingGradient, "leaf"]))
    for table, factor in zip(tables, (1, 3, 1), strict=True):
        assert torch.equal(table.grad.to_dense(), COUNTS * factor)
    handle.remove()
    total(tables).backward()
    for table, factor in zip(tables, (2, 4, 2), strict=True):
        assert torch.equal(table.grad.to_dense(), COUNTS * factor)


def test_steps_with_gradients_from_several_places(tables):
    """Of one call, of several, by hand, and of nowhere: every table takes the step of its whole gradient."""
    one, two, three = tables
    groups: list[dict[str, Any]] = [{"params": [two, one]}, {"params": [three], "lr": 10.0}]
    optimizer = sok.OptimizerWrapper(torch.optim.SGD(groups, lr=1.0))

    def check(prepare, *factors):
        before = [table.detach().clone() for table in tables]
        optimizer.zero_grad()
        assert all(table.grad is None for table in tables)
        prepare()
        optimizer.step()
        for table, old, factor in zip(tables, before, factors, strict=True):
            torch.testing.assert_close(table.detach(), old - factor * COUNTS)

    def by_hand():
        total([one, two]).backward()
        two.grad = COUNTS.clone()

    check(lambda: total([one, two]).backward(), 1, 1, 0)
    check(lambda: total([two]).backward(), 0, 1, 0)
    check(lambda: total([three, one]).backward(), 1, 0, 10)
    check(lambda: [total([one, two]).backward() for _ in range(2)], 2, 2, 0)
    check(lambda: (total([one, two]) + total([one])).backward(), 2, 1, 0)
    check(by_hand, 1, 1, 0)
    check(lambda: (total([one, two]).backward(), setattr(three, "grad", COUNTS.clone())), 1, 1, 10)
    check(lambda: None, 0, 0, 0)


def test_other_ways_to_the_same_leaf(tables):
    """Autograd visits a table's leaf where something else in the graph leads there, before the lookup or after it."""
    one, two, three = tables
    for build in (
        lambda: total(tables) + (two**2).sum(),
        lambda: (two**2).sum() + total(tables),
        lambda: total(tables) + total([two, three]) + (two**2).sum(),
        lambda: (two**2).sum() + total([two]) + total([three, one, two]),
    ):
        for table in tables:
            table.grad = None
        loss = build()
        lookups = torch.autograd.grad(loss, two, retain_graph=True)[0].to_dense() - 2 * two.detach()
        loss.backward(retain_graph=True)
        loss.backward()
        torch.testing.assert_close(two.grad.to_dense(), 2 * (lookups + 2 * two.detach()))
        assert torch.equal(lookups.round(), COUNTS * lookups[1, 0].round())
        for other in (one, three):
            gradient = other.grad.to_dense()
            assert torch.equal(gradient, COUNTS * gradient[1, 0]) and gradient[1, 0] >= 2


def test_the_graph_is_as_it_was_after_backward(tables):
    outputs = lookup(tables)
    node = outputs[0].grad_fn
    assert node.name() == "LookupBackward"
    before = [edge for edge, _ in node.next_functions]
    assert [leaf.variable for leaf in before] == tables
    sum(output.sum() for output in outputs).backward()
    assert [edge for edge, _ in node.next_functions] == before
    with pytest.raises(RuntimeError, match="second time"):
        outputs[0].sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(outputs[0].sum(), tables[0], allow_unused=True)


def test_hooks_of_the_node_see_all_tables(tables):
    seen = []
    outputs = lookup(tables)
    outputs[0].grad_fn.register_hook(lambda gradients, of_outputs: seen.append((len(gradients), len(of_outputs))))
    sum(output.sum() for output in outputs).backward()
    assert seen == [(3, 3)]
    assert all(torch.equal(table.grad.to_dense(), COUNTS) for table in tables)


def test_a_table_that_is_no_leaf():
    scale = torch.tensor(2.0, requires_grad=True)
    table = sok.Variable(torch.ones(10, 4), trainable=False)
    table.mul_(scale)
    lookup([table])[0].sum().backward()
    assert scale.grad == 4 * COUNTS[:, 0].sum()


def test_transforms_are_refused(tables):
    with torch.autograd.forward_ad.dual_level():
        weights = torch.autograd.forward_ad.make_dual(torch.ones(4), torch.ones(4)).requires_grad_()
        with pytest.raises(NotImplementedError, match="forward-mode"):
            sok.lookup_sparse(tables[0], IDS, weights)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda weights: sok.lookup_sparse(tables[0], IDS, weights).sum())(torch.ones(4))


def test_looking_at_one_gradient_leaves_the_others(tables):
    total(tables).backward()
    assert torch.equal(tables[1].grad.to_dense(), COUNTS)
    total(tables).backward()
    assert [torch.equal(table.grad.to_dense(), 2 * COUNTS) for table in tables] == [True] * 3


def test_what_was_overwritten_is_named(tables):
    ids = [(IDS[0].clone(), IDS[1]) for _ in tables]
    sum(output.sum() for output in sok.lookup_sparse(tables, ids, combiners="sum")).backward()
    ids[0][0].zero_()
    with pytest.raises(RuntimeError, match=r"'table2' were modified in place"):
        _ = tables[2].grad
    with pytest.raises(RuntimeError, match="modified in place"):
        sok.OptimizerWrapper(torch.optim.SGD(tables, lr=0.1)).step()


def test_several_threads(tables):
    failures = []

    def work(own):
        try:
            for _ in range(50):
                own[0].grad = None
                total([*own, *tables]).backward(inputs=own)
                assert torch.equal(own[0].grad.to_dense(), COUNTS)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=([sok.Variable(torch.randn(10, 4))],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_outputs_joined_side_by_side(tables, combiner):
    """torch.cat gives each lookup columns of one gradient, which are used where they are."""
    weights = [torch.rand(4, requires_grad=True) for _ in tables]
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn((2, 4 * len(tables) + 1), generator=generator)
    results = []
    for joined in (False, True):
        copies = [sok.Variable(table.detach().clone(), name=table._sok_name) for table in tables]
        outputs = sok.lookup_sparse(copies, [IDS] * len(copies), weights, combiners=combiner)
        if joined:
            torch.cat([outputs[0], torch.zeros(2, 1), *outputs[1:]], 1).backward(whole)
        else:
            parts = whole.split([4, 1, *[4] * (len(tables) - 1)], 1)
            torch.autograd.backward(outputs, [part.contiguous() for i, part in enumerate(parts) if i != 1])
        gradients = [copied.grad.to_dense() for copied in copies]
        sok.OptimizerWrapper(torch.optim.Adagrad(copies, lr=0.1)).step()
        results.append([*copies, *gradients, *(weight.grad.clone() for weight in weights)])
        for weight in weights:
            weight.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
