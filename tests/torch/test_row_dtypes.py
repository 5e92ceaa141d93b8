# SPDX-License-Identifier: Apache-2.0
"""Tables of float16 and bfloat16: each step is that of a float32 table with the same rows, rounded."""

import copy
import io

import cases
import pytest
import torch
import torch_harness as harness
from hypothesis import given
from hypothesis import strategies as st

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch.gradient import PendingGradient

HALVES = (torch.float16, torch.bfloat16)
ROWS, DIMENSION = harness.ROWS, harness.DIMENSION

each_half = pytest.mark.parametrize("dtype", HALVES)

# Options that run fused and others that run in PyTorch on the step's rows.
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "dampening": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.02, "weight_decay": 0.03}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.02, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "adamax": (torch.optim.Adamax, {"lr": 0.02, "eps": 1e-3}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0, "rho": 0.8}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.8, "eps": 1e-3}),
    "nadam": (torch.optim.NAdam, {"lr": 0.02}),
}


def bits(tensor):
    return tensor.detach().view(torch.int16)


def make_table(dtype, seed=1, **options):
    initial = torch.randn(ROWS, DIMENSION, generator=torch.Generator().manual_seed(seed))
    return sok.Variable(initial, dtype=dtype, **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
@each_half
def test_steps_are_those_of_float32_rows_rounded(dtype, name):
    make, options = OPTIMIZERS[name]
    table = make_table(dtype)
    wide = sok.Variable(table.detach().float())
    optimizer, other = (sok.OptimizerWrapper(make([x], **options)) for x in (table, wide))
    for keys, offsets, gradient in list(harness.batches(7))[:20]:
        with torch.no_grad():
            wide.copy_(table)
        before = table.detach().clone()
        outputs = []
        for x, one in ((table, optimizer), (wide, other)):
            one.zero_grad()
            outputs.append(sok.lookup_sparse(x, (keys, offsets), combiners="mean"))
            outputs[-1].backward(gradient)
            one.step()
        assert outputs[0].dtype == torch.float32
        assert torch.equal(*outputs)
        assert torch.equal(bits(table), bits(wide.to(dtype)))
        rest = torch.ones(ROWS, dtype=torch.bool)
        rest[keys] = False
        assert torch.equal(table.detach()[rest], before[rest])
    for key, value in other.state[wide].items():
        mine = optimizer.state[table][key]
        if isinstance(value, torch.Tensor):
            assert mine.dtype == value.dtype
            assert torch.equal(mine, value), key
        else:
            assert mine == value, key


@pytest.mark.parametrize("own", [sok.SGD, sok.RowWiseAdagrad, sok.Ftrl])
@each_half
def test_own_optimizers(dtype, own):
    table = make_table(dtype)
    wide = sok.Variable(table.detach().float())
    for x in (table, wide):
        sok.lookup_sparse(x, (torch.tensor([1, 5, 5]), torch.tensor([0, 3]))).sum().backward()
        own(lr=0.3).attach([x]).step()
    assert torch.equal(bits(table), bits(wide.to(dtype)))


@given(cases.calls(max_tables=6, max_dimension=100, bagless=True), st.integers(0, 2))
def test_outputs_and_gradients_of_any_call(call, first):
    """Tables of several dtypes in one call."""
    dtypes = (torch.float32, *HALVES)
    tables = [
        sok.Variable(torch.from_numpy(call.rows(t)), dtype=dtypes[(first + t) % 3], name=f"table{t}")
        for t in range(len(call.tables))
    ]
    wide = [sok.Variable(table.detach().float()) for table in tables]
    made, weights = harness.lookup(call, tables)
    expected, wide_weights = harness.lookup(call, wide)
    for output, wanted in zip(made, expected, strict=True):
        assert torch.equal(output, wanted)
    for outputs in (made, expected):
        torch.autograd.backward(outputs, harness.gradients(call))
    for table, other in zip(tables, wide, strict=True):
        assert (table.grad is None) == (other.grad is None)
        if table.grad is not None:
            assert table.grad.dtype == table.dtype
            found, wanted = table.grad.coalesce(), other.grad.coalesce()
            assert torch.equal(found.indices(), wanted.indices())
            assert found.dtype == table.dtype
            assert torch.equal(found.values(), wanted.values().to(table.dtype))
    for weight, other in zip(weights, wide_weights, strict=True):
        if weight is not None:
            torch.testing.assert_close(weight.grad, other.grad, rtol=1e-4, atol=1e-4)


@each_half
def test_gradient_arithmetic_stays_in_float32(dtype):
    """Accumulated, scaled and clipped gradients are rounded by no one on their way to the optimizer."""
    table = make_table(dtype)
    wide = sok.Variable(table.detach().float())
    ids = (torch.tensor([1, 5, 5, 7]), torch.tensor([0, 1, 4]))
    for x in (table, wide):
        for factor in (1.0, 0.001):
            (sok.lookup_sparse(x, ids) * factor).sum().backward()
        assert isinstance(x.grad, PendingGradient)
        torch.nn.utils.clip_grad_norm_([x], 0.5)
        x.grad.mul_(1.0001)
        sok.OptimizerWrapper(torch.optim.SGD([x], lr=0.7)).step()
    assert torch.equal(bits(table), bits(wide.to(dtype)))


@each_half
def test_gradients_that_others_made(dtype):
    """Dense and sparse gradients of the table's dtype, as autograd and users make them."""
    for layout in (torch.strided, torch.sparse_coo):
        table = make_table(dtype)
        expected = (table.detach().float() - 0.5).to(dtype)
        gradient = torch.ones(ROWS, DIMENSION, dtype=dtype)
        table.grad = gradient.to_sparse(1) if layout == torch.sparse_coo else gradient
        sok.OptimizerWrapper(torch.optim.SGD([table], lr=0.5)).step()
        assert torch.equal(bits(table), bits(expected))
    table = make_table(dtype)
    wide = sok.Variable(table.detach().float())
    for x in (table, wide):
        (sok.lookup_sparse(x, (torch.tensor([3, 4]), torch.tensor([0, 2]))).sum() + (x * 2).float().sum()).backward()
        assert x.grad.dtype == x.dtype
        sok.OptimizerWrapper(torch.optim.SGD([x], lr=0.5)).step()
    assert torch.equal(bits(table), bits(wide.to(dtype)))


@each_half
def test_initial_rows_are_those_of_float32_rounded(dtype):
    for initializer in ("uniform", "normal", "glorot_uniform", 0.1):
        wide = sok.Variable(shape=(50, 7), initializer=initializer, name="same")
        table = sok.Variable(shape=(50, 7), initializer=initializer, name="same", dtype=dtype)
        assert torch.equal(bits(table), bits(wide.to(dtype)))
    filled = sok.Variable(shape=(5, 3), initializer=torch.nn.init.ones_, dtype=dtype)
    assert filled.dtype == dtype
    assert bool((filled == 1).all())


@each_half
def test_assign_and_export(dtype):
    table = make_table(dtype)
    values = torch.randn(2, DIMENSION)
    sok.assign(table, [3, 5], values)
    assert torch.equal(bits(table[[3, 5]]), bits(values.to(dtype)))
    sok.assign(table, [4], values[:1].to(dtype))
    keys, rows = sok.export(table)
    assert rows.dtype == dtype
    assert torch.equal(rows, table.detach().cpu())
    assert keys.tolist() == list(range(ROWS))
    other = HALVES[1 - HALVES.index(dtype)]
    for wrong in (other, torch.float64):
        with pytest.raises(TypeError, match=f"values must be float32 or {str(dtype)[6:]}, not"):
            sok.assign(table, [3], torch.ones(1, DIMENSION, dtype=wrong))
    assert torch.equal(rows, table.detach().cpu())


def test_small_float16_numbers_where_subnormal_float32_ones_are_flushed():
    """As TensorFlow's threads do, and PyTorch's on demand: a subnormal float16 is a normal float32."""
    values = torch.arange(-1024, 1024).view(-1, 16) * 2.0**-24
    table = sok.Variable(torch.zeros_like(values), dtype=torch.float16)
    ids = (torch.arange(len(values)), torch.arange(len(values) + 1))
    torch.set_flush_denormal(True)
    try:
        sok.assign(table, ids[0], values)
        output = sok.lookup_sparse(table, ids)
        output.backward(torch.full_like(output, -(2.0**-24)))
        sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0)).step()
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(output, values)
    assert torch.equal(table.detach().float(), values + 2.0**-24)


