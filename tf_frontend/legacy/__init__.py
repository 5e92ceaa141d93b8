# SPDX-License-Identifier: Apache-2.0
"""The names of SparseOperationKit 1.x and of DeepRec, over those of this version.

    import sparse_operation_kit as sok

    sok.Init(global_batch_size=8192)
    layer = sok.All2AllDenseEmbedding(max_vocabulary_size_per_gpu=8192, embedding_vec_size=4, slot_num=100,
                                      nnz_per_slot=10)
    embedding_variables, others = sok.split_embedding_variable_from_others(model.trainable_variables)

They are for scripts that exist; docs/MIGRATING.md says what of them differs, and what new ones use instead. Modules are
loaded with the first of their names; those of layers and optimizers with Keras, which finds them in its files.
"""

from __future__ import annotations

import importlib
from typing import Any

NAMES = {
    "All2AllDenseEmbedding": "layers",
    "CBFFilter": "embedding_variables",
    "CounterFilter": "embedding_variables",
    "DistributedEmbedding": "layers",
    "EmbeddingVariableOption": "embedding_variables",
    "GlobalStepEvict": "embedding_variables",
    "GraphKeys": "keys",
    "Init": "initialize",
    "InitializerOption": "embedding_variables",
    "L2WeightEvict": "embedding_variables",
    "OptimizerScope": "scope",
    "Saver": "saver",
    "StorageOption": "embedding_variables",
    "StorageType": "embedding_variables",
    "categorical_column_with_embedding": "feature_columns",
    "deeprec": "deeprec",
    "embedding_column": "feature_columns",
    "enable_distributed_strategy": "deeprec",
    "get_embedding": "layers",
    "get_embedding_variable": "embedding_variables",
    "group_embedding_column_scope": "feature_columns",
    "group_embedding_lookup": "deeprec",
    "group_embedding_lookup_sparse": "deeprec",
    "input_layer": "feature_columns",
    "split_embedding_variable_from_others": "optimizers",
}
"""The names that are `sok.` names too, and their modules."""


def __getattr__(name: str) -> Any:
    if name in NAMES:
        module = importlib.import_module(f"{__name__}.{NAMES[name]}")
        return module if name == "deeprec" else getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
