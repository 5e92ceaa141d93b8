# SPDX-License-Identifier: Apache-2.0
"""benchmarks.whole_job: its data set, what it counts, and subjects that are missing."""

import json
import sys

import numpy as np
import pytest

from benchmarks import harness, whole_job
from benchmarks.whole_job_data import Job, make
from benchmarks.whole_job_worker import combined

ROWS, TABLE_ROWS = 500, 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    make(path, ROWS, TABLE_ROWS, seed=3)
    return path


@pytest.fixture
def job(folder):
    return Job(folder, batch_size=200, max_table_rows=TABLE_ROWS, device="cpu")


def test_batches_are_the_rows_again_and_again(job):
    batches = list(job.reader(5))
    assert [len(batch.labels) for batch in batches] == [200] * 5
    labels = np.concatenate([batch.labels for batch in batches])
    dense = np.concatenate([batch.dense for batch in batches])
    np.testing.assert_array_equal(labels[:ROWS], labels[ROWS:])
    np.testing.assert_array_equal(dense[:ROWS], dense[ROWS:])
    assert 0.2 < labels.mean() < 0.45
    for batch in batches:
        assert batch.ids.values().shape == (26 * 200,)
        assert batch.ids.values().min() >= 0 and batch.ids.values().max() < TABLE_ROWS
        np.testing.assert_array_equal(batch.ids.offsets(), np.arange(26 * 200 + 1))
    column = batches[0].ids.values().reshape(26, 200)
    assert not np.array_equal(column[0], column[1])


def test_a_data_set_of_another_shape_replaces_it(tmp_path):
    make(tmp_path, 20, 5, seed=0)
    first = (tmp_path / "dataset.json").stat().st_mtime_ns
    make(tmp_path, 20, 5, seed=0)
    assert (tmp_path / "dataset.json").stat().st_mtime_ns == first
    make(tmp_path, 20, 6, seed=0)
    assert json.loads((tmp_path / "dataset.json").read_text())["recipe"]["table_rows"] == 6


class Told(whole_job.Subjects):
    """Subjects whose steps take what they are told; "torch" breaks down in its third turn."""

    def __init__(self):
        self.told = {name: {"version": name} for name in ("torch", "tensorflow")}
        self.turns = []

    def measure(self, name, source):
        self.turns.append((name, source))
        if name not in self.told:
            return None
        if name == "torch" and self.turns.count((name, "files")) == 2:
            del self.told[name]
            return None
        count = self.turns.count((name, source))
        step = count * (4.0 if source == "files" else 3.0)
        return {"samples_per_second": 1e3 / step, "step_ms": step, "waiting": 0.1, "loss": 0.5}


def test_subjects_take_turns_and_one_that_breaks_down_is_left_out():
    subjects = Told()
    report = whole_job.measure(subjects, 3)
    assert subjects.turns[:4] == [
        *(("torch", "files"), ("tensorflow", "files"), ("torch", "memory"), ("tensorflow", "memory"))
    ]
    assert subjects.turns[4:6] == [("tensorflow", "files"), ("torch", "files")]
    assert list(report) == ["TensorFlow"]
    assert report["TensorFlow"]["files"]["step_ms"] == 8.0
    assert report["TensorFlow"]["files"]["step_ms_of_rounds"] == [4.0, 8.0, 12.0]
    assert report["TensorFlow"]["reading"] == pytest.approx(0.25)


def test_ranks_wait_for_the_slowest():
    first = {"samples_per_second": 10.0, "step_ms": 4.0, "waiting": 0.1, "loss": 0.5, "version": "v"}
    second = {"samples_per_second": 8.0, "step_ms": 5.0, "waiting": 0.0, "loss": 0.7, "version": "v"}
    expected = {"samples_per_second": 8.0, "step_ms": 5.0, "waiting": 0.1, "loss": 0.6, "version": "v"}
    assert combined([first, second]) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_command(ranks, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    options = f"--folder {folder} --rows {ROWS} --table-rows {TABLE_ROWS} --seed 3 --batch-size 50 --embedding-dim 8"
    command = f"whole_job {options} --steps 3 --rounds 1 --device cpu --ranks {ranks} --threads 1"
    monkeypatch.setattr(sys, "argv", command.split())
    whole_job.main()
    found = json.loads((tmp_path / "whole_job.json").read_text())
    losses = {title: subject["files"]["loss"] for title, subject in found["subjects"].items()}
    assert set(losses) >= {"PyTorch", "TensorFlow"}
    assert losses["PyTorch"] == pytest.approx(losses["TensorFlow"], rel=1e-5)
    assert (tmp_path / "whole_job.png").stat().st_size > 0
