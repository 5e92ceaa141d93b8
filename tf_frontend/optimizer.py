# SPDX-License-Identifier: Apache-2.0
"""OptimizerWrapper, which updates tables and dense variables together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable import base as trackable

from sparse_operation_kit.optimizers import NotFused
from sparse_operation_kit.tensorflow import (
    devices,
    hyperparameters,
    keras_compat,
    keras_optimizers,
    row_optimizer,
    step_count,
    table_step,
)
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.agreement import Agreement
from sparse_operation_kit.tensorflow.table_io import filter_variables
from sparse_operation_kit.tensorflow.table_stack import tables_or_stacks
from sparse_operation_kit.tensorflow.table_variable import TableVariable, as_table, is_table

_known: weakref.WeakValueDictionary[int, TableOptimizer] = weakref.WeakValueDictionary()
"""By id of the optimizer, which lives as long as what was made for it."""


class TableOptimizer(trackable.Trackable):  # type: ignore[misc]
    """The part of an optimizer that concerns tables; OptimizerWrapper and DistributedOptimizer share it."""

    def __init__(self, optimizer: Any, apart: bool = False) -> None:
        """apart: steps of tables alone are counted here. Otherwise the optimizer's own count is advanced."""
        self.optimizer = optimizer
        self._apart = apart and not hasattr(optimizer, "sok_step")
        _known[id(optimizer)] = self
        self.states = table_step.TableStates()
        self._track_trackable(self.states, "states")
        self.counter: Any = None
        """`own_counter`, where anybody has asked."""
        self.rows: row_optimizer.RowOptimizer | None = None

    @staticmethod
    def of(optimizer: Any) -> TableOptimizer | None:
        """What was made for this optimizer, last; None where nothing was."""
        return _known.get(id(optimizer))

    def state_names(self) -> list[str]:
        """What states a table has."""
        with tf.device(devices.HOST):
            try:
                return [spec.name for spec in hyperparameters.read(self.optimizer, self.iterations).states]
            except NotFused as reason:
                return [spec.name for spec in self.on_rows(reason).prepare([])]

    def iterations(self) -> Any:
        """The variable that counts the steps of tables: one kept here where tables have stepped alone or the optimizer
        has none, else the optimizer's.
        """
        self._take_restored()
        if self.counter is not None:
            return self.counter
        counter = keras_compat.iterations(self.optimizer)
        return self.own_counter() if counter is None else counter

    def _take_restored(self) -> None:
        """Makes the count that a checkpoint has which was read before the first step, so that it is taken."""
        if self.counter is None and "iterations" in self._deferred_dependencies:
            self.own_counter()

    def _trackable_children(self, *args: Any, **options: Any) -> Any:
        self._take_restored()
        return super()._trackable_children(*args, **options)

    def resume(self, iterations: Any) -> list[Any]:
        """Takes a number of steps over, wherever it is counted. Returns the results of the assignments."""
        counters = [self.counter, keras_compat.raw(keras_compat.iterations(self.optimizer))]
        return [each.assign(tf.cast(iterations, each.dtype)) for each in counters if each is not None]

    def own_counter(self) -> Any:
        """The variable that counts the steps of tables apart from the optimizer's, made when first asked for."""
        if self.counter is None:
            with tf.init_scope(), tf.device(devices.HOST):
                counter = keras_compat.raw(keras_compat.iterations(self.optimizer))
                first = 0 if counter is None or not tf.executing_eagerly() else int(tf.convert_to_tensor(counter))
                self.counter = tf.Variable(first, trainable=False, dtype=tf.int64, name="sok_iterations")
                self._track_trackable(self.counter, "iterations")
        return self.counter

    def _counter_of(self, with_dense: bool) -> tuple[Any, bool]:
        """What counts a step, and whether the optimizer advances it when it is given the dense gradients."""
        counter = keras_compat.iterations(self.optimizer)
        if counter is None or (self._apart and not with_dense):
            return self.own_counter(), False
        return counter, with_dense

    def on_rows(self, reason: object) -> row_optimizer.RowOptimizer:
        """What runs the optimizer on rows where the core has no fused form of it.

        Raises NotImplementedError for an optimizer that cannot be run so.
        """
        if self.rows is None:
            self.rows = row_optimizer.RowOptimizer(self.optimizer, str(reason), self.states)
            self._track_trackable(self.rows, "rows")
        return self.rows

    def build(self, tables: Iterable[Any]) -> None:
        """Makes the states of tables that have made no step yet.

        Raises NotImplementedError for an optimizer that cannot update tables.
        """
        found = [as_table(table) for table in tables_or_stacks(tables)]
        try:
            with tf.init_scope(), tf.device(devices.HOST):
                step = hyperparameters.read(self.optimizer, self.iterations)
        except NotFused as reason:
            self.on_rows(reason).prepare(found)
            return
        for table in found:
            self.states.get(table, step.spec.name, step.states)

    def apply(self, pairs: list[tuple[Any, TableVariable]], counter: Any = None) -> Any:
        """Updates the tables, before `counter`, of `iterations` unless given, counts this step. Returns the operation
        (None in eager mode).

        Raises ValueError for a dense gradient of another shape than its table's, NotImplementedError for a table with a
        constraint.
        """
        agreement = Agreement([table for _, table in pairs])
        with agreement.told():
            for _, table in pairs:
                _refuse_constraint(table)
            pairs = [(_of_shape(gradient, table), table) for gradient, table in pairs]
            try:
                with tf.device(devices.HOST):  # numbers for the op, not data of the device
                    step = hyperparameters.read(self.optimizer, self.iterations if counter is None else lambda: counter)
            except NotFused as reason:
                rows = self.on_rows(reason)
                with tf.control_dependencies(agreement.reach()):
                    return rows.apply(pairs, self.iterations() if counter is None else counter)
            optimizer = self.optimizer
            return table_step.apply(
                step, pairs, self.states, lambda table: keras_compat.uses_weight_decay(optimizer, table), agreement
            )

    def step(
        self,
        tables: list[tuple[Any, TableVariable]],
        dense: list[tuple[Any, Any]],
        apply_dense: Callable[[list[tuple[Any, Any]]], Any],
        *,
        global_step: Any = None,
        name: str | None = None,
    ) -> Any:
        """One step of tables and dense variables, counted once.

        Args:
          tables, dense: (gradient, variable) pairs.
          apply_dense: the optimizer's own update of the dense pairs.
          global_step: a variable that counts this step too. One of tf.compat.v1.train advances it when it has dense
            pairs.
          name: of the operation.

        Returns:
          In a tf.compat.v1 graph the operation to run; else the step count.
        """
        if tables and dense and getattr(self.optimizer, "global_clipnorm", None):
            raise NotImplementedError(
                f"tables and dense variables cannot be updated together by {type(self.optimizer).__name__} with "
                "global_clipnorm: their norms are computed apart; clip with sok.clip_by_global_norm before "
                "apply_gradients, or use clipnorm or clipvalue"
            )
        graph_mode = not tf.executing_eagerly() and not tf.inside_function()
        counter, counts_itself = self._counter_of(bool(dense))
        operations: list[Any] = []
        with step_count.followed(counter):
            if tables:
                operations.append(self.apply(tables, counter))
            if dense:
                keras_compat.build(self.optimizer, [variable for _, variable in dense])
            # Tables first: they read the count of this step, which the optimizer advances with the dense variables.
            with tf.control_dependencies([op for op in operations if op is not None] if graph_mode else []):
                if dense:
                    operations.append(apply_dense(dense))
                else:
                    keras_compat.compute_rate(self.optimizer)
                if not counts_itself:
                    operations.append(counter.assign_add(1))
                if global_step is not None and not (dense and keras_compat.takes_global_step(self.optimizer)):
                    operations.append(global_step.assign_add(1))
        if graph_mode:
            return tf.group(*[op for op in operations if op is not None], name=name)
        return counter


