"""All manifests of a store: in the backend, and the last used ones in memory."""

from __future__ import annotations

import itertools
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tq_fs.backends import Backend, Stamping
from tq_fs.errors import (
    CorruptError,
    ObjectMissing,
    SegmentMissing,
    StaleReference,
    TrajectoryMissing,
    WrongStore,
)
from tq_fs.keys import Incarnation, SegmentRef, component
from tq_fs.manifests._check import check_manifest
from tq_fs.manifests._decoded import DecodedManifest, DecodedManifests, Resolved
from tq_fs.manifests._models import (
    STATE_SCHEMA,
    Document,
    SegmentEntry,
    SessionManifest,
    SessionState,
    decode,
    encode,
)
from tq_fs.manifests._pages import Pages
from tq_fs.steps import StepEntry

T = TypeVar("T")
MANIFEST = "manifest.json"
TRAJECTORY = "trajectory.msgpack"
_ROOT = "manifests"
_PARTS = 4  # manifests / partition / session / incarnation
_STATE = re.compile(r"state-[0-9]{8,}\.json")


class Entry(NamedTuple):
    """An incarnation's path, and the names of what lies there.

    Attributes
    ----------
    stamp
        Of the manifest's file; empty where there is none, or the backend does not tell.
    """

    path: str
    names: frozenset[str]
    stamp: str = ""

    @property
    def released(self) -> bool:
        """Whether something was noted of what is released."""
        return any(map(_is_state, self.names))


class Found(NamedTuple):
    """A manifest, and what has happened to its Segments."""

    manifest: SessionManifest
    state: SessionState


