"""The table of sessions: which are open, which are finalized and kept.

::

    first request ──► open ──► finalizing ──► finalized ──► gone, once forgotten
                       │ ▲         │ fails
                       │ └─────────┘
                       └─────► discarding ──► gone

A session id names at most one incarnation that is open; a request after finalize or discard begins
a new one, beside which finalized ones stay readable until they are forgotten. Calls by id mean the
open one, and the latest finalized one where none is open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager

from msgspec import UNSET

from tq_fs.errors import (
    ProxyUnavailable,
    SessionBusy,
    SessionClosed,
    SessionMissing,
    TableFull,
    TqFsError,
)
from tq_fs.logs import log_context
from tq_fs.metrics import Sample
from tq_fs.proxy._entry import Entry, Live, seen
from tq_fs.proxy._kept import Kept
from tq_fs.proxy._settings import ProxySettings
from tq_fs.proxy._threads import in_thread
from tq_fs.proxy._wire import (
    DiscardAnswer,
    FinalizeAnswer,
    FinalizeRequest,
    SegmentAnswer,
)
from tq_fs.store import Store
from tq_fs.trajectory import Conversation, Renderer, Segment, VersionRule

_log = logging.getLogger(__name__)


class Sessions:
    """All sessions of a Proxy. Of one event loop: nothing else may call it.

    Attributes
    ----------
    kept
        Those that are finalized.
    stopping
        Whether the Proxy is about to end.

    Parameters
    ----------
    settings
        Bounds, and how sessions are recorded.
    store
        Begins them; stays the caller's.
    renderer
        Of their conversations.
    pool
        Threads that wait for the store; stays the caller's.
    clock
        Seconds; says for how long a session was idle.
    """

    def __init__(
        self,
        settings: ProxySettings,
        *,
        store: Store,
        renderer: Renderer,
        pool: Executor,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._store = store
        self._renderer = renderer
        self._pool = pool
        self._clock = clock
        self._rule = VersionRule(
            partial_rollout=settings.partial_rollout, max_span=settings.max_version_span
        )
        self._open: dict[str, Entry] = {}
        self.stopping = False
        self.kept = Kept()

    # ------------------------------------------------------------ requests

    @asynccontextmanager
    async def request(self, session_id: str, instance_id: str | None) -> AsyncIterator[Entry]:
        """Let a request into its session, which begins where there is none; until the block ends.

        The running task is what a finalize or discard with ``abort`` breaks off.

        Raises
        ------
        SessionBusy, SessionClosed
            The session is being ended.
        TableFull
            There is no room for another session.
        ProxyUnavailable
            The Proxy is being stopped.
        InvalidRequest, InvalidKey
        """
        self.check_goes_on()
        entry = self._open.get(session_id) or self._begin(session_id)
        entry.check_open()
        entry.join(instance_id)
        task = asyncio.current_task()
        assert task is not None
        entry.working.add(task)
        try:
            yield entry
        finally:
            entry.working.discard(task)
            entry.used_s = self._clock()

    def _begin(self, session_id: str) -> Entry:
        self._check_room()
        entry = Entry(session_id, self._clock())
        self._open[session_id] = entry
        entry.opening = asyncio.create_task(self._opened(entry))
        entry.opening.add_done_callback(seen)
        return entry

    async def _opened(self, entry: Entry) -> Live:
        try:
            return await in_thread(self._pool, lambda: self._live(entry.session_id))
        except BaseException:
            self._open.pop(entry.session_id, None)
            entry.state = "discarded"
            raise

    def _live(self, session_id: str) -> Live:
        settings = self._settings
        session = self._store.session(
            session_id, partition=settings.partition, mode=settings.mode, versions=self._rule
        )
        _ = session.trajectory.incarnation.path  # refuses ids too long to be stored, also in memory
        return Live(session, Conversation(session.trajectory, self._renderer))

    def _check_room(self) -> None:
        settings = self._settings
        for what, have, most in (
            ("open sessions", len(self._open), settings.open_sessions),
            ("finalized sessions that are kept", len(self.kept), settings.kept_sessions),
            ("bytes of finalized sessions", self.kept.nbytes, settings.kept_bytes),
        ):
            if have >= most:
                raise TableFull(
                    f"{have} {what}, of {most} at most",
                    subject="the Proxy's table of sessions",
                    remedy="finalize or discard sessions, and forget those that were read",
                )

    # ------------------------------------------------------------ finalize

    async def finalize(self, request: FinalizeRequest) -> FinalizeAnswer:
        """Finalize a session; again, return the same answer.

        Waits for Steps that are being recorded for clients that went away. A client that goes away
        does not stop it.

        Raises
        ------
        SessionMissing
            Unknown, discarded or forgotten.
        SessionBusy
            Requests are under way, and `abort` is not set.
        SessionClosed
            It is being discarded.
        """
        entry = self._latest(request.session_id)
        if entry.answer is not None:
            return entry.answer
        if entry.state != "finalizing":
            entry.check_open()
            if entry.working and not request.abort:
                raise SessionBusy(
                    f"{len(entry.working)} requests are under way",
                    subject=entry.about,
                    remedy="wait for their answers, or finalize with abort",
                )
            entry.end("finalizing", self._finalized(entry, request))
        assert entry.ending is not None
        answer: FinalizeAnswer = await asyncio.shield(entry.ending)
        return answer

    async def _finalized(self, entry: Entry, request: FinalizeRequest) -> FinalizeAnswer:
        try:
            await entry.quiet()
            assert entry.opening is not None
            live = await asyncio.shield(entry.opening)
            segments = await in_thread(self._pool, lambda: self._close(entry, live, request))
        except BaseException:
            entry.state, entry.ending = "open", None
            raise
        entry.segments, entry.turns = segments, {}
        entry.answer = _answer(entry, live, segments)
        entry.state, entry.ending, entry.opening = "finalized", None, None
        del self._open[entry.session_id]
        self.kept.add(entry)
        return entry.answer

    def _close(self, entry: Entry, live: Live, request: FinalizeRequest) -> list[Segment]:
        entry.extra = {
            "instance_id": entry.instance_id,
            "conversation": live.conversation.document(),
            **(request.extra or {}),
        }
        settings = self._settings
        return live.session.finalize(
            consumers=settings.consumers if request.consumers is UNSET else request.consumers,
            views=settings.views if request.views is UNSET else request.views,
            extra=entry.extra,
        )

    def _latest(self, session_id: str) -> Entry:
        entry = self._open.get(session_id) or next(iter(self.kept.of(session_id)), None)
        if entry is None:
            raise SessionMissing(
                "is neither open nor kept",
                subject=f"session {session_id!r}",
                remedy="it begins with its first chat request",
            )
        return entry

    # ------------------------------------------------------------ discard

    async def discard(self, session_id: str) -> DiscardAnswer:
        """Break off a session's requests and delete what it has recorded; idempotent.

        Raises
        ------
        SessionBusy
            It is being finalized.
        SessionClosed
            It was finalized.
        """
        entry = self._open.get(session_id)
        if entry is None:
            if self.kept.of(session_id):
                raise SessionClosed(
                    "was finalized",
                    subject=f"session {session_id!r}",
                    remedy="release its Segments",
                )
            return DiscardAnswer(session_id=session_id, discarded=False)
        if entry.state == "finalizing":
            entry.check_open()
        ending = entry.ending or entry.end("discarding", self._discarded(entry))
        await asyncio.shield(ending)
        return DiscardAnswer(session_id=session_id, discarded=True)

    async def _discarded(self, entry: Entry) -> None:
        try:
            await entry.quiet()
            assert entry.opening is not None
            live = await asyncio.shield(entry.opening)
            await in_thread(self._pool, live.session.discard)
        except BaseException:
            entry.ending = None  # for the next try
            raise
        entry.state = "discarded"
        self._open.pop(entry.session_id, None)

    async def sweep(self) -> int:
        """Discard open sessions that were idle for too long; returns how many."""
        swept = 0
        for entry in list(filter(self._is_idle, self._open.values())):
            if not self._is_idle(entry) or self._open.get(entry.session_id) is not entry:
                continue  # it came to life again
            with log_context(session=entry.session_id):
                swept += await self._swept(entry)
        return swept

    def _is_idle(self, entry: Entry) -> bool:
        since = self._clock() - self._settings.session_idle_s
        return not entry.busy and not entry.ending and entry.used_s < since

    async def _swept(self, entry: Entry) -> bool:
        """Discard a session; whatever stands against it, the others are swept too."""
        (ended,) = await asyncio.gather(self.discard(entry.session_id), return_exceptions=True)
        if isinstance(ended, DiscardAnswer):
            _log.info("was idle for %.0f s: discarded", self._settings.session_idle_s)
            return ended.discarded
        ours = isinstance(ended, TqFsError)
        _log.warning(
            "was idle, and cannot be discarded: %s", ended, exc_info=None if ours else ended
        )
        return False

    # ------------------------------------------------------------ whole

    def stop(self) -> None:
        """Break off all requests but for the Steps that are being recorded; let none in."""
        self.stopping = True
        for entry in self._open.values():
            for task in entry.working:
                task.cancel()

    def check_goes_on(self) -> None:
        """Refuse a request to a Proxy that is about to end.

        Raises
        ------
        ProxyUnavailable
        """
        if self.stopping:
            raise ProxyUnavailable(
                "is being stopped", subject="the Proxy", remedy="ask again once it is back"
            )

    def samples(self) -> Iterator[Sample]:
        """Yield what :meth:`tq_fs.metrics.Metrics.watch` wants to know."""
        entries = list(self._open.values())
        yield Sample("tqfs_proxy_sessions", len(entries), {"state": "open"})
        yield Sample("tqfs_proxy_sessions", len(self.kept), {"state": "finalized"})
        yield Sample("tqfs_proxy_kept_bytes", self.kept.nbytes)
        yield Sample("tqfs_proxy_running_requests", sum(len(e.working) for e in entries))

    async def close(self) -> None:
        """Break off all requests, and wait for what is being recorded or ended."""
        for entry in list(self._open.values()):
            await entry.quiet()
            if entry.ending is not None:
                await asyncio.wait([entry.ending])
            if entry.opening is not None:
                await asyncio.wait([entry.opening])


def _answer(entry: Entry, live: Live, segments: list[Segment]) -> FinalizeAnswer:
    return FinalizeAnswer(
        session_id=entry.session_id,
        incarnation_id=live.session.incarnation_id,
        steps=len(live.session.records),
        segments=[
            SegmentAnswer(
                ref=segment.ref,
                view=segment.view,
                index=segment.index,
                steps=list(segment.steps),
                tokens=len(segment.tokens),
                response_length=segment.response_length,
            )
            for segment in segments
        ],
    )
