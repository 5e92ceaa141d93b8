# SPDX-License-Identifier: Apache-2.0
"""tools/check.py: each rule finds its violation and lets the right thing pass."""

import json
import pathlib

import pytest

LICENSE = "# SPDX-License-Identifier: Apache-2.0\n"


@pytest.mark.parametrize(
    "path, line",
    [
        ("core/src/cpu/gather.cc", "#include <vector>"),
        ("core/src/cpu/gather.cc", "#include <immintrin.h>"),
        ("core/src/cpu/gather.cc", '#include "common/status.h"'),
        ("core/src/cpu/gather.cc", '#include "sok/sok.h"'),
        ("core/src/cuda/gather.cu", "#include <cub/cub.cuh>"),
        ("core/include/sok/sok.h", '#include "sok/types.h"'),
        ("tf_frontend/csrc/gather.cc", '#include "sok/sok.h"'),
        ("tf_frontend/csrc/gather.cc", '#include "tensorflow/core/framework/op.h"'),
        ("torch_frontend/csrc/ops.cc", "#include <torch/library.h>"),
    ],
)
def test_allowed_include(check, path, line):
    assert list(check.include_problems(pathlib.Path(path), line)) == []


@pytest.mark.parametrize(
    "path, line",
    [
        ("core/src/cpu/gather.cc", '#include "tensorflow/core/framework/op.h"'),
        ("core/src/cpu/gather.cc", "#include <torch/library.h>"),
        ("core/src/cpu/gather.cc", "#include <ATen/ATen.h>"),
        ("core/src/cpu/gather.cc", "#include <Python.h>"),
        ("core/src/cpu/gather.cc", "  #  include <omp.h>"),
        ("core/include/sok/sok.h", '#include "common/status.h"'),
        ("tf_frontend/csrc/gather.cc", '#include "common/status.h"'),
        ("torch_frontend/csrc/ops.cc", '#include "../../core/src/common/status.h"'),
    ],
)
def test_forbidden_include(check, path, line):
    (problem,) = check.include_problems(pathlib.Path(path), f"// first line\n{line}\n")
    assert problem.startswith(f"{path}:2: #include ")


@pytest.mark.parametrize(
    "path, module",
    [
        ("tests/conftest.py", "suites/conftest.py"),
        ("tests/core/test_abi.py", "suites/core/test_abi.py"),
        ("tests/reference.py", "reference.py"),
        ("tests/core/harness.py", "harness.py"),
        ("tests/torch/harness.py", "torch_harness.py"),
        ("tests/gpu_torch/mirror.py", "torch_mirror.py"),
        ("tests/gpu_core/mirror.py", "mirror.py"),
    ],
)
def test_modules_of_tests(check, path, module):
    """They have the names that the suites import them by."""
    assert check.test_module(pathlib.Path(path)) == pathlib.Path(module)


def test_modules_of_tests_have_names_of_their_own(check):
    modules = [check.test_module(path) for path in check.tracked(".py", under=["tests"])]
    assert len(set(modules)) == len(modules)


