# SPDX-License-Identifier: Apache-2.0
"""Checks of torch_worker.py and torch_gpu_worker.py, and of a process alone, about faults.FAULTS on each rank."""

import faults
import torch

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import stamps
from sparse_operation_kit.torch.errors import PeerError


class Job:
    """Tables and their optimizer, and what a step of a batch is."""

    def __init__(self, device, optimizer=lambda tables: torch.optim.Adagrad(tables, lr=0.1)):
        self.device = device
        self.tables = [
            sok.Variable(
                shape=(rows, dimension),
                initializer="uniform",
                mode=faults.mode(t, sok.num_ranks()),
                name=name,
                device=device,
            )
            for t, (rows, dimension, name) in enumerate(zip(faults.ROWS, faults.DIMENSIONS, faults.NAMES, strict=True))
        ]
        for table in self.tables:
            stamps.start(table)
        self.optimizer = sok.OptimizerWrapper(optimizer(self.tables))

    def forward(self, batches):
        """(outputs, keys of the first lookup)"""
        ids = [None if x.keys is None else (self.tensor(x.keys), self.tensor(x.row_splits)) for x in batches]
        weights = [None if x.weights is None else self.tensor(x.weights) for x in batches]
        tables = [self.tables[t] for t in faults.TABLES]
        return sok.lookup_sparse(tables, ids, weights, faults.COMBINERS), ids[0][0]

    def tensor(self, array):
        return torch.tensor(array).to(self.device)  # PyTorch's own memory: lookups copy that of others

    def step(self, batches, fault=None):
        """fault: the name of one of the backward pass or of the step."""
        self.optimizer.zero_grad()
        outputs, keys = self.forward(batches)
        if fault == "ids overwritten":
            keys.zero_()
        sum(output.square().sum() for output in outputs).backward()
        if fault is not None and fault.startswith("gradient"):
            self.tables[0].grad = self.wrong_gradient(fault)
        with self.spoiled(fault):
            self.optimizer.step()
        sok.check_errors()

    def spoiled(self, fault):
        if fault == "state of another shape":
            return _Replaced(self.optimizer.state[self.tables[0]], "sum", torch.zeros(3, 2, device=self.device))
        if fault == "learning rate that is none":
            return _Replaced(self.optimizer.param_groups[0], "lr", "fast")
        return _Replaced({"": None}, "", None)

    def wrong_gradient(self, fault):
        shape = self.tables[0].shape
        if fault == "gradient that does not fit":
            return torch.ones(shape, device=self.device).to_sparse()
        slots, values = torch.tensor([[99, 0]], device=self.device), torch.ones(2, shape[1], device=self.device)
        return torch.sparse_coo_tensor(slots, values, shape, check_invariants=False)

    def everything(self):
        """Rows, states and stamps, bit for bit."""
        stamped = [stamps.of(table).cpu().numpy() for table in self.tables]
        return [array.tobytes() for array in (*self.values(), *stamped)]

    def values(self):
        """Rows and states; no step counts on a GPU: where an error is raised later, steps were counted meanwhile."""
        states = [item for table in self.tables for item in self.optimizer.state[table].items()]
        kept = [value for name, value in states if name != "step" or self.device.type == "cpu"]
        return [tensor.detach().cpu().numpy() for tensor in (*self.tables, *kept)]


class _Replaced:
    """An item of a dictionary, within a block."""

    def __init__(self, items, key, value):
        self.items, self.key, self.value = items, key, value

    def __enter__(self):
        self.before = self.items[self.key]
        self.items[self.key] = self.value

    def __exit__(self, *_):
        self.items[self.key] = self.before


def run(device):
    """See faults.on_each_rank."""

    def is_right(error, own):
        return not isinstance(error, PeerError) if own else isinstance(error, RuntimeError)

    def not_of_gradients(fault):
        return fault.phase == "forward" or not ("gradient" in fault.name or "ids" in fault.name)

    faults.on_each_rank(lambda: Job(device), sok.rank(), sok.num_ranks(), lambda fault: False, is_right)
    # Its rows are PyTorch's to step, and what is wrong with its states and settings is found after the first of them.
    unfused = lambda tables: torch.optim.Adadelta(tables, lr=0.1)  # noqa: E731
    faults.on_each_rank(lambda: Job(device, unfused), sok.rank(), sok.num_ranks(), not_of_gradients, is_right)


def faults_on_each_rank():
    run(torch.device("cpu"))
