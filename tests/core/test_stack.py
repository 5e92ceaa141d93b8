# SPDX-License-Identifier: Apache-2.0
"""Stacks: several tables that are one to the stages give what they give by themselves."""

import dataclasses

import harness
import numpy as np
import pytest

from sparse_operation_kit import core, placement

UNTOUCHED = -7.25
CALLS = [
    # rows of the members, dimension, which members are looked up, batch
    pytest.param((7, 1, 30, 4), 4, (0, 1, 2, 3), 5, id="small"),
    pytest.param((7, 1, 30, 4), 3, (2, 0, 2), 6, id="a member twice, another not"),
    pytest.param((9, 5), 1, (1, 0), 1, id="one column"),
    pytest.param((5, 8), 8, (0, 1), 0, id="no bags"),
    pytest.param((2000, 3, 400), 32, (0, 1, 2), 700, id="enough work for several threads"),
    pytest.param((40, 50), 20, (0, 1, 1), 33, id="wide"),
]


@dataclasses.dataclass
class Case:
    """A batch of members of a stack, and of the same tables by themselves, on the ranks of a job."""

    rows: tuple
    dimension: int
    chosen: tuple
    batch: int
    key_dtype: type = np.int64
    combiner: str = "sum"
    weighted: bool = False
    bagged: bool = True
    num_ranks: int = 1
    owner: int = -1
    seed: int = 0

    def __post_init__(self):
        random = np.random.default_rng((self.seed, *self.rows, self.dimension, self.batch))
        self.whole = [random.standard_normal((n, self.dimension)).astype(np.float32) for n in self.rows]
        self.names = {f"member{i}": n for i, n in enumerate(self.rows)}
        self.ranks = [self.batch_of(random) for _ in range(self.num_ranks)]

    def batch_of(self, random):
        """(the lookup of each chosen member, output gradients likewise)."""
        lookups, gradients = [], []
        for i in self.chosen:
            lengths = random.integers(0, 5, self.batch) if self.bagged else np.ones(self.batch, np.int64)
            splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            keys = random.integers(0, self.rows[i], splits[-1]).astype(self.key_dtype)
            weights = (random.integers(1, 9, len(keys)) / 8).astype(np.float32) if self.weighted else None
            lookups.append(core.Lookup(keys, i, splits if self.bagged else None, weights, self.combiner))
            gradients.append(random.standard_normal((self.batch, self.dimension)).astype(np.float32))
        return lookups, gradients

    def places(self, rank):
        return placement.stack(self.names, self.dimension, self.owner, self.num_ranks, rank)

    def separate(self, rank=0):
        """The members as tables by themselves."""
        return [
            core.Table(
                rows[m.placement.rows].copy(), rows.shape[0], rows.shape[1], m.name, self.owner, self.num_ranks, rank
            )
            for rows, m in zip(self.whole, self.places(rank)[1].values(), strict=True)
        ]

    def stack(self, rank=0):
        place, members = self.places(rank)
        rows = np.full(place.local_shape, UNTOUCHED, np.float32)
        for whole, member in zip(self.whole, members.values(), strict=True):
            rows[member.slots] = whole[member.placement.rows]
        return core.Table(rows, place.num_rows, self.dimension, "stack", self.owner, self.num_ranks, rank)

    def flat(self, rank=0):
        """The lookups of all chosen members as one of the stack."""
        lookups, _ = self.ranks[rank]
        members = list(self.places(rank)[1].values())
        keys = np.concatenate([x.keys for x in lookups])
        splits, end = [np.zeros(1, np.int64)], 0
        for lookup in lookups:
            splits.append(lookup.row_splits[1:] + end if self.bagged else np.zeros(0, np.int64))
            end += len(lookup.keys)
        weights = np.concatenate([x.weights for x in lookups]) if self.weighted else None
        chosen = [core.Member(members[i].name, members[i].first_key, self.rows[i]) for i in self.chosen]
        row_splits = np.concatenate(splits) if self.bagged else None
        return core.Lookup(keys, 0, row_splits, weights, self.combiner, members=chosen)

    def located(self):
        """The same with slots, on one rank."""
        lookup, table = self.flat(), self.stack()
        return dataclasses.replace(lookup, slots=core.locate_lookups([table], [lookup])[0])

    def parts(self, number, lookups, gradients):
        """The gradient of a table by itself."""
        return [
            core.Gradient(x.keys, g, x.row_splits, x.weights, x.combiner)
            for x, g in zip(lookups, gradients, strict=True)
            if x.table == number
        ]


