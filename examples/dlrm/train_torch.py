# SPDX-License-Identifier: Apache-2.0
"""Trains the DLRM in PyTorch: `torchrun --nproc_per_node 2 -m examples.dlrm.train_torch --data demo/data`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

import sparse_operation_kit.torch as sok

from . import columns, dense_file, failure, training
from .architecture import Architecture, Layer
from .devices import choose_gpu
from .features import Batch
from .keyed_ids import KeyedIds
from .options import parse
from .settings import ADAGRAD_ACCUMULATOR, ADAGRAD_EPSILON, Settings


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A batch where the model is."""

    global_rows: int
    labels: torch.Tensor
    dense: torch.Tensor
    ids: KeyedIds[torch.Tensor]


class Dlrm(nn.Module):
    """Embedding tables sharded over the ranks, between two dense networks that every rank has whole."""

    def __init__(self, architecture: Architecture, settings: Settings) -> None:
        super().__init__()
        sizes = zip(columns.CATEGORICAL, settings.table_rows(), strict=True)
        tables = {name: _table(name, rows, architecture.embedding_dim, settings) for name, rows in sizes}
        self.tables = sok.EmbeddingBagCollection(tables, combiners="sum", initializer="uniform", concat=True)
        self.bottom = _mlp(architecture.bottom_layers(settings.seed), last_is_linear=False)
        self.top = _mlp(architecture.top_layers(settings.seed), last_is_linear=True)
        self.vectors = architecture.vectors
        self.pairs: torch.Tensor
        self.register_buffer("pairs", torch.tensor(architecture.pairs), persistent=False)

    def forward(self, dense: torch.Tensor, ids: KeyedIds[torch.Tensor]) -> torch.Tensor:
        """Logits [n] of rows with dense features [n, 13] and the ids of 26 columns."""
        embedded = self.tables(ids)
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom, embedded], dim=1).unflatten(1, (self.vectors, -1))
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        features = torch.cat([bottom, products.index_select(1, self.pairs)], dim=1)
        logits: torch.Tensor = self.top(features)
        return logits.squeeze(1)


def _table(name: str, rows: int | None, dimension: int, settings: Settings) -> Any:
    """What a collection makes a table of, or the table."""
    if rows is None:
        return sok.DynamicVariable(dimension, "uniform", name=name, max_capacity=settings.max_table_rows)
    return rows, dimension


class TorchModel:
    """The model on this rank, with its optimizer. Implements training.Model."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._device = device
        # Copies on a stream of their own do not wait for the step, nor the step for them.
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_mixed = settings.precision == "bfloat16"
        torch.set_float32_matmul_precision("high" if settings.precision == "tf32" else "highest")
        with device:
            model = self._dlrm = Dlrm(Architecture(settings.embedding_dim), settings)
        self._optimizer = sok.OptimizerWrapper(_optimizer(model, settings))
        self._model: nn.Module = model
        if sok.num_ranks() > 1:
            # Averages the gradients of the dense layers. The tables are not replicated: they are none of its business.
            self._model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)

    def prepare(self, batch: Batch) -> Prepared:
        """See training.Model."""
        arrays = (batch.labels, batch.dense, batch.ids.values(), batch.ids.offsets())
        tensors = [torch.from_numpy(array) for array in arrays]
        if self._copies is None:
            labels, dense, ids, offsets = (tensor.clone() for tensor in tensors)
        else:
            with torch.cuda.stream(self._copies):
                labels, dense, ids, offsets = (tensor.to(self._device, non_blocking=True) for tensor in tensors)
            for tensor in (labels, dense, ids, offsets):
                tensor.record_stream(torch.cuda.default_stream(self._device))  # which the step runs on
            self._copies.synchronize()
        return Prepared(batch.global_rows, labels, dense, batch.ids.of(ids, offsets))

    def train(self, batch: Prepared) -> SupportsFloat:
        """See training.Model."""
        logits = self._forward(batch)
        total = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
        # The average of this over the ranks is the mean over the global batch, however its rows are spread.
        loss = total * (sok.num_ranks() / batch.global_rows)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return _Later(total.detach())

    @torch.no_grad()
    def logits(self, batch: Prepared) -> npt.NDArray[np.float32]:
        """See training.Model."""
        logits: npt.NDArray[np.float32] = self._forward(batch).cpu().numpy()
        return logits

    def _forward(self, batch: Prepared) -> torch.Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_mixed):
            logits: torch.Tensor = self._model(batch.dense, batch.ids)
        return logits.float()

    def dump(self, folder: Path, step: int) -> None:
        """See training.Model."""
        if sok.rank() == 0:
            dense_file.save(folder, step, {name: tensor.cpu().numpy() for name, tensor in self._dense().items()})
        sok.dump(dense_file.tables(folder), self._tables(), self._optimizer, step=step, progress=False)

    def load(self, folder: Path) -> int:
        """See training.Model."""
        found = sok.load(dense_file.tables(folder), self._tables(), self._optimizer, progress=False)
        arrays = dense_file.load(folder, found.step)
        for name, tensor in self._dense().items():
            tensor.copy_(torch.from_numpy(arrays[name]))
        return found.step or 0

    def _tables(self) -> list[Any]:
        return list(self._dlrm.tables.parameters())

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


class _Later:
    """A number that a GPU has yet to compute. Asking for it waits for that, and not for what was begun later."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number = number.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if number.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def __float__(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._number)


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
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(settings.threads or max(1, len(os.sched_getaffinity(0)) // local_ranks))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu = choose_gpu(settings.device, int(os.environ.get("LOCAL_RANK", "0")), local_ranks, gpus)
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    if gpu is not None:
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo" if gpu is None else "cpu:gloo,cuda:nccl")
    # DDP averages dense gradients over the ranks; "mean" does the same for those of the tables.
    sok.init(gradient="mean", seed=settings.seed)
    model = TorchModel(settings, device)
    metrics = training.run("PyTorch", model, TorchRanks(), settings, gpu=gpu, local_ranks=local_ranks)
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


if __name__ == "__main__":
    main()
