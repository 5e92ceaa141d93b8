# SPDX-License-Identifier: Apache-2.0
"""A check of torch_gpu_worker.py: more than 2^31 rows on each rank."""

import many_rows
import torch
from many_rows import BATCH, ROWS, keys_of

import sparse_operation_kit.torch as sok

NEW = 1 << 20


def _values_of(numbers):
    """[n, 1] float32."""
    return many_rows.values_of(numbers).float()[:, None]


def _batches():
    """Numbers of this rank's keys, ROWS of them; key k belongs to rank k mod the number of ranks."""
    for first in range(0, ROWS * sok.num_ranks(), BATCH):
        numbers = torch.arange(first, first + BATCH)
        yield numbers[keys_of(numbers) % sok.num_ranks() == sok.rank()]


def _sample(seed):
    """NEW numbers of keys that the ranks hold; each rank has other ones."""
    generator = torch.Generator(torch.device("cuda", torch.cuda.current_device()))
    generator.manual_seed(seed * sok.num_ranks() + sok.rank())
    return torch.randint(ROWS * sok.num_ranks(), (NEW,), generator=generator)


def _read(table, numbers, **options):
    splits = torch.arange(len(numbers) + 1)
    return sok.lookup_sparse(table, (keys_of(numbers), splits), combiners="sum", **options)


def _times_looked_up(numbers, looked_up):
    """How often all ranks looked up each of these numbers."""
    everyones = [torch.empty_like(looked_up) for _ in range(sok.num_ranks())]
    torch.distributed.all_gather(everyones, looked_up)
    found, counts = torch.cat(everyones).unique(return_counts=True)
    places = torch.searchsorted(found, numbers).clamp(max=len(found) - 1)
    return torch.where(found[places] == numbers, counts[places], 0)


def many_rows_of_ranks():
    """Keys of all ranks are looked up and trained, new ones inserted, where slots take more than 31 bits."""
    table = sok.DynamicVariable(1, "zeros", var_type="hbm", name="t")
    rows = 0
    for numbers in _batches():
        sok.assign(table, keys_of(numbers), _values_of(numbers))
        rows += len(numbers)
    assert rows == ROWS == int(table.size)

    trained, seen = _sample(1), _sample(2)
    assert torch.equal(_read(table, seen, training=False), _values_of(seen))
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0))
    new = torch.cat([_sample(3), ROWS * sok.num_ranks() + sok.rank() * NEW + torch.arange(NEW)])
    for numbers in (trained, new):
        optimizer.zero_grad()
        _read(table, numbers).sum().backward()
        optimizer.step()
    sok.check_errors()
    looked_up = torch.cat([trained, new])
    for numbers in (trained, seen, new):
        before = torch.where(numbers[:, None] < ROWS * sok.num_ranks(), _values_of(numbers), 0)
        times = _times_looked_up(numbers, looked_up)[:, None]
        assert torch.equal(_read(table, numbers, training=False), before - times)
    own = new[keys_of(new) % sok.num_ranks() == sok.rank()]
    assert int(table.slots_of(keys_of(own)).max()) >= ROWS
