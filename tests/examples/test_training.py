# SPDX-License-Identifier: Apache-2.0
"""The loop, its settings, progress and report, with a stand-in for the model."""

import dataclasses
import io
import sys
from typing import Any

import numpy as np
import pytest
import tqdm
from rich.console import Console

from examples.dlrm import dense_file, failure, launch, options, progress, report, training
from examples.dlrm.architecture import Architecture
from examples.dlrm.errors import DataError
from examples.dlrm.settings import Settings

LOG_2: Any = pytest.approx(np.log(2))


class ConstantModel:
    """Gives every row the same logit, so that losses are known."""

    def __init__(self, logit=0.0):
        self.logit = logit
        self.rows = []
        self.dumped = []

    def prepare(self, batch):
        return batch

    def train(self, batch):
        self.rows.append(len(batch.labels))
        return float(np.sum(np.logaddexp(0, self.logit) - batch.labels * self.logit))

    def logits(self, batch):
        return np.full(len(batch.labels), self.logit, np.float32)

    def dump(self, folder, step):
        self.dumped.append((folder, step, len(self.rows)))

    def load(self, folder):
        return int(folder.name)


class OneRank:
    rank = 0
    num_ranks = 1

    def sum(self, array):
        return array


def run(directory, logit=0.0, **options):
    model = ConstantModel(logit)
    return model, training.run("None", model, OneRank(), Settings(directory, **options))


def test_losses_are_means_over_global_batches(generated):
    model, metrics = run(generated[0], batch_size=1500, epochs=2)
    assert model.rows == [1500, 1500, 1500, 500] * 2
    assert (metrics.steps, metrics.rows, metrics.valid_rows) == (8, 10_000, 1000)
    np.testing.assert_allclose(metrics.losses, np.log(2))
    assert metrics.valid_loss == pytest.approx(np.log(2))
    assert metrics.auc == 0.5


def test_the_held_out_loss_is_that_of_the_labels(generated):
    directory, summary = generated
    _, metrics = run(directory, logit=-1.0, max_steps=1)
    rate = summary["valid"]["click_rate"]
    assert metrics.valid_loss == pytest.approx(rate * np.log1p(np.e) + (1 - rate) * np.log1p(np.exp(-1)), rel=1e-6)


def test_max_steps_ends_all_epochs(generated):
    model, _ = run(generated[0], batch_size=1500, epochs=3, max_steps=5)
    assert model.rows == [1500, 1500, 1500, 500, 1500]


@pytest.mark.parametrize("steps", [1, 5, 6])
def test_few_steps_have_a_speed_too(generated, steps):
    _, metrics = run(generated[0], batch_size=100, max_steps=steps)
    assert metrics.steps == steps and metrics.samples_per_second > 0


def test_metrics_are_written(generated, tmp_path):
    file = tmp_path / "new" / "metrics.json"
    _, metrics = run(generated[0], metrics=file)
    assert training.read_metrics(file) == metrics


def test_a_checkpoint_in_the_middle(generated, tmp_path):
    options = {"batch_size": 1500, "epochs": 2, "metrics": tmp_path / "metrics"}
    model, metrics = run(generated[0], dump=tmp_path / "d", dump_after=3, **options)
    assert model.dumped == [(tmp_path / "d", 3, 3)] and metrics.steps == 8
    assert metrics.checkpoint == training.Evaluation(3, LOG_2, 0.5)
    assert training.read_metrics(tmp_path / "metrics") == metrics


def test_evaluations_on_the_way(generated, tmp_path):
    options = {"batch_size": 1500, "metrics": tmp_path / "metrics"}
    model, metrics = run(generated[0], evaluate_every=2, dump=tmp_path / "d", dump_after=2, **options)
    assert [point.step for point in metrics.evaluations] == [2, 4]
    assert metrics.checkpoint == metrics.evaluations[0] == training.Evaluation(2, LOG_2, 0.5)
    assert model.dumped == [(tmp_path / "d", 2, 2)] and metrics.evaluations[-1].auc == metrics.auc
    assert training.read_metrics(tmp_path / "metrics") == metrics
    assert [point.step for point in run(generated[0], batch_size=1500)[1].evaluations] == [4]


def test_a_checkpoint_at_the_end(generated, tmp_path):
    model, metrics = run(generated[0], batch_size=1500, dump=tmp_path / "d")
    assert model.dumped == [(tmp_path / "d", 4, 4)]
    assert metrics.checkpoint == training.Evaluation(4, metrics.valid_loss, metrics.auc)


