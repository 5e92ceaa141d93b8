# SPDX-License-Identifier: Apache-2.0
"""The build backend of pyproject.toml (PEP 517): setuptools', which also says what this build needs on this host.

An isolated build has a Python environment of its own. Frameworks that the target environment has are found in it
(build.py, `probe`); those that SOK_WITH_TENSORFLOW=1 or SOK_WITH_TORCH=1 demand, and it has not, are installed for the
build, and so are CMake and Ninja.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an isolated build has not the project's folder there

from tools import build as native

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *native.requirements()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *native.requirements()]
