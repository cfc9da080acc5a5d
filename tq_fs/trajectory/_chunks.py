"""A generation that weight updates cut into chunks: its routing, put together.

A chunk is what the engine answered between two interruptions, given `prefix` tokens: the prompt,
and in a later chunk all that was generated before. It has rows for the whole sequence so far, but a
token keeps the routing of the weights that met it first:

===========  ==============================  ====================================
chunk        rows the engine has             rows that are kept
===========  ==============================  ====================================
first        ``[0, prefix + output - 1)``    all
a later one  ``[0, prefix + output - 1)``    ``[prefix - 1, prefix + output - 1)``
===========  ==============================  ====================================
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tq_fs.errors import RowCountMismatch, WidthChanged

Array = npt.NDArray[Any]
_REMEDY = "check the counts of prompt and generated tokens against the engine's reply"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutChunk:
    """Routing of one part of a generation.

    Attributes
    ----------
    data
        Rows ``[start_row, prefix_token_count + output_token_count - 1)`` of the sequence's routing,
        ``[rows, layers, topk]``.
    prefix_token_count
        Tokens that the engine was given.
    output_token_count
        Tokens that it generated; 0 where it was cut off before the first.
    is_first_chunk
        Whether it was given the real prompt only.
    start_row
        First row in `data`: that which the engine was asked to begin with.
    version
        Weight version that generated it.
    """

    data: Array
    prefix_token_count: int
    output_token_count: int
    is_first_chunk: bool
    start_row: int = 0
    version: str = ""

    @property
    def stop_row(self) -> int:
        """Row after the last: a sequence's last token has none."""
        return self.prefix_token_count + self.output_token_count - 1


def join_chunks(chunks: Sequence[RolloutChunk], *, first_row: int, rows: int) -> Array:
    """Return rows ``[first_row, first_row + rows)`` of a sequence's routing.

    Rows before `first_row`, which earlier Steps hold, are left out. A chunk that gave nothing is
    left out too; where that is the first one, the next takes its place.

    Parameters
    ----------
    chunks
        In order.
    first_row, rows
        The Step's: :meth:`tq_fs.Session.first_row`, and as many as its tokens call for.

    Returns
    -------
    ndarray ``[rows, layers, topk]``
        Of the chunks' type. Where one chunk holds all rows, a view of it.

    Raises
    ------
    RowCountMismatch
        A chunk has other rows than its tokens call for, the rows that are kept leave a gap,
        overlap, or end elsewhere, or a chunk was given other tokens than those before it made.
    WidthChanged
        Rows of different shapes.
    """
    parts: list[Array] = []
    at = first_row
    for about, chunk, first in _with_rows(chunks):
        _check_count(chunk, about)
        begin = max(at, chunk.start_row) if first else chunk.prefix_token_count - 1
        if begin != at or not chunk.start_row <= at <= chunk.stop_row:
            raise RowCountMismatch(
                f"keeps rows [{begin}, {chunk.stop_row}) of [{chunk.start_row}, {chunk.stop_row}) "
                f"where row {at} comes next",
                subject=about,
                remedy=_REMEDY,
            )
        parts.append(chunk.data[at - chunk.start_row :])
        at = chunk.stop_row
    _check_tokens(chunks)
    stop = min(at, chunks[-1].stop_row) if chunks else 0
    if not chunks or stop != first_row + rows:
        raise RowCountMismatch(
            f"rows up to {stop} where {first_row + rows} are expected",
            subject=f"{len(chunks)} chunks",
            remedy=_REMEDY,
        )
    return _joined(parts or [chunks[0].data])


def _with_rows(chunks: Sequence[RolloutChunk]) -> Iterator[tuple[str, RolloutChunk, bool]]:
    """Yield the chunks that gave something; whether they count from their first row on."""
    first, begun = False, False
    for number, chunk in enumerate(chunks):
        first = first or chunk.is_first_chunk
        if chunk.output_token_count or len(chunk.data):
            yield f"chunk {number}", chunk, first and not begun
            begun = True


def _check_count(chunk: RolloutChunk, about: str) -> None:
    want = chunk.stop_row - chunk.start_row
    if min(want, chunk.start_row, chunk.output_token_count) < 0 or len(chunk.data) != want:
        raise RowCountMismatch(
            f"{len(chunk.data)} rows where {chunk.prefix_token_count} + "
            f"{chunk.output_token_count} tokens call for [{chunk.start_row}, {chunk.stop_row})",
            subject=about,
            remedy=_REMEDY,
        )


def _check_tokens(chunks: Sequence[RolloutChunk]) -> None:
    """Refuse a chunk, with rows or without, that was given other tokens than had been made."""
    for number, (before, chunk) in enumerate(itertools.pairwise(chunks), 1):
        given = before.prefix_token_count + before.output_token_count
        if chunk.prefix_token_count != given:
            raise RowCountMismatch(
                f"was given {chunk.prefix_token_count} tokens where {given} had been made",
                subject=f"chunk {number}",
                remedy=_REMEDY,
            )


def _joined(parts: Sequence[Array]) -> Array:
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise WidthChanged(
            f"rows of shapes {sorted(shapes)}",
            subject=f"{len(parts)} chunks",
            remedy="check that all were generated by one model",
        )
    filled = [part for part in parts if len(part)]
    return np.concatenate(filled) if len(filled) > 1 else (filled or parts)[0]
