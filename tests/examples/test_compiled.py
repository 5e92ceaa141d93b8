# SPDX-License-Identifier: Apache-2.0
"""--compiled: the same model, compiled."""

import importlib
import pathlib

import numpy as np
import pytest

pytestmark = pytest.mark.slow


def losses(framework, compiled):
    from benchmarks.whole_step import Step, make_batches

    sok = importlib.import_module(f"sparse_operation_kit.{framework}")
    sok.init(gradient="mean", seed=5)
    settings = Step(
        data=pathlib.Path(), batch_size=32, embedding_dim=8, max_table_rows=50, device="cpu", compiled=compiled
    )
    module = importlib.import_module(f"examples.dlrm.{framework}_model")
    if framework == "torch":
        torch = importlib.import_module("torch")
        model = module.TorchModel(settings, torch.device("cpu"))
    else:
        model = module.TensorflowModel(settings, "CPU:0")
    batches = [model.prepare(batch) for batch in make_batches(settings, 0, 1)]
    totals = [float(model.train(batch)) for batch in batches]
    return totals, model.logits(batches[0])


@pytest.mark.parametrize("framework", ("tensorflow", "torch"))
def test_a_compiled_model_trains_as_the_other(framework):
    plain, compiled = (losses(framework, each) for each in (False, True))
    np.testing.assert_allclose(compiled[0], plain[0], rtol=1e-5)
    np.testing.assert_allclose(compiled[1], plain[1], rtol=1e-4, atol=1e-5)
    assert plain[0][0] != plain[0][-1]
