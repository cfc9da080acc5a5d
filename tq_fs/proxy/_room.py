"""Room for the bytes of replies: asynchronous, first come first served, safe to cancel."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import NamedTuple

from tq_fs.errors import BackpressureTimeout, ReplyInvalid


class _Ticket(NamedTuple):
    granted: asyncio.Future[None]
    nbytes: int


class Room:
    """Room for so many bytes, given out in the order it is asked for. For one event loop.

    What :class:`tq_fs.budget.ByteBudget` is for threads. A caller that is cancelled while it waits
    leaves nothing behind, also where it was given room in the same moment.

    Parameters
    ----------
    limit_bytes
        The bound.
    deadline_s
        How long a :meth:`Lease.take` waits.
    """

    def __init__(self, limit_bytes: int, *, deadline_s: float) -> None:
        self.limit_bytes = limit_bytes
        self._deadline_s = deadline_s
        self._used = 0
        self._peak = 0
        self._queue: deque[_Ticket] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes given out now."""
        return self._used

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were ever given out at once."""
        return self._peak

    @property
    def waiting(self) -> int:
        """Callers that wait for room."""
        return len(self._queue)

    def lease(self) -> Lease:
        """Return an empty lease, which its holder fills, and empties at the end."""
        return Lease(self)

    async def _take(self, nbytes: int) -> None:
        if not self._queue and self._used + nbytes <= self.limit_bytes:
            self._add(nbytes)
            return
        ticket = _Ticket(asyncio.get_running_loop().create_future(), nbytes)
        self._queue.append(ticket)
        try:
            async with asyncio.timeout(self._deadline_s):
                await ticket.granted
        except TimeoutError as error:
            late = self._timed_out(nbytes)
            self._leave(ticket)
            raise late from error
        except asyncio.CancelledError:
            self._leave(ticket)
            raise

    def _leave(self, ticket: _Ticket) -> None:
        """Take back what was given in the moment of cancelling; let those behind move up."""
        if ticket in self._queue:
            self._queue.remove(ticket)
        elif not ticket.granted.cancelled():
            self._used -= ticket.nbytes
        self._move_up()

    def _add(self, nbytes: int) -> None:
        self._used += nbytes
        self._peak = max(self._peak, self._used)
        if nbytes < 0:
            self._move_up()

    def _move_up(self) -> None:
        while self._queue:
            granted, nbytes = self._queue[0]
            if not granted.cancelled():  # its caller has not run since
                if self._used + nbytes > self.limit_bytes:
                    return
                self._add(nbytes)
                granted.set_result(None)
            self._queue.popleft()

    def _timed_out(self, nbytes: int) -> BackpressureTimeout:
        return BackpressureTimeout(
            f"no room for a reply of {nbytes} bytes within {self._deadline_s:g} s; "
            f"{self._used} of {self.limit_bytes} are taken",
            subject="reply_bytes",
            remedy="replies come faster than they are recorded: raise reply_bytes, or ask for less "
            "at once",
        )


class Lease:
    """What one generation holds of a :class:`Room`; leaving the context gives it back."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._held = 0

    @property
    def held_bytes(self) -> int:
        """Bytes it holds."""
        return self._held

    async def take(self, nbytes: int) -> None:
        """Take `nbytes` more, waiting behind earlier callers until they are free.

        A lease that holds something already does not wait: if all held a part and waited for
        more, they would wait for ever. It may pass the bound by what it takes.

        Raises
        ------
        ReplyInvalid
            More than the whole room.
        BackpressureTimeout
            The deadline passed; nothing was taken.
        """
        if nbytes > self._room.limit_bytes:
            raise ReplyInvalid(
                f"{nbytes} bytes, where all replies together may have {self._room.limit_bytes}",
                subject="reply_bytes",
                remedy="raise reply_bytes above the largest reply, or ask for fewer tokens",
            )
        if self._held:
            self._room._add(nbytes)
        else:
            await self._room._take(nbytes)
        self._held += nbytes

    def keep(self, nbytes: int) -> None:
        """Give back all but `nbytes` of what it holds."""
        spare = self._held - min(nbytes, self._held)
        self._held -= spare
        self._room._add(-spare)

    def __enter__(self) -> Lease:
        """Hold nothing yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give everything back."""
        self.keep(0)
