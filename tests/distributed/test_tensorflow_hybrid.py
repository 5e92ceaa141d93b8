# SPDX-License-Identifier: Apache-2.0
"""dist_model_parallel of the TensorFlow frontend on 1 to 4 ranks; see tensorflow_hybrid.py for the checks."""

import ast
import pathlib

import launching
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

WORKER = pathlib.Path(__file__).with_name("tensorflow_hybrid.py")


def _checks():
    """The checks that the worker lists, without importing it."""
    for node in ast.parse(WORKER.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHECKS":
            return ast.literal_eval(node.value)
    raise AssertionError("no CHECKS")


FEW = ("random_models", "own_inputs", "planned", "unequal_columns")


@pytest.mark.parametrize(
    ("num_ranks", "keras"),
    [
        (1, "keras"),
        (2, "keras"),
        pytest.param(3, "tf_keras", marks=pytest.mark.slow),
        pytest.param(4, "keras", marks=pytest.mark.slow),
    ],
)
def test_checks(num_ranks, keras):
    legacy = "1" if keras == "tf_keras" else None
    checks = FEW if num_ranks in (1, 4) else _checks()
    launching.checks(num_ranks, WORKER, checks, TF_USE_LEGACY_KERAS=legacy)
