"""All manifests of a store: in the backend, and the last used ones in memory."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from tq_fs.backends import Backend
from tq_fs.errors import ObjectMissing, SegmentMissing, StaleReference, WrongStore
from tq_fs.keys import Incarnation, SegmentRef, component
from tq_fs.manifests._check import check_manifest
from tq_fs.manifests._models import (
    STATE_SCHEMA,
    SegmentEntry,
    SessionManifest,
    SessionState,
    decode,
    encode,
)
from tq_fs.steps import StepEntry

MANIFEST = "manifest.json"
STATE = "state.json"
_ROOT = "manifests"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A reference with what it stands for.

    Attributes
    ----------
    ref
        The reference.
    segment
        Its entry in the manifest.
    steps
        The manifest's Steps by index.
    shared
        Indexes of the Steps that several of its Segments refer to.
    """

    ref: SegmentRef
    segment: SegmentEntry
    steps: dict[int, StepEntry]
    shared: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Cached:
    manifest: SessionManifest
    steps: dict[int, StepEntry]
    segments: dict[tuple[str, int], SegmentEntry]
    shared: frozenset[int]
    nbytes: int


class Catalog:
    """Finds what references mean. Safe to call from many threads.

    Memory: a bounded cache of decoded manifests.

    Parameters
    ----------
    backend
        Where the manifests lie; stays the caller's.
    store_id
        References of other stores are refused.
    cache_bytes
        Bound of the cache, counted in bytes of JSON; decoded they take about five times that.
    """

    def __init__(self, backend: Backend, store_id: str, *, cache_bytes: int) -> None:
        self.store_id = store_id
        self._backend = backend
        self._lock = threading.Lock()
        self._cache: OrderedDict[Incarnation, _Cached] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0

    # ------------------------------------------------------------ write

    def publish(self, manifest: SessionManifest) -> None:
        """Check a manifest and write it, once.

        Raises
        ------
        InvalidSegment
            A Segment could not be read; nothing was written.
        ObjectExists
            The incarnation has another manifest.
        """
        check_manifest(manifest)
        data = encode(manifest)
        self._backend.publish(self._prefix(manifest.incarnation), {MANIFEST: (data,)})
        self._remember(manifest, len(data))

    def put_state(self, incarnation: Incarnation, state: SessionState) -> None:
        """Write what has happened to a manifest's Segments."""
        self._backend.put(f"{self._prefix(incarnation)}/{STATE}", encode(state))

    def drop(self, incarnation: Incarnation) -> None:
        """Remove a manifest and its state; idempotent."""
        self._backend.delete(self._prefix(incarnation))
        with self._lock:
            gone = self._cache.pop(incarnation, None)
            self._cached_bytes -= gone.nbytes if gone else 0

    # ------------------------------------------------------------ read

    def resolve(self, ref: SegmentRef) -> Resolved:
        """Return what a reference stands for.

        Raises
        ------
        WrongStore
            The reference is of another store.
        StaleReference
            The session id has been used again since and this incarnation is gone.
        SegmentMissing
            Never finalized, discarded, or released by all its consumers.
        """
        self.check_store(ref)
        found = self._find(ref.incarnation)
        segment = found.segments.get((ref.view, ref.index)) if found else None
        if found is None or segment is None:
            raise self._absent(ref)
        return Resolved(ref, segment, found.steps, found.shared)

    def check_store(self, ref: SegmentRef) -> None:
        """Refuse a reference of another store.

        Raises
        ------
        WrongStore
        """
        if ref.store_id != self.store_id:
            raise WrongStore(
                f"is of store {ref.store_id!r}, this is {self.store_id!r}",
                subject=str(ref),
                remedy="open the store that the rollout was recorded in",
            )

    def manifest(self, incarnation: Incarnation) -> SessionManifest | None:
        """Return an incarnation's manifest, if it has one."""
        found = self._find(incarnation)
        return found.manifest if found else None

    def state(self, incarnation: Incarnation) -> SessionState:
        """Return what has happened to a manifest's Segments; nothing, if nothing was written."""
        key = f"{self._prefix(incarnation)}/{STATE}"
        try:
            return decode(self._backend.get(key), SessionState, key)
        except ObjectMissing:
            return SessionState(schema=STATE_SCHEMA, epoch=0, released={})

    def paths(self) -> Iterator[str]:
        """Yield the path of every incarnation that has a manifest, sessions by age."""
        for partition in self._backend.list(_ROOT):
            for session in self._backend.list(f"{_ROOT}/{partition}"):
                for name in self._backend.list(f"{_ROOT}/{partition}/{session}"):
                    yield f"{partition}/{session}/{name}"

    def read(self, path: str) -> tuple[SessionManifest, SessionState] | None:
        """Return the manifest and state at a path, if there is a manifest.

        Raises
        ------
        CorruptError, WrongStore, InvalidSegment
            It cannot be used.
        """
        found = self._read(f"{_ROOT}/{path}")
        return (found.manifest, self.state(found.manifest.incarnation)) if found else None

    # ------------------------------------------------------------ inside

    def _prefix(self, incarnation: Incarnation) -> str:
        return f"{_ROOT}/{incarnation.path}"

    def _find(self, incarnation: Incarnation) -> _Cached | None:
        with self._lock:
            found = self._cache.get(incarnation)
            if found is not None:
                self._cache.move_to_end(incarnation)
                return found
        return self._read(self._prefix(incarnation))

    def _read(self, prefix: str) -> _Cached | None:
        key = f"{prefix}/{MANIFEST}"
        try:
            data = self._backend.get(key)
        except ObjectMissing:
            return None
        manifest = decode(data, SessionManifest, key)
        check_manifest(manifest)
        if manifest.store_id != self.store_id:
            raise WrongStore(
                f"is a manifest of store {manifest.store_id!r} in store {self.store_id!r}",
                subject=key,
                remedy="give each run a folder or store_id of its own",
            )
        return self._remember(manifest, len(data))

    def _remember(self, manifest: SessionManifest, nbytes: int) -> _Cached:
        steps = {step.index: step for step in manifest.steps}
        segments: dict[tuple[str, int], SegmentEntry] = {
            (s.view, s.index): s for s in manifest.segments
        }
        entry = _Cached(manifest, steps, segments, _shared(manifest), nbytes)
        with self._lock:
            old = self._cache.pop(manifest.incarnation, None)
            self._cache[manifest.incarnation] = entry
            self._cached_bytes += nbytes - (old.nbytes if old else 0)
            while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return entry

    def _absent(self, ref: SegmentRef) -> StaleReference | SegmentMissing:
        where = ref.incarnation
        session = f"{_ROOT}/{component(where.partition)}/{component(where.session_id)}"
        newer = [n for n in self._backend.list(session) if n > component(where.incarnation_id)]
        if newer:
            return StaleReference(
                f"session {where.session_id!r} has been used again since (incarnation {newer[-1]})",
                subject=str(ref),
                remedy="train on references of the newer rollout",
            )
        return SegmentMissing(
            "no such Segment: never finalized, discarded, or released by all its consumers",
            subject=str(ref),
        )


def _shared(manifest: SessionManifest) -> frozenset[int]:
    counts = Counter(
        step
        for segment in manifest.segments
        for step in {f.step for fragments in segment.fields.values() for f in fragments}
    )
    return frozenset(step for step, count in counts.items() if count > 1)