@pytest.mark.parametrize(
    ("step", "options", "rows"),
    [
        (3, {}, [500, 1500, 1500, 1500, 500]),
        (4, {}, [1500, 1500, 1500, 500]),
        (6, {}, [1500, 500]),
        (6, {"max_steps": 7}, [1500]),
        (3, {"max_steps": 3}, []),
        (8, {}, []),
    ],
)
def test_goes_on_with_the_batch_after_the_checkpoint(generated, tmp_path, step, options, rows):
    model, metrics = run(generated[0], batch_size=1500, epochs=2, load=tmp_path / str(step), **options)
    assert model.rows == rows
    assert (metrics.first_step, metrics.steps, metrics.checkpoint.step) == (step, len(rows), step)


def test_dense_layers_beside_the_tables(tmp_path):
    arrays = {"a.kernel": np.ones((2, 3), np.float32), "a.bias": np.zeros(3, np.float32)}
    dense_file.save(tmp_path / "new", 1, {})
    dense_file.save(tmp_path / "new", 7, arrays)
    found = dense_file.load(tmp_path / "new", 7)
    assert set(found) == set(arrays)
    np.testing.assert_array_equal(found["a.kernel"], arrays["a.kernel"])
    with pytest.raises(DataError, match="is of step 7, but the tables beside it are of step 8"):
        dense_file.load(tmp_path / "new", 8)
    with pytest.raises(DataError, match="cannot be read"):
        dense_file.load(tmp_path / "nowhere", 7)
    (tmp_path / "new" / "dense.npz").write_bytes(b"no zip file")
    with pytest.raises(DataError, match="cannot be read"):
        dense_file.load(tmp_path / "new", 7)


def test_a_broken_model_leaves_no_thread(generated):
    import threading

    before = threading.active_count()
    model = ConstantModel()
    model.train = lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        training.run("None", model, OneRank(), Settings(generated[0], batch_size=10))
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--epochs", "0", "--epochs must be at least 1, not 0"),
        ("--batch-size", "-5", "--batch-size must be at least 1"),
        ("--learning-rate", "nan", "--learning-rate must be positive"),
        ("--seed", "-1", "--seed must not be negative"),
        ("--optimizer", "adam", "invalid choice: 'adam'"),
    ],
)
def test_bad_settings_are_refused(option, value, problem, capsys):
    with pytest.raises(SystemExit) as caught:
        options.parse(Settings, "", ["--data", "x", option, value])
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("dynamic", [False, True])
def test_settings_survive_the_command_line(tmp_path, dynamic):
    files = {name: tmp_path / name for name in ("data", "metrics", "progress", "dump", "load")}
    numbers: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 30,
        "max_steps": 4,
        "embedding_dim": 5,
        "max_table_rows": 6,
        "seed": 8,
    }
    more: dict[str, Any] = {"threads": 9, "readers": 3, "dump_after": 3, "evaluate_every": 10, "learning_rate": 0.125}
    more |= {"optimizer": "sgd", "device": "cpu", "precision": "bfloat16"}
    told = Settings(dynamic=dynamic, compiled=not dynamic, **files, **numbers, **more)
    assert set(options.names(Settings)) == {*files, *numbers, *more, "dynamic", "compiled"}
    assert options.parse(Settings, "", options.to_arguments(told)) == told


def test_initial_values_depend_on_the_seed_alone():
    one, same, other = (Architecture().top_layers(seed) for seed in (1, 1, 2))
    assert [layer.kernel.shape for layer in one] == [(16 + 27 * 13, 128), (128, 64), (64, 1)]
    for layer, again, different in zip(one, same, other, strict=True):
        np.testing.assert_array_equal(layer.kernel, again.kernel)
        assert not np.array_equal(layer.kernel, different.kernel)
    assert len(set(Architecture().pairs)) == 27 * 13


def test_progress_crosses_processes(tmp_path):
    seen = []

    class Recorder:
        def report(self, state):
            seen.append(state)

        def close(self):
            seen.append("closed")

    state = progress.State("train", 3, 3, 0.5, 100.0, 0.0)
    with progress.Follower(tmp_path / "p", Recorder()) as follower:
        follower.poll()
        progress.FileReporter(tmp_path / "p").report(state)
        follower.poll()
    assert seen == [state, state, "closed"]


def test_a_bar_completes_a_phase_whose_end_it_has_not_seen(monkeypatch):
    bars = []

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    class Tqdm(tqdm.tqdm):
        def __init__(self, **options):
            super().__init__(file=Terminal(), ncols=100, **options)
            bars.append(self)

    monkeypatch.setattr(progress, "tqdm", Tqdm)
    bar = progress.Bar("PyTorch")
    bar.report(progress.State("train", 7, 10, 0.5, 100.0, 0.0))
    bar.report(progress.State("valid", 2, None, 0.25, 3000.0, 0.5))
    bar.close()
    assert [bar.n for bar in bars] == [10, 2]
    assert "PyTorch train: 100%" in bars[0].fp.getvalue()
    assert "loss 0.2500, 3,000 samples/s" in bars[1].fp.getvalue()


