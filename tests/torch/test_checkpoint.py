# SPDX-License-Identifier: Apache-2.0
"""dump and load in a process alone: each optimizer goes on as if it had not stopped; what does not fit is an error."""

import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch_harness as harness
from torch import optim

import sparse_operation_kit.checkpoint as ck
import sparse_operation_kit.torch as sok

OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, 0.1),
    "SGD momentum": lambda p: optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
    "SGD dampening": lambda p: optim.SGD(p, 0.01, momentum=0.9, dampening=0.5),
    "Adagrad": lambda p: optim.Adagrad(p, 0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adam": lambda p: optim.Adam(p, 0.1, weight_decay=0.01),
    "Adam amsgrad": lambda p: optim.Adam(p, 0.1, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, 0.1),
    "SparseAdam": lambda p: optim.SparseAdam(p, 0.1),
    "Adamax": lambda p: optim.Adamax(p, 0.1),
    "Adadelta": lambda p: optim.Adadelta(p, 0.5),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01),
    "RMSprop centered": lambda p: optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "NAdam": lambda p: optim.NAdam(p, 0.1),
    "RAdam": lambda p: optim.RAdam(p, 0.01),
    "ASGD": lambda p: optim.ASGD(p, 0.01, t0=2),
    "Rprop": lambda p: optim.Rprop(p, 0.01),
    "sok.SGD": lambda p: sok.SGD(0.1).attach(p),
    "sok.RowWiseAdagrad": lambda p: sok.RowWiseAdagrad(0.1, 0.1).attach(p),
    "sok.Ftrl": lambda p: sok.Ftrl(0.1, l1_regularization_strength=0.01).attach(p),
}


def tables(**options):
    return [sok.Variable(shape=(50, 4), name="a", **options), sok.Variable(shape=(9, 3), name="b/c", **options)]


