# SPDX-License-Identifier: Apache-2.0
"""TableStack, and EmbeddingBagCollection with stacks: what separate tables give, at the cost of one."""

import copy
import datetime
import io

import numpy as np
import pytest
import torch

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch.table_stack import Member

ROWS = {"a": 5, "b": 30, "c": 1, "d": 12}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "row-wise": lambda p: sok.RowWiseAdagrad(0.1).attach(p),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "ftrl": lambda p: sok.Ftrl(0.1).attach(p),
    "of rows": lambda p: torch.optim.NAdam(p, lr=0.1),
}


def wrapped(name, parameters):
    made = OPTIMIZERS[name](parameters)
    return made if type(made).__module__.startswith("sparse_operation_kit") else sok.OptimizerWrapper(made)


def stack_and_tables(dimension=4, **options):
    shapes = {name: (rows, dimension) for name, rows in ROWS.items()}
    options = {"initializer": "normal", **options}
    tables = [sok.Variable(shape=shape, name=name, **options) for name, shape in shapes.items()]
    return sok.TableStack(shapes, **options), tables


def flat_ids(random, names=tuple(ROWS), batch=3, dtype=torch.int64):
    """(flat ids, ids of each)."""
    values, lengths, each = [], [], []
    for name in names:
        n = torch.from_numpy(random.integers(0, 4, batch))
        keys = torch.from_numpy(random.integers(0, ROWS[name], int(n.sum()))).to(dtype)
        each.append((keys, torch.cat([torch.zeros(1, dtype=torch.int64), n.cumsum(0)])))
        values.append(keys)
        lengths.append(n)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
    return (torch.cat(values), offsets), each