class Catalog:
    """Finds what references mean. Safe to call from many threads.

    Memory: a bounded cache of decoded manifests; in the process that writes also all manifests of
    live sessions, packed (:class:`tq_fs.manifests.Pages`).

    Parameters
    ----------
    backend
        Where the manifests lie; stays the caller's.
    store_id
        References of other stores are refused.
    cache_bytes
        Bound of the cache, counted in bytes of JSON; decoded they take about five times that.
    pages
        What is known of all manifests; one with the usual sizes where left out.
    """

    def __init__(
        self, backend: Backend, store_id: str, *, cache_bytes: int, pages: Pages | None = None
    ) -> None:
        self.store_id = store_id
        self._backend = backend
        self._stamping = backend if isinstance(backend, Stamping) else None
        self._pages = pages or Pages(backend, store_id)
        self._decoded = DecodedManifests(cache_bytes)

    # ------------------------------------------------------------ write

    def put_trajectory(self, incarnation: Incarnation, trajectory: bytes) -> None:
        """Write a session's resident fields beside the manifest that follows, or leave nothing."""
        try:
            self._backend.put(f"{self._prefix(incarnation)}/{TRAJECTORY}", trajectory)
        except BaseException:
            self._backend.delete(self._prefix(incarnation))
            raise

    def publish(self, manifest: SessionManifest) -> None:
        """Check a manifest and write it: the session's Segments can be resolved from then on.

        An incarnation has one writer, the Controller that opened it, so that its key is used once.

        Raises
        ------
        InvalidSegment
            A Segment could not be read; nothing was written.
        """
        check_manifest(manifest)
        data = encode(manifest)
        prefix = self._prefix(manifest.incarnation)
        self._backend.put(f"{prefix}/{MANIFEST}", data)
        self._decoded.put(manifest, len(data))
        self._pages.hold(manifest, data, self._stamp(f"{prefix}/{MANIFEST}"))
        self._pages.turn(manifest.epoch)

    def _stamp(self, key: str) -> str:
        return self._stamping.stamp(key) if self._stamping is not None else ""

    def put_state(self, incarnation: Incarnation, state: SessionState) -> None:
        """Write what has happened to a manifest's Segments.

        Each epoch has a document of its own: a Controller that does not know yet that it was
        replaced cannot undo what a later one wrote.
        """
        key = f"{self._prefix(incarnation)}/{_state_name(state.epoch)}"
        self._backend.put(key, encode(state), urgent=True)

    def drop(self, incarnation: Incarnation) -> None:
        """Remove a manifest and its state; idempotent."""
        # The manifest goes before the rest, for its name is the first: without it the rest is
        # nothing, while it would bring back to life what the state says is released.
        self._backend.delete(self._prefix(incarnation))
        self.forget(incarnation)

    def forget(self, incarnation: Incarnation) -> None:
        """Resolve nothing of an incarnation from memory any more; idempotent."""
        self._decoded.drop(incarnation)
        self._pages.drop(incarnation)

    # ------------------------------------------------------------ pages

    def known(self) -> dict[str, tuple[str, bytes]]:
        """Return what earlier Controllers noted of manifests, by path; not all of it is true."""
        return self._pages.read() if self._stamping is not None else {}

    def keep(self, manifest: SessionManifest, stamp: str) -> None:
        """Hold a manifest that was read, in the process that writes."""
        self._pages.hold(manifest, stamp=stamp)

    def keep_noted(self, incarnation: Incarnation, page: str, entry: bytes) -> None:
        """Hold what a page says, once its stamp was compared, in the process that writes."""
        self._pages.keep(incarnation, page, entry)

    def flush(self, epoch: int) -> None:
        """Note what the next start need not read anew, where that is worth a file."""
        self._pages.flush(epoch)

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
        resolved = found.resolve(ref) if found is not None else None
        if resolved is None:
            raise self.absent(ref)
        return resolved

    def packed(self, ref: SegmentRef) -> bytes:
        """Return the manifest of a reference's session as its file holds it, for another process.

        Raises
        ------
        WrongStore, StaleReference, SegmentMissing
        """
        self.check_store(ref)
        data = self._pages.get(ref.incarnation)
        if data is None:
            found = self._read(self._prefix(ref.incarnation))
            if found is None:
                raise self.absent(ref)
            data = encode(found.manifest)
        return data

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

    def trajectory(self, path: str, decode: Callable[[bytes], T]) -> T:
        """Return the resident fields that lie at an incarnation's path.

        Raises
        ------
        TrajectoryMissing
            They were not kept when the session was finalized.
        ManifestCorrupt
        """
        try:
            return fetch(self._backend, f"{_ROOT}/{path}/{TRAJECTORY}", decode)[0]
        except ObjectMissing as error:
            raise TrajectoryMissing(
                "its resident fields were not kept",
                subject=path,
                remedy="finalize with persist_trajectories on",
            ) from error

    def entries(self, within: Backend | None = None) -> Iterator[Entry]:
        """Yield what the Controller has written, incarnation by incarnation.

        Parameters
        ----------
        within
            Only what lies there: a part of the catalog's own backend.
        """
        listing = self._listing(within or self._backend)
        for path, group in itertools.groupby(listing, key=lambda item: item[0]):
            mine = {name: stamp for _, name, stamp in group if _is_ours(name)}
            if mine:
                yield Entry(path, frozenset(mine), mine.get(MANIFEST, ""))

    def _listing(self, backend: Backend) -> Iterator[tuple[str, str, str]]:
        """Yield path of the incarnation, name and stamp of all that lies where documents do."""
        found: Iterator[tuple[str, str]]
        if isinstance(backend, Stamping):
            found = backend.stamps(_ROOT)
        else:
            found = ((key, "") for key, _ in backend.walk(_ROOT))
        for key, stamp in found:
            path, _, name = key[len(_ROOT) + 1 :].rpartition("/")
            if path.count("/") == _PARTS - 2:
                yield path, name, stamp

    def read(self, path: str, names: Collection[str] | None = None) -> Found | None:
        """Return the manifest and state at a path, if there is a manifest.

        Parameters
        ----------
        names
            What lies there, where that is known.

        Raises
        ------
        CorruptError, WrongStore, InvalidSegment
            It cannot be used.
        """
        prefix = f"{_ROOT}/{path}"
        if names is None:
            names = set(self._backend.list(prefix))
        found = self._read(prefix) if MANIFEST in names else None
        if found is None:
            return None
        return Found(found.manifest, self.state(path, names))

    def state(self, path: str, names: Collection[str] | None = None) -> SessionState:
        """Return what has happened to the Segments of the manifest at a path.

        Parameters
        ----------
        names
            What lies there, where that is known.

        Raises
        ------
        CorruptError
        """
        prefix = f"{_ROOT}/{path}"
        if names is None:
            names = set(self._backend.list(prefix))
        states = [self._state(f"{prefix}/{name}") for name in sorted(names) if _is_state(name)]
        return _merged([s for s in states if s is not None])

    def clear(self, path: str) -> None:
        """Remove what lies at a path that has no manifest; idempotent."""
        self._backend.delete(f"{_ROOT}/{path}")

    # ------------------------------------------------------------ inside

    def _prefix(self, incarnation: Incarnation) -> str:
        return f"{_ROOT}/{incarnation.path}"

    def _find(self, incarnation: Incarnation) -> DecodedManifest | None:
        found = self._decoded.get(incarnation)
        if found is not None:
            return found
        data = self._pages.get(incarnation)
        if data is None:
            return self._read(self._prefix(incarnation))
        return self._decoded.put(decode(data, SessionManifest, str(incarnation)), len(data))

    def _read(self, prefix: str) -> DecodedManifest | None:
        key = f"{prefix}/{MANIFEST}"
        try:
            manifest, nbytes = self._document(key, SessionManifest)
        except ObjectMissing:
            return None
        check_manifest(manifest)
        if manifest.store_id != self.store_id:
            raise WrongStore(
                f"is a manifest of store {manifest.store_id!r} in store {self.store_id!r}",
                subject=key,
                remedy="give each run a folder or store_id of its own",
            )
        return self._decoded.put(manifest, nbytes)

    def _state(self, key: str) -> SessionState | None:
        try:
            return self._document(key, SessionState)[0]
        except ObjectMissing:
            return None  # released as a whole in the meantime

    def _document(self, key: str, kind: type[Document]) -> tuple[Document, int]:
        return fetch(self._backend, key, lambda data: decode(data, kind, key))

    def absent(self, ref: SegmentRef) -> StaleReference | SegmentMissing:
        """Return the error of a reference whose session has no manifest."""
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


