# SPDX-License-Identifier: Apache-2.0
"""README.md: its programs run as written on two processes, its commands exist, its links lead somewhere."""

import pathlib
import re

import launching
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

LAUNCHERS = {"TensorFlow": launching.horovodrun, "PyTorch": launching.torchrun}


def blocks(heading: str) -> list[str]:
    section = re.search(rf"^## {heading}$(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    return re.findall(r"```python\n(.*?)```", section[1], re.DOTALL)


# Some first weights do not come below the loss that the test asks for (9 of 60 in TensorFlow). Each rank has a seed of
# its own, so that ranks have the same model only if one of them sends its own.
SEEDS = {
    "TensorFlow": "import os, keras; keras.utils.set_random_seed(4 + int(os.environ['HOROVOD_RANK']))\n",
    "PyTorch": "import os, torch; torch.manual_seed(4 + int(os.environ['RANK']))\n",
}


def program(heading: str) -> str:
    (block,) = blocks(heading)
    return block


def run(heading: str, text: str, folder: pathlib.Path) -> str:
    (folder / "train.py").write_text(text)
    status, output = LAUNCHERS[heading](2, ["train.py"], cwd=folder)
    assert status == 0, output
    return output


@pytest.mark.parametrize("heading", LAUNCHERS)
def test_program_runs_on_two_processes(heading, tmp_path):
    printed = run(heading, SEEDS[heading] + program(heading), tmp_path)
    losses = dict(re.findall(r"rank (\d) of 2: loss (\d\.\d+)", printed))
    assert set(losses) == {"0", "1"}, printed
    assert losses["0"] == losses["1"], "both ranks have the same batch and the same model"
    assert float(losses["0"]) < 0.5, "it learns"


def test_one_framework_goes_on_from_the_others_checkpoint(tmp_path):
    dump, load = blocks("Checkpoints")
    run("TensorFlow", program("TensorFlow") + dump, tmp_path)
    before, loop, after = program("PyTorch").partition("for _ in range(30):")
    assert loop
    printed = run("PyTorch", before + load + loop + after, tmp_path)
    assert set(re.findall(r"rank (\d) goes on from step (\d+)", printed)) == {("0", "30"), ("1", "30")}, printed


def test_programs_are_about_twenty_lines():
    for heading in LAUNCHERS:
        lines = [line for line in program(heading).splitlines() if line.strip()]
        assert len(lines) <= 26, heading


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    text = README + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"(?:^ *|`)make ([a-z]+)", text, re.MULTILINE))
    assert {"demo", "check", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_links_lead_somewhere():
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")]
    assert len(documents) > 10
    for document in documents:
        for target in re.findall(r"\]\(([^)#\s]+)\)", document.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert document.parent.joinpath(target).exists(), f"{document.name}: {target}"


def test_environment_variables_are_documented():
    documented = set(re.findall(r"`(SOK_[A-Z_]+)`", (ROOT / "docs/ENVVARS.md").read_text()))
    read = set()
    reading = r"(?:environ(?:\.get)?[\[(]|getenv\(|switch\(|_VARIABLE = |switch=)\s*\"(SOK_[A-Z_]+)\""
    for folder in ("core", "tf_frontend", "torch_frontend", "tools", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cc", ".cu", ".h"):
                read |= set(re.findall(reading, path.read_text(encoding="utf-8")))
    assert read == documented
