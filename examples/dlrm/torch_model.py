# SPDX-License-Identifier: Apache-2.0
"""The DLRM in PyTorch: model, optimizer, one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import sparse_operation_kit.torch as sok

from . import columns, dense_file
from .architecture import Layer
from .devices import choose_gpu
from .features import Batch
from .keyed_ids import KeyedIds
from .settings import ADAGRAD_ACCUMULATOR, ADAGRAD_EPSILON, Settings


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A batch where the model is."""

    global_rows: int
    labels: torch.Tensor
    dense: torch.Tensor
    ids: KeyedIds[torch.Tensor]


class Dlrm(nn.Module):
    """Embedding tables between two dense networks that every rank has whole.

    tables: gives the vectors [n, 26 * dimension] for the ids of 26 columns.
    """

    def __init__(self, tables: nn.Module, settings: Settings) -> None:
        super().__init__()
        architecture = settings.architecture()
        self.tables = tables
        self.bottom = _mlp(architecture.bottom_layers(settings.seed), last_is_linear=False)
        self.top = _mlp(architecture.top_layers(settings.seed), last_is_linear=True)
        self.vectors = architecture.vectors
        self.pairs: torch.Tensor
        self.register_buffer("pairs", torch.tensor(architecture.pairs), persistent=False)
        self._logits = torch.compile(self._interact) if settings.compiled else self._interact

    def forward(self, dense: torch.Tensor, ids: KeyedIds[torch.Tensor]) -> torch.Tensor:
        """Logits [n] of rows with dense features [n, 13] and the ids of 26 columns."""
        logits: torch.Tensor = self._logits(dense, self.tables(ids))
        return logits

    def _interact(self, dense: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """embedded: the vectors of all columns, side by side."""
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom, embedded], dim=1).unflatten(1, (self.vectors, -1))
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        features = torch.cat([bottom, products.index_select(1, self.pairs)], dim=1)
        logits: torch.Tensor = self.top(features)
        return logits.squeeze(1)


def _tables(settings: Settings) -> sok.EmbeddingBagCollection:
    """Those of the 26 columns, sharded over the ranks."""
    sizes = zip(columns.CATEGORICAL, settings.table_rows(), strict=True)
    tables = {name: _table(name, rows, settings) for name, rows in sizes}
    return sok.EmbeddingBagCollection(tables, combiners="sum", initializer="uniform", concat=True)


def _table(name: str, rows: int | None, settings: Settings) -> Any:
    """What a collection makes a table of, or the table."""
    if rows is None:
        return sok.DynamicVariable(settings.embedding_dim, "uniform", name=name, max_capacity=settings.max_table_rows)
    return rows, settings.embedding_dim


class Copies:
    """Copies batches to a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # On a stream of their own they do not wait for the step, nor the step for them.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def prepare(self, batch: Batch) -> Prepared:
        """See training.Model."""
        arrays = (batch.labels, batch.dense, batch.ids.values(), batch.ids.offsets())
        tensors = [torch.from_numpy(array) for array in arrays]
        if self._stream is None:
            labels, dense, ids, offsets = (tensor.clone() for tensor in tensors)
        else:
            with torch.cuda.stream(self._stream):
                labels, dense, ids, offsets = (tensor.to(self._device, non_blocking=True) for tensor in tensors)
            for tensor in (labels, dense, ids, offsets):
                tensor.record_stream(torch.cuda.default_stream(self._device))  # which the step runs on
            self._stream.synchronize()
        return Prepared(batch.global_rows, labels, dense, batch.ids.of(ids, offsets))


class TorchModel:
    """The model on this rank, with its optimizer. Implements training.Model."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._device = device
        self._copies = Copies(device)
        self._is_mixed = settings.precision == "bfloat16"
        set_precision(settings)
        with device:
            model = self._dlrm = Dlrm(_tables(settings), settings)
        self._optimizer = sok.OptimizerWrapper(make_optimizer(model.parameters(), settings))
        self._model: nn.Module = model
        if sok.num_ranks() > 1:
            # Averages the gradients of the dense layers. The tables are not replicated: they are none of its business.
            self._model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)

    def prepare(self, batch: Batch) -> Prepared:
        """See training.Model."""
        return self._copies.prepare(batch)

    def train(self, batch: Prepared) -> SupportsFloat:
        """See training.Model."""
        logits = self._forward(batch)
        total = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
        # The average of this over the ranks is the mean over the global batch, however its rows are spread.
        loss = total * (sok.num_ranks() / batch.global_rows)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return Later(total.detach())

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


class Later:
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


def _mlp(layers: list[Layer], *, last_is_linear: bool) -> nn.Sequential:
    modules: list[nn.Module] = []
    for layer in layers:
        linear = nn.Linear(*layer.kernel.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(layer.kernel.T))
            linear.bias.copy_(torch.from_numpy(layer.bias))
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*(modules[:-1] if last_is_linear else modules))


def choose_device(device: str, local_rank: int, local_ranks: int) -> tuple[int | None, torch.device]:
    """The number of this rank's GPU, which is the current one from now on, or None; and the device."""
    gpu = choose_gpu(device, local_rank, local_ranks, torch.cuda.device_count())
    if gpu is None:
        return None, torch.device("cpu")
    torch.cuda.set_device(gpu)
    return gpu, torch.device("cuda", gpu)


def set_precision(settings: Settings) -> None:
    """Of products of float32 matrices, for the whole process."""
    torch.set_float32_matmul_precision("high" if settings.precision == "tf32" else "highest")


def make_optimizer(parameters: Iterable[nn.Parameter], settings: Settings) -> torch.optim.Optimizer:
    """The optimizer of the settings."""
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=settings.learning_rate)
    return torch.optim.Adagrad(
        parameters,
        lr=settings.learning_rate,
        initial_accumulator_value=ADAGRAD_ACCUMULATOR,
        eps=ADAGRAD_EPSILON,
    )
