"""The Proxy over real HTTP: a session's whole life, and what its clients may rely on."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tq_fs
from tests._proxies import (
    FIELDS,
    TOOL,
    World,
    check_tensors,
    template,
    together,
    user,
    wait_until,
    world,
)
from tq_fs.errors import (
    InvalidConfig,
    InvalidRequest,
    ProxyUnavailable,
    SegmentMissing,
    SessionClosed,
    SessionMissing,
    StorageFailed,
    TableFull,
    Unauthorized,
)
from tq_fs.manifests import Mode
from tq_fs.metrics import METRICS
from tq_fs.proxy import ProxyClient, ProxySettings, RunningProxy, create_app
from tq_fs.proxy._routes import ROUTES

CALL = '<tool_call>\n{"name": "look", "arguments": {"what": "moon"}}\n</tool_call>'


@pytest.fixture(params=["file", "off"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Where the store lies."""
    return tmp_path if request.param == "file" else None


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        yield made


# ---------------------------------------------------------------- a session's life


@pytest.mark.parametrize("mode", ["tito", "snapshot"])
def test_a_session_lives_from_its_first_question_to_its_release(
    place: Path | None, mode: Mode
) -> None:
    with world(place, mode=mode, views=("lineage", "timeline")) as w:
        kinds = play_all_kinds(w, "s")
        assert kinds == [
            ("create", ""),
            ("append", ""),
            ("branch", ""),
            ("boundary", "tools changed"),
            ("boundary", "history rewritten"),
        ]
        answer = w.client.finalize("s", extra={"label": "7"})
        assert answer.steps == 5
        segments = w.client.read(["s"])
        for have, want in zip(segments, answer.segments, strict=True):
            assert (have.ref, have.view, have.index) == (want.ref, want.view, want.index)
            assert list(have.steps) == want.steps
            assert (len(have.tokens), have.response_length) == (want.tokens, want.response_length)
            assert (have.ref is None) == (place is None)
            assert set(have.arrays) == (set() if place else {"logprobs", "routed_experts"})
            assert have.extra["label"] == "7"
        check_tensors(w, segments)
        asked = [a.input_ids for a in w.engine.asked]
        assert [s.tokens.tolist()[: len(asked[i])] for s in segments for i in s.steps[-1:]] == [
            asked[i] for s in segments for i in s.steps[-1:]
        ]
        assert w.steps_on_disk() == (5 if place else 0)
        assert w.client.release(segments) == (5 if place else 0)
        assert w.client.release(segments) == 0
        assert w.steps_on_disk() == 0
        w.quiet()


def play_all_kinds(w: World, session_id: str) -> list[tuple[str, str]]:
    """A conversation with a Step of every kind; returns kinds and reasons."""
    first = [user("one")]
    answers = [w.chat(session_id, first).json]
    second = [*first, reply_of(answers[0]), user("two")]
    answers.append(w.chat(session_id, second).json)
    answers.append(w.chat(session_id, first, temperature=0.5, seed=3).json)  # the same again
    answers.append(
        w.chat(session_id, [*second, reply_of(answers[1]), user("3")], tools=[TOOL]).json
    )
    compacted = [user("In short: one, two."), user("go on")]
    answers.append(w.chat(session_id, [user("one"), *compacted]).json)
    return [(a["tq_fs"]["kind"], a["tq_fs"]["reason"]) for a in answers]


def reply_of(answer: Any) -> dict[str, Any]:
    message = answer["choices"][0]["message"]
    assert isinstance(message, dict)
    return message


