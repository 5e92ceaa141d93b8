# SPDX-License-Identifier: Apache-2.0
"""What only a GPU does: bad ids found late, ids from elsewhere, streams, CUDA graphs, no waiting, bounded memory."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

import sparse_operation_kit.torch as sok

GPU = torch.device("cuda", 0)


def make_table(rows=1000, dimension=16, name="items", seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return sok.Variable(torch.randn((rows, dimension), generator=generator), name=name, device=GPU, **options)


def make_ids(rows=1000, bags=64, length=5, seed=0, device=GPU):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, rows, (bags * length,), generator=generator)
    return values.to(device), (torch.arange(bags + 1) * length).to(device)


def train(table, optimizer, ids, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        sok.lookup_sparse(table, ids, combiners="sum").pow(2).sum().backward()
        optimizer.step()


def optimizer_of(table, cls=torch.optim.Adam, **options):
    return sok.OptimizerWrapper(cls([table], **options))


# --- tables on several devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["cpu", "cuda"])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.Rprop])
def test_an_optimizer_of_tables_on_cpu_and_gpu(first, cls):
    devices: list[Any] = ["cpu", GPU, "cpu"]
    tables = [sok.Variable(torch.ones(1000, 4), name=f"t{i}", device=d) for i, d in enumerate(devices)]
    same = [sok.Variable(torch.ones(1000, 4), name=f"t{i}", device="cpu") for i in range(3)]
    optimizers = [sok.OptimizerWrapper(cls(t[:: 1 if first == "cpu" else -1], lr=0.1)) for t in (tables, same)]

    def run(each, optimizer, ids=(1, 7, 7)):
        for table in each:
            given = torch.tensor(ids, device=table.device), torch.tensor([0, 2, 3], device=table.device)
            sok.lookup_sparse(table, given, combiners="sum").pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        run(tables, optimizers[0])
        run(same, optimizers[1])
    for table, other in zip(tables, same, strict=True):
        torch.testing.assert_close(table.detach().cpu(), other.detach())
        for key, value in optimizers[0].state[table].items():
            torch.testing.assert_close(value.cpu(), optimizers[1].state[other][key])
    before = [table.detach().clone() for table in tables]
    sok.lookup_sparse(tables[0], (torch.tensor([3]), torch.tensor([0, 1])), combiners="sum").sum().backward()
    bad = torch.tensor([5000], device=GPU), torch.tensor([0, 1], device=GPU)
    with pytest.raises(IndexError, match="5000"):  # the GPU says it late: no table has changed then
        sok.lookup_sparse(tables[1], bad, combiners="sum").sum().backward()
        optimizers[0].step()
    for table, rows in zip(tables, before, strict=True):
        assert torch.equal(table.detach(), rows)


# --- bad ids --------------------------------------------------------------------------------------------------------


def bad_ids():
    values, offsets = make_ids()
    values[7] = 5000
    return values, offsets


def test_a_bad_id_is_raised_by_check_errors():
    table = make_table()
    sok.lookup_sparse(table, bad_ids())
    with pytest.raises(IndexError, match=r"'items'.* 5000 .*\[0, 1000\)"):
        sok.check_errors()
    sok.check_errors()  # once
    assert torch.isfinite(sok.lookup_sparse(table, make_ids())).all()


def test_a_bad_id_is_raised_before_a_table_changes():
    table = make_table()
    before = table.detach().clone()
    optimizer = optimizer_of(table, torch.optim.SGD, lr=0.1)
    loss = sok.lookup_sparse(table, bad_ids(), combiners="sum").sum()
    torch.cuda.synchronize()
    loss.backward()
    with pytest.raises(IndexError, match=r"'items'.* 5000 "):
        optimizer.step()
    assert torch.equal(table.detach(), before)
    optimizer.zero_grad()
    train(table, optimizer, make_ids())
    sok.check_errors()
    assert not torch.equal(table.detach(), before)


def test_a_step_that_was_queued_before_the_error_showed_changes_nothing():
    """The host runs ahead: everything is enqueued while the GPU is still busy."""
    table = make_table()
    before = table.detach().clone()
    optimizer = optimizer_of(table, torch.optim.SGD, lr=0.1)
    good, bad = make_ids(), bad_ids()
    torch.cuda._sleep(400_000_000)
    train(table, optimizer, bad)
    train(table, optimizer, good)
    with pytest.raises(IndexError, match=r" 5000 "):
        sok.check_errors()
    assert torch.equal(table.detach(), before)


def test_the_table_of_an_earlier_call_is_named():
    first, second = make_table(name="first"), make_table(name="second")
    good, bad = make_ids(), bad_ids()
    torch.cuda._sleep(200_000_000)
    sok.lookup_sparse([second, first], [good, bad])
    sok.lookup_sparse(second, good)
    with pytest.raises(IndexError, match="'first'"):
        sok.check_errors()


def test_bad_row_splits():
    table = make_table()
    values, offsets = make_ids()
    sok.lookup_sparse(table, (values, offsets + 1))
    with pytest.raises(ValueError, match="row_splits"):
        sok.check_errors()


def test_assign_of_a_bad_key_writes_nothing():
    table = make_table()
    before = table.detach().clone()
    sok.assign(table, torch.tensor([3, 1000], device=GPU), torch.ones((2, 16), device=GPU))
    with pytest.raises(IndexError, match=r" 1000 "):
        sok.check_errors()
    assert torch.equal(table.detach(), before)


# --- placement ------------------------------------------------------------------------------------------------------


def test_ids_from_the_cpu():
    table = make_table()
    wanted = sok.lookup_sparse(table, make_ids(), torch.ones(320, device=GPU))
    values, offsets = make_ids(device="cpu")
    assert torch.equal(sok.lookup_sparse(table, (values, offsets), torch.ones(320)), wanted)
    assert torch.equal(sok.lookup_sparse(table, (values.pin_memory(), offsets.pin_memory())), wanted)
    assert torch.equal(sok.lookup_sparse(table, (values.cuda(), offsets), torch.ones(320)), wanted)
    dense = sok.all2all_dense_embedding(table, values.view(64, 5))
    assert dense.device == GPU and torch.equal(dense, table.detach()[values.cuda()].view(64, 5, 16))


def test_ids_from_the_gpu_for_a_table_on_the_cpu():
    table = sok.Variable(make_table().detach().cpu(), name="items")
    output = sok.lookup_sparse(table, make_ids())
    assert output.device.type == "cpu"
    torch.testing.assert_close(output, sok.lookup_sparse(table, make_ids(device="cpu")))


def test_ids_that_the_gpu_has_still_to_make_for_a_table_on_the_cpu():
    table = sok.Variable(make_table().detach().cpu(), name="items")
    values, offsets = make_ids()
    expected = sok.lookup_sparse(table, make_ids(device="cpu"))
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    torch.testing.assert_close(sok.lookup_sparse(table, (values + 0, offsets + 0)), expected)


def test_weights_from_the_cpu_get_their_gradient():
    table = make_table()
    weights = torch.rand(320, requires_grad=True)
    on_gpu = weights.detach().cuda().requires_grad_()
    sok.lookup_sparse(table, make_ids(device="cpu"), weights, "mean").sum().backward()
    sok.lookup_sparse(table, make_ids(), on_gpu, "mean").sum().backward()
    assert weights.grad.device.type == "cpu" and torch.equal(weights.grad, on_gpu.grad.cpu())


def test_tables_of_a_call_must_be_together():
    here, there = make_table(name="here"), sok.Variable(torch.zeros(10, 4), name="there")
    with pytest.raises(ValueError, match=r"one device.*'here' is on cuda:0, 'there' on cpu"):
        sok.lookup_sparse([here, there], [make_ids(), make_ids(10)])


def test_initial_rows_are_those_of_the_cpu():
    for initializer in ("uniform", "normal", "glorot_uniform", 0.5):
        host = sok.Variable(shape=(1001, 17), initializer=initializer, name="same")
        device = sok.Variable(shape=(1001, 17), initializer=initializer, name="same", device=GPU)
        torch.testing.assert_close(device.detach().cpu(), host.detach(), rtol=1e-6, atol=1e-7)


# --- streams and graphs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_the_gpu_trains_as_the_cpu(cls):
    host = sok.Variable(make_table().detach().cpu(), name="items")
    device = make_table()
    for table in (host, device):
        optimizer = optimizer_of(table, cls, lr=0.05)
        for step in range(20):
            train(table, optimizer, make_ids(seed=step, device=table.device))
    size = host.detach().norm()
    assert (device.detach().cpu() - host.detach()).norm() <= 1e-6 * size


def test_several_streams():
    tables = [make_table(name=f"t{i}", seed=i) for i in range(4)]
    twins = [make_table(name=f"t{i}", seed=i) for i in range(4)]
    streams = [torch.cuda.Stream() for _ in tables]
    torch.cuda.synchronize()
    for step in range(10):
        for i, (table, stream) in enumerate(zip(tables, streams, strict=True)):
            with torch.cuda.stream(stream):
                train(table, optimizer_of(table, torch.optim.SGD, lr=0.01), make_ids(seed=10 * step + i))
    torch.cuda.synchronize()
    for i, table in enumerate(twins):
        for step in range(10):
            train(table, optimizer_of(table, torch.optim.SGD, lr=0.01), make_ids(seed=10 * step + i))
    for table, twin in zip(tables, twins, strict=True):
        assert torch.equal(table.detach(), twin.detach())


def test_backward_on_the_calling_thread():
    tables, threads = [], []
    for multithreaded in (True, False):
        table = make_table()
        optimizer = optimizer_of(table, torch.optim.Adagrad, lr=0.1)
        with torch.autograd.set_multithreading_enabled(multithreaded):
            for step in range(3):
                output = sok.lookup_sparse(table, make_ids(seed=step), combiners="sum")
                output.register_hook(lambda gradient: threads.append(threading.get_ident()))
                output.pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        tables.append(table)
    assert threads[3:] == [threading.get_ident()] * 3
    assert torch.equal(tables[0].detach(), tables[1].detach())


def test_a_step_in_a_cuda_graph():
    tables = [make_table(name=f"t{i}", seed=i) for i in range(3)]
    twins = [make_table(name=f"t{i}", seed=i) for i in range(3)]
    buffers = [make_ids(seed=i) for i in range(3)]

    def step(members, batches, optimizer):
        outputs = sok.lookup_sparse(members, batches, combiners="sum")
        torch.cat(outputs, 1).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizer = sok.OptimizerWrapper(torch.optim.Adagrad(tables, lr=0.1))
    other = sok.OptimizerWrapper(torch.optim.Adagrad(twins, lr=0.1))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(tables, buffers, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(tables, buffers, optimizer)
    for _ in range(2):
        step(twins, [make_ids(seed=i) for i in range(3)], other)
    for number in range(5):
        batches = [make_ids(seed=100 * number + i) for i in range(3)]
        for buffer, batch in zip(buffers, batches, strict=True):
            buffer[0].copy_(batch[0])
        graph.replay()
        step(twins, batches, other)
    sok.check_errors()
    for table, twin in zip(tables, twins, strict=True):
        assert torch.equal(table.detach(), twin.detach())


@pytest.mark.parametrize("capturable", [False, True])
def test_adam_is_not_captured(capturable):
    """It counts its steps on the host: replays would repeat the bias correction of the captured one."""
    table = make_table(name="captured")
    optimizer = sok.OptimizerWrapper(torch.optim.Adam([table], lr=0.1, capturable=capturable))

    train(table, optimizer, make_ids())
    before = table.detach().clone()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    assert torch.equal(table.detach(), before)


# --- waiting, memory, determinism -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", ["static", "dynamic", "dynamic, lru", "both"])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_a_step_does_not_wait_for_the_gpu(cls, kinds):
    """Of dynamic tables all keys are there, which the host does not know."""
    strategy = "lru" if "lru" in kinds else None
    dynamic: dict[str, Any] = {"evict_strategy": strategy, "max_capacity": 5000, "device": GPU}
    tables = [
        make_table(name=f"t{i}")
        if kinds == "static" or (kinds == "both" and i == 1)
        else sok.DynamicVariable(16, name=f"t{i}", **dynamic)
        for i in range(3)
    ]
    optimizer = sok.OptimizerWrapper(cls(tables, lr=0.1))
    ids = [make_ids(seed=i) for i in range(3)]
    weights = torch.rand(320, device=GPU)
    busy = torch.cuda.Event()

    def step():
        outputs = sok.lookup_sparse(tables, ids, [weights, None, weights], ["sum", "mean", "sqrtn"])
        torch.cat(outputs, 1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    # What the host has not heard of yet counts as new, and a table that grew might wait for memory.
    assert all(table.size for table in tables if isinstance(table, sok.DynamicVariable))
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)  # about a second
        busy.record()
        step()
        assert not busy.query(), "the step waited for the GPU"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_a_thousand_steps_leak_nothing():
    rng = np.random.default_rng(0)
    tables = [make_table(100_000, 32, name=f"t{i}") for i in range(4)]
    optimizer = sok.OptimizerWrapper(torch.optim.Adam(tables, lr=0.01))

    def step(bags):
        ids = [make_ids(100_000, bags, 8, seed=int(rng.integers(2**31))) for _ in tables]
        torch.cat(sok.lookup_sparse(tables, ids), 1).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step(2048)
    torch.cuda.synchronize()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(1000):
        step(int(rng.integers(0, 2048)))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_reserved() <= 1.5 * reserved
    sok.check_errors()


@pytest.mark.parametrize("weighted", [False, True])
def test_memory_beyond_tables_and_outputs(weighted):
    """At most four times the rows of the batch."""
    tables = [make_table(200_000, 64, name=f"t{i}") for i in range(4)]
    optimizer = sok.OptimizerWrapper(torch.optim.Adam(tables, lr=0.01))
    ids = [make_ids(200_000, 8192, 10, seed=i) for i in range(4)]
    weights = [torch.rand(81920, device=GPU) if weighted else None for _ in tables]
    gradients = [torch.ones((8192, 64), device=GPU) for _ in tables]

    def step():
        outputs = sok.lookup_sparse(tables, ids, weights, "mean")
        torch.autograd.backward(outputs, gradients)
        optimizer.step()
        optimizer.zero_grad()

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    outputs = 4 * 8192 * 64 * 4
    extra = torch.cuda.max_memory_allocated() - before - outputs
    rows = 4 * 81920 * 64 * 4
    assert extra <= 4 * rows, f"{extra / rows:.2f} times the batch's rows"


def test_the_same_bits_again():
    def run():
        table = make_table(500, 33)
        optimizer = optimizer_of(table, torch.optim.Adam, lr=0.1)
        for step in range(10):
            train(table, optimizer, make_ids(500, 4096, 9, seed=step))
        return table.detach().clone()

    first = run()
    for _ in range(3):
        assert torch.equal(run(), first)


def test_other_optimizers_run_on_rows():
    table, twin = make_table(), sok.Variable(make_table().detach().cpu(), name="items")
    for member in (table, twin):
        optimizer = optimizer_of(member, torch.optim.RAdam, lr=0.05)
        for step in range(8):
            train(member, optimizer, make_ids(seed=step, device=member.device))
    torch.testing.assert_close(table.detach().cpu(), twin.detach(), rtol=1e-5, atol=1e-6)
