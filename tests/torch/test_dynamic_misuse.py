# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a lookup is found before a dynamic table changes, and no gradient reads another key's row."""

import pytest
import torch

import sparse_operation_kit.torch as sok

WRONG = {
    "splits that fall": lambda keys: (keys, torch.tensor([0, 3, 2, 4])),
    "splits that end early": lambda keys: (keys, torch.tensor([0, 1, 2, 3])),
    "splits that end late": lambda keys: (keys, torch.tensor([0, 1, 2, 5])),
    "splits that begin late": lambda keys: (keys, torch.tensor([1, 1, 2, 4])),
    "negative splits": lambda keys: (keys, torch.tensor([0, -1, 2, 4])),
    "splits of integers of 32 bits": lambda keys: (keys, torch.tensor([0.0, 1, 2, 4])),
    "keys of floats": lambda keys: (keys.float(), torch.tensor([0, 1, 2, 4])),
    "keys of two dimensions": lambda keys: (keys[None], torch.tensor([0, 1, 2, 4])),
    "no splits": lambda keys: (keys, torch.tensor([], dtype=torch.int64)),
}
WEIGHTS = {"too few": torch.ones(3), "of integers": torch.ones(4, dtype=torch.int64), "too many": torch.ones(2, 4)}


@pytest.mark.parametrize("concat", [False, True])
@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("wrong", [*WRONG, *(f"weights {which}" for which in WEIGHTS), "bags"])
def test_wrong_lookups_insert_nothing(wrong, position, concat):
    """Of a trained table, one that is only read, and a static one in the same call."""
    table, frozen = (sok.DynamicVariable(5, name=name, trainable=name == "t") for name in ("t", "f"))
    static = sok.Variable(shape=(60, 5), name="s")
    right = [(torch.tensor([i, 5, -6, 7 + i]).abs(), torch.tensor([0, 1, 2, 4])) for i in range(3)]
    given, weights = list(right), [None] * 3
    if wrong.startswith("weights"):
        weights[position] = WEIGHTS[wrong.removeprefix("weights ")]
    elif wrong == "bags":
        given[position] = (given[position][0], torch.tensor([0, 4]))
    else:
        given[position] = WRONG[wrong](given[position][0])
    tables = [table, frozen, static]
    if wrong == "bags" and not concat:
        sok.lookup_sparse(tables, given, weights)
        return
    with pytest.raises((ValueError, TypeError)):
        sok.lookup_sparse(tables, given, weights, concat=concat)
    assert table.size == 0 == frozen.size and table.shape == (0, 5) and table.statistics().lookups == 0
    sok.lookup_sparse(tables, right, concat=concat)
    assert table.size == 4


def test_a_refused_gradient_leaves_no_states_behind():
    """Of tables that are stepped row by row; a GPU refuses it after the states were made."""
    tables = [sok.DynamicVariable(1, "zeros", name=name, max_capacity=2) for name in "st"]
    optimizer = sok.OptimizerWrapper(torch.optim.RAdam(tables, lr=0.01))
    sum(sok.all2all_dense_embedding(table, torch.tensor([1])).sum() for table in tables).backward()
    for key in (2, 3):
        sok.all2all_dense_embedding(tables[1], torch.tensor([key]))
    with pytest.raises(RuntimeError, match=r"table 't': a row of this gradient was erased or evicted"):
        optimizer.step()
        sok.check_errors()
    if not tables[0].is_cuda:
        assert [table._states for table in tables] == [[], []]


@pytest.mark.parametrize("how", ["evicted", "erased", "evicted and back"])
def test_gradients_of_weights_whose_rows_are_gone(how):
    """They are refused, or right."""
    table = sok.DynamicVariable(2, "normal", name="t", max_capacity=4)
    weights = torch.tensor([1.0, 2.0], requires_grad=True)
    output = sok.lookup_sparse(table, (torch.tensor([1, 2]), torch.tensor([0, 2])), weights, "sum")
    other = sok.lookup_sparse(table, (torch.tensor([3, 4]), torch.tensor([0, 2])), weights, "sum")
    rows = table.detach().clone()
    if how == "erased":
        table.erase([2])
    else:
        table._core.end_step()
        for key in (3, 4, 5) if how == "evicted" else (3, 4, 5, 1):
            sok.all2all_dense_embedding(table, torch.tensor([key]))
        assert (1 in table.indices) == (how != "evicted")
    with pytest.raises(RuntimeError, match=r"table 't': a row of this gradient was erased or evicted"):
        output.sum().backward()
    other.sum().backward()
    assert torch.equal(weights.grad, rows[2:].sum(dim=1))
