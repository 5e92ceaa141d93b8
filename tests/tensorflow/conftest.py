# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow frontend alone in this process, on the CPU and on a GPU; `tensorflow_harness` turns the shared cases
into tensors, `tensorflow_permuted` is the tests' own kind of table.
"""

import contextlib
import importlib.util
import os
import pathlib
import sys

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")

import sparse_operation_kit.tensorflow as sok  # noqa: E402

_TESTS = pathlib.Path(__file__).parents[1]
_SHARED = (
    ("tensorflow_harness", "tensorflow/harness.py"),
    ("tensorflow_permuted", "tensorflow/permuted.py"),
    ("keras_resume", "keras_resume.py"),
)
for _name, _file in _SHARED:
    _spec = importlib.util.spec_from_file_location(_name, _TESTS / _file)
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])


def _missing():
    """Why nothing can run on a GPU here, or None."""
    from sparse_operation_kit import core

    if not core.built_with_cuda():
        return "the core was built without CUDA"
    return None if tf.config.list_physical_devices("GPU") else "TensorFlow finds no GPU"


@pytest.fixture(autouse=True, params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """Each test runs on both: what it makes (tables, ids, weights) is on this device unless it says otherwise."""
    if request.param == "gpu":
        reason = _missing()
        if reason is not None and os.environ.get("SOK_TEST_GPU") == "1":  # a GPU was promised
            pytest.fail(reason)
        if reason is not None:
            pytest.skip(reason)
    has_choice = bool(tf.config.list_physical_devices("GPU"))
    with tf.device(f"{request.param}:0") if has_choice else contextlib.nullcontext():
        yield request.param


@pytest.fixture(autouse=True)
def initialised(device):
    """Each test starts after init() with its defaults, and leaves no error of a GPU behind."""
    from sparse_operation_kit.tensorflow import runtime

    runtime.shutdown()
    sok.init()
    yield
    sok.check_errors()
    runtime.shutdown()
