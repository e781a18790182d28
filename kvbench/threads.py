"""Do work in threads that spends most of its time outside Python, such as a tokenizer's."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

MOST = 8  # threads; what work does in Python is done in turn, so more bring little
S = TypeVar("S")
T = TypeVar("T")


def map_in_threads(work: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """Yield the results of ``map(work, items)`` in order, while threads already work on the next items.

    There are as many threads as processors, at most MOST. The first item is done before they start, so that `work` can
    set up what all items use. Up to two items for each thread are asked for ahead. An error of `work` is raised where
    its result would be yielded, an error of `items` when it occurs.

    Args:
        work: A function that several threads may call at once, each with another item.
        items: The items. Only this thread iterates over them.
    """
    remaining, waiting = iter(items), deque[Future[T]]()
    yield from map(work, islice(remaining, 1))
    threads = min(MOST, count_processors())
    pool = ThreadPoolExecutor(threads)
    try:
        for item in remaining:
            waiting.append(pool.submit(work, item))
            if len(waiting) == 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def count_processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
