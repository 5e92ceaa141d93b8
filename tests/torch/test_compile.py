# SPDX-License-Identifier: Apache-2.0
"""Under torch.compile: one graph and the same numbers, in evaluation and in training."""

import copy
import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import dist_model_parallel as dmp
from sparse_operation_kit.torch import graph_lookup


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


def test_training_of_a_hybrid_layer_is_one_graph():
    layers = [dmp.DistributedEmbedding([(10, 4, "sum"), (10, 3, "mean")]) for _ in range(2)]
    layers[1].set_weights(layers[0].get_weights())
    for layer in (torch.compile(layers[0], fullgraph=True, backend="aot_eager"), layers[1]):
        torch.cat(layer([ids(5), ids(5, 7)]), 1).pow(2).sum().backward()
    agree(layers)


class Weighted(torch.nn.Module):
    """Two tables, ids that the graph computes, and weights that are learned."""

    def __init__(self, items):
        super().__init__()
        self.items, self.users = items, sok.Variable(torch.arange(21.0).reshape(7, 3))
        self.weights = torch.nn.Parameter(torch.linspace(-1, 1, 100))
        self.top = torch.nn.Linear(7, 1)

    def forward(self, a, b):
        weights = torch.sigmoid(self.weights)[: a[0].shape[0]]
        bags = [(a[0] * 3 % 10, a[1]), (b[0] % 7, b[1])]
        found = sok.lookup_sparse([self.items, self.users], bags, [weights, None], ["sum", "mean"])
        return self.top(torch.cat(found, 1)).squeeze(1)


def dynamic():
    return sok.DynamicVariable(4, initializer="ones")


def twins(kind):
    """The same model twice, and what makes a batch for it."""
    torch.manual_seed(0)
    if kind == "collection":
        model = Model()
        return model, copy.deepcopy(model), lambda step: (inputs(5 + step, step),)
    model = Weighted(dynamic() if kind == "dynamic" else sok.Variable(torch.randn(10, 4)))
    return model, copy.deepcopy(model), lambda step: (ids(5 + step, step), ids(5 + step, step + 10))


def agree(models):
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach())
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad.to_dense(), theirs.grad.to_dense())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["collection", "weighted", "dynamic"])
def test_training_is_one_graph(kind, backend):
    *models, batch = twins(kind)
    runs = [torch.compile(models[0], fullgraph=True, backend=backend), models[1]]
    optimizers = [sok.OptimizerWrapper(torch.optim.Adagrad(model.parameters(), lr=0.1)) for model in models]
    for step in range(4):
        for run, optimizer in zip(runs, optimizers, strict=True):
            optimizer.zero_grad()
            for part in (step, step + 20):  # accumulated
                run(*batch(part)).pow(2).mean().backward()
            optimizer.step()
        agree(models)
    assert not graph_lookup._tickets


def test_training_without_fullgraph_breaks_the_graph():
    *models, batch = twins("collection")
    counter = torch._dynamo.testing.CompileCounter()
    torch.compile(models[0], backend=counter)(*batch(0)).sum().backward()
    models[1](*batch(0)).sum().backward()
    agree(models)
    assert counter.op_count and not graph_lookup._tickets


def test_what_is_not_gone_back_through_is_freed():
    model, _, batch = twins("weighted")
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = None
    for _ in range(3):
        loss = run(*batch(0)).sum()
    assert len(graph_lookup._tickets) == 1
    loss.backward(retain_graph=True)
    loss.backward()
    gradient = model.items.grad.to_dense()
    model.zero_grad()
    model(*batch(0)).sum().backward()
    torch.testing.assert_close(gradient, 2 * model.items.grad.to_dense())
    del loss
    gc.collect()
    assert not graph_lookup._tickets


def test_gradients_that_are_asked_for():
    *models, batch = twins("weighted")
    run = torch.compile(models[0], fullgraph=True, backend="aot_eager")
    losses = [each(*batch(0)).pow(2).sum() for each in (run, models[1])]
    wanted = [model.weights for model in models]
    asked = [torch.autograd.grad(loss, of, retain_graph=True) for loss, of in zip(losses, wanted, strict=True)]
    torch.testing.assert_close(*asked)
    agree(models)
    for loss, model in zip(losses, models, strict=True):
        loss.backward(inputs=[model.items, model.top.weight], retain_graph=True)
    agree(models)
    with pytest.raises(RuntimeError, match=r"running autograd\.grad\(\)"):
        torch.autograd.grad(losses[0], models[0].items, retain_graph=True)


def test_tables_with_hooks_break_the_graph():
    *models, batch = twins("weighted")
    run = torch.compile(models[0], backend="aot_eager")
    run(*batch(0))
    for model in models:
        model.seen = []
        model.items.register_post_accumulate_grad_hook(lambda table, seen=model.seen: seen.append(1))
        model.users.register_hook(lambda gradient, seen=model.seen: seen.append(gradient.to_dense().sum()))
    run(*batch(0)).sum().backward()
    models[1](*batch(0)).sum().backward()
    agree(models)
    assert len(models[0].seen) == 2 and torch.tensor(models[0].seen).sum() == torch.tensor(models[1].seen).sum()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"gradients have hooks .*leave fullgraph=True out"):
        torch.compile(models[0], fullgraph=True, backend="aot_eager")(*batch(0))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_activations_are_computed_again(backend):
    *models, batch = twins("weighted")
    run = torch.compile(
        lambda *bags: checkpoint(models[0], *bags, use_reentrant=False), fullgraph=True, backend=backend
    )
    run(*batch(0)).sum().backward()
    models[1](*batch(0)).sum().backward()
    agree(models)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["collection", "dynamic"])
def test_compiled_autograd(kind, backend):
    *models, batch = twins(kind)
    run = torch.compile(models[0], fullgraph=True, backend=backend)
    for step in range(2):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
            run(*batch(step)).pow(2).sum().backward()
        models[1](*batch(step)).pow(2).sum().backward()
    agree(models)


def test_compiled_autograd_wants_the_lookup_compiled():
    model = Model()
    with (
        pytest.raises(NotImplementedError, match=r"LookupBackward.*compile the model too"),
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
