# SPDX-License-Identifier: Apache-2.0
"""Initial rows: what an initializer of a framework is to the core, and the op that draws rows."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit import placement as _placement
from sparse_operation_kit.placement import ANY_KEY, Initializer, Placement
from sparse_operation_kit.tensorflow import devices
from sparse_operation_kit.tensorflow._ops import ops


def initialize(spec: Initializer, place: Placement, seed: int, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """[local rows, dimension]: this rank's rows as `spec` draws them, in float32, rounded to `dtype`."""
    return initialize_rows(spec, place.first_key, place.local_rows, place.dimension, seed, dtype, place.key_stride)


def initialize_rows(
    spec: Initializer, first_key: int, number: int, dimension: int, seed: int, dtype: tf.DType, key_stride: int = 1
) -> tf.Tensor:
    """[number, dimension]: the first columns of the rows of keys first_key, first_key + key_stride, ..."""
    return ops.sok_initialize(
        num_rows=number,
        dimension=dimension,
        first_key=first_key,
        key_stride=key_stride,
        dtype=dtype,
        **arguments(spec, seed),
    )


def arguments(spec: Initializer, seed: int) -> dict[str, Any]:
    """`spec` and the seed of a table, as the ops take them."""
    # In a tf.compat.v1 graph everything here is tied to the variable's device.
    with tf.device(devices.HOST) if tf.executing_eagerly() else contextlib.nullcontext():
        parameters = tf.constant([spec.a, spec.b], tf.float64)
    return {"parameters": parameters, "kind": spec.kind, "seed": _placement.as_signed(seed)}


def as_spec(initializer: Any, place: Placement) -> Initializer | None:
    """The core's form of a name, a number or a framework's initializer object; None when it has none."""
    if isinstance(initializer, Mapping):  # DynamicVariable.config
        initializer = Initializer(**initializer)
    if isinstance(initializer, Initializer):
        return initializer
    if isinstance(initializer, type):
        initializer = initializer()
    if isinstance(initializer, (str, int, float)):
        return _placement.parse_initializer(initializer, place.num_rows, place.dimension)
    if not callable(initializer):
        raise TypeError(f"initializer must be a name, a number or an initializer object, got {initializer!r}")
    if not hasattr(initializer, "get_config"):
        return None
    config = initializer.get_config()
    kind = type(initializer).__name__.removesuffix("V2").removesuffix("Initializer")
    if kind in (
        "VarianceScaling",
        "GlorotUniform",
        "GlorotNormal",
        "HeUniform",
        "HeNormal",
        "LecunUniform",
        "LecunNormal",
    ):
        return _variance_scaling(initializer, config, place)
    seed = config.get("seed")
    own_seed = seed if isinstance(seed, int) else None
    if kind == "Zeros":
        return Initializer(_placement.CONSTANT, 0.0)
    if kind == "Ones":
        return Initializer(_placement.CONSTANT, 1.0)
    if kind == "Constant" and np.ndim(config["value"]) == 0 and not isinstance(config["value"], dict):
        return Initializer(_placement.CONSTANT, float(config["value"]))
    if kind in ("RandomUniform", "UniformUnitScaling") and "minval" in config and config["maxval"] is not None:
        return Initializer(_placement.UNIFORM, float(config["minval"]), float(config["maxval"]), own_seed)
    if kind in ("RandomNormal", "TruncatedNormal"):
        drawn = _placement.NORMAL if kind == "RandomNormal" else _placement.TRUNCATED_NORMAL
        return Initializer(drawn, float(config["mean"]), float(config["stddev"]), own_seed)
    return None


def _variance_scaling(initializer: Any, config: dict[str, Any], place: Placement) -> Initializer | None:
    scale, mode, distribution = (getattr(initializer, name, None) for name in ("scale", "mode", "distribution"))
    if scale is None or mode is None or distribution is None:
        return None
    if place.num_rows == ANY_KEY and mode != "fan_out":
        return None
    fans = {
        "fan_in": place.num_rows,
        "fan_out": place.dimension,
        "fan_avg": (place.num_rows + place.dimension) / 2,
    }
    variance = float(scale) / max(1.0, fans[mode])
    seed = config.get("seed")
    own_seed = seed if isinstance(seed, int) else None
    if distribution == "uniform":
        limit = (3.0 * variance) ** 0.5
        return Initializer(_placement.UNIFORM, -limit, limit, own_seed)
    if distribution == "untruncated_normal":
        return Initializer(_placement.NORMAL, 0.0, variance**0.5, own_seed)
    # 0.8796...: the standard deviation of a normal distribution cut at two standard deviations.
    return Initializer(_placement.TRUNCATED_NORMAL, 0.0, variance**0.5 / 0.87962566103423978, own_seed)
