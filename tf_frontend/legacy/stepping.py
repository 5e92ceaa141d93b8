# SPDX-License-Identifier: Apache-2.0
"""How optimizers of the frameworks, which do not know tables, step them: what OptimizerScope and this package's Adam
share.

Gradients of tables are taken out of what an optimizer is given and go to the fused op; the rest goes on to the
optimizer. Where the optimizer moves rows that the batch did not name (Adam's moments decay, so all rows move at every
step), they move here too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow import communication, keras_compat, plain_optimizer, runtime
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.distributed import states_of
from sparse_operation_kit.tensorflow.gradient import of_every_row
from sparse_operation_kit.tensorflow.keras_compat import replace
from sparse_operation_kit.tensorflow.optimizer import split_pairs
from sparse_operation_kit.tensorflow.table_variable import TableVariable, as_table, is_table

UPDATES = ("all", "touched")

_STAYS = ("Adagrad", "Ftrl", "SGD")
"""Classes of Keras 3 and tf_keras of which a row without gradient stays where it is."""

_MOVES = ("Adam", "AdamOptimizer")
"""Classes of tf_keras.optimizers.legacy and tf.compat.v1.train of which it moves."""

Pair = tuple[Any, Any]


def check_update(update: str) -> str:
    """`update` itself; ValueError unless it is one of UPDATES."""
    if update not in UPDATES:
        raise ValueError(f"update must be one of {', '.join(UPDATES)}, got {update!r}")
    return update


def moves_every_row(optimizer: Any) -> bool:
    """Whether the optimizer's step of an ordinary variable reaches rows that a sparse gradient does not name."""
    name = keras_compat.library_class(optimizer)
    if keras_compat.family(optimizer) in (keras_compat.LEGACY, keras_compat.TF1):
        # Of RMSprop without momentum, tf_keras's mean squares decay in all rows.
        return name in _MOVES or (name == "RMSprop" and getattr(optimizer, "_momentum", None) is False)
    if getattr(optimizer, "weight_decay", None):
        return True
    return name not in _STAYS or bool(getattr(optimizer, "momentum", 0))


@as_written
def step(
    optimizer: Any,
    pairs: Iterable[Pair],
    apply_dense: Callable[[list[Pair]], Any],
    update: Callable[[TableVariable], str],
    options: Mapping[str, Any],
) -> Any:
    """One step of tables and dense variables, counted once.

    Args:
      optimizer: whose.
      pairs: (gradient, variable), as `apply_gradients` takes them.
      apply_dense: the optimizer's own update of the dense ones.
      update: one of UPDATES for a table.
      options: what else the caller gave; `name` and `global_step` count.

    Raises ValueError for a table that a legacy optimizer of tf_keras has stepped, or loaded, as an ordinary variable.
    """
    tables, dense = split_pairs(_given(pairs))
    kept = states_of(optimizer)
    for _, table in tables:
        if not kept.states.of(table) and plain_optimizer.has_slots(optimizer, table):
            raise ValueError(
                f"{type(optimizer).__name__} has states of table '{table.table_name}' from a step or sok.load outside "
                "of OptimizerScope, which its steps within do not use: step and load within the scope alone"
            )
    if moves_every_row(optimizer):
        distinct = {id(table): table for _, table in tables}.values()
        tables += [(of_every_row(table), table) for table in distinct if update(table) == "all"]
    result = kept.step(tables, dense, apply_dense, global_step=options.get("global_step"), name=options.get("name"))
    if keras_compat.family(optimizer) == keras_compat.LEGACY and tf.inside_function():
        return tf.no_op()  # as these do: a LossScaleOptimizer has an operation in its other branch too
    return result


def without_tables(variables: Iterable[Any]) -> list[Any]:
    """What an optimizer of Keras makes states for."""
    return [variable for variable in variables if not is_table(variable)]


# --- loss scaling -----------------------------------------------------------------------------------------------------
#
# A LossScaleOptimizer looks at all gradients, skips the step where one is not finite, and hands them on to its inner
# optimizer. Rows of tables are on one rank each, and so are gradients that a strategy sums in the inner optimizer, and
# the ranks have to skip the same steps. So it is given a number in place of a table's gradient, 1, or NaN where any
# gradient is not finite on some rank. Keras 3 divides it by the scale, so that it comes to the inner optimizer as what
# the gradient is to be multiplied with. tf_keras, of which the caller divides, may sum it over a strategy's workers.

