# SPDX-License-Identifier: Apache-2.0
"""Makes the suite's shared module importable as `checkpoint_cases` (see tests/conftest.py for why not by sys.path)."""

import importlib.util
import pathlib
import sys

if "checkpoint_cases" not in sys.modules:
    _path = pathlib.Path(__file__).parent / "checkpoint_cases.py"
    _spec = importlib.util.spec_from_file_location("checkpoint_cases", _path)
    sys.modules["checkpoint_cases"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["checkpoint_cases"])
