# SPDX-License-Identifier: Apache-2.0
"""What the checks of stacks on several ranks look up, in NumPy: the same for both frontends."""

import numpy as np

ROWS = {"first": 7, "one": 1, "large": 40, "last": 12}
DIMENSION = 4
MODES = ("distributed", "localized:LAST")
COMBINERS = ("sum", "mean", "sqrtn")


def modes(num_ranks):
    return tuple(mode.replace("LAST", str(num_ranks - 1)) for mode in MODES)


def batch(rank, step):
    """({member: its keys}, {member: its lengths}) of a rank's batch; ranks have batches of different sizes."""
    random = np.random.default_rng((rank, step))
    lengths = {name: random.integers(0, 4, 3 + rank % 2) for name in ROWS}
    return {name: random.integers(0, rows, lengths[name].sum()) for name, rows in ROWS.items()}, lengths


def splits(lengths):
    return np.r_[0, np.cumsum(lengths)]


def flat(keys, lengths):
    """(values, row splits) of all members."""
    return np.concatenate(list(keys.values())), splits(np.concatenate(list(lengths.values())))


def loss_weights(rank, step, shape):
    return np.random.default_rng((7, rank, step)).standard_normal(shape).astype(np.float32)
