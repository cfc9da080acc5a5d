"""Memory over time of one path, seen from outside of its process."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import ClassVar, NamedTuple

import psutil

from tq_fs.demo.replay import PHASES, Failure, Ledger, Phase, Task, Tell, main
from tq_fs.errors import FatalError

INTERVAL_S = 0.02


class PathFailed(FatalError):
    """The process that ran a path ended with an error, which the message holds."""

    code: ClassVar[str] = "path_failed"


class Sample(NamedTuple):
    """Resident memory of a process at one time."""

    clock_s: float
    rss: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One path and its memory.

    Attributes
    ----------
    ledger
        What the path did.
    samples
        From the first phase's begin, about every 20 ms.
    phases
        First and last message of each phase, in order.
    """

    ledger: Ledger
    samples: Sequence[Sample]
    phases: Sequence[Phase]

    @property
    def baseline(self) -> int:
        """Resident bytes before the first Step: the interpreter, torch, the played rollouts."""
        return self.samples[0].rss

    @property
    def start_s(self) -> float:
        """When the first phase began."""
        return self.samples[0].clock_s

    @property
    def peak_growth(self) -> int:
        """Most bytes over the baseline at any time."""
        return max(s.rss for s in self.samples) - self.baseline

    def growth_at(self, phase: str) -> int:
        """Return the bytes over the baseline when `phase` ended."""
        end = max(p.clock_s for p in self.phases if p.name == phase)
        return min(self.samples, key=lambda s: abs(s.clock_s - end)).rss - self.baseline


def watch(task: Task, tell: Tell = lambda _phase, _done: None) -> Watched:
    """Run a path in a fresh process and sample its memory until it ends.

    Parameters
    ----------
    tell
        Is told how far each phase is.

    Raises
    ------
    PathFailed
        With the traceback of the process, or how it died.
    """
    context = multiprocessing.get_context("spawn")  # a fork would inherit the model's memory
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=main, args=(theirs, task), daemon=True)
    process.start()
    theirs.close()
    try:
        return _watch(process, ours, tell)
    finally:
        ours.close()
        process.kill()
        process.join()


def _watch(process: SpawnProcess, messages: Connection, tell: Tell) -> Watched:
    seen = psutil.Process(process.pid)
    samples: list[Sample] = []
    phases: list[Phase] = []
    while True:
        message = _next(process, messages)
        if isinstance(message, Ledger):
            return Watched(ledger=message, samples=samples, phases=phases)
        if message is not None:
            phases.append(message)
            tell(message.name, message.done)
        if phases:
            samples.append(Sample(time.monotonic(), seen.memory_info().rss))


def _next(process: SpawnProcess, messages: Connection) -> Phase | Ledger | None:
    """Return the next message, or None after an interval without one."""
    try:
        message: Phase | Ledger | Failure | None = (
            messages.recv() if messages.poll(INTERVAL_S) else None
        )
    except EOFError as error:
        process.join()
        raise PathFailed(
            f"its process ended with exit code {process.exitcode}", subject="replay"
        ) from error
    if isinstance(message, Failure):
        raise PathFailed(f"\n{message.trace}", subject="replay")
    return message


def ordered(phases: Sequence[Phase]) -> list[tuple[str, float, float]]:
    """Return name, begin and end of each phase."""
    spans = []
    for name in PHASES:
        clocks = [p.clock_s for p in phases if p.name == name]
        spans.append((name, min(clocks), max(clocks)))
    return spans