def wide(array, gap):
    """The same numbers as columns of a wider array."""
    whole = np.full((len(array), array.shape[1] + gap), UNTOUCHED, np.float32)
    whole[:, : array.shape[1]] = array
    return whole[:, : array.shape[1]]


KINDS = [
    pytest.param(np.int64, "sum", False, True, id="sum"),
    pytest.param(np.int32, "mean", False, True, id="mean of int32"),
    pytest.param(np.int64, "sqrtn", True, True, id="sqrtn with weights"),
    pytest.param(np.int64, "mean", False, False, id="no bags"),
]


@pytest.mark.every_isa
@pytest.mark.parametrize(("key_dtype", "combiner", "weighted", "bagged"), KINDS)
@pytest.mark.parametrize(("rows", "dimension", "chosen", "batch"), CALLS)
def test_one_rank(rows, dimension, chosen, batch, key_dtype, combiner, weighted, bagged):
    case = Case(rows, dimension, chosen, batch, key_dtype, combiner, weighted, bagged)
    lookups, gradients = case.ranks[0]
    expected = np.concatenate(core.gather_combine(case.separate(), lookups), axis=1)
    located = case.located()
    (output,) = core.gather_combine([case.stack()], [located])
    assert harness.same_bytes(output, expected)
    given = wide(np.zeros_like(expected), 5)
    core.gather_combine([case.stack()], [located], out=[given])
    assert harness.same_bytes(np.ascontiguousarray(given), expected)
    assert (given.base[:, expected.shape[1] :] == UNTOUCHED).all()

    of_stack = np.concatenate(gradients, axis=1)
    tables = case.separate()
    steps = [
        core.Update(table, core.Optimizer("adagrad", 0.1), parts, [np.full(table.weight.shape, 0.1, np.float32)])
        for i, table in enumerate(tables)
        if (parts := case.parts(i, lookups, gradients))
    ]
    reduced = [core.reduce(step.table, step.gradients) for step in steps]
    core.apply(steps)
    members = list(case.places(0)[1].values())
    for gap in (0, dimension, 3):  # columns of an array whose rows are a multiple of a vector, or are not
        values = wide(of_stack, gap)
        part = core.Gradient(
            located.slots, values, located.row_splits, located.weights, combiner, num_members=len(chosen)
        )
        table = case.stack()
        slots, sums = core.reduce(table, [part])
        first = 0
        for step, (own_slots, own_sums) in zip(steps, reduced, strict=True):
            end = first + len(own_slots)
            member = members[tables.index(step.table)]
            assert np.array_equal(slots[first:end], own_slots + member.first_slot)
            np.testing.assert_allclose(sums[first:end], own_sums, rtol=4e-6, atol=3e-5)
            first = end
        assert first == len(slots)
        states = np.full(table.weight.shape, 0.1, np.float32)
        core.apply([core.Update(table, core.Optimizer("adagrad", 0.1), [part], [states])])
        for own, member in zip(tables, members, strict=True):
            np.testing.assert_allclose(table.weight[member.slots], own.weight, rtol=2e-6, atol=1e-6)
        if weighted:
            (of_weights,) = core.weight_gradient([case.stack()], [located], [values])
            own = np.concatenate(core.weight_gradient(case.separate(), lookups, gradients))
            np.testing.assert_allclose(of_weights, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("unique", [False, True])
def test_gradients_of_single_keys(unique):
    """Without row splits, also where the caller says that no slot occurs twice."""
    case = Case((6, 9), 4, (0, 1), 5, bagged=False)
    located, table = case.located(), case.stack()
    slots = np.array([0, 2, 4, 5, 1, 6, 8, 14, 10, 7]) if unique else located.slots
    values = np.concatenate(case.ranks[0][1], axis=1)
    part = core.Gradient(slots, values, unique=unique, num_members=2)
    expected = table.weight.astype(np.float64)
    np.subtract.at(expected, slots, 0.5 * np.concatenate(case.ranks[0][1]))
    core.apply([core.Update(table, core.Optimizer("sgd", 0.5), [part])])
    np.testing.assert_allclose(table.weight, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("owner", [-1, 1])
@pytest.mark.parametrize(("key_dtype", "combiner", "weighted", "bagged"), KINDS)
@pytest.mark.parametrize(("rows", "dimension", "chosen", "batch"), CALLS)
def test_several_ranks(rows, dimension, chosen, batch, key_dtype, combiner, weighted, bagged, owner):
    pooled = (owner < 0) != bagged and not weighted  # lookups with weights are pooled at the requester
    case = Case(rows, dimension, chosen, batch, key_dtype, combiner, weighted, bagged, 3, owner)
    separate = [harness.Rank(case.separate(r), case.ranks[r][0]) for r in range(3)]
    stacked = [harness.Rank([case.stack(r)], [case.flat(r)]) for r in range(3)]
    harness.forward(separate)
    harness.forward(stacked, pooled=[[pooled]] * 3)
    for own, rank in zip(separate, stacked, strict=True):
        np.testing.assert_allclose(rank.outputs[0], np.concatenate(own.outputs, axis=1), rtol=2e-6, atol=1e-6)
    gradients = [case.ranks[r][1] for r in range(3)]
    own_parts = harness.backward(separate, gradients)
    expected = harness.reduce(separate, own_parts)
    for gap in (0, 3):
        values = [[wide(np.concatenate(of_rank, axis=1), gap)] for of_rank in gradients]
        reduced = harness.reduce(stacked, harness.backward(stacked, values))
        for r in range(3):
            slots, sums = reduced[r][0]
            wanted = [
                (of_table[0] + member.first_slot, of_table[1])
                for of_table, member in zip(expected[r], case.places(r)[1].values(), strict=True)
            ]
            assert np.array_equal(slots, np.concatenate([x for x, _ in wanted]))
            np.testing.assert_allclose(sums, np.concatenate([x for _, x in wanted]), rtol=4e-6, atol=3e-5)
    if weighted:
        for r, rank in enumerate(stacked):
            given = [np.concatenate(gradients[r], axis=1)]
            (of_weights,) = core.weight_gradient(
                rank.tables, rank.lookups, given, inverse=rank.routing.inverse, rows=rank.rows
            )
            own = core.weight_gradient(
                separate[r].tables,
                separate[r].lookups,
                gradients[r],
                inverse=separate[r].routing.inverse,
                rows=separate[r].rows,
            )
            np.testing.assert_allclose(of_weights, np.concatenate(own), rtol=1e-5, atol=1e-5)


def test_a_stack_beside_tables():
    """One call has lookups of a stack, of some of its members alone, and of a table."""
    case = Case((7, 9, 3), 4, (0, 1, 2), 6)
    lookups, gradients = case.ranks[0]
    other = core.Table(np.arange(20, dtype=np.float32).reshape(10, 2), name="other")
    keys = np.array([3, 9, 0])
    of_other = core.Lookup(keys, 1)
    some = dataclasses.replace(
        case.flat(), keys=lookups[2].keys, row_splits=lookups[2].row_splits, members=case.flat().members[2:]
    )
    call = [of_other, case.flat(), some]
    slots = core.locate_lookups([case.stack(), other], call)
    assert np.array_equal(slots[0], keys)
    located = [dataclasses.replace(x, slots=s) for x, s in zip(call, slots, strict=True)]
    outputs = core.gather_combine([case.stack(), other], located)
    expected = core.gather_combine(case.separate(), lookups)
    assert harness.same_bytes(outputs[0], other.weight[keys])
    assert harness.same_bytes(outputs[1], np.concatenate(expected, axis=1))
    assert harness.same_bytes(outputs[2], expected[2])
    parts = [
        core.Gradient(slots[1], np.concatenate(gradients, axis=1), call[1].row_splits, num_members=3),
        core.Gradient(slots[2], gradients[2], call[2].row_splits, num_members=1),
    ]
    table, own = case.stack(), case.separate()
    core.apply([core.Update(table, core.Optimizer("sgd", 0.5), parts)])
    own_parts = [case.parts(i, lookups, gradients) for i in range(3)]
    own_parts[2] *= 2
    core.apply([core.Update(t, core.Optimizer("sgd", 0.5), p) for t, p in zip(own, own_parts, strict=True)])
    for separate, member in zip(own, case.places(0)[1].values(), strict=True):
        np.testing.assert_allclose(table.weight[member.slots], separate.weight, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("key", [-1, 5, 8, 2**40])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_key_outside_its_member(num_ranks, key):
    """It is refused though other members have it, and the message names the member."""
    case = Case((30, 5, 30), 2, (0, 1, 2), 3, num_ranks=num_ranks)
    lookup, table = case.flat(), case.stack()
    keys = lookup.keys.copy()
    at = lookup.row_splits[3]
    if lookup.row_splits[6] == at:
        pytest.fail("the second member has no keys")
    keys[at] = key
    lookup = dataclasses.replace(lookup, keys=keys)
    with pytest.raises(IndexError, match=rf"'member1'.*{key}.*\[0, 5\)"):
        if num_ranks == 1:
            core.locate_lookups([table], [lookup])
        else:
            core.route([table], [lookup])


def test_every_bad_row_split_is_refused():
    case = Case((8, 8), 2, (0, 1), 2)
    table, lookup = case.stack(), dataclasses.replace(case.flat(), keys=np.arange(6))
    for splits in ([0, 1, 2, 7, 6], [1, 2, 3, 4, 6], [0, 1, 2, 3, 5], [0, 3, 2, 4, 6], [0, -1, 3, 4, 6]):
        bad = dataclasses.replace(lookup, row_splits=np.array(splits))
        for call in (core.locate_lookups, core.route):
            with pytest.raises(ValueError, match="stack"):
                call([table], [bad])


def test_wrong_members():
    case = Case((8, 5), 2, (0, 1), 2)
    table, lookup = case.stack(), case.flat()
    first, second = lookup.members
    uneven = dataclasses.replace(lookup, keys=np.arange(3), row_splits=np.arange(4))
    for call in (core.locate_lookups, core.route):
        with pytest.raises(ValueError, match="3 bags"):
            call([table], [uneven])
        for wrong in (
            dataclasses.replace(second, num_rows=6),
            dataclasses.replace(second, num_rows=0),
            dataclasses.replace(first, first_key=-1),
            dataclasses.replace(second, first_key=2**62),
        ):
            with pytest.raises(ValueError, match="members"):
                call([table], [dataclasses.replace(lookup, members=[first, wrong])])
    with pytest.raises(ValueError, match="output"):
        core.gather_combine([table], [case.located()], out=[np.zeros((2, 2), np.float32)])
    gradient = core.Gradient(np.arange(3), np.zeros((1, 4), np.float32), np.arange(4), num_members=2)
    with pytest.raises(ValueError, match="num_members"):
        core.reduce(table, [gradient])
    several = Case((8, 5), 2, (0, 1), 2, num_ranks=2)
    with pytest.raises(ValueError, match="one rank"):
        core.locate_lookups([several.stack()], [several.flat()])
    anything = core.Table(np.zeros((4, 2), np.float32), core.ANY_KEY, 2, index=core.Index(lambda keys, _: keys))
    with pytest.raises(ValueError, match="dynamic"):
        core.route([anything], [lookup])


@pytest.mark.parametrize(("num_ranks", "owner"), [(1, -1), (1, 0), (3, -1), (3, 2), (4, -1), (4, 0)])
def test_members_have_the_slots_of_tables(num_ranks, owner):
    rows = {"a": 1, "b": 7, "c": 12, "d": 2, "e": 5}
    every = [placement.stack(rows, 3, owner, num_ranks, r) for r in range(num_ranks)]
    for place, members in every:
        taken = np.zeros(place.local_rows, int)
        for name, member in members.items():
            assert member.placement == placement.Placement(rows[name], 3, owner, num_ranks, place.rank)
            keys = np.arange(rows[name])
            keys = keys[member.placement.mine(keys)]
            assert len(range(*member.slots.indices(place.local_rows))) == len(keys)
            taken[member.slots] += 1
            of_stack = member.first_key + keys
            assert (place.owner_of(of_stack) == place.rank).all()
            assert np.array_equal(place.key_map(of_stack), member.first_slot + member.placement.key_map(keys))
        assert taken.max(initial=1) == 1
        assert place.local_rows - taken.sum() < len(rows) + (owner >= 0)
