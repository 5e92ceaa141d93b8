# SPDX-License-Identifier: Apache-2.0
"""export_for_serving of tables; the files are what tests/format/test_serving.py says."""

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file

import sparse_operation_kit.tensorflow as sok


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_static_tables(tmp_path, dtype):
    tables = [sok.Variable(shape=(7, width), initializer="normal", name=f"t{width}", dtype=dtype) for width in (3, 5)]
    assert sok.export_for_serving(tmp_path / "m", tables) == {"t3": 7, "t5": 7}
    for table, width in zip(tables, (3, 5), strict=True):
        keys = np.fromfile(tmp_path / "m" / f"t{width}" / "key", np.int64)
        rows = np.fromfile(tmp_path / "m" / f"t{width}" / "emb_vector", np.float32).reshape(7, width)
        np.testing.assert_array_equal(rows, tf.cast(table, tf.float32).numpy()[keys])
    sok.export_for_serving(tmp_path / "m.safetensors", tables[0], dtype="int8")
    found = load_file(tmp_path / "m.safetensors")
    rows = found["t3/emb_vector"] * found["t3/scale"][:, None]
    error = np.abs(rows - tf.cast(tables[0], tf.float32).numpy()[found["t3/key"]]).max(axis=1)
    assert (error <= found["t3/scale"] * 0.5001).all()


def test_errors(tmp_path):
    table = sok.Variable(shape=(7, 3), name="t")
    with pytest.raises(TypeError, match=r"vars\[1\] must be a sok.Variable"):
        sok.export_for_serving(tmp_path / "m", [table, tf.Variable([1.0])])

    @tf.function
    def inside():
        sok.export_for_serving(tmp_path / "m", table)

    with pytest.raises(RuntimeError, match="export_for_serving"):
        inside()
    assert not (tmp_path / "m").exists()
