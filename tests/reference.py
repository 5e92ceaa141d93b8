# SPDX-License-Identifier: Apache-2.0
"""What every stage means, in float64 NumPy: slow, obvious, and independent of the core's code.

All suites measure against these functions. They take and return float64 (inputs of other dtypes are widened), loop over
bags, and know nothing of threads, blocks or instruction sets.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

SUM, MEAN, SQRTN = "sum", "mean", "sqrtn"
COMBINERS = (SUM, MEAN, SQRTN)


def assert_close(actual, expected, tolerance=1e-6, magnitude=None, message=""):
    """||actual - expected|| <= tolerance * max(||expected||, ||magnitude||), norms over the whole array.

    `magnitude` is the size of the terms that were added up, for results in which terms may cancel (see `absolute`).
    """
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{message} shape {actual.shape}, expected {expected.shape}"
    assert np.isfinite(actual).all(), f"{message} holds values that are not finite"
    size = float(np.linalg.norm(expected))
    if magnitude is not None:
        size = max(size, float(np.linalg.norm(np.asarray(magnitude, np.float64))))
    error = float(np.linalg.norm(actual - expected))
    assert error <= tolerance * size, (
        f"{message} error {error:.3e} of {size:.3e}: {error / max(size, 1e-300):.2e} relative"
    )


# --- rows of 16 bits a number ---------------------------------------------------------------------------------------

BFLOAT16 = np.dtype("V2")
"""NumPy has no bfloat16: its bits, as the core's binding takes them."""

HALVES = (np.dtype(np.float16), BFLOAT16)
"""The dtypes of rows that are stored rounded."""


def rounded(values, dtype):
    """float32 numbers as the nearest of `dtype`, ties to even; too large ones become infinities, NaN stays NaN."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype != BFLOAT16:
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(dtype)
    bits = values.view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, nearest).astype(np.uint16).view(BFLOAT16)


def widened(array):
    """The numbers of an array of any of these dtypes, as float32."""
    if array.dtype != BFLOAT16:
        return array.astype(np.float32)
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def spacing(values, dtype):
    """The distance between neighbouring numbers of `dtype` around each of the float64 `values`."""
    digits, smallest = (7, -133) if dtype == BFLOAT16 else (10, -24)
    _, exponent = np.frexp(values)
    return np.ldexp(1.0, np.maximum(exponent - 1 - digits, smallest))


# --- bags -----------------------------------------------------------------------------------------------------------


def bag_splits(keys, row_splits):
    """Row splits as given, or one bag a key where there are none."""
    return np.arange(len(keys) + 1) if row_splits is None else np.asarray(row_splits)


def entry_weights(keys, weights):
    return np.ones(len(keys)) if weights is None else np.asarray(weights, np.float64)


def divisor(combiner, weights):
    """What a bag's weighted sum is divided by; 0 means that the bag gives zeros."""
    if len(weights) == 0:
        return 0.0
    return {SUM: 1.0, MEAN: math.fsum(weights), SQRTN: math.sqrt(math.fsum(weights**2))}[combiner]


def scales(keys, row_splits, weights, combiner):
    """[n]: the factor that each entry's row has in its bag's output."""
    splits = bag_splits(keys, row_splits)
    weights = entry_weights(keys, weights)
    result = np.zeros(len(keys))
    for begin, end in itertools.pairwise(splits):
        d = divisor(combiner, weights[begin:end])
        if d != 0:
            result[begin:end] = weights[begin:end] / d
    return result


def bags_from_coordinates(rows, num_bags):
    """(row_splits, order, sorted) of entries that name their bag by number."""
    rows = np.asarray(rows)
    order = np.argsort(rows, kind="stable")
    splits = np.array([np.sum(rows < bag) for bag in range(num_bags + 1)], np.int64)
    return splits, order, bool(np.all(rows[1:] >= rows[:-1]))


# --- one lookup, forward and backward -------------------------------------------------------------------------------


def pool(table, keys, row_splits=None, weights=None, combiner=SUM, absolute=False):
    """[bags, dimension]: the pooled rows. absolute=True adds up the terms' absolute values instead."""
    table = np.asarray(table, np.float64)
    splits = bag_splits(keys, row_splits)
    factors = scales(keys, row_splits, weights, combiner)
    if absolute:
        table, factors = abs(table), abs(factors)
    result = np.zeros((len(splits) - 1, table.shape[1]))
    for bag, (begin, end) in enumerate(itertools.pairwise(splits)):
        for entry in range(begin, end):
            result[bag] += factors[entry] * table[keys[entry]]
    return result


