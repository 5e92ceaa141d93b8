# SPDX-License-Identifier: Apache-2.0
"""The fused optimizers, without any framework: kinds, hyper-parameters, states and their names.

A frontend reads the settings of the optimizer it wraps at each step and turns them, with one of the functions below,
into an :class:`OptimizerSpec`, which has the fields of ``sok_optimizer`` (core/include/sok/optimizer.h, where the
formulas are). The functions use arithmetic operators alone, so that a learning rate or step count may be a symbolic
tensor; such tensors should be float64.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparse_operation_kit import legacy_paths

__all__ = [
    "CLASSES",
    "FIELDS",
    "Flags",
    "Kind",
    "NotFused",
    "OptimizerSpec",
    "StateSpec",
    "from_keras",
    "from_torch",
    "ftrl",
    "rowwise_adagrad",
    "sgd",
    "slot_name_from_torch",
    "slot_name_of_torch",
    "slot_names",
    "steps_whole_tables",
]


class Kind(enum.IntEnum):
    """``sok_optimizer_kind``."""

    SGD = 0
    MOMENTUM = 1
    ADAGRAD = 2
    ROWWISE_ADAGRAD = 3
    ADAM = 4
    ADAMAX = 5
    ADADELTA = 6
    RMSPROP = 7
    FTRL = 8


class Flags(enum.IntFlag):
    """Bits of ``sok_optimizer.flags``."""

    NONE = 0
    NESTEROV = 1
    EPSILON_INSIDE = 2
    LEARNING_RATE_IN_MOMENTUM = 4
    CENTERED = 8
    DECOUPLED_WEIGHT_DECAY = 16


FIELDS = (
    "learning_rate",
    "learning_rate_of_decay",
    "weight_decay",
    "momentum",
    "beta1",
    "beta2",
    "rho",
    "epsilon",
    "l1",
    "l2",
    "l2_shrinkage",
    "beta",
    "learning_rate_power",
)
"""The double fields of ``sok_optimizer`` in their order: what a frontend's apply op takes, 13 numbers a table."""


class NotFused(Exception):
    """The core has no fused form of this optimizer with these options;
    the message says which option stands in the way.
    """


_WHOLE = ("adafactor", "lamb", "lars", "lbfgs", "muon", "shampoo")


def steps_whole_tables(optimizer: type) -> str | None:
    """The name of the class, or of a base of it, whose step of one row depends on the other rows of its variable. They
    are known by name, in upper or lower case, since frameworks lack some of them. None: each row may be stepped alone.
    """
    return next((base.__name__ for base in optimizer.__mro__ if base.__name__.lower() in _WHOLE), None)


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """One state array of a table, indexed by slot as the weights are.

    ``name`` is the checkpoint's name for it. ``rowwise``: shape [slots] instead of [slots, dimension]. ``initial``: the
    value a row's state has before its first step.
    """

    name: str
    rowwise: bool = False
    initial: float = 0.0


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """One step of a fused optimizer: everything in ``sok_optimizer`` and the states it needs.

    The number fields may be Python numbers or scalar tensors of a framework.
    """

    name: str
    """Class name in the checkpoint's file names: "SGD", "Adam", "AdamW", "Adagrad", ..."""
    kind: Kind
    flags: Flags = Flags.NONE
    learning_rate: Any = 0.0
    learning_rate_of_decay: Any = 0.0
    weight_decay: Any = 0.0
    momentum: Any = 0.0
    beta1: Any = 0.0
    beta2: Any = 0.0
    rho: Any = 0.0
    epsilon: Any = 0.0
    l1: Any = 0.0
    l2: Any = 0.0
    l2_shrinkage: Any = 0.0
    beta: Any = 0.0
    learning_rate_power: Any = -0.5
    initial_accumulator_value: float = 0.0
    gradient_sign: float = 1.0
    """-1 where the wrapped optimizer maximises: the frontend multiplies the gradient scale with it."""

    @functools.cached_property
    def states(self) -> tuple[StateSpec, ...]:
        """The states in the order of optimizer.h."""
        initial = self.initial_accumulator_value
        if self.kind == Kind.ROWWISE_ADAGRAD:
            return (StateSpec("accumulator", rowwise=True, initial=initial),)
        names = _STATE_NAMES[self.kind]
        if self.kind == Kind.RMSPROP:
            with_momentum = not (isinstance(self.momentum, (int, float)) and self.momentum == 0)
            names = (
                "rms",
                *(("mg",) if self.flags & Flags.CENTERED else ()),
                *(("momentum",) if with_momentum else ()),
            )
        return tuple(StateSpec(name, initial=initial if name == "accumulator" else 0.0) for name in names)

    @functools.cached_property
    def numbers(self) -> tuple[Any, ...]:
        """The number fields in the order of :data:`FIELDS`."""
        return tuple(getattr(self, field) for field in FIELDS)

    def values(self) -> list[Any]:
        """The number fields in the order of :data:`FIELDS`, as a list."""
        return list(self.numbers)

    def keras_settings(self) -> dict[str, Any]:
        """The numbers that are not 0, by the names of Keras's arguments. Of an optimizer without bias correction."""
        named = {_KERAS_NAMES.get(field, field): getattr(self, field) for field in FIELDS}
        named["initial_accumulator_value"] = self.initial_accumulator_value
        return {
            name: value
            for name, value in named.items()
            if not (isinstance(value, (int, float)) and value == 0)
            and (name != "learning_rate_power" or self.kind == Kind.FTRL)
        }


