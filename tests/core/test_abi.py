# SPDX-License-Identifier: Apache-2.0
"""The ctypes mirror (_abi.py) against the headers: sizes, offsets, numbers, prototypes, exported symbols."""

import ctypes
import pathlib
import re
import shutil
import subprocess

import pytest

from sparse_operation_kit.core import _abi, _library

INCLUDE = pathlib.Path(__file__).parents[2] / "core" / "include"
HEADERS = sorted((INCLUDE / "sok").glob("*.h"))
TEXT = re.sub(r"/\*.*?\*/", "", "\n".join(header.read_text() for header in HEADERS), flags=re.DOTALL)

STRUCTS = {
    "sok_device": _abi.Device,
    "sok_tensor": _abi.Tensor,
    "sok_allocator": _abi.Allocator,
    "sok_executor": _abi.Executor,
    "sok_context": _abi.Context,
    "sok_device_properties": _abi.DeviceProperties,
    "sok_nccl_properties": _abi.NcclProperties,
    "sok_communicator_id": _abi.CommunicatorId,
    "sok_placement": _abi.Placement,
    "sok_columns": _abi.Columns,
    "sok_index_request": _abi.IndexRequest,
    "sok_index": _abi.Index,
    "sok_admission": _abi.Admission,
    "sok_dynamic_table_counts": _abi.DynamicTableCounts,
    "sok_use_time": _abi.UseTime,
    "sok_dynamic_table_config": _abi.DynamicTableConfig,
    "sok_hash_index_config": _abi.HashIndexConfig,
    "sok_hash_index_request": _abi.HashIndexRequest,
    "sok_reserved_range_config": _abi.ReservedRangeConfig,
    "sok_lookup": _abi.Lookup,
    "sok_member": _abi.Member,
    "sok_routing": _abi.Routing,
    "sok_batch": _abi.Batch,
    "sok_messages": _abi.Messages,
    "sok_gradient": _abi.Gradient,
    "sok_optimizer": _abi.Optimizer,
    "sok_update": _abi.Update,
    "sok_initializer": _abi.Initializer,
}


def fields_in_headers():
    """{struct: [fields in order]}."""
    found = {}
    for name, body in re.findall(r"typedef struct (sok_\w+) \{(.*?)\} \1;", TEXT, re.DOTALL):
        body = re.sub(r"\(\*(\w+)\)\([^;]*\)", r"\1", body)  # function pointers
        body = re.sub(r"\[\w+\]", "", body)
        found[name] = [declaration.split()[-1].lstrip("*") for declaration in body.split(";") if declaration.strip()]
    return found


def numbers_in_headers():
    """Names of all enumerators and of the macros that are numbers."""
    enumerators = re.findall(r"\b(SOK_\w+)\s*=\s*\d+", TEXT)
    macros = re.findall(r"#define (SOK_\w+)\s+\(?-?\d+u?\)?\s*$", TEXT, re.MULTILINE)
    return enumerators + macros


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What a C compiler says of the headers: {"sok_tensor": size, "sok_tensor.data": offset, "SOK_SUM": number}."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler is needed"
    lines = [f'printf("{name} %zu\\n", sizeof({name}));' for name in STRUCTS]
    for name, fields in fields_in_headers().items():
        lines += [f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));' for field in fields]
    lines += [f'printf("{name} %lld\\n", (long long){name});' for name in numbers_in_headers()]
    folder = tmp_path_factory.mktemp("abi")
    source = folder / "abi.c"
    source.write_text("#include <stdio.h>\n#include <sok/sok.h>\nint main(void) {\n" + "\n".join(lines) + "\n}\n")
    command = [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-I", str(INCLUDE), str(source), "-o"]
    subprocess.run([*command, str(folder / "abi")], check=True)
    output = subprocess.run([str(folder / "abi")], check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in (line.split() for line in output.splitlines())}


def test_every_struct_is_mirrored():
    assert set(fields_in_headers()) == set(STRUCTS)


@pytest.mark.parametrize("name", STRUCTS)
def test_struct_layout(name, compiled):
    struct = STRUCTS[name]
    assert ctypes.sizeof(struct) == compiled[name]
    assert [field[0] for field in struct._fields_] == fields_in_headers()[name]
    for field, *_ in struct._fields_:
        assert getattr(struct, field).offset == compiled[f"{name}.{field}"], field


def test_numbers(compiled):
    names = numbers_in_headers()
    assert len(names) > 40
    for name in names:
        module = _library if name == "SOK_ABI_VERSION" or "_STATUS" in name else _abi
        short = name.removeprefix("SOK_")
        if not hasattr(module, short):
            module = _library
        assert getattr(module, short) == compiled[name], name


def test_every_function_is_declared():
    declared = dict(re.findall(r"SOK_EXPORT [\w\s]+?\*?\s?(sok_\w+)\((.*?)\);", TEXT, re.DOTALL))
    assert set(declared) == set(_abi.PROTOTYPES)
    for name, parameters in declared.items():
        count = 0 if parameters.strip() == "void" else parameters.count(",") + 1
        assert len(_abi.PROTOTYPES[name][1]) == count, name


def test_library_exports_the_interface_and_nothing_else():
    nm = shutil.which("nm")
    assert nm, "nm (binutils) is needed"
    command = [nm, "-D", "--defined-only", "--format=posix", str(_library.path())]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    symbols = {line.split()[0].split("@")[0] for line in listing.splitlines() if line.split()[1] != "A"}
    assert symbols == set(_abi.PROTOTYPES)
