# SPDX-License-Identifier: Apache-2.0
"""This package's own small optimizers against the reference: SGD, RowWiseAdagrad, Ftrl."""

import copy
import pickle

import numpy as np
import pytest
import reference
import torch
import torch_harness as harness

import sparse_operation_kit.torch as sok

ROWS, DIMENSION = harness.ROWS, harness.DIMENSION


OWN = {
    "sgd": (lambda: sok.SGD(0.1), reference.Optimizer("sgd", learning_rate=0.1)),
    "rowwise": (
        lambda: sok.RowWiseAdagrad(0.1, 0.2, 1e-3),
        reference.Optimizer("rowwise_adagrad", learning_rate=0.1, epsilon=1e-3),
    ),
    "ftrl": (
        lambda: sok.Ftrl(0.1, -0.4, 0.3, 0.01, 0.02, 0.03, 0.1),
        reference.Optimizer(
            "ftrl", learning_rate=0.1, learning_rate_power=-0.4, l1=0.01, l2=0.02, l2_shrinkage=0.03, beta=0.1
        ),
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_own_optimizers_follow_the_reference(name):
    make, settings_ = OWN[name]
    initial = torch.randn(ROWS, DIMENSION)
    table, weight = sok.Variable(initial), initial.clone().requires_grad_()
    optimizer = make().attach([table, weight])
    value = {"table": initial.double().numpy(), "weight": initial.double().numpy()}
    start = {"rowwise": 0.2, "ftrl": 0.3}.get(name, 0.0)
    of_states: dict[str, list[tuple[int, ...]]] = {"rowwise": [(ROWS,)], "ftrl": [(ROWS, DIMENSION)] * 2}
    shapes = of_states.get(name, [])
    states = {key: [np.full(shape, start if i == 0 else 0.0) for i, shape in enumerate(shapes)] for key in value}
    for keys, offsets, gradient in harness.batches(13):
        optimizer.zero_grad()
        sok.lookup_sparse(table, (keys, offsets), combiners="sum").backward(gradient)
        bag = torch.nn.functional.embedding_bag(keys, weight, offsets, mode="sum", include_last_offset=True)
        bag.backward(gradient)
        dense = weight.grad.double().numpy()
        for key, rows in (("table", keys.unique().numpy()), ("weight", np.arange(ROWS))):
            reference.step(settings_, value[key], states[key], rows, dense[rows])
        optimizer.step()
    reference.assert_close(harness.rows_of(table), value["table"], 2e-6, message="table")
    reference.assert_close(weight.detach(), value["weight"], 2e-6, message="dense parameter")


def test_dense_parameters_of_any_shape():
    shapes = [(), (3,), (2, 3), (2, 3, 4), (0, 3)]
    parameters = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    optimizer = sok.RowWiseAdagrad(1.0, 0.0, 0.0).attach(parameters)
    for parameter in parameters:
        parameter.grad = torch.full(parameter.shape, 2.0)
    optimizer.step()
    for parameter in parameters:
        assert torch.equal(parameter.detach(), -torch.ones(parameter.shape))
    assert optimizer.state[parameters[1]]["sum"].shape == (3,)
    wide = torch.zeros(4, 4, requires_grad=True).T.detach().requires_grad_()
    wide.grad = torch.ones(4, 4)
    with pytest.raises(TypeError, match="contiguous"):
        optimizer.attach([wide]).step()


def test_own_optimizers_apply_gradients_and_schedules():
    table = sok.Variable(torch.zeros(4, 2))
    optimizer = sok.SGD(1.0)
    loss = sok.lookup_sparse(table, (torch.tensor([1]), torch.tensor([0, 1]))).sum()
    optimizer.apply_gradients([(torch.autograd.grad(loss, [table])[0], table)])
    assert sok.export(table)[1][1].tolist() == [-1, -1]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        optimizer.zero_grad()
        sok.lookup_sparse(table, (torch.tensor([1]), torch.tensor([0, 1]))).sum().backward()
        optimizer.step()
        scheduler.step()
    assert sok.export(table)[1][1].tolist() == [-2.5, -2.5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sok.SGD(-1), "lr must not be negative"),
        (lambda: sok.RowWiseAdagrad(0.1, epsilon=-1), "epsilon"),
        (lambda: sok.Ftrl(0), "lr must be positive"),
        (lambda: sok.Ftrl(0.1, learning_rate_power=0.5), "learning_rate_power"),
    ],
)
def test_own_optimizers_check_their_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("by", ["deepcopy", "pickle", "state_dict"])
def test_copies_of_ftrl_go_on(by):
    table = sok.Variable(torch.ones(4, 2))
    optimizer = sok.Ftrl(0.1).attach([table])

    def step(optimizer, table):
        sok.lookup_sparse(table, (torch.tensor([1]), torch.tensor([0, 1])), combiners="sum").sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(optimizer, table)
    if by == "state_dict":
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        pair = (optimizer, table)
        optimizer, table = copy.deepcopy(pair) if by == "deepcopy" else pickle.loads(pickle.dumps(pair))
    before = harness.rows_of(table)
    step(optimizer, table)
    assert (harness.rows_of(table) != before).any(1).tolist() == [False, True, False, False]


def test_an_optimizer_that_counts_by_the_name_of_one_that_does_not():
    tables = [sok.Variable(torch.ones(ROWS, DIMENSION)) for _ in range(2)]
    named_sgd = type("SGD", (sok.RowWiseAdagrad,), {})
    optimizers = [
        make(0.1).attach([table]) for make, table in zip((named_sgd, sok.RowWiseAdagrad), tables, strict=True)
    ]
    for keys, offsets, gradient in harness.batches(13):
        for optimizer, table in zip(optimizers, tables, strict=True):
            optimizer.zero_grad()
            sok.lookup_sparse(table, (keys, offsets), combiners="sum").backward(gradient)
            optimizer.step()
    assert torch.equal(*tables)
    counts = [optimizer.state[table]["step"] for optimizer, table in zip(optimizers, tables, strict=True)]
    assert counts[0] == counts[1] > 1
