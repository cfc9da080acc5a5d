"""How late an event loop is."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress

_TICK_S = 0.001


async def ticks(seconds: float = float("inf")) -> list[float]:
    """Sleep 1 ms again and again; return by how many seconds each wake-up was late."""
    late: list[float] = []
    until = time.perf_counter() + seconds
    with suppress(asyncio.CancelledError):
        while (start := time.perf_counter()) < until:
            await asyncio.sleep(_TICK_S)
            late.append(time.perf_counter() - start - _TICK_S)
    return late


def p999(sittings: Sequence[Sequence[float]]) -> float:
    """Return the median of what 99.9 % of each are not above."""
    worst = [sorted(late)[min(int(len(late) * 0.999), len(late) - 1)] for late in sittings]
    return statistics.median(worst)
