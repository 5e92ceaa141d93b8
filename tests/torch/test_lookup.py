# SPDX-License-Identifier: Apache-2.0
"""lookup_sparse and all2all_dense_embedding against F.embedding_bag and the reference, forward and backward."""

import cases
import numpy as np
import pytest
import reference
import torch
import torch_harness as harness
from hypothesis import given
from hypothesis import strategies as st

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import dist_model_parallel as dmp
from sparse_operation_kit.torch import runtime


def check_call(call, ids=harness.pair):
    """Outputs, row gradients and weight gradients of a call: to 1e-6 of F.embedding_bag's and the reference's."""
    variables = harness.tables(call)
    outputs, weights = harness.lookup(call, variables, ids)
    oracle = harness.Oracle(call)
    expected = oracle.lookup(call)
    for i, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert output.dtype == torch.float32
        magnitude = call.output(i, absolute=True)
        reference.assert_close(output.detach(), wanted.detach(), magnitude=magnitude, message=f"output {i}")
        reference.assert_close(output.detach(), call.output(i), magnitude=magnitude, message=f"output {i}")

    gradients = harness.gradients(call)
    torch.autograd.backward(outputs, gradients)
    torch.autograd.backward(expected, [gradient.double() for gradient in gradients])
    for t, (variable, dense) in enumerate(zip(variables, oracle.tables, strict=True)):
        if all(item.table != t for item in call.lookups):
            assert variable.grad is None
            continue
        magnitude = call.row_gradient(t, absolute=True)
        coalesced = variable.grad.coalesce()
        touched = torch.zeros(len(variable), dtype=torch.bool).index_fill(0, coalesced.indices()[0], True)
        assert harness.by_key(variable, touched).nonzero().flatten().tolist() == call.touched(t).tolist()
        actual = harness.by_key(variable, coalesced.to_dense())
        reference.assert_close(actual, dense.grad, magnitude=magnitude, message=f"gradient of table {t}")
        reference.assert_close(actual, call.row_gradient(t), magnitude=magnitude, message=f"gradient of table {t}")
    for i, (given_weights, double) in enumerate(zip(weights, oracle.weights, strict=True)):
        if given_weights is not None:
            magnitude = call.weight_gradient(i, absolute=True)
            message = f"weight gradient {i}"
            reference.assert_close(given_weights.grad, double.grad, 1e-6, magnitude, message)
            reference.assert_close(given_weights.grad, call.weight_gradient(i), 1e-6, magnitude, message)


@pytest.mark.parametrize("call", cases.CASES, ids=lambda call: call.name)
def test_named_cases(call):
    check_call(call)


@given(cases.calls())
def test_any_call(call):
    check_call(call)


@given(cases.calls(max_tables=3, max_dimension=16), st.integers(0, 2**16))
def test_sparse_coordinates_in_any_order(call, seed):
    def sparse(item):
        indices, order = item.coordinates(shuffle=seed)
        return torch.sparse_coo_tensor(indices.T.copy(), item.keys[order], item.dense_shape, check_invariants=True)

    variables = harness.tables(call)
    weights = []
    for item in call.lookups:
        _, order = item.coordinates(shuffle=seed)
        weights.append(None if item.weights is None else torch.from_numpy(item.weights[order]).requires_grad_())
    outputs, _ = harness.lookup(call, variables, sparse, weights)
    torch.autograd.backward(outputs, harness.gradients(call))
    for i, item in enumerate(call.lookups):
        magnitude = call.output(i, absolute=True)
        reference.assert_close(outputs[i].detach(), call.output(i), magnitude=magnitude, message=f"output {i}")
        if item.weights is not None:
            _, order = item.coordinates(shuffle=seed)
            wanted, magnitude = call.weight_gradient(i)[order], call.weight_gradient(i, absolute=True)
            reference.assert_close(weights[i].grad, wanted, 1e-6, magnitude, f"weight gradient {i}")
    for t, variable in enumerate(variables):
        if variable.grad is not None:
            magnitude = call.row_gradient(t, absolute=True)
            actual = harness.by_key(variable, variable.grad.to_dense())
            reference.assert_close(actual, call.row_gradient(t), magnitude=magnitude)


class Jagged:
    """As TorchRec's JaggedTensor."""

    def __init__(self, values, offsets):
        self._values, self._offsets = values, offsets

    def values(self):
        return self._values

    def offsets(self):
        return self._offsets


class WeightedJagged(Jagged):
    def weights_or_none(self):
        return torch.arange(1.0, 1 + len(self._values))


def test_weights_of_a_jagged_tensor_count():
    table = sok.Variable(torch.ones(4, 2))
    ids = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])
    found = sok.lookup_sparse(table, WeightedJagged(*ids), combiners="sum")
    torch.testing.assert_close(found, torch.tensor([[3.0, 3], [3, 3]]))
    given = sok.lookup_sparse(table, WeightedJagged(*ids), torch.ones(3), combiners="sum")
    torch.testing.assert_close(given, torch.tensor([[2.0, 2], [1, 1]]))
    with pytest.raises(ValueError, match="ids have weights"):
        dmp.DistributedEmbedding([(4, 2, "sum")])([WeightedJagged(*ids)])