def test_a_tool_is_called_and_its_result_is_appended(place: Path | None) -> None:
    with world(place) as w:
        w.engine.answer("I will look." + CALL)
        question = [user("what is up?")]
        answer = w.chat("s", question, tools=[TOOL], max_tokens=200).json
        reply = reply_of(answer)
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert reply["content"].strip() == "I will look."
        (call,) = reply["tool_calls"]
        assert call["type"] == "function"
        assert call["function"]["name"] == "look"
        assert json.loads(call["function"]["arguments"]) == {"what": "moon"}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "it is full"}
        second = w.chat("s", [*question, reply, result], tools=[TOOL]).json
        assert second["tq_fs"]["kind"] == "append"
        prompt = template().decode(w.engine.asked[1].input_ids)
        assert "look" in prompt
        assert "it is full" in prompt
        w.client.finalize("s")
        (segment,) = w.client.read(["s"])
        assert segment.steps == (0, 1)
        assert segment.loss_mask.sum() == sum(
            a["usage"]["completion_tokens"] for a in (answer, second)
        )
        check_tensors(w, [segment])


def test_with_tool_choice_none_the_answer_is_not_searched_for_calls(proxy: World) -> None:
    proxy.engine.answer(CALL)
    answer = proxy.chat("s", [user("?")], tools=[TOOL], tool_choice="none", max_tokens=200).json
    assert "tool_calls" not in reply_of(answer)
    assert reply_of(answer)["content"] == CALL
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "look" in template().decode(proxy.engine.asked[0].input_ids)


def test_many_sessions_at_once_do_not_mix(place: Path | None) -> None:
    with world(place, engine={"token_s": 0.001}) as w:
        names = [f"s{i}" for i in range(8)]
        together(partial(w.play, n, 3, headers={"X-Instance-Id": n[:1]}) for n in names)
        assert w.engine.most_running > 1
        answers = together(partial(w.client.finalize, n) for n in names)
        assert [a.steps for a in answers] == [3] * 8
        segments = w.client.read(instance_id="s")
        assert sorted(s.session_id for s in segments) == names
        check_tensors(w, segments)
        (first,) = [s for s in segments if s.session_id == "s0"]
        prompts = [a.input_ids for a in w.engine.asked]
        assert any(first.tokens.tolist()[: len(p)] == p for p in prompts)


def test_requests_of_one_session_at_once_are_branches_of_one_another(proxy: World) -> None:
    messages = proxy.play("s", 1)
    proxy.engine.fault("hold", "hold", "hold", after=2)
    calls = [lambda i=i: proxy.chat("s", [*messages, user(f"q{i}")]) for i in range(3)]
    threads = [threading.Thread(target=c) for c in calls]
    for thread in threads:
        thread.start()
    proxy.engine.wait_for(lambda: proxy.engine.running == 3)
    proxy.engine.release()
    for thread in threads:
        thread.join(20)
    kinds = sorted(r.kind for r in proxy.store_records("s"))
    assert kinds == ["append", "branch", "branch", "create"]
    proxy.client.finalize("s")
    check_tensors(proxy, proxy.client.read(["s"]))


# ---------------------------------------------------------------- OpenAI's form


def test_the_answer_is_openais(proxy: World) -> None:
    answer = proxy.chat("s", [user("hello")])
    assert answer.headers["content-type"] == "application/json"
    body = answer.json
    assert set(body) == {"id", "object", "created", "model", "choices", "usage", "tq_fs"}
    assert body["object"] == "chat.completion"
    assert body["model"] == "tq-fs"
    assert abs(body["created"] - time.time()) < 60
    (choice,) = body["choices"]
    assert set(choice) == {"index", "message", "finish_reason"}
    assert choice["index"] == 0
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 5  # without the stop token
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(proxy.engine.asked[0].input_ids)
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    recorded = body["tq_fs"]
    assert recorded["session_id"] == "s"
    assert (recorded["step"], recorded["kind"], recorded["reason"]) == (0, "create", "")
    assert recorded["versions"] == [["0", 6]]


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_says_the_same_in_events(proxy: World, usage: bool) -> None:
    proxy.engine.answer("Look:" + CALL)
    options = {"stream_options": {"include_usage": True}} if usage else {}
    answer = proxy.chat("s", [user("?")], tools=[TOOL], stream=True, max_tokens=200, **options)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, end, rest = answer.body.decode().split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] > 0
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(d.get("content", "") for d in deltas).strip() == "Look:"
    (calls,) = [d["tool_calls"] for d in deltas if "tool_calls" in d]
    assert calls[0]["index"] == 0
    assert calls[0]["function"]["name"] == "look"
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


