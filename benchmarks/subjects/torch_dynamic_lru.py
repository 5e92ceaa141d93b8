# SPDX-License-Identifier: Apache-2.0
"""The same with tables that keep the time of each row's last use, of a capacity that all rows fit into."""

from __future__ import annotations

from benchmarks.subjects import torch_dynamic


class Subject(torch_dynamic.Subject):
    evicts = True