@pytest.mark.parametrize(
    "path, text",
    [
        ("core/python/sparse_operation_kit/a.py", "import numpy"),
        (
            "core/python/sparse_operation_kit/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        ),
        ("tf_frontend/a.py", "import tensorflow as tf\nimport horovod.tensorflow as hvd\nimport keras"),
        ("tf_frontend/a.py", "from sparse_operation_kit.tensorflow import lookup"),
        ("torch_frontend/a.py", "from torch import nn\nimport torch.distributed"),
    ],
)
def test_allowed_import(check, path, text):
    assert list(check.import_problems(pathlib.Path(path), text)) == []


@pytest.mark.parametrize(
    "path, text",
    [
        ("core/python/sparse_operation_kit/a.py", "import torch"),
        ("core/python/sparse_operation_kit/a.py", "def f():\n    from keras import ops"),
        ("core/python/sparse_operation_kit/a.py", "import sparse_operation_kit.tensorflow"),
        ("tf_frontend/a.py", "import torch"),
        ("tf_frontend/a.py", "from sparse_operation_kit.torch import lookup"),
        ("torch_frontend/a.py", "import tensorflow.compat.v1"),
        ("torch_frontend/a.py", "import horovod.torch"),
    ],
)
def test_forbidden_import(check, path, text):
    (problem,) = check.import_problems(pathlib.Path(path), text)
    assert "import" in problem and problem.startswith(path)


def test_good_source(check):
    assert list(check.source_problems(pathlib.Path("a.py"), LICENSE + "x = 1\n")) == []


@pytest.mark.parametrize(
    "path, text, expected",
    [
        ("a.cc", "int x;\n", "no `SPDX"),
        ("a.py", LICENSE + "x = 1\n" * 499, "500 lines"),
        ("a.cc", "// " + LICENSE + "// " + "x" * 118, "121 columns"),
        ("a.md", "see /" + "home/somebody/file", "somebody's machine"),
        ("a.py", LICENSE + "path = '/" + "work/main'", "somebody's machine"),
    ],
)
def test_bad_source(check, path, text, expected):
    (problem,) = check.source_problems(pathlib.Path(path), text)
    assert expected in problem


def test_urls_and_relative_paths_are_no_machine_paths(check):
    text = "https://example.org/home/page and docs/work/notes and ${HOME}/work/x"
    assert list(check.source_problems(pathlib.Path("a.md"), text)) == []


def test_declared_functions(check):
    names = check.declared_functions()
    assert {"sok_abi_version", "sok_gather_combine", "sok_last_error_message"} <= names
    assert all(name.startswith("sok_") for name in names)


def test_every_check_says_what_it_is(check):
    assert all((function.__doc__ or "").strip() for function in check.CHECKS.values())


def test_unknown_check_is_named(check, capsys):
    with pytest.raises(SystemExit):
        check.main(["nonsense"])
    assert "unknown: nonsense" in capsys.readouterr().err


def test_header_that_needs_another_first_is_found(check, monkeypatch, tmp_path):
    (tmp_path / "sok").mkdir()
    (tmp_path / "sok/good.h").write_text("#ifndef G\n#define G\n#include <stdint.h>\nint32_t sok_f(void);\n#endif\n")
    monkeypatch.setattr(check, "INCLUDE", str(tmp_path))
    assert list(check.check_headers(False)) == []
    (tmp_path / "sok/bad.h").write_text("#ifndef B\n#define B\nint32_t sok_g(void);\n#endif\n")
    problems = list(check.check_headers(False))
    assert len(problems) == 2 and all("int32_t" in problem for problem in problems)  # in C and in C++


def test_version_that_the_changelog_does_not_have(check, monkeypatch):
    monkeypatch.setattr(check, "package_version", lambda: "99.0.0")
    assert "the package is 99.0.0" in next(check.check_version(False))


MISTAKE = """// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <utility>
#include <vector>

std::vector<std::string> twice(std::string word) {
  std::vector<std::string> words;
  words.push_back(std::move(word));
  words.push_back(word);
  return words;
}
"""


def test_a_mistake_that_clang_tidy_knows_is_found(check, monkeypatch, tmp_path):
    (tmp_path / ".clang-tidy").write_text((check.ROOT / ".clang-tidy").read_text())
    monkeypatch.setattr(check, "ROOT", tmp_path)
    (missing,) = check.check_tidy(False)
    assert missing == "build/core/compile_commands.json is missing: python tools/build.py core"
    source = tmp_path / "core" / "src" / "twice.cc"
    database = tmp_path / "build" / "core" / "compile_commands.json"
    for file in (source, database):
        file.parent.mkdir(parents=True)
    entry = {"directory": str(tmp_path), "file": str(source), "command": f"c++ -std=c++20 -Werror -c {source}"}
    database.write_text(json.dumps([entry]))
    source.write_text(MISTAKE)
    (problem,) = check.check_tidy(False)
    assert "twice.cc:9" in problem and "bugprone-use-after-move" in problem
    source.write_text(MISTAKE.replace("push_back(word)", "push_back({})"))
    assert list(check.check_tidy(False)) == []


def test_a_warning_that_comes_without_cuda_alone_is_found(check, monkeypatch, tmp_path):
    monkeypatch.setattr(check, "ROOT", tmp_path)
    source, database = tmp_path / "double.cc", tmp_path / "build" / "tensorflow" / "compile_commands.json"
    database.parent.mkdir(parents=True)
    command = f"c++ -DSOK_WITH_CUDA=1 -Wall -Wextra -c {source} -o {tmp_path / 'double.o'}"
    database.write_text(json.dumps([{"directory": str(tmp_path), "file": str(source), "command": command}]))
    text = "int twice(int n) {\n#if defined(SOK_WITH_CUDA)\n  return 2 * n;\n#endif\n  return 0;\n}\n"
    source.write_text(text)
    (problem,) = check.check_without_cuda(False)
    assert "double.cc:1" in problem and "unused parameter" in problem
    source.write_text(text.replace("int n", "[[maybe_unused]] int n"))
    assert list(check.check_without_cuda(False)) == []
