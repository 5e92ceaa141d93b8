# SPDX-License-Identifier: Apache-2.0
"""EmbeddingBagCollection."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sparse_operation_kit.torch as sok

IDS = (torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]))


def test_features_and_tables():
    items = sok.Variable(torch.randn(10, 4), name="items")
    bags = sok.EmbeddingBagCollection(
        {"items": items, "users": (7, 2)}, {"clicked": "items", "bought": "items", "user": "users"}, "sum"
    )
    outputs = bags({"user": IDS, "bought": torch.tensor([[1, 2], [3, 3]]), "clicked": torch.tensor([5, 6])})
    assert list(outputs) == ["clicked", "bought", "user"]
    torch.testing.assert_close(outputs["clicked"], items[[5, 6]])
    torch.testing.assert_close(outputs["bought"], torch.stack([items[1] + items[2], 2 * items[3]]))
    users = bags.tables["users"]
    torch.testing.assert_close(outputs["user"], torch.stack([users[1] + users[2], users[3]]))
    assert users.name == "users" and users.global_shape == (7, 2)
    assert sorted(name for name, _ in bags.named_parameters()) == ["tables.items", "tables.users"]
    sum(output.sum() for output in outputs.values()).backward()
    assert items.grad.to_dense()[:, 0].tolist() == [0, 1, 1, 2, 0, 1, 1, 0, 0, 0]


def test_one_tensor_for_all_features():
    tables = {"a": sok.Variable(torch.randn(10, 4)), "b": sok.Variable(torch.randn(10, 3))}
    features = {"x": "b", "y": "a", "z": "b"}
    ids = {"x": IDS, "y": torch.tensor([5, 6]), "z": torch.tensor([[1, 2], [3, 3]])}
    apart, together = (sok.EmbeddingBagCollection(tables, features, concat=concat) for concat in (False, True))
    assert torch.equal(together(ids), torch.cat(list(apart(ids).values()), dim=1))
    with pytest.raises(ValueError, match="lookup 1 has 1 and lookup 0 has 2"):
        together(ids | {"y": torch.tensor([5])})


@pytest.mark.parametrize("stack", [False, True])
def test_keyed_vectors(stack):
    tables, features = {"a": (10, 4), "b": (10, 3), "c": (9, 4)}, {"x": "b", "y": "a", "z": "b", "w": "c"}
    keyed = sok.EmbeddingBagCollection(tables, features, stack=stack, keyed=True)
    apart = sok.EmbeddingBagCollection(tables, features, stack=stack)
    ids = {"x": IDS, "y": torch.tensor([5, 6]), "z": torch.tensor([[1, 2], [3, 3]]), "w": torch.tensor([0, 8])}
    vectors, wanted = keyed(ids), apart(ids)
    assert isinstance(vectors, sok.KeyedVectors) and vectors.keys() == list(wanted) == list(vectors.to_dict())
    assert vectors.length_per_key() == [3, 4, 3, 4] and vectors.offset_per_key() == [0, 3, 7, 10, 14]
    assert vectors.key_dim() == 1 and vectors.values().shape == (2, 14)
    for name, value in wanted.items():
        assert torch.equal(vectors[name], value) and torch.equal(vectors.to_dict()[name], value)
    vectors["y"].sum().backward()
    parameters: list[Any] = list(keyed.parameters())
    assert all(p.grad is not None for p in parameters if p.name != "b")
    with pytest.raises(KeyError, match="q"):
        _ = vectors["q"]
    with pytest.raises(ValueError, match=r"values of \[2, 5\] are not the vectors"):
        sok.KeyedVectors({"x": 4}, torch.ones(2, 5))
    with torch.no_grad():
        compiled = torch.compile(keyed, fullgraph=True, backend="aot_eager")(ids)
    assert torch.equal(compiled.values(), vectors.values()) and compiled.keys() == vectors.keys()
    dense = {name: torch.tensor([[1, 2], [3, 4]]) for name in features}
    exported = torch.export.export(keyed, (dense,)).module()(dense)
    assert isinstance(exported, sok.KeyedVectors) and torch.equal(exported["w"], keyed(dense)["w"])


def test_weights_and_combiners():
    bags = sok.EmbeddingBagCollection(
        {"a": (10, 4), "b": (10, 4)}, combiners={"a": "SUM", "b": "mean"}, initializer="normal", mode="localized:0"
    )
    weights = torch.tensor([0.5, 1.0, 4.0], requires_grad=True)
    outputs = bags({"a": IDS, "b": IDS}, {"a": weights})
    a, b = bags.tables["a"], bags.tables["b"]
    torch.testing.assert_close(outputs["a"], torch.stack([0.5 * a[1] + a[2], 4 * a[3]]))
    torch.testing.assert_close(outputs["b"], torch.stack([(b[1] + b[2]) / 2, b[3]]))
    assert a.mode == "localized:0"
    outputs["a"].sum().backward()
    torch.testing.assert_close(weights.grad, a.detach()[[1, 2, 3]].sum(1))
    dense = bags({"a": torch.tensor([[1, 2]]), "b": IDS}, {"a": torch.tensor([[2.0, 3.0]])})
    torch.testing.assert_close(dense["a"], (2 * a[1] + 3 * a[2]).unsqueeze(0))


@pytest.mark.parametrize("name", ["items", "keys", "type", "forward", "weight.1", "a b"])
def test_any_name(name):
    bags = sok.EmbeddingBagCollection({name: (4, 2)})
    assert bags({name: torch.tensor([1])})[name].shape == (1, 2)
    assert len(bags.tables) == 1 and list(bags.tables) == [name] and name in bags.tables
    assert list(bags.state_dict()) == [f"tables.{name}"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((({"a": (4, 2)}, {"x": "b"})), ValueError, "feature 'x' names table 'b'"),
        (({"a": (4, 2)}, None, {"b": "sum"}), ValueError, r"no entry for the features \['a'\]"),
        (({"a": (4, 2)}, None, "max"), ValueError, "'max'"),
        (({"a": (0, 2)},), ValueError, "'a' has no rows"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        sok.EmbeddingBagCollection(*arguments)


@pytest.mark.parametrize("stack", [False, True])
def test_missing_feature(stack):
    bags = sok.EmbeddingBagCollection({"a": (4, 2), "b": (5, 2)}, stack=stack)
    values, offsets = torch.tensor([1]), torch.tensor([0, 1])
    keyed = SimpleNamespace(keys=lambda: ["a"], values=lambda: values, offsets=lambda: offsets)
    message = r"EmbeddingBagCollection: the ids have no feature 'b', only \['a'\]"
    for ids in ({"a": values}, keyed):
        with pytest.raises(KeyError, match=message):
            bags(ids)


def test_kinds_of_ids():
    """Those of one feature are never promoted to those of another one."""
    bags = sok.EmbeddingBagCollection({"a": (4, 2), "b": (5, 2)}, combiners="sum")
    ids = torch.tensor([[1], [2]])
    vectors = bags({"a": ids, "b": ids.int()})
    assert torch.equal(vectors["b"], bags({"a": ids, "b": ids})["b"])
    for dtype in (torch.uint8, torch.bool, torch.float32):
        for given in ({"a": ids, "b": ids.to(dtype)}, {"a": ids.to(dtype), "b": ids.to(dtype)}):
            with pytest.raises(TypeError, match=f"must be int32 or int64, not {str(dtype).removeprefix('torch.')}"):
                bags(given)


def test_repr_names_features():
    assert "a: a (mean)" in repr(sok.EmbeddingBagCollection({"a": (4, 2)}))


def test_empty_batch():
    bags = sok.EmbeddingBagCollection({"a": (4, 2)})
    assert bags({"a": torch.zeros(0, 3, dtype=torch.int64)})["a"].shape == (0, 2)
    assert bags({"a": torch.zeros(0, dtype=torch.int64)})["a"].shape == (0, 2)
