# SPDX-License-Identifier: Apache-2.0
"""The pending gradient: it joins, scales and materialises as a sparse tensor would, and stays pending otherwise."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch_harness as harness

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch.gradient import PendingGradient

IDS = (torch.tensor([1, 2, 2, 7]), torch.tensor([0, 3, 4]))
COUNTS = torch.bincount(IDS[0], minlength=10).float()


@pytest.fixture
def table():
    return sok.Variable(torch.randn(10, 4), name="items")


def backward(table, factor=1.0):
    """Gradient of a row: its count times `factor`."""
    (sok.lookup_sparse(table, IDS, combiners="sum").sum() * factor).backward()


def dense(factor=1.0):
    return (COUNTS * factor).unsqueeze(1).expand(10, 4)


def test_stays_pending(table):
    backward(table)
    assert isinstance(table.grad, PendingGradient)
    assert table.grad.handle.sizes() == (1, 4)  # one part of four entries, not one of three rows
    assert not table.grad.is_coalesced()
    assert table.grad.shape == table.shape and table.grad.dtype == torch.float32 and table.grad.device == table.device
    assert "items" in repr(table.grad) and "1 summands" in repr(table.grad)


def test_face_of_a_sparse_tensor(table):
    backward(table)
    gradient = table.grad
    assert gradient.is_sparse and gradient.layout == torch.sparse_coo
    assert not gradient.is_coalesced()
    coalesced = gradient.coalesce()
    assert type(coalesced) is torch.Tensor and coalesced.is_coalesced() and gradient.is_coalesced()
    assert coalesced.indices().tolist() == [[1, 2, 7]]
    assert torch.equal(gradient.to_dense(), dense())
    assert torch.equal(gradient.indices(), coalesced.indices())
    assert torch.equal(gradient._values(), coalesced.values())
    assert gradient._nnz() == 3 and gradient.sparse_dim() == 1 and gradient.dense_dim() == 1
    torch.testing.assert_close(gradient.norm(), dense().norm())
    torch.testing.assert_close(torch.sparse.sum(gradient.coalesce()), dense().sum())


def test_accumulates_over_backward_passes(table):
    backward(table)
    backward(table, 2.0)
    assert isinstance(table.grad, PendingGradient) and table.grad.handle.sizes() == (2, 8)
    backward(table, -4.0)
    assert torch.equal(harness.by_key(table, table.grad.to_dense()), dense(-1.0))
    backward(table, 0.5)  # onto a gradient that was reduced already
    assert torch.equal(harness.by_key(table, table.grad.to_dense()), dense(-0.5))


def test_several_lookups_in_one_backward(table):
    one = sok.lookup_sparse(table, IDS, combiners="sum")
    two, three = sok.lookup_sparse([table, table], [IDS, IDS], combiners="sum")
    single = sok.all2all_dense_embedding(table, IDS[0])
    (one + 2 * two + 4 * three).sum().add(8 * single.sum()).backward()
    assert isinstance(table.grad, PendingGradient)
    assert torch.equal(harness.by_key(table, table.grad.to_dense()), dense(15.0))


def test_retain_graph(table):
    loss = sok.lookup_sparse(table, IDS, combiners="sum").sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(harness.by_key(table, table.grad.to_dense()), dense(2.0))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_autograd_grad(table):
    other = sok.Variable(torch.randn(10, 4))
    weight = torch.ones(4, requires_grad=True)
    loss = (sok.lookup_sparse(table, IDS, combiners="sum") * weight).sum()
    gradient, dense_gradient, unused = torch.autograd.grad(loss, [table, weight, other], allow_unused=True)
    assert isinstance(gradient, PendingGradient) and unused is None and dense_gradient.shape == (4,)
    assert torch.equal(gradient.to_dense(), dense())
    assert table.grad is None


def test_unused_output_has_no_part(table):
    other = sok.Variable(torch.randn(10, 4))
    used, _, _ = sok.lookup_sparse([table, table, other], [IDS] * 3, combiners="sum")
    used.sum().backward()
    assert table.grad.handle.sizes() == (1, 4) and other.grad is None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(table, set_to_none):
    optimizer = torch.optim.SGD([table], lr=0.1)
    backward(table)
    optimizer.zero_grad(set_to_none)
    if set_to_none:
        assert table.grad is None
    else:
        assert torch.equal(harness.by_key(table, table.grad.to_dense()), torch.zeros(10, 4))
    backward(table, 3.0)
    assert torch.equal(harness.by_key(table, table.grad.to_dense()), dense(3.0))


def test_dense_use_of_the_table_beside_a_lookup(table):
    for order in range(2):
        table.grad = None
        lookup = sok.lookup_sparse(table, IDS, combiners="sum").sum()
        penalty = (table**2).sum()
        (lookup + penalty if order else penalty + lookup).backward()
        torch.testing.assert_close(harness.by_key(table, table.grad.to_dense()), dense() + 2 * table.detach())
        backward(table)
        torch.testing.assert_close(harness.by_key(table, table.grad.to_dense()), 2 * dense() + 2 * table.detach())
        (table**2).sum().backward()
        torch.testing.assert_close(harness.by_key(table, table.grad.to_dense()), 2 * dense() + 4 * table.detach())
    table.grad = None
    backward(table)
    (table**2).sum().backward()
    assert not table.grad.is_sparse
    torch.testing.assert_close(harness.by_key(table, table.grad.to_dense()), dense() + 2 * table.detach())


def test_arithmetic(table):
    def fresh():
        table.grad = None
        backward(table)
        return table.grad

    for actual, factor in [
        (fresh() * 3, 3.0),
        (3 * fresh(), 3.0),
        (fresh() / 2, 0.5),
        (-fresh(), -1.0),
        (fresh().mul_(0.25), 0.25),
        (fresh().div_(4), 0.25),
        (fresh().mul_(torch.tensor(0.5)), 0.5),
        (fresh() + fresh(), 2.0),
        (fresh().add_(fresh(), alpha=3), 4.0),
        (fresh().clone(), 1.0),
        (fresh().detach(), 1.0),
        (fresh().clone().mul_(2) + fresh(), 3.0),
        (fresh().zero_(), 0.0),
        (torch.zeros_like(fresh()), 0.0),
        (copy.deepcopy(fresh()), 1.0),
        (fresh().clamp(-1, 1), None),
    ]:
        assert isinstance(actual, PendingGradient)
        wanted = dense().clamp(-1, 1) if factor is None else dense(factor)
        assert torch.equal(actual.to_dense(), wanted)
    plain = torch.ones(10, 4)
    assert torch.equal(plain + fresh(), plain + dense())
    assert torch.equal((fresh() + plain).to_dense(), plain + dense())
    assert torch.equal(torch.zeros(10, 4).copy_(fresh()), dense())
    assert torch.equal(pickle.loads(pickle.dumps(fresh())).to_dense(), dense())


def test_scaling_a_copy_leaves_the_original(table):
    backward(table)
    table.grad.coalesce()
    twice = table.grad.clone()
    twice.mul_(2)
    assert torch.equal(harness.by_key(table, table.grad.to_dense()), dense())
    assert torch.equal(twice.to_dense(), dense(2.0))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clip_grad_norm(table, norm_type):
    weight = torch.randn(3, requires_grad=True)
    plain, plain_weight = table.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    backward(table)
    (weight * 2).sum().backward()
    plain.grad, plain_weight.grad = dense().clone(), torch.full((3,), 2.0)
    norm = torch.nn.utils.clip_grad_norm_([table, weight], 0.5, norm_type)
    wanted = torch.nn.utils.clip_grad_norm_([plain, plain_weight], 0.5, norm_type)
    torch.testing.assert_close(norm, wanted)
    torch.testing.assert_close(harness.by_key(table, table.grad.to_dense()), plain.grad)
    torch.testing.assert_close(weight.grad, plain_weight.grad)
    torch.nn.utils.clip_grad_value_([table], 0.01)
    assert harness.by_key(table, table.grad.to_dense()).max() <= 0.01


@pytest.mark.parametrize("options", [{}, {"p": 2, "dim": 1}, {"p": 1.0, "dim": (0, 1)}, {"p": float("-inf")}, {"p": 0}])
def test_norms(table, options):
    """Of all elements, and along dimensions of the table, of whose rows most have none."""
    backward(table)
    torch.testing.assert_close(table.grad.norm(**options), table.grad.to_dense().norm(**options))
    table.grad = None
    sok.lookup_sparse(table, (torch.tensor([], dtype=torch.int64), torch.tensor([0, 0]))).sum().backward()
    assert not table.grad.norm(**options).any() and table.grad.norm(float("inf")) == 0


def test_the_norm_of_no_rows(table):
    """It takes no memory of the table's size, and has the dtype that it has with rows."""
    table = sok.Variable(shape=(1000, 8), name="wide", dtype=torch.bfloat16)
    for ids in ([], [3]):
        table.grad = None
        sok.lookup_sparse(table, (torch.tensor(ids, dtype=torch.int64), torch.tensor([0, len(ids)]))).sum().backward()
        gradient: Any = table.grad
        with torch.profiler.profile(profile_memory=True) as profile:
            norms = [gradient.norm(p) for p in (2, 1.0, "fro", None, 0, float("inf"))]
        assert all(norm.dtype == torch.float32 for norm in norms), norms
        assert max(event.self_cpu_memory_usage for event in profile.events()) < 1000


