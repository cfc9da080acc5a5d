"""The Controller's process in a cluster: its catalog, its units, and what it does by itself.

Knows no Ray: who has units tells it how they are asked.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any, Protocol

from tq_fs import manifests
from tq_fs.backends import Backend, ObjectBackend
from tq_fs.channel import Identity
from tq_fs.claim import take_claim
from tq_fs.cluster._exports import export
from tq_fs.cluster._node_unit import UnitReport
from tq_fs.cluster._roster import Roster
from tq_fs.cluster._settings import cluster_of
from tq_fs.config import StoreConfig
from tq_fs.controller import Controller, Leases, Tombstones
from tq_fs.embedded import encode_options
from tq_fs.errors import SessionClosed, StoreFenced, TqFsError, UnitsUnavailable
from tq_fs.keys import Incarnation
from tq_fs.manifests import Catalog, SessionManifest
from tq_fs.metrics import Metrics, Sample
from tq_fs.placement import rank
from tq_fs.places import open_objects
from tq_fs.recovery import Recovery
from tq_fs.units import Access, Directory, HomeDocuments, Layout, RemoteUnits

_TRIES = 8  # to be the one with the highest epoch
_EVERY_S = 1.0  # between two rounds of reports
_PATIENCE_S = 1.0  # for a unit that does not answer; who asks may be more patient
_PAGE = 10_000  # references at a time
_LOAD_THREADS = 8
_SHARE = 0.25  # of one processor, for sweeps
_log = logging.getLogger(__name__)


class Fleet(Protocol):
    """How the Controller reaches the units' processes."""

    def reports(self) -> Mapping[str, UnitReport | TqFsError]:
        """Ask all units; for each its report, or why there is none: UnitLost where it is gone."""


def _nothing() -> None:
    """Do nothing: the default for `replaced`."""


