"""The store of this process, opened once."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

from tq_fs.integrations.slime._settings import CONSUMER, Settings, read_once
from tq_fs.store import Store, open_store

_lock = threading.Lock()
_stores: dict[tuple[Any, ...], Store] = {}


def store_of(settings: Settings, *, writes: bool) -> Store:
    """Return the store of this process; the first call opens it.

    A store in a folder or a bucket has one process that writes, the RolloutManager; actors open it
    for reading. On a cluster all are equal.

    Raises
    ------
    StoreBusy, WrongStore, InvalidConfig, UnitsUnavailable, StorageFailed
    """
    config = settings.config
    key = (os.getpid(), config.url, config.store_id, settings.fields, writes or settings.in_cluster)
    with _lock:
        if key not in _stores:
            if not _stores:
                atexit.register(close_stores)
            _stores[key] = _open(settings, writes=writes)
        return _stores[key]


def _open(settings: Settings, *, writes: bool) -> Store:
    config = settings.config
    if settings.in_cluster:
        from tq_fs import cluster  # noqa: PLC0415  # needs ray, which an embedded store does not

        return cluster.attach(config.store_id).store(
            settings.fields, consumers=[CONSUMER], transfer=None
        )
    return open_store(config.url, fields=settings.fields, config=config, read_only=not writes)


def close_stores() -> None:
    """Close what this process has opened; the next use reads and opens it again. Idempotent."""
    read_once.cache_clear()
    with _lock:
        opened = list(_stores.values())
        _stores.clear()
    for store in opened:
        store.close()