def fetch(backend: Backend, key: str, decode: Callable[[bytes], T]) -> tuple[T, int]:
    """Return a document and its size; read once more where the way to it may be at fault.

    Raises
    ------
    ObjectMissing, CorruptError
    """
    data = backend.get(key)
    try:
        return decode(data), len(data)
    except CorruptError:
        if not backend.distrust(key):
            raise
        data = backend.get(key)
        return decode(data), len(data)


def _state_name(epoch: int) -> str:
    return f"state-{epoch:08d}.json"


def _is_state(name: str) -> bool:
    return _STATE.fullmatch(name) is not None


def _is_ours(name: str) -> bool:
    return name in (MANIFEST, TRAJECTORY) or _is_state(name)


def _merged(states: Sequence[SessionState]) -> SessionState:
    """Return all that was released, in any epoch: what was released once stays so."""
    released: dict[str, set[str]] = {}
    for state in states:
        for consumer, segments in state.released.items():
            released.setdefault(consumer, set()).update(segments)
    last = max(states, key=lambda s: s.epoch, default=None)
    return SessionState(
        schema=STATE_SCHEMA,
        epoch=last.epoch if last else 0,
        released={c: tuple(sorted(s)) for c, s in released.items()},
        held=last.held if last else {},  # all that is held stands in each
    )
