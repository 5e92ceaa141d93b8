# SPDX-License-Identifier: Apache-2.0
"""What optimizers' states mean, where frameworks differ in it, and how one meaning becomes the other.

States are stored as their writer keeps them. All mean the same in each framework but one:

    momentum of SGD     Keras keeps the velocity v = momentum v - lr g, w += v;
                        PyTorch and tf.compat.v1 keep b = momentum b + g, w -= lr b. So v = -lr b.
    momentum of RMSprop Keras and tf.compat.v1 keep v = momentum v + lr u, w -= v;
                        PyTorch keeps b = momentum b + u, w -= lr b. So v = lr b.

The learning rate is the writer's at the time of the dump: then the next step goes on as the writer's would have. Where
it changes from step to step, so do the two forms' later steps: the frameworks differ there, not the state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .errors import ManifestError, MismatchError
from .names import MANIFEST
from .reader import Dump

LEARNING_RATE = "learning_rate"
LEARNING_RATE_IN_MOMENTUM = "learning_rate_in_momentum"
"""Hyper-parameter of a dump: true where the state "momentum" holds learning rates, as Keras's does."""

# velocity = sign * learning rate * buffer
_SIGNS = {"SGD": -1.0, "RMSprop": 1.0}

# Classes whose states mean the same: they differ in how the weights decay.
_SAME_STATES = ({"Adam", "AdamW"},)


def momentum_differs(optimizer: str) -> bool:
    """Whether frameworks keep the momentum of an optimizer class in different forms."""
    return optimizer in _SIGNS


def stored_optimizer(dump: Dump, wanted: str) -> str:
    """The optimizer's name under which a dump holds the states that `wanted` can use.

    Raises MismatchError for a dump of another optimizer, or of none.
    """
    if dump.manifest is None:
        return wanted  # its files say, and the loader looks for them
    if dump.optimizer is None:
        raise MismatchError(
            "was dumped without an optimizer",
            file=dump.path,
            expected=f"the states of {wanted}; without optimizer= the rows alone are loaded",
        )
    found = dump.optimizer.name
    if found != wanted and not any({found, wanted} <= names for names in _SAME_STATES):
        raise MismatchError(
            f"holds the states of {found}",
            file=dump.path,
            expected=f"those of {wanted}; without optimizer= the rows alone are loaded",
        )
    return found


def momentum_factor(
    optimizer: str, stored: Mapping[str, Any] | None, wanted: Mapping[str, Any], table: str, path: str
) -> float:
    """What the stored state "momentum" is to be multiplied with for the optimizer that is to go on with it.

    optimizer:  "SGD" or "RMSprop"
    stored:     the dump's hyper-parameters for the table; None for a dump of SOK 2.x, which holds Keras's form and no
                learning rate: the reader's is taken
    wanted:     the reader's

    Raises MismatchError where the forms differ and the learning rate is 0 or unknown.
    """
    if not momentum_differs(optimizer):
        return 1.0
    velocity = True if stored is None else stored.get(LEARNING_RATE_IN_MOMENTUM)
    if velocity is None or velocity == wanted.get(LEARNING_RATE_IN_MOMENTUM):
        return 1.0
    rate = (wanted if stored is None else stored).get(LEARNING_RATE)
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or rate == 0 or not math.isfinite(rate):
        raise MismatchError(
            f"the momentum of table {table!r} cannot be converted: it was dumped with the learning rate {rate}",
            file=path,
            expected=f"a learning rate other than 0, because {'Keras keeps' if velocity else 'PyTorch does not keep'} "
            "it in the momentum",
        )
    return _SIGNS[optimizer] / rate if velocity else _SIGNS[optimizer] * rate


def table_settings(dump: Dump, name: str) -> Mapping[str, Any] | None:
    """A dump's hyper-parameters for the table of that name (its member of "tables" replaces some); None when the dump
    has none.

    Besides the optimizer's own there may be "iterations" (steps of this table) and "scalars" (states of the optimizer
    that are one number). ManifestError where one of them has another type.
    """
    if dump.optimizer is None:
        return None
    settings: dict[str, Any] = {"iterations": dump.optimizer.iterations}
    settings.update(dump.optimizer.hyperparameters)
    tables = settings.pop("tables", {})
    own = tables.get(name, {}) if isinstance(tables, dict) else None
    if not isinstance(own, dict):
        raise ManifestError('optimizer: "tables" is not what it should be', file=MANIFEST, expected="objects by table")
    settings.update(own)
    count, scalars = settings["iterations"], settings.get("scalars")
    scalars = settings["scalars"] = {} if scalars is None else scalars
    if count is not None and (type(count) is not int or count < 0):
        raise ManifestError(f'optimizer: "iterations" of {name!r} is {count!r}', file=MANIFEST, expected="a count")
    if not isinstance(scalars, dict) or not all(type(value) in (int, float) for value in scalars.values()):
        raise ManifestError(f'optimizer: "scalars" of {name!r} are wrong', file=MANIFEST, expected="numbers by name")
    return settings


def joined_settings(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Hyper-parameters for a dump, from those of each table: the first table's, and under "tables" what others have
    otherwise.
    """
    common = dict(next(iter(tables.values()), {}))
    others = {}
    for name, settings in tables.items():
        keys = {*common, *settings}
        own = {key: settings.get(key) for key in sorted(keys) if settings.get(key) != common.get(key)}
        if own:
            others[name] = own
    return {**common, "tables": others} if others else common
