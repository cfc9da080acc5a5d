"""From entries back to values: packs are read by ranges, arrays by chunks, all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from tq_fs.backends import ObjectReader, Readable
from tq_fs.errors import ChunkCorrupt, ObjectMissing, ObjectShort, UnitLost
from tq_fs.keys import Incarnation
from tq_fs.memory import align, mapped_empty
from tq_fs.plan import ArrayRead, Copy, spans_of
from tq_fs.reader import SegmentReader
from tq_fs.values._entry import SMALL, Found, Place, ValueEntry
from tq_fs.values._places import ValuePlaces
from tq_fs.values.codec import ArrayForm, decode, sole_array

Array = npt.NDArray[Any]
_REMEDY = "put it again, or load the last checkpoint"
_SMALL_OBJECT = f"{SMALL}/c.0"
_GAP_BYTES = 64 * 1024  # between two heads of a pack that are read at once all the same


class Joined(NamedTuple):
    """Arrays that follow each other in one block of memory.

    Attributes
    ----------
    block
        ``[rows of all, *inner]``, of the stored type.
    lengths
        Rows of each.
    memory
        What they were in memory (:attr:`ArrayForm.memory`).
    """

    block: Array
    lengths: list[int]
    memory: str


Column = list[Any] | Joined


class Source(Protocol):
    """What values are read with: the ValueStore."""

    places: ValuePlaces
    reader: SegmentReader
    allow_pickle: bool

    def run_each(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Do something with each of several items, in several threads."""


class ValueRead(ArrayRead):
    """A read of one array of a value; its incarnation names partition, sample and field."""

    __slots__ = ()

    def subject(self, position: int | None = None) -> str:
        """Name field and sample and, where given, the chunk."""
        name = named(self.incarnation)
        return name if position is None else f"{name}, chunk {position} of {self.layout.chunks}"


class Wanted(NamedTuple):
    """A value that is read.

    Attributes
    ----------
    whose
        Partition, sample and field, as an Incarnation.
    found
        What and where it is.
    """

    whose: Incarnation
    found: Found

    @property
    def entry(self) -> ValueEntry:
        """How it is stored."""
        return self.found.entry

    @property
    def place(self) -> Place:
        """Where its group is."""
        return self.found.place


def wanted(sample: tuple[str, int], field: str, found: Found) -> Wanted:
    """Return a value to be read."""
    return Wanted(Incarnation(sample[0], str(sample[1]), field), found)


def named(whose: Incarnation) -> str:
    """Name a value for messages."""
    return f"{whose.incarnation_id!r} of sample {whose.session_id} ({whose.partition})"


def fetch(
    source: Source,
    samples: Sequence[tuple[str, int]],
    fields: Sequence[str],
    found: Sequence[Sequence[Found]],
    *,
    joined: bool,
) -> dict[str, Column]:
    """Read values; see :meth:`ValueStore.get`."""
    columns = [
        [wanted(sample, field, value) for sample, value in zip(samples, column, strict=True)]
        for field, column in zip(fields, found, strict=True)
    ]
    heads = heads_of(source, [value for column in columns for value in column])
    at = iter(heads)
    plan = Plan()
    finish = [
        plan.add([(value, next(at)) for value in column], source, joined=joined)
        for column in columns
    ]
    source.reader.carry_out(plan.reads, plan.outs)
    return {field: end() for field, end in zip(fields, finish, strict=True)}


class Plan:
    """Which arrays are read into which memory."""

    def __init__(self) -> None:
        self.reads: list[ArrayRead] = []
        self.outs: list[Array] = []

    def add(
        self, column: Sequence[tuple[Wanted, bytes]], source: Source, *, joined: bool
    ) -> Callable[[], Column]:
        """Plan one field's values; return what makes them once all is read."""
        forms = _joinable(column) if joined and column else None
        if forms is not None:
            return self._join([value for value, _ in column], forms)
        parts = [(value, head, self._arrays(value)) for value, head in column]
        return lambda: [
            decode(head, arrays, allow_pickle=source.allow_pickle, subject=named(value.whose))
            for value, head, arrays in parts
        ]

    def _join(self, values: Sequence[Wanted], forms: Sequence[ArrayForm]) -> Callable[[], Column]:
        lengths = [form.shape[0] for form in forms]
        dtype, inner = np.dtype(forms[0].dtype), forms[0].shape[1:]
        nbytes = sum(lengths) * prod(inner) * dtype.itemsize
        block = mapped_empty(align(nbytes))[:nbytes].view(dtype).reshape(sum(lengths), *inner)
        at = 0
        for value, length in zip(values, lengths, strict=True):
            self.read(value, 0, block[at : at + length])
            at += length
        return lambda: Joined(block, lengths, forms[0].memory)

    def _arrays(self, value: Wanted) -> list[Array]:
        arrays = [np.empty(a.shape, a.dtype) for a in value.entry.arrays]
        for number, array in enumerate(arrays):
            self.read(value, number, array)
        return arrays

    def read(
        self,
        value: Wanted,
        number: int,
        out: Array,
        *,
        start: int = 0,
        layers: tuple[int, int] | None = None,
        memory: str = "",
    ) -> None:
        """Plan to read rows of one of a value's arrays, from `start` on, into `out`.

        Parameters
        ----------
        memory
            Type of `out`, where that is another than the stored one.
        """
        array = value.entry.arrays[number]
        if memory:
            array = msgspec.structs.replace(array, memory=memory)
        copies = (Copy(start, start + len(out), len(self.outs), 0),)
        self.outs.append(out)
        self.reads.append(
            ValueRead(
                value.whose,
                number,
                value.place.path,
                value.place.unit,
                value.entry.name(number),
                array,
                array.layout,
                layers if array.layered else None,
                copies,
                spans_of(array, copies, layers),
                shared=False,
            )
        )