def check_rows(stack, tables):
    for member, table in zip(stack.members.values(), tables, strict=True):
        np.testing.assert_allclose(member.numpy(), table.detach().numpy(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_as_separate_tables(name):
    random = np.random.default_rng(3)
    stack, tables = stack_and_tables()
    for member, table in zip(stack.members.values(), tables, strict=True):
        assert torch.equal(member.weight, table.detach())
    optimizers = [wrapped(name, p) for p in ([stack], tables)]
    for step in range(4):
        ids, each = flat_ids(random, dtype=(torch.int64, torch.int32)[step % 2])
        combiner = ("sum", "mean", "sqrtn", "mean")[step]
        weights = torch.from_numpy(random.integers(1, 9, len(ids[0])) / 8).float() if step == 2 else None
        apart = None if weights is None else list(torch.split(weights, [len(keys) for keys, _ in each]))
        output = sok.lookup_sparse(stack, ids, weights, combiners=combiner)
        expected = torch.cat(sok.lookup_sparse(tables, each, apart, combiners=[combiner] * len(tables)), dim=1)
        np.testing.assert_allclose(output.detach().numpy(), expected.detach().numpy(), rtol=1e-5, atol=1e-5)
        loss = torch.from_numpy(random.standard_normal(output.shape)).float()
        for optimizer, vectors in zip(optimizers, (output, expected), strict=True):
            optimizer.zero_grad()
            (vectors * loss).sum().backward()
            optimizer.step()
        np.testing.assert_allclose(
            stack.detach().numpy(), torch.cat(list(map(torch.detach, tables))).numpy(), atol=2e-5
        )


def test_some_members_beside_tables():
    random = np.random.default_rng(4)
    stack, tables = stack_and_tables()
    other = sok.Variable(torch.randn(9, 3))
    ids, each = flat_ids(random, ("d", "a", "d"))
    of_other = (torch.tensor([3, 8]), torch.tensor([0, 1, 1, 2]))
    every, of_every = flat_ids(random)
    picked = stack.choose(["d", "a", "d"])
    outputs = sok.lookup_sparse([picked, other, stack], [ids, of_other, every], combiners="sum")
    expected = sok.lookup_sparse(
        [tables[3], tables[0], tables[3], other, *tables], [*each, of_other, *of_every], combiners="sum"
    )
    wide = torch.cat(expected, dim=1)
    assert torch.equal(torch.cat(outputs, dim=1), wide)
    together = sok.lookup_sparse([picked, other, stack], [ids, of_other, every], combiners="sum", concat=True)
    assert torch.equal(together, wide)
    loss = torch.randn_like(wide)
    (wide * loss).sum().backward()
    expected_grad = [table.grad.to_dense() for table in tables]
    for vectors in (torch.cat(outputs, dim=1), together):
        stack.grad = None
        (vectors * loss).sum().backward()
        torch.testing.assert_close(stack.grad.to_dense(), torch.cat(expected_grad))


def test_gradient_of_weights():
    random = np.random.default_rng(5)
    stack, tables = stack_and_tables()
    ids, each = flat_ids(random)
    weights = torch.rand(len(ids[0]), requires_grad=True)
    output = sok.lookup_sparse(stack, ids, weights, combiners="mean")
    loss = torch.randn_like(output)
    (found,) = torch.autograd.grad((output * loss).sum(), weights)
    apart = torch.split(weights, [len(keys) for keys, _ in each])
    expected = torch.cat(sok.lookup_sparse(tables, each, list(apart), combiners="mean"), dim=1)
    (wanted,) = torch.autograd.grad((expected * loss).sum(), weights)
    torch.testing.assert_close(found, wanted)


def test_errors():
    stack, _ = stack_and_tables()
    splits = torch.arange(5)
    with pytest.raises(IndexError, match=r"'c': key 1 is outside \[0, 1\)"):
        sok.lookup_sparse(stack, (torch.tensor([4, 29, 1, 0]), splits))
    with pytest.raises(ValueError, match="5 bags, and its stack 4 tables"):
        sok.lookup_sparse(stack, (torch.zeros(5, dtype=torch.int64), torch.arange(6)))
    with pytest.raises(ValueError, match="sok_TableStack"):
        sok.lookup_sparse(stack, (torch.zeros(4, dtype=torch.int64), torch.tensor([0, 2, 1, 3, 4])))
    with pytest.raises(TypeError, match=r"stack.members\[name\]"):
        sok.all2all_dense_embedding(stack, torch.tensor([0]))
    for function in (sok.export, lambda table: sok.assign(table, [0], torch.zeros(1, 4))):
        with pytest.raises(TypeError, match=r"stack.members\[name\]"):
            function(stack)
    with pytest.raises(KeyError, match="'e'"):
        stack.choose(["a", "e"])
    with pytest.raises(ValueError, match="no members"):
        stack.choose([])
    with pytest.raises(ValueError, match="'empty' has no tables"):
        sok.TableStack({}, name="empty")
    with pytest.raises(ValueError, match="one dimension"):
        sok.TableStack({"a": (3, 4), "b": (3, 5)})
    with pytest.raises(ValueError, match="'b' has no rows"):
        sok.TableStack({"a": (3, 4), "b": (0, 4)})
    with pytest.raises(IndexError, match=r"'d'.*12"):
        sok.assign(stack.member("d"), [12], torch.zeros(1, 4))


def test_members():
    shapes = {name: (rows, 4) for name, rows in ROWS.items()}
    stack = sok.TableStack(shapes, initializer={"a": "ones", "b": 2.0}, mode="localized:0")
    a, b, c, d = stack.members.values()
    assert (a == 1).all() and (b == 2).all() and 0 < c.abs().max() <= 0.05 and d.name == "d"
    assert b.global_shape == (30, 4) and b.mode == "localized:0" and b.key_map(7) == 7 and b.shape == (30, 4)
    assert type(b[3]) is torch.Tensor and not b.requires_grad
    sok.assign(b, [7, 0], torch.tensor([[1.0] * 4, [3.0] * 4]))
    keys, rows = sok.export(b)
    assert keys.tolist() == list(range(30)) and rows[7].tolist() == [1.0] * 4 and rows[0].tolist() == [3.0] * 4
    assert torch.equal(stack[12], rows[7]) and (a == 1).all()
    assert sok.filter_variables([stack, torch.zeros(1)])[0][0] is stack
    copied = copy.deepcopy(stack)
    assert torch.equal(copied.member("b"), b) and copied.members.keys() == stack.members.keys()
    buffer = io.BytesIO()
    torch.save(stack, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded.member("d"), d) and isinstance(loaded, sok.TableStack)
    assert "'b' 30" in repr(stack)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "row-wise", "adam"])
