"""What a place for bytes promises. A backend has never heard of a Step or a manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

# bytes, bytearray, memoryview or a contiguous numpy array. Python 3.11 has no type for "anything
# with a buffer", and numpy does not declare its own before 3.12.
Buffer: TypeAlias = Any


COMMIT = "zarr.json"


class ObjectReader(Protocol):
    """An open object; a context manager. Used by one thread."""

    def readinto(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Fill `buffers`, one after the other, with the object's bytes from `offset`.

        Raises
        ------
        ObjectShort
            The object ends before the buffers are full.
        """

    def ahead(self, offset: int, nbytes: int) -> None:
        """Hear that these bytes will be read next, one part after the other.

        A reader for which asking takes time asks for all of them now.
        """

    def __enter__(self) -> ObjectReader:
        """Return the reader."""

    def __exit__(self, *exc: object) -> None:
        """Close the object."""


class Readable(Protocol):
    """What a reader of Steps needs of a :class:`Backend`."""

    @property
    def request_bytes(self) -> int:
        """Size of a read that is large enough to run at full speed."""

    def open(self, key: str) -> ObjectReader:
        """Open an object for ranged reads."""

    def distrust(self, key: str) -> bool:
        """Hear that what was read of an object is not what was written."""


class Backend(Protocol):
    """Write-once groups of objects, and small replaceable ones, under keys of plain text.

    A key is components joined by ``/``; no component is empty or begins with a dot, and none is
    ``try-`` with 16 hex digits, which names an attempt to publish. All methods may be called from
    many threads. Absence always raises, but for deleting, which is idempotent.

    A group lies at its *place*. A file system renames it to its prefix, whole. An object store has
    no rename: there each attempt has a place of its own below the prefix, and one member is the
    commit, written last: the group's ``zarr.json``, or the last one where there is none. Who finds
    that one finds all of them.

    Attributes
    ----------
    request_bytes
        Size of a read that is large enough to run at full speed; larger ones gain nothing.
    """

    request_bytes: int

    def publish(
        self, prefix: str, members: Mapping[str, Sequence[Buffer]], *, fresh: bool = False
    ) -> str:
        """Make all `members` readable below the place returned at once, or none of them.

        A member's buffers are written one after the other. Publishing content that is there
        already, byte for byte, succeeds: the acknowledgement was lost.

        Parameters
        ----------
        fresh
            The caller knows that `prefix` was never used, so that a backend for which looking
            costs a request may do without.

        Returns
        -------
        str
            The group's place: `prefix`, or a prefix below it.

        Raises
        ------
        ObjectExists
            `prefix` is taken by other content, which is unchanged.
        StorageFull
            No room; nothing is visible.
        """

    def put(self, key: str, data: bytes, *, urgent: bool = False) -> None:
        """Write one small object whole, replacing what was there at once.

        Parameters
        ----------
        urgent
            It makes room elsewhere, and may take what a backend keeps for that.

        Raises
        ------
        StorageFull
            No room; what was there is unchanged.
        """

    def get(self, key: str) -> bytes:
        """Return a small object.

        Raises
        ------
        ObjectMissing
        """

    def open(self, key: str) -> ObjectReader:
        """Open an object for ranged reads.

        Raises
        ------
        ObjectMissing
            Here, or at the first read.
        """

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names right below `prefix`, sorted; nothing where there is no such prefix."""

    def walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield key and size of each object below `prefix`; those of a prefix follow each other."""

    def delete(self, prefix: str) -> bool:
        """Remove an object or everything below a prefix; at once, as a reader sees it.

        Where not everything can go at once the commits of groups go before all else; below a prefix
        without any, the first object by name does, which others may therefore hang on.

        Returns
        -------
        bool
            Whether there was something.
        """

    def distrust(self, key: str) -> bool:
        """Hear that what was read of an object is not what was written.

        Returns
        -------
        bool
            Whether reading it again may help: the bytes may have changed on their way, or a copy
            of them was dropped.
        """

    def cool(self, prefixes: Iterable[str]) -> None:
        """Hear that groups will hardly be read again: the first to leave where room is short."""

    def settle(self, prefix: str) -> None:
        """Return once everything published below `prefix` lies where the policy wants it.

        Raises
        ------
        TqFsError
            It could not be brought there; what was acknowledged is kept, and tried again.
        """

    def sync(self) -> None:
        """Return once everything published before is as durable as the device can make it."""

    def close(self) -> None:
        """Release threads and descriptors; idempotent."""


@runtime_checkable
class Stamping(Protocol):
    """A backend that can tell, without reading an object, that it was written again.

    A *stamp* is text that is another one whenever the object was written, replaced or copied. Equal
    stamps say that it is the same; that the device gives the same bytes they do not say.
    """

    def stamp(self, key: str) -> str:
        """Return an object's stamp.

        Raises
        ------
        ObjectMissing
        """

    def stamps(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield key and stamp of each object below `prefix`, in the order of a walk."""
