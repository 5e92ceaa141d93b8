#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs what needs GPUs: the suites, the checks of several ranks, compute-sanitizer, the figures of the documents.

    python tools/gpu_ci.py                        # all stages, on all GPUs of this host
    python tools/gpu_ci.py suites ranks           # some stages
    python tools/gpu_ci.py --list                 # the jobs and their commands
    python tools/gpu_ci.py --only gpu_torch --gpus 0 --seconds 300 --logs /tmp/logs

Nothing is built or installed: `make build` comes first. Jobs of tests run at the same time, up to --jobs on a GPU;
figures are taken while nothing else runs. Each job's output is in LOGS/<job>.log. A job that takes longer than its
limit is ended with all processes that it started. Exit status: 0 when every job that ran has passed; a job for more
GPUs than there are does not run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
PASSED, FAILED, LATE, TOO_FEW = "passed", "failed", "ended: too late", "not run: too few GPUs"


@dataclasses.dataclass(frozen=True)
class Job:
    """A command of a stage. `seconds`: after which it is ended."""

    name: str
    command: Sequence[str]
    gpus: int = 1
    shares: bool = True
    """Whether other jobs may run on its GPUs meanwhile."""
    measures: bool = False
    """Whether no other job may run at all."""
    environment: tuple[tuple[str, str], ...] = ()
    seconds: int = 1800


# They take all memory of the GPU, and look at how much is free.
_MEMORY = ("tests/gpu_core/test_reserved_range.py", "tests/gpu_core/test_table_memory.py")
_CORE = "tests/gpu_core"
_WITHOUT_MEMORY = [f"--ignore={path}" for path in _MEMORY]
_PROCESSES = 16  # of a sanitizer on a GPU; each keeps a core of the host busy
_MANY_ROWS = "tests/gpu_torch/test_many_rows.py"
_MANY_ROWS_IN_TENSORFLOW = "tests/tensorflow/test_many_rows.py"


def _tests(name: str, *arguments: str) -> Job:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return Job(name, command, environment=(("SOK_TEST_GPU", "1"),))


def _alone(name: str, gpus: int, *arguments: str) -> Job:
    return dataclasses.replace(_tests(name, *arguments), gpus=gpus, shares=False)