def test_what_a_stream_fails_with_is_a_status(proxy: World) -> None:
    proxy.engine.fault("error-500")
    answer = proxy.chat("s", [user("?")], stream=True)
    assert answer.status == 502
    assert answer.code == "upstream_unavailable"


def test_what_openais_clients_send_besides_is_passed_over(proxy: World) -> None:
    """Keys of newer versions, nulls, parts, and what a client echoes of an answer."""
    first = proxy.chat(
        "s",
        [
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}],
            },
        ],
        user="u",
        metadata={"a": "b"},
        store=False,
        parallel_tool_calls=True,
        service_tier="auto",
        tools=None,
        stop=None,
        seed=None,
        n=1,
        top_p=1,
        temperature=0,
        logprobs=False,
        response_format={"type": "text"},
    )
    assert first.status == 200, first.body
    echoed = {**reply_of(first.json), "refusal": None, "annotations": [], "audio": None}
    second = proxy.chat(
        "s",
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": "hello"},
            {**echoed, "function_call": None, "tool_calls": None},
            user("and?"),
        ],
    )
    assert second.json["tq_fs"]["kind"] == "append"


def test_sampling_is_handed_on_in_the_engines_words(tmp_path: Path) -> None:
    with world(tmp_path, sampling={"temperature": 0.7, "ignore_eos": True}) as w:
        w.chat("s", [user("?")], top_p=0.5, top_k=20, seed=11, stop="xyz", max_completion_tokens=3)
        sampling = w.engine.asked[0].sampling
        assert sampling["temperature"] == 0.7
        assert sampling["ignore_eos"] is True
        assert (sampling["top_p"], sampling["top_k"]) == (0.5, 20)
        assert sampling["sampling_seed"] == 11
        assert sampling["stop"] == ["xyz"]
        assert sampling["max_new_tokens"] == 3  # the newer word counts
        assert sampling["stop_token_ids"] == list(template().stop_ids)
        w.chat("s", [user("?")], temperature=0.2)
        assert w.engine.asked[1].sampling["temperature"] == 0.2


def test_text_ends_before_a_stop_text_and_tokens_do_not(proxy: World) -> None:
    proxy.engine.answer("one two END more")
    answer = proxy.chat("s", [user("?")], stop=["END"], max_tokens=100).json
    assert reply_of(answer)["content"] == "one two "
    assert answer["usage"]["completion_tokens"] == len("one two END more") + 1


def test_without_max_tokens_the_context_is_the_bound(tmp_path: Path) -> None:
    with world(tmp_path, context_length=100, max_new_tokens=50) as w:
        w.send("POST", "/v1/chat/completions", {"messages": [user("?")]}, {"X-Session-Id": "s"})
        w.send(
            "POST",
            "/v1/chat/completions",
            {"messages": [user("x" * 40)]},
            {"X-Session-Id": "t"},
        )
        first, second = (a.max_new_tokens for a in w.engine.asked)
        assert first == 50
        assert second == 100 - len(w.engine.asked[1].input_ids) < 50


def test_an_answer_that_is_cut_says_so(proxy: World) -> None:
    answer = proxy.chat("s", [user("?")], max_tokens=3).json
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


# ---------------------------------------------------------------- headers


def test_ids_are_utf_8(proxy: World) -> None:
    name = "søssion/日本 1"
    answer = proxy.chat("x", [user("?")], headers={"X-Session-Id": name.encode()})
    assert answer.json["tq_fs"]["session_id"] == name
    assert proxy.client.finalize(name).steps == 1
    client = proxy.client.chat([user("?")], session_id=name, max_tokens=4)
    assert client["tq_fs"]["session_id"] == name


