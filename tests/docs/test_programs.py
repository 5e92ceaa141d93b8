# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/*.md run as written, those of TensorFlow in both Kerases: whole ones, and pieces after what they
leave to the reader.
"""

import pathlib
import re
import subprocess
import sys

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"

# Each program in a namespace of its own, all in one process.
RUN = """
import sys
for number, program in enumerate(sys.stdin.read().split("\\0")):
    exec(compile(program, f"program {number}", "exec"), {"__name__": f"program_{number}"})
print("all ran")
"""

LAYER_OF_TENSORFLOW = """
import tensorflow as tf

sizes = [(100, 8), (50, 8)]
inputs = [tf.constant([[1], [2]]), tf.constant([[3], [4]])]
dense = tf.keras.layers.Dense(1)
dense.build([None, 16])
model_variables = dense.trainable_variables


def model(vectors):
    return tf.reduce_sum(dense(tf.concat(vectors, 1)))


"""
FILES_OF_ALL_RANKS = """
model.save_weights("weights-0.weights.h5")
number_that_wrote = 1
"""
LAYER_OF_PYTORCH = """
import torch

sizes = [(100, 8), (50, 8), (30, 8)]
tables = [(*size, "sum") for size in sizes]
inputs = [torch.tensor([[1], [2]]), torch.tensor([[3], [4]]), torch.tensor([[3, 1], [4, 2]])]
tower = torch.nn.Linear(24, 1)


def DistributedDataParallel(module):
    return module


"""
TABLES_OF_PYTORCH = """
import torch

import sparse_operation_kit.torch as sok

sok.init(gradient="mean")  # as MIGRATING.md's
ids = (torch.tensor([5, 7, 2**40]), torch.tensor([0, 2, 3]))
batches = [ids, (torch.tensor([8, -9]), torch.tensor([0, 1, 2]))]
"""
OPTIMIZER = """
optimizer = sok.OptimizerWrapper(torch.optim.Adam([users]))
"""
DUMPS = """
items, table_optimizer = users, optimizer


def train():
    sok.lookup_sparse(users, ids).sum().backward()
    table_optimizer.step()


"""
COPIES = """
tables = [users]
copies = [sok.DynamicVariable(dimension=16, initializer="normal", name="users", max_capacity=10_000_000)]
"""


def programs(document, heading=None):
    """The Python of a page, or of one of its sections."""
    text = (DOCS / f"{document}.md").read_text(encoding="utf-8")
    if heading is not None:
        text = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def pieces_of_keras():
    fit, callbacks, save, from_all_ranks, beside_dump, _ = programs("KERAS")
    twice = beside_dump + beside_dump  # the second time it goes on from the dump
    return [fit + callbacks + save + FILES_OF_ALL_RANKS + from_all_ranks + twice]


def pieces_of_pytorch():
    _, layer, plan = programs("HYBRID")
    lookup, prefetch, stored, remote, increments, restart, serving = programs("DYNAMIC")
    (dumps,) = programs("CLUSTER", "Dumps while training goes on")
    dynamic = lookup + OPTIMIZER + prefetch + DUMPS + dumps + stored + remote + COPIES + increments + restart + serving
    return [LAYER_OF_PYTORCH + layer + plan, TABLES_OF_PYTORCH + dynamic]


@pytest.mark.parametrize("legacy_keras", ["0", "1"])
def test_programs_of_tensorflow(legacy_keras, monkeypatch, tmp_path):
    pytest.importorskip("tensorflow")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", legacy_keras)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    sections = ("SOK 1.x", "SOK 2.x", "DeepRec", "tf.distribute")
    whole = [text for section in sections for text in programs("MIGRATING", section)]
    assert len(whole) == 11
    stack, read_ahead = programs("TABLES", "Stacks")[1], programs("KERAS", "Inputs")[0]
    # The layer goes first: what comes then makes Keras's optimizers the legacy ones.
    run([LAYER_OF_TENSORFLOW + programs("HYBRID")[0], *whole, stack, read_ahead], tmp_path)
    run(pieces_of_keras(), tmp_path)  # with other arguments of init()


def test_programs_of_pytorch(tmp_path):
    pytest.importorskip("torch")
    whole = [*programs("MIGRATING", "TorchRec"), *programs("PYTORCH"), *programs("TABLES")[:2]]
    run([*whole, *pieces_of_pytorch()], tmp_path)


def run(texts, folder):
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(
        command, input="\0".join(texts), capture_output=True, text=True, timeout=300, check=False, cwd=folder
    )
    assert done.stdout.endswith("all ran\n"), done.stderr
