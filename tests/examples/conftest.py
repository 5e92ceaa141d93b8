# SPDX-License-Identifier: Apache-2.0
"""Makes `examples` importable, whatever directory pytest was started in."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def generated(tmp_path_factory):
    """(directory, summary) of a small generated data set: 5000 training and 1000 held-out rows in groups of 128."""
    from examples.dlrm.generate import Recipe
    from examples.dlrm.writing import generate

    directory = tmp_path_factory.mktemp("generated")
    recipe = Recipe(rows=5000, valid_rows=1000, max_cardinality=300, seed=3, files=3, rows_per_group=128)
    return directory, generate(directory, recipe)


@pytest.fixture
def criteo_lines():
    """Makes rows as Criteo writes them: (label, 13 counts, 26 ids), fields as text, some empty."""

    def make(rows):
        lines = []
        for row in range(rows):
            dense = ["" if (row + i) % 5 == 0 else str((row * 7 + i * 31) % 400 - 2) for i in range(13)]
            ids = ["" if (row + i) % 7 == 0 else f"{(row * 2654435761 + i * 40503) % 2**32:08x}" for i in range(26)]
            lines.append([str(row % 3 % 2), *dense, *ids])
        return lines

    return make
