# SPDX-License-Identifier: Apache-2.0
"""How a call runs: thread pools (also after fork), foreign executors, allocators that fail."""

import os
import signal
import threading
import time

import cases
import harness
import numpy as np
import pytest
import reference

from sparse_operation_kit import core
from sparse_operation_kit.core import _abi

ADAM = core.Optimizer("adam", 0.1, beta1=0.9, beta2=0.99, epsilon=1e-7)


def outputs(context=None):
    return core.gather_combine(harness.tables(harness.LARGE), harness.lookups(harness.LARGE), context=context)


# --- threads --------------------------------------------------------------------------------------------------------


def num_threads_of_process():
    return len(os.listdir("/proc/self/task"))


def wait_for_threads_that_end():
    """What was joined may not be gone yet. A thread that ends during fork() may have locked the allocator of the
    sanitizer of addresses (GCC 12), which then stays locked in the child.
    """
    before = None
    while before != (before := num_threads_of_process()):
        time.sleep(0.05)


def test_pool_starts_its_threads_at_the_first_use_and_joins_them():
    before = num_threads_of_process()
    with core.ThreadPool(4) as pool:
        assert pool.num_threads == 4
        assert num_threads_of_process() == before
        outputs(core.Context(pool))
        assert num_threads_of_process() == before + 3
    deadline = time.monotonic() + 10
    while num_threads_of_process() != before:  # the kernel may show a joined thread for a moment
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pool.close()


def test_pool_sizes():
    with core.ThreadPool() as pool:
        assert pool.num_threads == len(os.sched_getaffinity(0))
    with core.ThreadPool(1) as pool:
        assert harness.same_bytes(outputs(core.Context(pool)), outputs())
    for bad in (-1, 10**6):
        with pytest.raises(ValueError, match="num_threads"):
            core.ThreadPool(bad)