def nested(values, offsets):
    return torch.nested.nested_tensor_from_jagged(values, offsets)


KINDS = {
    "pair": lambda values, offsets: (values, offsets),
    "list": lambda values, offsets: [values, offsets],
    "int32 offsets": lambda values, offsets: (values, offsets.int()),
    "nested": nested,
    "object": Jagged,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kinds_of_ids(kind, weighted, dtype):
    table = sok.Variable(torch.randn(10, 4))
    values, offsets = torch.tensor([1, 2, 3, 3], dtype=dtype), torch.tensor([0, 1, 1, 4])
    weights = torch.tensor([0.5, 1.0, 2.0, 0.25]) if weighted else None
    wanted = sok.lookup_sparse(table, (values, offsets), weights, "mean")
    given_weights = None if weights is None else KINDS[kind](weights, offsets)
    assert torch.equal(sok.lookup_sparse(table, KINDS[kind](values, offsets), given_weights, "mean"), wanted)
    assert torch.equal(sok.lookup_sparse(table, KINDS[kind](values, offsets), weights, "MEAN"), wanted)


def test_nested_tensor_with_holes():
    table = sok.Variable(torch.randn(10, 4))
    values, offsets, lengths = torch.tensor([1, 9, 2, 3, 9]), torch.tensor([0, 2, 5]), torch.tensor([1, 2])
    ids = torch.nested.nested_tensor_from_jagged(values, offsets, lengths)
    rows = harness.rows_of(table)
    wanted = torch.stack([rows[1], rows[2] + rows[3]])
    torch.testing.assert_close(sok.lookup_sparse(table, ids, combiners="sum"), wanted)


def test_coalesced_sparse_weights_have_a_gradient():
    table = sok.Variable(torch.randn(10, 4))
    indices = torch.tensor([[0, 1, 1], [0, 0, 1]])
    ids = torch.sparse_coo_tensor(indices, torch.tensor([1, 2, 3]), (2, 2), check_invariants=True).coalesce()
    weights = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0]), (2, 2), check_invariants=True)
    weights = weights.coalesce().requires_grad_()
    sok.lookup_sparse(table, ids, weights, "sum").sum().backward()
    torch.testing.assert_close(weights.grad.coalesce().values(), harness.rows_of(table)[[1, 2, 3]].sum(1))
    uncoalesced = torch.sparse_coo_tensor(indices, torch.ones(3), (2, 2), requires_grad=True, check_invariants=True)
    with pytest.raises(ValueError, match="1-D tensor"):
        sok.lookup_sparse(table, ids, uncoalesced, "sum")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_any_floating_dtype(dtype):
    table = sok.Variable(torch.randint(-64, 65, (10, 4)) / 16)  # sums are exact
    weights = torch.tensor([0.5, 2.0, 1.0], dtype=dtype, requires_grad=True)
    output = sok.lookup_sparse(table, (torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])), weights, "sum")
    rows = harness.rows_of(table)
    torch.testing.assert_close(output, torch.stack([0.5 * rows[1] + 2 * rows[2], rows[3]]))
    output.sum().backward()
    assert weights.grad.dtype == dtype
    torch.testing.assert_close(weights.grad, rows[[1, 2, 3]].sum(1).to(dtype))


