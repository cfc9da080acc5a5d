"""The endpoints: each reads its body, calls, and answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from tq_fs.errors import SessionClosed
from tq_fs.metrics import TEXT_TYPE, Metrics, exposition
from tq_fs.proxy import _wire as wire
from tq_fs.proxy._answers import events
from tq_fs.proxy._attended import attended, body_of
from tq_fs.proxy._capabilities import Capabilities, capabilities
from tq_fs.proxy._entry import Entry
from tq_fs.proxy._gate import Gate
from tq_fs.proxy._headers import Origin
from tq_fs.proxy._requests import decode, decode_chat, decode_finalize
from tq_fs.proxy._sessions import Sessions
from tq_fs.proxy._settings import ProxySettings
from tq_fs.proxy._threads import in_thread
from tq_fs.proxy._trajectories import (
    JSON,
    MSGPACK,
    ReadAnswer,
    gathered,
    json_pieces,
    msgpack_pieces,
)
from tq_fs.proxy._turns import Turns
from tq_fs.store import Store

T = TypeVar("T")

_LARGE = 64 * 1024  # bytes of a body that is not decoded on the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """The parts of a Proxy that runs, as its endpoints use them."""

    settings: ProxySettings
    store: Store
    sessions: Sessions
    turns: Turns
    gate: Gate
    workers: Executor
    callers: Executor
    metrics: Metrics
    loop: asyncio.AbstractEventLoop


async def _body(proxy: Proxy, request: Request, decoded: Callable[[bytes], T]) -> T:
    body = await body_of(request, proxy.settings.body_bytes)
    if len(body) < _LARGE:
        return decoded(body)
    return await in_thread(proxy.workers, lambda: decoded(body))


def _decoder(kind: type[T]) -> Callable[[bytes], T]:
    return lambda body: decode(body, kind)


def _answer(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


# ---------------------------------------------------------------- rollout


async def chat(proxy: Proxy, request: Request) -> Response:
    """Generate an answer, record it, and return it in OpenAI's form."""
    origin = Origin.of(request.headers)
    asked = await _body(proxy, request, decode_chat)
    try:
        answer = await attended(request, proxy.turns.answer(asked, origin))
    except SessionClosed:
        proxy.sessions.check_goes_on()  # that is why, if it does not
        raise
    if asked.stream:
        return Response(events(answer, asked), media_type="text/event-stream")
    return _answer(answer)


async def pause(proxy: Proxy, request: Request) -> Response:
    """Hold up generation, and return when none runs."""
    asked = await _body(proxy, request, _decoder(wire.PauseRequest))
    deadline_s = asked.deadline_s
    if deadline_s is None:
        deadline_s = proxy.settings.pause_deadline_s
    return _answer(wire.PauseAnswer(paused=True, aborted=await proxy.gate.pause(deadline_s)))


async def resume(proxy: Proxy, request: Request) -> Response:
    """Go on with generation."""
    await body_of(request, proxy.settings.body_bytes)
    proxy.gate.resume()
    return _answer(wire.PauseAnswer(paused=False))


# ---------------------------------------------------------------- sessions


async def finalize(proxy: Proxy, request: Request) -> Response:
    """Make a session's Segments; again, the same answer."""
    asked = await _body(proxy, request, decode_finalize)
    return _answer(await proxy.sessions.finalize(asked))


async def discard(proxy: Proxy, request: Request) -> Response:
    """Break off a session and delete what it has recorded."""
    asked = await _body(proxy, request, _decoder(wire.DiscardRequest))
    return _answer(await proxy.sessions.discard(asked.session_id))


# ---------------------------------------------------------------- trajectories


async def read(proxy: Proxy, request: Request) -> Response:
    """Return the Segments of finalized sessions; values too, where they are not stored."""
    asked = await _body(proxy, request, _decoder(wire.ReadRequest))
    entries = proxy.sessions.kept.asked_for(asked)
    binary = MSGPACK in request.headers.get("accept", "")
    pieces = gathered(msgpack_pieces(entries) if binary else json_pieces(entries))
    sent = _sent(proxy, pieces, entries if asked.forget else [])
    return StreamingResponse(sent, media_type=MSGPACK if binary else JSON)


