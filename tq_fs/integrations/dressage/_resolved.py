"""Layouts as the Segments that tq-fs plans reads of. Pure.

Each array that holds rows of a layout takes the place of a Step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tq_fs import manifests
from tq_fs.errors import InvalidSegment
from tq_fs.fields import FieldSpec
from tq_fs.integrations.dressage._models import Fragment, Layout, LayoutSample
from tq_fs.keys import Incarnation, SegmentRef
from tq_fs.manifests import Resolved, SegmentEntry
from tq_fs.steps import ArrayEntry, ArrayLayout, StepEntry

Array = npt.NDArray[Any]


class ArraySource(NamedTuple):
    """An array that holds rows of a layout.

    Attributes
    ----------
    unit, place, name
        The StorageUnit, the group there, and the array in it; together they say which array it is,
        also where it is in memory.
    whose
        Partition, key and field of its value.
    entry
        How it is stored, seen with rows of the layout's shape and type.
    array
        The array itself, where it is in memory.
    """

    unit: str
    place: str
    name: str
    whose: Incarnation
    entry: ArrayEntry
    array: Array | None = None


class Piece(NamedTuple):
    """Rows of a field of a sample.

    Attributes
    ----------
    source
        Where they are.
    start
        The array's first row.
    low, high
        Half-open range of the field's rows.
    """

    source: ArraySource
    start: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class LaidOut(Resolved):
    """A sample's layouts with where their rows are.

    Attributes
    ----------
    sources
        By the number of the Step whose place they take.
    """

    sources: tuple[ArraySource, ...]

    def place(self, step: int) -> str:
        """Return where an array's group lies."""
        return self.sources[step].place

    def array(self, step: int, field: str) -> str:  # noqa: ARG002
        """Return an array's name in its group."""
        return self.sources[step].name


def laid_out(
    number: int,
    sample: LayoutSample,
    pieces: Mapping[str, Iterable[Piece]],
    shared: Iterable[Incarnation] = (),
) -> LaidOut:
    """Return a sample as a Segment.

    Parameters
    ----------
    pieces
        For each field the rows that make it up.
    shared
        Values that other samples refer to as well.
    """
    sources: dict[tuple[str, str], tuple[int, ArraySource]] = {}
    fields: dict[str, tuple[manifests.Fragment, ...]] = {}
    steps: dict[int, StepEntry] = {}
    for field, some in pieces.items():
        found = []
        for source, start, low, high in some:
            step, _ = sources.setdefault((source.place, source.name), (len(sources), source))
            rows = source.entry.shape[0]
            steps[step] = StepEntry(
                index=step, tokens=rows, fields={field: source.entry}, unit=source.unit
            )
            end = start + high - low
            found.append(
                manifests.Fragment(
                    step=step,
                    source=(start, end),
                    target=(low, high),
                    chunks=source.entry.layout.chunk_range((start, end)),
                )
            )
        fields[field] = tuple(found)
    segment = SegmentEntry(
        view="timeline",
        index=number,
        tokens=min((layout.token_count for layout in sample.layouts.values()), default=0),
        response_tokens=sample.response_length,
        fields=fields,
    )
    ref = SegmentRef("", Incarnation("layouts", str(number), ""), "timeline", number)
    several = set(shared)
    ours = tuple(source for _, source in sources.values())
    common = frozenset(i for i, source in enumerate(ours) if source.whose in several)
    return LaidOut(ref, segment, steps, common, ours)


def outline(number: int, sample: LayoutSample) -> LaidOut:
    """Return a sample as a Segment of which nothing is known but its shape."""
    pieces = {}
    for field, layout in sample.layouts.items():
        spec, whose = layout.spec(), Incarnation("layouts", str(number), field)
        entry = entry_of((layout.rows, *layout.inner), spec)
        source = ArraySource("", str(number), field, whose, entry)
        pieces[field] = [Piece(source, 0, 0, layout.rows)]
    return laid_out(number, sample, pieces)


