# SPDX-License-Identifier: Apache-2.0
"""Stands in for CuPy in SOK 1.x's tests: what they use of it, and the work of their two kernels, in NumPy."""

import contextlib

import numpy as np
from numpy import float32, int64  # noqa: F401  (names of CuPy)


class ndarray(np.ndarray):
    def get(self):
        return np.asarray(self)


def zeros(shape, dtype):
    return np.zeros(shape, dtype).view(ndarray)


def asarray(values):
    return np.asarray(values).view(ndarray)


class cuda:
    @staticmethod
    def Device(number):
        return contextlib.nullcontext()


def RawKernel(source, name):
    """The kernel that draws keys, or the one that puts rows in the order of their keys."""
    work = _sort if "sorted_indexes" in source else _draw
    return lambda blocks, threads, arguments: work(*arguments)


def _draw(keys, count, slots, keys_per_slot, range_of_slot):
    keys[...] = np.random.randint(range_of_slot, size=keys.shape) + np.arange(slots)[:, None] * range_of_slot


def _sort(order, values, out, width, count):
    out.reshape(-1, width)[:] = values.reshape(-1, width)[order]
