"""Trying again: what may pass is waited for, up to a deadline; what will not, fails at once."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tq_fs.errors import CredentialsExpired, RetryError

T = TypeVar("T")

_log = logging.getLogger(__name__)


def _uniform(low: float, high: float) -> float:
    """Return a random number; by name, so that a pickle does not carry the generator's state."""
    return random.uniform(low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Exponential backoff with full jitter: the wait before try n is a random part of its bound.

    Source of the rule: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.

    Attributes
    ----------
    deadline_s
        Seconds from the first try after which no further one is begun.
    first_s, most_s
        Bound of the first wait; it doubles with each try up to the second.
    clock, sleep, uniform
        Monotonic seconds, waiting, and a random number in a range; for tests.
    """

    deadline_s: float = 60.0
    first_s: float = 0.1
    most_s: float = 5.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = field(default=_uniform)

    def call(self, request: Callable[[], T], *, renew: Callable[[], None]) -> T:
        """Return what `request` returns, once it succeeds.

        Parameters
        ----------
        renew
            Fetches credentials anew; called once where they have expired.

        Raises
        ------
        RetryError
            The last failure, when the deadline is over; says how often was tried.
        TqFsError
            A failure that will not pass, at once.
        """
        start = self.clock()
        try:
            return request()
        except (RetryError, CredentialsExpired) as error:
            return self._again(request, error, renew, start)

    def _again(
        self,
        request: Callable[[], T],
        error: RetryError | CredentialsExpired,
        renew: Callable[[], None],
        start: float,
    ) -> T:
        tries = 1
        renewed = False
        while True:
            if isinstance(error, CredentialsExpired):
                if renewed:
                    raise error
                renew()
                renewed = True
            else:
                self._wait(error, tries, start)
            try:
                return request()
            except (RetryError, CredentialsExpired) as again:
                error = again
                tries += 1

    def _wait(self, error: RetryError, tries: int, start: float) -> None:
        """Wait before the next try, or raise `error` if it would come too late."""
        bound = min(self.first_s * 2.0 ** min(tries - 1, 30), self.most_s)
        wait = self.uniform(0.0, bound)
        spent = self.clock() - start
        if spent + wait > self.deadline_s:
            raise _given_up(error, tries, spent) from error
        _log.warning("%s; try %d in %.1f s", error, tries + 1, wait)
        self.sleep(wait)


def _given_up(error: RetryError, tries: int, spent_s: float) -> RetryError:
    return type(error)(
        f"{error.problem} (tried {tries} times in {spent_s:.0f} s)",
        subject=error.subject,
        remedy=error.remedy,
    )
