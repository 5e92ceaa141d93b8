# SPDX-License-Identifier: Apache-2.0
"""Thousands of damaged dumps: each is refused with an error that names a file, or does no harm.

In bounded memory and time: it runs in a process of its own whose memory the kernel limits, so that an allocation of a
lying size fails there and not on the machine.
"""

import os
import pathlib
import subprocess
import sys

import pytest

SEED = int(os.environ.get("SOK_FUZZ_SEED", "20240607"))
COUNT = int(os.environ.get("SOK_FUZZ_COUNT", "2400"))

_SCRIPT = r"""
import json, os, random, resource, shutil, sys, time
sys.path.insert(0, sys.argv[1])
import checkpoint_cases as cases
import numpy as np
import xxhash
import sparse_operation_kit.checkpoint as ck

folder, seed, count, legacy = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "legacy"
rng = random.Random(seed)
held = [cases.model("a:0", 37, 4), cases.model("b/c:0", 11, 8, mode="localized:0"),
        cases.model("d", 13, 3, kind="dynamic")]
clean, work = os.path.join(folder, "clean"), os.path.join(folder, "d")
if legacy:
    for entry in held:
        cases.write_legacy(clean, entry, 2, stem=entry.table.stem)
else:
    cases.results(cases.dump(clean, held, 2, chunk_bytes=128))
content = {name: open(os.path.join(clean, name), "rb").read() for name in os.listdir(clean)}
data_names = sorted(name for name in content if name != "sok_manifest.json")
def peak_bytes():  # not getrusage: its peak is inherited from the process that started this one
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
held_bytes = peak_bytes()
with open("/proc/self/statm") as statm:
    virtual = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (virtual + (768 << 20), virtual + (768 << 20)))

def sign(document):
    rest = json.dumps({"m": "", **document}, ensure_ascii=True).encode()[len('{"m": "'):]
    return b'{"manifest_xxh3_128": "' + xxhash.xxh3_128_hexdigest(rest).encode() + rest

def put(name, data):
    with open(os.path.join(work, name), "wb") as file:
        file.write(data)

def flip():
    name = rng.choice(list(content))
    data = bytearray(content[name])
    for _ in range(rng.choice([1, 1, 1, 2, 30])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    put(name, bytes(data))

def truncate():
    name = rng.choice(list(content))
    put(name, content[name][: rng.randrange(len(content[name]))])

def extend():
    name = rng.choice(list(content))
    put(name, content[name] + rng.randbytes(rng.choice([1, 8, 16, 100])))

def sparse():
    # A size that lies: terabytes that take no space.
    name = rng.choice(list(content))
    os.truncate(os.path.join(work, name), rng.choice([1 << 30, 1 << 36, (1 << 42) + rng.randrange(64)]))

def overwrite():
    name = rng.choice(list(content))
    data = bytearray(content[name])
    start = rng.randrange(len(data))
    piece = rng.randbytes(rng.choice([1, 4, 8, 64]))
    data[start : start + len(piece)] = piece
    put(name, bytes(data))

def header():
    name = rng.choice(data_names)
    data = bytearray(content[name])
    data[256 + rng.randrange(40)] = rng.randrange(256)
    put(name, bytes(data))

def swap():
    one, two = rng.sample(list(content), 2)
    put(one, content[two])
    put(two, content[one])

def copy():
    one, two = rng.sample(list(content), 2)
    put(one, content[two])

def missing():
    for name in rng.sample(list(content), rng.choice([1, 1, 2, 5])):
        os.unlink(os.path.join(work, name))

def link():
    name = rng.choice(list(content))
    os.unlink(os.path.join(work, name))
    target = rng.choice(["/dev/zero", "/etc/passwd", os.path.join(clean, name), "nowhere", "."])
    os.symlink(target, os.path.join(work, name))

def special():
    name = rng.choice(list(content))
    os.unlink(os.path.join(work, name))
    rng.choice([os.mkfifo, os.mkdir])(os.path.join(work, name))

def shuffle_rows():
    name = rng.choice(data_names)
    payload = bytearray(content[name][296:])
    rows = [bytes(payload[i : i + 8]) for i in range(0, len(payload), 8)]
    rng.shuffle(rows)
    put(name, content[name][:296] + b"".join(rows))

NUMBERS = [0, -1, 1, 2, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64, 10**400, 1e308, 0.5, True]
TEXTS = ["", "..", "../../etc/passwd", "/etc/passwd", "a/b", "a\0b", "\ud800", "x" * 300, "ö" * 200,
         "localized:99999999999", "localized:7", "dynamic", "float16", "object", "__class__", "Adam", "%s%n", "\x1b[2J"]

def nonsense(depth):
    kind = rng.randrange(6 if depth else 4)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(TEXTS)
    if kind in (2, 3):
        return rng.choice([None, True, False, [], {}])
    if kind == 4:
        return [nonsense(depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS[:6]): nonsense(depth - 1) for _ in range(rng.randrange(4))}

def manifest():
    # A manifest with a right checksum and a member that lies, is missing, is doubled, or is nonsense.
    document = json.loads(content["sok_manifest.json"])
    del document["manifest_xxh3_128"]
    for _ in range(rng.choice([1, 1, 2, 4])):
        place, inside = None, document
        while isinstance(inside, (dict, list)) and inside and (place is None or rng.random() < 0.85):
            place, step = inside, rng.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
            inside = inside[step]
        if place is None:
            continue
        what = rng.randrange(5)
        if what == 0:
            del place[step]
        elif what == 1:
            place[step] = nonsense(3)
        elif what == 2 and isinstance(inside, int):
            place[step] = inside + rng.choice([-1, 1, 2**20, -inside, inside])
        elif what == 3 and isinstance(place, list):
            place.insert(step, inside)
        else:
            place[step] = rng.choice(TEXTS) if isinstance(inside, str) else rng.choice(NUMBERS)
    put("sok_manifest.json", sign(document))

def bomb():
    # Nested nonsense and long nonsense.
    rest = rng.choice([
        b'", "a": ' + b"[" * 200_000,
        b'", "a": [' + b"[]," * 3_000_000 + b"0]}",
        b'", "a": ' + b'{"a":' * 50_000,
        b'", "extra": "' + b"x" * 5_000_000 + b'"}',
        b'", "a": ' + b"9" * 2_000_000 + b"}",
        rng.randbytes(10_000),
    ])
    put("sok_manifest.json", b'{"manifest_xxh3_128": "' + xxhash.xxh3_128_hexdigest(rest).encode() + rest)

kinds = [flip, flip, truncate, extend, sparse, overwrite, header, swap, copy, missing, link, special, shuffle_rows]
if not legacy:
    kinds += [manifest] * 6
verdicts, slowest = {}, 0.0
for number in range(count):
    state = rng.getstate()
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(clean, work)
    kind = bomb if not legacy and number % 100 == 0 else rng.choice(kinds)
    kind()
    before = set(os.listdir(folder))
    started = time.monotonic()
    loaded = [cases.Loaded(entry, -1 if entry.owner < 0 else 0) for entry in held]
    try:
        with open(os.devnull, "w"):
            ck.load(work, [entry.target() for entry in loaded], optimizer="Adam")
    except ck.CheckpointError as error:
        assert error.file and os.path.dirname(error.file).startswith(folder) or error.file == work, (number, error)
        assert str(error).startswith(error.file), (number, error)
        assert not any(entry.parts for entry in loaded), (number, error)
        verdict = "refused"
    else:
        verdict = "harmless"
        try:
            cases.check([loaded], held)
        except (AssertionError, KeyError):
            # Without checksums changed values cannot be seen; nor can a signed manifest that tells another story of the
            # same files. Everything else must come back bit for bit.
            assert legacy, (number, kind.__name__)
            for entry, expected in zip(loaded, held):
                assert sum(len(part[0]) for part in entry.parts) == len(expected.keys), (number, kind.__name__)
            verdict = "unseen"
    slowest = max(slowest, time.monotonic() - started)
    assert set(os.listdir(folder)) == before
    key = (kind.__name__, verdict)
    verdicts[key] = verdicts.get(key, 0) + 1
for key, times in sorted(verdicts.items()):
    print(*key, times)
grown = peak_bytes() - held_bytes
print(f"slowest {slowest:.2f} s, memory grew by {grown >> 20} MiB")
assert slowest < 30 and grown < 512 << 20
"""


@pytest.mark.parametrize("kind", ["manifest", "legacy"])
def test_damaged_dumps(tmp_path, kind):
    count = COUNT if kind == "manifest" else COUNT // 4
    here = str(pathlib.Path(__file__).parent)
    command = [sys.executable, "-c", _SCRIPT, here, str(tmp_path), str(SEED), str(count), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    print(f"seed {SEED}, {count} damaged dumps ({kind}); SOK_FUZZ_SEED and SOK_FUZZ_COUNT change them\n{done.stdout}")
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout}\n{done.stderr[-4000:]}"