class ClusterController:
    """A store's Controller among the units of a cluster. Safe to call from many threads.

    Parameters
    ----------
    config
        The store's settings.
    identity
        The store's certificate; None where the network is private.
    fleet
        Its units.
    node, address
        The node it runs on: its id, and the address that others reach it at.
    replaced
        Called once a unit obeys another Controller: this one has to end. Where it is the last one,
        after all, that unit was away when it began, and the next start takes a higher epoch.
    now_ns, clock
        Its clock, and monotonic seconds.

    Attributes
    ----------
    epoch
        Higher than that of every Controller before it.
    recovery
        What it found when it started.
    """

    def __init__(
        self,
        config: StoreConfig,
        identity: Identity | None,
        fleet: Fleet,
        *,
        node: str,
        address: str = "127.0.0.1",
        replaced: Callable[[], None] = _nothing,
        now_ns: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.identity = identity
        self._fleet = fleet
        self._replaced = replaced
        self._clock = clock
        self._roster = Roster()
        self._ended = threading.Event()
        self._observing = threading.Lock()
        self._learned: set[str] = set()
        self._settings = cluster_of(config)
        self.holder = os.urandom(8).hex()
        with ExitStack() as opened:
            self._roster.observe(fleet.reports())
            objects = open_objects(config, opened=opened, read_only=False)
            self._directory = Directory(self.layout, node=node, clock=clock, fresh_s=0.0)
            self.epoch, fence, self._units = self._take_over(objects, opened)
            documents: Backend = objects if objects is not None else HomeDocuments(self._units)
            pool = opened.enter_context(ThreadPoolExecutor(_LOAD_THREADS, "tq-fs-load"))
            self.leases = Leases(
                lease_s=self._settings.lease_s, grace_s=self._settings.grace_s, clock=clock
            )
            self.controller = Controller(
                Catalog(documents, config.store_id, cache_bytes=config.manifest_cache_bytes),
                self._units,
                epoch=self.epoch,
                now_ns=now_ns,
                fence=fence,
                pool=pool,
                home=self._home,
                leases=self.leases,
                tombstones=Tombstones(documents, epoch=self.epoch),
            )
            self._learned.update(self._directory.live())
            self.recovery = self.controller.take_over()
            opened.callback(self._flush)
            metrics = Metrics(config.store_id, role="controller")
            opened.callback(metrics.watch(self.samples))
            self.metrics_url = export(metrics, self._settings, address, opened)
            for work in (self._watch, self._tend):
                thread = threading.Thread(target=work, name="tq-fs-controller", daemon=True)
                thread.start()
                opened.callback(thread.join)
            opened.callback(self._ended.set)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """End its threads and let go of everything; idempotent."""
        self._opened.close()

    def _flush(self) -> None:
        with suppress(TqFsError):  # it only makes the next start quick
            self.controller.close()

    # ------------------------------------------------------------ epoch

    def _take_over(
        self, objects: ObjectBackend | None, opened: ExitStack
    ) -> tuple[int, Callable[[], None], RemoteUnits]:
        """Become the one that all units obey, with an epoch above those they have seen."""
        if objects is not None:
            claim = take_claim(objects)
            units = self._reach(claim.epoch, objects, opened)
            self._announce(units)
            return claim.epoch, claim.check, units
        for _ in range(_TRIES):
            reports = self._roster.reports().values()
            units = self._reach(max((r.epoch for r in reports), default=0) + 1, None, opened)
            try:
                self._announce(units)
            except StoreFenced:
                _log.warning("another Controller starts too", exc_info=True)
                self._roster.observe(self._fleet.reports())
                continue
            return units.epoch, lambda: None, units
        raise UnitsUnavailable(
            f"others took it over {_TRIES} times in a row",
            subject=f"store {self.config.store_id!r}",
            remedy="let one Controller start",
        )

    def _reach(self, epoch: int, objects: ObjectBackend | None, opened: ExitStack) -> RemoteUnits:
        access = Access(
            store_id=self.config.store_id,
            identity=self.identity,
            retry_deadline_s=min(self.config.retry_deadline_s, _PATIENCE_S),
            timeout_s=self.config.request_timeout_s,
            epoch=epoch,
            holder=self.holder,
        )
        options = encode_options(self.config, remote=objects is not None)
        units = RemoteUnits(self._directory, access, options, objects=objects)
        opened.callback(units.close)
        return units

    def _announce(self, units: RemoteUnits) -> None:
        for name in self._directory.live():
            try:
                units.backend(name).list("manifests")
            except StoreFenced:
                raise
            except TqFsError:
                _log.warning("unit %s does not know yet who controls it", name, exc_info=True)

    # ------------------------------------------------------------ units

    def layout(self) -> Layout:
        """Return the units as they are known now."""
        return self._roster.layout(getattr(self, "epoch", 0))

    def look(self) -> Layout:
        """Ask all units now, and return what came of it."""
        self._observe()
        return self.layout()

    def drain(self, name: str, on: bool = True) -> None:
        """Give a unit no new sessions, or give it some again."""
        self._roster.drain(name, on=on)

    def _home(self, partition: str, session_id: str) -> str:
        """Return the unit on which a session is recorded; empty without units."""
        if not self._settings.has_units:
            return ""
        order = rank(f"{partition}\0{session_id}", self._roster.weights())
        if not order:
            raise UnitsUnavailable(
                "no unit takes a new session: they are full, draining or gone",
                subject=f"session {session_id!r}",
                remedy="release trained Segments, or add units",
            )
        return order[0]

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            try:
                self._observe()
            except Exception:  # a thread's edge: the next round may do better
                _log.exception("the units could not be looked at")

    def _observe(self) -> None:
        with self._observing:
            change = self._roster.observe(self._fleet.reports())
            for name in change.went:
                _log.error("unit %s cannot be asked any more", name)
            for name in change.came:
                _log.info("unit %s is there", name)
            self._check_obeyed()
            for name in self._directory.live():
                if name not in self._learned:
                    self._learn(name)

    def _check_obeyed(self) -> None:
        for name, report in self._roster.reports().items():
            if report.epoch > self.epoch:
                _log.error(
                    "unit %s obeys a Controller of epoch %d, this is %d",
                    name,
                    report.epoch,
                    self.epoch,
                )
                self._replaced()

    def _learn(self, name: str) -> None:
        """Take in the manifests of a unit that was not there when the Controller started.

        Where that fails it is tried again: what is not known cannot be released.
        """
        if self._units.objects is None:
            try:
                self.controller.learn(self._units.backend(name))
            except StoreFenced:
                _log.exception("unit %s obeys another Controller", name)
                self._replaced()
                return
            except TqFsError:
                _log.warning("what unit %s holds is learnt later", name, exc_info=True)
                return
        self._learned.add(name)

    # ------------------------------------------------------------ what is done by itself

    def _tend(self) -> None:
        """Sweep, and delete what is too old."""
        every_s = self._settings.sweep_s
        while every_s and not self._ended.wait(every_s):
            try:
                self.sweep()
            except Exception:  # a thread's edge: the next round may do better
                _log.exception("the sweep was broken off")

    def sweep(self) -> Recovery:
        """Remove what nobody refers to, and what is older than the retention time."""
        if self._settings.retention_s is not None:
            self.controller.expire(self._settings.retention_s)
        last = self._clock()

        def pause() -> None:
            nonlocal last
            if self._ended.wait((self._clock() - last) * (1 / _SHARE - 1)):
                raise SessionClosed("the Controller ends", subject="a sweep")
            last = self._clock()

        return self.controller.sweep(pause)

    # ------------------------------------------------------------ calls of clients

    def open_session(self, partition: str, session_id: str, holder: str) -> str:
        """Begin a new incarnation of a session id; return its id."""
        return self.controller.open_session(partition, session_id, holder).incarnation_id

    def publish(self, draft: bytes) -> bytes:
        """Write the manifest that a session's recorder has drafted; both as documents."""
        manifest = manifests.decode(draft, SessionManifest, "a session that is finalized")
        return manifests.encode(self.controller.publish(manifest))

    def discard(self, partition: str, session_id: str, incarnation_id: str) -> None:
        """Delete all that an open session has written; idempotent."""
        self.controller.discard(Incarnation(partition, session_id, incarnation_id))

    def manifests(self, refs: Sequence[str]) -> list[bytes | TqFsError]:
        """Return the manifest of each reference's session, or why there is none."""
        return self.controller.manifests(refs)

    def release(self, refs: Sequence[str], consumer: str, rollout_id: int | None) -> int:
        """Note that a consumer needs Segments no more; return how many Steps that deleted."""
        return self.controller.release(refs, consumer, rollout_id)

    def checkpoint_saved(self, rollout_id: int) -> int:
        """Release what was held for a rollout, or for an earlier one."""
        return self.controller.checkpoint_saved(rollout_id)

    def unreleased(
        self, consumer: str | None, partition: str | None, after: str, held: bool
    ) -> tuple[list[str], bool]:
        """Return some of the references that are still to be released, and whether that is all.

        Parameters
        ----------
        after
            The last reference of the call before; empty for the first.
        held
            Also those whose release waits for a checkpoint.
        """
        return self.controller.some_unreleased(consumer, partition, after, _PAGE, held=held)

    def renew(
        self, holder: str, consumers: Sequence[str], paths: Sequence[str] | None
    ) -> tuple[int, bool]:
        """Hear that a process is alive; return the epoch, and whether it was known."""
        return self.epoch, self.leases.renew(holder, consumers=consumers, paths=paths)

    def leave(self, holder: str) -> None:
        """Hear that a process has ended."""
        self.leases.leave(holder)

    def samples(self) -> Iterator[Sample]:
        """Yield what :meth:`tq_fs.metrics.Metrics.watch` wants to know."""
        holders, sessions = self.leases.counts()
        yield Sample("tqfs_processes", holders)
        yield Sample("tqfs_open_sessions", sessions)
        yield Sample("tqfs_finalized_sessions", self.controller.count())
        states = Counter(unit.state for unit in self.layout().units)
        for state in ("live", "draining", "restarting", "lost"):
            yield Sample("tqfs_units", states[state], {"state": state})

    def status(self) -> dict[str, Any]:
        """Return what an operator wants to see."""
        holders, sessions = self.leases.counts()
        reports = self._roster.reports()
        units = [
            {**asdict(unit), **_figures(reports.get(unit.name))} for unit in self.layout().units
        ]
        return {
            "store_id": self.config.store_id,
            "epoch": self.epoch,
            "pid": os.getpid(),
            "url": self.config.url,
            "metrics_url": self.metrics_url,
            "processes": holders,
            "open_sessions": sessions,
            "finalized_sessions": self.controller.count(),
            "units": units,
        }


def _figures(report: UnitReport | None) -> dict[str, Any]:
    if report is None:
        return {}
    return {
        "total_bytes": report.total_bytes,
        "held_bytes": report.held_bytes,
        "lanes": report.lanes,
        "pid": report.pid,
        "counts": report.counts,
        "metrics_url": report.metrics_url,
    }
