"""What tests of the Proxy's way to the engine share: a loop for each test, and raw servers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, ParamSpec

import numpy as np
import numpy.typing as npt

from tests._engines import Fault
from tq_fs import routed_experts
from tq_fs.metrics import Metrics
from tq_fs.proxy._engine import SglangEngine
from tq_fs.proxy._wanted import Wanted

P = ParamSpec("P")
ROUTING = routed_experts(layers=4, topk=2, experts=16)
PROMPT = tuple(range(30, 42))
LIMIT_S = 60.0


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an asynchronous test in a loop of its own; nothing it started may be left there."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def limited() -> None:
            loop = asyncio.get_running_loop()
            unhandled: list[dict[str, Any]] = []
            loop.set_exception_handler(lambda _, context: unhandled.append(context))
            async with asyncio.timeout(LIMIT_S):
                await test(*args, **kwargs)
                left = asyncio.all_tasks() - {asyncio.current_task()}
                for task in left:  # those that were cancelled just now may still run to their end
                    await asyncio.wait([task], timeout=1)
            assert [t for t in left if not t.done()] == []
            assert unhandled == []

        asyncio.run(limited())

    return run


@asynccontextmanager
async def upstream(
    *urls: str,
    timeout_s: float = 20.0,
    reply_bytes: int = 64 << 20,
    pool: Executor | None = None,
    metrics: Metrics | None = None,
    **settings: Any,
) -> AsyncIterator[SglangEngine]:
    """A client of engines, which has nothing left at the end."""
    with ThreadPoolExecutor(2) as own:
        engine = SglangEngine(
            urls,
            timeout_s=timeout_s,
            reply_bytes=reply_bytes,
            pool=pool or own,
            metrics=metrics,
            **settings,
        )
        try:
            yield engine
            assert_nothing_left(engine)
        finally:
            await engine.close()


def assert_nothing_left(engine: SglangEngine) -> None:
    assert engine.running == 0
    assert (engine.room.used_bytes, engine.room.waiting) == (0, 0)


def wanted(rid: str = "r0", *, prompt: Sequence[int] = PROMPT, **given: Any) -> Wanted:
    """A request of 8 tokens with routing, unless said otherwise."""
    return Wanted(
        **{
            "rid": rid,
            "session_id": "s0",
            "input_ids": np.array(prompt, np.int32),
            "sampling": {"sampling_seed": 5, "temperature": 1.0},
            "max_new_tokens": 8,
            "routing": ROUTING,
            **given,
        }
    )


def same(got: npt.NDArray[Any] | None, want: npt.NDArray[Any]) -> None:
    """Check values, shape and type."""
    assert got is not None
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def times(fault: Fault, count: int) -> list[Fault]:
    """So many requests to which the same happens."""
    return [fault] * count


async def until(true: Callable[[], bool]) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.002)


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task, which then has to end as cancelled."""
    task.cancel()
    await asyncio.wait([task], timeout=10)
    assert task.cancelled()


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(talk: Talk | bytes) -> AsyncIterator[str]:
    """A server that reads a request and then does as it is told, or writes bytes and closes."""
    talking: set[asyncio.Task[None]] = set()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talking.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            await reader.readexactly(length)
            if isinstance(talk, bytes):
                writer.write(talk)
                await writer.drain()
            else:
                await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            talking.discard(task)

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.close()
        for task in list(talking):
            task.cancel()
        await asyncio.sleep(0)


def http(body: bytes, *, status: int = 200, length: int | None = None) -> bytes:
    """A whole answer."""
    declared = len(body) if length is None else length
    return b"HTTP/1.1 %d Said\r\nContent-Length: %d\r\n\r\n%b" % (status, declared, body)
