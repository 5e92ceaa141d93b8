# SPDX-License-Identifier: Apache-2.0
"""What test_torch_gpu.py runs for each rank: `torch_gpu_worker.py CHECK RANK NUM_RANKS FOLDER`, a GPU a rank.

Not under torchrun: that ends the other ranks when one dies, and here they have to notice themselves.
"""

import importlib.util
import itertools
import logging
import os
import pathlib
import signal
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import sparse_operation_kit.torch as sok
from sparse_operation_kit import core
from sparse_operation_kit.nccl import NcclUnavailable
from sparse_operation_kit.torch import runtime
from sparse_operation_kit.torch.errors import PeerError
from sparse_operation_kit.torch.exchange import Exchange, NcclExchange

CHECK, RANK, NUM_RANKS, FOLDER = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4])
DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.int64, torch.float64)


def restart(**options):
    runtime.shutdown()
    sok.init(**options)
    return runtime.get().exchange


def expect(error, message, call):
    try:
        call()
    except error as caught:
        assert message in str(caught), str(caught)
        return str(caught)
    raise AssertionError(f"no {error.__name__}")


def values(n, dtype, seed):
    generator = torch.Generator().manual_seed(seed * NUM_RANKS + RANK)
    return torch.randint(0, 100, (n,), generator=generator).to(dtype)


def counts_of(number):
    """[from rank, to rank]: even, uneven and empty ones, the same on all ranks."""
    rng = np.random.default_rng(number)
    high = (2, 50, 5_000, 3_000_000)[number % 4]
    return rng.integers(0, high, (NUM_RANKS, NUM_RANKS)) * rng.integers(0, 2, (NUM_RANKS, NUM_RANKS))


def table_of(name, device="cuda", rows=1000, dimension=16):
    with torch.device(device):
        return sok.Variable(shape=(rows, dimension), initializer="uniform", name=name)


def batch(step, rows=1000, bags=257):
    """(ids, offsets) of this rank, on the GPU."""
    rng = np.random.default_rng(step * NUM_RANKS + RANK)
    lengths = rng.integers(0, 5, bags)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, rows, offsets[-1])
    return torch.from_numpy(ids).cuda(), torch.from_numpy(offsets).cuda()


# --- checks ----------------------------------------------------------------------------------------------------------


def equals_the_engine():
    """What NCCL brings is what torch.distributed brings: over several streams, awaited late, every dtype."""
    exchange = restart(exchange="nccl")
    assert isinstance(exchange, NcclExchange)
    engine = Exchange(exchange.group)
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for number in range(42):
        counts = counts_of(number)
        send, receive = counts[RANK].tolist(), counts[:, RANK].tolist()
        sent = values(sum(send), DTYPES[number % len(DTYPES)], number)
        stream = streams[number % len(streams)]
        with torch.cuda.stream(stream):
            results.append((exchange.all_to_all(sent.cuda(), send, receive), sent, send, receive))
    for number, (received, sent, send, receive) in enumerate(results):
        streams[number % len(streams)].synchronize()
        expected = engine.all_to_all(sent.double(), send, receive)  # gloo does not know every dtype
        assert received.is_cuda and received.dtype == sent.dtype
        assert torch.equal(received.cpu().double(), expected), number
    cpu = torch.arange(NUM_RANKS)
    assert torch.equal(exchange.all_to_all(cpu, [1] * NUM_RANKS, [1] * NUM_RANKS), torch.full((NUM_RANKS,), RANK))


def message(counts):
    """Counts and the news that this rank has not failed."""
    return torch.nn.functional.pad(counts, (0, 1))


def swap_counts():
    """The same counts on both sides, and how ranks learn that one failed, from the host and from a device."""
    for kind in ("nccl", "torch"):
        exchange = restart(exchange=kind)
        check_swapped(exchange)
        check_failures(exchange)


def check_swapped(exchange):
    for number in range(20):
        tables = number % 5 + 1
        counts = torch.arange(NUM_RANKS * tables).view(NUM_RANKS, tables) + 1000 * RANK + 10 * number
        sent, received = exchange.swap_counts(message(counts.cuda()))
        assert not sent.is_cuda and torch.equal(sent, message(counts))
        of = [torch.arange(tables) + RANK * tables + 1000 * r + 10 * number for r in range(NUM_RANKS)]
        assert torch.equal(received, message(torch.stack(of)))


