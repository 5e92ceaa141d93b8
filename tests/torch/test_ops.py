# SPDX-License-Identifier: Apache-2.0
"""The ops themselves: schemas, fakes, opcheck, error types, and whose threads and memory they use."""

import ctypes
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import sparse_operation_kit.torch as sok
from sparse_operation_kit.core import _library
from sparse_operation_kit.torch import _ops, errors

ops = torch.ops.sok
CSRC = pathlib.Path(_ops.__file__).parent / "csrc"

TABLES = (torch.arange(40.0).view(10, 4), torch.arange(14.0).view(7, 2))
NAMES = ["items", "users"]
KEYS = [torch.tensor([1, 2, 2, 9]), torch.tensor([0, 6, 3], dtype=torch.int32), torch.tensor([5, 5])]
LOOKUPS = (
    KEYS,
    [0, 1, 0],
    [0, 1, 2],
    [torch.tensor([0, 3, 4]), torch.tensor([0, 0, 3, 3])],
    [0, 1],
    [torch.tensor([0.5, 2.0, 1.0])],
    [1],
)
GRADIENTS = [torch.ones(2, 4), torch.ones(3, 2), None]


def calls():
    """Sample inputs of each op."""
    return {
        "gather_combine": (list(TABLES), NAMES, *LOOKUPS),
        "weight_gradient": (GRADIENTS, list(TABLES), NAMES, *LOOKUPS),
        "bags": (torch.tensor([2, 0, 0, 1]), 4),
        "locate_members": (torch.tensor([2, 0, 1]), torch.tensor([0, 1, 3]), "stack", 9, ["a", "b"], [0, 4], [4, 5]),
        "initialize": (torch.zeros(5, 3), 1, 7, -1.0, 1.0, None, 0, 1),
        "count_up": ([torch.tensor(3.0), torch.tensor([4.0]), torch.tensor(5.0)],),
        "assign": (torch.zeros(10, 4), "items", -1, 10, 1, 0, torch.tensor([3, 9]), torch.ones(2, 4)),
        "error_flags": (torch.zeros((2, 3), dtype=torch.int64),),
        "all_to_all": (torch.zeros(5), torch.arange(5.0), 0, [5], [5]),
    }


@pytest.mark.parametrize("name", [*calls(), "initialize keys"])
def test_opcheck(name):
    if name == "initialize keys":
        arguments = (torch.zeros(2, 3), 2, -7, 0.0, 1.0, torch.tensor([5, -3]), 0, 1)
    else:
        arguments = calls()[name]
    torch.library.opcheck(getattr(ops, name.split()[0]).default, arguments)


def test_every_op_is_checked():
    text = (CSRC / "library.cc").read_text()
    assert len(re.findall(r"^TORCH_LIBRARY\(", text, re.MULTILINE)) == 1
    assert not any("pybind" in path.read_text() for path in CSRC.glob("*.[ch]*"))
    without_results = {"check_status", "check_errors", "error_devices"}
    without_results |= {"prefetch"}
    without_results |= {"swap_counts", "failed_ranks"}
    called_back = {"carry"}  # by the function of autograd, in gradient.py
    called_back |= {"exchange", "exchange_counts", "check_swapped"}  # by exchange.cc, in exchange.py
    defined = set(re.findall(r'"(\w+)\(', text)) - without_results - called_back
    assert defined == set(calls())
    implemented = set(re.findall(r'm\.impl\("(\w+)"', text))
    assert implemented == defined
    for name in defined:
        for key in ("CPU", "CUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sok::{name}", key), (name, key)


def test_mutation_is_in_the_schemas():
    mutated = {name: [a.name for a in getattr(ops, name).default._schema.arguments if a.is_write] for name in calls()}
    assert {name: names for name, names in mutated.items() if names} == {
        "initialize": ["rows"],
        "count_up": ["numbers"],
        "assign": ["target"],
        "all_to_all": ["received"],
    }


def test_step_counts():
    for dtype in (torch.float32, torch.float64, torch.int64):
        numbers = [torch.tensor(2, dtype=dtype, device="cpu"), torch.tensor([2], dtype=dtype, device="cpu")]
        ops.count_up(numbers)
        assert [int(number) for number in numbers] == [3, 3] and [number._version for number in numbers] == [1, 1]


@pytest.mark.parametrize("status", errors.EXCEPTIONS)
def test_each_status_has_its_exception(status):
    with pytest.raises(errors.EXCEPTIONS[status]) as info:
        ops.check_status(status)
    assert type(info.value) is errors.EXCEPTIONS[status]


