# SPDX-License-Identifier: Apache-2.0
"""PyTorch's profiler shows the stages of a training step, each by its name."""

import torch

import sparse_operation_kit.torch as sok


def test_stages_in_the_profiler():
    table = sok.Variable(torch.ones(10, 4), name="profiled")
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=0.1))

    def step():
        optimizer.zero_grad()
        sok.lookup_sparse(table, (torch.tensor([1, 2]), torch.tensor([0, 1, 2])), combiners="sum").sum().backward()
        optimizer.step()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    stages = [event for event in profile.events() if event.name in ("sok_gather_combine", "sok_apply")]
    assert [event.name for event in sorted(stages, key=lambda event: event.time_range.start)] == [
        "sok_gather_combine",
        "sok_apply",
    ]
    for event in stages:
        assert event.cpu_parent is not None and event.time_range.elapsed_us() > 0
