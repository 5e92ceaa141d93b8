# SPDX-License-Identifier: Apache-2.0
"""OptimizerWrapper against torch.optim's own on the touched rows, over 100 steps; and this package's small
optimizers."""

import contextlib
import copy
import pickle
from typing import Any

import cases
import pytest
import reference
import torch
import torch_harness as harness
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import hyperparameters
from sparse_operation_kit.torch.gradient import PendingGradient

STEPS, ROWS, DIMENSION = harness.STEPS, harness.ROWS, harness.DIMENSION
batches = harness.batches


def by_steps(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7)


def cyclic(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS + 1, cycle_momentum=True)


# What each optimizer does to a row by itself, so that a dense optimizer over that row alone is the oracle.
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd weight decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.05}),
    "sgd maximize": (torch.optim.SGD, {"lr": 0.1, "maximize": True, "weight_decay": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02}),
    "dampening": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "adagrad options": (
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.03, "initial_accumulator_value": 0.1, "eps": 1e-3},
    ),
    "adam": (torch.optim.Adam, {"lr": 0.02}),
    "adam options": (torch.optim.Adam, {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.03}),
    "adam tensor lr": (torch.optim.Adam, {"lr": torch.tensor(0.02)}),
    "adam amsgrad": (torch.optim.Adam, {"lr": 0.02, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "adamw maximize": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1, "maximize": True}),
    "adamax": (torch.optim.Adamax, {"lr": 0.02, "eps": 1e-3}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0, "rho": 0.8, "weight_decay": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "rmsprop momentum": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.8, "weight_decay": 0.01}),
    "rmsprop centered": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "eps": 1e-3}),
    "rmsprop all": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.8, "eps": 1e-3}),
    "nadam": (torch.optim.NAdam, {"lr": 0.02}),
    "radam": (torch.optim.RAdam, {"lr": 0.02, "weight_decay": 0.01}),
    "rprop": (torch.optim.Rprop, {"lr": 0.02}),
    "asgd": (torch.optim.ASGD, {"lr": 0.02}),
}
FUSED = ("sgd", "momentum", "nesterov", "adagrad", "adam", "adamw", "adamax", "adadelta", "rmsprop")


@pytest.mark.parametrize("schedule", [None, by_steps, cyclic], ids=["constant", "steps", "cyclic"])
@pytest.mark.parametrize("name", SETTINGS)
def test_equals_torch_where_every_row_is_touched(name, schedule):
    # With every row in every batch a dense optimizer takes the same steps, bias corrections and states included.
    make, options = SETTINGS[name]
    if schedule is cyclic and not ({"momentum", "betas"} & set(make([torch.zeros(1)], **options).defaults)):
        schedule = by_steps
    if schedule is not None and isinstance(options["lr"], torch.Tensor):
        schedule = None
    if schedule is cyclic and make is torch.optim.SGD and "momentum" not in options:
        schedule = by_steps  # it would turn momentum on
    initial = torch.randn(ROWS, DIMENSION, generator=torch.Generator().manual_seed(1))
    table, dense, single = sok.Variable(initial), torch.nn.Parameter(initial.double()), torch.nn.Parameter(initial)
    optimizer = sok.OptimizerWrapper(make([table], **copy.deepcopy(options)))
    oracle, rounded = make([dense], **copy.deepcopy(options)), make([single], **copy.deepcopy(options))
    schedulers = [] if schedule is None else [schedule(x) for x in (optimizer.optimizer, oracle, rounded)]
    for keys, offsets, gradient in batches(len(name), all_rows=True):
        for parameter in (table, dense, single):
            parameter.grad = None
        sok.lookup_sparse(table, (keys, offsets), combiners="sum").backward(gradient)
        for parameter in (dense, single):
            bag = torch.nn.functional.embedding_bag(keys, parameter, offsets, mode="sum", include_last_offset=True)
            bag.backward(gradient.to(parameter.dtype))
        assert isinstance(table.grad, PendingGradient)
        for one in (optimizer, oracle, rounded, *schedulers):
            one.step()
    tolerance = 1e-6
    if name.split()[0] not in FUSED:
        # Torch's own arithmetic on the rows, in float32: as near to float64 as torch.optim itself comes.
        own_error = torch.linalg.norm(single.detach().double() - dense.detach()) / torch.linalg.norm(dense.detach())
        tolerance = max(tolerance, 1.5 * own_error.item())
    reference.assert_close(harness.rows_of(table), dense.detach(), tolerance, message=name)
    for key, value in oracle.state[dense].items():
        mine = optimizer.state[table][key]
        if isinstance(value, torch.Tensor):
            mine = harness.by_key(table, mine) if mine.dim() else mine
            assert mine.shape == value.shape
            reference.assert_close(mine, value, 2e-5, message=key)
        else:
            assert mine == value, key