_KERAS_NAMES = {
    "beta1": "beta_1",
    "beta2": "beta_2",
    "l1": "l1_regularization_strength",
    "l2": "l2_regularization_strength",
    "l2_shrinkage": "l2_shrinkage_regularization_strength",
}

_STATE_NAMES: dict[Kind, tuple[str, ...]] = {
    Kind.SGD: (),
    Kind.MOMENTUM: ("momentum",),
    Kind.ADAGRAD: ("accumulator",),
    Kind.ROWWISE_ADAGRAD: ("accumulator",),
    Kind.ADAM: ("m", "v"),
    Kind.ADAMAX: ("m", "v"),
    Kind.ADADELTA: ("accum_grad", "accum_var"),
    Kind.RMSPROP: ("rms", "mg", "momentum"),
    Kind.FTRL: ("accumulator", "linear"),
}

_KIND_OF_CLASS: dict[str, Kind] = {
    "SGD": Kind.MOMENTUM,
    "Adagrad": Kind.ADAGRAD,
    "RowWiseAdagrad": Kind.ROWWISE_ADAGRAD,
    "Adam": Kind.ADAM,
    "AdamW": Kind.ADAM,
    "Adamax": Kind.ADAMAX,
    "Adadelta": Kind.ADADELTA,
    "RMSprop": Kind.RMSPROP,
    "Ftrl": Kind.FTRL,
}

CLASSES = tuple(_KIND_OF_CLASS)
"""The classes that are fused, by the names that checkpoints have for them."""


def slot_names(optimizer: str) -> tuple[str, ...]:
    """All states that a checkpoint may hold for an optimizer class, e.g. ``slot_names("Adam") == ("m", "v")``.

    Raises KeyError for a class that is not fused.
    """
    return _STATE_NAMES[_KIND_OF_CLASS[optimizer]]


_TORCH_SLOTS: dict[str, dict[str, str]] = {
    "SGD": {"momentum": "momentum_buffer"},
    "Adagrad": {"accumulator": "sum"},
    "RowWiseAdagrad": {"accumulator": "sum"},
    "Adam": {"m": "exp_avg", "v": "exp_avg_sq"},
    "AdamW": {"m": "exp_avg", "v": "exp_avg_sq"},
    "Adamax": {"m": "exp_avg", "v": "exp_inf"},
    "Adadelta": {"accum_grad": "square_avg", "accum_var": "acc_delta"},
    "RMSprop": {"rms": "square_avg", "mg": "grad_avg", "momentum": "momentum_buffer"},
    "Ftrl": {"accumulator": "accumulator", "linear": "linear"},
}


def slot_name_of_torch(optimizer: str, state: str) -> str:
    """PyTorch's key in ``optimizer.state[parameter]`` for a checkpoint state: ("Adam", "m") -> "exp_avg"."""
    return _TORCH_SLOTS[optimizer][state]


def slot_name_from_torch(optimizer: str, key: str) -> str:
    """The checkpoint's name of a key in ``optimizer.state[parameter]``, also of states that the core does not know:
    ("Adam", "exp_avg") -> "m", ("Adam", "max_exp_avg_sq") -> "vhat"; a key without another name keeps its own.
    """
    for state, name in _TORCH_SLOTS.get(optimizer, {}).items():
        if name == key:
            return state
    return {"max_exp_avg_sq": "vhat"}.get(key, key)


# --- the small optimizers of this project ---------------------------------------------------------------------------


def sgd(learning_rate: Any) -> OptimizerSpec:
    """Plain stochastic gradient descent."""
    return OptimizerSpec("SGD", Kind.SGD, learning_rate=learning_rate)


def rowwise_adagrad(learning_rate: Any, initial_accumulator_value: float, epsilon: Any) -> OptimizerSpec:
    """Adagrad with one accumulator a row, which grows by the mean of the squared gradient."""
    return OptimizerSpec(
        "RowWiseAdagrad",
        Kind.ROWWISE_ADAGRAD,
        learning_rate=learning_rate,
        epsilon=epsilon,
        initial_accumulator_value=initial_accumulator_value,
    )


