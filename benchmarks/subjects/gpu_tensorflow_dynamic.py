# SPDX-License-Identifier: Apache-2.0
"""The project's TensorFlow frontend on a GPU with one output and dynamic tables of raw ids, all of which have rows."""

from __future__ import annotations

from typing import Any

from benchmarks.cases import Case, raw_ids
from benchmarks.subjects import gpu_tensorflow_frontend
from benchmarks.subjects.tensorflow_inputs import make_dynamic


class Subject(gpu_tensorflow_frontend.Subject):
    concat = True
    ids_of = staticmethod(raw_ids)

    def make_table(self, case: Case, table: int, dtype: str) -> Any:
        return make_dynamic(case, table, dtype, evicts=False)
