# SPDX-License-Identifier: Apache-2.0
"""Models of Keras 3 and tf_keras that stop and train on, in a process alone; ranks are in tests/distributed."""

import keras
import keras_resume
import pytest
import tf_keras


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "with a dynamic table"])
@pytest.mark.parametrize("kit", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_resume(kit, dynamic, tmp_path):
    keras_resume.check(kit, tmp_path, dynamic)


def test_classes_are_known_from_the_start():
    """A process that loads a file has not used what the file names."""
    names = {name.removeprefix("sparse_operation_kit>") for name in keras.saving.get_custom_objects()}
    assert {"EmbeddingBagCollection", "DistributedOptimizer"} <= names
