# SPDX-License-Identifier: Apache-2.0
"""The project's PyTorch frontend with dynamic tables of raw ids, all of which have rows."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.cases import Case, raw_ids
from benchmarks.subjects import torch_frontend
from benchmarks.subjects.torch_inputs import make_dynamic


class Subject(torch_frontend.Subject):
    evicts = False
    ids_of = staticmethod(raw_ids)

    def make_table(self, case: Case, table: int) -> Any:
        return make_dynamic(case, table, "float32", torch.device("cpu"), self.evicts)
