"""The end of puts: the index and TransferQueue's controller are told of several at once.

Telling them costs the three processes more than all else that is done for a small put. What was
written is told of together with what is just being written, if that takes no longer than
:data:`PATIENCE_S`; a put that is alone is told of at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from tq_fs.values import Prepared, ValueStore

PATIENCE_S = 0.003
_MOST = 64  # puts that are told of at once
_log = logging.getLogger(__name__)

Schema = dict[str, dict[str, Any]]


class Waiter:
    """Somebody in an event loop who waits for a put to end."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()

    def end(self, error: BaseException | None = None) -> None:
        """Wake up who waits; from any thread."""
        _wake([(self, error)])


class Put(NamedTuple):
    """A put whose values are written.

    Attributes
    ----------
    prepared
        What was written.
    indexes
        Of the samples.
    schema
        What TransferQueue's controller is told of the fields; ``per_sample_shapes`` by index.
    waiter
        Who waits for it.
    """

    prepared: Prepared
    indexes: list[int]
    schema: Schema
    waiter: Waiter


class Notice(NamedTuple):
    """What TransferQueue's controller is told of puts.

    Attributes
    ----------
    partition, indexes, schema
        As in :class:`Put`.
    known
        For each index what the backend wants to hear again, by field.
    """

    partition: str
    indexes: list[int]
    schema: Schema
    known: dict[int, dict[str, int]]


class Commits:
    """Ends puts, in the order in which they were written. Safe to call from many threads.

    Parameters
    ----------
    values
        Where they are; stays the caller's, as the others do.
    loop
        Runs `send`.
    send
        Tells the controller; returns once it has acknowledged.
    """

    def __init__(
        self,
        values: ValueStore,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[Notice], Awaitable[None]],
    ) -> None:
        self._values = values
        self._loop = loop
        self._send = send
        self._changed = threading.Condition()
        self._waiting: list[Put] = []
        self._writing = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tq-fs-commits", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Hear that a put is being written; :meth:`finish` or :meth:`give_up` follows."""
        with self._changed:
            self._writing += 1

    def give_up(self) -> None:
        """Hear that a put was not written."""
        with self._changed:
            self._writing -= 1
            self._changed.notify()

    def finish(self, put: Put) -> None:
        """End a put that is written; its waiter wakes up when that is done, or has failed."""
        with self._changed:
            self._writing -= 1
            self._waiting.append(put)
            if len(self._waiting) == 1 or self._is_due():
                self._changed.notify()

    def close(self) -> None:
        """End all that is written, and the thread; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _is_due(self) -> bool:
        return not self._writing or len(self._waiting) >= _MOST or self._closed

    def _run(self) -> None:
        while puts := self._next():
            by_partition: dict[str, list[Put]] = {}
            for put in puts:
                by_partition.setdefault(put.prepared.partition, []).append(put)
            for partition, some in by_partition.items():
                self._commit(partition, some)

    def _next(self) -> list[Put]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._changed.wait_for(self._is_due, PATIENCE_S)
            some, self._waiting = self._waiting, []
            return some

    def _commit(self, partition: str, puts: list[Put]) -> None:
        try:
            generation = self._values.commit(partition, [put.prepared for put in puts])
        except BaseException as error:  # the thread lives on; who waits is told
            _wake([(put.waiter, error) for put in puts])
            return
        for notice, some in joined(partition, puts, generation):
            future = asyncio.run_coroutine_threadsafe(self._tell(notice), self._loop)
            future.add_done_callback(_ender(some))

    async def _tell(self, notice: Notice) -> None:
        await self._send(notice)


def _ender(puts: Sequence[Put]) -> Callable[[Future[None]], None]:
    def end(done: Future[None]) -> None:
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        _wake([(put.waiter, error) for put in puts])

    return end


def _wake(ended: Iterable[tuple[Waiter, BaseException | None]]) -> None:
    """Wake up who waits, each event loop once."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[Waiter, BaseException | None]]] = {}
    for waiter, error in ended:
        loops.setdefault(waiter.loop, []).append((waiter, error))
    for loop, some in loops.items():
        try:
            loop.call_soon_threadsafe(_set, some)
        except RuntimeError:  # the loop was closed: nobody waits any more
            _log.info("%d puts ended after their event loop", len(some))


def _set(ended: Iterable[tuple[Waiter, BaseException | None]]) -> None:
    for waiter, error in ended:
        if waiter.future.done():
            continue  # cancelled
        if error is None:
            waiter.future.set_result(None)
        else:
            waiter.future.set_exception(error)


def joined(partition: str, puts: Sequence[Put], generation: int) -> list[tuple[Notice, list[Put]]]:
    """Return what the controller is told of puts: neighbours of the same schema together.

    It takes the shape of fields from each notice as it comes, and a later one of another shape
    changes what an earlier one has said; so only equal ones are joined.
    """
    found: list[tuple[Notice, list[Put]]] = []
    kind: object = None
    for put in puts:
        known = dict.fromkeys(put.schema, generation)
        notes = dict.fromkeys(put.indexes, known)
        if found and _kind(put.schema) == kind:
            notice, some = found[-1]
            notice.indexes.extend(put.indexes)
            notice.known.update(notes)
            _add_shapes(notice.schema, put.schema)
            some.append(put)
        else:
            kind = _kind(put.schema)
            found.append((Notice(partition, list(put.indexes), put.schema, notes), [put]))
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
