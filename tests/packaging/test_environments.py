# SPDX-License-Identifier: Apache-2.0
"""Empty environments, as a stranger has them: the lines that install, on each Python and framework of README's table.

Each downloads its framework and compiles for it. `make installs` runs them; `make test` does not.
"""

import os
import pathlib
import shutil
import subprocess

import launching
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

USE_CORE = """
import numpy as np
from sparse_operation_kit import core
table = core.Table(np.arange(12, dtype=np.float32).reshape(6, 2))
output, = core.gather_combine([table], [core.Lookup(np.array([1, 5]), row_splits=np.array([0, 2]), combiner="sum")])
assert output.tolist() == [[12.0, 14.0]], output
"""
TRAIN = {
    "tensorflow": """
import numpy as np, tensorflow as tf
import sparse_operation_kit as sok
sok.init()
tables = [sok.Variable(np.ones((10, 4), np.float32)), sok.DynamicVariable(dimension=4, initializer="ones")]
optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.5))
ids = tf.ragged.constant([[1, 2], [2]], dtype=tf.int64)
@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(out) for out in sok.lookup_sparse(tables, [ids, ids], combiners=["sum", "sum"])])
    optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables))
    return loss
losses = [float(step()) for _ in range(2)]
assert losses == [24.0, 24.0 - 0.5 * 2 * 4 * (1 + 2 * 2)], losses
""",
    "torch": """
import torch
import sparse_operation_kit.torch as sok
sok.init()
tables = [sok.Variable(torch.ones(10, 4)), sok.DynamicVariable(dimension=4, initializer="ones")]
optimizer = sok.OptimizerWrapper(torch.optim.SGD(tables, lr=0.5))
ids = (torch.tensor([1, 2, 2]), torch.tensor([0, 2, 3]))
def step():
    optimizer.zero_grad()
    loss = sum(out.sum() for out in sok.lookup_sparse(tables, [ids, ids], combiners=["sum", "sum"]))
    loss.backward()
    optimizer.step()
    return loss.item()
losses = [step() for _ in range(2)]
assert losses == [24.0, 24.0 - 0.5 * 2 * 4 * (1 + 2 * 2)], losses
""",
}
CORE_ALONE = {"SOK_WITH_TENSORFLOW": "0", "SOK_WITH_TORCH": "0"}

pytestmark = pytest.mark.installs


class Environment:
    """An empty virtual environment, and a copy of the sources to install into it."""

    def __init__(self, version, folder, source):
        python = shutil.which(f"python{version}")
        probe = python and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0
        if not probe:
            pytest.skip(f"there is no Python {version}")
        self.folder, self.source = folder, source
        self._run(python, "-m", "venv", folder)
        self._python = folder / "bin" / "python"

    def install(self, *arguments, fails=False, **variables):
        """The output of pip; everything is compiled without CUDA, which changes nothing here."""
        settings = {"SOK_WITH_CUDA": "0", **variables}
        return self._run(self._python, "-m", "pip", "install", *arguments, fails=fails, **settings)

    def uv_install(self, *arguments, fails=False):
        command = (self._python, "-m", "uv", "pip", "install", "--python", self._python, *arguments)
        return self._run(*command, fails=fails, SOK_WITH_CUDA="0")

    def use(self, program):
        return self._run(self._python, "-c", program)

    def _run(self, *command, fails=False, **variables):
        variables = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONPATH": None, **variables}
        status, output = launching.run([str(part) for part in command], timeout=3600, cwd=self.source, **variables)
        assert (status != 0) == fails, output
        return output


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What a clone has; compiled files stay in it from test to test."""
    folder = tmp_path_factory.mktemp("source")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(os.path.isfile, (ROOT / each for each in names if each)):
        target = folder / name.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, target)
    return folder


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_without_a_framework(source, tmp_path, version):
    environment = Environment(version, tmp_path / "venv", source)
    for line in (".", ".[torch]", ".[tensorflow]"):
        output = environment.install(line, fails=True)
        assert "Install one first" in output and "SOK_WITH_TORCH=1 pip install '.[torch]'" in output
    environment.install(".", **CORE_ALONE)
    environment.use(USE_CORE)
    environment.install("pytest", "hypothesis")
    names = ("gather_combine", "apply", "dynamic_table", "hash_index", "route")
    files = [str(source / f"tests/core/test_{name}.py") for name in names]
    environment.use(f"import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *{files!r}]))")


@pytest.mark.parametrize(
    ("version", "framework", "requirement"),
    [
        ("3.10", "tensorflow", "tensorflow-cpu==2.21.*"),
        ("3.11", "tensorflow", "tensorflow-cpu==2.16.*"),
        ("3.12", "tensorflow", "tensorflow-cpu==2.21.*"),
        ("3.13", "tensorflow", "tensorflow-cpu==2.21.*"),
        ("3.11", "torch", "torch==2.13.0"),
    ],
)
def test_beside_a_framework(source, tmp_path, version, framework, requirement):
    environment = Environment(version, tmp_path / "venv", source)
    environment.install(requirement)
    environment.install(".")
    environment.use(TRAIN[framework])
    other = {"tensorflow": "torch", "torch": "tensorflow"}[framework]
    assert f"{other}==0+install.{other}.first" in environment.install(f".[{other}]", fails=True)


def test_the_build_brings_the_framework(source, tmp_path):
    environment = Environment("3.11", tmp_path / "venv", source)
    constraint = tmp_path / "constraint.txt"
    constraint.write_text("torch==2.13.0\n")
    environment.install(".[torch]", SOK_WITH_TORCH="1", PIP_CONSTRAINT=str(constraint))
    environment.use(TRAIN["torch"])


def test_uv(source, tmp_path):
    """uv builds where the environment cannot be seen: it says what to do, and that works."""
    environment = Environment("3.11", tmp_path / "venv", source)
    environment.install("uv", "torch==2.13.0")
    output = environment.uv_install(".", fails=True)
    assert "uv pip install --no-build-isolation ." in output
    environment.install("setuptools", "wheel", "cmake", "ninja")
    environment.uv_install("--no-build-isolation", ".")
    environment.use(TRAIN["torch"])
