"""The channel: a unit's backend from elsewhere, its credit, its lanes, and who may use it."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import pickle
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests._rollouts import spawn_child
from tq_fs.backends import LocalBackend, LocalObject, Retry
from tq_fs.channel import ChannelBackend, ChannelServer, Identity, Limits
from tq_fs.channel import _wire as wire
from tq_fs.channel._buffers import Buffers, size_of
from tq_fs.channel._endpoint import connect, listen, parse
from tq_fs.channel._stream import tune
from tq_fs.errors import (
    BackpressureTimeout,
    InvalidConfig,
    InvalidKey,
    ObjectShort,
    ProtocolMismatch,
    StepTooLarge,
    StorageDenied,
    StorageFailed,
    StorageUnreachable,
    WrongStore,
)
from tq_fs.testing import MEMBERS, BackendSuite, read

MiB = 1024**2
IDENTITY = Identity.new("s")


@contextmanager
def serving(
    folder: Path, *, way: str = "unix", limits: Limits | None = None, **named: Any
) -> Iterator[tuple[ChannelServer, ChannelBackend]]:
    """Serve a folder, and give a client of it."""
    backend = LocalBackend(folder / "unit")
    identity = IDENTITY if way == "tls" else None
    if way == "unix":
        named = {"local": [f"unix:{folder}/socket"], **named}
    else:
        named = {"remote": ["tcp:127.0.0.1:0"], "identity": identity, **named}
    named = {"roots": None, "store_id": "s", "unit": "u", "limits": limits, **named}
    server = ChannelServer(backend, **named)
    endpoint = server.endpoints[0]
    client = ChannelBackend(endpoint, store_id="s", unit="u", identity=identity, timeout_s=10)
    try:
        yield server, client
    finally:
        client.close()
        server.close()
        backend.close()


@pytest.mark.parametrize("way", ["unix", "tcp", "tls"], scope="class")
class TestChannel(BackendSuite):
    """Everything a backend promises, through a socket."""

    @pytest.fixture
    def backend(self, tmp_path: Path, way: str) -> Iterator[ChannelBackend]:
        with serving(tmp_path, way=way) as (_, client):
            yield client


# ---------------------------------------------------------------- who may speak


def client_of(server: ChannelServer, **named: Any) -> ChannelBackend:
    named = {"store_id": "s", "unit": "u", "timeout_s": 5, **named}
    return ChannelBackend(server.endpoints[0], **named)


def test_a_client_of_another_store_is_refused_by_name(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as (server, _),
        closing(client_of(server, store_id="t")) as stranger,
        pytest.raises(WrongStore, match=r"unit u: serves 's', this client wants 't'"),
    ):
        stranger.put("steps/a", b"x")


@pytest.mark.parametrize("identity", [None, Identity.new("s")], ids=["none", "another"])
def test_without_the_stores_identity_nothing_is_served(
    tmp_path: Path, identity: Identity | None
) -> None:
    with serving(tmp_path, way="tls") as (server, ours):
        ours.put("a", b"x")
        with (
            closing(client_of(server, identity=identity)) as stranger,
            pytest.raises((StorageDenied, StorageUnreachable)),
        ):
            stranger.get("a")
        assert eventually(lambda: server.counts.get("refused", 0) > 0)
        assert ours.get("a") == b"x"


def test_who_does_not_shake_hands_is_let_go(tmp_path: Path) -> None:
    limits = Limits(quiet_s=0.1)
    with (
        serving(tmp_path, way="tls", limits=limits) as (server, ours),
        connect(server.endpoints[0], 5) as silent,
    ):
        assert silent.recv(1) == b""
        assert server.counts["refused"] == 1
        ours.put("a", b"x")


def test_keys_are_not_shown() -> None:
    assert b"PRIVATE" in IDENTITY.key
    assert "PRIVATE" not in repr(IDENTITY)


def test_another_version_is_told_so(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, _):
        said = talk(server, message(wire.Hello(wire.VERSION + 1, "s")))
        answer = wire.decode_answer(said[wire.PREFIX.size :], "unit u")
        assert isinstance(answer, wire.Failed)
        error = wire.error_of(answer)
        assert isinstance(error, ProtocolMismatch)
        assert "same version of tq-fs everywhere" in str(error)


def test_an_error_of_a_later_version_is_a_failure_that_says_what_it_said() -> None:
    error = wire.error_of(wire.Failed("of_tomorrow", "went wrong", "Step 7", "do this"))
    assert type(error) is StorageFailed
    assert str(error) == "Step 7: went wrong; do this"


def test_a_listing_of_everything_shows_what_is_served(tmp_path: Path) -> None:
    with serving(tmp_path, roots=frozenset({"steps"})) as (_, client):
        client.publish("steps/a", MEMBERS)
        (tmp_path / "unit" / "secret").write_bytes(b"x")
        assert list(client.list("")) == ["steps"]
        assert {key.partition("/")[0] for key, _ in client.walk("")} == {"steps"}
        assert {key.partition("/")[0] for key, _ in client.stamps("")} == {"steps"}


@pytest.mark.parametrize("key", ["store.json", "claims/x", "../x", "steps/../store.json", "/etc"])
def test_no_key_leads_out_of_what_is_served(tmp_path: Path, key: str) -> None:
    """Also where the client does not look at it."""
    with serving(tmp_path, roots=frozenset({"steps"})) as (_, client):
        client.publish("steps/a", MEMBERS)
        backend: list[Callable[[], object]] = [
            lambda: client.publish(key, MEMBERS),
            lambda: client.put(key, b"x"),
            lambda: client.get(key),
            lambda: client.read(key, 0, [memoryview(bytearray(1))]),
            lambda: client.delete(key),
            lambda: client.list(key),
            lambda: client.walk(key),
            lambda: client.settle(key),
            lambda: client.cool([key]),
            lambda: client.distrust(key),
        ]
        passed = []
        for i, call in enumerate(backend):
            try:
                call()
            except InvalidKey:
                continue
            passed.append(i)
        # Settling, cooling and distrusting touch nothing.
        assert passed in ([], [7, 8, 9]) if key == "steps/../store.json" else passed == []
        assert list(client.list("")) == ["steps"]


# ---------------------------------------------------------------- what is malformed


def talk(server: ChannelServer, data: bytes, *, leave: bool = True) -> bytes:
    """Send bytes and return what comes until the unit closes, or is silent for a second."""
    with connect(server.endpoints[0], 5) as sock:
        said = b""
        with suppress(ConnectionError):
            sock.sendall(data)
            if leave:
                sock.shutdown(socket.SHUT_WR)
            sock.settimeout(1)
            with suppress(TimeoutError):
                while more := sock.recv(65536):
                    said += more
        return said


def message(request: wire.AnyRequest | bytes, body: bytes = b"", magic: bytes = b"tqf1") -> bytes:
    header = request if isinstance(request, bytes) else wire.encoder.encode(request)
    return wire.PREFIX.pack(magic, len(header), len(body)) + header + body


HELLO = message(wire.Hello(wire.VERSION, "s"))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        message(wire.Get("a")),
        HELLO + HELLO,
        HELLO + message(b"\xc1"),
        HELLO + message(b"\x93\x63\xa1a\xc0"),
        HELLO + message(wire.Get("a"), magic=b"tqf9"),
        HELLO + message(wire.Get("a"), b"body"),
        HELLO + wire.PREFIX.pack(b"tqf1", 2**32 - 1, 0),
        HELLO + wire.PREFIX.pack(b"tqf1", 0, 0),
        HELLO + message(b"\x93\x04\xa1a" + b"\x91" * 100_000),
    ],
    ids=[
        *("http", "no hello", "two", "no msgpack", "unknown", "magic", "body"),
        *("long header", "no header", "deep"),
    ],
)
def test_what_is_malformed_is_counted_and_its_lane_closed(tmp_path: Path, data: bytes) -> None:
    with serving(tmp_path) as (server, client):
        client.put("a", b"x")
        talk(server, data)
        assert eventually(lambda: server.counts.get("malformed") == 1)
        assert client.get("a") == b"x"
        assert eventually(lambda: server.lanes == 1)


@pytest.mark.parametrize(
    ("request_", "body"),
    [
        (wire.Publish("steps/a", [("zarr.json", 5)], True), b"1234"),
        (wire.Publish("steps/a", [("zarr.json", -1), ("x", 5)], True), b"1234"),
        (wire.Read("a", -1, 4), b""),
        (wire.Read("a", 0, -4), b""),
        (wire.More(), b""),
    ],
    ids=["short body", "negative size", "negative offset", "negative length", "no listing"],
)
def test_what_makes_no_sense_is_answered(
    tmp_path: Path, request_: wire.AnyRequest, body: bytes
) -> None:
    with serving(tmp_path) as (server, client):
        client.put("a", b"abcd")
        said = talk(server, HELLO + message(request_, body), leave=False)
        assert b"protocol_mismatch" in said
        assert client.get("a") == b"abcd"
        assert list(client.list("")) == ["a"]


def test_who_connects_and_says_nothing_does_not_keep_others_out(tmp_path: Path) -> None:
    with serving(tmp_path, limits=Limits(lanes=2, quiet_s=0.3)) as (server, client):
        with ExitStack() as silent:
            for _ in range(4):
                silent.enter_context(connect(server.endpoints[0], 5))
            assert eventually(lambda: server.counts.get("malformed") == 4)
            client.put("a", b"x")
        time.sleep(0.5)
        assert client.get("a") == b"x"  # by the same lane, which was silent for longer
        assert (server.lanes, server.counts["malformed"]) == (1, 4)


def test_a_unit_without_threads_refuses_and_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as (server, client):
        start = threading.Thread.start

        def fails(thread: threading.Thread) -> None:
            if thread.name == "tq-fs-lane":
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fails)
            with pytest.raises(StorageUnreachable):
                client.put("a", b"x")
        client.put("a", b"x")
        assert server.counts["refused"] == 1


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_do_no_harm(data: bytes, polite: bool) -> None:
    server, client = shared()
    talk(server, HELLO + data if polite else data)
    assert client.get("a") == b"x"


@functools.cache
def shared() -> tuple[ChannelServer, ChannelBackend]:
    """Serve a folder to many examples, until the tests end."""
    opened = ExitStack()
    atexit.register(opened.close)
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
    server, client = opened.enter_context(serving(folder))
    client.put("a", b"x")
    return server, client


# ---------------------------------------------------------------- room


def test_a_write_waits_where_it_is_until_there_is_room(tmp_path: Path) -> None:
    limits = Limits(budget_bytes=3 * MiB, writers=1, deadline_s=30)
    with serving(tmp_path, limits=limits) as (server, client):
        gate = hold_disk(server)
        with ThreadPoolExecutor(8) as pool:
            data = bytes(MiB)
            writes = [pool.submit(client.put, f"v/{i}", data) for i in range(8)]
            assert eventually(lambda: server.held_bytes == 3 * MiB)
            time.sleep(0.2)
            assert server.held_bytes == 3 * MiB
            assert server.counts["received_bytes"] <= 3 * MiB
            gate.set()
            for write in writes:
                write.result(20)
        assert len(list(client.list("v"))) == 8


def test_a_write_that_waits_for_too_long_is_told_so_and_leaves_nothing(tmp_path: Path) -> None:
    limits = Limits(budget_bytes=MiB, writers=1, deadline_s=0.3)
    with serving(tmp_path, limits=limits) as (server, client):
        gate = hold_disk(server)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(client.put, "v/first", bytes(MiB))
            assert eventually(lambda: server.held_bytes == MiB)
            with pytest.raises(BackpressureTimeout, match=r"unit u: no room for 600000 bytes"):
                client.put("v/second", bytes(600_000))
            assert list(client.list("v")) == []  # by the same lane
            assert (server.lanes, server.counts.get("malformed")) == (2, None)
            gate.set()
            first.result(20)
        assert list(client.list("v")) == ["first"]
        client.put("v/second", bytes(600_000))


def test_a_write_larger_than_the_budget_is_refused_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, limits=Limits(budget_bytes=MiB)) as (_, client):
        with pytest.raises(StepTooLarge, match="33554432 bytes, the budget is 1048576"):
            client.put("a", bytes(32 * MiB))
        client.put("a", bytes(MiB))


def test_more_connections_than_it_takes_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path, limits=Limits(lanes=2)) as (server, client):
        client.put("a", b"x")
        with closing(client_of(server)) as second, closing(client_of(server)) as third:
            second.get("a")
            with pytest.raises(StorageFailed, match="has 2 connections"):
                third.get("a")
            second.close()
            assert eventually(lambda: server.lanes == 1)
            assert third.get("a") == b"x"


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9 * MiB)), max_size=60))
def test_buffers_are_used_again_and_stay_within_their_bound(steps: list[tuple[bool, int]]) -> None:
    buffers = Buffers(16 * MiB)
    used: list[bytearray] = []
    for take, nbytes in steps:
        if take and sum(map(len, used)) + size_of(nbytes) <= 16 * MiB:
            used.append(buffers.take(nbytes))
            assert nbytes <= len(used[-1]) <= nbytes * 9 / 8 + 4096
        elif used:
            buffers.give(used.pop(nbytes % len(used)))
        assert sum(map(len, used)) <= buffers.nbytes <= 16 * MiB
        assert len({id(b) for b in used}) == len(used)
    for buffer in used:  # with them, one more might be too much to keep
        buffers.give(buffer)
    same = buffers.take(MiB)
    buffers.give(same)
    assert buffers.take(MiB - 1) is same


# ---------------------------------------------------------------- what breaks


def hold_disk(server: ChannelServer) -> threading.Event:
    """Make writes wait in the unit until the event is set."""
    gate = threading.Event()
    backend = server._service._backend
    put, publish = backend.put, backend.publish

    def slow_put(*args: Any, **named: Any) -> None:
        gate.wait(30)
        put(*args, **named)

    def slow_publish(*args: Any, **named: Any) -> str:
        gate.wait(30)
        return publish(*args, **named)

    backend.put, backend.publish = slow_put, slow_publish  # type: ignore[method-assign]
    return gate


def test_what_a_sender_gave_up_does_not_appear_after_it_was_deleted(tmp_path: Path) -> None:
    """A write that hangs in the unit, its sender's patience at an end, and what it does then."""
    with serving(tmp_path, limits=Limits(deadline_s=0)) as (server, client):
        gate = hold_disk(server)
        hasty = client_of(server, timeout_s=0.5)
        with pytest.raises(StorageUnreachable, match="no answer in time"):
            hasty.publish("steps/a/1", MEMBERS, fresh=True)
        with ThreadPoolExecutor(1) as pool:
            deleted = pool.submit(client.delete, "steps/a")
            time.sleep(0.2)
            assert not deleted.done()  # it waits for the write
            gate.set()
            deleted.result(10)
        hasty.close()
        assert list(client.walk("steps")) == []


