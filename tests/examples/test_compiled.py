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


@pytest.mark.parametrize("is_relu", (False, True))
@pytest.mark.parametrize("on_gpu", (False, True))
def test_dense_layers_are_those_of_keras(on_gpu, is_relu):
    tf = pytest.importorskip("tensorflow")
    from examples.dlrm.tensorflow_model import Dense

    ours = Dense(3, is_relu=is_relu, on_gpu=on_gpu, dtype="float32")
    theirs = tf.keras.layers.Dense(3, activation="relu" if is_relu else None)
    rng = np.random.default_rng(5)
    inputs, scale = (tf.constant(rng.standard_normal((4, size)), tf.float32) for size in (5, 3))
    found = []
    for layer in (ours, theirs):
        layer.build([None, 5])
        layer.set_weights(
            [rng.standard_normal((5, 3)), rng.standard_normal(3)] if layer is ours else ours.get_weights()
        )
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            values = layer(inputs)
            loss = tf.reduce_sum(values * scale)
        gradients = tape.gradient(loss, [inputs, *layer.trainable_variables])
        found.append([np.asarray(tensor) for tensor in (values, *gradients)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert (found[0][0] == 0).any() == is_relu
