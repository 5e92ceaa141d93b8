# SPDX-License-Identifier: Apache-2.0
"""init() for scripts that do not call it, as those of distributed-embeddings."""

from __future__ import annotations

import importlib.util

from sparse_operation_kit.tensorflow import collectives, runtime
from sparse_operation_kit.tensorflow.engine import horovod


def ensure_initialised() -> None:
    """Calls hvd.init(), where Horovod is installed and no strategy connects workers, and sok.init() with its defaults,
    each where nobody has.
    """
    if runtime.session.state is not None:
        return
    if collectives.place()[1] == 1 and horovod() is None and importlib.util.find_spec("horovod") is not None:
        import horovod.tensorflow as hvd

        hvd.init()
    runtime.init(use_legacy_optimizer=False)  # scripts of distributed-embeddings name both kinds
