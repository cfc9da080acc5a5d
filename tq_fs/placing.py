"""From the bytes of chunks to their places in destinations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tq_fs.backends import ObjectReader
from tq_fs.errors import ChunkCorrupt, CorruptError, ObjectShort
from tq_fs.fields import UNKNOWN
from tq_fs.memory import aligned_empty
from tq_fs.plan import ArrayRead, Span, box, runs
from tq_fs.steps import CHECKSUM_BYTES, check, decode

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Memory:
    """Buffers of one reading thread; grow to the largest request, which the plan bounds."""

    def __init__(self) -> None:
        self._raw: Bytes = aligned_empty(0)
        self._decoded: Bytes = aligned_empty(0)

    def raw(self, nbytes: int) -> Bytes:
        """Return a buffer for stored bytes."""
        if self._raw.size < nbytes:
            self._raw = aligned_empty(nbytes)
        return self._raw[:nbytes]

    def decoded(self, nbytes: int) -> Bytes:
        """Return a buffer for the decoded bytes of one chunk."""
        if self._decoded.size < nbytes:
            self._decoded = aligned_empty(nbytes)
        return self._decoded[:nbytes]


def _fill(
    read: ArrayRead, position: int, source: ObjectReader, buffers: Sequence[Any], start: int
) -> None:
    try:
        source.readinto(buffers, start)
    except ObjectShort as error:
        raise ObjectShort(
            f"{error.subject} {error.problem}",
            subject=read.subject(_first_short(read, position, source)),
            remedy=error.remedy,
        ) from error


def _first_short(read: ArrayRead, position: int, source: ObjectReader) -> int:
    """Return the first chunk from `position` on that the object does not hold whole."""
    sizes = read.entry.sizes
    offsets = read.layout.offsets(sizes)
    for chunk in range(position, read.layout.chunks - 1):
        end = offsets[chunk] + read.layout.stored_nbytes(chunk, sizes)
        try:
            source.readinto((bytearray(1),), end - 1)
        except ObjectShort:
            return chunk
    return read.layout.chunks - 1


def read_chunks(
    read: ArrayRead, span: Span, source: ObjectReader, memory: Memory, request_bytes: int
) -> Iterator[tuple[int, Array]]:
    """Yield each chunk of a span, decoded; valid until the next one.

    Requests are as small as the backend likes them, so that a chunk is still in the processor's
    cache when it is checked and widened.
    """
    layout = read.layout
    offsets = layout.offsets(read.entry.sizes)
    if span.last - span.first == 1:
        yield span.first, _read_chunk(read, span.first, source, memory)
        return
    last = span.last - 1
    end = offsets[last] + layout.stored_nbytes(last, read.entry.sizes)
    if end - offsets[span.first] > request_bytes:
        source.ahead(offsets[span.first], end - offsets[span.first])
    for first, last in runs(range(span.first, span.last), offsets, request_bytes):
        start = offsets[first]
        end = offsets[last - 1] + layout.stored_nbytes(last - 1, read.entry.sizes)
        raw = memory.raw(end - start)
        _fill(read, first, source, (raw,), start)
        for position in range(first, last):
            at = offsets[position] - start
            stored = raw[at : at + layout.stored_nbytes(position, read.entry.sizes)]
            yield position, _decoded(read, position, stored, memory)


def _read_chunk(read: ArrayRead, position: int, source: ObjectReader, memory: Memory) -> Array:
    layout, sizes = read.layout, read.entry.sizes
    stored = memory.raw(layout.stored_nbytes(position, sizes))
    _fill(read, position, source, (stored,), layout.offsets(sizes)[position] if position else 0)
    return _decoded(read, position, stored, memory)


def _decoded(read: ArrayRead, position: int, stored: Bytes, memory: Memory) -> Array:
    layout = read.layout
    try:
        data = decode(stored, layout, memory.decoded)
    except ChunkCorrupt as error:
        raise _named(error, read, position) from error
    return data.view(layout.dtype).reshape(layout.chunk)


def _named(error: CorruptError, read: ArrayRead, position: int) -> CorruptError:
    return type(error)(error.problem, subject=read.subject(position), remedy=error.remedy)


def direct(read: ArrayRead, span: Span, outs: Sequence[Array]) -> Array | None:
    """Return the rows of the only destination, where the file holds just those bytes."""
    entry = read.entry
    layout = read.layout
    if not layout.plain or entry.dtype != entry.memory or len(read.copies) != 1 or read.shared:
        return None
    copy = read.copies[0]
    first, last = span.first * layout.chunk[0], span.last * layout.chunk[0]
    out = outs[copy.target]
    whole = layout.grid[1] == 1 and out.shape[1:] == layout.chunk[1:] and out.flags.c_contiguous
    if not whole or copy.start > first or copy.stop < last:
        return None
    return out[copy.at + first - copy.start : copy.at + last - copy.start]


def read_direct(read: ArrayRead, span: Span, target: Array, source: ObjectReader) -> None:
    """Read a span's chunks into the rows that :func:`direct` gave, and check them there."""
    layout = read.layout
    start = layout.offsets(None)[span.first]
    tall = layout.chunk[0]
    parts = [target[i : i + tall] for i in range(0, len(target), tall)]
    tails = [bytearray(layout.stored_nbytes(0, None) + layout.gap - p.nbytes) for p in parts]
    if not tails[0]:
        _fill(read, span.first, source, (target,), start)
        return
    buffers = [b for pair in zip(parts, tails, strict=True) for b in pair]
    _fill(read, span.first, source, buffers, start)
    if not layout.checksum:
        return
    for i, (part, tail) in enumerate(zip(parts, tails, strict=True)):
        try:
            check(part, tail[:CHECKSUM_BYTES])
        except ChunkCorrupt as error:
            raise _named(error, read, span.first + i) from error


