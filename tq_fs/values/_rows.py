"""A value as rows of arrays: what of it can be read by ranges, and where each row lies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from tq_fs.errors import InvalidField, RowCountMismatch, WidthChanged
from tq_fs.values._fetch import Source, Wanted, heads_of, named
from tq_fs.values.codec import ArrayForm, ArrayLeaf, kind_of, outline, restore

EXPERTS = "int32"  # of routed experts in memory, however they came
_ROWS = ("numpy", "torch", "list")


class Run(NamedTuple):
    """Rows of a value that lie in one of its arrays.

    Attributes
    ----------
    leaf
        The array.
    low, high
        Half-open range of the value's rows that it holds.
    start
        Row of the array that `low` is.
    """

    leaf: ArrayLeaf
    low: int
    high: int
    start: int = 0

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape of a row as stored."""
        return self.leaf.form.shape[1:]


class Rows(NamedTuple):
    """A value that consists of rows.

    Attributes
    ----------
    value
        Whose it is, and where.
    runs
        Its rows in order, without gaps.
    is_routed
        Whether it is chunks of routed experts; the first row need not be 0.
    numbers
        The value itself, where it is a list of numbers so short or mixed that it is no array.
    """

    value: Wanted
    runs: tuple[Run, ...]
    is_routed: bool = False
    numbers: list[Any] | None = None

    @property
    def bounds(self) -> tuple[int, int]:
        """Half-open range of its rows."""
        if self.numbers is not None:
            return 0, len(self.numbers)
        return self.runs[0].low, self.runs[-1].high


def look(source: Source, values: Sequence[Wanted]) -> list[Rows]:
    """Return values as rows. Of those with large arrays only heads are read.

    Raises
    ------
    InvalidField
        A value is no array, no list of numbers and no chunks of routed experts (of one kind).
    RowCountMismatch, WidthChanged
        Chunks leave a gap, overlap, or differ in their rows.
    """
    heads = heads_of(source, values)
    return [rows_of(value, head) for value, head in zip(values, heads, strict=True)]


def rows_of(value: Wanted, head: bytes) -> Rows:
    """Return a value as rows; see :func:`look`."""
    subject = named(value.whose)
    found = outline(head, subject=subject)
    if isinstance(found, ArrayLeaf):
        return Rows(value, (_sole(found, subject),))
    if isinstance(found, list) and {*map(type, found)} <= {int, float}:
        return Rows(value, (), numbers=found)
    chunks = found if isinstance(found, list) else [found]
    leaves = [leaf for chunk in chunks if (leaf := _chunk_leaf(chunk)) is not None]
    if leaves and len(leaves) == len(chunks) and len({leaf.form.cut for leaf in leaves}) == 1:
        runs = _cut(leaves) if leaves[0].form.cut else _routed(leaves, subject)
        _check_widths(runs, subject)
        return Rows(value, runs, is_routed=True)
    raise InvalidField(f"is a {kind_of(found)}, which has no rows", subject=subject, remedy=_WHOLE)


_WHOLE = "get it whole; or put a tensor, an ndarray, a list of numbers, or chunks of routed experts"


def _sole(leaf: ArrayLeaf, subject: str) -> Run:
    if leaf.form.memory.partition(":")[0] not in _ROWS or not axes(leaf.form):
        raise InvalidField(
            f"is a {kind_of(leaf)} of shape {list(leaf.form.shape)}, which has no rows",
            subject=subject,
            remedy=_WHOLE,
        )
    return Run(leaf, 0, leaf.form.shape[0])


def axes(form: ArrayForm) -> int:
    """Return how many axes an array has in memory; it may have one more as stored."""
    if not form.shape:
        return 0
    return int(np.ndim(restore(form, np.empty((0, *form.shape[1:]), form.dtype))))


def _chunk_leaf(item: Any) -> ArrayLeaf | None:
    """Return the rows of a chunk of routed experts; None for anything else."""
    data = item.get("data") if isinstance(item, dict) else None
    is_chunk = isinstance(data, ArrayLeaf) and (data.form.chunk is not None or data.form.cut)
    return data if is_chunk else None


def _cut(leaves: Sequence[ArrayLeaf]) -> tuple[Run, ...]:
    """Return the rows of chunks that are cut already: one after the other, counted from 0."""
    ends = list(accumulate(leaf.form.shape[0] for leaf in leaves))
    return tuple(map(Run, leaves, [0, *ends], ends))


def _routed(leaves: Sequence[ArrayLeaf], subject: str) -> tuple[Run, ...]:
    """Return which rows of a generation's chunks are kept.

    Rows count from 0 in the first chunk and from ``prefix - 1`` in a later one: earlier tokens keep
    the routing of the weights that generated them (the rule of partial rollouts in Dressage).
    """
    runs: list[Run] = []
    for number, leaf in enumerate(leaves):
        chunk = leaf.form.chunk
        assert chunk is not None
        low = 0 if chunk.is_first else chunk.prefix - 1
        expected = runs[-1].high if runs else max(0, low)
        if low != expected:
            raise RowCountMismatch(
                f"chunk {number} goes on at row {low} where {expected} comes next",
                subject=subject,
                remedy="put the chunks of one generation, in their order",
            )
        runs.append(Run(leaf, low, chunk.rows, low))
    return tuple(runs)


def _check_widths(runs: Sequence[Run], subject: str) -> None:
    for number, run in enumerate(runs):
        if run.inner != runs[0].inner:
            raise WidthChanged(
                f"chunk {number} has rows of {list(run.inner)}, the first one of "
                f"{list(runs[0].inner)}",
                subject=subject,
            )
