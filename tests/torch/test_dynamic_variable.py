# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables in PyTorch, beside static ones of the same rows: lookups, steps, evaluation, growth, errors."""

import copy
import pathlib
import pickle

import pytest
import torch
from torch_harness import has_slots

import sparse_operation_kit.torch as sok
from sparse_operation_kit import dynamic
from sparse_operation_kit.torch import runtime

ROWS, DIMENSION = 60, 5
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "row-wise adagrad": lambda p: sok.RowWiseAdagrad(0.1, initial_accumulator_value=0.5).attach(p),
    "ftrl": lambda p: sok.Ftrl(0.1).attach(p),
    "not fused": lambda p: torch.optim.RAdam(p, lr=0.01),
}


def both(name="t", dimension=DIMENSION, dtype=torch.float32, **options):
    """A dynamic table and the static one of the same rows."""
    return sok.DynamicVariable(dimension, name=name, dtype=dtype, max_capacity=1000, **options), sok.Variable(
        shape=(ROWS, dimension), name=name, dtype=dtype
    )


def wrap(optimizer):
    return optimizer if isinstance(optimizer, (sok.RowWiseAdagrad, sok.Ftrl)) else sok.OptimizerWrapper(optimizer)


def ids(step, upto=ROWS, seed=0):
    """Bags of keys that are below a bound that grows with the steps; some come twice."""
    generator = torch.Generator().manual_seed(100 * seed + step)
    keys = torch.randint(0, min(upto, 8 + 7 * step), (13,), generator=generator)
    return keys, torch.tensor([0, 4, 4, 9, 13])


def as_static(table, rows=ROWS):
    """The rows of keys [0, rows), those that the table does not hold too."""
    keys = torch.arange(rows, dtype=table.key_type)
    with torch.no_grad():
        return sok.all2all_dense_embedding(table, keys).to(table.dtype)


def exported(table):
    keys, rows = sok.export(table)
    return dict(zip(keys.tolist(), map(tuple, rows.tolist()), strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_as_a_static_table(optimizer):
    tables = both()
    wrapped = [wrap(OPTIMIZERS[optimizer]([table])) for table in tables]
    for step in range(12):
        outputs = []
        for table, each in zip(tables, wrapped, strict=True):
            each.zero_grad()
            outputs.append(sok.lookup_sparse(table, ids(step), combiners="mean"))
            (outputs[-1] * torch.arange(1.0, 6)).sum().backward()
            each.step()
        assert torch.equal(*outputs)
    table, static = tables
    keys = torch.unique(torch.cat([ids(step)[0] for step in range(12)]))
    assert sorted(table.indices.tolist()) == keys.tolist() and table.size == len(keys)
    assert torch.equal(as_static(table), static.detach())
    for key, state in wrapped[1].state[static].items():
        if state.dim():
            slots = table._core.locate(keys, False)
            grown = wrapped[0].state[table][key]
            assert has_slots(grown, len(keys)) and torch.equal(grown[slots], state[keys]), key


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_row_dtypes(dtype):
    tables = both(dtype=dtype)
    wrapped = [sok.OptimizerWrapper(torch.optim.Adagrad([table], lr=0.1)) for table in tables]
    for step in range(6):
        for table, each in zip(tables, wrapped, strict=True):
            each.zero_grad()
            sok.lookup_sparse(table, ids(step)).square().sum().backward()
            assert table.grad.dtype == dtype
            each.step()
    assert (
        torch.equal(as_static(tables[0]), tables[1].detach())
        and wrapped[0].state[tables[0]]["sum"].dtype == torch.float32
    )


def test_mixed_call_with_weights():
    """Static and dynamic tables, twice each, weights and their gradients, side by side and apart."""
    for concat in (False, True):
        results = []
        for kind in range(2):
            first, second = both("a")[kind], both("b", 3)[kind]
            plain = sok.Variable(shape=(ROWS, 4), name="c")
            optimizer = sok.OptimizerWrapper(torch.optim.Adam([first, second, plain], lr=0.1))
            found = []
            for step in range(5):
                optimizer.zero_grad()
                weights = torch.linspace(0.5, 2, 13, requires_grad=True)
                outputs = sok.lookup_sparse(
                    [first, plain, second, first],
                    [ids(step), ids(step, seed=1), ids(step, seed=2), ids(step, seed=3)],
                    [weights, None, weights, None],
                    ["mean", "sum", "sqrtn", "sum"],
                    concat=concat,
                )
                outputs = [outputs] if concat else outputs
                sum((output.square()).sum() for output in outputs).backward()
                optimizer.step()
                found += [*(output.detach() for output in outputs), weights.grad]
            found.append(plain.detach().clone())
            results.append(found)
        assert all(map(torch.equal, *results))


def test_evaluation_changes_nothing():
    table, static = both()
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table, static], lr=0.1))
    sum(sok.lookup_sparse(x, ids(0)).sum() for x in (table, static)).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = (int(table.size), exported(table))
    keys = (torch.tensor([3, 59, 3, 40, 5]), torch.tensor([0, 2, 5]))
    weights = torch.tensor([1.0, 2, 0.5, 1, 3], requires_grad=True)
    for given in (None, weights):
        expected = sok.lookup_sparse(static, keys, given)
        output = sok.lookup_sparse(table, keys, given, training=False)
        assert torch.equal(output, expected) and output.requires_grad == (given is not None)
        if given is not None:
            gradients = [torch.autograd.grad(x.square().sum(), weights)[0] for x in (output, expected)]
            assert torch.equal(*gradients)
        with torch.no_grad():
            assert torch.equal(sok.lookup_sparse(table, keys, given), expected)
        with torch.inference_mode():
            assert torch.equal(sok.lookup_sparse(table, keys, given), expected)
    table.requires_grad_(False)
    assert torch.equal(sok.lookup_sparse(table, keys), sok.lookup_sparse(static, keys))
    assert before == (int(table.size), exported(table)) and table.grad is None


