# SPDX-License-Identifier: Apache-2.0
"""Sharded embedding tables for PyTorch, over torch.distributed.

    import sparse_operation_kit.torch as sok

    sok.init()
    table = sok.Variable(shape=(1_000_000, 64), initializer="uniform")
    optimizer = sok.OptimizerWrapper(torch.optim.Adam([table]))
    vectors = sok.lookup_sparse(table, (values, offsets), combiners="sum")

The names are those of the TensorFlow frontend, sparse_operation_kit.tensorflow.
"""

from sparse_operation_kit.disk_store import DiskStore
from sparse_operation_kit.row_store import RowStore
from sparse_operation_kit.torch import communication as communication
from sparse_operation_kit.torch import default_plan as _default_plan  # noqa: F401  # PyTorch's planner knows tables
from sparse_operation_kit.torch import dist_model_parallel as dist_model_parallel
from sparse_operation_kit.torch import whole_modules as _whole_modules  # noqa: F401  # so do DDP and others
from sparse_operation_kit.torch.checkpoint import (
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
from sparse_operation_kit.torch.clipping import clip_grad_norm_, get_total_norm
from sparse_operation_kit.torch.distributed import DistributedOptimizer, broadcast_variables
from sparse_operation_kit.torch.dynamic_variable import DynamicVariable
from sparse_operation_kit.torch.embedding import EmbeddingBagCollection
from sparse_operation_kit.torch.errors import check_errors
from sparse_operation_kit.torch.keyed_vectors import KeyedVectors
from sparse_operation_kit.torch.lookup import all2all_dense_embedding, lookup_sparse
from sparse_operation_kit.torch.optimizer import OptimizerWrapper
from sparse_operation_kit.torch.own_optimizers import SGD, Ftrl, RowWiseAdagrad
from sparse_operation_kit.torch.prefetch import prefetch
from sparse_operation_kit.torch.runtime import global_gpu_id, init, local_rank, num_gpus, num_ranks, rank
from sparse_operation_kit.torch.table_io import assign, export, filter_variables, sparse_read_and_evict
from sparse_operation_kit.torch.table_stack import TableStack
from sparse_operation_kit.torch.variable import Variable

__all__ = [
    "SGD",
    "DiskStore",
    "DistributedOptimizer",
    "DynamicVariable",
    "EmbeddingBagCollection",
    "Ftrl",
    "KeyedVectors",
    "OptimizerWrapper",
    "RowStore",
    "RowWiseAdagrad",
    "TableStack",
    "Variable",
    "all2all_dense_embedding",
    "assign",
    "broadcast_variables",
    "check_errors",
    "clip_grad_norm_",
    "communication",
    "dump",
    "dump_async",
    "expire",
    "export",
    "export_for_serving",
    "filter_variables",
    "get_total_norm",
    "global_gpu_id",
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
    "sparse_read_and_evict",
    "track_changes",
]
