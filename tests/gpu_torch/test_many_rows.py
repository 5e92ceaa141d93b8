# SPDX-License-Identifier: Apache-2.0
"""More than 2^31 rows in one table: numbers of slots, entries and bytes that 32 bits do not hold."""

import many_rows
import pytest
import torch
from many_rows import BATCH, MEMORY, ROWS, keys_of

import sparse_operation_kit.torch as sok

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def large_gpu():
    if torch.cuda.get_device_properties(GPU).total_memory < MEMORY:
        pytest.skip("needs a GPU with 120 GiB")
    yield
    torch.cuda.empty_cache()


def values_of(numbers):
    """[n, 1] float32."""
    return many_rows.values_of(numbers).float()[:, None]


def batches(first=0, end=ROWS):
    """Numbers of keys, a batch at a time."""
    return (torch.arange(start, min(start + BATCH, end), device=GPU) for start in range(first, end, BATCH))


def read(table, numbers, training=False):
    splits = torch.arange(len(numbers) + 1, device=GPU)
    return sok.lookup_sparse(table, (keys_of(numbers), splits), combiners="sum", training=training)


def sample(seed):
    """65,536 numbers from everywhere, the first and the last among them."""
    generator = torch.Generator(GPU).manual_seed(seed)
    some = torch.randint(ROWS, (65_536,), generator=generator, device=GPU)
    return torch.cat([some, torch.tensor([0, ROWS - 1], device=GPU)]).unique()


def test_grows_trains_erases_and_is_read():
    table = sok.DynamicVariable(1, "zeros", var_type="hbm", name="t", device=GPU)
    for numbers in batches():
        sok.assign(table, keys_of(numbers), values_of(numbers))
    assert int(table.size) == table.shape[0] == ROWS
    for numbers in batches():
        assert torch.equal(read(table, numbers), values_of(numbers))
    assert not read(table, ROWS + torch.arange(1000, device=GPU)).any()
    held = table.indices
    for numbers in batches():
        assert torch.equal(held[numbers], keys_of(numbers))
    del held

    trained, seen = sample(1), sample(2)
    assert int(table.slots_of(keys_of(trained)).max()) == ROWS - 1
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0))
    read(table, trained, training=True).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(read(table, trained), values_of(trained) - 1)
    others = seen[~torch.isin(seen, trained)]
    assert len(others) > 60_000 and torch.equal(read(table, others), values_of(others))

    newest = ROWS - 1 - torch.arange(BATCH // 2, device=GPU)
    freed = table.slots_of(keys_of(newest))
    assert table.erase(keys_of(newest)) == BATCH // 2 and int(table.size) == ROWS - BATCH // 2
    assert not read(table, newest).any()
    for numbers in batches(end=ROWS - BATCH):
        kept = numbers[~torch.isin(numbers, trained)]
        assert torch.equal(read(table, kept), values_of(kept))
    again = ROWS + torch.arange(BATCH // 2, device=GPU)
    sok.assign(table, keys_of(again), values_of(again))
    assert int(table.size) == ROWS
    assert torch.equal(table.slots_of(keys_of(again)).sort()[0], freed.sort()[0])
    assert torch.equal(read(table, again), values_of(again))


def test_full_tables_evict_and_train_with_states():
    table = sok.DynamicVariable(
        1, "zeros", name="t", device=GPU, init_capacity=ROWS, max_capacity=ROWS, evict_strategy="lru"
    )
    optimizer = sok.OptimizerWrapper(torch.optim.Adam([table], lr=0.5))
    read(table, torch.arange(10, device=GPU), training=True).sum().backward()
    optimizer.step()  # the states
    optimizer.zero_grad()
    for numbers in batches():
        sok.assign(table, keys_of(numbers), values_of(numbers))
    assert int(table.size) == table.shape[0] == table.capacity == ROWS

    # The newest rows and the second batch are trained; then half of the first batch has to go.
    trained = torch.cat([torch.arange(BATCH, BATCH + 1000, device=GPU), ROWS - 1 - torch.arange(1000, device=GPU)])
    read(table, trained, training=True).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert (read(table, trained) < values_of(trained)).all()
    new = ROWS + torch.arange(BATCH // 2, device=GPU)
    sok.assign(table, keys_of(new), values_of(new) + 1)
    assert int(table.size) == table.shape[0] == ROWS and table.statistics().evictions == BATCH // 2
    assert torch.equal(read(table, new), values_of(new) + 1)
    first = read(table, torch.arange(BATCH, device=GPU))
    assert int((first != 0).sum()) == BATCH // 2
    for numbers in batches(BATCH):
        kept = numbers[~torch.isin(numbers, trained)]
        assert torch.equal(read(table, kept), values_of(kept))

    keys, slots = table.held().export(ROWS - 1000, 1000)  # as dumps read a table, in pieces
    assert slots.tolist() == list(range(ROWS - 1000, ROWS))
    assert keys.tolist() == keys_of(torch.arange(ROWS - 1000, ROWS)).tolist()
