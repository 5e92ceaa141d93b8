# SPDX-License-Identifier: Apache-2.0
"""The project's TensorFlow frontend with dynamic tables of raw ids, all of which have rows."""

from __future__ import annotations

from typing import Any

from benchmarks.cases import Case, raw_ids
from benchmarks.subjects import tensorflow_frontend_ragged
from benchmarks.subjects.tensorflow_inputs import make_dynamic


class Subject(tensorflow_frontend_ragged.Subject):
    ids_of = staticmethod(raw_ids)

    def make_table(self, case: Case, table: int) -> Any:
        return make_dynamic(case, table, "float32", evicts=False)
