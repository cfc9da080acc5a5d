"""Answers of the engine that are no replies, and what breaks on the way, as this package's errors.

===============================================  ==========================================
what came                                        error
===============================================  ==========================================
nothing: refused, reset, broken off, no such     ``UpstreamUnavailable``
host
nothing in time                                  ``UpstreamTimeout``
408, 425, 429, 5xx                               ``UpstreamUnavailable``
400, 413 or 422 that speak of the context's      ``ContextOverflow``
length
any other status but 200                         ``UpstreamRefused``
a whole answer that is no reply to the request   ``ReplyInvalid``
===============================================  ==========================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
import msgspec

from tq_fs.errors import (
    ContextOverflow,
    TqFsError,
    UpstreamRefused,
    UpstreamTimeout,
    UpstreamUnavailable,
)

MOST_MESSAGE_BYTES = 64 * 1024
_SHOWN = 500  # characters of a message
_MAY_PASS = (408, 425, 429)
_SAYS_TOO_LONG = (400, 413, 422)
# The wordings of SGLang (tokenizer and scheduler), vLLM and TGI.
_TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size)|maximum context|maximum allowed length|max_model_len"
    r"|longer than the model|(prompt|input|sequence)( length| tokens?)?( is| are)? too long"
    r"|input length \(?\d+",
    re.IGNORECASE,
)


@contextmanager
def mapped(url: str, timeout_s: float) -> Iterator[None]:
    """Turn errors of the connection into this package's own."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise UpstreamUnavailable(
            "takes no connection", subject=url, remedy="see whether the engine runs, and its URL"
        ) from error
    except TimeoutError as error:
        raise UpstreamTimeout(
            f"no answer within {timeout_s:g} s",
            subject=url,
            remedy="see whether the engine runs; raise timeout_s if generations take longer",
        ) from error
    except (aiohttp.ClientError, OSError) as error:
        raise UpstreamUnavailable(
            f"gave no whole answer ({_cut(str(error)) or type(error).__name__})",
            subject=url,
            remedy="see the engine's log, then ask again",
        ) from error


async def check_status(response: aiohttp.ClientResponse, url: str) -> None:
    """Raise what an answer says, unless it is a reply.

    Raises
    ------
    UpstreamUnavailable, UpstreamRefused, ContextOverflow
    """
    if response.status != 200:
        raise refusal(response.status, await _beginning(response), url)


def refusal(status: int, body: bytes, url: str) -> TqFsError:
    """Return the error of an answer with this status and (beginning of a) body."""
    said = message_of(body)
    problem = f"HTTP {status}: {_cut(said)}" if said else f"HTTP {status}"
    if status >= 500 or status in _MAY_PASS:
        return UpstreamUnavailable(
            problem, subject=url, remedy="see the engine's log, then ask again"
        )
    if status in _SAYS_TOO_LONG and _TOO_LONG.search(said):
        return ContextOverflow(
            problem, subject=url, remedy="shorten the conversation, or ask for fewer tokens"
        )
    return UpstreamRefused(
        problem,
        subject=url,
        remedy="change the request, or start an engine that takes it; asking again is in vain",
    )


def message_of(body: bytes) -> str:
    """Return what a body that is no reply says: its ``message`` or ``detail``, else its text."""
    with suppress(msgspec.DecodeError):
        found = _message(msgspec.json.decode(body))
        if found:
            return found
    return body.decode("utf-8", "replace").strip()


def _message(said: Any) -> str:
    """Look where SGLang, vLLM and FastAPI put it."""
    while isinstance(said, dict):
        said = next((said[k] for k in ("error", "message", "detail") if said.get(k)), "")
    return said if isinstance(said, str) else msgspec.json.encode(said).decode()


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]} …"


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    """Return as much of a body as is worth showing, or has come before it broke off."""
    read = bytearray()
    with suppress(aiohttp.ClientError):
        while len(read) < MOST_MESSAGE_BYTES and (piece := await response.content.readany()):
            read += piece
    return bytes(read[:MOST_MESSAGE_BYTES])
