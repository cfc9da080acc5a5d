"""Where a store without an object store keeps its documents: on its units.

A session's manifest lies on the session's home, which its incarnation id names, so that nobody has
to be asked where. Pages and tombstones lie on any unit: they are looked for on all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tq_fs.backends import Buffer, ObjectReader
from tq_fs.channel import ChannelBackend
from tq_fs.errors import ObjectMissing, UnitsUnavailable
from tq_fs.units._units import RemoteUnits

_MANIFESTS = "manifests"
_DEPTH = 4  # manifests / partition / session / incarnation


class HomeDocuments:
    """A :class:`~tq_fs.backends.Backend` for documents, over a store's units.

    What lies on a unit that cannot be asked is not listed, and raises when it is read.

    Parameters
    ----------
    units
        The units; stay the caller's.
    """

    request_bytes = ChannelBackend.request_bytes

    def __init__(self, units: RemoteUnits) -> None:
        self._units = units
        self._where: dict[str, str] = {}  # of what has no home

    # ------------------------------------------------------------ write

    def put(self, key: str, data: bytes, *, urgent: bool = False) -> None:
        """Write a document where it belongs."""
        home = _home(key)
        if home:
            self._units.backend(home).put(key, data, urgent=urgent)
            return
        desk = self._desk()
        self._where[key] = desk  # also where nobody says so: it may be there by then
        self._units.backend(desk).put(key, data, urgent=urgent)

    def publish(
        self, prefix: str, members: Mapping[str, Sequence[Buffer]], *, fresh: bool = False
    ) -> str:
        """Publish a group on the unit that is the home of `prefix`."""
        return self._units.backend(_home(prefix) or self._desk()).publish(
            prefix, members, fresh=fresh
        )

    def _desk(self) -> str:
        """Return the unit that takes what has no home."""
        live = self._units.directory.live()
        if not live:
            raise UnitsUnavailable("none can be asked", subject="the store's units")
        return live[0]

    # ------------------------------------------------------------ read

    def get(self, key: str) -> bytes:
        """Return a document.

        Raises
        ------
        ObjectMissing
        UnitLost, StorageUnreachable
            Its unit cannot be asked.
        """
        for unit in self._holders(key):
            try:
                return self._units.backend(unit).get(key)
            except ObjectMissing:
                continue
        raise ObjectMissing("no such object", subject=key)

    def open(self, key: str) -> ObjectReader:
        """Open a document for ranged reads."""
        return self._units.backend(_home(key) or self._desk()).open(key)

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names right below `prefix`, on all units that can be asked."""
        yield from sorted(
            {n for unit in self._holders(prefix) for n in self._units.backend(unit).list(prefix)}
        )

    def walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield key and size of each document below `prefix`."""
        for unit in self._holders(prefix):
            for key, nbytes in self._units.backend(unit).walk(prefix):
                self._note(key, unit)
                yield key, nbytes

    def stamp(self, key: str) -> str:
        """Return a document's stamp."""
        return self._units.backend(_home(key) or self._desk()).stamp(key)

    def stamps(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield key and stamp of each document below `prefix`."""
        for unit in self._holders(prefix):
            yield from self._units.backend(unit).stamps(prefix)

    def _holders(self, key: str) -> Sequence[str]:
        """Return the units that may hold a key or what is below it."""
        home = _home(key)
        if home:
            return [home]
        known = self._where.get(key)
        return [known] if known else self._units.directory.live()

    def _note(self, key: str, unit: str) -> None:
        if not _home(key):
            self._where[key] = unit

    # ------------------------------------------------------------ the rest

    def delete(self, prefix: str) -> bool:
        """Remove a document or all below a prefix."""
        found = [self._units.backend(unit).delete(prefix) for unit in self._holders(prefix)]
        self._where.pop(prefix, None)
        return any(found)

    def distrust(self, key: str) -> bool:
        """Return True: what came may have changed on its way."""
        found = [self._units.backend(unit).distrust(key) for unit in self._holders(key)]
        return any(found)

    def cool(self, prefixes: Iterable[str]) -> None:
        """Do nothing: documents are small."""

    def settle(self, prefix: str) -> None:
        """Do nothing: documents lie where they belong."""

    def sync(self) -> None:
        """Wait until everything is as durable as the units' devices can make it."""
        for unit in self._units.directory.live():
            self._units.backend(unit).sync()

    def close(self) -> None:
        """Do nothing: the units are their owner's."""


def _home(key: str) -> str:
    """Return the unit that a document belongs to; empty for one of no session, and for a prefix."""
    parts = key.split("/")
    if parts[0] != _MANIFESTS or len(parts) < _DEPTH:
        return ""
    return parts[_DEPTH - 1].partition(".")[2]
