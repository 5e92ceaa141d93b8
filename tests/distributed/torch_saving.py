# SPDX-License-Identifier: Apache-2.0
"""Checks of torch_worker.py: what leaves the tables of several ranks, and comes back."""

import shutil
import tempfile

import following
import torch
import torch.distributed as dist

import sparse_operation_kit.torch as sok


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
