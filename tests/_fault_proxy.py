"""An HTTP proxy between an S3 client and its server that fails on schedule.

It takes path-style requests in plain HTTP/1.1, keeps connections alive on both sides, reads each
message whole, and forwards it with the Host it came with, which signatures cover. What it does to
a request depends on the operation and on how many of that kind came before, not on the clock.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import random
import re
import select
import socket
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import BinaryIO, Literal, NamedTuple, get_args
from urllib.parse import parse_qs, unquote, urlsplit

from crc32c import crc32c

Operation = Literal[
    "put",  # PUT of an object
    "commit",  # PUT of a key that ends in /zarr.json
    "document",  # PUT of another .json, or of a .msgpack
    "get",  # GET of an object without Range
    "range",  # GET of an object with Range
    "head",  # HEAD of an object
    "list",  # GET of a bucket with list-type or prefix
    "delete",  # DELETE of an object
    "bulk-delete",  # POST of ?delete
    "multipart",  # anything with uploads, uploadId or partNumber
    "other",  # buckets, ACLs, tags …
]
Fault = Literal[
    "throttle-503",  # SlowDown; not forwarded
    "throttle-429",  # TooManyRequests; not forwarded
    "error-500",  # InternalError; not forwarded
    "error-502-html",  # a gateway's page; not forwarded
    "reset",  # RST; not forwarded
    "lost-ack",  # done by the server, then RST
    "timeout",  # no answer for `stall_s`, then FIN; not forwarded
    "short-body",  # the answer's body ends half-way; without a body, its head does
    "corrupt",  # one bit of the request's body, or of the answer to a request without one
    "slow",  # the answer comes whole, in pieces over `slow_s`
]
Crash = Literal[
    "before",  # the client dies, and the request is not forwarded
    "unacknowledged",  # the server has answered, and the client dies without hearing it
    "after",  # the client dies once the answer is sent; requests on other connections go on
]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
FAULTS: tuple[Fault, ...] = get_args(Fault)
CRASHES: tuple[Crash, ...] = get_args(Crash)

SERVER_SECONDS = 60.0  # a server that is silent for longer counts as gone
PIECES = 8  # of a slow answer

# What a throttled or failing server says: status line, code, message.
REFUSALS: Mapping[Fault, tuple[str, str, str]] = {
    "throttle-503": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    "throttle-429": ("429 Too Many Requests", "TooManyRequests", "Please reduce your rate."),
    "error-500": ("500 Internal Server Error", "InternalError", "We encountered an error."),
}


# ---------------------------------------------------------------- what is to happen


class Verdict(NamedTuple):
    """What happens to one request; nothing by default."""

    fault: Fault | None = None
    crash: Crash | None = None


@dataclass(frozen=True)
class Schedule:
    """Decides on each request by its operation and its number; the first of a kind is 1."""

    decide: Callable[[Operation, int], Verdict] = lambda operation, n: Verdict()

    @classmethod
    def at(
        cls, operation: Operation, n: int, fault: Fault | None = None, crash: Crash | None = None
    ) -> Schedule:
        """Hit one request only."""
        hit = Verdict(fault, crash)
        return cls(lambda o, m: hit if (o, m) == (operation, n) else Verdict())

    @classmethod
    def seeded(
        cls,
        seed: int,
        rates: Mapping[Fault, float],
        *,
        operations: Collection[Operation] = OPERATIONS,
    ) -> Schedule:
        """Draw a fault with its rate for each request; the same ones for the same seed."""
        assert sum(rates.values()) <= 1.0 + 1e-9, rates

        def decide(operation: Operation, n: int) -> Verdict:
            if operation not in operations:
                return Verdict()
            # By the request's name, so that threads which race for a number change nothing.
            left = random.Random(f"{seed} {operation} {n}").random()
            for fault, rate in rates.items():
                left -= rate
                if left < 0:
                    return Verdict(fault)
            return Verdict()

        return cls(decide)

    def __or__(self, other: Schedule) -> Schedule:
        """Hit what either hits; where both do, as this one does."""

        def decide(operation: Operation, n: int) -> Verdict:
            mine = self.decide(operation, n)
            return mine if any(mine) else other.decide(operation, n)

        return Schedule(decide)


class Seen(NamedTuple):
    """A request that came in, and what became of it.

    Attributes
    ----------
    path
        As sent: quoted, with the query.
    status
        Of the answer of server or proxy, also where it did not reach the client whole or at all;
        None where nobody answered.
    n
        Its number among those of its operation; the first is 1.
    """

    operation: Operation
    method: str
    path: str
    fault: Fault | None
    crash: Crash | None
    status: int | None
    n: int


# ---------------------------------------------------------------- messages


@dataclass(frozen=True)
class Message:
    """A request or an answer: its first line, its fields in order, and its body unframed."""

    first: bytes
    fields: tuple[tuple[bytes, bytes], ...]
    body: bytes = b""

    def get(self, name: str) -> str:
        """Return a field's value; empty where there is none."""
        wanted = name.lower().encode()
        values = (value for key, value in self.fields if key.lower() == wanted)
        return b", ".join(values).decode("latin-1")

    @property
    def chunked(self) -> bool:
        return "chunked" in self.get("Transfer-Encoding").lower()

    @property
    def method(self) -> str:
        return self.first.split()[0].decode()

    @property
    def path(self) -> str:
        return self.first.split()[1].decode("latin-1")

    @property
    def status(self) -> int:
        return int(self.first.split()[1])

    @property
    def closes(self) -> bool:
        """The sender ends the connection after this message."""
        wish = self.get("Connection").lower()
        return "close" in wish or (b"HTTP/1.0" in self.first and "keep-alive" not in wish)

    def without(self, *names: str) -> Message:
        """Return it without some fields."""
        gone = {name.lower().encode() for name in names}
        return replace(self, fields=tuple(f for f in self.fields if f[0].lower() not in gone))

    def head(self) -> bytes:
        lines = [self.first, *(name + b": " + value for name, value in self.fields)]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def framed(self) -> bytes:
        """Return the body as it travels: with chunks in one piece."""
        if not self.chunked:
            return self.body
        data = b"%x\r\n%s\r\n" % (len(self.body), self.body) if self.body else b""
        return data + b"0\r\n\r\n"


