# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.dlrm.auc import StreamingAuc


def exact(scores, labels):
    """By the definition: the fraction of (negative, positive) pairs in order, a tie counting half."""
    negative, positive = scores[labels == 0][:, None], scores[labels == 1][None, :]
    return np.mean((positive > negative) + 0.5 * (positive == negative))


@given(st.lists(st.tuples(st.integers(0, 64), st.booleans()), min_size=1, max_size=80), st.integers(1, 4))
def test_equals_the_definition_however_rows_are_spread(rows, parts):
    scores = np.array([score for score, _ in rows]) / 64
    labels = np.array([label for _, label in rows]).astype(np.float32)
    total = StreamingAuc()
    counts: Any = 0
    for part in range(parts):
        auc = StreamingAuc()
        auc.update(scores[part::parts], labels[part::parts])
        counts = counts + auc.counts
    total.load(counts)
    if labels.min() == labels.max():
        assert np.isnan(total.value())
    else:
        assert total.value() == pytest.approx(exact(scores, labels), abs=1e-12)


def test_bins_cost_little():
    generator = np.random.default_rng(0)
    scores = generator.random(3000)
    labels = (generator.random(3000) < scores).astype(np.float32)
    auc = StreamingAuc()
    auc.update(scores, labels)
    assert auc.value() == pytest.approx(exact(scores, labels), abs=1e-4)


@pytest.mark.parametrize("scores", [[1.5], [-0.1], [float("nan")]])
def test_scores_outside_of_the_range_are_refused(scores):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        StreamingAuc().update(np.array(scores), np.zeros(1))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="one length"):
        StreamingAuc().update(np.zeros(2), np.zeros(3))
