# SPDX-License-Identifier: Apache-2.0
"""assign and export, in a process alone."""

import numpy as np
import pytest
import torch
import torch_harness as harness

import sparse_operation_kit.torch as sok


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_assign_and_export(dtype):
    table = sok.Variable(torch.zeros(5, 2))
    sok.assign(table, torch.tensor([3, 0, 3], dtype=dtype), torch.tensor([[1.0, 2], [3, 4], [5, 6]]))
    keys, rows = sok.export(table)
    assert keys.dtype == torch.int64 and keys.tolist() == [0, 1, 2, 3, 4] and keys.device.type == "cpu"
    assert rows.dtype == torch.float32 and not rows.requires_grad
    assert rows.tolist() == [[3, 4], [0, 0], [0, 0], [5, 6], [0, 0]]


def test_assign_takes_arrays_and_lists():
    table = sok.Variable(torch.zeros(5, 2))
    sok.assign(table, np.array([1]), np.array([[1, 2]], np.float32))
    sok.assign(table, [2], [[3.0, 4.0]])
    sok.assign(table, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2))
    assert harness.rows_of(table)[1:3].tolist() == [[1, 2], [3, 4]]


def test_assign_of_strided_rows():
    table = sok.Variable(torch.zeros(4, 2))
    wide = torch.arange(16.0).view(4, 4)
    sok.assign(table, torch.arange(8)[::2][:2], wide[:2, ::2])
    assert harness.rows_of(table).tolist() == [[0, 2], [0, 0], [4, 6], [0, 0]]


def test_assign_checks_before_it_writes():
    table = sok.Variable(torch.zeros(5, 2), name="items")
    with pytest.raises(IndexError, match=r"'items'.*-3.*\[0, 5\)"):
        sok.assign(table, [0, -3], torch.ones(2, 2))
    assert torch.equal(harness.rows_of(table), torch.zeros(5, 2))


def test_assign_is_seen_by_autograd():
    table = sok.Variable(torch.zeros(5, 2))
    loss = (table**2).sum()
    sok.assign(table, [0], torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_export_is_a_copy():
    table = sok.Variable(torch.zeros(5, 2))
    _, rows = sok.export(table)
    rows.fill_(1)
    assert torch.equal(harness.rows_of(table), torch.zeros(5, 2))
