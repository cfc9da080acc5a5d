"""Calls by name over a channel: bytes in, bytes out, and errors as they were raised."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests._rollouts import spawn_child
from tests._values import stored_group
from tests.test_channel import HELLO, IDENTITY, eventually, talk
from tq_fs.backends import LocalBackend, Retry
from tq_fs.channel import ChannelBackend, ChannelServer, Limits
from tq_fs.channel import _wire as wire
from tq_fs.errors import (
    BackpressureTimeout,
    CheckpointMissing,
    InvalidKey,
    ProtocolMismatch,
    StepTooLarge,
    StorageFailed,
    StorageUnreachable,
    TqFsError,
)
from tq_fs.values import Place, ValueClient, ValueIndex, serve

MiB = 1024**2
Calls = Mapping[str, Callable[[bytes], bytes]]


@contextmanager
def serving(
    folder: Path, calls: Calls, *, way: str = "unix", timeout_s: float = 10, **named: Any
) -> Iterator[tuple[ChannelServer, ChannelBackend]]:
    identity = IDENTITY if way == "tls" else None
    if way == "unix":
        named["local"] = [f"unix:{folder}/socket"]
    else:
        named["remote"] = ["tcp:127.0.0.1:0"]
    retry = named.pop("retry", None)
    with closing(LocalBackend(folder / "unit", ahead=0)) as backend:
        named = {"store_id": "s", "unit": "u", "identity": identity, **named}
        server = ChannelServer(backend, roots=frozenset(), calls=calls, **named)
        client = ChannelBackend(
            server.endpoints[0],
            store_id="s",
            unit="u",
            identity=identity,
            timeout_s=timeout_s,
            retry=retry,
        )
        with closing(server), closing(client):
            yield server, client


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("way", ["unix", "tcp", "tls"])
def test_a_call_takes_bytes_and_gives_bytes(tmp_path: Path, way: str, long: bool) -> None:
    with serving(tmp_path, {"turn": lambda body: body[::-1]}, way=way) as (server, client):
        for body in (b"", b"a", b"abc", bytes(range(256)) * 80_000):
            assert client.call("turn", body, long=long) == body[::-1]
        assert eventually(lambda: server.held_bytes == 0)
        assert server.lanes == 1  # the lane is used again


def test_a_call_that_nobody_serves_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    with serving(tmp_path, {"turn": bytes, "a": bytes}) as (_, client):
        with pytest.raises(ProtocolMismatch, match=r"has no call 'put', only \['a', 'turn'\]"):
            client.call("put", b"x" * MiB)
        assert client.call("turn", b"x") == b"x"
    with serving(tmp_path, {}) as (_, client), pytest.raises(ProtocolMismatch):
        client.call("")


@pytest.mark.parametrize("long", [False, True])
def test_an_error_comes_as_it_was_raised(tmp_path: Path, long: bool) -> None:
    def fail(body: bytes) -> bytes:
        raise CheckpointMissing("is gone", subject=body.decode(), remedy="load another")

    def stumble(_: bytes) -> bytes:
        raise KeyError("unforeseen")

    with serving(tmp_path, {"fail": fail, "stumble": stumble}) as (server, client):
        with pytest.raises(CheckpointMissing) as caught:
            client.call("fail", b"checkpoint 7", long=long)
        assert str(caught.value) == "checkpoint 7: is gone; load another"
        with pytest.raises(StorageFailed, match=r"unit u: KeyError: 'unforeseen'.*log"):
            client.call("stumble", long=long)
        assert server.counts["error:checkpoint_missing"] == 1
        assert server.lanes == 1


def test_files_are_not_served_where_only_calls_are(tmp_path: Path) -> None:
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit/index.sqlite").write_bytes(b"private")
    with serving(tmp_path, {"turn": bytes}) as (_, client):
        asked: list[Callable[[], object]] = [
            lambda: client.get("index.sqlite"),
            lambda: client.put("index.sqlite", b"x"),
            lambda: client.delete("index.sqlite"),
            lambda: list(client.list("")),
            lambda: list(client.walk("")),
        ]
        for ask in asked:
            with pytest.raises((InvalidKey, TqFsError)):
                ask()
    assert (tmp_path / "unit/index.sqlite").read_bytes() == b"private"


# ---------------------------------------------------------------- time


def test_a_long_call_may_take_longer_than_an_answer_is_waited_for(tmp_path: Path) -> None:
    def slow(body: bytes) -> bytes:
        time.sleep(1.5)
        return body

    with serving(tmp_path, {"slow": slow}, timeout_s=0.5) as (_, client):
        assert client.call("slow", b"done", long=True) == b"done"
        with pytest.raises(StorageUnreachable, match="no answer in time"):
            client.call("slow", b"done")
        assert client.call("slow", b"again", long=True) == b"again"


def test_a_call_whose_answer_is_lost_is_made_again(tmp_path: Path) -> None:
    seen: list[bytes] = []

    def first_is_slow(body: bytes) -> bytes:
        seen.append(body)
        if len(seen) == 1:
            time.sleep(1)
        return body

    retry = Retry(deadline_s=10, first_s=0.01, most_s=0.1)
    with serving(tmp_path, {"call": first_is_slow}, timeout_s=0.3, retry=retry) as (_, client):
        assert client.call("call", b"x") == b"x"
        assert len(seen) >= 2


def test_calls_go_on_side_by_side(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def meet(body: bytes) -> bytes:
        together.wait(10)
        return body

    with serving(tmp_path, {"meet": meet}) as (_, client), ThreadPoolExecutor(4) as pool:
        bodies = [b"%d" % i for i in range(4)]
        assert list(pool.map(lambda body: client.call("meet", body), bodies)) == bodies


# ---------------------------------------------------------------- room


def test_a_body_larger_than_the_budget_is_refused_and_the_lane_lives(tmp_path: Path) -> None:
    limits = Limits(budget_bytes=MiB)
    with serving(tmp_path, {"size": lambda b: b"%d" % len(b)}, limits=limits) as (server, client):
        with pytest.raises(StepTooLarge):
            client.call("size", bytes(MiB + 1))
        assert client.call("size", bytes(MiB)) == b"%d" % MiB
        assert server.lanes == 1
        assert server.counts.get("malformed", 0) == 0


def test_bodies_wait_for_room_and_then_give_up(tmp_path: Path) -> None:
    inside, end = threading.Event(), threading.Event()

    def hold(body: bytes) -> bytes:
        inside.set()
        end.wait(10)
        return body[:1]

    limits = Limits(budget_bytes=MiB, deadline_s=0.3)
    calls: Calls = {"hold": hold, "size": lambda b: b"%d" % len(b)}
    with serving(tmp_path, calls, limits=limits) as (server, client), ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.call, "hold", bytes(MiB))
        assert inside.wait(10)
        with pytest.raises(BackpressureTimeout):
            client.call("size", b"x")
        end.set()
        assert first.result() == b"\0"
        assert client.call("size", b"x") == b"1"
        assert eventually(lambda: server.held_bytes == 0)


def test_a_client_that_dies_in_the_middle_of_a_body_leaves_nothing(tmp_path: Path) -> None:
    seen: list[int] = []

    def note(body: bytes) -> bytes:
        seen.append(len(body))
        return b""

    with serving(tmp_path, {"note": note}) as (server, client):
        header = wire.encoder.encode(wire.Call("note", False))
        prefix = wire.PREFIX.pack(wire.MAGIC, len(header), 100)
        talk(server, HELLO + prefix + header + b"half")
        assert eventually(lambda: server.lanes == 0 and server.held_bytes == 0)
        assert seen == []
        client.call("note", b"x")
        assert seen == [1]


# ---------------------------------------------------------------- the keeper's calls


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[tuple[ValueIndex, ChannelBackend]]:
    with (
        closing(ValueIndex(tmp_path / "index", "s")) as index,
        serving(tmp_path, serve(Whole(index))) as (_, client),
    ):
        yield index, client


class Whole:
    """A keeper's calls, by an index alone."""

    def __init__(self, index: ValueIndex) -> None:
        self._index = index

    def now(self) -> int:
        return self._index.generation

    def save(self, folder: str) -> str:
        raise CheckpointMissing("cannot be", subject=folder)

    load = save

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)


