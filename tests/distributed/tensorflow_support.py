# SPDX-License-Identifier: Apache-2.0
"""What the checks of tensorflow_worker.py and tensorflow_gpu_worker.py share."""

import contextlib
import importlib.util
import pathlib
import sys
from typing import Any

import numpy as np

TESTS = pathlib.Path(__file__).resolve().parents[1]
for _name in (
    "reference",
    "cases",
    "checking",
    "dict_store",
    "faults",
    "hybrid_model",
    "hybrid_examples",
    "keras_resume",
):
    _spec = importlib.util.spec_from_file_location(_name, TESTS / f"{_name}.py")
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])

import tensorflow as tf  # noqa: E402

import sparse_operation_kit.tensorflow as sok  # noqa: E402
from sparse_operation_kit.tensorflow import runtime  # noqa: E402

strategy: Any = None
"""The MultiWorkerMirroredStrategy whose workers the ranks are, where they are not Horovod's."""


def restart(**options):
    """init() anew, with other options.

    `tf.keras.optimizers` stay as they are: a later check may read Keras's files, which leave out states of legacy ones.
    """
    runtime.shutdown()
    sok.init(use_legacy_optimizer=False, **options)


def start_anew():
    """init() anew with its defaults after a check that failed, without what a GPU found wrong in it."""
    with contextlib.suppress(tf.errors.OpError):
        sok.check_errors()
    restart()


def take_own_gpu(number):
    """Makes one GPU the only one of this rank, with float32 numbers throughout: checks compare to a few 1e-6. Where
    there are fewer GPUs than ranks, they share them (`launching.need_gpus`).

    By default TensorFlow multiplies matrices of float32 numbers rounded to 10 bits (TF32) on GPUs that can.
    """
    gpus = tf.config.list_physical_devices("GPU")
    mine = gpus[number % len(gpus)]
    tf.config.set_visible_devices(mine, "GPU")
    tf.config.experimental.set_memory_growth(mine, True)
    tf.config.experimental.enable_tensor_float_32_execution(False)


def ids_of(lookup, kind):
    """A lookup's ids and weights as ragged or (unsorted) sparse tensors."""
    if kind == "ragged":
        ids = tf.RaggedTensor.from_row_splits(lookup.keys, lookup.splits)
        return ids, None if lookup.weights is None else ids.with_values(lookup.weights)
    indices, order = lookup.coordinates(shuffle=5 if kind == "unsorted" else None)
    ids = tf.SparseTensor(indices, lookup.keys[order], lookup.dense_shape)
    return ids, None if lookup.weights is None else tf.SparseTensor(indices, lookup.weights[order], lookup.dense_shape)


def tables_of(call):
    return [
        sok.Variable(call.rows(t), name=f"table{t}", mode=table.mode(sok.num_ranks()))
        for t, table in enumerate(call.tables)
    ]


def own_rows(table, whole):
    return np.asarray(whole)[table.placement.rows]


def gathered(array):
    """[ranks, ...]: an array of the same shape from every rank."""
    return np.asarray(sok.communication.allgather(np.asarray(array)[None], name="gathered"))
