# SPDX-License-Identifier: Apache-2.0
"""The stages of a call on several ranks (csrc/sharded_lookup.h) by the methods of ShardedLookup, on a CPU and, by
tests/gpu_torch, on a GPU: what one rank does, and what it is asked for that cannot be.
"""

import contextlib

import pytest
import torch

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch._ops import ops

KEYS = [torch.tensor([1, 2, 2, 9]), torch.tensor([0, 6, 3], dtype=torch.int32), torch.tensor([5, 5])]
SPLITS = [torch.tensor([0, 3, 4]), torch.tensor([0, 0, 3, 3])]
NO_MEMBERS: tuple[list, ...] = ([], [], [], [])  # no table is a stack


def one_of_each_kind(weights, owners, num_ranks, tables=None):
    """(tables, routed on rank 0): row splits and none, int64 and int32, two lookups in one table."""
    tables = tables or [torch.arange(40.0).view(10, 4), torch.arange(14.0).view(7, 2)]
    handle = torch.classes.sok.TableList(tables, [], [0, 1, 0], ["items", "users"], owners, [10, 7], *NO_MEMBERS)
    lookups = (KEYS, [0, 1, 2], SPLITS, [0, 1], weights, [1] * len(weights))
    return tables, handle.route(*lookups, num_ranks, 0, False)


def swapped(routed):
    """The counts of what a rank sends, [ranks, tables + 2 * lookups + 1] on the CPU."""
    return routed.counts().cpu()


def alone(routed):
    """The outputs of a call of one rank."""
    counts = swapped(routed)
    return routed.combine(routed.gather(routed.keys(counts, counts)))


@pytest.mark.parametrize("weights", [[], [torch.tensor([0.5, 2.0, 1.0])]])
def test_either_pooling_is_gather_combine(monkeypatch, weights):
    for choice in ("owner", "requester"):
        monkeypatch.setenv("SOK_POOLING", choice)
        tables, routed = one_of_each_kind(weights, [-1, -1], 1)
        lookups = (KEYS, [0, 1, 0], [0, 1, 2], SPLITS, [0, 1], weights, [1] * len(weights))
        wanted = ops.gather_combine(tables, ["items", "users"], *lookups)
        for output, expected in zip(alone(routed), wanted, strict=True):
            torch.testing.assert_close(output, expected)
        with pytest.raises(ValueError, match="one output gradient"):
            routed.spread([None], True, False)


def test_where_lookups_are_pooled(monkeypatch):
    def chosen(weights):
        counts = swapped(one_of_each_kind(weights, [-1, 1], 2)[1])
        assert counts[:, 8].tolist() == [0, 0]
        return counts[:, 2:5].sum(0).tolist(), counts[1, 5:8].tolist()  # keys, and row splits of rank 1

    for value, wanted in (("owner", ([4, 3, 0], [3, 4, 0])), ("requester", ([0, 0, 0], [0, 0, 0]))):
        monkeypatch.setenv("SOK_POOLING", value)
        assert chosen([]) == wanted
    monkeypatch.setenv("SOK_POOLING", "owner")
    assert chosen([torch.tensor([0.5, 2.0, 1.0])]) == ([4, 0, 0], [3, 0, 0])
    monkeypatch.setenv("SOK_POOLING", "nowhere")
    with pytest.raises(ValueError, match="SOK_POOLING is 'nowhere'"):
        chosen([])


@pytest.mark.parametrize(
    ("counts", "keys", "message"),
    [
        (
            [0, 0, 0, 4, 0, 0, 5, 0],
            [0, 1, 2, 3, 0, 1, 2, 3, 4],
            "key 0 belongs to rank 1|table 'users' lives on rank 1",
        ),
        ([0, 0, 0, 0, 0, 0, 2, 0], [0, 0], "table 'users' lives on rank 1"),
        ([0, 0, 4, 0, 0, 2, 0, 0], [0, 2, 4, 6, 0, 5], "row_splits"),
        ([0, 0, 4, 0, 0, 2, 0, 0], [0, 2, 4, 77, 0, 4], r"key 77 is outside \[0, 10\)"),
        ([0, 0, 4, 0, 0, 2, 0, 0], [0, 2, 4, 5, 0, 4], "key 5 belongs to rank 1"),
        ([2, 0, 0, 0, 0, 0, 0, 0], [0, 99], r"key 99 is outside \[0, 10\)"),
    ],
)
def test_requests_that_cannot_be(monkeypatch, counts, keys, message):
    """What another rank asks rank 0 of two for: a table of rank 1, bags beyond their keys, keys that are not here."""
    monkeypatch.setenv("SOK_POOLING", "requester")
    shards = [torch.arange(20.0).view(5, 4), torch.zeros(0, 2)]
    _, routed = one_of_each_kind([], [-1, 1], 2, shards)
    routed.keys(swapped(routed), torch.tensor([counts, [0] * 8], device="cpu"))
    with pytest.raises((ValueError, IndexError), match=message):
        routed.gather(torch.tensor(keys))
        sok.check_errors()  # what a device finds is raised later
    with contextlib.suppress(ValueError, IndexError):  # also where the host has found something before that
        sok.check_errors()