def test_a_client_of_the_keeper_says_what_the_index_says(
    keeper: tuple[ValueIndex, ChannelBackend],
) -> None:
    index, channel = keeper
    client = ValueClient(channel)
    group, other = stored_group((1, "a"), (2**62, "ü")), stored_group((1, "a"))
    assert client.put("train", [group]) == (1, [])
    assert client.put("train", [group]) == (1, [])
    samples = [("train", 1), ("train", 2**62), ("eval", 1)]
    assert client.find(samples, ["a", "ü"]) == index.find(samples, ["a", "ü"])
    assert client.put("train", [other]) == (2, [])
    assert client.now() == 2
    gone = client.clear([("train", 1, 2)])
    assert gone == [Place("", other.path)]
    assert isinstance(gone[0], Place)
    client.forget(gone)
    assert client.totals() == index.totals()
    with pytest.raises(CheckpointMissing, match="/folder: cannot be"):
        client.save("/folder")
    with pytest.raises(CheckpointMissing):
        client.load("/folder")


MALFORMED = [b"", b"\xc1", b"text", msgspec.msgpack.encode({"a": 1}), b"\x91" * 100_000]


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
@pytest.mark.parametrize("name", ["put", "find", "clear", "forget", "now", "save", "totals"])
def test_a_malformed_call_is_a_mismatch_and_changes_nothing(
    keeper: tuple[ValueIndex, ChannelBackend], name: str, body: bytes
) -> None:
    index, channel = keeper
    index.put("train", [stored_group((1, "a"))])
    before = index.totals()
    with pytest.raises(ProtocolMismatch, match=rf"{name}: no such call"):
        channel.call(name, body)
    assert index.totals() == before
    assert ValueClient(channel).now() == 1