def place(read: ArrayRead, position: int, chunk: Array, outs: Sequence[Array]) -> None:
    """Widen a chunk's rows and layers into every destination that wants them."""
    layout = read.layout
    if read.layers is not None or layout.grid[1] > 1:
        for view in views(read, position, outs):
            np.copyto(view.target, cut(read, position, chunk, view))
        return
    tall = layout.chunk[0]
    top = position * tall
    for start, stop, target, at in read.copies:  # whole rows: the ordinary case, kept short
        first, last = max(start, top), min(stop, top + tall)
        if first < last:
            row = at + first - start
            np.copyto(outs[target][row : row + last - first], chunk[first - top : last - top])


class View(NamedTuple):
    """Where a chunk meets a destination.

    Attributes
    ----------
    target
        The destination's part.
    row, layer
        Row and layer of the stored array that its first element is.
    """

    target: Array
    row: int
    layer: int


def views(read: ArrayRead, position: int, outs: Sequence[Array]) -> list[View]:
    """Return the parts of destinations that a chunk fills."""
    layout = read.layout
    top, left = box(layout, position)
    views = []
    for copy in read.copies:
        start, stop = max(copy.start, top), min(copy.stop, top + layout.chunk[0])
        if start >= stop:
            continue
        at = copy.at + start - copy.start
        target = outs[copy.target][at : at + stop - start]
        layer = left
        if layout.grid[1] > 1 or read.layers is not None:
            first, last = read.layers or (0, layout.shape[1])
            layer = max(first, left)
            target = target[:, layer - first : min(last, left + layout.chunk[1]) - first]
        views.append(View(target, start, layer))
    return views


def cut(read: ArrayRead, position: int, chunk: Array, view: View) -> Array:
    """Return the part of a chunk that a view takes."""
    target, row, layer = view
    top, left = box(read.layout, position)
    rows = chunk[row - top : row - top + len(target)]
    if rows.shape == target.shape:
        return rows
    return rows[:, layer - left : layer - left + target.shape[1]]


def mark_rows(read: ArrayRead, position: int, outs: Sequence[Array]) -> None:
    """Put -1 in the rows of a chunk that are unknown as a whole."""
    for target, row, _ in views(read, position, outs):
        for low, high in read.entry.unknown:
            if low < row + len(target) and high > row:
                target[max(0, low - row) : high - row] = UNKNOWN
