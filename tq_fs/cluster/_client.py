"""A store's Controller, as another process of the cluster asks it. Knows no Ray."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol, TypeVar

from tq_fs import manifests
from tq_fs.backends import Backend, Retry
from tq_fs.cache import ChunkCache
from tq_fs.channel import Identity
from tq_fs.cluster._settings import cluster_of
from tq_fs.config import StoreConfig
from tq_fs.controller import finish
from tq_fs.embedded import Parts, encode_options, reader_pool, reader_threads
from tq_fs.errors import (
    ConflictError,
    MissingError,
    ObjectMissing,
    SegmentMissing,
    TqFsError,
    TrajectoryMissing,
    WrongStore,
)
from tq_fs.keys import Incarnation, SegmentRef
from tq_fs.manifests import DecodedManifest, DecodedManifests, Resolved, SessionManifest
from tq_fs.metrics import Metrics
from tq_fs.places import open_objects, open_unit_files
from tq_fs.reader import SegmentReader
from tq_fs.recovery import Recovery
from tq_fs.trajectory import ClosedSession, decode_trajectory
from tq_fs.units import Access, Directory, HomeDocuments, Layout, RemoteUnits, UnitReaders

T = TypeVar("T")
_LAYOUT_S = 1.0  # for the Controller to say where units are, where that is known roughly
_LEAVE_S = 2.0  # for it to hear that this process ends
_BEATS = 3  # signs of life in the time of a lease

_log = logging.getLogger(__name__)


class Calls(Protocol):
    """The calls that a client makes of :class:`~tq_fs.cluster._service.ClusterController`."""

    def layout(self) -> Layout: ...
    def look(self) -> Layout: ...
    def open_session(self, partition: str, session_id: str, holder: str) -> str: ...
    def publish(self, draft: bytes) -> bytes: ...
    def discard(self, partition: str, session_id: str, incarnation_id: str) -> None: ...
    def manifests(self, refs: Sequence[str]) -> list[bytes | TqFsError]: ...
    def release(self, refs: Sequence[str], consumer: str, rollout_id: int | None) -> int: ...
    def checkpoint_saved(self, rollout_id: int) -> int: ...
    def unreleased(
        self, consumer: str | None, partition: str | None, after: str, held: bool
    ) -> tuple[list[str], bool]: ...
    def renew(
        self, holder: str, consumers: Sequence[str], paths: Sequence[str] | None
    ) -> tuple[int, bool]: ...
    def leave(self, holder: str) -> None: ...


def open_attached(
    calls: Calls,
    config: StoreConfig,
    identity: Identity | None,
    *,
    node: str,
    consumers: Sequence[str],
    metrics: Metrics | None,
    cache: ChunkCache,
    opened: ExitStack,
) -> Parts:
    """Make the parts of a store whose Controller and units are elsewhere in the cluster.

    Parameters
    ----------
    calls
        Its Controller.
    config, identity
        As the Controller gives them.
    node
        Id of the node that this process runs on.
    consumers
        See :class:`ControllerClient`.
    metrics
        Counts what is read; None for nothing.
    """
    units, readers = reach_units(calls, config, identity, node=node, opened=opened)
    objects = units.objects
    threads = reader_threads(config, remote=objects is not None)  # units answer like a disk
    pool = reader_pool(threads, opened)
    client = ControllerClient(
        calls,
        units,
        objects if objects is not None else HomeDocuments(units),
        config,
        consumers=consumers,
    )
    opened.callback(client.close)
    return Parts(
        controller=client,
        units=units,
        reader=SegmentReader(
            client.resolve,
            readers,
            pool=pool,
            threads=threads,
            cache=cache,
            metrics=metrics,
            gone=client.gone,
        ),
        url=config.url,
        location=None,
        recovery=Recovery(),
        passed=readers.passed,
    )


def reach_units(
    calls: Calls, config: StoreConfig, identity: Identity | None, *, node: str, opened: ExitStack
) -> tuple[RemoteUnits, UnitReaders]:
    """Return the ways to write to a cluster's units, and to read; see :func:`open_attached`."""
    objects = open_objects(config, opened=opened, read_only=True)
    directory = Directory(calls.layout, node=node, clock=time.monotonic, patience_s=_LAYOUT_S)
    access = Access(
        store_id=config.store_id,
        identity=identity,
        retry_deadline_s=config.retry_deadline_s,
        timeout_s=config.request_timeout_s,
        full_deadline_s=cluster_of(config).full_deadline_s,
    )
    options = encode_options(config, remote=objects is not None)
    units = RemoteUnits(directory, access, options, objects=objects)
    opened.callback(units.close)
    readers = UnitReaders(units, lambda root, files: open_unit_files(root, config, opened=files))
    opened.callback(readers.close)
    return units, readers


