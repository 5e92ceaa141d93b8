# SPDX-License-Identifier: Apache-2.0
"""Programs of torch.export: models evaluated elsewhere, with the tables of a collection in them."""

import copy
import io

import pytest
import torch

import sparse_operation_kit.torch as sok

BATCH = torch.export.Dim.DYNAMIC


class Model(torch.nn.Module):
    """Two features of one table and one of another."""

    def __init__(self, **options):
        super().__init__()
        tables = {"items": (10, 4), "users": (7, 4)}
        self.bags = sok.EmbeddingBagCollection(tables, {"a": "items", "b": "users", "c": "items"}, **options)
        self.top = torch.nn.Linear(12, 1)

    def forward(self, a, b, c):
        found = self.bags({"a": a, "b": b, "c": c})
        return self.top(found if isinstance(found, torch.Tensor) else torch.cat(list(found.values()), dim=1))


def ids(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 7, (batch, k), generator=generator) for k in (2, 2, 2)]


def saved_and_loaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("stack", [False, True])
def test_a_program_is_the_model(stack, strict):
    model = Model(stack=stack).eval()
    program = torch.export.export(model, tuple(ids(4)), dynamic_shapes=({0: BATCH},) * 3, strict=strict)
    run = saved_and_loaded(program)
    for batch in (4, 9):
        torch.testing.assert_close(run(*ids(batch, batch)), model(*ids(batch, batch)))
    kept = program.state_dict
    name = "bags.tables.items to users" if stack else "bags.tables.items"
    assert torch.equal(kept[name].detach(), model.get_parameter(name).data)
    with pytest.raises(IndexError, match=r"'items': key 77 is outside \[0, 10\)"):
        run(torch.full((4, 2), 77), *ids(4)[1:])
    model(*ids(4)).sum().backward()  # the model is as it was
    assert type(model.bags.tables["items"]) is not torch.Tensor


def test_other_outputs_and_inputs():
    for model, batch in (
        (Model(concat=True), ids(3)),
        (Model(), [torch.tensor([1, 2, 3]), torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([3, 4, 5])]),
        (Model(table_dtype=torch.bfloat16), ids(3)),
    ):
        program = torch.export.export(model.eval(), tuple(batch))
        torch.testing.assert_close(program.module()(*batch), model(*batch))


def test_what_has_no_program():
    dynamic = sok.EmbeddingBagCollection({"items": sok.DynamicVariable(4, name="items")})
    with pytest.raises(NotImplementedError, match=r"'items' cannot be in a program of torch\.export"):
        torch.export.export(dynamic, ({"items": torch.tensor([1])},))

    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.items = sok.Variable(shape=(5, 2))

        def forward(self, keys):
            return sok.all2all_dense_embedding(self.items, keys)

    with pytest.raises(TypeError, match=r"tables are exported in a sok\.EmbeddingBagCollection"):
        torch.export.export(Bare(), (torch.tensor([1]),))


def test_copies_are_exported_too():
    model = copy.deepcopy(Model())
    program = torch.export.export(model, tuple(ids(4)))
    torch.testing.assert_close(program.module()(*ids(4)), model(*ids(4)))


class Ragged(torch.nn.Module):
    """Pairs of ids and offsets of two tables, one with weights."""

    def __init__(self, **options):
        super().__init__()
        features = {"a": "items", "b": "users", "c": "items"}
        combiners = {"a": "sum", "b": "sqrtn", "c": "mean"}
        self.bags = sok.EmbeddingBagCollection({"items": (10, 4), "users": (7, 3)}, features, combiners, **options)
        self.top = torch.nn.Linear(11, 1)

    def forward(self, ids, weights):
        return self.top(torch.cat(list(self.bags(ids, {"b": weights}).values()), dim=1))


def ragged(batch, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = {}
    for feature in "abc":
        offsets = torch.nn.functional.pad(torch.randint(0, 4, (batch,), generator=generator).cumsum(0), (1, 0))
        ids[feature] = (torch.randint(0, 7, (int(offsets[-1]),), generator=generator), offsets)
    return ids, torch.rand(len(ids["b"][0]), generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_a_package_of_aotinductor_is_the_model(kind, tmp_path):
    if kind == "dense":  # one tensor has one key a bag, which come without row splits
        model, made = Model(combiners="sum").eval(), lambda batch: (ids(batch, batch)[0][:, 0], *ids(batch, batch)[1:])
        shapes = ({0: BATCH},) * 3
    else:
        model, made = Ragged(stack=False).eval(), lambda batch: ragged(batch, batch)
        shapes = (dict.fromkeys("abc", ({0: BATCH}, {0: BATCH})), {0: BATCH})
    program = torch.export.export(model, made(5), dynamic_shapes=shapes)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    run = torch._inductor.aoti_load_package(path)
    for batch in (5, 9, 1):
        torch.testing.assert_close(run(*made(batch)), model(*made(batch)))
    wrong = made(5)
    (wrong[0] if kind == "dense" else wrong[0]["a"][0]).fill_(77)
    with pytest.raises(RuntimeError, match="key 77 is outside"):
        run(*wrong)
