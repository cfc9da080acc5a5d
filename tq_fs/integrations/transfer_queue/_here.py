"""What this process has of TransferQueue: its client, and with it the run's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transfer_queue import interface
from transfer_queue.metadata import BatchMeta

from tq_fs.errors import InvalidConfig
from tq_fs.integrations.transfer_queue._bootstrap import NAME
from tq_fs.integrations.transfer_queue._manager import KeyGone, TqFsStorageManager
from tq_fs.values import ValueStore


def client_here() -> Any:
    """Return this process's client; the first call in a process makes it, as TransferQueue does."""
    return interface._maybe_create_tq_client()


def values_of(client: Any) -> ValueStore:
    """Return the values that a client stores.

    Raises
    ------
    InvalidConfig
        It stores them somewhere else.
    """
    manager = client.storage_manager
    if not isinstance(manager, TqFsStorageManager):
        raise InvalidConfig(
            f"keeps its data by {type(manager).__name__}, which reads whole values only",
            subject="TransferQueue",
            remedy=f"set backend.storage_backend: {NAME}",
        )
    return manager.values


def indexes_of(client: Any, keys: Sequence[str], partition_id: str) -> dict[str, int]:
    """Return what keys stand for; asks TransferQueue's controller once.

    Raises
    ------
    KeyGone
        A key was never put, or it was cleared.
    """
    names = list(dict.fromkeys(keys))
    meta = client._kv_retrieve_meta(keys=names, partition_id=partition_id) if names else None
    return _indexes(names, meta, partition_id)


async def async_indexes_of(client: Any, keys: Sequence[str], partition_id: str) -> dict[str, int]:
    """Return what keys stand for; see :func:`indexes_of`."""
    names = list(dict.fromkeys(keys))
    if not names:
        return {}
    meta = await client.async_kv_retrieve_meta(keys=names, partition_id=partition_id)
    return _indexes(names, meta, partition_id)


def _indexes(names: Sequence[str], meta: BatchMeta | None, partition_id: str) -> dict[str, int]:
    found: Sequence[int] = [] if meta is None else meta.global_indexes
    if len(found) != len(names):  # it leaves out what it does not know
        raise KeyGone(
            f"has {len(found)} of the {len(names)} keys",
            subject=f"partition {partition_id!r}",
            remedy=f"they were never put, or cleared; asked for {_few(names)}",
        )
    return dict(zip(names, found, strict=True))


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