def classify(request: Message) -> Operation:
    """Return which operation of S3 a path-style request is."""
    url = urlsplit(request.path)
    query = parse_qs(url.query, keep_blank_values=True).keys()
    _, _, key = url.path.lstrip("/").partition("/")
    if query & {"uploads", "uploadId", "partNumber"}:
        return "multipart"
    if request.method == "POST" and "delete" in query:
        return "bulk-delete"
    if not key:
        listing = request.method == "GET" and query & {"list-type", "prefix"}
        return "list" if listing else "other"
    if query & {"acl", "attributes", "legal-hold", "retention", "tagging"}:
        return "other"
    return _classify_object(request, unquote(key))


def _classify_object(request: Message, key: str) -> Operation:
    match request.method:
        case "PUT" if key.rpartition("/")[2] == "zarr.json":
            return "commit"
        case "PUT":
            return "document" if key.endswith((".json", ".msgpack")) else "put"
        case "GET":
            return "range" if request.get("Range") else "get"
        case "HEAD":
            return "head"
        case "DELETE":
            return "delete"
    return "other"


def read_request(wire: Wire) -> Message:
    """Read a request whole; invite its body where the client waits for that."""
    request = _read_head(wire)
    if "100-continue" in request.get("Expect").lower():
        wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    return replace(request, body=_read_body(wire, request))


def read_answer(wire: Wire, request: Message) -> Message:
    """Read the answer to `request` whole."""
    answer = _read_head(wire)
    while 100 <= answer.status < 200:
        answer = _read_head(wire)
    if request.method == "HEAD" or answer.status in {204, 304}:
        return answer
    if answer.chunked or answer.get("Content-Length"):
        return replace(answer, body=_read_body(wire, answer))
    body = wire.file.read()
    length = (b"Content-Length", b"%d" % len(body))
    return replace(answer, body=body, fields=(*answer.fields, length, (b"Connection", b"close")))


