# SPDX-License-Identifier: Apache-2.0
"""Plans where embedding tables lie on several GPUs or hosts, without having any of them.

    python -m sparse_operation_kit.planner --example > tables.json   # then put your own tables in
    python -m sparse_operation_kit.planner tables.json --ranks 8
    python -m sparse_operation_kit.planner tables.json --ranks 8 --compare
    python -m sparse_operation_kit.planner tables.json --ranks 8 --strategy basic --picture basic.png --json basic.json

tables.json holds a list of tables, or an object with "tables" and any of "batch_size", "optimizer" and "topology". Of a
table:

    rows, width    its size; all else may be left out
    name           for the report
    hotness        ids of a sample, on average (1)
    skew           how unequal ids are: the exponent of a power law, 0 for uniform ids (0); clicks have about 1.05
    inputs         how many inputs look it up (1)
    dtype          "float32", "float16" or "bfloat16" ("float32")
    trainable      false for a table that is not trained (true)
    choices        what may be done with it, some of "replicated", "whole", "columns", "rows" (all)
    min_columns    of a table that is cut into columns (1)
    on_host        true: it is to be in host memory; false: it must not be

The exit status is 0, 1 where the tables do not fit, and 2 where the arguments or the file are wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import hybrid
from .arguments import TABLE_DTYPES
from .hybrid import Report
from .hybrid.request import BATCH_SIZE
from .hybrid.strategy import PLANNED
from .hybrid.topology import TOPOLOGIES, topology_of

_EXAMPLE = {
    "batch_size": 65536,
    "optimizer": "adagrad",
    "topology": {"name": "h200"},
    "tables": [
        {"name": "user", "rows": 40_000_000, "width": 128, "skew": 1.05},
        {"name": "item", "rows": 10_000_000, "width": 128, "skew": 1.05},
        {"name": "history", "rows": 10_000_000, "width": 64, "hotness": 20, "skew": 1.05},
        {"name": "country", "rows": 200, "width": 16},
    ],
}
_MOST_RANKS = 4096
"""Time and memory grow with the square of ranks: so many and 1,000 tables take 3 s and 1 GB."""
_OF_TABLE = ("rows", "width", "name", "hotness", "skew", "inputs", "dtype", "trainable")
_CONSTRAINTS = ("choices", "min_columns", "on_host")


def read_tables(content: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(embeddings, options of `plan`) of what tables.json holds.

    Raises ValueError for what it may not hold.
    """
    whole = {"tables": content} if isinstance(content, list) else content
    if not isinstance(whole, dict) or not isinstance(whole.get("tables"), list):
        raise ValueError('the file must hold a list of tables, or an object with "tables"')
    known = ("tables", "batch_size", "optimizer", "topology")
    _refuse_others("the file", whole, known)
    options = {name: whole[name] for name in known[1:] if name in whole}
    embeddings, hotness, skew, tables_of = [], [], [], []
    constraints = {}
    for number, table in enumerate(whole["tables"]):
        what = f"table {number}"
        if not isinstance(table, dict):
            raise ValueError(f"{what} must be an object with rows and width, got {table!r}")
        _refuse_others(what, table, (*_OF_TABLE, *_CONSTRAINTS))
        for size in ("rows", "width", "inputs"):
            value = table.get(size, 1 if size == "inputs" else None)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{what}: {size} must be a positive integer, got {value!r}")
        _check_options(what, table)
        config = {name: table[name] for name in ("name", "dtype", "trainable") if name in table}
        embeddings.append({**config, "input_dim": table["rows"], "output_dim": table["width"]})
        for _ in range(table.get("inputs", 1)):
            tables_of.append(number)
            hotness.append(table.get("hotness", 1))
            skew.append(table.get("skew", 0))
        own = {name: table[name] for name in _CONSTRAINTS if name in table}
        if own:
            constraints[number] = own
    options.update(hotness=hotness, skew=skew, input_table_map=tables_of, constraints=constraints)
    return embeddings, options


def _check_options(what: str, table: Mapping[str, Any]) -> None:
    if table.get("dtype", TABLE_DTYPES[0]) not in TABLE_DTYPES:
        raise ValueError(f"{what}: dtype must be one of {', '.join(TABLE_DTYPES)}, got {table['dtype']!r}")
    for name, known in (("trainable", (True, False)), ("on_host", (True, False, None))):
        if not any(table.get(name, True) is each for each in known):
            raise ValueError(f"{what}: {name} must be true or false, got {table[name]!r}")
    if not isinstance(table.get("name", ""), str):
        raise ValueError(f"{what}: name must be text, got {table['name']!r}")


