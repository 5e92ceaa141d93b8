# SPDX-License-Identifier: Apache-2.0
"""The check of torch_worker.py that is about state_dict and torch.distributed.checkpoint of a DistributedEmbedding."""

import following
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import dist_model_parallel as dmp
from sparse_operation_kit.torch import runtime
from sparse_operation_kit.torch.group import Group
from sparse_operation_kit.torch.planner import LoadPlanner

ROWS = 6
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # parameters differ between ranks, and so do groups of them


def _states(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=FLAT), strict=True))


def hybrid_files():
    """state_dict and distributed checkpoints give back tables and states where the placement is the same, and no others
    take them, also where tables are of one size; rows on all ranks load at another number of ranks.
    """
    rank, ranks = sok.rank(), sok.num_ranks()
    start = [np.random.default_rng(t).normal(size=(ROWS, 4)).astype(np.float32) for t in range(10 * ranks)]
    zeros = [np.zeros_like(table) for table in start]

    def make(weights, **options):
        layer = dmp.DistributedEmbedding([(ROWS, 4, "sum")] * len(start), name="l", **options)
        layer.set_weights(weights)
        return layer, dmp.DistributedOptimizer(torch.optim.Adagrad(layer.parameters(), 0.5))

    def train(layer, optimizer):
        optimizer.zero_grad()
        (torch.cat(layer([torch.arange(3)[:, None]] * len(start)), 1) ** 2).sum().backward()
        optimizer.step()
        return layer.get_weights(True)

    def refused(call, *kinds):
        try:
            call()
        except kinds as error:
            assert "sok.dump and sok.load" in str(error), error
            return
        raise AssertionError("no error")

    with following.shared_folder(Group()) as folder:
        for number, options in enumerate(({}, {"column_slice_threshold": 12}, {"row_slice_threshold": 1})):
            saved = make(start, **options)
            wanted = train(*saved)
            path = f"{folder}/{number}"
            dcp.save(_states(*saved), checkpoint_id=path)
            torch.save([each.state_dict() for each in saved], f"{path}-{rank}.pt")
            Group().allgather(b"")
            trained = train(*saved)
            own = torch.load(f"{path}-{rank}.pt")
            for planner in (None, LoadPlanner(), "state_dict"):
                layer, optimizer = make(zeros, **options)
                if planner == "state_dict":
                    layer.load_state_dict(own[0])
                    optimizer.load_state_dict(own[1])
                else:
                    state = _states(layer, optimizer)
                    dcp.load(state, checkpoint_id=path, planner=planner)
                    given = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
                    set_state_dict(layer, optimizer, **given, options=FLAT)
                np.testing.assert_array_equal(layer.get_weights(True), wanted)
                np.testing.assert_allclose(train(layer, optimizer), trained, rtol=1e-6)
            if ranks == 1:
                continue
            moved, optimizer = make(zeros, **{**options, "strategy": "memory_balanced"})
            same = make(zeros, **options)
            others = torch.load(f"{path}-{(rank + 1) % ranks}.pt")
            if number < 2:  # of rows on all ranks no strategy makes others
                refused(lambda m=moved, o=own: m.load_state_dict(o[0]), RuntimeError)
                refused(lambda o=optimizer, w=own: o.load_state_dict(w[1]), ValueError)
                for planner in (None, LoadPlanner()):
                    state = {"model": moved.state_dict()}
                    load = lambda s=state, p=path, pl=planner: dcp.load(s, checkpoint_id=p, planner=pl)  # noqa: E731
                    refused(load, RuntimeError, dcp.api.CheckpointException)
            refused(lambda s=same, o=others: s[0].load_state_dict(o[0]), RuntimeError)
            refused(lambda s=same, o=others: s[1].load_state_dict(o[1]), ValueError)
            for each in (moved, same[0]):
                assert not np.any(each.get_weights(True))
        one = dmp.DistributedEmbedding([(ROWS + 1, 4, "sum")], name="one", row_slice_threshold=1)
        wanted = one.get_weights(True)[0]
        dcp.save({"model": one.state_dict()}, checkpoint_id=f"{folder}/one")
        before = runtime.get()
        runtime.session.state = runtime.Runtime(before.arguments, 0, 1, None)
        try:
            alone = dmp.DistributedEmbedding([(ROWS + 1, 4, "sum")], name="one")
            alone.set_weights([np.zeros((ROWS + 1, 4), np.float32)])
            state = {"model": alone.state_dict()}
            dcp.load(state, checkpoint_id=f"{folder}/one", planner=LoadPlanner(), no_dist=True)
            np.testing.assert_array_equal(alone.get_weights()[0], wanted)
        finally:
            runtime.session.state = before
