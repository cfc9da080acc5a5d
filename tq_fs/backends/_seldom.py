"""Warnings that would otherwise come with every call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from logging import Logger


class Seldom:
    """Logs one warning a minute, and says how often there was reason for it.

    Parameters
    ----------
    log
        Where to.
    every_s
        Seconds between two warnings.
    clock
        Monotonic seconds.

    Attributes
    ----------
    count
        How often there was reason.
    """

    def __init__(
        self, log: Logger, *, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.count = 0
        self._log = log
        self._every_s = every_s
        self._clock = clock
        self._next = 0.0
        self._lock = threading.Lock()

    def warn(self, what: str, error: BaseException) -> None:
        """Count a failure, and log it where the last one logged is long ago."""
        with self._lock:
            self.count += 1
            count, due = self.count, self._clock() >= self._next
            if due:
                self._next = self._clock() + self._every_s
        if due:
            self._log.warning("%s (%d times so far): %s", what, count, error)
