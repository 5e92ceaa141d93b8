# SPDX-License-Identifier: Apache-2.0
"""Sharded tables from PyTorch: the project's frontend, rows dealt out or tables placed whole, and TorchRec."""

from __future__ import annotations

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


class Ranks:
    """Under torchrun, a GPU a rank."""

    def __init__(self) -> None:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
        sok.init()
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.versions = {"GPU": torch.cuda.get_device_name(), "torch": torch.__version__}

    def subjects(self, names: list[str]) -> dict[str, Callable[[Case, list[Batch], str], Any]]:
        makers: dict[str, Callable[[Case, list[Batch], str], Any]] = {
            "PyTorch, by row": lambda *given: Frontend(*given, by_row=True),
            "PyTorch, by table": lambda *given: Frontend(*given, by_row=False),
        }
        try:
            from benchmarks.subjects.distributed_torchrec import Subject

            for plan in ("table_wise", "row_wise", "planner"):
                makers[f"TorchRec, {plan}"] = lambda *given, plan=plan: Subject(*given, plan=plan)
            self.versions["torchrec"] = importlib.metadata.version("torchrec")
            self.versions["fbgemm-gpu"] = importlib.metadata.version("fbgemm-gpu")
        except ImportError as error:
            self.versions["torchrec"] = f"missing: {error}"
        return {name: make for name, make in makers.items() if not names or name in names}

    def wait(self) -> None:
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
    return TorchModel(step, torch.device("cuda", torch.cuda.current_device()))


class Frontend:
    """lookup_sparse of all tables in one call, OptimizerWrapper."""

    def __init__(self, case: Case, batches: list[Batch], optimizer: str, by_row: bool) -> None:
        ranks = dist.get_world_size()
        self.tables = [
            sok.Variable(
                shape=[case.rows, case.dimension],
                initializer="uniform",
                name=f"table{t}",
                mode=None if by_row else f"localized:{t % ranks}",
                device="cuda",
            )
            for t in range(case.tables)
        ]
        self.optimizer = {
            "sgd": lambda: sok.OptimizerWrapper(torch.optim.SGD(self.tables, lr=0.01)),
            "rowwise_adagrad": lambda: sok.RowWiseAdagrad(0.01, epsilon=1e-8).attach(self.tables),
            "adagrad": lambda: sok.OptimizerWrapper(torch.optim.Adagrad(self.tables, lr=0.01, eps=1e-8)),
            "adam": lambda: sok.OptimizerWrapper(torch.optim.Adam(self.tables, lr=0.01, eps=1e-8)),
        }[optimizer]()
        self.combiners = [case.combiner] * case.tables
        self.inputs = []
        for batch in batches:
            splits = torch.from_numpy(batch.row_splits).cuda()
            self.inputs.append([(torch.from_numpy(keys).cuda(), splits) for keys in batch.keys])
        bags = len(batches[0].row_splits) - 1
        self.gradients = [torch.randn((bags, case.dimension), device="cuda") for _ in self.tables]

    def forward(self, i: int) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = sok.lookup_sparse(self.tables, self.inputs[i], combiners=self.combiners)
        return outputs

    def step(self, i: int) -> None:
        torch.autograd.backward(self.forward(i), self.gradients)
        self.optimizer.step()
        self.optimizer.zero_grad()
