# SPDX-License-Identifier: Apache-2.0
"""The manifest: what is written is read again; what somebody else wrote is read in bounded memory, or refused."""

import copy
import json
import time
import tracemalloc

import checkpoint_cases as cases
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import sparse_operation_kit.checkpoint as ck
from sparse_operation_kit.checkpoint import manifest, strict_json, tables

_PREFIX = b'{"manifest_xxh3_128": "'


def sign(text):
    """Puts the right checksum into the text of a manifest."""
    rest = text[len(_PREFIX) + 32 :]
    return _PREFIX + xxhash.xxh3_128_hexdigest(rest).encode() + rest


def signed(document):
    return sign(json.dumps({"manifest_xxh3_128": "0" * 32, **document}).encode())


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    path = tmp_path_factory.mktemp("manifest") / "d"
    cases.results(cases.dump(path, [cases.model("a"), cases.model("b", mode="localized:1")], 2, chunk_bytes=64))
    found = json.loads((path / "sok_manifest.json").read_bytes())
    del found["manifest_xxh3_128"]
    return found


json_data = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('abcß"\\,:{', max_size=5), inner, max_size=4),
    max_leaves=20,
)
tables_drawn = st.builds(
    ck.Table,
    name=st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\x7f"), min_size=1, max_size=20),
    dimension=st.integers(1, 1000),
    value_dtype=st.sampled_from(["float16", "float32", "float64"]),
    kind=st.sampled_from(["static", "dynamic"]),
    mode=st.sampled_from(["distributed", "localized:0", "localized:12"]),
    key_dtype=st.sampled_from(["int32", "int64", "uint32", "uint64"]),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    initializer=json_data,
    optimizer=st.just("Adam"),
    states=st.dictionaries(
        st.sampled_from(["m", "v"]), st.builds(ck.State, st.sampled_from(["float16", "float32"]), st.just(1))
    ),
)


@given(
    st.lists(tables_drawn, max_size=3, unique_by=lambda table: table.stem),
    st.lists(st.integers(0, 50), min_size=1, max_size=4),
    st.integers(1, 9),
    st.none() | st.integers(-(2**63), 2**63 - 1),
    json_data,
    st.dictionaries(st.text("abc", max_size=3), json_data, max_size=3),
)
def test_round_trip(found, parts, chunk_rows, step, extra, hyperparameters):
    layout = tables.Layout(tuple(parts), chunk_rows)
    stored = []
    for table in found:
        digests = {file.name: file.name.encode()[:1] * 16 * layout.num_chunks for file in table.files()}
        stored.append(tables.StoredTable(table, layout, digests))
    written = manifest.Manifest(
        tables=tuple(stored),
        world_size=len(parts),
        optimizer=ck.Optimizer("Adam", 3, hyperparameters),
        step=step,
        extra=extra,
        writer={"name": "x", "version": "1"},
    )
    data = manifest.encode(written)
    data.decode("ascii")
    assert sign(data) == data
    assert manifest.decode(data) == written


@given(json_data)
def test_strict_json_round_trip(value):
    assert strict_json.loads(strict_json.dumps(value)) == value


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), {1: 2}, b"x", object(), 2**64, -(2**63) - 1, "\ud800", {"\ud800": 1}]
)
def test_what_json_cannot_hold_is_not_written(value, tmp_path):
    with pytest.raises(ValueError):
        strict_json.dumps(value)
    with pytest.raises(ck.ManifestError, match="cannot be written"):
        ck.dump(tmp_path / "d", [], extra=value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1, "a": 2}',
        b"[NaN]",
        b"[Infinity]",
        b"[1e999]",
        b"[18446744073709551616]",
        b"[" + b"9" * 100_000 + b"]",
        b"\xff",
        b'"\\ud800"',
        b"[1,]",
        b"",
        b"[" * 33 + b"]" * 33,
        b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b"[" + b"0," * 2_000_000 + b"0]",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_strict_json_refuses(text):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            strict_json.loads(text)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


def _set(path, value):
    def change(document):
        place = document
        for part in path[:-1]:
            place = place[part]
        if value is ...:
            del place[path[-1]]
        else:
            place[path[-1]] = value

    return change