def _joinable(column: Sequence[tuple[Wanted, bytes]]) -> list[ArrayForm] | None:
    """Return the forms of values that are large tensors of one type and width; None for others."""
    forms: list[ArrayForm] = []
    for value, head in column:
        form = sole_array(head) if value.entry.arrays else None
        if form is None or not form.memory.startswith("torch:"):
            return None
        if forms and (form.memory, form.shape[1:]) != (forms[0].memory, forms[0].shape[1:]):
            return None
        forms.append(form)
    return forms


# ---------------------------------------------------------------- heads


def heads_of(source: Source, values: Sequence[Wanted]) -> list[bytes]:
    """Return what says what values are, and holds those that are small."""
    packs: dict[Place, list[int]] = {}
    for i, value in enumerate(values):
        if value.entry.nbytes:
            packs.setdefault(value.place, []).append(i)
    heads = [value.entry.head for value in values]

    def read(pack: tuple[Place, list[int]]) -> list[tuple[int, bytes]]:
        place, members = pack
        return list(_read_pack(source.places.readers, place, [(i, values[i]) for i in members]))

    for some in source.run_each(read, list(packs.items())):
        for i, head in some:
            heads[i] = head
    return heads


def _read_pack(
    readers: Mapping[str, Readable], place: Place, values: Sequence[tuple[int, Wanted]]
) -> Iterator[tuple[int, bytes]]:
    key = f"{place.path}/{_SMALL_OBJECT}"
    way = readers[place.unit]
    with _naming(values, key):
        opened = way.open(key)
    with opened as source:
        for run in _runs(values):
            try:
                yield from _read_run(way, source, key, run)
            except ObjectShort:
                for value in run:  # the error is to name one that is not whole
                    yield from _read_run(way, source, key, [value])


def _read_run(
    way: Readable, source: ObjectReader, key: str, run: Sequence[tuple[int, Wanted]]
) -> Iterator[tuple[int, bytes]]:
    start = run[0][1].entry.at
    end = max(v.entry.at + v.entry.nbytes for _, v in run)
    data = bytearray(end - start)
    with _naming(run, key):
        source.readinto((data,), start)
    for i, value in run:
        entry = value.entry
        head = bytes(data[entry.at - start : entry.at - start + entry.nbytes])
        if crc32c(head) != entry.crc:
            head = _again(way, key, value)
        yield i, head


@contextmanager
def _naming(values: Sequence[tuple[int, Wanted]], key: str) -> Iterator[None]:
    """Let errors name the first of the values that are read, beside the file."""
    try:
        yield
    except (ObjectMissing, ObjectShort, UnitLost) as error:
        subject = f"{named(values[0][1].whose)}, in {key}"
        raise type(error)(error.problem, subject=subject, remedy=_REMEDY) from error


def _again(way: Readable, key: str, value: Wanted) -> bytes:
    """Read a damaged head once more, where that may help.

    Raises
    ------
    ChunkCorrupt
    """
    entry = value.entry
    data = bytearray(entry.nbytes)
    if way.distrust(key):
        with way.open(key) as source:
            source.readinto((data,), entry.at)
    if crc32c(data) != entry.crc:
        raise ChunkCorrupt(
            "its bytes do not match their checksum",
            subject=f"{named(value.whose)}, in {key}",
            remedy=_REMEDY,
        )
    return bytes(data)


def _runs(values: Sequence[tuple[int, Wanted]]) -> Iterator[list[tuple[int, Wanted]]]:
    """Yield heads that lie near each other in a pack."""
    run: list[tuple[int, Wanted]] = []
    end = 0
    for item in sorted(values, key=lambda v: v[1].entry.at):
        entry = item[1].entry
        if run and entry.at > end + _GAP_BYTES:
            yield run
            run = []
        run.append(item)
        end = max(end, entry.at + entry.nbytes)
    if run:
        yield run