def _sanitized(tool: str) -> list[Job]:
    """The core's tests under a tool of compute-sanitizer: most of them, and those that take the GPU's memory.

    Each has a GPU to itself: a second service of MPS on the same GPU was seen to begin only after minutes.
    """
    # Racecheck keeps what it has seen of a kernel until somebody waits for the GPU: without a limit a test that queues
    # many takes more than 70 GB of the host. By itself it starts threads that are in each other's way: 16 processes
    # made a load of 140.
    limit = ["--force-synchronization-limit=32", "--racecheck-num-workers=1"] if tool == "racecheck" else []
    # The tests fill and compare memory by CuPy's kernels, which are not this project's.
    without_cupy = ["--kernel-name-exclude", "kernel_substring=cupy"]
    options = [f"--tool={tool}", "--error-exitcode=9", "--target-processes=all", *limit, *without_cupy]
    sanitizer = ["compute-sanitizer", *options]
    # Processes that took turns on an H200 made about as many tests a minute whether there were 8 or 24.
    at_once = [sys.executable, "tools/mps.py", "--share", str(100 // _PROCESSES)]
    spread = ["-n", str(_PROCESSES), "--dist", "load", "--maxschedchunk=1"]
    most = _alone(tool, 1, "-v", *spread, _CORE, *_WITHOUT_MEMORY)
    few_examples = ("HYPOTHESIS_PROFILE", "quick")

    def under(job: Job, *options: str, before: Sequence[str] = ()) -> Job:
        command = [*before, *sanitizer, *options, *job.command]
        return dataclasses.replace(job, command=command, environment=(*job.environment, few_examples), seconds=7200)

    # Those take memory until there is no more, which memcheck would count as errors of calls to CUDA.
    of_memory = ["--report-api-errors=no"] if tool == "memcheck" else []
    return [under(most, before=at_once), under(_alone(f"{tool}_memory", 1, *_MEMORY), *of_memory)]


def _figures(name: str, *command: str, gpus: int = 1) -> Job:
    return Job(f"figures_{name}", command, gpus, shares=False, measures=True)


_OF_TWO_RANKS = ("-k", "not 4")  # the tests are named after their number of ranks
_OF_FOUR_RANKS = ("-k", "4")
_LOOKUP = (sys.executable, "-m", "benchmarks.gpu_lookup")
_FRONTENDS = (
    "torch_frontend",
    "torch_frontend_concat",
    "torch_stack",
    *(f"tensorflow_frontend{kind}" for kind in ("", "_concat", "_concrete", "_steps")),
    "tensorflow_stack",
    "tensorflow_embedding_lookup_sparse",
)
_TO_FRONTENDS = ("--subjects", *_FRONTENDS, "--optimizers", "sgd", "adam", "--rounds", "3", "--output", "gpu_frontends")
_OF_16_BITS = ("core", "torch_frontend_concat", "fbgemm_tbe")
_TO_16_BITS = ("--subjects", *_OF_16_BITS, "--dtypes", "float16", "bfloat16", "--output", "gpu_lookup_16_bits")
_OF_BAGS = ("core", "torch_frontend", "torch_stack", "tensorflow_frontend", "fbgemm_tbe", "fbgemm_tbe_graph")
_TO_BAGS = (
    *("--cases", "B", "B-varying", "B-weighted", "--optimizers", "sgd", "adam"),
    *("--subjects", *_OF_BAGS, "--output", "gpu_bags"),
)
_OF_DYNAMIC = ("torch_frontend_concat", "torch_dynamic", "torch_dynamic_lru", "fbgemm_tbe")
_CASES_OF_DYNAMIC = ("--cases", "A", "A-zipf", "B", "B-zipf", "dynamicemb", "--optimizers", "sgd", "adagrad", "adam")
_TO_DYNAMIC = (*_CASES_OF_DYNAMIC, "--subjects", *_OF_DYNAMIC, "--output", "gpu_dynamic")
_OF_TENSORFLOW = ("tensorflow_frontend_concat", "tensorflow_dynamic")
_TO_DYNAMIC_IN_TENSORFLOW = (
    *(*_CASES_OF_DYNAMIC, "--subjects", *_OF_TENSORFLOW, "--output", "gpu_dynamic_tensorflow"),
)
_SGD_AND_ADAM = ("--optimizers", "sgd", "adam")
_OF_STACKS = ("--subjects", "torch_frontend_concat", "torch_stack")
_TO_STACKS = ("--cases", "A", "B", "C", "D", *_SGD_AND_ADAM, *_OF_STACKS, "fbgemm_tbe", "--output", "gpu_stack")
_TO_STACKS_IN_TENSORFLOW = (
    *("--cases", "C", "D", *_SGD_AND_ADAM, *_OF_STACKS, "tensorflow_frontend_concat", "tensorflow_stack"),
    *("--output", "gpu_stack_tensorflow"),
)
_OF_GRAPHS = ("torch_frontend", "torch_frontend_graph", "fbgemm_tbe", "fbgemm_tbe_graph")
_TO_GRAPHS = (
    *("--cases", "A", "A-zipf", "B", "C", "D", *_SGD_AND_ADAM),
    *("--subjects", *_OF_GRAPHS, "--output", "gpu_graphs"),
)
_WHOLE_JOB = (sys.executable, "-m", "benchmarks.whole_job", "--folder", str(ROOT / "build" / "whole_job"))
_HASH_INDEX = (sys.executable, "-m", "benchmarks.hash_index", "--device", "cuda", "--rows", "67108864")
_EVICTION = (sys.executable, "-m", "benchmarks.eviction", "--device", "cuda", "--rows", "16777216")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
_HOROVODRUN = ("horovodrun", "-np", "2", sys.executable, "-m")

STAGES: dict[str, list[Job]] = {
    "suites": [
        _tests("gpu_core", _CORE, *_WITHOUT_MEMORY),
        _alone("memory", 1, *_MEMORY),
        _alone("many_rows", 1, _MANY_ROWS),
        _alone("many_rows_in_tensorflow", 1, _MANY_ROWS_IN_TENSORFLOW),
        _tests("gpu_torch", "tests/gpu_torch", "tests/torch/test_faults.py", f"--ignore={_MANY_ROWS}"),
        _tests("gpu_tensorflow", "-m", "gpu", "tests/tensorflow", f"--ignore={_MANY_ROWS_IN_TENSORFLOW}"),
    ],
    "ranks": [
        _alone("torch_2", 2, "tests/distributed/test_torch_gpu.py", *_OF_TWO_RANKS),
        _alone("tensorflow_2", 2, "tests/distributed/test_tensorflow_gpu.py", *_OF_TWO_RANKS),
        _alone("torch_4", 4, "tests/distributed/test_torch_gpu.py", *_OF_FOUR_RANKS),
        _alone("tensorflow_4", 4, "tests/distributed/test_tensorflow_gpu.py", *_OF_FOUR_RANKS),
    ],
    # The long jobs first, so that each has a GPU where there are two.
    "sanitize": [job for jobs in zip(_sanitized("racecheck"), _sanitized("memcheck"), strict=True) for job in jobs],
    "figures": [
        _figures("lookup", *_LOOKUP, "--profile"),
        _figures("frontends", *_LOOKUP, *_TO_FRONTENDS),
        _figures("16_bits", *_LOOKUP, *_TO_16_BITS),
        _figures("bags", *_LOOKUP, *_TO_BAGS),
        _figures("stacks", *_LOOKUP, *_TO_STACKS),
        _figures("stacks_in_tensorflow", *_LOOKUP, *_TO_STACKS_IN_TENSORFLOW),
        _figures("graphs", *_LOOKUP, *_TO_GRAPHS),
        _figures("dynamic", *_LOOKUP, *_TO_DYNAMIC),
        _figures("dynamic_tensorflow", *_LOOKUP, *_TO_DYNAMIC_IN_TENSORFLOW),
        _figures("whole_job", *_WHOLE_JOB),
        _figures("whole_job_2", *_WHOLE_JOB, "--ranks=2", "--output=whole_job_2", gpus=2),
        _figures("tiers", sys.executable, "-m", "benchmarks.tiers"),
        _figures("hash_index", *_HASH_INDEX, "--output", "hash_index"),
        _figures("eviction", *_EVICTION, "--output", "eviction"),
        _figures("distributed_torch", *_TORCHRUN, "benchmarks.distributed", "torch", gpus=2),
        _figures("distributed_tensorflow", *_HOROVODRUN, "benchmarks.distributed", "tensorflow", gpus=2),
        _figures("whole_step_torch", *_TORCHRUN, "benchmarks.whole_step", "torch", gpus=2),
        _figures("whole_step_tensorflow", *_HOROVODRUN, "benchmarks.whole_step", "tensorflow", gpus=2),
        _figures("hybrid_torch", *_TORCHRUN, "benchmarks.hybrid", "torch", gpus=2),
        _figures("hybrid_tensorflow", *_HOROVODRUN, "benchmarks.hybrid", "tensorflow", gpus=2),
        _figures("exchange_torch", *_TORCHRUN, "benchmarks.exchange", "torch", gpus=2),
        _figures("exchange_tensorflow", *_HOROVODRUN, "benchmarks.exchange", "tensorflow", gpus=2),
    ],
}


@dataclasses.dataclass
class _Running:
    job: Job
    gpus: list[int]
    process: subprocess.Popen[bytes]
    started: float


class Runner:
    """Runs jobs on GPUs and keeps how each ended.

    Args:
      gpus: their numbers on this host.
      logs: the folder of the jobs' output, made where it is not there.
      jobs_a_gpu: how many jobs of tests share a GPU.
      seconds: after which whatever runs is ended, and nothing more begins.
      side_by_side: whether figures may be taken at the same time on different GPUs.
    """

    def __init__(
        self,
        gpus: Sequence[int],
        logs: pathlib.Path,
        *,
        jobs_a_gpu: int = 3,
        seconds: float | None = None,
        side_by_side: bool = False,
    ) -> None:
        self.ends: dict[str, str] = {}
        self._places = dict.fromkeys(gpus, jobs_a_gpu)
        self._jobs_a_gpu = jobs_a_gpu
        self._logs = logs
        self._deadline = float("inf") if seconds is None else time.monotonic() + seconds
        self._side_by_side = side_by_side
        self._running: list[_Running] = []

    def run(self, jobs: Sequence[Job]) -> None:
        """Returns when the last job has ended. What still runs when this is interrupted is ended."""
        self._logs.mkdir(parents=True, exist_ok=True)
        waiting = [job for job in jobs if job.gpus <= len(self._places)]
        for job in jobs:
            if job not in waiting:
                self._end(job, TOO_FEW)
        try:
            while waiting or self._running:
                for job in list(waiting):
                    if self._late():
                        self._end(job, LATE)
                    elif not self._start(job):
                        continue
                    waiting.remove(job)
                time.sleep(0.05)
                for running in list(self._running):
                    self._look_at(running)
        finally:
            for running in self._running:
                self._kill(running)

    def _start(self, job: Job) -> bool:
        """Starts the job if there is room for it."""
        if self._running and (job.measures or self._running[0].job.measures):
            both_measure = job.measures and self._running[0].job.measures
            if not (both_measure and self._side_by_side):
                return False
        taken = self._taken(job)
        free = [gpu for gpu, places in self._places.items() if places >= taken]
        if len(free) < job.gpus:
            return False
        gpus = sorted(sorted(free, key=lambda gpu: -self._places[gpu])[: job.gpus])
        for gpu in gpus:
            self._places[gpu] -= taken
        environment = {
            **os.environ,
            "PATH": _path(),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # jobs share a GPU
            "SOK_TEST_LOGS": self._mark(job),
            "PYTHONUNBUFFERED": "1",
            **dict(job.environment),
        }
        program = shutil.which(job.command[0], path=environment["PATH"])
        # Where there is no such program the shell says so, and the job has failed.
        command = ["sh", "-c", 'exec "$0" "$@"', *job.command] if program is None else [program, *job.command[1:]]
        with self._log(job).open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self._running.append(_Running(job, gpus, process, time.monotonic()))
        return True

    def _taken(self, job: Job) -> int:
        """Places on each of its GPUs."""
        return 1 if job.shares else self._jobs_a_gpu

    def _mark(self, job: Job) -> str:
        """What SOK_TEST_LOGS is for the job, and for no other: whatever the job starts inherits it."""
        return str(self._logs / job.name)

    def _look_at(self, running: _Running) -> None:
        status = running.process.poll()
        seconds = time.monotonic() - running.started
        if status is None and seconds < running.job.seconds and not self._late():
            return
        self._kill(running)
        self._running.remove(running)
        for gpu in running.gpus:
            self._places[gpu] += self._taken(running.job)
        self._end(running.job, LATE if status is None else FAILED if status else PASSED, seconds)

    def _kill(self, running: _Running) -> None:
        """Ends what is left of a job: its process, and what that has started, in whatever session."""
        if running.process.poll() is None:
            running.process.kill()
        variable = f"SOK_TEST_LOGS={self._mark(running.job)}".encode()
        for _ in range(100):  # who is killed may just have started another one
            found = list(_processes(variable))
            for process in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if not found:
                break
            time.sleep(0.02)
        running.process.wait()

    def _late(self) -> bool:
        return time.monotonic() > self._deadline

    def _end(self, job: Job, end: str, seconds: float = 0.0) -> None:
        self.ends[job.name] = end
        lines = self._log(job).read_text(errors="replace").split("\n") if seconds else []  # else it did not run
        last = next((line for line in reversed(lines) if line.strip()), "")
        print(f"{job.name:30s} {end:22s} {seconds:6.0f} s  {last[:100]}", flush=True)

    def _log(self, job: Job) -> pathlib.Path:
        return self._logs / f"{job.name}.log"


def _path() -> str:
    """PATH, and where horovodrun and compute-sanitizer are when they are not there."""
    beside = [str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    return os.pathsep.join(
        [*beside, *(f"{cuda}/bin" for cuda in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if cuda)]
    )


def _processes(variable: bytes) -> Iterator[int]:
    """The processes with this NAME=VALUE in their environment."""
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


def find_gpus() -> list[int]:
    """The numbers of this host's GPUs, by nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], stdout=subprocess.PIPE, text=True, check=False).stdout
    return list(range(len(listed.splitlines())))


def chosen_jobs(stages: Sequence[str], only: Sequence[str]) -> list[Job]:
    """The jobs of these stages (of all where none is named), or those of them that `only` names.

    Raises SystemExit for names that there are not.
    """
    for stage in stages:
        if stage not in STAGES:
            raise SystemExit(f"no stage is named {stage}: {', '.join(STAGES)}")
    jobs = {job.name: job for stage in stages or STAGES for job in STAGES[stage]}
    for name in only:
        if name not in jobs:
            raise SystemExit(f"no job is named {name}: {', '.join(jobs)}")
    return [jobs[name] for name in only or jobs]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; default: all")
    parser.add_argument("--only", nargs="+", default=[], metavar="JOB", help="these jobs of the stages")
    parser.add_argument("--gpus", nargs="+", type=int, help="default: all of this host")
    parser.add_argument("--jobs", type=int, default=3, help="jobs of tests that share a GPU (default: 3)")
    parser.add_argument("--side-by-side", action="store_true", help="take figures at the same time on different GPUs")
    parser.add_argument("--seconds", type=float, help="for all jobs together")
    parser.add_argument("--logs", type=pathlib.Path, default=ROOT / "build" / "gpu_ci", help="default: build/gpu_ci")
    parser.add_argument("--list", action="store_true", help="show the jobs and run none")
    args = parser.parse_args(arguments)
    jobs = chosen_jobs(args.stages, args.only)
    if args.list:
        for job in jobs:
            print(f"{job.name:30s} GPUs: {job.gpus}  {shlex.join(job.command)}")
        return 0
    gpus = find_gpus() if args.gpus is None else args.gpus
    if not gpus:
        print("nvidia-smi finds no GPU on this host")
        return 2
    logs = args.logs.resolve()
    runner = Runner(gpus, logs, jobs_a_gpu=args.jobs, seconds=args.seconds, side_by_side=args.side_by_side)
    runner.run(jobs)
    print(f"logs: {logs}")
    return 0 if set(runner.ends.values()) <= {PASSED, TOO_FEW} else 1


if __name__ == "__main__":
    sys.exit(main())
