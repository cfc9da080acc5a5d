"""Objects that were read from far away, kept on a local disk for all processes of the node."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from tq_fs.backends._base import Buffer
from tq_fs.backends._errors import check_key, mapped
from tq_fs.backends._files import LocalObject, nbytes
from tq_fs.backends._local import _at_nothing
from tq_fs.backends._node_files import (
    all_files,
    is_at,
    lock,
    open_to_lock,
    part_of,
    remove_file,
    sweep_part,
    unlock,
    whole_of,
)
from tq_fs.backends._seldom import Seldom
from tq_fs.errors import InvalidConfig

_log = logging.getLogger(__name__)
_COUNT = ".used"
_KEPT = 0.9  # of the limit, where something has to go
_MOST_REMEMBERED = 10_000
_READ = os.O_RDONLY | os.O_CLOEXEC

Download = Callable[[str, BinaryIO], int]


class NodeCache:
    """Whole objects as files in a folder that the processes of a node share.

    Of all who want an object one downloads it, and the others wait. It writes to a part file,
    which it holds a lock on, and renames that: the lock file becomes the object, so that none are
    left over. The kernel lets go of the lock of a process that was killed, and one of those who
    wait takes over.

    Bytes are counted in a file, before they are written. Who would pass the limit looks at the
    folder, corrects the count and removes what was not read for longest. A reader keeps a file
    that it has open.

    Whatever fails here is no failure of a read: it goes to the object store. Safe to call from
    many threads; pickles as its configuration. Holds nothing open, so there is nothing to close.

    Parameters
    ----------
    folder
        Of its own, on a local disk; made where it is missing.
    limit_bytes
        Bound of the files' bytes.
    wait_s
        How long to wait for the download of somebody who may have been stopped.
    at
        Called with the name of each point that is passed; for tests that kill the process there.

    Attributes
    ----------
    promoted
        Objects that this process downloaded.
    """

    POINTS = ("promoting", "promoted")

    def __init__(
        self,
        folder: str | os.PathLike[str],
        limit_bytes: int,
        *,
        wait_s: float = 60.0,
        at: Callable[[str], None] = _at_nothing,
    ) -> None:
        if limit_bytes < 1:
            raise InvalidConfig(f"{limit_bytes} bytes", subject="limit of a cache")
        self.folder = Path(folder).absolute()
        self.limit_bytes = limit_bytes
        self.promoted = 0
        self._wait_s = wait_s
        self._at = at
        self._too_large: set[str] = set()
        self._trouble = Seldom(_log)
        with mapped(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._count() as count:
                count.put(self._look(self.folder).nbytes)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as configuration."""
        return _again, (str(self.folder), self.limit_bytes, self._wait_s)

    # ------------------------------------------------------------ read

    def open(self, key: str, download: Download) -> LocalObject | None:
        """Open an object, which is downloaded first where it is not here.

        Parameters
        ----------
        key
            Of an object that never changes.
        download
            Writes the object of a key to a file.

        Returns
        -------
        LocalObject | None
            None where it cannot be kept: too large, no room, or who downloads it did not succeed.

        Raises
        ------
        TqFsError
            What `download` raises.
        """
        fd = self._find(key, download)
        return None if fd is None else LocalObject(fd, self.folder, key)

    def get(self, key: str, download: Download) -> bytes | None:
        """Return a whole object, or None; see :meth:`open`."""
        fd = self._find(key, download)
        if fd is None:
            return None
        try:
            with open(fd, "rb") as file:
                return file.read()
        except OSError as error:
            self._trouble.warn(f"{self.folder}/{key} cannot be read", error)
            return None

    def _find(self, key: str, download: Download) -> int | None:
        check_key(key)
        try:
            fd = self._kept(key)
            if fd is None and key not in self._too_large and self._promote(key, download):
                fd = self._kept(key)
        except OSError as error:
            self._trouble.warn(f"{self.folder}/{key} cannot be kept", error)
            return None
        return fd

    def _kept(self, key: str) -> int | None:
        try:
            fd = os.open(self.folder / key, _READ)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with suppress(OSError):
            os.utime(fd)  # when it was read last; mounts may be told not to keep that themselves
        return fd

    # ------------------------------------------------------------ promote

    def _promote(self, key: str, download: Download) -> bool:
        """Download an object, or wait for who does; return whether it may be here now."""
        path = self.folder / key
        part = part_of(path)
        fd = open_to_lock(part)
        try:
            if not lock(fd, self._wait_s):
                return False
            if not is_at(fd, part):
                return True  # it was renamed: here it is; or given up: then it is not
            if path.exists():
                self._remove(fd, part)
                return True
            self._give_back(fd)  # what somebody left who was killed
            self._fetch(key, download, fd, part)
            return True
        finally:
            unlock(fd)

    def _fetch(self, key: str, download: Download, fd: int, part: Path) -> None:
        try:
            download(key, cast("BinaryIO", _Part(self, key, fd)))
            if not is_at(fd, part):
                raise FileNotFoundError(errno.ENOENT, "somebody removed it", str(part))
            os.rename(part, self.folder / key)
        except BaseException:
            self._remove(fd, part)
            raise
        self.promoted += 1
        self._at("promoted")

    def _extend(self, key: str, fd: int, have: int, more: int) -> None:
        """Make a part file longer, before its bytes are written."""
        if have + more > self.limit_bytes:
            if len(self._too_large) < _MOST_REMEMBERED:
                self._too_large.add(key)
            raise OSError(errno.EFBIG, f"larger than the {self.limit_bytes} bytes of the cache")
        with self._count() as count:
            used = count.get()
            if used is None or used + more > self.limit_bytes:
                used = self._evict(more)
                count.put(used)
            if used + more > self.limit_bytes:
                raise OSError(errno.ENOSPC, "no room beside what is being downloaded")
            count.put(used + more)
            os.ftruncate(fd, have + more)  # so that who looks at the folder counts it too

    # ------------------------------------------------------------ leave

    def drop(self, prefix: str) -> bool:
        """Remove an object or everything below a prefix, but for what is being downloaded.

        Returns
        -------
        bool
            Whether there was something.
        """
        check_key(prefix)
        path = self.folder / prefix
        if not path.exists():
            return False
        try:
            with self._count() as count:
                files = self._look(path).files
                for file in files:
                    remove_file(file.path, self.folder)
                used = count.get()
                if used is not None:
                    count.put(used - sum(file.nbytes for file in files))
        except OSError as error:
            self._trouble.warn(f"{path} cannot be removed", error)
            return False
        return bool(files)

    def _evict(self, need: int) -> int:
        """Remove what was not read for longest, if that is needed; return the bytes in use."""
        found = self._look(self.folder)
        used = found.nbytes
        if used + need <= self.limit_bytes:
            return used
        for file in sorted(found.files, key=lambda file: file.read_ns):
            if used + need <= _KEPT * self.limit_bytes:
                break
            remove_file(file.path, self.folder)
            used -= file.nbytes
        return used

    def _look(self, top: Path) -> _Look:
        """Look at a folder or file, and remove the parts of those who were killed."""
        files: dict[Path, _File] = {}
        parts = 0
        for path in all_files(top):
            if path.name == _COUNT:
                continue
            whole = whole_of(path)
            if whole != path:
                size = sweep_part(path)
                parts += size or 0
                if size is not None:
                    continue  # else it became whole a moment ago
            with suppress(FileNotFoundError):
                found = whole.stat()
                files[whole] = _File(whole, found.st_size, found.st_mtime_ns)
        whole_bytes = sum(file.nbytes for file in files.values())
        return _Look([*files.values()], parts + whole_bytes)

    def _remove(self, fd: int, part: Path) -> None:
        """Remove a part file that is locked by `fd`."""
        with suppress(OSError):
            self._give_back(fd)
        if is_at(fd, part):
            remove_file(part, self.folder)

    def _give_back(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        if size:
            with self._count() as count:
                used = count.get()
                os.ftruncate(fd, 0)
                if used is not None:
                    count.put(used - size)

    @contextmanager
    def _count(self) -> Iterator[_Count]:
        """Hold the count of bytes, which all processes share."""
        fd = open_to_lock(self.folder / _COUNT)
        try:
            if not lock(fd, self._wait_s):
                raise OSError(errno.ETIMEDOUT, "another process holds the count of bytes")
            yield _Count(fd)
        finally:
            unlock(fd)


def _again(folder: str, limit_bytes: int, wait_s: float) -> NodeCache:
    return NodeCache(folder, limit_bytes, wait_s=wait_s)


class _File(NamedTuple):
    """An object that is kept; when it was read last."""

    path: Path
    nbytes: int
    read_ns: int


class _Look(NamedTuple):
    """What is in a folder; bytes of parts included."""

    files: list[_File]
    nbytes: int


class _Count:
    """The number in an open file; None where it holds none."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def get(self) -> int | None:
        text = os.pread(self._fd, 32, 0).strip()
        return int(text) if text.isdigit() else None

    def put(self, nbytes: int) -> None:
        os.pwrite(self._fd, b"%020d\n" % max(nbytes, 0), 0)


class _Part:
    """A file that takes what is downloaded; counts it before it is written."""

    def __init__(self, cache: NodeCache, key: str, fd: int) -> None:
        self._cache = cache
        self._key = key
        self._fd = fd
        self._have = 0

    def write(self, data: Buffer) -> int:
        rest = memoryview(data).cast("B") if nbytes(data) else memoryview(b"")
        size = len(rest)
        self._cache._extend(self._key, self._fd, self._have, size)
        while rest:
            done = os.pwrite(self._fd, rest, self._have)
            self._have += done
            rest = rest[done:]
        self._cache._at("promoting")
        return size
