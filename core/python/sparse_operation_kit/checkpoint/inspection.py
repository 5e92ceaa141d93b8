# SPDX-License-Identifier: Apache-2.0
"""inspect and verify: what is in a dump, and whether it is whole."""

import os
from typing import Any

from ..placement import Placement
from . import manifest, names, tables
from .errors import CheckpointError
from .plan import plan
from .progress import bar
from .reader import Dump, DumpTable, open_dump
from .verify import check_chunks, chunk_jobs


def describe(dump: Dump) -> dict[str, Any]:
    """A dump as plain data: what `inspect --json` prints."""
    held = [describe_table(table, legacy=dump.manifest is None) for table in dump.tables.values()]
    return {
        "path": dump.path,
        "format": "SOK 2.x" if dump.manifest is None else f"{manifest.FORMAT} {manifest.VERSION[0]}",
        "writer": dict(dump.manifest.writer) if dump.manifest else None,
        "world_size": dump.world_size,
        "step": dump.step,
        "extra": dump.extra,
        "optimizer": manifest.optimizer_to_json(dump.optimizer),
        "rows": sum(table["rows"] for table in held),
        "bytes": sum(table["bytes"] for table in held),
        "tables": held,
    }


def describe_table(stored: DumpTable, legacy: bool) -> dict[str, Any]:
    table = stored.table
    return {
        "name": table.name,
        "rows": stored.rows,
        "dimension": table.dimension,
        "key_dtype": table.key_type,
        "value_dtype": table.value_dtype,
        **({} if table.row_dtype is None else {"row_dtype": table.row_dtype}),
        "kind": None if legacy else table.kind,
        "mode": None if legacy else table.mode,
        "seed": table.seed,
        "initializer": table.initializer,
        "parts": None if legacy else list(stored.layout.parts),
        "bytes": sum(file.file.size for file in stored.files),
        "states": [
            {
                "optimizer": optimizer,
                "slot": slot,
                "dtype": file.spec.header.dtype,
                "columns": file.spec.columns,
            }
            for (optimizer, slot), file in stored.states.items()
        ],
        "files": [{"name": file.spec.name, "bytes": file.file.size} for file in stored.files],
    }


def verify(path: str | os.PathLike[str], progress: bool | None = None) -> dict[str, Any]:
    """Checks everything that can be checked; does not stop at the first problem.

    Returns {"path", "ok", "checked_bytes", "has_checksums", "problems": [{"file", "problem"}], "notes": [text]}.
    """
    text = os.fspath(path)
    result: dict[str, Any] = {"path": text, "ok": False, "checked_bytes": 0, "has_checksums": False}
    problems: list[dict[str, Any]] = []
    notes: list[str] = []
    result.update(problems=problems, notes=notes)
    try:
        dump = open_dump(text)
    except CheckpointError as error:
        problems.append({"file": error.file, "problem": str(error)})
        return result
    with dump:
        result["has_checksums"] = dump.manifest is not None
        total = sum(file.file.size for table in dump.tables.values() for file in table.files)
        with bar("verify", total, 0, progress) as advance:

            def count(size: int) -> None:
                result["checked_bytes"] += size
                advance(size)

            for table in dump.tables.values():
                problems.extend(_verify_table(table, count))
        if dump.manifest is None:
            notes.append("a dump of SOK 2.x: it has no checksums, only names, headers, sizes and keys were checked")
        notes.extend(_strangers(dump))
    result["ok"] = not problems
    return result


def _verify_table(table: DumpTable, count: Any) -> list[dict[str, Any]]:
    problems = []
    rows = table.rows if table.table.kind == tables.STATIC else None
    # A dump of SOK 2.x does not say which integers its keys are; int64 holds all that a table can have.
    key_dtype = "int32" if table.table.key_type == "int32" else "int64"
    try:
        plan(table, Placement(table.rows, table.table.dimension), rows, key_dtype, count)
    except CheckpointError as error:
        problems.append({"file": error.file, "problem": str(error)})
    for file in table.files[1:]:
        try:
            check_chunks(chunk_jobs(table, [file]), count)
        except CheckpointError as error:
            problems.append({"file": error.file, "problem": str(error)})
    return problems


def _strangers(dump: Dump) -> list[str]:
    """Notes on files that look like a dump's and belong to none of its tables."""
    if dump.manifest is None:
        return []
    listed = {file.spec.name for table in dump.tables.values() for file in table.files}
    try:
        there = os.listdir(dump.path)
    except OSError:
        return []
    parsers = (names.parse_key_file, names.parse_weight_file, names.parse_state_file)
    return [
        f"{name} is no part of this dump"
        for name in sorted(set(there) - listed)
        if any(parse(name) for parse in parsers)
    ]