async def _sent(
    proxy: Proxy, pieces: Iterator[bytes], to_forget: list[Entry]
) -> AsyncIterator[bytes]:
    while piece := await in_thread(proxy.workers, lambda: next(pieces, b"")):
        yield piece
    proxy.sessions.kept.forget(to_forget)


async def forget(proxy: Proxy, request: Request) -> Response:
    """Keep finalized sessions no longer."""
    asked = await _body(proxy, request, _decoder(wire.ForgetRequest))
    return _answer(
        wire.ForgetAnswer(forgotten=proxy.sessions.kept.forget_sessions(asked.session_ids))
    )


async def release(proxy: Proxy, request: Request) -> Response:
    """Note that a consumer needs Segments no more."""
    asked = await _body(proxy, request, _decoder(wire.ReleaseRequest))

    def call() -> int:
        return proxy.store.release(asked.refs, asked.consumer, rollout_id=asked.rollout_id)

    return _answer(wire.ReleaseAnswer(deleted_steps=await in_thread(proxy.callers, call)))


async def checkpoint_saved(proxy: Proxy, request: Request) -> Response:
    """Release what was held back until the model's checkpoint is saved."""
    asked = await _body(proxy, request, _decoder(wire.CheckpointRequest))

    def call() -> int:
        return proxy.store.checkpoint_saved(asked.rollout_id)

    return _answer(wire.ReleaseAnswer(deleted_steps=await in_thread(proxy.callers, call)))


# ---------------------------------------------------------------- about itself


async def about(proxy: Proxy, _: Request) -> Response:
    """Tell what the Proxy can do, and how it is set."""
    return _answer(capabilities(proxy.settings, proxy.store))


async def health(proxy: Proxy, _: Request) -> Response:
    """Tell that it is there."""
    return _answer(wire.Health(status="ok", paused=proxy.gate.paused))


async def models(proxy: Proxy, _: Request) -> Response:
    """List the one model, as OpenAI's clients ask for it."""
    model = {"id": proxy.settings.model, "object": "model", "created": 0, "owned_by": "tq-fs"}
    return _answer({"object": "list", "data": [model]})


async def metrics(proxy: Proxy, _: Request) -> Response:
    """Tell Prometheus what was counted."""
    families = await in_thread(proxy.callers, proxy.metrics.collect)
    return Response(exposition(families), media_type=TEXT_TYPE)


# ---------------------------------------------------------------- table

Call = Callable[[Proxy, Request], Awaitable[Response]]


class Route(NamedTuple):
    """An endpoint; `takes` and `gives` describe its bodies."""

    method: str
    path: str
    call: Call
    takes: Any = None
    gives: Any = None


ROUTES = (
    Route("POST", "/v1/chat/completions", chat, wire.ChatRequest, wire.ChatAnswer),
    Route("GET", "/v1/models", models),
    Route("POST", "/v1/rollout/pause", pause, wire.PauseRequest, wire.PauseAnswer),
    Route("POST", "/v1/rollout/resume", resume, None, wire.PauseAnswer),
    Route("POST", "/session/finalize", finalize, wire.FinalizeRequest, wire.FinalizeAnswer),
    Route("POST", "/session/discard", discard, wire.DiscardRequest, wire.DiscardAnswer),
    Route("POST", "/trajectory/read", read, wire.ReadRequest, ReadAnswer),
    Route("POST", "/trajectory/forget", forget, wire.ForgetRequest, wire.ForgetAnswer),
    Route("POST", "/trajectory/release", release, wire.ReleaseRequest, wire.ReleaseAnswer),
    Route(
        *("POST", "/trajectory/checkpoint_saved", checkpoint_saved),
        *(wire.CheckpointRequest, wire.ReleaseAnswer),
    ),
    Route("GET", "/integration/capabilities", about, None, Capabilities),
    Route("GET", "/health", health, None, wire.Health),
    Route("GET", "/metrics", metrics),
)


def add_routes(app: FastAPI) -> None:
    """Let the application serve all endpoints, by the Proxy that its lifespan has made."""
    for route in ROUTES:
        app.add_api_route(
            route.path,
            _endpoint(route.call),
            methods=[route.method],
            name=route.call.__name__,
            description=route.call.__doc__ or "",
        )


def _endpoint(call: Call) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await call(request.app.state.proxy, request)

    return endpoint