class ControllerClient:
    """:class:`~tq_fs.controller.ControllerCalls` of a cluster. Safe to call from many threads.

    Says from time to time that its process lives, and what it records.

    Parameters
    ----------
    calls
        The Controller.
    units
        Where Steps are; stay the caller's.
    documents
        Where manifests and trajectories are; stays the caller's.
    config
        The store's settings.
    consumers
        In whose name this process reads: what they have still to release outlives the retention
        time while it lives.
    """

    def __init__(
        self,
        calls: Calls,
        units: RemoteUnits,
        documents: Backend,
        config: StoreConfig,
        *,
        consumers: Sequence[str] = (),
    ) -> None:
        self._calls = calls
        self._units = units
        self._documents = documents
        self._store_id = config.store_id
        self._retry = Retry(deadline_s=config.retry_deadline_s, most_s=1.0)
        persist = config.persist_trajectories
        self._persists = units.objects is not None if persist is None else persist
        self._consumers = tuple(consumers)
        self._holder = f"{os.getpid()}-{os.urandom(6).hex()}"
        self._retry = Retry(deadline_s=config.retry_deadline_s, most_s=1.0)
        self._decoded = DecodedManifests(config.manifest_cache_bytes)
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._ended = threading.Event()
        self._every_s = cluster_of(config).lease_s / _BEATS
        self._thread = threading.Thread(target=self._beat, name="tq-fs-lease", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ sessions

    def open_session(self, partition: str, session_id: str) -> Incarnation:
        """Begin a new incarnation of a session id, with a unit as its home."""
        found = self._calls.open_session(partition, session_id, self._holder)
        incarnation = Incarnation(partition, session_id, found)
        with self._lock:
            self._open.add(incarnation.path)
        return incarnation

    def finalize(self, session: ClosedSession) -> SessionManifest:
        """Write a session's manifest; its Segments can be resolved from then on."""
        manifest, unneeded = finish(
            session,
            self._store_id,
            self._units,
            keep=self._keeper(session.incarnation) if self._persists else None,
            publish=self._publish,
        )
        self._forget(session.incarnation)
        for place in unneeded:
            try:
                self._units.clear(place)
            except TqFsError:
                _log.warning("%s is left to the sweep", place, exc_info=True)
        return manifest

    def _keeper(self, incarnation: Incarnation) -> Callable[[bytes], None]:
        key = f"manifests/{incarnation.path}/{manifests.TRAJECTORY}"
        return lambda trajectory: self._documents.put(key, trajectory)

    def _publish(self, draft: SessionManifest) -> SessionManifest:
        data = self._patiently(lambda: self._calls.publish(manifests.encode(draft)))
        return manifests.decode(data, SessionManifest, str(draft.incarnation))

    def discard(self, incarnation: Incarnation) -> None:
        """Delete all that an open session has written; idempotent."""
        names = (incarnation.partition, incarnation.session_id, incarnation.incarnation_id)
        self._patiently(lambda: self._calls.discard(*names))
        self._forget(incarnation)

    def _patiently(self, call: Callable[[], T]) -> T:
        """Call again while a unit, or the Controller itself, is being started anew."""
        return self._retry.call(call, renew=lambda: None)

    def _forget(self, incarnation: Incarnation) -> None:
        with self._lock:
            self._open.discard(incarnation.path)

    # ------------------------------------------------------------ references

    def resolve(self, refs: Iterable[str]) -> list[Resolved]:
        """Return what references stand for, in their order; what is not known here by one call.

        Raises
        ------
        InvalidKey, WrongStore, StaleReference, SegmentMissing, UnitLost
        """
        parsed = [SegmentRef.parse(ref) for ref in refs]
        known = {ref.incarnation: self._decoded.get(ref.incarnation) for ref in parsed}
        asked = {ref.incarnation: ref for ref in parsed if known[ref.incarnation] is None}
        if asked:
            wanted = list(asked.values())
            known |= self._patiently(lambda: self._ask(wanted))
        return [self._resolved(ref, known[ref.incarnation]) for ref in parsed]

    def _ask(self, refs: Sequence[SegmentRef]) -> dict[Incarnation, DecodedManifest | None]:
        answers = self._calls.manifests([str(ref) for ref in refs])
        found = zip(refs, answers, strict=True)
        return {ref.incarnation: self._take(ref, answer) for ref, answer in found}

    def _take(self, ref: SegmentRef, answer: bytes | TqFsError) -> DecodedManifest:
        if isinstance(answer, TqFsError):
            raise answer
        manifest = manifests.decode(answer, SessionManifest, str(ref.incarnation))
        return self._decoded.put(manifest, len(answer))

    def _resolved(self, ref: SegmentRef, found: DecodedManifest | None) -> Resolved:
        if ref.store_id != self._store_id:
            raise WrongStore(
                f"is of store {ref.store_id!r}, not {self._store_id!r}", subject=str(ref)
            )
        resolved = found.resolve(ref) if found is not None else None
        if resolved is None:
            raise SegmentMissing("its session has no such Segment", subject=str(ref))
        return resolved

    def gone(self, incarnation: Incarnation) -> TqFsError | None:
        """Ask anew for a session of which a Step was not found; return why it is gone, if so."""
        ref = SegmentRef(self._store_id, incarnation, "lineage", 0)
        self._decoded.drop(incarnation)
        try:
            self._take(ref, self._calls.manifests([str(ref)])[0])
        except (MissingError, ConflictError) as error:
            return error
        except TqFsError:
            _log.warning("%s could not be asked for", incarnation, exc_info=True)
        return None

    def forget(self, refs: Iterable[str]) -> None:
        """Ask for the manifests of these references anew when they are resolved next."""
        for ref in refs:
            self._decoded.drop(SegmentRef.parse(ref).incarnation)

    def trajectory(self, ref: SegmentRef) -> ClosedSession:
        """Return the finalized session of a Segment with its resident fields."""
        self.forget([str(ref)])
        self.resolve([str(ref)])
        path = ref.incarnation.path
        subject = f"trajectory of {path}"
        try:
            document, _ = manifests.fetch(
                self._documents,
                f"manifests/{path}/{manifests.TRAJECTORY}",
                lambda data: decode_trajectory(data, subject),
            )
        except ObjectMissing as error:
            raise TrajectoryMissing(
                "its resident fields were not kept",
                subject=path,
                remedy="finalize with persist_trajectories on",
            ) from error
        return document.closed()

    def unreleased(
        self, consumer: str | None = None, partition: str | None = None, *, held: bool = False
    ) -> Iterator[str]:
        """Yield the references that a consumer, or any consumer, has still to release."""
        after, last = "", False
        while not last:
            refs, last = self._calls.unreleased(consumer, partition, after, held)
            yield from refs
            after = refs[-1] if refs else after

    def release(self, refs: Iterable[str], consumer: str, rollout_id: int | None = None) -> int:
        """Note that a consumer needs Segments no more; return how many Steps that deleted."""
        given = list(refs)
        count = self._patiently(lambda: self._calls.release(given, consumer, rollout_id))
        self.forget(given)
        return count

    def checkpoint_saved(self, rollout_id: int) -> int:
        """Release what was held for a rollout, or for an earlier one."""
        return self._calls.checkpoint_saved(rollout_id)

    # ------------------------------------------------------------ life

    def _beat(self) -> None:
        while True:
            try:
                self.renew()
            except Exception:  # a thread's edge: the next beat may get through
                _log.warning("no sign of life reached the Controller", exc_info=True)
            if self._ended.wait(self._every_s):
                return

    def renew(self) -> None:
        """Say that this process lives; all that it records, where the Controller does not know."""
        _, known = self._calls.renew(self._holder, self._consumers, None)
        if not known:
            with self._lock:
                paths = list(self._open)
            self._calls.renew(self._holder, self._consumers, paths)

    def close(self) -> None:
        """Say that this process needs nothing any more; idempotent.

        A Controller that does not answer is not waited for: it finds out by itself.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        leaving = threading.Thread(target=self._leave, name="tq-fs-leave", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_S)

    def _leave(self) -> None:
        self._thread.join()  # its last sign of life comes first
        try:
            self._calls.leave(self._holder)
        except TqFsError:
            _log.info("the Controller is gone: it will find out by itself", exc_info=True)
