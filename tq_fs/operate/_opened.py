"""A store as an operator opens it: to look at, beside whoever writes, or to change it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tq_fs.backends import Backend, ObjectBackend, TieredBackend, is_attempt
from tq_fs.config import StoreConfig
from tq_fs.embedded import reader_threads
from tq_fs.errors import ObjectMissing
from tq_fs.keys import Incarnation
from tq_fs.manifests import Catalog
from tq_fs.operate._neighbours import naming_neighbours
from tq_fs.places import Places, open_places
from tq_fs.store_folder import LOCK_FILE

GRACE_S = 3600.0
_CACHE_BYTES = 1024 * 1024  # sessions are looked at one after the other, and once
_LEAST_THREADS = 2
_DEPTH = 5  # steps / partition / session / incarnation / Step

Held = dict[str, dict[str, int]]
"""What lies at each place of a Step: the members with their sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedStore:
    """A store that is looked at. Its pieces belong to whoever opened it.

    Attributes
    ----------
    store_id
        The run.
    places
        Where it lies.
    tiers
        The places that Steps may lie in: ``store``, or ``front`` and ``back``.
    catalog
        Its manifests.
    pool
        Threads that read.
    threads
        How many those are.
    ask_written
        Tells whether another process has it open for writing by now; None where nobody can tell.
    grace_s
        Where that cannot be told: sessions that began, or wrote a Step, less than so many seconds
        ago may still be recorded.
    now_ns
        The clock.
    """

    store_id: str
    places: Places
    tiers: Mapping[str, Backend]
    catalog: Catalog
    pool: ThreadPoolExecutor
    threads: int
    ask_written: Callable[[], bool | None]
    grace_s: float
    now_ns: Callable[[], int]

    @property
    def window(self) -> int:
        """How far work goes ahead of who takes its results."""
        return 4 * self.threads

    def may_be_recorded(self, path: str) -> bool:
        """Tell whether a session without a manifest may still be going on."""
        is_written = self.ask_written()
        if is_written is not None:
            return is_written
        return self._is_young(opened_ns(path)) or self._is_young(self._written_ns(path))

    def _is_young(self, then_ns: int) -> bool:
        return bool(self.grace_s) and self.now_ns() - then_ns < self.grace_s * 1e9

    def _written_ns(self, path: str) -> int:
        """Return when the last Step of a session was written; 0 where nobody says."""
        return max((_last_written_ns(tier, path) for tier in self.tiers.values()), default=0)


def opened_ns(path: str) -> int:
    """Return when the incarnation at a path began; 0 where its name does not say that."""
    return Incarnation("", "", path.rpartition("/")[2]).opened_ns


@contextmanager
def opened_store(
    url: str,
    config: StoreConfig,
    *,
    write: bool = False,
    grace_s: float = GRACE_S,
    now_ns: Callable[[], int] = time.time_ns,
) -> Iterator[OpenedStore]:
    """Open a store that is there; as a reader, which takes no lock, unless `write`.

    Raises
    ------
    WrongStore
        There is none, or something else.
    ManifestCorrupt, FormatTooNew
        What the store says of itself cannot be read.
    StoreBusy
        Another process has it open for writing; only with `write`.
    BucketMissing, StorageDenied, StorageFailed, InvalidConfig
    """
    with ExitStack() as opened:
        with naming_neighbours(url, config):
            places = open_places(url, config, read_only=not write, opened=opened, create=False)
        threads = max(_LEAST_THREADS, reader_threads(config, remote=places.remote))
        pool = opened.enter_context(ThreadPoolExecutor(threads, "tq-fs-operate"))
        yield OpenedStore(
            store_id=config.store_id,
            places=places,
            tiers=_tiers(places.steps),
            catalog=Catalog(places.documents, config.store_id, cache_bytes=_CACHE_BYTES),
            pool=pool,
            threads=threads,
            ask_written=(lambda: False) if write else partial(_is_written, places.folder),
            grace_s=grace_s,
            now_ns=now_ns,
        )


def _tiers(steps: Backend) -> Mapping[str, Backend]:
    if not isinstance(steps, TieredBackend):
        return {"store": steps}
    near: dict[str, Backend] = {"front": steps.front} if steps.front is not None else {}
    return {**near, "back": steps.back}


def _is_written(folder: Path | None) -> bool | None:
    """Tell whether a process holds the lock of a store's folder; None where there is no lock.

    The lock is asked for, shared with others who ask, and let go of at once.
    """
    if folder is None:
        return None
    try:
        fd = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _last_written_ns(backend: Backend, path: str) -> int:
    """Return when the last Step of a session was written to a tier; 0 where it does not say."""
    last = max((key for key, _ in backend.walk(f"steps/{path}")), default=None)
    if last is None or not isinstance(backend, ObjectBackend):
        return 0
    try:
        return backend.modified_ns(last)
    except ObjectMissing:
        return 0  # removed since


def held_at(backend: Backend, path: str) -> Held:
    """Return what lies at the Steps of one incarnation."""
    found: Held = {}
    for key, nbytes in backend.walk(f"steps/{path}"):
        put_member(found, key, nbytes)
    return found


def put_member(found: Held, key: str, nbytes: int) -> None:
    """Note an object at the place of its Step; what is no part of a Step is left out."""
    parts = key.split("/")
    if len(parts) <= _DEPTH:
        return
    deep = _DEPTH + is_attempt(parts[_DEPTH])
    found.setdefault("/".join(parts[:deep]), {})["/".join(parts[deep:])] = nbytes


def inventory(backend: Backend) -> Iterator[tuple[str, Held]]:
    """Yield path and Steps of each incarnation that lies in a tier, one after the other."""
    path, found = "", Held()
    for key, nbytes in backend.walk("steps"):
        parts = key.split("/", _DEPTH)
        if len(parts) <= _DEPTH:
            continue
        mine = "/".join(parts[1 : _DEPTH - 1])
        if mine != path:
            if found:
                yield path, found
            path, found = mine, {}
        put_member(found, key, nbytes)
    if found:
        yield path, found


def nbytes_of(held: Held) -> int:
    """Return the bytes of all that was found."""
    return sum(sum(members.values()) for members in held.values())