@pytest.mark.parametrize("name", SETTINGS)
def test_touches_only_the_rows_of_the_step(name):
    make, options = SETTINGS[name]
    table = sok.Variable(torch.randn(ROWS, DIMENSION))
    optimizer = sok.OptimizerWrapper(make([table], **copy.deepcopy(options)))
    for keys, offsets, gradient in list(batches(3))[:10]:
        before = harness.rows_of(table)
        states = {
            k: harness.by_key(table, v.clone())
            for k, v in optimizer.state[table].items()
            if torch.is_tensor(v) and v.dim()
        }
        optimizer.zero_grad()
        sok.lookup_sparse(table, (keys, offsets), combiners="sum").backward(gradient)
        optimizer.step()
        rest = torch.ones(ROWS, dtype=torch.bool)
        rest[keys] = False
        after = harness.rows_of(table)
        assert torch.equal(after[rest], before[rest])
        assert not torch.equal(after[~rest], before[~rest])
        for key, value in states.items():
            assert torch.equal(harness.by_key(table, optimizer.state[table][key])[rest], value[rest]), key


@pytest.mark.parametrize("name", FUSED)
def test_each_row_takes_its_own_steps(name):
    # A dense optimizer over one row alone, stepped when the batch names the row, is the oracle of lazy semantics. Step
    # counts are the table's, so the oracle's is set before each step.
    make, options = SETTINGS[name]
    initial = torch.randn(ROWS, DIMENSION, generator=torch.Generator().manual_seed(2))
    table = sok.Variable(initial)
    optimizer = sok.OptimizerWrapper(make([table], **options))
    rows = [torch.nn.Parameter(row.double()) for row in initial]
    oracles = [make([row], **options) for row in rows]
    for number, (keys, offsets, gradient) in enumerate(batches(5)):
        optimizer.zero_grad()
        sok.lookup_sparse(table, (keys, offsets), combiners="mean").backward(gradient)
        optimizer.step()
        dense = torch.zeros(ROWS, DIMENSION, dtype=torch.float64, requires_grad=True)
        bag = torch.nn.functional.embedding_bag(keys, dense, offsets, mode="mean", include_last_offset=True)
        bag.backward(gradient.double())
        for key in keys.unique().tolist():
            rows[key].grad = dense.grad[key]
            state = oracles[key].state[rows[key]]
            if number and not state and name in ("adam", "adamw", "adamax"):
                rows[key].grad = torch.zeros_like(rows[key])
                value = rows[key].detach().clone()
                oracles[key].step()  # makes the states
                with torch.no_grad():
                    rows[key].copy_(value)
                rows[key].grad = dense.grad[key]
            if "step" in state:
                state["step"].fill_(number)
            oracles[key].step()
    reference.assert_close(harness.rows_of(table), torch.stack([row.detach() for row in rows]), 2e-6, message=name)


def test_sparse_adam_equals_torch():
    initial = torch.randn(ROWS, DIMENSION)
    table, dense = sok.Variable(initial), torch.nn.Parameter(initial.double())
    optimizer = sok.OptimizerWrapper(torch.optim.SparseAdam([table], lr=0.02))
    oracle = torch.optim.SparseAdam([dense], lr=0.02)
    for keys, offsets, gradient in batches(7):
        optimizer.zero_grad()
        oracle.zero_grad()
        sok.lookup_sparse(table, (keys, offsets), combiners="sum").backward(gradient)
        embedding = torch.nn.functional.embedding_bag(
            keys, dense, offsets, mode="sum", sparse=True, include_last_offset=True
        )
        embedding.backward(gradient.double())
        optimizer.step()
        oracle.step()
    reference.assert_close(harness.rows_of(table), dense.detach(), 2e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.Adagrad(params, lr=0.1),
        lambda params: torch.optim.SparseAdam(params, lr=0.1),
    ],
    ids=["sgd", "momentum", "adagrad", "sparse_adam"],
)
def test_plain_optimizers_take_tables(make):
    # Without the wrapper: PyTorch's own optimizers that know sparse gradients.
    initial = torch.randn(ROWS, DIMENSION)
    table, plain = sok.Variable(initial), torch.nn.Parameter(initial.clone())
    optimizer, oracle = make([table]), make([plain])
    torch.sparse.check_sparse_tensor_invariants.enable()  # or Adagrad warns that nobody said whether to check
    for keys, offsets, gradient in list(batches(9))[:10]:
        optimizer.zero_grad()
        oracle.zero_grad()
        sok.lookup_sparse(table, (keys, offsets), combiners="sum").backward(gradient)
        bag = torch.nn.functional.embedding_bag(keys, plain, offsets, mode="sum", sparse=True, include_last_offset=True)
        bag.backward(gradient)
        optimizer.step()
        oracle.step()
    torch.testing.assert_close(harness.rows_of(table), plain.detach(), rtol=2e-6, atol=2e-6)


