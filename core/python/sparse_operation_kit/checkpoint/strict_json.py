# SPDX-License-Identifier: Apache-2.0
"""JSON for files that somebody else may have written: bounded in size, depth and number of values, and unambiguous."""

import json
import math
from typing import Any

MAX_BYTES = 64 << 20
MAX_VALUES = 1 << 20  # bounds what the parsed text takes in memory, some 100 bytes a value
MAX_DEPTH = 32
_MIN_INTEGER, _MAX_INTEGER = -(1 << 63), 1 << 64  # int64 and uint64 both fit; the end is exclusive
_MAX_DIGITS = 32


def _pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(items)
    if len(result) != len(items):
        raise ValueError("a member occurs twice in one object")
    return result


def _integer(text: str) -> int:
    value = int(text) if len(text) <= _MAX_DIGITS else _MAX_INTEGER
    if not _MIN_INTEGER <= value < _MAX_INTEGER:
        raise ValueError(f"the integer {text[:_MAX_DIGITS]} does not fit 64 bits")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:_MAX_DIGITS]} is not finite")
    return value


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def check(value: object, depth: int = MAX_DEPTH) -> int:
    """The number of values in `value`; ValueError where it is not plain JSON data within the limits."""
    if value is None or isinstance(value, bool):
        return 1
    if isinstance(value, str):
        value.encode("utf-8")  # lone surrogates: UnicodeEncodeError is a ValueError
        return 1
    if isinstance(value, int):
        if not _MIN_INTEGER <= value < _MAX_INTEGER:
            raise ValueError(f"the integer {value} does not fit 64 bits")
        return 1
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} cannot be written as JSON")
        return 1
    if depth == 0:
        raise ValueError(f"values are nested deeper than {MAX_DEPTH}")
    if isinstance(value, (list, tuple)):
        return 1 + sum(check(item, depth - 1) for item in value)
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"the member name {key!r} is not a str")
            key.encode("utf-8")
        return 1 + sum(check(item, depth - 1) for item in value.values())
    raise ValueError(f"{type(value).__name__} cannot be written as JSON")


def loads(data: bytes) -> Any:
    """Parses UTF-8 JSON; ValueError says what is wrong with it."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes are more than {MAX_BYTES}")
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_pairs,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
        )
    except RecursionError:
        raise ValueError(f"values are nested deeper than {MAX_DEPTH}") from None
    check(value)
    return value


def dumps(value: object) -> bytes:
    """`value` as ASCII JSON; ValueError where `loads` would not give it back."""
    check(value)
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(", ", ": ")).encode("ascii")
