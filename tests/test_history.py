"""Which Step a request follows: every rule of the table, and what makes two messages the same."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests._talks import Message, Talk, said, schema, system, tool, user
from tests._templates import call
from tq_fs.errors import InvalidRequest, StepMissing
from tq_fs.trajectory import Turn, messages_of
from tq_fs.trajectory._messages import digests

S, U, V, W = system("be fine"), user("the tool?"), user("and then?"), user("the town?")
A, B, C = said("the answer"), said("another answer"), said("a third")
TOOLS, OTHER_TOOLS = [schema("weather")], [schema("weather"), schema("town")]


def decision(turn: Turn) -> tuple[str, int | None, str]:
    return turn.kind, turn.parent, turn.reason


def routed(talk: Talk, messages: Sequence[Message], tools: Any = None) -> Any:
    """Ask, tell where the request belongs, and leave everything as it was."""
    turn = talk.begin(messages, tools)
    talk.conversation.cancel(turn)
    return decision(turn)


REWRITTEN, NEW_TOOLS = "history rewritten", "tools changed"

# What was said before, each with its reply; the request; the decision.
RULES: dict[str, tuple[list[tuple[list[Message], Message]], list[Message], Any]] = {
    "no Step yet": ([], [U], ("create", None, "")),
    "nothing shared": ([([U], A)], [V], ("create", None, "")),
    "the whole conversation goes on": ([([U], A)], [U, A, V], ("append", 0, "")),
    "goes on by two messages": ([([U], A)], [U, A, tool("x"), tool("y")], ("append", 0, "")),
    "goes on by none": ([([U], A)], [U, A], ("append", 0, "")),
    "goes on from a Step that was continued": (
        [([U], A), ([U, A, V], B)],
        [U, A, W],
        ("branch", 0, ""),
    ),
    "goes on from the last of two": (
        [([U], A), ([U, A, V], B)],
        [U, A, V, B, W],
        ("append", 1, ""),
    ),
    "a tip though a branch goes on beyond it": (
        # Step 1 was no append: it came while another request claimed Step 0, which then failed
        [([U], A), ([U, A, V], B)],
        [U, A, W],
        ("append", 0, ""),
    ),
    "the same prompt again": ([([U], A)], [U], ("branch", 0, "")),
    "the same later prompt again": ([([U], A), ([U, A, V], B)], [U, A, V], ("branch", 1, "")),
    "the same prompt again, long ago": ([([U], A), ([U, A, V], B)], [U], ("branch", 0, "")),
    "the same prompt a third time": ([([U], A), ([U], B)], [U], ("branch", 1, "")),
    "another message after a shared reply": (
        [([U], A), ([U, A, V, W], B)],
        [U, A, V, V],
        ("branch", 0, ""),
    ),
    "ends inside the context after a shared reply": (
        [([U], A), ([U, A, V, W], B)],
        [U, A, V],
        ("branch", 0, ""),
    ),
    "another message after the later of two shared replies": (
        [([U], A), ([U, A, V], B), ([U, A, V, B, U, W], C)],
        [U, A, V, B, U, U],
        ("branch", 1, ""),
    ),
    "the reply changed": ([([U], A)], [U, B, V], ("boundary", 0, REWRITTEN)),
    "the reply dropped": ([([U], A)], [U, V], ("boundary", 0, REWRITTEN)),
    "a later reply changed": (
        [([U], A), ([U, A, V], B)],
        [U, A, V, C, W],
        ("boundary", 1, REWRITTEN),
    ),
    "an early reply changed": (
        [([U], A), ([U, A, V], B)],
        [U, C, V, B, W],
        ("boundary", 1, REWRITTEN),
    ),
    "only the system message shared": ([([S, U], A)], [S, V], ("boundary", 0, REWRITTEN)),
    "ends inside the context, no reply shared": ([([S, U], A)], [S], ("boundary", 0, REWRITTEN)),
    "compaction that keeps the system message": (
        [([S, U], A), ([S, U, A, V], B)],
        [S, user("so far: …"), W],
        ("boundary", 1, REWRITTEN),
    ),
    "of several conversations the one that shares most": (
        [([S, U], A), ([S, V], B), ([S, U, A, W], C)],
        [S, V, B, W],
        ("append", 1, ""),
    ),
    "of several that share as much the latest": (
        [([S, U], A), ([S, V], B)],
        [S, W],
        ("boundary", 1, REWRITTEN),
    ),
    "the same reply given twice": ([([U], A), ([U], A)], [U, A, V], ("append", 1, "")),
    "a whole conversation, though a later one goes on beyond the same words": (
        # Step 2 goes on from what a client wrote, Step 1 ends with the same, which it generated
        [([U, A, V], B), ([U], said("the answer", "hm")), ([U, A, V, B, W], C)],
        [U, A, W],
        ("append", 1, ""),
    ),
    "a reply that the client wrote itself": (
        [([U, A, V], B)],
        [U, A, W],
        ("boundary", 0, REWRITTEN),
    ),
}


@pytest.mark.parametrize("mode", ["tito", "snapshot"])
@pytest.mark.parametrize("rule", RULES)
def test_a_request_is_routed_by_the_table(rule: str, mode: Any) -> None:
    before, request, expected = RULES[rule]
    talk = Talk(mode=mode)
    for i, (messages, reply) in enumerate(before):
        held = talk.begin([U, A, W]) if rule.startswith("a tip though") and i else None
        talk.say(messages, reply)
        if held is not None:
            assert held.kind == "append"
            talk.conversation.cancel(held)
    assert routed(talk, request) == expected


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize(
    ("request_", "tools", "expected"),
    [
        ([U, A, V], TOOLS, ("append", 0, "")),
        ([U, A, V], [dict(reversed(list(TOOLS[0].items())))], ("append", 0, "")),
        ([U, A, V], OTHER_TOOLS, ("boundary", 0, NEW_TOOLS)),
        ([U, A, V], OTHER_TOOLS[::-1], ("boundary", 0, NEW_TOOLS)),
        ([U, A, V], None, ("boundary", 0, NEW_TOOLS)),
        ([U], OTHER_TOOLS, ("boundary", 0, NEW_TOOLS)),
        ([U], TOOLS, ("branch", 0, "")),
        ([U, B], OTHER_TOOLS, ("boundary", 0, REWRITTEN)),
        ([V], OTHER_TOOLS, ("create", None, "")),
    ],
)
def test_other_tools_draw_a_boundary(request_: Any, tools: Any, expected: Any) -> None:
    talk = Talk()
    talk.say([U], A, TOOLS)
    assert routed(talk, request_, tools) == expected


def test_tools_are_those_of_the_parent_not_of_the_first_step() -> None:
    talk = Talk()
    talk.say([U], A, TOOLS)
    assert talk.say([U, A, V], B, OTHER_TOOLS).kind == "boundary"
    assert routed(talk, [U, A, V, B, W], OTHER_TOOLS) == ("append", 1, "")
    assert routed(talk, [U, A, V, B, W], TOOLS) == ("boundary", 1, NEW_TOOLS)
    assert routed(talk, [U, A, W], TOOLS) == ("append", 0, "")  # nothing was appended to it


def test_no_tools_and_an_empty_list_are_the_same() -> None:
    talk = Talk()
    talk.say([U], A)
    assert routed(talk, [U, A, V], []) == ("append", 0, "")


# ---------------------------------------------------------------- claims


def test_of_two_requests_at_once_one_appends_and_the_other_branches() -> None:
    talk = Talk()
    talk.say([U], A)
    first, second = talk.begin([U, A, V]), talk.begin([U, A, W])
    assert decision(first) == ("append", 0, "")
    assert decision(second) == ("branch", 0, "")
    talk.answer(second, B)
    talk.answer(first, B)
    kinds = [(r.kind, r.parent) for r in talk.trajectory.records()]
    assert kinds == [("create", None), ("branch", 0), ("append", 0)]
    assert routed(talk, [U, A, V, B, U]) == ("append", 2, "")
    assert routed(talk, [U, A, W, B, U]) == ("append", 1, "")


def test_a_cancelled_turn_lets_another_append() -> None:
    talk = Talk()
    talk.say([U], A)
    first = talk.begin([U, A, V])
    talk.conversation.cancel(first)
    second = talk.begin([U, A, W])
    assert decision(second) == ("append", 0, "")
    talk.conversation.cancel(first)  # once more: the claim is another's by now
    assert routed(talk, [U, A, U]) == ("branch", 0, "")
    talk.answer(second, B)
    talk.conversation.cancel(second)
    talk.conversation.cancel(second)
    assert routed(talk, [U, A, W]) == ("branch", 1, "")
    assert routed(talk, [U, A, W, B, U]) == ("append", 1, "")


def test_a_request_that_cannot_be_rendered_claims_nothing() -> None:
    talk = Talk()
    talk.say([U], A)
    with pytest.raises(InvalidRequest, match="a role that nobody knows"):
        talk.begin([U, A, {"role": "refused", "content": "x"}])
    assert routed(talk, [U, A, V]) == ("append", 0, "")


def test_an_append_that_is_not_confirmed_claims_nothing() -> None:
    talk = Talk("thinking")
    talk.say([U], said("the answer", "hm"))
    turn = talk.begin([U, said("the answer", "hm"), V])
    assert decision(turn) == ("boundary", 0, "template rewrote the history")
    follow = [U, said("the answer", "hm"), tool("x")]
    assert routed(talk, follow) == ("append", 0, "")
    talk.answer(turn, B)
    assert routed(talk, follow) == ("append", 0, "")  # a boundary leaves its parent a tip


def test_a_turn_that_is_committed_twice_is_kept_once() -> None:
    talk = Talk()
    turn = talk.begin([U])
    record = talk.answer(turn, A)
    before = talk.conversation.document()
    talk.conversation.commit(turn, record, B)
    assert talk.conversation.document() == before


def test_a_turn_that_was_cancelled_can_still_be_committed() -> None:
    """Its client went away while its Step was being recorded."""
    talk = Talk()
    turn = talk.begin([U])
    talk.conversation.cancel(turn)
    talk.answer(turn, A)
    assert routed(talk, [U, A, V]) == ("append", 0, "")


def test_of_many_threads_that_append_to_one_step_one_does() -> None:
    talk = Talk()
    talk.say([U], A)
    turns: list[Turn] = []
    ready = threading.Barrier(8)

    def ask(number: int) -> None:
        ready.wait(30)
        turns.append(talk.begin([U, A, user(f"question {number}")]))

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    sys.setswitchinterval(switch)
    assert sorted(t.kind for t in turns) == ["append"] + ["branch"] * 7
    for turn in turns:
        talk.answer(turn, B)
    document = talk.conversation.document()
    assert len(document["messages"]) == 2 + 2 * 8


# ---------------------------------------------------------------- sameness

WEATHER = call("weather", {"city": "Oslo", "days": 2}, 1)
SAME: dict[str, tuple[Message, Message]] = {
    "null values": (said("fine"), {**said("fine"), "tool_calls": None, "name": None}),
    "decorations": (
        said("fine"),
        {**said("fine"), "refusal": "", "annotations": [1], "audio": {"id": 1}, "index": 3},
    ),
    "a library's own additions": (said("fine"), {**said("fine"), "provider_specific": {"a": 1}}),
    "null content and none": (
        said(None, calls=[WEATHER]),
        {"role": "assistant", "tool_calls": [WEATHER]},
    ),
    "null content and an empty one": (said(None, calls=[WEATHER]), said("", calls=[WEATHER])),
    "ids of tool calls": (
        said("x", calls=[WEATHER]),
        said("x", calls=[{**WEATHER, "id": "other", "index": 0}]),
    ),
    "arguments by their meaning": (
        said("x", calls=[WEATHER]),
        said("x", calls=[call("weather", '{"days":2,   "city":"Oslo"}')]),
    ),
    "numbers as JavaScript writes them": (
        said("x", calls=[call("f", '{"a": 1.0, "b": [2e3, -0.0, 0.5]}')]),
        said("x", calls=[call("f", '{"a":1,"b":[2000,0,0.5]}')]),
    ),
    "arguments as a mapping": (
        said("x", calls=[WEATHER]),
        said(
            "x", calls=[{"function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}}]
        ),
    ),
    "text parts": (
        said("fine"),
        said([{"type": "text", "text": "fi"}, {"type": "text", "text": "ne"}]),  # type: ignore[arg-type]
    ),
    "reasoning left out": (said("fine", "hm"), said("fine")),
    "reasoning empty": (said("fine", "hm"), said("fine", "")),
    "no reasoning and an empty one": (said("fine"), said("fine", "")),
}
DIFFERENT: dict[str, tuple[Message, Message]] = {
    "content": (said("fine"), said("Fine")),
    "role": (said("fine"), user("fine")),
    "other reasoning": (said("fine", "hm"), said("fine", "well")),
    "reasoning that was never generated": (said("fine"), said("fine", "hm")),
    "arguments": (said("x", calls=[WEATHER]), said("x", calls=[call("weather", {"city": "Rome"})])),
    "numbers": (
        said("x", calls=[call("f", '{"a": 1.0}')]),
        said("x", calls=[call("f", '{"a": 1.5}')]),
    ),
    "arguments that are no JSON": (
        said("x", calls=[call("f", "{")]),
        said("x", calls=[call("f", "{{")]),
    ),
    "JSON and its text": (said("x", calls=[call("f", '"a"')]), said("x", calls=[call("f", "a")])),
    "name of the tool": (said("x", calls=[WEATHER]), said("x", calls=[call("town", {})])),
    "order of the calls": (
        said("x", calls=[call("f", {}), call("g", {})]),
        said("x", calls=[call("g", {}), call("f", {})]),
    ),
    "one call more": (said("x", calls=[WEATHER]), said("x", calls=[WEATHER, WEATHER])),
    "parts that are no text": (
        said([{"type": "image_url", "image_url": {"url": "a"}}]),  # type: ignore[arg-type]
        said([{"type": "image_url", "image_url": {"url": "b"}}]),  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_a_reply_is_known_again(case: str) -> None:
    generated, returned = SAME[case]
    talk = Talk()
    talk.say([U], generated)
    assert routed(talk, [U, returned, V])[:2] == ("append", 0)


@pytest.mark.parametrize("case", DIFFERENT)
def test_another_reply_is_told_from_the_recorded_one(case: str) -> None:
    generated, returned = DIFFERENT[case]
    talk = Talk("unclosed" if "parts" in case else "plain")
    turn = talk.begin([U])
    talk.conversation.commit(turn, talk.record(turn, talk.template.ids("the answer")), generated)
    assert routed(talk, [U, returned, V]) == ("boundary", 0, REWRITTEN)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (user("the tool"), user([{"type": "text", "text": "the tool"}]), True),
        (tool("fine", 1), tool("fine", 2), True),
        (tool("fine"), {**tool("fine"), "name": None}, True),
        (tool("fine"), {**tool("fine"), "name": "weather"}, False),
        (user("fine"), {**user("fine"), "images": ["a"]}, False),  # a template may show it
    ],
)
def test_a_context_message_is_known_again(first: Message, second: Message, same: bool) -> None:
    talk = Talk()
    talk.say([first, V], A)
    assert (routed(talk, [second, V, A, W])[0] == "append") is same


@pytest.mark.parametrize(
    "bad",
    [
        [],
        ["text"],
        [{"content": "x"}],
        [{"role": 7}],
        [{**user("x"), "more": object()}],
        [{**user("x"), 3: 1, "a": 2}],  # keys that cannot be put in order
    ],
)
def test_what_is_no_message_is_refused(bad: Any) -> None:
    talk = Talk()
    with pytest.raises(InvalidRequest, match="messages"):
        talk.begin(bad)
    with pytest.raises(InvalidRequest, match=r"messages\[1\]" if bad else "messages"):
        talk.begin(bad and [U, *bad])


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_a_message_nested_too_deep_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\]"):
        Talk().begin([{**user("x"), "more": nested(100_000)}])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": 7},
        {"role": "assistant", "tool_calls": [7, {"function": 3}, {}]},
        {"role": "assistant", "tool_calls": [call("f", "[" * 100_000)]},
        user([{"type": "text"}, 3, None]),
        user("\ud800"),
    ],
)
def test_odd_messages_are_told_apart(message: Message) -> None:
    """Whether they can be rendered is the template's to say."""
    assert len(set(digests([message, U]))) == 2


