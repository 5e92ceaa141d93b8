# SPDX-License-Identifier: Apache-2.0
"""tools/install_horovod.py: the edits are exact, and what is missing is named."""

import importlib.metadata
import shutil
import sys

import pytest


@pytest.fixture
def source(install_horovod, tmp_path):
    """A source tree with the places that are edited."""
    cmake = tmp_path / install_horovod.CMAKE_FILE
    cmake.parent.mkdir(parents=True)
    cmake.write_text(f"# before\n{install_horovod.CMAKE_LINE}# after\n")
    calls = "stream_executor::gpu::AsGpuStreamValue(context->stream());\n" * install_horovod.STREAM_CALLS
    (tmp_path / install_horovod.OPS_FILE).write_text(f"{install_horovod.STREAM_DECLARATION}{calls}")
    return tmp_path


def test_edits(install_horovod, source):
    install_horovod.edit_source(source)
    assert (source / install_horovod.CMAKE_FILE).read_text() == "# before\n# after\n"
    ops = (source / install_horovod.OPS_FILE).read_text()
    assert "AsGpuStreamValue" not in ops
    assert ops.count("HorovodGpuStream(context->stream())") == install_horovod.STREAM_CALLS
    assert "platform_specific_handle().stream" in ops


@pytest.mark.parametrize("which", ["CMAKE_FILE", "OPS_FILE"])
def test_other_source_is_refused_and_left_alone(install_horovod, source, which):
    changed = source / getattr(install_horovod, which)
    changed.write_text(changed.read_text().replace("xla_mpi_ops", "other").replace("AsGpuStreamValue(c", "Other(c", 1))
    before = {path: path.read_text() for path in source.rglob("*") if path.is_file()}
    with pytest.raises(install_horovod.InstallError, match=r"is not the source of Horovod 0\.28\.1"):
        install_horovod.edit_source(source)
    assert before == {path: path.read_text() for path in source.rglob("*") if path.is_file()}


def test_second_edit_is_refused(install_horovod, source):
    install_horovod.edit_source(source)
    with pytest.raises(install_horovod.InstallError, match="expected 1 time"):
        install_horovod.edit_source(source)


def test_missing_file(install_horovod, tmp_path):
    with pytest.raises(install_horovod.InstallError, match=r"CMakeLists\.txt is missing"):
        install_horovod.edit_source(tmp_path)


def test_missing_tool_names_its_package(install_horovod, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name in ("cmake", "g++") else f"/usr/bin/{name}")
    with pytest.raises(install_horovod.InstallError, match=r"apt-get install cmake g\+\+"):
        install_horovod.check_tools(cuda=False)


def test_cuda_needs_nvcc(install_horovod, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "nvcc" else f"/usr/bin/{name}")
    with pytest.raises(install_horovod.InstallError, match="CUDA toolkit"):
        install_horovod.check_tools(cuda=True)


def test_no_tensorflow(install_horovod, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(install_horovod.InstallError, match="pip install 'tensorflow-cpu"):
        install_horovod.installed_tensorflow()


def test_nccl_that_is_not_there(install_horovod, tmp_path):
    with pytest.raises(install_horovod.InstallError, match="--nccl-home"):
        install_horovod.find_nccl(str(tmp_path))


def test_nccl_from_a_wheel_gets_the_linkers_name(install_horovod, tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "include/nccl.h").touch()
    (tmp_path / "lib/libnccl.so.2").write_text("library")
    include, library = install_horovod.find_nccl(str(tmp_path))
    assert include == tmp_path / "include"
    with install_horovod.linkable_nccl(library) as folder:
        assert (folder / "libnccl.so").read_text() == "library"
    assert not (tmp_path / "lib/libnccl.so").exists()


def test_wheel_of_another_tensorflow_is_not_reused(install_horovod, tmp_path):
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = tmp_path / f"horovod-0.28.1+tf2.21.0-{python}-{python}-linux_x86_64.whl"
    wheel.touch()
    assert install_horovod.find_wheel(tmp_path, "tf2.21.0") == wheel
    assert install_horovod.find_wheel(tmp_path, "tf2.20.0") is None
    assert install_horovod.find_wheel(tmp_path, "tf2.21.0.cuda") is None


def test_error_ends_with_status_1(install_horovod, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(install_horovod, "installed_tensorflow", lambda: "2.21.0")
    monkeypatch.setattr(install_horovod, "check_tools", lambda cuda: None)
    arguments = ["--sdist", str(tmp_path / "none.tar.gz"), "--wheel-dir", str(tmp_path), "--no-install"]
    assert install_horovod.main(arguments) == 1
    assert "no such file" in capsys.readouterr().err


def test_other_archive_is_refused(install_horovod, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(install_horovod, "installed_tensorflow", lambda: "2.21.0")
    monkeypatch.setattr(install_horovod, "check_tools", lambda cuda: None)
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    archive.write_bytes(b"something else")
    assert install_horovod.main(["--sdist", str(archive), "--wheel-dir", str(tmp_path), "--no-install"]) == 1
    assert "its SHA-256 differs" in capsys.readouterr().err
