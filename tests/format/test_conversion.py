# SPDX-License-Identifier: Apache-2.0
"""Which dump an optimizer can read, and what becomes of a momentum on the way."""

import types
from typing import Any

import pytest

import sparse_operation_kit.checkpoint as ck
from sparse_operation_kit.checkpoint import conversion

KERAS = {"learning_rate": 0.25, "learning_rate_in_momentum": True}
TORCH = {"learning_rate": 0.5, "learning_rate_in_momentum": False}


def factor(optimizer, stored, wanted):
    return conversion.momentum_factor(optimizer, stored, wanted, "items", "dump")


def test_momentum_between_frameworks():
    assert factor("SGD", KERAS, TORCH) == -4.0
    assert factor("SGD", TORCH, KERAS) == -0.5
    assert factor("RMSprop", KERAS, TORCH) == 4.0
    assert factor("RMSprop", TORCH, KERAS) == 0.5


@pytest.mark.parametrize("optimizer", ["SGD", "RMSprop", "Adam"])
def test_momentum_of_one_form_stays(optimizer):
    for settings in (KERAS, TORCH):
        assert factor(optimizer, settings, {**settings, "learning_rate": 9.0}) == 1.0
    assert factor(optimizer, {}, TORCH) == 1.0, "a dump that does not say has the reader's form"


def test_momentum_of_sok_2():
    """Keras's form, and no learning rate: the reader's counts."""
    assert factor("SGD", None, KERAS) == 1.0
    assert factor("SGD", None, TORCH) == -2.0


@pytest.mark.parametrize("rate", [0, 0.0, None, "0.1", True, float("nan")])
@pytest.mark.parametrize("stored", [KERAS, TORCH])
def test_momentum_without_a_rate_is_an_error(rate, stored):
    wanted = TORCH if stored is KERAS else KERAS
    with pytest.raises(ck.MismatchError, match="momentum of table 'items' cannot be converted"):
        factor("SGD", {**stored, "learning_rate": rate}, wanted)


def dump_of(optimizer, manifest=True):
    return types.SimpleNamespace(manifest=manifest or None, optimizer=optimizer, path="dump")


def test_stored_optimizer():
    adam = ck.Optimizer("Adam", 3)
    assert conversion.stored_optimizer(dump_of(adam), "Adam") == "Adam"
    assert conversion.stored_optimizer(dump_of(adam), "AdamW") == "Adam"
    assert conversion.stored_optimizer(dump_of(ck.Optimizer("AdamW")), "Adam") == "AdamW"
    assert conversion.stored_optimizer(dump_of(None, manifest=False), "Adamax") == "Adamax"
    with pytest.raises(ck.MismatchError, match="holds the states of Adam; expected those of Adamax"):
        conversion.stored_optimizer(dump_of(adam), "Adamax")
    with pytest.raises(ck.MismatchError, match="without an optimizer"):
        conversion.stored_optimizer(dump_of(None), "Adam")


def test_settings_of_a_table():
    tables: dict[str, dict[str, Any]] = {
        "a:0": {"learning_rate": 0.1, "nesterov": False},
        "b:0": {"learning_rate": 0.1, "nesterov": False},
        "c:0": {"learning_rate": 0.2, "scalars": {"mu": 0.5}},
    }
    joined = conversion.joined_settings(tables)
    assert joined["tables"] == {"c:0": {"learning_rate": 0.2, "nesterov": None, "scalars": {"mu": 0.5}}}
    opened = dump_of(ck.Optimizer("SGD", 7, joined))
    assert conversion.table_settings(opened, "a:0") == {"iterations": 7, "scalars": {}, **tables["a:0"]}
    assert conversion.table_settings(opened, "c:0") == {"iterations": 7, **tables["c:0"], "nesterov": None}
    assert conversion.table_settings(dump_of(None), "a:0") is None
    assert conversion.joined_settings({}) == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"tables": [1]},
        {"tables": {"a:0": 3}},
        {"iterations": -1},
        {"iterations": "many"},
        {"iterations": True},
        {"scalars": [1]},
        {"scalars": {"mu": "half"}},
    ],
)
def test_wrong_settings_are_errors(settings):
    with pytest.raises(ck.ManifestError, match=r"sok_manifest\.json"):
        conversion.table_settings(dump_of(ck.Optimizer("SGD", 7, settings)), "a:0")
