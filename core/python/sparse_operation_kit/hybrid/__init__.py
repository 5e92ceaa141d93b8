# SPDX-License-Identifier: Apache-2.0
"""Planning of the hybrid-parallel layer (`dist_model_parallel` of both frontends), without a framework."""

from .plans import Plan as Plan
from .plans import plan as plan
from .report import Report as Report
from .request import Constraint as Constraint
from .search import PlanError as PlanError
from .strategy import STRATEGIES as STRATEGIES
from .strategy import Assignment as Assignment
from .strategy import DistEmbeddingStrategy as DistEmbeddingStrategy
from .strategy import Piece as Piece
from .topology import CPU as CPU
from .topology import H100 as H100
from .topology import H200 as H200
from .topology import Topology as Topology
