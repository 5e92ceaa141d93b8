# SPDX-License-Identifier: Apache-2.0
"""dist_model_parallel in one process: Embedding, embedding_lookup, IntegerLookup, what DistributedEmbedding takes."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import dist_model_parallel as dmp

TABLE = torch.tensor([[0.0, 3.0], [1.0, 5.0], [7.0, 2.0]])


def embedding(combiner=None):
    layer = dmp.Embedding(3, 2, combiner=combiner)
    with torch.no_grad():
        layer.embeddings.copy_(TABLE)
    return layer


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 3), (2, 2, 3)])
def test_dense_ids(shape, dtype):
    ids = torch.arange(int(np.prod(shape))).reshape(shape) % 3
    torch.testing.assert_close(embedding()(ids.to(dtype)), TABLE[ids])
    if len(shape) > 1:
        torch.testing.assert_close(embedding("sum")(ids.to(dtype)), TABLE[ids].sum(-2))
        torch.testing.assert_close(embedding("mean")(ids.to(dtype)), TABLE[ids].mean(-2))


def test_bags():
    """As many ids as bags, an empty bag among them: bags stay bags."""
    values, offsets = torch.tensor([1, 2, 0]), torch.tensor([0, 2, 2, 3])
    coordinates = torch.tensor([[0, 0, 2], [0, 1, 0]])
    kinds = [
        (values, offsets),
        (values.int(), offsets),
        torch.nested.nested_tensor_from_jagged(values, offsets),
        torch.sparse_coo_tensor(coordinates, values, (3, 2), check_invariants=True),
    ]
    for ids in kinds:
        torch.testing.assert_close(embedding("sum")(ids), torch.tensor([[8.0, 7], [0, 0], [0, 3]]))
        torch.testing.assert_close(embedding("mean")(ids), torch.tensor([[4.0, 3.5], [0, 0], [0, 3]]))
    found = embedding()(kinds[0])
    assert [row.tolist() for row in found.unbind()] == [[[1, 5], [7, 2]], [], [[0, 3]]]
    with pytest.raises(ValueError, match="sparse ids take a combiner"):
        embedding()(kinds[3])


def test_what_is_refused():
    for sizes in ((0, 2), (3, -1)):
        with pytest.raises(ValueError, match="should be positive"):
            dmp.Embedding(*sizes)
    with pytest.raises(ValueError, match="combiner must be"):
        dmp.Embedding(3, 2, combiner="sqrtn")
    with pytest.raises(ValueError, match="1D input with combiner is ambiguous"):
        embedding("sum")(torch.tensor([1]))
    with pytest.raises(TypeError, match="param must be Tensor"):
        dmp.embedding_lookup(TABLE.numpy(), torch.tensor([[1]]))  # type: ignore[arg-type]
    for module, message in (
        (nn.Embedding(4, 2, padding_idx=0), "padding_idx"),
        (nn.EmbeddingBag(4, 2, mode="max"), '"sum" or "mean"'),
        (nn.Embedding(4, 2, max_norm=1.0), "max_norm"),
    ):
        with pytest.raises(ValueError, match=message):
            dmp.DistributedEmbedding([module])
    with pytest.raises(TypeError, match=r"nn.Embedding, nn.EmbeddingBag"):
        dmp.DistributedEmbedding([4])


def test_an_id_outside_an_embedding():
    with pytest.raises(IndexError):
        embedding()(torch.tensor([3]))


def test_an_id_outside_a_table_of_a_variable():
    """It is an error that names the table, also where the row would be another table's."""
    layer = dmp.DistributedEmbedding([(4, 2, "sum")] * 3, name="alike")
    assert [tuple(p.shape) for p in layer.parameters()] == [(12, 2)]
    for key in (4, 7, -1, -4):
        with pytest.raises(IndexError, match=rf"'alike/1': key {key} is outside \[0, 4\)"):
            layer([torch.tensor([[1]]), torch.tensor([[key]]), torch.tensor([[1]])])
            sok.check_errors()


