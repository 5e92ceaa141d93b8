# SPDX-License-Identifier: Apache-2.0
"""The dense layers beside a dump of the tables: dense.npz, with the step that both are of.

Tables are sok.dump's. Of the dense layers each rank has all, and they are small: arrays by name, for both frameworks
alike. A layer's kernel is [inputs, outputs]; "top.0.kernel.accumulator" is the state of Adagrad that goes with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import DataError

Arrays = dict[str, npt.NDArray[np.float32]]

_STEP = "step"


def tables(folder: Path) -> Path:
    """Where sok.dump writes and sok.load reads."""
    return folder / "tables"


def save(folder: Path, step: int, arrays: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Writes the arrays, in place of those that were there."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / "dense.new.npz"
    contents: dict[str, Any] = {_STEP: np.int64(step), **arrays}
    np.savez(new, **contents)
    os.replace(new, folder / "dense.npz")


def load(folder: Path, step: int | None) -> Arrays:
    """The arrays. DataError unless they are of the step that the tables are of."""
    file = folder / "dense.npz"
    try:
        with np.load(file, allow_pickle=False) as contents:
            arrays = dict(contents)
    except (OSError, ValueError) as error:
        raise DataError(file, f"cannot be read: {error}") from error
    found = arrays.pop(_STEP, None)
    if found is None or int(found) != step:
        raise DataError(file, f"is of step {found}, but the tables beside it are of step {step}")
    return arrays