def check_failures(exchange):
    counts = torch.ones((NUM_RANKS, 2), dtype=torch.int64, device="cuda")
    last = NUM_RANKS - 1
    if last == RANK:
        exchange.handle.tell_of_failure(counts.device, 3)
    else:
        expect(PeerError, f"rank {last}", lambda: exchange.swap_counts(message(counts)))
    if RANK == 0:  # found by the device
        weight = torch.zeros((4, 2), device="cuda")
        ids = torch.tensor([9], device="cuda")
        torch.ops.sok.gather_combine([weight], ["items"], [ids], [0], [0], [], [], [], [])
        expect(IndexError, "key 9 is outside [0, 4)", lambda: exchange.swap_counts(message(counts)))
    else:
        expect(PeerError, "rank 0", lambda: exchange.swap_counts(message(counts)))
    exchange.swap_counts(message(counts))


def training():
    """Lookups and steps over NCCL give the same bits as over torch.distributed: the same pieces in the same order."""
    results = []
    for kind in ("nccl", "auto", "torch"):
        exchange = restart(exchange=kind)
        tables = [table_of("a"), table_of("b", dimension=8)]
        optimizer = sok.OptimizerWrapper(torch.optim.Adagrad([*tables], lr=0.1))
        losses = []
        for step in range(12):
            outputs = sok.lookup_sparse(tables, [batch(step), batch(100 + step)], combiners=["sum", "mean"])
            loss = sum((output * output).sum() for output in outputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        sok.check_errors()
        results.append((torch.stack(losses).cpu(), *(table.detach().cpu() for table in tables)))
        assert (kind == "torch") == (type(exchange) is Exchange)
        if kind != "torch":
            assert exchange.communicator(torch.device("cuda")) is not None
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def pooling():
    """Rows and sums of them, together in a call and on ranks that differ, train as rows on the CPU do."""
    restart(exchange="nccl")
    results = []
    for device, choices in (
        ("cpu", ["requester"]),
        ("cuda", ["requester"]),
        ("cuda", ["owner"]),
        ("cuda", ["owner", "requester"]),
        ("cuda", ["auto"]),
    ):
        os.environ["SOK_POOLING"] = choices[RANK % len(choices)]
        tables = [table_of("a", device), table_of("b", device, rows=40_000, dimension=8)]
        optimizer = sok.OptimizerWrapper(torch.optim.Adagrad([*tables], lr=0.1))
        lookups = [tables[0], tables[1], tables[0]]
        outputs = []
        for step in range(8):
            ids = [batch(step), batch(100 + step, 40_000, 20 * (RANK + step % 2)), batch(200 + step)]
            weights = [None, None, torch.linspace(0, 1, len(ids[2][0]), device=device, requires_grad=True)]
            ids = [tuple(tensor.to(device) for tensor in pair) for pair in ids]
            outputs = sok.lookup_sparse(lookups, ids, weights, ["mean", "sqrtn", "sum"])
            optimizer.zero_grad()
            sum(output.square().sum() for output in outputs).backward()
            optimizer.step()
        sok.check_errors()
        results.append([tensor.detach().cpu() for tensor in (*outputs, weights[2].grad, *tables)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def bad_id():
    """An id out of range on one rank raises on all, and the exchange goes on working."""
    restart(exchange="nccl")
    table = table_of("items")
    ids, offsets = batch(1)
    sok.lookup_sparse(table, (ids, offsets))
    wrong = ids.clone()
    if RANK == 0:
        wrong[0] = 1000
        expect(IndexError, "key 1000 is outside [0, 1000)", lambda: sok.lookup_sparse(table, (wrong, offsets)))
    else:
        expect(PeerError, "rank 0", lambda: sok.lookup_sparse(table, (wrong, offsets)))
    if RANK == 0:
        expect(TypeError, "ids", lambda: sok.lookup_sparse(table, (ids.float(), offsets)))
    else:
        expect(PeerError, "rank 0", lambda: sok.lookup_sparse(table, (ids, offsets)))
    sok.lookup_sparse(table, (ids, offsets))
    sok.check_errors()


def load(*paths):
    """Modules that tests share, by their paths in tests/; the last one is returned."""
    for path in map(pathlib.Path, paths):
        spec = importlib.util.spec_from_file_location(path.stem, pathlib.Path(__file__).parents[1] / path)
        sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path.stem])
    return sys.modules[path.stem]


def hybrid():
    """dist_model_parallel as on CPUs: tables on the GPU and, of some plans, others in host memory."""
    checks = load("hybrid_model.py", "hybrid_examples.py", "distributed/torch_hybrid.py")
    restart(exchange="nccl")
    with torch.device("cuda"):
        for name in ("models", "at_random", "planned", "own_inputs", "rows"):
            getattr(checks, f"hybrid_{name}")()
    sok.check_errors()


def dynamic_tables():
    """The check of this name of the ranks on CPUs, with tables and ids on GPUs."""
    checks = load("hybrid_model.py", "faults.py", "dict_store.py", "distributed/torch_dynamic.py")
    restart(exchange="nccl")
    with torch.device("cuda"):
        checks.dynamic_tables()
    sok.check_errors()


def many_rows():
    """More than 2^31 rows on each rank."""
    check = load("many_rows.py", "distributed/torch_many_rows.py")
    restart(exchange="nccl")
    with torch.device("cuda"):
        check.many_rows_of_ranks()


def tiers():
    """A dynamic table of which a tenth is on the GPU trains as one that is there whole, and what was prefetched is on
    the GPU when it is looked up.
    """
    restart(exchange="nccl")
    tiered: dict[str, Any] = {"max_hbm_for_vectors": 3000 * 64e-9}
    with torch.device("cuda"):
        tables = [sok.DynamicVariable(16, "normal", name="t", max_capacity=30_000, **more) for more in ({}, tiered)]
    optimizers = [sok.OptimizerWrapper(torch.optim.Adagrad([table], lr=0.1)) for table in tables]
    far, rng = tables[1], np.random.default_rng(RANK)

    def step(keys):
        outputs = []
        for table, optimizer in zip(tables, optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(sok.lookup_sparse(table, bags(keys), combiners="mean"))
            outputs[-1].square().sum().backward()
            optimizer.step()
        assert torch.allclose(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)

    def bags(keys):
        return torch.from_numpy(keys).cuda(), torch.arange(0, len(keys) + 1, 3, device="cuda")

    for first in range(0, 30_000, 1500):
        step(np.arange(first, first + 1500))
    batches = [rng.integers(0, 30_000, 600) for _ in range(9)]
    sok.prefetch(far, bags(batches[0]))
    before = far.statistics()
    for keys, following in itertools.pairwise(batches):
        step(keys)
        sok.prefetch(far, bags(following))
    after = far.statistics()
    sok.check_errors()
    assert after.host_hits == before.host_hits and after.moves > before.moves, (before, after)
    assert after.lookups - before.lookups == after.device_hits - before.device_hits > 0, (before, after)
    with torch.no_grad():
        every = torch.arange(30_000, device="cuda")
        rows = [sok.all2all_dense_embedding(table, every) for table in tables]
    assert torch.allclose(rows[0], rows[1], rtol=1e-5, atol=1e-6)


def faults_on_each_rank():
    """Of faults.FAULTS: all ranks raise, no table changes, and training goes on."""
    faults = load("faults.py", "distributed/torch_faults.py")
    for kind in ("nccl", "torch"):
        restart(exchange=kind)
        faults.run(torch.device("cuda", torch.cuda.current_device()))


def beside_ddp():
    """DistributedDataParallel's NCCL and the core's in one step, many times, with work of uneven length between."""
    restart(exchange="nccl")
    table = table_of("items", dimension=64)
    dense = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)).cuda()
    model = torch.nn.parallel.DistributedDataParallel(dense, device_ids=[torch.cuda.current_device()], bucket_cap_mb=1)
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=0.1))
    dense_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(200):
        if (step + RANK) % 7 == 0:
            torch.cuda._sleep(20_000_000)
        output = model(sok.lookup_sparse(table, batch(step), combiners="sum"))
        optimizer.zero_grad()
        dense_optimizer.zero_grad()
        output.square().mean().backward()
        optimizer.step()
        dense_optimizer.step()
    sok.check_errors()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    others = [torch.empty_like(weights) for _ in range(NUM_RANKS)]
    dist.all_gather(others, weights)
    assert all(torch.equal(weights, other) for other in others)


