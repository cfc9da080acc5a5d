"""Where groups of values lie: one place that all processes see, or the units of a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from tq_fs.backends import Backend, Buffer, Readable
from tq_fs.channel import ChannelBackend
from tq_fs.errors import RetryError, StorageFull, UnitLost, UnitsUnavailable
from tq_fs.placement import rank
from tq_fs.units import RemoteUnits
from tq_fs.values._calls import Note, decode_noted, encode_note
from tq_fs.values._entry import Place

_PAUSES_S = (0.05, 1.0)
_MOST_ASKED = 3


class ValuePlaces(Protocol):
    """Takes groups and deletes them. Safe to call from many threads."""

    readers: Mapping[str, Readable]

    def publish(self, path: str, members: Mapping[str, Sequence[Buffer]]) -> Place:
        """Make a group readable, whole or not at all; its path was never used."""

    def units(self) -> Sequence[str]:
        """Return the units that can be asked; one without a name where there are none."""

    def home(self, unit: str) -> str:
        """Return the unit, or the place without a name, that keeps what is noted of a unit."""

    def backend(self, unit: str) -> Backend:
        """Return the way to a unit."""


@runtime_checkable
class AtOnce(Protocol):
    """Places of which one also has the index."""

    def put(
        self, partition: str, path: str, members: Mapping[str, Sequence[Buffer]], note: Note
    ) -> int:
        """Make a group readable and let names stand for its values, in one request.

        Returns
        -------
        int
            The generation.
        """


class OnePlace(dict[str, Readable]):
    """A folder or an object store, whatever unit a value was taken by.

    Parameters
    ----------
    backend
        Stays the caller's.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend
        self.readers: Mapping[str, Readable] = self

    def __missing__(self, unit: str) -> Readable:
        """Return the place."""
        return self._backend

    def publish(self, path: str, members: Mapping[str, Sequence[Buffer]]) -> Place:
        """Make a group readable; see the protocol."""
        return Place("", self._backend.publish(path, members, fresh=True))

    def units(self) -> Sequence[str]:
        """Return the only one, without a name."""
        return ("",)

    def home(self, unit: str) -> str:  # noqa: ARG002
        """Return the place."""
        return ""

    def backend(self, unit: str) -> Backend:  # noqa: ARG002
        """Return the place."""
        return self._backend


class KeeperPlaces(dict[str, Readable]):
    """A folder that the keeper writes to and that this process reads.

    Parameters
    ----------
    keeper
        The way to the keeper's process.
    files
        The folder. Both stay the caller's.
    """

    def __init__(self, keeper: ChannelBackend, files: Readable) -> None:
        super().__init__()
        self._keeper = keeper
        self._files = files
        self.readers: Mapping[str, Readable] = self

    def __missing__(self, unit: str) -> Readable:
        """Return the folder."""
        return self._files

    def publish(self, path: str, members: Mapping[str, Sequence[Buffer]]) -> Place:
        """Make a group readable; see the protocol."""
        return Place("", self._keeper.publish(path, members, fresh=True))

    def put(
        self, partition: str, path: str, members: Mapping[str, Sequence[Buffer]], note: Note
    ) -> int:
        """Make a group readable and let names stand for its values; see :class:`AtOnce`."""
        asked = encode_note(partition, note)
        _, answer = self._keeper.publish_noted(path, members, asked, fresh=True)
        return decode_noted(answer)

    def units(self) -> Sequence[str]:
        """Return the only one, without a name."""
        return ("",)

    def home(self, unit: str) -> str:  # noqa: ARG002
        """Return the only one."""
        return ""

    def backend(self, unit: str) -> Backend:  # noqa: ARG002
        """Return the way to the keeper."""
        return self._keeper


class UnitPlaces:
    """The units of a cluster: those of the own node take what it puts, while they have room.

    Parameters
    ----------
    units, readers
        Ways to write and to read; stay the caller's.
    full_deadline_s
        Seconds for which a group waits while all units are full.
    clock, sleep
        Monotonic seconds, and waiting.
    """

    def __init__(
        self,
        units: RemoteUnits,
        readers: Mapping[str, Readable],
        *,
        full_deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.readers = readers
        self._units = units
        self._full_deadline_s = full_deadline_s
        self._clock = clock
        self._sleep = sleep

    def publish(self, path: str, members: Mapping[str, Sequence[Buffer]]) -> Place:
        """Make a group readable on a unit of the own node, else on another.

        Raises
        ------
        StorageFull
            No unit has had room until the deadline.
        UnitsUnavailable, UnitLost, StorageUnreachable
            None could be reached.
        """
        until = self._clock() + self._full_deadline_s
        pause_s, most_s = _PAUSES_S
        while True:
            failed: StorageFull | RetryError | UnitLost = self._nobody(path)
            for name in self._candidates(path):
                try:
                    place = self._units.backend(name).publish(path, members, fresh=True)
                    return Place(name, place)
                except (StorageFull, RetryError, UnitLost) as error:
                    failed = error
            if not isinstance(failed, StorageFull) or self._clock() + pause_s > until:
                raise failed
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, most_s)

    def _nobody(self, path: str) -> StorageFull | UnitsUnavailable:
        """Return what is said where no unit is asked: units that are full take no weight."""
        if any(u.state == "live" for u in self._units.directory.layout().units):
            return StorageFull("all units are full", subject=path, remedy="clear samples")
        return UnitsUnavailable("no unit takes it", subject=path, remedy="see tq-fs cluster status")

    def _candidates(self, path: str) -> Iterator[str]:
        directory = self._units.directory
        live = [u for u in directory.layout().units if u.state == "live"]
        here = {u.name: u.weight for u in live if u.node == directory.node}
        there = {u.name: u.weight for u in live if u.node != directory.node}
        yield from rank(path, here)[:_MOST_ASKED]
        yield from rank(path, there)[:_MOST_ASKED]

    def units(self) -> Sequence[str]:
        """Return the units that can be asked; see the protocol."""
        return self._units.directory.live() or [*([""] if self._units.objects else [])]

    def home(self, unit: str) -> str:
        """Return the object store, where there is one: units come and go."""
        return unit if self._units.objects is None else ""

    def backend(self, unit: str) -> Backend:
        """Return the way to a unit; to the object store, once a unit that had it is lost.

        Raises
        ------
        UnitLost
        """
        objects = self._units.objects
        if objects is not None and (not unit or self._units.directory.is_lost(unit)):
            return objects
        return self._units.backend(unit)
