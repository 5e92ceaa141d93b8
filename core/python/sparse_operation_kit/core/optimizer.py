# SPDX-License-Identifier: Apache-2.0
"""Settings of the fused optimizers."""

from __future__ import annotations

import ctypes
import dataclasses

from sparse_operation_kit.core import _abi

KINDS = {
    "sgd": _abi.SGD,
    "momentum": _abi.MOMENTUM,
    "adagrad": _abi.ADAGRAD,
    "rowwise_adagrad": _abi.ROWWISE_ADAGRAD,
    "adam": _abi.ADAM,
    "adamax": _abi.ADAMAX,
    "adadelta": _abi.ADADELTA,
    "rmsprop": _abi.RMSPROP,
    "ftrl": _abi.FTRL,
}


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """One optimizer step's settings; core/include/sok/optimizer.h has the formulas and the order of the states.

    kind is one of KINDS; what a kind does not name is ignored. learning_rate and epsilon include the bias correction of
    the step, where there is one.
    """

    kind: str
    learning_rate: float
    learning_rate_of_decay: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    rho: float = 0.0
    epsilon: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    l2_shrinkage: float = 0.0
    beta: float = 0.0
    learning_rate_power: float = -0.5
    nesterov: bool = False
    epsilon_inside: bool = False
    learning_rate_in_momentum: bool = False
    centered: bool = False
    decoupled_weight_decay: bool = False

    def struct(self) -> _abi.Optimizer:
        """The sok_optimizer."""
        if self.kind not in KINDS:
            raise ValueError(f"optimizer kind {self.kind!r}: expected one of {', '.join(KINDS)}")
        flags = (
            _abi.NESTEROV * self.nesterov
            | _abi.EPSILON_INSIDE * self.epsilon_inside
            | _abi.LEARNING_RATE_IN_MOMENTUM * self.learning_rate_in_momentum
            | _abi.CENTERED * self.centered
            | _abi.DECOUPLED_WEIGHT_DECAY * self.decoupled_weight_decay
        )
        struct = _abi.Optimizer(struct_size=ctypes.sizeof(_abi.Optimizer), kind=KINDS[self.kind], flags=flags)
        for name, _ in _abi.Optimizer._fields_[3:]:
            setattr(struct, name, getattr(self, name))
        return struct
