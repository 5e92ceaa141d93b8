# SPDX-License-Identifier: Apache-2.0
"""docs/CLUSTER.md: its programs on two "hosts" of two ranks each, which are names of this machine, without ssh."""

import pathlib
import re

import launching
import pytest

pytestmark = pytest.mark.slow

DOCUMENT = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "CLUSTER.md").read_text(encoding="utf-8")

# What each rank has come to, and a failure of the first start alone. torchrun may write the output of a second start
# over that of the first.
RECORD = """
    with open(f"steps-{sok.rank()}-{sok.local_rank()}", "a") as file:
        print(step, file=file)
    if step == 15 and sok.rank() == 3 and not os.path.exists("failed"):
        open("failed", "w").close()
        raise OSError("no more data")
"""


def program(heading):
    section = re.search(rf"^## {re.escape(heading)}$(.*?)^## ", DOCUMENT, re.MULTILINE | re.DOTALL)
    (block,) = re.findall(r"```python\n(.*?)```", section[1], re.DOTALL)
    return block


def lines(output, num_ranks=4):
    """[(rank, local rank, device, step, loss)] as the program printed them."""
    printed = rf"rank (\d) of {num_ranks}, (\d) on its host, (\S+): step (\d+), loss (\d\.\d+)"
    found = re.findall(printed, output)
    return sorted((int(r), int(local), device, int(step), float(loss)) for r, local, device, step, loss in found)


def learns(printed):
    """Whether the last loss of every rank is below its first, of three each."""
    return all(last[4] < first[4] for first, last in zip(printed[::3], printed[2::3], strict=True))


def test_horovod_numbers_the_ranks_of_each_host(tmp_path):
    pytest.importorskip("horovod.tensorflow")
    (tmp_path / "train.py").write_text(program("TensorFlow and Horovod"))
    status, output = launching.horovodrun(4, ["train.py"], 120, "localhost:2,127.0.0.1:2", cwd=tmp_path)
    assert status == 0, output
    printed = lines(output)
    assert [(rank, local, step) for rank, local, _, step, _ in printed] == [
        (rank, rank % 2, step) for rank in range(4) for step in (10, 20, 30)
    ], output
    assert learns(printed), output


def test_a_strategy_takes_horovods_place(tmp_path):
    pytest.importorskip("tensorflow")
    (instead,) = re.findall(r"```text\n(strategy = .*?)```", DOCUMENT, re.DOTALL)
    text = program("TensorFlow and Horovod").removeprefix("import horovod.tensorflow as hvd\n")
    text, count = re.subn(r"^hvd\.init\(\)$.*?^sok\.init\(.*?\n", instead, text, flags=re.MULTILINE | re.DOTALL)
    assert count == 1 and "hvd" not in text
    (tmp_path / "train.py").write_text(text)
    status, output = launching.strategy_run(2, ["train.py"], 120, cwd=tmp_path)
    assert status == 0, output
    printed = lines(output, 2)
    assert [(rank, local, step) for rank, local, _, step, _ in printed] == [
        (rank, rank, step) for rank in range(2) for step in (10, 20, 30)
    ], output
    assert learns(printed), output


def test_torchrun_restarts_both_hosts_from_the_checkpoint(tmp_path):
    pytest.importorskip("torch")
    before, loop, after = program("PyTorch").partition("for step in range(start + 1, 31):\n")
    assert loop
    (tmp_path / "train.py").write_text(before + loop + RECORD.lstrip("\n") + after)
    hosts = launching.torchrun_on_hosts(
        *(2, 2, ["train.py"], 240, ["--max-restarts=3"]), cwd=tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"
    )
    for status, output in hosts:
        assert status == 0, output
        # The ranks of a host are neighbours, with local ranks 0 and 1.
        last = [(rank % 2, local) for rank, local, _, step, _ in lines(output) if step == 30]
        assert last == [(0, 0), (1, 1)], output
    both = "".join(output for _, output in hosts)
    assert [rank for rank, _, _, step, _ in lines(both) if step == 30] == [0, 1, 2, 3], both
    for rank in range(4):
        steps = [int(step) for step in (tmp_path / f"steps-{rank}-{rank % 2}").read_text().split()]
        assert steps[0] == 1 and steps.count(1) == 1, "the second start does not begin anew"
        assert steps[-20:] == [*range(11, 31)], "but after the checkpoint of step 10"
