"""What may pass is tried again, up to a deadline, and what was half done then is not seen."""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests._fault_proxy import (
    Fault,
    Message,
    Operation,
    Schedule,
    Verdict,
    answer_with,
    error_answer,
)
from tests._ways import DRIVERS, QUICK, Way, gate_before
from tq_fs.backends import ObjectBackend, Retry, _s3
from tq_fs.bench.servers import S3Server
from tq_fs.errors import (
    BucketMissing,
    ClockSkewed,
    CredentialsExpired,
    ObjectMissing,
    RetryError,
    StorageDenied,
    StorageFailed,
    StorageFull,
    StorageRefused,
    StorageThrottled,
    StorageUnreachable,
    TqFsError,
    WrongRegion,
)
from tq_fs.storage_options import StorageOptions

MiB = 1024 * 1024

# ---------------------------------------------------------------- the rule


@dataclass
class Time:
    """A clock that only sleeping and `passes` move."""

    now: float = 100.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def retry(self, deadline_s: float, part: float = 1.0, **settings: Any) -> Retry:
        """Return a rule whose waits are a given part of their bounds."""

        def uniform(low: float, high: float) -> float:
            assert low == 0.0, "full jitter"
            return part * high

        return Retry(
            deadline_s=deadline_s, clock=self, sleep=self.sleep, uniform=uniform, **settings
        )


@dataclass
class Requests:
    """A request that fails in the given ways, one after the other, and then succeeds."""

    failures: Sequence[TqFsError]
    clock: Time
    takes_s: Sequence[float] = ()
    begun: list[float] = field(default_factory=list)
    renewed: int = 0

    def __call__(self) -> str:
        n = len(self.begun)
        self.begun.append(self.clock())
        self.clock.passes(self.takes_s[n % len(self.takes_s)] if self.takes_s else 0.0)
        if n < len(self.failures):
            raise self.failures[n]
        return "done"

    def renew(self) -> None:
        self.renewed += 1


def throttled(times: int) -> list[TqFsError]:
    return [StorageThrottled("SlowDown", subject="s3://b/k", remedy="fewer threads")] * times


def test_the_bound_of_a_wait_doubles_up_to_the_most() -> None:
    clock = Time()
    requests = Requests(throttled(9), clock)
    retry = clock.retry(1000, first_s=0.1, most_s=5.0)
    assert retry.call(requests, renew=requests.renew) == "done"
    assert clock.slept == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])


def test_a_wait_is_a_random_part_of_its_bound() -> None:
    clock = Time()
    requests = Requests(throttled(400), clock)
    retry = Retry(deadline_s=1e9, first_s=1.0, most_s=1.0, clock=clock, sleep=clock.sleep)
    assert retry.call(requests, renew=requests.renew) == "done"
    assert all(0.0 <= wait <= 1.0 for wait in clock.slept)
    assert min(clock.slept) < 0.1
    assert max(clock.slept) > 0.9
    assert len(set(clock.slept)) > 390


@given(
    deadline_s=st.floats(0, 100),
    takes_s=st.lists(st.floats(0, 40), min_size=1, max_size=5),
    part=st.floats(0.05, 1),
)
def test_no_try_begins_after_the_deadline(
    deadline_s: float, takes_s: list[float], part: float
) -> None:
    """The first try counts, too: a server that is silent for long uses the time up."""
    clock = Time()
    requests = Requests(throttled(10_000), clock, takes_s)
    with pytest.raises(StorageThrottled) as raised:
        clock.retry(deadline_s, part).call(requests, renew=requests.renew)
    assert all(begun - 100.0 <= deadline_s + 1e-9 for begun in requests.begun)
    assert len(clock.slept) == len(requests.begun) - 1
    spent = clock() - 100.0
    bound = part * min(0.1 * 2 ** len(clock.slept), 5.0)
    assert spent + bound > deadline_s  # it was not given up too early
    assert f"(tried {len(requests.begun)} times in {spent:.0f} s)" in str(raised.value)


def test_the_last_error_says_how_often_and_keeps_what_to_do() -> None:
    clock = Time()
    requests = Requests(throttled(100), clock)
    with pytest.raises(StorageThrottled) as raised:
        clock.retry(10).call(requests, renew=requests.renew)
    assert str(raised.value) == (
        "s3://b/k: SlowDown (tried 7 times in 6 s); fewer threads"  # 0.1 + … + 3.2, next 5
    )
    assert raised.value.__cause__ is requests.failures[0]


