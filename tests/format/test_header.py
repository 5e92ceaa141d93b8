# SPDX-License-Identifier: Apache-2.0
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparse_operation_kit.checkpoint as ck
from sparse_operation_kit.checkpoint import header
from sparse_operation_kit.checkpoint.header import Header, Kind

_CODES = ["int32", "int64", "uint32", "uint64", "float16", "float32", "float64"]


@pytest.mark.parametrize(("code", "dtype"), list(enumerate(_CODES)))
@pytest.mark.parametrize(("number", "kind", "state"), [(0, Kind.KEY, ""), (1, Kind.WEIGHT, ""), (2, Kind.STATE, "m")])
def test_bytes(code, dtype, number, kind, state):
    expected = (
        b" " * 256 + struct.pack(">I", number) + b" " * (32 - len(state)) + state.encode() + struct.pack(">I", code)
    )
    assert Header(kind, state, dtype).encode() == expected
    assert len(expected) == header.SIZE == 296


@given(st.sampled_from(Kind), st.from_regex(r"[A-Za-z0-9_]{0,32}", fullmatch=True), st.sampled_from(_CODES))
def test_round_trip(kind, state, dtype):
    assert header.decode(Header(kind, state, dtype).encode(), "x") == Header(kind, state, dtype)


@given(st.binary(min_size=0, max_size=400))
def test_anything_decodes_or_names_the_file(data):
    try:
        found = header.decode(data, "some-file")
    except ck.HeaderError as error:
        assert error.file == "some-file" and "some-file" in str(error)
    else:
        assert len(data) >= 296 and found.dtype in _CODES


def test_reserved_bytes_are_ignored():
    data = b"table0".rjust(256) + Header(Kind.KEY, "", "int64").encode()[256:]
    assert header.decode(data, "x") == Header(Kind.KEY, "", "int64")


def test_long_state_name():
    with pytest.raises(ValueError, match="32 bytes"):
        Header(Kind.STATE, "x" * 33, "float32").encode()


@pytest.mark.parametrize("dtype", ["complex64", "bfloat16", object, bool, "int64"])
def test_value_dtypes(dtype):
    with pytest.raises(ValueError, match="float16, float32, float64"):
        header.dtype_name(dtype, header.VALUE_DTYPES)


def test_dtypes_are_little_endian():
    assert [dtype.newbyteorder("<") for dtype in header.DTYPES.values()] == list(header.DTYPES.values())
    assert header.dtype_name(np.float16, header.VALUE_DTYPES) == "float16"