def train(variables, optimizer, steps):
    losses = []
    for step in steps:
        rng = np.random.default_rng(step)
        ids = [(torch.tensor(rng.integers(0, v.global_shape[0], 12)), torch.arange(0, 13, 3)) for v in variables]
        optimizer.zero_grad()
        outputs = sok.lookup_sparse(variables, ids, combiners=["sum"] * len(variables))
        loss = sum((output - 1).square().sum() for output in outputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def optimizer_of(path):
    with ck.open_dump(path) as dump:
        return dump.optimizer


def same(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("started", [False, True])
def test_training_goes_on(tmp_path, name, started):
    variables = tables()
    optimizer = sok.OptimizerWrapper(OPTIMIZERS[name](variables))
    train(variables, optimizer, range(5))
    sok.dump(tmp_path / "d", variables, optimizer)
    others = tables(initializer="zeros")
    other = sok.OptimizerWrapper(OPTIMIZERS[name](others))
    if started:
        train(others, other, range(2))
    sok.load(tmp_path / "d", others, other)
    same(variables, others)
    assert train(variables, optimizer, range(5, 10)) == train(others, other, range(5, 10))
    same(variables, others)


@pytest.mark.parametrize("name", ["SGD momentum", "Adagrad", "Adam", "Adam amsgrad", "NAdam", "sok.RowWiseAdagrad"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_16_bits(tmp_path, dtype, name):
    """Training goes on bit for bit; what float32 tables dumped is rounded, and what they load is exact."""
    variables, others, wide = tables(dtype=dtype), tables(dtype=dtype, initializer="zeros"), tables(initializer="ones")
    optimizer, other, of_wide = (sok.OptimizerWrapper(OPTIMIZERS[name](x)) for x in (variables, others, wide))
    sok.dump(tmp_path / "first", variables, optimizer)
    sok.load(tmp_path / "first", others, other)
    same(variables, others)
    train(variables, optimizer, range(5))
    sok.dump(tmp_path / "d", variables, optimizer)
    expected = ("float16", None) if dtype == torch.float16 else ("float32", "bfloat16")
    with ck.open_dump(tmp_path / "d") as stored:
        assert {(entry.table.value_dtype, entry.table.row_dtype) for entry in stored.tables.values()} == {expected}
    sok.load(tmp_path / "d", others, other)
    sok.load(tmp_path / "d", wide, of_wide)
    same([table.float() for table in variables], wide)
    assert train(variables, optimizer, range(5, 8)) == train(others, other, range(5, 8))
    same(variables, others)
    train(wide, of_wide, range(3))
    sok.dump(tmp_path / "wide", wide, of_wide)
    sok.load(tmp_path / "wide", others, other)
    same([table.to(dtype) for table in wide], others)
    for key, value in of_wide.state[wide[0]].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(other.state[others[0]][key], value)
    another = tables(dtype=torch.bfloat16 if dtype == torch.float16 else torch.float16)
    sok.load(tmp_path / "d", another)
    sok.load(tmp_path / "d", wide)
    same([table.to(another[0].dtype) for table in wide], another)


@pytest.mark.parametrize(
    "name", ["SGD momentum", "SGD dampening", "Adam", "Adagrad", "RMSprop centered", "NAdam", "Adam amsgrad"]
)
def test_before_the_first_step(tmp_path, name):
    """States that PyTorch makes lazily are dumped as they will begin; dumping makes none."""
    variables = tables()
    optimizer = sok.OptimizerWrapper(OPTIMIZERS[name](variables))
    sok.dump(tmp_path / "d", variables, optimizer)
    assert not optimizer.state or name == "Adagrad", "Adagrad makes its states at once"
    others = tables(initializer="zeros")
    other = sok.OptimizerWrapper(OPTIMIZERS[name](others))
    train(others, other, range(2))
    sok.load(tmp_path / "d", others, other)
    assert train(variables, optimizer, range(5)) == train(others, other, range(5))


def test_each_table_keeps_its_own_count_and_rate(tmp_path):
    a, b = tables()
    groups: list[dict[str, Any]] = [{"params": [a]}, {"params": [b], "lr": 0.5}]
    optimizer = sok.OptimizerWrapper(optim.Adam(groups, lr=0.1))
    train([a, b], optimizer, range(3))
    train([b], optimizer, range(2))
    sok.dump(tmp_path / "d", [a, b], optimizer)
    found = optimizer_of(tmp_path / "d")
    assert found.iterations == 5 and found.hyperparameters["learning_rate"] == 0.1
    assert found.hyperparameters["tables"] == {"a:0": {"iterations": 3}, "b/c:0": {"learning_rate": 0.5}}
    others = tables()
    other = sok.OptimizerWrapper(optim.Adam(others, lr=0.1))
    sok.load(tmp_path / "d", others, other)
    assert [int(other.state[table]["step"]) for table in others] == [3, 5]


@pytest.mark.parametrize("name", ["Adam", "NAdam", "SGD dampening"])
def test_a_table_without_a_step_among_others(tmp_path, name):
    a, b = tables()
    optimizer = sok.OptimizerWrapper(OPTIMIZERS[name]([a, b]))
    train([a], optimizer, range(3))
    sok.dump(tmp_path / "d", [a, b], optimizer)
    others = tables(initializer="zeros")
    other = sok.OptimizerWrapper(OPTIMIZERS[name](others))
    train(others, other, range(2))
    sok.load(tmp_path / "d", others, other)
    assert train([a, b], optimizer, range(3, 6)) == train(others, other, range(3, 6))


def test_step_extra_and_what_the_optimizer_keeps(tmp_path):
    variables = tables()
    optimizer = sok.OptimizerWrapper(optim.Adam(variables, lr=0.1))
    train(variables, optimizer, range(2))
    step: Any = np.int64(12)
    sok.dump(tmp_path / "d", variables, optimizer, step=step, extra={"epoch": [1, None]}, progress=False)
    other = sok.OptimizerWrapper(optim.Adam(others := tables(), lr=0.7))
    found = sok.load(tmp_path / "d", others, other, verify="during", progress=False)
    assert (found.step, found.extra, found.world_size) == (12, {"epoch": [1, None]}, 1)
    assert found.manifest.writer["frontend"].startswith("torch ")
    assert found.optimizer.name == "Adam" and found.optimizer.iterations == 2
    assert found.optimizer.hyperparameters["beta_2"] == 0.999
    assert other.param_groups[0]["lr"] == 0.7, "hyper-parameters stay the user's"


def test_one_table_and_rows_alone(tmp_path):
    variables = tables()
    optimizer = sok.OptimizerWrapper(optim.Adam(variables, lr=0.1))
    train(variables, optimizer, range(2))
    sok.dump(tmp_path / "d", variables, optimizer)
    other = tables(initializer="zeros")[1]
    assert sok.load(tmp_path / "d", other).optimizer.name == "Adam"
    same([variables[1]], [other])
    sok.dump(tmp_path / "d", other)
    assert optimizer_of(tmp_path / "d") is None
    with pytest.raises(ck.MismatchError, match="without an optimizer"):
        sok.load(tmp_path / "d", other, sok.OptimizerWrapper(optim.Adam([other])))


def test_adam_and_adamw_are_one(tmp_path):
    variables = tables()
    optimizer = sok.OptimizerWrapper(optim.AdamW(variables, lr=0.1))
    train(variables, optimizer, range(2))
    sok.dump(tmp_path / "d", variables, optimizer)
    others = tables()
    other = optim.Adam(others)  # not wrapped: its states are where the wrapper's are
    sok.load(tmp_path / "d", others, other)
    for table, twin in zip(variables, others, strict=True):
        assert torch.equal(optimizer.state[table]["exp_avg_sq"], other.state[twin]["exp_avg_sq"])


def test_momentum_of_keras(tmp_path):
    """velocity = -lr * buffer, with the learning rate of the dump."""
    (table,) = variables = [sok.Variable(shape=(6, 2), name="t")]
    state = np.arange(12, dtype=np.float32).reshape(6, 2)
    stored = ck.Table("t:0", 2, optimizer="SGD", states={"momentum": ck.State("float32", 2)})
    source = ck.from_arrays(stored, np.arange(6), np.zeros((6, 2), np.float32), {"momentum": state})
    settings = {"learning_rate": 0.25, "learning_rate_in_momentum": True}
    ck.dump(tmp_path / "d", [source], optimizer=ck.Optimizer("SGD", 3, settings))
    optimizer = sok.OptimizerWrapper(optim.SGD(variables, 0.5, momentum=0.9))
    sok.load(tmp_path / "d", variables, optimizer)
    np.testing.assert_array_equal(harness.by_key(table, optimizer.state[table]["momentum_buffer"].cpu()), state / -0.25)
    ck.dump(tmp_path / "d", [source], optimizer=ck.Optimizer("SGD", 3, {**settings, "learning_rate": 0.0}))
    with pytest.raises(ck.MismatchError, match="momentum of table 't' cannot be converted"):
        sok.load(tmp_path / "d", variables, optimizer)


def _wrapped(make):
    return lambda p: sok.OptimizerWrapper(make(p))


ADAM = _wrapped(lambda p: optim.Adam(p, 0.1))
# (tables, optimizer or None) that do not fit the dump of `tables()` with Adam: (error, part of the message)
MISFITS = {
    "rows": (lambda: [sok.Variable(shape=(51, 4), name="a")], None, ck.MismatchError, "a_0-key.*50 rows.*51 rows"),
    "dimension": (lambda: [sok.Variable(shape=(50, 5), name="a")], None, ck.MismatchError, "expected dimension 5"),
    "name": (lambda: [sok.Variable(shape=(50, 4), name="z")], None, ck.MismatchError, "holds no table 'z:0'.*a_0"),
    "optimizer": (tables, _wrapped(lambda p: optim.Adagrad(p)), ck.MismatchError, "states of Adam; expected.*Adagrad"),
    "state": (tables, _wrapped(lambda p: optim.Adam(p, amsgrad=True)), ck.MismatchError, "no state 'vhat' of Adam"),
    "same name twice": (lambda: [tables()[0], tables()[0]], None, ck.TableNameError, "a_0-key"),
    "no table": (
        lambda: [torch.nn.Parameter(torch.zeros(3, 3))],
        None,
        TypeError,
        r"vars\[0\] must be a sok.Variable, got Parameter.*filter_",
    ),
    "no optimizer": (tables, lambda p: "adam", TypeError, "OptimizerWrapper"),
    "not its tables": (tables, lambda p: ADAM(p[:1]), ValueError, "'b/c' is not among the parameters of the Adam"),
    "whole": (tables, _wrapped(lambda p: optim.LBFGS(p)), NotImplementedError, "LBFGS"),
}


@pytest.mark.parametrize(("make", "optimizer", "error", "message"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit(tmp_path, make, optimizer, error, message):
    variables = tables()
    trained = ADAM(variables)
    train(variables, trained, range(2))
    sok.dump(tmp_path / "d", variables, trained)
    others = make()
    before = [table.detach().clone() for table in others]
    with pytest.raises(error, match=message):
        sok.load(tmp_path / "d", others, optimizer and optimizer(others))
    same(before, others)


@pytest.mark.parametrize("dump", [sok.dump, sok.dump_async])
def test_bad_arguments(tmp_path, dump):
    variables = tables()
    for error, call in (
        (ValueError, lambda: sok.load(tmp_path / "d", variables, verify="after")),
        (TypeError, lambda: dump(tmp_path / "d", [torch.zeros(2, 2)])),
        (TypeError, lambda: dump(tmp_path / "d", None)),
        (TypeError, lambda: dump(tmp_path / "d", variables, step="two")),
        (ValueError, lambda: dump(tmp_path / "d", variables, step=2**70)),
        (ValueError, lambda: dump(tmp_path / "d", variables, extra={"a": object()})),
        (ck.MissingFileError, lambda: sok.load(tmp_path / "nowhere", variables)),
    ):
        with pytest.raises(error):
            call()
    assert not list(tmp_path.iterdir()), "nothing half-done"


def test_damage_changes_nothing(tmp_path):
    variables = tables()
    optimizer = ADAM(variables)
    train(variables, optimizer, range(2))
    sok.dump(tmp_path / "d", variables, optimizer)
    with open(tmp_path / "d" / "a_0-Adam-v", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    others = tables()
    other = ADAM(others)
    before = [table.detach().clone() for table in others]
    with pytest.raises(ck.ChecksumError, match="a_0-Adam-v"):
        sok.load(tmp_path / "d", others, other)
    same(before, others)
    assert not other.state


_NO_SPACE = """
import resource, signal, sys
import sparse_operation_kit.checkpoint as ck
import sparse_operation_kit.torch as sok
sok.init()
table = sok.Variable(shape=(50_000, 8), initializer="ones", name="t")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sok.dump(sys.argv[1], table, step=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
table.detach().zero_()
try:
    sok.dump(sys.argv[1], table, step=2)
except ck.NoSpaceError as error:
    assert "t_0-" in str(error), error
    assert sok.load(sys.argv[1], table).step == 1 and float(table.detach().min()) == 1.0
    print("the old dump is whole")
"""


def test_no_space_left(tmp_path):
    command = [sys.executable, "-c", _NO_SPACE, str(tmp_path / "d")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "the old dump is whole\n", done.stderr
    assert [path.name for path in pathlib.Path(tmp_path).iterdir()] == ["d"]