def nothing(layout: Layout, number: int) -> Piece:
    """Return the rows of a layout that has none: their shape is asked for all the same."""
    spec = layout.spec()
    shape = (0, *layout.inner)
    whose = Incarnation("layouts", str(number), layout.field)
    array: Array = np.empty(shape, spec.dtype)
    source = ArraySource("", str(number), layout.field, whose, entry_of(shape, spec), array)
    return Piece(source, 0, 0, 0)


def entry_of(shape: tuple[int, ...], spec: FieldSpec) -> ArrayEntry:
    """Return the entry of an array in memory."""
    chunk = (max(1, shape[0]), *shape[1:])
    return ArrayEntry(
        shape=shape,
        dtype=spec.dtype,
        memory=spec.dtype,
        chunk=chunk,
        checksum=False,
        layered=spec.layered,
    )


class Column(NamedTuple):
    """Rows of a value that one array holds; see :class:`tq_fs.values.Run`."""

    source: ArraySource
    low: int
    high: int
    start: int


def cut(layout: Layout, columns: Mapping[Any, list[Column]]) -> Iterator[Piece]:
    """Yield where a layout's rows are.

    Parameters
    ----------
    columns
        For each reference its value's rows, in order and without gaps.

    Raises
    ------
    InvalidSegment
        A fragment wants rows that its value does not have.
    """
    for fragment in layout.fragments:
        rows = columns[fragment.ref]
        _check(fragment, rows[0].low, rows[-1].high)
        start, stop = fragment.source_start, fragment.source_start + fragment.length
        for source, low, high, first in rows:
            begin, end = max(start, low), min(stop, high)
            if begin < end:
                at = fragment.target_start + begin - start
                yield Piece(source, first + begin - low, at, at + end - begin)


def _check(fragment: Fragment, low: int, high: int) -> None:
    start, stop = fragment.source_start, fragment.source_start + fragment.length
    if not low <= start <= stop <= high:
        raise InvalidSegment(
            f"a fragment wants rows [{start}, {stop}), the value has [{low}, {high})",
            subject=str(fragment.ref),
        )


# ---------------------------------------------------------------- rows in another shape


class FlatLayout(ArrayLayout):
    """Rows that are stored flat, seen in their own shape: the same bytes, under the same name."""

    @functools.cached_property
    def object_name(self) -> str:
        """Zarr key of the only chunk or shard."""
        return "c.0.0"


class FlatEntry(ArrayEntry, frozen=True, kw_only=True, dict=True):
    """An array whose rows are stored flat, seen with rows in their own shape."""

    @functools.cached_property
    def layout(self) -> ArrayLayout:
        """The array's chunking."""
        return FlatLayout(self.shape, self.dtype, self.chunk, self.codec, self.checksum)


def seen_as(entry: ArrayEntry, spec: FieldSpec) -> ArrayEntry | None:
    """Return the entry of a stored array as one with rows of a field; None where it has none.

    Type and shape of a row may differ from what is stored, its bytes not.
    """
    assert spec.inner is not None
    inner = entry.shape[1:]
    if inner != spec.inner and (len(inner) != 1 or inner[0] != prod(spec.inner)):
        return None
    kind = ArrayEntry if inner == spec.inner else FlatEntry
    return kind(
        shape=(entry.shape[0], *spec.inner),
        dtype=entry.dtype,
        memory=spec.dtype,
        chunk=entry.chunk if kind is ArrayEntry else (entry.chunk[0], *spec.inner),
        codec=entry.codec,
        checksum=entry.checksum,
        layered=spec.layered,
        nbytes=entry.nbytes,
        sizes=entry.sizes,
    )


def can_widen(stored: str, spec: FieldSpec) -> bool:
    """Tell whether numpy turns a stored type into a field's as ``tensor.to`` does."""
    return np.can_cast(stored, spec.dtype, "same_kind")