def test_numbers_beyond_those_of_the_index_are_refused(
    keeper: tuple[ValueIndex, ChannelBackend],
) -> None:
    _, channel = keeper
    client = ValueClient(channel)
    for ask in (
        lambda: client.find([("train", 2**63)], ["a"]),
        lambda: client.put("train", [stored_group((2**63, "a"))]),
        lambda: client.clear([("train", 1, 2**63)]),
    ):
        with pytest.raises(ProtocolMismatch):
            ask()
    assert client.now() == 0


def test_a_malformed_answer_is_a_mismatch(tmp_path: Path) -> None:
    answers: Calls = {"now": lambda _: b"\xa1x", "totals": lambda _: b""}
    with serving(tmp_path, answers) as (_, channel):
        with pytest.raises(ProtocolMismatch, match="now: no answer"):
            ValueClient(channel).now()
        with pytest.raises(ProtocolMismatch, match="totals: no answer"):
            ValueClient(channel).totals()


CALLER = """
import sys
from tq_fs.channel import ChannelBackend
client = ChannelBackend(sys.argv[1], store_id="s", unit="u", timeout_s=20)
print("calling", flush=True)
client.call("hold", bytes(1000), long=True)
"""


def test_a_caller_that_is_killed_while_it_waits_gives_its_room_back(tmp_path: Path) -> None:
    inside, end = threading.Event(), threading.Event()

    def hold(_: bytes) -> bytes:
        inside.set()
        end.wait(20)
        return b""

    with serving(tmp_path, {"hold": hold, "turn": bytes}) as (server, client):
        with spawn_child(CALLER, server.endpoints[0]) as process:
            assert inside.wait(20)
            process.kill()
            process.communicate()
        assert eventually(lambda: server.lanes == 0)
        end.set()
        assert eventually(lambda: server.held_bytes == 0)
        assert client.call("turn", b"x") == b"x"
