# SPDX-License-Identifier: Apache-2.0
"""The project's core on a GPU, called as a frontend calls it: arguments made once, memory from PyTorch's allocator."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from benchmarks.cases import Batch, Case
from sparse_operation_kit import core
from sparse_operation_kit.core import _abi, _arrays, _library

DEVICE = torch.device("cuda", 0)

# Tensors are Any here: what the binding takes on a GPU it knows by __cuda_array_interface__, and its types say NumPy.


class Subject:
    takes_any_bags = True
    version = f"core {core.build_info()}"

    def __init__(self, case: Case, batches: list[Batch], optimizer: str, dtype: str) -> None:
        self.library = _abi.library()
        self.errors = core.ErrorRecord(0)
        stream = torch.cuda.current_stream(DEVICE)
        allocate, release = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
        self.context = core.Context(
            device=0,
            stream=stream.cuda_stream,
            errors=self.errors,
            empty=lambda shape, dtype: torch.empty(shape, dtype=dtype, device=DEVICE),
            allocate=lambda size: allocate(size, DEVICE, stream),
            release=release,
        )
        shape = (case.rows, case.dimension)
        self.alive: list[Any] = []
        weights = [torch.empty(shape, device=DEVICE).uniform_(-0.05, 0.05) for _ in range(case.tables)]
        self.weights = [weight.to(getattr(torch, dtype)) for weight in weights]
        del weights
        self.outputs: Any = torch.empty((case.tables, case.batch, case.dimension), device=DEVICE)
        self.gradients: Any = torch.randn((case.tables, case.batch, case.dimension), device=DEVICE)
        state_shapes: dict[str, list[tuple[int, ...]]] = {
            "sgd": [],
            "rowwise_adagrad": [(case.rows,)],
            "adagrad": [shape],
            "adam": [shape, shape],
        }
        states = [[torch.zeros(s, device=DEVICE) for s in state_shapes[optimizer]] for _ in range(case.tables)]
        self.alive.append(states)
        settings = core.Optimizer(optimizer, 0.01, beta1=0.9, beta2=0.999, epsilon=1e-8).struct()
        # PyTorch describes no bfloat16 array to others: its bits are shown as those of float16.
        bits: list[Any] = [w.view(torch.float16) if w.dtype == torch.bfloat16 else w for w in self.weights]
        tables = [core.Table(weight, name=f"table{t}").columns() for t, weight in enumerate(bits)]
        for table in tables:
            table.weight.dtype = _abi.BFLOAT16 if dtype == "bfloat16" else table.weight.dtype
        self.tables = (_abi.Columns * case.tables)(*tables)
        self.calls = [self._make_call(case, batch, settings, states) for batch in batches]
        self.num_tables = case.tables

    def _make_call(self, case: Case, batch: Batch, settings: Any, states: list[list[Any]]) -> tuple[Any, Any]:
        splits: Any = torch.from_numpy(batch.row_splits).to(DEVICE)
        lookups = (_abi.Lookup * case.tables)()
        updates = (_abi.Update * case.tables)()
        combiner = {"sum": _abi.SUM, "mean": _abi.MEAN}[case.combiner]
        for t in range(case.tables):
            keys: Any = torch.from_numpy(batch.keys[t]).to(DEVICE)
            weights: Any = None if batch.weights is None else torch.from_numpy(batch.weights[t]).to(DEVICE)
            weights_view = _arrays.absent() if weights is None else _arrays.view(weights)
            lookup = lookups[t]
            lookup.struct_size, lookup.table, lookup.combiner = ctypes.sizeof(_abi.Lookup), t, combiner
            lookup.keys, lookup.row_splits = _arrays.view(keys), _arrays.view(splits)
            lookup.slots, lookup.weights = _arrays.absent(), weights_view
            lookup.output = _arrays.view(self.outputs[t])
            part = (_abi.Gradient * 1)(_abi.Gradient(ctypes.sizeof(_abi.Gradient), combiner, 0))
            part[0].slots, part[0].values = _arrays.view(keys), _arrays.view(self.gradients[t])
            part[0].row_splits, part[0].weights = _arrays.view(splits), weights_view
            update = updates[t]
            update.struct_size, update.gradient_scale = ctypes.sizeof(_abi.Update), 1.0
            update.table, update.optimizer = ctypes.pointer(self.tables[t]), ctypes.pointer(settings)
            update.num_states, update.num_gradients = len(states[t]), 1
            for s in range(_abi.MAX_STATES):
                update.states[s] = _arrays.view(states[t][s]) if s < len(states[t]) else _arrays.absent()
            update.gradients = ctypes.cast(part, ctypes.POINTER(_abi.Gradient))
            self.alive += [keys, splits, weights, part, settings]
        return lookups, updates

    def forward(self, i: int) -> None:
        lookups, _ = self.calls[i % len(self.calls)]
        context = ctypes.byref(self.context.struct)
        _library.check(self.library.sok_gather_combine(context, self.num_tables, self.tables, self.num_tables, lookups))

    def step(self, i: int) -> None:
        self.forward(i)
        _, updates = self.calls[i % len(self.calls)]
        context = ctypes.byref(self.context.struct)
        _library.check(self.library.sok_apply(context, self.num_tables, updates, _abi.AGREE(), None))

    def finish(self) -> None:
        torch.cuda.synchronize()
        self.errors.check()
        self.errors.close()