def test_threads_of_one_process_share_a_pool():
    expected = outputs()
    wrong = []

    def work(pool):
        for _ in range(10):
            if not harness.same_bytes(outputs(core.Context(pool)), expected):
                wrong.append(1)

    with core.ThreadPool(3) as pool:
        threads = [threading.Thread(target=work, args=(pool,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("used_before", [False, True])
def test_pool_after_fork(used_before):
    expected = outputs()
    pool = core.ThreadPool(3)
    context = core.Context(pool)
    if used_before:
        outputs(context)
    wait_for_threads_that_end()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            same = all(harness.same_bytes(outputs(context), expected) for _ in range(3))
            alive = num_threads_of_process()
            pool.close()
            code = 0 if same and alive == 3 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert harness.same_bytes(outputs(context), expected)  # the parent's pool is as it was
    pool.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_while_another_thread_is_in_the_pool():
    expected = outputs()
    pool = core.ThreadPool(3)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            outputs(core.Context(pool))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                os._exit(0 if harness.same_bytes(outputs(core.Context(pool)), expected) else 2)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
    finally:
        stop.set()
        thread.join()
    pool.close()


class Foreign:
    """An executor in Python: workers in the order of `order`, on the caller's thread or on threads of their own."""

    def __init__(self, num_workers, order=reversed, threads=False):
        self.calls, self.order, self.threads = [], order, threads
        self.context = core.Context()
        self.context.struct.executor.num_workers = num_workers
        self.context.struct.executor.run = _abi.RUN(self._run)

    def _run(self, _, num_workers, body, argument):
        self.calls.append(num_workers)
        workers = list(self.order(range(num_workers)))
        if not self.threads:
            for worker in workers:
                body(argument, worker)
            return
        threads = [threading.Thread(target=body, args=(argument, worker)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("threads", [False, True])
def test_executor_of_the_caller(threads):
    expected = outputs()
    foreign = Foreign(5, threads=threads)
    assert harness.same_bytes(outputs(foreign.context), expected)
    assert foreign.calls
    assert all(1 <= n <= 5 for n in foreign.calls)
    shifted = Foreign(4, lambda workers: [*workers][2:] + [*workers][:2])
    weights = []
    for context in (None, foreign.context, shifted.context):
        tables = harness.tables(harness.LARGE)
        states = [[np.zeros(table.shape, np.float32) for _ in range(2)] for table in tables]
        updates = [
            core.Update(table, ADAM, harness.parts(harness.LARGE, t), states[t]) for t, table in enumerate(tables)
        ]
        core.apply(updates, context=context)
        weights.append([table.weight for table in tables])
    assert harness.same_bytes(weights[1], weights[0])
    assert harness.same_bytes(weights[2], weights[0])


def test_errors_come_through_an_executor():
    keys = np.arange(20_000)
    keys[-1] = 10**6
    table = core.Table(np.ones((20_000, 8), np.float32), name="big")
    for foreign in (Foreign(4), Foreign(4, threads=True)):
        with pytest.raises(IndexError, match="1000000"):
            core.gather_combine([table], [core.Lookup(keys)], context=foreign.context)


# --- memory ---------------------------------------------------------------------------------------------------------


def stages():
    """Every stage as (name, run(context) -> results, arrays that it changes in place)."""
    call = harness.LARGE
    tables, lookups = harness.tables(call), harness.lookups(call)
    incoming = [call.output_gradient(i) for i in range(len(lookups))]
    ranks, gradients, _ = harness.simulate(call, 2)
    harness.forward(ranks)
    rank = ranks[0]
    states = [[np.zeros(table.shape, np.float32) for _ in range(2)] for table in tables]
    updates = [core.Update(table, ADAM, harness.parts(call, t), states[t]) for t, table in enumerate(tables)]
    in_place = [*(table.weight for table in tables), *(s for pair in states for s in pair)]
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 1000, 20_000)
    keys = rng.integers(0, 3000, 5000)
    values = rng.random((5000, 32), np.float32)
    normal = core.Initializer("normal", 0.0, 1.0, 3)
    weighted = lambda gradients: [g for g in gradients if g is not None]  # noqa: E731
    routed = lambda r: [r.counts, r.keys[: r.num_unique], r.inverse, r.order]  # noqa: E731
    return [
        ("bags", lambda c: list(core.bags_from_coordinates(rows, 1000, context=c)[:2]), []),
        ("route", lambda c: routed(core.route(rank.tables, rank.lookups, context=c)), []),
        ("locate", lambda c: [core.locate(rank.tables, rank.keys, rank.counts, context=c)], []),
        ("gather", lambda c: [core.gather(rank.tables, rank.slots, rank.counts, context=c)], []),
        (
            "combine",
            lambda c: core.combine(rank.tables, rank.lookups, rank.routing.inverse, rank.rows, context=c),
            [],
        ),
        ("gather_combine", lambda c: core.gather_combine(tables, lookups, context=c), []),
        ("spread", lambda c: [core.spread(rank.tables, rank.lookups, gradients[0], rank.routing, context=c)], []),
        ("weight_gradient", lambda c: weighted(core.weight_gradient(tables, lookups, incoming, context=c)), []),
        ("reduce", lambda c: list(core.reduce(tables[0], harness.parts(call, 0), context=c)), []),
        ("apply", lambda c: core.apply(updates, context=c) or in_place, in_place),
        ("assign", lambda c: core.assign(tables[0], keys, values, context=c) or [tables[0].weight], [tables[0].weight]),
        ("initialize", lambda c: [core.initialize(normal, 500, 33, context=c)], []),
    ]


STAGES = [
    "bags",
    "route",
    "locate",
    "gather",
    "combine",
    "gather_combine",
    "spread",
    "weight_gradient",
    "reduce",
    "apply",
    "assign",
    "initialize",
]


@pytest.fixture(scope="module", params=range(len(STAGES)), ids=STAGES)
def stage(request):
    made = stages()
    assert [name for name, _, _ in made] == STAGES
    return made[request.param]


def copies(results):
    return [result.copy() for result in results]


@pytest.mark.parametrize("workers", [1, 3])
def test_allocator_of_the_caller(stage, workers, pools):
    _, run, in_place = stage
    start = copies(in_place)
    expected = copies(run(pools[1] if workers == 3 else None))
    for array, was in zip(in_place, start, strict=True):
        array[...] = was
    allocator = harness.CountingAllocator()
    if workers == 3:
        allocator.context.struct.executor = pools[1].struct.executor
    assert harness.same_bytes(copies(run(allocator.context)), expected)
    assert not allocator.live, "memory was not released"
    for fail_at in range(allocator.count):
        for array, was in zip(in_place, start, strict=True):
            array[...] = was
        failing = harness.CountingAllocator(fail_at)
        failing.context.struct.executor = allocator.context.struct.executor
        with harness.unchanged(*in_place), pytest.raises(MemoryError):
            run(failing.context)
        assert not failing.live, f"memory was not released when allocation {fail_at} failed"
    for array, was in zip(in_place, start, strict=True):
        array[...] = was


def test_errors_release_memory():
    allocator = harness.CountingAllocator()
    keys = np.zeros(20_000, np.int64)
    keys[7777] = -5
    table = core.Table(np.zeros((10, 4), np.float32), name="t")
    part = core.Gradient(keys, np.zeros((20_000, 4), np.float32))
    calls = [
        lambda c: core.route([table], [core.Lookup(keys)], context=c),
        lambda c: core.gather_combine([table], [core.Lookup(keys)], context=c),
        lambda c: core.reduce(table, [part], context=c),
        lambda c: core.apply([core.Update(table, core.Optimizer("sgd", 0.1), [part])], context=c),
        lambda c: core.assign(table, keys, np.zeros((20_000, 4), np.float32), context=c),
        lambda c: core.bags_from_coordinates(keys, 5, context=c),
    ]
    for call in calls:
        with pytest.raises(IndexError, match="-5"):
            call(allocator.context)
        assert not allocator.live


def test_temporary_memory_does_not_grow_with_the_table():
    """A step on a table of a hundred times the rows takes the same memory."""
    sizes = []
    for num_rows in (1000, 100_000):
        table = core.Table(np.zeros((num_rows, 8), np.float32))
        states = [np.zeros((num_rows, 8), np.float32) for _ in range(2)]
        total = []
        counting = harness.CountingAllocator()
        give = counting._allocate

        def allocate(size, give=give, total=total):
            total.append(size)
            return give(size)

        context = core.Context(allocate=allocate, release=counting._release)
        rng = np.random.default_rng(0)
        keys = rng.integers(0, 1000, 5000)
        splits = np.arange(0, 5001, 5)
        core.gather_combine([table], [core.Lookup(keys, row_splits=splits)], context=context)
        part = core.Gradient(keys, np.ones((1000, 8), np.float32), row_splits=splits)
        core.apply([core.Update(table, ADAM, [part], states)], context=context)
        core.reduce(table, [part], context=context)
        sizes.append(sum(total))
    assert sizes[1] <= 1.5 * sizes[0] + 65536


def test_allocator_halves():
    with pytest.raises(ValueError, match="together"):
        core.Context(allocate=lambda size: 0)
    context = core.Context()
    context.struct.allocator.allocate = _abi.ALLOCATE(lambda _, size: 0)
    with pytest.raises(ValueError, match="allocator"):
        core.gather_combine([core.Table(np.zeros((1, 1), np.float32))], [], context=context)


def test_cases_with_garbage_in_temporary_memory():
    """Whatever temporary memory holds must not show in results."""
    for call in cases.CASES:
        allocator = harness.CountingAllocator()
        made = core.gather_combine(harness.tables(call), harness.lookups(call), context=allocator.context)
        for i, output in enumerate(made):
            reference.assert_close(output, call.output(i), magnitude=call.output(i, absolute=True))
        for t, table in enumerate(harness.tables(call)):
            slots, values = core.reduce(table, harness.parts(call, t), context=allocator.context)
            assert np.array_equal(slots, call.touched(t))
            size = call.row_gradient(t, absolute=True)[slots]
            reference.assert_close(values, call.row_gradient(t)[slots], magnitude=size)
        assert not allocator.live
