"""What connections need in a process that forks: things of its own, and the parent's left alone."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_connected: weakref.WeakSet[object] = weakref.WeakSet()
_of_parents: list[object] = []


class PerProcess(Generic[T]):
    """Something made lazily, once in each process that asks, forks included.

    Takes no lock, which a fork could leave locked; two threads that ask at once may make it twice,
    and one of the two is used.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: dict[int, T] = {}

    def get(self) -> T:
        """Return it."""
        found = self._made.get(os.getpid())
        return found if found is not None else self._made.setdefault(os.getpid(), self._make())

    def forget(self) -> None:
        """Make it anew next time."""
        self._made = {}


def leave_to_parent(connected: object) -> None:
    """Never end something in a fork of this process, where its threads do not live.

    Its end would wait there for an event loop that nobody runs (s3fs: a second for each file system
    that the garbage collector finds), or for a lock that a thread held (obstore).
    """
    _connected.add(connected)


def _keep() -> None:
    _of_parents.extend(_connected)


os.register_at_fork(after_in_child=_keep)
