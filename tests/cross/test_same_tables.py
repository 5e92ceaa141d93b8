# SPDX-License-Identifier: Apache-2.0
"""The same tables, batches and optimizer give the same model in both frontends, from the initial rows on."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

SEED = 20
STEPS = 20

COMMON = """
import sys
import numpy as np
ROWS, DIM, BATCH, STEPS = (50, 17, 400), (8, 3, 33), 24, {steps}
COMBINERS = ["sum", "mean", "sqrtn"]
def batch(step, table):
    generator = np.random.default_rng([{seed}, step, table])
    lengths = generator.integers(0, 4, BATCH)
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    keys = generator.integers(0, ROWS[table], splits[-1])
    weights = generator.uniform(0.5, 2.0, splits[-1]).astype(np.float32)
    target = generator.standard_normal((BATCH, DIM[table])).astype(np.float32)
    return keys, splits, weights, target
def save(path, tables):
    np.savez(path, **{{f"{{when}}{{t}}": table for when, group in tables.items() for t, table in enumerate(group)}})
"""

TENSORFLOW = """
import tensorflow as tf
import sparse_operation_kit.tensorflow as sok
sok.init(seed={seed})
def make(t):
    return sok.Variable(shape=[ROWS[t], DIM[t]], initializer="normal", name=f"table{{t}}", dtype="{dtype}")
tables = [make(t) for t in range(3)]
optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.1, epsilon=1e-12))
before = [tf.cast(table.read_value(), tf.float32).numpy() for table in tables]
for step in range(STEPS):
    batches = [batch(step, t) for t in range(3)]
    ids = [tf.RaggedTensor.from_row_splits(keys, splits) for keys, splits, _, _ in batches]
    weights = [tf.RaggedTensor.from_row_splits(w, splits) for _, splits, w, _ in batches]
    with tf.GradientTape() as tape:
        outputs = sok.lookup_sparse(tables, ids, weights, COMBINERS)
        loss = tf.add_n([tf.reduce_sum((o - b[3]) ** 2) for o, b in zip(outputs, batches)])
    optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables))
save(sys.argv[1], dict(before=before, after=[tf.cast(table.read_value(), tf.float32).numpy() for table in tables]))
"""

TORCH = """
import torch
import sparse_operation_kit.torch as sok
sok.init(seed={seed})
def make(t):
    return sok.Variable(shape=[ROWS[t], DIM[t]], initializer="normal", name=f"table{{t}}", dtype=torch.{dtype})
tables = [make(t) for t in range(3)]
optimizer = sok.OptimizerWrapper(torch.optim.Adagrad(tables, lr=0.1, initial_accumulator_value=0.1, eps=1e-12))
before = [table.detach().float().numpy().copy() for table in tables]
for step in range(STEPS):
    batches = [batch(step, t) for t in range(3)]
    ids = [(torch.from_numpy(keys), torch.from_numpy(splits)) for keys, splits, _, _ in batches]
    weights = [torch.from_numpy(w) for _, _, w, _ in batches]
    optimizer.zero_grad()
    outputs = sok.lookup_sparse(tables, ids, weights, COMBINERS)
    sum(((o - torch.from_numpy(b[3])) ** 2).sum() for o, b in zip(outputs, batches)).backward()
    optimizer.step()
save(sys.argv[1], dict(before=before, after=[table.detach().float().numpy() for table in tables]))
"""


def train(frontend, path, dtype):
    if importlib.util.find_spec(frontend) is None:
        pytest.skip(f"{frontend} is not installed")
    program = (COMMON + {"tensorflow": TENSORFLOW, "torch": TORCH}[frontend]).format(
        seed=SEED, steps=STEPS, dtype=dtype
    )
    run = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return np.load(path)


# A float32 result that differs in its last bit may be rounded to the neighbour, and later steps go on from there.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("float16", 2**-11), ("bfloat16", 2**-8)])
def test_both_frontends_train_the_same_tables(tmp_path, dtype, tolerance):
    ours, theirs = (train(frontend, tmp_path / f"{frontend}.npz", dtype) for frontend in ("tensorflow", "torch"))
    for t in range(3):
        np.testing.assert_array_equal(ours[f"before{t}"], theirs[f"before{t}"])  # initial rows: bit for bit
        moved = np.linalg.norm(ours[f"after{t}"] - ours[f"before{t}"])
        difference = np.linalg.norm(ours[f"after{t}"] - theirs[f"after{t}"])
        assert moved > 0.1, "the optimizer did nothing"
        assert difference <= tolerance * np.linalg.norm(ours[f"after{t}"])
