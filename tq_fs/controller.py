"""Controller: gives out incarnations, keeps the manifests, and deletes what nobody needs."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tq_fs.errors import (
    ConflictError,
    CorruptError,
    FormatTooNew,
    InvalidConfig,
    InvalidKey,
    InvalidSegment,
    ManifestCorrupt,
    MissingError,
    ReadOnlyStore,
    TqFsError,
    TrajectoryMissing,
)
from tq_fs.keys import Incarnation, SegmentRef, StepKey
from tq_fs.manifests import (
    MANIFEST_SCHEMA,
    STATE_SCHEMA,
    Catalog,
    Entry,
    Found,
    Noted,
    Resolved,
    SessionManifest,
    SessionState,
    noted,
)
from tq_fs.recovery import Loaded, Objects, Recovery, Sweep, Wanted, wanted_places
from tq_fs.released import (
    Released,
    is_over,
    is_pending,
    needed_steps,
    nothing_released,
    released_by_all,
    released_of,
)
from tq_fs.storage_unit import Inventory, StorageUnit
from tq_fs.trajectory import (
    ClosedSession,
    TrajectoryDocument,
    decode_trajectory,
    encode_trajectory,
    trajectory_document,
)

_BATCH = 256  # manifests that are read side by side

_log = logging.getLogger(__name__)


def _no_fence() -> None:
    """Raise nothing: a store on a local disk is locked."""


class Controller:
    """The catalog's owner. Never on the hot path of a Step write. Safe to call from many threads.

    Parameters
    ----------
    catalog
        The store's manifests; stays the caller's.
    unit
        The StorageUnit that holds the Steps; None for a store opened read-only.
    epoch
        Raised with each start; stands in all that is written.
    now_ns
        The Controller's clock: nanoseconds since 1970.
    persist
        Keep the resident fields of finalized sessions beside their manifests.
    fence
        Raises where a later process has taken the store; asked before anything is changed.
    pool
        Threads that read manifests at a start; stays the caller's.
    """

    def __init__(
        self,
        catalog: Catalog,
        unit: StorageUnit | None,
        *,
        epoch: int,
        now_ns: Callable[[], int],
        persist: bool = False,
        fence: Callable[[], None] = _no_fence,
        pool: Executor | None = None,
    ) -> None:
        self._persist = persist
        self._fence = fence
        self._pool = pool
        self._catalog = catalog
        self._unit = unit
        self._epoch = epoch
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._released: dict[Incarnation, Released] = {}
        self._unreadable: list[str] = []
        self._leftover: dict[str, None] = {}

    # ------------------------------------------------------------ sessions

    def open_session(self, partition: str, session_id: str) -> Incarnation:
        """Begin a new incarnation of a session id."""
        name = f"{self._now_ns():016x}{os.urandom(4).hex()}"
        incarnation = Incarnation(partition, session_id, name)
        _ = incarnation.path  # refuses ids that cannot be stored
        return incarnation

    def finalize(self, session: ClosedSession) -> SessionManifest:
        """Write a session's manifest; its Segments can be resolved from then on.

        Steps that no Segment refers to are deleted. Waits until the others lie where the policy
        wants them.

        Raises
        ------
        InvalidConfig
            No consumer, or one that is named twice.
        StoreFenced
            A later process has taken the store.
        """
        consumers = session.consumers
        if not consumers or len(set(consumers)) != len(consumers):
            raise InvalidConfig(f"{list(consumers)}", subject="consumers", remedy="name each once")
        unit = self._writable()
        incarnation = session.incarnation
        manifest = self._manifest(session)
        trajectory = self._trajectory(session)
        unit.settle(incarnation.path)
        self._fence()
        self._publish(manifest, trajectory)
        self._fence()  # once more: who took the store in between may have swept the Steps
        with self._lock:
            self._released[incarnation] = nothing_released(manifest.consumers)
        kept = {s.index for s in manifest.steps}
        unneeded = [s.index for s in session.step_entries() if s.index not in kept]
        self._clear(unit, [StepKey(incarnation, i).path for i in unneeded])
        return manifest

    def _manifest(self, session: ClosedSession) -> SessionManifest:
        where = session.incarnation
        segments = session.segment_entries()
        needed = {f.step for s in segments for fs in s.fields.values() for f in fs}
        return SessionManifest(
            schema=MANIFEST_SCHEMA,
            store_id=self._catalog.store_id,
            partition=where.partition,
            session_id=where.session_id,
            incarnation_id=where.incarnation_id,
            epoch=self._epoch,
            created_ns=self._now_ns(),
            mode=session.mode,
            consumers=session.consumers,
            steps=tuple(s for s in session.step_entries() if s.index in needed),
            segments=segments,
        )

    def _trajectory(self, session: ClosedSession) -> bytes | None:
        if not self._persist:
            return None
        return encode_trajectory(trajectory_document(self._catalog.store_id, session))

    def _publish(self, manifest: SessionManifest, trajectory: bytes | None) -> None:
        """Write a manifest, or leave none behind: the session can then be finalized again."""
        try:
            self._catalog.publish(manifest, trajectory)
        except BaseException:
            self._catalog.drop(manifest.incarnation)
            raise

    def discard(self, incarnation: Incarnation) -> None:
        """Delete all that an open session has written; idempotent."""
        self._fence()
        self._writable().clear_incarnation(incarnation.path)

    # ------------------------------------------------------------ references

    def trajectory(self, ref: SegmentRef) -> ClosedSession:
        """Return the finalized session of a Segment with its resident fields.

        Raises
        ------
        SegmentMissing, StaleReference
            It was released meanwhile, by another process too.
        TrajectoryMissing, ManifestCorrupt
        """
        path = ref.incarnation.path
        try:
            return self._document(path).closed()
        except TrajectoryMissing as error:
            if self._catalog.read(path) is None:
                raise self._catalog.absent(ref) from error
            raise

    def _document(self, path: str) -> TrajectoryDocument:
        subject = f"trajectory of {path}"
        found = self._catalog.trajectory(path, lambda data: decode_trajectory(data, subject))
        if found.store_id != self._catalog.store_id or found.incarnation.path != path:
            raise ManifestCorrupt(
                f"describes {found.incarnation} of store {found.store_id!r}", subject=subject
            )
        return found

    def resolve(self, refs: Iterable[str]) -> list[Resolved]:
        """Return what references stand for, in their order.

        Raises
        ------
        InvalidKey, WrongStore, StaleReference, SegmentMissing
        """
        return [self._catalog.resolve(SegmentRef.parse(ref)) for ref in refs]

    def unreleased(
        self, consumer: str | None = None, partition: str | None = None
    ) -> Iterator[str]:
        """Yield the references that a consumer, or any consumer, has still to release."""
        with self._lock:
            known = list(self._released.items())
        for incarnation, released in known:
            if partition not in (None, incarnation.partition):
                continue
            manifest = self._catalog.manifest(incarnation)
            if manifest is None:
                continue  # released while we were counting
            for segment in manifest.segments:
                if is_pending(segment, released, consumer):
                    yield str(manifest.ref(segment))

    def release(self, refs: Iterable[str], consumer: str) -> int:
        """Note that a consumer needs these Segments no more.

        Idempotent: Segments that are gone already count as released. Steps that no unreleased
        Segment refers to are deleted. Comes after the barrier of all ranks that read them.

        Returns
        -------
        int
            Steps deleted.

        Raises
        ------
        InvalidConfig
            The consumer was not declared at finalize.
        WrongStore, SegmentMissing
        """
        by_session: dict[Incarnation, set[SegmentRef]] = {}
        for ref in map(SegmentRef.parse, refs):
            self._catalog.check_store(ref)
            by_session.setdefault(ref.incarnation, set()).add(ref)
        unit = self._writable()
        self._fence()
        with self._lock:
            for incarnation, mine in by_session.items():
                self._check_release(incarnation, mine, consumer)
        self._clear(unit, list(self._leftover))
        return sum(self._release(unit, i, mine, consumer) for i, mine in by_session.items())

    def _check_release(
        self, incarnation: Incarnation, refs: Iterable[SegmentRef], consumer: str
    ) -> None:
        released = self._released.get(incarnation)
        if released is None and incarnation.path not in self._unreadable:
            return  # all of the session was released before
        if released is None:
            self._catalog.read(incarnation.path)  # says what is wrong with it
            raise ManifestCorrupt(
                "could not be used when the store was opened",
                subject=str(incarnation),
                remedy="it can now: open the store again",
            )
        for ref in refs:
            self._catalog.resolve(ref)
        if consumer not in released:
            raise InvalidConfig(
                f"{consumer!r} is not among {sorted(released)}",
                subject=str(incarnation),
                remedy="declare every consumer at finalize",
            )

    def _release(
        self, unit: StorageUnit, incarnation: Incarnation, refs: set[SegmentRef], consumer: str
    ) -> int:
        with self._lock:
            released = self._released.get(incarnation)
            manifest = self._catalog.manifest(incarnation) if released is not None else None
            if released is None or manifest is None:
                return 0
            before = released_by_all(released)
            names = {f"{r.view}/{r.index}" for r in refs}
            wanted = {c: s | names if c == consumer else s for c, s in released.items()}
            after = released_by_all(wanted)
            if is_over(manifest, after):
                # Without a manifest the Steps are orphans, which a start sweeps: nothing else has
                # to be written down, so that this works on a full disk too.
                self._catalog.drop(incarnation)
                del self._released[incarnation]
            else:
                self._note(incarnation, wanted)
                self._released[incarnation] = wanted
        gone = needed_steps(manifest, before) - needed_steps(manifest, after)
        places = [StepKey(incarnation, i).path for i in sorted(gone)]
        if is_over(manifest, after):
            places = [f"steps/{incarnation.path}"]  # one listing, where a listing is a request
        self._clear(unit, places)
        unwanted = frozenset().union(*wanted.values())
        cold = needed_steps(manifest, frozenset()) - needed_steps(manifest, unwanted) - gone
        unit.cool(StepKey(incarnation, i) for i in cold)
        return len(gone)

    def _clear(self, unit: StorageUnit, places: Sequence[str]) -> None:
        """Delete Steps; what will not go now is tried again at later releases and at a start."""
        for place in places:
            try:
                unit.clear(place)
            except TqFsError:
                _log.warning("%s could not be deleted yet", place, exc_info=True)
                self._leftover[place] = None
            else:
                self._leftover.pop(place, None)

    def _tidy(self, path: str, remove: Callable[[], None]) -> None:
        """Remove what a session left in the catalog; what will not go now, at a later start."""
        try:
            remove()
        except TqFsError:
            _log.warning("what is left of %s could not be deleted yet", path, exc_info=True)

    def _note(self, incarnation: Incarnation, released: Released) -> None:
        """Write down a release before anything is deleted on its account."""
        state = SessionState(
            schema=STATE_SCHEMA,
            epoch=self._epoch,
            released={c: tuple(sorted(s)) for c, s in released.items()},
        )
        self._catalog.put_state(incarnation, state)

    # ------------------------------------------------------------ start

    def recover(self, *, rebuild: bool = False) -> Recovery:
        """Read the manifests, finish deletions that were begun, and sweep what is orphaned.

        Call once, before anything else, in the process that holds the store for writing. What a
        manifest refers to is never deleted, nor what lies beside one that cannot be used.

        Parameters
        ----------
        rebuild
            Make a manifest that cannot be used anew, from the session's trajectory and from what
            its Steps say of themselves, where both are whole. Pages are not believed then: every
            manifest is read.
        """
        unit = self._writable()
        loaded = self._load(trust=not rebuild)
        sweep = Sweep(loaded.wanted)
        rebuilt = []
        for held in unit.inventory():
            if rebuild and held.path in self._unreadable and self._rebuild(held, loaded):
                rebuilt.append(held.path)
            self._look_again(held.path, loaded)
            self._clear(unit, sweep.strays(held))
        for path in loaded.abandoned:
            self._tidy(path, partial(self._catalog.clear, path))
        for incarnation in loaded.ended.values():
            self._tidy(incarnation.path, partial(self._catalog.drop, incarnation))
        if not rebuild:
            self._catalog.flush(self._epoch)
        return replace(
            self._summary(loaded),
            swept_sessions=sweep.sessions,
            swept_steps=sweep.steps,
            incomplete=sweep.incomplete(),
            rebuilt=tuple(rebuilt),
        )

    def load(self) -> Recovery:
        """Read the manifests without changing anything: for a store opened read-only."""
        return self._summary(self._load())

    def survey(self) -> Recovery:
        """Tell what :meth:`recover` would find and remove, without changing anything."""
        loaded = self._load(trust=False)
        sweep = Sweep(loaded.wanted)
        assert self._unit is not None
        for held in self._unit.inventory():
            self._look_again(held.path, loaded)
            sweep.strays(held)
        return replace(
            self._summary(loaded),
            swept_sessions=sweep.sessions,
            swept_steps=sweep.steps,
            incomplete=sweep.incomplete(),
        )

    def close(self) -> None:
        """Leave behind what makes the next start quick; nothing that it needs."""
        if self._unit is not None:
            self._catalog.flush(self._epoch)

    def _summary(self, loaded: Loaded) -> Recovery:
        return replace(loaded.summary(), unreadable=tuple(self._unreadable))

    def _load(self, *, trust: bool = True) -> Loaded:
        """Learn of all manifests; without opening those that a page tells of, if it is trusted."""
        loaded = Loaded(Wanted(self._places))
        pages = self._catalog.known() if trust else {}  # first: what is written later is listed
        for entry, found in self._read_all(pages):
            if found is None:
                loaded.abandoned.add(entry.path)  # a finalize that was not finished
            elif isinstance(found, _Recalled):
                self._take_recalled(entry.path, found, loaded)
            else:
                self._take(entry.path, found, loaded, entry.stamp)
        return loaded

    def _places(self, incarnation: Incarnation) -> Mapping[str, Objects]:
        """Return where the Steps lie that unreleased Segments refer to."""
        manifest = self._catalog.manifest(incarnation)
        assert manifest is not None  # it is held, or was read a moment ago
        needed = needed_steps(manifest, released_by_all(self._released[incarnation]))
        return wanted_places(manifest, [s for s in manifest.steps if s.index in needed])

    def _look_again(self, path: str, loaded: Loaded) -> None:
        """Ask for the manifest of Steps that would be swept: no listing is trusted with them."""
        if path in loaded.wanted or path in loaded.ended or path in loaded.abandoned:
            return
        found = self._read(path)
        if found is not None:
            self._take(path, found, loaded)

    def _take(self, path: str, found: Found | Exception, loaded: Loaded, stamp: str = "") -> None:
        if isinstance(found, Exception):
            _log.error("manifest of %s is left alone, and its Steps", path, exc_info=found)
            self._unreadable.append(path)
            loaded.wanted.add(path, None)
            return
        manifest = found.manifest
        released = released_of(manifest.consumers, found.state)
        if self._count(path, manifest, released, loaded) and self._unit is not None:
            self._catalog.keep(manifest, stamp)

    def _take_recalled(self, path: str, found: _Recalled, loaded: Loaded) -> None:
        """Believe a page of a manifest; it is not even decoded where all of it is still needed."""
        noted = found.noted
        incarnation = noted.incarnation
        released = released_of(noted.consumers, found.state)
        if not released_by_all(released):
            self._released[incarnation] = released
            loaded.wanted.add(path, incarnation)
            loaded.add(segments=noted.segments, released=0, steps=noted.steps, nbytes=noted.nbytes)
        elif not self._count(path, noted.manifest(), released, loaded):
            return
        if self._unit is not None:
            self._catalog.keep_noted(incarnation, found.page, found.entry)

    def _count(
        self, path: str, manifest: SessionManifest, released: Released, loaded: Loaded
    ) -> bool:
        """Take in what is left of a session; False where nothing is."""
        done = released_by_all(released)
        if is_over(manifest, done):
            loaded.ended[path] = manifest.incarnation
            return False
        self._released[manifest.incarnation] = released
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
        self, pages: Mapping[str, tuple[str, bytes]]
    ) -> Iterator[tuple[Entry, _Recalled | Found | Exception | None]]:
        """Yield all manifests with their states, read side by side where there is a pool."""

        def read(entry: Entry) -> tuple[Entry, _Recalled | Found | Exception | None]:
            found = self._recall(entry, *pages[entry.path]) if entry.path in pages else None
            return entry, found or self._read(entry.path, entry.names) or self._read(entry.path)

        entries = self._catalog.entries()
        while some := list(itertools.islice(entries, _BATCH)):
            yield from self._pool.map(read, some) if self._pool is not None else map(read, some)

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

    def _rebuild(self, held: Inventory, loaded: Loaded) -> bool:
        """Make a damaged manifest anew; False where what is left does not say how."""
        unit = self._writable()
        try:
            document = self._document(held.path)
            state = self._catalog.state(held.path)
            if not self._is_damaged(document.incarnation):
                return False
            manifest = self._manifest(document.closed(unit.entries(held)))
            self._catalog.publish(manifest)  # replaces it, or changes nothing
        except (CorruptError, ConflictError, InvalidSegment, MissingError):
            _log.exception("manifest of %s cannot be made anew", held.path)
            return False
        self._unreadable.remove(held.path)
        loaded.wanted.discard(held.path)
        self._take(held.path, Found(manifest, state), loaded)
        return True

    def _is_damaged(self, incarnation: Incarnation) -> bool:
        """Tell whether a manifest is damaged; raises where it is somebody else's."""
        try:
            self._catalog.manifest(incarnation)
        except FormatTooNew:
            raise
        except (CorruptError, InvalidSegment):
            return True
        return False

    def _writable(self) -> StorageUnit:
        if self._unit is None:
            raise ReadOnlyStore(
                "is open for reading only", subject=f"store {self._catalog.store_id!r}"
            )
        return self._unit


class _Recalled(NamedTuple):
    """A manifest that was not read: what a page says of it, and its state where it has one."""

    noted: Noted
    page: str
    entry: bytes
    state: SessionState | None
