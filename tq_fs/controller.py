"""Controller: gives out incarnations, keeps the manifests, and deletes what nobody needs."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tq_fs.errors import (
    ConflictError,
    CorruptError,
    InvalidConfig,
    InvalidSegment,
    ManifestCorrupt,
    ObjectExists,
    ReadOnlyStore,
    TqFsError,
)
from tq_fs.keys import Incarnation, SegmentRef, StepKey
from tq_fs.manifests import (
    MANIFEST_SCHEMA,
    STATE_SCHEMA,
    Catalog,
    Mode,
    Resolved,
    SegmentEntry,
    SessionManifest,
    SessionState,
)
from tq_fs.steps import StepEntry
from tq_fs.storage_unit import StorageUnit

Released = dict[str, set[str]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Swept:
    """What a start removed.

    Attributes
    ----------
    sessions
        Incarnations that were never finalized.
    steps
        Steps that no unreleased Segment refers to.
    unreadable
        Paths of incarnations whose manifest cannot be used; they were left as they are.
    """

    sessions: int
    steps: int
    unreadable: tuple[str, ...] = ()


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
    """

    def __init__(
        self,
        catalog: Catalog,
        unit: StorageUnit | None,
        *,
        epoch: int,
        now_ns: Callable[[], int],
    ) -> None:
        self._catalog = catalog
        self._unit = unit
        self._epoch = epoch
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._released: dict[Incarnation, Released] = {}
        self._unreadable: list[str] = []
        self._leftover: dict[StepKey, None] = {}

    # ------------------------------------------------------------ sessions

    def open_session(self, partition: str, session_id: str) -> Incarnation:
        """Begin a new incarnation of a session id."""
        name = f"{self._now_ns():016x}{os.urandom(4).hex()}"
        incarnation = Incarnation(partition, session_id, name)
        _ = incarnation.path  # refuses ids that cannot be stored
        return incarnation

    def finalize(
        self,
        incarnation: Incarnation,
        *,
        mode: Mode,
        consumers: Sequence[str],
        steps: Sequence[StepEntry],
        segments: Sequence[SegmentEntry],
    ) -> SessionManifest:
        """Write a session's manifest; its Segments can be resolved from then on.

        Steps that no Segment refers to are deleted.

        Parameters
        ----------
        consumers
            Who must release each Segment before its Steps are deleted; at least one.
        """
        if not consumers or len(set(consumers)) != len(consumers):
            raise InvalidConfig(f"{list(consumers)}", subject="consumers", remedy="name each once")
        needed = {f.step for s in segments for fs in s.fields.values() for f in fs}
        manifest = SessionManifest(
            schema=MANIFEST_SCHEMA,
            store_id=self._catalog.store_id,
            partition=incarnation.partition,
            session_id=incarnation.session_id,
            incarnation_id=incarnation.incarnation_id,
            epoch=self._epoch,
            created_ns=self._now_ns(),
            mode=mode,
            consumers=tuple(consumers),
            steps=tuple(s for s in steps if s.index in needed),
            segments=tuple(segments),
        )
        self._publish(manifest)
        with self._lock:
            self._released[incarnation] = {c: set() for c in consumers}
        unneeded = [StepKey(incarnation, s.index) for s in steps if s.index not in needed]
        self._clear(self._writable(), unneeded)
        return manifest

    def _publish(self, manifest: SessionManifest) -> None:
        """Write a manifest, or leave none behind: the session can then be finalized again."""
        try:
            self._catalog.publish(manifest)
        except ObjectExists:
            raise
        except BaseException:
            self._catalog.drop(manifest.incarnation)
            raise

    def discard(self, incarnation: Incarnation) -> None:
        """Delete all that an open session has written; idempotent."""
        self._writable().clear_incarnation(incarnation.path)

    # ------------------------------------------------------------ references

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
                if _pending(segment, released, consumer):
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
            before = _done(released)
            names = {f"{r.view}/{r.index}" for r in refs}
            wanted = {c: s | names if c == consumer else s for c, s in released.items()}
            after = _done(wanted)
            if _all(manifest, after):
                # Without a manifest the Steps are orphans, which a start sweeps: nothing else has
                # to be written down, so that this works on a full disk too.
                self._catalog.drop(incarnation)
                del self._released[incarnation]
            else:
                self._note(incarnation, wanted)
                self._released[incarnation] = wanted
        gone = _needed(manifest, before) - _needed(manifest, after)
        self._clear(unit, [StepKey(incarnation, i) for i in sorted(gone)])
        return len(gone)

    def _clear(self, unit: StorageUnit, keys: Sequence[StepKey]) -> None:
        """Delete Steps; what will not go now is tried again at later releases and at a start."""
        for key in keys:
            try:
                unit.clear(key)
            except TqFsError:
                _log.warning("%s could not be deleted yet", key, exc_info=True)
                self._leftover[key] = None
            else:
                self._leftover.pop(key, None)

    def _note(self, incarnation: Incarnation, released: Released) -> None:
        """Write down a release before anything is deleted on its account."""
        state = SessionState(
            schema=STATE_SCHEMA,
            epoch=self._epoch,
            released={c: tuple(sorted(s)) for c, s in released.items()},
        )
        self._catalog.put_state(incarnation, state)

    # ------------------------------------------------------------ start

    def recover(self) -> Swept:
        """Read the manifests, finish deletions that were begun, and sweep what is orphaned.

        Call once, before anything else, in the process that holds the store for writing.
        """
        unit = self._writable()
        steps = 0
        kept = set()
        for path, manifest, released in self._load():
            kept.add(path)
            if manifest is None:
                continue
            done = _done(released)
            stray = set(unit.steps(path)) - _needed(manifest, done)
            steps += len(stray)
            if _all(manifest, done):
                self._catalog.drop(manifest.incarnation)
                del self._released[manifest.incarnation]
            self._clear(unit, [StepKey(manifest.incarnation, i) for i in sorted(stray)])
        orphans = [path for path in unit.incarnations() if path not in kept]
        for path in orphans:
            steps += len(unit.steps(path))
            try:
                unit.clear_incarnation(path)
            except TqFsError:
                _log.warning("%s could not be swept yet", path, exc_info=True)
        return Swept(len(orphans), steps, tuple(self._unreadable))

    def load(self) -> Swept:
        """Read the manifests without changing anything: for a store opened read-only."""
        for _ in self._load():
            continue
        return Swept(0, 0, tuple(self._unreadable))

    def _load(self) -> Iterator[tuple[str, SessionManifest | None, Released]]:
        """Yield each incarnation's path, manifest and state; None for one that cannot be used."""
        for path in list(self._catalog.paths()):
            try:
                found = self._catalog.read(path)
            except (CorruptError, ConflictError, InvalidSegment):
                _log.exception("manifest of %s is left alone, and its Steps with it", path)
                self._unreadable.append(path)
                yield path, None, {}
                continue
            if found is None:
                continue
            manifest, state = found
            released = {c: set(state.released.get(c, ())) for c in manifest.consumers}
            self._released[manifest.incarnation] = released
            yield path, manifest, released

    def _writable(self) -> StorageUnit:
        if self._unit is None:
            raise ReadOnlyStore(
                "is open for reading only", subject=f"store {self._catalog.store_id!r}"
            )
        return self._unit


def _name(segment: SegmentEntry) -> str:
    return f"{segment.view}/{segment.index}"


def _pending(segment: SegmentEntry, released: Released, consumer: str | None) -> bool:
    names = released if consumer is None else [c for c in released if c == consumer]
    return any(_name(segment) not in released[c] for c in names)


def _done(released: Released) -> set[str]:
    """Return the Segments that every consumer has released."""
    return set.intersection(*released.values()) if released else set()


def _all(manifest: SessionManifest, done: set[str]) -> bool:
    return len(done) == len(manifest.segments)


def _needed(manifest: SessionManifest, done: set[str]) -> set[int]:
    """Return the Steps that Segments outside of `done` refer to."""
    return {
        fragment.step
        for segment in manifest.segments
        if _name(segment) not in done
        for fragments in segment.fields.values()
        for fragment in fragments
    }
