"""What reads the rows of layouts: of many samples at once, each array once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, cast

import numpy as np

from tq_fs.errors import (
    InvalidField,
    ObjectMissing,
    StaleReference,
    StepMissing,
    ValueMissing,
    WidthChanged,
    WrongStore,
)
from tq_fs.fields import FieldSpec, coerce
from tq_fs.integrations.dressage._models import Layout, LayoutSample, Ref
from tq_fs.integrations.dressage._resolved import (
    Array,
    ArraySource,
    Column,
    LaidOut,
    can_widen,
    cut,
    entry_of,
    laid_out,
    nothing,
    outline,
    seen_as,
)
from tq_fs.keys import Incarnation
from tq_fs.manifests import Resolved
from tq_fs.plan import ArrayRead, Range, Want, plan_reads
from tq_fs.reader import Read
from tq_fs.values import (
    Found,
    Plan,
    Rows,
    Run,
    ValueRead,
    ValueStore,
    Wanted,
    group_path,
    look,
)
from tq_fs.values.codec import restore

_MEMORY = "memory"


class Outlines:
    """Says what samples are made of as far as their layouts do; reads nothing.

    Parameters
    ----------
    samples
        A reference is the number of one of them.
    """

    def __init__(self, samples: Sequence[LayoutSample]) -> None:
        self._samples = samples

    def resolve(self, refs: Iterable[str]) -> list[Resolved]:
        """Return samples as Segments without places."""
        return [outline(int(ref), self._samples[int(ref)]) for ref in refs]

    def fetch(self, reads: Sequence[Read], *, layers: Range | None = None) -> None:
        """Refuse: nothing is known of where rows are."""
        raise NotImplementedError


class LayoutReader:
    """Reads the rows of samples' layouts. Safe to call from many threads.

    Small values, and those of types that have to be converted, are in memory from
    :meth:`resolve` until what it returned goes.

    Parameters
    ----------
    values
        Where the values are; stays the caller's.
    samples
        A reference is the number of one of them.
    indexes
        For each partition and key what TransferQueue calls the sample.
    """

    def __init__(
        self,
        values: ValueStore,
        samples: Sequence[LayoutSample],
        indexes: Mapping[tuple[str, str], int],
    ) -> None:
        self._values = values
        self._samples = samples
        self._indexes = indexes
        self._shared = _shared(samples) if values.reader.cache.limit_bytes else frozenset()

    # ------------------------------------------------------------ where rows are

    def resolve(self, refs: Iterable[str]) -> list[Resolved]:
        """Return samples as Segments; what several of them refer to is looked up once.

        Raises
        ------
        ValueMissing, WrongStore, StaleReference
            A value is not there, or is not the one that is meant.
        InvalidField, InvalidSegment, WidthChanged, RowCountMismatch
            A value is not what the layout says.
        """
        numbers = [int(ref) for ref in refs]
        layouts = [layout for n in numbers for layout in self._samples[n].layouts.values()]
        columns = self._columns(layouts)
        return [self._resolved(number, columns) for number in numbers]

    def _resolved(self, number: int, columns: Mapping[Any, list[Column]]) -> LaidOut:
        sample = self._samples[number]
        pieces = {
            field: list(cut(layout, columns)) or [nothing(layout, number)]
            for field, layout in sample.layouts.items()
        }
        return laid_out(number, sample, pieces, self._shared)

    def _columns(self, layouts: Iterable[Layout]) -> dict[Ref, list[Column]]:
        """Return for each value that layouts refer to where its rows are."""
        specs = {f.ref: layout.spec() for layout in layouts for f in layout.fragments}
        try:
            rows = look(self._values, self._found(list(specs)))
            pairs = zip(specs.items(), rows, strict=True)
            return {ref: self._seen(ref, some, spec) for (ref, spec), some in pairs}
        except (ObjectMissing, StepMissing) as error:
            raise _gone(error) from error

    def _found(self, refs: Sequence[Ref]) -> list[Wanted]:
        """Look values up: samples that have the same fields in one call."""
        fields: dict[tuple[str, str], set[str]] = {}
        for ref in refs:
            _check_store(ref, self._values.store_id)
            fields.setdefault((ref.partition, ref.key), set()).add(ref.field)
        groups: dict[tuple[str, ...], list[tuple[str, str]]] = {}
        for key, some in fields.items():
            groups.setdefault(tuple(sorted(some)), []).append(key)
        found: dict[tuple[tuple[str, str], str], Found | None] = {}
        for names, keys in groups.items():
            asked = [(key[0], self._indexes[key]) for key in keys]
            for name, column in zip(names, self._values.calls.find(asked, names), strict=True):
                found.update(((key, name), value) for key, value in zip(keys, column, strict=True))
        return [_checked(ref, found[(ref.partition, ref.key), ref.field]) for ref in refs]

    def _seen(self, ref: Ref, rows: Rows, spec: FieldSpec) -> list[Column]:
        """Return a value's rows as those of a field: where they lie, or as arrays in memory."""
        if rows.numbers is not None:
            array = _converted(rows.numbers, spec, ref)
            return [self._in_memory(rows, 0, array, spec, low=0, start=0)]
        return [self._column(ref, rows, n, run, spec) for n, run in enumerate(rows.runs)]

    def _column(self, ref: Ref, rows: Rows, number: int, run: Run, spec: FieldSpec) -> Column:
        where, form = run.leaf
        _check_width(ref, run, spec)
        name = form.memory.partition(":")[2]
        is_plain = rows.is_routed or name in (form.dtype, "int", "float")
        if isinstance(where, int) and is_plain and can_widen(form.dtype, spec):
            entry = seen_as(rows.value.entry.arrays[where], spec)
            if entry is not None:
                place, name = rows.value.place, rows.value.entry.name(where)
                source = ArraySource(place.unit, place.path, name, rows.value.whose, entry)
                return Column(source, run.low, run.high, run.start)
        stored = self._whole(rows, where) if isinstance(where, int) else where
        value = stored if rows.is_routed else restore(form, stored)
        array = _converted(value, spec, ref)
        return self._in_memory(rows, number, array, spec, low=run.low, start=run.start)

    def _whole(self, rows: Rows, where: int) -> Array:
        """Read an array whose rows cannot be read one by one."""
        array = rows.value.entry.arrays[where]
        out: Array = np.empty(array.shape, array.dtype)
        plan = Plan()
        plan.read(rows.value, where, out)
        self._values.reader.carry_out(plan.reads, plan.outs)
        return out

    @staticmethod
    def _in_memory(
        rows: Rows, number: int, array: Array, spec: FieldSpec, *, low: int, start: int
    ) -> Column:
        whose = rows.value.whose
        name = f"{whose.session_id}/{whose.incarnation_id}/{number}"
        entry = entry_of(array.shape, spec)
        source = ArraySource(_MEMORY, rows.value.place.path, name, whose, entry, array)
        return Column(source, low, low + len(array) - start, start)

    # ------------------------------------------------------------ rows

    def fetch(self, reads: Sequence[Read], *, layers: Range | None = None) -> None:
        """Fill the destinations of several reads; what they share is read once.

        Raises
        ------
        ValueMissing
            A value was cleared or replaced since it was looked up.
        ChunkCorrupt, ObjectShort, UnitLost
            What is stored is not what was written, or is gone.
        """
        wants = [Want(r.segment, r.field, r.rows, i) for i, r in enumerate(reads)]
        outs = [read.out for read in reads]
        segments = [cast("LaidOut", read.segment) for read in reads]
        sources = {(s.place, s.name): s for segment in segments for s in segment.sources}
        stored: list[ArrayRead] = []
        for read in plan_reads(wants, layers):
            source = sources[read.prefix, read.field]
            if source.array is None:
                stored.append(ValueRead(*read._replace(incarnation=source.whose)))
            else:
                _copy(source.array, read, outs)
        try:
            self._values.reader.carry_out(stored, outs)
        except StepMissing as error:
            raise _gone(error) from error


