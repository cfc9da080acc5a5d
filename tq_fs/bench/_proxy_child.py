"""The Proxy of ``tq-fs bench proxy``, in a process of its own, which watches itself.

Its event loop is the one that serves requests; how late it wakes is noted by a coroutine beside
them. Memory is what the kernel counts as this process's own, after garbage was collected and free
memory given back.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import urlopen

from tq_fs.bench._child import answer, own_answers
from tq_fs.bench._ticks import ticks
from tq_fs.config import StoreConfig
from tq_fs.flags import TransferFlags
from tq_fs.proxy import ChatTemplate, ProxySettings, RunningProxy

T = TypeVar("T")
_KIB = 1024
_SETTLE_S = 0.2


class Ticker:
    """Notes how late a loop wakes, from :meth:`start` to :meth:`stop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[list[float]] | None = None

    def start(self) -> None:
        """Begin."""
        self._on_loop(self._start())

    async def _start(self) -> None:
        self._task = asyncio.create_task(ticks())

    def stop(self) -> list[float]:
        """End; return the seconds by which each wake-up was late."""
        return self._on_loop(self._stop())

    async def _stop(self) -> list[float]:
        assert self._task is not None
        self._task.cancel()
        return await self._task

    def idle(self, seconds: float) -> list[float]:
        """Return the same for a time without requests."""
        return self._on_loop(ticks(seconds))

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def loop_of(proxy: RunningProxy) -> asyncio.AbstractEventLoop:
    """Return the event loop that serves requests, by one that is answered on it."""
    found: list[asyncio.AbstractEventLoop] = []

    async def tell() -> None:
        found.append(asyncio.get_running_loop())

    proxy.app.add_api_route("/bench/loop", tell)
    with urlopen(f"{proxy.url}/bench/loop"):
        return found[0]


def memory() -> dict[str, int]:
    """Return anonymous and resident memory [bytes] once nothing more can be given back.

    Traced: what Python has allocated since ``tracemalloc`` was started, 0 before.
    Anonymous: what the process has written itself. Files that are mapped, such as libraries, are
    not in it, and so it does not change with what other processes map.
    """
    gc.collect()
    time.sleep(_SETTLE_S)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = {"traced": tracemalloc.get_traced_memory()[0]}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("Anonymous", "Rss"):
            found[name.lower()] = int(rest.split()[0]) * _KIB
    return found


def main(model: str, upstream: str, folder: str | None, context_length: int) -> None:
    """Serve, and answer requests, until the input ends.

    Parameters
    ----------
    model
        Folder of tokenizer and configuration.
    upstream
        URL of the engine.
    folder
        Where the store is; None switches it off.
    context_length
        Tokens that a session may have.
    """
    answers = own_answers()
    flags = TransferFlags(
        enabled=folder is not None,
        config=None if folder is None else StoreConfig(url=Path(folder).absolute().as_uri()),
        experts_dtype="auto",
        replay=True,
    )
    settings = ProxySettings(model="bench", upstreams=(upstream,), context_length=context_length)
    template = ChatTemplate.from_model(model)
    with flags.open(Path(model)) as store, RunningProxy(settings, store, template) as proxy:
        ticker = Ticker(loop_of(proxy))
        requests: dict[str, Callable[..., object]] = {
            "ready": lambda: None,
            "url": lambda: proxy.url,
            "start": ticker.start,
            "stop": ticker.stop,
            "idle": ticker.idle,
            "memory": memory,
            "trace": tracemalloc.start,
            "cpu": time.process_time,
        }
        answer(requests, sys.stdin, answers)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