_DEFECTS = {
    "format": (_set(["format"], "safetensors"), "format"),
    "version text": (_set(["version"], "1.0"), "major, minor"),
    "version bool": (_set(["version"], [True, 0]), "major, minor"),
    "newer major": (_set(["version"], [2, 0]), "newer sparse_operation_kit"),
    "no tables": (_set(["tables"], ...), "tables is 'missing'"),
    "tables object": (_set(["tables"], {}), "tables"),
    "table is number": (_set(["tables", 0], 7), r"tables\[0\] is int"),
    "checksum": (_set(["checksum"], "crc32"), "xxh3_128"),
    "world size 0": (_set(["world_size"], 0), "world_size"),
    "world size bool": (_set(["world_size"], True), "world_size"),
    "world size float": (_set(["world_size"], 2.0), "world_size"),
    "huge world size": (_set(["world_size"], 2**40), "world_size"),
    "writer": (_set(["writer"], {"name": 3}), "writer"),
    "step": (_set(["step"], "3"), "step"),
    "step missing": (_set(["step"], ...), "step"),
    "extra missing": (_set(["extra"], ...), "extra"),
    "optimizer": (_set(["optimizer"], []), "optimizer"),
    "iterations": (_set(["optimizer", "iterations"], -1), "iterations"),
    "hyperparameters": (_set(["optimizer", "hyperparameters"], []), "hyperparameters"),
    "empty name": (_set(["tables", 0, "name"], ""), r"tables\[0\]"),
    "name with slash": (_set(["tables", 0, "name"], "../../x"), r"files\[0\]: name"),
    "other file": (
        _set(["tables", 0, "files", 0, "name"], "../../etc/passwd"),
        r"files\[0\]: name.*expected one of a-key",
    ),
    "absolute file": (_set(["tables", 0, "files", 1, "name"], "/etc/passwd"), r"files\[1\]: name"),
    "same name twice": (_set(["tables", 1, "name"], "a"), "name"),
    "dimension 0": (_set(["tables", 0, "dimension"], 0), "dimension"),
    "dimension huge": (_set(["tables", 0, "dimension"], 2**40), "dimension"),
    "dimension wrong": (_set(["tables", 0, "dimension"], 5), "columns"),
    "key dtype": (_set(["tables", 0, "key_dtype"], "float32"), "int32, int64, uint32, uint64"),
    "row dtype": (_set(["tables", 0, "row_dtype"], "float16"), "bfloat16"),
    "row dtype of another kind": (_set(["tables", 0, "row_dtype"], 3), "bfloat16"),
    "value dtype": (_set(["tables", 0, "value_dtype"], "object"), "float16, float32, float64"),
    "kind": (_set(["tables", 0, "kind"], "other"), "static, dynamic"),
    "mode": (_set(["tables", 0, "mode"], "localized:-1"), "mode"),
    "seed": (_set(["tables", 0, "seed"], 2**63 * 3), "64 bits"),
    "states columns": (_set(["tables", 0, "states", 0, "columns"], 3), "columns"),
    "state slot": (_set(["tables", 0, "states", 0, "slot"], "../m"), "state name"),
    "state twice": (_set(["tables", 0, "states", 0, "slot"], "v"), "distinct slots"),
    "states without optimizer": (_set(["tables", 0, "optimizer"], None), "optimizer"),
    "rows negative": (_set(["tables", 0, "rows"], -1), "rows"),
    "rows huge": (_set(["tables", 0, "rows"], 2**62), "rows"),
    "rows other than parts": (_set(["tables", 0, "rows"], 24), "sum is 24"),
    "parts negative": (_set(["tables", 0, "parts"], [24, -1]), "parts"),
    "too many parts": (_set(["tables", 0, "parts"], [23, 0, 0]), "parts"),
    "chunk rows 0": (_set(["tables", 0, "chunk_rows"], 0), "chunk_rows"),
    "chunk rows huge": (_set(["tables", 0, "chunk_rows"], 2**40), "chunks of at most"),
    "chunk rows other": (_set(["tables", 0, "chunk_rows"], 3), "digests"),
    "file missing": (_set(["tables", 0, "files"], []), "4 files"),
    "bytes": (_set(["tables", 0, "files", 0, "bytes"], 10**15), "bytes"),
    "digests short": (_set(["tables", 0, "files", 0, "digests"], "ab"), "digests"),
    "digests not hex": (_set(["tables", 0, "files", 0, "digests"], "g" * 256), "digests"),
}


@pytest.mark.parametrize(("change", "message"), _DEFECTS.values(), ids=_DEFECTS)
def test_defects(document, change, message):
    """Each with a right checksum: only the content is wrong."""
    changed = copy.deepcopy(document)
    change(changed)
    with pytest.raises(ck.ManifestError, match=message) as caught:
        manifest.decode(signed(changed), "/x/sok_manifest.json")
    assert caught.value.file == "/x/sok_manifest.json"
    assert "/x/sok_manifest.json" in str(caught.value)


def test_unknown_members_and_newer_minor_versions_are_read(document):
    changed = copy.deepcopy(document)
    changed["version"] = [1, 7]
    changed["later"] = {"x": 1}
    changed["tables"][0]["later"] = 1
    assert manifest.decode(signed(changed)) == manifest.decode(signed(document))


def test_each_byte_is_covered(document):
    data = signed(document)
    manifest.decode(data)
    for place in range(0, len(data), 7):
        changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises(ck.ManifestError):
            manifest.decode(changed)
    for changed in (data[:-1], data + b" ", data[:40], b"", b"{}", data[1:]):
        with pytest.raises(ck.ManifestError):
            manifest.decode(changed)


def test_one_gigabyte_is_refused_before_it_is_read(tmp_path):
    cases.results(cases.dump(tmp_path / "d", [cases.model()]))
    with open(tmp_path / "d" / "sok_manifest.json", "r+b") as file:
        file.truncate(1 << 30)
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(ck.SizeError, match=r"sok_manifest\.json.*1073741824"):
            ck.open_dump(tmp_path / "d")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 60


@given(st.binary(max_size=300))
def test_anything_after_a_right_checksum(data):
    text = sign(_PREFIX + b"0" * 32 + b'", ' + data)
    with pytest.raises(ck.ManifestError):
        manifest.decode(text)
