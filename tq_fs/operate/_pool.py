"""Work on a bounded pool, a bounded way ahead of who takes the results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ahead(
    pool: Executor, function: Callable[[T], R], items: Iterable[T], *, window: int
) -> Iterator[R]:
    """Yield the results of `function` in the order of `items`.

    Parameters
    ----------
    window
        Calls that may be under way or done before their result is taken: what bounds the memory.
    """
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= window:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
