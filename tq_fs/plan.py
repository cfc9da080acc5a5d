"""Which bytes to read for which rows: a pure function of manifests and slices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tq_fs.errors import FieldMissing, InvalidSelection
from tq_fs.keys import Incarnation, StepKey
from tq_fs.manifests import Resolved
from tq_fs.steps import MASK_SUFFIX, ArrayEntry, ArrayLayout

SPAN_BYTES = 4 * 1024 * 1024

Range = tuple[int, int]


class Want(NamedTuple):
    """Rows of one field of one Segment that are to be in one destination.

    Attributes
    ----------
    segment
        The resolved Segment.
    field
        Field name.
    rows
        Half-open row ranges of the Segment's field; they fill the destination one after another.
    target
        Number of the destination.
    """

    segment: Resolved
    field: str
    rows: tuple[Range, ...]
    target: int


class Copy(NamedTuple):
    """Rows of a Step's array and where they go.

    Attributes
    ----------
    start, stop
        Rows of the Step's array.
    target, at
        Destination, and its row for `start`.
    """

    start: int
    stop: int
    target: int
    at: int


class Span(NamedTuple):
    """Neighbouring chunks of one object, read by one request.

    Attributes
    ----------
    first, last
        Half-open range of chunk positions in the object.
    """

    first: int
    last: int


class ArrayRead(NamedTuple):
    """What is read of one stored array.

    Attributes
    ----------
    incarnation, step
        Whose array it is.
    prefix
        Path of the Step.
    unit
        StorageUnit that holds it.
    field
        Name of the array.
    entry, layout
        How it is stored.
    layers
        Half-open layer range; None for all.
    copies
        Every row that is wanted, with its place; a row may be wanted more than once.
    spans
        The chunks that hold them.
    shared
        Whether another Segment of the session refers to the Step too.
    """

    incarnation: Incarnation
    step: int
    prefix: str
    unit: str
    field: str
    entry: ArrayEntry
    layout: ArrayLayout
    layers: Range | None
    copies: tuple[Copy, ...]
    spans: tuple[Span, ...]
    shared: bool

    @property
    def key(self) -> str:
        """Key of the object."""
        return f"{self.prefix}/{self.field}/{self.layout.object_name}"

    def nbytes(self, span: Span) -> int:
        """Return the stored bytes of a span's chunks."""
        sizes = self.entry.sizes
        if sizes is not None:
            return sum(sizes[span.first : span.last])
        return (span.last - span.first) * self.layout.stored_nbytes(0, None)

    def subject(self, position: int | None = None) -> str:
        """Name the Step, the field and, where given, the chunk."""
        name = f"{StepKey(self.incarnation, self.step)}, {self.field}"
        return name if position is None else f"{name}, chunk {position} of {self.layout.chunks}"

    def mask(self) -> ArrayRead | None:
        """Return the read of the array that says which values are unknown, if there is one."""
        mask = self.entry.mask
        if mask is None:
            return None
        return self._replace(field=self.field + MASK_SUFFIX, entry=mask, layout=mask.layout)


def clip(rows: Range, length: int, subject: str) -> Range:
    """Return a half-open range, once it lies within ``[0, length]``.

    Raises
    ------
    InvalidSelection
    """
    start, stop = rows
    if not 0 <= start <= stop <= length:
        raise InvalidSelection(f"[{start}, {stop}) does not lie in [0, {length})", subject=subject)
    return start, stop


def field_rows(segment: Resolved, field: str) -> int:
    """Return how many rows a Segment has of a field.

    Raises
    ------
    FieldMissing
    """
    fragments = segment.segment.fields.get(field)
    if fragments is None:
        raise FieldMissing(
            f"does not hold {field!r}, only {sorted(segment.segment.fields)}",
            subject=str(segment.ref),
        )
    return fragments[-1].target[1] if fragments else 0


