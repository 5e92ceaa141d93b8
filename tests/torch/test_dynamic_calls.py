# SPDX-License-Identifier: Apache-2.0
"""What users call on dynamic tables between steps: erase, clear, epochs, ranks of their own, counts, rows with those
that went for them.
"""

import copy
import threading

import pytest
import torch
from torch_harness import has_slots

import sparse_operation_kit.torch as sok
from sparse_operation_kit.dynamic import MOST_SCORE, Statistics
from sparse_operation_kit.torch import keyed_shard, runtime


def make(capacity=4, initializer="zeros", **options):
    return sok.DynamicVariable(2, initializer, name="t", max_capacity=capacity, **options)


def use(table, *keys):
    """One call that trains, or could."""
    return sok.all2all_dense_embedding(table, torch.tensor(keys, dtype=table.key_type))


def held(table):
    return sorted(table.indices.tolist())


def adagrad(table):
    return sok.OptimizerWrapper(torch.optim.Adagrad([table], lr=1.0))


def test_erase():
    table = make()
    optimizer = adagrad(table)
    use(table, 1, 2, 3).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert table.erase(torch.tensor([2, 9, 2, 3], dtype=torch.int32)) == 2 and held(table) == [1]
    assert table.erase([2]) == 0 == table.erase(torch.zeros(0, dtype=torch.int64)) and has_slots(table, 3)
    use(table, 2).sum().backward()
    optimizer.step()
    assert held(table) == [1, 2]
    slot = table._core.locate(torch.tensor([2]), False)
    assert optimizer.state[table]["sum"][slot].tolist() == [[1, 1]]  # it began as new


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("how", ["erase", "clear"])
def test_a_gradient_of_an_erased_row_is_refused(how, look):
    table = make()
    optimizer = adagrad(table)
    use(table, 1, 2).sum().backward()
    if look:
        table.grad.coalesce()
    table.erase([2]) if how == "erase" else table.clear()
    with pytest.raises(RuntimeError, match=r"table 't': a row of this gradient was erased or evicted"):
        optimizer.step()
        sok.check_errors()  # a GPU says it later
    use(table, 3)
    with pytest.raises(RuntimeError, match=r"table 't': a row of this gradient was erased or evicted"):
        optimizer.step()
        sok.check_errors()  # a GPU says it later
    assert not sok.export(table)[1].any()
    optimizer.zero_grad()
    use(table, 3).sum().backward()
    optimizer.step()
    assert sok.export(table)[1].tolist()[-1] == [-1, -1]


def test_clear():
    table = make()
    optimizer = adagrad(table)
    use(table, 1, 2, 3).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    memory = table._core.bytes()
    table.clear()
    state = optimizer.state[table]["sum"]
    assert table.size == 0 and table.shape == state.shape == (0, 2) and table._core.bytes() == memory
    use(table, 7).sum().backward()
    optimizer.step()
    assert held(table) == [7] and state.tolist() == [[1, 1]]


def test_erased_rows_stay_erased_in_a_gradient_that_was_given():
    """A dense gradient of all slots reaches those that have keys, also where there are fewer slots than it has."""
    table = make()
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0))
    use(table, 1, 2, 3)
    table.grad = torch.ones_like(table)
    table.erase([2])
    optimizer.step()
    assert dict(zip(*(x.tolist() for x in sok.export(table)), strict=True)) == {1: [-1, -1], 3: [-1, -1]}
    table.clear()
    use(table, 5)
    with pytest.raises((RuntimeError, ValueError), match="table 't'"):
        optimizer.step()
        sok.check_errors()
    assert sok.export(table)[1].tolist() == [[0, 0]]


@pytest.mark.parametrize("strategy", ["epoch_lru", "epoch_lfu"])
def test_epochs(strategy):
    table = make(evict_strategy=strategy)
    use(table, 1)
    table.set_epoch(1)
    use(table, 2, 3)
    for _ in range(3):
        use(table, 1)
    table.set_epoch(2)
    use(table, 3, 4)
    sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0)).step()
    table._core.end_step()
    use(table, 5)
    assert held(table) == [1, 3, 4, 5]
    for epoch in (-1, 2**31):
        with pytest.raises(ValueError, match=r"the epoch of table 't' must be in"):
            table.set_epoch(epoch)


def test_scores():
    table = make(evict_strategy="customized")
    use(table, 1, 2, 3, 4)
    assert table.scores([4, 9, 1]).tolist() == [0, -1, 0]
    table.set_scores(torch.tensor([3, 1, 9, 2, 4]), torch.tensor([5, MOST_SCORE, 7, 0, 6], dtype=torch.int64))
    assert table.scores([1, 2, 3, 4]).tolist() == [MOST_SCORE, 0, 5, 6] and held(table) == [1, 2, 3, 4]
    table._core.end_step()
    for key, gone in ((5, 2), (6, 5)):  # 5 has rank 0, but is used by the running step
        use(table, key)
        assert gone not in held(table)
        table._core.end_step()
    table.set_scores([6], [8])
    use(table, 7)
    assert held(table) == [1, 4, 6, 7]


