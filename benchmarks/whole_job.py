# SPDX-License-Identifier: Apache-2.0
"""A DLRM trained from Parquet files, and with batches in memory: the demo's in both frontends, and in TorchRec.

    python -m benchmarks.whole_job --folder /path/on/a/local/disk [--steps 150] [--rounds 3]
    python -m benchmarks.whole_job --folder /tmp/small --rows 8192 --batch-size 1024 --table-rows 1000
        --embedding-dim 16 --steps 4 --rounds 1 --device cpu --output ""

The data set has 13 dense features and an id for each of 26 tables of --table-rows rows, from a power law with exponent
1.05. It is made in --folder unless it is there; its files are read as often as the steps need them. They are in the
page cache after that: what is measured is decoding, conversion and the way to the GPU, not the disk.

Each subject is in processes of its own, as many as --ranks, which keep its tables; on GPUs each rank has one. All have
the reader of examples/dlrm, and the batch is that of all ranks together. In a round each trains --steps batches from
files and as many from memory, in turn, while the others wait, another one first each time. Steps before them do not
count: the first ones compile, and they are more than the batches that lie ready. Of each source the file has medians of
the rounds: "samples_per_second", "step_ms", "waiting" (the part of the time in which a batch was waited for). "reading"
is the part of a step from files that one from memory does not take. Writes results/<output>.json and .png.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import statistics
from typing import Any

from benchmarks import harness, plot
from benchmarks.whole_job_data import Job, make
from benchmarks.whole_job_worker import Order, Workers

TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "torchrec": "TorchRec"}
OURS = {"PyTorch", "TensorFlow"}
SOURCES = ("files", "memory")


class Subjects:
    """Those that are there: each has started its processes."""

    def __init__(self, names: list[str], order: Order) -> None:
        self.told: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self._workers: dict[str, Workers] = {}
        for name in names:
            self._workers[name] = Workers(name, order)
            told = self._known(name, self._workers[name].answer())
            if told is not None:
                self.told[name] = told

    def __enter__(self) -> Subjects:
        return self

    def __exit__(self, *_: object) -> None:
        for workers in self._workers.values():
            workers.end()

    def measure(self, name: str, source: str) -> dict[str, float] | None:
        """The figures of a subject's turn; None if it is missing, from now on or before."""
        return self._known(name, self._workers[name].ask(source)) if name in self._workers else None

    def _known(self, name: str, answer: dict[str, Any]) -> dict[str, Any] | None:
        if "missing" not in answer:
            return answer
        self.missing[TITLES[name]] = answer["missing"]
        self.told.pop(name, None)
        self._workers.pop(name).end()
        return None


def measure(subjects: Subjects, rounds: int) -> dict[str, Any]:
    """{title: {"version", "processes", "files": figures, "memory": figures, "reading"}}"""
    names = list(subjects.told)
    seen: dict[str, dict[str, list[dict[str, float]]]] = {name: {source: [] for source in SOURCES} for name in names}
    for turn in range(rounds):
        first = turn % max(1, len(names))
        for source, name in itertools.product(SOURCES, names[first:] + names[:first]):
            found = subjects.measure(name, source)
            if found is not None:
                seen[name][source].append(found)
                print(f"round {turn} {TITLES[name]:10s} {source:6s} {found['step_ms']:8.2f} ms a step", flush=True)
    report: dict[str, Any] = {}
    for name, told in subjects.told.items():
        report[TITLES[name]] = dict(told)
        for source, turns in seen[name].items():
            figures: dict[str, Any] = {key: statistics.median(found[key] for found in turns) for key in turns[0]}
            figures["step_ms_of_rounds"] = [found["step_ms"] for found in turns]
            report[TITLES[name]][source] = figures
        steps = [report[TITLES[name]][source]["step_ms"] for source in SOURCES]
        report[TITLES[name]]["reading"] = 1.0 - steps[1] / steps[0]
    return report


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="of the data set")
    parser.add_argument("--subjects", nargs="+", default=list(TITLES), choices=list(TITLES))
    parser.add_argument("--rows", type=int, default=32 * 65536, help="of the data set")
    parser.add_argument("--table-rows", type=int, default=1_000_000)
    parser.add_argument("--embedding-dim", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=65536)
    parser.add_argument("--optimizer", default="sgd", choices=["sgd", "adagrad"])
    parser.add_argument("--precision", default="tf32", choices=["float32", "tf32", "bfloat16"])
    parser.add_argument("--compiled", action="store_true", help="the dense layers, by XLA and by torch.compile")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "gpu"])
    parser.add_argument("--readers", type=int, default=0, help="processes (default: as examples/dlrm chooses)")
    parser.add_argument("--ranks", type=int, default=1, help="under torchrun and horovodrun where it is more than one")
    parser.add_argument("--threads", type=int, help="of a rank (default: the cores, divided by the ranks)")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only-data", action="store_true", help="make the data set and end")
    parser.add_argument("--output", default="whole_job", help="name of the result files; empty: write none")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    job = Job(
        data=args.folder,
        batch_size=args.batch_size,
        seed=args.seed,
        threads=args.threads or max(1, len(os.sched_getaffinity(0)) // args.ranks),
        readers=args.readers,
        embedding_dim=args.embedding_dim,
        max_table_rows=args.table_rows,
        device=args.device,
        precision=args.precision,
        compiled=args.compiled,
        optimizer=args.optimizer,
    )
    make(args.folder, args.rows, args.table_rows, args.seed)
    if args.only_data:
        return
    with Subjects(args.subjects, Order(job, args.ranks, args.steps)) as subjects:
        report = measure(subjects, args.rounds)
    for title, found in report.items():
        speeds = ", ".join(f"{found[source]['samples_per_second']:,.0f} samples/s from {source}" for source in SOURCES)
        waiting = found["files"]["waiting"]
        loss = found["files"]["loss"]
        print(f"{title:10s} {speeds}; reading {found['reading']:.1%}, waiting {waiting:.1%}; loss {loss:.4f}")
    for title, reason in subjects.missing.items():
        print(f"{title:10s} not measured: {reason}")
    if args.output and report:
        settings = {name: str(value) for name, value in vars(args).items() if name not in ("folder", "output")}
        content = {"machine": harness.machine(), "settings": settings, "subjects": report, "missing": subjects.missing}
        path = harness.save(args.output, content)
        title = f"26 tables of {args.table_rows:,} x {args.embedding_dim}, batch {args.batch_size}, {args.optimizer}"
        title += f", {args.ranks} GPUs" if args.ranks > 1 else ""
        plot.plot_whole_job(report, OURS, title, path.with_suffix(".png"))
        print(f"wrote {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