def ftrl(
    learning_rate: Any,
    learning_rate_power: Any,
    initial_accumulator_value: float,
    l1: Any,
    l2: Any,
    l2_shrinkage: Any,
    beta: Any,
) -> OptimizerSpec:
    """Follow the regularised leader, as Keras parametrises it."""
    return OptimizerSpec(
        "Ftrl",
        Kind.FTRL,
        learning_rate=learning_rate,
        learning_rate_power=learning_rate_power,
        l1=l1,
        l2=l2,
        l2_shrinkage=l2_shrinkage,
        beta=beta,
        initial_accumulator_value=initial_accumulator_value,
    )


# --- Keras ----------------------------------------------------------------------------------------------------------


def _bias_corrected_adam(learning_rate: Any, beta1: Any, beta2: Any, step: Any) -> Any:
    return learning_rate * (1.0 - beta2**step) ** 0.5 / (1.0 - beta1**step)


def from_keras(class_name: str, settings: Mapping[str, Any], step: Any, dialect: str = "keras") -> OptimizerSpec:
    """The step that a Keras or TensorFlow optimizer takes.

    class_name: "SGD", "Adam", ... as Keras names its classes.
    settings: attributes by Keras's names ("learning_rate" already evaluated for this step; "momentum", "nesterov",
        "beta_1", "beta_2", "epsilon", "rho", "centered", "amsgrad", "weight_decay", "initial_accumulator_value",
        "learning_rate_power", "l1_regularization_strength", "l2_regularization_strength",
        "l2_shrinkage_regularization_strength", "beta"). Absent ones count as 0, False or None.
    step: 1 for the first step; a number or scalar tensor.
    dialect: "keras" (Keras 3 and tf_keras), "keras_legacy" (tf_keras.optimizers.legacy) or "tf1" (tf.compat.v1.train);
        they differ in where epsilon and the learning rate stand.

    Raises NotFused when an option has no fused form.
    """
    lr = settings["learning_rate"]
    decay = settings.get("weight_decay")
    common: dict[str, Any] = {"learning_rate": lr}
    flags = Flags.NONE
    if decay is not None and decay is not False:
        flags |= Flags.DECOUPLED_WEIGHT_DECAY
        common.update(weight_decay=decay, learning_rate_of_decay=lr)
    if settings.get("amsgrad"):
        raise NotFused("amsgrad")
    epsilon = settings.get("epsilon") or 0.0
    inside = Flags.EPSILON_INSIDE if dialect == "keras" else Flags.NONE

    if class_name == "SGD":
        momentum = _number(settings, "momentum")
        if isinstance(momentum, (int, float)) and momentum == 0:
            return OptimizerSpec("SGD", Kind.SGD, flags, **common)
        if dialect != "tf1":
            flags |= Flags.LEARNING_RATE_IN_MOMENTUM
        if settings.get("nesterov"):
            flags |= Flags.NESTEROV
        return OptimizerSpec("SGD", Kind.MOMENTUM, flags, momentum=momentum, **common)
    if class_name == "Adagrad":
        initial = float(settings.get("initial_accumulator_value") or 0.0)
        return OptimizerSpec(
            "Adagrad", Kind.ADAGRAD, flags | inside, epsilon=epsilon, initial_accumulator_value=initial, **common
        )
    if class_name in ("Adam", "AdamW"):
        beta1, beta2 = settings["beta_1"], settings["beta_2"]
        common["learning_rate"] = _bias_corrected_adam(lr, beta1, beta2, step)
        return OptimizerSpec(class_name, Kind.ADAM, flags, beta1=beta1, beta2=beta2, epsilon=epsilon, **common)
    if class_name == "Adamax":
        beta1, beta2 = settings["beta_1"], settings["beta_2"]
        common["learning_rate"] = lr / (1.0 - beta1**step)
        return OptimizerSpec("Adamax", Kind.ADAMAX, flags, beta1=beta1, beta2=beta2, epsilon=epsilon, **common)
    if class_name == "Adadelta":
        return OptimizerSpec("Adadelta", Kind.ADADELTA, flags, rho=settings["rho"], epsilon=epsilon, **common)
    if class_name == "RMSprop":
        momentum = _number(settings, "momentum")
        # The older classes add epsilon under the root too when there is a momentum: their kernels are fused ones.
        has_momentum = not (isinstance(momentum, (int, float)) and momentum == 0)
        flags |= Flags.EPSILON_INSIDE if dialect != "keras_legacy" or has_momentum else Flags.NONE
        flags |= Flags.LEARNING_RATE_IN_MOMENTUM
        if settings.get("centered"):
            flags |= Flags.CENTERED
        return OptimizerSpec(
            "RMSprop", Kind.RMSPROP, flags, rho=settings["rho"], momentum=momentum, epsilon=epsilon, **common
        )
    if class_name == "Ftrl":
        spec = ftrl(
            lr,
            settings.get("learning_rate_power", -0.5),
            float(settings.get("initial_accumulator_value") or 0.0),
            _number(settings, "l1_regularization_strength"),
            _number(settings, "l2_regularization_strength"),
            _number(settings, "l2_shrinkage_regularization_strength"),
            _number(settings, "beta"),
        )
        common.pop("learning_rate")
        return dataclasses.replace(spec, flags=flags, **common)
    raise NotFused(f"the class {class_name}")


