"""Controller: gives out incarnations, keeps the manifests, and deletes what nobody needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import msgspec

from tq_fs.backends import Backend
from tq_fs.controller._finish import draft_manifest, finish
from tq_fs.controller._leases import Leases
from tq_fs.controller._releases import Freed, Releases
from tq_fs.controller._removal import Removal
from tq_fs.controller._start import Start
from tq_fs.controller._tombstones import Tombstones
from tq_fs.errors import (
    ConflictError,
    CorruptError,
    FormatTooNew,
    InvalidSegment,
    ManifestCorrupt,
    MissingError,
    ReadOnlyStore,
    SessionClosed,
    TqFsError,
    TrajectoryMissing,
    UnitLost,
)
from tq_fs.keys import Incarnation, SegmentRef
from tq_fs.manifests import Catalog, Found, Resolved, SessionManifest
from tq_fs.recovery import Loaded, Recovery, Sweep
from tq_fs.storage_unit import Inventory, Located, Units
from tq_fs.trajectory import ClosedSession, TrajectoryDocument, decode_trajectory

_log = logging.getLogger(__name__)


def _no_fence() -> None:
    """Raise nothing: a store on a local disk is locked."""


def _at_nothing(point: str) -> None:
    """Do nothing: the default for `at`."""


def _at_home(partition: str, session_id: str) -> str:  # noqa: ARG001
    """Return that manifests lie where the store does."""
    return ""


class Controller:
    """The catalog's owner. Never on the hot path of a Step write. Safe to call from many threads.

    Parameters
    ----------
    catalog
        The store's manifests; stays the caller's.
    units
        The StorageUnits that hold the Steps; None for a store opened read-only.
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
    home
        The unit that keeps the manifest of a session that begins.
    leases
        Who records which session. None: this process alone does.
    tombstones
        Where deletions are written down. None: a start sweeps what one has left.
    at
        Called with the name of each point of a finalize, release or deletion as it is passed; for
        tests that kill the process there.
    """

    POINTS = (
        "manifest written",
        "release written",
        "tombstone written",
        "manifest dropped",
        "steps deleted",
        "tombstone removed",
    )

    def __init__(
        self,
        catalog: Catalog,
        units: Units | None,
        *,
        epoch: int,
        now_ns: Callable[[], int],
        persist: bool = False,
        fence: Callable[[], None] = _no_fence,
        pool: Executor | None = None,
        home: Callable[[str, str], str] = _at_home,
        leases: Leases | None = None,
        tombstones: Tombstones | None = None,
        at: Callable[[str], None] = _at_nothing,
    ) -> None:
        self._at = at
        self._persist = persist
        self._fence = fence
        self._catalog = catalog
        self._units = units
        self._epoch = epoch
        self._now_ns = now_ns
        self._home = home
        self._leases = leases
        self._removal: Removal | None = None
        if units is not None:
            self._removal = Removal(catalog, units, tombstones, at=at)
        self._releases = Releases(catalog, lambda m: self._removing().bury(m), epoch=epoch)
        self._start = Start(catalog, self._releases, keep=units is not None, pool=pool)
        self._saved: int | None = None  # of the last checkpoint, for units that are away

    # ------------------------------------------------------------ sessions

    def open_session(self, partition: str, session_id: str, holder: str = "") -> Incarnation:
        """Begin a new incarnation of a session id.

        Parameters
        ----------
        holder
            Who records it, where leases say for how long.
        """
        home = self._home(partition, session_id)
        incarnation = Incarnation.new(partition, session_id, self._now_ns(), home)
        path = incarnation.path  # refuses ids that cannot be stored
        if self._leases is not None:
            self._leases.open(path, holder)
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
        units = self._writable()

        def keep(trajectory: bytes) -> None:
            self._fence()
            self._catalog.put_trajectory(session.incarnation, trajectory)

        manifest, unneeded = finish(
            session,
            self._catalog.store_id,
            units,
            keep=keep if self._persist else None,
            publish=self.publish,
        )
        self._removing().clear(unneeded)
        return manifest

    def publish(self, draft: SessionManifest) -> SessionManifest:
        """Write the manifest of a session whose Steps lie where they belong, or leave none behind.

        Where none is left the session can be finalized again.

        Raises
        ------
        SessionClosed
            Its lease ran out, and its Steps were swept.
        InvalidSegment
            A Segment could not be read; nothing was written.
        """
        self._writable()
        incarnation = draft.incarnation
        if self._is_published(draft):
            return draft
        self._check_still_there(draft)
        manifest = msgspec.structs.replace(draft, epoch=self._epoch, created_ns=self._now_ns())
        self._fence()
        try:
            self._catalog.publish(manifest)
        except BaseException:
            self._removing().tidy(incarnation.path, partial(self._catalog.drop, incarnation))
            raise
        self._at("manifest written")
        self._fence()  # once more: who took the store in between may have swept the Steps
        self._releases.begin(manifest)
        if self._leases is not None:
            self._leases.close(incarnation.path)
        return manifest

    def _is_published(self, draft: SessionManifest) -> bool:
        """Tell whether that was done before: the acknowledgement was lost with a Controller."""
        if self._releases.of(draft.incarnation) is None:
            return False
        found = self._catalog.manifest(draft.incarnation)
        return found is not None and found.segments == draft.segments

    def _check_still_there(self, draft: SessionManifest) -> None:
        """Refuse a session that was not held all the time, once its Steps were swept."""
        incarnation = draft.incarnation
        if self._leases is None:
            return
        if not self._leases.pin(incarnation.path):
            raise SessionClosed(
                "its lease ran out, and it is being swept",
                subject=str(incarnation),
                remedy="record it again; raise lease_s where processes pause for longer",
            )
        if self._leases.is_unbroken(incarnation.path):
            return
        units = self._writable()
        for unit in {s.unit for s in draft.steps}:
            there = units.steps(incarnation, unit)
            gone = sorted(s.index for s in draft.steps if s.unit == unit and s.index not in there)
            if gone:
                raise SessionClosed(
                    f"its lease ran out, and Steps {gone[:5]} were swept",
                    subject=str(incarnation),
                    remedy="record it again; raise lease_s where processes pause for longer",
                )

    def discard(self, incarnation: Incarnation) -> None:
        """Delete all that an open session has written; idempotent.

        A manifest, too: of a finalize that was done, and whose acknowledgement was lost.
        """
        self._fence()
        units = self._writable()
        if self._leases is not None:
            self._releases.forget(incarnation)
            with suppress(UnitLost):
                self._catalog.drop(incarnation)
        for unit in units.may_hold(incarnation):
            with suppress(UnitLost):
                units.clear(Located(unit, f"steps/{incarnation.path}"))
        if self._leases is not None:
            self._leases.close(incarnation.path)

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

    def manifests(self, refs: Iterable[str]) -> list[bytes | TqFsError]:
        """Return the manifest of each reference's session, or why there is none.

        For processes that resolve by themselves: a batch is one call, and nothing is decoded here.
        """
        return [self._packed(ref) for ref in refs]

    def _packed(self, ref: str) -> bytes | TqFsError:
        try:
            parsed = SegmentRef.parse(ref)
            if self._removing().is_dying(parsed.incarnation):
                return self._catalog.absent(parsed)
            return self._catalog.packed(parsed)
        except TqFsError as error:
            return error

    def resolve(self, refs: Iterable[str]) -> list[Resolved]:
        """Return what references stand for, in their order.

        Raises
        ------
        InvalidKey, WrongStore, StaleReference, SegmentMissing
        """
        return [self._catalog.resolve(SegmentRef.parse(ref)) for ref in refs]

    def unreleased(
        self, consumer: str | None = None, partition: str | None = None, *, held: bool = False
    ) -> Iterator[str]:
        """Yield the references that a consumer, or any consumer, has still to release.

        With `held`, those too whose release waits for a checkpoint.
        """
        return self._releases.pending(consumer, partition, held=held)

    def some_unreleased(
        self,
        consumer: str | None,
        partition: str | None,
        after: str,
        limit: int,
        *,
        held: bool = False,
    ) -> tuple[list[str], bool]:
        """Return references as :meth:`unreleased` does, in parts, and whether they were the last.

        Parameters
        ----------
        after
            The last reference of the part before; empty for the first part.
        limit
            References at most, but all of a session's that begins within.
        """
        last = SegmentRef.parse(after).incarnation if after else None
        return self._releases.some_pending(consumer, partition, last, limit, held=held)

    def count(self) -> int:
        """Return how many sessions there are of which something is needed."""
        return len(self._releases.known())

    # ------------------------------------------------------------ release

    def release(self, refs: Iterable[str], consumer: str, rollout_id: int | None = None) -> int:
        """Note that a consumer needs these Segments no more.

        Idempotent: Segments that are gone already count as released. Steps that no unreleased
        Segment refers to are deleted. Comes after the barrier of all ranks that read them.

        Parameters
        ----------
        rollout_id
            Hold the release back until :meth:`checkpoint_saved` names this rollout or a later one.

        Returns
        -------
        int
            Steps deleted.

        Raises
        ------
        InvalidConfig
            The consumer was not declared at finalize.
        WrongStore, SegmentMissing
        StorageUnreachable
            A session is on a unit that has not been seen since the Controller started.
        """
        by_session: dict[Incarnation, set[SegmentRef]] = {}
        for ref in map(SegmentRef.parse, refs):
            self._catalog.check_store(ref)
            by_session.setdefault(ref.incarnation, set()).add(ref)
        self._writable()
        self._fence()
        for incarnation, mine in by_session.items():
            self._check_usable(incarnation)
            self._look_for(incarnation)
            self._releases.check(incarnation, mine, consumer)
        self._removing().try_again()
        names = {
            incarnation: frozenset(f"{r.view}/{r.index}" for r in mine)
            for incarnation, mine in by_session.items()
        }
        if rollout_id is not None:
            for incarnation, held in names.items():
                self._releases.hold(incarnation, held, consumer, rollout_id)
            return 0
        return sum(
            self._removing().delete(i, self._releases.release(i, done, consumer))
            for i, done in names.items()
        )

    def checkpoint_saved(self, rollout_id: int) -> int:
        """Release what was held for a rollout, or for an earlier one; return how many Steps go.

        Idempotent. The model checkpoint that used them is on disk: a run that resumes from it
        needs them no more.
        """
        self._writable()
        self._fence()
        self._saved = rollout_id if self._saved is None else max(self._saved, rollout_id)
        return sum(
            self._removing().delete(i, freed) for i, freed in self._releases.saved(rollout_id)
        )

    def _delete(self, freed: Iterable[tuple[Incarnation, Freed]]) -> int:
        removal = self._removing()
        return sum(removal.delete(incarnation, one) for incarnation, one in freed)

    def expire(self, retention_s: float) -> int:
        """Release, for everybody, sessions that are older than that; return how many.

        What a live consumer has still to release is left alone, however old it is; everything is,
        until all who are alive had time to say so.
        """
        self._fence()
        if self._leases is not None and not self._leases.is_heard():
            return 0
        before = self._now_ns() - int(retention_s * 1e9)
        count = 0
        for incarnation in self._releases.known():
            if incarnation.opened_ns >= before or self._is_awaited(incarnation):
                continue
            _log.warning("%s is older than the retention time, and is deleted", incarnation)
            self._removing().delete(incarnation, self._releases.release_all(incarnation))
            count += 1
        return count

    def _is_awaited(self, incarnation: Incarnation) -> bool:
        """Tell whether a live consumer has still to release something of a session."""
        released = self._releases.of(incarnation)
        return (
            self._leases is not None
            and released is not None
            and any(self._leases.is_live(consumer) for consumer in released)
        )

    def _check_usable(self, incarnation: Incarnation) -> None:
        if self._releases.of(incarnation) is None and incarnation.path in self._start.unreadable:
            self._catalog.read(incarnation.path)  # says what is wrong with it
            raise ManifestCorrupt(
                "could not be used when the store was opened",
                subject=str(incarnation),
                remedy="it can now: open the store again",
            )

    def _look_for(self, incarnation: Incarnation) -> None:
        """Take in a session that is not known: of a unit that was away, or finalized elsewhere.

        One that is gone, or lost with its unit, counts as released.
        """
        if self._leases is None or self._releases.of(incarnation) is not None:
            return
        if self._removing().is_dying(incarnation):
            return
        path = incarnation.path
        try:
            found = self._catalog.read(path)
        except UnitLost:
            _log.warning("%s is lost, and counts as released", incarnation, exc_info=True)
            return
        if found is not None:
            loaded = Loaded(self._start.wanted())
            self._start.take(path, found, loaded)
            self._tidy_all(loaded)

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
        units = self._writable()
        loaded = self._start.load(trust=not rebuild)
        sweep = Sweep(loaded.wanted)
        rebuilt = []
        for held in units.inventory():
            if rebuild and held.path in self._start.unreadable and self._rebuild(held, loaded):
                rebuilt.append(held.path)
            self._start.look_again(held.path, loaded)
            self._removing().clear(sweep.strays(held))
        self._tidy_all(loaded)
        if not rebuild:
            self._catalog.flush(self._epoch)
        return replace(
            self._swept(loaded.summary(), sweep),
            rebuilt=tuple(rebuilt),
        )

    def rebuild(self) -> tuple[str, ...]:
        """Make manifests that cannot be used anew, as :meth:`recover` does, and remove nothing.

        Returns
        -------
        tuple of str
            Paths of their incarnations.
        """
        units = self._writable()
        loaded = self._start.load(trust=False)
        rebuilt = []
        for held in units.inventory() if self._start.unreadable else ():
            if held.path in self._start.unreadable:
                self._fence()
                if self._rebuild(held, loaded):
                    rebuilt.append(held.path)
        return tuple(rebuilt)

    def take_over(self) -> Recovery:
        """Read the manifests and finish deletions that were begun, while sessions go on.

        Call once, before anything else, where there are leases. Orphans are :meth:`sweep`'s.
        """
        self._removing().resume()
        loaded = self._start.load()
        self._tidy_all(loaded, keep=self._is_spared)
        self._catalog.flush(self._epoch)
        return replace(loaded.summary(), unreadable=tuple(self._start.unreadable))

    def learn(self, documents: Backend) -> Recovery:
        """Take in the manifests of a unit that has joined, or is there again.

        Parameters
        ----------
        documents
            What lies on it.
        """
        self._removing().resume()
        loaded = self._start.load(within=documents)
        self._tidy_all(loaded, keep=self._is_spared)
        if self._saved is not None:
            self.checkpoint_saved(self._saved)
        return self._summary(loaded)

    def sweep(self, pause: Callable[[], None] = lambda: None) -> Recovery:
        """Remove what is orphaned, while sessions go on: never what may still be recorded.

        Parameters
        ----------
        pause
            Called between incarnations, so that a long sweep takes nobody's processor.
        """
        assert self._leases is not None, "a store without leases is swept at its start"
        units = self._writable()
        self._leases.expire()
        self._removing().try_again()
        loaded = Loaded(self._start.wanted())
        sweep = Sweep(loaded.wanted)
        for held in units.inventory():
            if held.path in loaded.wanted:
                self._removing().sweep(sweep.strays(held))
            elif not self._is_spared(held.path) and self._leases.condemn(held.path):
                # From here on nobody can finalize it, and who did before has left a manifest.
                try:
                    self._sweep_orphan(held, loaded, sweep)
                finally:
                    self._leases.swept(held.path)
            pause()
        return self._swept(Recovery(), sweep)

    def _sweep_orphan(self, held: Inventory, loaded: Loaded, sweep: Sweep) -> None:
        """Remove what lies of a session that nobody records, unless it was finalized."""
        self._start.look_again(held.path, loaded)
        self._fence()
        if held.path not in loaded.wanted:
            try:
                self._catalog.clear(held.path)  # first: without Steps nobody would find the rest
            except TqFsError:
                _log.warning("what is left of %s is swept later", held.path, exc_info=True)
                return
        self._removing().sweep(sweep.strays(held))

    def _is_spared(self, path: str) -> bool:
        """Tell whether an incarnation without a manifest has to be left alone."""
        leases = self._leases
        if leases is None:
            return False
        incarnation = Incarnation("", "", path.rpartition("/")[2])  # an id of ours is never hashed
        young = int((leases.lease_s + leases.grace_s) * 1e9) > (
            self._now_ns() - incarnation.opened_ns
        )
        return (
            young
            or leases.is_open(path)
            or not leases.is_complete()
            or not self._is_home_there(incarnation)
        )

    def _is_home_there(self, incarnation: Incarnation) -> bool:
        """Tell whether the unit that would have its manifest can be asked."""
        return not incarnation.home or incarnation.home in self._writable().may_hold(incarnation)

    def load(self) -> Recovery:
        """Read the manifests without changing anything: for a store opened read-only."""
        return self._summary(self._start.load())

    def survey(self) -> Recovery:
        """Tell what :meth:`recover` would find and remove, without changing anything."""
        loaded = self._start.load(trust=False)
        sweep = Sweep(loaded.wanted)
        for held in self._writable().inventory():
            self._start.look_again(held.path, loaded)
            sweep.strays(held)
        return self._swept(loaded.summary(), sweep)

    def close(self) -> None:
        """Leave behind what makes the next start quick; nothing that it needs."""
        if self._units is not None:
            self._catalog.flush(self._epoch)

    def _tidy_all(self, loaded: Loaded, keep: Callable[[str], bool] = lambda _: False) -> None:
        """Remove what sessions that are over, or were never finalized, left in the catalog."""
        for path in loaded.abandoned:
            if not keep(path):
                self._removing().tidy(path, partial(self._catalog.clear, path))
        for incarnation in loaded.ended.values():
            self._removing().tidy(incarnation.path, partial(self._catalog.drop, incarnation))

    def _summary(self, loaded: Loaded) -> Recovery:
        return replace(loaded.summary(), unreadable=tuple(self._start.unreadable))

    def _swept(self, summary: Recovery, sweep: Sweep) -> Recovery:
        return replace(
            summary,
            unreadable=tuple(self._start.unreadable),
            swept_sessions=sweep.sessions,
            swept_steps=sweep.steps,
            incomplete=sweep.incomplete(),
        )

    def _rebuild(self, held: Inventory, loaded: Loaded) -> bool:
        """Make a damaged manifest anew; False where what is left does not say how."""
        units = self._writable()
        try:
            document = self._document(held.path)
            state = self._catalog.state(held.path)
            if not self._is_damaged(document.incarnation):
                return False
            closed = document.closed(units.entries(held))
            manifest = msgspec.structs.replace(
                draft_manifest(closed, self._catalog.store_id),
                epoch=self._epoch,
                created_ns=self._now_ns(),
            )
            self._catalog.publish(manifest)  # replaces it, or changes nothing
        except (CorruptError, ConflictError, InvalidSegment, MissingError):
            _log.exception("manifest of %s cannot be made anew", held.path)
            return False
        self._start.unreadable.remove(held.path)
        loaded.wanted.discard(held.path)
        self._start.take(held.path, Found(manifest, state), loaded)
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

    def _removing(self) -> Removal:
        self._writable()
        assert self._removal is not None  # as there are units
        return self._removal

    def _writable(self) -> Units:
        if self._units is None:
            raise ReadOnlyStore(
                "is open for reading only", subject=f"store {self._catalog.store_id!r}"
            )
        return self._units
