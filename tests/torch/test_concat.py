# SPDX-License-Identifier: Apache-2.0
"""lookup_sparse(concat=True): the bits that torch.cat of the list has, forward, backward and after a step."""

import functools

import cases
import pytest
import torch
import torch_harness as harness
from hypothesis import given
from hypothesis import strategies as st

import sparse_operation_kit.torch as sok

SAME_BATCH = [call for call in cases.CASES if len({item.num_bags for item in call.lookups}) == 1]
IDS = (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]))


def arguments(call, variables, weights, ids=harness.pair):
    return (
        [variables[item.table] for item in call.lookups],
        [ids(item) for item in call.lookups],
        weights,
        [item.combiner for item in call.lookups],
    )


def train(call, concat, optimizer=torch.optim.Adagrad, ids=harness.pair, **options):
    """(outputs side by side, tables, gradients of the weights) after two steps."""
    variables = harness.tables(call, **options)
    used = [variables[t] for t in sorted({item.table for item in call.lookups})]
    wrapper = sok.OptimizerWrapper(optimizer(used, lr=0.1))
    weights = [harness.weights(item) for item in call.lookups]
    for _ in range(2):
        wrapper.zero_grad()
        outputs = sok.lookup_sparse(*arguments(call, variables, weights, ids), concat=concat)
        outputs = outputs if concat else torch.cat(outputs, dim=1)
        outputs.backward(torch.cat(harness.gradients(call), dim=1))
        wrapper.step()
    return outputs.detach(), [v.detach() for v in variables], [w.grad for w in weights if w is not None]


def check(call, **options):
    apart, whole = train(call, False, **options), train(call, True, **options)
    assert torch.equal(apart[0], whole[0])
    assert all(map(torch.equal, apart[1], whole[1]))
    for a, b in zip(apart[2], whole[2], strict=True):
        # A sum over columns; on a GPU its order is that of the widest loads that the stride allows.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("call", SAME_BATCH, ids=lambda call: call.name)
def test_named_cases(call):
    check(call)


@given(cases.calls(same_batch=True, max_tables=6, max_dimension=64), st.sampled_from(["SGD", "Adam"]))
def test_any_call(call, optimizer):
    check(call, optimizer=getattr(torch.optim, optimizer))


def sparse(item):
    indices, order = item.coordinates(shuffle=1)
    return torch.sparse_coo_tensor(
        torch.from_numpy(indices.T.copy()), torch.from_numpy(item.keys[order]), item.dense_shape, check_invariants=True
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_rows(dtype):
    check(SAME_BATCH[0], dtype=dtype)


def test_sparse_ids():
    call = next(x for x in SAME_BATCH if all(item.weights is None for item in x.lookups))
    check(call, ids=sparse)


def tables(*dimensions):
    return [sok.Variable(torch.arange(10.0 * d).view(10, d), name=f"t{i}") for i, d in enumerate(dimensions)]


def test_shape_and_gradient_of_every_layout():
    first, second = tables(3, 4)
    output = sok.lookup_sparse([first, second, first], [IDS] * 3, combiners="sum", concat=True)
    assert output.shape == (2, 10) and output.is_contiguous() and output.dtype == torch.float32
    assert torch.equal(output[:, 3:7], sok.lookup_sparse(second, IDS, combiners="sum"))
    wide = torch.randn(2, 40)
    layouts = {
        "expanded": torch.ones(()).expand(2, 10),
        "transposed": torch.randn(10, 2).T,
        "columns of a wider one": wide[:, 5:15],
        "every other column": wide[:, ::4],
    }
    for name, gradient in layouts.items():
        first.grad = second.grad = None
        output = sok.lookup_sparse([first, second, first], [IDS] * 3, combiners="sum", concat=True)
        output.backward(gradient)
        for table, columns in ((first, [gradient[:, :3], gradient[:, 7:]]), (second, [gradient[:, 3:7]])):
            expected = torch.zeros(10, table.shape[1])
            for part in columns:
                expected.index_add_(0, IDS[0], part[torch.tensor([0, 1, 1])])
            torch.testing.assert_close(table.grad.to_dense(), expected, msg=functools.partial("{}: {}".format, name))


def test_empty_batch():
    first, second = tables(3, 4)
    none = (torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    output = sok.lookup_sparse([first, second], [none, none], concat=True)
    assert output.shape == (0, 7)
    output.sum().backward()
    assert all(table.grad is None or not table.grad.to_dense().any() for table in (first, second))


def test_one_table():
    (table,) = tables(3)
    assert torch.equal(sok.lookup_sparse(table, IDS, concat=True), sok.lookup_sparse(table, IDS))
    assert torch.equal(sok.lookup_sparse([table], [IDS], concat=True), sok.lookup_sparse(table, IDS))


@pytest.mark.parametrize("weights", [None, [None, torch.ones(2)]], ids=["pairs", "with weights"])
def test_unequal_batches(weights):
    first, second = tables(3, 4)
    short = (torch.tensor([1, 2]), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=r"lookup 1 has 1 and lookup 0 has 2"):
        sok.lookup_sparse([first, second], [IDS, short], weights, concat=True)


def test_a_gradient_that_is_changed_is_noticed():
    first, second = tables(3, 4)
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([first, second], lr=1.0))
    before = first.detach().clone()
    gradient = torch.ones(2, 7)
    sok.lookup_sparse([first, second], [IDS, IDS], concat=True).backward(gradient)
    gradient.zero_()
    with pytest.raises(RuntimeError, match="in place"):
        optimizer.step()
    assert torch.equal(first.detach(), before)


def test_no_gradient_where_nobody_asks():
    first, second = tables(3, 4)
    with torch.no_grad():
        assert not sok.lookup_sparse([first, second], [IDS, IDS], concat=True).requires_grad
    output = sok.lookup_sparse([first, second], [IDS, IDS], concat=True)
    with pytest.raises(NotImplementedError, match="differentiated again"):
        torch.autograd.grad(output.sum() ** 2, first, create_graph=True)