def _copy(array: Array, read: ArrayRead, outs: Sequence[Array]) -> None:
    if read.layers is not None:
        array = array[:, slice(*read.layers)]
    for start, stop, target, at in read.copies:
        np.copyto(outs[target][at : at + stop - start], array[start:stop])


def _shared(samples: Sequence[LayoutSample]) -> frozenset[Incarnation]:
    """Return the values that several samples refer to."""
    counts = Counter(
        chain.from_iterable(
            {whose(f.ref) for layout in sample.layouts.values() for f in layout.fragments}
            for sample in samples
            if not sample.removed
        )
    )
    return frozenset(value for value, count in counts.items() if count > 1)


def whose(ref: Ref) -> Incarnation:
    """Return partition, key and field of a value, as reads name them."""
    return Incarnation(ref.partition, ref.key, ref.field)


def incarnation_of(found: Found) -> str:
    """Return what tells a value from all others that were ever put under its name."""
    return group_path(found.place.path).rpartition("/")[2]


def _check_store(ref: Ref, store_id: str) -> None:
    if ref.store_id and ref.store_id != store_id:
        raise WrongStore(f"lies in store {ref.store_id!r}, this is {store_id!r}", subject=str(ref))


def _checked(ref: Ref, found: Found | None) -> Wanted:
    if found is None:
        raise ValueMissing("is not there: it was never put, or cleared", subject=str(ref))
    here = incarnation_of(found)
    if ref.incarnation_id and ref.incarnation_id != here:
        raise StaleReference(
            f"is another value now ({here}) than the reference means ({ref.incarnation_id})",
            subject=str(ref),
            remedy="discard the sample: its value was replaced, or cleared and put again",
        )
    return Wanted(whose(ref), found)


def _gone(error: ObjectMissing | StepMissing) -> ValueMissing:
    return ValueMissing(
        f"was cleared or replaced while it was read: {error.problem}",
        subject=error.subject,
        remedy="discard the sample",
    )


def _check_width(ref: Ref, run: Run, spec: FieldSpec) -> None:
    """Refuse rows of another shape; flat ones, and numbers in one row, take the layout's."""
    assert spec.inner is not None
    have, want = run.inner, spec.inner
    is_flat = not have or (len(have) == 1 and have[0] == prod(want))
    if have != want and not is_flat:
        raise WidthChanged(
            f"has rows of {list(have)} where its layout says {list(want)}", subject=str(ref)
        )


def _converted(value: Any, spec: FieldSpec, ref: Ref) -> Array:
    """Return a value as rows of a field, in memory."""
    assert spec.inner is not None
    if hasattr(value, "detach"):  # a tensor, maybe of a type that numpy lacks
        value = (value.float() if value.is_floating_point() else value).numpy()
    array = coerce(spec, value, str(ref))
    if array.size % prod(spec.inner):
        raise InvalidField(
            f"{array.size} numbers are no rows of {list(spec.inner)}", subject=str(ref)
        )
    return array.reshape(-1, *spec.inner)