def test_evaluation_beside_training_in_one_call():
    """A frozen table is read by key while another one of the call is trained."""
    frozen, static = both("frozen", trainable=False)
    table, _ = both("t")
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0))
    outputs = sok.lookup_sparse([frozen, table], [ids(0), ids(0)])
    assert torch.equal(outputs[0], sok.lookup_sparse(static, ids(0)))
    (outputs[0] * outputs[1]).sum().backward()
    optimizer.step()
    assert frozen.size == 0 and frozen.grad is None and table.size == len(ids(0)[0].unique())


def test_any_integer_is_a_key():
    table = sok.DynamicVariable(2, "normal", name="t")
    keys = torch.tensor([0, -1, 2**63 - 1, -(2**63), 5, -1])
    rows = sok.all2all_dense_embedding(table, keys.view(2, 3))
    assert rows.shape == (2, 3, 2) and table.size == 5 and has_slots(table, 5)
    assert table.size() == table.shape and table.size(0) == len(table)
    assert table.indices.tolist() == keys[:5].tolist() and len(torch.unique(rows.flatten(0, 1), dim=0)) == 5
    narrow = sok.DynamicVariable(2, "normal", name="t", key_type=torch.int32)
    assert torch.equal(
        sok.all2all_dense_embedding(narrow, torch.tensor([5, -1], dtype=torch.int32)), rows.view(-1, 2)[[4, 1]]
    )
    assert narrow.indices.dtype == torch.int32 == sok.export(narrow)[0].dtype
    sok.all2all_dense_embedding(table, torch.tensor([7], dtype=torch.int32))
    for call in (
        lambda: sok.all2all_dense_embedding(narrow, torch.tensor([1])),
        lambda: sok.lookup_sparse(narrow, (torch.tensor([1]), torch.tensor([0, 1]))),
        lambda: sok.assign(narrow, torch.tensor([1]), torch.ones(1, 2)),
    ):
        with pytest.raises(TypeError, match=r"'t' must be int32, its key_type, not int64"):
            call()
    assert narrow.size == 2


def test_seeds():
    def row(**options):
        return sok.all2all_dense_embedding(sok.DynamicVariable(3, name="t", **options), torch.tensor([-4])).tolist()

    assert row() == row() == row(seed=0) != row(seed=1)
    runtime.shutdown()
    sok.init(seed=1)
    assert row() == row(seed=1)


def test_a_full_table_refuses():
    """Nothing is inserted, into no table of the call."""
    table, other = (
        sok.DynamicVariable(2, name="t", max_capacity=4, evict_strategy=None),
        sok.DynamicVariable(2, name="u"),
    )
    sok.lookup_sparse(table, (torch.tensor([1, 2, 3]), torch.tensor([0, 3])))
    before = exported(table)
    keys = (torch.tensor([3, 4, 5]), torch.tensor([0, 3]))
    for call in (
        lambda: sok.lookup_sparse([other, table], [keys, keys]),
        lambda: sok.assign(table, keys[0], torch.ones(3, 2)),
    ):
        with pytest.raises(torch.OutOfMemoryError, match=r"'t'.*no room for the new ones"):
            call()
        assert exported(table) == before and has_slots(table, 3) and other.size == 0
    sok.lookup_sparse(table, (torch.tensor([4]), torch.tensor([0, 1])))
    assert table.size == 4 == table.capacity