def test_a_dump_is_that_of_separate_tables(name, tmp_path):
    random = np.random.default_rng(6)
    stack, tables = stack_and_tables()
    optimizers = [wrapped(name, p) for p in ([stack], tables)]
    ids, each = flat_ids(random)
    for optimizer, outputs in zip(
        optimizers, (sok.lookup_sparse(stack, ids), torch.cat(sok.lookup_sparse(tables, each), dim=1)), strict=True
    ):
        (outputs * torch.arange(16.0)).sum().backward()
        optimizer.step()
    sok.dump(tmp_path / "stack", [stack], optimizers[0])
    sok.dump(tmp_path / "tables", tables, optimizers[1])
    files = {path.name: path.read_bytes() for path in (tmp_path / "tables").iterdir() if "manifest" not in path.name}
    assert len(files) >= 8
    for file, content in files.items():
        assert (tmp_path / "stack" / file).read_bytes() == content, file
    # Each loads into the other, new ones.
    new_stack, new_tables = stack_and_tables(initializer="zeros")
    new = [wrapped(name, p) for p in ([new_stack], new_tables)]
    sok.load(tmp_path / "tables", [new_stack], new[0])
    sok.load(tmp_path / "stack", new_tables, new[1])
    check_rows(stack, new_tables)
    assert torch.equal(new_stack, stack)
    kept, found = (
        getattr(optimizer, "optimizer", optimizer).state.get(p, {})
        for optimizer, p in ((optimizers[0], stack), (new[0], new_stack))
    )
    for key, value in kept.items():
        torch.testing.assert_close(torch.as_tensor(found[key]), torch.as_tensor(value))
    sok.load(tmp_path / "tables", new_stack.member("b"))


def test_changed_rows_of_members():
    stack, _ = stack_and_tables()
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([stack], lr=0.1))
    sok.track_changes([stack])
    since = datetime.datetime.now(datetime.timezone.utc)
    ids = (torch.tensor([4, 29, 3, 0, 7]), torch.tensor([0, 1, 3, 4, 5]))
    sok.lookup_sparse(stack, ids).sum().backward()
    optimizer.step()
    sok.assign(stack.member("d"), [2], torch.zeros(1, 4))
    keys, values = sok.incremental_model_dump([stack], since)
    assert [each.tolist() for each in keys] == [[4], [3, 29], [0], [2, 7]]
    copied, separate = stack_and_tables()
    sok.load_incremental((keys, values), [copied])
    sok.load_incremental((keys, values), separate)
    assert torch.equal(copied, stack)
    check_rows(stack, separate)
    (of_d,), _ = sok.incremental_model_dump(stack.member("d"), since)
    assert of_d.tolist() == [2, 7]


class KeyedJaggedTensor:
    """What TorchRec's has of this name."""

    def __init__(self, names, values, offsets, weights=None):
        self._parts = (names, values, offsets, weights)

    def keys(self):
        return self._parts[0]

    def values(self):
        return self._parts[1]

    def offsets(self):
        return self._parts[2]

    def weights_or_none(self):
        return self._parts[3]


SHAPES = {"a": (5, 4), "b": (30, 4), "narrow": (7, 2), "c": (6, 4)}
FEATURES = {"x": "b", "y": "narrow", "z": "a", "u": "b", "v": "c"}


