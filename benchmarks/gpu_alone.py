# SPDX-License-Identifier: Apache-2.0
"""A subject of benchmarks.gpu_lookup in a process of its own, into which nothing of PyTorch is loaded.

    python -m benchmarks.gpu_alone tensorflow_frontend A sgd float32

A subject has `forward(i)` and `step(i)` with batch i, `wait()` for the GPU, `version`, and `steps_per_call`: how many
steps one such call makes. Prints a line of JSON: milliseconds of a step, from the time that 4 x --repeat of them take
together.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.cases import CASES, make_batches


def measure(name: str, case: str, optimizer: str, dtype: str, *, num_batches: int, repeat: int, seed: int) -> Any:
    """What the process says of the subject: {"version", "forward_together_ms", "step_together_ms"}, or {"missing"}."""
    command = [sys.executable, "-m", __name__, name, case, optimizer, dtype]
    command += [f"--num-batches={num_batches}", f"--repeat={repeat}", f"--seed={seed}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"missing": f"{' '.join(command[1:])} ended with {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def timed_together(subject: Any, call: Callable[[int], Any], steps: int) -> float:
    """Milliseconds of a step, from the time that at least `steps` of them take together."""
    calls = -(-steps // subject.steps_per_call)
    for i in range(min(calls, 3)):
        call(i)
    subject.wait()
    start = time.perf_counter()
    for i in range(calls):
        call(i)
    subject.wait()
    return 1e3 * (time.perf_counter() - start) / (calls * subject.steps_per_call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", help="NAME of benchmarks/subjects/gpu_NAME.py")
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("optimizer")
    parser.add_argument("dtype")
    parser.add_argument("--num-batches", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    case = CASES[args.case]
    try:
        module = importlib.import_module(f"benchmarks.subjects.gpu_{args.subject}")
        batches = make_batches(case, args.num_batches, args.seed)
        subject = module.Subject(case, batches, args.optimizer, args.dtype)
    except (ImportError, NotImplementedError) as error:
        print(json.dumps({"missing": str(error)}))
        return
    result = {"version": subject.version, "steps_per_call": subject.steps_per_call}
    for phase in ("forward", "step"):
        result[f"{phase}_together_ms"] = timed_together(subject, getattr(subject, phase), 4 * args.repeat)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
