# SPDX-License-Identifier: Apache-2.0
"""Dumps of a DistributedEmbedding's tables: whole tables LAYER/NUMBER with states, whatever the placement, the number
of ranks and the framework were, and are. And increments of them.
"""

import importlib.util
import pathlib
import sys
from typing import Any

import launching
import numpy as np
import pytest

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))

import hybrid_matrix as matrix  # noqa: E402

from sparse_operation_kit.checkpoint import open_dump  # noqa: E402

NEEDED = ("tensorflow", "horovod", "torch")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")]


def run(frontend, num_ranks, folder, *actions):
    worker = [HERE / f"hybrid_{frontend}.py", folder, *actions]
    if num_ranks == 1:
        status, output = launching.run([sys.executable, *worker], timeout=500)
    else:
        launch = launching.torchrun if frontend == "torch" else launching.horovodrun
        status, output = launch(num_ranks, worker, timeout=500)
    assert status == 0 and all(f"passed {action}" in output for action in actions), output


def content(path):
    """name of a file -> its rows in the order of keys; and the steps."""
    found = {}
    with open_dump(path) as dump:
        for name, table in dump.tables.items():
            keys = np.concatenate([chunk for _, chunk in table.key_chunks()]).astype(np.int64)
            order = np.argsort(keys)
            found[name, "key"] = keys[order]
            files: dict[Any, Any] = {"weight": table.weight, **table.states}
            for what, file in files.items():
                found[name, what] = file_rows(table, file)[order]
        return found, dump.optimizer and dump.optimizer.iterations


def file_rows(table, file):
    dtype = np.dtype(file.spec.header.dtype)
    data = np.fromfile(file.file.path, dtype, offset=296)
    return data.reshape(len(data) // file.spec.columns, file.spec.columns)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Dumps of both frontends on two ranks, of a process alone, and what each read of the others'."""
    folder = tmp_path_factory.mktemp("hybrid")
    run("torch", 1, folder, "write:one:basic:Adagrad")
    run(
        "torch", 3, folder,
        "write:t3:groups:Adagrad", "write:t3adam:mixed:Adam", "write:t3row:columns:RowWiseAdagrad",
        "changes:t3changes:groups:Adagrad",
    )  # fmt: skip
    run(
        "tensorflow", 2, folder,
        "changes:f2changes:mixed:Adagrad", "follow:t3changes:f2_of_t3changes:columns:Adagrad",
        "write:f2:columns:Adagrad", "write:f2adam:groups:Adam", "read:one:f2_of_one:replicated:Adagrad",
        "read:t3:f2_of_t3:mixed:Adagrad", "read:t3adam:f2_of_t3adam:columns:Adam",
        "read:t3row:f2_of_t3row:rows:RowWiseAdagrad",
    )  # fmt: skip
    run(
        "torch", 2, folder,
        "follow:f2changes:t2_of_f2changes:groups:Adagrad",
        "read:one:t2_of_one:columns:Adagrad", "read:f2:t2_of_f2:groups:Adagrad", "read:f2adam:t2_of_f2adam:mixed:Adam",
        "read:t3row:t2_of_t3row:columns:RowWiseAdagrad", "read:t3:t2_of_t3:replicated:Adagrad",
        "read:t3adam:t2_of_t3adam:planned:Adam",
    )  # fmt: skip
    return folder


def test_whole_tables_under_their_names(folder):
    found, _ = content(folder / "t3adam")
    assert len({name for name, _ in found}) == len(matrix.TABLES)
    for number, (rows, width) in enumerate(matrix.TABLES):
        (name,) = {name for name, _ in found if name.startswith(f"layer_{number}")}
        assert found[name, "key"].tolist() == list(range(rows))
        assert {array.shape for (each, what), array in found.items() if each == name and what != "key"} == {
            (rows, width)
        }
    assert len(found) == 4 * len(matrix.TABLES)  # keys, rows, m, v


@pytest.mark.parametrize("reader", ["f2_of_one", "f2_of_t3", "f2_of_t3adam", "f2_of_t3row", "t2_of_one", "t2_of_f2",
                                    "t2_of_f2adam", "t2_of_t3row", "t2_of_t3", "t2_of_t3adam"])  # fmt: skip
def test_what_was_loaded_is_what_was_dumped(folder, reader):
    written, steps = content(folder / reader.split("_of_")[1])
    read, steps_read = content(folder / reader)
    assert read.keys() == written.keys() and steps == steps_read
    for name, array in written.items():
        if "t3row" in reader and "accumulator" in str(name):  # means over columns
            np.testing.assert_allclose(read[name], array, rtol=1e-6, err_msg=str(name))
        else:
            np.testing.assert_array_equal(read[name], array, str(name))


@pytest.mark.parametrize("follower", ["f2_of_t3changes", "t2_of_f2changes"])
def test_a_layer_follows_another(folder, follower):
    with np.load(folder / f"{follower.split('_of_')[1]}.npz") as wanted, np.load(folder / f"{follower}.npz") as got:
        assert len(got.files) == len(wanted.files) == len(matrix.TABLES)
        for name in wanted.files:
            np.testing.assert_array_equal(got[name], wanted[name], err_msg=name)


def trained():
    """The tables after all steps of Adagrad, by NumPy."""
    tables = [table.astype(np.float64) for table in matrix.first_rows()]
    sums = [np.full_like(table, 0.125) for table in tables]
    for step in range(matrix.STEPS):
        for table, total, ids, upstream in zip(tables, sums, *matrix.batch(step, 0, 1), strict=True):
            gradient = np.zeros_like(table)
            np.add.at(gradient, ids, upstream[:, None])
            total += gradient**2
            table -= matrix.RATE * gradient / np.sqrt(total)
    return tables


@pytest.mark.parametrize("reader", ["f2_of_one", "f2_of_t3", "t2_of_one", "t2_of_f2", "t2_of_t3"])
def test_training_goes_on(folder, reader):
    """As of a model that did not stop."""
    with np.load(folder / f"{reader}.npz") as got:
        for name, wanted in zip(got.files, trained(), strict=True):
            np.testing.assert_allclose(got[name], wanted, rtol=2e-5, atol=2e-6, err_msg=name)
