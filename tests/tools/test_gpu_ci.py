# SPDX-License-Identifier: Apache-2.0
"""tools/gpu_ci.py with jobs that need no GPU: who runs beside whom, limits, logs, exit status."""

import pathlib
import sys
import time

import pytest


def python(text):
    return [sys.executable, "-c", text]


def times(path):
    """(begin, end) that a job of `recorded` wrote."""
    return tuple(map(float, path.read_text().split()))


def recorded(gpu_ci, folder, name, seconds=0.6, **options):
    text = f"import time, pathlib; begin = time.monotonic(); time.sleep({seconds}); "
    text += f"pathlib.Path({str(folder / name)!r}).write_text(f'{{begin}} {{time.monotonic()}}')"
    return gpu_ci.Job(name, python(text), **options)


def overlap(first, second):
    return max(first[0], second[0]) < min(first[1], second[1])


def test_ends_and_logs(gpu_ci, tmp_path, capsys):
    runner = gpu_ci.Runner([0], tmp_path / "logs")
    runner.run(
        [
            gpu_ci.Job("good", python("import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OF_JOB'])"),
                       environment=(("OF_JOB", "yes"),)),
            gpu_ci.Job("bad", python("raise SystemExit(3)")),
            gpu_ci.Job("absent", ["no-such-program-of-this-host"]),
            gpu_ci.Job("large", python("raise SystemExit(0)"), gpus=2),
        ]
    )  # fmt: skip
    failed = dict.fromkeys(["bad", "absent"], gpu_ci.FAILED)
    assert runner.ends == {"good": gpu_ci.PASSED, **failed, "large": gpu_ci.TOO_FEW}
    assert "no-such-program-of-this-host" in (tmp_path / "logs" / "absent.log").read_text()
    assert (tmp_path / "logs" / "good.log").read_text() == "0 yes\n"
    assert "0 yes" in capsys.readouterr().out


@pytest.mark.parametrize("limit", ["of the job", "of all"])
def test_a_late_job_is_ended_with_what_it_started(gpu_ci, tmp_path, limit):
    text = "import subprocess, sys; command = [sys.executable, '-c', 'import time; time.sleep(300)']; "
    text += "child = subprocess.Popen(command, start_new_session=True); print(child.pid, flush=True); child.wait()"
    late = gpu_ci.Job("late", python(text), seconds=8 if limit == "of the job" else 300)
    runner = gpu_ci.Runner([0], tmp_path, jobs_a_gpu=1, seconds=None if limit == "of the job" else 8)
    runner.run([late, gpu_ci.Job("next", python("print('after')"))])
    assert runner.ends == {
        "late": gpu_ci.LATE,
        "next": gpu_ci.PASSED if limit == "of the job" else gpu_ci.LATE,
    }
    child = int((tmp_path / "late.log").read_text())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # it has been killed, and is gone when its new parent has seen it
        try:
            if "\nState:\tZ" in pathlib.Path(f"/proc/{child}/status").read_text():
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.05)
    pytest.fail("the job's child is still there")


def test_who_runs_beside_whom(gpu_ci, tmp_path):
    jobs = [recorded(gpu_ci, tmp_path, f"tests{i}") for i in range(3)]
    jobs += [recorded(gpu_ci, tmp_path, f"figures{i}", shares=False, measures=True) for i in range(2)]
    gpu_ci.Runner([0], tmp_path / "logs", jobs_a_gpu=2).run(jobs)
    spans = {job.name: times(tmp_path / job.name) for job in jobs}
    assert max(sum(span[0] <= other[0] < span[1] for span in spans.values()) for other in spans.values()) <= 2
    for name in ("figures0", "figures1"):
        assert not any(overlap(spans[name], span) for other, span in spans.items() if other != name)


def test_a_job_with_gpus_of_its_own(gpu_ci, tmp_path):
    jobs = [recorded(gpu_ci, tmp_path, name, shares=name != "own") for name in ("first", "own", "last")]
    gpu_ci.Runner([0], tmp_path / "logs").run(jobs)
    spans = {job.name: times(tmp_path / job.name) for job in jobs}
    assert not overlap(spans["own"], spans["first"]) and not overlap(spans["own"], spans["last"])


def test_figures_side_by_side(gpu_ci, tmp_path):
    """Each waits for the other to begin, which only ends well where both run."""
    jobs = []
    for i in range(2):
        text = f"import pathlib, time; pathlib.Path({str(tmp_path / 'here')!r} + '{i}').touch()\n"
        text += f"while not pathlib.Path({str(tmp_path / 'here')!r} + '{1 - i}').exists(): time.sleep(0.01)\n"
        jobs.append(gpu_ci.Job(f"figures{i}", python(text), gpus=2, shares=False, measures=True, seconds=120))
    runner = gpu_ci.Runner([0, 1, 2, 3], tmp_path / "logs", side_by_side=True)
    runner.run(jobs)
    assert set(runner.ends.values()) == {gpu_ci.PASSED}


def test_the_jobs(gpu_ci, capsys):
    names = [job.name for job in gpu_ci.chosen_jobs([], [])]
    assert len(set(names)) == len(names)
    assert [job.name for job in gpu_ci.chosen_jobs(["ranks"], ["torch_4", "torch_2"])] == ["torch_4", "torch_2"]
    for arguments in (["nothing"], ["suites", "--only", "torch_2"]):
        with pytest.raises(SystemExit, match="is named"):
            gpu_ci.main(arguments)
    assert gpu_ci.main(["--list"]) == 0
    assert "tests/gpu_torch" in capsys.readouterr().out
    for job in gpu_ci.chosen_jobs([], []):
        for argument in job.command:
            assert not argument.startswith("tests/") or (gpu_ci.ROOT / argument).exists(), argument


def test_exit_status(gpu_ci, tmp_path, monkeypatch):
    for status, end in ((0, 0), (1, 1)):
        monkeypatch.setitem(gpu_ci.STAGES, "suites", [gpu_ci.Job("only", python(f"raise SystemExit({status})"))])
        assert gpu_ci.main(["suites", "--gpus", "0", "--logs", str(tmp_path)]) == end
    monkeypatch.setattr(gpu_ci, "find_gpus", list)
    assert gpu_ci.main(["suites"]) == 2


def test_the_sanitizers_take_the_whole_suite(gpu_ci):
    for tool in ("memcheck", "racecheck"):
        most, of_memory = (job for job in gpu_ci.STAGES["sanitize"] if job.name.startswith(tool))
        assert not most.shares and not of_memory.shares
        assert "tests/gpu_core" in most.command
        left_out = {argument.removeprefix("--ignore=") for argument in most.command if "--ignore=" in argument}
        assert left_out == {argument for argument in of_memory.command if argument.startswith("tests/")} != set()
