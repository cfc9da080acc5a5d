"""The actors: a unit on its node, and the Controller, which starts them and looks after them."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tq_fs.channel import Identity
from tq_fs.cluster._node_unit import NodeUnit, UnitReport
from tq_fs.cluster._service import ClusterController
from tq_fs.cluster._settings import cluster_of
from tq_fs.config import StoreConfig
from tq_fs.errors import (
    FatalError,
    StorageUnreachable,
    StoreBusy,
    TqFsError,
    UnitLost,
    UnitsUnavailable,
)
from tq_fs.logs import configure_logs

NAMESPACE = "tq-fs"
_REPORT_S = 5.0
_CLOSE_S = 240.0  # for uploads that are still to be made
_PAUSE_S = 0.1
_AGAIN_S = 1.0
_RESTART_S = 10.0  # for units to report to a Controller that is there again
_UNIT_THREADS = 4
_CONTROLLER_THREADS = 64

_log = logging.getLogger(__name__)


def controller_name(store_id: str) -> str:
    """Return the name of a store's Controller among the actors."""
    return f"controller/{store_id}"


def _unit_prefix(store_id: str) -> str:
    return f"unit/{store_id}/"


class Spot(NamedTuple):
    """Where a unit belongs: a node that is there, and a folder on it."""

    node: str
    node_name: str
    folder: str

    def actor(self, store_id: str) -> str:
        """Return the name of its actor."""
        return f"{_unit_prefix(store_id)}{self.node_name}{self.folder}"


def log_as(config: StoreConfig) -> None:
    """Write this process's log lines as the settings say; it is an actor's own."""
    chosen = cluster_of(config).log_format
    if chosen:
        configure_logs(chosen)


class UnitActor:
    """A StorageUnit on its node. Opens its folder when it is first asked, and tries that again."""

    def __init__(self, folder: str, config: StoreConfig, identity: Identity | None) -> None:
        log_as(config)
        self._made_of = (folder, config, identity)
        self._lock = threading.Lock()
        self._unit: NodeUnit | None = None
        self._closed = False

    def report(self) -> UnitReport:
        """Return what the unit says of itself."""
        with self._lock:
            if self._unit is None and not self._closed:
                self._unit = self._open()
            if self._unit is None:
                raise UnitLost("was stopped", subject=self._made_of[0])
            return self._unit.report()

    def _open(self) -> NodeUnit:
        context = ray.get_runtime_context()
        node = _node(context.get_node_id())
        return NodeUnit(
            *self._made_of,
            node=node["NodeID"],
            node_name=node["NodeName"],
            address=node["NodeManagerAddress"],
        )

    def close(self) -> None:
        """End what is under way, and let go of the folder."""
        with self._lock:
            self._closed = True
            if self._unit is not None:
                self._unit.close()
                self._unit = None


def nodes() -> list[dict[str, Any]]:
    """Return what Ray says of the cluster's nodes."""
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return found


def _node(node_id: str) -> dict[str, Any]:
    """Return what Ray says of one node."""
    return next(node for node in nodes() if node["NodeID"] == node_id)


class RayFleet:
    """The units' actors: starts those that belong somewhere and are not there, and asks them all.

    Parameters
    ----------
    config, identity
        What units are made with.
    """

    def __init__(self, config: StoreConfig, identity: Identity | None) -> None:
        self._config = config
        self._identity = identity
        self._settings = cluster_of(config)
        self._handles: dict[str, Any] = {}
        self._gone: set[str] = set()
        self.started: list[Any] = []

    def spots(self) -> Iterator[Spot]:
        """Yield where units belong now."""
        for node in nodes():
            if not node["Alive"]:
                continue
            name = str(node["NodeName"])
            for folder in self._settings.folders(name, node["NodeID"], node["NodeManagerAddress"]):
                yield Spot(node["NodeID"], name, folder)

    def missing(self) -> list[str]:
        """Return the nodes that settings name and that are not there."""
        wanted = [] if isinstance(self._settings.nodes, str) else list(self._settings.nodes)
        there = {
            name
            for node in nodes()
            if node["Alive"]
            for name in (node["NodeName"], node["NodeID"], node["NodeManagerAddress"])
        }
        return [name for name in wanted if name not in there]

    def reports(self) -> Mapping[str, UnitReport | TqFsError]:
        """Ask all units; for each its report, or why there is none."""
        self._start()
        pending = {h.report.remote(): key for key, h in self._handles.items()}
        asked = list(pending)
        ready, _ = _wait(asked, _REPORT_S)
        found: dict[str, UnitReport | TqFsError] = {
            pending[ref]: StorageUnreachable("did not answer", subject=pending[ref])
            for ref in asked
        }
        for ref in ready:
            found[pending[ref]] = _report_of(ref, pending[ref])
        for key, report in found.items():
            if isinstance(report, UnitLost):
                del self._handles[key]
                self._gone.add(key)
        for key in self._gone - found.keys():
            found[key] = UnitLost("its actor is dead, and its node is gone", subject=key)
        return found

    def stop(self) -> list[TqFsError]:
        """End all units, and let go of their folders; return what was left undone."""
        closing = {handle.close.remote(): key for key, handle in self._handles.items()}
        ready, late = _wait(list(closing), _CLOSE_S)
        found = [_end_of(ref, closing[ref]) for ref in ready]
        found += [UnitsUnavailable("did not end in time", subject=closing[ref]) for ref in late]
        for handle in self._handles.values():
            ray.kill(handle)
        self._handles.clear()
        return [error for error in found if error is not None]

    def roll_back(self) -> None:
        """End the units that this object has started."""
        for handle in self.started:
            ray.kill(handle)
        self._handles.clear()

    def _start(self) -> None:
        store_id = self._config.store_id
        for spot in self.spots():
            name = spot.actor(store_id)
            if name in self._handles:
                continue
            try:
                self._handles[name] = ray.get_actor(name, NAMESPACE)
            except ValueError:
                self._handles[name] = self._create(name, spot)
                self.started.append(self._handles[name])
            self._gone.discard(name)

    def _create(self, name: str, spot: Spot) -> Any:
        actor = ray.remote(UnitActor).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=self._settings.cpus,
            max_concurrency=_UNIT_THREADS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(spot.node, soft=False),
        )
        return actor.remote(spot.folder, self._config, self._identity)