@each_half
def test_copies_and_checkpoints_of_pytorch(dtype):
    table = make_table(dtype)
    model = torch.nn.ParameterList([table])
    optimizer = sok.OptimizerWrapper(torch.optim.Adam(model.parameters(), lr=0.02))

    def step(x, one):
        one.zero_grad()
        sok.lookup_sparse(x, (torch.tensor([1, 5, 5]), torch.tensor([0, 3]))).sum().backward()
        one.step()

    step(table, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()))
    copied = copy.deepcopy(table)
    assert copied.dtype == dtype
    fresh = torch.nn.ParameterList([make_table(dtype, seed=9)])
    fresh.load_state_dict(saved["model"])
    resumed = sok.OptimizerWrapper(torch.optim.Adam(fresh.parameters(), lr=0.02))
    resumed.load_state_dict(saved["optimizer"])
    for key, value in optimizer.state[table].items():
        assert resumed.state[fresh[0]][key].dtype == torch.float32
        assert torch.equal(resumed.state[fresh[0]][key], value)
    step(table, optimizer)
    step(fresh[0], resumed)
    assert torch.equal(bits(table), bits(fresh[0]))


@each_half
def test_states_that_were_rounded_are_refused(dtype):
    """As torch.optim's own load_state_dict leaves them."""
    table = make_table(dtype)
    inner = torch.optim.Adagrad([table], lr=0.1)
    inner.state[table] = {"sum": torch.zeros(ROWS, DIMENSION, dtype=dtype), "step": torch.tensor(1.0)}
    sok.lookup_sparse(table, (torch.tensor([1]), torch.tensor([0, 1]))).sum().backward()
    before = table.detach().clone()
    with pytest.raises(ValueError, match=r"state 'sum'.*OptimizerWrapper\.load_state_dict"):
        sok.OptimizerWrapper(inner).step()
    assert torch.equal(before, table.detach())