def test_hooks_see_and_change_it(table):
    seen: list[Any] = []
    table.register_hook(lambda gradient: seen.append(type(gradient)) or gradient * 10)
    table.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.to_dense()))
    backward(table)
    assert seen[0] is PendingGradient
    assert torch.equal(seen[1], dense(10.0))


def test_memory_reused_after_backward_is_noticed(table):
    ids = IDS[0].clone()
    assert ids._version == 0
    sok.lookup_sparse(table, (ids, IDS[1]), combiners="sum").sum().backward()
    ids.zero_()
    with pytest.raises(RuntimeError, match=r"'items' were modified in place"):
        table.grad.coalesce()

    output = sok.lookup_sparse(table, IDS, combiners="sum")
    table.grad = None
    gradient = torch.ones(2, 4)
    output.backward(gradient)
    gradient.zero_()
    with pytest.raises(RuntimeError, match="modified in place"):
        sok.OptimizerWrapper(torch.optim.SGD([table], lr=0.1)).step()


@pytest.mark.parametrize("kind", ["tensor", "numpy"])
def test_buffers_refilled_between_backward_passes(table, kind):
    for ids, weights in harness.refill_buffers(kind):
        sok.lookup_sparse(table, ids, weights, "sum").sum().backward()
    wanted = torch.zeros(10, 4)
    for row, value in harness.REFILLED.items():
        wanted[row] = value
    assert torch.equal(harness.by_key(table, table.grad.to_dense()), wanted)


