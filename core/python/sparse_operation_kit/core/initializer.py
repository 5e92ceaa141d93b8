# SPDX-License-Identifier: Apache-2.0
"""Initial rows: a pure function of (seed, key, column), the same for every world size, frontend and device."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import numpy.typing as npt

from sparse_operation_kit.core import _abi, _arrays, _library
from sparse_operation_kit.core._arrays import Array
from sparse_operation_kit.core.context import Context, empty, pointer

KINDS = {
    "constant": _abi.CONSTANT,
    "uniform": _abi.UNIFORM,
    "normal": _abi.NORMAL,
    "truncated_normal": _abi.TRUNCATED_NORMAL,
}


@dataclasses.dataclass(frozen=True)
class Initializer:
    """kind "constant": a; "uniform": in [a, b); "normal": mean a, standard deviation b; "truncated_normal": the same,
    redrawn beyond two standard deviations. seed: in [0, 2^64)."""

    kind: str = "constant"
    a: float = 0.0
    b: float = 0.0
    seed: int = 0

    def struct(self) -> _abi.Initializer:
        """The sok_initializer."""
        if self.kind not in KINDS:
            raise ValueError(f"initializer kind {self.kind!r}: expected one of {', '.join(KINDS)}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed {self.seed}: expected a number in [0, 2^64)")
        return _abi.Initializer(ctypes.sizeof(_abi.Initializer), KINDS[self.kind], 0, self.seed, self.a, self.b)


def initialize(
    initializer: Initializer,
    num_rows: int,
    dimension: int,
    *,
    keys: npt.ArrayLike | None = None,
    first_key: int = 0,
    key_stride: int = 1,
    dtype: npt.DTypeLike = np.float32,
    out: Array | None = None,
    context: Context | None = None,
) -> Array:
    """The initial rows of some keys: [num_rows, dimension] `dtype`.

    Args:
      keys: [num_rows] int64; None: row i has key first_key + i * key_stride.
      dtype: float32, or float16 or `core.BFLOAT16`: the float32 values rounded to nearest.
      out: an array to fill in place of a new one.
    """
    rows = empty(context, (num_rows, dimension), dtype) if out is None else _arrays.written(out, "out")
    key_array = _arrays.read(keys, "keys")
    struct = initializer.struct()
    _library.check(
        _abi.library().sok_initialize(
            pointer(context), ctypes.byref(struct), _arrays.view(key_array), first_key, key_stride, _arrays.view(rows)
        )
    )
    return rows