def _read_head(wire: Wire) -> Message:
    first = wire.line()
    fields = []
    while line := wire.line():
        name, _, value = line.partition(b":")
        fields.append((name, value.strip()))
    return Message(first, tuple(fields))


def _read_body(wire: Wire, message: Message) -> bytes:
    if not message.chunked:
        return wire.exactly(int(message.get("Content-Length") or 0))
    data = []
    while size := int(wire.line().partition(b";")[0], 16):
        data.append(wire.exactly(size))
        wire.line()
    while wire.line():
        pass  # trailers
    return b"".join(data)


# ---------------------------------------------------------------- damage


def corrupted(request: Message) -> Message:
    """Flip a bit in the middle of a request's data: of the first chunk where it is aws-chunked."""
    start, size = 0, len(request.body)
    if is_aws_chunked(request):
        line = request.body.partition(b"\r\n")[0]
        start, size = len(line) + 2, int(line.partition(b";")[0], 16)
    return flipped(request, start + size // 2) if size else request


def flipped(message: Message, at: int) -> Message:
    """Flip a bit of one byte of the body."""
    body = bytearray(message.body)
    body[at] ^= 1
    return replace(message, body=bytes(body))


def is_aws_chunked(request: Message) -> bool:
    """Say whether the body is in chunks of its own, below those of HTTP."""
    declared = request.get("x-amz-content-sha256").startswith("STREAMING-")
    return declared or "aws-chunked" in request.get("Content-Encoding").lower()


def refusal(request: Message) -> Message | None:
    """Return what S3 answers to a body that belies the request's digests.

    MinIO checks two of them, moto none.
    """
    body = request.body
    declared = request.get("x-amz-content-sha256")
    if re.fullmatch("[0-9a-f]{64}", declared) and hashlib.sha256(body).hexdigest() != declared:
        return error_answer(request, "400 Bad Request", "XAmzContentSHA256Mismatch", "No match.")
    digests: dict[str, Callable[[], bytes]] = {
        "Content-MD5": lambda: hashlib.md5(body, usedforsecurity=False).digest(),
        "x-amz-checksum-crc32": lambda: zlib.crc32(body).to_bytes(4),
        "x-amz-checksum-crc32c": lambda: crc32c(body).to_bytes(4),
        "x-amz-checksum-sha1": lambda: hashlib.sha1(body, usedforsecurity=False).digest(),
        "x-amz-checksum-sha256": lambda: hashlib.sha256(body).digest(),
    }
    for name, digest in digests.items():
        if (value := request.get(name)) and base64.b64encode(digest()).decode() != value:
            return error_answer(request, "400 Bad Request", "BadDigest", f"{name} does not match.")
    return None


def error_answer(request: Message, status: str, code: str, message: str) -> Message:
    """Return an error as S3 words it."""
    text = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message><RequestId>0</RequestId></Error>"
    )
    return answer_with(request, status, "application/xml", text)


def answer_with(request: Message, status: str, content_type: str, text: str) -> Message:
    """Return an answer of the proxy's own; without its body to a HEAD."""
    body = b"" if request.method == "HEAD" else text.encode()
    fields = {"Content-Type": content_type, "Content-Length": str(len(body))}
    encoded = tuple((name.encode(), value.encode()) for name, value in fields.items())
    return Message(f"HTTP/1.1 {status}".encode(), encoded, body)


GATEWAY_PAGE = "<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"


# ---------------------------------------------------------------- connections


