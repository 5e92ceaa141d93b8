# SPDX-License-Identifier: Apache-2.0
"""tools/build.py: switches, tools that are missing, architectures."""

import shutil
import subprocess
import sys

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    names = "SOK_WITH_CUDA SOK_WITH_TORCH SOK_WITH_TENSORFLOW SOK_CUDA_ARCHS MAX_JOBS CXX CUDACXX CUDA_HOME CUDA_PATH"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("text, expected", [("1", True), ("ON", True), ("0", False), ("off", False), ("", None)])
def test_switch(build, monkeypatch, text, expected):
    monkeypatch.setenv("SOK_WITH_CUDA", text)
    assert build.switch("SOK_WITH_CUDA") is expected


def test_switch_refuses_other_words(build, monkeypatch):
    monkeypatch.setenv("SOK_WITH_CUDA", "maybe")
    with pytest.raises(build.BuildError, match=r"SOK_WITH_CUDA='maybe': use 1"):
        build.switch("SOK_WITH_CUDA")


def test_unset_without_nvcc_leaves_cuda_out(build, monkeypatch):
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    assert build.cuda_variables() == {"SOK_WITH_CUDA": "OFF"}


def test_demanded_cuda_without_nvcc_fails(build, monkeypatch):
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setenv("SOK_WITH_CUDA", "1")
    with pytest.raises(build.BuildError, match="Install the CUDA toolkit"):
        build.cuda_variables()


def test_refused_cuda_is_off_where_nvcc_is(build, monkeypatch):
    monkeypatch.setattr(build, "find_nvcc", lambda: "/usr/local/cuda/bin/nvcc")
    monkeypatch.setenv("SOK_WITH_CUDA", "0")
    assert build.cuda_variables() == {"SOK_WITH_CUDA": "OFF"}


@pytest.mark.parametrize(
    "text, expected",
    [("90", "90"), ("80;90", "80;90"), ("8.0, 9.0", "80;90"), ("80-real 90a", "80-real;90a")],
)
def test_archs(build, monkeypatch, text, expected):
    monkeypatch.setenv("SOK_CUDA_ARCHS", text)
    assert build.cuda_archs("nvcc") == expected


@pytest.mark.parametrize("text", ["sm_90", "hopper", "9"])
def test_bad_archs(build, monkeypatch, text):
    monkeypatch.setenv("SOK_CUDA_ARCHS", text)
    with pytest.raises(build.BuildError, match="compute capabilities such as"):
        build.cuda_archs("nvcc")


def answers(monkeypatch, **outputs):
    """subprocess.run answers with these outputs, by the program's name."""

    def run(command, **_):
        text = outputs.get(command[0].rsplit("/", 1)[-1].replace("-", "_"))
        return subprocess.CompletedProcess(command, 1 if text is None else 0, text or "", "")

    monkeypatch.setattr(subprocess, "run", run)


