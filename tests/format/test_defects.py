# SPDX-License-Identifier: Apache-2.0
"""One test a defect of a dump with a manifest: an error that names the file, and nothing assigned."""

import os
import socket

import checkpoint_cases as cases
import pytest

import sparse_operation_kit.checkpoint as ck

_KEY, _WEIGHT, _STATE = "table0_0-key", "table0_0-weight", "table0_0-Adam-m"


@pytest.fixture
def held():
    return cases.model(rows=40)


@pytest.fixture
def dump(tmp_path, held):
    cases.results(cases.dump(tmp_path / "d", [held], 2, chunk_bytes=128))
    return tmp_path / "d"


def refused(dump, held, error, file, message, readers=2, **options):
    """Loading fails on every rank, names the file, and assigns nothing anywhere."""
    assigned = []

    def run(group):
        loaded = cases.Loaded(held, -1)
        target = loaded.target(assign=assigned.append, **options)
        ck.load(dump, [target], optimizer="Adam", group=group, progress=False)

    outcomes = cases.on_ranks(readers, run)
    assert all(isinstance(outcome, ck.CheckpointError) for outcome in outcomes)
    assert not assigned
    with pytest.raises(error, match=message) as caught:
        cases.results(outcomes)
    assert file in str(caught.value)
    if error is not ck.MismatchError or file != dump.name:
        assert os.path.basename(caught.value.file) == file
    for outcome in outcomes:
        assert file in str(outcome)


