"""For whoever serves many: a unit that did not answer is not waited for again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tq_fs.backends import Retry
from tq_fs.errors import StorageUnreachable

T = TypeVar("T")
_REST_S = 5.0


class Rest:
    """Tries again like :class:`~tq_fs.backends.Retry`; after it was in vain, fails at once a while.

    A release of a hundred sessions then waits for a unit that is cut off once, and not for each.

    Parameters
    ----------
    retry
        How it is tried.
    clock
        Monotonic seconds.
    """

    def __init__(self, retry: Retry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._retry = retry
        self._clock = clock
        self._until = float("-inf")
        self._said = StorageUnreachable("did not answer")

    def call(self, request: Callable[[], T], *, renew: Callable[[], None]) -> T:
        """Return what `request` returns, once it succeeds.

        Raises
        ------
        StorageUnreachable
            It does not answer, or did not a moment ago.
        TqFsError
            As :meth:`tq_fs.backends.Retry.call`.
        """
        if self._clock() < self._until:
            said = self._said
            raise StorageUnreachable(
                f"{said.problem}; it is not asked again for {_REST_S:g} s",
                subject=said.subject,
                remedy=said.remedy,
            )
        try:
            return self._retry.call(request, renew=renew)
        except StorageUnreachable as error:
            self._said = error
            self._until = self._clock() + _REST_S
            raise
