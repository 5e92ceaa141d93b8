# SPDX-License-Identifier: Apache-2.0
"""When OptimizerWrapper calls the optimizer that it wraps: unless that would do nothing, and nobody notice."""

import warnings

import pytest
import torch
import torch.optim.optimizer as all_optimizers

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import wrapped_optimizer


def trained(optimizer, table):
    optimizer.zero_grad()
    sok.lookup_sparse(table, (torch.tensor([1]), torch.tensor([0, 1]))).sum().backward()
    optimizer.step()


def make(base=torch.optim.SGD, dense=()):
    table = sok.Variable(torch.zeros(4, 2))
    return table, sok.OptimizerWrapper(base([table, *dense], lr=1.0))


def count_calls(monkeypatch, base, method):
    calls = []
    original = getattr(base, method)
    monkeypatch.setattr(base, method, lambda self, *args: (calls.append(method), original(self, *args))[1])
    return calls


@pytest.mark.parametrize("method", ["step", "zero_grad"])
@pytest.mark.parametrize("dense", [False, True])
def test_only_with_dense_parameters(monkeypatch, method, dense):
    parameter = torch.nn.Parameter(torch.ones(2))
    table, optimizer = make(dense=[parameter] if dense else [])
    calls = count_calls(monkeypatch, torch.optim.SGD, method)
    parameter.grad = torch.ones(2)
    trained(optimizer, table)
    assert calls == [method] * dense
    assert torch.equal(table.detach()[1], torch.tensor([-1.0, -1.0]))
    assert (parameter.grad is None) == dense  # zero_grad came first
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    getattr(optimizer, method)()
    assert len(calls) == dense + 1


@pytest.mark.parametrize("of", ["this optimizer", "all optimizers"])
@pytest.mark.parametrize("hook", ["pre", "post"])
def test_hooks_see_the_wrapped_optimizer(of, hook):
    table, optimizer = make()
    seen = []
    owner = optimizer.optimizer if of == "this optimizer" else all_optimizers
    prefix = "register_step" if of == "this optimizer" else "register_optimizer_step"
    handle = getattr(owner, f"{prefix}_{hook}_hook")(lambda which, *_: seen.append(type(which)))
    try:
        trained(optimizer, table)
    finally:
        handle.remove()
    assert torch.optim.SGD in seen
    seen.clear()
    trained(optimizer, table)
    assert not seen


def test_a_captured_step_is_the_wrapped_optimizer_s_to_refuse(monkeypatch):
    """In a CUDA graph torch.optim.Adam raises: replays would repeat one step's bias correction."""
    table, optimizer = make(torch.optim.Adam)
    calls = count_calls(monkeypatch, torch.optim.Adam, "step")
    trained(optimizer, table)
    assert not calls
    monkeypatch.setattr(wrapped_optimizer, "_are_captured", lambda groups: True)
    trained(optimizer, table)
    assert calls == ["step"]


def test_schedulers_of_the_wrapped_optimizer_see_its_steps():
    table, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns of a scheduler that comes before its optimizer's step
        trained(optimizer, table)
        scheduler.step()
    assert optimizer.optimizer._opt_called


def test_classes_derived_from_an_optimizer():
    class Noticing(torch.optim.SGD):
        steps = zeros = 0

        def step(self, closure=None):
            self.steps += 1
            return super().step(closure)

        def zero_grad(self, set_to_none=True):
            self.zeros += 1
            super().zero_grad(set_to_none)

    table, optimizer = make(Noticing)
    trained(optimizer, table)
    assert (optimizer.optimizer.steps, optimizer.optimizer.zeros) == (1, 1)


def test_own_optimizers_forget_dense_gradients():
    table, parameter = sok.Variable(torch.zeros(4, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = sok.SGD(1.0).attach([table, parameter])
    parameter.grad = torch.ones(2)
    trained(optimizer, table)
    assert parameter.grad is None
    assert torch.equal(parameter.detach(), torch.ones(2))


def test_hooks_of_the_state_dict():
    """Each is called as torch.optim calls it, and what it returns counts."""
    made, calls = [], []
    for wrapped in (False, True):
        optimizer: torch.optim.Optimizer = torch.optim.SGD([sok.Variable(torch.zeros(4, 2))], lr=0.5, momentum=0.9)
        optimizer = sok.OptimizerWrapper(optimizer) if wrapped else optimizer
        called: list[str] = []

        def before(_, to=called):
            to.append("before")

        def change(_, state):
            return {**state, "param_groups": [{**group, "lr": 0.25} for group in state["param_groups"]]}

        def after(of, to=called):
            to.append(str(of.param_groups[0]["lr"]))

        optimizer.register_state_dict_pre_hook(before)
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
        optimizer.register_load_state_dict_pre_hook(change)
        optimizer.register_load_state_dict_post_hook(after)
        made.append(optimizer.state_dict())
        optimizer.load_state_dict(made[-1])
        calls.append(called)
    assert calls[0] == calls[1] == ["before", "0.25"]
    assert made[0].keys() == made[1].keys() and made[1]["param_groups"][0]["lr"] == 0.5
