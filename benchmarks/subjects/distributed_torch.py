# SPDX-License-Identifier: Apache-2.0
"""Sharded tables from PyTorch: the project's frontend, rows dealt out or tables placed whole, its DistributedEmbedding,
and TorchRec.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import sparse_operation_kit.torch as sok
from benchmarks.cases import Batch, Case
from examples.dlrm.settings import Settings
from examples.dlrm.torch_model import TorchModel
from sparse_operation_kit.torch import dist_model_parallel as dmp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Ranks:
    """Under torchrun, a GPU a rank."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = {"torch": torch.__version__}
        if DEVICE == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            self.versions["GPU"] = torch.cuda.get_device_name()
        dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
        sok.init()
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def placements(self) -> dict[str, Callable[..., Any]]:
        return {
            "PyTorch, by row": functools.partial(Frontend, by_row=True),
            "PyTorch, by table": functools.partial(Frontend, by_row=False),
        }

    def peers(self) -> dict[str, Callable[..., Any]]:
        makers: dict[str, Callable[..., Any]] = {}
        try:
            from benchmarks.subjects.distributed_torchrec import Subject

            for plan in ("table_wise", "row_wise", "planner"):
                makers[f"TorchRec, {plan}"] = functools.partial(Subject, plan=plan)
            self.versions["torchrec"] = importlib.metadata.version("torchrec")
            self.versions["fbgemm-gpu"] = importlib.metadata.version("fbgemm-gpu")
        except ImportError as error:
            self.versions["torchrec"] = f"missing: {error}"
        return makers

    def layer(self, case: Case, batches: list[Batch], optimizer: str, options: dict[str, Any]) -> Any:
        return Layer(case, batches, optimizer, options)

    def wait(self) -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def slowest(self, seconds: float) -> float:
        number = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return float(number)

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def whole_model(step: Settings) -> TorchModel:
    """For benchmarks.whole_step."""
    device = torch.device("cuda", torch.cuda.current_device()) if DEVICE == "cuda" else torch.device("cpu")
    return TorchModel(step, device)


class Subject:
    """forward() and step() of tables that a subject makes and looks up, and the optimizer."""

    tables: list[Any]

    def __init__(self, case: Case, batches: list[Batch], optimizer: str) -> None:
        """After `tables` are there."""
        self.optimizer = {
            "sgd": lambda: sok.OptimizerWrapper(torch.optim.SGD(self.tables, lr=0.01)),
            "rowwise_adagrad": lambda: sok.RowWiseAdagrad(0.01, epsilon=1e-8).attach(self.tables),
            "adagrad": lambda: sok.OptimizerWrapper(torch.optim.Adagrad(self.tables, lr=0.01, eps=1e-8)),
            "adam": lambda: sok.OptimizerWrapper(torch.optim.Adam(self.tables, lr=0.01, eps=1e-8)),
        }[optimizer]()
        self.inputs = []
        for batch in batches:
            splits = torch.from_numpy(batch.row_splits).to(DEVICE)
            self.inputs.append([(torch.from_numpy(keys).to(DEVICE), splits) for keys in batch.keys])
        bags = len(batches[0].row_splits) - 1
        self.gradients = [torch.randn((bags, case.dimension), device=DEVICE) for _ in range(case.tables)]

    def forward(self, i: int) -> list[torch.Tensor]:
        raise NotImplementedError

    def step(self, i: int) -> None:
        torch.autograd.backward(self.forward(i), self.gradients)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Frontend(Subject):
    """lookup_sparse of all tables in one call, OptimizerWrapper."""

    def __init__(self, case: Case, batches: list[Batch], optimizer: str, by_row: bool) -> None:
        ranks = dist.get_world_size()
        self.tables = [
            sok.Variable(
                shape=[case.rows, case.dimension],
                initializer="uniform",
                name=f"table{t}",
                mode=None if by_row else f"localized:{t % ranks}",
                device=DEVICE,
            )
            for t in range(case.tables)
        ]
        self.combiners = [case.combiner] * case.tables
        super().__init__(case, batches, optimizer)

    def forward(self, i: int) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = sok.lookup_sparse(self.tables, self.inputs[i], combiners=self.combiners)
        return outputs


class Layer(Subject):
    """A DistributedEmbedding, OptimizerWrapper. The planner is told what is known of the case."""

    def __init__(self, case: Case, batches: list[Batch], optimizer: str, options: dict[str, Any]) -> None:
        tables = [(case.rows, case.dimension, case.combiner)] * case.tables
        known: dict[str, Any] = {"batch_size": case.batch, "hotness": case.keys_per_bag, "skew": case.skew}
        known["optimizer"] = optimizer
        if options.get("strategy") == "planned":
            options = {**options, "strategy": dmp.plan(tables, device=DEVICE, **known)}
        self.module = dmp.DistributedEmbedding(tables, name="tables", device=DEVICE, **options)
        self.known = known
        self.tables = list(self.module.parameters())
        super().__init__(case, batches, optimizer)

    def forward(self, i: int) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = self.module(self.inputs[i])
        return outputs

    def estimate(self) -> dict[str, float]:
        report = self.module.report(**self.known)
        return {"estimated_forward_ms": 1e3 * report.lookup, "estimated_step_ms": 1e3 * report.step}