@settings(max_examples=10)
@given(cases.calls(max_tables=8, max_dimension=64), st.sampled_from(sorted(FUSED)))
def test_hundred_steps_of_any_call(call, name):
    # Against F.embedding_bag in float64 and torch.optim on dense gradients masked to the touched rows.
    make, options = SETTINGS[name]
    variables, oracle = harness.tables(call), harness.Oracle(call)
    options = {**options, "lr": 0.01 if name != "adadelta" else 1.0}
    if name in ("adam", "adamw", "adamax", "rmsprop", "adadelta"):
        options["eps"] = 1e-3  # gradients that cancel to rounding errors would else be blown up to a full step
    optimizer = sok.OptimizerWrapper(make(variables, **options))
    touched = [torch.from_numpy(call.touched(t)) for t in range(len(call.tables))]
    rows = [
        torch.nn.Parameter(harness.rows_of(table)[keys]) for table, keys in zip(oracle.tables, touched, strict=True)
    ]
    dense = make(rows, **options)
    gradients = harness.gradients(call)
    for _ in range(STEPS):
        optimizer.zero_grad()
        outputs, _ = harness.lookup(call, variables)
        torch.autograd.backward(outputs, gradients)
        optimizer.step()
        full = [
            torch.zeros_like(table).index_put((keys,), part)
            for table, keys, part in zip(oracle.tables, touched, rows, strict=True)
        ]
        bags = [
            harness.embedding_bag(full[item.table], item, weights)
            for item, weights in zip(call.lookups, oracle.weights, strict=True)
        ]
        for row in rows:
            row.grad = None
        torch.autograd.backward(bags, [gradient.double() for gradient in gradients])
        dense.step()
    for t, variable in enumerate(variables):
        actual, wanted = harness.rows_of(variable)[touched[t]], rows[t].detach()
        if variable.grad is not None:
            reference.assert_close(actual, wanted, 1e-5, message=f"table {t}")
        else:
            assert torch.equal(harness.rows_of(variable), torch.from_numpy(call.rows(t)))


def test_dense_parameters_step_together():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    twin = copy.deepcopy(model)
    table = sok.Variable(torch.randn(10, 4))
    plain = torch.nn.Parameter(table.detach().clone())
    optimizer = sok.OptimizerWrapper(torch.optim.Adam([*model.parameters(), table], lr=0.05))
    oracle = torch.optim.Adam([*twin.parameters(), plain], lr=0.05)
    ids, offsets = torch.arange(10), torch.tensor([0, 3, 7, 10])
    for _ in range(20):
        optimizer.zero_grad()
        oracle.zero_grad()
        loss = model(sok.lookup_sparse(table, (ids, offsets))).pow(2).sum()
        loss.backward()
        bag = torch.nn.functional.embedding_bag(ids, plain, offsets, mode="mean", include_last_offset=True)
        twin(bag).pow(2).sum().backward()
        optimizer.step()
        oracle.step()
    for mine, theirs in zip([*model.parameters(), table], [*twin.parameters(), plain], strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
    assert isinstance(table.grad, PendingGradient)  # as ever after a step


def test_groups_closures_and_hooks():
    slow, fast = sok.Variable(torch.zeros(4, 2)), sok.Variable(torch.zeros(4, 2))
    frozen = sok.Variable(torch.zeros(4, 2), trainable=False)
    groups: list[dict[str, Any]] = [{"params": [slow], "lr": 0.1}, {"params": [fast], "lr": 1.0}, {"params": [frozen]}]
    optimizer = sok.OptimizerWrapper(torch.optim.SGD(groups, lr=0.5))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    ids = (torch.tensor([0, 1]), torch.tensor([0, 2]))

    def closure():
        optimizer.zero_grad()
        loss = sum(x.sum() for x in sok.lookup_sparse([slow, fast, frozen], [ids] * 3, combiners="sum"))
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 0.0
    assert calls == ["pre", "post"]
    assert torch.equal(slow.detach()[:, 0], torch.tensor([-0.1, -0.1, 0, 0]))
    assert torch.equal(fast.detach()[:, 0], torch.tensor([-1.0, -1.0, 0, 0]))
    optimizer.add_param_group({"params": [sok.Variable(torch.zeros(1, 1))], "lr": 3.0})
    assert len(optimizer.optimizer.param_groups) == 4
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = fast.detach().clone()
    optimizer.step()
    assert torch.equal(fast.detach(), before)


@pytest.mark.parametrize("on", ["wrapper", "wrapped"])
def test_schedulers_on_either(on):
    table = sok.Variable(torch.zeros(4, 2))
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer if on == "wrapper" else optimizer.optimizer, 0.5)
    ids = (torch.tensor([1]), torch.tensor([0, 1]))
    for _ in range(3):
        optimizer.zero_grad()
        sok.lookup_sparse(table, ids).sum().backward()
        optimizer.step()
        scheduler.step()
    assert torch.equal(table.detach()[1], torch.tensor([-1.75, -1.75]))