def test_without_time_there_is_one_try() -> None:
    clock = Time()
    requests = Requests(throttled(1), clock)
    with pytest.raises(StorageThrottled, match="tried 1 times in 0 s"):
        clock.retry(0).call(requests, renew=requests.renew)
    assert len(requests.begun) == 1


@pytest.mark.parametrize(
    "kind",
    [BucketMissing, ClockSkewed, ObjectMissing, StorageDenied, StorageFull, StorageRefused,
     WrongRegion],
)  # fmt: skip
@pytest.mark.parametrize("before", [0, 2])
def test_what_will_not_pass_is_not_tried_again(kind: type[TqFsError], before: int) -> None:
    clock = Time()
    error = kind("no")
    requests = Requests([*throttled(before), error], clock)
    with pytest.raises(kind) as raised:
        clock.retry(60).call(requests, renew=requests.renew)
    assert raised.value is error
    assert len(requests.begun) == before + 1
    assert len(clock.slept) == before


def test_every_retry_error_is_tried_again() -> None:
    kinds = [RetryError, StorageFailed, StorageUnreachable, StorageThrottled]
    clock = Time()
    requests = Requests([kind("later") for kind in kinds], clock)
    assert clock.retry(60).call(requests, renew=requests.renew) == "done"


def test_waiting_is_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    clock = Time()
    requests = Requests(throttled(2), clock)
    with caplog.at_level(logging.DEBUG, "tq_fs"):
        clock.retry(60).call(requests, renew=requests.renew)
    assert [r.getMessage() for r in caplog.records] == [
        f"s3://b/k: SlowDown; fewer threads; try {n} in {wait} s"
        for n, wait in ((2, 0.1), (3, 0.2))
    ]
    assert {r.levelno for r in caplog.records} == {logging.WARNING}


def test_credentials_are_renewed_once_and_without_a_wait() -> None:
    clock = Time()
    requests = Requests([CredentialsExpired("old"), *throttled(2)], clock)
    assert clock.retry(60).call(requests, renew=requests.renew) == "done"
    assert requests.renewed == 1
    assert len(clock.slept) == 2


@pytest.mark.parametrize("between", [0, 2])
def test_credentials_that_stay_expired_are_given_up(between: int) -> None:
    clock = Time()
    last = CredentialsExpired("still old")
    requests = Requests([CredentialsExpired("old"), *throttled(between), last], clock)
    with pytest.raises(CredentialsExpired) as raised:
        clock.retry(60).call(requests, renew=requests.renew)
    assert raised.value is last
    assert requests.renewed == 1


def test_copies_in_other_processes_do_not_wait_in_step() -> None:
    data = pickle.dumps(Retry(deadline_s=7))
    assert len(data) < 1000  # no state of a generator
    one, two = pickle.loads(data), pickle.loads(data)
    assert one == two == Retry(deadline_s=7)
    assert [one.uniform(0, 1) for _ in range(9)] != [two.uniform(0, 1) for _ in range(9)]


# ---------------------------------------------------------------- requests that fail


def ranged(backend: ObjectBackend) -> bytes:
    buffers = [bytearray(3), bytearray(2)]
    backend.open("k").readinto(buffers, 1)
    return b"".join(buffers)


REQUESTS: dict[str, tuple[Operation, Callable[[ObjectBackend], Any], Any]] = {
    "a value": ("put", lambda b: b.put("new", b"written"), None),
    "a document": ("document", lambda b: b.put("new.json", b"{}"), None),
    "a read": ("get", lambda b: b.get("k"), b"0123456789"),
    "a ranged read": ("range", ranged, b"12345"),
    "a look": ("head", lambda b: b._is_object("k"), True),
    "a listing": ("list", lambda b: list(b.walk("f")), [("f/a", 1), ("f/b", 2)]),
    "a listing of names": ("list", lambda b: list(b.list("f")), ["a", "b"]),
    "a deletion": ("delete", lambda b: b._remove(["gone"]), None),
}
PASSING: tuple[Fault, ...] = (
    *("throttle-503", "throttle-429", "error-500", "error-502-html"),
    *("reset", "lost-ack", "short-body"),
)


def prepare(backend: ObjectBackend) -> None:
    for key, data in {"k": b"0123456789", "f/a": b"a", "f/b": b"bb", "gone": b""}.items():
        backend.put(key, data)
    backend.delete("new")
    backend.delete("new.json")


@pytest.fixture(scope="module")
def prepared(shared_way: Way) -> None:
    prepare(shared_way.backend)


