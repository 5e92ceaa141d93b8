# SPDX-License-Identifier: Apache-2.0
"""Plans played through in NumPy, beside whole tables: what each rank holds, what lookups give, what comes back."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparse_operation_kit.hybrid import STRATEGIES, DistEmbeddingStrategy, plan
from sparse_operation_kit.hybrid.layout import layout_of
from sparse_operation_kit.hybrid.request import CHOICES
from sparse_operation_kit.hybrid.transfer import Transfer


@st.composite
def _strategies(draw):
    shapes = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=6))
    tables = [{"input_dim": rows, "output_dim": width, "combiner": "sum"} for rows, width in shapes]
    num_ranks = draw(st.sampled_from([1, 2, 4]))
    inputs = draw(st.lists(st.integers(0, len(shapes) - 1), min_size=1, max_size=8))
    if draw(st.booleans()):
        limits = [draw(st.one_of(st.none(), st.integers(0, 150))) for _ in range(4)]
        return DistEmbeddingStrategy(tables, num_ranks, draw(st.sampled_from(STRATEGIES)), inputs, *limits)
    choices = st.sets(st.sampled_from(CHOICES), min_size=1).map(lambda each: {"choices": sorted(each | {"rows"})})
    constraints = draw(st.dictionaries(st.integers(0, len(shapes) - 1), choices))
    return plan(tables, num_ranks, input_table_map=inputs, constraints=constraints, batch_size=64).strategy


@given(_strategies(), st.integers(0, 2**32 - 1))
def test_lookups_and_weights_are_those_of_whole_tables(strategy, seed):
    rng = np.random.default_rng(seed)
    whole = [rng.normal(size=(c["input_dim"], c["output_dim"])).astype(np.float32) for c in strategy.global_configs]
    layout, num_ranks = layout_of(strategy), strategy.world_size
    transfers = [Transfer(strategy, layout, rank) for rank in range(num_ranks)]
    held = []
    for rank, transfer in enumerate(transfers):
        places = [variable.placement(num_ranks, rank) for variable in layout.variables]
        own = {number: np.full(place.local_shape, np.nan, np.float32) for number, place in enumerate(places)}
        for number, first, rows in transfer.writes(whole, chunk=7):
            own[number][first : first + len(rows)] = rows
        assert not any(np.isnan(rows).any() for rows in own.values())
        held.append(own)

    for number, table in enumerate(layout.tables_of):
        ids = rng.integers(0, len(whole[table]), 5)
        parts = []
        for part in layout.lookups[number]:
            variable = layout.variables[part.variable]
            keys = variable.members[part.member].first_row + ids
            places = [variable.placement(num_ranks, rank) for rank in range(num_ranks)]
            owners = places[0].owner_of(keys)
            slots = places[0].key_map(keys)
            parts.append([held[owner][part.variable][slot] for owner, slot in zip(owners, slots, strict=True)])
        if parts:
            np.testing.assert_array_equal(np.concatenate(parts, 1), whole[table][ids])
        else:
            assert table in strategy.table_groups[0]

    back = [np.array(table) if t in strategy.table_groups[0] else np.zeros_like(table) for t, table in enumerate(whole)]
    for batch in transfers[0].batches():
        came = [
            held[rank][segment.variable][transfer.own(segment)].reshape(-1)
            for rank, transfer in enumerate(transfers)
            for segment in batch
        ]
        transfers[0].put(back, batch, np.concatenate(came))
    for got, wanted in zip(back, whole, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_name_says_what_a_variable_has():
    """Under any strategy and threshold; more tables than a name lists, and columns of them."""
    for number in (3, 20):
        named = {}
        tables = [{"input_dim": 6, "output_dim": 4 + 4 * (t % 2), "combiner": "sum"} for t in range(number)]
        for threshold, strategy in itertools.product((None, 8, 12, 24, 36), STRATEGIES):
            layout = layout_of(DistEmbeddingStrategy(tables, 2, strategy, column_slice_threshold=threshold))
            for variable in layout.variables:
                assert named.setdefault(variable.name("l", layout.widths), variable.members) == variable.members
