"""Directories made ahead, so that a write does not wait for them.

Making three directories and five files costs a journaled file system more time than writing the
bytes of a Step into them (docs/design/0002). A thread of the backend therefore keeps a few empty
groups ready in the staging folder, shaped like those that were asked for last and with their files
open; a writer fills one and renames it. Where none is ready the writer makes its own. Files are
never reused: a reader that still holds a deleted Step open must not see another one's bytes.
"""

from __future__ import annotations

import itertools
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from tq_fs.backends._errors import check_key

_SHAPES = 3
_SMALLEST = 3  # members; of fewer, nothing is gained
_BURST_S = 0.006  # without a writer for so long, a burst is over
_SHARE = 8  # of the process's descriptors
_FLAGS = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC


class Staged(NamedTuple):
    """An empty group in the staging folder, its files open for writing.

    Attributes
    ----------
    name
        Its name there.
    shape
        Its member files.
    fds
        Their descriptors, in the same order; whoever writes a file takes its descriptor away.
    """

    name: str
    shape: tuple[str, ...]
    fds: deque[int]


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
        Groups to keep ready, of all shapes together; 0 makes every one on demand and starts no
        thread. Never more than an eighth of the process's descriptors are held open.
    """

    def __init__(self, folder_fd: int, *, ahead: int) -> None:
        self._folder = folder_fd
        self._ahead = ahead
        self._pools: dict[tuple[str, ...], _Pool] = {}
        self._retired: deque[_Pool] = deque()
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
        if not self._ahead or len(shape) < _SMALLEST:
            return self.make(shape)
        pool = self._pools.get(shape) or self._remember(shape)
        pool.taken += 1
        try:
            staged = pool.ready.popleft()
        except IndexError:
            staged = self.make(shape)
        if pool.taken > 1 and not self._wake.is_set():
            self._wake.set()
        return staged

    def make(self, shape: tuple[str, ...]) -> Staged:
        """Make an empty group now, and nothing if that fails."""
        for member in shape:
            check_key(member)
        staged = Staged(self.name(), shape, deque())
        os.mkdir(staged.name, dir_fd=self._folder)
        try:
            for folder in folders_of(shape):
                os.mkdir(f"{staged.name}/{folder}", dir_fd=self._folder)
            for member in shape:
                path = f"{staged.name}/{member}"
                staged.fds.append(os.open(path, _FLAGS, 0o644, dir_fd=self._folder))
        except OSError:
            self.drop(staged)
            raise
        return staged

    def drop(self, staged: Staged) -> None:
        """Close and remove a group that was not published."""
        while staged.fds:
            os.close(staged.fds.popleft())
        for member in staged.shape:
            self._quietly(os.unlink, f"{staged.name}/{member}")
        for folder in reversed(folders_of(staged.shape)):
            self._quietly(os.rmdir, f"{staged.name}/{folder}")
        self._quietly(os.rmdir, staged.name)

    def _quietly(self, call: Callable[..., None], path: str) -> None:
        """Remove what is there; what is not, or will not go, the next sweep meets."""
        try:
            call(path, dir_fd=self._folder)
        except OSError:
            return

    def close(self) -> None:
        """Stop the thread and remove what it made."""
        with self._lock:
            self._closed = True
        self._wake.set()
        if self._worker is not None:
            self._worker.join()
        self._retired.extend(self._pools.values())
        self._pools.clear()
        self._drop_retired()

    def _remember(self, shape: tuple[str, ...]) -> _Pool:
        """Keep groups of this shape ready from now on, in the place of the least used shape."""
        with self._lock:
            pool = self._pools.setdefault(shape, _Pool(shape))
            if len(self._pools) > _SHAPES:
                others = [p for p in self._pools.values() if p is not pool]
                least = min(others, key=lambda p: p.taken)
                self._retired.append(self._pools.pop(least.shape))
            for other in self._pools.values():
                other.taken //= 2  # so that what was used long ago counts for less
            if self._worker is None and not self._closed:
                self._worker = threading.Thread(
                    target=self._work, name="tq-fs-staging", daemon=True
                )
                self._worker.start()
        return pool

    def _drop_retired(self) -> None:
        while self._retired:
            pool = self._retired.popleft()
            while pool.ready:
                with suppress(IndexError):  # a writer took the last one
                    self.drop(pool.ready.popleft())

    def _work(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            self._let_bursts_pass()
            self._drop_retired()
            pools = self._wanted()
            self._shrink(pools)
            for pool in pools:
                self._fill(pool, self._share(pool, len(pools)))

    def _shrink(self, wanted: list[_Pool]) -> None:
        """Drop what is more than a shape's share, which gets less as others come."""
        with self._lock:
            pools = list(self._pools.values())
        for pool in pools:
            most = self._share(pool, len(wanted)) if pool in wanted else 0
            while len(pool.ready) > most:
                with suppress(IndexError):  # a writer took the last one
                    self.drop(pool.ready.popleft())

    def _wanted(self) -> list[_Pool]:
        """Return the shapes that were asked for more than once."""
        with self._lock:
            return [pool for pool in self._pools.values() if pool.taken > 1]

    def _share(self, pool: _Pool, shapes: int) -> int:
        """Return how many groups of one shape are kept."""
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE
        return min(self._ahead, open_files // len(pool.shape)) // shapes

    def _let_bursts_pass(self) -> None:
        """Leave the processor to writers, as long as they take groups and enough are ready."""
        seen = -1
        while not self._closed:
            pools = self._wanted()
            taken = sum(pool.taken for pool in pools)
            few = any(len(p.ready) <= self._share(p, len(pools)) // 4 for p in pools)
            if few or taken == seen:
                return
            seen = taken
            time.sleep(_BURST_S)

    def _fill(self, pool: _Pool, most: int) -> None:
        while len(pool.ready) < most and not self._closed:
            try:
                staged = self.make(pool.shape)
            except OSError:
                return  # a full or failing device speaks to the writer, who makes its own
            with self._lock:
                kept = self._pools.get(pool.shape) is pool
                if kept:
                    pool.ready.append(staged)
            if not kept:
                self.drop(staged)
                return


def folders_of(shape: Iterable[str]) -> list[str]:
    """Return the folders of a group's members, each once and after the one that holds it."""
    folders: dict[str, None] = {}
    for member in shape:
        parts = member.split("/")[:-1]
        folders.update(dict.fromkeys("/".join(parts[: i + 1]) for i in range(len(parts))))
    return list(folders)
