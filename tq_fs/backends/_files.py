"""Reading and writing whole sequences of buffers, whatever the kernel does of them at once."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tq_fs.backends._base import Buffer
from tq_fs.backends._errors import translate
from tq_fs.errors import ObjectShort

_MOST_BUFFERS = 1024  # IOV_MAX on Linux
_PART_BYTES = 1024 * 1024


class LocalObject:
    """An open file; an :class:`~tq_fs.backends.ObjectReader`."""

    __slots__ = ("_fd", "_key", "_root")

    def __init__(self, fd: int, root: Path, key: str) -> None:
        self._fd = fd
        self._root = root
        self._key = key

    def readinto(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Fill `buffers` with the file's bytes from `offset`; see the protocol."""
        many = len(buffers) > _MOST_BUFFERS
        want = nbytes(buffers[0]) if len(buffers) == 1 else sum(map(nbytes, buffers))
        try:
            have = os.preadv(self._fd, buffers[:_MOST_BUFFERS] if many else buffers, offset)
            if have != want:
                self._read_rest(buffers, offset, have, want)
        except OSError as error:
            raise translate(error, f"{self._root}/{self._key}") from error

    def _read_rest(self, buffers: Sequence[Buffer], offset: int, have: int, want: int) -> None:
        """Go on after a short read: a signal, more buffers than one call takes, or the end."""
        rest = _views(buffers)
        done = have
        while have and done < want:
            rest = _after(rest, have)
            have = os.preadv(self._fd, rest[:_MOST_BUFFERS], offset + done)
            done += have
        if done < want:
            raise self._short(offset + want)

    def ahead(self, offset: int, nbytes: int) -> None:
        """Do nothing: the kernel reads ahead by itself."""

    def check(self, offset: int, nbytes: int) -> None:
        """Refuse a range that the file does not hold.

        Raises
        ------
        ObjectShort, ObjectMissing
        """
        found = os.fstat(self._fd)
        if stat.S_ISDIR(found.st_mode):
            error = IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            raise translate(error, f"{self._root}/{self._key}")
        if found.st_size < offset + nbytes:
            raise self._short(offset + nbytes)

    def send(self, to: int, offset: int, nbytes: int) -> None:
        """Send bytes to a socket's descriptor, from the page cache.

        Raises
        ------
        ConnectionError
            The file was cut meanwhile, or the other end is gone.
        """
        end = offset + nbytes
        while offset < end:
            sent = os.sendfile(to, self._fd, offset, end - offset)
            if not sent:
                raise ConnectionAbortedError(str(self._short(end)))
            offset += sent

    def _short(self, needed: int) -> ObjectShort:
        return ObjectShort(
            f"has {os.fstat(self._fd).st_size} bytes, {needed} are needed",
            subject=f"{self._root}/{self._key}",
            remedy="the file was cut: restore the Step or discard its session",
        )

    def __enter__(self) -> LocalObject:
        """Return the object."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the file."""
        os.close(self._fd)


def nbytes(buffer: Buffer) -> int:
    size: int = len(buffer) if type(buffer) in _BYTES else buffer.nbytes
    return size


_BYTES = (bytes, bytearray)


def write(fd: int, buffers: Sequence[Buffer], sync: Callable[[int], None] | None) -> None:
    """Write all buffers, sync where asked, and close `fd` in any case.

    One call for all, because the page cache takes a large write in larger pages than small ones.
    """
    try:
        if len(buffers) == 1:
            have, want = os.write(fd, buffers[0]), nbytes(buffers[0])
        else:
            have, want = os.writev(fd, buffers[:_MOST_BUFFERS]), sum(map(nbytes, buffers))
        if have != want:
            _write_rest(fd, buffers, have)
        if sync is not None:
            sync(fd)
    finally:
        os.close(fd)


def _write_rest(fd: int, buffers: Sequence[Buffer], have: int) -> None:
    rest = _after(_views(buffers), have)
    while rest:
        rest = _after(rest, os.writev(fd, rest[:_MOST_BUFFERS]))


def _views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Return buffers as bytes; empty ones, which have no such view, are left out."""
    return [memoryview(b).cast("B") for b in buffers if nbytes(b)]


def parts(buffers: Sequence[Buffer]) -> Iterator[memoryview]:
    for view in _views(buffers):
        for start in range(0, len(view), _PART_BYTES):
            yield view[start : start + _PART_BYTES]


def _after(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return what remains of `buffers` after their first `nbytes`."""
    for i, buffer in enumerate(buffers):
        if nbytes < buffer.nbytes:
            return [buffer[nbytes:], *buffers[i + 1 :]]
        nbytes -= buffer.nbytes
    return []


def sync_folder(path: str, dir_fd: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
