"""The Proxy as an ASGI application: its parts, and how long they live."""

from __future__ import annotations

import asyncio
import hmac
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

import tq_fs
from tq_fs.errors import TqFsError, Unauthorized
from tq_fs.ingest import RoutingCheck
from tq_fs.metrics import Metrics
from tq_fs.proxy._attended import GONE, BrokenOff
from tq_fs.proxy._connections import checked_urls
from tq_fs.proxy._engine import SglangEngine
from tq_fs.proxy._errors import RETRY_AFTER_S, error_body, plain_error, status_of
from tq_fs.proxy._gate import Gate
from tq_fs.proxy._openapi import describe
from tq_fs.proxy._parts import Parts, Template, check_specs
from tq_fs.proxy._routes import Proxy, add_routes
from tq_fs.proxy._sessions import Sessions
from tq_fs.proxy._settings import ProxySettings
from tq_fs.proxy._turns import Turns
from tq_fs.store import Store

_log = logging.getLogger(__name__)
_JSON = "application/json"


def create_app(
    settings: ProxySettings,
    store: Store,
    template: Template,
    *,
    metrics: Metrics | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """Return the Proxy as an application for any ASGI server with lifespan; one worker process.

    Threads, connections to the engine and the table of sessions are made when it starts, and go
    when it ends. Sessions that are open then are left to the store's sweep.

    Parameters
    ----------
    store
        Where Steps go; also one that is off. Open until the application has ended; the caller
        closes it.
    template
        The model's tokenizer and chat template, :class:`tq_fs.proxy.ChatTemplate`.
    metrics
        Counts; what :func:`tq_fs.open_store` was given, so that ``/metrics`` tells of both.
    clock
        Seconds, for how long a session was idle.

    Raises
    ------
    InvalidConfig
        No engine is named, or one by what is no URL, or the store's fields are not those of an
        engine's replies.
    """
    check_specs(store.fields)
    checked_urls(settings.upstreams)
    counted = metrics or Metrics(store.config.store_id, role="proxy")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with _running(settings, store, template, counted, clock) as proxy:
            app.state.proxy = proxy
            yield

    app = FastAPI(title="tq-fs Proxy", version=tq_fs.__version__, lifespan=lifespan)
    add_routes(app)
    describe(app)
    app.add_exception_handler(TqFsError, _typed)
    app.add_exception_handler(HTTPException, _framework)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(BrokenOff, _gone)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(Counted, metrics=counted)
    if settings.token is not None:
        app.add_middleware(Guarded, token=settings.token)
    return app


# ---------------------------------------------------------------- its life


@asynccontextmanager
async def _running(
    settings: ProxySettings,
    store: Store,
    template: Template,
    metrics: Metrics,
    clock: Callable[[], float],
) -> AsyncIterator[Proxy]:
    async with AsyncExitStack() as opened:
        opened.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(settings.switch_s)

        def pool(name: str, threads: int) -> ThreadPoolExecutor:
            return opened.enter_context(ThreadPoolExecutor(threads, f"tq-fs-proxy-{name}"))

        workers = pool("work", settings.cpu_threads)
        recorders = pool("record", settings.store_threads)
        callers = pool("store", settings.store_threads)
        engine = SglangEngine(
            settings.upstreams,
            timeout_s=settings.timeout_s,
            reply_bytes=settings.reply_bytes,
            pool=workers,
            metrics=metrics,
        )
        opened.push_async_callback(engine.close)
        gate = Gate(resume_s=settings.paused_s)
        sessions = Sessions(settings, store=store, renderer=template, pool=callers, clock=clock)
        opened.push_async_callback(sessions.close)
        parts = Parts(
            engine=engine,
            gate=gate,
            template=template,
            check=RoutingCheck(settings.routing_check, metrics, dense_layers=settings.dense_layers),
            specs=store.fields,
            workers=workers,
            recorders=recorders,
            metrics=metrics,
        )
        opened.callback(metrics.watch(sessions.samples))
        opened.callback(metrics.watch(engine.samples))
        await opened.enter_async_context(_sweeping(sessions, settings.sweep_s))
        yield Proxy(
            settings=settings,
            store=store,
            sessions=sessions,
            turns=Turns(settings, sessions, parts),
            gate=gate,
            workers=workers,
            callers=callers,
            metrics=metrics,
            loop=asyncio.get_running_loop(),
        )


@asynccontextmanager
async def _sweeping(sessions: Sessions, every_s: float) -> AsyncIterator[None]:
    async def sweep() -> None:
        while True:
            await asyncio.sleep(every_s)
            await sessions.sweep()

    task = asyncio.create_task(sweep())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


# ---------------------------------------------------------------- errors


async def _typed(_: Request, error: Exception) -> Response:
    assert isinstance(error, TqFsError)
    status = status_of(error)
    if status >= 500:
        _log.warning("%s", error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return Response(error_body(error), status, headers, _JSON)


async def _framework(_: Request, error: Exception) -> Response:
    """Answer what the framework says, such as that there is no such path, in our form."""
    assert isinstance(error, HTTPException)
    code = {404: "no_such_path", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    body = plain_error(error.status_code, code, str(error.detail))
    return Response(body, error.status_code, dict(error.headers or {}), _JSON)


async def _gone(_: Request, error: Exception) -> Response:  # noqa: ARG001  # nobody reads it
    return Response(status_code=GONE)


async def _unexpected(_: Request, error: Exception) -> Response:
    """Answer; the framework raises the error again, and the server logs its traceback."""
    body = plain_error(500, "internal", f"unexpected: {type(error).__name__}", remedy="see the log")
    return Response(body, 500, media_type=_JSON)


# ---------------------------------------------------------------- around every request


class Guarded:
    """Lets nobody in without the token, except to ``/health``."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._wanted = f"Bearer {token}".encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] != "http" or scope["path"] == "/health" or self._is_good(scope):
            await self._app(scope, receive, send)
            return
        error = Unauthorized(
            "no bearer token, or a wrong one",
            subject="the request",
            remedy="send the header Authorization: Bearer <token>",
        )
        answer = await _typed(Request(scope), error)
        await answer(scope, receive, send)

    def _is_good(self, scope: Scope) -> bool:
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        scheme, _, token = given.partition(b" ")
        return hmac.compare_digest(scheme.title() + b" " + token.strip(), self._wanted)


class Counted:
    """Counts answers by path and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                self._count(scope, str(message["status"]))
            await send(message)

        await self._app(scope, receive, counting)  # type: ignore[arg-type]

    def _count(self, scope: Scope, status: str) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "other")
        self._metrics.counter("tqfs_proxy_requests_total", path=path, status=status).add()
