# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of embedding tables: written and read with NumPy, by any number of processes of any framework.

    dump(path, [Source, ...], optimizer=..., group=...)   every rank writes its rows; a dump appears whole or not at all
    dump_async(path, ...)                                 the same, of copies that a thread writes; wait() ends it
    load(path, [Target, ...], optimizer=..., group=...)   every rank gets its rows, checked before the first is given
    has_dump(path)                                        whether there is one
    open_dump(path)                                       tables, files, optimizer, step of a dump
    python -m sparse_operation_kit.checkpoint --help      inspect, verify, diff, convert,
                                                          export-for-serving

docs/FORMAT.md describes the files byte by byte.
"""

from .background import PendingDump, dump_async
from .errors import (
    CheckpointError,
    ChecksumError,
    FormatError,
    HeaderError,
    KeysError,
    ManifestError,
    MismatchError,
    MissingFileError,
    NoSpaceError,
    PeerError,
    SizeError,
    StorageError,
    TableNameError,
)
from .group import Group, SingleProcess, agree
from .loader import Target, load, open_together
from .names import tensor_name
from .reader import Dump, has_dump, open_dump
from .source import Rows, Source, from_arrays
from .tables import DISTRIBUTED, Optimizer, State, Table
from .writer import dump

__all__ = [
    "DISTRIBUTED",
    "CheckpointError",
    "ChecksumError",
    "Dump",
    "FormatError",
    "Group",
    "HeaderError",
    "KeysError",
    "ManifestError",
    "MismatchError",
    "MissingFileError",
    "NoSpaceError",
    "Optimizer",
    "PeerError",
    "PendingDump",
    "Rows",
    "SingleProcess",
    "SizeError",
    "Source",
    "State",
    "StorageError",
    "Table",
    "TableNameError",
    "Target",
    "agree",
    "dump",
    "dump_async",
    "from_arrays",
    "has_dump",
    "load",
    "open_dump",
    "open_together",
    "tensor_name",
]
