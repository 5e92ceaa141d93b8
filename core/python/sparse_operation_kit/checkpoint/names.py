# SPDX-License-Identifier: Apache-2.0
"""How a table's name becomes file names.

`stem("table0:0")` is `table0_0`; its files are `table0_0-key`, `table0_0-weight` and `table0_0-Adam-m`. A stem holds no
ASCII punctuation, so that `-` separates the parts of a file name without doubt and no name can leave its directory.
"""

import re
import string
from collections.abc import Iterable
from typing import NamedTuple

from .errors import TableNameError

MANIFEST = "sok_manifest.json"
KEY = "key"
WEIGHT = "weight"
KEPT = "sok"  # stands for the optimizer in names of files of what is no optimizer's state

_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, "_"))
_MAX_FILE_NAME = 255  # bytes, NAME_MAX of the usual file systems
_MAX_STATE_NAME = 32  # bytes, the header's field
_STATE_NAME = re.compile(r"[A-Za-z0-9_]{1,32}")
_OPTIMIZER_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_OUTPUT = re.compile(r".*:[0-9]+", re.DOTALL)

# SOK 2.x found an optimizer's name by looking for these substrings, the last hit counting: Adamax and AdamW became
# "Adam".
_SOK_ALIASES = {"Adamax": ("Adamax", "Adam"), "AdamW": ("AdamW", "Adam")}


class StateFile(NamedTuple):
    """A file name of an optimizer state, taken apart."""

    stem: str
    optimizer: str
    slot: str


def tensor_name(name: str) -> str:
    """`name` with TensorFlow's output number: "table0" and "table0:0" are both "table0:0"."""
    return name if _OUTPUT.fullmatch(name) else name + ":0"


def candidates_name(name: str) -> str:
    """What the keys are called in a dump that wait for rows of the dynamic table `name`."""
    return f"{name.removesuffix(':0')} (candidates)"


def gone_name(name: str) -> str:
    """What the keys are called in an increment that went from the dynamic table `name`."""
    return f"{name.removesuffix(':0')} (gone)"


def stem(name: str) -> str:
    """`name` with each ASCII punctuation character replaced by `_`: the T of the file names.

    Raises TableNameError where no file can be named so: empty names, control characters, lone surrogates, names so
    long that the longest file name of the table passes 255 bytes.
    """
    if not isinstance(name, str):
        raise TableNameError(f"a table's name must be a str, not {type(name).__name__}")
    if not name:
        raise TableNameError("a table's name is empty", expected="at least one character")
    if any(ord(c) < 32 or ord(c) == 127 for c in name):
        raise TableNameError(f"the table name {name!r} holds a control character", expected="printable characters")
    result = name.translate(_PUNCTUATION)
    try:
        size = len(result.encode("utf-8"))
    except UnicodeEncodeError:
        raise TableNameError(
            f"the table name {name!r} is not valid Unicode", expected="text that UTF-8 encodes"
        ) from None
    if size > _MAX_FILE_NAME - len("-weight"):
        raise TableNameError(
            f"the table name {name[:40]!r}... takes {size} bytes",
            expected=f"at most {_MAX_FILE_NAME - len('-weight')} bytes",
        )
    return result


def is_stem(text: str) -> bool:
    """Whether `text` could be the stem of some name."""
    try:
        return stem(text) == text
    except TableNameError:
        return False


def stems(names: Iterable[str]) -> list[str]:
    """The stems of `names`; TableNameError when two are equal."""
    seen: dict[str, str] = {}
    for name in names:
        text = stem(name)
        if text in seen:
            raise TableNameError(
                f"the tables {seen[text]!r} and {name!r} would both be written to {text}-{KEY}",
                expected="names that differ in more than punctuation",
            )
        seen[text] = name
    return list(seen)


def check_optimizer(name: str) -> str:
    """`name`, or TableNameError where it cannot be part of a file name."""
    if not isinstance(name, str) or not _OPTIMIZER_NAME.fullmatch(name):
        raise TableNameError(
            f"{name!r} is not an optimizer name", expected="a letter, then letters, digits and _ (64 at most)"
        )
    return name


def check_slot(name: str) -> str:
    """`name`, or TableNameError where it cannot be a state's name."""
    if not isinstance(name, str) or not _STATE_NAME.fullmatch(name):
        raise TableNameError(
            f"{name!r} is not a state name", expected=f"letters, digits and _, at most {_MAX_STATE_NAME} characters"
        )
    return name


def key_file(table_stem: str) -> str:
    return f"{table_stem}-{KEY}"


def weight_file(table_stem: str) -> str:
    return f"{table_stem}-{WEIGHT}"


def state_file(table_stem: str, optimizer: str, slot: str) -> str:
    """The file of one optimizer state; TableNameError when the name is too long for a file system."""
    text = f"{table_stem}-{check_optimizer(optimizer)}-{check_slot(slot)}"
    if len(text.encode("utf-8")) > _MAX_FILE_NAME:
        raise TableNameError(f"the file name {text[:40]!r}... is too long", expected=f"at most {_MAX_FILE_NAME} bytes")
    return text


def parse_key_file(file_name: str) -> str | None:
    """The stem of a key file's name, or None when it is no such name."""
    head, separator, tail = file_name.rpartition("-")
    return head if separator and tail == KEY and is_stem(head) else None


def parse_weight_file(file_name: str) -> str | None:
    """The stem of a weight file's name, or None when it is no such name."""
    head, separator, tail = file_name.rpartition("-")
    return head if separator and tail == WEIGHT and is_stem(head) else None


def parse_state_file(file_name: str) -> StateFile | None:
    """The parts of a state file's name, or None when it is no such name."""
    parts = file_name.split("-")
    if len(parts) != 3 or not _OPTIMIZER_NAME.fullmatch(parts[1]) or not _STATE_NAME.fullmatch(parts[2]):
        return None
    return StateFile(*parts) if is_stem(parts[0]) else None


def sok_aliases(optimizer: str) -> tuple[str, ...]:
    """The names under which SOK 2.x may have written the states of `optimizer`, best first."""
    return _SOK_ALIASES.get(optimizer, (optimizer,))
