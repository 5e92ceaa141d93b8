# SPDX-License-Identifier: Apache-2.0
"""Where a rank pools bags: for the checks of both frontends' workers."""

import contextlib
import os


@contextlib.contextmanager
def pooling(choice):
    """SOK_POOLING of this rank for what runs meanwhile."""
    before = os.environ.get("SOK_POOLING")
    os.environ["SOK_POOLING"] = choice
    try:
        yield
    finally:
        if before is None:
            del os.environ["SOK_POOLING"]
        else:
            os.environ["SOK_POOLING"] = before
