"""SegmentReader: references into arrays, in parallel and within a fixed amount of memory."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tq_fs.backends import Readable
from tq_fs.cache import ChunkCache
from tq_fs.errors import (
    CorruptError,
    InvalidField,
    ObjectMissing,
    StepMissing,
    TqFsError,
    UnitLost,
)
from tq_fs.fields import UNKNOWN
from tq_fs.keys import Incarnation
from tq_fs.logs import carried, log_context
from tq_fs.manifests import Resolved
from tq_fs.metrics import Counter, Metrics
from tq_fs.placing import Memory, cut, direct, mark_rows, place, read_chunks, read_direct, views
from tq_fs.plan import ArrayRead, Range, Span, Want, clip, field_rows, plan_reads, selection

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
_log = logging.getLogger(__name__)

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
    metrics
        Counts bytes and spans by their unit, seconds and errors; None counts nothing.
    gone
        Asks anew whether a session is there of which a Step is gone: the reason where it is not.
        For processes that may have missed a release.
    """

    def __init__(
        self,
        resolve: Resolve,
        backends: Mapping[str, Readable],
        *,
        pool: Executor | None,
        threads: int,
        cache: ChunkCache,
        metrics: Metrics | None = None,
        gone: Callable[[Incarnation], TqFsError | None] = lambda _: None,
    ) -> None:
        self._gone = gone
        self._resolve = resolve
        self._backends = backends
        self._pool = pool
        self._threads = threads if pool is not None else 1
        self.cache = cache
        self._memories: SimpleQueue[Memory] = SimpleQueue()
        for _ in range(self._threads):
            self._memories.put(Memory())
        self._meter = None if metrics is None else _Meter(metrics)
        self._failures = nullcontext() if metrics is None else metrics.failures("read")

    def resolve(self, refs: Iterable[str]) -> list[Resolved]:
        """Return what references stand for; see the Controller."""
        with self._failures:
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
        with self._failures:
            read = self._planned(ref, field, rows, layers, out)
        self.fetch([read], layers=layers)
        return read.out

    def _planned(
        self, ref: str, field: str, rows: Range | None, layers: Range | None, out: Array | None
    ) -> Read:
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
        return Read(segment, field, (rows,), out)

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
        with self._failures:
            plan = plan_reads(wants, layers)
        self.carry_out(plan, [r.out for r in reads])

    def carry_out(self, plan: Sequence[ArrayRead], outs: Sequence[Array]) -> None:
        """Fill destinations as a plan says; see :meth:`fetch`."""
        begun = perf_counter()
        with self._failures:
            self._carry_out(plan, outs)
        if self._meter is not None:
            self._meter.took.observe(perf_counter() - begun)

    def _carry_out(self, plan: Sequence[ArrayRead], outs: Sequence[Array]) -> None:
        tasks = deque((read, span) for read in plan for span in read.spans)
        helpers = min(self._threads, len(tasks)) - 1
        stop = threading.Event()
        futures: list[Future[None]] = []
        if self._pool is not None:
            work = carried(self._work)
            futures = [self._pool.submit(work, tasks, outs, stop) for _ in range(helpers)]
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
            with log_context() as about:
                while not stop.is_set():
                    try:
                        read, span = tasks.popleft()
                    except IndexError:
                        return
                    about.session, about.step = read.incarnation.session_id, read.step
                    self._fetch_span(read, span, outs, memory)
        except BaseException:
            stop.set()
            raise
        finally:
            self._memories.put(memory)

    def _fetch_span(
        self, read: ArrayRead, span: Span, outs: Sequence[Array], memory: Memory
    ) -> None:
        try:
            self._trusting(read, lambda: self._read_values(read, span, outs, memory))
            if read.entry.unknown or read.entry.mask is not None:
                mask = read.mask() or read
                self._trusting(mask, lambda: self._mark_unknown(read, span, outs, memory))
        except ObjectMissing as error:
            raise self._missing(read, error) from error
        except UnitLost as error:
            subject = f"{read.subject()}, on {error.subject}"
            raise UnitLost(error.problem, subject=subject, remedy=error.remedy) from error

    def _trusting(self, read: ArrayRead, fetch: Callable[[], None]) -> None:
        """Fetch, and once more where the bytes may have been damaged on their way."""
        try:
            fetch()
        except CorruptError:
            if not self._backends[read.unit].distrust(read.key):
                raise
            _log.warning("%s came damaged; it is read once more", read.subject())
            fetch()

    def _missing(self, read: ArrayRead, error: ObjectMissing) -> TqFsError:
        return self._gone(read.incarnation) or StepMissing(
            f"its object {error.subject} is gone",
            subject=read.subject(),
            remedy="the Segment was released while it was read, or the file was deleted: "
            "discard the sample",
        )

    def _read_values(
        self, read: ArrayRead, span: Span, outs: Sequence[Array], memory: Memory
    ) -> None:
        shared = read.shared and self.cache.limit_bytes > 0
        if shared and self._from_cache(read, span, outs):
            return
        target = direct(read, span, outs)
        backend = self._backends[read.unit]
        with backend.open(read.key) as source:
            if target is not None:
                read_direct(read, span, target, source)
            else:
                chunks = read_chunks(read, span, source, memory, backend.request_bytes)
                for position, chunk in chunks:
                    if shared:
                        self.cache.put((read.key, position), chunk)
                    place(read, position, chunk, outs)
        if self._meter is not None:
            self._meter.got(read, span)

    def _mark_unknown(
        self, read: ArrayRead, span: Span, outs: Sequence[Array], memory: Memory
    ) -> None:
        """Put -1 where the route is unknown."""
        for position in range(span.first, span.last):
            mark_rows(read, position, outs)
        mask = read.mask()
        if mask is None:
            return
        backend = self._backends[mask.unit]
        with backend.open(mask.key) as source:
            for position, chunk in read_chunks(mask, span, source, memory, backend.request_bytes):
                for view in views(mask, position, outs):
                    view.target[cut(mask, position, chunk, view).view(bool)] = UNKNOWN
        if self._meter is not None:
            self._meter.got(mask, span)

    # ------------------------------------------------------------ cache

    def _from_cache(self, read: ArrayRead, span: Span, outs: Sequence[Array]) -> bool:
        chunks = []
        for position in range(span.first, span.last):
            chunk = self.cache.get((read.key, position))
            if chunk is None:
                return False
            chunks.append((position, chunk))
        for position, chunk in chunks:
            place(read, position, chunk, outs)
        return True


class _Meter:
    """What is counted of reads."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._by_unit: dict[str, tuple[Counter, Counter]] = {}
        self.took = metrics.histogram("tqfs_read_seconds")

    def got(self, read: ArrayRead, span: Span) -> None:
        nbytes, spans = self._of(read.unit)
        nbytes.add(read.nbytes(span))
        spans.add()

    def _of(self, unit: str) -> tuple[Counter, Counter]:
        found = self._by_unit.get(unit)
        if found is None:
            found = self._by_unit[unit] = (
                self._metrics.counter("tqfs_read_bytes_total", source=unit),
                self._metrics.counter("tqfs_read_spans_total", source=unit),
            )
        return found
