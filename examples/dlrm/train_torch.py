# SPDX-License-Identifier: Apache-2.0
"""Trains the DLRM in PyTorch: `torchrun --nproc_per_node 2 -m examples.dlrm.train_torch --data demo/data`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

import sparse_operation_kit.torch as sok

from . import columns, dense_file, failure, training
from .architecture import Architecture, Layer
from .features import Batch
from .options import parse
from .settings import ADAGRAD_ACCUMULATOR, ADAGRAD_EPSILON, Settings

Ids = list[tuple[torch.Tensor, torch.Tensor]]
"""(keys, offsets) of each column."""


class Dlrm(nn.Module):
    """Embedding tables sharded over the ranks, between two dense networks that every rank has whole."""

    def __init__(self, architecture: Architecture, settings: Settings) -> None:
        super().__init__()
        sizes = zip(columns.CATEGORICAL, settings.table_rows(), strict=True)
        self.tables = nn.ParameterList(_table(name, rows, architecture.embedding_dim, settings) for name, rows in sizes)
        self.bottom = _mlp(architecture.bottom_layers(settings.seed), last_is_linear=False)
        self.top = _mlp(architecture.top_layers(settings.seed), last_is_linear=True)
        self.pairs = torch.from_numpy(architecture.pairs)

    def forward(self, dense: torch.Tensor, ids: Ids) -> torch.Tensor:
        """Logits [n] of rows with dense features [n, 13] and the ids of 26 columns."""
        embedded = sok.lookup_sparse(list(self.tables), ids, combiners="sum", concat=True)
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom, embedded], dim=1).unflatten(1, (len(ids) + 1, -1))
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        features = torch.cat([bottom, products.index_select(1, self.pairs)], dim=1)
        logits: torch.Tensor = self.top(features)
        return logits.squeeze(1)


def _table(name: str, rows: int | None, dimension: int, settings: Settings) -> nn.Parameter:
    if rows is None:
        return sok.DynamicVariable(dimension, "uniform", name=name, max_capacity=settings.max_table_rows)
    return sok.Variable(shape=[rows, dimension], initializer="uniform", name=name)


class TorchModel:
    """The model on this rank, with its optimizer. Implements training.Model."""

    def __init__(self, settings: Settings) -> None:
        model = self._dlrm = Dlrm(Architecture(settings.embedding_dim), settings)
        self._optimizer = sok.OptimizerWrapper(_optimizer(model, settings))
        # Averages the gradients of the dense layers. The tables are not replicated, so they are none of its business.
        self._model: nn.Module = nn.parallel.DistributedDataParallel(model) if sok.num_ranks() > 1 else model

    def train(self, batch: Batch) -> float:
        """See training.Model."""
        logits = self._model(*_inputs(batch))
        labels = torch.from_numpy(batch.labels)
        total = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        # The average of this over the ranks is the mean over the global batch, however its rows are spread.
        loss = total * (sok.num_ranks() / batch.global_rows)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(total.detach())

    @torch.no_grad()
    def logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """See training.Model."""
        logits: npt.NDArray[np.float32] = self._model(*_inputs(batch)).numpy()
        return logits

    def dump(self, folder: Path, step: int) -> None:
        """See training.Model."""
        if sok.rank() == 0:
            dense_file.save(folder, step, {name: tensor.numpy() for name, tensor in self._dense().items()})
        sok.dump(dense_file.tables(folder), self._dlrm.tables, self._optimizer, step=step, progress=False)

    def load(self, folder: Path) -> int:
        """See training.Model."""
        found = sok.load(dense_file.tables(folder), self._dlrm.tables, self._optimizer, progress=False)
        arrays = dense_file.load(folder, found.step)
        for name, tensor in self._dense().items():
            tensor.copy_(torch.from_numpy(arrays[name]))
        return found.step or 0

    def _dense(self) -> dict[str, torch.Tensor]:
        """The dense layers and what the optimizer keeps for them, by name; kernels as [inputs, outputs]."""
        named = {}
        for part, layers in (("bottom", self._dlrm.bottom), ("top", self._dlrm.top)):
            for place, layer in enumerate(layer for layer in layers if isinstance(layer, nn.Linear)):
                for name, parameter in (("kernel", layer.weight), ("bias", layer.bias)):
                    named[f"{part}.{place}.{name}"] = parameter.detach().T if name == "kernel" else parameter.detach()
                    state = self._optimizer.state.get(parameter, {}).get("sum")
                    if state is not None:
                        named[f"{part}.{place}.{name}.accumulator"] = state.T if name == "kernel" else state
        return named


class TorchRanks:
    """Implements training.Ranks."""

    def __init__(self) -> None:
        self.rank = sok.rank()
        self.num_ranks = sok.num_ranks()

    def sum(self, array: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """See training.Ranks."""
        total: npt.NDArray[np.float64] = sok.communication.allreduce(torch.from_numpy(array)).numpy()
        return total


def main() -> None:
    """Command line; one process, or as many as torchrun starts."""
    settings = parse(Settings, "Train a DLRM in PyTorch, on one process or under torchrun.")
    with failure.reported(settings.progress):
        _run(settings)


def _run(settings: Settings) -> None:
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(settings.threads or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    # DDP averages dense gradients over the ranks; "mean" does the same for those of the tables.
    sok.init(gradient="mean", seed=settings.seed)
    metrics = training.run("PyTorch", TorchModel(settings), TorchRanks(), settings)
    if sok.rank() == 0:
        print(f"PyTorch: AUC {metrics.auc:.4f}, {metrics.samples_per_second:,.0f} samples/s")
    if dist.is_initialized():
        dist.destroy_process_group()


def _mlp(layers: list[Layer], *, last_is_linear: bool) -> nn.Sequential:
    modules: list[nn.Module] = []
    for layer in layers:
        linear = nn.Linear(*layer.kernel.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(layer.kernel.T))
            linear.bias.copy_(torch.from_numpy(layer.bias))
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*(modules[:-1] if last_is_linear else modules))


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    if settings.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=settings.learning_rate)
    return torch.optim.Adagrad(
        model.parameters(),
        lr=settings.learning_rate,
        initial_accumulator_value=ADAGRAD_ACCUMULATOR,
        eps=ADAGRAD_EPSILON,
    )


def _inputs(batch: Batch) -> tuple[torch.Tensor, Ids]:
    ids = [(torch.from_numpy(k), torch.from_numpy(s)) for k, s in zip(batch.keys, batch.splits, strict=True)]
    return torch.from_numpy(batch.dense), ids


if __name__ == "__main__":
    main()
