# SPDX-License-Identifier: Apache-2.0
"""Small optimizers of this package: SGD, row-wise Adagrad, Ftrl."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit import optimizers as _optimizers
from sparse_operation_kit.optimizers import OptimizerSpec
from sparse_operation_kit.torch import saving, table_step
from sparse_operation_kit.torch.optimizer import apply_gradients, restore_states


def _as_rows(parameter: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """A dense parameter and its gradient as rows [n, m], the same memory of the parameter."""
    if parameter.dtype != torch.float32 or not parameter.is_contiguous():
        raise TypeError(f"a parameter of shape {list(parameter.shape)} must be float32 and contiguous")
    shape = (parameter.shape[0], math.prod(parameter.shape[1:])) if parameter.dim() else (1, 1)
    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
    return parameter.detach().view(shape), dense.reshape(shape)


class OwnOptimizer(torch.optim.Optimizer):
    """Base of this package's own optimizers, which run in the core for tables and dense parameters alike.

    ``SGD(0.1).attach(model.parameters())`` steps like any optimizer of torch.optim; without parameters attached,
    ``SGD(0.1).apply_gradients(zip(gradients, parameters))`` updates what it is given. Dense parameters are float32
    and contiguous; tables are of any dtype that they have.
    """

    def __init__(self, defaults: dict[str, Any]) -> None:
        for name, value in defaults.items():
            if isinstance(value, (int, float)) and value < 0 and name != "learning_rate_power":
                raise ValueError(f"{name} must not be negative, got {value}")
        super().__init__([{"params": []}], defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients."""
        if not set_to_none:
            super().zero_grad(False)
            return
        known = table_step.known(self)
        known.forget_gradients()
        for each in known.groups:
            for parameter in each.dense:
                parameter.grad = None

    def fused_spec(self, group: Mapping[str, Any], step: int) -> OptimizerSpec:
        """The step that a parameter of `group` takes."""
        raise NotImplementedError

    def attach(self, params: Iterable[Tensor]) -> OwnOptimizer:
        """Adds parameters to those that step() updates, and returns self."""
        known = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        new = [parameter for parameter in params if id(parameter) not in known]
        self.param_groups[0]["params"].extend(new)
        return self

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every attached parameter that has a gradient. Returns the loss of `closure`, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        known = table_step.known(self)
        dense = [
            (each.group, parameter, *_as_rows(parameter, parameter.grad))
            for each in known.groups
            for parameter in each.dense
            if parameter.grad is not None and parameter.numel()
        ]
        table_step.step(self, known)
        table_step.step_dense(self, dense)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As of torch.optim; states of tables are this rank's rows (`saving.TableShard`)."""
        return saving.share_states(super().state_dict(), self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As OptimizerWrapper's."""
        own = saving.take_states(state_dict, self.param_groups)
        super().load_state_dict(own)
        restore_states(self, own)
        table_step.settle(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        table_step.settle(self)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Tensor | None, Tensor]]) -> None:
        """One step with given gradients instead of those in ``.grad``; parameters not seen before are attached."""
        pairs = [(gradient, parameter) for gradient, parameter in grads_and_vars]
        self.attach(parameter for _, parameter in pairs)
        apply_gradients(self, pairs)


class SGD(OwnOptimizer):
    """Plain stochastic gradient descent: w -= lr g.

    Args:
      lr: learning rate, >= 0.
    """

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__({"lr": lr})

    def fused_spec(self, group: Mapping[str, Any], step: int) -> OptimizerSpec:
        return _optimizers.sgd(float(group["lr"]))


class RowWiseAdagrad(OwnOptimizer):
    """Adagrad with one accumulator a row, which grows by the mean of the row's squared gradient (Mudigere et al. 2022).

    Args:
      lr: learning rate, >= 0.
      initial_accumulator_value: of every row, >= 0.
      epsilon: added to the root of the accumulator, >= 0.
    """

    def __init__(self, lr: float = 0.01, initial_accumulator_value: float = 0.0, epsilon: float = 1e-10) -> None:
        super().__init__({"lr": lr, "initial_accumulator_value": initial_accumulator_value, "epsilon": epsilon})

    def fused_spec(self, group: Mapping[str, Any], step: int) -> OptimizerSpec:
        return _optimizers.rowwise_adagrad(
            float(group["lr"]), float(group["initial_accumulator_value"]), float(group["epsilon"])
        )


_OF_FTRL = (
    *("lr", "learning_rate_power", "initial_accumulator_value", "l1_regularization_strength"),
    *("l2_regularization_strength", "l2_shrinkage_regularization_strength", "beta"),
)
"""Its settings in the order of the core's; `defaults` get others when an optimizer is copied."""


class Ftrl(OwnOptimizer):
    """Follow the regularised leader (McMahan et al. 2013), as Keras parametrises it.

    Args:
      lr: learning rate, > 0.
      learning_rate_power: <= 0.
      initial_accumulator_value, l1_regularization_strength, l2_regularization_strength,
        l2_shrinkage_regularization_strength, beta: >= 0, as of keras.optimizers.Ftrl.
    """

    def __init__(
        self,
        lr: float = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
    ) -> None:
        if lr <= 0:
            raise ValueError(f"lr must be positive, got {lr}")
        if learning_rate_power > 0:
            raise ValueError(f"learning_rate_power must not be positive, got {learning_rate_power}")
        super().__init__(
            {
                "lr": lr,
                "learning_rate_power": learning_rate_power,
                "initial_accumulator_value": initial_accumulator_value,
                "l1_regularization_strength": l1_regularization_strength,
                "l2_regularization_strength": l2_regularization_strength,
                "l2_shrinkage_regularization_strength": l2_shrinkage_regularization_strength,
                "beta": beta,
            }
        )

    def fused_spec(self, group: Mapping[str, Any], step: int) -> OptimizerSpec:
        return _optimizers.ftrl(*(float(group[name]) for name in _OF_FTRL))