# ---------------------------------------------------------------- reasoning


def test_the_model_sees_its_own_reasoning_where_the_client_left_it_out() -> None:
    talk = Talk("thinking")
    generated = said("let me see", "the tool knows", [call("weather", {})])
    talk.say([U], generated)
    stripped = {k: v for k, v in generated.items() if k != "reasoning_content"}
    for kind, request in [("append", [U, stripped, tool("fine")])]:
        turn = talk.begin(request)
        assert turn.kind == kind
        assert "the tool knows" in talk.template.decode(turn.input_ids)
    branch = talk.begin([U, stripped, tool("not fine")])
    assert branch.kind == "branch"
    assert "the tool knows" in talk.template.decode(branch.input_ids)


def test_of_replies_that_differ_in_reasoning_alone_the_one_is_meant_that_goes_on() -> None:
    talk = Talk()
    talk.say([U], said("yes", "first"))
    talk.say([U, said("yes", "first"), V], B)
    talk.say([U], said("yes", "second"))
    assert routed(talk, [U, said("yes"), V, B, W]) == ("append", 1, "")
    assert routed(talk, [U, said("yes"), W]) == ("append", 2, "")  # the latest, where none does
    assert routed(talk, [U, said("yes", "first"), W]) == ("branch", 0, "")
    turn = talk.begin([U, said("yes"), W])
    assert "second" in talk.template.decode(turn.input_ids)