def test_lines_are_few(capsys):
    lines = progress.Lines("TensorFlow")
    for step in range(1, 101):
        lines.report(progress.State("train", step, 100, 0.25, 1234.0, 0.125))
    assert capsys.readouterr().out == "TensorFlow train: step 100/100, loss 0.2500, 1,234 samples/s, reading 12%\n"


def metrics_of(framework, losses, ranks=2):
    held_out, told = (50, 0.5, 0.75), {"precision": "float32"}
    steps = len(losses)
    return training.Metrics(framework, ranks, steps, 100, losses, 1.5, 5000.0, 0.25, *held_out, 0, None, [], told)


def test_the_table_compares(tmp_path):
    trainings = [metrics_of("TensorFlow", [0.7, 0.5]), metrics_of("PyTorch", [0.7, 0.50002])]
    output = io.StringIO()
    report.print_table(trainings, 0.8, Console(file=output, width=100))
    text = output.getvalue()
    for expected in ("TensorFlow", "PyTorch", "horovodrun", "torchrun", "2.0e-05", "0.7500", "5,000", "0.8000"):
        assert expected in text
    assert report.largest_difference(trainings) == pytest.approx(2e-5)


def handed_over(auc):
    source = dataclasses.replace(metrics_of("TensorFlow", [0.7] * 4), checkpoint=training.Evaluation(2, 0.6, 0.7))
    point = training.Evaluation(2, 0.6, auc)
    target = dataclasses.replace(metrics_of("PyTorch", [0.7] * 2), first_step=2, checkpoint=point)
    looked = dataclasses.replace(metrics_of("PyTorch", [], 1), first_step=2, checkpoint=point)
    return source, [target, looked]


def test_the_hand_over_is_compared(tmp_path):
    source, targets = handed_over(0.70001)
    output = io.StringIO()
    report.print_handover(source, targets, Console(file=output, width=100))
    for expected in ("after step 2: TensorFlow dumps, PyTorch loads", "0.7000", "the same to 1.0e-05", "5e-05"):
        assert expected in output.getvalue()
    assert report.handover_difference(source, targets) == pytest.approx(1e-5)
    report.draw([source, source], tmp_path / "loss.png", targets)
    assert (tmp_path / "loss.png").stat().st_size > 10_000


@pytest.mark.parametrize("count", [1, 2])
def test_the_chart_is_a_png(tmp_path, count):
    trainings = [metrics_of("TensorFlow", [0.7, 0.5, 0.5]), metrics_of("PyTorch", [0.7, 0.5, 0.5001])]
    report.draw(trainings[:count], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_trainer_is_quoted(tmp_path):
    command = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
    with pytest.raises(launch.TrainerFailed, match=r"(?s)status 3; see .*log.*the reason"):
        launch.run("PyTorch", command, tmp_path / "log", tmp_path / "progress")


def test_the_first_reason_is_the_one_that_is_told(tmp_path):
    progress_file = tmp_path / "x.progress"
    for message in ("the cause", "a consequence"):
        with pytest.raises(OSError, match=message), failure.reported(progress_file):
            raise OSError(message)
    assert failure.reason_file(progress_file).read_text() == "OSError: the cause"
    # What an earlier run has left is not told again.
    launch.run("PyTorch", [sys.executable, "-c", ""], tmp_path / "log", progress_file)
    write = f"open({str(failure.reason_file(progress_file))!r}, 'w').write('so it is')"
    with pytest.raises(launch.TrainerFailed, match="PyTorch: so it is"):
        launch.run("PyTorch", [sys.executable, "-c", write + "; raise SystemExit(1)"], tmp_path / "log", progress_file)


def test_trainers_are_started_by_their_launchers(monkeypatch):
    monkeypatch.setattr(launch, "_horovodrun", lambda: "horovodrun")
    assert launch.command("torchrun", 1, "some.module", ["--x"]) == [sys.executable, "-m", "some.module", "--x"]
    torch = launch.command("torchrun", 3, "some.module", [])
    assert torch[1:3] == ["-m", "torch.distributed.run"]
    assert torch[torch.index("--nproc_per_node") + 1] == "3"
    horovod = launch.command("horovodrun", 2, "some.module", [])
    assert horovod[:3] == ["horovodrun", "-np", "2"]
    assert horovod[-1] == "some.module"
    workers = launch.command("workers", 2, "some.module", ["--x"])
    assert workers[1:5] == ["-m", "examples.workers", "-np", "2"]
    assert workers[5:] == [*horovod[3:], "--x"]