def row_gradient(output_gradient, num_rows, keys, row_splits=None, weights=None, combiner=SUM, absolute=False):
    """[num_rows, dimension]: d loss / d table of `pool`, duplicates summed, zeros where no key points."""
    output_gradient = np.asarray(output_gradient, np.float64)
    splits = bag_splits(keys, row_splits)
    factors = scales(keys, row_splits, weights, combiner)
    if absolute:
        output_gradient, factors = abs(output_gradient), abs(factors)
    result = np.zeros((num_rows, output_gradient.shape[1]))
    for bag, (begin, end) in enumerate(itertools.pairwise(splits)):
        for entry in range(begin, end):
            result[keys[entry]] += factors[entry] * output_gradient[bag]
    return result


def weight_gradient(table, output_gradient, keys, row_splits, weights, combiner, absolute=False):
    """[n]: d loss / d weights of `pool`, by the quotient rule. absolute=True adds the terms' absolute values."""
    table = np.asarray(table, np.float64)
    output_gradient = np.asarray(output_gradient, np.float64)
    splits = bag_splits(keys, row_splits)
    weights = entry_weights(keys, weights)
    result = np.zeros(len(keys))
    for bag, (begin, end) in enumerate(itertools.pairwise(splits)):
        w = weights[begin:end]
        rows, g = table[keys[begin:end]], output_gradient[bag]
        d, sign = rows @ g, -1.0
        if absolute:
            d, sign = abs(rows) @ abs(g), 1.0
        size = abs(w) if absolute else w
        s = divisor(combiner, w)
        if s == 0:
            continue
        if combiner == SUM:
            result[begin:end] = d
        elif combiner == MEAN:
            s = abs(s) if absolute else s
            result[begin:end] = (d + sign * (size @ d) / s) / s
        else:
            result[begin:end] = (d + sign * size * (size @ d) / s**2) / s
    return result


# --- placement and routing ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the rows of a static table lie: owner -1 spreads them over the ranks, owner g keeps them all on rank g."""

    num_rows: int
    dimension: int
    owner: int = -1
    num_ranks: int = 1

    def rank_of(self, key):
        return int(key) % self.num_ranks if self.owner < 0 else self.owner

    def slot_of(self, key):
        return int(key) // self.num_ranks if self.owner < 0 else int(key)

    def keys_of(self, rank):
        """The keys of `rank`, by slot."""
        return np.array([k for k in range(self.num_rows) if self.rank_of(k) == rank], np.int64)


@dataclasses.dataclass(frozen=True)
class Routing:
    """As sok_routing, without the unused ends of its arrays; `groups[u]` is the set of entries of unique key u."""

    keys: np.ndarray
    counts: np.ndarray
    inverse: np.ndarray
    groups: list[set[int]]


def route(placements, lookups):
    """lookups: (table, keys) pairs. Unique keys by owning rank, then table, then ascending."""
    num_ranks = placements[0].num_ranks
    entries = [(table, int(key)) for table, keys in lookups for key in keys]
    counts = np.zeros((num_ranks, len(placements)), np.int64)
    keys, offset, offset_of, groups = [], 0, {}, []
    for rank in range(num_ranks):
        for table, placement in enumerate(placements):
            mine = sorted({key for t, key in entries if t == table and placement.rank_of(key) == rank})
            counts[rank, table] = len(mine)
            for key in mine:
                offset_of[table, key] = offset
                offset += placement.dimension
                keys.append(key)
                groups.append({i for i, entry in enumerate(entries) if entry == (table, key)})
    inverse = np.array([offset_of[entry] for entry in entries], np.int64)
    return Routing(np.array(keys, np.int64), counts, inverse, groups)


# --- optimizers -----------------------------------------------------------------------------------------------------

KINDS = ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "adamax", "adadelta", "rmsprop", "ftrl")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """One fused optimizer's settings, as sok_optimizer names them; flags are booleans."""

    kind: str
    learning_rate: float = 0.1
    learning_rate_of_decay: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    rho: float = 0.9
    epsilon: float = 1e-7
    l1: float = 0.0
    l2: float = 0.0
    l2_shrinkage: float = 0.0
    beta: float = 0.0
    learning_rate_power: float = -0.5
    nesterov: bool = False
    epsilon_inside: bool = False
    learning_rate_in_momentum: bool = False
    centered: bool = False
    decoupled_weight_decay: bool = False

    def state_names(self):
        """Names of the states in the order in which `step` takes them."""
        if self.kind == "rmsprop":
            return ("rms", *(["mg"] if self.centered else []), *(["momentum"] if self.momentum else []))
        return {
            "sgd": (),
            "momentum": ("momentum",),
            "adagrad": ("accumulator",),
            "rowwise_adagrad": ("accumulator",),
            "adam": ("m", "v"),
            "adamax": ("m", "v"),
            "adadelta": ("accum_grad", "accum_var"),
            "ftrl": ("accumulator", "linear"),
        }[self.kind]

    def initial_states(self, num_rows, dimension, initial_accumulator=0.1):
        """Fresh float64 states of a table: zeros, accumulators at `initial_accumulator`."""
        shape = (num_rows,) if self.kind == "rowwise_adagrad" else (num_rows, dimension)
        return [np.full(shape, initial_accumulator if name == "accumulator" else 0.0) for name in self.state_names()]


