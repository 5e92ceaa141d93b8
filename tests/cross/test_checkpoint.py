# SPDX-License-Identifier: Apache-2.0
"""Dumps of either frontend on 1 to 4 ranks, loaded by either frontend on 1 to 4 ranks: the same bits, and training
goes on as if it had not stopped. The checks themselves are in checkpoint_matrix.py. Without a framework, dumps of every
number of ranks are read by every number of ranks in tests/format/test_round_trip.py.
"""

import importlib.util
import itertools
import os
import pathlib
import shutil
import sys

import launching
import numpy as np
import pytest

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))

import checkpoint_matrix as matrix  # noqa: E402

NEEDED = ("tensorflow", "horovod", "torch")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def _cases():
    """tests/format/checkpoint_cases.py, which lays out dumps of SOK 2.x."""
    spec = importlib.util.spec_from_file_location("checkpoint_cases", HERE.parent / "format" / "checkpoint_cases.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(frontend, num_ranks, folder, *checks):
    """One launch for all checks: starting the processes takes longer than they do."""
    worker = [HERE / f"checkpoint_{frontend}.py", folder, *checks]
    if num_ranks == 1:
        status, output = launching.run([sys.executable, *worker], timeout=900)
    else:
        # Three ranks of TensorFlow are workers of a MultiWorkerMirroredStrategy.
        tensorflow = launching.strategy_run if num_ranks == 3 else launching.horovodrun
        launch = launching.torchrun if frontend == "torch" else tensorflow
        status, output = launch(num_ranks, worker, timeout=900)
    passed = [check for check in checks if f"passed {check} " in output]
    assert status == 0 and passed == list(checks), output


def write(folder, writers):
    """The dumps of these writers, one of SOK 2.x, and a damaged one."""
    for frontend, num_ranks in writers:
        run(frontend, num_ranks, folder, "write")
    cases = _cases()
    arrays = {}
    for t, (rows, dimension) in enumerate(((29, 4), (7, 16))):
        model = cases.model(f"old{t}:0", rows, dimension, seed=t)
        cases.write_legacy(folder / f"legacy{t}", model, ranks=2)
        arrays.update({f"weight{t}": model.weights, **{f"{slot}{t}": a for slot, a in model.states.items()}})
    np.savez(folder / "legacy.npz", **arrays)
    shutil.copytree(matrix.where(folder, "training", "tensorflow", 2, "Adam"), folder / "damaged")
    with open(folder / "damaged" / "trained1_0-weight", "r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


def test_each_loads_the_other(tmp_path):
    """Few pairs: what may go wrong in one of the others alone is `test_dumps_load`'s."""
    write(tmp_path, [("tensorflow", 2), ("torch", 1)])
    run("torch", 2, tmp_path, "read:tensorflow:2", "legacy", "errors")
    run("tensorflow", 1, tmp_path, "read:torch:1", "legacy", "errors")


def writers_for(frontend, num_ranks):
    """(frontend, number of ranks) of the dumps that a reader loads: over all readers, each dump is loaded by both
    frontends, and dumps of each number of ranks by each number of ranks.
    """
    reader = matrix.FRONTENDS.index(frontend)
    for writer in matrix.FRONTENDS:
        for writers in matrix.RANKS:
            if (writers + reader - num_ranks) % len(matrix.RANKS) == 0:
                yield writer, writers


def test_pairs():
    pairs = [
        (writer, reader)
        for reader in itertools.product(matrix.FRONTENDS, matrix.RANKS)
        for writer in writers_for(*reader)
    ]
    assert len(pairs) == 8
    assert {(writer, reader[0]) for writer, reader in pairs} == set(
        itertools.product(itertools.product(matrix.FRONTENDS, matrix.RANKS), matrix.FRONTENDS)
    )
    assert {(writer[1], reader[1]) for writer, reader in pairs} == set(itertools.product(matrix.RANKS, repeat=2))


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """A folder with those of every writer."""
    folder = tmp_path_factory.mktemp("dumps")
    write(folder, [*itertools.product(matrix.FRONTENDS, matrix.RANKS), ("torch", 1)])  # "errors" damages that
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", matrix.RANKS)
@pytest.mark.parametrize("frontend", matrix.FRONTENDS)
def test_dumps_load(dumps, frontend, num_ranks):
    checks = [f"read:{writer}:{writers}" for writer, writers in writers_for(frontend, num_ranks)]
    run(frontend, num_ranks, dumps, *checks, "legacy", "errors")
