# SPDX-License-Identifier: Apache-2.0
"""What test files of this folder share: `tensorflow_checks`."""

import importlib.util
import pathlib
import sys

_spec = importlib.util.spec_from_file_location(
    "tensorflow_checks", pathlib.Path(__file__).with_name("tensorflow_checks.py")
)
sys.modules["tensorflow_checks"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["tensorflow_checks"])
