# SPDX-License-Identifier: Apache-2.0
"""The project's TensorFlow frontend on a GPU with one output for all tables, called as a concrete function.

A tf.function looks its trace up at each call, by the types of all that it captures; a concrete function is one trace.
"""

from __future__ import annotations

from benchmarks.subjects import gpu_tensorflow_frontend


class Subject(gpu_tensorflow_frontend.Subject):
    concat = True
    concrete = True
