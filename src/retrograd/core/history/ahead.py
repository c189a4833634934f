"""Reads what is asked for next while the last of it is worked on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

NEAR_READERS = 1
"""Threads that read files: pyarrow unpacks beside Python, which merges on one core. A second one took 50 MB, and no
time off on two cores."""

FAR_READERS = 16
"""Threads that read from a store, each of which waits some 50 ms for an answer."""


def read_ahead(calls: Iterable[Callable[[], T]], readers: int) -> Iterator[T]:
    """What some calls return, in order; the next ones are made by other threads meanwhile, as many as there are."""
    pool = ThreadPoolExecutor(readers, "retrograd-reader")
    try:
        waiting: deque[Future[T]] = deque()
        for call in calls:
            waiting.append(pool.submit(call))
            if len(waiting) > readers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)  # nobody waits for what is behind a call that has raised


def read_each(calls: Iterable[Callable[[], T]], *, is_far: bool) -> Iterator[T]:
    """The same where there is somebody to wait for; files of this machine are read by the thread that asks."""
    return read_ahead(calls, FAR_READERS) if is_far else (call() for call in calls)