@pytest.mark.parametrize("name", [*FUSED, "adam amsgrad", "nadam"])
def test_state_dict_round_trip(name):
    make, options = SETTINGS[name]
    initial = torch.randn(ROWS, DIMENSION)
    steps = list(batches(11))

    def run(table, optimizer, part):
        for keys, offsets, gradient in part:
            optimizer.zero_grad()
            sok.lookup_sparse(table, (keys, offsets), combiners="sum").backward(gradient)
            optimizer.step()

    table = sok.Variable(initial)
    optimizer = sok.OptimizerWrapper(make([table], **options))
    run(table, optimizer, steps[:10])
    saved = copy.deepcopy(optimizer.state_dict())
    weights = harness.rows_of(table)
    run(table, optimizer, steps[10:20])

    again = sok.Variable(weights)
    resumed = sok.OptimizerWrapper(make([again], **options))
    resumed.load_state_dict(saved)
    run(again, resumed, steps[10:20])
    assert torch.equal(again.detach(), table.detach())
    if name in ("adam", "adagrad", "rmsprop"):
        assert set(saved["state"][0]) >= {"step"}


def test_wrong_state_is_refused_before_anything_changes():
    table = sok.Variable(torch.randn(4, 2))
    optimizer = sok.OptimizerWrapper(torch.optim.Adam([table]))
    optimizer.state[table].update(exp_avg=torch.zeros(5, 2), exp_avg_sq=torch.zeros(4, 2), step=torch.tensor(1.0))
    sok.lookup_sparse(table, (torch.tensor([1]), torch.tensor([0, 1]))).sum().backward()
    before = table.detach().clone()
    with pytest.raises(ValueError, match=r"'exp_avg'.*\[5, 2\].*\[4, 2\]"):
        optimizer.step()
    assert torch.equal(table.detach(), before)
    assert optimizer.state[table]["step"] == 1


def test_subclasses_are_not_mistaken_for_their_bases():
    class Halved(torch.optim.SGD):
        def __init__(self, params, lr, factor):
            super().__init__(params, lr=lr)
            self.factor = factor

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter -= self.factor * group["lr"] * parameter.grad

    table = sok.Variable(torch.zeros(4, 2))
    optimizer = sok.OptimizerWrapper(Halved([table], 1.0, 0.5))
    sok.lookup_sparse(table, (torch.tensor([1]), torch.tensor([0, 1]))).sum().backward()
    optimizer.step()
    assert table.detach().tolist() == [[0, 0], [-0.5, -0.5], [0, 0], [0, 0]]


def test_gradients_given_by_hand():
    rows = torch.tensor([[0, 1, 1, 2, 3]])
    for gradient in (
        torch.ones(4, 2),
        torch.sparse_coo_tensor(rows, torch.tensor([1, 0.5, 0.5, 1, 1]).view(5, 1).expand(5, 2), (4, 2)),
    ):
        table = sok.Variable(torch.zeros(4, 2))
        optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0))
        table.grad = gradient
        optimizer.step()
        assert torch.equal(table.detach(), -torch.ones(4, 2))


