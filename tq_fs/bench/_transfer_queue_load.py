"""What is asked of a TransferQueue: puts and gets of Steps on one event loop.

A Step is what a rollout stores for 2048 tokens: uint8 routing ``[2047, 40, 8]`` (0.66 MB) and
float32 logprobs ``[2048]``. All Steps in use at a time differ, and none is encoded for the purpose:
the tensors are views of a few that are made before.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import transfer_queue

from tq_fs.bench._data import Shape, make_payloads
from tq_fs.bench._ticks import ticks

CALLERS = 8
BATCH = 48  # keys of a get
ROUTED, LOGPROBS = "routed_experts", "logprobs"
STEP_BYTES = 2047 * 40 * 8 + 2048 * 4
PARTITION = "bench"
_PAYLOADS = 8
_WINDOWS = 16  # first tokens that a Step of a payload can have


class Puts(NamedTuple):
    """How long puts took [s].

    Attributes
    ----------
    seconds
        All of them.
    calls
        Each one, beside others.
    """

    seconds: float
    calls: list[float]


class Steps:
    """Steps by number; those of 128 numbers in a row all differ."""

    def __init__(self) -> None:
        self._payloads = make_payloads(Shape(2048 + _WINDOWS, 40, 8, "uint8"), _PAYLOADS)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        window, which = divmod(number, _PAYLOADS)
        payload, first = self._payloads[which], window % _WINDOWS
        return {
            ROUTED: torch.from_numpy(payload.narrow[first : first + 2047]),
            LOGPROBS: torch.from_numpy(payload.logprobs[first : first + 2048]),
        }


class Load:
    """Puts, gets and clears; keys are never used again.

    The first :data:`BATCH` Steps that :meth:`keep` puts stay, and are what :meth:`get` gets.
    """

    def __init__(self) -> None:
        self._steps = Steps()
        self._numbers = itertools.count()
        self._put: list[str] = []
        self._kept: list[str] = []

    async def put(self, count: int) -> Puts:
        """Put so many Steps from :data:`CALLERS` coroutines."""
        calls: list[float] = []
        mine = list(itertools.islice(self._numbers, count))
        self._put += map(str, mine)
        shared = iter(mine)
        start = time.perf_counter()
        await asyncio.gather(*(self._call(shared, calls) for _ in range(CALLERS)))
        return Puts(time.perf_counter() - start, calls)

    async def _call(self, numbers: Iterator[int], calls: list[float]) -> None:
        for number in numbers:
            step = self._steps[number]
            start = time.perf_counter()
            await transfer_queue.async_kv_put(str(number), PARTITION, step)
            calls.append(time.perf_counter() - start)

    async def clear(self) -> None:
        """Clear what was put, except for what is kept."""
        await transfer_queue.async_kv_clear(self._put, PARTITION)
        self._put = []

    async def keep(self) -> None:
        """Put what is got from now on, get it, and compare it bit for bit."""
        await self.put(BATCH)
        self._kept, self._put = self._put, []
        found = await self._get()
        for name in (ROUTED, LOGPROBS):
            for key, value in zip(self._kept, found[name].unbind(), strict=True):
                expected = self._steps[int(key)][name]
                assert value.dtype == expected.dtype
                assert np.array_equal(value.numpy(), expected.numpy()), f"{name} of {key} differs"

    async def get(self, times: int) -> list[float]:
        """Get what is kept, both fields, so many times; return the seconds of each."""
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            await self._get()
            seconds.append(time.perf_counter() - start)
        return seconds

    async def _get(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = await transfer_queue.async_kv_batch_get(
            self._kept, PARTITION, [ROUTED, LOGPROBS]
        )
        return found

    async def stall(self, count: int) -> list[float]:
        """Put while another coroutine gets; return how late a ticker woke, in seconds."""
        async with asyncio.TaskGroup() as tasks:
            getting = tasks.create_task(self._get_on())
            ticking = tasks.create_task(ticks())
            await self.put(count)
            ticking.cancel()
            getting.cancel()
        return ticking.result()

    async def _get_on(self) -> None:
        while True:
            await self._get()


def steps_in(nbytes: float) -> int:
    """Return how many Steps have so many bytes."""
    return max(1, round(nbytes / STEP_BYTES))


def chunks(count: int, size: int) -> Iterable[int]:
    """Split a count into parts of at most `size`."""
    return (min(size, count - done) for done in range(0, count, size))