@pytest.mark.parametrize("file", [_KEY, _WEIGHT, _STATE])
class TestFile:
    def test_missing(self, dump, held, file):
        (dump / file).unlink()
        refused(dump, held, ck.MissingFileError, file, "is missing")

    @pytest.mark.parametrize("size", [0, 1, 295, 296, 300])
    def test_truncated(self, dump, held, file, size):
        expected = os.path.getsize(dump / file)
        os.truncate(dump / file, size)
        refused(dump, held, ck.SizeError, file, f"is {size} bytes long; expected {expected} bytes")

    def test_over_long(self, dump, held, file):
        with open(dump / file, "ab") as out:
            out.write(b"\0")
        refused(dump, held, ck.SizeError, file, "bytes long")

    def test_bit_flipped(self, dump, held, file):
        size = os.path.getsize(dump / file)
        for place in (296, (296 + size) // 2, size - 1):
            data = bytearray((dump / file).read_bytes())
            data[place] ^= 16
            (dump / file).write_bytes(data)
            refused(dump, held, ck.ChecksumError, file, "XXH3-128")
            data[place] ^= 16
            (dump / file).write_bytes(data)
        cases.check(cases.load(dump, [held], 2), [held])

    def test_header(self, dump, held, file):
        for place in (0, 255, 259, 291, 295):
            data = bytearray((dump / file).read_bytes())
            data[place] ^= 1
            (dump / file).write_bytes(data)
            refused(dump, held, ck.HeaderError, file, "another header")
            data[place] ^= 1
            (dump / file).write_bytes(data)

    def test_symbolic_link(self, dump, held, file, tmp_path):
        os.rename(dump / file, tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", dump / file)
        refused(dump, held, ck.FormatError, file, "is a symbolic link; expected a regular file")

    def test_fifo_does_not_hang(self, dump, held, file):
        (dump / file).unlink()
        os.mkfifo(dump / file)
        refused(dump, held, ck.FormatError, file, "not a regular file")

    def test_socket(self, dump, held, file, monkeypatch):
        (dump / file).unlink()
        monkeypatch.chdir(dump)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(file)
        refused(dump, held, ck.FormatError, file, "is a socket")

    def test_directory(self, dump, held, file):
        (dump / file).unlink()
        (dump / file).mkdir()
        refused(dump, held, ck.FormatError, file, "not a regular file")


def test_swapped_files(dump, held):
    os.rename(dump / _STATE, dump / "x")
    os.rename(dump / "table0_0-Adam-v", dump / _STATE)
    os.rename(dump / "x", dump / "table0_0-Adam-v")
    refused(dump, held, ck.HeaderError, _STATE, "expected a header of state 'm' of float32")


def test_files_of_another_dump(dump, held, tmp_path):
    cases.results(cases.dump(tmp_path / "other", [cases.model(rows=40, seed=9)], 2, chunk_bytes=128))
    os.replace(tmp_path / "other" / _WEIGHT, dump / _WEIGHT)
    refused(dump, held, ck.ChecksumError, _WEIGHT, "chunk 0")


def test_manifest_is_a_symbolic_link(dump, held, tmp_path):
    os.rename(dump / "sok_manifest.json", tmp_path / "m")
    os.symlink(tmp_path / "m", dump / "sok_manifest.json")
    refused(dump, held, ck.FormatError, "sok_manifest.json", "symbolic link")


def test_manifest_is_empty(dump, held):
    os.truncate(dump / "sok_manifest.json", 0)
    refused(dump, held, ck.ManifestError, "sok_manifest.json", "is not a manifest")


@pytest.mark.parametrize(
    ("changes", "file", "message"),
    [
        ({"dimension": 5}, _WEIGHT, "has rows of 4 elements; expected dimension 5"),
        ({"value_dtype": "float64"}, _WEIGHT, "holds float32; expected float64"),
        ({"rows": 41}, _KEY, "has 40 rows; expected 41 rows"),
        ({"rows": 39}, _KEY, "has 40 rows; expected 39 rows"),
        ({"states": {"m": ck.State("float16", 4)}}, _STATE, "holds float32; expected float16"),
        ({"states": {"m": ck.State("float32", 1)}}, _STATE, "has 4 elements a row; expected 1"),
        ({"states": {"x": ck.State("float32", 4)}}, "table0_0-Adam-x", "has no state 'x' of Adam"),
    ],
)
def test_variable_of_another_shape(dump, held, changes, file, message):
    refused(dump, held, ck.MismatchError, file, message, **changes)


def test_table_that_is_not_there(dump, held):
    with pytest.raises(ck.MismatchError, match=r"no table 'other' \(file other-key\); its tables are: table0_0"):
        ck.load(dump, [cases.Loaded(held, -1).target(name="other")], optimizer="Adam")


def test_key_that_the_variable_cannot_hold(tmp_path):
    held = cases.model(kind="dynamic", optimizer=None)
    cases.results(cases.dump(tmp_path / "d", [held], 2))
    with pytest.raises(
        ck.KeysError, match=r"table0_0-key: holds the key -9223372036854775808; expected keys in \[-2147"
    ):
        ck.load(tmp_path / "d", [cases.Loaded(held, -1).target(key_dtype="int32")])


def test_dynamic_dump_into_a_static_variable(tmp_path):
    held = cases.model(kind="dynamic", optimizer=None)
    cases.results(cases.dump(tmp_path / "d", [held], 2))
    with pytest.raises(ck.KeysError, match=r"expected keys in \[0, 22\]"):
        ck.load(tmp_path / "d", [cases.Loaded(held, -1).target(rows=23)])


def test_a_failing_rank_stops_all(dump, held):
    """An error that only one rank meets reaches the others with its message, and nothing is assigned."""
    assigned = []

    def run(group):
        dimension = 4 if group.rank == 0 else 5
        target = cases.Loaded(held, -1).target(dimension=dimension, assign=assigned.append)
        ck.load(dump, [target], optimizer="Adam", group=group)

    first, second = cases.on_ranks(2, run)
    assert isinstance(second, ck.MismatchError) and isinstance(first, ck.PeerError)
    assert "rank 1 failed" in str(first) and "expected dimension 5" in str(first)
    assert not assigned


def test_damage_found_while_reading(dump, held):
    """verify="during" reads once; it still never hands over a damaged row."""
    data = bytearray((dump / _WEIGHT).read_bytes())
    data[296 + 16 * 20 + 3] ^= 1
    (dump / _WEIGHT).write_bytes(data)
    loaded = cases.Loaded(held, -1)
    with pytest.raises(ck.ChecksumError, match=_WEIGHT):
        ck.load(dump, [loaded.target()], optimizer="Adam", verify="during")
    for keys, weights, _ in loaded.parts:
        cases.same_bits(weights, held.weights[keys])


def test_states_need_an_optimizer(dump, held):
    with pytest.raises(ValueError, match="no optimizer is named"):
        ck.load(dump, [cases.Loaded(held, -1).target()])
    with pytest.raises(ValueError, match='"before" or "during"'):
        ck.load(dump, [], verify="never")  # type: ignore[arg-type]


def test_errors_are_one_tree():
    for name in ck.__all__:
        value = getattr(ck, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, ck.CheckpointError)
    for kind in (ck.FormatError, ck.MismatchError, ck.TableNameError):
        assert issubclass(kind, ValueError)
    assert issubclass(ck.StorageError, OSError) and issubclass(ck.MissingFileError, FileNotFoundError)
    error = ck.SizeError("is short", file="f", expected="8 bytes")
    assert (str(error), error.file, error.expected) == ("f: is short; expected 8 bytes", "f", "8 bytes")
