# SPDX-License-Identifier: Apache-2.0
"""Checks of torch_worker.py: stacks of tables on several ranks."""

import datetime

import numpy as np
import stacked
import torch
from torch_model import whole
from torch_saving import shared_folder

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch.errors import PeerError


def _made(mode, initializer="normal"):
    shapes = {name: (rows, stacked.DIMENSION) for name, rows in stacked.ROWS.items()}
    options = {"initializer": initializer, "mode": mode}
    return sok.TableStack(shapes, **options), [sok.Variable(shape=s, name=n, **options) for n, s in shapes.items()]


def _check_rows(stack, tables):
    for member, table in zip(stack.members.values(), tables, strict=True):
        np.testing.assert_allclose(member.numpy(), table.detach().numpy(), rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(whole(member).numpy(), whole(table).numpy(), rtol=2e-6, atol=2e-6)


def stacks():
    """Outputs, steps, dumps and changed rows of a stack are those of its tables by themselves."""
    rank = sok.rank()
    for mode, combiner in zip(stacked.modes(sok.num_ranks()), stacked.COMBINERS, strict=False):
        stack, tables = _made(mode)
        _check_rows(stack, tables)
        optimizers = [sok.OptimizerWrapper(torch.optim.Adam(p, lr=0.1)) for p in ([stack], tables)]
        for step in range(3):
            keys, lengths = stacked.batch(rank, step)
            values, offsets = map(torch.from_numpy, stacked.flat(keys, lengths))
            each = [(torch.from_numpy(keys[n]), torch.from_numpy(stacked.splits(lengths[n]))) for n in keys]
            output = sok.lookup_sparse(stack, (values, offsets), combiners=combiner)
            expected = torch.cat(sok.lookup_sparse(tables, each, combiners=combiner), dim=1)
            np.testing.assert_allclose(output.detach().numpy(), expected.detach().numpy(), rtol=1e-5, atol=1e-5)
            loss = torch.from_numpy(stacked.loss_weights(rank, step, tuple(output.shape)))
            for optimizer, vectors in zip(optimizers, (output, expected), strict=True):
                optimizer.zero_grad()
                (vectors * loss).sum().backward()
                optimizer.step()
        _check_rows(stack, tables)
        folder = shared_folder()
        sok.dump(f"{folder}/stack", stack, optimizers[0], progress=False)
        new_stack, new_tables = _made(mode, "zeros")
        sok.load(f"{folder}/stack", new_tables, progress=False)
        sok.dump(f"{folder}/tables", new_tables, progress=False)
        sok.load(f"{folder}/tables", new_stack, progress=False)
        assert torch.equal(new_stack, stack)
        sok.track_changes(stack)
        torch.distributed.barrier()  # tracked by all before the earliest threshold
        since = datetime.datetime.now(datetime.timezone.utc)
        member = stack.member("large")
        mine = torch.arange(40)[member.placement.mine(torch.arange(40))]
        sok.assign(member, mine, torch.full((len(mine), stacked.DIMENSION), 2.0))
        changed, rows = sok.incremental_model_dump(stack, since)
        assert [len(each) for each in changed] == [0, 0, 40, 0] and (rows[2] == 2).all()
        sok.load_incremental((changed, rows), new_stack)
        assert (whole(new_stack.member("large")) == 2).all()
        assert torch.equal(new_stack.member("last"), stack.member("last"))


def wrong_keys_of_members():
    """A key outside its member on one rank is that rank's IndexError, and a PeerError of the others."""
    stack, _ = _made(None)
    last = sok.num_ranks() - 1
    before = stack.detach().clone()
    good = (torch.tensor([0, 0, 39, 1]), torch.arange(5))
    for ids, error, message in (
        ((torch.tensor([0, 1, 39, 1]), torch.arange(5)), IndexError, "table 'one': key 1 is outside [0, 1)"),
        ((torch.tensor([0, 1, 2, 3, 4]), torch.arange(6)), ValueError, "5 bags, and its stack 4 tables"),
    ):
        try:
            sok.lookup_sparse(stack, ids if sok.rank() == last else good)
        except (IndexError, ValueError, PeerError) as caught:
            own = sok.rank() == last
            assert isinstance(caught, error if own else PeerError), repr(caught)
            assert message in str(caught) if own else f"rank {last}" in str(caught), str(caught)
        else:
            raise AssertionError("no error")
    assert sok.lookup_sparse(stack, good).shape == (1, 16)
    assert torch.equal(stack.detach(), before)


class _Keyed:
    def __init__(self, names, values, offsets):
        self.keys, self.values, self.offsets = (lambda: names), (lambda: values), (lambda: offsets)


def wrong_inputs_of_a_collection():
    """What a collection refuses on one rank, before it looks anything up, is a PeerError of the others."""
    last = sok.num_ranks() - 1
    one = torch.tensor([[0]])
    good = {"a": one, "b": one}
    calls = (
        ((good, {"b": torch.ones(3)}), ValueError),
        (({"a": one, "b": one[None]},), ValueError),
        (({"a": one},), KeyError),
        (({"a": one, "b": [0]},), TypeError),
        (({"a": one, "b": one.float()},), TypeError),
        ((_Keyed(["b", "a"], torch.tensor([0, 1]), torch.arange(4)),), ValueError),
        ((_Keyed(["b", "c"], torch.tensor([0, 1]), torch.arange(3)),), KeyError),
        ((_Keyed(["b", "a"], torch.tensor([0, 1]), torch.arange(3)), {}), TypeError),
    )
    for stack in (True, False):
        collection = sok.EmbeddingBagCollection({"a": (5, 4), "b": (30, 4)}, stack=stack)
        for arguments, kind in calls:
            try:
                collection(*(arguments if sok.rank() == last else (good,)))
            except (kind, PeerError) as caught:
                told = isinstance(caught, kind) if sok.rank() == last else f"rank {last}" in str(caught)
                assert told, repr(caught)
            else:
                raise AssertionError("no error")
        assert collection(good)["a"].shape == (1, 4)


def features_of_other_batches():
    """Features that have batches of different sizes, on all ranks or on one alone."""
    last, rank = sok.num_ranks() - 1, sok.rank()
    made = [sok.EmbeddingBagCollection({"a": (5, 4), "b": (30, 4)}, stack=stack) for stack in (True, False)]
    optimizers = [sok.OptimizerWrapper(torch.optim.SGD(each.parameters(), lr=0.5)) for each in made]
    for sizes in ([(2, 2)] * last + [(2, 3)], [(0, 1)] + [(1, 1)] * last, [(i, 2 * i + 1) for i in range(last + 1)]):
        ids = {
            feature: ((torch.arange(size) + rank) % 5, torch.arange(size + 1))
            for feature, size in zip("ab", sizes[rank], strict=True)
        }
        weights = {"b": torch.arange(1.0, sizes[rank][1] + 1)}
        outputs = []
        for collection, optimizer in zip(made, optimizers, strict=True):
            outputs.append(collection(ids, weights))
            optimizer.zero_grad()
            sum((vectors * (i + 2.0)).sum() for i, vectors in enumerate(outputs[-1].values())).backward()
            optimizer.step()
        for feature, size in zip("ab", sizes[rank], strict=True):
            assert outputs[0][feature].shape == (size, 4)
            assert torch.equal(*(each[feature] for each in outputs))
        for table in "ab":
            stacked_rows, rows = (whole(each.tables[table]).numpy() for each in made)
            np.testing.assert_allclose(stacked_rows, rows, rtol=1e-6)
    collection = sok.EmbeddingBagCollection({"a": (5, 4), "b": (30, 4)}, concat=True)
    good = {"a": torch.tensor([[0]]), "b": torch.tensor([[1]])}
    try:
        collection({**good, "b": torch.tensor([[1], [2]])} if rank == last else good)
    except (ValueError, PeerError) as caught:
        assert "['a', 'b'] have [1, 2]" in str(caught) if rank == last else f"rank {last}" in str(caught), caught
    else:
        raise AssertionError("no error")
    assert collection(good).shape == (1, 8)
