# SPDX-License-Identifier: Apache-2.0
"""The estimates beside what was measured, and beside counts of drawn ids."""

import json
import pathlib

import numpy as np
import pytest

from benchmarks.cases import CASES, ZIPF_EXPONENT, make_batches
from sparse_operation_kit.hybrid import DistEmbeddingStrategy, distinct, plan
from sparse_operation_kit.hybrid.topology import topology_of_gpu

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def known_of(case, optimizer):
    """(tables, what the planner is told)."""
    case = CASES[case]
    skew = ZIPF_EXPONENT if case.distribution == "zipf" else 0
    known = {"batch_size": case.batch, "hotness": case.keys_per_bag, "skew": skew, "optimizer": optimizer}
    return [{"input_dim": case.rows, "output_dim": case.dimension}] * case.tables, known


def estimate(case, num_ranks, optimizer, **options):
    tables, known = known_of(case, optimizer)
    return DistEmbeddingStrategy(tables, num_ranks, **options).report(**known)


def kernels(report):
    """Milliseconds of the stages, without what the host's processor takes."""
    return 1e3 * sum(seconds.max() for seconds in report.costs.seconds.values())


@pytest.mark.parametrize("case", ["A", "A-zipf", "B", "B-zipf", "C", "D"])
def test_one_gpu(case):
    """benchmarks/results/gpu_lookup.json: the core's lookups and steps, within a quarter."""
    measured = json.loads((RESULTS / "gpu_lookup.json").read_text())["reports"]
    measured = {r["optimizer"]: r["subjects"]["core"] for r in measured if (r["case"], r["dtype"]) == (case, "float32")}
    assert len(measured) == 4
    for optimizer, figures in measured.items():
        report = estimate(case, 1, optimizer)
        assert kernels(report) == pytest.approx(figures["step_ms"], rel=0.25), optimizer
        assert 1e3 * report.lookup == pytest.approx(figures["forward_ms"], rel=0.25), optimizer


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_several_gpus(num_ranks):
    """benchmarks/results/distributed.json: a step of the faster framework, within a quarter."""
    runs = json.loads((RESULTS / "distributed.json").read_text())["runs"]
    steps = {}
    for framework, name in (("torch", "PyTorch"), ("tensorflow", "TensorFlow")):
        for report in runs[f"{framework}-{num_ranks}"]["reports"]:
            for how in ("row", "table"):
                each = report["subjects"][f"{name}, by {how}"]["step_ms"]
                steps.setdefault((report["case"], how), []).append(each)
    assert len(steps) == 8
    for (case, how), measured in steps.items():
        options = {"row_slice_threshold": 1} if how == "row" else {"column_slice_threshold": 1 << 40}
        assert 1e3 * estimate(case, num_ranks, "sgd", **options).step == pytest.approx(min(measured), rel=0.25), (
            case,
            how,
        )


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_planned_on_two_h100(framework):
    """benchmarks/results/hybrid_h100.json: steps of planned layers, within a quarter."""
    run = json.loads((RESULTS / "hybrid_h100.json").read_text())["runs"][f"{framework}-2"]
    assert "H100" in run["versions"]["GPU"]
    for report in run["reports"]:
        tables, known = known_of(report["case"], report["optimizer"])
        estimated = plan(tables, 2, topology=topology_of_gpu(run["versions"]["GPU"]), **known).report().step
        measured = report["subjects"]["layer, planned"]["step_ms"]
        assert 1e3 * estimated == pytest.approx(measured, rel=0.25), report["case"]


@pytest.mark.parametrize("case", ["cpu-10", "cpu-10-zipf", "C"])
def test_distinct_rows(case):
    case = CASES[case]
    exponent = ZIPF_EXPONENT if case.distribution == "zipf" else 0.0
    keys = make_batches(case, 1, seed=3)[0].keys[0]
    rows, drawn = np.array([case.rows]), np.array([len(keys)])
    expected = distinct.expected_rows(rows, drawn, np.array([exponent]))[0]
    assert expected == pytest.approx(len(np.unique(keys)), rel=0.02)
    found = distinct.exponent_of(keys, case.rows)
    if exponent:
        assert found == pytest.approx(exponent, abs=0.05)
    assert distinct.expected_rows(rows, drawn, np.array([found]))[0] == pytest.approx(len(np.unique(keys)), rel=0.01)


def test_distinct_rows_at_the_ends():
    rows, ids = np.array([1.0, 5, 5, 1e9]), np.array([0.0, 1, 1e6, 10])
    for exponent in (0.0, 0.7, 1.0, 3.0):
        found = distinct.expected_rows(rows, ids, np.full(4, exponent))
        assert found[0] == 0 and found[1] == pytest.approx(1) and found[2] == pytest.approx(5, rel=1e-3)
        assert 1 <= found[3] <= 10