@dataclass(frozen=True, eq=False)
class Wire:
    """A connection, read by one thread. Its end, expected or not, is a ConnectionError."""

    peer: socket.socket
    file: BinaryIO

    @classmethod
    def of(cls, connected: socket.socket) -> Wire:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(connected, connected.makefile("rb"))

    def line(self) -> bytes:
        line = self.file.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("the connection ended within a head")
        return line.rstrip(b"\r\n")

    def exactly(self, size: int) -> bytes:
        data = self.file.read(size)
        if len(data) < size:
            raise ConnectionError("the connection ended within a body")
        return data

    def send(self, data: bytes) -> None:
        self.peer.sendall(data)

    def reset(self) -> None:
        """Close by RST: what was sent and not read yet is lost."""
        self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self.file.close()
        self.peer.close()

    def wake(self) -> None:
        """End the connection under the thread that reads it."""
        with contextlib.suppress(OSError):
            self.peer.shutdown(socket.SHUT_RDWR)

    @property
    def is_stale(self) -> bool:
        """The other side has closed it, or sent what nobody asked for."""
        return bool(select.select([self.peer], [], [], 0)[0])


@dataclass
class Wires:
    """The open connections of a run of the proxy, for whoever ends it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    open: set[Wire] = field(default_factory=set)
    ended: bool = False

    def add(self, connected: socket.socket) -> Wire:
        wire = Wire.of(connected)
        with self.lock:
            if self.ended:
                wire.close()
                raise ConnectionError("the proxy has stopped")
            self.open.add(wire)
        return wire

    def drop(self, wire: Wire) -> None:
        with self.lock:
            self.open.discard(wire)
        wire.close()

    def end(self) -> None:
        with self.lock:
            self.ended = True
            for wire in self.open:
                wire.wake()


class Link:
    """One client's way to the server: a connection that is kept, and made again where it ended."""

    def __init__(self, address: tuple[str, int], wires: Wires) -> None:
        self._address = address
        self._wires = wires
        self._wire: Wire | None = None

    def ask(self, request: Message) -> Message:
        """Forward a request, once, and return the answer."""
        if self._wire is not None and self._wire.is_stale:
            self.close()
        if self._wire is None:
            self._wire = self._wires.add(socket.create_connection(self._address, SERVER_SECONDS))
        request = request.without("Connection", "Keep-Alive", "Expect")
        self._wire.send(request.head() + request.framed())
        answer = read_answer(self._wire, request)
        if answer.closes:
            self.close()
        return answer.without("Connection", "Keep-Alive")

    def close(self) -> None:
        if self._wire is not None:
            self._wires.drop(self._wire)
            self._wire = None


# ---------------------------------------------------------------- the proxy


