"""From a generation to OpenAI's answer. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tq_fs.proxy._wire import ChatAnswer, ChatRequest, Choice, Message, Recorded, Usage
from tq_fs.session import Session
from tq_fs.trajectory import StepRecord


def cut_at(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of `stops` in it."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def finish_reason(finish: str, reply: Message) -> str:
    """Return why the answer ended, in OpenAI's words; one that was cut off counts as too long."""
    if finish == "stop":
        return "tool_calls" if reply.get("tool_calls") else "stop"
    return "length"


def chat_answer(
    session: Session,
    record: StepRecord,
    reply: Message,
    *,
    model: str,
    prompt_tokens: int,
    finish: str,
    versions: Sequence[tuple[str, int]],
) -> ChatAnswer:
    """Return the answer to a request that was recorded as `record`."""
    return ChatAnswer(
        id=f"chatcmpl-{session.incarnation_id}-{record.index}",
        created=int(time.time()),
        model=model,
        choices=[Choice(message=reply, finish_reason=finish_reason(finish, reply))],
        usage=Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=record.response,
            total_tokens=prompt_tokens + record.response,
        ),
        tq_fs=Recorded(
            session_id=session.session_id,
            incarnation_id=session.incarnation_id,
            step=record.index,
            kind=record.kind,
            reason=record.reason,
            versions=list(versions),
        ),
    )


# ---------------------------------------------------------------- stream


def events(answer: ChatAnswer, request: ChatRequest) -> bytes:
    """Return the answer as server-sent events: OpenAI's ``chat.completion.chunk``, then ``[DONE]``.

    The answer is computed whole before the first event, so that what goes wrong is an HTTP status.
    """
    options = request.stream_options
    usage = bool(options and options.include_usage)
    chunks = _chunks(answer, usage=usage)
    lines = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks]
    return b"".join([*lines, b"data: [DONE]\n\n"])


def _chunks(answer: ChatAnswer, *, usage: bool) -> Iterator[dict[str, Any]]:
    head = {
        "id": answer.id,
        "object": "chat.completion.chunk",
        "created": answer.created,
        "model": answer.model,
    }
    if usage:
        head["usage"] = None  # of every chunk but the last
    choice = answer.choices[0]
    for delta in _deltas(choice.message):
        yield head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    last = {"index": 0, "delta": {}, "finish_reason": choice.finish_reason}
    yield head | {"choices": [last], "tq_fs": answer.tq_fs}
    if usage:
        yield head | {"choices": [], "usage": answer.usage}


def _deltas(message: Message) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    for name in ("reasoning_content", "content"):
        if message.get(name):
            yield {name: message[name]}
    calls = message.get("tool_calls")
    if calls:
        yield {"tool_calls": [{**call, "index": place} for place, call in enumerate(calls)]}
