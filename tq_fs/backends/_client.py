"""What a driver of an object store does: one request at a time, tried once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

from tq_fs.backends._base import Buffer


class Page(NamedTuple):
    """A part of a listing, in the server's order.

    Attributes
    ----------
    objects
        Keys with their sizes in bytes.
    prefixes
        Beginnings that keys have in common up to the next ``/``, it included; none in a deep
        listing.
    """

    objects: Sequence[tuple[str, int]]
    prefixes: Sequence[str] = ()

    @property
    def last(self) -> str:
        """The last of all keys and prefixes: where a listing that broke off goes on."""
        return max((*(key for key, _ in self.objects), *self.prefixes), default="")


class ObjectClient(Protocol):
    """The requests that :class:`~tq_fs.backends.ObjectBackend` makes, from many threads.

    Each is tried once and raises errors of this package: a :class:`~tq_fs.errors.RetryError` where
    the same request may succeed later, another one where it will not.
    """

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Write an object by one request, replacing what was there."""

    def read(self, key: str, offset: int, nbytes: int) -> Buffer:
        """Return bytes of an object; fewer where it ends before that.

        Raises
        ------
        ObjectMissing
        """

    def get(self, key: str) -> Buffer:
        """Return a whole object.

        Raises
        ------
        ObjectMissing
        """

    def size(self, key: str) -> int:
        """Return an object's size in bytes.

        Raises
        ------
        ObjectMissing
        """

    def modified_ns(self, key: str) -> int:
        """Return when an object was written, by the server's clock; 0 where it does not say.

        Raises
        ------
        ObjectMissing
        """

    def pages(self, prefix: str, *, deep: bool, after: str) -> Iterator[Page]:
        """Yield the keys below `prefix` (empty, or ending in ``/``) that come behind `after`.

        Parameters
        ----------
        deep
            All of them; else what lies below the next ``/`` is told by its common prefix.
        """

    def delete(self, keys: list[str]) -> None:
        """Remove up to 1,000 objects; those that are not there count as removed.

        Takes from `keys` what it knows to be gone: another try asks for the rest.
        """

    def renew(self) -> None:
        """Forget credentials and connections: the next request begins anew."""

    def close(self) -> None:
        """Let go of connections; idempotent."""


def nanoseconds(time: datetime) -> int:
    """Return a time in nanoseconds since 1970; one without a zone is UTC."""
    known = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    return int(known.timestamp() * 1e9)
