# SPDX-License-Identifier: Apache-2.0
"""Legacy optimizers of tf_keras that update tables without a wrapper, as scripts of SOK 2.x use them: their states in
dump and load.

Such an optimizer keeps a slot variable of the shard's shape for a static table, as for any variable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_operation_kit.checkpoint.variables import StateShard, TableShard, TrainedBy
from sparse_operation_kit.optimizers import StateSpec
from sparse_operation_kit.tensorflow import hyperparameters, keras_compat
from sparse_operation_kit.tensorflow.held import PlainColumn, Table


def has_slots(optimizer: Any, table: Any) -> bool:
    """Whether a legacy optimizer of tf_keras has slots of a table."""
    return keras_compat.family(optimizer) == keras_compat.LEGACY and bool(optimizer._slots.get(table._unique_id))


def trained(optimizer: Any, tables: Sequence[Table]) -> tuple[Sequence[TableShard], TrainedBy]:
    """The tables with the optimizer's slots for them, which are made where no step has made them yet.

    Raises TypeError for any other optimizer, and for a dynamic table.
    """
    if keras_compat.family(optimizer) != keras_compat.LEGACY:
        raise TypeError(
            "optimizer must be a sok.OptimizerWrapper, what sok.DistributedOptimizer gave, one of this package's own, "
            f"or a legacy one of tf_keras: a {type(optimizer).__name__} by itself has no states of tables"
        )
    for table in tables:
        table.variable.check_plain(optimizer)
    optimizer._create_all_weights([table.variable for table in tables])
    counter = optimizer.iterations
    settings = hyperparameters.plain(hyperparameters.settings(optimizer, lambda: counter))

    def state(table: Table, name: str) -> StateShard:
        column = PlainColumn(optimizer.get_slot(table.variable, name))
        return StateShard(StateSpec(name), column, lambda: column)

    shards = [
        TableShard(table, [state(table, name) for name in optimizer.get_slot_names()], settings, in_momentum=True)
        for table in tables
    ]
    name = keras_compat.library_class(optimizer) or type(optimizer).__name__
    return shards, TrainedBy(name, int(counter.numpy()), counter.assign)
