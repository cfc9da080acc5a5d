"""What lies on the front: bytes, and who leaves first. Touches no disk."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from enum import Enum, auto

from tq_fs.backends._places import Places
from tq_fs.backends._staging import folders_of

_BLOCK = 4096


class _State(Enum):
    COMING = auto()  # counted, and perhaps on the disk
    ONLY_HERE = auto()  # must not leave: nowhere else
    CLEAN = auto()
    LEAVING = auto()  # counted, and perhaps gone


class _Group:
    __slots__ = ("cool", "nbytes", "state")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.state = _State.COMING
        self.cool = False


class Ledger:
    """Bytes of the groups on the front, and the order in which they may leave it.

    A group is expected, arrives (clean, or held because it is nowhere else yet), is chosen to
    leave, and is forgotten. Clean groups leave cooled ones first, then in the order of their last
    use. Safe to call from many threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: Places[_Group] = Places()
        self._order: tuple[OrderedDict[str, None], OrderedDict[str, None]] = (
            OrderedDict(),  # of those that may be read again
            OrderedDict(),  # of cooled ones
        )
        self._used = self._coming = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all groups, those included that are on their way here or away."""
        return self._used

    def limit(self, capacity_bytes: int, free_bytes: int) -> int:
        """Return what the front can hold: its capacity, or less where others fill the disk."""
        return min(capacity_bytes, self._used - self._coming + free_bytes)

    def expect(self, place: str, nbytes: int, capacity_bytes: int, free_bytes: int) -> bool:
        """Count a group that is about to be written; False where it finds no room."""
        with self._lock:
            if self._used + nbytes > self.limit(capacity_bytes, free_bytes):
                return False
            self._count(place, nbytes)
            return True

    def adopt(self, place: str, nbytes: int, *, clean: bool) -> None:
        """Count a group that was found on the disk, whatever room there is."""
        with self._lock:
            if self._groups.get(place) is None:
                self._count(place, nbytes)
        self.arrive(place, clean=clean)

    def _count(self, place: str, nbytes: int) -> None:
        self._groups[place] = _Group(nbytes)
        self._used += nbytes
        self._coming += nbytes

    def arrive(self, place: str, *, clean: bool) -> None:
        """Hear that a group was written."""
        with self._lock:
            group = self._groups.get(place)
            if group is not None and group.state is _State.COMING:
                self._coming -= group.nbytes
                group.state = _State.ONLY_HERE
                if clean:
                    self._clean(place, group)

    def clean(self, place: str) -> None:
        """Hear that a group lies elsewhere too, and may leave."""
        with self._lock:
            group = self._groups.get(place)
            if group is not None and group.state is _State.ONLY_HERE:
                self._clean(place, group)

    def _clean(self, place: str, group: _Group) -> None:
        group.state = _State.CLEAN
        self._order[group.cool][place] = None

    def touch(self, place: str) -> None:
        """Hear that a group was read."""
        with self._lock:
            group = self._groups.get(place)
            if group is not None and group.state is _State.CLEAN:
                self._order[group.cool].move_to_end(place)

    def cool(self, prefix: str) -> None:
        """Let groups at or below a prefix leave before others."""
        with self._lock:
            for place, group in self._groups.below(prefix):
                if not group.cool:
                    group.cool = True
                    if group.state is _State.CLEAN:
                        del self._order[False][place]
                        self._order[True][place] = None

    def choose(self) -> str | None:
        """Return the group to leave next; None where none may."""
        with self._lock:
            order = self._order[True] or self._order[False]
            place = next(iter(order), None)
            if place is not None:
                self._take_away(place)
            return place

    def leave(self, place: str) -> bool:
        """Choose this group; False where it must stay. One that is not there may go, too."""
        with self._lock:
            group = self._groups.get(place)
            if group is None or group.state is _State.LEAVING:
                return True
            if group.state is not _State.CLEAN:
                return False
            self._take_away(place)
            return True

    def _take_away(self, place: str) -> None:
        group = self._groups.get(place)
        assert group is not None, "it is in order"
        del self._order[group.cool][place]
        group.state = _State.LEAVING

    def stay(self, place: str) -> None:
        """Hear that a group that was chosen could not leave: its turn comes after all others."""
        with self._lock:
            group = self._groups.get(place)
            if group is not None and group.state is _State.LEAVING:
                self._clean(place, group)

    def forget(self, place: str) -> None:
        """Hear that a group is gone; idempotent."""
        with self._lock:
            group = self._groups.pop(place)
            if group is None:
                return
            self._used -= group.nbytes
            if group.state is _State.COMING:
                self._coming -= group.nbytes
            elif group.state is _State.CLEAN:
                del self._order[group.cool][place]

    def forget_below(self, prefix: str) -> None:
        """Hear that everything at or below a prefix is gone."""
        for place in self.below(prefix):
            self.forget(place)

    def below(self, prefix: str) -> list[str]:
        """Return the places of the groups at or below a prefix that are on the disk."""
        with self._lock:
            found = self._groups.below(prefix)
            return [place for place, group in found if group.state is not _State.COMING]

    def is_only_here(self, place: str) -> bool:
        """Tell whether a group lies nowhere else yet."""
        with self._lock:
            group = self._groups.get(place)
            return group is not None and group.state is _State.ONLY_HERE


def footprint(sizes: Mapping[str, int]) -> int:
    """Return what a group takes of a disk: whole blocks, and one for every folder."""
    folders = 2 + len(folders_of(sizes))  # the place and the prefix above it
    return _BLOCK * (folders + blocks(sizes.values()))


def blocks(sizes: Collection[int]) -> int:
    """Return the blocks of files of these sizes [bytes]."""
    return sum(-(-size // _BLOCK) for size in sizes)
