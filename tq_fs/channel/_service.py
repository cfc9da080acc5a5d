"""What a unit does for a request: one call of its backend, within its own store."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from tq_fs.backends import Backend, Buffer, LocalObject, ObjectReader, Stamping
from tq_fs.budget import ByteBudget
from tq_fs.channel import _wire as wire
from tq_fs.channel._sealed import FRAME_BYTES
from tq_fs.channel._stream import Stream
from tq_fs.channel._wire import Limits
from tq_fs.errors import InvalidKey, ProtocolMismatch

_NAMES = 2_000  # of one answer to a listing


class Service:
    """Serves requests from a backend. Safe to call from many threads.

    Parameters
    ----------
    backend
        What is served; stays the caller's.
    roots
        First components of the keys that are served; None for all.
    limits
        How much at a time.
    clock
        Monotonic seconds.
    unit
        The unit's name, in messages.
    calls
        What can be called besides, by name.
    noted
        Told of groups that come with a note, by their place; returns its answer.
    """

    def __init__(
        self,
        backend: Backend,
        roots: frozenset[str] | None,
        limits: Limits,
        *,
        clock: Callable[[], float],
        unit: str,
        calls: Mapping[str, Callable[[bytes], bytes]],
        noted: Callable[[str, bytes], bytes] | None,
    ) -> None:
        self._backend = backend
        self._calls = calls
        self._noted = noted
        self._roots = roots
        self.budget = ByteBudget(
            limits.budget_bytes,
            deadline_s=limits.deadline_s,
            clock=clock,
            subject=f"unit {unit}",
        )
        self._disk = threading.Semaphore(limits.writers)
        self._in_hand: Counter[str] = Counter()
        self._ended = threading.Condition()

    def lane(self) -> LaneService:
        """Return what serves one lane."""
        return LaneService(self)

    def write(
        self, request: wire.Publish | wire.Put, body: memoryview, is_wanted: Callable[[], bool]
    ) -> wire.Done:
        """Write what came; answer with a group's place.

        Parameters
        ----------
        is_wanted
            Whether the sender still waits. One that gave up may have deleted the place since, so
            that nothing may appear there any more.
        """
        target = self.own(request.prefix if isinstance(request, wire.Publish) else request.key)
        with self._ended:
            self._in_hand[target] += 1
        try:
            with self._disk:
                if not is_wanted():
                    raise ConnectionAbortedError("its sender gave up")
                if isinstance(request, wire.Put):
                    self._backend.put(target, bytes(body), urgent=request.urgent)
                    return wire.Done()
                members = _members(request, body)
                place = self._backend.publish(target, members, fresh=request.fresh)
            return wire.Done(place, self._note(place, request.note))
        finally:
            with self._ended:
                self._in_hand[target] -= 1
                self._in_hand += Counter()  # forgets what is at 0
                self._ended.notify_all()

    def _note(self, place: str, note: bytes) -> bytes:
        if not note:
            return b""
        if self._noted is None:
            raise ProtocolMismatch("takes no notes", subject="this endpoint")
        return self._noted(place, note)

    def call(self, name: str, body: bytes) -> bytes:
        """Call something by name.

        Raises
        ------
        ProtocolMismatch
            There is no such call.
        """
        found = self._calls.get(name)
        if found is None:
            raise ProtocolMismatch(
                f"has no call {name!r}, only {sorted(self._calls)}",
                subject="this endpoint",
                remedy="run the same version of tq-fs everywhere",
            )
        return found(body)

    def delete(self, prefix: str) -> bool:
        """Delete, once the writes below that are in hand have ended."""
        self.own(prefix)
        with self._ended:
            self._ended.wait_for(lambda: not self._is_written(prefix))
        return self._backend.delete(prefix)

    def own(self, key: str) -> str:
        """Return a key that is this store's to serve; the backend refuses what leads out of it.

        Raises
        ------
        InvalidKey
        """
        if self._roots is not None and not self._is_own(key):
            raise InvalidKey(f"a unit serves {sorted(self._roots)} only", subject=repr(key)[:200])
        return key

    def _is_own(self, key: str) -> bool:
        return self._roots is None or key.partition("/")[0] in self._roots

    def names(self, request: wire.List | wire.Stamps) -> Iterator[tuple[str, int | str]]:
        """Return what lies below a prefix, with sizes or -1, or with stamps."""
        if not request.prefix and self._roots != frozenset():
            return (item for item in self._names(request) if self._is_own(item[0]))
        self.own(request.prefix)
        return self._names(request)

    def _names(self, request: wire.List | wire.Stamps) -> Iterator[tuple[str, int | str]]:
        if isinstance(request, wire.Stamps):
            return self._stamps(request.prefix)
        if request.deep:
            return iter(self._backend.walk(request.prefix))
        return ((name, -1) for name in self._backend.list(request.prefix))

    def open(self, key: str) -> ObjectReader:
        """Open an object."""
        return self._backend.open(self.own(key))

    def do(self, request: wire.AnyRequest) -> bool | bytes | str | None:
        """Do what has neither a body nor a long answer."""
        backend = self._backend
        match request:
            case wire.Get(key=key):
                return backend.get(self.own(key))
            case wire.Delete(prefix=prefix):
                return self.delete(prefix)
            case wire.Stamp(key=key):
                return self._stamp(self.own(key))
            case wire.Distrust(key=key):
                return backend.distrust(self.own(key))
            case wire.Cool(prefixes=prefixes):
                backend.cool([self.own(prefix) for prefix in prefixes])
            case wire.Settle(prefix=prefix):
                backend.settle(self.own(prefix))
            case wire.Sync():
                backend.sync()
            case _:
                raise ProtocolMismatch(f"{type(request).__name__} comes too late", subject="a lane")
        return None

    def _stamp(self, key: str) -> str:
        """Return an object's stamp; empty where the backend knows none."""
        return self._backend.stamp(key) if isinstance(self._backend, Stamping) else ""

    def _stamps(self, prefix: str) -> Iterator[tuple[str, str]]:
        if isinstance(self._backend, Stamping):
            return self._backend.stamps(prefix)
        return ((key, "") for key, _ in self._backend.walk(prefix))

    def _is_written(self, prefix: str) -> bool:
        return any(t == prefix or t.startswith(f"{prefix}/") for t in self._in_hand)


