# SPDX-License-Identifier: Apache-2.0
"""The PyTorch side of test_hybrid_checkpoint.py; see hybrid_matrix.py."""

import os

import hybrid_matrix as matrix
import torch
import torch.distributed as dist
from torch import optim

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import dist_model_parallel as dmp

MAKE = {
    "Adagrad": lambda p: optim.Adagrad(p, matrix.RATE, initial_accumulator_value=0.125, eps=1e-12),
    "Adam": lambda p: optim.Adam(p, matrix.RATE, (0.5, 0.75), eps=1e-12),
    "RowWiseAdagrad": lambda p: sok.RowWiseAdagrad(matrix.RATE, 0.125).attach(p),
}


class Frontend:
    sok = sok

    def __init__(self):
        self.rank, self.num_ranks = sok.rank(), sok.num_ranks()

    def layer(self, placement):
        shapes = [(*shape, "sum") for shape in matrix.TABLES]
        options = matrix.options_of(placement, lambda constraints: dmp.plan(shapes, constraints=constraints))
        return dmp.DistributedEmbedding(shapes, name="layer", **options)

    def optimizer(self, name, layer):
        return dmp.DistributedOptimizer(MAKE[name](list(layer.parameters())))

    def listed(self, layer):
        """Any of its tables stands for all, where this rank has some."""
        return sok.filter_variables(layer.parameters())[0] or layer

    def step(self, layer, optimizer, ids, upstream):
        optimizer.zero_grad()
        outputs = layer([torch.from_numpy(each) for each in ids])
        sum((o * torch.from_numpy(u)).sum() for o, u in zip(outputs, upstream, strict=True)).backward()
        optimizer.step()


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    sok.init()
    matrix.main(Frontend())
    if dist.is_initialized():
        dist.destroy_process_group()
