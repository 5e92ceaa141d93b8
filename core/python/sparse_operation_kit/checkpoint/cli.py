# SPDX-License-Identifier: Apache-2.0
"""The command line: inspect, verify, diff, convert, export-for-serving.

Exit status: 0 done (verify: whole; diff: equal), 1 verify found damage or diff a difference, 2 wrong usage, a dump that
cannot be read, or an output that takes no more.
"""

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from . import display, inspection, serving
from .convert import convert
from .difference import diff
from .errors import CheckpointError
from .reader import open_dump


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # tables have names that not every terminal can show
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except CheckpointError as error:
        if getattr(options, "json", False):
            print(json.dumps({"error": str(error), "file": error.file}))
        print(f"error: {display.printable(str(error))}", file=sys.stderr)
        return 2
    except OSError as error:  # what concerns the dump is a CheckpointError
        if not isinstance(error, BrokenPipeError):
            print(f"error: {error}", file=sys.stderr)
        # What is still buffered must not raise again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_operation_kit.checkpoint",
        description="Looks at, checks, compares and converts dumps of embedding tables.",
        epilog="Exit status: 0 done, whole, equal; 1 damaged or different; 2 wrong usage or unreadable.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    command_inspect = command("inspect", _inspect, "Shows tables, rows, states and sizes; does not read the rows.")
    command_inspect.add_argument("path")
    command_verify = command("verify", _verify, "Reads everything and compares it with the checksums.")
    command_verify.add_argument("path")
    command_diff = command("diff", _diff, "Compares two dumps row by row, by key.")
    command_diff.add_argument("first")
    command_diff.add_argument("second")
    command_diff.add_argument(
        "--tolerance",
        type=_number,
        default=0.0,
        help="largest absolute difference that counts as equal (0: bit for bit)",
    )
    for added in (command_inspect, command_verify, command_diff):
        added.add_argument("--json", action="store_true", help="print one JSON object")
    command_convert = command(
        "convert",
        _convert,
        "Converts a dump to .npz or .safetensors and back, adds a manifest to one of SOK 2.x, reads and writes files "
        "of SOK 1.x's Saver.",
    )
    command_convert.add_argument("source", help="a dump's or SOK 1.x's directory, or a .npz or .safetensors file")
    command_convert.add_argument("destination", help="likewise; the ending decides")
    command_convert.add_argument("--optimizer", help="whose states to take, where a SOK 2.x directory has several")
    command_convert.add_argument("--dimension", type=int, help="elements a row, where files of SOK 1.x allow two")
    command_convert.add_argument("--sok1", action="store_true", help="write SOK 1.x's files into a directory")
    command_convert.add_argument("--force", action="store_true", help="replace what is at the destination")
    command_export = command(
        "export-for-serving",
        _export,
        "Writes keys and rows of a dump for servers: a folder a table as HugeCTR's HPS reads it, or one .safetensors.",
    )
    command_export.add_argument("source", help="a dump's directory")
    command_export.add_argument("destination", help="a new path; one that ends in .safetensors becomes that")
    command_export.add_argument("--tables", nargs="+", metavar="NAME", help="some of the tables")
    command_export.add_argument("--dtype", choices=serving.DTYPES, default="float32", help="HPS reads float32")
    command_export.add_argument(
        "--min-norm", type=_number, help="leave out rows of a smaller L2 norm; one with a NaN has none"
    )
    command_export.add_argument(
        "--min-score", type=_integer, help="leave out rows that the table's strategy of eviction ranks lower"
    )
    command_export.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _number(text: str, kind: type[float] = float) -> float:
    """Of an argument. NaN is refused like a negative one: nothing compares with it."""
    try:
        value = kind(text)
    except ValueError:
        what = "a number" if kind is float else "an integer"
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}") from None
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return value


def _integer(text: str) -> float:
    return _number(text, int)


