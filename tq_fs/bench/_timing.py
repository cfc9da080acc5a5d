"""Interleaved timing: every variant in every repeat; medians and ratios of pairs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Variant:
    """Something to time.

    Attributes
    ----------
    run
        What is timed; does a fixed number of Steps.
    before, after
        What is done around it, untimed: recycled pages, clean-up.
    """

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


@dataclass(slots=True)
class Timings:
    """Seconds per Step of each variant, one for each repeat.

    Attributes
    ----------
    seconds
        By variant, in the order of the repeats.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Return the median of a variant."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, base: str) -> float:
        """Return the median of the ratios of pairs measured in the same repeat."""
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        return statistics.median(mine / other for mine, other in pairs)


def interleave(
    variants: Mapping[str, Variant],
    *,
    repeats: int,
    steps: int,
    progress: Callable[[], object],
) -> Timings:
    """Time all variants `repeats` times, after one round that does not count.

    Parameters
    ----------
    steps
        Steps that one run of a variant does.
    progress
        Called after each run.
    """
    timings = Timings({name: [] for name in variants})
    names = list(variants)
    for repeat in range(repeats + 1):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            seconds = _time(variants[name])
            if repeat:
                timings.seconds[name].append(seconds / steps)
            progress()
    return timings


def _time(variant: Variant) -> float:
    variant.before()
    start = time.perf_counter()
    variant.run()
    seconds = time.perf_counter() - start
    variant.after()
    return seconds


def runs_in(variants: Sequence[object], repeats: int) -> int:
    """Return how many runs :func:`interleave` makes."""
    return len(variants) * (repeats + 1)
