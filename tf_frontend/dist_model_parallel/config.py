# SPDX-License-Identifier: Apache-2.0
"""Configs of embedding layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KNOWN = ("keras.src.layers.", "tf_keras.src.layers.", "sparse_operation_kit.tensorflow.dist_model_parallel.")


def is_custom(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a class other than the Embedding of a Keras and of this package."""
    kind = config["layer_type"]
    return kind is not None and not (kind.__name__ == "Embedding" and kind.__module__.startswith(_KNOWN))