def slow_peer():
    """A rank that comes 20 s late, and one whose GPU is busy for as long, are no errors."""
    exchange = restart(exchange="nccl")
    counts = torch.ones((NUM_RANKS, 1), dtype=torch.int64, device="cuda")
    exchange.swap_counts(message(counts))
    if RANK == 0:
        time.sleep(20)
    exchange.swap_counts(message(counts))


def dead_peer():
    """The last rank is killed while the others wait for it: they get an error that names it, soon, and can go on."""
    exchange = restart(exchange="nccl")
    table = table_of("items")
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=0.1))
    last = NUM_RANKS - 1

    def step(number):
        optimizer.zero_grad()
        sok.lookup_sparse(table, batch(number)).sum().backward()
        optimizer.step()

    for number in range(3):
        step(number)
    torch.cuda.synchronize()
    before = table.detach().clone()
    if last == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    said = expect(RuntimeError, f"rank {last} (process ", lambda: step(3))
    taken = time.monotonic() - start
    assert taken < 60, taken
    print(f"rank {RANK}: {taken:.1f} s: {said}", flush=True)
    expect(RuntimeError, f"rank {last} (process ", lambda: exchange.swap_counts(
        message(torch.ones((NUM_RANKS, 1), dtype=torch.int64, device="cuda"))))  # fmt: skip
    torch.cuda.synchronize()
    assert torch.equal(table.detach(), before)  # the GPU works, and nothing was applied
    end()