def collections(**options):
    torch.manual_seed(1)
    options = {"combiners": {"x": "sum", "y": "mean", "z": "sum", "u": "mean", "v": "sum"}, **options}
    return [sok.EmbeddingBagCollection(SHAPES, FEATURES, stack=stack, **options) for stack in (True, False)]


def feature_ids(random, kind, batch=3):
    if kind == "dense":
        return {f: torch.from_numpy(random.integers(0, SHAPES[t][0], (batch, 2))) for f, t in FEATURES.items()}
    ids = {}
    for feature, table in FEATURES.items():
        lengths = torch.from_numpy(random.integers(0, 3, batch))
        keys = torch.from_numpy(random.integers(0, SHAPES[table][0], int(lengths.sum())))
        ids[feature] = (keys, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
    return ids


@pytest.mark.parametrize("kind", ["dense", "pairs", "weighted", "uneven"])
@pytest.mark.parametrize("concat", [False, True])
def test_a_collection_stacks_its_tables(concat, kind):
    random = np.random.default_rng(7)
    stacked, apart = collections(concat=concat and kind != "uneven")
    assert [name for name, _ in stacked.tables.named_parameters()] == ["a to c", "narrow"]
    assert stacked.state_dict().keys() == apart.state_dict().keys() == {f"tables.{name}" for name in SHAPES}
    assert list(stacked.tables) == list(apart.tables) == list(SHAPES)
    for name in SHAPES:
        assert torch.equal(stacked.tables[name].detach(), apart.tables[name].detach())
    assert isinstance(stacked.tables["a"], Member) and not isinstance(stacked.tables["narrow"], Member)
    optimizers = [sok.OptimizerWrapper(torch.optim.Adagrad(each.parameters(), lr=0.1)) for each in (stacked, apart)]
    for _ in range(2):
        ids = feature_ids(random, kind)
        if kind == "uneven":
            ids["u"] = (torch.tensor([3]), torch.tensor([0, 1]))
        weights = {"x": torch.rand(len(ids["x"][0]))} if kind == "weighted" else None
        outputs = [each(ids, weights) for each in (stacked, apart)]
        if not stacked.concat:
            assert list(outputs[0]) == list(outputs[1]) == list(FEATURES)
            outputs = [torch.cat([vector.flatten() for vector in each.values()]) for each in outputs]
        assert torch.equal(*outputs)
        loss = torch.from_numpy(random.standard_normal(outputs[0].shape)).float()
        for optimizer, output in zip(optimizers, outputs, strict=True):
            optimizer.zero_grad()
            (output * loss).sum().backward()
            optimizer.step()
        for name in SHAPES:
            np.testing.assert_allclose(stacked.tables[name].detach(), apart.tables[name].detach(), rtol=1e-5, atol=1e-6)


def test_ids_in_one_tensor():
    random = np.random.default_rng(8)
    ids = feature_ids(random, "pairs")
    for names in (list(FEATURES), ["v", "y", "u", "z", "x"]):
        values = torch.cat([ids[name][0] for name in names])
        lengths = torch.cat([ids[name][1].diff() for name in names])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        weights = torch.rand(len(values))
        apart = dict(zip(names, torch.split(weights, [len(ids[name][0]) for name in names]), strict=True))
        for collection in collections():
            keyed = KeyedJaggedTensor(names, values, offsets)
            outputs, expected = collection(keyed), collection(ids)
            assert all(torch.equal(outputs[name], expected[name]) for name in FEATURES)
            outputs, expected = collection(KeyedJaggedTensor(names, values, offsets, weights)), collection(ids, apart)
            assert all(torch.equal(outputs[name], expected[name]) for name in FEATURES)
    collection = sok.EmbeddingBagCollection({"a": (5, 4), "b": (30, 4)}, concat=True)
    keyed = KeyedJaggedTensor(["a", "b"], torch.tensor([4, 29, 3]), torch.tensor([0, 1, 1, 2, 3]))
    assert collection(keyed).shape == (2, 8)
    with pytest.raises(TypeError, match="weights_or_none"):
        collection(keyed, {"a": torch.ones(1)})
    with pytest.raises(TypeError, match=r"keys\(\), values\(\) and offsets\(\)"):
        collection(torch.tensor([1]))
    with pytest.raises(IndexError, match="'a': key 5"):
        collection(KeyedJaggedTensor(["a", "b"], torch.tensor([5, 5]), torch.tensor([0, 1, 2])))
    with pytest.raises(ValueError, match="4 entries"):
        collection(KeyedJaggedTensor(["b", "a"], torch.tensor([5, 5]), torch.tensor([0, 1, 2, 2])))
    with pytest.raises(ValueError, match=r"offsets of 3 entries are not those of as many bags for each of \[\]"):
        collection(KeyedJaggedTensor([], torch.tensor([5, 5]), torch.tensor([0, 1, 2])))


class OfManySizes(KeyedJaggedTensor):
    """As TorchRec has it with stride_per_key_per_rank: each key has a number of bags of its own, and inverse_indices
    say which sample has which bag.
    """

    def __init__(self, names, values, offsets, sizes, inverse=None):
        super().__init__(names, values, offsets)
        self.sizes, self.inverse = sizes, inverse

    def variable_stride_per_key(self):
        return True

    def stride_per_key(self):
        return self.sizes

    def inverse_indices_or_none(self):
        return self.inverse


@pytest.mark.parametrize("names", [["a", "b"], ["b", "a"]])
@pytest.mark.parametrize("stack", [False, True])
def test_ids_in_one_tensor_with_a_batch_size_per_key(names, stack):
    collection = sok.EmbeddingBagCollection({"a": (5, 4), "b": (30, 4)}, stack=stack)
    values, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1, 2, 3, 4])
    with pytest.raises(
        ValueError, match=r"one batch size,.* has \[3, 1\] bags for \['.', '.'\]: .* \(values, offsets\)"
    ):
        collection(OfManySizes(names, values, offsets, [3, 1]))
    inverse = names, torch.tensor([[0, 1, 0], [1, 0, 1]])
    with pytest.raises(ValueError, match="inverse_indices"):
        collection(OfManySizes(names, values, offsets, [2, 2], inverse))
    outputs = collection(OfManySizes(names, values, offsets, [2, 2]))
    expected = collection(KeyedJaggedTensor(names, values, offsets))
    assert all(torch.equal(outputs[name], expected[name]) for name in names)