# ---------------------------------------------------------------- document


def test_a_document_tells_every_conversation_and_keeps_each_message_once() -> None:
    talk = Talk()
    talk.say([S, U], said("x", "hm", [call("weather", {})]), TOOLS)
    first = [S, U, said("x", "hm", [call("weather", {})])]
    talk.say([*first, tool("fine")], A, TOOLS)
    talk.say([*first, tool("fine")], B, TOOLS)
    talk.say([*first, tool("fine"), A, V], C)
    document = json.loads(json.dumps(talk.conversation.document()))
    assert messages_of(document, 0) == first
    assert messages_of(document, 1) == [*first, tool("fine"), A]
    assert messages_of(document, 2) == [*first, tool("fine"), B]
    assert messages_of(document, 3) == [*first, tool("fine"), A, V, C]
    assert len(document["messages"]) == 8
    assert [document["tools"][s["tools"]] for s in document["steps"]] == [TOOLS] * 3 + [[]]
    prompts = [document["messages"][s["prompt"]] for s in document["steps"]]
    assert prompts == [U, tool("fine"), tool("fine"), V]
    with pytest.raises(StepMissing):
        messages_of(document, 4)


def test_a_document_tells_of_recorded_steps_only() -> None:
    talk = Talk()
    talk.conversation.cancel(talk.begin([U]))
    talk.begin([V])
    assert talk.conversation.document() == {
        "schema": "tq-fs/conversation/1",
        "messages": [],
        "parents": [],
        "tools": [],
        "steps": [],
    }


