# SPDX-License-Identifier: Apache-2.0
"""The 296 bytes at the head of each file."""

import enum
import struct
from dataclasses import dataclass

import numpy as np

from .errors import HeaderError

SIZE = 296
_STRUCT = struct.Struct(">256sI32sI")
_RESERVED = b" " * 256


class Kind(enum.IntEnum):
    """What a file holds."""

    KEY = 0
    WEIGHT = 1
    STATE = 2


# Code in the header -> dtype of the payload, little-endian on every host.
_DTYPES = ("<i4", "<i8", "<u4", "<u8", "<f2", "<f4", "<f8")
DTYPES: dict[str, np.dtype] = {np.dtype(text).name: np.dtype(text) for text in _DTYPES}
_CODES = {name: code for code, name in enumerate(DTYPES)}
_NAMES = tuple(DTYPES)
KEY_DTYPES = ("int32", "int64", "uint32", "uint64")
VALUE_DTYPES = ("float16", "float32", "float64")
BFLOAT16 = "bfloat16"
"""A dtype of rows that files do not have: such rows are stored as float32."""


def stored_dtype(row_dtype: str) -> str:
    """The dtype in which rows are written to files, and handed around as NumPy arrays."""
    return "float32" if row_dtype == BFLOAT16 else row_dtype


def dtype_name(dtype: object, allowed: tuple[str, ...]) -> str:
    """The format's name of a NumPy dtype (or of anything NumPy takes for one); ValueError when it is not in
    `allowed`.
    """
    try:
        name = np.dtype(dtype).name  # type: ignore[call-overload]
    except TypeError:
        name = str(dtype)
    if name not in allowed:
        raise ValueError(f"a checkpoint cannot hold {name}; expected one of {', '.join(allowed)}")
    return str(name)


@dataclass(frozen=True)
class Header:
    """kind; the state's name, "" for keys and weights; the dtype's name."""

    kind: Kind
    state: str
    dtype: str

    def encode(self) -> bytes:
        """The 296 bytes."""
        state = self.state.encode("ascii").rjust(32)
        if len(state) != 32:
            raise ValueError(f"the state name {self.state!r} takes more than 32 bytes")
        return _STRUCT.pack(_RESERVED, int(self.kind), state, _CODES[self.dtype])

    def describe(self) -> str:
        what = f"state {self.state!r}" if self.kind is Kind.STATE else self.kind.name.lower()
        return f"a header of {what} of {self.dtype}"


def decode(data: bytes, file: str) -> Header:
    """Reads a header; the first 256 bytes are ignored. HeaderError names `file`."""
    if len(data) < SIZE:
        raise HeaderError(f"{len(data)} bytes are too few for a header", file=file, expected=f"at least {SIZE} bytes")
    _, kind, state, code = _STRUCT.unpack(data[:SIZE])
    if kind not in (0, 1, 2):
        raise HeaderError(f"the header's kind is {kind}", file=file, expected="0 (key), 1 (weight) or 2 (state)")
    if code >= len(_NAMES):
        raise HeaderError(f"the header's dtype is {code}", file=file, expected=f"0 to {len(_NAMES) - 1}")
    try:
        text = state.decode("ascii").strip(" ")
    except UnicodeDecodeError:
        raise HeaderError("the header's state name is not ASCII", file=file, expected="32 ASCII bytes") from None
    return Header(Kind(kind), text, _NAMES[code])
