# SPDX-License-Identifier: Apache-2.0
"""python -m sparse_operation_kit.doctor: what it finds, what it says of what is missing."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from sparse_operation_kit import core, doctor


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sparse_operation_kit.doctor", *arguments]
    env = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)


def test_json():
    done = run("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    findings = {finding["subject"]: finding for finding in report["findings"]}
    assert list(findings) == ["core", "CPU", "GPU", "NCCL", "TensorFlow", "Horovod", "PyTorch"]
    assert findings["core"]["ok"] and core.version() in findings["core"]["text"]
    assert core.device_properties().name in findings["CPU"]["text"]
    assert not any(finding["ok"] is False for finding in findings.values())


def test_text_has_one_line_a_finding():
    done = run()
    assert done.returncode == 0
    for finding in doctor.examine():
        assert finding.text in done.stdout


def test_run_loads_the_frontends():
    findings = {finding.subject: finding for finding in doctor.examine(run=True)}
    for title in ("TensorFlow", "PyTorch"):
        assert findings[title].ok and findings[title].text.endswith("built and loaded")
    assert findings["Horovod"].ok


def test_frameworks_are_not_imported():
    program = (
        "import sys\nfrom sparse_operation_kit import doctor\ndoctor.main([])\n"
        "assert not {'tensorflow', 'torch', 'horovod'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_missing_core(tmp_path):
    done = run(SOK_CORE_LIBRARY=str(tmp_path / "libsok_core.so"))
    assert done.returncode == 1
    assert "FAIL core" in done.stdout and "mend: " in done.stdout and "tools/build.py core" in done.stdout
    assert "CPU" not in done.stdout, "nothing is asked of a core that is not there"


def test_ops_that_were_not_built(monkeypatch, tmp_path):
    package = tmp_path / "frontend"
    package.mkdir()
    (package / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location("frontend", package / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    finding = doctor.check_frontend("torch", "PyTorch", "2.13.0", run=False)
    assert finding.ok is False and "its ops were not built" in finding.text and "torch" in finding.remedy


def test_frontend_that_does_not_load(monkeypatch):
    monkeypatch.setattr(doctor, "_import_error", lambda program: "ImportError: undefined symbol")
    finding = doctor.check_frontend("torch", "PyTorch", "2.13.0", run=True)
    assert finding.ok is False and "undefined symbol" in finding.text


def test_what_is_not_installed_is_no_failure(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda *names: None)
    assert doctor.check_frontend("torch", "PyTorch", None, run=False).ok is None
    finding = doctor.check_horovod("2.21.0", run=False)
    assert finding.ok is None and "install_horovod" in finding.remedy


def horovod_built_with(tmp_path, *libraries):
    """A file with the classes that Horovod's ops have in a build with these libraries."""
    binary = tmp_path / "mpi_lib.so"
    binary.write_bytes(b"\x7fELF" + b"\0".join(doctor._HOROVOD_LIBRARIES[name] for name in libraries) + b"\0")
    return binary


def test_what_horovod_was_built_with():
    binary = doctor._horovod_binary()
    assert binary is not None
    asked = "hvd.nccl_built(), hvd.gloo_built(), hvd.mpi_built()"
    program = f"import horovod.tensorflow as hvd; print(*map(int, ({asked})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    built = [name for name, flag in zip(("NCCL", "Gloo", "MPI"), done.stdout.split()[-3:], strict=True) if flag != "0"]
    assert doctor.horovod_libraries(binary) == built
    assert ", ".join(built) in doctor.check_horovod("2.21.0", run=False).text


@pytest.mark.parametrize(
    ("libraries", "has_gpus", "ok", "text", "remedy"),
    [
        (("Gloo",), False, True, "0.28.1, built with Gloo", ""),
        (("NCCL", "Gloo"), True, True, "0.28.1, built with NCCL, Gloo", ""),
        (("Gloo", "MPI"), True, None, "travel through host memory, which is slow", "tools/install_horovod.py --cuda"),
        (("NCCL",), True, False, "cannot find each other", "tools/install_horovod.py"),
        ((), False, False, "built with none of NCCL, Gloo, MPI", "tools/install_horovod.py"),
    ],
)
def test_horovod_builds(monkeypatch, tmp_path, libraries, has_gpus, ok, text, remedy):
    binary = horovod_built_with(tmp_path, *libraries)
    monkeypatch.setattr(doctor, "_version", lambda *names: "0.28.1")
    monkeypatch.setattr(doctor, "_horovod_binary", lambda: binary)
    monkeypatch.setattr(doctor, "_driver_has_gpus", lambda: has_gpus)
    finding = doctor.check_horovod("2.21.0", run=False)
    assert finding.ok is ok and text in finding.text
    assert (remedy in finding.remedy) if remedy else not finding.remedy


def test_horovod_without_ops_for_tensorflow(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda *names: "0.28.1")
    monkeypatch.setattr(doctor, "_horovod_binary", lambda: None)
    assert doctor.check_horovod(None, run=False).ok is None
    finding = doctor.check_horovod("2.21.0", run=False)
    assert finding.ok is False and "install_horovod" in finding.remedy


def test_gpus_without_cuda_in_the_build(monkeypatch):
    monkeypatch.setattr(core, "built_with_cuda", lambda: False)
    monkeypatch.setattr(doctor, "_driver_has_gpus", lambda: True)
    finding = doctor.check_gpus()
    assert finding.ok is None and "SOK_WITH_CUDA=1" in finding.remedy


def test_gpus_that_are_hidden(monkeypatch):
    monkeypatch.setattr(core, "built_with_cuda", lambda: True)
    monkeypatch.setattr(core, "cuda_device_count", lambda: 0)
    monkeypatch.setattr(doctor, "_driver_has_gpus", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = doctor.check_gpus()
    assert finding.ok is None and finding.remedy == "unset CUDA_VISIBLE_DEVICES"


def test_nccl(monkeypatch):
    monkeypatch.setattr(core, "nccl_properties", lambda: core.NcclProperties(22803, "/opt/libnccl.so.2"))
    finding = doctor.check_nccl()
    assert finding.ok and finding.text == "2.28.3 (/opt/libnccl.so.2)"


def test_nccl_that_is_missing(monkeypatch):
    def fail(error):
        raise error

    monkeypatch.setattr(core, "nccl_properties", lambda: fail(OSError("NCCL was not found")))
    monkeypatch.setattr(core, "build_info", lambda: "sok, GCC, avx2, CUDA 12.8, sm 90")
    monkeypatch.setattr(doctor, "_driver_has_gpus", lambda: True)
    finding = doctor.check_nccl()
    assert finding.ok is None and "NCCL was not found" in finding.text
    assert finding.remedy.endswith("-m pip install nvidia-nccl-cu12")
    monkeypatch.setattr(core, "nccl_properties", lambda: fail(NotImplementedError("no CUDA")))
    assert doctor.check_nccl().text == "not used: the core was built without CUDA"


@pytest.mark.gpu
def test_gpus():
    finding = doctor.check_gpus()
    assert finding.ok and f"sm {core.device_properties(0).compute_capability}" in finding.text
