# SPDX-License-Identifier: Apache-2.0
"""The shared cases as tensors, and F.embedding_bag in float64 as the oracle of forward and backward."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import sparse_operation_kit.torch as sok

STEPS, ROWS, DIMENSION = 100, 30, 5
"""Of `batches`, what the optimizer tests train on."""


def tables(call, num_ranks=1, **options):
    """The tables of a call as variables."""
    return [
        sok.Variable(call.rows(t), mode=table.mode(num_ranks), name=f"table{t}", **options)
        for t, table in enumerate(call.tables)
    ]


def has_slots(tensor, number):
    """That a dynamic table, or a state of it, has so many; of a GPU's the host knows an upper bound."""
    return len(tensor) == number or (tensor.is_cuda and len(tensor) > number)


def by_key(table, tensor):
    """What there is one of for each slot of a table, in the order of its keys: [slots, ...] -> [local rows, ...]."""
    places = getattr(table, "places", None)  # of the kind in permuted.py
    return tensor if places is None or len(tensor) != len(table) else tensor[places]


def rows_of(table):
    """A copy of this rank's rows as a plain tensor, in the order of their keys."""
    return by_key(table, torch.Tensor.detach(table).clone())


def pair(item):
    """A lookup's ids as (values, offsets)."""
    return torch.from_numpy(item.keys), torch.from_numpy(np.array(item.splits, np.int64))


def weights(item, requires_grad=True):
    """A lookup's weights as a tensor, or None."""
    return None if item.weights is None else torch.tensor(item.weights, requires_grad=requires_grad)


def lookup(call, variables, ids=pair, given_weights=None):
    """lookup_sparse over a call. Returns (outputs, weights)."""
    given_weights = [weights(item) for item in call.lookups] if given_weights is None else given_weights
    outputs = sok.lookup_sparse(
        [variables[item.table] for item in call.lookups],
        [ids(item) for item in call.lookups],
        given_weights,
        [item.combiner for item in call.lookups],
    )
    return outputs, given_weights


def gradients(call):
    """The output gradients of a call."""
    return [torch.from_numpy(call.output_gradient(i)) for i in range(len(call.lookups))]


def embedding_bag(table, item, given_weights=None):
    """A lookup by F.embedding_bag; weighted means and sqrtn by scaled weights, zero where the divisor is."""
    keys, offsets = pair(item)
    keys = keys.long()
    bags = torch.repeat_interleave(torch.arange(item.num_bags), offsets.diff())
    scale = torch.ones(len(keys), dtype=table.dtype) if given_weights is None else given_weights
    if item.combiner != "sum" and item.num_bags:
        terms = scale if item.combiner == "mean" else scale * scale
        divisor = torch.zeros(item.num_bags, dtype=table.dtype).index_add(0, bags, terms)
        inside = divisor != 0
        divisor = torch.where(inside, divisor, torch.ones_like(divisor))
        divisor = divisor if item.combiner == "mean" else divisor.sqrt()
        scale = torch.where(inside[bags], scale / divisor[bags], torch.zeros_like(scale))
    return F.embedding_bag(keys, table, offsets, mode="sum", per_sample_weights=scale, include_last_offset=True)


class Oracle:
    """The tables of a call as dense float64 parameters, looked up by F.embedding_bag."""

    def __init__(self, call):
        self.tables = [
            torch.tensor(call.rows(t).astype(np.float64), requires_grad=True) for t in range(len(call.tables))
        ]
        self.weights = [
            None if item.weights is None else torch.tensor(item.weights.astype(np.float64), requires_grad=True)
            for item in call.lookups
        ]

    def lookup(self, call):
        return [
            embedding_bag(self.tables[item.table], item, given)
            for item, given in zip(call.lookups, self.weights, strict=True)
        ]


REFILLED = {3: 1.0, 1: 2.0 + 3.0 + 1.0}
"""What each row of a table gets from `refill_buffers`, looked up with combiner "sum" and gradients of ones."""


