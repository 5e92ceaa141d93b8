# SPDX-License-Identifier: Apache-2.0
"""Checks of torch_worker.py: what leaves the tables of several ranks, and comes back."""

import shutil
import tempfile
from typing import Any

import dumping
import following
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hybrid_model import TABLES
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import dist_model_parallel as dmp
from sparse_operation_kit.torch import runtime
from sparse_operation_kit.torch.group import Group
from sparse_operation_kit.torch.planner import LoadPlanner


def shared_folder():
    """The path of a new folder, the same on all ranks."""
    paths = [tempfile.mkdtemp() if sok.rank() == 0 else None]
    dist.broadcast_object_list(paths)
    return paths[0]


def incremental():
    """Changed rows of all ranks reach a copy on as many."""

    def make_step(tables):
        optimizer = sok.OptimizerWrapper(torch.optim.Adam(tables))

        def step(keys):
            optimizer.zero_grad()
            ids = [(torch.from_numpy(k), torch.tensor([0, len(k)])) for k in keys]
            sum((output**2).sum() for output in sok.lookup_sparse(tables, ids)).backward()
            optimizer.step()

        return step

    folder = shared_folder()
    following.follow(sok, make_step, lambda table: table.detach().numpy(), f"{folder}/delta")
    dist.barrier()
    if sok.rank() == 0:
        shutil.rmtree(folder)


def dump_while_training():
    """What dump_async writes is what the tables were when it was called."""
    tables = dumping.tables_of(sok, torch.bfloat16)
    layer = dmp.DistributedEmbedding([(*shape, "sum") for shape in TABLES], name="layer", **dumping.LAYER)
    optimizer = dmp.DistributedOptimizer(torch.optim.Adam([*tables, *layer.parameters()], 0.1))

    def step(turn):
        optimizer.zero_grad()
        keys = [torch.from_numpy(each) for each in dumping.keys_of(sok, turn)]
        ids = [(each, torch.arange(0, len(each) + 1, 4)) for each in keys]
        outputs = sok.lookup_sparse(tables, ids, combiners=["sum"] * len(tables))
        outputs += layer([(keys[0] % 7)[:, None]] * len(TABLES))
        torch.stack([(output - 1).square().sum() for output in outputs]).sum().backward()
        optimizer.step()

    dumping.while_training(sok, Group(), [*tables, layer], step, tables[-1], optimizer)


class Saved(torch.nn.Module):
    """Tables of both placements and a dense layer."""

    def __init__(self):
        super().__init__()
        mode = f"localized:{sok.num_ranks() - 1}"
        self.items = sok.Variable(shape=(23, 4), initializer="normal", name="saved_items")
        self.users = sok.Variable(shape=(7, 4), initializer="normal", mode=mode, name="saved_users")
        self.dense = torch.nn.Linear(4, 1)

    def forward(self):
        ids = [(torch.arange(k, n, 3), torch.tensor([0, len(range(k, n, 3))])) for k, n in ((sok.rank(), 23), (1, 7))]
        outputs = sok.lookup_sparse([self.items, self.users], ids, combiners=["sum", "mean"])
        return self.dense(sum(outputs)).sum()


def whole(model, optimizer):
    """Tables and their states, put together from all ranks; and the dense parameters."""
    result = [parameter.detach().clone() for parameter in model.dense.parameters()]
    for table in (model.items, model.users):
        states = [value for key, value in sorted(optimizer.state[table].items()) if key != "step"]
        for part in (table.data, *states):
            joined = torch.zeros((table.global_shape[0], *part.shape[1:]), dtype=part.dtype)
            joined[table.placement.rows] = part
            dist.all_reduce(joined)
            result.append(joined)
        result.append(torch.as_tensor(optimizer.state[table]["step"]))
    return result


def state_of(model, optimizer) -> dict[str, Any]:
    """What torch.distributed.checkpoint saves and loads of both."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def distributed_checkpoint():
    """Saved by all ranks; loaded by as many, by each rank alone, and asynchronously saved again."""
    torch.manual_seed(1)
    folder = shared_folder()
    model = Saved()
    optimizer = sok.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    expected = whole(model, optimizer)
    states = state_of(model, optimizer)
    for name, value in states["model"].items():
        assert value.size() == value.shape == model.get_parameter(name).shape, name
    dcp.save(states, checkpoint_id=f"{folder}/plain")
    saved: Any = dcp.async_save(states, checkpoint_id=f"{folder}/async")
    saved.result()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/rank{sok.rank()}.pt")

    def check(source, planner):
        other = Saved()
        again = sok.OptimizerWrapper(torch.optim.Adam(other.parameters()))
        state = state_of(other, again)
        source(state, planner)
        set_state_dict(other, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for ours, theirs in zip(expected, whole(other, again), strict=True):
            assert torch.equal(ours, theirs)

    for name in ("plain", "async"):
        for planner in (None, LoadPlanner()):
            check(
                lambda state, planner, name=name: dcp.load(state, checkpoint_id=f"{folder}/{name}", planner=planner),
                planner,
            )
    other = Saved()
    again = sok.OptimizerWrapper(torch.optim.Adam(other.parameters()))
    own = torch.load(f"{folder}/rank{sok.rank()}.pt")
    other.load_state_dict(own["model"])
    again.load_state_dict(own["optimizer"])
    for ours, theirs in zip(expected, whole(other, again), strict=True):
        assert torch.equal(ours, theirs)
    if sok.num_ranks() > 1:
        # What every script with `if rank == 0: torch.save(...)` would do to the others.
        first = torch.load(f"{folder}/rank0.pt")
        try:
            other.load_state_dict(first["model"])
        except RuntimeError as error:
            assert sok.rank() != 0 and "rank 0 of" in str(error) and "LoadPlanner" in str(error), error
        else:
            assert sok.rank() == 0
        alone(folder, expected)
    dist.barrier()
    if sok.rank() == 0:
        shutil.rmtree(folder)


def alone(folder, expected):
    """Every rank loads the checkpoint of all as if it were the only one: another world size."""
    before = runtime.get()
    runtime.session.state = runtime.Runtime(before.arguments, 0, 1, None)
    try:
        model = Saved()
        optimizer = sok.OptimizerWrapper(torch.optim.Adam(model.parameters()))
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=f"{folder}/plain", planner=LoadPlanner(), no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found = [parameter.detach() for parameter in model.dense.parameters()]
        for table in (model.items, model.users):
            held = optimizer.state[table]
            found += [table.data, *(value for key, value in sorted(held.items()) if key != "step"), held["step"]]
        for ours, theirs in zip(expected, found, strict=True):
            assert torch.equal(ours, theirs)
    finally:
        runtime.session.state = before
