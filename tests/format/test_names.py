# SPDX-License-Identifier: Apache-2.0
import os
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparse_operation_kit.checkpoint as ck
from sparse_operation_kit.checkpoint import names

_text = st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\x7f"), min_size=1, max_size=50)


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("table0:0", "table0_0"),
        ("a/b.c-d:0", "a_b_c_d_0"),
        ("../../etc/passwd", "______etc_passwd"),
        ("..", "__"),
        (string.punctuation, "_" * 32),
        ("tête à tête", "tête à tête"),
        ("名前:0", "名前_0"),
    ],
)
def test_stem(name, stem):
    assert names.stem(name) == stem


@pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "\x7f", "\ud800", "é" * 125, "x" * 249, None, 3])
def test_names_that_cannot_be_files(name):
    with pytest.raises(ck.TableNameError):
        names.stem(name)


@given(_text)
def test_stem_stays_in_its_directory(name):
    stem = names.stem(name)
    assert len(stem) == len(name)
    assert not set(stem) & (set(string.punctuation) - {"_"})
    for file in (names.key_file(stem), names.weight_file(stem), names.state_file(stem, "Adam", "m")):
        assert os.path.basename(file) == file and file not in (".", "..", "")
    assert names.stem(stem) == stem


@given(_text)
def test_file_names_parse_back(name):
    stem = names.stem(name)
    assert names.parse_key_file(names.key_file(stem)) == stem
    assert names.parse_weight_file(names.weight_file(stem)) == stem
    assert names.parse_state_file(names.state_file(stem, "Adam", "m")) == (stem, "Adam", "m")


@given(st.text(max_size=60))
def test_parsers_take_nothing_else(text):
    for parse in (names.parse_key_file, names.parse_weight_file):
        stem = parse(text)
        assert stem is None or names.stem(stem) == stem
    state = names.parse_state_file(text)
    assert state is None or names.state_file(*state) == text


def test_collision_names_both_tables():
    with pytest.raises(ck.TableNameError, match=r"'a/b'.*'a\.b'.*a_b-key"):
        names.stems(["x", "a/b", "a.b"])
    assert names.stems(["b", "a"]) == ["b", "a"]


def test_tensor_name():
    assert names.tensor_name("table0") == "table0:0"
    assert names.tensor_name("table0:0") == "table0:0"
    assert names.tensor_name("a:b") == "a:b:0"


@pytest.mark.parametrize("name", ["", "a-b", "../x", "é", "x" * 33, "a b"])
def test_slot_names(name):
    with pytest.raises(ck.TableNameError):
        names.check_slot(name)


@pytest.mark.parametrize("name", ["", "Adam-W", "1", "x" * 65, "A/B"])
def test_optimizer_names(name):
    with pytest.raises(ck.TableNameError):
        names.check_optimizer(name)
