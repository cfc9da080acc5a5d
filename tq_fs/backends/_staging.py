"""Directories made ahead, so that a write does not wait for them.

Making three directories and five files costs a journaled file system more time than writing the
bytes of a Step into them (docs/design/0002). A thread of the backend therefore keeps a few empty
groups ready in the staging folder, shaped like those that were asked for last; a writer fills one and
renames it. Where none is ready the writer makes its own. Files are never reused: a reader that
still holds a deleted Step open must not see another one's bytes.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_SHAPES = 4
_FLAGS = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC


class Staged(NamedTuple):
    """An empty group in the staging folder.

    Attributes
    ----------
    name
        Its name there.
    fd
        Descriptor of its directory; whoever took the group closes it.
    """

    name: str
    fd: int


class _Pool:
    """Ready groups of one shape."""

    def __init__(self, shape: tuple[str, ...]) -> None:
        self.shape = shape
        self.ready: deque[Staged] = deque()
        self.taken = 0


class Staging:
    """The staging folder of one backend.

    Parameters
    ----------
    folder_fd
        Descriptor of the folder; stays the caller's.
    ahead
        Groups of each shape to keep ready; 0 makes every one on demand and starts no thread.
    """

    def __init__(self, folder_fd: int, *, ahead: int) -> None:
        self._folder = folder_fd
        self._ahead = ahead
        self._pools: OrderedDict[tuple[str, ...], _Pool] = OrderedDict()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._run = f"{os.getpid():x}-{os.urandom(4).hex()}"
        self._wake = threading.Event()
        self._closed = False
        self._worker: threading.Thread | None = None

    def name(self) -> str:
        """Return a name in the staging folder that nobody else uses."""
        return f"{self._run}-{next(self._numbers):x}"

    def take(self, members: Iterable[str]) -> Staged:
        """Return an empty group with these member files."""
        shape = tuple(members)
        if not self._ahead:
            return self.make(shape)
        pool = self._pools.get(shape) or self._remember(shape)
        pool.taken += 1
        try:
            staged = pool.ready.popleft()
        except IndexError:
            staged = self.make(shape)
        if pool.taken > 1 and len(pool.ready) <= self._ahead // 2:
            self._wake.set()
        return staged

    def make(self, shape: Sequence[str]) -> Staged:
        """Make an empty group now, and nothing if that fails."""
        name = self.name()
        os.mkdir(name, dir_fd=self._folder)
        try:
            fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._folder)
        except OSError:
            os.rmdir(name, dir_fd=self._folder)
            raise
        staged = Staged(name, fd)
        try:
            for folder in dict.fromkeys(os.path.dirname(m) for m in shape):
                if folder:
                    os.mkdir(folder, dir_fd=fd)
            for member in shape:
                os.close(os.open(member, _FLAGS, 0o644, dir_fd=fd))
        except OSError:
            self.drop(staged, shape)
            raise
        return staged

    def drop(self, staged: Staged, shape: Sequence[str]) -> None:
        """Remove a group that was not published, and close it."""
        _quietly(*((os.unlink, m, staged.fd) for m in shape))
        folders = {os.path.dirname(m) for m in shape} - {""}
        _quietly(*((os.rmdir, f, staged.fd) for f in folders))
        os.close(staged.fd)
        _quietly((os.rmdir, staged.name, self._folder))

    def close(self) -> None:
        """Stop the thread and remove what it made."""
        with self._lock:
            self._closed = True
        self._wake.set()
        if self._worker is not None:
            self._worker.join()
        while self._pools:
            self._forget(next(iter(self._pools)))

    def _remember(self, shape: tuple[str, ...]) -> _Pool:
        """Keep groups of this shape ready from now on, in the place of the oldest shape."""
        with self._lock:
            pool = self._pools.setdefault(shape, _Pool(shape))
            oldest = next(iter(self._pools)) if len(self._pools) > _SHAPES else None
            if self._worker is None and not self._closed:
                self._worker = threading.Thread(
                    target=self._work, name="tq-fs-staging", daemon=True
                )
                self._worker.start()
        if oldest is not None:
            self._forget(oldest)
        return pool

    def _forget(self, shape: tuple[str, ...]) -> None:
        with self._lock:
            pool = self._pools.pop(shape, None)
        while pool is not None and pool.ready:
            try:
                self.drop(pool.ready.popleft(), shape)
            except IndexError:
                return  # a writer took the last one

    def _work(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            for pool in list(self._pools.values()):
                self._fill(pool)

    def _fill(self, pool: _Pool) -> None:
        while pool.taken > 1 and len(pool.ready) < self._ahead and not self._closed:
            try:
                staged = self.make(pool.shape)
            except OSError:
                return  # a full or failing device speaks to the writer, who makes its own
            with self._lock:
                kept = self._pools.get(pool.shape) is pool
                if kept:
                    pool.ready.append(staged)
            if not kept:
                self.drop(staged, pool.shape)
                return


def _quietly(*calls: tuple[object, str, int]) -> None:
    """Remove what is there; what is not, or will not go, the next sweep meets."""
    for call, name, fd in calls:
        try:
            call(name, dir_fd=fd)  # type: ignore[operator]
        except OSError:
            continue
