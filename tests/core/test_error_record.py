# SPDX-License-Identifier: Apache-2.0
"""Error records as far as they need no GPU, and contexts of callers that were compiled before there were any."""

import ctypes

import numpy as np
import pytest

from sparse_operation_kit import core
from sparse_operation_kit.core import _abi, _arrays, _library


def message():
    return _abi.library().sok_last_error_message().decode()


def test_records_are_for_cuda_devices():
    handle = ctypes.c_void_p()
    create = _abi.library().sok_error_record_create
    assert create(_abi.Device(_abi.CPU, 0), ctypes.byref(handle)) == _library.INVALID_ARGUMENT
    assert "SOK_CUDA" in message()
    assert create(_abi.Device(_abi.CUDA, 0), None) == _library.INVALID_ARGUMENT
    assert create(_abi.Device(_abi.CUDA, 10_000), ctypes.byref(handle)) != _library.OK
    assert "10000" in message()


def test_null():
    assert _abi.library().sok_error_record_destroy(None) == _library.OK
    assert _abi.library().sok_error_record_is_empty(None) == 1
    assert _abi.library().sok_error_record_check(None) == _library.INVALID_ARGUMENT
    assert "record" in message()


def test_without_a_gpu_a_record_cannot_be_made():
    if core.cuda_device_count() > 0:
        pytest.skip("there is a GPU")
    with pytest.raises((NotImplementedError, ValueError), match="CUDA"):
        core.ErrorRecord(0)


class _Recorded(ctypes.Structure):
    """The memory behind a sok_error_record (core/src/common/error_record.h)."""

    _fields_ = (
        ("taken", ctypes.c_uint32),
        ("ended", ctypes.c_int32),
        ("fault", ctypes.c_int32),
        ("table", ctypes.c_int32),
        ("value", ctypes.c_int64),
        ("limit", ctypes.c_int64),
        ("keeper", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
    )


def recorded(fault, table, value, limit, ended=0):
    """As a call on a device leaves it."""
    return _Recorded(1, ended, fault, table, value, limit)


@pytest.mark.parametrize(
    ("fault", "exception", "words"),
    [
        (1, IndexError, "table 1: key 12 is outside [0, 10)"),
        (2, IndexError, "table 1: key 12 belongs to rank 10"),
        (3, IndexError, "table 1: slot 12 is outside [0, 10)"),
        (4, ValueError, "table 1: row_splits of bag 12"),
        (5, IndexError, "row 12 is outside [0, 10)"),
        (6, IndexError, "table 1: inverse 12"),
        (7, ValueError, "routing"),
        (99, SystemError, "unknown fault 99"),
    ],
)
def test_each_fault_has_its_words(fault, exception, words):
    record = recorded(fault, 1, 12, 10)  # with no names: they are added by calls on a device
    assert words in raised(record, exception)


def test_an_exchange_that_was_ended():
    """By the host itself, which leaves no finding."""
    assert "an exchange with the other ranks was ended" in raised(_Recorded(ended=8), OSError)


def test_an_exchange_that_was_ended_after_a_finding():
    """Each is raised once: what the device had found stays the first."""
    record = recorded(1, 1, 12, 10, ended=8)
    check = _abi.library().sok_error_record_check
    for exception, words in ((IndexError, "key 12 is outside"), (OSError, "was ended")):
        with pytest.raises(exception, match=words):
            _library.check(check(ctypes.byref(record)))
    _library.check(check(ctypes.byref(record)))


@pytest.mark.parametrize("fault", [10, 11, 14, 15])
@pytest.mark.parametrize("num_ranks", [0, 1, 3])
def test_a_capacity_is_that_of_a_rank(fault, num_ranks):
    record = recorded(fault, 1, 12, 12)
    record.rank, record.num_ranks = 2, num_ranks
    assert raised(record, MemoryError).endswith("nothing was inserted" + ". This is rank 2 of 3" * (num_ranks > 1))


def test_other_faults_do_not_name_the_rank():
    record = recorded(1, 1, 12, 10)
    record.rank, record.num_ranks = 2, 3
    assert "This is rank" not in raised(record, IndexError)


def test_who_inserts_is_noted():
    """For what a device finds later."""
    record, context = _Recorded(), core.Context()
    context.struct.errors = ctypes.addressof(record)
    table = core.Table(np.ones((4, 2), np.float32), num_rows=12, num_ranks=3, rank=2)
    assert core.locate([table], np.array([5]), [[0], [0], [1]], context=context).tolist() == [1]
    assert (record.rank, record.num_ranks) == (2, 3)


@pytest.mark.parametrize("value", [-1, -(2**63), 2**63 - 1, 2**32, -(2**32) - 5])
def test_numbers_of_64_bits(value):
    assert f"key {value} is outside [0, {2**40 + 3})" in raised(recorded(1, 5, value, 2**40 + 3), IndexError)


def raised(record, exception):
    """What a check of the record says, which empties it."""
    check, is_empty = _abi.library().sok_error_record_check, _abi.library().sok_error_record_is_empty
    assert is_empty(ctypes.byref(record)) == 0
    with pytest.raises(exception) as error:
        _library.check(check(ctypes.byref(record)))
    assert is_empty(ctypes.byref(record)) == 1  # once only
    _library.check(check(ctypes.byref(record)))
    return str(error.value)


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_flags_on_the_cpu_are_zero(n):
    """Calls on the CPU report at once."""
    flags = np.full(n, 7, np.int64)
    core.Context().flag_errors(flags)
    assert flags.tolist() == [0] * n


def test_flags_in_a_column():
    """Of a matrix, as the last number of each rank's message is."""
    matrix = np.full((3, 4), 7, np.int64)
    flags = _arrays.view(matrix[:, 3:])
    _library.check(_abi.library().sok_error_record_flag(ctypes.byref(core.Context().struct), flags))
    assert matrix.tolist() == [[7, 7, 7, 0]] * 3


def test_wrong_flags():
    for flags in (np.zeros(3, np.int32), np.zeros((3, 2), np.int64)):
        with pytest.raises(ValueError, match="flags"):
            core.Context().flag_errors(flags)
    with pytest.raises(ValueError, match="flags"):
        core.Context().flag_errors(np.zeros(6, np.int64)[::2])
