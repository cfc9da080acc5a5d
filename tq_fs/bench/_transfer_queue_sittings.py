"""What is measured of a TransferQueue while it runs: one sitting after the other.

A sitting is a fresh process with its own Ray. It warms up, and then puts and gets by turns:

* **put**: 200 Steps by ``async_kv_put`` under fresh keys from eight coroutines, cleared afterwards,
  untimed.
* **get**: 48 kept keys by ``async_kv_batch_get``, five times. They were compared bit for bit with
  what was put, once, before. What backends keep in files is in the page cache.
* **loop stall**: how late a coroutine wakes that sleeps 1 ms again and again, while eight others
  put and one gets. What runs on the loop then is for the most part TransferQueue itself: it makes a
  TensorDict of each put, encodes messages, and stacks what it got to nested tensors. Told is the
  99.9th percentile of a sitting, and of those the median: whatever else runs on the machine can
  hold up the worst one.

Variants sit in turn. Their processes do not run at once, because even idle ones disturb: on two
cores a put into SimpleStorage took 1.8 ms alone and 2.4 beside another Ray, and one with its SSD
offload 2.1 and 2.9.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tq_fs.bench._child import Child
from tq_fs.bench._timing import Timings
from tq_fs.bench._transfer_queue_variants import queue_with

BATCH = 48
_ROUNDS = 5  # of puts and gets
_STALLS = 3  # rounds; they take longer
_IDLE_S = 1.0


class Sitting(NamedTuple):
    """What one process measured [s].

    Attributes
    ----------
    put
        A Step, eight callers at once: the time of a round over its puts; median of the rounds.
    call
        One put beside seven others: median.
    get
        A batch of 48 keys: median.
    late, idle
        By how much wake-ups were late, under load and without.
    """

    put: float
    call: float
    get: float
    late: list[float]
    idle: list[float]


@dataclass(frozen=True, slots=True)
class Sittings:
    """What the processes of each variant measured, in the order they ran."""

    of: dict[str, list[Sitting]] = field(default_factory=dict)

    def timings(self, what: str) -> Timings:
        """Return one of ``put``, ``call`` and ``get``; what sat in the same turn is a pair."""
        return Timings({n: [getattr(s, what) for s in found] for n, found in self.of.items()})

    def late(self, name: str) -> list[list[float]]:
        """Return by how much wake-ups were late in each sitting of a variant."""
        return [sitting.late for sitting in self.of[name]]

    def idle(self) -> list[list[float]]:
        """Return the same of each sitting of all variants, without load."""
        return [sitting.idle for found in self.of.values() for sitting in found]


def sit(
    names: Sequence[str],
    folder: Path,
    *,
    repeats: int,
    puts: int,
    progress: Callable[[], object],
) -> Sittings:
    """Let all variants measure `repeats` times, in turn.

    Parameters
    ----------
    names
        Of the variants.
    puts
        Of a round.
    progress
        Called after each sitting.
    """
    sittings = Sittings({name: [] for name in names})
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in [*names[turn:], *names[:turn]]:
            with queue_with(name, folder) as queue:
                sittings.of[name].append(_sitting(queue, puts))
            progress()
    return sittings


def _sitting(queue: Child, puts: int) -> Sitting:
    queue.ask("keep")
    queue.ask("put", puts)
    queue.ask("clear")
    queue.ask("get", 1)
    seconds: list[float] = []
    calls: list[float] = []
    got: list[float] = []
    late: list[float] = []
    for _ in range(_ROUNDS):
        whole, each = queue.ask("put", puts)
        seconds.append(whole / puts)
        calls += each
        queue.ask("clear")
        got += queue.ask("get", _ROUNDS)
    for _ in range(_STALLS):
        late += queue.ask("stall", puts)
        queue.ask("clear")
    put, call, get = (statistics.median(found) for found in (seconds, calls, got))
    return Sitting(put, call, get, late, queue.ask("idle", _IDLE_S))


# ---------------------------------------------------------------- memory


class Held(NamedTuple):
    """Growth of memory [bytes, PSS] while so many bytes of Steps are held.

    Attributes
    ----------
    nbytes
        Bytes in the end.
    early, late
        Of all processes that store, with a quarter of them and with all, above that before the
        first put.
    client
        Of the process that put them all.
    processes
        Which ones store.
    """

    nbytes: int
    early: int
    late: int
    client: int
    processes: list[str]

    @property
    def slope(self) -> float:
        """Bytes of memory for each byte that came after the first quarter."""
        return (self.late - self.early) / (self.nbytes * 3 / 4)


def hold(
    names: Sequence[str], folder: Path, nbytes: int, progress: Callable[[], object]
) -> Mapping[str, Held]:
    """Let each variant hold so many bytes, one after the other."""
    found = {}
    for name in names:
        with queue_with(name, folder) as queue:
            before = queue.ask("memory")
            early = queue.ask("hold", nbytes / 4)
            late = queue.ask("hold", nbytes * 3 / 4)
        found[name] = Held(
            nbytes=nbytes,
            early=early["storage"] - before["storage"],
            late=late["storage"] - before["storage"],
            client=late["client"] - before["client"],
            processes=late["names"],
        )
        progress()
    return found
