"""`map_in_threads` yields what `map` does, a few items ahead."""

import threading
import time
from itertools import count, islice

import pytest

from kvbench.threads import MOST, count_processors, map_in_threads

AHEAD = 2 * min(MOST, count_processors())


def test_results_come_in_order_and_threads_work_at_once():
    two = threading.Barrier(2, timeout=10)

    def work(item: int) -> int:
        if item in (1, 2):  # each ends only while the other one is worked on; the first item is done alone
            two.wait()
        time.sleep(0.01 * (item % 3 == 0))
        return item * item

    if AHEAD == 2:
        pytest.skip("one processor")
    assert list(map_in_threads(work, range(20))) == [item * item for item in range(20)]
    assert list(map_in_threads(work, [])) == [] and list(map_in_threads(work, [5])) == [25]


def test_only_a_few_items_are_asked_for_ahead():
    asked = []

    def endless():
        for item in count():
            asked.append((item, threading.current_thread()))
            yield item

    results = map_in_threads(abs, endless())
    assert next(results) == 0 and len(asked) == 1
    assert list(islice(results, 3)) == [1, 2, 3] and len(asked) == 3 + AHEAD
    before = threading.active_count()
    results.close()
    assert threading.active_count() <= before - 1 and len(asked) == 3 + AHEAD
    assert {thread for _, thread in asked} == {threading.current_thread()}


def test_an_error_is_raised_in_its_place():
    results = map_in_threads(lambda item: 1 // (3 - item), range(9))
    assert [next(results) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert list(results) == []