def test_ranks_leave_the_order_of_use():
    table = make(3, evict_strategy="customized")
    for key in (3, 1, 2, 3):
        use(table, key)
    table.set_scores([2, 1, 3], [4, 4, 4])
    table._core.end_step()
    use(table, 5)
    assert held(table) == [2, 3, 5]


def test_wrong_scores_change_nothing():
    table = make(evict_strategy="customized")
    use(table, 1, 2)
    for scores in ([1, -1], [MOST_SCORE + 1, 0]):
        with pytest.raises(ValueError, match=rf"scores of table 't' must be in \[0, {MOST_SCORE}\]"):
            table.set_scores([1, 2], scores)
    with pytest.raises(ValueError, match=r"scores of table 't' must be \[2\]"):
        table.set_scores([1, 2], [1])
    with pytest.raises(TypeError, match=r"scores of table 't' must be integers"):
        table.set_scores([1, 2], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"keys of table 't' must be \[n\]"):
        table.set_scores([[1, 2]], [[1, 2]])
    with pytest.raises(TypeError, match="indices must be int32 or int64, not float32"):
        table.erase([1.0])
    assert table.scores([1, 2]).tolist() == [0, 0]
    for strategy in ("lru", None):
        other = make(evict_strategy=strategy)
        for call, arguments in ((other.scores, [[1]]), (other.set_scores, [[1], [1]])):
            with pytest.raises(ValueError, match=f"no scores of yours: evict_strategy is {strategy!r}"):
                call(*arguments)
        with pytest.raises(ValueError, match="table 't' has no epochs"):
            other.set_epoch(1)


def test_statistics():
    table = make(3)
    assert table.statistics() == Statistics.of(0, 3, 0, 0, 0, 0, 0)
    use(table, 1, 2, 1)
    use(table, 3)
    assert table.statistics() == Statistics.of(3, 3, 4, 3, 0, 0, 0) and table.statistics().load_factor == 1
    use(table, 4, 3)
    assert table.statistics() == Statistics.of(3, 3, 6, 4, 1, 0, 0)
    with torch.no_grad():
        use(table, 99, 1)
    table.erase([3])
    assert table.statistics() == Statistics(
        2, 3, 2 / 3, lookups=6, hits=2, misses=4, insertions=4, evictions=1, refusals=0, expirations=0
    )
    with pytest.raises(torch.OutOfMemoryError):
        use(table, 1, 2, 3, 4, 5)
    lookups = 11 if table.is_cuda else 6  # a GPU finds later that there was no room
    assert table.statistics() == Statistics.of(2, 3, lookups, 4, 1, 0, 0)


def test_prefetching_on_a_cpu():
    """All rows are in one memory: nothing is to be brought, whatever the tables are. What is no table is refused."""
    table, static = make(9, max_hbm_for_vectors=0.5), sok.Variable(shape=(4, 2), name="static")
    assert table.device_rows == 2**29 // 8 and make().device_rows == 0
    use(table, 1, 2)
    before = table.statistics()
    ids = (torch.tensor([1, 7]), torch.tensor([0, 1, 2]))
    assert sok.prefetch([table, static], [ids, ids]) is None and sok.prefetch(table, ids) is None
    assert table.statistics() == before and before.host_bytes == before.moves == 0
    with pytest.raises(TypeError):
        sok.prefetch(torch.zeros(3), ids)
    with pytest.raises(ValueError, match="1"):
        sok.prefetch([table, static], [ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_type", [torch.int32, torch.int64])
def test_read_and_evict(dtype, key_type):
    table, fresh = (make(capacity, "normal", dtype=dtype, key_type=key_type) for capacity in (3, 99))
    keys = torch.tensor([[1, 2], [1, 3]], dtype=key_type)
    rows, gone, gone_rows = sok.sparse_read_and_evict(table, keys)
    assert torch.equal(rows, use(fresh, 1, 2, 1, 3).view(2, 2, 2).to(dtype)) and rows.dtype == dtype
    assert gone.tolist() == [] and gone.dtype == key_type and gone_rows.shape == (0, 2) and held(table) == [1, 2, 3]
    sok.assign(table, keys[0], torch.tensor([[1.0, 2], [3, 4]]))
    table._core.end_step()
    rows, gone, gone_rows = sok.sparse_read_and_evict(table, torch.tensor([2, 5, 6], dtype=key_type))
    assert rows[0].tolist() == [3, 4] and held(table) == [2, 5, 6] and rows.requires_grad is False
    assert dict(zip(gone.tolist(), gone_rows.tolist(), strict=True)) == {
        1: [1, 2],
        3: use(fresh, 3).to(dtype)[0].tolist(),
    }
    before = sok.export(table)
    with pytest.raises(torch.OutOfMemoryError, match="table 't'"):
        sok.sparse_read_and_evict(table, torch.arange(4, dtype=key_type))
    assert all(map(torch.equal, before, sok.export(table))) and gone_rows.dtype == dtype
    empty = sok.sparse_read_and_evict(table, torch.zeros((0, 5), dtype=key_type))
    assert empty[0].shape == (0, 5, 2) and len(empty[1]) == 0


def test_rows_assigned_between_steps_go_before_those_of_the_step():
    table = make(evict_strategy="lfu")
    for _ in range(5):
        sok.assign(table, [1, 2], torch.ones(2, 2))
    outputs = [use(table, 3, 4), use(table, 5, 6)]
    assert held(table) == [3, 4, 5, 6]
    sum(output.sum() for output in outputs).backward()
    sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0)).step()


