"""What a start reads: all manifests, or what pages say of them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Executor
from typing import NamedTuple

from tq_fs.backends import Backend
from tq_fs.controller._releases import Releases
from tq_fs.errors import ConflictError, CorruptError, InvalidKey, InvalidSegment
from tq_fs.keys import Incarnation
from tq_fs.manifests import Catalog, Entry, Found, Noted, SessionManifest, SessionState, noted
from tq_fs.recovery import Loaded, Places, Wanted, wanted_places
from tq_fs.released import Released, is_over, needed_steps, released_by_all, released_of

_BATCH = 256  # manifests that are read side by side

_log = logging.getLogger(__name__)


class Start:
    """Learns what the store's manifests say, and what of it is still needed.

    Parameters
    ----------
    catalog
        The store's manifests; stays the caller's.
    releases
        Gets to know all sessions of which something is still needed.
    keep
        Hold the manifests in memory: in the process that writes.
    pool
        Threads that read manifests; stays the caller's.

    Attributes
    ----------
    unreadable
        Paths of incarnations whose manifest cannot be used.
    """

    def __init__(
        self, catalog: Catalog, releases: Releases, *, keep: bool, pool: Executor | None
    ) -> None:
        self.unreadable: list[str] = []
        self._catalog = catalog
        self._releases = releases
        self._keep = keep
        self._pool = pool

    def load(self, *, trust: bool = True, within: Backend | None = None) -> Loaded:
        """Learn of all manifests; without opening those that a page tells of, if it is trusted.

        Parameters
        ----------
        within
            Only of those that lie there and are not known yet.
        """
        loaded = Loaded(Wanted(self._places))
        pages = self._catalog.known() if trust else {}  # first: what is written later is listed
        entries = self._catalog.entries(within)
        if within is not None:
            known = {incarnation.path for incarnation in self._releases.known()}
            entries = (entry for entry in entries if entry.path not in known)
        for entry, found in self._read_all(entries, pages):
            if found is None:
                loaded.abandoned.add(entry.path)  # a finalize that was not finished
            elif isinstance(found, _Recalled):
                self._take_recalled(entry.path, found, loaded)
            else:
                self.take(entry.path, found, loaded, entry.stamp)
        return loaded

    def wanted(self) -> Wanted:
        """Return what has to lie where, of all sessions that are known now."""
        wanted = Wanted(self._places)
        for incarnation in self._releases.known():
            wanted.add(incarnation.path, incarnation)
        for path in self.unreadable:
            wanted.add(path, None)
        return wanted

    def look_again(self, path: str, loaded: Loaded) -> None:
        """Ask for the manifest of Steps that would be swept: no listing is trusted with them."""
        if path in loaded.wanted or path in loaded.ended or path in loaded.abandoned:
            return
        found = self._read(path)
        if found is not None:
            self.take(path, found, loaded)

    def take(self, path: str, found: Found | Exception, loaded: Loaded, stamp: str = "") -> None:
        """Take in a manifest that was read, or why it cannot be used."""
        if isinstance(found, Exception):
            _log.error("manifest of %s is left alone, and its Steps", path, exc_info=found)
            self.unreadable.append(path)
            loaded.wanted.add(path, None)
            return
        manifest = found.manifest
        released = released_of(manifest.consumers, found.state)
        if self._count(path, manifest, released, found.state, loaded) and self._keep:
            self._catalog.keep(manifest, stamp)

    # ------------------------------------------------------------ inside

    def _places(self, incarnation: Incarnation) -> Places:
        """Return where the Steps lie that unreleased Segments refer to."""
        manifest = self._catalog.manifest(incarnation)
        released = self._releases.of(incarnation)
        if manifest is None or released is None:
            return {}  # released a moment ago
        needed = needed_steps(manifest, released_by_all(released))
        return wanted_places(manifest, [s for s in manifest.steps if s.index in needed])

    def _take_recalled(self, path: str, found: _Recalled, loaded: Loaded) -> None:
        """Believe a page of a manifest; it is not even decoded where all of it is still needed."""
        noted = found.noted
        incarnation = noted.incarnation
        released = released_of(noted.consumers, found.state)
        if not released_by_all(released):
            self._releases.learn(incarnation, released, found.state)
            loaded.wanted.add(path, incarnation)
            loaded.add(segments=noted.segments, released=0, steps=noted.steps, nbytes=noted.nbytes)
        elif not self._count(path, noted.manifest(), released, found.state, loaded):
            return
        if self._keep:
            self._catalog.keep_noted(incarnation, found.page, found.entry)

    def _count(
        self,
        path: str,
        manifest: SessionManifest,
        released: Released,
        state: SessionState | None,
        loaded: Loaded,
    ) -> bool:
        """Take in what is left of a session; False where nothing is."""
        done = released_by_all(released)
        if is_over(manifest, done):
            loaded.ended[path] = manifest.incarnation
            return False
        self._releases.learn(manifest.incarnation, released, state)
        loaded.wanted.add(path, manifest.incarnation)
        wanted = needed_steps(manifest, done)
        needed = [s for s in manifest.steps if s.index in wanted]
        loaded.add(
            segments=len(manifest.segments),
            released=len(done),
            steps=len(needed),
            nbytes=sum(step.nbytes for step in needed),
        )
        return True

    def _read_all(
        self, entries: Iterator[Entry], pages: Mapping[str, tuple[str, bytes]]
    ) -> Iterator[tuple[Entry, _Recalled | Found | Exception | None]]:
        """Yield manifests with their states, read side by side where there is a pool."""

        def read(entry: Entry) -> tuple[Entry, _Recalled | Found | Exception | None]:
            found = self._recall(entry, *pages[entry.path]) if entry.path in pages else None
            return entry, found or self._read(entry.path, entry.names) or self._read(entry.path)

        while some := list(itertools.islice(entries, _BATCH)):
            known = [self._known(entry, pages) for entry in some]
            rest = [entry for entry, found in zip(some, known, strict=True) if found is None]
            others = self._pool.map(read, rest) if self._pool is not None else map(read, rest)
            for entry, found in zip(some, known, strict=True):
                yield next(others) if found is None else (entry, found)

    def _known(self, entry: Entry, pages: Mapping[str, tuple[str, bytes]]) -> _Recalled | None:
        """Return what a page says of a manifest, where nothing has to be read for that."""
        if entry.released or entry.path not in pages:
            return None
        found = self._recall(entry, *pages[entry.path])
        return found if isinstance(found, _Recalled) else None

    def _recall(self, entry: Entry, page: str, data: bytes) -> _Recalled | Exception | None:
        """Return what a page says of a manifest, if its file has the stamp that was noted."""
        found = noted(data)
        if not entry.stamp or found.stamp != entry.stamp or not found.segments:
            return None
        try:
            state = self._catalog.state(entry.path, entry.names) if entry.released else None
        except CorruptError as error:
            return error
        return _Recalled(found, page, data, state)

    def _read(self, path: str, names: Collection[str] | None = None) -> Found | Exception | None:
        try:
            return self._catalog.read(path, names)
        except (CorruptError, ConflictError, InvalidSegment, InvalidKey) as error:
            return error  # the last: it is named as nothing of ours is


class _Recalled(NamedTuple):
    """A manifest that was not read: what a page says of it, and its state where it has one."""

    noted: Noted
    page: str
    entry: bytes
    state: SessionState | None
