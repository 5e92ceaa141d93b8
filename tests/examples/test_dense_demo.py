# SPDX-License-Identifier: Apache-2.0
"""The dense demo: its data, the loader for scripts of NVTabular's, the model, and the whole as a user runs it."""

import contextlib
import itertools
import json
import pathlib
import re
import subprocess
import sys
import threading
from typing import Any

import launching
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.dense_demo import shape
from examples.dense_demo.generate import Recipe
from examples.dlrm import dataset
from examples.dlrm.errors import DataError
from examples.dlrm.reader import Reader
from examples.dlrm.writing import generate

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = {"slots": 4, "keys": 3, "vocabulary": 90}


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """(directory, summary) of 3000 training and 500 held-out rows in 2 files each."""
    directory = tmp_path_factory.mktemp("samples")
    return directory, generate(directory, Recipe(rows=3000, valid_rows=500, files=2, rows_per_group=128, **SMALL))


def test_generated_samples(samples):
    directory, summary = samples
    layout = shape.layout(4, 3)
    (batch,) = Reader(dataset.find(directory, layout.names).train, 3000, layout)
    keys = np.asarray(batch.arrays["feature"])
    assert keys.shape == (3000, 4, 3)
    assert (keys // 22 == np.arange(4)[:, None]).all(), "each slot has its own keys, 22 of 90 // 4"
    assert (np.diff(keys, axis=2) <= 0).all() and len(np.unique(keys)) == 88
    assert pq.read_schema(directory / "train" / "part-0000.parquet").field("feature").type == pa.list_(
        pa.list_(pa.int64())
    )
    for part in ("train", "valid"):
        assert 0.8 < summary[part]["achievable_auc"] < 0.95
    with pytest.raises(ValueError, match="--vocabulary must be at least --slots, 4, not 3"):
        Recipe(slots=4, vocabulary=3)


def loader_of(*arguments, **options):
    pytest.importorskip("tensorflow")
    from examples.dense_demo.loader import KerasSequenceLoader

    return KerasSequenceLoader(*arguments, **options)


def test_the_loader_gives_values_and_counts(samples):
    files = sorted((samples[0] / "train").iterdir())
    names = {"label_names": ["label"], "cont_names": ["feature"]}
    table = pa.concat_tables([pq.read_table(file) for file in files])
    expected = np.array(table["feature"].to_pylist())
    for given_paths in (files, [str(file) for file in files], str(files[0].parent / "*.parquet")):
        loader = loader_of(
            given_paths, 700, engine="parquet", shuffle=False, buffer_size=0.06, sparse_as_dense=True, **names
        )
        assert len(loader) == 5
        for _ in range(2):
            batches = list(loader)
            assert [len(labels) for _, labels in batches] == [700] * 4 + [200]
            values = np.concatenate([features["feature"][0] for features, _ in batches])
            np.testing.assert_array_equal(values.reshape(-1, 4, 3), expected)
    features, labels = batches[-1]
    values, nnzs = features["feature"]
    assert (values.dtype, nnzs.dtype, labels.dtype) == ("int64", "int64", "int64")
    assert (values.shape, nnzs.shape, labels.shape) == ((200 * 12, 1), (200, 1), (200, 1))
    assert (nnzs.numpy() == 12).all()
    np.testing.assert_array_equal(labels[:, 0], table["label"].to_numpy()[-200:])
    assert len(loader_of(files, 700, drop_last=True, **names)) == len(
        list(loader_of(files, 700, drop_last=True, **names))
    )


def test_the_loader_takes_columns_of_all_kinds(tmp_path):
    rows = 50
    columns: dict[str, Any] = {
        "price": np.arange(rows) / 2,
        "user": np.arange(rows, dtype=np.int32),
        "tags": [list(range(i % 4)) for i in range(rows)],
        "deep": [[[i] * (i % 3), [], [0.5]] for i in range(rows)],
        "clicked": np.arange(rows) % 2,
        "rating": np.arange(rows) / 10,
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    names = {"label_names": ["clicked", "rating"], "cat_names": ["user", "tags"], "cont_names": ["price", "deep"]}
    seen = {name: [] for name in columns}
    for features, labels in loader_of([tmp_path / "x.parquet"], 8, shuffle=False, **names):
        assert list(features) == ["user", "tags", "price", "deep"] and len(labels) == 2
        for name, tensor in (*features.items(), ("clicked", labels[0]), ("rating", labels[1])):
            if isinstance(tensor, tuple):
                values, nnzs = (part.numpy()[:, 0] for part in tensor)
                seen[name] += [part.tolist() for part in np.split(values, np.cumsum(nnzs)[:-1])]
            else:
                assert tensor.shape[1:] == (1,)
                seen[name] += tensor.numpy()[:, 0].tolist()
    flat = {**columns, "deep": [list(itertools.chain(*row)) for row in columns["deep"]]}
    for name, found in seen.items():
        assert len(found) == rows
        for one, other in zip(found, flat[name], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


@settings(max_examples=15)
@given(st.integers(1, 40), st.integers(1, 3), st.sampled_from([0.5, 2, 30, 10_000]), st.booleans())
def test_shuffled_rows_are_the_same_rows_on_any_number_of_ranks(shuffle_samples, batch_size, ranks, buffer, drop_last):
    expected, file = shuffle_samples
    options = {"label_names": ["label"], "cat_names": ["ids", "bags"], "drop_last": drop_last, "buffer_size": buffer}
    loaders = [
        loader_of([file], batch_size, shuffle=True, global_size=ranks, global_rank=r, **options) for r in range(ranks)
    ]
    orders = []
    for _ in range(2):
        steps = list(zip(*map(list, loaders), strict=True))
        assert len(steps) == len(loaders[0])
        found = []
        for features, label in itertools.chain(*steps):
            values, nnzs = (part.numpy()[:, 0] for part in features["bags"])
            ids = features["ids"].numpy()[:, 0]
            np.testing.assert_array_equal(label[:, 0], ids % 2)
            bags = np.split(values, np.cumsum(nnzs)[:-1]) if len(ids) else []
            assert [bag.tolist() for bag in bags] == [expected[i] for i in ids]
            found += ids.tolist()
        whole = batch_size * ranks
        assert sorted(found) == list(range(len(expected) // whole * whole if drop_last else len(expected)))
        orders.append(found)
    if buffer == 10_000 and len(orders[0]) > 20 and batch_size < 40:
        assert orders[0] != orders[1] and orders[0] != sorted(orders[0])


@pytest.fixture(scope="module")
def shuffle_samples(tmp_path_factory):
    bags = [[i] * (i % 4) for i in range(97)]
    file = tmp_path_factory.mktemp("shuffle") / "x.parquet"
    pq.write_table(pa.table({"label": np.arange(97) % 2, "ids": np.arange(97), "bags": bags}), file, row_group_size=10)
    return bags, file


def test_what_the_loader_refuses(tmp_path, samples):
    file = tmp_path / "x.parquet"
    good = [[1, 2], [3, 4]]
    pq.write_table(pa.table({"feature": [good, good, [[1, 2], [3]]], "label": [0, 1, 0]}), file)
    names = {"label_names": ["label"], "cont_names": ["feature"], "shuffle": False}
    dense = loader_of([file], 2, sparse_as_dense=True, **names)
    before = threading.active_count()
    with pytest.raises(DataError, match=r"x.parquet, row 3, column feature: lists of 2 expected at depth 2 of 2"):
        list(dense)
    assert threading.active_count() == before
    (_, (nnzs)), _ = list(loader_of([file], 2, **names))[1][0]["feature"], None
    assert nnzs.numpy().tolist() == [[3]], "rows of any lengths are fine otherwise"
    for problem, options in (
        ("engine must be 'parquet', not 'csv'", {"engine": "csv"}),
        ("buffer_size must be positive, not 0", {"buffer_size": 0}),
        ("cat_names or cont_names must name a column", {"cont_names": []}),
        ("columns missing: other", {"cat_names": ["other"]}),
        ("rank 2 is not one of 2", {"global_size": 2, "global_rank": 2}),
    ):
        with pytest.raises(ValueError, match=re.escape(problem)):
            loader_of([file], 2, **{**names, **options})
    with pytest.raises(ValueError, match="there is no file to read"):
        loader_of(str(tmp_path / "*.pq"), 2, **names)
    with pytest.raises(DataError, match=r"nowhere.parquet: no such file"):
        loader_of([tmp_path / "nowhere.parquet"], 2, **names)


def test_leaving_the_loader_early_ends_its_thread(samples):
    before = threading.active_count()
    for _ in loader_of(str(samples[0] / "train" / "*"), 10, ["label"], cont_names=["feature"]):
        break
    assert threading.active_count() == before


@pytest.fixture
def alone():
    """The engine of a process without launcher, and rank 0 of 1."""
    pytest.importorskip("tensorflow")
    import sparse_operation_kit as sok
    from sparse_operation_kit.tensorflow import runtime

    class Alone:
        scope = staticmethod(contextlib.nullcontext)
        run = staticmethod(lambda function, *arguments: function(*arguments))
        summed = staticmethod(lambda gradients: gradients)

    class Ranks:
        rank, num_ranks = 0, 1
        sum = staticmethod(lambda array: array)

    runtime.shutdown()
    sok.Init()
    yield Alone(), Ranks()
    runtime.shutdown()


def test_the_model_learns_and_goes_on_from_a_dump(samples, alone, tmp_path):
    from examples.dense_demo.model import TrainedModel
    from examples.dense_demo.settings import Settings
    from examples.dlrm import training

    engine, ranks = alone

    def train(**options):
        told = {"batch_size": 100, "units": 32, "layers": 2, "learning_rate": 0.01, **SMALL, **options}
        settings = Settings(samples[0], **told)
        return training.run("alone", TrainedModel(settings, engine), ranks, settings)

    whole = train(evaluate_every=10)
    aucs = [point.auc for point in whole.evaluations]
    assert [point.step for point in whole.evaluations] == [10, 20, 30]
    assert aucs[0] < aucs[-1] and aucs[-1] > 0.75, aucs
    first, last = train(dump=tmp_path, max_steps=15), train(load=tmp_path)
    assert (last.first_step, last.steps) == (15, 15)
    np.testing.assert_allclose(first.losses + last.losses, whole.losses, rtol=0, atol=1e-4)
    np.testing.assert_allclose(train(optimizer="adam").losses, whole.losses, rtol=0, atol=1e-4)
    slower = train(optimizer="sgd", learning_rate=0.5)
    assert slower.losses[-1] < slower.losses[0]
    with pytest.raises(ValueError, match="--dump and --load take --optimizer plugin_adam"):
        train(optimizer="adam", dump=tmp_path)


def demo(out, *options, status=0):
    command = [sys.executable, "-m", "examples.dense_demo.run_demo", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_horovod_and_a_strategy_train_the_same_model(tmp_path):
    pytest.importorskip("horovod.tensorflow")
    # 61 batches, the last one of one row: rank 0 has none of it.
    sizes = ["--rows=6001", "--valid-rows=500", "--slots=4", "--keys=3", "--vocabulary=90", "--batch-size=100"]
    model = ["--units=32", "--layers=2", "--learning-rate=0.01", "--threads=1"]
    done = demo(tmp_path, "--engine=both", *sizes, *model)
    horovod, strategy = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("horovod", "tensorflow"))
    for found in (horovod, strategy):
        assert (found["num_ranks"], found["steps"], found["rows"]) == (2, 61, 6001)
        aucs = [point["auc"] for point in found["evaluations"]]
        assert len(aucs) == 4 and aucs[0] < aucs[-1] - 0.05 and aucs[-1] > 0.75, aucs
    np.testing.assert_allclose(strategy["losses"], horovod["losses"], rtol=0, atol=1e-5)
    assert strategy["auc"] == pytest.approx(horovod["auc"], abs=1e-5)
    for expected in ("horovodrun", "examples.workers", "held-out AUC", "samples/s", "Largest difference"):
        assert expected in done.stdout
    assert (tmp_path / "training.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_script_with_its_loader_replaced(samples, tmp_path):
    pytest.importorskip("tf_keras")
    script = pathlib.Path(__file__).with_name("dense_demo_script.py")
    told = ["--data_filename", samples[0] / "train" / "*.parquet", "--global_batch_size", "200", "--losses", tmp_path]
    variables = {"PYTHONPATH": str(ROOT), "TF_USE_LEGACY_KERAS": "1"}
    status, output = launching.strategy_run(2, [script, *told, "--optimizer", "adam"], 120, **variables)
    assert status == 0, output
    losses = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert losses[0] == losses[1] and len(losses[0]) == 15
    assert losses[0][-1] < losses[0][0] - 0.05


def test_the_trainer_on_tf_keras(samples, tmp_path):
    pytest.importorskip("tf_keras")
    sizes = ["--slots=4", "--keys=3", "--vocabulary=90", "--batch-size=100", "--units=32", "--layers=2"]
    told = ["--data", samples[0], "--engine=tensorflow", "--learning-rate=0.01", "--metrics", tmp_path / "m.json"]
    command = [sys.executable, "-m", "examples.dense_demo.train", *told, *sizes, "--dump", tmp_path / "dump"]
    status, output = launching.run(command, 120, cwd=ROOT, TF_USE_LEGACY_KERAS="1")
    assert status == 0, output
    assert json.loads((tmp_path / "m.json").read_text())["auc"] > 0.75
    with np.load(tmp_path / "dump" / "dense.npz") as arrays:
        states = [name for name in arrays if name.startswith("optimizer.")]
        assert len(states) > 2 * sum(name.startswith("model.") for name in arrays), "Adam's two moments of each layer"


def test_an_uneven_row_ends_the_demo_with_its_place(tmp_path):
    good = [[1, 2], [3, 4]]
    pq.write_table(pa.table({"feature": [good] * 30 + [[[1, 2], [3]]], "label": [0] * 31}), tmp_path / "x.parquet")
    sizes = ("--slots=2", "--keys=2", "--batch-size=8", "--world-size=1", "--engine=tensorflow")
    done = demo(tmp_path / "out", "--data", str(tmp_path / "x.parquet"), *sizes, status=1)
    place = f"{tmp_path}/x.parquet, row 31, column feature"
    assert f"error: tf.distribute: {place}: lists of 2 expected at depth 2 of 2, not of 1\n" in done.stderr
    done = demo(tmp_path / "out", "--data", str(tmp_path / "nowhere"), *sizes, status=1)
    assert done.stderr == f"error: {tmp_path}/nowhere: no such file or directory\n"
    done = demo(tmp_path / "out", "--slots=10", "--vocabulary=9", status=2)
    assert "--vocabulary must be at least --slots, 10, not 9" in done.stderr
