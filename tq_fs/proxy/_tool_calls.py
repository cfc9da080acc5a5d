"""What a model wrote, as an assistant message: thinking and tool calls in Qwen's notation.

======================================================  ==========================================
text                                                    message
======================================================  ==========================================
``<think>…</think>`` at its beginning                   ``reasoning_content``
text up to ``</think>`` (``<think>`` was in the prompt)  ``reasoning_content``
``<think>…`` cut off                                    all of it ``reasoning_content``
``<tool_call>{"name", "arguments"}</tool_call>``        an entry of ``tool_calls``
a call that is malformed, cut off, or without tools     stays text
a call whose arguments are nested over 90 deep          stays text
everything else                                         ``content``
======================================================  ==========================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from tq_fs.proxy._plain import DEEPEST, too_deep

_THINK, _THOUGHT = "<think>", "</think>"
_CALL = re.compile(r"\n?<tool_call>\s*(?=\{)")  # the line break before it is the template's
_AROUND = 10  # levels that the conversation puts around a call's arguments
_CALLED = re.compile(r"\s*</tool_call>")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A well-formed call, and which characters of the text it takes."""

    name: str
    arguments: str
    start: int
    stop: int


def parse_reply(text: str, *, tools: bool, prefix: str = "call") -> dict[str, Any]:
    """Return the assistant message that a reply's text is.

    Parameters
    ----------
    text
        Without the stop token.
    tools
        Whether the request offered tools; without, calls stay text.
    prefix
        Ids of calls are ``{prefix}_{n}``, counted from 0: the same text has the same ids. Give
        another one for each reply, where ids must differ within a conversation.

    Returns
    -------
    dict
        ``role``, ``content`` (None beside calls where no text is left), and where there are some
        ``reasoning_content`` and ``tool_calls`` (their ``arguments`` are JSON text, as OpenAI's).
    """
    thinking, rest = _split(text)
    calls = list(_calls(rest)) if tools else []
    content = _without(rest, calls)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["content"] = content if content.strip() else None
        message["tool_calls"] = [
            {
                "id": f"{prefix}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(calls)
        ]
    return message


def _split(text: str) -> tuple[str, str]:
    """Return the thinking and what follows it, each without the line breaks between them."""
    opened = text.lstrip().startswith(_THINK)
    before, closed, after = text.partition(_THOUGHT)
    if not opened and (not closed or _CALL.search(before)):  # it may be an argument of a call
        return "", text
    thinking = before.lstrip().removeprefix(_THINK) if opened else before
    return thinking.strip("\n"), after.lstrip("\n")


def _calls(text: str) -> Iterator[_Call]:
    at = 0
    while found := _CALL.search(text, at):
        call = _read(text, found)
        if call is not None:
            yield call
        at = found.end() if call is None else call.stop


def _read(text: str, opening: re.Match[str]) -> _Call | None:
    """Return the call that begins there; None where it is malformed."""
    try:
        value, stop = _JSON.raw_decode(text, opening.end())
        name, arguments = value.get("name"), value.get("arguments", {})
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{name}{written}".encode()  # which half a surrogate pair has no way to be
    except (ValueError, RecursionError):
        return None
    closing = _CALLED.match(text, stop)
    if closing is None or not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    if too_deep(arguments, DEEPEST - _AROUND):
        return None
    return _Call(name=name, arguments=written, start=opening.start(), stop=closing.end())


def _without(text: str, calls: list[_Call]) -> str:
    starts = [0, *(call.stop for call in calls)]
    stops = [*(call.start for call in calls), len(text)]
    return "".join(text[start:stop] for start, stop in zip(starts, stops, strict=True))


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_refused)
