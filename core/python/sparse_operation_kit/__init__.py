# SPDX-License-Identifier: Apache-2.0
"""Sharded embedding tables for TensorFlow and PyTorch.

    import sparse_operation_kit.tensorflow as sok     # under Horovod
    import sparse_operation_kit.torch as sok          # under torch.distributed
    import sparse_operation_kit as sok                # TensorFlow, as scripts written for SparseOperationKit do

This package itself is empty: the first use of one of its names loads the TensorFlow frontend and takes the name from
there. Importing it, or the PyTorch frontend, never loads TensorFlow.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from sparse_operation_kit import legacy_paths
from sparse_operation_kit._version import __version__ as __version__

if TYPE_CHECKING:
    from sparse_operation_kit.tensorflow import *  # noqa: F403

_FRONTEND = f"{__name__}.tensorflow"

legacy_paths.install()


def __getattr__(name: str) -> Any:
    if name.startswith("_"):  # asked for by tools that look at modules; no public name
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    try:
        frontend = importlib.import_module(_FRONTEND)
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise ModuleNotFoundError(
            f"`{__name__}.{name}` is a name of the TensorFlow frontend and TensorFlow is not installed. "
            f"For PyTorch: `import {__name__}.torch as sok`. For TensorFlow: `python -m pip install tensorflow` (2.16 "
            "or newer), then build this package again.",
            name="tensorflow",
        ) from error
    try:
        value = getattr(frontend, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}, nor has {_FRONTEND!r}") from None
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    # Listing names does not load the frontend; once it is loaded its public names are listed too.
    frontend = sys.modules.get(_FRONTEND)
    return sorted({*globals(), *(getattr(frontend, "__all__", ()) if frontend else ())})
