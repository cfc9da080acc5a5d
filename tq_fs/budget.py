"""A bound on bytes that are on their way: writers wait for room, with a deadline."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tq_fs.errors import BackpressureTimeout, StepTooLarge


class ByteBudget:
    """Room for so many bytes, given out in the order it is asked for.

    Parameters
    ----------
    limit_bytes
        The bound.
    deadline_s
        How long :meth:`acquire` waits.
    clock
        Monotonic seconds.
    subject
        What the budget is for, in messages.
    """

    def __init__(
        self, limit_bytes: int, *, deadline_s: float, clock: Callable[[], float], subject: str
    ) -> None:
        self.limit_bytes = limit_bytes
        self._deadline_s = deadline_s
        self._clock = clock
        self._subject = subject
        self._used = 0
        self._peak = 0
        self._holders = 0
        self._queue: deque[object] = deque()
        self._room = threading.Condition()

    @property
    def used_bytes(self) -> int:
        """Bytes given out now."""
        return self._used

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were ever given out at once."""
        return self._peak

    @property
    def holders(self) -> int:
        """Callers that were given bytes and have not given them back."""
        return self._holders

    @property
    def waiting(self) -> int:
        """Callers that wait for room."""
        return len(self._queue)

    def acquire(self, nbytes: int) -> None:
        """Take `nbytes`, waiting behind earlier callers until they are free.

        Raises
        ------
        StepTooLarge
            More than the whole budget.
        BackpressureTimeout
            The deadline passed; nothing was taken.
        """
        if nbytes > self.limit_bytes:
            raise StepTooLarge(
                f"{nbytes} bytes, the budget is {self.limit_bytes}",
                subject=self._subject,
                remedy="raise inflight_bytes above the largest Step",
            )
        ticket = object()
        with self._room:
            self._queue.append(ticket)
            until = self._clock() + self._deadline_s
            try:
                while self._queue[0] is not ticket or self._used + nbytes > self.limit_bytes:
                    left = until - self._clock()
                    if left <= 0:
                        raise self._timeout(nbytes)
                    self._room.wait(min(left, threading.TIMEOUT_MAX))
                self._used += nbytes
                self._holders += 1
                self._peak = max(self._peak, self._used)
            finally:
                self._queue.remove(ticket)
                self._room.notify_all()

    def release(self, nbytes: int) -> None:
        """Give back the `nbytes` of one :meth:`acquire`."""
        with self._room:
            self._used -= nbytes
            self._holders -= 1
            self._room.notify_all()

    def _timeout(self, nbytes: int) -> BackpressureTimeout:
        return BackpressureTimeout(
            f"no room for {nbytes} bytes within {self._deadline_s:g} s; "
            f"{self._used} of {self.limit_bytes} are on their way",
            subject=self._subject,
            remedy="the disk is too slow or full: release trained Segments, or raise "
            "inflight_bytes or inflight_deadline_s",
        )
