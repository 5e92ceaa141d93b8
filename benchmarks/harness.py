# SPDX-License-Identifier: Apache-2.0
"""Runs subjects side by side: each in a process of its own, taking turns, so that all see the same machine.

A subject is a module of benchmarks.subjects with a class `Subject(case, batches, output_gradient, threads)` that has
the methods `forward(i)` and `step(i)` (forward, backward, SGD update with batch i; both return when the work is done)
and the attribute `version`. One that can be asked for an optimizer takes its name too, `optimizer=`, and is then called
"subject:optimizer". The harness warms up, then measures in rounds: in each round every subject runs a few
calls, in turn, and the figure of a subject is the median over all its calls.
"""

from __future__ import annotations

import datetime
import importlib
import json
import multiprocessing
import os
import pathlib
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.cases import CASES, make_batches, make_output_gradient

RESULTS = pathlib.Path(__file__).parent / "results"
NUM_BATCHES = 4
LEARNING_RATE = 0.01


def _worker(connection: Connection, subject_name: str, case_name: str, seed: int, threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        module_name, _, optimizer = subject_name.partition(":")
        module = importlib.import_module(f"benchmarks.subjects.{module_name}")
        case = CASES[case_name]
        options = {"optimizer": optimizer} if optimizer else {}
        batches, gradient = make_batches(case, NUM_BATCHES, seed), make_output_gradient(case, seed)
        subject = module.Subject(case, batches, gradient, threads, **options)
        connection.send({"version": subject.version})
        count = 0
        while (request := connection.recv()) is not None:
            phase, calls = request
            method = getattr(subject, phase)
            times = []
            for _ in range(calls):
                start = time.perf_counter()
                method(count % NUM_BATCHES)
                times.append(time.perf_counter() - start)
                count += 1
            connection.send(times)
    except ImportError as error:
        connection.send({"missing": str(error)})


def run(
    subjects: Sequence[str], case_name: str, *, rounds: int = 15, calls: int = 4, threads: int = 2, seed: int = 0
) -> dict[str, Any]:
    """Measures `subjects` on one case.

    Returns {"subjects": {name: {"version", "forward_ms", "step_ms", ...}}, "missing": {name: reason}, ...}.

    Milliseconds are medians over rounds * calls calls after two warm-up rounds.
    """
    context = multiprocessing.get_context("spawn")
    workers: dict[str, tuple[Any, Connection]] = {}
    report: dict[str, Any] = {"case": case_name, "threads": threads, "seed": seed, "subjects": {}, "missing": {}}
    try:
        for name in subjects:
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(theirs, name, case_name, seed, threads), daemon=True)
            process.start()
            theirs.close()
            hello = ours.recv()
            if "missing" in hello:
                report["missing"][name] = hello["missing"]
                process.join()
                continue
            workers[name] = (process, ours)
            report["subjects"][name] = {"version": hello["version"]}
        for phase in ("forward", "step"):
            times: dict[str, list[float]] = {name: [] for name in workers}
            for round_number in range(rounds + 2):
                for name, (_, connection) in workers.items():
                    connection.send((phase, calls))
                    measured = connection.recv()
                    if round_number >= 2:
                        times[name] += measured
            for name, values in times.items():
                report["subjects"][name][f"{phase}_ms"] = 1e3 * statistics.median(values)
                report["subjects"][name][f"{phase}_min_ms"] = 1e3 * min(values)
    finally:
        for process, connection in workers.values():
            connection.send(None)
            process.join(timeout=30)
    return report


def kernel_times(call: Callable[[], object]) -> dict[str, float]:
    """Microseconds that each kernel takes in a call on a GPU, by PyTorch's profiler, whose names they have."""
    import torch

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return {event.key: event.device_time_total for event in profile.key_averages() if event.device_time_total > 0}


def machine() -> dict[str, Any]:
    """What a figure depends on: processor, cores, versions, commit."""
    model = platform.processor()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    git = ["git", "-C", str(pathlib.Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False).stdout
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": commit + ("+changes" if dirty.strip() else ""),
    }


def save(name: str, content: dict[str, Any]) -> pathlib.Path:
    """Writes results/<name>.json and returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def keep_run(name: str, framework: str, ranks: Any, **figures: Any) -> None:
    """Puts the figures of a run on several ranks into results/<name>.json, beside those of other runs.

    ranks: what the benchmark's module of subjects gives: num_ranks and versions are kept.
    """
    path = RESULTS / f"{name}.json"
    content = json.loads(path.read_text()) if path.is_file() else {"runs": {}}
    run = {"framework": framework, "num_ranks": ranks.num_ranks, "machine": machine(), "versions": ranks.versions}
    content["runs"][f"{framework}-{ranks.num_ranks}"] = run | figures
    print(f"wrote {save(name, content)}")
