"""A process with a Ray and a TransferQueue of its own, which does what it is told.

Started by :mod:`tq_fs.bench._transfer_queue_variants`. It reads requests from standard input, each
a line of JSON with a name and arguments, and answers each with a line of JSON; it ends with its
input. Between requests it waits.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import ray
import transfer_queue
from omegaconf import OmegaConf

from tq_fs.bench._child import answer, own_answers
from tq_fs.bench._ticks import ticks
from tq_fs.bench._transfer_queue_load import Load, chunks, steps_in
from tq_fs.bench._transfer_queue_memory import memory_now, started

_CPUS = 8  # that Ray believes in: the Controller and each unit ask for one
_SETTLE_S = 1.0
_HOLD_PUTS = 256  # at a time


def main(backend: dict[str, Any], module: str | None) -> None:
    """Serve requests.

    Parameters
    ----------
    backend
        TransferQueue's configuration section of that name.
    module
        To import first: it registers the backend.
    """
    answers = own_answers()
    ray.init(
        address="local",
        num_cpus=_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    before = started()
    if module is not None:
        import_module(module)
    transfer_queue.init(OmegaConf.create({"backend": backend}))
    try:
        with asyncio.Runner() as loop:
            answer(_requests(loop, Load(), before), sys.stdin, answers)
    finally:
        transfer_queue.close()
        ray.shutdown()


def _requests(
    loop: asyncio.Runner, load: Load, before: set[int]
) -> dict[str, Callable[..., object]]:
    """Return what can be asked for, by name."""

    def hold(nbytes: float) -> object:
        for count in chunks(steps_in(nbytes), _HOLD_PUTS):
            loop.run(load.put(count))
        return memory()

    def memory() -> object:
        gc.collect()
        time.sleep(_SETTLE_S)
        return memory_now(before)._asdict()

    return {
        "ready": lambda: None,
        "put": lambda count: loop.run(load.put(count)),
        "clear": lambda: loop.run(load.clear()),
        "keep": lambda: loop.run(load.keep()),
        "get": lambda times: loop.run(load.get(times)),
        "stall": lambda count: loop.run(load.stall(count)),
        "idle": lambda seconds: loop.run(ticks(seconds)),
        "hold": hold,
        "memory": memory,
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
