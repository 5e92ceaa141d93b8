# SPDX-License-Identifier: Apache-2.0
"""DistEmbeddingStrategy: worked examples, plans that are kept, and what holds for all of them."""

import json
import pathlib
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_operation_kit.hybrid import STRATEGIES, DistEmbeddingStrategy
from sparse_operation_kit.hybrid.plans import plan_layer

EIGHT = [(20, 4), (15, 4), (10, 6), (5, 10), (10, 4), (6, 5), (5, 4), (5, 2)]


def plan(shapes, world_size, strategy="basic", **options):
    tables = [
        {"input_dim": rows, "output_dim": width, "combiner": (rest or [None])[0]} for rows, width, *rest in shapes
    ]
    return DistEmbeddingStrategy(tables, world_size, strategy, **options)


# --- cutting and dealing ----------------------------------------------------------------------------------------------


def test_one_table_is_cut_for_all_ranks():
    made = plan([(10, 8)], 3)
    assert made.table_ids == [[0], [0], [0]]
    assert made.widths_list_flat == [3, 3, 2]
    assert made.sliced_out_ranges == [[0, 3]]


def test_equal_largest_tables_are_all_cut():
    made = plan([(10, 8), (10, 8)], 3)
    assert made.table_ids == [[0, 1], [0], [1]]
    assert made.widths_list_flat == [4, 4, 4, 4]


def test_the_last_largest_size_less_one_is_the_threshold():
    made = plan([(10 * n, 8) for n in range(1, 8)], 8, "memory_balanced")
    assert made.table_ids == [[5], [4], [3], [6], [6], [2], [1], [0]]


def test_one_column_cannot_be_cut():
    assert plan([(1000, 1)], 2).table_ids == [[0], []]


def test_a_threshold_ends_where_there_is_nothing_to_halve():
    """Halving a table of one element again and again never comes below 0."""
    assert plan([(1, 1)], 4).table_ids == [[0], [], [], []]
    assert plan([(1, 3)], 7).widths_list_flat == [1, 1, 1]


def test_a_number_is_the_threshold_and_equal_is_not_cut():
    assert plan([(10, 8)], 3, column_slice_threshold=80).table_ids == [[0], [], []]
    assert plan([(10, 8)], 4, column_slice_threshold=79).widths_list_flat == [4, 4]
    assert plan([(10, 8)], 4, column_slice_threshold=0).widths_list_flat == [2, 2, 2, 2]
    assert plan([(10, 8)], 1, column_slice_threshold=1).widths_list_flat == [8]


