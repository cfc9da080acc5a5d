"""Parts of values, for programs that know us."""

from __future__ import annotations

import asyncio
from typing import Any

from tq_fs import values as _values
from tq_fs.errors import ValueMissing
from tq_fs.integrations.transfer_queue._here import (
    async_indexes_of,
    client_here,
    indexes_of,
    values_of,
)
from tq_fs.integrations.transfer_queue._manager import KeyGone
from tq_fs.plan import Range


def read_range(
    key: str,
    field: str,
    *,
    partition_id: str,
    tokens: Range | None = None,
    layers: Range | None = None,
) -> Any:
    """Return rows of a value that was put into TransferQueue; reads only the chunks with them.

    Parameters
    ----------
    key, field, partition_id
        The value, as ``transfer_queue.kv_put`` had them.
    tokens
        Half-open range of rows, the first axis; None for all. Of chunks of routed experts they are
        rows of the whole sequence: a generation that was continued has none before its
        ``prefix_token_count - 1``. Rows of chunks that are cut already (with ``row_count``) count
        from 0.
    layers
        Half-open range of the second axis; None for all.

    Returns
    -------
    tensor, ndarray or list
        As the value; of chunks of routed experts an int32 ndarray ``[rows, *width]``.

    Raises
    ------
    KeyGone
        The key or the field was never put, or cleared.
    InvalidSelection
        A range lies outside of the value.
    InvalidField
        The value is no array, no list of numbers and no chunks of routed experts (of one kind).
    RowCountMismatch, WidthChanged
        The chunks of a partial rollout leave a gap, overlap, or differ in their rows.
    ChunkCorrupt, ObjectShort, UnitLost
        What is stored is not what was written, or is gone.
    InvalidConfig
        TransferQueue keeps its data elsewhere.
    """
    client = client_here()
    values = values_of(client)
    index = indexes_of(client, [key], partition_id)[key]
    return _read(values, (partition_id, index), field, tokens, layers)


async def async_read_range(
    key: str,
    field: str,
    *,
    partition_id: str,
    tokens: Range | None = None,
    layers: Range | None = None,
) -> Any:
    """Return rows of a value; see :func:`read_range`. The reading is done in a thread."""
    client = client_here()
    values = values_of(client)
    index = (await async_indexes_of(client, [key], partition_id))[key]
    sample = partition_id, index
    return await asyncio.to_thread(_read, values, sample, field, tokens, layers)


def _read(
    values: _values.ValueStore,
    sample: tuple[str, int],
    field: str,
    tokens: Range | None,
    layers: Range | None,
) -> Any:
    try:
        return _values.read_range(values, sample, field, tokens=tokens, layers=layers)
    except ValueMissing as error:
        raise KeyGone(error.problem, subject=error.subject, remedy=error.remedy) from error
