# SPDX-License-Identifier: Apache-2.0
"""tools/sanitize.py: what it leaves out are tests that there are."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_what_is_left_out_is_there(sanitize):
    assert sanitize.LEFT_OUT.keys() == sanitize.SANITIZERS.keys()
    for tests in sanitize.LEFT_OUT.values():
        for test in tests:
            path, name = test.split("::")
            assert f"def {name}(" in (ROOT / path).read_text(), test
