# SPDX-License-Identifier: Apache-2.0
"""Keeps AutoGraph from rewriting this package's functions when a tf.function calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import tensorflow as tf

F = TypeVar("F", bound=Callable[..., Any])


def as_written(function: F) -> F:
    """Marks an entry point: it and what it calls run as they are written, in a tf.function too."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))
