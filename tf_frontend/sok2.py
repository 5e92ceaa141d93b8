# SPDX-License-Identifier: Apache-2.0
"""What SOK 2.x's functions are called with beside the names that both frontends have."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import tensorflow as tf

F = TypeVar("F", bound=Callable[..., Any])

tf_version = [int(part) for part in tf.__version__.split("-")[0].split(".")]
"""TensorFlow's version, [major, minor, patch]."""


def keywords(**names: str) -> Callable[[F], F]:
    """A decorator: the function also takes these keywords of SOK 2.x, each for the parameter that is named here."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for theirs, ours in names.items():
                if theirs in options:
                    if ours in options:
                        raise TypeError(f"{function.__name__}() got both {theirs} and {ours}, which are one")
                    options[ours] = options.pop(theirs)
            return function(*args, **options)

        return cast(F, call)

    return decorate


def with_session(function: F) -> F:
    """The function of (vars, time_threshold), which also takes `sess`, the session of a tf.compat.v1 graph, in place of
    a default session.
    """

    @functools.wraps(function)
    def call(vars: Any, time_threshold: Any, sess: Any = None) -> Any:
        with contextlib.nullcontext() if sess is None else sess.as_default():
            return function(vars, time_threshold)

    return cast(F, call)
