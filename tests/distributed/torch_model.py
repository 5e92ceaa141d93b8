# SPDX-License-Identifier: Apache-2.0
"""The model that torch_worker.py trains on every rank, and the same model in one process on the joined batches."""

import copy

import reference
import torch

import sparse_operation_kit.torch as sok


def whole(table):
    """The whole table, put together from all ranks' export(); every row comes from exactly one of them."""
    keys, rows = sok.export(table)
    keys, rows = sok.communication.allgather(keys), sok.communication.allgather(rows)
    assert sorted(keys.tolist()) == list(range(table.global_shape[0]))
    result = torch.empty(table.global_shape)
    result[keys] = rows
    return result


class Model(torch.nn.Module):
    """Two tables, one of them localized, and a dense layer whose parameters start alike on every rank."""

    def __init__(self, tables=(30, 12)):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        modes = (None, f"localized:{sok.num_ranks() - 1}")
        values = [torch.randn(rows, 4, generator=generator) for rows in tables]
        self.bags = sok.EmbeddingBagCollection(
            {
                name: sok.Variable(value, name=name, mode=mode)
                for name, value, mode in zip("ab", values, modes, strict=True)
            },
            combiners="sum",
        )
        self.top = torch.nn.Linear(8, 1)
        with torch.no_grad():
            for parameter in self.top.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.whole = dict(zip("ab", values, strict=True))

    def forward(self, ids):
        return self.top(torch.cat(list(self.bags(ids).values()), 1)).squeeze(1)


def batch_of(step, rank, num_ranks, batch=12):
    """Equal shares of one global batch."""
    generator = torch.Generator().manual_seed(step)
    ids = {"a": torch.randint(0, 30, (batch, 3), generator=generator)}
    ids["b"] = torch.randint(0, 12, (batch, 1), generator=generator)
    labels = torch.randn(batch, generator=generator)
    share = slice(rank * batch // num_ranks, (rank + 1) * batch // num_ranks)
    return {name: value[share] for name, value in ids.items()}, labels[share]


def one_process(model, steps, make):
    """The same model with plain tensors, trained on the joined batches."""
    tables = {name: torch.nn.Parameter(value.clone()) for name, value in model.whole.items()}
    top = copy.deepcopy(model.top)
    optimizer = make([*tables.values(), *top.parameters()])
    for step in range(steps):
        ids, labels = batch_of(step, 0, 1)
        optimizer.zero_grad()
        vectors = [torch.nn.functional.embedding_bag(ids[name], tables[name], mode="sum") for name in "ab"]
        (top(torch.cat(vectors, 1)).squeeze(1) - labels).pow(2).mean().backward()
        optimizer.step()
    return tables, top


def check_model(model, steps, make):
    tables, top = one_process(Model(), steps, make)
    for name, wanted in tables.items():
        reference.assert_close(whole(model.bags.tables[name]), wanted.detach(), 2e-6, message=f"table {name}")
    for mine, wanted in zip(model.top.parameters(), top.parameters(), strict=True):
        reference.assert_close(mine.detach(), wanted.detach(), 2e-6, message="dense parameter")
        copies = sok.communication.allgather(mine.detach().reshape(1, -1))
        assert (copies == copies[0]).all(), "dense parameters differ between ranks"