def test_a_conversation_keeps_some_hundred_bytes_a_step_besides_the_messages() -> None:
    talk = Talk()
    history: list[Message] = [S]

    def turns(count: int) -> None:
        for _ in range(count):
            history.append(user(f"question {len(history)}"))
            turn = talk.begin(history)
            reply = said("yes", "hm")
            record = talk.record(turn, talk.generated(reply))
            talk.conversation.commit(turn, record, reply)
            history.append(reply)

    turns(20)
    before = kept_bytes(talk)
    turns(60)
    assert (kept_bytes(talk) - before) / 60 < 1000


def kept_bytes(talk: Talk) -> int:
    """Return the bytes of all that a Conversation holds, without messages, tokens and tokenizer."""
    seen: set[int] = set()
    stack: list[Any] = [talk.conversation._history, talk.conversation._rendered]
    total = 0
    while stack:
        thing = stack.pop()
        if id(thing) in seen or (isinstance(thing, dict) and "role" in thing):
            continue
        seen.add(id(thing))
        total += sys.getsizeof(thing)
        stack += inside(thing)
    return total


def inside(thing: Any) -> list[Any]:
    if isinstance(thing, dict):
        return [*thing, *thing.values()]
    if isinstance(thing, list | tuple | set):
        return list(thing)
    slots: Callable[[Any], Any] = lambda t: getattr(type(t), "__slots__", ())  # noqa: E731
    return [getattr(thing, name) for name in (*slots(thing), *getattr(thing, "__dict__", ()))]