def _wait(asked: list[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
    """Return what is done within a time, and what is not."""
    if not asked:
        return [], []
    return ray.wait(asked, num_returns=len(asked), timeout=timeout_s)


def _end_of(ref: Any, key: str) -> TqFsError | None:
    try:
        ray.get(ref)
    except RayTaskError as error:
        return as_ours(error, key, _CLOSE_S)
    except RayError:
        _log.info("unit %s was gone already", key, exc_info=True)
    return None


def _report_of(ref: Any, key: str) -> UnitReport | TqFsError:
    try:
        report: UnitReport = ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, TqFsError):
            return error.cause
        raise
    except (ActorDiedError, ActorUnschedulableError) as error:
        return UnitLost(f"its actor is dead, or its node is: {error}", subject=key)
    except RayError as error:
        return StorageUnreachable(f"is being started anew: {error}", subject=key)
    return report


class ControllerActor:
    """A store's Controller. Begins by itself, also when Ray has started it anew."""

    def __init__(self, config: StoreConfig, identity: Identity | None) -> None:
        log_as(config)
        self._config = config
        self._identity = identity
        self._fleet = RayFleet(config, identity)
        self._begun = threading.Event()
        self._failed: Exception | None = None
        self._service: ClusterController | None = None
        again = _is_restarted()
        threading.Thread(target=self._begin, args=(again,), daemon=True).start()

    def _begin(self, again: bool) -> None:
        while not self._begun.is_set():
            try:
                here = _node(ray.get_runtime_context().get_node_id())
                self._await_units(again=again)
                self._service = ClusterController(
                    self._config,
                    self._identity,
                    self._fleet,
                    node=here["NodeID"],
                    address=here["NodeManagerAddress"],
                    replaced=_end_at_once,
                )
            except Exception as error:  # told to whoever calls
                _log.exception("the Controller of %r could not begin", self._config.store_id)
                if again and not isinstance(error, FatalError):  # nobody else would try
                    time.sleep(_AGAIN_S)
                    continue
                self._failed = error
                self._fleet.roll_back()
            self._begun.set()

    def _await_units(self, *, again: bool) -> None:
        """Return once all units report; or, to a Controller that is there again, most of them.

        Raises
        ------
        UnitsUnavailable
            Some do not, in time.
        StoreBusy, FatalError
            One cannot take its folder.
        """
        settings = cluster_of(self._config)
        if not settings.has_units:
            return
        until = time.monotonic() + (_RESTART_S if again else settings.start_s)
        while True:
            reports = self._fleet.reports()
            late = {k: r for k, r in reports.items() if not isinstance(r, UnitReport)}
            missing = self._fleet.missing()
            if reports and not late and not missing:
                return
            for error in late.values():
                if isinstance(error, FatalError | StoreBusy) and not again:
                    raise error
            if time.monotonic() > until:
                break
            time.sleep(_PAUSE_S)
        if again and len(late) < len(reports):
            _log.error("units that do not report: %s; nodes that are gone: %s", late, missing)
            return
        raise _not_there(late, missing, settings.start_s)

    def ready(self) -> tuple[StoreConfig, Identity | None]:
        """Return settings and certificate, once the Controller has begun."""
        self._begun.wait()
        if self._failed is not None:
            raise self._failed
        return self._config, self._identity

    def call(self, name: str, *arguments: Any) -> Any:
        """Do what a client asks of :class:`~tq_fs.cluster._service.ClusterController`."""
        self.ready()
        return getattr(self._service, name)(*arguments)

    def pid(self) -> int:
        """Return the Controller's process; for operators and tests."""
        return os.getpid()

    def stop(self) -> None:
        """End the Controller and all units."""
        self._begun.wait()
        if self._service is not None:
            self._service.close()
        left = self._fleet.stop()
        for error in left:
            _log.error("a unit has left something undone: %s", error)
        if left:
            raise left[0]


def _end_at_once() -> None:
    """Let Ray start this actor anew, if it is still the one that it knows."""
    os._exit(1)


def _is_restarted() -> bool:
    """Tell whether Ray has started this actor anew."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray 2.60 warns of what it calls itself
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _not_there(
    late: Mapping[str, TqFsError], missing: list[str], start_s: float
) -> UnitsUnavailable:
    said = [f"{key}: {error}" for key, error in sorted(late.items())]
    said += [f"no node is called {name!r}" for name in missing]
    return UnitsUnavailable(
        f"not all units started within {start_s:g} s: {'; '.join(said) or 'there is no node'}",
        subject="the store's cluster",
        remedy="see `ray status` for nodes and free CPUs; cluster.nodes and cluster.cpus say what "
        "is asked for",
    )


def as_ours(error: RayError, subject: str, timeout_s: float) -> TqFsError:
    """Return our error of a call that failed in Ray."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, TqFsError):
        return error.cause
    return UnitsUnavailable(
        f"{type(error).__name__} within {timeout_s:g} s: {error}",
        subject=subject,
        remedy="see `ray status`, and the Controller's log",
    )