def _members(request: wire.Publish, body: memoryview) -> dict[str, list[Buffer]]:
    members: dict[str, list[Buffer]] = {}
    at = 0
    for name, nbytes in request.members:
        members[name] = [body[at : at + nbytes]]
        at += nbytes
    if at != body.nbytes or any(nbytes < 0 for _, nbytes in request.members):
        raise ProtocolMismatch(
            f"{body.nbytes} bytes where members have {at}", subject=request.prefix
        )
    return members


class LaneService:
    """One lane's requests, and the listing it is in the middle of."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._listing: Iterator[tuple[str, int | str]] | None = None
        self._piece = bytearray()

    def listed(self, request: wire.List | wire.Stamps | wire.More) -> wire.Listed:
        """Begin or go on with a listing."""
        if not isinstance(request, wire.More):
            self._listing = self._service.names(request)
        if self._listing is None:
            raise ProtocolMismatch("no listing to go on with", subject="a lane")
        names = list(itertools.islice(self._listing, _NAMES))
        if len(names) < _NAMES:
            self._listing = None
        return wire.Listed(names=names, last=self._listing is None)

    def send(self, request: wire.Read, stream: Stream, piece_bytes: int) -> None:
        """Send bytes of an object, from the page cache where that can be.

        Raises
        ------
        TqFsError
            Nothing was sent.
        ConnectionError
            The object ended early, or could not be read on: the lane has to be closed.
        """
        offset, nbytes = request.offset, request.nbytes
        if offset < 0 or nbytes < 0:
            raise ProtocolMismatch(f"{nbytes} bytes from {offset}", subject=request.key)
        prefix = memoryview(wire.PREFIX.pack(wire.MAGIC, 0, nbytes))
        with self._service.open(request.key) as source:
            if isinstance(source, LocalObject):
                if stream.plain:
                    source.check(offset, nbytes)
                    stream.send([prefix], more=True)
                    source.send(stream.fileno(), offset, nbytes)
                    return
                piece_bytes = min(piece_bytes, FRAME_BYTES)  # sealed while it is in the cache
            self._send_pieces(source, request, stream, prefix, piece_bytes)

    def _send_pieces(
        self,
        source: ObjectReader,
        request: wire.Read,
        stream: Stream,
        prefix: memoryview,
        piece_bytes: int,
    ) -> None:
        end = request.offset + request.nbytes
        if request.nbytes > piece_bytes:
            source.readinto([bytearray(1)], end - 1)  # is it that long?
        piece = memoryview(self._buffer(min(piece_bytes, request.nbytes)))
        first = True
        for start in range(request.offset, end, piece_bytes) or (request.offset,):
            part = piece[: min(piece_bytes, end - start)]
            try:
                source.readinto([part], start)
            except Exception as error:
                if first:
                    raise
                raise ConnectionAbortedError(f"{request.key} could not be read on") from error
            stream.send([prefix, part] if first and part.nbytes else [prefix if first else part])
            first = False

    def _buffer(self, nbytes: int) -> bytearray:
        if len(self._piece) < nbytes:
            self._piece = bytearray(nbytes)
        return self._piece
