"""A client that goes away, at every stage of its request: nothing is left, or the Step is recorded.

The requests come over plain sockets, which are closed (FIN) or broken off (RST).
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import tq_fs
from tests._proxies import (
    STOP,
    Message,
    Slow,
    World,
    check_tensors,
    template,
    user,
    wait_until,
    world,
)
from tq_fs.errors import StorageFailed
from tq_fs.ingest import RoutingCheck
from tq_fs.storage_unit import StorageUnit
from tq_fs.trajectory import Conversation, Trajectory

How = Literal["close", "reset"]


@pytest.fixture(params=["close", "reset"])
def how(request: pytest.FixtureRequest) -> How:
    found: How = request.param
    return found


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        yield made


class Visitor:
    """A client that may go away."""

    def __init__(self, w: World) -> None:
        self._socket = socket.create_connection(("127.0.0.1", int(w.proxy.url.split(":")[-1])))

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def ask(self, messages: list[Message], session_id: str = "s", **more: Any) -> None:
        self.send(request(messages, session_id, **more))

    def hear(self) -> bytes:
        """What is answered, to the end of the connection or of patience."""
        self._socket.settimeout(10)
        heard = b""
        with contextlib.suppress(TimeoutError):
            while piece := self._socket.recv(65536):
                heard += piece
                _, end, body = heard.partition(b"\r\n\r\n")
                if end and b'"tq_fs"' in body:
                    break
        return heard

    def leave(self, how: How) -> None:
        if how == "reset":
            linger = struct.pack("ii", 1, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._socket.close()


def request(
    messages: list[Message],
    session_id: str = "s",
    *,
    path: str = "/v1/chat/completions",
    turn_id: str = "",
    body: dict[str, Any] | None = None,
    **more: Any,
) -> bytes:
    sent = json.dumps(body or {"messages": messages, "max_tokens": 6, **more}).encode()
    turn = f"X-Turn-Id: {turn_id}\r\n" if turn_id else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Session-Id: {session_id}\r\n{turn}"
        f"Content-Length: {len(sent)}\r\n\r\n"
    )
    return head.encode() + sent


def check_nothing_left(w: World, messages: list[Message], *, recorded: int) -> None:
    """The session has so many Steps, nothing runs, and it goes on where it was."""
    w.quiet()
    w.engine.wait_for(lambda: w.engine.running == 0)
    assert w.client.pause(1) == 0
    w.client.resume()
    entry = w.entry("s")
    assert entry is None or not (entry.working or entry.recording or entry.ending)
    assert (len(w.store_records("s")) if entry else 0) == recorded
    assert w.steps_on_disk() == recorded
    answer = w.chat("s", [*messages, user("after")])
    assert answer.status == 200, answer.body
    assert answer.json["tq_fs"]["kind"] == ("append" if recorded else "create")
    assert w.client.finalize("s").steps == recorded + 1
    check_tensors(w, w.client.read(["s"]))
    assert w.tasks() == []


# ---------------------------------------------------------------- before the request is whole


@pytest.mark.parametrize("part", ["nothing", "head", "no body", "half"])
def test_while_it_sends_its_request(proxy: World, how: How, part: str) -> None:
    messages = proxy.play("s", 1)
    whole = request([*messages, user("?")])
    end_of_head = whole.index(b"\r\n\r\n") + 4
    length = {"nothing": 0, "head": 30, "no body": end_of_head, "half": end_of_head + 20}[part]
    visitor = Visitor(proxy)
    visitor.send(whole[:length])
    wait_until(lambda: proxy.tasks() == [] or part in ("no body", "half"))
    visitor.leave(how)
    check_nothing_left(proxy, messages, recorded=1)


# ---------------------------------------------------------------- while it waits


@pytest.mark.parametrize("turn_id", ["", "t"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Conversation, "begin"),
        (RoutingCheck, "check"),
    ],
)
def test_while_a_thread_works_for_it(
    proxy: World,
    monkeypatch: pytest.MonkeyPatch,
    how: How,
    kind: type,
    name: str,
    turn_id: str,
) -> None:
    messages = proxy.play("s", 1)
    with monkeypatch.context() as patch:
        slow = Slow(patch, kind, name)
        visitor = Visitor(proxy)
        visitor.ask([*messages, user("?")], turn_id=turn_id)
        assert slow.entered.wait(10)
        visitor.leave(how)
        wait_until(lambda: not proxy.entry("s").working)
        slow.go_on.set()  # the thread goes on, and its claim is given back
    check_nothing_left(proxy, messages, recorded=1)


def test_while_its_session_begins(proxy: World, monkeypatch: pytest.MonkeyPatch, how: How) -> None:
    with monkeypatch.context() as patch:
        slow = Slow(patch, tq_fs.Store, "session")
        visitor = Visitor(proxy)
        visitor.ask([user("?")])
        assert slow.entered.wait(10)
        visitor.leave(how)
        wait_until(lambda: not proxy.entry("s").working)
        slow.go_on.set()
    check_nothing_left(proxy, [user("?")], recorded=0)


def test_while_its_session_begins_in_vain(
    proxy: World, monkeypatch: pytest.MonkeyPatch, how: How
) -> None:
    with monkeypatch.context() as patch:

        def failing(*args: Any, **named: Any) -> Any:
            raise StorageFailed("EIO")

        patch.setattr(tq_fs.Store, "session", failing)
        slow = Slow(patch, tq_fs.Store, "session")
        visitor = Visitor(proxy)
        visitor.ask([user("?")])
        assert slow.entered.wait(10)
        visitor.leave(how)
        wait_until(lambda: not proxy.entry("s").working)
        slow.go_on.set()
        wait_until(lambda: proxy.entry("s") is None)
    check_nothing_left(proxy, [user("?")], recorded=0)


@pytest.mark.parametrize("fault", ["hold", "hang", "slow-body"])
@pytest.mark.parametrize("stream", [False, True])
def test_while_the_engine_generates(proxy: World, how: How, fault: Any, stream: bool) -> None:
    messages = proxy.play("s", 1)
    proxy.engine.fault(fault)
    visitor = Visitor(proxy)
    visitor.ask([*messages, user("?")], stream=stream)
    proxy.engine.wait_for(lambda: proxy.engine.running == 1)
    visitor.leave(how)
    proxy.engine.wait_for(lambda: proxy.engine.running == 0)
    check_nothing_left(proxy, messages, recorded=1)


def test_while_generation_is_paused(proxy: World, how: How) -> None:
    messages = proxy.play("s", 1)
    proxy.client.pause()
    visitor = Visitor(proxy)
    visitor.ask([*messages, user("?")])
    wait_until(lambda: proxy.inside.gate.waiting == 1)
    visitor.leave(how)
    wait_until(lambda: proxy.inside.gate.waiting == 0)
    proxy.client.resume()
    check_nothing_left(proxy, messages, recorded=1)


def test_while_a_pause_waits_for_it(proxy: World, how: How) -> None:
    messages = proxy.play("s", 1)
    proxy.engine.fault("hang")  # an engine that does not listen to an abort
    visitor = Visitor(proxy)
    visitor.ask([*messages, user("?")])
    proxy.engine.wait_for(lambda: proxy.engine.running == 1)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(proxy.client.pause(60)))
    thread.start()
    wait_until(lambda: proxy.inside.gate.paused)
    visitor.leave(how)
    thread.join(10)
    assert found == [1]
    proxy.client.resume()
    check_nothing_left(proxy, messages, recorded=1)


# ---------------------------------------------------------------- once it is recorded


@pytest.mark.parametrize(("kind", "name"), [(StorageUnit, "put"), (Trajectory, "commit")])
def test_while_its_step_is_recorded(
    proxy: World, monkeypatch: pytest.MonkeyPatch, how: How, kind: type, name: str
) -> None:
    """The Step stays: the conversation goes on after it, and the same turn gives its answer."""
    messages = proxy.play("s", 1)
    proxy.engine.answer("recorded")
    question = [*messages, user("?")]
    with monkeypatch.context() as patch:
        slow = Slow(patch, kind, name)
        visitor = Visitor(proxy)
        visitor.ask(question, turn_id="t", max_tokens=20)
        assert slow.entered.wait(10)
        visitor.leave(how)
        wait_until(lambda: not proxy.entry("s").working)
        assert proxy.entry("s").busy
        slow.go_on.set()
    proxy.quiet()
    again = proxy.chat("s", question, max_tokens=20, headers={"X-Turn-Id": "t"})
    reply = again.json["choices"][0]["message"]
    assert reply["content"] == "recorded"
    assert again.json["tq_fs"]["kind"] == "append"
    check_nothing_left(proxy, [*question, reply], recorded=2)


def test_a_finalize_waits_for_the_step_of_who_went_away(
    proxy: World, monkeypatch: pytest.MonkeyPatch, how: How
) -> None:
    messages = proxy.play("s", 1)
    with monkeypatch.context() as patch:
        slow = Slow(patch, Trajectory, "commit")
        visitor = Visitor(proxy)
        visitor.ask([*messages, user("?")])
        assert slow.entered.wait(10)
        visitor.leave(how)
        wait_until(lambda: not proxy.entry("s").working)
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(proxy.client.finalize("s").steps))
        thread.start()
        wait_until(lambda: proxy.entry("s").state == "finalizing")
        slow.go_on.set()
        thread.join(10)
    assert found == [2]
    (segment,) = proxy.client.read(["s"])
    assert [s["step"] for s in segment.extra["conversation"]["steps"]] == [0, 1]
    check_tensors(proxy, [segment])


def test_while_its_step_cannot_be_recorded(
    proxy: World, monkeypatch: pytest.MonkeyPatch, how: How
) -> None:
    messages = proxy.play("s", 1)
    with monkeypatch.context() as patch:

        def failing(*args: Any, **named: Any) -> Any:
            raise StorageFailed("EIO")

        patch.setattr(Trajectory, "commit", failing)
        slow = Slow(patch, Trajectory, "commit")
        visitor = Visitor(proxy)
        visitor.ask([*messages, user("?")], turn_id="t")
        assert slow.entered.wait(10)
        visitor.leave(how)
        slow.go_on.set()
        proxy.quiet()
    assert proxy.entry("s").turns == {}
    check_nothing_left(proxy, messages, recorded=1)


def test_while_it_does_not_hear_its_answer(proxy: World, how: How) -> None:
    messages = proxy.play("s", 1)
    visitor = Visitor(proxy)
    visitor.ask([*messages, user("?")])
    wait_until(lambda: len(proxy.store_records("s")) == 2)
    visitor.leave(how)
    ids = proxy.engine.asked[-1].input_ids
    text = template().decode(proxy.store_records("s")[-1].tokens).removesuffix(STOP)
    reply = {"role": "assistant", "content": text[text.rindex("assistant\n") + 10 :]}
    assert ids
    check_nothing_left(proxy, [*messages, user("?"), reply], recorded=2)


# ---------------------------------------------------------------- others, meanwhile


def test_who_asks_the_same_turn_takes_over(proxy: World, how: How) -> None:
    """A client that gave up and asks again does not wait for what was broken off."""
    messages = proxy.play("s", 1)
    proxy.engine.fault("hang")
    visitor, other = Visitor(proxy), Visitor(proxy)
    visitor.ask([*messages, user("?")], turn_id="t")
    proxy.engine.wait_for(lambda: proxy.engine.running == 1)
    other.ask([*messages, user("?")], turn_id="t")
    wait_until(lambda: len(proxy.entry("s").working) == 2)
    assert len(proxy.engine.asked) == 2
    visitor.leave(how)
    heard = other.hear()
    other.leave("close")
    assert b"200 OK" in heard
    reply = json.loads(heard.partition(b"\r\n\r\n")[2])["choices"][0]["message"]
    check_nothing_left(proxy, [*messages, user("?"), reply], recorded=2)


def test_while_it_waits_for_the_same_turn_of_another(proxy: World, how: How) -> None:
    messages = proxy.play("s", 1)
    proxy.engine.fault("hold")
    first, visitor = Visitor(proxy), Visitor(proxy)
    first.ask([*messages, user("?")], turn_id="t")
    proxy.engine.wait_for(lambda: proxy.engine.running == 1)
    visitor.ask([*messages, user("?")], turn_id="t")
    wait_until(lambda: len(proxy.entry("s").working) == 2)
    visitor.leave(how)
    wait_until(lambda: len(proxy.entry("s").working) == 1)
    proxy.engine.release()
    heard = first.hear()
    first.leave("close")
    reply = json.loads(heard.partition(b"\r\n\r\n")[2])["choices"][0]["message"]
    check_nothing_left(proxy, [*messages, user("?"), reply], recorded=2)


# ---------------------------------------------------------------- other requests


@pytest.mark.parametrize("what", ["finalize", "discard"])
def test_while_its_session_ends(
    proxy: World, monkeypatch: pytest.MonkeyPatch, how: How, what: str
) -> None:
    proxy.play("s", 2)
    with monkeypatch.context() as patch:
        slow = Slow(patch, tq_fs.Session, what)
        visitor = Visitor(proxy)
        visitor.ask([], path=f"/session/{what}", body={"session_id": "s"})
        assert slow.entered.wait(10)
        visitor.leave(how)
        slow.go_on.set()
        wait_until(lambda: proxy.entry("s") is None)
    wait_until(lambda: proxy.tasks() == [])
    if what == "finalize":
        assert proxy.client.finalize("s").steps == 2
        check_tensors(proxy, proxy.client.read(["s"]))
    else:
        assert proxy.steps_on_disk() == 0
        assert proxy.client.discard("s") is False


def test_while_it_reads_what_is_then_to_be_forgotten(how: How) -> None:
    """It has not got it, so that it is kept."""
    fields = [tq_fs.logprobs(), tq_fs.routed_experts(layers=40, topk=8, experts=256)]
    shape = {"layers": 40, "topk": 8, "experts": 256, "length": None}
    with world(None, engine=shape, fields=fields, context_length=20_000) as w:
        w.chat("s", [user("?")], max_tokens=16_000)
        w.client.finalize("s")
        visitor = Visitor(w)
        visitor.ask([], path="/trajectory/read", body={"session_ids": ["s"], "forget": True})
        visitor._socket.recv(1000)
        visitor.leave(how)
        wait_until(lambda: w.tasks() == [])
        check_tensors(w, w.client.read(["s"], forget=True))
        assert w.client.read() == []


@pytest.mark.slow
def test_many_come_and_go(proxy: World) -> None:
    """None of them leaves anything: what was recorded is whole, and the rest is not there."""
    messages = proxy.play("s", 1)
    proxy.engine.token_s = 0.005
    stages = [0.0, 0.002, 0.01, 0.02, 0.03, 0.04, 0.06]

    def visit(place: int) -> None:
        visitor = Visitor(proxy)
        visitor.ask([*messages, user(f"q{place % 5}")])
        threading.Event().wait(stages[place % len(stages)])
        visitor.leave("reset" if place % 2 else "close")

    for batch in range(10):
        threads = [threading.Thread(target=visit, args=(batch * 12 + i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    proxy.quiet()
    records = proxy.store_records("s")
    assert 1 < len(records) < 121
    assert proxy.steps_on_disk() == len(records)
    assert proxy.client.finalize("s").steps == len(records)
    check_tensors(proxy, proxy.client.read(["s"]))
    assert proxy.client.release(proxy.client.read(["s"])) == len(records)
    assert proxy.steps_on_disk() == 0
