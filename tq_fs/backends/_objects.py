"""Groups of objects in an object store: each attempt to publish has a place of its own."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, TypeVar

from tq_fs.backends._base import COMMIT, Buffer
from tq_fs.backends._client import ObjectClient, Page
from tq_fs.backends._errors import check_key
from tq_fs.backends._files import nbytes, parts
from tq_fs.backends._forks import PerProcess
from tq_fs.backends._retry import Retry
from tq_fs.errors import (
    InvalidKey,
    ObjectExists,
    ObjectMissing,
    ObjectShort,
    StepTooLarge,
    StorageFailed,
    TqFsError,
)

T = TypeVar("T")
MiB = 1024 * 1024
_ATTEMPT = re.compile(r"try-[0-9a-f]{16}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MOST_BYTES = 5 * 1024 * MiB  # of one PUT, by the S3 API
_BULK = 1000  # keys of one DeleteObjects, by the S3 API
_LOCKS = 64
_PART_BYTES = 8 * MiB


def new_attempt() -> str:
    """Return a name that no other attempt to publish has."""
    return f"try-{os.urandom(8).hex()}"


def is_attempt(name: str) -> bool:
    """Tell whether a path component names an attempt to publish."""
    return _ATTEMPT.fullmatch(name) is not None


def _at_nothing(point: str) -> None:
    """Do nothing: the default for `at`."""


class ObjectBackend:
    """A :class:`~tq_fs.backends.Backend` over an object store.

    Nothing in it relies on conditional requests, which some servers ignore: a group's members lie
    below a path with a nonce, and the last of them is its commit. No upload has several parts, so
    that none can be left dangling.

    Parameters
    ----------
    url
        Of the folder that is the backend's root; for messages.
    root
        The prefix of all keys, without a ``/`` at its end; may be empty.
    client
        Makes the requests; becomes the backend's, which closes it.
    retry
        When to try them again.
    at
        Called with the name of each point of a write or delete as it is passed; for tests that
        kill the process there.
    """

    request_bytes = 8 * MiB

    POINTS = ("member uploaded", "committed", "value uploaded", "deleting", "deleted")

    def __init__(
        self,
        url: str,
        root: str,
        client: ObjectClient,
        *,
        retry: Retry,
        at: Callable[[str], None] = _at_nothing,
    ) -> None:
        self.url = url.rstrip("/")
        self._root = f"{root}/" if root else ""
        self._client = client
        self._retry = retry
        self._at = at
        self._locks = PerProcess(_make_locks)  # a fork would find them as threads left them

    # ------------------------------------------------------------ write

    def publish(
        self, prefix: str, members: Mapping[str, Sequence[Buffer]], *, fresh: bool = False
    ) -> str:
        """Upload all members to a new place below `prefix`, the commit last; see the protocol."""
        _check_members(prefix, members)
        if fresh:
            return self._upload_new(prefix, members)
        with self._lock(prefix):
            return self.published(prefix, members) or self._upload_new(prefix, members)

    def _upload_new(self, prefix: str, members: Mapping[str, Sequence[Buffer]]) -> str:
        place = f"{prefix}/{new_attempt()}"
        try:
            self.upload(place, members)
        except BaseException as error:
            self._undo(place, members, error)
            raise
        return place

    def check(self, prefix: str, members: Mapping[str, Sequence[Buffer]]) -> None:
        """Refuse what no upload would take.

        Raises
        ------
        InvalidKey, StepTooLarge
        """
        _check_members(prefix, members)
        for name, buffers in members.items():
            self._check_size(f"{prefix}/{name}", sum(map(nbytes, buffers)))

    def upload(self, place: str, members: Mapping[str, Sequence[Buffer]]) -> None:
        """Upload a group's members to its place, the commit last.

        What a failure leaves is not visible, and stays: the same group may be uploaded to the same
        place again.
        """
        _check_members(place, members)
        last = commit_of(members)
        for name in sorted(members, key=last.__eq__):  # the commit behind all others
            self._put(f"{place}/{name}", members[name])
            self._at("committed" if name == last else "member uploaded")

    def _undo(self, place: str, names: Iterable[str], because: BaseException) -> None:
        """Remove what was uploaded, the commit first: it may be there though the call failed."""
        try:
            self._remove([f"{place}/{name}" for name in names])
        except TqFsError as error:
            because.add_note(f"and what was uploaded to {place} is still there: {error}")

    def published(self, prefix: str, members: Mapping[str, Sequence[Buffer]]) -> str | None:
        """Return where these members lie already, complete; None where nothing lies.

        Raises
        ------
        ObjectExists
            `prefix` is taken by other content.
        """
        differs = ""
        for attempt, names in self._attempts(prefix).items():
            if not is_attempt(attempt):
                differs = attempt or "an object of that name"
            elif names.keys().isdisjoint((COMMIT, commit_of(members))):
                continue  # was never committed
            elif self._equal(f"{prefix}/{attempt}", names, members):
                return f"{prefix}/{attempt}"
            else:
                differs = attempt
        if differs:
            raise ObjectExists(
                f"is taken by other content ({differs})",
                subject=self._name(prefix),
                remedy="Steps are written once: use a new Step index or session incarnation",
            )
        return None

    def _attempts(self, prefix: str) -> dict[str, dict[str, int]]:
        """Return the objects below a prefix with their sizes, by attempt; and itself as ``""``."""
        found: dict[str, dict[str, int]] = defaultdict(dict)
        if self._is_object(prefix):
            found[""][""] = 0
        for key, size in self.walk(prefix):
            attempt, _, name = key[len(prefix) + 1 :].partition("/")
            found[attempt][name] = size
        return found

    def _is_object(self, key: str) -> bool:
        try:
            self._call(lambda: self._client.size(self._root + key))
        except ObjectMissing:
            return False
        return True

    def _equal(
        self, place: str, names: Mapping[str, int], members: Mapping[str, Sequence[Buffer]]
    ) -> bool:
        if names != {name: sum(map(nbytes, b)) for name, b in members.items()}:
            return False
        return all(
            self._get(f"{place}/{name}") == b"".join(parts(buffers))
            for name, buffers in members.items()
        )

    def put(self, key: str, data: bytes, *, urgent: bool = False) -> None:  # noqa: ARG002
        """Write one small object whole, replacing what was there at once."""
        _check(key)
        self._put(key, (data,))
        self._at("value uploaded")

    def _put(self, key: str, buffers: Sequence[Buffer]) -> None:
        self._check_size(key, sum(map(nbytes, buffers)))
        self._call(lambda: self._put_once(key, buffers))

    def _put_once(self, key: str, buffers: Sequence[Buffer]) -> None:
        try:
            self._client.put(self._root + key, buffers)
        except ObjectMissing as error:  # a gateway onto folders, one of which a delete has removed
            raise StorageFailed("the server lost it while it came", subject=error.subject) from error

    def _check_size(self, key: str, size: int) -> None:
        if size > _MOST_BYTES:
            raise StepTooLarge(
                f"has {size} bytes, one upload takes {_MOST_BYTES}",
                subject=self._name(key),
                remedy="record shorter Steps, or store fewer layers",
            )

    # ------------------------------------------------------------ read

    def open(self, key: str) -> RemoteObject:
        """Open an object for ranged reads; costs no request."""
        _check(key)
        return RemoteObject(self, key)

    def get(self, key: str) -> bytes:
        """Return a small object."""
        _check(key)
        return self._get(key)

    def _get(self, key: str) -> bytes:
        return bytes(self._call(lambda: self._client.get(self._root + key)))

    def read(self, key: str, offset: int, nbytes: int) -> memoryview:
        """Return exactly `nbytes` of an object.

        Raises
        ------
        ObjectMissing, ObjectShort
        """
        return self._call(lambda: self._read(key, offset, nbytes))

    def _read(self, key: str, offset: int, nbytes: int) -> memoryview:
        data = memoryview(self._client.read(self._root + key, offset, nbytes)).cast("B")
        if len(data) == nbytes:
            return data
        size = self._client.size(self._root + key)
        if size >= offset + nbytes:
            raise StorageFailed(
                f"{len(data)} bytes came of {nbytes} asked for", subject=self._name(key)
            )
        raise ObjectShort(
            f"has {size} bytes, {offset + nbytes} are needed",
            subject=self._name(key),
            remedy="the object was replaced: restore the Step or discard its session",
        )

    def download(self, key: str, file: BinaryIO) -> int:
        """Write an object to a file, part by part; return its size in bytes."""
        _check(key)
        at = 0
        while True:
            part = memoryview(
                self._call(lambda at=at: self._client.read(self._root + key, at, _PART_BYTES))  # type: ignore[misc]
            )
            at += file.write(part)
            if part.nbytes < _PART_BYTES:
                return at

    def modified_ns(self, key: str) -> int:
        """Return when an object was written, by the server's clock; 0 where it does not say."""
        _check(key)
        return self._call(lambda: self._client.modified_ns(self._root + key))

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names right below `prefix`, sorted."""
        if prefix:
            _check(prefix)
        below = f"{self._root}{prefix}/" if prefix else self._root
        names: set[str] = set()
        for page in self._pages(below, deep=False):
            names.update(key[len(below) :] for key, _ in page.objects)
            names.update(p[len(below) : -1] for p in page.prefixes)
        yield from sorted(n for n in names if n and not n.startswith("."))

    def walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield key and size of each object below `prefix`; those of a prefix follow each other."""
        if prefix:
            _check(prefix)
        start = len(self._root)
        below = f"{self._root}{prefix}/" if prefix else self._root
        for page in self._pages(below, deep=True):
            yield from ((key[start:], size) for key, size in page.objects)

    def _pages(self, beginning: str, *, deep: bool) -> Iterator[Page]:
        """Yield a listing page by page; one that breaks off goes on behind its last key."""
        last = ""
        pages = self._client.pages(beginning, deep=deep, after=last)

        def turn() -> Page | None:
            nonlocal pages
            try:
                return next(pages, None)
            except TqFsError:  # a generator that raised is at its end
                pages = self._client.pages(beginning, deep=deep, after=last)
                raise

        while (page := self._call(turn)) is not None:
            yield page
            last = max(last, page.last)

    # ------------------------------------------------------------ remove

    def delete(self, prefix: str) -> bool:
        """Remove an object or everything below a prefix, what makes others visible first."""
        _check(prefix)
        keys = [key for key, _ in self.walk(prefix)]
        if not keys and self._is_object(prefix):
            keys = [prefix]
        if not keys:
            return False
        self._remove(keys)
        return True

    def _remove(self, keys: Sequence[str]) -> None:
        """Remove objects: commits before all others, without any the first; see the protocol.

        In requests of their own: servers remove the keys of one in any order, and drivers send
        some side by side.
        """
        self._at("deleting")
        heads = [key for key in keys if key.rpartition("/")[2] == COMMIT] or list(keys[:1])
        first = set(heads)
        self._remove_some(heads)
        self._remove_some([key for key in keys if key not in first])
        self._at("deleted")

    def _remove_some(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _BULK):
            some = [self._root + key for key in keys[start : start + _BULK]]
            self._call(lambda some=some: self._client.delete(some))  # type: ignore[misc]

    # ------------------------------------------------------------ policy

    def distrust(self, key: str) -> bool:  # noqa: ARG002
        """Return True: the bytes may have changed on their way."""
        return True

    def cool(self, prefixes: Iterable[str]) -> None:
        """Do nothing: there is nowhere else to go."""

    def settle(self, prefix: str) -> None:
        """Do nothing: an upload is done when it is acknowledged."""

    def sync(self) -> None:
        """Do nothing: what the server acknowledged is durable."""

    def close(self) -> None:
        """Let go of connections; idempotent."""
        self._client.close()

    # ------------------------------------------------------------ inside

    def _call(self, request: Callable[[], T]) -> T:
        return self._retry.call(request, renew=self._client.renew)

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _lock(self, prefix: str) -> threading.Lock:
        locks = self._locks.get()
        return locks[hashlib.blake2b(prefix.encode(), digest_size=1).digest()[0] % _LOCKS]


