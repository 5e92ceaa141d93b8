# SPDX-License-Identifier: Apache-2.0
"""Runs scripts of the projects that this one replaces, from a clone of theirs, and keeps what passed.

    python tests/upstream/run.py sok2 --repository ~/HugeCTR [--ranks 1 2] [--keras tf_keras] [-k lookup]

A suite (`suites/NAME.py`) names the commit, the scripts with their arguments, and the edits each takes: smaller sizes,
and what the migration guide says. Nothing of those projects is in this one. An edit whose pattern is not found is an
error, so that none is believed to be needed which is not. Results go to `results/NAME.json`, one entry for each run.
"""

import argparse
import dataclasses
import datetime
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE / "suites"), str(HERE.parent)]  # behind the packages: tests/ has folders named like some

import launching  # noqa: E402  (tests/launching.py)
import tqdm  # noqa: E402

KERAS = {"tf_keras": "1", "keras": None}  # the value of TF_USE_LEGACY_KERAS


@dataclasses.dataclass(frozen=True)
class Edit:
    """What changes in a script: a regular expression (`^` and `$` match at lines), its replacement, and the reason."""

    pattern: str
    replacement: str
    why: str

    def apply(self, text, path):
        text, count = re.subn(self.pattern, self.replacement, text, flags=re.MULTILINE)
        if not count:
            raise ValueError(f"{path} has nothing that matches {self.pattern!r} ({self.why})")
        return text


@dataclasses.dataclass(frozen=True)
class Run:
    """One script with one set of arguments, on each of `ranks` and under each of `keras`.

    name: what it is called in the results, unique in its suite.
    script: the path in the repository; it runs in its own folder, as upstream's do.
    start: "python" (one process for all ranks, or a script that starts its own) or "horovodrun".
    edits, keras_3_edits: (path, Edit) pairs, paths in the repository; the latter under Keras 3 alone.
    before: names of runs that have to pass first (a restore needs its save), on the same ranks and Keras. They run
        too where this one is picked, and leave their files to it.
    prints: what the output has to hold where the exit status does not tell, as of scripts that start processes.
    """

    name: str
    script: str
    arguments: str = ""
    ranks: tuple[int, ...] = (1,)
    keras: tuple[str, ...] = ("tf_keras",)
    start: str = "horovodrun"
    edits: tuple[tuple[str, Edit], ...] = ()
    keras_3_edits: tuple[tuple[str, Edit], ...] = ()
    before: tuple[str, ...] = ()
    prints: str = ""
    timeout: int = 600

    def command(self, ranks):
        """`arguments` with {ranks} filled in, and {hosts}: "localhost" for each rank."""
        return self.arguments.format(ranks=ranks, hosts=" ".join(["localhost"] * ranks)).split()


def export(repository, commit, folder, into):
    """The files of `folder`, or of several with spaces between, at `commit`; `repository` is a clone or a bare one."""
    with tempfile.TemporaryFile() as archive:
        command = ["git", "-C", str(repository), "archive", commit, *folder.split()]
        subprocess.run(command, stdout=archive, check=True)
        archive.seek(0)
        with tarfile.open(fileobj=archive) as files:
            files.extractall(into, filter="data")


class Trees:
    """Exported files: a tree for each run, its edits made; runs that need the files of another share its tree."""

    def __init__(self, suite, repository, folder):
        self._suite, self._repository, self._folder = suite, repository, folder
        self._named = {run.name: run for run in suite.RUNS}
        self._edited = {}  # (path, Edit) pairs that were made, by tree

    def of(self, run, ranks, keras):
        first = run
        while first.before:
            first = self._named[first.before[0]]
        root = self._folder / f"{self._suite.RUNS.index(first)}-{ranks}-{keras}"
        if root not in self._edited:
            export(self._repository, self._suite.COMMIT, self._suite.FOLDER, root)
            self._edited[root] = set()
        for pair in (*run.edits, *(run.keras_3_edits if keras == "keras" else ())):
            if pair not in self._edited[root]:
                self._edited[root].add(pair)
                path, change = pair
                (root / path).write_text(change.apply((root / path).read_text(), path))
        return root


def start(run, ranks, keras, root, gpu):
    """(passed, what was printed)."""
    script = root / run.script
    variables = {"TF_USE_LEGACY_KERAS": KERAS[keras]}
    if not gpu:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE / "stand_ins"), os.environ.get("PYTHONPATH")]))
    command = [script.name, *run.command(ranks)]
    try:
        if run.start == "python":
            status, output = launching.run([sys.executable, *command], run.timeout, cwd=script.parent, **variables)
        else:
            status, output = launching.horovodrun(ranks, command, run.timeout, cwd=script.parent, **variables)
    except AssertionError as error:
        return False, str(error)
    return status == 0 and run.prints in output, output