@pytest.mark.s3
@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_that_fails_twice_succeeds(way: Way, request_: str, fault: Fault) -> None:
    operation, call, expected = REQUESTS[request_]
    way.gate.fail(operation, fault, fault)
    assert call(way.backend) == expected
    assert [s.fault for s in way.gate.seen() if s.operation == operation] == [fault, fault, None]
    written = {"put": "new", "document": "new.json"}.get(operation)
    if written:
        assert way.objects(f"shared/{written}") != {}
    if operation == "delete":
        assert way.keys("shared/gone") == []


@pytest.mark.s3
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_request_without_an_answer_is_tried_again(s3_server: S3Server, driver: str) -> None:
    bucket = f"silent-{uuid.uuid4().hex[:12]}"
    s3_server.make_bucket(bucket)
    with (
        gate_before(s3_server) as gate,
        closing(DRIVERS[driver](f"s3://{bucket}/p", retry=QUICK, timeout_s=0.4)) as backend,
    ):
        prepare(backend)
        for name in ("a value", "a read", "a ranged read", "a look", "a listing", "a deletion"):
            operation, call, expected = REQUESTS[name]
            gate.reset()
            gate.fail(operation, "timeout")
            assert call(backend) == expected, operation
            assert gate.counted(operation) >= 2


class Deaf:
    """A server that takes connections, and reads and says nothing."""

    def __init__(self) -> None:
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.taken: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._serve(self._listener.accept()[0])

    def _serve(self, connected: socket.socket) -> None:
        self.taken.append(connected)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for each in [self._listener, *self.taken]:
            each.close()


class Slow(Deaf):
    """A server that needs a while for the first half of an upload, and then says yes."""

    slow_s = 1.0
    pieces = 30

    def _serve(self, connected: socket.socket) -> None:
        self.taken.append(connected)
        with connected.makefile("rb") as file:
            size = 0
            while (line := file.readline().strip()) and line:
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    size = int(value)
            piece = size // self.pieces // 2
            for _ in range(self.pieces):
                file.read(piece)
                time.sleep(self.slow_s / self.pieces)
            file.read(size - piece * self.pieces)
        connected.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: "0"\r\n\r\n')


LOCAL = StorageOptions({"key": "key", "secret": "secret", "region": "us-east-1"})


def backend_at(url: str, driver: str, timeout_s: float) -> ObjectBackend:
    options = StorageOptions({**LOCAL, "endpoint_url": url})
    made = DRIVERS[driver]("s3://bucket/p", options, retry=Retry(deadline_s=0), timeout_s=timeout_s)
    assert isinstance(made, ObjectBackend)
    return made


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_server_that_says_nothing_is_not_waited_for_for_ever(
    driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_s3, "_SLOWEST", 32 * MiB)
    calls: list[Callable[[ObjectBackend], Any]] = [
        lambda b: b.put("k", b"small"),
        lambda b: b.put("k", bytes(16 * MiB)),  # more than the kernel takes
        lambda b: b.get("k"),
        lambda b: list(b.walk("")),
    ]
    with closing(Deaf()) as server, closing(backend_at(server.url, driver, 0.3)) as backend:
        for call in calls:
            with pytest.raises(StorageUnreachable, match=r"bucket/p.*: .+tried 1 times"):
                call(backend)


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_upload_may_take_longer_than_an_answer(driver: str) -> None:
    with closing(Slow()) as server, closing(backend_at(server.url, driver, 0.4)) as backend:
        start = time.monotonic()
        backend.put("k", bytes(8 * MiB))
        assert time.monotonic() - start > 0.8


# ---------------------------------------------------------------- listings

# The last key of the first page is one that a request has to quote with care.
ODD = "n/0999 +%&=é~'(x"
KEYS = sorted(
    [*(f"n/{i:04d}" for i in range(1040) if i != 999), ODD, "n/0500.d/below", "n/0500-beside"],
    key=str.encode,
)


BREAKS: dict[tuple[int, ...], Fault] = {
    (2, 3): "short-body",
    (1, 3): "reset",
    (1, 2, 4): "throttle-503",
}


@pytest.fixture(scope="module")
def many(s3_server: S3Server) -> str:
    """Give a bucket with more keys than one answer lists, and others around them."""
    bucket = f"many-{uuid.uuid4().hex[:12]}"
    s3_server.make_bucket(bucket)
    backend = DRIVERS["obstore"](f"s3://{bucket}/root", retry=QUICK)
    with closing(backend), ThreadPoolExecutor(8) as pool:
        around = ["m/zzzz", "n0", "n-", "o/0000"]
        list(pool.map(lambda key: backend.put(key, b"x"), [*KEYS, *around]))
    return bucket


