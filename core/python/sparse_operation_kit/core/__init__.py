# SPDX-License-Identifier: Apache-2.0
"""The core over NumPy: every stage as a function, without any framework.

    from sparse_operation_kit import core

    table = core.Table(weight)                                        # [rows, dimension] float32, float16 or BFLOAT16
    lookup = core.Lookup(keys, row_splits=splits, combiner="mean")
    (output,) = core.gather_combine([table], [lookup])
    summand = core.Gradient(keys, output_gradient, row_splits=splits, combiner="mean")
    core.apply([core.Update(table, core.Optimizer("sgd", learning_rate=0.1), [summand])])

Importing this package loads nothing; the first call loads libsok_core.so (ImportError when it is missing).
"""

import importlib

from sparse_operation_kit.core._abi import ANY_KEY
from sparse_operation_kit.core._arrays import BFLOAT16
from sparse_operation_kit.core.communicator import (
    REDUCTIONS,
    Communicator,
    NcclProperties,
    device_uuid,
    nccl_properties,
)
from sparse_operation_kit.core.context import Context, ErrorRecord, ThreadPool
from sparse_operation_kit.core.coordinates import bags_from_coordinates
from sparse_operation_kit.core.device import (
    DeviceProperties,
    build_info,
    built_with_cuda,
    cuda_device_count,
    device_properties,
    version,
)
from sparse_operation_kit.core.dynamic_table import Admission, DynamicTable, DynamicTableCounts, prefetch
from sparse_operation_kit.core.gradient import Gradient, Update, apply, owner_gradients, reduce, spread, weight_gradient
from sparse_operation_kit.core.hash_index import HashIndex, HashRequest, erase, find, find_or_insert
from sparse_operation_kit.core.initializer import Initializer, initialize
from sparse_operation_kit.core.lookup import (
    Lookup,
    Member,
    Routing,
    combine,
    gather,
    gather_combine,
    join_keys,
    locate,
    locate_lookups,
    route,
    split_batch,
)
from sparse_operation_kit.core.messages import Messages
from sparse_operation_kit.core.optimizer import Optimizer
from sparse_operation_kit.core.reserved_range import ReservedRange
from sparse_operation_kit.core.table import Index, Table, assign, local_rows

__all__ = [
    "ANY_KEY",
    "BFLOAT16",
    "REDUCTIONS",
    "Admission",
    "Communicator",
    "Context",
    "DeviceProperties",
    "DynamicTable",
    "DynamicTableCounts",
    "ErrorRecord",
    "Gradient",
    "HashIndex",
    "HashRequest",
    "Index",
    "Initializer",
    "Lookup",
    "Member",
    "Messages",
    "NcclProperties",
    "Optimizer",
    "ReservedRange",
    "Routing",
    "Table",
    "ThreadPool",
    "Update",
    "apply",
    "assign",
    "bags_from_coordinates",
    "build_info",
    "built_with_cuda",
    "combine",
    "cuda_device_count",
    "device_properties",
    "device_uuid",
    "erase",
    "find",
    "find_or_insert",
    "gather",
    "gather_combine",
    "initialize",
    "join_keys",
    "local_rows",
    "locate",
    "locate_lookups",
    "nccl_properties",
    "owner_gradients",
    "prefetch",
    "reduce",
    "route",
    "split_batch",
    "spread",
    "version",
    "weight_gradient",
]

# Paths of SparseOperationKit 1.x (legacy_paths): `core.initialize` stays the function, and has `Init` besides.
for _name in ("initialize", "context_scope"):
    importlib.import_module(f"{__name__}.{_name}")
