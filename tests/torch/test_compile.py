# SPDX-License-Identifier: Apache-2.0
"""Under torch.compile: one graph in evaluation, a graph break around lookups in training, the same numbers in both."""

import pytest
import torch

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import dist_model_parallel as dmp


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def ids(batch, seed=0, rows=10):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (batch,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.randint(0, rows, (int(offsets[-1]),), generator=generator), offsets


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = sok.EmbeddingBagCollection(
            {"items": (10, 4), "users": (7, 4)}, {"a": "items", "b": "users", "c": "items"}
        )
        self.top = torch.nn.Linear(12, 1)

    def forward(self, inputs):
        return self.top(torch.cat(list(self.bags(inputs).values()), 1)).squeeze(1)


def inputs(batch, seed=0):
    return {"a": ids(batch, seed), "b": ids(batch, seed + 1, 7), "c": ids(batch, seed + 2)}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_evaluation_is_one_graph(backend):
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for batch in (5, 8, 3):
            torch.testing.assert_close(compiled(inputs(batch, batch)), model(inputs(batch, batch)))


def test_one_output_for_all_tables_is_one_graph():
    tables = [sok.Variable(torch.randn(10, 4)), sok.Variable(torch.randn(10, 3))]
    run = torch.compile(lambda *bags: sok.lookup_sparse(tables, bags, concat=True).exp(), fullgraph=True)
    with torch.no_grad():
        for batch in (5, 8):
            bags = [ids(batch), ids(batch, 1)]
            torch.testing.assert_close(run(*bags), torch.cat(sok.lookup_sparse(tables, bags), dim=1).exp())


@pytest.mark.parametrize("kind", ["weighted", "nested", "dense"])
def test_evaluation_of_other_inputs_is_one_graph(kind):
    table = sok.Variable(torch.randn(10, 4))
    keys, offsets = ids(6)
    weights = torch.rand(len(keys))

    def run(keys, offsets, weights):
        if kind == "weighted":
            return sok.lookup_sparse(table, (keys, offsets), weights, "sqrtn").exp()
        if kind == "nested":
            return sok.lookup_sparse(table, torch.nested.nested_tensor_from_jagged(keys, offsets), None, "sum").exp()
        return sok.all2all_dense_embedding(table, keys.view(1, -1)).exp()

    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(run, fullgraph=True, backend="aot_eager")(keys, offsets, weights), run(keys, offsets, weights)
        )


def test_frozen_tables_are_one_graph_in_training():
    table = sok.Variable(torch.randn(10, 4), trainable=False)
    top = torch.nn.Linear(4, 1)
    batch = ids(6)
    run = torch.compile(lambda batch: top(sok.lookup_sparse(table, batch)).sum(), fullgraph=True, backend="aot_eager")
    run(batch).backward()
    wanted = torch.autograd.grad(top(sok.lookup_sparse(table, batch)).sum(), [top.weight])[0]
    torch.testing.assert_close(top.weight.grad, wanted)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_evaluation_of_a_hybrid_layer_is_one_graph(backend):
    """Training is in tests/distributed/torch_hybrid.py."""
    tables = [(10, 4, "sum"), (10, 4, "mean"), (7, 3, None), (7, 3, "sum"), (9, 2, None)]
    layer = dmp.DistributedEmbedding(tables, input_table_map=[0, 1, 2, 3, 4, 0])
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with torch.no_grad():
        for batch in (5, 8, 3):
            values, offsets = ids(batch, batch)
            dense = torch.arange(3 * batch).reshape(batch, 3) % 7
            sparse = torch.nested.nested_tensor_from_jagged(values, offsets)
            given = [(values, offsets), sparse, dense[:, :1], dense, dense[:, 0], dense.int()]
            for ours, theirs in zip(compiled(given), layer(given), strict=True):
                torch.testing.assert_close(ours, theirs)


def test_training_of_a_hybrid_layer_is_no_single_graph():
    layer = dmp.DistributedEmbedding([(10, 4, "sum")])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="run between compiled parts: leave fullgraph=True out"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")([ids(5)])


def test_training_breaks_the_graph_and_agrees():
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        twin = Model()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            theirs.copy_(mine)
    compiled = torch.compile(model, backend="aot_eager")
    optimizers = [sok.OptimizerWrapper(torch.optim.Adagrad(m.parameters(), lr=0.1)) for m in (model, twin)]
    for step in range(4):
        batch = inputs(5, step)
        for run, optimizer in zip((compiled, twin), optimizers, strict=True):
            optimizer.zero_grad()
            run(batch).pow(2).sum().backward()
            optimizer.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach())


def test_training_is_no_single_graph():
    model = Model()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="run between compiled parts: leave fullgraph=True out"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(inputs(5))


def test_compiled_autograd_says_no():
    model = Model()
    with (
        pytest.raises(NotImplementedError, match="LookupBackward"),
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")),
    ):
        model(inputs(5)).sum().backward()
    model(inputs(5)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_errors_pass_through():
    table = sok.Variable(torch.randn(10, 4), name="items")
    run = torch.compile(lambda keys, offsets: sok.lookup_sparse(table, (keys, offsets)), backend="aot_eager")
    with torch.no_grad(), pytest.raises(IndexError, match="'items'"):
        run(torch.tensor([3, 10]), torch.tensor([0, 2]))
