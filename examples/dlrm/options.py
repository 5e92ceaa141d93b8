# SPDX-License-Identifier: Apache-2.0
"""Dataclasses whose fields are options of a command line: `rows: Annotated[int, Option("of a batch", least=1)] = 2048`.

A bool is a flag; what has no default has to be given.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Option:
    """What stands beside a field's type: its help, its least value or its choices."""

    help: str
    least: int | None = None
    choices: Sequence[str] = ()


def check(told: Any) -> None:
    """Raises ValueError for a field that is out of its bounds; for __post_init__."""
    for name, _, option in _fields(type(told)):
        value = getattr(told, name)
        if option.least is not None and not value >= option.least:
            bound = "must not be negative, but is" if option.least == 0 else f"must be at least {option.least}, not"
            raise ValueError(f"{flag(name)} {bound} {value}")
        if option.choices and value not in option.choices:
            raise ValueError(f"{flag(name)} must be one of {', '.join(option.choices)}, not {value}")


def add_arguments(cls: Any, parser: argparse.ArgumentParser, *, leave_out: Sequence[str] = ()) -> None:
    """Adds an option for each field, except those that the caller has its own way to set."""
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    for name, kind, option in _fields(cls):
        if name in leave_out:
            continue
        if kind is bool:
            parser.add_argument(flag(name), action="store_true", help=option.help)
            continue
        required = defaults[name] is dataclasses.MISSING
        default = None if required else defaults[name]
        parser.add_argument(
            flag(name),
            type=Path if kind == Path | None else kind,
            default=default,
            required=required,
            help=option.help + ("" if default is None else " (default: %(default)s)"),
            choices=option.choices or None,
        )


def names(cls: Any) -> list[str]:
    """The names of the fields."""
    return [field.name for field in dataclasses.fields(cls)]


def to_arguments(told: Any) -> list[str]:
    """The command line that gives these values."""
    arguments = []
    for name in names(told):
        value = getattr(told, name)
        if value is not None and value is not False:
            arguments += [flag(name)] if value is True else [flag(name), str(value)]
    return arguments


def parse(cls: type[T], description: str, arguments: Sequence[str] | None = None) -> T:
    """The values that a command line gives."""
    parser = argparse.ArgumentParser(description=description)
    add_arguments(cls, parser)
    parsed = vars(parser.parse_args(arguments))
    try:
        return cls(**parsed)
    except ValueError as error:
        parser.error(str(error))


def flag(field: str) -> str:
    """The option of a field."""
    return "--" + field.replace("_", "-")


def _fields(cls: Any) -> list[tuple[str, Any, Option]]:
    """(name, type, option) of each field."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return [(name, *typing.get_args(hints[name])) for name in names(cls)]
