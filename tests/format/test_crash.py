# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at random instants of a dump over an existing one: the old or the new dump loads, whole."""

import os
import pathlib
import random
import subprocess
import sys
import time

import pytest

KILLS = 110  # for each way of replacing

# Forks a child that dumps version after version, kills it after a random while, and checks what is there.
_SCRIPT = """
import os, random, signal, sys, time
sys.path.insert(0, sys.argv[1])
import checkpoint_cases as cases
import sparse_operation_kit.checkpoint as ck
from sparse_operation_kit.checkpoint import replace

folder, kills, seed, how = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
rng = random.Random(seed)
if how == "two steps":
    replace.exchange = lambda *_: False
path = os.path.join(folder, "d")
held = {version: cases.model(seed=version, rows=64, dimension=8) for version in range(4)}

def write(version):
    held_one = held[version % 4]
    sources = [held_one.source(0, 1)]
    ck.dump(path, sources, optimizer=ck.Optimizer("Adam", version), step=version, chunk_bytes=512, progress=False)

def read():
    with ck.open_dump(path) as dump:
        version = dump.step
        assert dump.optimizer.iterations == version
    cases.check(cases.load(path, [held[version % 4]]), [held[version % 4]])
    return version

write(0)
started = time.monotonic()
for _ in range(3):
    write(0)
typical = (time.monotonic() - started) / 3
version, survived = 0, [0, 0, 0]
for _ in range(kills):
    child = os.fork()
    if child == 0:
        try:
            while True:
                version += 1
                write(version)
        except BaseException:
            import traceback
            traceback.print_exc()
        os._exit(1)
    time.sleep(rng.random() * 3 * typical)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status
    found = read()
    assert found >= version, (found, version)
    survived[0] += found > version
    survived[1] += len(os.listdir(folder)) > 1
    survived[2] += not os.path.exists(path)
    version = found
    if rng.random() < 0.2:
        write(version)
        assert os.listdir(folder) == ["d"], os.listdir(folder)
write(version)
assert os.listdir(folder) == ["d"], os.listdir(folder)
print(*survived)
"""


@pytest.mark.parametrize("how", ["exchange", "two steps"])
def test_kill(tmp_path, how):
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    started = time.monotonic()
    here = str(pathlib.Path(__file__).parent)
    command = [sys.executable, "-c", _SCRIPT, here, str(tmp_path), str(KILLS), str(seed), how]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONWARNINGS": "ignore"}
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr}"
    advanced, leftovers, missing = map(int, done.stdout.split())
    print(
        f"{KILLS} kills in {time.monotonic() - started:.1f} s: {advanced} after a new dump, {leftovers} with leftovers"
    )
    # The kills fell where they hurt: within dumps, not between them.
    assert leftovers > KILLS // 10 and advanced > 0
    assert missing == 0 or how == "two steps"
