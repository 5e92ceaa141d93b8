# SPDX-License-Identifier: Apache-2.0
"""plan(): it fits, it is not beaten by the named strategies, and it says what is missing."""

import json
import random
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_operation_kit import core, planner
from sparse_operation_kit.checkpoint.group import SingleProcess
from sparse_operation_kit.hybrid import STRATEGIES, Constraint, DistEmbeddingStrategy, Plan, PlanError, plan
from sparse_operation_kit.hybrid.layout import layout_of
from sparse_operation_kit.hybrid.plans import topology_here
from sparse_operation_kit.hybrid.request import CHOICES
from sparse_operation_kit.hybrid.topology import TOPOLOGIES

CRITEO = [
    39884406,
    39043,
    17289,
    7420,
    20263,
    3,
    7120,
    1543,
    63,
    38532951,
    2953546,
    403346,
    10,
    2208,
    11938,
    155,
    4,
    976,
]
CRITEO += [14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36]


def tables(shapes, **config):
    return [{"input_dim": rows, "output_dim": width, "combiner": "sum", **config} for rows, width in shapes]


def where(made):
    return [row.where for row in made.report().tables]


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [None, "adagrad", "adam"])
def test_what_is_planned_fits(optimizer):
    made = plan(tables([(rows, 128) for rows in CRITEO]), 4, optimizer=optimizer, skew=1.05)
    report = made.report()
    assert report.fits
    states = {None: 0, "adagrad": 1, "adam": 2}[optimizer]
    size = sum(CRITEO) * 128 * 4
    assert sum(report.costs.device_bytes["weights"]) == pytest.approx(size)
    assert sum(report.costs.device_bytes["states"]) == pytest.approx(states * size)


def test_a_table_too_large_for_a_rank_is_cut():
    """Half of a rank's memory is left: 3 GB of 4 x 1 GB."""
    topology = {"device_memory": 1e9, "reserved": 0, "host_memory": 0}
    for choices in (("whole", "columns"), ("whole", "rows")):
        made = plan(
            tables([(5_859_375, 128)]), 4, batch_size=64, topology=topology, constraints={0: {"choices": choices}}
        )
        assert made.report().fits
    assert where(made) == ["rows on all ranks"]


def test_what_is_used_least_goes_to_host_memory():
    topology = {"device_memory": 1.2e9, "reserved": 0, "host_memory": 4e9}
    made = plan(tables([(1_000_000, 128)] * 4), 1, hotness=[5, 1, 3, 2], batch_size=1024, topology=topology)
    assert [text.endswith("in host memory") for text in where(made)] == [False, True, False, True]
    assert made.report().fits


def test_what_does_not_fit_is_an_error_that_says_what_is_missing():
    topology = {"device_memory": 1e9, "reserved": 1e8, "host_memory": 1e8}
    shapes = tables([(1_000_000, 128), (2_000_000, 128)])
    shapes[1]["name"] = "clicks"
    with pytest.raises(
        PlanError, match=r"4\.608 GB, of which 3\.072 GB are states of Adam.*Missing: at least 1\.3 GB a rank.*clicks"
    ):
        plan(shapes, 2, optimizer="adam", topology=topology)
    fits = plan(shapes, 2, topology=topology, batch_size=64)
    assert fits.report().fits


def test_constraints():
    shapes = tables([(1000, 16)] * 6)
    constraints: dict[int | str, Any] = {
        0: {"choices": ["replicated"]},
        1: Constraint(("rows",)),
        2: {"choices": ["columns"], "min_columns": 4},
        3: {"choices": ["whole"], "on_host": True},
        "named": {"choices": ["columns"], "min_columns": 16},
    }
    shapes[4]["name"] = "named"
    with pytest.raises(
        PlanError, match=r"^named cannot lie as its constraints say: columns, of 16 at least, on 8 ranks$"
    ):
        plan(shapes, 8, constraints=constraints)
    del constraints["named"]
    found = where(plan(shapes, 8, constraints=constraints))
    assert found[0] == "replicated" and found[1] == "rows on all ranks" and found[3].endswith("in host memory")
    assert found[2].startswith("columns: ")
    widths = [row.columns for row in plan(shapes, 8, constraints=constraints).report().tables]
    assert min(widths[2]) >= 4


