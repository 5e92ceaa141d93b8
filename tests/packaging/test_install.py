# SPDX-License-Identifier: Apache-2.0
"""Wheel, sdist and editable installs, each used from a virtual environment of its own.

What is compiled is compiled once (by `make build`, or here from the sdist without frameworks); the environments see the
heavy wheels (NumPy, the frameworks) of the one that runs the tests through a .pth file.
"""

import importlib.metadata
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import launching
import pytest

from sparse_operation_kit import __version__

ROOT = pathlib.Path(__file__).resolve().parents[2]

USE_CORE = """
import numpy as np, pathlib, sparse_operation_kit
from sparse_operation_kit import core
place = pathlib.Path(sparse_operation_kit.__file__).resolve()
assert place.is_relative_to({expected!r}), place
assert core.version() == sparse_operation_kit.__version__
table = core.Table(np.arange(12, dtype=np.float32).reshape(6, 2))
output, = core.gather_combine([table], [core.Lookup(np.array([1, 5]), row_splits=np.array([0, 2]), combiner="sum")])
assert output.tolist() == [[12.0, 14.0]], output
"""
USE_FRONTEND = """
import pathlib, sparse_operation_kit.{name} as sok
assert pathlib.Path(sok.__file__).resolve().is_relative_to({expected!r}), sok.__file__
sok.init()
assert sok.num_ranks() == 1
"""

pytestmark = pytest.mark.slow


def run(*command, cwd, **variables):
    variables = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONPATH": None, **variables}
    # Long enough to compile everything on a busy machine: what `make build` left is only brought up to date.
    status, output = launching.run(command, timeout=1800, cwd=cwd, **variables)
    assert status == 0, f"{command}\n{output}"


class Environment:
    """A virtual environment that sees the packages of this one, but not its installation of the package under test."""

    def __init__(self, folder: pathlib.Path):
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = str(folder / "bin/python")
        self.site = next(folder.glob("lib/python*/site-packages"))
        # A folder that a .pth file names has its own .pth files ignored, editable installs among them.
        (self.site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.folder = folder

    def install(self, *arguments, **variables):
        command = ("-m", "pip", "install", "--no-deps", "--no-build-isolation", "--ignore-installed", "--no-index")
        run(self.python, *command, *map(str, arguments), cwd=self.folder, **variables)

    def use(self, program):
        run(self.python, "-c", program, cwd=self.folder)


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "venv")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this source tree; its libraries are those of `make build`, brought up to date."""
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index",
        "--wheel-dir", str(folder), str(ROOT), cwd=folder,
    )  # fmt: skip
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    program = f"import setuptools.build_meta as backend; backend.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", program, cwd=ROOT)
    return next(folder.glob("*.tar.gz"))


def tracked(*folders):
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


def series(module):
    """Major and minor number of the installed framework, whichever its distribution is called."""
    (distribution,) = set(importlib.metadata.packages_distributions()[module])
    return ".".join(importlib.metadata.version(distribution).split(".")[:2])


def test_wheel_holds_every_module_header_and_library(wheel):
    label = f"tf{series('tensorflow')}.torch{series('torch')}"
    assert wheel.name.split("-")[1:4] == [f"{__version__}+{label}", "py3", "none"], (
        "for every Python 3 of this platform"
    )
    assert wheel.stem.endswith(sysconfig.get_platform().replace("-", "_").replace(".", "_"))
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    folders = {
        "core/python/sparse_operation_kit/": "sparse_operation_kit/",
        "tf_frontend/": "sparse_operation_kit/tensorflow/",
        "torch_frontend/": "sparse_operation_kit/torch/",
        "core/include/": "sparse_operation_kit/include/",
    }
    for source, target in folders.items():
        for name in tracked(source):
            if name.endswith((".py", ".h", "py.typed")) and "/csrc/" not in name:
                assert name.replace(source, target) in held, name
    libraries = {"lib/libsok_core.so", "tensorflow/libsok_tensorflow.so", "torch/libsok_torch.so"}
    assert {name for name in held if name.endswith(".so")} == {f"sparse_operation_kit/{name}" for name in libraries}
    assert not [name for name in held if "/csrc/" in name or name.startswith(("tests", "tools"))]


def test_wheel_works(environment, wheel):
    environment.install(wheel)
    environment.use(USE_CORE.format(expected=str(environment.site)))
    for name in ("tensorflow", "torch"):
        environment.use(USE_FRONTEND.format(name=name, expected=str(environment.site)))


def test_sdist_holds_what_a_build_needs(sdist):
    with tarfile.open(sdist) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    needed = tracked("core", "tf_frontend", "torch_frontend") | {
        "setup.py",
        "pyproject.toml",
        "tools/build.py",
        "LICENSE",
    }
    assert needed <= held, needed - held
    assert not [name for name in held if name.endswith((".so", ".pyc"))]


def test_sdist_and_editable_install_work(environment, sdist, tmp_path):
    shutil.unpack_archive(sdist, tmp_path)
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    without = {"SOK_WITH_TENSORFLOW": "0", "SOK_WITH_TORCH": "0", "SOK_WITH_CUDA": "0"}
    environment.install("--editable", source, **without)
    environment.use(USE_CORE.format(expected=str(source)))
    environment.use("import sparse_operation_kit.doctor as d; assert d.main(['--json']) == 1")  # ops were not built

    other = Environment(tmp_path / "other")
    other.install(source, **without)
    other.use(USE_CORE.format(expected=str(other.site)))
    assert not list(other.site.rglob("libsok_t*.so")), "a framework that was left out"


def test_demanded_framework_that_is_missing_fails(environment, sdist, tmp_path):
    shutil.unpack_archive(sdist, tmp_path)
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    (tmp_path / "none").mkdir()
    (tmp_path / "none/torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    environment.site.joinpath("outer.pth").write_text(f"{tmp_path / 'none'}\n{sysconfig.get_path('purelib')}\n")
    with pytest.raises(AssertionError, match="SOK_WITH_TORCH=1 but PyTorch is not installed"):
        environment.install(source, SOK_WITH_TORCH="1", SOK_WITH_TENSORFLOW="0", SOK_WITH_CUDA="0")