def _make_locks() -> list[threading.Lock]:
    return [threading.Lock() for _ in range(_LOCKS)]


class RemoteObject:
    """An object that is read by ranges; an :class:`~tq_fs.backends.ObjectReader`."""

    __slots__ = ("_backend", "_key")

    def __init__(self, backend: ObjectBackend, key: str) -> None:
        self._backend = backend
        self._key = key

    def readinto(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Fill `buffers` by one request; see the protocol."""
        sizes = [nbytes(b) for b in buffers]
        want = sum(sizes)
        if not want:
            return
        data = self._backend.read(self._key, offset, want)
        at = 0
        for buffer, size in zip(buffers, sizes, strict=True):
            if size:
                memoryview(buffer).cast("B")[:] = data[at : at + size]
                at += size

    def ahead(self, offset: int, nbytes: int) -> None:
        """Do nothing: requests are large enough."""

    def __enter__(self) -> RemoteObject:
        """Return the object."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Do nothing: nothing is held open."""


def commit_of(members: Collection[str]) -> str:
    """Return the member that makes a group visible: see :class:`~tq_fs.backends.Backend`."""
    return COMMIT if COMMIT in members else ([*members] or [""])[-1]


def _check_members(prefix: str, names: Iterable[str]) -> None:
    _check(prefix)
    for name in names:
        _check(f"{prefix}/{name}")


def _check(key: str) -> None:
    check_key(key)
    if _CONTROL.search(key):
        raise InvalidKey("holds control characters", subject=repr(key)[:200])