def test_a_write_whose_sender_is_gone_is_not_begun(tmp_path: Path) -> None:
    limits = Limits(writers=1, deadline_s=0)
    with serving(tmp_path, limits=limits) as (server, client):
        gate = hold_disk(server)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(client.put, "first", b"x")
            assert eventually(lambda: server.held_bytes == 1)
            hasty = client_of(server, timeout_s=0.3)
            with pytest.raises(StorageUnreachable):
                hasty.put("second", b"xy")
            gate.set()
            first.result(10)
        hasty.close()
        assert eventually(lambda: server.held_bytes == 0)
        assert list(client.list("")) == ["first"]


def test_an_object_that_is_cut_while_it_is_sent_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as (server, client):
        client.publish("steps/a", {"x": [bytes(4 * MiB)], "zarr.json": [b"{}"]})
        check = LocalObject.check

        def cut(self: LocalObject, offset: int, nbytes: int) -> None:
            check(self, offset, nbytes)
            os.truncate(tmp_path / "unit" / "steps" / "a" / "x", 3 * MiB)

        monkeypatch.setattr(LocalObject, "check", cut)
        with pytest.raises(StorageUnreachable):
            read(client, "steps/a/x", 4 * MiB)
        with pytest.raises(ObjectShort, match=f"has {3 * MiB} bytes, {4 * MiB} are needed"):
            read(client, "steps/a/x", 4 * MiB)
        assert eventually(lambda: server.lanes <= 1)


