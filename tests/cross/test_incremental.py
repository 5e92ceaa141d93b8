# SPDX-License-Identifier: Apache-2.0
"""What changes in TensorFlow reaches a copy in PyTorch, and back, through a directory."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

COMMON = """
import datetime, sys
import numpy as np
folder, role = sys.argv[1:]
TABLES = {"items": (50, 8), "user/id": (17, 3)}
tables = [sok.Variable(shape=shape, initializer="normal", name=name) for name, shape in TABLES.items()]
if role == "write":
    sok.track_changes(tables)
    since = datetime.datetime.now(datetime.timezone.utc)
    train([3, 41, 3], [16])
    sok.save_incremental(folder + "/delta", tables, *sok.incremental_model_dump(tables, since))
else:
    sok.load_incremental(folder + "/delta", tables)
np.savez(f"{folder}/{role}.npz", *[np.asarray(sok.export(table)[1]) for table in tables])
"""

PROGRAMS = {
    "tensorflow": """
import tensorflow as tf
import sparse_operation_kit.tensorflow as sok
sok.init(seed=4)
def train(first, second):
    optimizer = sok.OptimizerWrapper(sok.SGD(0.5))
    with tf.GradientTape() as tape:
        outputs = sok.lookup_sparse(tables, [tf.ragged.constant([first]), tf.ragged.constant([second])])
        loss = tf.add_n([tf.reduce_sum(output) for output in outputs])
    optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables))
"""
    + COMMON,
    "torch": """
import torch
import sparse_operation_kit.torch as sok
sok.init(seed=4)
def train(first, second):
    optimizer = sok.SGD(0.5).attach(tables)
    ids = [(torch.tensor(keys), torch.tensor([0, len(keys)])) for keys in (first, second)]
    sum(output.sum() for output in sok.lookup_sparse(tables, ids)).backward()
    optimizer.step()
"""
    + COMMON,
}


def run(frontend, folder, role):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS[frontend], str(folder), role], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return list(np.load(folder / f"{role}.npz").values())


@pytest.mark.parametrize(("writer", "reader"), [("tensorflow", "torch"), ("torch", "tensorflow")])
def test_a_copy_in_the_other_frontend(tmp_path, writer, reader):
    for frontend in (writer, reader):
        if importlib.util.find_spec(frontend) is None:
            pytest.skip(f"{frontend} is not installed")
    for trained, copied in zip(run(writer, tmp_path, "write"), run(reader, tmp_path, "read"), strict=True):
        np.testing.assert_array_equal(trained, copied)