def test_a_wrong_key_of_another_table_inserts_nothing():
    table, static = both()
    with pytest.raises(IndexError, match=rf"{ROWS} is outside"):
        sok.lookup_sparse([table, static], [ids(0), (torch.tensor([ROWS]), torch.tensor([0, 1]))])
    assert table.size == 0 and has_slots(table, 0)


def test_a_full_table_evicts():
    table = sok.DynamicVariable(1, "zeros", name="t", max_capacity=3)
    optimizer = sok.OptimizerWrapper(torch.optim.Adagrad([table], lr=1.0))
    for key in (1, 2, 3, 1, 4):
        optimizer.zero_grad()
        sok.all2all_dense_embedding(table, torch.tensor([key])).sum().backward()
        optimizer.step()
    assert sorted(table.indices.tolist()) == [1, 3, 4] and has_slots(table, 3)  # 2 was used least recently
    sums = optimizer.state[table]["sum"]
    slots = table._core.locate(torch.tensor([1, 3, 4]), False)
    assert sums[slots].flatten().tolist() == [2, 1, 1]


@pytest.mark.parametrize("look", [False, True])
def test_a_gradient_whose_row_is_gone_is_refused(look):
    table = sok.DynamicVariable(1, "zeros", name="t", max_capacity=2)
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0))
    sok.all2all_dense_embedding(table, torch.tensor([1])).sum().backward()
    if look:
        table.grad.coalesce()
    for key in (2, 3):
        sok.all2all_dense_embedding(table, torch.tensor([key]))
    before = exported(table)
    assert 1 not in before
    with pytest.raises(RuntimeError, match=r"table 't': a row of this gradient was erased or evicted"):
        optimizer.step()
        sok.check_errors()  # a GPU says it later
    assert exported(table) == before


def test_accumulation_over_growth():
    """Lookups between which the table grows, then one step; in one backward pass too, and with gradients looked at."""
    for look in (False, True):
        tables = both()
        wrapped = [sok.OptimizerWrapper(torch.optim.Adam([table], lr=0.1)) for table in tables]
        for table, each in zip(tables, wrapped, strict=True):
            for step in range(3):
                sok.lookup_sparse(table, ids(step)).square().sum().backward()
                if look:
                    assert table.grad.shape == table.shape
                    torch.nn.utils.clip_grad_norm_([table], 0.1)
            outputs = [sok.lookup_sparse(table, ids(step)) for step in range(3, 6)]
            sum(output.square().sum() for output in outputs).backward()
            assert table.grad.to_dense().shape == table.shape
            each.step()
        assert torch.equal(as_static(tables[0]), tables[1].detach())
        table = tables[0]
        wrapped[0].zero_grad()
        assert table.grad is None


def test_gradients_that_go_through_autograd():
    """autograd.grad(), hooks and dense gradients while the table grows."""
    tables = both()
    seen, results = [], []
    for table in tables:
        handle = table.register_hook(lambda gradient: seen.append(gradient.shape))
        first, second = (sok.lookup_sparse(table, ids(step)) for step in (0, 3))
        (gradient,) = torch.autograd.grad(first.sum() + (second**2).sum(), table)
        dense = gradient.to_dense()
        assert dense.shape == table.shape
        results.append(dense[table._core.locate(ids(3)[0], False)] if table is tables[0] else dense[ids(3)[0]])
        first, second = (sok.lookup_sparse(table, ids(step)) for step in (1, 6))
        first.sum().backward()
        assert table.grad.shape == table.shape
        sok.lookup_sparse(table, ids(7)).sum().backward()
        second.sum().backward()
        assert table.grad.shape == table.shape
        handle.remove()
    assert torch.equal(*results) and len(seen) == 8


