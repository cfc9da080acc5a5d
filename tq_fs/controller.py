"""Controller: gives out incarnations, keeps the manifests, and deletes what nobody needs."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tq_fs.errors import InvalidConfig, ObjectExists, ReadOnlyStore, TqFsError
from tq_fs.keys import Incarnation, SegmentRef
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
    """

    sessions: int
    steps: int


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
        self._clear_unneeded(incarnation, [s.index for s in steps if s.index not in needed])
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

    def _clear_unneeded(self, incarnation: Incarnation, indexes: Sequence[int]) -> None:
        try:
            self._writable().clear_steps(incarnation, indexes)
        except TqFsError:
            _log.warning(
                "Steps %s of %s are left to the next sweep", indexes, incarnation, exc_info=True
            )

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
        by_session: dict[Incarnation, list[SegmentRef]] = {}
        for ref in map(SegmentRef.parse, refs):
            by_session.setdefault(ref.incarnation, []).append(ref)
        return sum(self._release(i, mine, consumer) for i, mine in by_session.items())

    def _release(self, incarnation: Incarnation, refs: Sequence[SegmentRef], consumer: str) -> int:
        unit = self._writable()
        self._catalog.check_store(refs[0])
        with self._lock:
            released = self._released.get(incarnation)
            manifest = self._catalog.manifest(incarnation) if released is not None else None
            if released is None or manifest is None:
                return 0  # all of the session was released before
            for ref in refs:
                self._catalog.resolve(ref)
            if consumer not in released:
                raise InvalidConfig(
                    f"{consumer!r} is not among {sorted(released)}",
                    subject=str(refs[0]),
                    remedy="declare every consumer at finalize",
                )
            before = _done(released)
            self._note(incarnation, released, consumer, {f"{r.view}/{r.index}" for r in refs})
            after = _done(released)
            if _all(manifest, after):
                del self._released[incarnation]  # the last one: nobody writes its state again
        gone = _needed(manifest, before) - _needed(manifest, after)
        self._delete(unit, manifest, gone, after)
        return len(gone)

    def _note(
        self, incarnation: Incarnation, released: Released, consumer: str, names: set[str]
    ) -> None:
        """Write down a release before anything is deleted on its account."""
        wanted = {c: s | names if c == consumer else s for c, s in released.items()}
        state = SessionState(
            schema=STATE_SCHEMA,
            epoch=self._epoch,
            released={c: tuple(sorted(s)) for c, s in wanted.items()},
        )
        self._catalog.put_state(incarnation, state)
        released[consumer] = wanted[consumer]

    def _delete(
        self, unit: StorageUnit, manifest: SessionManifest, gone: set[int], done: set[str]
    ) -> None:
        """Delete Steps, and the manifest after them once every Segment is done with."""
        unit.clear_steps(manifest.incarnation, sorted(gone))
        if _all(manifest, done):
            unit.clear_incarnation(manifest.incarnation.path)
            self._catalog.drop(manifest.incarnation)

    # ------------------------------------------------------------ start

    def recover(self) -> Swept:
        """Read the manifests, finish deletions that were begun, and sweep what is orphaned.

        Call once, before anything else, in the process that holds the store for writing.
        """
        unit = self._writable()
        steps = 0
        finalized = set()
        for manifest, released in self._load():
            where = manifest.incarnation
            finalized.add(where.path)
            done = _done(released)
            stray = set(unit.steps(where.path)) - _needed(manifest, done)
            steps += len(stray)
            if _all(manifest, done):
                del self._released[where]
            self._delete(unit, manifest, stray, done)
        orphans = [path for path in unit.incarnations() if path not in finalized]
        for path in orphans:
            steps += len(unit.steps(path))
            unit.clear_incarnation(path)
        return Swept(len(orphans), steps)

    def load(self) -> None:
        """Read the manifests without changing anything: for a store opened read-only."""
        for _ in self._load():
            continue

    def _load(self) -> Iterator[tuple[SessionManifest, Released]]:
        for incarnation in list(self._catalog.incarnations()):
            manifest = self._catalog.manifest(incarnation)
            if manifest is None:
                continue
            state = self._catalog.state(incarnation).released
            released = {c: set(state.get(c, ())) for c in manifest.consumers}
            self._released[incarnation] = released
            yield manifest, released

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
