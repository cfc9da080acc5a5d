"""Puts, carried out in threads; several are told of at once.

Telling the index and TransferQueue's controller of a put costs the processes more than all else
that is done for a small one. A put that is alone is told of at once; where several are under way
those that are written wait for each other, but not longer than :data:`PATIENCE_S`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

from tq_fs.errors import SessionClosed
from tq_fs.values import Prepared, ValueStore

PATIENCE_S = 0.004
TOGETHER = 4  # puts that wait for each other, at most
LARGE_BYTES = 4 * 1024 * 1024
_LARGE_THREADS = 2
_RECENT = 16  # puts by which it is judged how many are under way
_log = logging.getLogger(__name__)

Schema = dict[str, dict[str, Any]]


class Waiter:
    """Somebody in an event loop who waits for a put to end."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[int] = self.loop.create_future()  # of the generation

    async def end(self) -> int:
        """Return the generation once the put has ended; also where that is no longer wanted.

        Raises
        ------
        CancelledError
            Who waits was cancelled; the put has ended all the same.
        """
        try:
            return await asyncio.shield(self.future)
        except asyncio.CancelledError:
            await asyncio.wait([self.future])
            if error := self.future.exception():
                _log.warning("a put that was cancelled has failed", exc_info=error)
            raise


class Put(NamedTuple):
    """A put that is asked for.

    Attributes
    ----------
    partition
        Of its samples.
    write
        Writes its values; returns the generation, or what is still to be committed, and what
        TransferQueue's controller is told of the fields (``per_sample_shapes`` by index).
    indexes
        Of the samples.
    nbytes
        Of its tensors: small puts do not wait for large ones.
    waiter
        Who waits for it.
    """

    partition: str
    write: Callable[[], tuple[int | Prepared, Schema]]
    indexes: list[int]
    nbytes: int
    waiter: Waiter


class Written(NamedTuple):
    """A put whose values are written: its generation, or what is to be committed."""

    put: Put
    done: int | Prepared
    schema: Schema


class Notice(NamedTuple):
    """What TransferQueue's controller is told of puts.

    Attributes
    ----------
    partition, indexes
        The samples.
    schema
        As in :class:`Put`.
    known
        For each index what the backend wants to hear again, by field.
    """

    partition: str
    indexes: list[int]
    schema: Schema
    known: dict[int, dict[str, int]]