def test_a_dense_gradient_that_a_user_sets():
    """Lookups that bring new keys add to it."""
    table, _ = both()
    sok.lookup_sparse(table, ids(6))
    table.grad = torch.ones_like(table)
    sok.lookup_sparse(table, (torch.tensor([1000]), torch.tensor([0, 1]))).sum().backward()
    before = as_static(table, 1001)
    sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0)).step()
    held = table.indices
    assert torch.equal(as_static(table, 1001)[held], before[held] - 1)


def test_a_gradient_is_read_after_the_table_has_grown_or_was_cleared():
    table, _ = both()

    def use(*keys):
        return sok.lookup_sparse(table, (torch.tensor(keys), torch.arange(len(keys) + 1)))

    (gradient,) = torch.autograd.grad((use(1, 2, 3) * torch.tensor([[1.0], [2.0], [3.0]])).sum(), table)
    shape = tuple(gradient.shape)
    use(4, 5)
    assert tuple(gradient.shape) == shape
    assert gradient.to_dense()[:3].tolist() == [[1.0] * 5, [2.0] * 5, [3.0] * 5]
    before = table.detach().clone()
    table.grad = gradient
    sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0)).step()
    torch.testing.assert_close(table[:3] + torch.tensor([[1.0], [2.0], [3.0]]), before[:3])
    assert torch.equal(table[3:5], before[3:5])
    (gradient,) = torch.autograd.grad(use(1, 2).sum(), table)
    table.clear()
    with pytest.raises(RuntimeError, match=r"a row of this gradient was erased or evicted|is not in \[0, 0\)"):
        gradient.to_dense()
        sok.check_errors()


def test_assign_and_export():
    table, _ = both()
    keys = torch.tensor([7, -3, 7], dtype=torch.int32)
    sok.assign(table, keys, torch.arange(15.0).view(3, 5))
    assert exported(table) == {7: (10, 11, 12, 13, 14), -3: (5, 6, 7, 8, 9)} and has_slots(table, 2)
    sok.assign(table, [-3, 2**40], torch.zeros(2, 5))
    assert sorted(exported(table)) == [-3, 7, 2**40]
    with pytest.raises(ValueError, match=r"\[n, 5\]"):
        sok.assign(table, [1], torch.zeros(1, 4))
    assert sok.filter_variables([table, torch.ones(1)])[0][0] is table


def test_properties():
    table = sok.DynamicVariable(3, "ones", "hbm", "t", mode="localized:0", dtype=torch.float16, init_capacity=10)
    assert (table.dimension, table.key_type, table.backend_type, table.mode) == (3, torch.int64, "hbm", "localized:0")
    assert table.target_gpu == 0 and table.num_gpus == 1 and table.size == 0 and table.shape == (0, 3)
    assert isinstance(table, torch.nn.Parameter) and table.requires_grad and table.name == "t"
    assert table.capacity > 1 << 20 and "DynamicVariable 't' [3] hbm localized:0" in repr(table)
    assert sok.DynamicVariable(3).capacity == dynamic.HYBRID_CAPACITY
    names = [sok.DynamicVariable(1).name for _ in range(2)]
    assert names[0].startswith("sok_dynamic_Variable_") and names[0] != names[1]
    with pytest.raises(ValueError, match="any integers"):
        table.key_map(3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_capcity": 3}, TypeError, "max_capcity.*max_capacity"),
        ({"constraint": abs}, TypeError, "constraint must be None"),
        ({"dtype": torch.float64}, TypeError, "must be float32 or float16 or bfloat16"),
        ({"mode": "localized:1"}, ValueError, r"\[0, 1\)"),
        ({"initializer": torch.nn.init.ones_}, TypeError, "name or a number"),
        ({"key_type": torch.int16}, TypeError, "key_type must be int32 or int64"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        sok.DynamicVariable(3, name="t", **options)


def trained():
    table, _ = both()
    optimizer = sok.OptimizerWrapper(torch.optim.Adam([table], lr=0.1))
    for step in range(4):
        optimizer.zero_grad()
        sok.lookup_sparse(table, ids(step)).sum().backward()
        optimizer.step()
    return table, optimizer


@pytest.mark.parametrize("how", [copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table))])
def test_copies(how):
    table, _ = trained()
    copied = how(table)
    assert type(copied) is sok.DynamicVariable and exported(copied) == exported(table) and copied.name == "t"
    sok.all2all_dense_embedding(copied, torch.tensor([-5]))
    assert copied.size == table.size + 1 and -5 not in table.indices


