# SPDX-License-Identifier: Apache-2.0
"""The shape of a sample: slots of as many keys each, a range of keys a slot."""

from __future__ import annotations

from typing import Annotated

from ..dlrm.arrays import ArrayColumn, ArrayLayout
from ..dlrm.options import Option

FEATURE = "feature"

Slots = Annotated[int, Option("slots of a sample", least=1)]
Keys = Annotated[int, Option("keys of each slot", least=1)]
Vocabulary = Annotated[int, Option("different keys, divided evenly among the slots", least=1)]


def check(slots: int, vocabulary: int) -> None:
    """Raises ValueError where a slot would have no key."""
    if vocabulary < slots:
        raise ValueError(f"--vocabulary must be at least --slots, {slots}, not {vocabulary}")


def layout(slots: int, keys: int) -> ArrayLayout:
    """`feature`, list<list<int64>> [slots][keys], and `label`."""
    return ArrayLayout([ArrayColumn(FEATURE, (slots, keys))], has_label=True)