def test_distributed_embedding_takes_modules():
    made = [
        nn.Embedding(4, 2, device="meta"),
        nn.EmbeddingBag(5, 3, mode="mean", device="meta"),
        dmp.Embedding(6, 2, "ones", "sum", dtype=torch.bfloat16, device="meta"),
        (7, 2, "sum"),
    ]
    layer = dmp.DistributedEmbedding(made, name="taken")
    tables = layer.get_weights()
    assert [table.shape for table in tables] == [(4, 2), (5, 3), (6, 2), (7, 2)]
    assert (tables[2] == 1).all() and tables[0].std() > 0.2  # normal, as nn.Embedding draws it
    bags = (torch.tensor([1]), torch.tensor([0, 0, 1]))
    outputs = layer([torch.tensor([1, 2]), torch.tensor([[1, 2], [3, 3]]), bags, torch.tensor([[0], [6]])])
    np.testing.assert_allclose(outputs[0].detach(), tables[0][[1, 2]])
    np.testing.assert_allclose(outputs[1].detach(), [tables[1][[1, 2]].mean(0), tables[1][3]], rtol=1e-6)
    np.testing.assert_allclose(outputs[2].detach(), [[0, 0], [1, 1]])
    np.testing.assert_allclose(outputs[3].detach(), tables[3][[0, 6]])
    assert sorted(layer.state_dict()) == sorted(name for name, _ in layer.named_parameters())
    with pytest.raises(ValueError, match="list of inputs"):
        layer(torch.tensor([1]))
    with pytest.raises(ValueError, match="Expect"):
        layer([torch.tensor([1])])
    with pytest.raises(ValueError, match="same batchsize"):
        layer([torch.zeros(2 + (i == 0), 1, dtype=torch.int64) for i in range(4)])
    layer.to(torch.float16)
    assert all(parameter.dtype == torch.float16 for parameter in layer.parameters())
    layer([torch.tensor([1])] * 4)


@pytest.mark.parametrize("dtype", ["bfloat16", ">f4", "longdouble", "int64", "float16"])
def test_weights_of_any_dtype(dtype):
    layer = dmp.DistributedEmbedding([(5, 4, "sum"), (6, 3, "sum")])
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    given = [np.arange(20).reshape(5, 4).astype(kind), np.arange(18).reshape(6, 3).astype(kind)]
    layer.set_weights(given)
    for found, wanted in zip(layer.get_weights(), given, strict=True):
        np.testing.assert_array_equal(found, wanted.astype(np.float32))


def test_copies_stand_for_themselves(tmp_path):
    layer = dmp.DistributedEmbedding([(5, 4, "sum"), (6, 4, "sum"), (60, 4, "sum")], name="e")
    copied = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    for number, each in enumerate(copied):
        each.set_weights([np.full(shape, number, np.float32) for shape in ((5, 4), (6, 4), (60, 4))])
        sok.dump(tmp_path / str(number), list(each.parameters()))
        sok.load(tmp_path / str(number), layer)
        assert all((found == number).all() for found in layer.get_weights())


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_of_another_placement_changes_nothing(strict):
    """Not the replicated tables either, which have the same names wherever the others lie."""

    def layer_of(*replicated):
        sizes = [(5, 4, "sum"), (6, 4, "sum"), (7, 4, "sum")]
        constraints = {table: {"choices": ["replicated"]} for table in replicated}
        return dmp.DistributedEmbedding(sizes, dmp.plan(sizes, 1, constraints=constraints), name="e")

    layer, other, same = layer_of(0), layer_of(0, 1), layer_of(0)
    before = layer.get_weights()
    for each in (other, same):
        each.set_weights([rows + 1 for rows in before])
    for state in (other.state_dict(), {**same.state_dict(), "table_0": torch.zeros(9, 4)}):
        with pytest.raises(RuntimeError, match=r"tables lie otherwise|size mismatch for table_0"):
            layer.load_state_dict(state, strict=strict)
        for found, wanted in zip(layer.get_weights(), before, strict=True):
            np.testing.assert_array_equal(found, wanted)
    layer.load_state_dict(same.state_dict(), strict=strict)
    np.testing.assert_array_equal(layer.get_weights()[0], before[0] + 1)


def test_integer_lookup():
    layer = dmp.IntegerLookup(4)
    keys = torch.tensor([-1, 2**63 - 1, -(2**63), -1, 0])
    assert layer(keys).tolist() == [1, 2, 3, 1, 4]
    assert layer(torch.tensor([[7, 0], [-1, 8]], dtype=torch.int32)).tolist() == [[0, 4], [1, 0]]
    assert layer.get_vocabulary() == [-1, -1, 2**63 - 1, -(2**63), 0]
    assert layer.count.tolist() == [2, 3, 1, 1, 2]
    copy = dmp.IntegerLookup(4).eval()
    assert copy(keys).tolist() == [0] * 5 and copy.get_vocabulary() == [-1]
    copy.load_state_dict(layer.state_dict())
    assert copy(keys).tolist() == [1, 2, 3, 1, 4]
    with pytest.raises(TypeError, match="integers"):
        layer(torch.tensor([1.0]))
    rng = np.random.default_rng(1)
    layer, numbers = dmp.IntegerLookup(50), {}
    for batch in rng.integers(-100, 100, (6, 20)):
        for key in batch.tolist():
            if len(numbers) < 50:
                numbers.setdefault(key, len(numbers) + 1)
        wanted = [numbers.get(key, 0) for key in batch.tolist()]
        assert layer(torch.from_numpy(batch)).tolist() == wanted