@pytest.mark.parametrize("way", ["unix", "tcp", "tls"])
def test_bytes_that_were_asked_for_ahead_come_in_order_or_the_ordinary_way(
    tmp_path: Path, way: str
) -> None:
    want = os.urandom(3 * MiB + 7)
    with serving(tmp_path, way=way) as (server, client):
        client.publish("steps/a", {"x": [want], "zarr.json": [b"{}"]})
        got = bytearray(len(want))
        before = server.counts["requests"]
        with client.open("steps/a/x") as source:
            source.ahead(0, len(want))
            for start in range(0, len(want), MiB):
                source.readinto([memoryview(got)[start : start + MiB]], start)
        assert got == want
        assert server.counts["requests"] - before == 1
        with client.open("steps/a/x") as source:  # out of order, twice, and left in the middle
            source.ahead(0, len(want))
            for start in (2 * MiB, 0, MiB, 0):
                part = bytearray(1000)
                source.readinto([part], start)
                assert part == want[start : start + 1000]
            source.ahead(5, 100)
            source.readinto([part := bytearray(60)], 5)
            assert part == want[5:65]
        with client.open("steps/a/x") as source:  # beyond the end
            source.ahead(MiB, len(want))
            with pytest.raises(ObjectShort):
                source.readinto([bytearray(len(want))], MiB)


