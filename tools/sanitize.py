#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `make sanitize` runs: the tests of the core on the CPU, with the core compiled for GCC's sanitizers.

python tools/sanitize.py                    # addresses and undefined behaviour, then races between threads
python tools/sanitize.py thread -- -k route # one of them; what follows -- goes to pytest

A first finding ends the run of its sanitizer. On GPUs compute-sanitizer does the same: tools/gpu_ci.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.build import CORE_LIBRARY, BuildError, compile_part  # noqa: E402

FOLDER = ROOT / "build" / "sanitize"
SANITIZERS = {"address": "address,undefined", "thread": "thread"}
"""Name, which is that of the runtime (libasan, libtsan) by its first letter, and what -fsanitize= takes."""

# They measure memory and set limits to it, of which a sanitizer takes some itself.
OF_MEMORY = [
    "tests/core/test_reserved_range.py::test_memory_is_given_back",
    "tests/core/test_reserved_range_use.py::test_a_limit_of_addresses",
    *(
        f"tests/core/test_table_bytes.py::test_{name}"
        for name in ("a_table_that_grows", "a_table_at_capacity", "guests_and_candidates")
    ),
    "tests/core/test_table_bytes.py::test_ten_thousand_steps_take_no_more_memory",
    # It takes all mappings that the kernel allows, of which a sanitizer may need one more.
    "tests/core/test_reserved_range_use.py::test_as_many_ranges_as_the_kernel_allows",
]
LEFT_OUT = {
    "address": OF_MEMORY,
    "thread": [
        *OF_MEMORY,
        # They reserve more addresses than the sanitizer of threads leaves to a process: not much more than 1 TB.
        "tests/core/test_dynamic_table.py::test_bad_arguments",
        "tests/core/test_dynamic_table.py::test_where_there_is_no_memory_nothing_changes",
        "tests/core/test_hash_index.py::test_initial_rows_fit_before_it_grows",
        "tests/core/test_hash_index.py::test_it_grows",
        "tests/core/test_reserved_range.py::test_far_more_addresses_than_memory",
        "tests/core/test_reserved_range_use.py::test_a_table_that_grows",
        # Threads of a child after fork(): the sanitizer takes them for the parent's, which the child does not have.
        "tests/core/test_context.py::test_fork_while_another_thread_is_in_the_pool",
        "tests/core/test_context.py::test_pool_after_fork",
    ],
}
"""Tests that cannot pass under a sanitizer."""


def compile_core(name: str) -> Path:
    """The core for a sanitizer, in a folder of its own: without CUDA, whose memory no sanitizer of the CPU sees."""
    folder = FOLDER / name
    settings = {"SOK_SANITIZE": SANITIZERS[name], "SOK_OUTPUT_DIR": str(folder), "SOK_WITH_CUDA": "OFF"}
    compile_part(ROOT / "core", folder, settings, debug=False)
    return folder / CORE_LIBRARY


def runtime(name: str) -> str:
    """What is loaded before everything else, for Python is linked to neither: the sanitizer's library, and that of C++,
    whose `throw` the sanitizer looks for when it starts.
    """
    compiler = os.environ.get("CXX", "c++").split()[0]
    paths = []
    for library in (f"lib{name[0]}san.so", "libstdc++.so"):
        found = subprocess.run([compiler, f"-print-file-name={library}"], capture_output=True, text=True, check=True)
        paths.append(found.stdout.strip())
        if not Path(paths[-1]).is_file():
            raise BuildError(f"{compiler} has no {library}. It comes with GCC (sudo apt-get install g++).")
    return " ".join(paths)


def run_tests(name: str, library: Path, arguments: list[str]) -> tuple[int, list[Path]]:
    """pytest's status and the files with findings. Files, for pytest captures what processes print."""
    logs = library.parent / "findings"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    options = f"log_path={logs}/log:exitcode=99:halt_on_error=1"
    environment = {
        **os.environ,
        "SOK_CORE_LIBRARY": str(library),
        "CXXFLAGS": f"-fsanitize={SANITIZERS[name]} -fno-sanitize-recover=all -g",  # for what tests compile
        "LD_PRELOAD": runtime(name),
        "HYPOTHESIS_PROFILE": os.environ.get("HYPOTHESIS_PROFILE", "quick"),
        "SOK_TEST_MOST_ROWS": str(2**33),  # of random tables; see LEFT_OUT
        "ASAN_OPTIONS": f"{options}:detect_leaks=0",  # Python's own objects, of which it frees few at its end
        "UBSAN_OPTIONS": f"{options}:print_stacktrace=1",
        "TSAN_OPTIONS": f"{options}:report_thread_leaks=0",  # ranks of tests end by os._exit() while threads run
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/core"]
    command += [f"--deselect={test}" for test in LEFT_OUT[name]] + arguments
    print("+", " ".join(command), flush=True)
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    return status, sorted(logs.iterdir())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [SANITIZER ...] [-- PYTEST'S ARGUMENTS]", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("sanitizers", nargs="*", metavar="SANITIZER", help=f"of {', '.join(SANITIZERS)} (default: all)")
    given = sys.argv[1:] if argv is None else argv
    split = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:split])
    unknown = set(args.sanitizers) - set(SANITIZERS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(SANITIZERS)}")
    summary = []
    failed = False
    for name in args.sanitizers or SANITIZERS:
        try:
            library = compile_core(name)
            status, findings = run_tests(name, library, given[split + 1 :])
        except BuildError as error:
            print(f"\nsanitize: {error}", file=sys.stderr)
            return 1
        for file in findings:
            print(f"\n{file}\n{file.read_text(errors='replace')}")
        failed |= bool(status or findings)
        summary.append(f"{SANITIZERS[name]:18} pytest's status {status}, {len(findings)} findings")
    print("\n".join(["", *summary]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
