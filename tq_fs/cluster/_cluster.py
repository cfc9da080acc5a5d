"""Start a store on a Ray cluster, or attach to one: from any process that Ray knows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tq_fs.cache import ChunkCache
from tq_fs.channel import Identity
from tq_fs.cluster._actors import _CONTROLLER_THREADS as THREADS
from tq_fs.cluster._actors import NAMESPACE, ControllerActor, as_ours, controller_name
from tq_fs.cluster._client import Calls, open_attached, reach_units
from tq_fs.cluster._settings import cluster_of, settings_of
from tq_fs.config import StoreConfig
from tq_fs.embedded import Parts
from tq_fs.errors import InvalidConfig, UnitsUnavailable
from tq_fs.fields import FieldSpec, select
from tq_fs.metrics import Metrics
from tq_fs.recovery import Recovery
from tq_fs.store import Store
from tq_fs.units import Layout, RemoteUnits, UnitReaders

_MARGIN_S = 30.0  # for Ray to start a process
_CALL_S = 300.0


def start(config: StoreConfig | str | Path) -> StoreCluster:
    """Start a store's Controller and units on the Ray cluster, or attach where they run.

    Parameters
    ----------
    config
        Settings, or the YAML file that holds them; see :class:`tq_fs.ClusterConfig`.

    Returns
    -------
    StoreCluster
        A context manager that stops what this call has started.

    Raises
    ------
    InvalidConfig
        The settings make no sense, or the store runs with other ones.
    UnitsUnavailable
        Units could not be started in time; those that were are stopped again.
    StoreBusy, WrongStore
        A folder is taken, or holds something else.
    """
    settings = settings_of(config)
    _join()
    running = _find(settings.store_id)
    if running is not None:
        found = StoreCluster(running, settings.store_id)
        _check_same(found.config, settings)
        return found
    cluster = cluster_of(settings)
    identity = Identity.new(settings.store_id) if cluster.encryption == "tls" else None
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor = ray.remote(ControllerActor).options(
        name=controller_name(settings.store_id),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=-1,
        num_cpus=cluster.cpus,
        max_concurrency=THREADS,
        scheduling_strategy=here,
    )
    handle: Any = actor.remote(settings, identity)
    try:
        return StoreCluster(handle, settings.store_id, timeout_s=cluster.start_s, started=True)
    except BaseException:
        ray.kill(handle)
        raise


def attach(store_id: str, *, timeout_s: float = 60.0) -> StoreCluster:
    """Find a store that runs on the Ray cluster; from a driver, an actor, a task or a process.

    Raises
    ------
    UnitsUnavailable
        It does not run, or does not answer in time.
    """
    _join()
    handle = _find(store_id)
    if handle is None:
        raise UnitsUnavailable(
            "no Controller of it runs on this Ray cluster",
            subject=f"store {store_id!r}",
            remedy="start it: tq_fs.cluster.start(config)",
        )
    return StoreCluster(handle, store_id, timeout_s=timeout_s)


def _join() -> None:
    """Join the cluster of this machine, unless this process belongs to one."""
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", namespace=NAMESPACE, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise UnitsUnavailable(
            f"no Ray cluster was found: {error}",
            subject="this process",
            remedy="call ray.init, or start one on this machine: ray start --head",
        ) from error


def _find(store_id: str) -> Any:
    try:
        return ray.get_actor(controller_name(store_id), NAMESPACE)
    except ValueError:
        return None


def _check_same(running: StoreConfig, wanted: StoreConfig) -> None:
    other = [
        field.name
        for field in fields_of(StoreConfig)
        if getattr(running, field.name) != getattr(wanted, field.name)
    ]
    if other:
        raise InvalidConfig(
            f"runs with other settings of {other}",
            subject=f"store {wanted.store_id!r}",
            remedy="attach to it as it is, or stop it first",
        )


class _RayCalls:
    """Makes a client's calls of a Controller's actor."""

    def __init__(self, handle: Any, store_id: str) -> None:
        self._handle = handle
        self._subject = f"the Controller of store {store_id!r}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return ray.get(self._handle.call.remote(name, *arguments), timeout=_CALL_S)
        except RayError as error:
            raise as_ours(error, self._subject, _CALL_S) from None


class StoreCluster:
    """A store that runs on a Ray cluster.

    Attributes
    ----------
    config
        Its settings.
    """

    def __init__(
        self, handle: Any, store_id: str, *, timeout_s: float = 60.0, started: bool = False
    ) -> None:
        self._handle = handle
        self._started = started
        limit_s = timeout_s + _MARGIN_S
        try:
            found = ray.get(handle.ready.remote(), timeout=limit_s)
        except RayError as error:
            raise as_ours(error, f"the Controller of store {store_id!r}", limit_s) from None
        self.config: StoreConfig = found[0]
        self._identity: Identity | None = found[1]
        self._calls = cast("Calls", _RayCalls(handle, store_id))

    def store(
        self,
        fields: Sequence[FieldSpec],
        *,
        consumers: Sequence[str] = (),
        metrics: Metrics | None = None,
        **settings: Any,
    ) -> Store:
        """Open the store in this process.

        Parameters
        ----------
        fields
            Declared per-token fields.
        consumers
            In whose name this process reads, such as ``("train",)``: what they have still to
            release outlives the retention time while the process lives.
        metrics
            Counts what passes in this process; stays the caller's.
        settings
            Settings of this process alone, such as ``cache_bytes``.

        Returns
        -------
        Store
            A context manager; close it.
        """
        config = StoreConfig.of(
            {**{n: getattr(self.config, n) for n in StoreConfig.__slots__}, **settings}
        )
        node = ray.get_runtime_context().get_node_id()

        def parts(cache: ChunkCache, opened: ExitStack) -> Parts:
            return open_attached(
                self._calls,
                config,
                self._identity,
                node=node,
                consumers=consumers,
                metrics=metrics,
                cache=cache,
                opened=opened,
            )

        selected = select(fields, config.transfer)
        if not selected:
            return Store(config, fields, frozenset(), None, metrics=metrics)
        return Store(config, fields, selected, parts, remote=True, metrics=metrics)

    def reach(self, opened: ExitStack) -> tuple[RemoteUnits, UnitReaders]:
        """Return the ways to write to its units, and to read, for as long as the stack is open."""
        node = ray.get_runtime_context().get_node_id()
        return reach_units(self._calls, self.config, self._identity, node=node, opened=opened)

    @property
    def identity(self) -> Identity | None:
        """Its certificate; None where what crosses nodes is not encrypted."""
        return self._identity

    def layout(self) -> Layout:
        """Return its units, asked now."""
        return self._calls.look()

    def status(self) -> dict[str, Any]:
        """Return what an operator wants to see: epoch, sessions, units and what has passed."""
        return cast("Any", self._calls).status()  # type: ignore[no-any-return]

    def drain(self, unit: str, *, on: bool = True) -> None:
        """Give a unit no new sessions, before it leaves; or some again."""
        cast("Any", self._calls).drain(unit, on)

    def sweep(self) -> Recovery:
        """Remove what nobody refers to, now."""
        return cast("Any", self._calls).sweep()  # type: ignore[no-any-return]

    def stop(self) -> None:
        """End the Controller and all units; what they hold stays on its disks. Idempotent.

        Raises
        ------
        StorageFailed
            A unit could not upload all of its Steps: they lie in its folder, and go when it is
            started again.
        """
        try:
            ray.get(self._handle.stop.remote(), timeout=_CALL_S)
        except RayActorError:
            pass  # it is gone already
        except RayError as error:
            raise as_ours(error, "the store's cluster", _CALL_S) from None
        finally:
            ray.kill(self._handle)

    def __enter__(self) -> StoreCluster:
        """Return it."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop it, where this object has started it."""
        if self._started:
            self.stop()
