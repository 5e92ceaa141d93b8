# SPDX-License-Identifier: Apache-2.0
"""The project's TensorFlow frontend on a GPU with one output for all tables, as FBGEMM's TBE has it."""

from __future__ import annotations

from benchmarks.subjects import gpu_tensorflow_frontend


class Subject(gpu_tensorflow_frontend.Subject):
    concat = True