def test_archs_of_this_host(build, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    answers(monkeypatch, nvidia_smi="9.0\n9.0\n10.0\n")
    assert build.cuda_archs("nvcc") == "90;100"


def test_archs_that_nvcc_knows(build, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    answers(monkeypatch, nvcc="compute_75\ncompute_80\ncompute_90\n")
    assert build.cuda_archs("nvcc") == "80-real;90"


def test_jobs(build, monkeypatch):
    assert build.jobs() >= 1
    monkeypatch.setenv("MAX_JOBS", "3")
    assert build.jobs() == 3
    monkeypatch.setenv("MAX_JOBS", "0")
    with pytest.raises(build.BuildError, match="MAX_JOBS"):
        build.jobs()


def test_missing_framework(build, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(build, "probe", lambda framework: None)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    assert build.installed(build.FRAMEWORKS["torch"], tmp_path) is None
    assert "PyTorch is not installed: its ops are left out" in capsys.readouterr().out
    monkeypatch.setenv("SOK_WITH_TORCH", "1")
    with pytest.raises(build.BuildError, match="--no-build-isolation"):
        build.installed(build.FRAMEWORKS["torch"], tmp_path)


def test_plan(build, monkeypatch, tmp_path):
    """Without a framework there is nothing to bind to: that has to be meant."""
    found = {}
    monkeypatch.setattr(build, "cached_probe", lambda framework, folder: found.get(framework.module))
    assert build.plan(("core",), tmp_path) == {}
    with pytest.raises(build.BuildError, match=r"(?s)pip install torch.*SOK_WITH_TENSORFLOW=0 SOK_WITH_TORCH=0 pip"):
        build.plan(build_dir=tmp_path)
    monkeypatch.setenv("SOK_WITH_TENSORFLOW", "0")
    with pytest.raises(build.BuildError, match=r"alone, without a framework: SOK_WITH_TORCH=0 pip install"):
        build.plan(build_dir=tmp_path)
    monkeypatch.setenv("SOK_WITH_TORCH", "0")
    assert build.plan(build_dir=tmp_path) == {"tensorflow": None, "torch": None}
    monkeypatch.delenv("SOK_WITH_TORCH")
    found["torch"] = {"version": "2.13.0+cpu", "variables": {"A": 1}}
    planned = build.plan(build_dir=tmp_path)
    assert planned["tensorflow"] is None
    assert (planned["torch"].series, planned["torch"].variables) == ("2.13", {"A": "1"})


def test_requirements_of_an_isolated_build(build, monkeypatch):
    monkeypatch.setattr(build, "find_tool", lambda name: None)
    monkeypatch.setattr(build, "probe", lambda framework: None)
    assert build.requirements() == ["cmake>=3.25", "ninja"]
    monkeypatch.setenv("SOK_WITH_TORCH", "1")
    assert build.requirements()[2:] == ["torch>=2.9"]
    monkeypatch.setattr(build, "find_tool", lambda name: f"/usr/bin/{name}")
    answers(monkeypatch, cmake="cmake version 3.25.1\n")
    monkeypatch.setattr(build, "probe", lambda framework: {"version": "2.13.0"})
    assert build.requirements() == []


def test_refused_framework_is_not_imported(build, monkeypatch, tmp_path):
    monkeypatch.setenv("SOK_WITH_TENSORFLOW", "0")
    monkeypatch.setattr(build, "probe", lambda framework: pytest.fail("imported"))
    assert build.installed(build.FRAMEWORKS["tensorflow"], tmp_path) is None


def test_old_framework(build, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(build, "probe", lambda framework: {"version": "2.8.1", "variables": {}})
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    assert build.installed(build.FRAMEWORKS["torch"], tmp_path) is None
    assert "PyTorch 2.8.1 is too old; 2.9 is the least" in capsys.readouterr().out
    monkeypatch.setenv("SOK_WITH_TORCH", "1")
    with pytest.raises(build.BuildError, match="too old"):
        build.installed(build.FRAMEWORKS["torch"], tmp_path)


def test_broken_framework_is_not_taken_for_a_missing_one(build, tmp_path):
    broken = build.dataclasses.replace(build.FRAMEWORKS["torch"], probe="raise OSError('libfoo.so: no such file')")
    with pytest.raises(build.BuildError, match=r"set SOK_WITH_TORCH=0:\n(.*\n)*OSError: libfoo"):
        build.probe(broken)


def test_probe_sees_the_environment_that_an_isolated_build_hides(build, monkeypatch, tmp_path):
    # An isolated build puts its own packages in front through PYTHONPATH; here one that hides `outer_framework`.
    outer = build.dataclasses.replace(
        build.FRAMEWORKS["torch"],
        module="outer_framework",
        probe="import os\nif 'PYTHONPATH' in os.environ: import outer_framework\nprint('{\"version\": \"9.9\"}')",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert build.probe(outer) == {"version": "9.9"}


def test_compiler_that_is_missing(build, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.BuildError, match=r"apt-get install g\+\+"):
        build.check_compiler()


def test_cmake_that_is_missing(build, monkeypatch):
    monkeypatch.setattr(build, "find_tool", lambda name: None)
    with pytest.raises(build.BuildError, match="pip install cmake"):
        build.cmake()


def test_cmake_that_is_too_old(build, monkeypatch):
    monkeypatch.setattr(build, "find_tool", lambda name: "/usr/bin/cmake")
    answers(monkeypatch, cmake="cmake version 3.18.4\n")
    with pytest.raises(build.BuildError, match=r"3\.25 or newer is needed"):
        build.cmake()


def test_failing_command_says_what_to_try(build):
    with pytest.raises(build.BuildError, match=r"status 7; its messages are above\.\nTry this"):
        build.run([sys.executable, "-c", "raise SystemExit(7)"], "Try this.")
