# SPDX-License-Identifier: Apache-2.0
"""The project's PyTorch frontend on a GPU with one output and dynamic tables of raw ids, all of which have rows."""

from __future__ import annotations

from typing import Any

from benchmarks.cases import Case, raw_ids
from benchmarks.subjects import gpu_torch_frontend, gpu_torch_frontend_concat
from benchmarks.subjects.torch_inputs import make_dynamic


class Subject(gpu_torch_frontend_concat.Subject):
    evicts = False
    ids_of = staticmethod(raw_ids)

    def make_table(self, case: Case, table: int, dtype: str) -> Any:
        return make_dynamic(case, table, dtype, gpu_torch_frontend.DEVICE, self.evicts)
