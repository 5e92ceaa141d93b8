# SPDX-License-Identifier: Apache-2.0
"""The documents name what there is: files of the repository, and names of the package."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")]
FOLDERS = ("core", "tf_frontend", "torch_frontend", "tests", "tools", "benchmarks", "examples", "docs")
WRITTEN = {"train.py", "sok_manifest.json", "demo/data/dataset.json"}  # by the reader, or by the programs


@pytest.fixture(scope="module")
def files():
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")] + [*ROOT.glob("*.*")]
    return {path.relative_to(ROOT).as_posix() for path in found}


def exported(package):
    names = set()
    for file in (ROOT / package).rglob("__init__.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
                names.update(ast.literal_eval(node.value))
    return names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_are_there(document, files):
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./-]+\.(?:py|cc|cu|h|cuh|json|md))`", text)) - WRITTEN
    missing = {name for name in named if not any(file == name or file.endswith(f"/{name}") for file in files)}
    assert not missing


# MIGRATING.md also has names of other packages, and its programs are run (test_programs.py).
@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if path.name != "MIGRATING.md"],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_names_of_sok_are_there(document):
    names = exported("tf_frontend") | exported("torch_frontend")
    used = set(re.findall(r"\bsok\.([A-Za-z_]\w*)", document.read_text(encoding="utf-8")))
    assert used <= names
