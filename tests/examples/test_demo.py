# SPDX-License-Identifier: Apache-2.0
"""The demo as a whole, tiny: both frameworks, on one process and on two, train the same model."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = {"tensorflow": ("tensorflow", "horovod"), "torch": ("torch",)}
MISSING = [name for names in MODULES.values() for name in names if importlib.util.find_spec(name) is None]

# What run_demo --quick tells its trainers.
QUICK = ["--batch-size=250", "--max-table-rows=500", "--embedding-dim=8", "--learning-rate=0.01", "--threads=1"]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def demo(out, *options, status=0):
    command = [sys.executable, "-m", "examples.dlrm.run_demo", "--quick", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def handed_over(out):
    return [json.loads((out / f"{name}.json").read_text()) for name in ("handover", "handover-1")]


def metrics_of(out):
    return {name: json.loads((out / f"{name}.json").read_text()) for name in MODULES if (out / f"{name}.json").exists()}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return out, demo(out)


def test_both_frameworks_learn(two_ranks):
    metrics = metrics_of(two_ranks[0])
    achievable = json.loads((two_ranks[0] / "data-quick" / "dataset.json").read_text())["valid"]["achievable_auc"]
    for training in metrics.values():
        assert training["num_ranks"] == 2
        assert 0.65 < training["auc"] < achievable
        assert np.mean(training["losses"][-10:]) < training["losses"][0] - 0.05


def test_the_frameworks_agree(two_ranks):
    metrics = metrics_of(two_ranks[0])
    tensorflow, torch = metrics["tensorflow"], metrics["torch"]
    assert tensorflow["rows"] == torch["rows"]
    np.testing.assert_allclose(tensorflow["losses"], torch["losses"], rtol=0, atol=1e-4)
    assert tensorflow["auc"] == pytest.approx(torch["auc"], abs=1e-4)
    assert tensorflow["valid_loss"] == pytest.approx(torch["valid_loss"], abs=1e-4)


def test_ends_with_a_table_and_a_chart(two_ranks):
    out, done = two_ranks
    for expected in ("TensorFlow", "PyTorch", "horovodrun", "torchrun", "held-out AUC", "samples/s"):
        assert expected in done.stdout
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    # No terminal here, so no bars.
    assert "\r" not in done.stdout + done.stderr


def test_pytorch_goes_on_from_the_checkpoint_of_tensorflow(two_ranks):
    out, done = two_ranks
    source = metrics_of(out)["tensorflow"]
    two, one = handed_over(out)
    point, half = source["checkpoint"], source["steps"] // 2
    assert [point["step"], two["first_step"], one["first_step"]] == [half] * 3
    assert [two["num_ranks"], one["num_ranks"], one["steps"]] == [2, 1, 0]
    assert point["auc"] != source["auc"], "it learns after the checkpoint too"
    for target in (two, one):
        assert target["checkpoint"]["auc"] == pytest.approx(point["auc"], abs=1e-6)
        assert target["checkpoint"]["valid_loss"] == pytest.approx(point["valid_loss"], abs=1e-6)
    np.testing.assert_allclose(two["losses"], source["losses"][half:], rtol=0, atol=1e-5)
    assert two["auc"] == pytest.approx(source["auc"], abs=1e-5)
    assert f"Hand-over after step {half}: TensorFlow dumps, PyTorch loads" in done.stdout


@pytest.mark.slow
def test_tensorflow_goes_on_from_a_checkpoint_of_pytorch(two_ranks, tmp_path):
    out, _ = two_ranks
    wanted = metrics_of(out)["torch"]
    told = ["--data", str(out / "data-quick"), *QUICK]
    trainers = {name: [sys.executable, "-m", f"examples.dlrm.train_{name}", *told] for name in MODULES}
    folder, file = tmp_path / "checkpoint", tmp_path / "metrics.json"
    half = str(wanted["steps"] // 2)
    last = [*trainers["torch"], "--max-steps", half, "--dump", str(folder)]
    first = [*trainers["tensorflow"], "--load", str(folder), "--metrics", str(file)]
    for command in (last, first):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    np.testing.assert_allclose(found["losses"], wanted["losses"][int(half) :], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("framework", MODULES)
def test_one_process_trains_the_same_model(two_ranks, tmp_path, framework):
    demo(tmp_path, "--only", framework, "--world-size", "1")
    (single,) = metrics_of(tmp_path).values()
    assert single["num_ranks"] == 1
    np.testing.assert_allclose(single["losses"], metrics_of(two_ranks[0])[framework]["losses"], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_processes_read_the_same_batches(two_ranks, tmp_path):
    demo(tmp_path, "--readers", "2", "--device", "cpu")
    for framework, training in metrics_of(tmp_path).items():
        assert 0 < training["reading"] < 1
        np.testing.assert_allclose(training["losses"], metrics_of(two_ranks[0])[framework]["losses"], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_bfloat16_learns(two_ranks, tmp_path):
    demo(tmp_path, "--precision", "bfloat16")
    for framework, training in metrics_of(tmp_path).items():
        wanted = metrics_of(two_ranks[0])[framework]
        assert training["losses"] != wanted["losses"]
        np.testing.assert_allclose(training["losses"], wanted["losses"], rtol=0, atol=0.02)


@pytest.mark.slow
def test_trains_on_criteo_text(tmp_path, criteo_lines):
    # 25 rows in batches of 16 on 2 ranks: of the second, short batch rank 1 has no row.
    file = tmp_path / "day_0"
    file.write_text("".join("\t".join(line) + "\n" for line in criteo_lines(25)))
    options = ("--data", str(file), "--batch-size", "16", "--max-table-rows", "50", "--epochs", "2")
    demo(tmp_path / "out", *options)
    metrics = metrics_of(tmp_path / "out")
    for training in metrics.values():
        assert (training["rows"], training["steps"], training["valid_rows"]) == (2 * 23, 4, 2)
    np.testing.assert_allclose(metrics["tensorflow"]["losses"], metrics["torch"]["losses"], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_dynamic_tables_that_all_ids_fit_into_train_the_same_model(two_ranks, tmp_path):
    demo(tmp_path, "--dynamic")
    for framework, training in metrics_of(tmp_path).items():
        wanted = metrics_of(two_ranks[0])[framework]
        np.testing.assert_allclose(training["losses"], wanted["losses"], rtol=0, atol=1e-6)
        assert training["auc"] == pytest.approx(wanted["auc"], abs=1e-6)
    for target, wanted in zip(handed_over(tmp_path), handed_over(two_ranks[0]), strict=True):
        assert target["checkpoint"]["auc"] == pytest.approx(wanted["checkpoint"]["auc"], abs=1e-6)
        np.testing.assert_allclose(target["losses"], wanted["losses"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_dynamic_tables_of_raw_ids_that_do_not_all_fit(tmp_path, criteo_lines):
    file = tmp_path / "day_0"
    file.write_text("".join("\t".join(line) + "\n" for line in criteo_lines(45)))
    options = ("--data", str(file), "--batch-size", "8", "--max-table-rows", "8", "--epochs", "2", "--dynamic")
    demo(tmp_path / "out", *options)
    metrics = metrics_of(tmp_path / "out")
    for training in metrics.values():
        assert (training["rows"], training["valid_rows"]) == (2 * 41, 4)
    two, one = handed_over(tmp_path / "out")
    np.testing.assert_allclose(two["losses"], metrics["tensorflow"]["losses"][two["first_step"] :], rtol=0, atol=1e-5)
    assert one["checkpoint"]["valid_loss"] == pytest.approx(two["checkpoint"]["valid_loss"], abs=1e-6)
    np.testing.assert_allclose(metrics["tensorflow"]["losses"], metrics["torch"]["losses"], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("framework", MODULES)
def test_a_malformed_row_of_one_rank_ends_the_demo_with_its_place(tmp_path, criteo_lines, framework):
    lines = criteo_lines(40)
    lines[20][16] = "no id"
    file = tmp_path / "bad.csv"
    file.write_text("".join(",".join(line) + "\n" for line in lines))
    done = demo(tmp_path / "out", "--data", str(file), "--batch-size", "8", "--only", framework, status=1)
    place = f"{file}, row 21, column C3"
    title = {"tensorflow": "TensorFlow", "torch": "PyTorch"}[framework]
    assert f"\nerror: {title}: {place}: not a hexadecimal number of at most 16 digits: 'no id'\n" in done.stderr


def test_missing_data_is_said_before_anything_starts(tmp_path):
    done = demo(tmp_path / "out", "--data", str(tmp_path / "nowhere"), status=1)
    assert done.stderr == f"error: {tmp_path}/nowhere: no such file or directory\n"