def test_own_inputs_give_each_rank_a_table():
    with pytest.raises(PlanError, match="with dp_input=False each rank has a table or columns of one, and there are 3"):
        plan(tables([(1000, 1), (10, 2)]), 4, dp_input=False)
    with pytest.raises(PlanError, match=r"table 0 cannot .* say: replicated, rows, on 2 ranks with dp_input=False"):
        plan(tables([(10, 16)]), 2, dp_input=False, constraints={0: {"choices": ["replicated", "rows"]}})
    made = plan(tables([(1000, 16), (10, 16)]), 4, dp_input=False)
    assert made.strategy.table_groups == [[], [0, 1], []] and all(made.strategy.input_ids_list)


# --- costs ------------------------------------------------------------------------------------------------------------


@st.composite
def _requests(draw):
    shapes = draw(st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 40)), min_size=1, max_size=8))
    inputs = draw(st.one_of(st.none(), st.lists(st.integers(0, len(shapes) - 1), min_size=1, max_size=10)))
    number = len(shapes) if inputs is None else len(inputs)
    constraints = draw(
        st.dictionaries(
            st.integers(0, len(shapes) - 1),
            st.sets(st.sampled_from(CHOICES), min_size=1).map(lambda choices: {"choices": sorted(choices | {"whole"})}),
        )
    )
    options = {
        "batch_size": draw(st.integers(1, 5000)),
        "hotness": draw(st.lists(st.floats(0, 30), min_size=number, max_size=number)),
        "skew": draw(st.sampled_from([0.0, 0.6, 1.05])),
        "optimizer": draw(st.sampled_from([None, "momentum", "rowwise_adagrad", "adam", 3])),
        "topology": draw(st.sampled_from(["h200", {"ranks_per_host": 2}, "cpu"])),
        "input_table_map": inputs,
        "dp_input": draw(st.booleans()),
        "constraints": constraints,
    }
    return tables(shapes), draw(st.sampled_from([1, 2, 4])), options


@given(_requests())
def test_any_plan(given):
    embeddings, num_ranks, options = given
    try:
        made = plan(embeddings, num_ranks, **options)
    except PlanError:
        assert not options["dp_input"]  # there may be fewer columns than ranks
        return
    report = made.report()
    assert report.fits
    assert np.isfinite(report.step) and report.step > 0
    for table, constraint in options["constraints"].items():
        row = report.tables[table]
        kind = {-2: "replicated", -1: "rows"}.get(row.owners[0], "whole" if len(row.owners) == 1 else "columns")
        assert kind in constraint["choices"] or num_ranks == 1
    layout = layout_of(made.strategy)  # its variables hold each element of each table once
    held = np.zeros(len(embeddings), int)
    for variable in layout.variables:
        for member in variable.members:
            held[member.table] += member.rows * member.columns
    for table in made.strategy.table_groups[0]:
        held[table] += embeddings[table]["input_dim"] * embeddings[table]["output_dim"]
    assert held.tolist() == [config["input_dim"] * config["output_dim"] for config in embeddings]
    again = Plan.from_config(json.loads(json.dumps(made.to_config())), embeddings, num_ranks)
    assert again.strategy.assignment == made.strategy.assignment and again.request == made.request
    if not options["constraints"] and options["dp_input"]:
        for strategy in STRATEGIES:
            named = DistEmbeddingStrategy(embeddings, num_ranks, strategy, options["input_table_map"])
            estimated = {k: v for k, v in options.items() if k not in ("constraints", "input_table_map", "dp_input")}
            assert report.step <= named.report(**estimated).step * (1 + 1e-9)


def test_skew_and_samples():
    shapes = tables([(1_000_000, 64)] * 4)
    drawn = np.random.default_rng(0).zipf(1.5, 20000) % 1_000_000
    uniform, skewed = (plan(shapes, 2, skew=skew).report() for skew in (0, 1.2))
    assert skewed.step < uniform.step
    sampled = plan(shapes, 2, samples=[drawn] * 3 + [None])
    assert sampled.request.exponents[0] > 0.8 and sampled.request.exponents[3] == 0


def test_a_hot_table_is_not_left_to_one_rank():
    """One table that is looked up a hundred times as often as the others."""
    made = plan(tables([(1_000_000, 128)] * 8), 4, hotness=[100] + [1] * 7)
    assert made.report().tables[0].owners == (-1,) or len(made.report().tables[0].owners) == 4
    assert made.report().balance["time"] > 0.9


