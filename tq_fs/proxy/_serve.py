"""The Proxy as a server: in the foreground, or in a thread of a test or an example."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import uvicorn
from fastapi import FastAPI

from tq_fs.errors import InvalidConfig, ProxyUnavailable
from tq_fs.metrics import Metrics
from tq_fs.proxy._app import create_app
from tq_fs.proxy._parts import Template
from tq_fs.proxy._settings import ProxySettings
from tq_fs.store import Store

_START_S = 60.0


def serve(
    settings: ProxySettings,
    store: Store,
    template: Template,
    *,
    host: str = "127.0.0.1",
    port: int = 8800,
    metrics: Metrics | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then finish the Steps that are being recorded, and return.

    Parameters
    ----------
    settings, store, template, metrics
        See :func:`create_app`.
    host, port
        Where to listen; 0 takes a free port.
    ready
        Is called with the URL once requests are taken.

    Raises
    ------
    InvalidConfig
        The address cannot be listened at.
    """
    app = create_app(settings, store, template, metrics=metrics)
    listening = _listen(host, port)
    server = _Server(app, ready=ready, url=_url(listening))
    with listening:
        server.run(sockets=[listening])


class RunningProxy:
    """A Proxy that serves from a thread of its own until its context ends.

    Parameters
    ----------
    settings, store, template, metrics, clock
        See :func:`create_app`.
    host, port
        Where to listen; a free port where left out.

    Attributes
    ----------
    url
        Of the Proxy: ``http://127.0.0.1:…``; ``base_url`` of OpenAI's clients is this and ``/v1``.
    """

    def __init__(
        self,
        settings: ProxySettings,
        store: Store,
        template: Template,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.app = create_app(settings, store, template, metrics=metrics, clock=clock)
        self._listening = _listen(host, port)
        self.url = _url(self._listening)
        self._started = threading.Event()
        self._server = _Server(self.app, ready=lambda _: self._started.set(), url=self.url)
        self._thread = threading.Thread(target=self._run, name="tq-fs-proxy", daemon=True)

    def __enter__(self) -> RunningProxy:
        """Start, and return once requests are taken.

        Raises
        ------
        ProxyUnavailable
            It could not start; the log says why.
        """
        self._thread.start()
        self._started.wait(_START_S)
        if not self._server.started:
            self.close()
            raise ProxyUnavailable("did not start", subject=self.url, remedy="see the log")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop."""
        self.close()

    def close(self) -> None:
        """Stop, once the Steps that are being recorded are; idempotent."""
        self._server.should_exit = True
        self._thread.join()
        self._listening.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listening])
        finally:
            self._started.set()


class _Server(uvicorn.Server):
    """Says when it is ready; ends without waiting for what engines take."""

    def __init__(self, app: FastAPI, *, ready: Callable[[str], None] | None, url: str) -> None:
        super().__init__(_config(app))
        self._app = app
        self._ready = ready
        self._url = url

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.proxy.sessions.stop()
        await super().shutdown(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._ready is not None:
            self._ready(self._url)


def _config(app: Any) -> Any:
    return uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,  # logging is the program's
        access_log=False,
        workers=1,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address, family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise InvalidConfig(
            f"cannot be listened at: {error}",
            subject=f"{host}:{port}",
            remedy="choose another port, or 0 for a free one",
        ) from error


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
