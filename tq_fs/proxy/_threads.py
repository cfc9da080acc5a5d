"""Blocking work, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import TypeVar

from tq_fs.errors import TqFsError
from tq_fs.logs import carried

T = TypeVar("T")


async def in_thread(
    pool: Executor, call: Callable[[], T], *, undo: Callable[[T], object] | None = None
) -> T:
    """Run `call` in a thread of `pool` and return what it returns.

    Parameters
    ----------
    pool
        Stays the caller's.
    undo
        Takes back what `call` did, where nobody waits for it any more: a thread cannot be
        cancelled, and goes on to its end. Runs in that thread, or here where that has ended.
    """
    future = pool.submit(carried(call))
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if undo is not None:
            future.add_done_callback(_undoing(undo))
        raise


def _undoing(undo: Callable[[T], object]) -> Callable[[Future[T]], None]:
    def undone(future: Future[T]) -> None:
        if not future.cancelled() and future.exception() is None:
            with suppress(TqFsError):
                undo(future.result())

    return undone
