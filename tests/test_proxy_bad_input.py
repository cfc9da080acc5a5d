"""What goes wrong at the Proxy is an HTTP error with a stable code, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tq_fs
from tests._engines import Fault
from tests._proxies import TOOL, Answer, Message, Slow, World, check_tensors, user, world
from tq_fs.errors import StorageFailed, WidthChanged
from tq_fs.trajectory import Trajectory


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        yield made


@contextmanager
def unharmed(w: World, session_id: str = "s") -> Iterator[list[Message]]:
    """A session of one Step; what fails in the block changes nothing about it.

    Afterwards nothing is under way, no Step more lies in the store, and the session goes on where
    it was: had the failed request kept its claim, the next one would be a branch.
    """
    messages = w.play(session_id, 1)
    before = [r.index for r in w.store_records(session_id)]
    yield [*messages, user("next")]
    w.quiet()
    assert [r.index for r in w.store_records(session_id)] == before
    assert w.steps_on_disk() == len(before)
    answer = w.chat(session_id, [*messages, user("next")], max_tokens=20)
    assert answer.status == 200, answer.body
    assert answer.json["tq_fs"]["kind"] == "append"
    assert w.client.finalize(session_id).steps == 2
    check_tensors(w, w.client.read([session_id]))


# ---------------------------------------------------------------- the engine

UPSTREAM: list[tuple[Fault, int, str]] = [
    ("error-400", 502, "upstream_refused"),
    ("error-context", 400, "context_overflow"),
    ("error-500", 502, "upstream_unavailable"),
    ("error-502-html", 502, "upstream_unavailable"),
    ("error-503", 502, "upstream_unavailable"),
    ("hang", 504, "upstream_timeout"),
    ("reset", 502, "upstream_unavailable"),
    ("broken-body", 502, "upstream_unavailable"),
    ("cut-json", 502, "reply_invalid"),
    ("not-json", 502, "reply_invalid"),
    ("wrong-width", 502, "reply_invalid"),
    ("short-base64", 502, "reply_invalid"),
    ("bad-base64", 502, "reply_invalid"),
    ("row-short", 502, "reply_invalid"),
    ("row-more", 502, "reply_invalid"),
    ("no-routing", 502, "reply_invalid"),
    ("expert-out-of-range", 502, "reply_invalid"),
    ("no-version", 502, "reply_invalid"),
    ("version-number", 502, "reply_invalid"),
    ("no-logprobs", 502, "reply_invalid"),
    ("nan-logprob", 502, "reply_invalid"),
    ("null-logprob", 502, "reply_invalid"),
    ("fewer-logprobs", 502, "reply_invalid"),
    ("other-ids", 502, "reply_invalid"),
    ("no-ids", 502, "reply_invalid"),
    ("one-id", 502, "routing_suspect"),
    ("repeat-id", 502, "routing_suspect"),
]


@pytest.mark.parametrize(("fault", "status", "code"), UPSTREAM)
def test_what_the_engine_does_wrong_is_told_and_not_recorded(
    tmp_path: Path, fault: Fault, status: int, code: str
) -> None:
    with world(tmp_path, routing_check="reject", timeout_s=1.0) as w, unharmed(w) as messages:
        w.engine.fault(fault)
        answer = w.chat("s", messages)
        assert (answer.status, answer.code) == (status, code)
        check_error(answer)


def check_error(answer: Answer) -> None:
    error = answer.json["error"]
    assert set(error) == {"message", "type", "code", "subject", "remedy"}
    assert error["message"]
    assert error["remedy"]
    assert ("retry-after" in answer.headers) == (answer.status == 503)


@pytest.mark.parametrize("fault", ["one-id", "repeat-id", "unknown-rows"])
def test_suspect_routing_is_recorded_where_it_is_only_warned_of(proxy: World, fault: Fault) -> None:
    proxy.engine.fault(fault)
    assert proxy.chat("s", [user("?")]).status == 200
    assert proxy.client.finalize("s").steps == 1


def test_an_engine_that_is_not_there(proxy: World) -> None:
    messages = proxy.play("s", 1)
    proxy.engine.stop()
    answer = proxy.chat("s", [*messages, user("?")])
    assert (answer.status, answer.code) == (502, "upstream_unavailable")
    assert proxy.client.finalize("s").steps == 1
    check_tensors(proxy, proxy.client.read(["s"]))


@pytest.mark.parametrize("fault", ["expert-out-of-range", "wrong-width"])
def test_another_model_is_told_with_the_store_off_too(fault: Fault) -> None:
    with world(None, store={"compact": True}) as w:
        w.engine.fault(fault)
        answer = w.chat("s", [user("?")])
        assert (answer.status, answer.code) == (502, "reply_invalid")
        assert w.client.finalize("s").steps == 0


# ---------------------------------------------------------------- the request

BODIES: list[tuple[str, bytes]] = [
    ("nothing", b""),
    ("no JSON", b"{"),
    ("two values", b"{} {}"),
    ("a list", b"[]"),
    ("no UTF-8", b'{"messages":[{"role":"user","content":"\xff"}]}'),
    ("half a surrogate", b'{"messages":[{"role":"user","content":"\\ud800"}]}'),
    ("deep", b'{"messages":[{"role":"user","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"),
    ("no messages", b"{}"),
    ("messages is null", b'{"messages":null}'),
    ("no message", b'{"messages":[]}'),
    ("a message that is none", b'{"messages":["hello"]}'),
    ("no role", b'{"messages":[{"content":"hello"}]}'),
    ("another role", b'{"messages":[{"role":"narrator","content":"x"}]}'),
    ("no content", b'{"messages":[{"role":"user"}]}'),
    ("content of another type", b'{"messages":[{"role":"user","content":7}]}'),
    ("an image", b'{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}'),
    ("calls that are none", b'{"messages":[{"role":"assistant","tool_calls":[{"id":"x"}]}]}'),
]

HELLO: list[Message] = [user("hello")]

FIELDS_OF_BODY: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": "6"},
    {"max_tokens": 1.5},
    {"n": 2},
    {"temperature": -1},
    {"temperature": "hot"},
    {"top_p": 0},
    {"top_p": 1.5},
    {"stop": 7},
    {"seed": "x"},
    {"stream": "yes"},
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "web_search", "function": {}}]},
    {"tools": {}},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "look"}}},
    {"response_format": {"type": "json_object"}},
    {"logprobs": True},
    {"logit_bias": {"5": 100}},
    {"chat_template_kwargs": []},
]


@pytest.mark.parametrize("body", [b for _, b in BODIES], ids=[name for name, _ in BODIES])
def test_a_body_that_is_none_is_refused(proxy: World, body: bytes) -> None:
    answer = proxy.send("POST", "/v1/chat/completions", body, {"X-Session-Id": "s"})
    assert (answer.status, answer.code) == (400, "invalid_request")
    check_error(answer)
    assert proxy.entry("s") is None
    assert proxy.engine.asked == []


@pytest.mark.parametrize("fields", FIELDS_OF_BODY, ids=str)
def test_what_is_not_served_is_refused(proxy: World, fields: dict[str, Any]) -> None:
    answer = proxy.chat("s", HELLO, **fields)
    assert (answer.status, answer.code) == (400, "invalid_request")
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert next(iter(fields)) in answer.json["error"]["message"]
    assert proxy.entry("s") is None


def test_what_the_template_does_not_take_is_refused(proxy: World) -> None:
    with unharmed(proxy) as messages:
        wrong = [*messages, {"role": "assistant", "content": "x", "tool_calls": [7]}]
        assert proxy.chat("s", wrong).code == "invalid_request"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "invalid_request"),
        ({"X-Session-Id": ""}, "invalid_request"),
        ({"X-Session-Id": b"\xff"}, "invalid_request"),
        ({"X-Session-Id": "s", "X-Turn-Id": b"\xff"}, "invalid_request"),
        ({"X-Session-Id": "s" * 1001}, "invalid_key"),
    ],
)
@pytest.mark.parametrize("on", [True, False], ids=["file", "off"])
def test_ids_that_are_none_are_refused(
    tmp_path: Path, headers: dict[str, str | bytes], code: str, on: bool
) -> None:
    with world(tmp_path if on else None) as w:
        body = {"messages": HELLO, "max_tokens": 4}
        answer = w.send("POST", "/v1/chat/completions", body, headers)
        assert (answer.status, answer.code) == (400, code)
        check_error(answer)
        assert w.inside.sessions._open == {}
        assert w.tasks() == []


def test_a_body_that_is_too_long_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with world(tmp_path, body_bytes=10_000) as w, unharmed(w):
        answer = w.chat("s", [user("x" * 20_000)])
        assert (answer.status, answer.code) == (400, "invalid_request")


def test_a_large_body_is_refused_for_what_it_says(proxy: World) -> None:
    """It is decoded in a thread."""
    answer = proxy.chat("s", [user("x" * 100_000), {"role": "nobody", "content": ""}])
    assert (answer.status, answer.code) == (400, "invalid_request")
    assert "messages[1]" in answer.json["error"]["message"]


OTHERS: list[tuple[str, object, int, str]] = [
    ("/session/finalize", {}, 400, "invalid_request"),
    ("/session/finalize", {"session_id": ""}, 400, "invalid_request"),
    ("/session/finalize", {"session_id": 7}, 400, "invalid_request"),
    ("/session/finalize", {"session_id": "nobody"}, 404, "session_missing"),
    ("/session/finalize", {"session_id": "s", "views": ["x"]}, 400, "invalid_config"),
    ("/session/finalize", {"session_id": "s", "views": []}, 400, "invalid_config"),
    ("/session/finalize", {"session_id": "s", "consumers": []}, 400, "invalid_config"),
    ("/session/finalize", {"session_id": "s", "consumers": ["a", "a"]}, 400, "invalid_config"),
    ("/session/finalize", {"session_id": "s", "extra": 7}, 400, "invalid_request"),
    ("/session/discard", {}, 400, "invalid_request"),
    ("/session/discard", b"x", 400, "invalid_request"),
    ("/trajectory/read", {"session_ids": ["nobody"]}, 404, "session_missing"),
    ("/trajectory/read", {"session_ids": ["s"]}, 404, "session_missing"),
    ("/trajectory/read", {"session_ids": "s"}, 400, "invalid_request"),
    ("/trajectory/read", {"limit": 0}, 400, "invalid_request"),
    ("/trajectory/forget", {}, 400, "invalid_request"),
    ("/trajectory/release", {}, 400, "invalid_request"),
    ("/trajectory/release", {"refs": ["nonsense"]}, 400, "invalid_key"),
    ("/trajectory/release", {"refs": [], "consumer": ""}, 400, "invalid_request"),
    ("/trajectory/checkpoint_saved", {"rollout_id": "1"}, 400, "invalid_request"),
    ("/v1/rollout/pause", {"deadline_s": -1}, 400, "invalid_request"),
    ("/v1/rollout/pause", {"deadline_s": "soon"}, 400, "invalid_request"),
    ("/v1/nothing", {}, 404, "no_such_path"),
    ("/health", {}, 405, "method_not_allowed"),
]


def test_other_endpoints_refuse_what_they_cannot_take(proxy: World) -> None:
    with unharmed(proxy):
        for path, body, status, code in OTHERS:
            answer = proxy.send("POST", path, body)
            assert (answer.status, answer.code) == (status, code), (path, body)
            assert set(answer.json["error"]) == {"message", "type", "code", "subject", "remedy"}
        assert proxy.client.health().paused is False


# ---------------------------------------------------------------- the context


def test_a_conversation_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with world(tmp_path, context_length=200) as w, unharmed(w) as messages:
        asked = len(w.engine.asked)
        for long in (
            w.chat("s", [*messages, user("x" * 200)]),
            w.chat("s", messages, max_tokens=190),
        ):
            assert (long.status, long.code) == (400, "context_overflow")
            check_error(long)
        assert len(w.engine.asked) == asked


# ---------------------------------------------------------------- the weights


def test_a_session_does_not_span_versions_where_it_must_not(tmp_path: Path) -> None:
    with world(tmp_path, partial_rollout=False) as w, unharmed(w) as messages:
        w.engine.version = "1"
        answer = w.chat("s", messages)
        assert (answer.status, answer.code) == (409, "version_span")
        w.engine.version = "0"


def test_a_session_spans_so_many_versions_and_no_more(tmp_path: Path) -> None:
    with world(tmp_path, max_version_span=1) as w:
        messages = w.play("s", 1)
        w.engine.version = "1"
        assert w.chat("s", [*messages, user("?")]).status == 200
        w.engine.version = "2"
        assert w.chat("s", [user("?")]).code == "version_span"
        assert w.client.finalize("s").steps == 2


# ---------------------------------------------------------------- the store


def failing_once(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, error: Exception
) -> list[Exception]:
    """Let the next call of a method do its work and then raise; what is left to raise."""
    left = [error]
    call = getattr(kind, name)

    def failing(self: Any, *args: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return call(self, *args, **named)

    monkeypatch.setattr(kind, name, failing)
    return left


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StorageFailed("EIO", subject="disk", remedy="look"), 503, "storage_failed"),
        (WidthChanged("another", subject="Step", remedy="look"), 502, "reply_invalid"),
        (tq_fs.errors.SessionClosed("closed", subject="s", remedy="look"), 409, "session_closed"),
        (tq_fs.errors.StoreFenced("owned", subject="s", remedy="look"), 409, "store_fenced"),
    ],
)
def test_a_step_that_cannot_be_recorded_once_it_is_put_is_taken_back(
    proxy: World, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, code: str
) -> None:
    with unharmed(proxy) as messages:
        left = failing_once(monkeypatch, Trajectory, "commit", error)
        answer = proxy.chat("s", messages)
        assert left == []
        assert (answer.status, answer.code) == (status, code)
        check_error(answer)


def test_an_error_that_is_none_of_ours_is_told_too(
    proxy: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unharmed(proxy) as messages:
        failing_once(monkeypatch, Trajectory, "commit", ZeroDivisionError("secret"))
        answer = proxy.chat("s", messages)
        assert (answer.status, answer.code) == (500, "internal")
        assert "secret" not in answer.body.decode()


def test_a_step_that_is_larger_than_all_room_is_told(tmp_path: Path) -> None:
    with world(tmp_path, store={"inflight_bytes": 3000}) as w, unharmed(w) as messages:
        answer = w.chat("s", [user("x" * 200)])
        assert (answer.status, answer.code) == (500, "step_too_large")
        assert messages


def test_a_finalize_that_fails_leaves_the_session_open(
    proxy: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unharmed(proxy):
        failing_once(monkeypatch, Trajectory, "close", StorageFailed("EIO"))
        answer = proxy.send("POST", "/session/finalize", {"session_id": "s"})
        assert (answer.status, answer.code) == (503, "storage_failed")
        assert proxy.entry("s").state == "open"


def test_a_discard_that_fails_can_be_tried_again(
    proxy: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.play("s", 1)
    failing_once(monkeypatch, tq_fs.Session, "discard", StorageFailed("EIO"))
    assert proxy.send("POST", "/session/discard", {"session_id": "s"}).status == 503
    answer = proxy.chat("s", HELLO)
    assert (answer.status, answer.code) == (409, "session_closed")
    assert proxy.client.discard("s") is True
    assert proxy.steps_on_disk() == 0
    assert proxy.chat("s", HELLO).json["tq_fs"]["step"] == 0


def test_a_session_that_cannot_begin_leaves_nothing(
    proxy: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_once(monkeypatch, tq_fs.Store, "session", StorageFailed("EIO"))
    assert proxy.chat("s", HELLO).status == 503
    assert proxy.entry("s") is None
    assert proxy.chat("s", HELLO).status == 200


# ---------------------------------------------------------------- at the wrong time


@contextmanager
def running(w: World, messages: list[Message], **body: Any) -> Iterator[list[Answer]]:
    """A request that the engine holds; its answer is there after the block."""
    found: list[Answer] = []
    asked = len(w.engine.asked)
    w.engine.fault("hold", after=2)
    thread = threading.Thread(target=lambda: found.append(w.chat("s", messages, **body)))
    thread.start()
    w.engine.wait_for(lambda: len(w.engine.asked) == asked + 1)
    yield found
    w.engine.release()
    thread.join(20)
    assert len(found) == 1


def test_a_session_is_not_finalized_while_a_request_runs(proxy: World) -> None:
    messages = proxy.play("s", 1)
    with running(proxy, [*messages, user("?")]) as found:
        answer = proxy.send("POST", "/session/finalize", {"session_id": "s"})
        assert (answer.status, answer.code) == (409, "session_busy")
    assert found[0].status == 200
    assert proxy.client.finalize("s").steps == 2
    check_tensors(proxy, proxy.client.read(["s"]))


def test_a_finalize_may_break_requests_off(proxy: World) -> None:
    messages = proxy.play("s", 1)
    with running(proxy, [*messages, user("?")]) as found:
        assert proxy.client.finalize("s", abort=True).steps == 1
    assert (found[0].status, found[0].code) == (409, "session_closed")
    proxy.quiet()
    assert proxy.steps_on_disk() == 1
    check_tensors(proxy, proxy.client.read(["s"]))


def test_a_discard_breaks_requests_off(proxy: World) -> None:
    messages = proxy.play("s", 1)
    with running(proxy, [*messages, user("?")]) as found:
        assert proxy.client.discard("s") is True
    assert (found[0].status, found[0].code) == (409, "session_closed")
    proxy.quiet()
    assert proxy.steps_on_disk() == 0
    assert proxy.entry("s") is None
    proxy.engine.wait_for(lambda: proxy.engine.running == 0)
    assert proxy.client.pause() == 0  # what was broken off does not hold it up


def test_finalizing_twice_gives_the_same_answer(proxy: World) -> None:
    proxy.play("s", 2)
    first = proxy.client.finalize("s", views=["timeline"])
    assert proxy.client.finalize("s") == first
    assert proxy.client.finalize("s", abort=True) == first


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    return thread, found


def test_while_a_session_is_finalized_it_takes_nothing(
    proxy: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = proxy.play("s", 1)
    slow = Slow(monkeypatch, tq_fs.Session, "finalize")
    threads = [in_thread(lambda: proxy.client.finalize("s")) for _ in range(3)]
    assert slow.entered.wait(10)
    for answer in (
        proxy.chat("s", [*messages, user("?")]),
        proxy.send("POST", "/session/discard", {"session_id": "s"}),
    ):
        assert (answer.status, answer.code) == (409, "session_busy")
    slow.go_on.set()
    for thread, _ in threads:
        thread.join(10)
    answers = [found[0] for _, found in threads]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0].steps == 1


def test_while_a_session_is_discarded_it_takes_nothing(
    proxy: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = proxy.play("s", 1)
    slow = Slow(monkeypatch, tq_fs.Session, "discard")
    threads = [in_thread(lambda: proxy.client.discard("s")) for _ in range(2)]
    assert slow.entered.wait(10)
    for answer in (
        proxy.chat("s", [*messages, user("?")]),
        proxy.send("POST", "/session/finalize", {"session_id": "s"}),
    ):
        assert (answer.status, answer.code) == (409, "session_closed")
    slow.go_on.set()
    for thread, found in threads:
        thread.join(10)
        assert found == [True]
    assert proxy.steps_on_disk() == 0


def test_a_finalized_session_is_not_discarded(proxy: World) -> None:
    proxy.play("s", 1)
    proxy.client.finalize("s")
    answer = proxy.send("POST", "/session/discard", {"session_id": "s"})
    assert (answer.status, answer.code) == (409, "session_closed")
    check_error(answer)
    check_tensors(proxy, proxy.client.read(["s"]))
    proxy.play("s", 1)  # a new incarnation is another matter
    assert proxy.client.discard("s") is True
    check_tensors(proxy, proxy.client.read(["s"]))


def test_a_rollout_that_is_not_resumed_in_time_is_told(tmp_path: Path) -> None:
    with world(tmp_path, paused_s=0.2) as w, unharmed(w) as messages:
        w.client.pause()
        answer = w.chat("s", messages)
        assert (answer.status, answer.code) == (503, "rollout_paused")
        check_error(answer)
        w.client.resume()


@pytest.mark.parametrize("fault", ["error-500", "not-json", "broken-body"])
def test_what_failed_does_not_hold_up_a_pause(proxy: World, fault: Fault) -> None:
    with unharmed(proxy) as messages:
        proxy.engine.fault(fault)
        proxy.chat("s", messages, tools=[TOOL])
        assert proxy.client.pause(1) == 0
        proxy.client.resume()