def _refuse_constraint(table: TableVariable) -> None:
    if table.constraint is not None:
        raise NotImplementedError(
            f"table '{table.table_name}' has a constraint, which steps of this package do not apply: make the table "
            "without, and assign what the constraint gives after a step, or let an optimizer of Keras step it by itself"
        )


def _of_shape(gradient: Any, table: TableVariable) -> Any:
    """The gradient; a dense one has a row for each of the table's."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    dense, wanted = tf.convert_to_tensor(gradient), table.shape.as_list()
    if not dense.shape.is_compatible_with(wanted):
        raise ValueError(f"the gradient of table '{table.table_name}' has shape {dense.shape}, must have {wanted}")
    return tf.ensure_shape(dense, wanted)


class KeepsStates(trackable.Trackable):  # type: ignore[misc]
    """An optimizer of this package, which has states of tables in `_tables`.

    Of a Keras in use it is an optimizer too, which `compile` takes and Keras saves: see keras_optimizers.
    """

    _tables: TableOptimizer

    def build(self, vars: Iterable[Any]) -> None:
        """Makes the states of tables and of dense variables before their first step, for example to restore them.

        Raises NotImplementedError for an optimizer that cannot update tables.
        """
        tables, dense = filter_variables(tables_or_stacks(vars))
        self._build_dense(dense)
        self._tables.build(tables)

    def _build_dense(self, variables: Sequence[Any]) -> None:
        """Makes the states of dense variables."""
        raise NotImplementedError

    def slots(self, var: Any) -> Mapping[str, Any]:
        """The optimizer states of a table by name ("m", "v", "accumulator", ...), of the shard's shape; copies where
        it is a member of a stack.
        """
        return self._tables.states.of(var)

    def get_slot_names(self) -> list[str]:
        """The names of what is kept for each table: "m", "v", "accumulator", ...."""
        return self._tables.state_names()

    def get_slot(self, var: Any, name: str) -> Any:
        """The state of that name of a table; None where no step has made it yet."""
        return self.slots(var).get(name)

    def __dir__(self) -> list[str]:
        # tf.train.Checkpoint looks here for get_slot_names, and would save the states as slots a second time.
        return [name for name in super().__dir__() if name != "get_slot_names"]


class OptimizerWrapper(KeepsStates):
    """Updates tables, static and dynamic ones, and with them ordinary dense variables, with one optimizer.

    The rows that a step's gradients name are updated in place by one fused op for all tables, with the wrapped
    optimizer's own formula, hyper-parameters and learning rate schedule, read at each step; other rows and their states
    stay as they are, and weight decay reaches only the rows of the step. Dense variables go to the wrapped optimizer
    itself, unchanged; average their gradients over the ranks first (`sok.DistributedGradientTape`,
    `hvd.DistributedGradientTape`). They may also be given to the wrapped optimizer directly, as scripts of SOK 2.x do:
    steps of tables alone are counted apart, in the `iterations` of the wrapper, and leave those of the wrapped
    optimizer as they are.

    A wrapper of an optimizer of Keras 3 or tf_keras is one itself: it can be given to `compile`, which does not average
    gradients of dense variables either (`sok.DistributedOptimizer(wrapper)` does), and Keras saves it with the model.

    Args:
      optimizer: of Keras 3, tf_keras (new or legacy), tf.compat.v1.train, or `sok.SGD`, `sok.RowWiseAdagrad`,
        `sok.Ftrl`. SGD (momentum, Nesterov), Adagrad, row-wise Adagrad, Adam, AdamW, Adamax, Adadelta, RMSprop and Ftrl
        are fused. Any other one, or one with options the core does not know, runs on the rows of the step through the
        framework.

    Raises:
      TypeError: not an optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        if isinstance(optimizer, OptimizerWrapper):
            optimizer = optimizer.optimizer
        if keras_compat.family(optimizer) is None and not hasattr(optimizer, "sok_step"):
            raise TypeError(
                "OptimizerWrapper wraps optimizers of Keras, tf_keras or tf.compat.v1.train, got "
                f"{type(optimizer).__name__}"
            )
        keras_optimizers.enter(self, keras_compat.kind(optimizer))
        self._optimizer = optimizer
        self._tables = TableOptimizer(optimizer, apart=True)
        self._track_trackable(optimizer, "optimizer")
        self._track_trackable(self._tables, "tables")

    @property
    def optimizer(self) -> Any:
        """The wrapped optimizer."""
        return self._optimizer

    @property
    def iterations(self) -> Any:
        """The variable that counts the steps of tables: the wrapped optimizer's, until tables step alone."""
        return self._tables.iterations()

    @property
    def learning_rate(self) -> Any:
        """The wrapped optimizer's learning rate; may be assigned."""
        return self._optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self._optimizer.learning_rate = value

    lr = learning_rate

    def minimize(self, loss: Any, var_list: Any = None, global_step: Any = None, **options: Any) -> Any:
        """compute_gradients and apply_gradients of a tf.compat.v1 optimizer in one."""
        pairs = self._optimizer.compute_gradients(loss, var_list=var_list, **options)
        return self.apply_gradients(pairs, global_step)

    @property
    def variables(self) -> list[Any]:
        """The variables of the wrapped optimizer, without states of tables."""
        return keras_compat.variables(self._optimizer)

    @property
    def loss_scale_factor(self) -> Any:
        """The wrapped optimizer's."""
        return getattr(self._optimizer, "loss_scale_factor", None)

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        self._optimizer.loss_scale_factor = value

    def finalize_variable_values(self, var_list: Any) -> None:
        """What Keras does after `fit`; of dense variables."""
        self._optimizer.finalize_variable_values(filter_variables(var_list)[1])

    def _build_dense(self, variables: Sequence[Any]) -> None:
        if isinstance(self._optimizer, KeepsStates):
            self._optimizer.build(variables)
        else:
            keras_compat.build(self._optimizer, variables, make_legacy=True)

    def _config(self, kind: str) -> dict[str, Any]:
        return {**self._optimizer.get_config(), _WRAPPED: keras_compat.class_config(kind, type(self._optimizer))}

    @classmethod
    def _made(cls, kind: str, config: dict[str, Any], custom_objects: Any) -> OptimizerWrapper:
        wrapped = {**config.pop(_WRAPPED), "config": config}
        return cls(keras_compat.deserialize(kind, wrapped, custom_objects))

    def __getattr__(self, name: str) -> Any:
        # Other attributes are the wrapped optimizer's: beta_1, compute_gradients, ...
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._optimizer, name)

    @property
    def table_variables(self) -> list[tf.Variable]:
        """The optimizer states of all tables."""
        return self._tables.states.variables()

    def get_slot(self, var: Any, name: str) -> Any:
        """The state of that name of a table or of a dense variable; None where no step has made it yet."""
        return super().get_slot(var, name) if is_table(var) else self._optimizer.get_slot(var, name)

    @as_written
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        """Updates tables and dense variables; one step.

        Args:
          grads_and_vars: (gradient, variable) pairs; pairs without a gradient are skipped.
          global_step: a variable that counts this step too.
          name: of the operation.
          **options: go to the wrapped optimizer with the dense variables.

        Returns:
          In a tf.compat.v1 graph the operation to run; else the step count.
        """
        tables, dense = split_pairs(grads_and_vars)
        if keras_compat.takes_global_step(self._optimizer):
            options["global_step"] = global_step
        return self._tables.step(
            tables,
            dense,
            lambda pairs: self._optimizer.apply_gradients(pairs, **options),
            global_step=global_step,
            name=name,
        )


_WRAPPED = "sok_wrapped"
"""In a config, beside the settings of the wrapped optimizer: its class."""


def split_pairs(pairs: Iterable[tuple[Any, Any]]) -> tuple[list[tuple[Any, TableVariable]], list[tuple[Any, Any]]]:
    """(gradient, table) pairs and the pairs of other variables, without those that have no gradient."""
    tables: list[tuple[Any, TableVariable]] = []
    dense: list[tuple[Any, Any]] = []
    for gradient, variable in pairs:
        if gradient is None:
            continue
        if is_table(variable):
            tables.append((gradient, as_table(variable)))
        else:
            dense.append((gradient, variable))
    return tables, dense
