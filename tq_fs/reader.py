"""SegmentReader: references into arrays, in parallel and within a fixed amount of memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tq_fs.backends import Backend, ObjectReader
from tq_fs.cache import ChunkCache
from tq_fs.errors import (
    ChunkCorrupt,
    CorruptError,
    InvalidField,
    ObjectMissing,
    ObjectShort,
    StepMissing,
    TqFsError,
)
from tq_fs.fields import UNKNOWN
from tq_fs.manifests import Resolved
from tq_fs.memory import aligned_empty
from tq_fs.plan import ArrayRead, Range, Span, Want, box, clip, field_rows, plan_reads, runs
from tq_fs.steps import CHECKSUM_BYTES, check, decode

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Resolve = Callable[[Iterable[str]], list[Resolved]]


class Read(NamedTuple):
    """Rows of one field of one Segment, and the array they are read into.

    Attributes
    ----------
    segment
        The resolved Segment.
    field
        Field name.
    rows
        Half-open row ranges of the Segment's field, read one after the other.
    out
        Destination ``[rows, *inner]`` of the field's memory type; with a layer selection its
        second axis is as long as that.
    """

    segment: Resolved
    field: str
    rows: tuple[Range, ...]
    out: Array


class _Memory:
    """Buffers of one reading thread; grow to the largest request, which the plan bounds."""

    def __init__(self) -> None:
        self._raw: Bytes = aligned_empty(0)
        self._decoded: Bytes = aligned_empty(0)

    def raw(self, nbytes: int) -> Bytes:
        if self._raw.size < nbytes:
            self._raw = aligned_empty(nbytes)
        return self._raw[:nbytes]

    def decoded(self, nbytes: int) -> Bytes:
        if self._decoded.size < nbytes:
            self._decoded = aligned_empty(nbytes)
        return self._decoded[:nbytes]


class SegmentReader:
    """Reads what references stand for. Safe to call from many threads.

    Memory beyond destinations and cache: two buffers of about 4 MiB for each of `threads`.

    Parameters
    ----------
    resolve
        Gives what references stand for (the Controller's).
    backends
        Where each StorageUnit's Steps lie, by the unit's name; stay the caller's.
    pool
        Threads that help the calling one; stays the caller's. None reads in the calling thread.
    threads
        How many threads, the calling one included, read at a time.
    cache
        Keeps chunks that several Segments of a session share; stays the caller's.
    """

    def __init__(
        self,
        resolve: Resolve,
        backends: Mapping[str, Backend],
        *,
        pool: Executor | None,
        threads: int,
        cache: ChunkCache,
    ) -> None:
        self._resolve = resolve
        self._backends = backends
        self._pool = pool
        self._threads = threads if pool is not None else 1
        self.cache = cache
        self._memories: SimpleQueue[_Memory] = SimpleQueue()
        for _ in range(self._threads):
            self._memories.put(_Memory())

    def resolve(self, refs: Iterable[str]) -> list[Resolved]:
        """Return what references stand for; see the Controller."""
        return self._resolve(refs)

    def read(
        self,
        ref: str,
        field: str,
        *,
        rows: Range | None = None,
        layers: Range | None = None,
        out: Array | None = None,
    ) -> Array:
        """Return rows of one field of one Segment.

        Parameters
        ----------
        ref
            The Segment's reference.
        field
            Field name.
        rows, layers
            Half-open ranges; None for all. Only the chunks that hold them are read.
        out
            Array to read into, of the field's memory type and of the selection's shape.

        Returns
        -------
        array ``[rows, *inner]``
            `out`, or a new one.

        Raises
        ------
        InvalidSelection
            A range lies outside of the Segment.
        StepMissing, ObjectShort, ChunkCorrupt
            What is stored is not what was written; names Step, field and chunk.
        """
        (segment,) = self._resolve((ref,))
        length = field_rows(segment, field)
        rows = (0, length) if rows is None else clip(rows, length, f"{ref}, rows of {field}")
        shape, dtype = selection(segment, field, rows[1] - rows[0], layers)
        if out is None:
            out = np.empty(shape, dtype)
        elif out.shape != shape or out.dtype != dtype or not out.flags.writeable:
            raise InvalidField(
                f"is {out.dtype} {list(out.shape)}, a writable {dtype} {list(shape)} is needed",
                subject="destination",
            )
        self.fetch([Read(segment, field, (rows,), out)], layers=layers)
        return out

    def fetch(self, reads: Sequence[Read], *, layers: Range | None = None) -> None:
        """Fill the destinations of several reads; what they share is read once.

        Parameters
        ----------
        reads
            What to read; ranges lie within their Segments.
        layers
            Layer range of every field that has layers.

        Raises
        ------
        StepMissing, ObjectShort, ChunkCorrupt
            The first failure; destinations are then undefined, and no longer written to.
        """
        wants = [Want(r.segment, r.field, r.rows, i) for i, r in enumerate(reads)]
        outs = [r.out for r in reads]
        plan = plan_reads(wants, layers)
        tasks = deque((read, span) for read in plan for span in read.spans)
        helpers = min(self._threads, len(tasks)) - 1
        stop = threading.Event()
        futures: list[Future[None]] = []
        if self._pool is not None:
            futures = [self._pool.submit(self._work, tasks, outs, stop) for _ in range(helpers)]
        try:
            self._work(tasks, outs, stop)
        finally:
            stop.set()
            begun = [f for f in futures if not f.cancel()]
            errors = [e for e in (f.exception() for f in begun) if e is not None]
        if errors:
            raise errors[0]

    # ------------------------------------------------------------ one thread's work

    def _work(
        self, tasks: deque[tuple[ArrayRead, Span]], outs: Sequence[Array], stop: threading.Event
    ) -> None:
        memory = self._memories.get()
        try:
            while not stop.is_set():
                try:
                    read, span = tasks.popleft()
                except IndexError:
                    return
                self._fetch_span(read, span, outs, memory)
        except BaseException:
            stop.set()
            raise
        finally:
            self._memories.put(memory)

    def _fetch_span(
        self, read: ArrayRead, span: Span, outs: Sequence[Array], memory: _Memory
    ) -> None:
        try:
            self._read_values(read, span, outs, memory)
            if read.entry.unknown or read.entry.mask is not None:
                self._mark_unknown(read, span, outs, memory)
        except ObjectMissing as error:
            raise self._missing(read, error) from error

    def _missing(self, read: ArrayRead, error: ObjectMissing) -> TqFsError:
        return StepMissing(
            f"its object {error.subject} is gone",
            subject=read.subject(),
            remedy="the Segment was released while it was read, or the file was deleted: "
            "discard the sample",
        )

    def _read_values(
        self, read: ArrayRead, span: Span, outs: Sequence[Array], memory: _Memory
    ) -> None:
        shared = read.shared and self.cache.limit_bytes > 0
        if shared and self._from_cache(read, span, outs):
            return
        direct = _direct(read, span, outs)
        backend = self._backends[read.unit]
        with backend.open(read.key) as source:
            if direct is not None:
                _read_direct(read, span, direct, source)
                return
            for position, chunk in _read_chunks(read, span, source, memory, backend.request_bytes):
                if shared:
                    self.cache.put((read.key, position), chunk)
                for view in _views(read, position, outs):
                    np.copyto(view.target, _cut(read, position, chunk, view))

    def _mark_unknown(
        self, read: ArrayRead, span: Span, outs: Sequence[Array], memory: _Memory
    ) -> None:
        """Put -1 where the route is unknown."""
        for position in range(span.first, span.last):
            _mark_rows(read, position, outs)
        mask = read.mask()
        if mask is None:
            return
        backend = self._backends[mask.unit]
        with backend.open(mask.key) as source:
            for position, chunk in _read_chunks(mask, span, source, memory, backend.request_bytes):
                for view in _views(mask, position, outs):
                    view.target[_cut(mask, position, chunk, view).view(bool)] = UNKNOWN

    # ------------------------------------------------------------ cache

    def _from_cache(self, read: ArrayRead, span: Span, outs: Sequence[Array]) -> bool:
        chunks = []
        for position in range(span.first, span.last):
            chunk = self.cache.get((read.key, position))
            if chunk is None:
                return False
            chunks.append((position, chunk))
        for position, chunk in chunks:
            for view in _views(read, position, outs):
                np.copyto(view.target, _cut(read, position, chunk, view))
        return True


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


def _read_chunks(
    read: ArrayRead, span: Span, source: ObjectReader, memory: _Memory, request_bytes: int
) -> Iterator[tuple[int, Array]]:
    """Yield each chunk of a span, decoded; valid until the next one.

    Requests are as small as the backend likes them, so that a chunk is still in the processor's
    cache when it is checked and widened.
    """
    layout = read.layout
    offsets = layout.offsets(read.entry.sizes)
    pieces: Iterable[Span] = (span,)
    if span.last - span.first > 1:
        pieces = runs(range(span.first, span.last), offsets, request_bytes)
    for first, last in pieces:
        start = offsets[first]
        raw = memory.raw(offsets[last] - start)
        _fill(read, first, source, (raw,), start)
        for position in range(first, last):
            at = offsets[position] - start
            stored = raw[at : at + layout.stored_nbytes(position, read.entry.sizes)]
            try:
                data = decode(stored, layout, memory.decoded)
            except ChunkCorrupt as error:
                raise _named(error, read, position) from error
            yield position, data.view(layout.dtype).reshape(layout.chunk)


def _named(error: CorruptError, read: ArrayRead, position: int) -> CorruptError:
    return type(error)(error.problem, subject=read.subject(position), remedy=error.remedy)


# ---------------------------------------------------------------- into the destination


def _direct(read: ArrayRead, span: Span, outs: Sequence[Array]) -> Array | None:
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


def _read_direct(read: ArrayRead, span: Span, target: Array, source: ObjectReader) -> None:
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


class _View(NamedTuple):
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


def _views(read: ArrayRead, position: int, outs: Sequence[Array]) -> list[_View]:
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
        views.append(_View(target, start, layer))
    return views


def _cut(read: ArrayRead, position: int, chunk: Array, view: _View) -> Array:
    """Return the part of a chunk that a view takes."""
    target, row, layer = view
    top, left = box(read.layout, position)
    rows = chunk[row - top : row - top + len(target)]
    if rows.shape == target.shape:
        return rows
    return rows[:, layer - left : layer - left + target.shape[1]]


def _mark_rows(read: ArrayRead, position: int, outs: Sequence[Array]) -> None:
    for target, row, _ in _views(read, position, outs):
        for low, high in read.entry.unknown:
            if low < row + len(target) and high > row:
                target[max(0, low - row) : high - row] = UNKNOWN