def breaking(breaks: Sequence[int], fault: Fault) -> Schedule:
    """Hit listings by their number."""
    asked = 0

    def decide(operation: Operation, n: int) -> Verdict:
        nonlocal asked
        asked += operation == "list"
        return Verdict(fault if operation == "list" and asked in breaks else None)

    return Schedule(decide)


@pytest.mark.s3
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_listing_that_breaks_off_goes_on_behind_its_last_key(
    s3_server: S3Server, many: str, driver: str
) -> None:
    names = sorted({key.split("/")[1] for key in KEYS}, key=str.encode)
    with (
        gate_before(s3_server) as gate,
        closing(DRIVERS[driver](f"s3://{many}/root", retry=QUICK)) as backend,
    ):
        assert [key for key, _ in backend.walk("n")] == KEYS
        pages = gate.counted("list")
        assert pages == 2 or s3_server.kind == "minio"  # which gives more unless it is asked
        assert list(backend.list("n")) == names
        for breaks, fault in BREAKS.items():
            gate.reset()
            gate.schedule(breaking(breaks, fault))
            assert [key for key, _ in backend.walk("n")] == KEYS, (breaks, fault)
            broken = [seen for seen in gate.seen() if seen.fault]
            assert gate.counted("list") == pages + len(broken)
            assert len(broken) == len(breaks) or pages == 1
            gate.schedule(breaking(breaks, fault))
            assert list(backend.list("n")) == names, (breaks, fault)
        gate.reset()
        assert [key for key, _ in backend.walk("")][:2] == ["m/zzzz", "n-"]
        assert list(backend.list("")) == ["m", "n", "n-", "n0", "o"]


# ---------------------------------------------------------------- uploads that fail

GROUP = {"a/c.0": [b"a" * 100], "b/c.0": [b"b" * 10, b"c"], "zarr.json": [b'{"zarr_format": 3}']}


def uploads_of(way: Way) -> list[Any]:
    """Return the uploads of several parts that the server has under way."""
    found = way.client.list_multipart_uploads(Bucket=way.bucket)
    return list(found.get("Uploads", ()))


def failing(faults: dict[Operation, Fault]) -> Schedule:
    return Schedule(lambda operation, n: Verdict(faults.get(operation)))


@pytest.mark.s3
@pytest.mark.parametrize("operation", ["put", "commit"])
@pytest.mark.parametrize("fault", ["error-500", "reset", "lost-ack"])
@pytest.mark.parametrize("fresh", [False, True])
def test_an_upload_that_fails_leaves_nothing(
    way: Way, monkeypatch: pytest.MonkeyPatch, operation: Operation, fault: Fault, fresh: bool
) -> None:
    clock = Time()
    monkeypatch.setattr(way.backend, "_retry", clock.retry(3))
    way.gate.schedule(failing({operation: fault}))
    with pytest.raises(StorageFailed, match=r"tried 5 times in 2 s") as raised:
        way.backend.publish("groups/failed", GROUP, fresh=fresh)
    assert raised.value.subject.startswith(f"s3://{way.bucket}/shared/groups/failed/try-")
    assert not hasattr(raised.value, "__notes__")
    assert way.keys("shared/groups/") == []
    assert list(way.backend.list("groups")) == []
    assert way.gate.counted("multipart") == 0
    way.gate.reset()
    place = way.backend.publish("groups/failed", GROUP, fresh=fresh)
    assert way.backend.get(f"{place}/b/c.0") == b"b" * 10 + b"c"
    assert way.backend.delete("groups")


@pytest.mark.s3
@pytest.mark.parametrize("operation", ["put", "commit"])
def test_what_cannot_be_removed_either_is_never_half_visible(
    way: Way, monkeypatch: pytest.MonkeyPatch, operation: Operation
) -> None:
    """The acknowledgement is lost, and so is the way to the server."""
    monkeypatch.setattr(way.backend, "_retry", Time().retry(3))
    broken: dict[Operation, Fault] = {"delete": "error-500", "bulk-delete": "error-500"}
    way.gate.schedule(failing({**broken, operation: "lost-ack"}))
    with pytest.raises(StorageFailed) as raised:
        way.backend.publish("groups/left", GROUP)
    assert "is still there" in raised.value.__notes__[0]
    way.gate.reset()
    keys = {key.rpartition("/")[2] for key in way.keys("shared/groups/left/")}
    place = way.backend.published("groups/left", GROUP)
    if operation == "put":
        assert "zarr.json" not in keys
        assert place is None
    else:
        assert place is not None
        assert way.backend.publish("groups/left", GROUP) == place
    assert way.backend.delete("groups")


