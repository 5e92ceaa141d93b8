# SPDX-License-Identifier: Apache-2.0
"""init() for scripts that do not call it, as those of distributed-embeddings."""

from __future__ import annotations

import importlib.util

from sparse_operation_kit.tensorflow import runtime


def ensure_initialised() -> None:
    """Calls hvd.init(), where Horovod is installed, and sok.init() with its defaults, each where nobody has."""
    if runtime.session.state is not None:
        return
    if runtime.horovod() is None and importlib.util.find_spec("horovod") is not None:
        import horovod.tensorflow as hvd

        hvd.init()
    runtime.init()
