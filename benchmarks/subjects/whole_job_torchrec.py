# SPDX-License-Identifier: Apache-2.0
"""Peer: the demo's model with TorchRec's sharded EmbeddingBagCollection, the optimizer of its tables fused into the
backward pass, by TrainPipelineSparseDist. For benchmarks.whole_job.

Batches are copied to the GPU while others train, by the thread that copies them for the project's own frontend. The
pipeline has them there two steps ahead. Adagrad's states of tables begin at 0, which TorchRec's fused one does.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import os
from collections.abc import Iterator
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from benchmarks.whole_job_data import Job
from examples.dlrm import columns
from examples.dlrm.keyed_ids import KeyedIds
from examples.dlrm.settings import ADAGRAD_EPSILON
from examples.dlrm.torch_model import Copies, Dlrm, Later, Prepared, make_optimizer, set_precision


@dataclasses.dataclass
class OnGpu(Pipelineable):  # type: ignore[misc]
    """A batch that is on the GPU, as the pipeline takes it."""

    global_rows: int
    labels: torch.Tensor
    dense: torch.Tensor
    ids: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool) -> OnGpu:
        """It is there."""
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        """See Multistreamable."""
        for tensor in (self.labels, self.dense, self.ids):
            tensor.record_stream(stream)


class Vectors(nn.Module):
    """The vectors of a collection side by side."""

    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        vectors: torch.Tensor = self.collection(ids).values()
        return vectors


class Training(nn.Module):
    """Gives the loss, and what is shown of it."""

    def __init__(self, dlrm: Dlrm, is_mixed: bool, num_ranks: int) -> None:
        super().__init__()
        self.dlrm = dlrm
        self.is_mixed = is_mixed
        self.num_ranks = num_ranks

    def forward(self, batch: OnGpu) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.is_mixed):
            logits = self.dlrm(batch.dense, batch.ids).float()
        total = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
        # The gradients of dense layers and of tables are averaged over the ranks.
        return total * (self.num_ranks / batch.global_rows), total.detach()


class Subject:
    version = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torchrec", "fbgemm-gpu", "torch"))

    def __init__(self, job: Job) -> None:
        if job.device == "cpu" or not torch.cuda.is_available():
            raise ImportError("TorchRec is compared on a GPU only")
        torch.set_num_threads(job.threads)
        if not dist.is_torchelastic_launched():
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # at a port that is free
            dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        else:
            dist.init_process_group("nccl")
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.gpu = int(os.environ["LOCAL_RANK"])
        device = torch.device("cuda", self.gpu)
        torch.cuda.set_device(device)
        set_precision(job)
        tables = _tables(job)
        fused: dict[str, Any] = {"lr": job.learning_rate}
        if job.optimizer == "adagrad":
            fused["eps"] = ADAGRAD_EPSILON
        kind = torch.optim.SGD if job.optimizer == "sgd" else torch.optim.Adagrad
        apply_optimizer_in_backward(kind, tables.parameters(), fused)
        with device:
            training = Training(Dlrm(Vectors(tables), job), job.precision == "bfloat16", self.num_ranks)
        dense = [parameter for name, parameter in training.named_parameters() if ".collection." not in name]
        model = DistributedModelParallel(
            training,
            device=device,
            plan=_plan(training, job, device),
            sharders=[EmbeddingBagCollectionSharder()],
            init_data_parallel=self.num_ranks > 1,  # a process alone has nothing to average
        )
        self._pipeline = TrainPipelineSparseDist(model, make_optimizer(dense, job), device, execute_all_batches=True)
        self.prepare = Copies(device).prepare

    def train(self, batches: Iterator[Prepared]) -> Iterator[SupportsFloat]:
        """The sum of the losses of each batch, which is trained with when it is asked for."""
        source = map(_on_gpu, batches)
        while True:
            yield Later(self._pipeline.progress(source))


def _tables(job: Job) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=job.embedding_dim,
            num_embeddings=rows,
            feature_names=[name],
            weight_init_min=-0.05,
            weight_init_max=0.05,
        )
        for name, rows in zip(columns.CATEGORICAL, job.table_rows(), strict=True)
    ]
    return EmbeddingBagCollection(tables=configs, device=torch.device("meta"))


def _plan(module: nn.Module, job: Job, device: torch.device) -> Any:
    """By the kernel that has the optimizer in it. On one GPU all tables are whole, on several the planner chooses."""
    ranks, memory = dist.get_world_size(), torch.cuda.get_device_properties(device).total_memory
    kinds = ["table_wise"] if ranks == 1 else None
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=ranks, compute_device="cuda", hbm_cap=memory),
        constraints={
            name: ParameterConstraints(sharding_types=kinds, compute_kernels=["fused"]) for name in columns.CATEGORICAL
        },
        batch_size=job.batch_size // ranks,
    )
    return planner.collective_plan(module, [EmbeddingBagCollectionSharder()], dist.group.WORLD)


def _on_gpu(batch: Prepared) -> OnGpu:
    return OnGpu(batch.global_rows, batch.labels, batch.dense, _keyed(batch.ids))


def _keyed(ids: KeyedIds[torch.Tensor]) -> KeyedJaggedTensor:
    """A fresh one each time, since it keeps what it computes of itself; it need not fetch where columns begin."""
    first = ids.offset_per_key()
    return KeyedJaggedTensor(
        keys=ids.keys(),
        values=ids.values(),
        offsets=ids.offsets(),
        stride=(len(ids.offsets()) - 1) // len(ids.keys()),
        offset_per_key=first,
        length_per_key=[end - begin for begin, end in itertools.pairwise(first)],
    )
