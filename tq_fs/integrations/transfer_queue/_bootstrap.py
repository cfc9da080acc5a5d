"""What ``transfer_queue.init`` calls in the process that starts a run."""

from __future__ import annotations

import logging
import time
from typing import Any
from uuid import uuid4

import ray
from omegaconf import DictConfig, OmegaConf
from transfer_queue import interface
from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider

from tq_fs.errors import InvalidConfig
from tq_fs.keeper import Connection, RunningKeeper, ValueConfig

NAME = "TqFs"
_CONNECTION = "connection"

_log = logging.getLogger(__name__)
_running: dict[str, RunningKeeper] = {}


class Reached:
    """A :class:`Connection` in TransferQueue's configuration.

    Whoever gets that configuration imports this module with it, and thereby has the backend.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def __repr__(self) -> str:
        """Name what is reached; TransferQueue logs it."""
        found = self.connection
        return f"<store {found.config.store.store_id!r}, run {found.run}>"


@StorageBootstrapProvider.register_provider(NAME)  # type: ignore[untyped-decorator]
def bring_up(conf: DictConfig) -> dict[str, Any]:
    """Start what keeps a run's values, and note how it is reached.

    Raises
    ------
    TqFsError
        It could not be started. TransferQueue's controller is ended too: the next ``init`` would
        wait for its configuration for ever.
    """
    try:
        config = value_config(conf.backend.get(NAME))
        run = f"{time.time_ns():016x}{uuid4().hex[:8]}"
        keeper = RunningKeeper(config, run)
    except BaseException:
        _end_controller()
        raise
    _running[run] = keeper
    conf.backend[NAME][_CONNECTION] = Reached(keeper.connection)
    return {}


def value_config(section: Any) -> ValueConfig:
    """Return the settings in ``backend.TqFs``.

    Raises
    ------
    InvalidConfig
    """
    if section is None:
        raise InvalidConfig(
            "is missing", subject=f"backend.{NAME}", remedy="give at least url and store_id there"
        )
    plain = OmegaConf.to_container(section, resolve=True)
    assert isinstance(plain, dict)
    plain.pop(_CONNECTION, None)
    return ValueConfig.of({str(name): value for name, value in plain.items()})


def connection_of(section: Any) -> Connection:
    """Return how a run's values are reached, from TransferQueue's configuration.

    Raises
    ------
    InvalidConfig
        Nobody has started them.
    """
    found = section.get(_CONNECTION, None)
    if not isinstance(found, Reached):
        raise InvalidConfig(
            "no run was started with it: transfer_queue.init does that",
            subject=f"backend.{NAME}",
            remedy="import tq_fs.integrations.transfer_queue before transfer_queue.init",
        )
    return found.connection


def take_charge(run: str) -> None:
    """Let a manager end what this process has started, instead of TransferQueue.

    That knows the backends that it brings, and warns at its end that it cannot close others.
    """
    storage = getattr(interface, "_TQ_STORAGE", None)
    if run in _running and isinstance(storage, dict):
        storage.pop(NAME, None)


def stop_own(run: str) -> None:
    """End what this process has started for a run, if it has; idempotent."""
    keeper = _running.pop(run, None)
    if keeper is not None:
        keeper.stop()


def abandon(run: str, error: type[BaseException] | None) -> None:
    """Where a manager could not be made, undo what TransferQueue has begun in this process.

    It has noted a client that has no backend, and would take it for a whole one from then on; and
    it would look for the next queue's controller under the number of this one's.
    """
    client = getattr(interface, "_TQ_CLIENT", None)
    if error is None or client is None or getattr(client, "storage_manager", None) is not None:
        return
    interface._TQ_CLIENT = None
    client.close()
    if run in _running:
        stop_own(run)
        _end_controller()
    interface._TQ_CONTROLLER = None


def _end_controller() -> None:
    """End TransferQueue's controller, which this process has just started."""
    controller = getattr(interface, "_TQ_CONTROLLER", None)
    if controller is not None:
        ray.kill(controller)
    interface._TQ_CONTROLLER = None
    interface._TQ_STORAGE = None
