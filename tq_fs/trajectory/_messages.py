"""When two chat messages are the same one: their normal form, and its digest.

Clients send a conversation back as their library keeps it, which is not letter by letter what they
were given. What does not change what a model reads does not count:

==================================  =============================================================
part of a message                   in the normal form
==================================  =============================================================
None, empty text, empty lists       left out
``refusal``, ``annotations`` …      left out; of an assistant's message all but what it says
ids of tool calls                   left out, here and in a tool's answer
``arguments`` of a tool call        the JSON they are, where they are JSON, else their text; a
                                    whole number is one also where it is written as 1.0
text parts of a content             their text, put together; other parts stay as they are
==================================  =============================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from tq_fs.errors import InvalidRequest

Message = Mapping[str, Any]

DIGEST_BYTES = 16
# What an assistant says. Whatever else a client's library adds to it, the model has not.
_SAID = frozenset({"role", "content", "name", "reasoning_content", "tool_calls"})
_DECORATIONS = frozenset(
    {"annotations", "audio", "function_call", "id", "index", "refusal", "tool_call_id"}
)


def digest(message: Message, subject: str = "message") -> bytes:
    """Return what tells a message from all that are not the same, 16 bytes.

    Raises
    ------
    InvalidRequest
        It is no chat message, or it is nested too deep.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(
            "is no mapping with a role", subject=subject, remedy="send OpenAI chat messages"
        )
    return _digest(normal_form(message), subject)


def digests(messages: Sequence[Message]) -> list[bytes]:
    """Return the digest of each message, and name the one that has none."""
    return [digest(message, f"messages[{i}]") for i, message in enumerate(messages)]


def digest_without_reasoning(reply: Message) -> bytes:
    """Return the digest of a reply as clients send it that keep no reasoning."""
    return digest({k: v for k, v in reply.items() if k != "reasoning_content"}, "reply")


def digest_of_tools(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Return what tells a list of tool schemas from others: order counts, that of keys does not."""
    return _digest(list(tools), "tools")


def normal_form(message: Message) -> dict[str, Any]:
    """Return what of a message counts; see the module's table."""
    said = message["role"] == "assistant"
    form = {
        name: _FORMS.get(name, _as_it_is)(value)
        for name, value in message.items()
        if (name in _SAID if said else name not in _DECORATIONS)
    }
    return {name: value for name, value in form.items() if value not in (None, "", [], {})}


def _as_it_is(value: Any) -> Any:
    return value


def _text_of_parts(content: Any) -> Any:
    """Return the text of a content that is text alone."""
    if not isinstance(content, list):
        return content
    texts = [p.get("text") if isinstance(p, Mapping) else None for p in content]
    known = [text for text in texts if isinstance(text, str)]
    return "".join(known) if len(known) == len(texts) else content


def _calls(calls: Any) -> Any:
    return [_call(call) for call in calls] if isinstance(calls, list) else calls


def _call(call: Any) -> Any:
    """Return what a tool call calls, and with what."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    try:
        meant = ["json", _json(arguments) if isinstance(arguments, str) else arguments]
    except (ValueError, RecursionError):
        meant = ["text", arguments]
    return [function.get("name"), meant]


def _json(text: str) -> Any:
    return json.loads(text, parse_float=_number)


def _number(text: str) -> float | int:
    """Return 1 for 1.0, which is what a client in JavaScript sends back for it."""
    value = float(text)
    return int(value) if value.is_integer() else value


_FORMS = {"content": _text_of_parts, "tool_calls": _calls}


def _digest(value: Any, subject: str) -> bytes:
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"cannot be told from others: {error}", subject=subject, remedy="send plain JSON"
        ) from error
    return blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