def test_a_session_belongs_to_one_instance(proxy: World) -> None:
    proxy.chat("s", [user("?")], headers={"X-Instance-Id": "group 1"})
    proxy.chat("s", [user("??")])
    other = proxy.chat("s", [user("???")], headers={"X-Instance-Id": "group 2"})
    assert (other.status, other.code) == (400, "invalid_request")
    proxy.client.finalize("s")
    (one, _) = proxy.client.read(["s"])
    assert one.extra["instance_id"] == "group 1"


# ---------------------------------------------------------------- a turn again


def turn(name: str) -> dict[str, Any]:
    return {"headers": {"X-Turn-Id": name}}


def test_a_turn_that_is_asked_again_gives_the_recorded_answer(proxy: World) -> None:
    first = proxy.chat("s", [user("?")], **turn("t"))
    again = proxy.chat("s", [user("?")], **turn("t"))
    assert again.json == first.json
    assert len(proxy.engine.asked) == 1
    streamed = proxy.chat("s", [user("?")], stream=True, **turn("t"))
    assert first.json["id"] in streamed.body.decode()
    other = proxy.chat("s", [user("?")], **turn("u"))
    assert other.json["tq_fs"]["step"] == 1
    proxy.client.finalize("s")
    assert proxy.chat("s", [user("?")], **turn("t")).json == first.json
    assert proxy.entry("s") is None
    proxy.client.forget(["s"])
    assert proxy.chat("s", [user("?")], **turn("t")).json["id"] != first.json["id"]


def test_a_turn_that_is_asked_again_while_it_runs_waits_for_it(proxy: World) -> None:
    proxy.engine.fault("hold")
    timer = threading.Timer(0.3, proxy.engine.release)
    timer.start()
    answers = together([lambda: proxy.chat("s", [user("?")], **turn("t"))] * 4)
    assert len({a.body for a in answers}) == 1
    assert answers[0].status == 200
    assert len(proxy.engine.asked) == 1
    timer.join()


def test_a_turn_that_failed_is_asked_anew(proxy: World) -> None:
    proxy.engine.fault("error-500")
    assert proxy.chat("s", [user("?")], **turn("t")).status == 502
    assert proxy.chat("s", [user("?")], **turn("t")).status == 200
    assert proxy.entry("s").turns.keys() == {"t"}


def test_a_turn_id_names_one_request(proxy: World) -> None:
    proxy.chat("s", [user("?")], **turn("t"))
    other = proxy.chat("s", [user("!")], **turn("t"))
    assert (other.status, other.code) == (400, "invalid_request")
    proxy.client.finalize("s")
    other = proxy.chat("s", [user("!")], **turn("t"))
    assert (other.status, other.code) == (400, "invalid_request")


# ---------------------------------------------------------------- read, forget, release


def test_json_and_msgpack_say_the_same(place: Path | None) -> None:
    with world(place) as w:
        play_all_kinds(w, "s")
        w.client.finalize("s")
        one, other = (w.client.read(["s"], binary=binary) for binary in (True, False))
        for a, b in zip(one, other, strict=True):
            assert (a.ref, a.steps, a.versions, a.extra) == (b.ref, b.steps, b.versions, b.extra)
            for name in a.arrays.keys() | b.arrays.keys():
                np.testing.assert_array_equal(a.arrays[name], b.arrays[name])
            assert a.tokens.tolist() == b.tokens.tolist()
        plain = w.send("POST", "/trajectory/read", {"session_ids": ["s"]})
        assert plain.headers["content-type"] == "application/json"
        segment = plain.json["segments"][0]
        assert segment["tokens"].keys() == {"dtype", "shape", "data"}