def step(optimizer, weight, states, rows, gradient):
    """One step, in place, on the float64 arrays `weight` and `states`: rows[i] has the summed gradient gradient[i].

    `rows` holds no duplicates; every other row stays as it is.
    """
    o = optimizer
    rows = np.asarray(rows)
    assert len(set(rows.tolist())) == len(rows)
    lr, eps = o.learning_rate, o.epsilon
    w = weight[rows]
    g = np.array(gradient, np.float64)
    if o.decoupled_weight_decay:
        w = w * (1 - o.learning_rate_of_decay * o.weight_decay)
    else:
        g = g + o.weight_decay * w
    s = [state[rows] for state in states]

    def root(a):
        return np.sqrt(a + eps) if o.epsilon_inside else np.sqrt(a) + eps

    if o.kind == "sgd":
        w = w - lr * g
    elif o.kind == "momentum":
        if o.learning_rate_in_momentum:
            s[0] = o.momentum * s[0] - lr * g
            w = w + (o.momentum * s[0] - lr * g if o.nesterov else s[0])
        else:
            s[0] = o.momentum * s[0] + g
            w = w - lr * (g + o.momentum * s[0] if o.nesterov else s[0])
    elif o.kind == "adagrad":
        s[0] = s[0] + g**2
        w = w - lr * g / root(s[0])
    elif o.kind == "rowwise_adagrad":
        s[0] = s[0] + np.mean(g**2, axis=1)
        w = w - lr * g / root(s[0])[:, None]
    elif o.kind == "adam":
        s[0] = o.beta1 * s[0] + (1 - o.beta1) * g
        s[1] = o.beta2 * s[1] + (1 - o.beta2) * g**2
        w = w - lr * s[0] / (np.sqrt(s[1]) + eps)
    elif o.kind == "adamax":
        s[0] = o.beta1 * s[0] + (1 - o.beta1) * g
        if o.epsilon_inside:
            s[1] = np.maximum(o.beta2 * s[1], abs(g) + eps)
            w = w - lr * s[0] / s[1]
        else:
            s[1] = np.maximum(o.beta2 * s[1], abs(g))
            w = w - lr * s[0] / (s[1] + eps)
    elif o.kind == "adadelta":
        s[0] = o.rho * s[0] + (1 - o.rho) * g**2
        delta = g * np.sqrt(s[1] + eps) / np.sqrt(s[0] + eps)
        s[1] = o.rho * s[1] + (1 - o.rho) * delta**2
        w = w - lr * delta
    elif o.kind == "rmsprop":
        s[0] = o.rho * s[0] + (1 - o.rho) * g**2
        mean_square = s[0]
        if o.centered:
            s[1] = o.rho * s[1] + (1 - o.rho) * g
            mean_square = s[0] - s[1] ** 2
        u = g / root(mean_square)
        if not o.momentum:
            w = w - lr * u
        elif o.learning_rate_in_momentum:
            s[-1] = o.momentum * s[-1] + lr * u
            w = w - s[-1]
        else:
            s[-1] = o.momentum * s[-1] + u
            w = w - lr * s[-1]
    elif o.kind == "ftrl":
        power = -o.learning_rate_power
        accumulator = s[0] + g**2
        shrunk = g + 2 * o.l2_shrinkage * w
        s[1] = s[1] + shrunk - (accumulator**power - s[0] ** power) / lr * w
        quadratic = accumulator**power / lr + 2 * o.l2 + o.beta / lr
        w = (np.clip(s[1], -o.l1, o.l1) - s[1]) / quadratic
        s[0] = accumulator
    else:
        raise ValueError(o.kind)
    weight[rows] = w
    for state, new in zip(states, s, strict=True):
        state[rows] = new


# --- initial values -------------------------------------------------------------------------------------------------


def philox(counter, key):
    """Philox4x32-10 (Salmon et al. 2011): four 32-bit words from a counter of four and a key of two."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return tuple(c)


def random_words(seed, key, column, draw=0):
    """The four Philox words that row `key` uses for the block of four columns that holds `column`."""
    key &= 0xFFFFFFFFFFFFFFFF
    counter = (column // 4, draw, key & 0xFFFFFFFF, key >> 32)
    return philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
