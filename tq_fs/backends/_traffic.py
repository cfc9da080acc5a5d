"""Who is at work below which prefix."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class _Work(NamedTuple):
    prefix: str
    below: bool


class Traffic:
    """Turns at prefixes, in the order they are asked for.

    One at a time is at work on a prefix, and none below a prefix that is removed: who removes
    waits for those that came before, and those that come later wait for it. Nobody takes two turns
    at once, so that nobody waits for himself.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._works: dict[int, _Work] = {}
        self._tickets = itertools.count()

    @contextmanager
    def on(self, prefix: str, *, below: bool = False) -> Iterator[None]:
        """Be at work on a prefix; with `below` also on everything below it."""
        with self._turn:
            ticket = next(self._tickets)
            self._works[ticket] = _Work(prefix, below)
        try:
            with self._turn:
                while self._must_wait(ticket):
                    self._turn.wait()
            yield
        finally:
            with self._turn:
                del self._works[ticket]
                self._turn.notify_all()

    def _must_wait(self, ticket: int) -> bool:
        mine = self._works[ticket]
        earlier = itertools.takewhile(lambda item: item[0] < ticket, self._works.items())
        return any(_meet(mine, other) for _, other in earlier)


def _meet(one: _Work, other: _Work) -> bool:
    return (
        one.prefix == other.prefix
        or (one.below and other.prefix.startswith(f"{one.prefix}/"))
        or (other.below and one.prefix.startswith(f"{other.prefix}/"))
    )