def test_copies_of_optimizers():
    """States that load_state_dict, or a copy, brings become columns that grow."""
    table, optimizer = trained()
    twin, other = copy.deepcopy((table, optimizer))
    third = copy.deepcopy(table)
    loaded = sok.OptimizerWrapper(torch.optim.Adam([third], lr=0.1))
    loaded.optimizer.load_state_dict(copy.deepcopy(optimizer.optimizer.state_dict()))
    for step in range(4, 7):
        for each, wrapped in ((table, optimizer), (twin, other), (third, loaded)):
            wrapped.zero_grad()
            sok.lookup_sparse(each, ids(step)).sum().backward()
            wrapped.step()
    assert exported(table) == exported(twin) == exported(third)
    assert has_slots(other.state[twin]["exp_avg"], int(twin.size))


def test_columns_are_used_again():
    """An optimizer that is gone leaves no memory behind; the table lives as long as a tensor of its memory."""
    table, _ = trained()
    table.grad = None
    held = table._core.bytes()
    for _ in range(5):
        optimizer = sok.OptimizerWrapper(torch.optim.Adam([table], lr=0.1))
        sok.lookup_sparse(table, ids(0)).sum().backward()
        optimizer.step()
        assert bool((optimizer.state[table]["exp_avg_sq"] != 0).any(dim=1).sum() == len(ids(0)[0].unique()))
        del optimizer
        table.grad = None
    assert table._core.bytes() == held
    rows = table.detach()
    before = rows.clone()
    del table
    assert torch.equal(rows, before)


LIVES = {
    "made": lambda table: None,
    "looked up": lambda table: sok.lookup_sparse(table, ids(0)),
    "assigned": lambda table: sok.assign(table, [1, 2], torch.ones(2, DIMENSION)),
    "copied": lambda table: copy.deepcopy(table),
}


@pytest.mark.parametrize("life", LIVES)
def test_a_table_that_is_gone_leaves_no_memory_behind(life):
    """Whatever was done to it, and if nothing was."""
    number = []
    for _ in range(2):
        for _ in range(30):
            LIVES[life](sok.DynamicVariable(DIMENSION, name="t"))
        number.append(len(pathlib.Path("/proc/self/maps").read_text().splitlines()))
    assert number[1] - number[0] < 30, number


def test_other_memory_is_refused():
    table, _ = trained()
    module = torch.nn.Module()
    module.table = table
    module.to(table.device)
    module.float()
    before = exported(table)
    for change in (module.half, module.double):
        with pytest.raises(RuntimeError, match="dynamic table 't' cannot be moved"):
            change()
    assert exported(table) == before


def test_collection():
    table, static = both()
    outputs = []
    for each in (table, static):
        bags = sok.EmbeddingBagCollection({"t": each}, {"a": "t", "b": "t"}, "sum")
        inputs = {"a": ids(1), "b": torch.tensor([[1, 2], [50, 3]])}
        assert [name for name, _ in bags.named_parameters()] == ["tables.t"]
        bags.eval()
        outputs.append([*bags(inputs).values()])
        assert each is static or each.size == 0
        bags.train()
        outputs[-1] += bags(inputs).values()
    assert all(map(torch.equal, *outputs)) and table.size > 0


def test_compiled():
    """Outside the graphs; it trains and evaluates to the same numbers, with weights too."""

    def call(table, keys, offsets, weights):
        single = sok.all2all_dense_embedding(table, keys.view(1, -1))
        return sok.lookup_sparse(table, (keys, offsets), weights).exp(), single * 2

    torch._dynamo.reset()
    tables = both()
    optimizers = [sok.OptimizerWrapper(torch.optim.Adam([table], lr=0.1)) for table in tables]
    runs = (torch.compile(call, backend="aot_eager"), call)
    for step in range(4):
        results = []
        for table, optimizer, run in zip(tables, optimizers, runs, strict=True):
            optimizer.zero_grad()
            weights = torch.linspace(0.5, 2, 13, requires_grad=True)
            keys, offsets = ids(step)
            outputs = run(table, keys, offsets, weights)
            sum(output.sum() for output in outputs).backward()
            optimizer.step()
            results.append([*(output.detach() for output in outputs), weights.grad])
        assert all(map(torch.equal, *results))
    size = int(tables[0].size)
    with torch.no_grad():
        keys, offsets = ids(9)
        results = [run(table, keys, offsets, torch.ones(13)) for table, run in zip(tables, runs, strict=True)]
    assert all(map(torch.equal, *results)) and tables[0].size == size > 0
    torch._dynamo.reset()