def test_state_dict_of_a_collection_with_stacks():
    stacked, apart = collections(initializer="normal")
    other, separate = collections(initializer="zeros")
    other.load_state_dict(apart.state_dict())
    separate.load_state_dict(stacked.state_dict())
    for name in SHAPES:
        assert torch.equal(other.tables[name].detach(), stacked.tables[name].detach())
        assert torch.equal(separate.tables[name].detach(), apart.tables[name].detach())
    before = other.tables["b"].clone()
    wrong = {**stacked.state_dict(), "tables.b": torch.zeros(29, 4)}
    with pytest.raises(RuntimeError, match=r"tables\.b: table 'b'"):
        other.load_state_dict(wrong)
    assert torch.equal(other.tables["b"], before)
    missing = stacked.state_dict()
    del missing["tables.a"]
    with pytest.raises(RuntimeError, match=r"Missing key.*tables\.a"):
        other.load_state_dict(missing)
    assert other.load_state_dict(missing, strict=False).missing_keys == ["tables.a"]
    copied = copy.deepcopy(stacked)
    ids = feature_ids(np.random.default_rng(9), "dense")
    with torch.no_grad():
        copied.tables["b"].weight.zero_()
    assert not torch.equal(copied(ids)["x"], stacked(ids)["x"]) and (copied(ids)["x"] == 0).all()