def test_read_and_evict_of_a_table_that_evicts_nothing():
    table = make(evict_strategy=None)
    rows, gone, gone_rows = sok.sparse_read_and_evict(table, torch.tensor([[5]]))
    assert rows.tolist() == [[[0, 0]]] and len(gone) == len(gone_rows) == 0 and held(table) == [5]
    with pytest.raises(TypeError, match=r"must be a sok\.DynamicVariable"):
        sok.sparse_read_and_evict(sok.Variable(shape=(3, 2)), [1])


def test_keys_of_other_ranks(monkeypatch):
    """They are not held here; rows are read of this rank's alone."""
    table = make()
    monkeypatch.setattr(table, "_placement", type(table._placement)(-1, 2, -1, 3, 1))
    with pytest.raises(IndexError, match="table 't': key -3 belongs to rank 0, this is rank 1"):
        sok.sparse_read_and_evict(table, [4, -3])
    assert table.size == 0 and table.erase([0, 1]) == 0
    runtime.shutdown()


def test_threads():
    """Several train a table, one evaluates it, one exports it, all at once."""
    table = sok.DynamicVariable(8, "1", name="t")
    wrong, trained = [], threading.Event()

    def bags(generator):
        return torch.randint(0, 100_000, (50,), generator=generator), torch.arange(51)

    def train(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(500):
            rows = sok.lookup_sparse(table, bags(generator), combiners="sum")
            wrong.extend(["training"] * int((rows != 1).any()))

    def evaluate():
        generator = torch.Generator().manual_seed(9)
        while not trained.is_set():
            rows = sok.lookup_sparse(table, bags(generator), combiners="sum", training=False)
            wrong.extend(["evaluation"] * int((rows != 1).any()))

    def export():
        while not trained.is_set():
            keys, rows = sok.export(table)
            wrong.extend(["export"] * int((rows != 1).any() or len(keys.unique()) < len(keys)))

    def caught(call, *arguments):
        try:
            call(*arguments)
        except Exception as error:
            wrong.append(repr(error))

    beside = [threading.Thread(target=caught, args=(call,)) for call in (evaluate, export)]
    training = [threading.Thread(target=caught, args=(train, seed)) for seed in range(3)]
    for thread in (*beside, *training):
        thread.start()
    for thread in training:
        thread.join()
    trained.set()
    for thread in beside:
        thread.join()
    assert not wrong, wrong[:3]
    assert table.size == len(table.indices.unique()) > 20_000


@pytest.mark.parametrize("kind", ["export", "copy", "state_dict", "step on rows"])
def test_rows_of_other_keys_beside_a_thread(kind):
    """Keys come and go while another thread reads the whole table, or steps it where the core does not: rows, which are
    their keys, stay with their keys.
    """
    table = sok.DynamicVariable(1, name="t", initializer="zeros", max_capacity=4000)
    optimizer = sok.OptimizerWrapper(torch.optim.NAdam([table], lr=1e-30))  # changes nothing
    ended, wrong = threading.Event(), []

    def assign():
        for first in range(1, 400_000, 1000):
            keys = torch.arange(first, first + 1000)
            table.erase(-torch.arange(1, 1001))  # those of the step: others get their slots
            sok.assign(table, keys, keys.to(torch.float32)[:, None])

    def look(keys, rows):
        wrong.extend(keys[(rows[:, 0] != keys) & (rows[:, 0] != 0) & (keys > 0)].tolist())

    def step(keys):
        sok.lookup_sparse(table, (keys, torch.arange(len(keys) + 1)), combiners="sum").sum().backward()
        try:
            optimizer.step()
        except RuntimeError as error:  # one that says so, and changes nothing
            assert "erased or evicted" in str(error), error
        optimizer.zero_grad()

    def read():
        while not ended.is_set():
            if kind == "step on rows":
                step(-torch.arange(1, 1001))
            elif kind == "state_dict":
                shard = keyed_shard.on_host(table)
                look(shard.held.keys, shard.plain)
            else:
                look(*sok.export(copy.deepcopy(table) if kind == "copy" else table))

    reader = threading.Thread(target=read)
    reader.start()
    assign()
    ended.set()
    reader.join()
    look(*sok.export(table))
    assert not wrong, f"{len(wrong)} keys had rows of others, {wrong[:3]} among them"
