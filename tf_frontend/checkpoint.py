# SPDX-License-Identifier: Apache-2.0
"""dump and load: tables and their optimizer's states in the format that both frontends share (docs/FORMAT.md)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit import checkpoint as _checkpoint
from sparse_operation_kit.checkpoint import variables as _variables
from sparse_operation_kit.checkpoint.conversion import LEARNING_RATE_IN_MOMENTUM
from sparse_operation_kit.optimizers import Flags, NotFused, StateSpec
from sparse_operation_kit.tensorflow import hyperparameters, keras_compat
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.distributed import table_optimizer
from sparse_operation_kit.tensorflow.errors import check_errors
from sparse_operation_kit.tensorflow.group import Group, check_between_steps, on_host
from sparse_operation_kit.tensorflow.optimizer import TableOptimizer
from sparse_operation_kit.tensorflow.variable import Variable, as_table, is_table

_MOMENTUM = ("SGD", "RMSprop")


@as_written
def dump(
    path: str | os.PathLike[str],
    vars: Any,
    optimizer: Any = None,
    *,
    step: int | None = None,
    extra: Any = None,
    progress: bool | None = None,
) -> None:
    """Writes tables, and with an optimizer their states and its step count, to the directory `path`.

    Called by every rank with the same tables; each writes its rows. The dump appears whole or not at all, in place of
    one that was there. Any number of ranks loads it, in either frontend.

    Args:
      path: a directory that all ranks see.
      vars: tables, or one. Dense variables are not for this; see `sok.filter_variables`.
      optimizer: the `sok.OptimizerWrapper` (`sok.DistributedOptimizer`, `sok.SGD`, ...) that updates them. Its
        hyper-parameters are written too, for the record.
      step, extra: an integer and plain JSON data of the caller's, which load gives back.
      progress: whether to show a bar; None: on rank 0 of a terminal.

    Raises, on all ranks when on one:
      RuntimeError: before init(), inside a tf.function, or in a tf.compat.v1 graph without a default session.
      TypeError: something that is no table, or an optimizer that has no states of tables.
      NotImplementedError: an optimizer that cannot update tables.
      Otherwise what sparse_operation_kit.checkpoint raises (ValueError and OSError); the older dump is then intact.
    """
    group = _group()
    _variables.dump_variables(
        path,
        lambda: _describe(vars, optimizer),
        group=group,
        frontend=f"tensorflow {tf.__version__}",
        step=step,
        extra=extra,
        progress=progress,
    )


@as_written
def load(
    path: str | os.PathLike[str],
    vars: Any,
    optimizer: Any = None,
    *,
    verify: str = "before",
    progress: bool | None = None,
) -> _checkpoint.Dump:
    """Loads tables, and with an optimizer their states and its step count, from a dump of any number of ranks.

    Called by every rank with the same tables; each reads its rows. A dump of either frontend, or of SparseOperationKit
    2.x. Tables of float16 and bfloat16 load what float32 ones dumped, rounded to nearest, and the reverse, exactly. The
    optimizer must be of the dump's kind (Adam and AdamW count as one); its hyper-parameters stay as they are,
    its step count becomes the dump's, so that bias corrections and schedules go on. Momentum that PyTorch dumped
    becomes Keras's, which holds the learning rate. States of dense variables are not the dump's.

    Args:
      path, vars, optimizer, progress: as of `dump`; `vars` may be some of the dump's tables.
      verify: "before": every byte that is needed is checked before the first row changes, which reads the files
        twice. "during": reads once; damage may be found after some rows have changed.

    Returns:
      The dump, closed: `step` and `extra` as given to dump, `optimizer.name`, `.iterations` and `.hyperparameters`.

    Raises as `dump` does. With verify="before" nothing has changed then.
    """
    group = _group()
    return _variables.load_variables(
        path,
        lambda: _describe(vars, optimizer),
        group=group,
        verify=verify,  # type: ignore[arg-type]
        progress=progress,
    )


# --- where the rows are ----------------------------------------------------------------------------------------------


class _Storage:
    """A variable, read and written in pieces: reading it whole would copy it."""

    def __init__(self, variable: tf.Variable) -> None:
        self._variable = variable
        self._on_cpu = "GPU" not in (variable.device or "")

    def read(self, first: int, end: int) -> Any:
        """See Storage."""
        rows = np.arange(first, end, dtype=np.int64)

        def gathered(indices: Any) -> Any:
            values = tf.gather(self._variable, indices)
            return tf.cast(values, tf.float32) if values.dtype == tf.bfloat16 else values

        return on_host((id(self._variable), "read"), gathered, rows)

    def write(self, slots: Any, values: Any) -> None:
        """See Storage."""
        rows = np.arange(slots.start, slots.stop, dtype=np.int64) if isinstance(slots, slice) else slots
        # TensorFlow may use an array's memory as it is, and a copy to a GPU may be under way when this returns.
        values = values if self._on_cpu else np.array(values)

        def update(indices: Any, new: Any) -> Any:
            new = tf.cast(tf.convert_to_tensor(new), self._variable.dtype)
            result = self._variable.scatter_update(tf.IndexedSlices(new, indices))
            return None if tf.executing_eagerly() else result.op

        on_host((id(self._variable), "write"), update, rows, values)


def _group() -> Group:
    check_between_steps("dump and load")
    return Group()


# --- what there is to dump and load ----------------------------------------------------------------------------------


def _describe(variables: Any, optimizer: Any) -> _variables.Described:
    on_host("errors", check_errors)  # a GPU may not have said yet that the last step was wrong
    tables = _tables(variables)
    if optimizer is None:
        return [_shard(table) for table in tables], None
    trained = table_optimizer(optimizer)
    name, specs, settings = _optimizer(trained, tables)
    counter = keras_compat.raw(trained.iterations())
    scalars = {} if trained.rows is None else trained.rows.scalars

    def restore(iterations: int | None, stored: Mapping[str, float]) -> None:
        if trained.rows is not None:
            trained.rows.resume(stored, iterations)

    shards = []
    for table in tables:
        present = trained.states.of(table)
        states = [_state(trained, table, name, spec, present.get(spec.name)) for spec in specs]
        values = {scalar: float(variable.numpy()) for scalar, variable in scalars.items()}
        shards.append(_shard(table, states, settings, values, restore))

    def count(iterations: int) -> None:
        on_host((id(counter), "count"), lambda value: _assigned(counter, value), np.int64(iterations))

    steps = int(on_host((id(counter), "steps"), lambda: tf.identity(counter)))
    return shards, _variables.TrainedBy(name, steps, count)


def _assigned(counter: Any, value: Any) -> Any:
    result = counter.assign(tf.cast(value, counter.dtype))
    return None if tf.executing_eagerly() else result.op


def _tables(variables: Any) -> list[Variable]:
    given = [variables] if is_table(variables) or not isinstance(variables, Iterable) else list(variables)
    for position, variable in enumerate(given):
        if not is_table(variable):
            name = getattr(variable, "name", None)
            raise TypeError(
                f"vars[{position}] is a {type(variable).__name__}{f' named {name!r}' if name else ''}, not a table: a "
                "dump holds tables; sok.filter_variables tells them from other variables, which tf.train.Checkpoint or "
                "Keras saves"
            )
    return [as_table(variable) for variable in given]


def _shard(
    table: Variable,
    states: Sequence[_variables.StateShard] = (),
    settings: Mapping[str, Any] | None = None,
    scalars: Mapping[str, float] | None = None,
    restore: Any = None,
) -> _variables.TableShard:
    options = {} if restore is None else {"restore": restore}
    return _variables.TableShard(
        table.table_name,
        table.placement,
        _Storage(table),
        table.dtype.name,
        states,
        settings or {},
        None,
        scalars or {},
        **options,
    )


def _state(
    trained: TableOptimizer, table: Variable, optimizer: str, spec: StateSpec, present: Any
) -> _variables.StateShard:
    def make() -> _Storage:
        (state,) = trained.states.get(table, optimizer, [spec])
        if not tf.executing_eagerly():
            tf.compat.v1.get_default_session().run(state.initializer)
        return _Storage(state)

    return _variables.StateShard(spec, None if present is None else _Storage(present), make)


def _optimizer(
    trained: TableOptimizer, tables: Sequence[Variable]
) -> tuple[str, Sequence[StateSpec], Mapping[str, Any]]:
    """(name in the dump, states of a table, hyper-parameters) of an optimizer as it is now."""
    optimizer = trained.optimizer
    try:
        step = hyperparameters.read(optimizer, lambda: hyperparameters.next_step(trained.iterations()))
    except NotFused as reason:
        name = keras_compat.library_class(optimizer) or type(optimizer).__name__
        specs = trained.on_rows(reason).prepare(tables)
        settings = hyperparameters.settings(optimizer)
        in_momentum = True  # as in every Keras, and no other optimizer runs on rows
    else:
        name, specs = step.spec.name, step.states
        own = hasattr(optimizer, "sok_step")
        settings = step.spec.keras_settings() if own else hyperparameters.settings(optimizer)
        in_momentum = bool(step.spec.flags & Flags.LEARNING_RATE_IN_MOMENTUM)
    plain = {key: _plain(value) for key, value in settings.items()}
    if name in _MOMENTUM and any(spec.name == "momentum" for spec in specs):
        plain[LEARNING_RATE_IN_MOMENTUM] = in_momentum
    return name, specs, plain


def _plain(value: Any) -> Any:
    if tf.is_tensor(value):
        value = value.numpy() if tf.executing_eagerly() else tf.compat.v1.get_default_session().run(value)
    return value.item() if isinstance(value, (np.generic, np.ndarray)) else value