def test_apply_gradients():
    table, weight, other = sok.Variable(torch.zeros(4, 2)), torch.zeros(2, requires_grad=True), torch.zeros(2)
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table, weight], lr=1.0))
    loss = sok.lookup_sparse(table, (torch.tensor([1]), torch.tensor([0, 1]))).sum() + weight.sum()
    gradients = torch.autograd.grad(loss, [table, weight])
    optimizer.apply_gradients(zip(gradients, [table, weight], strict=True))
    assert harness.rows_of(table).tolist() == [[0, 0], [-1, -1], [0, 0], [0, 0]] and weight.tolist() == [-1, -1]
    assert table.grad is None and weight.grad is None
    optimizer.apply_gradients([(None, table), (torch.ones(2), weight)])
    assert weight.tolist() == [-2, -2]
    with pytest.raises(ValueError, match=r"grads_and_vars\[0\]"):
        optimizer.apply_gradients([(torch.ones(2), other)])


def test_pickled_with_its_state():
    table = sok.Variable(torch.zeros(4, 2))
    optimizer = sok.OptimizerWrapper(torch.optim.Adam([table], lr=0.5))
    sok.lookup_sparse(table, (torch.tensor([1]), torch.tensor([0, 1]))).sum().backward()
    optimizer.step()
    other = pickle.loads(pickle.dumps(optimizer))
    (again,) = other.param_groups[0]["params"]
    assert type(again) is sok.Variable and torch.equal(again.detach(), table.detach())
    assert torch.equal(other.state[again]["exp_avg"], optimizer.state[table]["exp_avg"])
    again.grad = table.grad.coalesce()
    optimizer.step()
    other.step()
    assert torch.equal(again.detach(), table.detach())


def test_wrapping_twice_or_nothing():
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    with pytest.raises(TypeError, match="already"):
        sok.OptimizerWrapper(optimizer)
    with pytest.raises(TypeError, match="float"):
        sok.OptimizerWrapper(0.1)  # type: ignore[arg-type]


@contextlib.contextmanager
def applied():
    """Counts the calls of the core that step tables."""
    calls = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        yield calls
    calls += [event.name for event in profiler.events() if event.name == "sok_apply"]


def test_all_tables_go_to_one_apply():
    variables = [sok.Variable(torch.zeros(4, 2)) for _ in range(5)]
    wrapper = sok.OptimizerWrapper(torch.optim.Adam(variables))
    ids = (torch.tensor([1]), torch.tensor([0, 1]))
    for looked_at in range(2):
        before = [variable.detach().clone() for variable in variables]
        with applied() as calls:
            wrapper.zero_grad()
            sum(x.sum() for x in sok.lookup_sparse(variables, [ids] * 5)).backward()
            if looked_at:
                assert variables[2].grad is not None
            wrapper.step()
        assert calls == ["sok_apply"]
        assert not any(torch.equal(variable.detach(), old) for variable, old in zip(variables, before, strict=True))


def test_delivered_tables_in_any_order_and_number():
    """Lookups of a table apart from each other in one call, in another order than the optimizer's."""
    for order, used in [((2, 0, 1, 0), (0, 1, 2, 3)), ((1, 1, 2, 0), (1, 2, 3)), ((0, 1, 2, 2), (0, 1, 2, 3))]:
        tables = [sok.Variable(torch.zeros(6, 3)) for _ in range(3)]
        dense = [torch.zeros(6, 3, requires_grad=True) for _ in range(3)]
        wrapper = sok.OptimizerWrapper(torch.optim.Adam(tables, lr=0.1))
        plain = torch.optim.Adam(dense, lr=0.1)
        keys = [torch.arange(6).roll(i) for i in range(4)]
        weights = [None, torch.rand(6), None, torch.rand(6)]
        ids = [(key, torch.tensor([0, 1, 6]) if i % 2 else torch.arange(7)) for i, key in enumerate(keys)]
        for _ in range(3):
            factors = torch.rand(4)
            wrapper.zero_grad()
            plain.zero_grad()
            with applied() as calls:
                outputs = sok.lookup_sparse([tables[t] for t in order], ids, weights, "sum")
                sum(factors[i] * outputs[i].square().add(outputs[i]).sum() for i in used).backward()
                wrapper.step()
            assert calls == ["sok_apply"]
            bags = [
                torch.segment_reduce(
                    dense[t][key] * (1.0 if weight is None else weight.unsqueeze(1)), "sum", offsets=splits
                )
                for t, (key, splits), weight in zip(order, ids, weights, strict=True)
            ]
            torch.autograd.backward([factors[i] * bags[i].square().add(bags[i]).sum() for i in used])
            plain.step()
            for table, wanted in zip(tables, dense, strict=True):
                torch.testing.assert_close(table.detach(), wanted.detach())


def test_class_names():
    assert hyperparameters.class_name(torch.optim.AdamW([torch.zeros(1)])) == "AdamW"
    assert hyperparameters.class_name(torch.optim.NAdam([torch.zeros(1)])) is None