@each_half
def test_a_module_converted_as_a_whole(dtype):
    module = sok.EmbeddingBagCollection({"items": (10, 4)})
    before = [p.detach().clone() for p in module.parameters()]
    module.to(dtype)
    for parameter, was in zip(module.parameters(), before, strict=True):
        assert isinstance(parameter, sok.Variable)
        assert torch.equal(bits(parameter), bits(was.to(dtype)))
    module({"items": torch.tensor([1, 2])})["items"].sum().backward()
    assert all(p.grad.dtype == dtype for p in module.parameters())


@each_half
def test_finite_rows_that_would_be_infinite_are_not_loaded(dtype, tmp_path):
    rows = torch.ones(ROWS, DIMENSION)
    rows[3, 2] = -3.4e38
    rows[4, 2] = torch.inf
    wide = [sok.Variable(rows, name="t"), sok.Variable(torch.ones(ROWS, DIMENSION), name="u")]
    sok.dump(tmp_path / "d", wide)
    tables = [make_table(dtype, name="t"), make_table(dtype, name="u")]
    dynamic = sok.DynamicVariable(DIMENSION, name="t", dtype=dtype)
    before = [table.detach().clone() for table in tables]
    for chosen in (tables, [dynamic]):
        with pytest.raises(ValueError, match=r"t_0-weight: the row of key 3 has the element -3.4e\+38"):
            sok.load(tmp_path / "d", chosen)
    assert all(torch.equal(table.detach(), was) for table, was in zip(tables, before, strict=True))
    assert dynamic.size == 0
    with pytest.raises(ValueError, match="the row of key 3"):
        sok.load(tmp_path / "d", tables, verify="during")
    sok.load(tmp_path / "d", tables[1])
    assert torch.equal(tables[1].detach(), torch.ones(ROWS, DIMENSION, dtype=dtype))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_an_initial_number_that_the_dtype_does_not_hold(dtype):
    number = {torch.float16: 65520.0, torch.bfloat16: -3.3962e38, torch.float32: 3.4029e38}[dtype]
    for chosen in (number, str(number)):
        with pytest.raises(ValueError, match=f"table 't': {str(dtype)[6:]} does not hold the initial value "):
            sok.Variable(shape=(2, 2), name="t", dtype=dtype, initializer=chosen)
        with pytest.raises(ValueError, match=r"table 't': .* does not hold the initial value "):
            sok.DynamicVariable(2, name="t", dtype=dtype, initializer=chosen)
        with pytest.raises(ValueError, match=r"table 't': .* does not hold the initial value "):
            sok.TableStack({"s": (2, 2), "t": (3, 2)}, dtype=dtype, initializer={"t": chosen})
    held = sok.Variable(shape=(2, 2), dtype=dtype, initializer=number * 0.999)
    assert held.isfinite().all()
    assert sok.Variable(shape=(2, 2), dtype=dtype, initializer=float("inf")).isinf().all()


@each_half
def test_compiled(dtype):
    table = make_table(dtype)
    ids = (torch.tensor([1, 5, 5]), torch.tensor([0, 3]))
    compiled = torch.compile(lambda: sok.lookup_sparse(table, ids) * 2, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(), sok.lookup_sparse(table, ids) * 2)
