"""Where groups lie, found by any prefix above them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_PLACE = re.compile(r"(.*/try-[0-9a-f]{16})(?:/|\Z)", re.DOTALL)


def place_of(key: str) -> str | None:
    """Return the place of the group that an object belongs to; None for one of no group."""
    found = _PLACE.match(key)
    return found[1] if found else None


class Places(Generic[T]):
    """A value for each place, kept by the prefix that sessions share.

    Not safe to call from many threads. Takes a few hundred bytes a place, of which there can be a
    million; looking below a group's own prefix costs as much as its session has groups.
    """

    def __init__(self) -> None:
        self._by_parent: dict[str, dict[str, T]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return how many there are."""
        return self._count

    def __setitem__(self, place: str, value: T) -> None:
        """Set the value of a place."""
        siblings = self._by_parent.setdefault(parent_of(place), {})
        self._count += place not in siblings
        siblings[place] = value

    def get(self, place: str) -> T | None:
        """Return the value of a place; None where there is none."""
        return self._by_parent.get(parent_of(place), {}).get(place)

    def pop(self, place: str) -> T | None:
        """Take a place out and return its value; None where there is none."""
        parent = parent_of(place)
        siblings = self._by_parent.get(parent, {})
        if place not in siblings:
            return None
        self._count -= 1
        value = siblings.pop(place)
        if not siblings:
            del self._by_parent[parent]
        return value

    def below(self, prefix: str) -> list[tuple[str, T]]:
        """Return the places at or below a prefix with their values; all of them for ``""``."""
        if not prefix:
            return list(self._all())
        begin = f"{prefix}/"
        near = [*self._by_parent.get(parent_of(prefix), {}).items()]
        near += self._by_parent.get(prefix.rpartition("/")[0], {}).items()
        found = {p: value for p, value in near if p == prefix or p.startswith(begin)}
        if found:  # groups do not lie below each other
            return list(found.items())
        return [
            item
            for parent, siblings in self._by_parent.items()
            if parent == prefix or parent.startswith(begin)
            for item in siblings.items()
        ]

    def _all(self) -> Iterator[tuple[str, T]]:
        for siblings in self._by_parent.values():
            yield from siblings.items()


def parent_of(place: str) -> str:
    """Return the prefix right above the group's own."""
    return place.rpartition("/")[0].rpartition("/")[0]