def test_large_arrays_come_whole(tmp_path: Path) -> None:
    """More than one piece of the body."""
    fields = [tq_fs.logprobs(), tq_fs.routed_experts(layers=40, topk=8, experts=256)]
    shape = {"layers": 40, "topk": 8, "experts": 256, "length": None}
    with world(None, engine=shape, fields=fields) as w:
        w.chat("s", [user("?" * 100)], max_tokens=2000)
        w.client.finalize("s")
        for binary in (True, False):
            segments = w.client.read(["s"], binary=binary)
            assert segments[0].arrays["routed_experts"].nbytes > 2 * 1024**2
            check_tensors(w, segments)


def test_reading_chooses_by_session_by_instance_and_by_number(proxy: World) -> None:
    for name, group in (("a", "g"), ("b", "g"), ("c", "h")):
        proxy.play(name, 1, headers={"X-Instance-Id": group})
        proxy.client.finalize(name)
    proxy.play("open", 1)

    def read(*args: Any, **named: Any) -> list[str]:
        return [s.session_id for s in proxy.client.read(*args, **named)]

    assert read() == ["a", "b", "c"]
    assert read(["c", "a", "c"]) == ["c", "a"]
    assert read(instance_id="g") == ["a", "b"]
    assert read(["a", "c"], instance_id="h") == ["c"]
    assert read(instance_id="nobody's") == []
    assert read([]) == []
    assert read(limit=2) == ["a", "b"]
    with pytest.raises(SessionMissing, match="open"):
        read(["a", "open"])
    assert read(limit=2, forget=True) == ["a", "b"]
    assert read() == ["c"]
    assert proxy.client.forget(["c", "c", "nobody"]) == 1
    assert read() == []
    with pytest.raises(SessionMissing):
        read(["c"])
    with pytest.raises(SessionMissing):
        proxy.client.finalize("c")


def test_a_session_id_can_be_used_again(place: Path | None) -> None:
    with world(place) as w:
        w.play("s", 1)
        first = w.client.finalize("s")
        w.play("s", 2)  # a new incarnation beside the kept one
        assert [s.steps for s in w.client.read(["s"])] == [(0,)]
        second = w.client.finalize("s")
        assert first.incarnation_id != second.incarnation_id
        assert (first.steps, second.steps) == (1, 2)
        segments = w.client.read(["s"])
        assert [s.steps for s in segments] == [(0,), (0, 1)]
        check_tensors(w, segments)
        assert w.client.finalize("s") == second
        assert w.client.forget(["s"]) == 2
        w.play("t", 1)
        assert w.client.discard("t") is True
        assert w.client.discard("t") is False
        w.play("t", 1)
        assert w.client.finalize("t").steps == 1


def test_a_discarded_session_leaves_nothing(place: Path | None) -> None:
    with world(place) as w:
        w.play("s", 3)
        assert w.steps_on_disk() == (3 if place else 0)
        assert w.client.discard("s") is True
        assert w.steps_on_disk() == 0
        assert w.entry("s") is None
        with pytest.raises(SessionMissing):
            w.client.finalize("s")


def test_a_release_may_wait_for_the_checkpoint(proxy: World) -> None:
    proxy.play("s", 2)
    proxy.client.finalize("s", consumers=["train", "eval"])
    segments = proxy.client.read(["s"])
    assert proxy.client.release(segments, "eval") == 0
    assert proxy.client.release(segments, "train", rollout_id=3) == 0
    check_tensors(proxy, segments)
    assert proxy.client.checkpoint_saved(2) == 0
    assert proxy.client.checkpoint_saved(3) == 2
    with pytest.raises(SegmentMissing):
        proxy.store.hydrate(segments)


# ---------------------------------------------------------------- pause