@pytest.mark.s3
def test_no_upload_has_several_parts_however_large_it_is(way: Way) -> None:
    chunk = random.Random(7).randbytes(35 * MiB)
    group: dict[str, Any] = {"c.0": [chunk, memoryview(chunk)[:-5]], "zarr.json": [b"{}"]}
    place = way.backend.publish("groups/large", group, fresh=True)
    assert way.gate.counted("multipart") == 0
    assert way.gate.counted("put") == way.gate.counted("commit") == 1
    assert not any(request.get("Expect") for request in way.gate.asked)  # another round trip
    part = [bytearray(9), bytearray(100)]
    with way.backend.open(f"{place}/c.0") as file:
        file.readinto(part, len(chunk) - 20)
    assert b"".join(part) == chunk[-20:] + chunk[: 109 - 20]
    assert way.backend.get(f"{place}/c.0") == chunk + chunk[:-5]
    assert uploads_of(way) == []
    assert way.backend.delete("groups")


# ---------------------------------------------------------------- deleting many


def fill(way: Way, prefix: str, count: int = 0) -> int:
    """Put objects, by default enough to be deleted together; return how many."""
    count = count or (3 if way.driver == "s3fs" else 101)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: way.backend.put(f"{prefix}/{i:03d}", b""), range(count)))
    way.gate.reset()
    return count


@pytest.mark.s3
@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("501 Not Implemented", "NotImplemented"),
        ("400 Bad Request", "MalformedXML"),
        ("405 Method Not Allowed", "MethodNotAllowed"),
    ],
)
def test_objects_are_deleted_one_by_one_where_the_server_cannot_do_many(
    way: Way, monkeypatch: pytest.MonkeyPatch, status: str, code: str
) -> None:
    def answer(request: Message) -> Message | None:
        if request.method == "POST":
            return error_answer(request, status, code, "no such thing")
        return None

    monkeypatch.setattr(way.backend._client, "_bulk", True)
    for tried in (1, 0):  # and once refused it is not asked for again
        count = fill(way, "many")
        way.gate.answer = answer
        assert way.backend.delete("many")
        assert way.keys("shared/many/") == []
        assert way.gate.counted("bulk-delete") == tried
        assert way.gate.counted("delete") == count


@pytest.mark.s3
@pytest.mark.parametrize("fault", ["throttle-503", "reset", "lost-ack"])
def test_a_deletion_of_many_that_fails_is_tried_again(
    way: Way, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr(way.backend._client, "_bulk", True)
    fill(way, "many")
    way.gate.fail("bulk-delete", fault, fault)
    assert way.backend.delete("many")
    assert way.keys("shared/many/") == []
    assert way.gate.counted("bulk-delete") == 3
    if way.server.kind == "moto":  # MinIO says no to some keys that it has deleted
        assert way.gate.counted("delete") == 1  # the one that goes first


@pytest.mark.s3
def test_a_deletion_one_by_one_goes_on_where_it_failed(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun again each time, it would never end where one request of many fails."""
    monkeypatch.setattr(way.backend._client, "_bulk", False)
    count = fill(way, "many", 60)
    asked = itertools.count()

    def answer(request: Message) -> Message | None:
        if request.method == "DELETE" and next(asked) % 5 == 4:
            return error_answer(request, "503 Slow Down", "SlowDown", "slow down")
        return None

    way.gate.answer = answer
    assert way.backend.delete("many")
    assert way.keys("shared/many/") == []
    assert way.gate.counted("delete") < 3 * count


@pytest.mark.s3
def test_keys_that_a_deletion_of_many_left_are_deleted_one_by_one(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers 200, and names the keys with which it had trouble."""
    monkeypatch.setattr(way.backend._client, "_bulk", True)
    fill(way, "many")
    left = "".join(
        f"<Error><Key>shared/many/{i:03d}</Key><Code>InternalError</Code>"
        "<Message>We encountered an internal error.</Message></Error>"
        for i in (1, 2)
    )
    text = f'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{left}</DeleteResult>'

    def answer(request: Message) -> Message | None:
        if request.method == "POST":
            return answer_with(request, "200 OK", "application/xml", text)
        return None

    way.gate.answer = answer
    assert way.backend.delete("many")
    assert way.gate.counted("bulk-delete") == 1
    deleted = {s.path.partition("?")[0] for s in way.gate.seen() if s.operation == "delete"}
    assert {f"/{way.bucket}/shared/many/{i:03d}" for i in (0, 1, 2)} <= deleted
    way.gate.reset()
    way.backend.delete("many")
