# SPDX-License-Identifier: Apache-2.0
"""Lookups that train nothing, of tables that hold all keys, some or none, against the reference."""

import contextlib

import numpy as np
import pytest
import reference
import torch

import sparse_operation_kit.torch as sok

DIMENSION = 5
HELD = [5, -2, 0, 17, 8, 2**31 - 1, -(2**31)]
LACKED = [-1, 6, 77]
MODES = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "recording": contextlib.nullcontext,
    "frozen": contextlib.nullcontext,
    "learned weights": contextlib.nullcontext,
}


def insert(table, keys):
    sok.all2all_dense_embedding(table, torch.tensor(keys, dtype=table.key_type))


def exported(table):
    keys, rows = sok.export(table)
    return dict(zip(keys.tolist(), rows.double().numpy(), strict=True))


def make(name, held, dtype, key_type, trainable=True):
    """(a table that holds rows which are not the initial ones, what each key of the test has there)"""
    options = {"name": name, "dtype": dtype, "key_type": key_type}
    table, initial = (sok.DynamicVariable(DIMENSION, "normal", **options) for _ in range(2))
    insert(initial, HELD + LACKED)
    if held:
        insert(table, held)
        with torch.no_grad():
            table.mul_(3)
    table.requires_grad_(trainable)
    return table, exported(initial) | exported(table)


def some_bags(generator, key_type, weighted, batch=20):
    """((values, offsets), weights): keys occur several times in a bag, some bags are empty."""
    lengths = generator.integers(0, 7, batch)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    keys = generator.choice(HELD + LACKED + LACKED, offsets[-1])
    weights = torch.from_numpy((generator.integers(1, 9, len(keys)) / 8).astype(np.float32)) if weighted else None
    return (torch.from_numpy(keys).to(key_type), torch.from_numpy(offsets)), weights


def check_unchanged(tables, before):
    for table, (rows, statistics) in zip(tables, before, strict=True):
        after = exported(table)
        assert table.statistics() == statistics and after.keys() == rows.keys()
        assert all((after[key] == row).all() for key, row in rows.items())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("key_type", [torch.int32, torch.int64], ids=str)
def test_keys_that_tables_lack(mode, dtype, key_type):
    generator = np.random.default_rng(0)
    made = [make(f"t{i}", held, dtype, key_type, mode != "frozen") for i, held in enumerate([HELD, HELD[:3], []])]
    tables, rows = map(list, zip(*made, strict=True))
    static = sok.Variable(shape=(9, DIMENSION), name="static", trainable=False)
    before = [(exported(table), table.statistics()) for table in tables]
    combiners = [combiner for combiner in reference.COMBINERS for _ in tables]
    ids, weights = map(list, zip(*(some_bags(generator, key_type, i % 2) for i in range(9)), strict=True))
    learned = [each.requires_grad_() for each in weights if mode == "learned weights" and each is not None]
    one = (torch.tensor([3]), torch.tensor([0, 1]))
    with MODES[mode]():
        outputs = sok.lookup_sparse(
            [*tables * 3, static], [*ids, one], [*weights, None], [*combiners, "sum"], training=mode == "frozen"
        )
    assert torch.equal(outputs.pop(), static[3:4].detach())
    check_unchanged(tables, before)
    incoming = [torch.from_numpy(generator.standard_normal(output.shape)).float() for output in outputs]
    gradients = iter(())
    if learned:
        tables[2].requires_grad_(True)
        insert(tables[2], LACKED)
        with torch.no_grad():
            tables[2].add_(1)  # the gradient is that of the rows that were read
        gradients = iter(torch.autograd.grad(outputs, learned, incoming))
    for i, ((keys, offsets), given, combiner) in enumerate(zip(ids, weights, combiners, strict=True)):
        of_entry = np.array([rows[i % 3][key] for key in keys.tolist()])
        given = None if given is None else given.detach().numpy()
        bags = (np.arange(len(keys)), offsets.numpy(), given, combiner)
        reference.assert_close(
            outputs[i].detach(),
            reference.pool(of_entry, *bags),
            magnitude=reference.pool(of_entry, *bags, absolute=True),
        )
        assert outputs[i].requires_grad == bool(learned)
        if learned and given is not None:
            reference.assert_close(
                next(gradients),
                reference.weight_gradient(of_entry, incoming[i], *bags),
                magnitude=reference.weight_gradient(of_entry, incoming[i], *bags, absolute=True),
            )


def test_ids_without_bags():
    table, rows = make("t", HELD, torch.float32, torch.int64)
    with torch.no_grad():
        found = sok.all2all_dense_embedding(table, torch.tensor([HELD[:3], LACKED]))
    np.testing.assert_array_equal(found.flatten(0, 1), np.stack([rows[key] for key in HELD[:3] + LACKED]).astype("f"))


def test_wrong_lookups():
    """What is wrong with a lookup is found before another table of the call changes."""
    table, _ = make("t", HELD, torch.float32, torch.int64)
    trained = sok.DynamicVariable(DIMENSION, name="trained")
    table.requires_grad_(False)
    wrong = (torch.tensor([1, 2]), torch.tensor([0, 3]))
    right = (torch.tensor([1, 2]), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="row_splits"):
        sok.lookup_sparse([trained, table], [right, wrong])
    assert trained.size == 0
    with torch.no_grad(), pytest.raises(ValueError, match="row_splits"):
        sok.lookup_sparse(table, wrong)