def test_a_pause_cuts_generations_and_they_go_on_after_it(place: Path | None) -> None:
    with world(place, engine={"length": None}) as w:
        w.engine.fault("hold", after=2)
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(w.chat("s", [user("?")])))
        thread.start()
        w.engine.wait_for(lambda: w.engine.running == 1)
        assert w.client.pause() == 1
        assert w.client.health().paused is True
        assert answers == []
        w.engine.version = "1"
        w.client.resume()
        thread.join(20)
        assert w.client.health().paused is False
        assert answers[0].json["tq_fs"]["versions"] == [["0", 2], ["1", 4]]
        w.client.finalize("s")
        (segment,) = w.client.read(["s"])
        assert segment.versions[-1] == ("1", 4)
        check_tensors(w, [segment])


def test_requests_wait_while_it_is_paused(proxy: World) -> None:
    proxy.client.pause()
    proxy.client.pause()
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(proxy.chat("s", [user("?")])))
    thread.start()
    wait_until(lambda: proxy.inside.gate.waiting == 1)
    assert (proxy.engine.asked, answers) == ([], [])
    proxy.client.resume()
    thread.join(20)
    assert answers[0].status == 200


# ---------------------------------------------------------------- the table of sessions


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_idle_sessions_are_discarded(place: Path | None) -> None:
    clock = Clock()
    with world(place, clock=clock, session_idle_s=100, sweep_s=0.01) as w:
        w.play("old", 2)
        w.play("kept", 1)
        w.client.finalize("kept")
        clock.now = 60
        w.play("young", 1)
        w.engine.fault("hold")
        thread = threading.Thread(target=lambda: w.chat("busy", [user("?")]))
        thread.start()
        w.engine.wait_for(lambda: w.engine.running == 1)
        clock.now = 120
        wait_until(lambda: w.entry("old") is None)
        assert w.entry("young") is not None
        clock.now = 1000
        wait_until(lambda: w.entry("young") is None)
        assert w.entry("busy") is not None
        w.engine.release()
        thread.join(20)
        assert w.entry("busy") is not None
        assert [s.session_id for s in w.client.read()] == ["kept"]
        assert w.steps_on_disk() == (2 if place else 0)  # of busy and kept


def test_a_sweep_that_fails_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    errors = [StorageFailed("EIO"), ZeroDivisionError()]
    discard = tq_fs.Session.discard

    def failing(session: tq_fs.Session) -> None:
        if errors:
            raise errors.pop()
        discard(session)

    monkeypatch.setattr(tq_fs.Session, "discard", failing)
    with world(tmp_path, clock=clock, session_idle_s=100, sweep_s=0.01) as w:
        w.play("s", 1)
        clock.now = 200
        wait_until(lambda: w.entry("s") is None)
        assert w.steps_on_disk() == 0
    assert "a look for idle sessions failed" in caplog.text
    assert "cannot be discarded" in caplog.text


def test_the_table_is_bounded(tmp_path: Path) -> None:
    with world(tmp_path, open_sessions=2, kept_sessions=1) as w:
        w.play("a", 1)
        w.play("b", 1)
        full = w.chat("c", [user("?")])
        assert (full.status, full.code) == (503, "table_full")
        assert full.headers["retry-after"] == "1"
        w.play("b", 1)
        w.client.finalize("a")
        with pytest.raises(TableFull, match="kept"):
            w.client.chat([user("?")], session_id="c")
        assert w.client.finalize("b").steps == 2  # what was begun can be ended
        assert w.client.forget(["a", "b"]) == 2
        w.play("c", 1)


def test_bytes_of_kept_sessions_are_bounded() -> None:
    with world(None, kept_bytes=1000) as w:
        w.play("a", 1)
        w.client.finalize("a")
        assert w.inside.sessions.kept.nbytes > 1000
        assert w.chat("b", [user("?")]).code == "table_full"
        w.client.read(forget=True)
        assert w.inside.sessions.kept.nbytes == 0
        w.play("b", 1)