def _inspect(options: argparse.Namespace) -> int:
    with open_dump(options.path) as dump:
        found = inspection.describe(dump)
    if options.json:
        print(json.dumps(found))
        return 0
    for label, value in (
        ("dump", found["path"]),
        ("format", found["format"]),
        ("writer", " ".join((found["writer"] or {}).values()) or None),
        ("ranks", found["world_size"]),
        ("step", found["step"]),
        ("extra", None if found["extra"] is None else json.dumps(found["extra"])),
        ("optimizer", _optimizer(found["optimizer"])),
        ("size", f"{found['rows']:,} rows, {display.size(found['bytes'])}"),
    ):
        if value is not None:
            print(f"{label + ':':<11}{display.printable(str(value))}")
    display.show_table(
        ("table", "rows", "dim", "keys", "values", "kind", "mode", "states", "size"),
        [
            (
                table["name"],
                table["rows"],
                table["dimension"],
                table["key_dtype"],
                table["value_dtype"],
                table["kind"] or "-",
                table["mode"] or "-",
                ", ".join(f"{state['optimizer']}-{state['slot']}" for state in table["states"]) or "-",
                display.size(table["bytes"]),
            )
            for table in found["tables"]
        ],
    )
    return 0


def _optimizer(found: dict[str, Any] | None) -> str | None:
    if found is None:
        return None
    steps = "" if found["iterations"] is None else f", {found['iterations']:,} iterations"
    return f"{found['name']}{steps}, {json.dumps(found['hyperparameters'])}"


def _verify(options: argparse.Namespace) -> int:
    found = inspection.verify(options.path)
    if options.json:
        print(json.dumps(found))
        return 0 if found["ok"] else 1
    for problem in found["problems"]:
        print(f"damaged: {display.printable(problem['problem'])}")
    for note in found["notes"]:
        print(f"note: {display.printable(note)}")
    checked = display.size(found["checked_bytes"])
    print(f"{'whole' if found['ok'] else 'NOT whole'}: {display.printable(found['path'])} ({checked} checked)")
    return 0 if found["ok"] else 1


def _diff(options: argparse.Namespace) -> int:
    with open_dump(options.first) as first, open_dump(options.second) as second:
        found = diff(first, second, options.tolerance)
    if options.json:
        print(json.dumps(found))
        return 0 if found["equal"] else 1
    for entry in found["metadata"]:
        one, two = json.dumps(entry["first"]), json.dumps(entry["second"])
        print(f"{entry['member']}: {display.printable(one)} | {display.printable(two)}")
    for which in ("first", "second"):
        for name in found[f"only_{which}"]:
            print(f"table {display.printable(name)}: only in {display.printable(found[which])}")
    lines: list[tuple[object, ...]] = []
    for table in found["tables"]:
        for state in table["states_in_one"]:
            print(f"table {display.printable(table['name'])}: {state['state']} only in the {state['in']} dump")
        for name, field in table["fields"].items():
            largest = field["largest_difference"] if field["comparable"] else f"columns {field['columns']}"
            counts = (table["only_first"], table["only_second"], field["rows_that_differ"])
            lines.append((table["name"], name, *table["rows"], *counts, str(largest)))
    if lines:
        titles = ("table", "field", "rows", "rows 2nd", "only 1st", "only 2nd", "differ", "largest")
        display.show_table(titles, lines)
    print("equal" if found["equal"] else "different")
    return 0 if found["equal"] else 1


def _convert(options: argparse.Namespace) -> int:
    convert(
        options.source,
        options.destination,
        optimizer=options.optimizer,
        dimension=options.dimension,
        to_sok1=options.sok1,
        force=options.force,
    )
    return 0


def _export(options: argparse.Namespace) -> int:
    choice = serving.Choice(options.dtype, options.min_norm, options.min_score)
    with open_dump(options.source) as dump:
        sources = serving.sources_of(dump, options.tables)
        written = serving.export_for_serving(options.destination, lambda: sources, choice)
    held = {name: source.rows for name, source in zip(written, sources, strict=True)}
    if options.json:
        print(json.dumps({"tables": {name: {"rows": rows, "of": held[name]} for name, rows in written.items()}}))
    else:
        display.show_table(("table", "rows", "of"), [(name, rows, held[name]) for name, rows in written.items()])
    return 0
