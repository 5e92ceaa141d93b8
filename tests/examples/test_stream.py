# SPDX-License-Identifier: Apache-2.0
"""The stream of ids that drift: what is drawn from it, and the example as a user runs it in both frameworks."""

import json
import subprocess
import sys

import numpy as np
import pytest

from examples.stream.stream import Stream


def test_the_stream_drifts():
    stream = Stream(batch=500, live=1000, new=100, seed=3)
    batches = list(stream.batches(30))
    assert all((a.ids == b.ids).all() for a, b in zip(batches, stream.batches(30), strict=True))
    for step, batch in enumerate(batches):
        live = stream.live_ids(step)
        assert len(np.unique(live)) == 1000 and np.isin(batch.ids, live).all()
        assert batch.ids.shape == (500 * stream.ids_per_sample,) and set(batch.labels) <= {0.0, 1.0}
        # A tenth of the ids came with this step, and the cube root of that is their share of the draws.
        newest = live[-100:]
        assert abs(np.isin(batch.ids, newest).mean() - 0.1 ** (1 / 3)) < 0.05
    assert not np.isin(stream.live_ids(0), stream.live_ids(10)).any()
    assert len(np.unique(np.concatenate([batch.ids for batch in batches]))) <= stream.num_ids(30)


@pytest.mark.slow
@pytest.mark.parametrize("frontend", ("torch", "tensorflow"))
def test_as_a_user_runs_it(frontend, tmp_path):
    command = [sys.executable, "-m", "examples.stream.run", "--frontend", frontend, "--steps", "120"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "stream.png").stat().st_size > 10_000
    curves = json.loads((tmp_path / "stream.json").read_text())
    assert list(curves) == ["unbounded", "LRU, a tenth of the ids", "LFU, a tenth of the ids"]
    capacity = Stream().num_ids(120) // 10
    for title, values in curves.items():
        assert {len(curve) for curve in values.values()} == {6}
        assert title == "unbounded" or values["size"] == [capacity] * 6
    assert curves["unbounded"]["size"][-1] > 4 * capacity
    assert curves["unbounded"]["loss"][-1] < curves["unbounded"]["loss"][0]


def test_too_few_steps(tmp_path):
    command = [sys.executable, "-m", "examples.stream.run", "--steps", "50", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "too few --steps" in done.stderr
