# SPDX-License-Identifier: Apache-2.0
"""dump, load and changed rows: `sparse_operation_kit.frontend` over TensorFlow's tables and optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit.checkpoint.variables import StateShard, TableShard, TrainedBy
from sparse_operation_kit.frontend import Frontend
from sparse_operation_kit.optimizers import Flags, NotFused, StateSpec
from sparse_operation_kit.tensorflow import hyperparameters, keras_compat, plain_optimizer, sok2
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.distributed import states_of, table_optimizer
from sparse_operation_kit.tensorflow.errors import check_errors
from sparse_operation_kit.tensorflow.group import Group, check_between_steps, on_host
from sparse_operation_kit.tensorflow.held import Column, PlainColumn, Replicated, Table
from sparse_operation_kit.tensorflow.optimizer import TableOptimizer
from sparse_operation_kit.tensorflow.table_stack import Member, TableStack
from sparse_operation_kit.tensorflow.table_variable import TableVariable, as_table, is_table


class _TensorFlow(Frontend[Table]):
    version = f"tensorflow {tf.__version__}"

    def check_between_steps(self, what: str) -> None:
        check_between_steps(what)

    def group(self) -> Group:
        return Group()

    def settle(self) -> None:
        on_host("errors", check_errors)

    def members(self, value: Any) -> Sequence[Any]:
        table = as_table(value) if is_table(value) else None
        return list(table.members.values()) if isinstance(table, TableStack) else [value]

    def held(self, value: Any) -> Table | None:
        rows = value if isinstance(value, Member) else as_table(value) if is_table(value) else None
        return None if rows is None else rows.held()

    def variable(self, value: Any) -> Any:
        return keras_compat.raw(value)

    def held_in_layer(self, variable: Any) -> Table:
        return self.held(variable) or Replicated(variable)

    def trained(self, optimizer: Any, tables: Sequence[Table]) -> tuple[Sequence[TableShard], TrainedBy]:
        trained = table_optimizer(optimizer)
        if trained is None and any(getattr(table.variable, "scopes", ()) for table in tables):
            trained = states_of(optimizer)  # as its steps in the scope find them
        if trained is None:
            return plain_optimizer.trained(optimizer, tables)
        sharded = [table.variable for table in tables if not isinstance(table, Replicated)]
        name, specs, settings, in_momentum = _optimizer(trained, sharded)
        if tf.executing_eagerly():
            for variable in {id(each): each for each in map(_whole, sharded)}.values():
                trained.states.make_awaited(variable, name, specs)
        counter = keras_compat.raw(trained.iterations())
        scalars = {} if trained.rows is None else trained.rows.scalars

        def restore(iterations: int | None, stored: Mapping[str, float]) -> None:
            if trained.rows is not None:
                trained.rows.resume(stored)

        shards = [
            TableShard(
                table,
                [_state(trained, table, name, spec) for spec in specs],
                settings,
                in_momentum,
                scalars={scalar: float(variable.numpy()) for scalar, variable in scalars.items()},
                restore=restore,
            )
            for table in tables
        ]

        def count(iterations: int) -> None:
            on_host((counter._unique_id, "count"), lambda value: _assigned(trained, value), np.int64(iterations))

        steps = int(on_host((counter._unique_id, "steps"), lambda: tf.identity(counter)))
        return shards, TrainedBy(name, steps, count)


_frontend = _TensorFlow()
dump = sok2.keywords(dump_vars="vars")(as_written(_frontend.dump))
dump_async = as_written(_frontend.dump_async)
has_dump = as_written(_frontend.has_dump)
load = sok2.keywords(load_vars="vars")(as_written(_frontend.load))
track_changes = as_written(_frontend.track_changes)
incremental_model_dump = sok2.keywords(sok_vars="vars")(sok2.with_session(as_written(_frontend.incremental_model_dump)))
save_incremental = as_written(_frontend.save_incremental)
load_incremental = as_written(_frontend.load_incremental)
expire = as_written(_frontend.expire)
increments = as_written(_frontend.increments)
export_for_serving = as_written(_frontend.export_for_serving)


def _whole(variable: Any) -> TableVariable:
    """The table, or the stack that it is a member of."""
    return variable.stack if isinstance(variable, Member) else as_table(variable)


def _assigned(trained: TableOptimizer, value: Any) -> Any:
    results = trained.resume(value)
    return None if tf.executing_eagerly() else [result.op for result in results]


def _state(trained: TableOptimizer, held: Table, optimizer: str, spec: StateSpec) -> StateShard:
    if isinstance(held, Replicated):
        return _dense_state(trained, held, spec)
    table = held.variable
    present = trained.states.of(table).get(spec.name)

    def make() -> Column:
        state = trained.states.of(table).get(spec.name)
        if state is None:  # another member of its stack may have made it
            (state,) = trained.states.get(table, optimizer, [spec])
            if not tf.executing_eagerly():
                tf.compat.v1.get_default_session().run(state.initializer)
        return Column(state, held.first_slot)

    return StateShard(spec, None if present is None else Column(present, held.first_slot), make)


def _dense_state(trained: TableOptimizer, held: Replicated, spec: StateSpec) -> StateShard:
    def make() -> Column:
        keras_compat.build(trained.optimizer, [held.of_keras])
        return PlainColumn(keras_compat.dense_state(trained.optimizer, held.of_keras, spec.name))

    return StateShard(spec, make(), make)


def _optimizer(
    trained: TableOptimizer, tables: Sequence[TableVariable]
) -> tuple[str, Sequence[StateSpec], Mapping[str, Any], bool]:
    """(name in the dump, states of a table, hyper-parameters, whether momenta hold learning rates) of an optimizer as
    it is now.
    """
    optimizer = trained.optimizer
    try:
        step = hyperparameters.read(optimizer, trained.iterations)
    except NotFused as reason:
        name = keras_compat.library_class(optimizer) or type(optimizer).__name__
        specs = trained.on_rows(reason).prepare(tables)
        settings = hyperparameters.settings(optimizer, trained.iterations)
        in_momentum = True  # as in every Keras, and no other optimizer runs on rows
    else:
        name, specs = step.spec.name, step.states
        own = hasattr(optimizer, "sok_step")
        settings = step.spec.keras_settings() if own else hyperparameters.settings(optimizer, trained.iterations)
        in_momentum = bool(step.spec.flags & Flags.LEARNING_RATE_IN_MOMENTUM)
    return name, specs, hyperparameters.plain(settings), in_momentum
