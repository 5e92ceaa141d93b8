# SPDX-License-Identifier: Apache-2.0
"""Builds the native libraries with tools/build.py and puts them into the package, for wheels and editable installs.

Ops are bound to a series of their framework, so the version of a package that holds some says which
(0.1.0+tf2.21.torch2.13), and its extras take just these. Everything that is not code is in pyproject.toml.
"""

import runpy
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # an isolated build does not have the project's folder on its path

from tools import build as native  # noqa: E402

PACKAGE = "sparse_operation_kit"
VERSION = runpy.run_path(str(ROOT / "core/python/sparse_operation_kit/_version.py"))["__version__"]
FOLDERS = {
    PACKAGE: "core/python/sparse_operation_kit",
    f"{PACKAGE}.tensorflow": "tf_frontend",
    f"{PACKAGE}.torch": "torch_frontend",
}


COMPILING = {"bdist_wheel", "dist_info", "editable_wheel", "develop", "install"}
"""Commands whose result is bound to the frameworks that are installed; an sdist is for any."""


def fail(error: native.BuildError) -> NoReturn:
    sys.exit(f"\n{PACKAGE}: {error}\n")


def bound() -> dict[str, object]:
    """The version with its label, and extras."""
    frameworks = native.FRAMEWORKS
    extras = {name: [f"{each.module}>={each.oldest}"] for name, each in frameworks.items()}
    extras["store"] = ["lmdb>=1.4"]  # sok.DiskStore
    if not COMPILING & set(sys.argv):
        return {"version": VERSION, "extras_require": extras}
    try:
        planned = native.plan()
    except native.BuildError as error:
        fail(error)
    label = ".".join(f"{frameworks[name].short}{found.series}" for name, found in planned.items() if found)
    for name, found in planned.items():
        module = frameworks[name].module
        # An extra whose ops are not there must not look as if it were: no index has this version, which pip names.
        extras[name] = [f"{module}=={found.series}.*" if found else f"{module}==0+install.{module}.first.then.build"]
    return {"version": f"{VERSION}+{label}" if label else VERSION, "extras_require": extras}


def packages() -> list[str]:
    """The root package, the frontends, and every package below them."""
    below = [f"{name}.{sub}" for name, folder in FOLDERS.items() for sub in find_packages(str(ROOT / folder))]
    return [*FOLDERS, *below]


class NativeDistribution(Distribution):
    """Has compiled parts, though none is a Python extension module."""

    def has_ext_modules(self) -> bool:
        return True


class CleanBuild(build):
    """Starts with an empty folder, so that a wheel holds nothing of an earlier build."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class NativeBuild(build_ext):
    """Builds the libraries beside the sources, where an editable install finds them; a wheel gets copies."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.extensions = []

    def run(self) -> None:
        try:
            libraries = native.build()
        except native.BuildError as error:
            fail(error)
        if self.inplace or self.editable_mode:
            return
        package = Path(self.build_lib) / PACKAGE
        for name, library in libraries.items():
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, package / name)
        shutil.copytree(ROOT / "core/include/sok", package / "include/sok")

    def get_outputs(self) -> list[str]:
        return []

    def get_source_files(self) -> list[str]:
        return []


class PlatformWheel(bdist_wheel):
    """One wheel for every Python 3: the libraries do not link Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    **bound(),
    packages=packages(),
    package_dir=FOLDERS,
    package_data={PACKAGE: ["py.typed"]},
    include_package_data=False,
    distclass=NativeDistribution,
    cmdclass={"build": CleanBuild, "build_ext": NativeBuild, "bdist_wheel": PlatformWheel},
)