def test_a_session_without_steps_is_finalized_to_nothing(proxy: World) -> None:
    proxy.engine.fault("error-500")
    proxy.chat("s", [user("?")])
    answer = proxy.client.finalize("s")
    assert (answer.steps, answer.segments) == (0, [])
    assert proxy.client.read(["s"]) == []


# ---------------------------------------------------------------- the token


def test_nobody_gets_in_without_the_token(tmp_path: Path) -> None:
    with world(tmp_path, token="s3cret") as w:
        for route in ROUTES:
            answer = w.send(route.method, route.path, {} if route.takes else None)
            assert (answer.status == 200) == (route.path == "/health"), route.path
            if route.path != "/health":
                assert (answer.status, answer.code) == (401, "unauthorized")
                assert answer.headers["www-authenticate"] == "Bearer"
        assert w.send("GET", "/openapi.json").status == 401
        assert w.send("GET", "/nowhere").status == 401
        for wrong in ("Bearer s3cre", "Bearer s3crets", "s3cret", "Basic s3cret", "Bearer é"):
            headers = {"Authorization": wrong.encode()}
            assert w.send("GET", "/metrics", headers=headers).status == 401, wrong
        assert w.send("GET", "/metrics", headers={"authorization": "bearer s3cret"}).status == 200
        assert w.client.chat([user("?")], session_id="s", max_tokens=4)["tq_fs"]["step"] == 0
        with pytest.raises(Unauthorized):
            ProxyClient(w.proxy.url, token="other").capabilities()
        assert "s3cret" not in repr(w.inside.settings)


# ---------------------------------------------------------------- about itself


def test_it_tells_what_it_can_do(place: Path | None) -> None:
    with world(place, model="qwen", views=("timeline",), store={"transfer": ("logprobs",)}) as w:
        told = w.client.capabilities()
        assert told.version == tq_fs.__version__
        assert (told.model, told.mode, told.views) == ("qwen", "tito", ["timeline"])
        assert told.store.url == w.store.url
        assert [(f.name, f.transferred) for f in told.fields] == [
            ("logprobs", place is not None),
            ("routed_experts", False),
        ]
        assert w.send("GET", "/v1/models").json["data"][0]["id"] == "qwen"
        assert w.client.health().status == "ok"


def test_every_metric_of_the_proxy_is_told(proxy: World) -> None:
    proxy.play("s", 2)
    proxy.play("t", 1)
    proxy.client.finalize("t")
    proxy.send("GET", "/nowhere/at/all")
    proxy.engine.fault("hold")
    thread = threading.Thread(target=lambda: proxy.chat("t", [user("?")]))
    thread.start()
    proxy.engine.wait_for(lambda: proxy.engine.running == 1)
    proxy.client.pause()
    proxy.client.resume()
    thread.join(20)
    text = proxy.client.metrics()
    for spec in METRICS:
        if spec.name.startswith(("tqfs_proxy_", "tqfs_upstream_")):
            assert f"# TYPE {spec.name} {spec.kind}\n" in text
    labels = 'store="default",role="proxy"'
    for line in (
        f'tqfs_proxy_requests_total{{{labels},path="/v1/chat/completions",status="200"}} 4',
        f'tqfs_proxy_requests_total{{{labels},path="other",status="404"}} 1',
        f'tqfs_proxy_sessions{{{labels},state="open"}} 2',
        f'tqfs_proxy_sessions{{{labels},state="finalized"}} 1',
        f'tqfs_proxy_stage_seconds_count{{{labels},stage="record"}} 4',
        f'tqfs_steps_written_total{{{labels},target="local"}} 4',
    ):
        assert line in text.splitlines(), line


def test_the_description_has_every_endpoint_and_no_loose_end(proxy: World) -> None:
    document = proxy.send("GET", "/openapi.json").json
    told = {(m.upper(), p) for p, methods in document["paths"].items() for m in methods}
    assert told == {(r.method, r.path) for r in ROUTES}
    names = document["components"]["schemas"].keys()
    wanted = set(_refs(document))
    assert wanted <= {f"#/components/schemas/{name}" for name in names}
    assert "#/components/schemas/ChatRequest" in wanted