@pytest.mark.parametrize("shape", [(0, 4), (10, 0), (10, -1), (10**30, 4)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_table_of_no_size(shape, world_size):
    with pytest.raises(ValueError, match=r"table '1' (has no rows|has rows of no|of shape .* has more than)"):
        plan([(10, 4), shape], world_size)
    with pytest.raises(TypeError, match="the shape of table '0' must be two integers"):
        plan([(10.5, 4)], world_size)


THRESHOLDS = ("column_slice_threshold", "row_slice_threshold", "data_parallel_threshold", "gpu_embedding_size")


@pytest.mark.parametrize("name", THRESHOLDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_threshold_that_is_no_number(name, world_size):
    tables, here = [{"input_dim": 9, "output_dim": 4}] * 2, types.SimpleNamespace(size=world_size)

    def layer(value):
        plan_layer(
            tables, "basic", dp_input=True, input_table_map=None, group=here, gpu=None,
            **{**dict.fromkeys(THRESHOLDS), name: value},
        )  # fmt: skip

    for make in (layer, lambda value: plan(FOUR, world_size, **{name: value})):
        for value in ("x", True, [3]):
            with pytest.raises(TypeError, match=f"{name} must be a number, got "):
                make(value)
        with pytest.raises(ValueError, match=f"{name} must be a number, got nan"):
            make(float("nan"))
        make(1e9)


def test_own_inputs_are_of_all_ranks():
    """A rank without an input would not know the number of samples."""
    tables, here = [{"input_dim": 9, "output_dim": 4}] * 2, types.SimpleNamespace(size=2)
    for dp_input, inputs in ((True, [0]), (False, [0, 1])):
        plan_layer(tables, "basic", None, None, dp_input, inputs, None, None, group=here, gpu=None)
    with pytest.raises(ValueError, match=r"ranks \[1\] have none"):
        plan_layer(tables, "basic", None, None, False, [0], None, None, group=here, gpu=None)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("basic", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("memory_balanced", [[0, 4, 3, 7], [2, 5, 1, 6]]),
        ("memory_optimized", [[2, 1, 4, 7], [0, 3, 5, 6]]),
    ],
)
def test_tables_are_dealt(strategy, expected):
    assert plan(EIGHT, 2, strategy).table_ids == expected


def test_memory_optimized_balances_unequal_tables():
    made = plan([(10, 10), (10, 6), (10, 5), (10, 4), (10, 3)], 2, "memory_optimized")
    assert made.table_ids == [[0, 3], [1, 2, 4]]


def test_one_rank_is_always_basic():
    assert plan(EIGHT, 1, "memory_optimized").strategy == "basic"


# --- merging ----------------------------------------------------------------------------------------------------------

FOUR = [(100, 8), (5, 8), (10, 8), (25, 4)]


def test_slices_that_meet_become_one():
    made = plan(FOUR, 4, "memory_balanced", column_slice_threshold=45)
    assert made.table_ids == [[0, 3], [0, 3, 1], [0, 3, 2], [0, 2]]
    assert made.sliced_out_ranges == [[0, 4], [2, 4], [3, 6]]
    assert made.widths_list_flat == [2, 2, 2, 1, 8, 2, 1, 4, 2, 4]
    assert made.rev_tp_ids == [0, 2, 5, 8, 4, 7, 9, 1, 3, 6]
    assert [(p.first_column, p.columns) for pieces in made.local_pieces for p in pieces if p.table == 3] == [
        (0, 2),
        (2, 1),
        (3, 1),
    ]


def test_slices_meet_on_two_ranks():
    assert plan(FOUR, 2, "memory_balanced", column_slice_threshold=45).table_ids == [[0, 2, 3], [0, 2, 3, 1]]


def test_columns_of_unequal_widths_after_merging():
    """Not half of the columns each: the slices of the second table that met are wider."""
    made = plan([(4, 10), (5, 3)], 3, "memory_optimized", column_slice_threshold=18)
    widths = [p.columns for pieces in made.local_pieces for p in pieces if p.table == 0]
    assert widths == [4, 6]


def test_merging_shortens_the_ranges_of_the_tables_own_inputs():
    made = plan([(5, 2), (5, 2)], 3, "memory_balanced", column_slice_threshold=8, input_table_map=[1, 0])
    assert made.sliced_out_ranges == [[0, 2], [1, 2]]


# --- what a rank holds ------------------------------------------------------------------------------------------------


def test_alike_tables_are_one_variable():
    made = plan(EIGHT, 2)
    assert made.local_group_list[0] == [[0, 2, 3], [1]]
    assert [(c["input_dim"], c["output_dim"]) for c in made.local_configs[0]] == [(35, 4), (10, 6)]
    assert made.local_maps[0] == [0, 1, 0, 0]
    assert made.local_input_offsets[0] == [0, 0, 20, 30]
    assert made.local_weight_offsets[0] == [[0, 20, 30, 35], [0, 10]]


def test_the_largest_tables_are_offloaded():
    made = plan([(10, 4), (20, 4), (30, 4), (40, 4)], 1, gpu_embedding_size=130)
    assert [config["cpu_offload"] for config in made.local_configs[0]] == [False, True, True]
    assert made.local_group_list[0] == [[0, 1], [2], [3]]
    assert all(c["cpu_offload"] for c in plan(EIGHT, 1, gpu_embedding_size=0).local_configs[0])
    assert not any(c["cpu_offload"] for c in plan(EIGHT, 1, gpu_embedding_size=1e9).local_configs[0])


@pytest.mark.parametrize(
    "other",
    [
        {"combiner": "sum"},
        {"dtype": "float16"},
        {"trainable": False},
        {"embeddings_regularizer": {"class_name": "L2"}},
        {"embeddings_constraint": {"class_name": "NonNeg"}},
        {"layer_type": int},
    ],
    ids=lambda other: next(iter(other)),
)
def test_only_equal_tables_are_one_variable(other):
    table = {"input_dim": 4, "output_dim": 2, "dtype": "float32", "trainable": True}
    assert len(DistEmbeddingStrategy([table, {**table, **other}], 1).local_configs[0]) == 2
    own_values = {**table, "embeddings_initializer": "zeros"}
    assert len(DistEmbeddingStrategy([table, own_values], 1).local_configs[0]) == 1


# --- groups -----------------------------------------------------------------------------------------------------------


def test_groups():
    made = plan(
        [(10, 4), (100, 8), (1000, 8), (50, 8), (2000, 8)],
        2,
        "memory_balanced",
        data_parallel_threshold=40,
        row_slice_threshold=8000,
        input_table_map=[0, 1, 2, 3, 4, 1, 0],
    )
    assert made.table_groups == [[0], [1, 3], [2, 4]]
    assert made.input_groups == [[0, 6], [1, 3, 5], [2, 4]]
    assert made.map_groups == [[0, 0], [0, 1, 0], [0, 1]]
    assert made.rev_group_ids == [0, 2, 5, 3, 6, 4, 1]
    assert made.row_inputs_offsets == [[0, 0], [-500, -1000]]
    assert made.input_ids_list == [[0, 2], [1]]
    assert [p.table for p in made.local_pieces[1]] == [3]


def test_rows_are_cut_as_evenly_as_can_be():
    made = plan([(10, 2)], 4, row_slice_threshold=1)
    assert [configs[0]["input_dim"] for configs in made.row_sliced_configs] == [3, 3, 2, 2]
    assert made.row_inputs_offsets == [[0], [-3], [-6], [-8]]


def test_without_tables_of_a_group_lists_are_empty():
    made = plan([(10, 2)], 3, row_slice_threshold=1)
    assert made.table_ids == made.input_ids_list == made.local_configs == [[], [], []]
    assert made.widths_list_flat == made.rev_tp_ids == made.sliced_out_ranges == []
    assert not hasattr(plan([(10, 2)], 3), "row_inputs_offsets")


def test_what_is_wrong_is_refused():
    with pytest.raises(ValueError, match="Unsupported shard strategy fast"):
        plan(EIGHT, 2, "fast")
    with pytest.raises(ValueError, match=r"Wrong input initializing input/map groups.*input_table_map\[1\] is 8"):
        plan(EIGHT, 2, input_table_map=[0, 8])
    assert plan(EIGHT, 2, input_table_map=iter([*range(8), True])).tables_of == [*range(8), 1]
    with pytest.raises(ValueError, match="must not be negative"):
        plan(EIGHT, 2, column_slice_threshold=-1)
    with pytest.raises(ValueError, match="at least 1"):
        plan(EIGHT, 0)
    with pytest.raises(TypeError, match="got a int"):
        DistEmbeddingStrategy([3], 2)
    with pytest.raises(ValueError, match="lacks output_dim"):
        DistEmbeddingStrategy([{"input_dim": 3}], 2)


# --- kept plans -------------------------------------------------------------------------------------------------------

KEPT = json.loads((pathlib.Path(__file__).parent / "plans.json").read_text())


@pytest.mark.parametrize("case", KEPT, ids=[case["name"] for case in KEPT])
def test_kept_plans(case):
    made = plan(case["tables"], case["world_size"], case["strategy"], **case["options"])
    assert {name: getattr(made, name) for name in case["expected"]} == case["expected"]


# --- what holds for all plans -----------------------------------------------------------------------------------------


@st.composite
def _plans(draw):
    shapes = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=9))
    thresholds = st.one_of(st.none(), st.integers(0, 250))
    tables = st.integers(0, len(shapes) - 1)
    return plan(
        shapes,
        draw(st.integers(1, 8)),
        draw(st.sampled_from(STRATEGIES)),
        input_table_map=draw(st.one_of(st.none(), st.lists(tables, min_size=1, max_size=12))),
        column_slice_threshold=draw(thresholds),
        row_slice_threshold=draw(thresholds),
        data_parallel_threshold=draw(thresholds),
        gpu_embedding_size=draw(thresholds),
    )


