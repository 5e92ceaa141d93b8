# SPDX-License-Identifier: Apache-2.0
"""Planning of the hybrid-parallel layer (`dist_model_parallel` of both frontends), without a framework."""

from .strategy import STRATEGIES as STRATEGIES
from .strategy import DistEmbeddingStrategy as DistEmbeddingStrategy
from .strategy import Piece as Piece