def _number(settings: Mapping[str, Any], name: str) -> Any:
    """A setting, which may be a symbolic tensor; 0 where it is absent."""
    value = settings.get(name)
    return 0.0 if value is None else value


# --- PyTorch --------------------------------------------------------------------------------------------------------


def from_torch(class_name: str, group: Mapping[str, Any], step: int) -> OptimizerSpec:
    """The step that a ``torch.optim`` optimizer takes.

    class_name: "SGD", "Adam", "SparseAdam", ... as torch.optim names its classes.
    group: the parameter group, its numbers as Python numbers.
    step: 1 for the first step.

    Raises NotFused when an option has no fused form.
    """
    lr = float(group["lr"])
    epsilon = float(group.get("eps", 0.0))
    decay = float(group.get("weight_decay", 0.0))
    flags = Flags.NONE
    common: dict[str, Any] = {"gradient_sign": -1.0 if group.get("maximize") else 1.0}
    if decay != 0.0:
        common["weight_decay"] = decay
    if group.get("amsgrad"):
        raise NotFused("amsgrad=True")
    if group.get("differentiable"):
        raise NotFused("differentiable=True")

    if class_name == "SGD":
        momentum = float(group["momentum"])
        if momentum == 0.0:
            return OptimizerSpec("SGD", Kind.SGD, learning_rate=lr, **common)
        if group.get("dampening", 0) != 0:
            raise NotFused("a dampening other than 0")
        flags |= Flags.NESTEROV if group.get("nesterov") else Flags.NONE
        return OptimizerSpec("SGD", Kind.MOMENTUM, flags, learning_rate=lr, momentum=momentum, **common)
    if class_name == "Adagrad":
        rate = lr / (1.0 + (step - 1) * float(group["lr_decay"]))
        initial = float(group["initial_accumulator_value"])
        return OptimizerSpec(
            "Adagrad",
            Kind.ADAGRAD,
            learning_rate=rate,
            epsilon=epsilon,
            initial_accumulator_value=initial,
            **common,
        )
    if class_name in ("Adam", "AdamW", "SparseAdam"):
        beta1, beta2 = (float(beta) for beta in group["betas"])
        decoupled = class_name == "AdamW" or bool(group.get("decoupled_weight_decay"))
        if decoupled and decay != 0.0:
            flags |= Flags.DECOUPLED_WEIGHT_DECAY
            common["learning_rate_of_decay"] = lr
        return OptimizerSpec(
            "AdamW" if class_name == "AdamW" else "Adam",
            Kind.ADAM,
            flags,
            learning_rate=_bias_corrected_adam(lr, beta1, beta2, step),
            beta1=beta1,
            beta2=beta2,
            # Adam adds epsilon to the corrected root, SparseAdam to the uncorrected one, as Keras does.
            epsilon=epsilon if class_name == "SparseAdam" else epsilon * (1.0 - beta2**step) ** 0.5,
            **common,
        )
    if class_name == "Adamax":
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return OptimizerSpec(
            "Adamax",
            Kind.ADAMAX,
            Flags.EPSILON_INSIDE,
            learning_rate=lr / (1.0 - beta1**step),
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
            **common,
        )
    if class_name == "Adadelta":
        return OptimizerSpec(
            "Adadelta", Kind.ADADELTA, learning_rate=lr, rho=float(group["rho"]), epsilon=epsilon, **common
        )
    if class_name == "RMSprop":
        flags |= Flags.CENTERED if group.get("centered") else Flags.NONE
        return OptimizerSpec(
            "RMSprop",
            Kind.RMSPROP,
            flags,
            learning_rate=lr,
            rho=float(group["alpha"]),
            momentum=float(group["momentum"]),
            epsilon=epsilon,
            **common,
        )
    raise NotFused(f"the class {class_name}")


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # Names of SparseOperationKit 1.x, which load TensorFlow: optimizers.Adam, optimizers.utils, ...
        return legacy_paths.look_up("optimizers", name)