def test_a_thousand_tables_on_128_ranks():
    rng = random.Random(0)
    shapes = [(int(10 ** rng.uniform(2, 7.5)), rng.choice([16, 32, 64, 128])) for _ in range(1000)]
    hotness = [rng.choice([1, 1, 1, 10, 40]) for _ in shapes]
    started = time.process_time()
    made = plan(tables(shapes), 128, hotness=hotness, skew=1.05, optimizer="adam")
    assert time.process_time() - started < 1.0
    assert made.report().balance["time"] > 0.8 and len(str(made.report()).splitlines()) < 80


class GroupOf(SingleProcess):
    """This rank's replies in place of those of `gpus` ranks, which have GPUs of these names and sizes."""

    def __init__(self, gpus):
        self.rank, self.size, self._gpus = 0, len(gpus), gpus

    def allgather(self, data):
        [host, memory, _, _] = json.loads(data)["value"]
        return [json.dumps({"value": [host, memory, size, name]}).encode() for name, size in self._gpus]


@pytest.mark.parametrize(
    ("gpus", "name", "memory"),
    [
        ([("NVIDIA H200", 141), ("NVIDIA H200", 140)], "h200", 140),
        ([("NVIDIA H200", 141), ("NVIDIA H100 80GB HBM3", 80)], "h100", 80),
        ([("NVIDIA H100 80GB HBM3", 80)] * 2, "h100", 80),
        ([("NVIDIA A100-SXM4-40GB", 40)] * 2, "h200", 40),
        ([("", 0)] * 2, "cpu", None),
    ],
)
def test_the_topology_of_these_ranks(gpus, name, memory):
    """Of the slowest GPU, with the least memory."""
    own = core.DeviceProperties(gpus[0][0], gpus[0][1], 90, 132) if memory else None
    found = topology_here(GroupOf(gpus), own)
    assert found.name == name
    if memory:
        assert found.device_memory == memory and found.reserved == pytest.approx(0.1 * memory)
    assert found.device.stream == TOPOLOGIES[name].device.stream


def test_another_layer_is_refused():
    made = plan(tables([(100, 8), (50, 4)]), 2)
    with pytest.raises(ValueError, match="for 2 ranks, and there are 4"):
        made.of_layer(tables([(100, 8), (50, 4)]), 4, None, True)
    with pytest.raises(ValueError, match="of other sizes"):
        made.of_layer(tables([(100, 8), (51, 4)]), 2, None, True)
    with pytest.raises(ValueError, match="input_table_map"):
        made.of_layer(tables([(100, 8), (50, 4)]), 2, [1, 0], True)


def test_what_is_wrong_is_refused():
    shapes = tables([(100, 8), (50, 4)])
    for options, text in (
        ({"hotness": [1]}, "hotness has 1 entries"),
        ({"skew": -1}, "must not be negative"),
        ({"optimizer": "fast"}, "unknown optimizer 'fast'"),
        ({"topology": "b200"}, "unknown topology 'b200'"),
        ({"topology": {"memory": 3}}, "a topology has no memory"),
        ({"constraints": {3: {}}}, "name table 3"),
        ({"constraints": {0: {"choices": ["ranks"]}}}, "choices of a table"),
        ({"batch_size": 0}, "batch_size"),
        ({"samples": [None]}, "samples has 1 entries"),
        ({"hotness": float("inf")}, "must be finite"),
        ({"topology": {"device_memory": float("nan")}}, "must not be negative, got nan"),
        ({"batch_size": float("nan")}, "batch_size must be at least 1, got nan"),
        ({"input_table_map": [0, 5]}, r"input_table_map\[1\] is 5, and there are 2 tables"),
        ({"input_table_map": [0, "a"]}, r"input_table_map\[1\] is a, and there are 2 tables"),
    ):
        with pytest.raises(ValueError, match=text):
            plan(shapes, 2, **options)
    for options, text in (
        ({"batch_size": "many"}, "batch_size must be a number, got 'many'"),
        ({"input_table_map": 3}, "input_table_map must be a list of numbers of tables, got 3"),
        ({"topology": {"device_memory": "80GB"}}, "device_memory of a topology must be a number, got '80GB'"),
        ({"topology": {"ranks_per_host": "2"}}, "ranks_per_host of a topology must be a number, got '2'"),
        ({"hotness": [1, "a"]}, r"hotness must be a number, or one for each input, got \[1, 'a'\]"),
    ):
        with pytest.raises(TypeError, match=text):
            plan(shapes, 2, **options)
    with pytest.raises(TypeError, match="world_size must be an integer, got 'two'"):
        plan(shapes, "two")  # type: ignore[arg-type]


