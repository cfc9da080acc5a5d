"""The Proxy in odd cases: what a reviewer looked for."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tq_fs
from tests._proxies import (
    FIELDS,
    Message,
    Slow,
    World,
    check_tensors,
    template,
    together,
    user,
    wait_until,
    world,
)
from tq_fs.errors import InvalidConfig
from tq_fs.proxy import ProxySettings
from tq_fs.proxy._app import create_app
from tq_fs.proxy._tool_calls import parse_reply
from tq_fs.session import Session
from tq_fs.store import Store


@pytest.fixture(params=["file", "off"])
def proxy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with world(tmp_path if request.param == "file" else None) as made:
        yield made


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


# ---------------------------------------------------------------- what cannot be handed on


@pytest.mark.parametrize(
    ("value", "said"),
    [(b"36893488147419103232", "64 bits"), (nested(102), "deep"), (nested(600), "deep")],
)
def test_what_no_answer_could_hold_is_refused_where_it_comes_in(
    proxy: World, value: bytes, said: str
) -> None:
    """Kept with the session, it would break every read of all of them (msgpack has no such)."""
    head = {"X-Session-Id": "s"}
    schema = b'{"type":"function","function":{"name":"a","parameters":{"x":%b}}}' % value
    for body, subject in (
        (b'{"messages":[{"role":"user","content":"?","n":%b}]}' % value, "messages[0]"),
        (b'{"messages":[{"role":"user","content":"?"}],"tools":[%b]}' % schema, "tools[0]"),
        (
            b'{"messages":[{"role":"user","content":"?"}],"chat_template_kwargs":{"n":%b}}' % value,
            "chat_template_kwargs",
        ),
    ):
        answer = proxy.send("POST", "/v1/chat/completions", body, head)
        assert (answer.status, answer.code) == (400, "invalid_request"), answer.body
        assert answer.json["error"]["subject"] == subject
        assert said in answer.json["error"]["message"]
    proxy.play("s", 1)
    answer = proxy.send("POST", "/session/finalize", b'{"session_id":"s","extra":{"n":%b}}' % value)
    assert (answer.status, answer.json["error"]["subject"]) == (400, "extra")
    assert proxy.client.finalize("s").steps == 1
    assert len(proxy.client.read(binary=True)) == len(proxy.client.read(binary=False)) == 1


def test_what_fits_is_taken(proxy: World) -> None:
    body = b'{"messages":[{"role":"user","content":"?","n":18446744073709551615,"m":%b}]}'
    body = body.replace(b"%b", nested(90))
    assert proxy.send("POST", "/v1/chat/completions", body, {"X-Session-Id": "s"}).status == 200
    proxy.client.finalize("s")
    assert len(proxy.client.read(binary=True)) == len(proxy.client.read(binary=False)) == 1


def test_a_call_that_is_nested_too_deep_stays_text() -> None:
    """It could not be recorded, or be rendered in the next prompt."""
    for depth, calls in ((90, True), (91, False), (900, False)):
        arguments = '{"a":' * depth + "1" + "}" * depth
        text = f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
        message = parse_reply(text, tools=True)
        assert ("tool_calls" in message) is calls
        assert (message["content"] == text) is not calls


# ---------------------------------------------------------------- ids used again


def turn(name: str) -> dict[str, Any]:
    return {"headers": {"X-Turn-Id": name}}


def test_a_turn_id_of_an_earlier_incarnation_is_free_in_a_new_one(proxy: World) -> None:
    first = proxy.chat("s", [user("?")], **turn("t")).json["tq_fs"]
    proxy.client.finalize("s")
    second = proxy.chat("s", [user("!")], **turn("u")).json["tq_fs"]
    assert second["incarnation_id"] != first["incarnation_id"]
    for question, step in (("?", 1), ("!!", 2)):
        answer = proxy.chat("s", [user(question)], **turn(f"t{step}" if step > 1 else "t"))
        assert answer.json["tq_fs"]["incarnation_id"] == second["incarnation_id"]
        assert answer.json["tq_fs"]["step"] == step
    assert proxy.chat("s", [user("?")], **turn("t")).json["tq_fs"]["step"] == 1
    assert proxy.client.finalize("s").steps == 3


# ---------------------------------------------------------------- the sweep


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_session_that_is_used_while_others_are_swept_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with world(tmp_path, clock=clock, session_idle_s=100, sweep_s=0.01) as w:
        w.play("idle", 1)
        w.play("used", 1)
        slow = Slow(monkeypatch, Session, "discard")
        clock.now = 200
        assert slow.entered.wait(10)
        w.play("used", 1)
        slow.go_on.set()
        wait_until(lambda: w.entry("idle") is None)
        swept = threading.Event()
        w.on_loop(lambda: w.inside.loop.call_later(0.1, swept.set))
        assert swept.wait(10)
        assert len(w.store_records("used")) == 2


def test_a_session_that_cannot_be_swept_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    discard = Session.discard

    def broken(self: Session) -> None:
        if self.session_id == "bad":
            raise ZeroDivisionError("a fault of ours")
        discard(self)

    monkeypatch.setattr(Session, "discard", broken)
    with world(tmp_path, clock=clock, session_idle_s=100, sweep_s=0.01) as w:
        w.play("bad", 1)
        w.play("good", 1)
        clock.now = 200
        wait_until(lambda: w.entry("good") is None)
        clock.now = 400
        w.play("later", 1)
        clock.now = 600
        wait_until(lambda: w.entry("later") is None)
        assert "cannot be discarded: a fault of ours" in caplog.text


# ---------------------------------------------------------------- all at once


@pytest.mark.parametrize("mode", ["tito", "snapshot"])
def test_whatever_comes_at_once_leaves_nothing_behind(tmp_path: Path, mode: str) -> None:
    """Requests, clients that go away, pauses, finalizes and discards of the same few sessions."""
    with world(tmp_path, mode=mode, engine={"token_s": 0.002}) as w:
        assert together([Rabble(w, seed).run for seed in range(8)]) == [None] * 8
        w.client.resume()
        w.quiet(seconds=20)
        inside = w.inside
        engine = inside.turns._parts.engine
        left = (inside.gate.running, inside.gate.waiting, engine.running, engine.room.used_bytes)
        assert left == (0, 0, 0, 0)
        for entry in inside.sessions._open.values():
            assert entry.opening is not None
            live = entry.opening.result()
            assert not live.conversation._claims
            history = live.conversation._history
            assert all(record.index in history for record in live.session.records)
        for name in SESSIONS:
            if w.entry(name) is not None:
                w.client.finalize(name)
        segments = w.client.read()
        check_tensors(w, segments)
        answers = [entry.answer for entry in inside.sessions.kept._entries.values()]
        steps = sum(answer.steps for answer in answers if answer is not None)
        assert w.steps_on_disk() == steps > 10
        w.client.release(segments)
        assert w.steps_on_disk() == 0


SESSIONS = ("a", "b")


class Rabble:
    """A client without manners."""

    def __init__(self, w: World, seed: int) -> None:
        self._world = w
        self._random = random.Random(seed)
        self._said: list[Message] = []

    def run(self) -> None:
        for _ in range(40):
            call = self._random.choices(
                (self.ask, self.leave, self.end, self.pause), weights=(10, 8, 1, 1)
            )[0]
            call(self._random.choice(SESSIONS))

    def ask(self, session_id: str) -> None:
        messages = [*self._said, user(self._random.choice("?!"))]
        named = turn(self._random.choice("xyz")) if self._random.random() < 0.3 else {}
        answer = self._world.chat(session_id, messages, **named)
        assert answer.status in (200, 400, 409), answer.body
        said = answer.json["choices"][0]["message"] if answer.status == 200 else None
        self._said = [*messages, said][-8:] if said else []

    def leave(self, session_id: str) -> None:
        body = json.dumps({"messages": [*self._said, user("?")], "max_tokens": 6})
        head = f"Host: a\r\nX-Session-Id: {session_id}\r\nContent-Length: {len(body)}\r\n\r\n"
        port = int(self._world.proxy.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}{body}".encode())
            time.sleep(self._random.random() * 0.04)

    def end(self, session_id: str) -> None:
        how = self._random.choice(("finalize", "finalize", "discard"))
        body = {"session_id": session_id, "abort": self._random.random() < 0.7}
        answer = self._world.send("POST", f"/session/{how}", body)
        assert answer.status in (200, 404, 409), answer.body

    def pause(self, _: str) -> None:
        assert self._world.send("POST", "/v1/rollout/pause", {}).status in (200, 409)
        self._world.engine.version = str(self._random.randrange(3))
        self._world.client.resume()


# ---------------------------------------------------------------- the start


@pytest.fixture
def off() -> Iterator[Store]:
    with tq_fs.open_store(None, fields=FIELDS) as store:
        yield store


@pytest.mark.parametrize(
    "urls", [(), ("localhost:30000",), ("http://",), ("http://[::1",), ("http://a:99999",)]
)
def test_an_engine_that_has_no_url_is_refused_before_it_starts(
    off: Store, urls: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidConfig, match="engine"):
        create_app(ProxySettings(context_length=10, upstreams=urls), off, template())


@pytest.mark.parametrize("wrong", [{"max_version_span": -1}, {"partial_rollout": "yes"}])
def test_a_rule_for_versions_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        ProxySettings(context_length=10, **wrong)
