# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's DLRM shape in PyTorch.

python -m examples.hybrid.train_torch
torchrun --nproc-per-node 2 -m examples.hybrid.train_torch --picture plan.png
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import sparse_operation_kit.torch as sok
from examples.hybrid import criteo
from sparse_operation_kit.torch import dist_model_parallel as dmp


class Towers(nn.Module):
    """What every process has: dense features and vectors of ids -> log odds."""

    def __init__(self, width: int, tables: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(criteo.DENSE, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(width + tables * (tables + 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, vectors: list[Tensor]) -> Tensor:
        bottom = self.bottom(dense)
        together = torch.stack([bottom, *vectors], 1)
        first, second = torch.triu_indices(together.shape[1], together.shape[1], 1)
        products = (together @ together.mT)[:, first, second]
        odds: Tensor = self.top(torch.cat([bottom, products], 1))
        return odds


def main() -> None:
    args = criteo.parse()
    if torch.cuda.is_available():  # one GPU a process, by its number on this host
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        torch.set_default_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    sok.init()
    torch.manual_seed(0)
    rank, num_ranks = sok.rank(), sok.num_ranks()
    rows = criteo.table_rows(args.scale)
    tables = [(count, args.width, "sum") for count in rows]
    strategy = args.strategy
    if strategy == "planned":
        strategy = dmp.plan(tables, batch_size=args.batch_size, skew=criteo.SKEW, optimizer="adagrad")
    embedding = dmp.DistributedEmbedding(tables, strategy=strategy)
    about = {} if args.strategy == "planned" else {"batch_size": args.batch_size, "optimizer": "adagrad"}
    criteo.show(embedding.report(**about), args, rank)

    towers: nn.Module = Towers(args.width, len(tables))
    parallel = nn.parallel.DistributedDataParallel(towers) if num_ranks > 1 else towers
    # Replicated tables are the embedding's, whose gradients nobody else averages: so this optimizer does.
    on_tables = dmp.DistributedOptimizer(torch.optim.Adagrad(embedding.parameters(), 0.05))
    on_towers = torch.optim.Adagrad(parallel.parameters(), 0.02)
    clicks = criteo.Clicks(rows)
    for step in range(args.steps):
        dense, ids, labels = clicks.batch(step, args.batch_size, rank, num_ranks)
        given = [torch.as_tensor(own, device=torch.get_default_device()) for own in ids]
        odds = parallel(torch.as_tensor(dense, device=torch.get_default_device()), embedding(given))
        labels_here = torch.as_tensor(labels, device=torch.get_default_device())
        loss = functional.binary_cross_entropy_with_logits(odds, labels_here)
        on_tables.zero_grad()
        on_towers.zero_grad()
        loss.backward()
        on_tables.step()
        on_towers.step()
        criteo.progress(step, float(sok.communication.allreduce(loss.detach(), op="average")), args, rank)
    report = embedding.report(inputs=given, **about)
    if rank == 0:
        print("\n".join(str(report).splitlines()[-4:]), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