def test_memory_of_others_refilled_before_backward(table):
    """PyTorch does not count changes of it."""
    factor = torch.tensor([[1.0], [10.0]])  # of each bag
    outputs = [sok.lookup_sparse(table, ids, weights, "sum") for ids, weights in harness.refill_buffers("numpy")]
    sum((output * factor).sum() for output in outputs).backward()
    assert harness.by_key(table, table.grad.to_dense())[:, 0].tolist() == [0, 60, 0, 1, 0, 0, 0, 0, 0, 0]


def test_ids_changed_between_forward_and_backward_are_noticed(table):
    ids = IDS[0].clone()
    loss = sok.lookup_sparse(table, (ids, IDS[1]), combiners="sum").sum()
    ids.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_need_the_rows_as_they_were(table):
    weights = torch.ones(4, requires_grad=True)
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=0.1))
    first = sok.lookup_sparse(table, IDS, combiners="sum").sum()
    second = sok.lookup_sparse(table, IDS, weights, "sum").sum()
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


def test_table_may_change_between_forward_and_backward_without_weights(table):
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=0.1))
    first, second = (sok.lookup_sparse(table, IDS, combiners="sum").sum() for _ in range(2))
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    second.backward()
    assert torch.equal(harness.by_key(table, table.grad.to_dense()), dense())


def test_expanded_output_gradient(table):
    output = sok.lookup_sparse(table, IDS, combiners="sum")
    strides = []
    output.register_hook(lambda gradient: strides.append(gradient.stride()))
    output.sum().backward()  # an expanded scalar
    assert strides == [(0, 0)]
    assert torch.equal(harness.by_key(table, table.grad.to_dense()), dense())


def test_second_derivatives_are_refused(table):
    scale = torch.ones(1, requires_grad=True)
    loss = (sok.lookup_sparse(table, IDS, combiners="sum") * scale).pow(2).sum()
    with pytest.raises(NotImplementedError, match="differentiated again"):
        torch.autograd.grad(loss, [table], create_graph=True)


