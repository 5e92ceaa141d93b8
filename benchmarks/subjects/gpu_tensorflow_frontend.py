# SPDX-License-Identifier: Apache-2.0
"""The project's TensorFlow frontend on a GPU: lookup_sparse of ragged ids in a tf.function, OptimizerWrapper.

Each batch is part of a tf.function of its own, as where a function takes its batches from an iterator (Keras's fit
does): as arguments of the function the ids cost Python more than the step takes, about 60 us for each ragged tensor.
Runs in a process of its own (benchmarks.gpu_alone).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from benchmarks.cases import Batch, Case
from benchmarks.subjects.tensorflow_inputs import MakeIds, functions, make_optimizer, ragged_inputs


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A batch: what makes its ids within a function, and float32 weights [tables, keys of one], where it has any."""

    make_ids: MakeIds
    weights: tf.Tensor | None


class Subject:
    takes_any_bags = True
    concat = False
    concrete = False
    """Whether it calls what get_concrete_function() gives, which has no arguments to look at in Python."""
    steps_per_call = 1
    """Steps in one call of a tf.function, as Keras's steps_per_execution has them."""
    version = f"tensorflow {tf.__version__}"

    def __init__(self, case: Case, batches: list[Batch], optimizer: str, dtype: str) -> None:
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)  # PyTorch's subjects are on the same GPU
        sok.init()
        with tf.device("GPU:0"):
            self.tables = self.make_tables(case, dtype)
            self.inputs = [
                Inputs(make_ids, None if batch.weights is None else tf.constant(self.stacked(batch.weights)))
                for make_ids, batch in zip(self.make_inputs(batches), batches, strict=True)
            ]
            width = case.dimension * (case.tables if self.concat else 1)
            gradients = [tf.random.normal((case.batch, width)) for _ in range(1 if self.concat else case.tables)]
        self.combiners = [case.combiner] * len(self.tables)
        update = self.make_update(optimizer)

        def step(inputs: Inputs) -> None:
            with tf.GradientTape() as tape:
                result = self.lookup(inputs)
            update(tape.gradient(result, self.tables, output_gradients=gradients))

        def train(group: list[Inputs]) -> None:
            for inputs in group:
                step(inputs)

        groups = [[inputs] for inputs in self.inputs]
        if self.steps_per_call > 1:
            groups = [list(itertools.islice(itertools.cycle(self.inputs), self.steps_per_call))]
        self._forward = functions(lambda group: [self.lookup(inputs) for inputs in group], groups)
        self._step = functions(train, groups)
        if self.concrete:
            self._forward = [function.get_concrete_function() for function in self._forward]
            self._step = [function.get_concrete_function() for function in self._step]

    def make_tables(self, case: Case, dtype: str) -> list[Any]:
        return [self.make_table(case, t, dtype) for t in range(case.tables)]

    def make_inputs(self, batches: list[Batch]) -> list[MakeIds]:
        return ragged_inputs([dataclasses.replace(b, keys=list(map(self.ids_of, b.keys))) for b in batches])

    def make_update(self, optimizer: str) -> Callable[[list[Any]], Any]:
        """What applies the gradients of the tables."""
        wrapped = make_optimizer(optimizer)
        return lambda slices: wrapped.apply_gradients(zip(slices, self.tables, strict=True))

    def lookup(self, inputs: Inputs) -> list[tf.Tensor]:
        ids, weights = inputs.make_ids(), None
        if inputs.weights is not None:
            weights = [each.with_values(inputs.weights[table]) for table, each in enumerate(ids)]
        result = sok.lookup_sparse(self.tables, ids, weights, combiners=self.combiners, concat=self.concat)
        return [result] if self.concat else result

    def make_table(self, case: Case, table: int, dtype: str) -> Any:
        shape = [case.rows, case.dimension]
        return sok.Variable(shape=shape, initializer="uniform", dtype=dtype, name=f"table{table}")

    @staticmethod
    def ids_of(numbers: np.ndarray) -> np.ndarray:
        return numbers

    @staticmethod
    def stacked(weights: list[np.ndarray]) -> np.ndarray:
        """The weights of all tables, a row for each tensor of ids."""
        return np.stack(weights)

    def forward(self, i: int) -> None:
        """Looks batch i up, or `steps_per_call` batches."""
        self._forward[i % len(self._forward)]()

    def step(self, i: int) -> None:
        """Trains with batch i, or with `steps_per_call` batches."""
        self._step[i % len(self._step)]()

    def wait(self) -> None:
        """Until the GPU has done what was called."""
        sok.check_errors()
