# SPDX-License-Identifier: Apache-2.0
"""The project's TensorFlow frontend fed with RaggedTensors: row splits as the core takes them, nothing to convert."""

from __future__ import annotations

from benchmarks.subjects import tensorflow_frontend
from benchmarks.subjects.tensorflow_inputs import ragged_inputs


class Subject(tensorflow_frontend.Subject):
    make_inputs = staticmethod(ragged_inputs)
