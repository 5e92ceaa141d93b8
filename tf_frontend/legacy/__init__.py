# SPDX-License-Identifier: Apache-2.0
"""The names of SparseOperationKit 1.x and of DeepRec, over those of this version.

    import sparse_operation_kit as sok

    sok.Init(global_batch_size=8192)
    layer = sok.All2AllDenseEmbedding(max_vocabulary_size_per_gpu=8192, embedding_vec_size=4, slot_num=100,
                                      nnz_per_slot=10)
    embedding_variables, others = sok.split_embedding_variable_from_others(model.trainable_variables)

They are for scripts that exist; docs/MIGRATING.md says what of them differs, and what new ones use instead. Modules are
loaded with the first of their names, those of layers and optimizers by the Keras that is active then.
"""

from __future__ import annotations

import importlib
from typing import Any

NAMES = {
    "All2AllDenseEmbedding": "layers",
    "DistributedEmbedding": "layers",
    "GraphKeys": "keys",
    "Init": "initialize",
    "OptimizerScope": "scope",
    "Saver": "saver",
    "get_embedding": "layers",
    "split_embedding_variable_from_others": "optimizers",
}
"""The names that are `sok.` names too, and their modules."""


def __getattr__(name: str) -> Any:
    if name in NAMES:
        return getattr(importlib.import_module(f"{__name__}.{NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
