# SPDX-License-Identifier: Apache-2.0
"""OptimizerWrapper: one step() for tables and dense parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.torch import saving, table_step, wrapped_optimizer
from sparse_operation_kit.torch.table_parameter import TableParameter


def restore_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """After optimizer.load_state_dict(state_dict), which converts states to the dtype of their parameter: those of
    tables are float32 whatever the rows are.
    """
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(saved, parameters, strict=True):
        if isinstance(parameter, TableParameter) and parameter.dtype != torch.float32:
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dtype == torch.float32 and key != "step":
                    optimizer.state[parameter][key] = value.to(parameter.device, copy=True)


def _changed(result: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What a hook returned, or what it was given where it returned None."""
    return given if result is None else result


class OptimizerWrapper(torch.optim.Optimizer):
    """Makes an optimizer of torch.optim update tables and dense parameters in the same step().

    Args:
      optimizer: made over all parameters, tables among them:
        ``OptimizerWrapper(torch.optim.Adam(model.parameters()))``.

    Tables: only the rows of the step are touched, duplicate ids are summed first, states are kept for each row. SGD
    (momentum, Nesterov), Adagrad, Adam, AdamW, SparseAdam, Adamax, Adadelta and RMSprop run fused in the core, all
    tables in one pass; their formulas are torch.optim's, bias correction counts the table's own steps. Options that
    have no fused form (amsgrad, a dampening other than 0, differentiable) and every other optimizer that treats each
    row by itself run in PyTorch on the step's rows alone. Dense parameters are stepped by the wrapped optimizer itself.

    Hyper-parameters are read from ``param_groups`` at each step, so schedulers made over the wrapped optimizer, or over
    this one, work. States are in ``optimizer.state[table]`` under torch.optim's names (this rank's rows) and thus in
    ``state_dict()``.

    To take a table's step inside backward(), so that its gradient is freed there, give the table a wrapper of its own
    and step that from ``table.register_post_accumulate_grad_hook``, as with any parameter of PyTorch. The rows and
    states are those of a step after backward().

    Raises NotImplementedError at step() for an optimizer that does not treat rows by themselves (LBFGS, Adafactor,
    Muon).
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, OptimizerWrapper):
            raise TypeError("the optimizer is an OptimizerWrapper already")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"OptimizerWrapper wraps a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self.optimizer = optimizer
        self._ready = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._ready = True

    # The base class keeps these in attributes; here they are the wrapped optimizer's.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if self._ready:
            self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        if self._ready:
            self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        if self._ready:
            self.optimizer.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer."""
        if self._ready:
            self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's; states of tables are this rank's rows (`saving.TableShard`)."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        result = saving.share_states(self.optimizer.state_dict(), self.param_groups)
        for after in self._optimizer_state_dict_post_hooks.values():
            result = _changed(after(self, result), result)
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what state_dict() gave on the same rank of as many, or what torch.distributed.checkpoint put into it.

        Raises ValueError for states of tables that are those of other rows; nothing has changed then.
        """
        given = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            given = _changed(before(self, given), given)
        own = saving.take_states(given, self.param_groups)
        self.optimizer.load_state_dict(own)
        restore_states(self.optimizer, own)
        table_step.settle(self.optimizer)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients."""
        if not set_to_none:
            self.optimizer.zero_grad(False)
            return
        known = table_step.known(self.optimizer)
        known.forget_gradients()
        wrapped_optimizer.call("zero_grad", self.optimizer, known, True)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["optimizer"])  # type: ignore[misc]
        table_step.settle(self.optimizer)

    def __repr__(self) -> str:
        return f"OptimizerWrapper({self.optimizer!r})"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient: the tables first, all or none of them, then the dense ones.

        With several ranks all of them call it. Where one cannot do its part all raise (PeerError on the others) and no
        row changes; what failed in this rank's backward pass is raised here too, for its others waited for gradients.
        On GPUs the others raise with the next lookup, or check_errors().

        Args:
          closure: reevaluates the model and returns the loss, as torch.optim allows; called once.

        Returns:
          The loss of `closure`, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        known = table_step.known(self.optimizer)
        table_step.step(self.optimizer, known)
        wrapped_optimizer.call("step", self.optimizer, known)
        return loss

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Tensor | None, Tensor]]) -> None:
        """One step with given gradients instead of those in ``.grad``; parameters that are not named stay as they are.

        Args:
          grads_and_vars: pairs (gradient, parameter), as ``zip(torch.autograd.grad(loss, params), params)`` gives them.
            A gradient that is None leaves its parameter out.

        Raises ValueError for a parameter that is not the wrapped optimizer's.
        """
        apply_gradients(self, grads_and_vars)


def apply_gradients(optimizer: torch.optim.Optimizer, grads_and_vars: Iterable[tuple[Tensor | None, Tensor]]) -> None:
    pairs = [(gradient, parameter) for gradient, parameter in grads_and_vars]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = {id(parameter) for parameter in parameters}
    for i, (_, parameter) in enumerate(pairs):
        if id(parameter) not in known:
            raise ValueError(
                f"grads_and_vars[{i}] names a parameter of shape {list(parameter.shape)} that is not the optimizer's"
            )
    before = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        for gradient, parameter in pairs:
            parameter.grad = gradient
        optimizer.step()
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
