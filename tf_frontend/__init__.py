# SPDX-License-Identifier: Apache-2.0
"""Sharded embedding tables for TensorFlow, over Horovod or the workers of a MultiWorkerMirroredStrategy.

    import horovod.tensorflow as hvd
    import sparse_operation_kit.tensorflow as sok

    hvd.init()
    sok.init()
    table = sok.Variable(shape=(1_000_000, 64), initializer="uniform", name="items")
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam())
    with tf.GradientTape() as tape:
        vectors = sok.lookup_sparse(table, ids, combiners="sum")
        ...
    optimizer.apply_gradients(zip(tape.gradient(loss, [table]), [table]))

The names are those of the PyTorch frontend, sparse_operation_kit.torch.
"""

import importlib
from typing import Any

from sparse_operation_kit.disk_store import DiskStore
from sparse_operation_kit.row_store import RowStore
from sparse_operation_kit.tensorflow import communication as communication
from sparse_operation_kit.tensorflow import keras_files as _keras_files  # noqa: F401
from sparse_operation_kit.tensorflow import legacy as legacy
from sparse_operation_kit.tensorflow import op_gradients as _op_gradients  # noqa: F401
from sparse_operation_kit.tensorflow.batches import copy_to_gpu
from sparse_operation_kit.tensorflow.checkpoint import (
    dump,
    dump_async,
    expire,
    export_for_serving,
    has_dump,
    incremental_model_dump,
    increments,
    load,
    load_incremental,
    save_incremental,
    track_changes,
)
from sparse_operation_kit.tensorflow.clipping import clip_by_global_norm, global_norm
from sparse_operation_kit.tensorflow.distributed import (
    DistributedGradientTape,
    DistributedOptimizer,
    broadcast_variables,
)
from sparse_operation_kit.tensorflow.dynamic_variable import DynamicVariable
from sparse_operation_kit.tensorflow.errors import check_errors
from sparse_operation_kit.tensorflow.lookup import all2all_dense_embedding, lookup_sparse
from sparse_operation_kit.tensorflow.optimizer import OptimizerWrapper
from sparse_operation_kit.tensorflow.own_optimizers import SGD, Ftrl, RowWiseAdagrad
from sparse_operation_kit.tensorflow.prefetch import prefetch
from sparse_operation_kit.tensorflow.runtime import (
    global_gpu_id,
    init,
    local_rank,
    num_gpus,
    num_ranks,
    rank,
    set_comm_tool,
)
from sparse_operation_kit.tensorflow.sok2 import tf_version
from sparse_operation_kit.tensorflow.table_io import assign, export, filter_variables, sparse_read_and_evict
from sparse_operation_kit.tensorflow.table_stack import TableStack
from sparse_operation_kit.tensorflow.variable import DistributedVariable, LocalizedVariable, Variable

__all__ = [
    "SGD",
    "DiskStore",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "DistributedVariable",
    "DynamicVariable",
    "EmbeddingBagCollection",
    "Ftrl",
    "LocalizedVariable",
    "OptimizerWrapper",
    "RowStore",
    "RowWiseAdagrad",
    "TableStack",
    "Variable",
    "all2all_dense_embedding",
    "assign",
    "broadcast_variables",
    "check_errors",
    "clip_by_global_norm",
    "communication",
    "copy_to_gpu",
    "dump",
    "dump_async",
    "expire",
    "export",
    "export_for_serving",
    "filter_variables",
    "global_gpu_id",
    "global_norm",
    "has_dump",
    "incremental_model_dump",
    "increments",
    "init",
    "load",
    "load_incremental",
    "local_rank",
    "lookup_sparse",
    "num_gpus",
    "num_ranks",
    "prefetch",
    "rank",
    "save_incremental",
    "set_comm_tool",
    "sparse_read_and_evict",
    "tf_version",
    "track_changes",
]


def __getattr__(name: str) -> Any:
    # A Keras layer: Keras is imported only by those who use it.
    if name == "EmbeddingBagCollection":
        from sparse_operation_kit.tensorflow import embedding

        return embedding.EmbeddingBagCollection
    if name == "dist_model_parallel":
        return importlib.import_module(f"{__name__}.{name}")
    if name in legacy.NAMES:  # of SparseOperationKit 1.x and DeepRec
        return getattr(legacy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