_kept: dict[int, tuple[list[Any], bool]] = {}
"""id of a table -> (its gradients, whether they are to be multiplied), while a LossScaleOptimizer has their stand-in.
Of all threads: strategies start some for what they run.
"""


def scale_losses(is_open: Callable[[Any], bool]) -> None:
    """Makes the LossScaleOptimizers of the Kerases that are loaded hand tables on to their inner optimizers.

    is_open: whether a variable is a table that any optimizer takes out; one with `sok_takes_tables` takes out all.
    """

    def takes(inner: Any, variable: Any) -> bool:
        return is_open(variable) or (is_table(variable) and hasattr(inner, "sok_takes_tables"))

    def pairwise(apply_gradients: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(self: Any, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
            run = functools.partial(apply_gradients, self)
            return _carried(self, grads_and_vars, takes, lambda pairs: run(pairs, *args, **options), divides=False)

        return replaced

    def listed(apply: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if trainable_variables is None:
                return apply(self, grads)
            pairs = zip(grads, trainable_variables, strict=True)
            run = functools.partial(apply, self)
            return _carried(self, pairs, takes, lambda rest: run(*map(list, zip(*rest, strict=True))), divides=True)

        return replaced

    def build(method: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(self: Any, variables: Any) -> Any:
            return method(self, [v for v in variables if not takes(self.inner_optimizer, v)])

        return replaced

    def build_late(method: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(self: Any, variables: Any) -> Any:
            # The inner optimizer knows the variables of its first call alone, and one of tables alone is not that.
            rest = [v for v in variables if not takes(self.inner_optimizer, v)]
            return method(self, rest) if rest else None

        return replaced

    where = "tf_keras.src.mixed_precision.loss_scale_optimizer"
    for name in ("LossScaleOptimizer", "LossScaleOptimizerV3"):
        replace(where, name, "apply_gradients", pairwise)
    replace(where, "LossScaleOptimizerV3", "build", build_late)
    where = "keras.src.optimizers.loss_scale_optimizer"
    replace(where, "LossScaleOptimizer", "apply", listed)
    replace(where, "LossScaleOptimizer", "build", build)


def _carried(
    scaler: Any,
    pairs: Iterable[Pair],
    takes: Callable[[Any, Any], bool],
    run: Callable[[list[Pair]], Any],
    divides: bool,
) -> Any:
    """run(pairs) with a stand-in for the gradients of each table that the inner optimizer takes out.

    divides: whether the scaler divides gradients by the scale.
    """
    gradients: dict[int, list[Any]] = {}
    variables: dict[int, Any] = {}
    others: list[Pair] = []
    for gradient, variable in pairs:
        if gradient is None or not takes(scaler.inner_optimizer, variable):
            others.append((gradient, variable))
            continue
        key = id(as_table(variable))
        gradients.setdefault(key, []).append(gradient)
        variables[key] = variable
    if not gradients:
        return run(others)
    of_others = [gradient for gradient, _ in others if gradient is not None]
    stand_in = _stand_in([*(gradient for of_table in gradients.values() for gradient in of_table), *of_others])
    _kept.update({key: (of_table, divides) for key, of_table in gradients.items()})
    try:
        return run([*((stand_in, variable) for variable in variables.values()), *others])
    finally:
        for key in gradients:
            _kept.pop(key, None)


def _stand_in(gradients: Sequence[Any]) -> tf.Tensor:
    """1 where all gradients are finite on all ranks, else NaN."""
    parts = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in gradients]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(part)) for part in parts])
    if runtime.num_ranks() > 1:
        finite = communication.allreduce(tf.cast(finite, tf.float32), "min", name="sok_finite") > 0
    return tf.where(finite, 1.0, float("nan"))


def _given(pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs with the gradients that stand-ins are for."""
    result: list[Pair] = []
    for gradient, variable in pairs:
        kept = _kept.get(id(as_table(variable))) if is_table(variable) else None
        if kept is None:
            result.append((gradient, variable))
        else:
            gradients, divided = kept
            result += [(_multiplied(each, gradient) if divided else each, variable) for each in gradients]
    return result


def _multiplied(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