def selected(runs, arguments):
    """(run, ranks, keras) in the order in which they run; those that a picked one needs are picked too."""
    named = {run.name: run for run in runs}
    for keras in arguments.keras or KERAS:
        for ranks in arguments.ranks or sorted({ranks for run in runs for ranks in run.ranks}):
            fits = [run for run in runs if ranks in run.ranks and keras in run.keras]
            picked = {run.name for run in fits if re.search(arguments.k, run.name)}
            needed = list(picked)
            while needed:
                before = named[needed.pop()].before
                picked.update(before)
                needed.extend(before)
            yield from ((run, ranks, keras) for run in runs if run.name in picked)


def keep(suite, names, entry):
    """Adds what was found to the suite's file, in place of what was found before of the same run.

    Runs that the suite no longer has, by `names`, leave the file.
    """
    path = HERE / "results" / f"{suite}.json"
    path.parent.mkdir(exist_ok=True)
    before = json.loads(path.read_text())["runs"] if path.exists() else []
    kept = {_key(found): found for found in (*before, entry) if found["name"] in names}
    path.write_text(json.dumps({"runs": [kept[key] for key in sorted(kept)]}, indent=1) + "\n")


def _key(entry):
    return entry["device"], entry["keras"], entry["ranks"], entry["name"]


def commit():
    """The project's commit, with a plus where the package differs from it."""
    git = ["git", "-C", str(HERE.parents[1])]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = [*git, "status", "--porcelain", "-uno", "core", "tf_frontend", "torch_frontend"]
    return name + "+" * bool(subprocess.run(changed, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=sorted(path.stem for path in (HERE / "suites").glob("[a-z]*.py")))
    parser.add_argument("--repository", type=pathlib.Path, required=True, help="a clone of the suite's project")
    parser.add_argument("--ranks", type=int, nargs="*", help="these numbers of ranks alone")
    parser.add_argument("--keras", nargs="*", choices=KERAS, help="tf_keras, or keras (3); both by default")
    parser.add_argument("-k", default="", help="runs whose names match this regular expression")
    parser.add_argument("--gpu", action="store_true", help="let scripts see the GPUs")
    parser.add_argument("--list", action="store_true", help="name the runs, start none")
    parser.add_argument("--logs", type=pathlib.Path, help="a folder for what each run printed")
    arguments = parser.parse_args()

    suite = importlib.import_module(arguments.suite)
    todo = list(selected(suite.RUNS, arguments))
    if arguments.list:
        for run, ranks, keras in todo:
            print(f"{run.name:50} {ranks} {keras:9} {run.script} {' '.join(run.command(ranks))}")
        return 0

    passed = {}
    bar = tqdm.tqdm(todo, unit="run", disable=None)
    with tempfile.TemporaryDirectory() as folder:
        trees = Trees(suite, arguments.repository, pathlib.Path(folder))
        for run, ranks, keras in bar:
            label = f"{run.name} ({ranks}, {keras})"
            bar.set_postfix_str(label)
            root = trees.of(run, ranks, keras)
            began = time.monotonic()
            if all(passed[name, ranks, keras] for name in run.before):
                ended, output = start(run, ranks, keras, root, arguments.gpu)
            else:
                ended, output = False, f"did not pass before it: {' or '.join(run.before)}"
            passed[run.name, ranks, keras] = ended
            seconds = round(time.monotonic() - began, 1)
            print(f"{'passed' if ended else 'FAILED'} {seconds:6.1f} s  {label}", flush=True)
            if arguments.logs:
                arguments.logs.mkdir(parents=True, exist_ok=True)
                log = f"{run.name}-{ranks}-{keras}.log".replace("/", "-")
                (arguments.logs / log).write_text(output)
            if not ended:
                print("\n".join(output.splitlines()[-15:]), flush=True)
            entry = {
                "name": run.name, "ranks": ranks, "keras": keras, "device": "gpu" if arguments.gpu else "cpu",
                "passed": ended, "seconds": seconds, "commit": commit(), "date": str(datetime.date.today()),
            }  # fmt: skip
            keep(arguments.suite, {run.name for run in suite.RUNS}, entry)
    print(f"{sum(passed.values())} passed, {len(passed) - sum(passed.values())} failed")
    return not all(passed.values())


if __name__ == "__main__":
    sys.exit(main())
