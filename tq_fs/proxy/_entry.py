"""One incarnation of a session, as the Proxy's table holds it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from tq_fs.errors import InvalidRequest, SessionBusy, SessionClosed
from tq_fs.proxy._wire import ChatAnswer, FinalizeAnswer
from tq_fs.session import Session
from tq_fs.trajectory import Conversation, Segment

State = Literal["open", "finalizing", "discarding", "finalized", "discarded"]


@dataclass(frozen=True, slots=True)
class Live:
    """What an incarnation needs while it can be added to."""

    session: Session
    conversation: Conversation


class Asked:
    """A request that carried an ``X-Turn-Id``, for who asks the same again.

    Attributes
    ----------
    digest
        Of what was asked.
    answer
        None where the request was broken off and recorded nothing.
    recording
        Whether the Step is on its way into the store: how that ends is the answer.
    """

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.recording = False
        self.answer: asyncio.Future[ChatAnswer | None] = asyncio.Future()
        self.answer.add_done_callback(seen)

    def fail(self, error: BaseException) -> None:
        """Let those who wait fail as well, or ask themselves where the request was broken off."""
        if isinstance(error, Exception):
            self.answer.set_exception(error)
        else:
            self.answer.set_result(None)


class Entry:
    """An incarnation from its first request until it is forgotten. Of the event loop only.

    Attributes
    ----------
    session_id, instance_id
        As the first request gave them.
    state
        ``open`` → ``finalizing`` → ``finalized``, or ``discarding`` → ``discarded``. A finalize
        that fails leads back to ``open``; a discard that fails can be tried again.
    opening
        Gives the session, once the store has begun it.
    working
        Requests under way.
    recording
        Steps on their way into the store, which nothing breaks off.
    ending
        The finalize or discard under way.
    turns
        By ``X-Turn-Id``.
    used_s
        When a request was last seen, on the table's clock.
    answer, segments, extra, nbytes
        What became of it; `nbytes` of the Segments' arrays.
    """

    def __init__(self, session_id: str, used_s: float) -> None:
        self.session_id = session_id
        self.instance_id: str | None = None
        self.state: State = "open"
        self.opening: asyncio.Future[Live] | None = None
        self.working: set[asyncio.Task[Any]] = set()
        self.recording: set[asyncio.Task[Any]] = set()
        self.ending: asyncio.Task[Any] | None = None
        self.turns: dict[str, Asked] = {}
        self.used_s = used_s
        self.answer: FinalizeAnswer | None = None
        self.segments: list[Segment] = []
        self.extra: dict[str, Any] = {}
        self.nbytes = 0

    @property
    def busy(self) -> bool:
        """Whether requests are under way."""
        return bool(self.working or self.recording)

    def check_open(self) -> None:
        """Refuse a request where the incarnation takes none.

        Raises
        ------
        SessionBusy
            It is being finalized.
        SessionClosed
            It is being discarded.
        """
        if self.state == "finalizing":
            raise SessionBusy(
                "is being finalized", subject=self.about, remedy="ask again when that is done"
            )
        if self.state != "open":
            raise SessionClosed(f"is {self.state}", subject=self.about)

    def join(self, instance_id: str | None) -> None:
        """Note the instance that a request names.

        Raises
        ------
        InvalidRequest
            Another request of the session named another.
        """
        if instance_id is None:
            return
        if self.instance_id not in (None, instance_id):
            raise InvalidRequest(
                f"belongs to instance {self.instance_id!r}, not to {instance_id!r}",
                subject=self.about,
                remedy="use a session id of its own for each rollout",
            )
        self.instance_id = instance_id

    @property
    def about(self) -> str:
        """Name of the session in messages."""
        return f"session {self.session_id!r}"

    def end(self, state: State, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin to finalize or discard: no request is let in from now on."""
        self.state = state
        self.ending = asyncio.create_task(work)
        self.ending.add_done_callback(seen)
        return self.ending

    def record(self, recording: asyncio.Task[ChatAnswer], asked: Asked | None) -> None:
        """Take charge of a Step on its way into the store."""
        self.recording.add(recording)
        recording.add_done_callback(self.recording.discard)
        recording.add_done_callback(seen)
        if asked is not None:
            asked.recording = True
            recording.add_done_callback(lambda task: self._settle(task, asked))

    def _settle(self, recording: asyncio.Task[ChatAnswer], asked: Asked) -> None:
        error = asyncio.CancelledError() if recording.cancelled() else recording.exception()
        if error is None:
            asked.answer.set_result(recording.result())
            return
        self.turns = {name: turn for name, turn in self.turns.items() if turn is not asked}
        asked.fail(error)

    async def quiet(self) -> None:
        """Break off what is under way, and wait until nothing is."""
        for task in self.working:
            task.cancel()
        while tasks := self.working | self.recording:
            await asyncio.wait(tasks)


def seen(future: asyncio.Future[Any]) -> None:
    """Take note of how a task ended that nobody may wait for: its errors reach those who do."""
    if not future.cancelled():
        future.exception()