def refill_buffers(kind):
    """(ids, weights) of two batches that lie in the same buffers, which are overwritten when the third is asked for."""
    arrays: list[Any]
    if kind == "tensor":
        buffers = [torch.empty(2, dtype=torch.int64), torch.empty(3, dtype=torch.int64), torch.empty(2)]
        arrays, views = buffers, buffers
    else:
        arrays = [np.empty(2, np.int64), np.empty(3, np.int64), np.empty(2, np.float32)]
        views = None
    for values in (([3, 1], [0, 1, 2], [1.0, 2.0]), ([1, 1], [0, 0, 2], [3.0, 1.0]), ([0, 0], [0, 2, 2], [9.0, 9.0])):
        for array, value in zip(arrays, values, strict=True):
            array[:] = torch.tensor(value) if kind == "tensor" else value
        if values[0] != [0, 0]:
            keys, offsets, weights = views or map(torch.from_numpy, arrays)
            yield (keys, offsets), weights


def batches(seed, rows=ROWS, all_rows=False):
    """(ids, offsets, output gradients) of each step; the rows of a step come several times each."""
    rng = np.random.default_rng(seed)
    for _ in range(STEPS):
        keys = rng.permutation(rows) if all_rows else rng.choice(rows, 12, replace=True)
        keys = np.concatenate([keys, keys[:5]])
        offsets = np.r_[0, np.sort(rng.integers(0, len(keys) + 1, 6)), len(keys)]
        gradient = rng.standard_normal((7, DIMENSION)).astype(np.float32)
        yield torch.from_numpy(keys), torch.from_numpy(offsets), torch.from_numpy(gradient)


