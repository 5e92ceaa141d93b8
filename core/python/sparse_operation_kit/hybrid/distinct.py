# SPDX-License-Identifier: Apache-2.0
"""How many different rows some ids name, as they are expected of a power law."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_BINS = 64
_LARGEST_EXPONENT = 4.0


def expected_rows(rows: Array, ids: Array, exponents: Array) -> Array:
    """Different rows among `ids` drawn from tables of `rows`, the k-th most frequent row with weight k ** -exponent.

    All arrays [n]; exponent 0 is uniform.
    """
    rows, ids, exponents = np.broadcast_arrays(*(np.asarray(each, float) for each in (rows, ids, exponents)))
    result = _missed(1 / rows, ids) * rows
    skewed = np.flatnonzero(exponents > 0)
    if len(skewed):  # rows of about the same weight together, more and more of them
        size, power = rows[skewed, None], exponents[skewed, None]
        edges = np.floor((size + 1) ** np.linspace(0, 1, _BINS + 1))
        edges[:, -1:] = size + 1
        heads = np.arange(1, 17)  # each by itself
        edges = np.sort(np.concatenate([edges, np.minimum(heads, size + 1)], 1), 1)
        number = np.diff(edges)
        mass = _antiderivative(edges[:, 1:], power) - _antiderivative(edges[:, :-1], power)
        mass /= mass.sum(1, keepdims=True)
        each = np.divide(mass, number, out=np.zeros_like(mass), where=number > 0)
        result[skewed] = (number * _missed(each, ids[skewed, None])).sum(1)
    return np.minimum(result, np.minimum(ids, rows))


def _missed(chance: Array, ids: Array) -> Array:
    """The chance that a row is among `ids`, when it is one of them with `chance`."""
    return np.asarray(-np.expm1(ids * np.log1p(-np.minimum(chance, 1 - 1e-12))))


def _antiderivative(x: Array, power: Array) -> Array:
    log = np.log(x)
    rest = np.where(power == 1, 1.0, 1 - power)
    return np.where(power == 1, log, np.expm1(rest * log) / rest)


def exponent_of(sample: Array, rows: int) -> float:
    """The exponent of the power law of which a sample of ids would have as many different ones, 0 at least."""
    found = len(np.unique(sample))
    low, high = 0.0, _LARGEST_EXPONENT
    size, ids = np.array([rows]), np.array([np.size(sample)])
    if found >= expected_rows(size, ids, np.array([0.0]))[0]:
        return 0.0
    for _ in range(30):
        middle = (low + high) / 2
        if expected_rows(size, ids, np.array([middle]))[0] > found:
            low = middle
        else:
            high = middle
    return (low + high) / 2