def selection(
    segment: Resolved, field: str, rows: int, layers: Range | None
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and memory type of a selection of a field.

    Raises
    ------
    InvalidSelection
        The layers are not the model's.
    """
    field_rows(segment, field)
    step = segment.segment.fields[field][0].step
    entry = segment.steps[step].fields[field]
    inner = entry.shape[1:]
    if entry.layered and layers is not None:
        first, last = clip(layers, inner[0], f"{segment.ref}, layers of {field}")
        inner = (last - first, *inner[1:])
    return (rows, *inner), np.dtype(entry.memory)


def plan_reads(wants: Iterable[Want], layers: Range | None = None) -> list[ArrayRead]:
    """Turn rows of Segments into reads of chunks.

    Steps shared by several Segments are read once, neighbouring chunks by one request of at most
    4 MiB (or one chunk, if that is larger).

    Parameters
    ----------
    wants
        What is wanted. Rows lie within the Segments (:func:`clip`).
    layers
        Layers that are wanted of every field that has them.
    """
    arrays: dict[tuple[str, str], _Gathered] = {}
    for want in wants:
        for step, copy in _copies(want):
            key = want.segment.place(step), want.segment.array(step, want.field)
            found = arrays.get(key)
            if found is None:
                found = arrays[key] = _Gathered(want.segment, step, want.field, [])
            found.copies.append(copy)
    return [_array_read(*key, gathered, layers) for key, gathered in arrays.items()]


class _Gathered(NamedTuple):
    """All that is wanted of one stored array."""

    segment: Resolved
    step: int
    field: str
    copies: list[Copy]


def _copies(want: Want) -> Iterator[tuple[int, Copy]]:
    """Yield the rows of each Step that a want touches."""
    fragments = want.segment.segment.fields[want.field]
    at = 0
    for first, last in want.rows:
        for fragment in fragments:
            low, high = fragment.target
            start, stop = max(first, low), min(last, high)
            if start < stop:
                shift = fragment.source[0] - low
                place = at + start - first
                yield fragment.step, Copy(start + shift, stop + shift, want.target, place)
        at += last - first


def _array_read(path: str, name: str, gathered: _Gathered, layers: Range | None) -> ArrayRead:
    segment, step, field, copies = gathered
    entry = segment.steps[step]
    array = entry.fields[field]
    return ArrayRead(
        segment.ref.incarnation,
        step,
        path,
        entry.unit,
        name,
        array,
        array.layout,
        layers if array.layered else None,
        tuple(copies),
        spans_of(array, copies, layers),
        step in segment.shared,
    )


def spans_of(
    array: ArrayEntry, copies: Sequence[Copy], layers: Range | None = None
) -> tuple[Span, ...]:
    """Return the chunks that hold what is wanted of an array."""
    layout = array.layout
    if layout.chunks == 1:
        return _WHOLE
    return tuple(_spans(array, layout, copies, layers if array.layered else None))


_WHOLE = (Span(0, 1),)


def _spans(
    array: ArrayEntry, layout: ArrayLayout, copies: Sequence[Copy], layers: Range | None
) -> Iterator[Span]:
    positions = sorted(
        {part.position for copy in copies for part in layout.parts(copy[:2], layers)}
    )
    yield from runs(positions, layout.offsets(array.sizes), SPAN_BYTES)


def runs(positions: Iterable[int], offsets: Sequence[int], most: int) -> Iterator[Span]:
    """Join neighbouring chunks into spans of at most `most` bytes, or of one chunk."""
    first = last = -1
    for position in positions:
        if position == last and offsets[position + 1] - offsets[first] <= most:
            last += 1
            continue
        if last > first:
            yield Span(first, last)
        first, last = position, position + 1
    if last > first:
        yield Span(first, last)


def box(layout: ArrayLayout, position: int) -> tuple[int, int]:
    """Return the first row and the first layer of a chunk."""
    group, block = divmod(position, layout.grid[0])
    across = layout.chunk[1] if len(layout.chunk) > 1 else 0
    return block * layout.chunk[0], group * across