def dead_peer_in_backward():
    """Killed between the lookup and its gradient: the exchange of gradients ends, and no table changes."""
    restart(exchange="nccl")
    table = table_of("items")
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=0.1))
    output = sok.lookup_sparse(table, batch(0))
    torch.cuda.synchronize()
    before = table.detach().clone()
    meet()
    if NUM_RANKS - 1 == RANK:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()

    def step():
        output.sum().backward()
        optimizer.step()  # enqueued behind the exchange that never ends
        torch.cuda.synchronize()
        sok.check_errors()

    expect(RuntimeError, "exchange", step)
    assert time.monotonic() - start < 60
    assert torch.equal(table.detach(), before)
    end()


def shared_gpu():
    """All ranks on one GPU: "nccl" is an error on all, "auto" goes on without."""
    os.environ.pop("NCCL_MULTI_RANK_GPU_ENABLE", None)
    torch.cuda.set_device(0)
    exchange = restart(exchange="nccl")
    counts = torch.ones((NUM_RANKS, 1), dtype=torch.int64, device="cuda:0")
    expect(NcclUnavailable, "share a GPU", lambda: exchange.swap_counts(message(counts)))
    exchange = restart(exchange="auto")
    sent, received = exchange.swap_counts(message(counts))
    assert torch.equal(sent, received)
    assert exchange.communicator(torch.device("cuda", 0)) is None
    table = table_of("items")
    sok.lookup_sparse(table, batch(0)).sum().backward()
    assert table.grad.coalesce().values().is_cuda


def restarts():
    """Communicators come and go; what one left behind does not disturb the next."""
    free = []
    for _ in range(4):
        exchange = restart(exchange="nccl")
        counts = torch.ones((NUM_RANKS, 1), dtype=torch.int64, device="cuda")
        exchange.swap_counts(message(counts))
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[1] - free[-1] < 64 << 20, free


def core_binding():
    """sparse_operation_kit.core.Communicator with PyTorch's tensors."""
    ids = [core.Communicator.make_id() if RANK == 0 else None]
    dist.broadcast_object_list(ids, 0)
    device = torch.cuda.current_device()
    with core.Communicator(device, ids[0], NUM_RANKS, RANK) as communicator:
        context = core.Context(
            device=device, stream=torch.cuda.current_stream().cuda_stream, empty=lambda shape, dtype: None
        )
        send: Any = torch.arange(3 * NUM_RANKS, device="cuda") + 100 * RANK
        receive: Any = torch.zeros(3 * NUM_RANKS, dtype=torch.int64, device="cuda")
        communicator.all_to_all(send, [3] * NUM_RANKS, receive, [3] * NUM_RANKS, context=context)
        expected = [100 * r + 3 * RANK + i for r in range(NUM_RANKS) for i in range(3)]
        assert receive.tolist() == expected
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            captured = core.Context(device=device, stream=stream.cuda_stream, empty=lambda shape, dtype: None)
            call = (send, [3] * NUM_RANKS, receive, [3] * NUM_RANKS)
            expect(RuntimeError, "CUDA graph", lambda: communicator.all_to_all(*call, context=captured))
            graph.capture_end()
        communicator.check()


def exit_at_once():
    """A process may end with the communicator alive."""
    exchange = restart(exchange="nccl")
    counts = torch.ones((NUM_RANKS, 1), dtype=torch.int64, device="cuda")
    exchange.swap_counts(message(counts))
    globals()["kept"] = exchange


def meet():
    """A barrier without NCCL."""
    dist.all_reduce(torch.zeros(1))


def end():
    """Ends a process whose peers are gone, without what waits for them."""
    print(f"passed {CHECK} on rank {RANK}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    store = dist.FileStore(str(FOLDER / "store"), NUM_RANKS)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=RANK, world_size=NUM_RANKS)
    globals()[CHECK]()
    print(f"passed {CHECK} on rank {RANK}", flush=True)
    meet()
    if CHECK != "exit_at_once":
        runtime.shutdown()
    dist.destroy_process_group()
