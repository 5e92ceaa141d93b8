# SPDX-License-Identifier: Apache-2.0
"""Loading the library, and statuses as exceptions."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from sparse_operation_kit import core
from sparse_operation_kit.core import _abi, _library

STATUS_H = pathlib.Path(__file__).parents[2] / "core" / "include" / "sok" / "status.h"


def run(code, **environment):
    """A Python process with `code`; returns (exit status, stderr)."""
    process = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    return process.returncode, process.stdout + process.stderr


def test_every_status_has_its_exception():
    statuses = {int(number): name for name, number in re.findall(r"(SOK_\w+) = (\d+)", STATUS_H.read_text())}
    assert statuses.pop(0) == "SOK_OK"
    assert set(statuses) == set(_library.EXCEPTIONS)
    library = _abi.library()
    for number, name in statuses.items():
        assert library.sok_status_name(number).decode() == name
        assert getattr(_library, name.removeprefix("SOK_")) == number
        with pytest.raises(_library.EXCEPTIONS[number]):
            _library.check(number)
    _library.check(0)


def test_unknown_status():
    assert _abi.library().sok_status_name(99) == b"unknown status"
    with pytest.raises(SystemError, match="unknown status 99"):
        _library.check(99)


def test_messages_are_kept_for_the_thread_that_failed():
    code = """
import threading
from sparse_operation_kit.core import _abi
library = _abi.library()
assert library.sok_last_error_message() == b""
assert library.sok_thread_pool_create(-1, None) != 0
mine = library.sok_last_error_message()
assert mine
others = []
thread = threading.Thread(target=lambda: others.append(library.sok_last_error_message()))
thread.start(); thread.join()
assert others == [b""], others
assert library.sok_last_error_message() == mine
"""
    status, output = run(code)
    assert status == 0, output


def test_load_returns_one_library():
    assert _library.load() is _library.load()
    assert _library.path().is_absolute()
    assert _library.load().sok_abi_version() == _library.ABI_VERSION


def test_importing_loads_nothing():
    code = """
import sys
from sparse_operation_kit import core
assert "libsok_core" not in open("/proc/self/maps").read()
assert not {"torch", "tensorflow", "horovod"} & set(sys.modules)
core.version()
assert "libsok_core" in open("/proc/self/maps").read()
assert "libcudart" not in open("/proc/self/maps").read()
"""
    status, output = run(code)
    assert status == 0, output


LOAD = "from sparse_operation_kit.core import _library; _library.load()"


def test_missing_library_says_how_to_build(tmp_path):
    status, output = run(LOAD, SOK_CORE_LIBRARY=str(tmp_path / "none.so"))
    assert status != 0
    assert "ImportError" in output
    assert "none.so" in output
    assert "pip install" in output
    assert "SOK_CORE_LIBRARY" in output


def test_a_file_that_is_no_library(tmp_path):
    (tmp_path / "text.so").write_text("not an ELF file")
    status, output = run(LOAD, SOK_CORE_LIBRARY=str(tmp_path / "text.so"))
    assert status != 0
    assert "ImportError" in output
    assert "cannot be loaded" in output


def test_ops_of_a_framework(tmp_path):
    """They are there, for this series of the framework, and load; else the error says what to run."""

    def load(version="2.13.0+cpu", load_library=pathlib.Path, failures=(OSError,)):
        return _library.load_ops(file, "PyTorch", version, load_library, failures)

    def refuse(path):
        raise LookupError(f"undefined symbol in {path}")

    file = tmp_path / "libsok_torch.so"
    with pytest.raises(ImportError, match=r"are missing: no file .*--no-build-isolation.*tools/build\.py torch"):
        load()
    file.touch()
    assert load() == file  # nothing says for which version
    file.with_suffix(".built_for").write_text("2.13.1\n")
    assert load() == file
    for other in ("2.14.0", "3.13.1"):
        with pytest.raises(ImportError, match=rf"compiled for PyTorch 2\.13\.1, and this is PyTorch {other}.*torch"):
            load(other)
    with pytest.raises(ImportError, match=r"cannot be loaded by PyTorch.*undefined symbol"):
        load(load_library=refuse, failures=(LookupError,))
    with pytest.raises(LookupError):
        load(load_library=refuse)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("int sok_abi_version(void) { return 999; }", "version 999"),
        ("int something_else(void) { return 1; }", "is not a libsok_core"),
    ],
)
def test_another_library(tmp_path, source, message):
    other = (
        '\nconst char* sok_last_error_message(void) { return ""; }\nconst char* sok_status_name(int s) { return ""; }\n'
    )
    (tmp_path / "other.c").write_text(source + other)
    compiler = shutil.which("cc") or shutil.which("gcc")
    command = [compiler, "-shared", "-fPIC", "-Wno-all", str(tmp_path / "other.c"), "-o", str(tmp_path / "other.so")]
    subprocess.run(command, check=True)
    status, output = run(LOAD, SOK_CORE_LIBRARY=str(tmp_path / "other.so"))
    assert status != 0
    assert "ImportError" in output
    assert message in output


def test_versions():
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", core.version())
    assert core.version() in core.build_info()
    assert "\n" not in core.build_info()


def test_devices():
    assert core.cuda_device_count() >= 0
    if not core.built_with_cuda():
        assert "no CUDA" in core.build_info()
        assert core.cuda_device_count() == 0
        with pytest.raises(NotImplementedError):
            core.device_properties(0)
    else:
        with pytest.raises((ValueError, OSError)):
            core.device_properties(10_000)
    cpu = core.device_properties()
    assert cpu.name
    assert (cpu.total_memory, cpu.compute_capability, cpu.multiprocessors) == (0, 0, 0)


def test_a_cuda_context_without_cuda():
    if core.built_with_cuda():
        pytest.skip("built with CUDA")
    context = core.Context()
    context.struct.device = _abi.Device(_abi.CUDA, 0)
    table = core.Table(np.zeros((2, 2), np.float32))
    with pytest.raises(NotImplementedError, match="CUDA"):
        core.gather_combine([table], [core.Lookup([0])], context=context)