def test_a_stream_that_breaks_goes_on_the_ordinary_way(tmp_path: Path) -> None:
    want = os.urandom(12 * MiB)
    with serving(tmp_path) as (server, client):
        client.publish("steps/a", {"x": [want], "zarr.json": [b"{}"]})
        got = bytearray(len(want))
        with client.open("steps/a/x") as source:
            source.ahead(0, len(want))
            source.readinto([memoryview(got)[:MiB]], 0)
            for stream in list(server._lanes.values()):
                stream.end()  # its thread is at it, and closes it
            for start in range(MiB, len(want), MiB):
                source.readinto([memoryview(got)[start : start + MiB]], start)
        assert got == want


UNIT = """
import sys
from tq_fs.backends import LocalBackend
from tq_fs.channel import ChannelServer
folder, endpoint = sys.argv[1:]
server = ChannelServer(LocalBackend(folder), store_id="s", unit="u", remote=[endpoint], roots=None)
print(server.endpoints[0], flush=True)
sys.stdin.read()
"""


@contextmanager
def unit_process(
    folder: Path, endpoint: str = "tcp:127.0.0.1:0"
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with spawn_child(UNIT, folder / "unit", endpoint) as child:
        assert child.stdout is not None
        try:
            yield child.stdout.readline().strip(), child
        finally:
            child.kill()


def test_a_killed_unit_is_reported_at_once_and_found_again(tmp_path: Path) -> None:
    """kill -9 amid writes and reads: what was acknowledged is there, the rest is whole or not."""
    with unit_process(tmp_path) as (endpoint, child):
        client = ChannelBackend(endpoint, store_id="s", unit="u", timeout_s=30)
        done: list[int] = []

        def write(worker: int) -> None:
            for i in itertools.count(worker, 4):
                client.publish(f"steps/a/{i}", {"x": [bytes([i % 251]) * 300_000], **MEMBERS})
                done.append(i)

        with ThreadPoolExecutor(4) as pool:
            writers = [pool.submit(write, i) for i in range(4)]
            assert eventually(lambda: len(done) > 40)
            child.kill()
            killed = time.monotonic()
            for writer in writers:
                assert isinstance(writer.exception(20), StorageUnreachable)
            assert time.monotonic() - killed < 5
        with pytest.raises(StorageUnreachable, match="unit u"):
            client.get("steps/a/0/x")
    with unit_process(tmp_path, endpoint):
        assert set(done) <= {int(name) for name in client.list("steps/a")}
        for i in map(int, client.list("steps/a")):
            assert client.get(f"steps/a/{i}/x") == bytes([i % 251]) * 300_000
        client.close()


def test_a_unit_that_was_started_again_is_not_asked_by_an_old_lane(tmp_path: Path) -> None:
    with unit_process(tmp_path) as (endpoint, _):
        client = ChannelBackend(endpoint, store_id="s", unit="u")
        client.put("a", b"x")
    with unit_process(tmp_path, endpoint):
        assert client.get("a") == b"x"
    client.close()


def test_a_lane_that_is_owed_bytes_is_not_lent_again(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, client):
        client.put("a", b"abcd")
        with client._lanes.get().lane() as lane:
            lane.ask(wire.Read("a", 0, 4))
            lane.fill(memoryview(bytearray(3)))
            assert not lane.is_free
        assert eventually(lambda: server.lanes == 0)


def test_what_may_have_been_published_is_looked_for_at_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The acknowledgement is lost: what the sender knows to be new is not new any more."""
    with serving(tmp_path) as (server, _):
        published: list[bool] = []
        publish = server._service._backend.publish

        def note(*args: Any, fresh: bool) -> str:
            published.append(fresh)
            place = publish(*args, fresh=fresh)
            if len(published) == 1:
                raise ConnectionAbortedError("on the way back")
            return place

        monkeypatch.setattr(server._service._backend, "publish", note)
        with closing(client_of(server, retry=Retry(deadline_s=10))) as client:
            assert client.publish("steps/a", MEMBERS, fresh=True) == "steps/a"
        assert published == [True, False]


def test_a_unit_that_comes_back_in_time_is_waited_for(tmp_path: Path) -> None:
    with unit_process(tmp_path) as (endpoint, child):
        client = ChannelBackend(endpoint, store_id="s", unit="u", retry=Retry(deadline_s=30))
        client.publish("steps/a", MEMBERS, fresh=True)
        child.kill()
        child.wait()
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(client.publish, "steps/b", MEMBERS, fresh=True)
            time.sleep(0.5)
            assert not late.done()
            with unit_process(tmp_path, endpoint):
                assert late.result(20) == "steps/b"
                client.close()


def test_a_unit_that_hangs_is_reported_when_patience_ends(tmp_path: Path) -> None:
    with unit_process(tmp_path) as (endpoint, child):
        client = ChannelBackend(endpoint, store_id="s", unit="u", timeout_s=0.5)
        client.put("a", b"x")
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)  # it takes a moment
        with pytest.raises(StorageUnreachable, match=r"no answer in time"):
            client.get("a")
        child.send_signal(signal.SIGCONT)
        assert client.get("a") == b"x"
        client.close()


@pytest.mark.parametrize("call", ["settle", "sync"])
def test_what_may_take_long_is_waited_for_as_long_as_the_unit_says_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with serving(tmp_path) as (server, _), closing(client_of(server, timeout_s=0.6)) as client:
        ended = []

        def slow(*_: object) -> None:
            time.sleep(1.5)
            ended.append(call)

        monkeypatch.setattr(server._service._backend, call, slow)
        client.sync() if call == "sync" else client.settle("steps/a")
        assert ended == [call]

        def fails(*_: object) -> None:
            raise StorageDenied("no permission", subject="the store")

        monkeypatch.setattr(server._service._backend, call, fails)
        with pytest.raises(StorageDenied):
            client.sync() if call == "sync" else client.settle("steps/a")


def test_nobody_waits_for_ever_for_a_unit_that_hangs_as_it_settles(tmp_path: Path) -> None:
    with unit_process(tmp_path) as (endpoint, child):
        client = ChannelBackend(endpoint, store_id="s", unit="u", timeout_s=0.6)
        client.settle("steps/a")
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        with pytest.raises(StorageUnreachable, match="no answer in time"):
            client.settle("steps/a")
        child.send_signal(signal.SIGCONT)
        client.close()


def test_clients_that_die_give_their_room_back(tmp_path: Path) -> None:
    """In the middle of what they send, too."""
    with serving(tmp_path, limits=Limits(budget_bytes=MiB)) as (server, client):
        for _ in range(5):
            with connect(server.endpoints[0], 5) as sock:
                half = message(wire.Put("half", False), bytes(MiB))[: MiB // 2]
                sock.sendall(HELLO + half)
                assert eventually(lambda: server.held_bytes == MiB)
            assert eventually(lambda: server.held_bytes == 0)
        client.put("whole", bytes(MiB))
        assert list(client.list("")) == ["whole"]
        assert eventually(lambda: server.lanes == 1)


def test_a_client_travels_and_forks(tmp_path: Path) -> None:
    with serving(tmp_path, way="tls") as (server, client):
        client.put("a", b"x")
        with closing(pickle.loads(pickle.dumps(client))) as copy:
            assert copy.get("a") == b"x"
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = client.get("a") != b"x"
                client.put("b", b"y")
                client.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.get("b") == b"y"
        assert eventually(lambda: server.lanes == 1)


def test_closing_ends_what_is_under_way_and_refuses_the_rest(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, client):
        gate = hold_disk(server)
        with ThreadPoolExecutor(2) as pool:
            write = pool.submit(client.put, "a", b"x")
            assert eventually(lambda: server.held_bytes == 1)
            closed = pool.submit(server.close)
            time.sleep(0.2)
            assert not closed.done()
            gate.set()
            closed.result(10)
            write.result(10)
        with pytest.raises(StorageUnreachable):
            client.get("a")
        assert not (tmp_path / "socket").exists()
        client.close()
        with pytest.raises(StorageFailed, match="was closed"):
            client.get("a")


# ---------------------------------------------------------------- endpoints


@pytest.mark.parametrize(
    "endpoint",
    ["", "tcp:", "tcp::80", "tcp:host:http", "tcp:host:99999", "unix:relative", "ipc:///x"],
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidConfig, match="is no endpoint"):
        parse(endpoint)


def test_an_endpoint_that_is_taken_is_refused(tmp_path: Path) -> None:
    for way in ("tcp", "unix"):
        with serving(tmp_path, way=way) as (server, client):
            with pytest.raises(InvalidConfig, match="cannot be listened at"):
                listen(server.endpoints[0])
            client.put("a", b"x")
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(InvalidConfig, match="cannot be listened at"):
        listen(f"unix:{tmp_path}/file")
    assert (tmp_path / "file").read_bytes() == b"mine"
    with pytest.raises(InvalidConfig, match="is longer than 107 bytes"):
        listen(f"unix:/{'x' * 107}")


def test_tcp_has_room_from_the_start_and_is_not_paced_within_a_host(tmp_path: Path) -> None:
    with serving(tmp_path, way="tcp") as (server, _), connect(server.endpoints[0], 5) as sock:
        assert eventually(lambda: server.lanes == 1)
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        tune(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) > before
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        control = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert control.rstrip(b"\0") == b"reno"


def test_a_socket_is_for_its_owner_only(tmp_path: Path) -> None:
    with serving(tmp_path):
        assert stat.S_IMODE(os.stat(tmp_path / "socket").st_mode) == 0o600


def eventually(holds: Callable[[], bool], seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
