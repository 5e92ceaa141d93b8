# SPDX-License-Identifier: Apache-2.0
"""The figures of README.md's first screen are the worst ones of benchmarks/results, of calls one by one and queued."""

import json
import math
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[0].split())
LARGE = ("A", "A-zipf", "B", "B-zipf")
MEASURES = ("step_ms", "step_together_ms")


def results(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def ratios(name, above, below, cases):
    """step time of `above` over that of `below`, of each case, optimizer and measure."""
    found = [
        report["subjects"][above][measure] / report["subjects"][below][measure]
        for report in results(name)["reports"]
        for measure in MEASURES
        if cases is None or report["case"] in cases
    ]
    assert found
    return found


def down(ratio, digits):
    return math.floor(ratio * 10**digits) / 10**digits


def up(ratio, digits):
    return math.ceil(ratio * 10**digits) / 10**digits


def test_large_tables_beside_tbe():
    worst = min(ratios("gpu_lookup", "fbgemm_tbe", "torch_frontend", LARGE))
    assert f"{down(worst, 2)} times as fast as FBGEMM's" in README


def test_rows_split_over_two_gpus_beside_torchrec():
    runs = results("distributed")["runs"]
    steps = {
        report["case"]: {subject: times["step_ms"] for subject, times in report["subjects"].items()}
        for report in runs["torch-2"]["reports"]
    }
    for report in runs["tensorflow-2"]["reports"]:
        steps[report["case"]]["TensorFlow, by row"] = report["subjects"]["TensorFlow, by row"]["step_ms"]
    worst = min(
        min(time for subject, time in times.items() if subject.startswith("TorchRec"))
        / max(times["PyTorch, by row"], times["TensorFlow, by row"])
        for times in steps.values()
    )
    assert f"{down(worst, 2)} times as fast as the best of TorchRec's" in README


@pytest.mark.parametrize(
    ("subject", "sentence"),
    [("torch_dynamic", "{} times as long as a static"), ("torch_dynamic_lru", "{} where the table keeps")],
)
def test_dynamic_tables_beside_static_ones(subject, sentence):
    worst = max(ratios("gpu_dynamic", subject, "torch_frontend_concat", None))
    assert sentence.format(up(worst, 2)) in README


def test_steps_that_are_the_hosts_work():
    many = max(ratios("gpu_lookup", "torch_frontend", "fbgemm_tbe", ("C",)))
    assert f"small tables take up to {up(many, 1)} times as long as TBE" in README
    narrow = max(ratios("gpu_lookup", "torch_frontend", "fbgemm_tbe", ("D",)))
    assert f"16 columns up to {up(narrow, 2)} times" in README
    stacked = min(ratios("gpu_stack", "fbgemm_tbe", "torch_stack", ("C", "D")))
    assert f"at least {down(stacked, 1)} times as fast" in README
