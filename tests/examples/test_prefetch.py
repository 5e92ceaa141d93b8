# SPDX-License-Identifier: Apache-2.0
import threading
import time

import pytest

from examples.dlrm.prefetch import Prefetch


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_gives_all_items_in_order():
    with Prefetch(range(1000), depth=3) as items:
        assert list(items) == list(range(1000))
        assert list(items) == []


def test_an_error_reaches_the_consumer_after_the_items_before_it():
    def items():
        yield 1
        yield 2
        raise KeyError("broken")

    seen = []
    with pytest.raises(KeyError, match="broken"), Prefetch(items()) as prefetched:
        for item in prefetched:
            seen.append(item)
    assert seen == [1, 2]


def test_runs_at_most_depth_and_one_ahead():
    made = []

    def items():
        for item in range(100):
            made.append(item)
            yield item

    with Prefetch(items(), depth=4) as prefetched:
        wait_until(lambda: len(made) == 5)
        time.sleep(0.05)
        assert len(made) == 5
        next(prefetched)
        wait_until(lambda: len(made) == 6)


def test_leaving_early_closes_the_iterator_on_its_thread_and_ends_it():
    closed_on = []

    def items():
        try:
            while True:
                yield 0
        finally:
            closed_on.append(threading.current_thread())

    with Prefetch(items(), depth=2) as prefetched:
        next(prefetched)
    assert len(closed_on) == 1
    assert closed_on[0] is not threading.current_thread()
    assert not closed_on[0].is_alive()
    prefetched.close()
    with pytest.raises(StopIteration):
        next(prefetched)


def test_an_exception_of_the_consumer_ends_the_thread_too():
    before = threading.active_count()
    with pytest.raises(ValueError, match="consumer"), Prefetch(iter(int, 1)):
        int("consumer")
    assert threading.active_count() == before


def test_depth_is_checked():
    with pytest.raises(ValueError, match="depth"):
        Prefetch([], depth=0)