def bad_calls():
    """For each kind of bad input: (name, function of a table of 10 x 4 that makes the call, error,
    part of the message).
    """
    int64 = torch.int64
    values, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])
    ids = (values, offsets)
    weight = torch.ones(3)

    def sparse(keys, shape=(2, 2)):
        return torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [0, 0, 1]]), keys, shape, check_invariants=True)

    def keys(*numbers, dtype=int64):
        return torch.tensor(numbers, dtype=dtype), offsets

    far = torch.sparse_coo_tensor(torch.tensor([[5, 0, 0], [0, 0, 5]]), values, (2, 2), check_invariants=False)
    lookup = sok.lookup_sparse
    # A device reports rows of coordinates without the table that they are for.
    named = "" if torch.get_default_device().type == "cuda" else "'items'.*"
    return [
        ("key out of range", lambda t: lookup(t, keys(1, 10, 3)), IndexError, r"'items'.* 10 .*\[0, 10\)"),
        ("key far out", lambda t: lookup(t, keys(1, 2**40, 3)), IndexError, rf"'items'.* {2**40} .*\[0, 10\)"),
        ("negative key", lambda t: lookup(t, keys(1, -1, 3)), IndexError, r"'items'.* -1 .*\[0, 10\)"),
        ("int32 key", lambda t: lookup(t, keys(1, 10, 3, dtype=torch.int32)), IndexError, r"10 .*\[0, 10\)"),
        ("dense key", lambda t: sok.all2all_dense_embedding(t, torch.tensor([[3, 11]])), IndexError, r"11 .*\[0, 10\)"),
        ("sparse key", lambda t: lookup(t, sparse(torch.tensor([0, 77, 1]))), IndexError, r" 77 .*\[0, 10\)"),
        ("ids too few", lambda t: lookup([t, t], [ids]), ValueError, "sp_ids has 1 entries, but params has 2"),
        ("weights too few", lambda t: lookup([t, t], [ids, ids], [None]), ValueError, "sp_weights has 1"),
        ("combiners too many", lambda t: lookup([t], [ids], None, ["sum"] * 2), ValueError, "combiners has 2"),
        ("no tables", lambda t: lookup([], []), ValueError, "empty"),
        ("list and no list", lambda t: lookup([t], ids[0]), TypeError, "both"),
        ("1-D ids", lambda t: lookup(t, values), ValueError, "2-D"),
        ("1-D sparse ids", lambda t: lookup(t, values.to_sparse()), ValueError, "2-D"),
        ("3-D sparse ids", lambda t: lookup(t, values.view(1, 1, 3).to_sparse()), ValueError, "2-D"),
        ("CSR ids", lambda t: lookup(t, values.view(1, 3).to_sparse_csr()), TypeError, "sparse_csr tensor"),
        (
            "sparse row outside the batch",
            lambda t: lookup(t, far),
            IndexError,
            rf"{named}row 5( is|,) outside \[0, 2\)",
        ),
        ("dense 2-D ids", lambda t: lookup(t, values.view(1, 3)), TypeError, "dense"),
        ("float ids", lambda t: lookup(t, (values.float(), offsets)), TypeError, "int32 or int64, not float32"),
        ("float sparse ids", lambda t: lookup(t, sparse(values.float())), TypeError, "not float32"),
        ("int16 ids", lambda t: lookup(t, (values.short(), offsets)), TypeError, "not int16"),
        ("float dense", lambda t: sok.all2all_dense_embedding(t, values.float()), TypeError, "not float32"),
        ("text ids", lambda t: lookup(t, "1 2 3"), TypeError, "str"),
        ("numpy ids", lambda t: lookup(t, (values.numpy(), offsets.numpy())), TypeError, "ndarray"),
        ("float offsets", lambda t: lookup(t, (values, offsets.float())), TypeError, "offsets"),
        ("no offsets", lambda t: lookup(t, (values, offsets[:0])), ValueError, "offsets"),
        ("offsets end early", lambda t: lookup(t, (values, torch.tensor([0, 1]))), ValueError, "row_splits"),
        ("offsets start late", lambda t: lookup(t, (values, torch.tensor([1, 3]))), ValueError, "row_splits"),
        ("offsets decrease", lambda t: lookup(t, (values, torch.tensor([0, 2, 1, 3]))), ValueError, "row_splits"),
        ("weights of another length", lambda t: lookup(t, ids, weight[:2]), ValueError, r"\[2\].*3 ids"),
        ("weights 2-D", lambda t: lookup(t, ids, weight.view(3, 1)), ValueError, r"\[3, 1\]"),
        (
            "weights of other bags",
            lambda t: lookup(t, ids, (weight, torch.tensor([0, 2, 3]))),
            ValueError,
            "bags of weights",
        ),
        (
            "sparse weights of another shape",
            lambda t: lookup(t, sparse(values), sparse(weight, (2, 3))),
            ValueError,
            r"weights have shape \[2, 3\].*ids have shape \[2, 2\]",
        ),
        (
            "sparse weights of other coordinates",
            lambda t: lookup(t, torch.sparse_coo_tensor(far._indices() // 5, values, (2, 2)), sparse(weight)),
            ValueError,
            "coordinates of ids, in the same order",
        ),
        ("integer weights", lambda t: lookup(t, ids, values), TypeError, "floating point, not int64"),
        ("unknown combiner", lambda t: lookup(t, ids, None, "max"), ValueError, "'max'.*sum.*mean.*sqrtn"),
        ("combiner no string", lambda t: lookup(t, ids, None, 3), TypeError, "string"),
        ("no table", lambda t: lookup(torch.zeros(10, 4), ids), TypeError, "sok.Variable"),
        (
            "assign out of range",
            lambda t: sok.assign(t, [0, 10], torch.ones(2, 4)),
            IndexError,
            r"'items'.* 10 .*\[0, 10\)",
        ),
        ("assign width", lambda t: sok.assign(t, [0], torch.ones(1, 5)), ValueError, r"\[n, 4\]"),
        ("assign float keys", lambda t: sok.assign(t, [0.5], torch.ones(1, 4)), TypeError, "float32"),
        ("assign float64", lambda t: sok.assign(t, [0], torch.ones(1, 4).double()), TypeError, "float64"),
        ("export no table", lambda t: sok.export(t.detach()), TypeError, "sok.Variable"),
    ]
