"""An aiohttp application in a thread of its own, for servers that run beside what asks them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Self

from aiohttp import web


class HttpThread:
    """Serves an application from a thread with its own event loop, until it is stopped.

    A handler whose client goes away is cancelled.

    Parameters
    ----------
    app
        Not running yet.
    host, port
        Where to listen; 0 takes a free port.
    """

    def __init__(self, app: web.Application, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._app = app
        self._host, self._port = host, port
        self._thread = threading.Thread(target=self._run, name="tq-fs-http", daemon=True)
        self._listening: Future[tuple[int, Callable[[], object]]] = Future()

    def start(self) -> Self:
        """Listen, and return once connections are taken.

        Raises
        ------
        OSError
            The port cannot be had.
        """
        self._thread.start()
        self._port, _ = self._listening.result()
        return self

    def stop(self) -> None:
        """Take no more connections, cancel what runs, and wait for the thread; idempotent."""
        if self._thread.is_alive():
            _, end = self._listening.result()
            end()
            self._thread.join()

    @property
    def url(self) -> str:
        """Base URL, without a slash at its end."""
        return f"http://{self._host}:{self._port}"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except OSError as error:
            self._listening.set_exception(error)

    async def _serve(self) -> None:
        # Handlers that still run when the server stops are cancelled (0 would wait for them).
        runner = web.AppRunner(
            self._app, access_log=None, handler_cancellation=True, shutdown_timeout=0.01
        )
        await runner.setup()
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
            end = partial(loop.call_soon_threadsafe, ended.set)
            self._listening.set_result((runner.addresses[0][1], end))
            await ended.wait()
        finally:
            await runner.cleanup()
