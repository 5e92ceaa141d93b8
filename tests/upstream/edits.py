# SPDX-License-Identifier: Apache-2.0
"""Edits that several suites share, by the names of what they are for."""

from run import Edit


def of(path, *changes):
    """(path, Edit) pairs of one file."""
    return tuple((path, change) for change in changes)


GRAPHS = Edit(
    r"^import tensorflow as tf$",
    "import tensorflow.compat.v1 as tf\n\ntf.disable_v2_behavior()",
    "TensorFlow 1.15 is a module of TensorFlow 2",
)
NUMPY_2 = Edit(r"\bnewshape=", "shape=", "NumPy 2.4 has no newshape")
NO_REDUCTION = Edit(r"tf\.keras\.losses\.Reduction\.NONE", '"none"', "Keras 3 has no names for reductions")
HOROVODRUN = Edit(r"OMPI_COMM_WORLD_(RANK|SIZE)", r"HOROVOD_\1", "horovodrun in place of mpiexec")
