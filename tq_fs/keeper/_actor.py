"""The keeper as an actor on Ray: on the node of the process that starts a run's values."""

from __future__ import annotations

import logging
import time
import warnings
from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tq_fs.cluster import StoreCluster, start
from tq_fs.errors import StoreBusy, TqFsError, UnitsUnavailable
from tq_fs.keeper._open import Spot, open_keeper
from tq_fs.keeper._settings import Connection, ValueConfig

NAMESPACE = "tq-fs"
_START_S = 180.0
_AGAIN_S = 1.0
_STOP_S = 300.0
_THREADS = 4

_log = logging.getLogger(__name__)


def here() -> Spot:
    """Return the node that this process runs on."""
    node_id = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    node = next(node for node in nodes if node["NodeID"] == node_id)
    return Spot(node["NodeID"], str(node["NodeName"]), node["NodeManagerAddress"])


class KeeperActor:
    """Has a run's index. Ray starts it anew where it was killed, and it goes on."""

    def __init__(self, config: ValueConfig, run: str) -> None:
        self._opened = ExitStack()
        self._connection: Connection | None = None
        self._failed: Exception | None = None
        again = _is_restarted()
        while self._connection is None and self._failed is None:
            try:
                self._connection = open_keeper(
                    config, run, here(), again=again, opened=self._opened
                )
            except Exception as error:  # told to whoever calls
                self._opened.close()
                _log.exception("the values of run %s cannot be kept", run)
                if again:  # nobody else would try; its port may not be free yet
                    time.sleep(_AGAIN_S)
                else:
                    self._failed = error

    def connection(self) -> Connection:
        """Return how it is reached; or raise why it could not begin."""
        if self._connection is None:
            assert self._failed is not None
            raise self._failed
        return self._connection

    def stop(self) -> None:
        """Let go of the store."""
        self._opened.close()


def _is_restarted() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray 2.60 warns of what it calls itself
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


class RunningKeeper:
    """A keeper that this process has started, with the cluster's units where it started those.

    Parameters
    ----------
    config
        Settings.
    run
        Names the run.

    Raises
    ------
    TqFsError
        It could not begin; nothing of it is left.
    """

    def __init__(self, config: ValueConfig, run: str) -> None:
        self._cluster: StoreCluster | None = None
        if config.kind == "cluster":
            self._cluster = start(config.store)
        try:
            self._handle = _start_actor(config, run)
            self.connection = self._connect(config)
        except BaseException:
            self.stop()
            raise

    def _connect(self, config: ValueConfig) -> Connection:
        try:
            found: Connection = ray.get(self._handle.connection.remote(), timeout=_START_S)
        except RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, TqFsError):
                raise cause from None
            raise UnitsUnavailable(
                f"its keeper did not begin: {error}",
                subject=f"store {config.store.store_id!r}",
                remedy="see `ray status`, and the keeper's log",
            ) from error
        return found

    def stop(self) -> None:
        """End the keeper, and the units where this object started them; idempotent."""
        handle = getattr(self, "_handle", None)
        if handle is not None:
            try:
                ray.get(handle.stop.remote(), timeout=_STOP_S)
            except RayActorError:
                _log.info("the keeper was gone already")
            except RayError:  # what it has not let go of goes with its process
                _log.warning("the keeper did not end by itself", exc_info=True)
            finally:
                ray.kill(handle)
                self._handle = None
        if self._cluster is not None:
            cluster, self._cluster = self._cluster, None
            cluster.__exit__()


def _start_actor(config: ValueConfig, run: str) -> Any:
    """Start a keeper.

    Raises
    ------
    StoreBusy
        The cluster's store has one: of a run that has not ended. (Folders are locked, and in an
        object store the later one wins.)
    """
    store_id = config.store.store_id
    is_cluster = config.kind == "cluster"
    actor = ray.remote(KeeperActor).options(
        name=f"keeper/{store_id}" if is_cluster else f"keeper/{store_id}/{run}",
        namespace=NAMESPACE,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=_THREADS,
        scheduling_strategy=NodeAffinitySchedulingStrategy(here().node, soft=False),
    )
    try:
        return actor.remote(config, run)
    except ValueError as error:
        raise StoreBusy(
            f"another run keeps its values there: {error}",
            subject=f"store {store_id!r}",
            remedy="close that run, or use another store_id",
        ) from error