def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        yield from itertools.chain.from_iterable(map(_refs, value))


# ---------------------------------------------------------------- its own life


def test_it_ends_with_requests_under_way(tmp_path: Path) -> None:
    """And what it had not finalized is swept when the store is opened again."""
    before = threading.active_count()
    with world(tmp_path) as w:
        w.play("s", 2)
        w.engine.fault("hang")
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(attempt(w)))
        thread.start()
        w.engine.wait_for(lambda: w.engine.running == 1)
    thread.join(20)
    assert answers != [200]
    wait_until(lambda: threading.active_count() <= before)
    with tq_fs.open_store(f"file://{tmp_path}/store", fields=FIELDS) as store:
        assert list(store.unreleased()) == []
    assert w.steps_on_disk() == 0


def attempt(w: World) -> int:
    try:
        return w.chat("s", [user("?")]).status
    except OSError:
        return 0


def test_what_cannot_be_is_refused_at_the_start(tmp_path: Path) -> None:
    settings = ProxySettings(context_length=10, upstreams=("http://127.0.0.1:1",))
    for fields, named in (
        ([tq_fs.logprobs(), tq_fs.routed_experts()], "layers and topk"),
        ([FIELDS[1]], "logprobs"),
    ):
        with (
            tq_fs.open_store(None, fields=fields) as store,
            pytest.raises(InvalidConfig, match=named),
        ):
            create_app(settings, store, template())
    with tq_fs.open_store(None, fields=FIELDS) as store:
        with (
            socket.create_server(("127.0.0.1", 0)) as taken,
            pytest.raises(InvalidConfig, match="listened"),
        ):
            RunningProxy(settings, store, template(), port=taken.getsockname()[1])
        with RunningProxy(settings, store, template()) as proxy:
            url = proxy.url
    with pytest.raises(ProxyUnavailable):
        ProxyClient(url).health()


@pytest.mark.parametrize(
    "wrong",
    [
        {"views": ()},
        {"views": ("both",)},
        {"mode": "other"},
        {"routing_check": "maybe"},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"session_idle_s": True},
        {"body_bytes": 1.5},
        {"token": "two words"},
        {"token": ""},
        {"context_length": None},
        {"max_new_tokens": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        ProxySettings(**{"context_length": 10, **wrong})


def test_the_client_names_what_went_wrong(proxy: World) -> None:
    with pytest.raises(InvalidRequest) as caught:
        proxy.client.chat([], session_id="s")
    assert caught.value.subject == "the body"
    proxy.play("s", 1)
    proxy.client.finalize("s")
    with pytest.raises(SessionClosed, match="was finalized") as closed:
        proxy.client.discard("s")
    assert closed.value.remedy
    for name in ("two\nlines", " spaces "):
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            proxy.client.chat([user("?")], session_id=name)
    with pytest.raises(InvalidRequest, match="stream"):
        proxy.client.chat([user("?")], session_id="s", stream=True)
    with pytest.raises(InvalidConfig):
        ProxyClient("ftp://x")


def other_server(answer: bytes) -> tuple[str, Callable[[], None]]:
    """A server that says one thing; its URL, and what ends it."""
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> None:
        thread.join(10)
        server.close()

    return f"http://127.0.0.1:{server.getsockname()[1]}", end


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 502 Bad\r\nContent-Length: 4\r\n\r\n<ht>",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<ht>",
        b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"status"',
    ],
)
def test_an_answer_that_is_no_proxys_is_one_error(answer: bytes) -> None:
    url, end = other_server(answer)
    with pytest.raises(ProxyUnavailable):
        ProxyClient(url, timeout_s=10).health()
    end()