class FaultProxy:
    """Forwards to the S3 server at `server`, and fails as the schedule says.

    Parameters
    ----------
    server
        ``http://HOST:PORT``.
    kill
        Ends the client, as by SIGKILL; called in a thread of the proxy where the schedule has a
        crash.
    stall_s
        How long a ``timeout`` is silent.
    slow_s
        How long a ``slow`` answer takes.
    """

    def __init__(
        self,
        server: str,
        schedule: Schedule | None = None,
        *,
        kill: Callable[[], object] | None = None,
        stall_s: float = 2.0,
        slow_s: float = 0.4,
    ) -> None:
        url = urlsplit(server)
        assert url.hostname is not None, server
        assert url.port is not None, server
        self._server = url.hostname, url.port
        self._schedule = schedule or Schedule()
        self._kill = kill
        self._stall_s = stall_s
        self._slow_s = slow_s
        self._lock = threading.Lock()
        self._counts: Counter[Operation] = Counter()
        self._seen: list[Seen] = []
        self._holder = socket.socket()  # bound but not listening: keeps the port while stopped
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("127.0.0.1", 0))
        self._run: _Run | None = None

    def __enter__(self) -> FaultProxy:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self._holder.close()

    @property
    def endpoint(self) -> str:
        """The address for the client; the same after :meth:`stop` and :meth:`start`."""
        return f"http://127.0.0.1:{self._holder.getsockname()[1]}"

    def start(self) -> None:
        """Take connections."""
        assert self._run is None, "runs already"
        self._run = _Run(self._holder.getsockname(), self._serve)

    def stop(self) -> None:
        """End all connections and refuse new ones, as a server that is down; keep the log."""
        if self._run is not None:
            self._run.end()
            self._run = None

    def seen(self) -> list[Seen]:
        """Return the requests in the order of their fates: each before its client can know it."""
        with self._lock:
            return list(self._seen)

    def counts(self) -> Counter[Operation]:
        """Return how many requests of each operation came in."""
        with self._lock:
            return self._counts.copy()

    def _serve(self, run: _Run, client: Wire) -> None:
        """Answer one client until its connection ends."""
        link = Link(self._server, run.wires)
        try:
            while self._exchange(run, client, link):
                pass
        finally:
            link.close()

    def _exchange(self, run: _Run, client: Wire, link: Link) -> bool:
        """Deal with one request; say whether the connection goes on."""
        request = read_request(client)
        operation = classify(request)
        with self._lock:
            self._counts[operation] += 1
            n = self._counts[operation]
        fault, crash = self._schedule.decide(operation, n)
        answer = None if crash == "before" else self._answer(link, request, fault)
        status = answer.status if answer else None
        with self._lock:
            self._seen.append(
                Seen(operation, request.method, request.path, fault, crash, status, n)
            )
        if crash in {"before", "unacknowledged"}:
            self._crash()
            client.reset()
            return False
        goes_on = self._deliver(run, client, answer, fault)
        if crash == "after":
            self._crash()
            return False  # what the dead client has sent since is not forwarded
        return goes_on and not request.closes

    def _crash(self) -> None:
        assert self._kill is not None, "the schedule has a crash, but there is nobody to kill"
        self._kill()

    def _answer(self, link: Link, request: Message, fault: Fault | None) -> Message | None:
        """Return what the server says, or what is said in its place; None for silence."""
        if fault in {"reset", "timeout"}:
            return None
        if fault == "error-502-html":
            return answer_with(request, "502 Bad Gateway", "text/html", GATEWAY_PAGE)
        if fault is not None and fault in REFUSALS:
            return error_answer(request, *REFUSALS[fault])
        if fault == "corrupt" and request.body:
            request = corrupted(request)
            return refusal(request) or self._ask(link, request)
        answer = self._ask(link, request)
        if fault == "corrupt" and answer and answer.body:
            answer = flipped(answer, len(answer.body) // 2)
        return answer

    def _ask(self, link: Link, request: Message) -> Message | None:
        try:
            return link.ask(request)
        except OSError:  # the server is down, or ended the connection
            link.close()
            return None

    def _deliver(
        self, run: _Run, client: Wire, answer: Message | None, fault: Fault | None
    ) -> bool:
        """Send the answer as the fault has it; say whether the connection goes on."""
        if fault == "timeout":
            run.over.wait(self._stall_s)
            return False
        if answer is None or fault == "lost-ack":
            client.reset()
            return False
        head, body = answer.head(), answer.framed()
        if fault == "short-body":
            client.send(head + body[: len(body) // 2] if answer.body else head[: len(head) // 2])
            return False
        if fault == "slow":
            size = -(-len(head + body) // PIECES)
            for start in range(0, len(head + body), size):
                run.over.wait(self._slow_s / PIECES)
                client.send((head + body)[start : start + size])
            return True
        client.send(head + body)
        return True


class _Run:
    """The listening socket of a proxy that runs, and the threads behind it."""

    def __init__(self, address: tuple[str, int], serve: Callable[[_Run, Wire], None]) -> None:
        self.over = threading.Event()
        self.wires = Wires()
        self._serve = serve
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(address)
        self._listener.listen(128)
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, name="fault proxy", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError), self._listener:
            while True:
                connected, _ = self._listener.accept()
                thread = threading.Thread(
                    target=self._talk, args=(connected,), name="fault proxy client", daemon=True
                )
                self._threads = [t for t in self._threads if t.is_alive()]
                self._threads.append(thread)
                thread.start()

    def _talk(self, connected: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the client or the proxy ends
            client = self.wires.add(connected)
            try:
                self._serve(self, client)
            finally:
                self.wires.drop(client)

    def end(self) -> None:
        self.over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self.wires.end()
        for thread in self._threads:
            thread.join()
