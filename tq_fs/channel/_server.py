"""The unit's end of the channel: a thread for each lane, and bytes that wait where they are.

A write is received only once the unit has room for it. Until then its bytes stay in the sender's
memory, and the connection's own flow control holds them there.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tq_fs.backends import Backend
from tq_fs.channel import _wire as wire
from tq_fs.channel._buffers import Buffers
from tq_fs.channel._endpoint import listen
from tq_fs.channel._fence import Fence
from tq_fs.channel._identity import Identity
from tq_fs.channel._sealed import SealedStream
from tq_fs.channel._service import LaneService, Service
from tq_fs.channel._stream import Forged, Gone, Stream
from tq_fs.channel._wire import Limits
from tq_fs.errors import (
    BackpressureTimeout,
    ProtocolMismatch,
    StepTooLarge,
    StorageFailed,
    StorageUnreachable,
    TqFsError,
    WrongStore,
)
from tq_fs.logs import carried, log_context
from tq_fs.metrics import Sample

_log = logging.getLogger(__name__)
_DRAIN = 64 * 1024
_BUSY_S = 0.25  # between two signs of life


class ChannelServer:
    """Serves a backend to other processes, from threads of its own until it is closed.

    Parameters
    ----------
    backend
        What is served; stays the caller's.
    store_id
        The store it belongs to; clients of another one are refused.
    unit
        The unit's name, in messages.
    local
        Endpoints for processes of this host, such as ``unix:/folder/socket``: whoever may enter the
        folder is served.
    remote
        Endpoints for other hosts, such as ``tcp:10.0.0.7:0``, encrypted with `identity`; port 0
        takes a free one.
    identity
        The store's certificate. None: `remote` is not protected, for networks that are.
    roots
        First components of the keys that are served; None for all.
    limits
        How much at a time.
    fence
        Refuses what a Controller sends that was replaced; None where there is none.
    calls
        What clients can call besides, by name: bytes in, bytes out.
    noted
        Told of groups that come with a note, by their place and it; returns an answer.
    clock
        Monotonic seconds.

    Attributes
    ----------
    endpoints
        Where it listens, local ones first; ports are filled in.

    Raises
    ------
    InvalidConfig
        An endpoint cannot be listened at.
    DependencyMissing
        What an identity needs is not installed.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        store_id: str,
        unit: str,
        local: Sequence[str] = (),
        remote: Sequence[str] = (),
        identity: Identity | None = None,
        roots: frozenset[str] | None = frozenset({"steps", "manifests"}),
        limits: Limits | None = None,
        fence: Fence | None = None,
        calls: Mapping[str, Callable[[bytes], bytes]] | None = None,
        noted: Callable[[str, bytes], bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fence = fence
        self._store_id = store_id
        self._unit = unit
        self._limits = limits or Limits()
        self._service = Service(
            backend, roots, self._limits, clock=clock, unit=unit, calls=calls or {}, noted=noted
        )
        self._buffers = Buffers(self._limits.budget_bytes)
        self._tls = None if identity is None else identity.context(server=True)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._lanes: dict[threading.Thread, Stream] = {}
        self._busy: set[threading.Thread] = set()
        self._closing = False
        self._listeners: list[tuple[socket.socket, threading.Thread]] = []
        self.endpoints: tuple[str, ...] = ()
        try:
            for endpoint in local:
                self._listen(endpoint, None)
            for endpoint in remote:
                self._listen(endpoint, self._tls)
        except BaseException:
            self.close()
            raise

    @property
    def counts(self) -> dict[str, int]:
        """What has passed, by name: requests, bytes, malformed, refused, ``error:<code>``."""
        with self._lock:
            return dict(self._counts)

    @property
    def lanes(self) -> int:
        """Connections that are open."""
        return len(self._lanes)

    @property
    def held_bytes(self) -> int:
        """Bytes of writes that were received and are not stored yet."""
        return self._service.budget.used_bytes

    def samples(self) -> Iterator[Sample]:
        """Yield what :meth:`tq_fs.metrics.Metrics.watch` wants to know."""
        counts = self.counts
        for what in ("requests", "received_bytes", "sent_bytes", "refused", "malformed"):
            yield Sample(f"tqfs_channel_{what}_total", counts.get(what, 0))
        for what, count in counts.items():
            if what.startswith("error:"):
                labels = {"operation": "serve", "code": what.removeprefix("error:")}
                yield Sample("tqfs_errors_total", count, labels)
        yield Sample("tqfs_channel_lanes", self.lanes)
        yield Sample("tqfs_channel_held_bytes", self.held_bytes)

    def close(self) -> None:
        """End what is under way, and close all connections; idempotent."""
        self._closing = True
        for sock, thread in self._listeners:
            sock.shutdown(socket.SHUT_RDWR)
            thread.join()
            sock.close()
        for endpoint in self.endpoints:
            if endpoint.startswith("unix:") and os.path.exists(path := endpoint[5:]):
                os.unlink(path)
        self._listeners, self.endpoints = [], ()
        with self._lock:
            lanes = dict(self._lanes)
            idle = [stream for thread, stream in lanes.items() if thread not in self._busy]
        for stream in idle:
            stream.end()  # its thread closes it
        for thread in lanes:
            thread.join()

    # ------------------------------------------------------------ connections

    def _listen(self, endpoint: str, tls: ssl.SSLContext | None) -> None:
        sock, name = listen(endpoint)
        thread = threading.Thread(
            target=self._accept, args=(sock, tls), name="tq-fs-channel", daemon=True
        )
        self._listeners.append((sock, thread))
        self.endpoints += (name,)
        thread.start()

    def _accept(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        with log_context(store=self._store_id, unit=self._unit):
            self._accept_all(listener, tls)

    def _accept_all(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._closing:
                    return
                _log.warning("unit %s could not accept a connection: %s", self._unit, error)
                time.sleep(0.1)  # out of descriptors, perhaps: lanes that end give some back
                continue
            thread = threading.Thread(
                target=carried(self._lane), args=(sock, tls), name="tq-fs-lane", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # no more threads: who connects tries again
                self._count("refused")
                _log.warning("unit %s has no thread for a connection: %s", self._unit, error)
                sock.close()
                time.sleep(0.1)

    def _lane(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Serve one connection until it ends."""
        me = threading.current_thread()
        try:
            stream = self._stream(sock, tls)
        except OSError as error:
            self._count("refused")
            _log.warning("unit %s refused a connection: %s", self._unit, error)
            sock.close()
            return
        with self._lock:
            self._lanes[me] = stream
        try:
            self._converse(stream)
        except Gone:
            pass
        except (Forged, ProtocolMismatch) as error:
            self._count("malformed")
            _log.warning("unit %s closed a lane: %s", self._unit, error)
        except OSError as error:
            _log.info("unit %s lost a lane: %s", self._unit, error)
        finally:
            stream.close()
            with self._lock:
                del self._lanes[me]
                self._busy.discard(me)

    def _stream(self, sock: socket.socket, tls: ssl.SSLContext | None) -> Stream:
        if tls is None:
            return Stream(sock, self._limits.quiet_s)
        return SealedStream(sock, self._limits.quiet_s, tls, server=True)

    def _converse(self, stream: Stream) -> None:
        lane = self._service.lane()
        prefix = memoryview(bytearray(wire.PREFIX.size))
        hello: wire.Hello | None = None
        while self._hear(stream, prefix, patiently=hello is not None):
            magic, length, nbytes = wire.PREFIX.unpack(prefix)
            if magic != wire.MAGIC or not 0 < length <= wire.MOST_HEADER:
                raise ProtocolMismatch("bytes of another language", subject="a message")
            header = bytearray(length)
            stream.fill(memoryview(header))
            request = wire.decode_request(header)
            self._count("requests")
            if isinstance(request, wire.Hello) != (hello is None):
                raise ProtocolMismatch(f"{type(request).__name__} out of turn", subject="a lane")
            if nbytes and not isinstance(request, wire.Publish | wire.Put | wire.Call):
                raise ProtocolMismatch("bytes that nobody asked for", subject="a message")
            if isinstance(request, wire.Hello):
                answer = self._welcome(request)
                self._answer(stream, answer)
                hello = request if isinstance(answer, wire.Welcome) else None
            elif hello is not None:
                self._serve(stream, lane, hello, request, nbytes)
            with self._lock:
                self._busy.discard(threading.current_thread())

    def _hear(self, stream: Stream, prefix: memoryview, *, patiently: bool) -> bool:
        """Wait for the next message; return False where the unit closes."""
        while not self._closing:
            try:
                have = stream.begin(prefix)
            except TimeoutError as error:
                if patiently:
                    continue
                raise ProtocolMismatch("no hello", subject="a lane") from error
            with self._lock:
                self._busy.add(threading.current_thread())
            stream.fill(prefix[have:])
            return True
        return False

    def _welcome(self, hello: wire.Hello) -> wire.AnyAnswer:
        error: TqFsError | None = None
        if hello.version != wire.VERSION:
            error = ProtocolMismatch(
                f"this client speaks version {hello.version} of the channel, the unit "
                f"{wire.VERSION}",
                subject=f"unit {self._unit}",
                remedy="run the same version of tq-fs everywhere",
            )
        elif hello.store_id != self._store_id:
            error = WrongStore(
                f"serves {self._store_id!r}, this client wants {hello.store_id!r}",
                subject=f"unit {self._unit}",
                remedy="check url and store_id",
            )
        elif hello.unit not in ("", self._unit):
            error = StorageUnreachable(
                f"is not there any more: unit {self._unit} is",
                subject=f"unit {hello.unit}",
                remedy="ask the Controller where it is",
            )
        elif len(self._lanes) > self._limits.lanes:
            error = StorageFailed(
                f"has {self._limits.lanes} connections, and takes no more",
                subject=f"unit {self._unit}",
                remedy="use fewer processes or threads, more units, or raise its lanes",
            )
        if error is not None:
            return self._failed(error)
        try:
            if self._fence is not None:
                self._fence.admit(hello.epoch, hello.holder)
        except TqFsError as refused:
            return self._failed(refused)
        return wire.Welcome(unit=self._unit, deadline_s=self._limits.deadline_s)

    # ------------------------------------------------------------ requests

    def _serve(
        self,
        stream: Stream,
        lane: LaneService,
        hello: wire.Hello,
        request: wire.AnyRequest,
        nbytes: int,
    ) -> None:
        try:
            if isinstance(request, wire.Read):
                lane.send(request, stream, self._limits.piece_bytes)
                self._count("sent_bytes", request.nbytes)
            elif isinstance(request, wire.Publish | wire.Put):
                self._answer(stream, self._write(stream, hello, request, nbytes))
            elif isinstance(request, wire.Call):
                self._called(stream, request, nbytes)
            elif isinstance(request, wire.List | wire.Stamps | wire.More):
                self._answer(stream, lane.listed(request))
            elif isinstance(request, wire.Settle | wire.Sync):
                work = functools.partial(self._service.do, request)
                self._done(stream, self._do_at_length(stream, work))
            else:
                writes = isinstance(request, wire.Delete)
                with self._writing(hello) if writes else nullcontext():
                    value = self._service.do(request)
                self._done(stream, value)
        except TqFsError as error:
            self._answer(stream, self._failed(error))
        except OSError:
            raise
        except Exception as error:  # who waits is told, and the unit lives on
            _log.exception("unit %s failed at %s", self._unit, type(request).__name__)
            unknown = StorageFailed(
                f"{type(error).__name__}: {error}",
                subject=f"unit {self._unit}",
                remedy="see the unit's log",
            )
            self._answer(stream, self._failed(unknown))

    def _do_at_length(self, stream: Stream, long_work: Callable[[], Any]) -> Any:
        """Do what may take long; say meanwhile that the unit is alive."""
        done: Future[Any] = Future()

        def work() -> None:
            try:
                done.set_result(long_work())
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=work, name="tq-fs-settle", daemon=True).start()
        while not wait([done], _BUSY_S).done:
            self._answer(stream, wire.Busy())
        return done.result()

    def _called(self, stream: Stream, request: wire.Call, nbytes: int) -> None:
        budget = self._service.budget
        try:
            budget.acquire(nbytes)
        except (BackpressureTimeout, StepTooLarge):
            _drain(stream, nbytes)
            raise
        try:
            body = bytearray(nbytes)
            stream.fill(memoryview(body))
            self._count("received_bytes", nbytes)
            work = functools.partial(self._service.call, request.name, bytes(body))
            self._done(stream, self._do_at_length(stream, work) if request.long else work())
        finally:
            budget.release(nbytes)

    def _writing(self, hello: wire.Hello) -> AbstractContextManager[None]:
        if self._fence is None:
            return nullcontext()
        return self._fence.writing(hello.epoch, hello.holder)

    def _write(
        self, stream: Stream, hello: wire.Hello, request: wire.Publish | wire.Put, nbytes: int
    ) -> wire.AnyAnswer:
        budget = self._service.budget
        try:
            budget.acquire(nbytes)
        except (BackpressureTimeout, StepTooLarge) as error:
            _drain(stream, nbytes)  # an answer is read behind the last byte only
            return self._failed(error)
        buffer = self._buffers.take(nbytes)
        try:
            body = memoryview(buffer)[:nbytes]
            stream.fill(body)
            self._count("received_bytes", nbytes)
            with self._writing(hello):
                return self._service.write(request, body, stream.is_idle)
        finally:
            self._buffers.give(buffer)
            budget.release(nbytes)

    def _done(self, stream: Stream, value: bool | bytes | str | None) -> None:
        if not isinstance(value, bytes):
            self._answer(stream, wire.Done(value))
            return
        self._count("sent_bytes", len(value))
        prefix = memoryview(wire.PREFIX.pack(wire.MAGIC, 0, len(value)))
        stream.send([prefix, memoryview(value)] if value else [prefix])

    def _failed(self, error: TqFsError) -> wire.Failed:
        self._count(f"error:{error.code}")
        return wire.failed(error)

    def _answer(self, stream: Stream, answer: wire.AnyAnswer) -> None:
        header = wire.encoder.encode(answer)
        stream.send([memoryview(wire.PREFIX.pack(wire.MAGIC, len(header), 0) + header)])

    def _count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self._counts[what] += by


def _drain(stream: Stream, nbytes: int) -> None:
    buffer = memoryview(bytearray(min(nbytes, _DRAIN)))
    while nbytes:
        part = buffer[: min(nbytes, len(buffer))]
        stream.fill(part)
        nbytes -= part.nbytes
