# SPDX-License-Identifier: Apache-2.0
"""Kinds of tables that the suite runs with: static ones, dynamic ones, and one for the tests alone."""

import dataclasses
import weakref

import numpy as np
import permutation

from sparse_operation_kit import core
from sparse_operation_kit.core import _abi

STATIC, PERMUTED, DYNAMIC = "static", "permuted", "dynamic"
KINDS = (STATIC, PERMUTED, DYNAMIC)


def permuted(table):
    """The same table as one of `permutation`. Rows of slots that no key has are not numbers."""
    rows, dimension = table.weight.shape
    places, num_slots = permutation.places_of(rows, dimension)
    weight = permutation.column((num_slots, dimension), table.weight.dtype, np.nan)
    weight[places] = table.weight
    index = permutation.index(places, table.owner, table.num_ranks)
    made = dataclasses.replace(table, weight=weight, num_rows=table.shape[0], index=index)
    made.places = places
    return made


def dynamic(table):
    """The same table as a dynamic one, whose keys came in any order, and which has free slots. Rows without a key are
    not numbers."""
    rows, dimension = table.weight.shape
    keys = np.arange(rows) if table.owner >= 0 else np.arange(rows) * table.num_ranks + table.rank
    order = np.random.default_rng((rows, dimension)).permutation(rows + rows // 2 + 3)
    others = order - 2**62  # keys that nobody asks for
    memory = core.DynamicTable(len(order), dimension, dtype=table.weight.dtype, name=table.name)
    first = np.where(order < rows, np.append(keys, np.zeros(len(order) - rows, np.int64))[order], others)
    core.locate([memory.table()], first, [[len(first)]], insert=True)
    weakref.finalize(memory, _abi.library().sok_dynamic_table_destroy, memory.handle)
    memory.column(0)[...] = np.nan
    memory.erase(others)
    made = dataclasses.replace(table, weight=memory.column(0), num_rows=core.ANY_KEY, index=memory)
    made.places = memory.index.find(keys)
    made.weight[made.places] = table.weight
    return made


MAKERS = {STATIC: lambda table: table, PERMUTED: permuted, DYNAMIC: dynamic}


def located(tables, lookups, context=None):
    """The lookups with the slots of their keys, where a table has an index."""
    result = []
    for lookup in lookups:
        table = tables[lookup.table]
        if table.index is not None:
            keys = np.asarray(lookup.keys)
            lookup = dataclasses.replace(lookup, slots=core.locate([table], keys, [[len(keys)]], context=context))
        result.append(lookup)
    return result


def places_of(table):
    """Where the slots of a static table are."""
    return getattr(table, "places", np.arange(len(table.weight)))


def rows_of(table):
    """The rows as a static table has them."""
    return table.weight[places_of(table)]


def as_static(table, slots, *arrays):
    """Distinct slots as those of a static table, ascending; and arrays of them in that order."""
    back = np.full(len(table.weight), -1)
    back[places_of(table)] = np.arange(len(places_of(table)))
    order = np.argsort(back[slots])
    return back[slots][order], *(array[order] for array in arrays)