class Puts:
    """Carries out puts. Safe to call from many threads.

    Parameters
    ----------
    values
        Where they go; stays the caller's, as the others do.
    tell
        Tells the controller; returns once it has acknowledged. Called by one thread, which is told
        to stop by None.
    threads
        That write small puts: on a local disk two keep up with the loops that ask, and more would
        only take the interpreter from each other.
    """

    def __init__(
        self,
        values: ValueStore,
        tell: Callable[[Notice | None], None],
        *,
        threads: int,
    ) -> None:
        self._values = values
        self._tell = tell
        self._small: SimpleQueue[Put | None] = SimpleQueue()
        self._large: SimpleQueue[Put | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._written: list[Written] = []
        self._outstanding = 0
        self._recent: deque[int] = deque([1], _RECENT)
        self._closed = self._ended = False
        queues = [self._small] * threads + [self._large] * _LARGE_THREADS
        self._writers = [
            threading.Thread(target=self._write_all, args=(queue,), name="tq-fs-put", daemon=True)
            for queue in queues
        ]
        self._committer = threading.Thread(
            target=self._commit_all, name="tq-fs-commit", daemon=True
        )
        for thread in (*self._writers, self._committer):
            thread.start()

    def ask(self, put: Put) -> None:
        """Have a put carried out; its waiter wakes up when that is done, or has failed.

        Raises
        ------
        SessionClosed
        """
        with self._changed:
            if self._closed:
                raise SessionClosed("is closed", subject="this client's storage manager")
            self._outstanding += 1
            self._recent.append(self._outstanding)
            (self._small if put.nbytes < LARGE_BYTES else self._large).put(put)

    def close(self) -> None:
        """Carry out what was asked for, and end the threads; idempotent."""
        with self._changed:
            if not self._closed:
                self._closed = True
                for _ in self._writers:
                    self._small.put(None)
                    self._large.put(None)
        for thread in self._writers:
            thread.join()
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._committer.join()

    # ------------------------------------------------------------ write

    def _write_all(self, asked: SimpleQueue[Put | None]) -> None:
        while (put := asked.get()) is not None:
            try:
                written = Written(put, *put.write())
            except BaseException as error:  # the thread lives on; who waits is told
                self._fail([put], error)
                continue
            with self._changed:
                self._written.append(written)
                if len(self._written) == 1 or self._is_due():
                    self._changed.notify()

    # ------------------------------------------------------------ tell

    def _commit_all(self) -> None:
        while some := self._next():
            by_partition: dict[str, list[Written]] = {}
            for one in some:
                by_partition.setdefault(one.put.partition, []).append(one)
            for partition, members in by_partition.items():
                try:
                    self._commit(partition, members)
                except Exception as error:  # the thread lives on; who waits is told
                    self._fail([one.put for one in members], error)
        self._tell(None)

    def _next(self) -> list[Written]:
        """Return what is written, together with what will be in a moment."""
        with self._changed:
            self._changed.wait_for(lambda: self._written or self._ended)
            self._changed.wait_for(self._is_due, PATIENCE_S)
            some, self._written = self._written, []
            return some

    def _is_due(self) -> bool:
        return len(self._written) >= min(max(self._recent), TOGETHER)

    def _commit(self, partition: str, written: Sequence[Written]) -> None:
        prepared = [one.done for one in written if isinstance(one.done, Prepared)]
        try:
            generation = self._values.commit(partition, prepared)
        except BaseException as error:  # as above
            self._fail([one.put for one in written if isinstance(one.done, Prepared)], error)
            written = [one for one in written if isinstance(one.done, int)]
            generation = 0
        for notice, some in joined(partition, written, generation):
            try:
                self._tell(notice)
            except Exception:  # the values are stored: as with a controller that does not answer
                _log.exception("the controller was not told of %s", notice.indexes)
            done = [one.done if isinstance(one.done, int) else generation for one in some]
            self._end([one.put for one in some], done)

    def _fail(self, puts: Sequence[Put], error: BaseException) -> None:
        self._end(puts, [error] * len(puts))

    def _end(self, puts: Sequence[Put], results: Sequence[int | BaseException]) -> None:
        """Wake up who waits, each event loop once."""
        with self._changed:
            self._outstanding -= len(puts)
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Waiter, int | BaseException]]] = {}
        for put, result in zip(puts, results, strict=True):
            loops.setdefault(put.waiter.loop, []).append((put.waiter, result))
        for loop, some in loops.items():
            try:
                loop.call_soon_threadsafe(_wake, some)
            except RuntimeError:  # the loop was closed: nobody waits any more
                _log.info("%d puts ended after their event loop", len(some))


def _wake(ended: Iterable[tuple[Waiter, int | BaseException]]) -> None:
    for waiter, result in ended:
        if waiter.future.done():
            continue  # who waits was cancelled twice
        if isinstance(result, StopIteration):  # which a future cannot carry
            waiter.future.set_exception(RuntimeError(f"a put raised {result!r}"))
        elif isinstance(result, int):
            waiter.future.set_result(result)
        else:
            waiter.future.set_exception(result)


# ---------------------------------------------------------------- notices


def joined(
    partition: str, written: Sequence[Written], generation: int
) -> list[tuple[Notice, list[Written]]]:
    """Return what the controller is told of puts: neighbours of the same schema together.

    It takes the shape of fields from each notice as it comes, and a later one of another shape
    changes what an earlier one has said; so only equal ones are joined.
    """
    found: list[tuple[Notice, list[Written]]] = []
    kind: object = None
    for one in written:
        mine = one.done if isinstance(one.done, int) else generation
        known = dict.fromkeys(one.schema, mine)
        notes = dict.fromkeys(one.put.indexes, known)
        if found and _kind(one.schema) == kind:
            notice, some = found[-1]
            notice.indexes.extend(one.put.indexes)
            notice.known.update(notes)
            _add_shapes(notice.schema, one.schema)
            some.append(one)
        else:
            kind = _kind(one.schema)
            found.append((Notice(partition, list(one.put.indexes), one.schema, notes), [one]))
    return found


def _kind(schema: Schema) -> object:
    return [
        (name, [(key, value) for key, value in meta.items() if key != "per_sample_shapes"])
        for name, meta in schema.items()
    ]


def _add_shapes(schema: Schema, other: Schema) -> None:
    for name, meta in other.items():
        shapes = meta.get("per_sample_shapes")
        if shapes is not None:
            schema[name]["per_sample_shapes"].update(shapes)
