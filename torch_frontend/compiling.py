# SPDX-License-Identifier: Apache-2.0
"""What differs between PyTorch's versions in torch.compile and torch.export."""

from __future__ import annotations

import torch

# Before, torch.compile takes torch.compiler.is_exporting() for true, and cannot be told from torch.export(strict=True).
_TELLS_EXPORTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def is_exporting() -> bool:
    """Whether torch.export runs the caller; before PyTorch 2.13 only the export that is not strict, its default."""
    return torch.compiler.is_exporting() and (_TELLS_EXPORTS or not torch.compiler.is_dynamo_compiling())
