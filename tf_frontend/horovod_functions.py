# SPDX-License-Identifier: Apache-2.0
"""Horovod's own functions on tables. They take what the ranks have of a table for copies of one variable, and would mix
the rows of different keys; so tables and their gradients refuse them.
"""

from __future__ import annotations

import sys
from types import FrameType

from sparse_operation_kit.tensorflow.engine import horovod

_REDUCERS = ("allreduce", "aggregation")
_BROADCASTERS = ("broadcast_",)


def refuse_reduction(table: str, num_ranks: int) -> None:
    """Raises TypeError where Horovod is about to reduce a gradient of this table, which `num_ranks` ranks share."""
    if _is_refused(_REDUCERS, num_ranks):
        raise _error(
            table,
            "DistributedGradientTape, DistributedOptimizer and allreduce would add the gradients of different rows",
            "sok.DistributedGradientTape or sok.DistributedOptimizer, which leave",
        )


def refuse_broadcast(table: str, num_ranks: int) -> None:
    """Raises TypeError where Horovod is about to write one rank's rows of this table over those of the others."""
    if _is_refused(_BROADCASTERS, num_ranks):
        does = "broadcast would write one rank's over those of all"
        raise _error(table, does, "sok.broadcast_variables, which leaves")


def _error(table: str, does: str, instead: str) -> TypeError:
    return TypeError(
        f"table '{table}': each rank has other rows of it, and Horovod's {does}. Use {instead} tables alone, or give "
        "Horovod the dense variables only: sok.filter_variables(variables) gives both apart"
    )


def is_caller() -> bool:
    """Whether the caller of the function that asks is Horovod's code."""
    return _module(sys._getframe(2)).startswith("horovod.")


def _is_refused(words: tuple[str, ...], num_ranks: int) -> bool:
    """Whether several ranks share the table, and one of Horovod's functions is running whose module and name have one
    of these words.
    """
    if num_ranks == 1 or horovod() is None:
        return False
    # Horovod asks nothing of what it is given but values, as everybody does: who asks is to be seen on the stack alone.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module, name = _module(frame), frame.f_code.co_name
        if module.startswith("tensorflow.python.eager.polymorphic_function") and name == "__call__":
            # In eager mode the function is a tf.function, which reads its arguments before it runs.
            function = getattr(frame.f_locals.get("self"), "python_function", None)
            module, name = getattr(function, "__module__", None) or "", getattr(function, "__name__", "")
        if module.startswith("horovod.") and any(word in f"{module}.{name}" for word in words):
            return True
        frame = frame.f_back
    return False


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
