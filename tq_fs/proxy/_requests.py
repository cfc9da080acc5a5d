"""From a request's raw body to what it asks for, or an error that says what is wrong with it."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tq_fs.errors import InvalidRequest
from tq_fs.proxy._plain import check_plain
from tq_fs.proxy._wire import ChatRequest, FinalizeRequest, Message

T = TypeVar("T")


def decode(body: bytes, kind: type[T]) -> T:
    """Return a request's body; an empty one counts as ``{}``.

    Raises
    ------
    InvalidRequest
        It is no JSON, or not what the endpoint takes.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f"cannot be read: {error}", subject="the body", remedy="see /openapi.json"
        ) from error
    except RecursionError as error:
        raise InvalidRequest(
            "is nested too deeply", subject="the body", remedy="see /openapi.json"
        ) from error


def decode_chat(body: bytes) -> ChatRequest:
    """Return a chat request whose messages and options can be served.

    Raises
    ------
    InvalidRequest
    """
    request = decode(body, ChatRequest)
    for place, message in enumerate(request.messages):
        _check_message(message, f"messages[{place}]")
        check_plain(message, f"messages[{place}]")
    for place, tool in enumerate(request.tools or ()):
        if tool.get("type", "function") != "function" or not isinstance(tool.get("function"), dict):
            raise InvalidRequest(
                "is no function", subject=f"tools[{place}]", remedy="functions alone are served"
            )
        check_plain(tool, f"tools[{place}]")
    check_plain(request.chat_template_kwargs, "chat_template_kwargs")
    _check_served(request)
    return request


def decode_finalize(body: bytes) -> FinalizeRequest:
    """Return a finalize whose `extra` can be read back.

    Raises
    ------
    InvalidRequest
    """
    request = decode(body, FinalizeRequest)
    check_plain(request.extra, "extra")
    return request


def _check_served(request: ChatRequest) -> None:
    """Refuse what would be left out silently otherwise."""
    refused = {
        "n": (request.n or 1) != 1,
        "tool_choice": request.tool_choice not in (None, "auto", "none"),
        "response_format": request.response_format is not None
        and request.response_format.type != "text",
        "logprobs": bool(request.logprobs),
        "logit_bias": bool(request.logit_bias),
    }
    for name, wrong in refused.items():
        if wrong:
            value = getattr(request, name)
            raise InvalidRequest(f"{value!r} is not served", subject=name, remedy="leave it out")


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def _check_message(message: Message, subject: str) -> None:
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"its role is {role!r}", subject=subject, remedy=", ".join(_ROLES))
    content = message.get("content")
    if not (content is None or isinstance(content, str) or _is_parts(content)):
        raise InvalidRequest(
            "its content is neither text nor parts of type text",
            subject=subject,
            remedy="images and sound are not served",
        )
    if content is None and role != "assistant":
        raise InvalidRequest("has no content", subject=subject, remedy="send text, or empty text")
    calls = message.get("tool_calls")
    if not (calls is None or (isinstance(calls, list) and all(map(_is_call, calls)))):
        raise InvalidRequest(
            "its tool_calls are no list of functions with a name",
            subject=subject,
            remedy="send back what was answered",
        )


def _is_parts(content: object) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
