"""The store as an actor opens it."""

from __future__ import annotations

from collections.abc import Sequence

from tq_fs import cluster
from tq_fs.fields import FieldSpec
from tq_fs.store import Store, open_store


def open_here(
    store_id: str | None,
    fields: Sequence[FieldSpec],
    *,
    consumers: Sequence[str] = (),
    compact: bool = False,
) -> Store:
    """Open the store that runs on this Ray cluster; None for the in-memory path."""
    if store_id is None:
        return open_store(None, fields=fields, compact=compact)
    return cluster.attach(store_id).store(fields, consumers=consumers, compact=compact)
