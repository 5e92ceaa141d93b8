# SPDX-License-Identifier: Apache-2.0
"""docs/MIGRATING.md: its programs run as written, those of TensorFlow in both Kerases."""

import pathlib
import re
import subprocess
import sys

import pytest

DOCUMENT = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "MIGRATING.md").read_text(encoding="utf-8")

# Each program in a namespace of its own, all in one process.
RUN = """
import sys
for number, program in enumerate(sys.stdin.read().split("\\0")):
    exec(compile(program, f"program {number}", "exec"), {"__name__": f"program_{number}"})
print("all ran")
"""


def programs(heading):
    section = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    return re.findall(r"```python\n(.*?)```", section[1], re.DOTALL)


@pytest.mark.parametrize("legacy_keras", ["0", "1"])
def test_programs_of_sok_and_deeprec_run(legacy_keras, monkeypatch):
    pytest.importorskip("tensorflow")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", legacy_keras)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    texts = [*programs("SOK 1.x"), *programs("SOK 2.x"), *programs("DeepRec"), *programs("tf.distribute")]
    assert len(texts) == 10
    run(texts)


def test_program_of_torchrec_runs():
    pytest.importorskip("torch")
    texts = programs("TorchRec")
    assert len(texts) == 1
    run(texts)


def run(texts):
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(command, input="\0".join(texts), capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.endswith("all ran\n"), done.stderr