def test_empty_batch(table):
    ids = (torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    output = sok.lookup_sparse(table, ids)
    assert output.shape == (0, 4)
    output.sum().backward()
    assert table.grad.coalesce()._nnz() == 0


def test_mean_gradient_of_one_rank(table):
    from sparse_operation_kit.torch import runtime

    runtime.shutdown()
    sok.init(gradient="mean")
    backward(table)
    assert torch.equal(harness.by_key(table, table.grad.to_dense()), dense())


def test_checkpointed_segment(table):
    # Recomputes the lookup in backward().
    output = torch.utils.checkpoint.checkpoint(
        lambda: sok.lookup_sparse(table, IDS, combiners="sum"), use_reentrant=False
    )
    output.sum().backward()
    assert torch.equal(harness.by_key(table, table.grad.to_dense()), dense())


CHANGES = {
    "mul_": (lambda g: g.mul_(0.5), 0.5),
    "neg_": (lambda g: g.neg_(), -1),
    "sub_": (lambda g: g.sub_(g, alpha=0.5), 0.5),
    "nan_to_num_": (lambda g: g.nan_to_num_(), 1),
    "foreach": (lambda g: torch._foreach_mul_([torch.ones(3), g], 0.5), 0.5),
    "foreach of tensors": (lambda g: torch._foreach_div_([g], [torch.tensor(2.0)]), 0.5),
    "out": (lambda g: torch.mul(g.coalesce(), 0.5, out=g), 0.5),
    "values": (lambda g: g.values().mul_(0.5), 0.5),
    "values twice": (lambda g: [g._values().mul_(0.5), g._values().mul_(0.5)], 0.25),
    "values after others": (lambda g: [g.mul_(2), g._values().mul_(0.5), g.neg_(), g._values().mul_(0.5)], -0.5),
    "values of coalesce": (lambda g: g.coalesce().values().mul_(0.5), 0.5),
    "dense": (lambda g: g.add_(torch.zeros(10, 4)).mul_(0.5), 0.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CHANGES)
def test_changes_in_place_are_kept(name, dtype):
    change, factor = CHANGES[name]
    if (name, dtype) in (("sub_", torch.float16), ("out", torch.float16)):
        pytest.skip("PyTorch's sparse tensors of float16 have no sum")
    table = sok.Variable(torch.zeros(10, 4), dtype=dtype)
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0))
    backward(table)
    change(table.grad)
    assert torch.equal(harness.by_key(table, table.grad.to_dense()).float(), dense(factor))
    backward(table, 2.0)
    optimizer.step()
    assert torch.equal(table.detach().float(), -dense(factor + 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_data_of_a_gradient(dtype):
    """As scripts clip and replace gradients without autograd's notice."""
    table = sok.Variable(torch.zeros(10, 4), dtype=dtype)
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0))
    given = torch.sparse_coo_tensor(torch.tensor([[3, 1]]), torch.full((2, 4), 2.0, dtype=dtype), (10, 4))
    for change, wanted in (
        (lambda gradient: gradient.data.mul_(0.5), dense(0.5)),
        (lambda gradient: gradient.data.zero_(), dense(0)),
        (lambda gradient: setattr(gradient, "data", gradient.data * 3), dense(3)),
        (lambda gradient: setattr(gradient, "data", torch.ones(10, 4, dtype=dtype)), torch.ones(10, 4)),
        (lambda gradient: setattr(gradient, "data", given), given.to_dense().float()),
    ):
        table.data.zero_()
        optimizer.zero_grad()
        backward(table)
        change(table.grad)
        assert torch.equal(harness.by_key(table, table.grad.to_dense()).float(), wanted)
        backward(table)
        optimizer.step()
        assert torch.equal(table.detach().float(), -(wanted + dense()))
    with pytest.raises(ValueError, match=r"has shape \[10, 4\]"):
        table.grad.data = torch.ones(9, 4)


def test_entries_of_different_scales(table):
    """Scaled before another backward(): by one number each, by nothing, and onto what was reduced."""
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0))
    for reduced in (False, True):
        table.data.zero_()
        optimizer.zero_grad()
        for factor in (0.5, 4.0, 1.0):
            backward(table, 3.0)
            table.grad.mul_(factor)
            if reduced:
                table.grad.coalesce()
        backward(table)
        optimizer.step()
        assert torch.equal(table.detach(), -dense(((3 * 0.5 + 3) * 4 + 3) + 1))
        assert torch.equal(harness.by_key(table, table.grad.to_dense()), dense(22.0))


def test_elements_cannot_be_assigned(table):
    backward(table)
    with pytest.raises(TypeError, match="cannot assign"):
        table.grad[1] = 0.0


def test_grad_scaler_of_narrow_rows():
    table = sok.Variable(torch.zeros(10, 4), dtype=torch.bfloat16)
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(sok.lookup_sparse(table, IDS, combiners="sum").sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(table.detach().float(), -dense(2.0))


def test_grad_scaler(table):
    weight = torch.ones(4, requires_grad=True)
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table, weight], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = table.detach().clone()
    scaler.scale((sok.lookup_sparse(table, IDS, combiners="sum") * weight).sum()).backward()
    scaler.unscale_(optimizer)
    assert torch.equal(harness.by_key(table, table.grad.to_dense()), dense())
    scaler.step(optimizer)
    torch.testing.assert_close(table.detach(), before - dense())

    scaler.update()
    optimizer.zero_grad()
    after = table.detach().clone()
    scaler.scale((sok.lookup_sparse(table, IDS, combiners="sum") * float("inf")).sum()).backward()
    scaler.step(optimizer)  # skipped: not finite
    assert torch.equal(table.detach(), after)
