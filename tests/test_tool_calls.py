"""Replies as assistant messages: what the template writes is read back, and the rest is text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from tq_fs.demo.tokenizer import TURN_END, build_tokenizer
from tq_fs.proxy._template import ChatTemplate
from tq_fs.proxy._tool_calls import parse_reply

TEMPLATE = ChatTemplate.from_model(build_tokenizer())
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
QUESTION = {"role": "user", "content": "?"}

# Text that is none of the notation itself: whoever writes markers into content means them.
plain = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(
    lambda text: not any(mark in text for mark in ("<think>", "</think>", "<tool_call>", "<|im"))
)
contents = plain.filter(lambda text: not text.startswith("\n"))
thoughts = plain.filter(lambda text: text.strip("\n") == text)
leaves = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=20)
values = st.recursive(
    leaves | st.sampled_from(["</tool_call>", "\n</tool_call>\n<tool_call>\n{", "</think>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
calls = st.tuples(st.text(min_size=1, max_size=12), st.dictionaries(st.text(max_size=6), values))

PIECES = ("<think>", "</think>", "<tool_call>", "</tool_call>", *'\n{}[":\\a,', "NaN", CALL)


def written(message: dict[str, Any]) -> str:
    """What the model would have written, for the template to render this message."""
    prompt = TEMPLATE.render([QUESTION], None, generation_prompt=True)
    whole = TEMPLATE.render([QUESTION, message], None, generation_prompt=False)
    assert whole.startswith(prompt)
    return whole.removeprefix(prompt).removesuffix(f"{TURN_END}\n")


def message_of(
    content: str, thought: str = "", made: list[tuple[str, dict[str, Any]]] | None = None
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    if made:
        message["content"] = content if content.strip() else None
        message["tool_calls"] = [
            {
                "id": f"call_{n}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": json.dumps(arguments, ensure_ascii=False),
                },
            }
            for n, (name, arguments) in enumerate(made)
        ]
    return message


@settings(max_examples=300, deadline=None)
@given(contents, thoughts, st.lists(calls, max_size=3))
def test_what_the_template_writes_is_read_back(
    content: str, thought: str, made: list[tuple[str, dict[str, Any]]]
) -> None:
    message = message_of(content, thought, made)
    assert parse_reply(written(message), tools=True) == message


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES)).map("".join),
    st.booleans(),
)
def test_any_text_is_a_message(text: str, tools: bool) -> None:
    message = parse_reply(text, tools=tools)
    assert message["role"] == "assistant"
    kept = (message["content"] or "") + message.get("reasoning_content", "")
    for call in message.get("tool_calls", []):
        assert json.loads(call["function"]["arguments"]) == {}
        kept += call["function"]["name"]
    assert kept.count("a") <= text.count("a")
    assert tools or "tool_calls" not in message
    assert parse_reply(text, tools=tools) == message


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>',  # a brace is missing
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": "{}"}\n</tool_call>',
        '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": 1, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": 1e999}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud800"}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {}} and more\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {}}',  # cut off
        "<tool_call>\n[1]\n</tool_call>",
        "<tool_call>\n",
        "<tool_call>\n" + '{"a":' * 100_000,  # deeper than Python goes
        "</tool_call>",
        "f(a=1)",
    ],
)
def test_malformed_calls_stay_text(text: str) -> None:
    for around in (text, f"So: {text}"):
        assert parse_reply(around, tools=True) == {"role": "assistant", "content": around}


def test_a_malformed_call_does_not_hide_the_next() -> None:
    message = parse_reply(f"<tool_call>\n{{oops}}\n</tool_call>\n{CALL}", tools=True)
    assert message["content"] == "<tool_call>\n{oops}\n</tool_call>"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


def test_without_tools_calls_stay_text() -> None:
    assert parse_reply(CALL, tools=False) == {"role": "assistant", "content": CALL}


def test_ids_of_calls_count_from_what_the_caller_gives() -> None:
    first = parse_reply(CALL * 2, tools=True, prefix="call_7")
    assert [made["id"] for made in first["tool_calls"]] == ["call_7_0", "call_7_1"]
    assert first == parse_reply(CALL * 2, tools=True, prefix="call_7")


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("\n<think>hm</think>yes", "hm", "yes"),
        ("hm\n</think>\n\nyes", "hm", "yes"),  # the prompt ended with <think>
        ("<think>\nhm, and", "hm, and", ""),  # cut off
        ("<think>\n\n</think>\n\nyes", "", "yes"),
        ("yes <think>hm", "", "yes <think>hm"),
        ("", "", ""),
    ],
)
def test_thinking_is_split_off(text: str, thought: str, content: str) -> None:
    message = parse_reply(text, tools=True)
    assert (message.get("reasoning_content", ""), message["content"]) == (thought, content)
