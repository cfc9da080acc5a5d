"""SGLang over HTTP: many generations at once, whose replies are parsed off the event loop.

Memory: a request is admitted once its reply's length is known, to a :class:`Room` of `reply_bytes`;
until then no more than its first piece is read, and the engine waits with it. A body is handed to
the pool piece by piece, and its socket is not read on while some pieces lie unparsed.
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from time import perf_counter
from typing import ParamSpec, TypeVar

import aiohttp

from tq_fs.errors import (
    InvalidRequest,
    TqFsError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from tq_fs.ingest import Asked, GenerateReply, ReplyParser
from tq_fs.metrics import Metrics, Sample
from tq_fs.placement import rank
from tq_fs.proxy._connections import checked_urls, client_session
from tq_fs.proxy._refusals import check_status, mapped
from tq_fs.proxy._room import Lease, Room
from tq_fs.proxy._wanted import Wanted, checked_length, request_body, too_large

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class SglangEngine:
    """Asks rollout engines that speak SGLang's ``/generate``. For one event loop.

    Parameters
    ----------
    urls
        Base URLs, such as ``http://10.0.0.7:30000``. A session's requests go to one of them, by
        rendezvous hashing: where one is added or taken away, most sessions stay where they were.
    timeout_s
        Seconds that one generation may take, from its being sent to the last byte of its reply;
        those in which the reply waits for room are not among them, and have the same bound.
    reply_bytes
        Bound of the bytes of replies that are on their way or not recorded yet.
    pool
        Threads that encode requests and parse replies; stays the caller's. Parsing is bound by the
        interpreter's lock: a few threads are as fast as many, and disturb the event loop less.
    connect_s, abort_s
        Seconds that connecting, and an abort, may take.
    headers
        Sent with every request, such as ``Authorization``.
    metrics
        Counts requests, failures, aborts and seconds.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float,
        reply_bytes: int,
        pool: Executor,
        connect_s: float = 10.0,
        abort_s: float = 5.0,
        headers: Mapping[str, str] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.urls = checked_urls(urls)
        self.room = Room(reply_bytes, deadline_s=timeout_s)
        self._timeout_s = timeout_s
        self._connect_s, self._abort_s = connect_s, abort_s
        self._pool = pool
        self._headers = dict(headers or {})
        self._metrics = metrics
        self._running: dict[str, str] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._made: aiohttp.ClientSession | None = None
        self._closed = False

    def url_of(self, session_id: str) -> str:
        """Return the engine that a session's requests go to."""
        return rank(session_id, dict.fromkeys(self.urls, 1))[0]

    @property
    def running(self) -> int:
        """Generations that were sent and have not come back."""
        return len(self._running)

    # ------------------------------------------------------------ generate

    async def generate(self, wanted: Wanted, *, lease: Lease | None = None) -> GenerateReply:
        """Generate, and return the reply once it was read and checked.

        Cancelled, or late, it closes the connection and sends an abort, which nobody waits for.

        Parameters
        ----------
        lease
            Holds the reply's bytes in :attr:`room` also after the return. None: they are given
            back at the return.

        Raises
        ------
        UpstreamUnavailable
            Refused, broken off, an error of the engine's own, or not in time
            (:class:`~tq_fs.errors.UpstreamTimeout`).
        UpstreamRefused
            The engine does not take the request.
        ContextOverflow
            It says that prompt and answer are longer than its context.
        ReplyInvalid
            The reply is short, too large, or contradicts itself or the request.
        BackpressureTimeout
            No room for the reply came free in time.
        InvalidRequest
            A request of this id is running.
        """
        asked = wanted.asked()
        url = self.url_of(wanted.session_id)
        with self._counted(url), self._ran(wanted.rid, url):
            if lease is None:
                with self.room.lease() as own:
                    return await self._exchange(url, wanted, asked, own)
            with _kept(lease):
                return await self._exchange(url, wanted, asked, lease)

    async def _exchange(
        self, url: str, wanted: Wanted, asked: Asked, lease: Lease
    ) -> GenerateReply:
        body = await self.in_pool(request_body, wanted)
        with mapped(url, self._timeout_s):
            async with (
                asyncio.timeout(self._timeout_s) as scope,
                self._session().post(
                    f"{url}/generate", data=io.BytesIO(body), allow_redirects=False
                ) as response,
            ):
                await check_status(response, url)
                nbytes = checked_length(response.content_length, asked, self.room.limit_bytes)
                before = lease.held_bytes
                with _stopped(scope):
                    await lease.take(nbytes)
                reply, taken = await self._parsed(response.content, asked, nbytes)
                lease.keep(before + taken)  # less, where the length was not told
                return reply

    async def _parsed(
        self, content: aiohttp.StreamReader, asked: Asked, most_bytes: int
    ) -> tuple[GenerateReply, int]:
        """Parse a body as it comes, each piece in the pool, where the last one also ends it.

        Returns
        -------
        GenerateReply, int
            And the bytes of the body.
        """
        parser = ReplyParser(asked)
        taken = 0
        while piece := await content.readany():
            taken += len(piece)
            if taken > most_bytes:
                raise too_large(asked, taken, most_bytes)
            if content.at_eof():
                return await self.in_pool(_ended, parser, piece), taken
            await self.in_pool(parser.feed, piece)
        return await self.in_pool(parser.close), taken

    async def in_pool(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run `call` in a thread of the pool, off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: call(*args, **kwargs))

    @contextmanager
    def _ran(self, rid: str, url: str) -> Iterator[None]:
        """Know which engine runs a request; abort it there where its answer is not waited for."""
        if rid in self._running:
            raise InvalidRequest("is running already", subject=f"rid {rid}")
        self._running[rid] = url
        try:
            yield
        except (asyncio.CancelledError, UpstreamTimeout):
            self._abort_unattended(rid, url)
            raise
        finally:
            del self._running[rid]

    @contextmanager
    def _counted(self, url: str) -> Iterator[None]:
        """Count a request, time it if it succeeds, and count its error if it does not."""
        if self._metrics is None:
            yield
            return
        self._metrics.counter("tqfs_upstream_requests_total", engine=url).add()
        since = perf_counter()
        with self._metrics.failures("upstream"):
            yield
        self._metrics.histogram("tqfs_upstream_seconds").observe(perf_counter() - since)

    # ------------------------------------------------------------ abort

    async def abort(self, rid: str) -> None:
        """Ask the engine that runs a request to end it; nothing where none does.

        The engine then answers with what it has, and finish reason ``abort``.

        Raises
        ------
        UpstreamUnavailable, UpstreamRefused
            It did not take the abort; the request may go on.
        """
        if (url := self._running.get(rid)) is not None:
            await self._abort(rid, url)

    async def _abort(self, rid: str, url: str) -> None:
        if self._metrics is not None:
            self._metrics.counter("tqfs_upstream_aborts_total", engine=url).add()
        with mapped(url, self._abort_s):
            async with (
                asyncio.timeout(self._abort_s),
                self._session().post(f"{url}/abort_request", json={"rid": rid}) as response,
            ):
                await check_status(response, url)

    def _abort_unattended(self, rid: str, url: str) -> None:
        async def abort() -> None:
            try:
                await self._abort(rid, url)
            except TqFsError as error:
                _log.warning("a request that nobody waits for was not aborted: %s", error)

        if not self._closed:
            task = asyncio.get_running_loop().create_task(abort())
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    # ------------------------------------------------------------ connections

    def _session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise UpstreamUnavailable("was closed", subject="the engine's client")
        if self._made is None:  # in the event loop, which the constructor need not have
            self._made = client_session(self._headers, self._connect_s)
        return self._made

    async def close(self) -> None:
        """Wait for aborts that are on their way, and close all connections; idempotent.

        Generations that still run end with :class:`~tq_fs.errors.UpstreamUnavailable`.
        """
        while self._aborts:
            await asyncio.wait(set(self._aborts))
        self._closed = True
        if self._made is not None:
            await self._made.close()

    def samples(self) -> Iterable[Sample]:
        """Tell a :class:`~tq_fs.metrics.Metrics` what runs, and how full the room is."""
        yield Sample("tqfs_upstream_running", self.running)
        yield Sample("tqfs_upstream_reply_bytes", self.room.used_bytes)
        yield Sample("tqfs_upstream_reply_limit_bytes", self.room.limit_bytes)
        yield Sample("tqfs_upstream_reply_waiting", self.room.waiting)


def _ended(parser: ReplyParser, piece: bytes) -> GenerateReply:
    parser.feed(piece)
    return parser.close()


@contextmanager
def _kept(lease: Lease) -> Iterator[Lease]:
    """Give back, if this fails, what a lease took meanwhile."""
    before = lease.held_bytes
    try:
        yield lease
    except BaseException:
        lease.keep(before)
        raise


@contextmanager
def _stopped(scope: asyncio.Timeout) -> Iterator[None]:
    """Let no time pass meanwhile."""
    clock = asyncio.get_running_loop().time
    until, since = scope.when(), clock()
    assert until is not None
    scope.reschedule(None)
    yield
    scope.reschedule(until + clock() - since)