def test_statuses_are_exhaustive():
    header = (CSRC.parents[1] / "core/include/sok/status.h").read_text()
    codes = {int(number) for number in re.findall(r"SOK_\w+ = (\d+)", header)}
    assert codes == {_library.OK, *errors.EXCEPTIONS}
    ops.check_status(_library.OK)
    with pytest.raises(RuntimeError, match="status 99"):
        ops.check_status(99)


def test_message_is_the_core_s():
    with pytest.raises(IndexError, match=r"^table 'items': key 10 is outside \[0, 10\)$"):
        ops.gather_combine([TABLES[0]], ["items"], [torch.tensor([10])], [0], [0], [], [], [], [])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.gather_combine([], [], [], [], [], [], [], [], []), "no tensor arguments"),
        (
            lambda: ops.gather_combine([TABLES[0]], [], KEYS[:1], [0], [0], [], [], [], []),
            "one entry a table",
        ),
        (
            lambda: ops.gather_combine([TABLES[0]], ["a"], KEYS[:1], [0], [], [], [], [], []),
            "one entry a lookup",
        ),
        (lambda: ops.gather_combine([TABLES[0]], ["a"], KEYS[:1], [3], [0], [], [], [], []), "table"),
        (lambda: ops.gather_combine([TABLES[0]], ["a"], KEYS[:1], [0], [9], [], [], [], []), "combiner"),
        (lambda: ops.gather_combine([TABLES[0].T], ["a"], KEYS[:1], [0], [0], [], [], [], []), "contiguous"),
        (
            lambda: ops.gather_combine([TABLES[0].double()], ["a"], KEYS[:1], [0], [0], [], [], [], []),
            "float32",
        ),
        (lambda: ops.bags(torch.tensor([0]), -1), "negative"),
        (
            lambda: ops.weight_gradient([None], list(TABLES), NAMES, *LOOKUPS),
            "one output gradient",
        ),
    ],
)
def test_ops_check_their_arguments(call, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        call()
        sok.check_errors()  # what a device finds is raised later


def test_positions_outside_the_lists():
    for bagged in ([5], [-1]):
        with pytest.raises((IndexError, ValueError, RuntimeError)):
            ops.gather_combine([TABLES[0]], ["a"], KEYS[:1], [0], [0], [torch.tensor([0, 4])], bagged, [], [])


def test_one_openmp_runtime_and_one_core():
    # Two OpenMP runtimes in a process would run twice as many threads as there are CPUs.
    code = """
import pathlib, torch
import sparse_operation_kit.torch as sok
sok.init()
sok.lookup_sparse(sok.Variable(torch.ones(4, 2)), (torch.tensor([1]), torch.tensor([0, 1])))
names = {line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if "/" in line}
print(*sorted(name for name in names if "gomp" in name or "libiomp" in name or "libomp" in name or "libsok_core" in
name), sep="\\n")
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    openmp = [name for name in found if "sok_core" not in name]
    assert len(openmp) == 1 and openmp[0].startswith(str(pathlib.Path(torch.__file__).parent)), found
    assert len(found) == 2, found


def test_threads_are_torch_s():
    # The core's own pool is not used: the number of threads of the process does not grow beyond torch's.
    code = """
import os, torch
import sparse_operation_kit.torch as sok
torch.set_num_threads(2)
torch.ones(2_000_000).exp().sum()
sok.init()
table = sok.Variable(shape=(1000, 64))
before = len(os.listdir("/proc/self/task"))
for _ in range(3):
    sok.lookup_sparse(table, (torch.randint(0, 1000, (50_000,)), torch.arange(50_001))).sum().backward()
table.grad.coalesce()
print(before, len(os.listdir("/proc/self/task")))
"""
    before, after = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert before == after


def test_library_is_for_this_core():
    assert ctypes.CDLL(str(_library.path())).sok_abi_version() == _library.ABI_VERSION
    assert sok.Variable  # loaded through _ops


def test_counts_are_swapped_on_a_gpu():
    with pytest.raises(ValueError, match="of a CUDA device"):
        ops.swap_counts(torch.zeros((2, 1), dtype=torch.int64), 0)


def test_failed_ranks():
    assert ops.failed_ranks(torch.tensor([[5, 0], [0, 1], [7, 0], [0, 3]])) == [1, 3]
    assert ops.failed_ranks(torch.zeros((3, 1), dtype=torch.int64)) == []
    for wrong in (torch.zeros((2, 0), dtype=torch.int64), torch.zeros((2, 2)), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="received must be"):
            ops.failed_ranks(wrong)


def test_on_a_cpu_there_are_no_deferred_errors():
    flags = ops.error_flags(torch.ones((3, 2), dtype=torch.int64))
    assert flags.tolist() == [0, 0, 0]
    sok.check_errors()
