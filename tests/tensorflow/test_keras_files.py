# SPDX-License-Identifier: Apache-2.0
"""Models with layers and an Adam of older names: a process that has only imported this package loads them."""

import subprocess
import sys

import keras
import numpy as np
import tf_keras

from sparse_operation_kit.tensorflow import dist_model_parallel as dmp
from sparse_operation_kit.tensorflow.legacy import layers, optimizers

IDS = np.arange(8).reshape(-1, 2, 2) % 5
LABELS = np.ones((2, 1))

LOAD = """
import sys
import keras, tf_keras
import numpy as np
import sparse_operation_kit.tensorflow as sok
sok.init()
for kit in (keras, tf_keras):
    model = kit.models.load_model(f"{sys.argv[1]}/{kit.__name__}.keras")
    ids = np.load(f"{sys.argv[1]}/ids.npy")
    expected = np.load(f"{sys.argv[1]}/{kit.__name__}.npy")
    np.testing.assert_array_equal(model.predict(ids, verbose=0), expected)
    assert model.optimizer.get_config()["update"] == "touched" and int(model.optimizer.iterations) == 1
    model.train_on_batch(ids, np.ones((2, 1)))
    assert (model.predict(ids, verbose=0) != expected).all()
    print("loaded", kit.__name__)
"""


def save(kit, folder):
    parallel = dmp.layers_of(kit)
    inputs = kit.Input((2, 2), dtype="int64")
    flat = kit.layers.Reshape((4,))(inputs)
    vectors = [
        kit.layers.Flatten()(layers.classes(kit).All2AllDenseEmbedding(8, 4, 2, 2)(inputs)),
        parallel.Embedding(8, 3, combiner="mean")(flat),
        *parallel.DistributedEmbedding(
            [parallel.Embedding(8, width, combiner="sum") for width in (2, 3)], name="tables"
        )([flat, flat]),
    ]
    model = kit.Model(inputs, kit.layers.Dense(1)(kit.layers.Concatenate()(vectors)))
    adam, _ = optimizers.adams_of(kit.optimizers.Adam)
    model.compile(adam(0.01, update="touched"), "mse", jit_compile=False)
    model.train_on_batch(IDS, LABELS)
    model.save(folder / f"{kit.__name__}.keras")
    np.save(folder / f"{kit.__name__}.npy", model.predict(IDS, verbose=0))


def test_another_process_loads_layers_and_adam(tmp_path):
    np.save(tmp_path / "ids.npy", IDS)
    for kit in (keras, tf_keras):
        save(kit, tmp_path)
    done = subprocess.run([sys.executable, "-c", LOAD, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["loaded", "keras", "loaded", "tf_keras"]
