# SPDX-License-Identifier: Apache-2.0
"""Hybrid parallelism: embedding tables spread over the processes beside data-parallel modules.

    from sparse_operation_kit.torch import dist_model_parallel as dmp

    embedding = dmp.DistributedEmbedding([(rows, width, "sum") for rows, width in sizes], strategy="memory_balanced")
    dense = DistributedDataParallel(tower)
    # Of the tables alone: it averages the gradients of those that are replicated.
    optimizers = [dmp.DistributedOptimizer(Adagrad(embedding.parameters())), Adagrad(dense.parameters())]
    loss = dense(torch.cat(embedding(inputs), 1)).mean()  # a list of inputs, this process's samples of each

The names are those of the TensorFlow frontend's module, but for what autograd has no counterpart of: there is no tape
and no callback. See docs/HYBRID.md.
"""

from sparse_operation_kit.hybrid import DistEmbeddingStrategy, Plan
from sparse_operation_kit.torch.dist_model_parallel.embedding import Embedding, embedding_lookup
from sparse_operation_kit.torch.dist_model_parallel.integer_lookup import IntegerLookup
from sparse_operation_kit.torch.dist_model_parallel.layer import DistributedEmbedding
from sparse_operation_kit.torch.dist_model_parallel.planning import plan
from sparse_operation_kit.torch.dist_model_parallel.training import DistributedOptimizer, broadcast_variables

__all__ = [
    "DistEmbeddingStrategy",
    "DistributedEmbedding",
    "DistributedOptimizer",
    "Embedding",
    "IntegerLookup",
    "Plan",
    "broadcast_variables",
    "embedding_lookup",
    "plan",
]
