# SPDX-License-Identifier: Apache-2.0
"""A table takes its own size once, its states theirs, and a step nothing of that order; nor do dump and load."""

import importlib.util
import os
import subprocess
import sys

import pytest

TABLE = 256 << 20  # bytes
CHUNKS = 128 << 20  # a few chunks of 8 MiB of each file and their threads' buffers; less than the table
SLACK = 48 << 20  # batches, outputs, allocators and thread stacks; far below one more table

# Peak resident memory after each phase, in bytes above the first reading.
COMMON = """
import sys
import numpy as np
def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
DIM, BATCH, KEYS = 64, 512, 8
ROWS = {table} // (4 * DIM)
def batch(step):
    keys = np.random.default_rng(step).integers(0, ROWS, BATCH * KEYS)
    return keys, np.arange(BATCH + 1, dtype=np.int64) * KEYS
def report(*readings):
    print("PEAKS", *(reading - readings[0] for reading in readings[1:]))
"""

TENSORFLOW = """
import tensorflow as tf
import sparse_operation_kit.tensorflow as sok
sok.init()
def make_step(table):
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))
    @tf.function
    def step(keys, splits):
        ids = tf.RaggedTensor.from_row_splits(keys, splits)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(table, ids) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, [table]), [table]))
    return step, optimizer
"""

TORCH = """
import torch
import sparse_operation_kit.torch as sok
sok.init()
def make_step(table):
    optimizer = sok.OptimizerWrapper(torch.optim.Adagrad([table], lr=0.1))
    def step(keys, splits):
        optimizer.zero_grad()
        ids = torch.as_tensor(keys), torch.as_tensor(splits)
        (sok.lookup_sparse(table, ids) ** 2).sum().backward()
        optimizer.step()
    return step, optimizer
"""

# A small table first, so that what the framework itself takes on first use is not counted.
PHASES = """
def make_table(rows, name):
    return sok.Variable(shape=[rows, DIM], initializer="uniform", name=name)
warm_step, _ = make_step(make_table(1000, "warm"))
for i in range(3):
    keys, splits = batch(i)
    warm_step(keys % 1000, splits)
before = peak()
table = make_table(ROWS, "table")
made = peak()
step, optimizer = make_step(table)
step(*batch(0))
first = peak()
for i in range(1, 20):
    step(*batch(i))
last = peak()
sok.dump(sys.argv[1], table, optimizer)
dumped = peak()
sok.load(sys.argv[1], table, optimizer)
loaded = peak()
for _ in range(2):
    sok.dump_async(sys.argv[1], table, optimizer).wait()
report(before, made, first, last, dumped, loaded, peak())
"""


@pytest.mark.parametrize("frontend", ["tensorflow", "torch"])
def test_one_table_and_its_states(frontend, tmp_path):
    if importlib.util.find_spec(frontend) is None:
        pytest.skip(f"{frontend} is not installed")
    program = COMMON.format(table=TABLE) + {"tensorflow": TENSORFLOW, "torch": TORCH}[frontend] + PHASES
    command = [sys.executable, "-c", program, str(tmp_path / "dump")]
    # What is in use is measured. By default glibc keeps freed chunks too, of each thread its own, as it happens. So
    # does TensorFlow with oneDNN, which it takes by itself on CPUs that have certain instructions.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "TF_ENABLE_ONEDNN_OPTS": "0"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    line = next(line for line in run.stdout.splitlines() if line.startswith("PEAKS"))
    made, first, last, dumped, loaded, copied = (int(word) for word in line.split()[1:])
    assert TABLE * 0.9 < made < TABLE + SLACK, f"building a table of {TABLE} bytes took {made}"
    # Adagrad holds one state of the table's size, made at the first step.
    assert first < 2 * TABLE + SLACK, f"the first step reached {first}"
    assert last < first + SLACK, f"later steps reached {last}, the first {first}"
    assert dumped < last + CHUNKS, f"dump reached {dumped}, the steps {last}"
    assert loaded < last + CHUNKS, f"load reached {loaded}, the steps {last}"
    copies = 2 * TABLE + TABLE // 32  # rows, states and keys, once: the second dump has what the first gave back
    assert copies < copied - last < copies + CHUNKS, f"two of dump_async reached {copied}, the steps {last}"
