"""Parts of values: only the chunks that hold them are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tq_fs.errors import InvalidSelection
from tq_fs.plan import Range, clip
from tq_fs.values._calls import Sample
from tq_fs.values._entry import Found
from tq_fs.values._fetch import Plan, named, wanted
from tq_fs.values._rows import EXPERTS, Rows, Run, axes, look
from tq_fs.values._store import ValueStore
from tq_fs.values.codec import restore

Array = npt.NDArray[Any]
_TRIES = 4  # to read what is replaced again and again meanwhile


def read_range(
    values: ValueStore,
    sample: Sample,
    field: str,
    *,
    tokens: Range | None = None,
    layers: Range | None = None,
) -> Any:
    """Return rows of a value, of the kind that it is.

    Parameters
    ----------
    values
        Where it is.
    sample
        Partition and index.
    field
        Name of the field.
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
        As the value; of chunks of routed experts an int32 ndarray ``[rows, *width]``. Independent
        and writable.

    Raises
    ------
    InvalidSelection
        A range lies outside of the value.
    InvalidField
        The value is no array, no list of numbers and no chunks of routed experts (of one kind).
    RowCountMismatch, WidthChanged
        The chunks of a partial rollout leave a gap, overlap, or differ in their rows.
    ValueMissing
        It was never put, or cleared.
    ChunkCorrupt, ObjectShort, UnitLost
        What is stored is not what was written, or is gone.
    """

    def read(found: list[list[Found]]) -> Any:
        (rows,) = look(values, [wanted(sample, field, found[0][0])])
        return _read(values, rows, tokens, layers)

    return values.reading([sample], [field], read)


def _read(values: ValueStore, rows: Rows, tokens: Range | None, layers: Range | None) -> Any:
    low, high = _rows_in(rows, tokens)
    across = _layers_in(rows, layers)
    if rows.numbers is not None:
        return rows.numbers[low:high]
    first = rows.runs[0]
    inner, cut = first.inner, None
    if across is not None and not _is_layered(rows):
        cut, across = across, None  # the axis is in one piece: cut once it is read
    if across is not None:
        inner = (across[1] - across[0], *inner[1:])
    out: Array = np.empty(
        (high - low, *inner), EXPERTS if rows.is_routed else first.leaf.form.dtype
    )
    _fill(values, rows, out, low, across)
    if cut is not None:
        out = out[:, cut[0] : cut[1]].copy()
    return out if rows.is_routed else restore(first.leaf.form, out)


def _is_layered(rows: Rows) -> bool:
    """Tell whether all arrays can be read by layers."""
    return all(
        not isinstance(run.leaf.where, int) or rows.value.entry.arrays[run.leaf.where].layered
        for run in rows.runs
    )


def _fill(values: ValueStore, rows: Rows, out: Array, low: int, layers: Range | None) -> None:
    if not out.size:
        return
    plan = Plan()
    memory = EXPERTS if rows.is_routed else ""
    for part in parts(rows, (low, low + len(out))):
        where, target = part.run.leaf.where, out[part.at : part.at + part.length]
        if isinstance(where, int):
            plan.read(rows.value, where, target, start=part.start, layers=layers, memory=memory)
        else:
            found = where[part.start : part.start + part.length]
            np.copyto(target, found if layers is None else found[:, layers[0] : layers[1]])
    values.reader.carry_out(plan.reads, plan.outs)


class Part(NamedTuple):
    """Rows of one array that are wanted.

    Attributes
    ----------
    run
        The array.
    start, length
        The first of its rows, and how many.
    at
        Where they go: which of the wanted rows the first one is.
    """

    run: Run
    start: int
    length: int
    at: int


def parts(rows: Rows, wanted: Range) -> Iterator[Part]:
    """Yield where a half-open range of a value's rows lies."""
    for run in rows.runs:
        low, high = max(run.low, wanted[0]), min(run.high, wanted[1])
        if low < high:
            yield Part(run, run.start + low - run.low, high - low, low - wanted[0])


def _rows_in(rows: Rows, tokens: Range | None) -> Range:
    low, high = rows.bounds
    if tokens is None:
        return low, high
    start, stop = tokens
    if not low <= start <= stop <= high:
        raise InvalidSelection(
            f"rows [{start}, {stop}) do not lie in [{low}, {high})", subject=named(rows.value.whose)
        )
    return start, stop


def _layers_in(rows: Rows, layers: Range | None) -> Range | None:
    if layers is None:
        return None
    subject = named(rows.value.whose)
    run = None if rows.numbers is not None else rows.runs[0]
    flat = run is None or (run.leaf.form.flat if rows.is_routed else axes(run.leaf.form) < 2)
    if run is None or flat:
        raise InvalidSelection(
            f"layers {list(layers)} of rows that have no axis of layers", subject=subject
        )
    return clip(layers, run.inner[0], f"{subject}, layers")
