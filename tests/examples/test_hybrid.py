# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's DLRM shape on dist_model_parallel, as a user runs it on two processes."""

import pathlib

import launching
import numpy as np
import pytest

from examples.hybrid import criteo

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_samples_do_not_depend_on_the_number_of_processes():
    rows = criteo.table_rows(0.001)
    clicks = criteo.Clicks(rows)
    whole = clicks.batch(3, 10, 0, 1)
    parts = [clicks.batch(3, 10, rank, 3) for rank in range(3)]
    np.testing.assert_array_equal(np.concatenate([dense for dense, _, _ in parts]), whole[0])
    np.testing.assert_array_equal(np.concatenate([labels for _, _, labels in parts]), whole[2])
    for table, ids in enumerate(whole[1]):
        np.testing.assert_array_equal(np.concatenate([part[1][table] for part in parts]), ids)
        assert ids.min() >= 0 and ids.max() < rows[table]


@pytest.mark.slow
@pytest.mark.parametrize("frontend", ["torch", "tensorflow"])
def test_as_a_user_runs_it(frontend, tmp_path, monkeypatch):
    pytest.importorskip("torch" if frontend == "torch" else "horovod.tensorflow")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = ROOT / "examples" / "hybrid" / f"train_{frontend}.py"
    arguments = [script, "--steps", "11", "--batch-size", "512", "--picture", tmp_path / "plan.png"]
    launch = launching.torchrun if frontend == "torch" else launching.horovodrun
    status, output = launch(2, arguments, timeout=300)
    assert status == 0, output
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "Strategy 'planned': 26 tables on 2 rank(s) of 'cpu'" in output and "measured" in output
    losses = [float(line.split("loss")[1]) for line in output.splitlines() if " loss " in line]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.01, output
