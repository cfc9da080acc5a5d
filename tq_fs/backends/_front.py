"""The front of a tier: a local backend that makes room for what comes."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tq_fs.backends._base import Buffer
from tq_fs.backends._errors import mapped
from tq_fs.backends._files import nbytes, parts
from tq_fs.backends._ledger import Ledger, footprint
from tq_fs.backends._local import LocalBackend
from tq_fs.backends._objects import is_attempt
from tq_fs.backends._places import place_of
from tq_fs.backends._seldom import Seldom
from tq_fs.errors import ObjectExists, ObjectMissing, ObjectShort, StorageFull, TqFsError

_log = logging.getLogger(__name__)
_TRIES = 4  # to write a group on a disk that is fuller than it says
_COUNT_S = 60.0  # between two looks for groups that somebody removed: a call for each


@dataclass(frozen=True, slots=True)
class Found:
    """A group that was found on the disk.

    Attributes
    ----------
    place
        Where it lies.
    sizes
        Its members' sizes [bytes].
    written_ns
        When it was written.
    """

    place: str
    sizes: Mapping[str, int]
    written_ns: int


class Front:
    """Groups on a local disk, within a capacity. Safe to call from many threads.

    A write that finds no room makes room, by removing clean groups: just as many as it needs.
    Above the high-water mark a thread goes on with that, down to the low-water mark. The
    accounting decides when; the disk decides whether it was right.

    Parameters
    ----------
    local
        The disk; stays the caller's. Nobody else writes groups there.
    capacity_bytes
        Bound, in bytes that the groups take of the disk; None for as much as it has.
    high_water, low_water
        Shares of that, or of what others leave of the disk.
    at
        Called with the name of each point that is passed; for tests that kill the process there.
    """

    POINTS = ("evicting", "evicted")

    def __init__(
        self,
        local: LocalBackend,
        *,
        capacity_bytes: int | None,
        high_water: float,
        low_water: float,
        at: Callable[[str], None],
    ) -> None:
        self.local = local
        self.evicted = 0
        self._capacity = sys.maxsize if capacity_bytes is None else capacity_bytes
        self._high, self._low = high_water, low_water
        self._at = at
        self._ledger = Ledger()
        self._trouble = Seldom(_log)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._next_count = 0.0
        self._thread: threading.Thread | None = None

    @property
    def used_bytes(self) -> int:
        """What the groups take of the disk."""
        return self._ledger.used_bytes

    @property
    def limit_bytes(self) -> int:
        """What they may take now: the capacity, or less where others fill the disk."""
        return self._limit()

    # ------------------------------------------------------------ come

    def add(
        self,
        place: str,
        members: Mapping[str, Sequence[Buffer]],
        sizes: Mapping[str, int],
        *,
        clean: bool,
    ) -> None:
        """Write a group; one that is not clean stays until :meth:`clean`.

        Raises
        ------
        StorageFull
            No room, also after everything that may leave has left; nothing is visible.
        """
        need = footprint(sizes)
        for tries in range(1, _TRIES + 1):
            self._expect(place, need)
            try:
                self.local.publish(place, members)
            except BaseException as error:
                self.withdraw(place)
                full = isinstance(error, StorageFull) and tries < _TRIES
                if not (full and self._find_room(need)):
                    raise
            else:
                break
        self._ledger.arrive(place, clean=clean)
        self._trim_if_high()

    def _expect(self, place: str, need: int) -> None:
        """Count a group in, making room for it."""
        while not self._ledger.expect(place, need, self._capacity, self._free()):
            limit = self._limit()
            if need > limit or not self._evict_one():
                raise StorageFull(
                    f"no room for {need} bytes: {self.used_bytes} of {limit} are used, and what "
                    "could leave has left",
                    subject=str(self.local.root),
                    remedy="release trained Segments, or give the front more room",
                )

    def withdraw(self, place: str) -> None:
        """Remove what a failed write may have left, such as a rename whose sync failed."""
        with suppress(TqFsError):
            self.local.delete(place)
        self._ledger.forget(place)

    def _find_room(self, need: int) -> bool:
        """Make room on a disk that is fuller than the accounting says; return whether it helped."""
        before = self.used_bytes
        if time.monotonic() >= self._next_count:
            self._next_count = time.monotonic() + _COUNT_S
            for place in self._ledger.below(""):
                if not (self.local.root / place).exists():
                    self._ledger.forget(place)  # removed behind our back
        while before - self.used_bytes < need and self._evict_one():
            pass
        return self.used_bytes < before

    def _free(self) -> int:
        with mapped(str(self.local.root)):
            found = os.statvfs(self.local.root)
        return found.f_bavail * found.f_frsize

    def _limit(self) -> int:
        return self._ledger.limit(self._capacity, self._free())

    # ------------------------------------------------------------ stay

    def published(self, prefix: str, members: Mapping[str, Sequence[Buffer]]) -> str | None:
        """Return where these members lie already; None where nothing lies.

        Raises
        ------
        ObjectExists
            `prefix` is taken by other content.
        """
        for attempt in self.local.list(prefix):
            place = f"{prefix}/{attempt}"
            if is_attempt(attempt) and self._equal(place, members):
                if self.local.durability != "none":
                    self.local.sync()  # the acknowledgement may have been lost before it was
                return place
            if not is_attempt(attempt) or any(self.local.walk(place)):
                raise ObjectExists(
                    f"is taken by other content ({attempt})",
                    subject=f"{self.local.root}/{prefix}",
                    remedy="Steps are written once: use a new Step index or session incarnation",
                )
        return None

    def _equal(self, place: str, members: Mapping[str, Sequence[Buffer]]) -> bool:
        there = {key[len(place) + 1 :]: size for key, size in self.local.walk(place)}
        if there != {name: sum(map(nbytes, buffers)) for name, buffers in members.items()}:
            return False
        try:
            return all(self._holds(f"{place}/{name}", members[name]) for name in members)
        except (ObjectMissing, ObjectShort):
            return False  # evicted meanwhile

    def _holds(self, key: str, buffers: Sequence[Buffer]) -> bool:
        offset = 0
        with self.local.open(key) as there:
            for part in parts(buffers):
                have = bytearray(len(part))
                there.readinto([have], offset)
                if have != part:
                    return False
                offset += len(part)
        return True

    def clean(self, place: str) -> None:
        """Hear that a group lies elsewhere too, and may leave."""
        self._ledger.clean(place)
        self._trim_if_high()

    def touch(self, place: str) -> None:
        """Hear that a group was read."""
        self._ledger.touch(place)

    def cool(self, prefix: str) -> None:
        """Let the groups below a prefix leave before others."""
        self._ledger.cool(prefix)

    def is_only_here(self, place: str) -> bool:
        """Tell whether a group lies nowhere else yet."""
        return self._ledger.is_only_here(place)

    # ------------------------------------------------------------ leave

    def remove(self, prefix: str) -> bool:
        """Remove everything at or below a prefix; return whether there was something."""
        found = self.local.delete(prefix)
        self._ledger.forget_below(prefix)
        return found

    def discard(self, place: str) -> bool:
        """Remove a group that may leave; False where it must stay, for it is nowhere else."""
        if not self._ledger.leave(place):
            return False
        self.remove(place)
        return True

    def _evict_one(self) -> bool:
        """Remove the coldest clean group; False where none may leave, or the disk refuses."""
        place = self._ledger.choose()
        if place is None:
            return False
        self._at("evicting")
        try:
            self.local.delete(place)
        except TqFsError as error:
            self._ledger.stay(place)
            self._trouble.warn("a group cannot be evicted", error)
            return False
        self._ledger.forget(place)
        with self._lock:
            self.evicted += 1
        self._at("evicted")
        return True

    def _trim_if_high(self) -> None:
        if self._ledger.used_bytes > self._high * self._limit():
            with self._lock:
                if self._thread is None and not self._closed:
                    self._thread = threading.Thread(
                        target=self._work, name="tq-fs-evict", daemon=True
                    )
                    self._thread.start()
            self._wake.set()

    def _work(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._closed:
                return
            try:
                self._trim()
            except TqFsError as error:
                self._trouble.warn("the front cannot be trimmed", error)

    def _trim(self) -> None:
        """Remove clean groups down to the low-water mark."""
        while not self._closed and self._ledger.used_bytes > self._low * self._limit():
            if not self._evict_one():
                return

    # ------------------------------------------------------------ start and end

    def found(self) -> Iterator[Found]:
        """Yield the groups on the disk, those of a prefix one after the other.

        Only for the one process that writes, before it does: removes what earlier ones left.
        """
        self.local.sweep()
        keys = ((place_of(key), key, size) for key, size in self.local.walk(""))
        for place, members in itertools.groupby(keys, key=lambda found: found[0]):
            if place is not None:
                sizes = {sys.intern(key[len(place) + 1 :]): size for _, key, size in members}
                with mapped(place):
                    written_ns = (self.local.root / place).stat().st_mtime_ns
                yield Found(place, sizes, written_ns)

    def adopt(self, found: Found, *, clean: bool) -> None:
        """Count a group that was found; those found first are the coldest."""
        self._ledger.adopt(found.place, footprint(found.sizes), clean=clean)
        self._trim_if_high()

    def close(self) -> None:
        """Stop the thread; idempotent."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