def _refuse_others(what: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{what}: unknown {', '.join(unknown)}; known are {', '.join(known)}")


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m sparse_operation_kit.planner",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tables", nargs="?", help="a JSON file of tables (see below); - is standard input")
    parser.add_argument("--ranks", type=int, default=8, help="processes, one a GPU (%(default)s)")
    parser.add_argument("--batch-size", type=int, help=f"samples of a step, of all ranks together ({BATCH_SIZE})")
    parser.add_argument(
        "--optimizer", help='of the tables: "sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", ... (sgd)'
    )
    parser.add_argument(
        "--strategy",
        choices=(PLANNED, *hybrid.STRATEGIES),
        default=PLANNED,
        help="planned: the cheapest place for each table. The others are those of distributed-embeddings (%(default)s)",
    )
    parser.add_argument("--compare", action="store_true", help="one line for each strategy in place of a report")
    parser.add_argument(
        "--topology", choices=tuple(TOPOLOGIES), help="what the ranks run on, as far as speed goes (h200)"
    )
    parser.add_argument("--device-memory", type=float, metavar="GB", help="of a rank's GPU")
    parser.add_argument("--host-memory", type=float, metavar="GB", help="of a rank, its share of its host's")
    parser.add_argument("--reserved", type=float, metavar="GB", help="of the GPU's memory, for the rest of the model")
    parser.add_argument("--ranks-per-host", type=int, help="where they are on several hosts")
    parser.add_argument(
        "--json", metavar="FILE", help="writes the report as JSON; - is standard output, in place of text"
    )
    parser.add_argument("--picture", metavar="FILE", help="draws bytes and time of each rank: .png, .svg, .pdf")
    parser.add_argument("--example", action="store_true", help="prints a tables.json to begin with")
    return parser


def _options(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """Those of the file, as the command line changes them."""
    if args.batch_size is not None:
        options["batch_size"] = args.batch_size
    if args.optimizer is not None:
        options["optimizer"] = args.optimizer
    topology = topology_of(args.topology or options.get("topology"))
    memory = {"device_memory": args.device_memory, "host_memory": args.host_memory, "reserved": args.reserved}
    changes = {name: 1e9 * value for name, value in memory.items() if value is not None}
    if args.ranks_per_host is not None:
        changes["ranks_per_host"] = args.ranks_per_host
    options["topology"] = topology.replace(**changes)
    return options


def _report(strategy: str, embeddings: list[dict[str, Any]], ranks: int, options: dict[str, Any]) -> Report:
    if strategy == PLANNED:
        return hybrid.plan(embeddings, ranks, **options).report()
    named = hybrid.DistEmbeddingStrategy(embeddings, ranks, strategy, options["input_table_map"])
    estimated = {name: value for name, value in options.items() if name not in ("input_table_map", "constraints")}
    return named.report(**estimated)


def _compare(embeddings: list[dict[str, Any]], ranks: int, options: dict[str, Any]) -> int:
    status = 0
    print(f"{'strategy':18}{'ms a step':>10}{'most GB a rank':>16}{'balance':>9}  fits")
    for strategy in (PLANNED, *hybrid.STRATEGIES):
        try:
            report = _report(strategy, embeddings, ranks, options)
        except hybrid.PlanError as error:
            print(f"{strategy:18}{error}")
            status = 1
            continue
        most = report.costs.device_memory.max() / 1e9
        balance = report.balance["time"]
        fits = "yes" if report.fits else f"no: {report.shortages()[0]}"
        print(f"{strategy:18}{1e3 * report.step:10.3f}{most:16.2f}{balance:9.2f}  {fits}")
    return status


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.example:
        print(json.dumps(_EXAMPLE, indent=1))
        return 0
    if args.tables is None:
        parser.error("which tables? Give a JSON file; --example prints one to begin with")
    if args.ranks > _MOST_RANKS:
        print(f"--ranks must be at most {_MOST_RANKS}, got {args.ranks}", file=sys.stderr)
        return 2
    try:
        if args.tables == "-":
            content = json.load(sys.stdin)
        else:
            with open(args.tables, encoding="utf-8") as file:
                content = json.load(file)
        embeddings, options = read_tables(content)
        options = _options(args, options)
        if args.compare:
            return _compare(embeddings, args.ranks, options)
        report = _report(args.strategy, embeddings, args.ranks, options)
    except hybrid.PlanError as error:
        print(error, file=sys.stderr)
        return 1
    except (OSError, ValueError, TypeError) as error:
        print(f"{args.tables}: {error}", file=sys.stderr)
        return 2
    if args.json == "-":
        print(report.to_json())
    else:
        print(report)
    try:
        what = "--json"
        if args.json not in (None, "-"):
            with open(args.json, "w", encoding="utf-8") as file:
                file.write(report.to_json() + "\n")
        what = "--picture"
        if args.picture is not None:
            report.picture(args.picture)
    except (OSError, ValueError) as error:  # ValueError: a suffix that names no format
        print(f"{what}: {error}", file=sys.stderr)
        return 2
    return int(not report.fits)


if __name__ == "__main__":
    sys.exit(main())
