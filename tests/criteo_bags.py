# SPDX-License-Identifier: Apache-2.0
"""The bags of a batch, for comparing."""

import itertools


def bags_of(batch):
    """For each column the ids of each row."""
    offsets = batch.ids.offsets().tolist()
    bags = [batch.ids.values()[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    rows = len(batch.labels)
    return [bags[column * rows : (column + 1) * rows] for column in range(len(batch.ids.keys()))]
