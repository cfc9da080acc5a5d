"""What this process has of TransferQueue: its client, and with it the run's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue import interface

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
    if not names:
        return {}
    found = client._kv_retrieve_meta(keys=names, partition_id=partition_id).global_indexes
    if len(found) != len(names):  # it leaves out what it does not know
        raise _gone(names, client._kv_list(partition_id=partition_id), partition_id)
    return dict(zip(names, found, strict=True))


async def async_indexes_of(client: Any, keys: Sequence[str], partition_id: str) -> dict[str, int]:
    """Return what keys stand for; see :func:`indexes_of`."""
    names = list(dict.fromkeys(keys))
    if not names:
        return {}
    meta = await client.async_kv_retrieve_meta(keys=names, partition_id=partition_id)
    if len(meta.global_indexes) != len(names):
        raise _gone(names, await client.async_kv_list(partition_id=partition_id), partition_id)
    return dict(zip(names, meta.global_indexes, strict=True))


def _gone(
    names: Sequence[str], known: Mapping[str, Mapping[str, Any]] | None, partition_id: str
) -> KeyGone:
    there = (known or {}).get(partition_id) or {}
    missing = [name for name in names if name not in there]
    more = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
    return KeyGone(
        "is not there: it was never put, or cleared",
        subject=f"key {', '.join(map(repr, missing[:3]))}{more} ({partition_id})",
        remedy="discard the samples that need it",
    )