@given(_plans())
def test_each_table_lies_somewhere_once(made):
    assert sorted(table for group in made.table_groups for table in group) == list(range(len(made.global_configs)))
    assert sorted(made.rev_group_ids) == list(range(sum(map(len, made.input_groups))))
    for table in made.table_groups[1]:
        config = made.global_configs[table]
        pieces = [p for rank in made.local_pieces for p in rank if p.table == table]
        columns = [c for p in pieces for c in range(p.first_column, p.first_column + p.columns)]
        assert columns == list(range(config["output_dim"]))
        assert all(p.rows == config["input_dim"] for p in pieces)
    for place, table in enumerate(made.table_groups[2]):
        blocks = [configs[place]["input_dim"] for configs in made.row_sliced_configs]
        assert sum(blocks) == made.global_configs[table]["input_dim"]
        assert [-sum(blocks[:rank]) for rank in range(len(blocks))] == [o[place] for o in made.row_inputs_offsets]


@given(_plans())
def test_rows_of_a_variable_are_its_tables(made):
    for rank in range(made.world_size):
        seen = [0] * len(made.local_configs[rank])
        for piece in made.local_pieces[rank]:
            variable = made.local_configs[rank][piece.variable]
            assert variable["output_dim"] == piece.columns
            assert piece.first_row == seen[piece.variable]
            seen[piece.variable] += piece.rows
        assert seen == [variable["input_dim"] for variable in made.local_configs[rank]]


