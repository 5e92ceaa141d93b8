# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from examples.dlrm import columns
from examples.dlrm.planted import PlantedRule

SIZES = columns.table_rows(40)


@pytest.fixture(scope="module")
def rule():
    return PlantedRule(SIZES, 13, seed=5)


def logit(rule, ids=None, present=None, dense=None):
    ids = np.zeros(26, np.int64) if ids is None else ids
    present = np.ones(26, np.bool_) if present is None else present
    dense = np.zeros(13) if dense is None else dense
    return rule.logits(dense[None, :], ids[None, :], present[None, :])[0]


def changed(values, *places, to):
    values = values.copy()
    values[list(places)] = to
    return values


def test_a_missing_id_does_not_matter(rule):
    present = changed(np.ones(26, np.bool_), 5, to=False)
    ids = np.zeros(26, np.int64)
    assert logit(rule, changed(ids, 5, to=3), present) == logit(rule, ids, present)
    assert logit(rule, changed(ids, 5, to=3)) != logit(rule, ids)


def effect_together(rule, left, right):
    """By how much the effect of the two columns' ids differs from the sum of the effects of each."""
    ids, present = np.ones(26, np.int64), np.ones(26, np.bool_)
    both, none = logit(rule, ids, present), logit(rule, ids, changed(present, left, right, to=False))
    alone = [logit(rule, ids, changed(present, column, to=False)) for column in (left, right)]
    return both - alone[0] - alone[1] + none


def test_some_pairs_act_together_and_others_do_not(rule):
    assert abs(effect_together(rule, 5, 13)) > 1e-3
    assert abs(effect_together(rule, 0, 1)) < 1e-12


@pytest.mark.parametrize("column", range(13))
def test_every_count_matters(rule, column):
    assert logit(rule, dense=changed(np.zeros(13), column, to=1.0)) != logit(rule)


def test_depends_on_the_seed(rule):
    assert logit(PlantedRule(SIZES, 13, seed=5)) == logit(rule)
    assert logit(PlantedRule(SIZES, 13, seed=6)) != logit(rule)
