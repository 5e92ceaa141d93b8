# SPDX-License-Identifier: Apache-2.0
"""Peer: TorchRec's sharded EmbeddingBagCollection, the optimizer fused into its backward pass."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.cases import Batch, Case

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.01}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.01, "eps": 1e-8}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01, "eps": 1e-8}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-8}),
}


class Subject:
    def __init__(self, case: Case, batches: list[Batch], optimizer: str, plan: str) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        names = [f"table{t}" for t in range(case.tables)]
        pooling = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}[case.combiner]
        module = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    embedding_dim=case.dimension,
                    num_embeddings=case.rows,
                    feature_names=[name],
                    pooling=pooling,
                )
                for name in names
            ],
            device=torch.device("meta"),
        )
        kind, options = OPTIMIZERS[optimizer]
        apply_optimizer_in_backward(kind, module.parameters(), dict(options))  # it adds to them
        constraints = None
        if plan != "planner":
            constraints = {
                name: ParameterConstraints(sharding_types=[plan], compute_kernels=["fused"]) for name in names
            }
        bags = len(batches[0].row_splits) - 1
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=dist.get_world_size(), compute_device="cuda"),
            constraints=constraints,
            batch_size=bags,
        )
        sharders = [EmbeddingBagCollectionSharder()]
        chosen = planner.collective_plan(module, sharders, dist.group.WORLD)
        self.model = DistributedModelParallel(module, device=device, plan=chosen, sharders=sharders)
        self.inputs = []
        for batch in batches:
            lengths = np.tile(np.diff(batch.row_splits).astype(np.int32), case.tables)
            self.inputs.append(
                KeyedJaggedTensor(
                    keys=names,
                    values=torch.from_numpy(np.concatenate(batch.keys)).to(device),
                    lengths=torch.from_numpy(lengths).to(device),
                )
            )
        self.gradient = torch.randn((bags, case.tables * case.dimension), device=device)

    def forward(self, i: int) -> torch.Tensor:
        inputs = self.inputs[i]
        # A fresh object each time: it caches what it computes of itself.
        fresh = KeyedJaggedTensor(keys=inputs.keys(), values=inputs.values(), lengths=inputs.lengths())
        values: torch.Tensor = self.model(fresh).values()
        return values

    def step(self, i: int) -> None:
        self.forward(i).backward(self.gradient)