def test_single_and_list():
    table = sok.Variable(torch.randn(10, 4))
    ids = (torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]))
    single = sok.lookup_sparse(table, ids)
    listed = sok.lookup_sparse([table], [ids])
    assert isinstance(single, torch.Tensor) and isinstance(listed, list) and len(listed) == 1
    assert torch.equal(single, listed[0])
    rows = harness.rows_of(table)
    wanted = torch.stack([(rows[1] + rows[2]) / 2, rows[3]])
    torch.testing.assert_close(single, wanted)  # the mean is the default
    assert all(torch.equal(x, single) for x in sok.lookup_sparse([table, table], [ids, ids], None, "mean"))
    assert all(torch.equal(x, single) for x in sok.lookup_sparse((table, table), (ids, ids), None, [None, "Mean"]))


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 3), (2, 0, 3), (2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_all2all_dense_embedding(shape, dtype):
    table = sok.Variable(torch.randn(10, 4))
    dense = harness.rows_of(table).requires_grad_()
    indices = torch.randint(0, 10, shape, dtype=dtype)
    output = sok.all2all_dense_embedding(table, indices)
    wanted = torch.nn.functional.embedding(indices, dense)
    assert output.shape == (*shape, 4)
    assert torch.equal(output, wanted)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    wanted.backward(gradient)
    torch.testing.assert_close(harness.by_key(table, table.grad.to_dense()), dense.grad)


def test_ids_may_be_a_strided_view():
    table = sok.Variable(torch.randn(10, 4))
    grid = torch.randint(0, 10, (6, 3))
    output = sok.lookup_sparse(table, (grid[:, 1], torch.tensor([0, 2, 6])), combiners="sum")
    rows = harness.rows_of(table)
    torch.testing.assert_close(output, torch.stack([rows[grid[:2, 1]].sum(0), rows[grid[2:, 1]].sum(0)]))
    output.sum().backward()
    assert torch.equal(
        harness.by_key(table, table.grad.to_dense()).sum(1), 4.0 * torch.bincount(grid[:, 1], minlength=10)
    )


@pytest.mark.parametrize(
    ("name", "call", "error", "message"), harness.bad_calls(), ids=lambda value: getattr(value, "__name__", value)
)
def test_bad_input(name, call, error, message):
    table = sok.Variable(np.arange(40, dtype=np.float32).reshape(10, 4), name="items")
    before = table.detach().clone()
    with pytest.raises(error, match=message):
        call(table)
    assert torch.equal(table.detach(), before)
    assert table.grad is None


def test_lookup_before_init():
    table = sok.Variable(torch.randn(10, 4))
    runtime.shutdown()
    with pytest.raises(RuntimeError, match=r"sok\.init\(\)"):
        sok.lookup_sparse(table, (torch.tensor([1]), torch.tensor([0, 1])))


def test_table_moved_to_another_dtype():
    module = sok.EmbeddingBagCollection({"items": (10, 4)})
    with pytest.raises(ValueError, match=r"table items has dtype .*float32, float16 or bfloat16"):
        module.double()({"items": torch.tensor([1, 2])})
    for dtype in (torch.float16, torch.bfloat16):
        assert module.to(dtype)({"items": torch.tensor([1, 2])})["items"].dtype == torch.float32


def test_no_gradient_when_nobody_wants_one():
    ids = (torch.tensor([1, 2]), torch.tensor([0, 2]))
    table = sok.Variable(torch.randn(10, 4))
    frozen = sok.Variable(torch.randn(10, 4), trainable=False)
    with torch.no_grad():
        assert not sok.lookup_sparse(table, ids).requires_grad
    with torch.inference_mode():
        assert not sok.lookup_sparse(table, ids).requires_grad
    assert not sok.lookup_sparse(frozen, ids).requires_grad
    outputs = sok.lookup_sparse([frozen, table], [ids, ids])
    sum(output.sum() for output in outputs).backward()
    assert frozen.grad is None and table.grad is not None


def test_lookup_in_another_thread():
    # An autograd worker, a data loader: the error message is the calling thread's.
    import threading

    table = sok.Variable(torch.randn(10, 4), name="items")
    seen = []

    def work():
        try:
            sok.lookup_sparse(table, (torch.tensor([10]), torch.tensor([0, 1])))
        except IndexError as error:
            seen.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4 and all("'items'" in text for text in seen)


def test_single_ids_of_several_tables():
    items, users = sok.Variable(torch.randn(10, 4), name="items"), sok.Variable(torch.randn(6, 2), name="users")
    dynamic = sok.DynamicVariable(3, initializer=2.0)
    indices = [torch.tensor([[1, 2, 1], [9, 0, 3]]), torch.tensor(5, dtype=torch.int32), torch.tensor([4, 4])]
    given = [*indices, torch.tensor([-7]), torch.empty(0, 2, dtype=torch.int64)]
    outputs = sok.all2all_dense_embedding([items, users, items, dynamic, users], given)
    assert isinstance(outputs, list)
    for output, table, index in zip(outputs, (items, users, items), indices, strict=False):
        assert torch.equal(output, harness.rows_of(table)[index.long()])
    assert torch.equal(outputs[3], torch.full((1, 3), 2.0)) and outputs[4].shape == (0, 2, 2)
    sum(output.sum() for output in outputs).backward()
    assert harness.by_key(items, items.grad.to_dense())[:, 0].tolist() == [1, 2, 1, 1, 2, 0, 0, 0, 0, 1]
    assert harness.by_key(users, users.grad.to_dense())[:, 0].tolist() == [0, 0, 0, 0, 0, 1]
    (alone,) = sok.all2all_dense_embedding((items,), (indices[0],))
    assert torch.equal(alone, outputs[0])
    for tables, ids, error, message in (
        ([items, users], indices[:1], ValueError, "indices has 1 entries, but param has 2 tables"),
        ([], [], ValueError, "param has 0 tables"),
        ([items], indices[0], TypeError, "param is a list, so indices must be one, got Tensor"),
        (items, [indices[0]], TypeError, "must be a dense tensor, got list"),
        ([items, users], [indices[0], torch.tensor([6])], IndexError, r"'users'.* 6 .*\[0, 6\)"),
    ):
        with pytest.raises(error, match=message):
            sok.all2all_dense_embedding(tables, ids)
