"""How this process reads what units hold: files on its own node, the channel, the object store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from tq_fs.backends import Backend, Buffer, ObjectBackend, ObjectReader, Readable
from tq_fs.errors import StorageUnreachable, TqFsError, UnitLost
from tq_fs.units._units import RemoteUnits

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Bytes of values that have passed between a process and the units of its store.

    Attributes
    ----------
    sent_bytes, received_bytes
        Over the channel.
    file_bytes
        Read from files of units on the same node.
    files
        The units whose files were opened, each with the id of its node.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    file_bytes: int = 0
    files: Mapping[str, str] = field(default_factory=dict)


class UnitReaders(Mapping[str, Readable]):
    """For each unit the way to read from it, by its name. Safe to call from many threads.

    Parameters
    ----------
    units
        The units, as they are reached over the channel; stay the caller's.
    open_files
        Opens a folder of a unit of this node, for as long as the stack is open; raises where this
        process cannot.

    Attributes
    ----------
    files
        Units whose files were opened.
    """

    def __init__(self, units: RemoteUnits, open_files: Callable[[str, ExitStack], Backend]) -> None:
        self.files: dict[str, Backend] = {}
        self._units = units
        self._open_files = open_files
        self._lock = threading.Lock()
        self._ways: dict[str, Readable] = {}
        self._nodes: dict[str, str] = {}
        self._count = _Count()
        self._opened = ExitStack()

    def __getitem__(self, unit: str) -> Readable:
        """Return the way to read from a unit.

        Raises
        ------
        UnitLost
            There is no such unit, and no object store.
        """
        found = self._ways.get(unit)
        if found is None:
            with self._lock:
                found = self._ways.get(unit)
                if found is None:
                    found = self._way(unit)
                    if self._is_known(unit):
                        self._ways[unit] = found
        return found

    def __iter__(self) -> Iterator[str]:
        """Iterate over the units that were asked for."""
        return iter(self._ways)

    def __len__(self) -> int:
        """Return how many were asked for."""
        return len(self._ways)

    def passed(self) -> Passed:
        """Return what has passed so far."""
        with self._lock:
            files = dict(self._nodes)
        return Passed(
            sent_bytes=self._units.sent_bytes,
            received_bytes=self._units.received_bytes,
            file_bytes=self._count.nbytes,
            files=files,
        )

    def close(self) -> None:
        """Close the files of units of this node; idempotent."""
        with self._lock:
            self._ways.clear()
            self.files.clear()
            self._opened.close()

    def _way(self, unit: str) -> Readable:
        objects = self._units.objects
        directory = self._units.directory
        here = False
        try:
            here = bool(unit) and directory.is_here(unit)
        except UnitLost:
            unit = "" if objects is not None else unit
        except StorageUnreachable:
            pass  # whoever reads waits for it
        if objects is not None and not unit:
            return objects
        if here and (files := self._files(unit)) is not None:
            return _Counted(files, self._count)
        way = self._units.backend(unit)
        return way if objects is None else _Fallback(way, objects)

    def _is_known(self, unit: str) -> bool:
        """Tell whether it is settled how a unit is read: it is known where it is."""
        try:
            self._units.directory.is_here(unit)
        except StorageUnreachable:
            return False
        except UnitLost:
            pass
        return True

    def _files(self, unit: str) -> Backend | None:
        address = self._units.directory.find(unit)
        try:
            found = self._open_files(address.folder, self._opened)
        except TqFsError:
            _log.info("files of unit %s are read over the channel", unit, exc_info=True)
            return None  # another mount namespace, perhaps
        self.files[unit] = found
        self._nodes[unit] = address.node
        return found


class _Count:
    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()

    def add(self, buffers: Sequence[Buffer]) -> None:
        nbytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        with self._lock:
            self.nbytes += nbytes


class _Counted:
    """Reads files, and counts their bytes."""

    def __init__(self, files: Backend, count: _Count) -> None:
        self._files = files
        self._count = count
        self.request_bytes = files.request_bytes

    def open(self, key: str) -> ObjectReader:
        return _CountedObject(self._files.open(key), self._count)

    def distrust(self, key: str) -> bool:
        return self._files.distrust(key)


class _CountedObject:
    def __init__(self, source: ObjectReader, count: _Count) -> None:
        self._source = source
        self._count = count

    def readinto(self, buffers: Sequence[Buffer], offset: int) -> None:
        self._source.readinto(buffers, offset)
        self._count.add(buffers)

    def ahead(self, offset: int, nbytes: int) -> None:
        self._source.ahead(offset, nbytes)

    def __enter__(self) -> _CountedObject:
        self._source.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._source.__exit__(*exc)


class _Fallback:
    """Reads from a unit, and from the object store where that one is gone."""

    def __init__(self, way: Readable, objects: ObjectBackend) -> None:
        self._way = way
        self._objects = objects
        self.request_bytes = way.request_bytes

    def open(self, key: str) -> ObjectReader:
        return _FallbackObject(self._way, self._objects, key)

    def distrust(self, key: str) -> bool:
        try:
            return self._way.distrust(key)
        except (UnitLost, StorageUnreachable):
            return self._objects.distrust(key)


class _FallbackObject:
    def __init__(self, way: Readable, objects: ObjectBackend, key: str) -> None:
        self._source = way.open(key)
        self._objects = objects
        self._key = key

    def readinto(self, buffers: Sequence[Buffer], offset: int) -> None:
        try:
            self._source.readinto(buffers, offset)
        except (UnitLost, StorageUnreachable) as error:
            _log.warning("%s is read from the object store: %s", self._key, error)
            self._source.__exit__(None, None, None)
            self._source = self._objects.open(self._key)
            self._source.readinto(buffers, offset)

    def ahead(self, offset: int, nbytes: int) -> None:
        self._source.ahead(offset, nbytes)

    def __enter__(self) -> _FallbackObject:
        return self

    def __exit__(self, *exc: object) -> None:
        self._source.__exit__(*exc)
