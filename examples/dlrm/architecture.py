# SPDX-License-Identifier: Apache-2.0
"""The DLRM that both trainers build: sizes, and initial values of the dense layers.

bottom MLP of the dense features -> one vector of the embedding dimension, beside one vector for each of the 26 columns;
dot products of all pairs of these 27 vectors; top MLP of the bottom vector and the products -> the logit of a click.
ReLU follows every layer but the last. (Naumov et al. 2019, "Deep Learning Recommendation Model".)
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt

from . import columns


@dataclasses.dataclass(frozen=True)
class Layer:
    """Initial values of a fully connected layer: kernel [inputs, outputs] and bias [outputs], float32."""

    kernel: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Sizes of the model."""

    embedding_dim: int = 16
    bottom_hidden: tuple[int, ...] = (64,)
    top_hidden: tuple[int, ...] = (128, 64)

    @property
    def vectors(self) -> int:
        """Vectors that interact: one a column and the bottom MLP's."""
        return len(columns.CATEGORICAL) + 1

    @property
    def pairs(self) -> npt.NDArray[np.int64]:
        """Places of the pairs i > j in the flattened [vectors, vectors] matrix of dot products."""
        row, column = np.tril_indices(self.vectors, -1)
        return row.astype(np.int64) * self.vectors + column

    @property
    def places_of_pairs(self) -> npt.NDArray[np.int64]:
        """Of each element of that matrix its place among the pairs; the number of pairs where it is none of them."""
        places = np.full(self.vectors**2, len(self.pairs), np.int64)
        places[self.pairs] = np.arange(len(self.pairs))
        return places

    def bottom_layers(self, seed: int) -> list[Layer]:
        """Initial values of the bottom MLP."""
        return _layers((len(columns.DENSE), *self.bottom_hidden, self.embedding_dim), [seed, 10])

    def top_layers(self, seed: int) -> list[Layer]:
        """Initial values of the top MLP."""
        inputs = self.embedding_dim + len(self.pairs)
        return _layers((inputs, *self.top_hidden, 1), [seed, 11])


def _layers(sizes: tuple[int, ...], seed: list[int]) -> list[Layer]:
    generator = np.random.default_rng(seed)
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        limit = np.sqrt(6.0 / (inputs + outputs))  # Glorot and Bengio 2010
        kernel = generator.uniform(-limit, limit, (inputs, outputs)).astype(np.float32)
        layers.append(Layer(kernel, np.zeros(outputs, np.float32)))
    return layers
