"""Work for a client that may go away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from tq_fs.errors import InvalidRequest, SessionClosed
from tq_fs.proxy._entry import seen

T = TypeVar("T")

GONE = 499  # what proxies write into their logs where the client went away


class BrokenOff(Exception):
    """The client went away: there is nobody to answer."""


async def body_of(request: Request, limit: int) -> bytes:
    """Return a request's body.

    Raises
    ------
    InvalidRequest
        It is longer than `limit` bytes.
    starlette.requests.ClientDisconnect
        The client went away before it had sent all of it.
    """
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise InvalidRequest(
                f"more than {limit} bytes", subject="the body", remedy="raise body_bytes"
            )
        pieces.append(piece)
    return b"".join(pieces)


async def attended(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do a request's work, and break it off where the client goes away. The body has been read.

    Raises
    ------
    BrokenOff
        The client went away.
    SessionClosed
        The work was broken off by someone else: the session was discarded, or finalized with
        ``abort``.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(seen)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise BrokenOff
        if task.cancelled():
            raise SessionClosed(
                "was ended while the request was under way",
                subject="its session",
                remedy="begin a session anew",
            )
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait((task, gone))


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
