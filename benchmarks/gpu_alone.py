# SPDX-License-Identifier: Apache-2.0
"""Subjects of benchmarks.gpu_lookup in a process of their own, into which nothing of PyTorch is loaded.

    echo '["tensorflow_frontend", "A", "sgd", "float32"]' | python -m benchmarks.gpu_alone

A subject has `forward(i)` and `step(i)` with batch i, `wait()` for the GPU, `version`, and `steps_per_call`: how many
steps one such call makes. The process reads a subject's name, case, optimizer and dtype from each line of its input,
and answers with a line of JSON: milliseconds of a step, from the time that 4 x --repeat of them take together
(`timed_together`).
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.cases import CASES, check_taken, make_batches

ANSWER = "measured: "
_ROUNDS = 7  # the first two have been seen to be slower


class Process:
    """The process, begun when it is first asked for something, and again after it has broken down."""

    def __init__(self, *, num_batches: int, repeat: int, seed: int) -> None:
        self._command = [sys.executable, "-m", __name__]
        self._command += [f"--num-batches={num_batches}", f"--repeat={repeat}", f"--seed={seed}"]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate()

    def measure(self, name: str, case: str, optimizer: str, dtype: str) -> Any:
        """{"version", "steps_per_call", "forward_together_ms", "step_together_ms"} of a subject, or {"missing"}."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, case, optimizer, dtype]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        status = self._process.wait()
        self._process = None
        return {"missing": f"the process of {name} ended with {status}"}


def timed_together(
    call: Callable[[int], Any], steps: int, *, wait: Callable[[], Any], steps_per_call: int = 1
) -> float:
    """Milliseconds of a step, from the time that at least `steps` of them take together: the median of several such
    times, of which the first ones may be slower (docs/PERFORMANCE.md, "Dynamic tables").
    """
    calls = -(-steps // steps_per_call)
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for i in range(calls):
            call(i)
        wait()
        times.append(1e3 * (time.perf_counter() - start) / (calls * steps_per_call))
    return statistics.median(times)


def _measure(name: str, optimizer: str, dtype: str, case: Any, batches: Any, repeat: int) -> dict[str, Any]:
    try:
        module = importlib.import_module(f"benchmarks.subjects.gpu_{name}")
        check_taken(module.Subject, case)
        subject = module.Subject(case, batches, optimizer, dtype)
    except (ImportError, NotImplementedError) as error:
        return {"missing": str(error)}
    result = {"version": subject.version, "steps_per_call": subject.steps_per_call}
    for phase in ("forward", "step"):
        result[f"{phase}_together_ms"] = timed_together(
            getattr(subject, phase), 4 * repeat, wait=subject.wait, steps_per_call=subject.steps_per_call
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-batches", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    @functools.lru_cache(maxsize=1)
    def batches_of(case: str) -> Any:
        return make_batches(CASES[case], args.num_batches, args.seed)

    for line in sys.stdin:
        name, case, optimizer, dtype = json.loads(line)
        answer = _measure(name, optimizer, dtype, CASES[case], batches_of(case), args.repeat)
        print(ANSWER + json.dumps(answer), flush=True)
        gc.collect()  # the subject's tables, before those of the next


if __name__ == "__main__":
    main()