@given(_plans())
def test_outputs_come_back_in_the_order_of_inputs(made):
    """Each output, called by its input and its first column, put together as the attributes say."""
    outputs = []
    for rank, inputs in enumerate(made.input_ids_list):
        pieces: dict[int, Any] = {made.map_groups[1][i]: None for i in inputs}
        for piece in made.local_pieces[rank]:
            pieces[made.table_groups[1].index(piece.table)] = piece
        outputs += [[(number, pieces[made.map_groups[1][number]])] for number in inputs]
    assert [output[0][1].columns for output in outputs] == made.widths_list_flat
    outputs = [outputs[place] for place in made.rev_tp_ids]
    for first, end in made.sliced_out_ranges:
        outputs[first:end] = [[part for output in outputs[first:end] for part in output]]
    assert [output[0][0] for output in outputs] == list(range(len(made.input_groups[1])))
    for number, output in enumerate(outputs):
        assert {part[0] for part in output} == {number}
        table = made.table_groups[1][made.map_groups[1][number]]
        assert {part[1].table for part in output} == {table}
        columns = [c for _, p in output for c in range(p.first_column, p.first_column + p.columns)]
        assert columns == list(range(made.global_configs[table]["output_dim"]))


@given(_plans())
def test_what_stays_on_the_gpu_fits(made):
    limit = made.gpu_embedding_size
    for rank in made.local_configs:
        kept = sum(config["input_dim"] * config["output_dim"] for config in rank if not config["cpu_offload"])
        assert limit is None or kept <= limit


def test_numbers_that_keras_gives_objects_in_files_make_no_difference():
    made = [{"class_name": "DTypePolicy", "config": {"name": "float32"}, "shared_object_id": n} for n in (7, 8)]
    tables = [{"input_dim": 5, "output_dim": 2, "dtype": dtype} for dtype in made]
    assert len(DistEmbeddingStrategy(tables, 1).local_configs[0]) == 1
