# SPDX-License-Identifier: Apache-2.0
"""Peer: tf.nn.embedding_lookup_sparse fed with RaggedTensors, as tensorflow_frontend_ragged is."""

from __future__ import annotations

from benchmarks.subjects import tf_embedding_lookup_sparse
from benchmarks.subjects.tensorflow_inputs import ragged_inputs


class Subject(tf_embedding_lookup_sparse.Subject):
    make_inputs = staticmethod(ragged_inputs)
