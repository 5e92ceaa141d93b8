# SPDX-License-Identifier: Apache-2.0
"""The runner of other projects' scripts, on a project of three small ones."""

import json
import pathlib
import shutil
import subprocess
import sys

import launching
import pytest

HERE = pathlib.Path(__file__).parent
SUITE = """
from run import Edit, Run

COMMIT = "HEAD"
FOLDER = "scripts"

EDIT = Edit("size = 1000", "size = 10", "smaller")
SMALL = (("scripts/save.py", EDIT),)
RUNS = [
    Run("save", "scripts/save.py", start="python", edits=SMALL),
    Run("load", "scripts/load.py", "--ranks={ranks}", start="python", before=("save",), edits=SMALL),
    Run("alone", "scripts/load.py", start="python"),
    Run("silent", "scripts/save.py", start="python", prints="loaded"),
    Run("after", "scripts/save.py", start="python", before=("alone",)),
    Run("unneeded", "scripts/load.py", start="python", edits=(("scripts/load.py", EDIT),)),
]
"""
SCRIPTS = {
    "save.py": "size = 1000\nopen('saved', 'w').write(str(size))\n",
    "load.py": "import sys\nassert open('saved').read() == '10'\nprint('loaded', *sys.argv[1:])\n",
}


@pytest.fixture
def upstream(tmp_path):
    """Calls the runner with arguments; gives (exit status, output, {name of a run: whether it passed})."""
    scripts = tmp_path / "clone" / "scripts"
    scripts.mkdir(parents=True)
    for name, text in SCRIPTS.items():
        (scripts / name).write_text(text)
    git = ["git", "-C", str(tmp_path / "clone"), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "scripts"]):
        subprocess.run(git + command, check=True)

    runner = tmp_path / "tests" / "upstream" / "run.py"
    (runner.parent / "suites").mkdir(parents=True)
    (runner.parent / "suites" / "small.py").write_text(SUITE)
    shutil.copy(HERE / "run.py", runner)
    for name in ("launching.py", "checking.py"):
        shutil.copy(HERE.parent / name, tmp_path / "tests")

    def call(*arguments):
        command = [sys.executable, runner, "small", "--repository", tmp_path / "clone", "--keras", "tf_keras"]
        status, output = launching.run([*command, *arguments], 60)
        results = runner.parent / "results" / "small.json"
        runs = json.loads(results.read_text())["runs"] if results.exists() else []
        return status, output, {run["name"]: run["passed"] for run in runs}

    return call


def test_a_run_that_needs_another_has_its_files(upstream):
    status, output, passed = upstream("-k", "load")
    assert status == 0, output
    assert passed == {"save": True, "load": True}


def test_a_script_that_fails_is_a_run_that_failed(upstream):
    status, output, passed = upstream("-k", "save|alone")
    assert status == 1
    assert passed == {"save": True, "alone": False}
    assert "No such file" in output


def test_what_comes_after_a_failure_is_not_started(upstream):
    _, output, passed = upstream("-k", "after")
    assert passed == {"alone": False, "after": False}
    assert "did not pass before it: alone" in output


def test_a_script_has_to_print_what_it_should(upstream):
    _, _, passed = upstream("-k", "silent")
    assert passed == {"silent": False}


def test_an_edit_that_matches_nothing_is_an_error(upstream):
    status, output, passed = upstream("-k", "unneeded")
    assert status == 1
    assert passed == {}
    assert "scripts/load.py has nothing that matches 'size = 1000' (smaller)" in output


def test_results_of_other_runs_stay(upstream):
    upstream("-k", "save")
    _, _, passed = upstream("-k", "alone")
    assert passed == {"save": True, "alone": False}


def test_what_each_run_printed_is_kept(upstream, tmp_path):
    upstream("-k", "load", "--logs", tmp_path / "logs")
    assert (tmp_path / "logs" / "load-1-tf_keras.log").read_text() == "loaded --ranks=1\n"