# --- reports and the command ------------------------------------------------------------------------------------------


def test_reports_of_all_strategies(tmp_path):
    shapes = tables([(rows, 128) for rows in CRITEO])
    reports = [DistEmbeddingStrategy(shapes, 8, strategy).report(optimizer="adam") for strategy in STRATEGIES]
    reports.append(plan(shapes, 8, optimizer="adam").report())
    for report in reports:
        text = str(report)
        assert f"'{report.strategy}'" in text and "exchange of rows" in text and "rank" in text
        data = json.loads(report.to_json())
        total = sum(rank["device_bytes"]["weights"] for rank in data["ranks"])
        assert len(data["ranks"]) == 8 and total == pytest.approx(sum(CRITEO) * 512)
        assert sum(t["bytes"] for t in data["tables"]) == sum(CRITEO) * 512
    reports[0].picture(tmp_path / "basic.png")
    assert (tmp_path / "basic.png").read_bytes().startswith(b"\x89PNG")
    assert min(report.step for report in reports) == reports[-1].step


def test_the_command(tmp_path, capsys):
    path = tmp_path / "tables.json"
    assert planner.main(["--example"]) == 0
    path.write_text(capsys.readouterr().out)
    out, picture = tmp_path / "report.json", tmp_path / "report.svg"
    assert planner.main([str(path), "--ranks", "4", "--json", str(out), "--picture", str(picture)]) == 0
    assert "history" in capsys.readouterr().out
    assert json.loads(out.read_text())["world_size"] == 4 and "svg" in picture.read_text()[:200]
    assert planner.main([str(path), "--ranks", "4", "--compare"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["strategy", "planned", *STRATEGIES]
    assert planner.main([str(path), "--ranks", "2", "--strategy", "basic", "--json", "-", "--optimizer", "adam"]) == 0
    assert json.loads(capsys.readouterr().out)["optimizer"] == "Adam"
    assert planner.main([str(path), "--ranks", "1", "--device-memory", "20", "--host-memory", "1"]) == 1
    assert "Missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[", "Expecting"),
        ("3", "must hold a list of tables"),
        ('[{"rows": 3}]', "table 0: width must be a positive integer"),
        ('[{"rows": 3, "width": 2, "hot": 1}]', "unknown hot"),
        ('{"tables": [], "ranks": 3}', "unknown ranks"),
        ('[{"rows": 3, "width": 2, "dtype": "float64"}]', "table 0: dtype must be one of float32, float16, bfloat16"),
        ('[{"rows": 3, "width": 2, "dtype": 5}]', "table 0: dtype must be one of float32, float16, bfloat16, got 5"),
        ('[{"rows": 3, "width": 2, "trainable": "no"}]', "table 0: trainable must be true or false, got 'no'"),
        ('[{"rows": 3, "width": 2, "on_host": 1}]', "table 0: on_host must be true or false, got 1"),
        ('[{"rows": 3, "width": 2, "name": 5}]', "table 0: name must be text, got 5"),
        (f'[{{"rows": 1{"0" * 30}, "width": 2}}]', "has more than 2^63 bytes"),
    ],
)
def test_a_wrong_file(tmp_path, capsys, content, text):
    path = tmp_path / "tables.json"
    path.write_text(content)
    assert planner.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert text in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("told", ["--json", "--picture"])
@pytest.mark.parametrize("place", ["missing/file.svg", "folder.svg"])
def test_an_output_that_cannot_be_written(tmp_path, capsys, told, place):
    (tmp_path / "tables.json").write_text('[{"rows": 30, "width": 8}]')
    (tmp_path / "folder.svg").mkdir()
    assert planner.main([str(tmp_path / "tables.json"), told, str(tmp_path / place)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{told}: ") and len(error.splitlines()) == 1


def test_too_many_ranks_for_the_command(tmp_path, capsys):
    (tmp_path / "tables.json").write_text('[{"rows": 30, "width": 8000}]')
    assert planner.main([str(tmp_path / "tables.json"), "--ranks", "100000"]) == 2
    assert "--ranks must be at most 4096, got 100000" in capsys.readouterr().err
    assert planner.main([str(tmp_path / "tables.json"), "--ranks", "4096"]) == 0
