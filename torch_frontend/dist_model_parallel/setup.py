# SPDX-License-Identifier: Apache-2.0
"""init() for programs that do not call it."""

from __future__ import annotations

from sparse_operation_kit.torch import runtime


def ensure_initialised() -> None:
    """Calls sok.init() with its defaults where nobody has; torch.distributed is used if it was started."""
    if runtime.session.state is None:
        runtime.init()
