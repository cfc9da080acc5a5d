"""What is measured of a Proxy, and how.

Engine, agents and each Proxy are processes of their own. The engine answers at once, with bodies
that were made before (:mod:`tq_fs.bench._proxy_replies`); agents are threads of this process, which
send short messages and read short answers. So what is left is the Proxy's: rendering and
tokenizing, reading JSON, base64, checks, narrowing, and, with a store, writing. Processors are
shared, though: on few of them what the engine takes to send megabytes is in both times alike. In
earnest engine and agents are on other machines; here they run with a lower priority (nice 5).

* **step**: seconds of a round over its Steps. A round is eight sessions at once, each a turn after
  the other; those with the store and those without follow each other in turn, and what was measured
  in the same repeat is a pair. Sessions are discarded afterwards, untimed. A Step is acknowledged
  to its agent once it is written and recorded.
* **loop stall**: how late a coroutine wakes on the event loop that serves the requests, which
  sleeps 1 ms again and again. Told is the 99.9th percentile of a round, and of those the median:
  whatever else runs on the machine can hold up the worst one. Rounds are longer than those that
  are timed, for a thousand wake-ups. Once with replies of 2,048 tokens, eight sessions at once,
  once with replies of 65,536, four at once.
* **resident**: the growth of the Proxy's anonymous memory over sessions of 100 Steps that stay
  open, after garbage was collected and free memory given back (``malloc_trim``), without the bytes
  of their messages, over their tokens. As many before them, which stay open too, are not
  counted: buffers, pools and the allocator's arenas are as large as they get after some hundred
  thousand tokens. What those hold free may be used again, so that growth can be less than what the
  sessions take; of one more set, Python therefore counts its allocations (``tracemalloc``), and
  the larger figure is told. Messages are counted as CPython has them, a dict and its strings, each
  once.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tq_fs.bench._child import Child, running
from tq_fs.bench._proxy_load import Agents, Load
from tq_fs.bench._proxy_replies import RoutingShape
from tq_fs.bench._timing import Timings, Variant, interleave, runs_in
from tq_fs.demo.tokenizer import STOP_IDS, save_tokenizer

ON, OFF = "store_on", "store_off"
_UPSTREAM = "tq_fs.bench._proxy_upstream"
_CHILD = "tq_fs.bench._proxy_child"
_CONTEXT = 2**20
_IDLE_S = 2.0

Progress = Callable[[], object]


class Place(NamedTuple):
    """Where a measurement is made.

    Attributes
    ----------
    folder
        For stores and logs.
    model
        Folder of tokenizer and configuration.
    shape
        Of the model's routing.
    """

    folder: Path
    model: Path
    shape: RoutingShape

    @classmethod
    def of(cls, folder: Path, shape: RoutingShape) -> Place:
        """Make the model's folder below another."""
        config = {
            "num_hidden_layers": shape.layers,
            "num_experts_per_tok": shape.topk,
            "num_experts": shape.experts,
        }
        return cls(folder, save_tokenizer(folder / "model", config), shape)


@dataclass(frozen=True, slots=True)
class Steps:
    """Times of Steps [s], by ``store_on`` and ``store_off``.

    Attributes
    ----------
    wall
        Of a round over its Steps.
    processor
        Of the Proxy's process, over the same.
    """

    wall: Timings
    processor: Timings


@dataclass(frozen=True, slots=True)
class Stalls:
    """By how much wake-ups were late [s], in each round, and without load."""

    late: list[list[float]] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)


class Resident(NamedTuple):
    """Memory of sessions that are open.

    Attributes
    ----------
    sessions, steps, tokens
        What was counted.
    anonymous, rss
        Growth of the Proxy's memory over that [bytes].
    traced
        Growth of what Python has allocated, over as many sessions [bytes].
    messages
        Bytes of the messages among them.
    """

    sessions: int
    steps: int
    tokens: int
    anonymous: int
    rss: int
    traced: int
    messages: int

    @property
    def bytes_per_token(self) -> float:
        """Growth without messages, the larger of both kinds, over tokens."""
        return (max(self.anonymous, self.traced) - self.messages) / self.tokens


@contextmanager
def engine(place: Place, tokens: int) -> Iterator[str]:
    """Start an engine whose replies have up to so many tokens; give its URL."""
    arguments = json.dumps([*place.shape, tokens, STOP_IDS[0]])
    log = place.folder / "engine.log"
    child = Child(_UPSTREAM, [arguments], log=log, subject="the engine of the benchmark")
    with running(child):
        yield child.ask("url")


@contextmanager
def proxy(place: Place, upstream: str, name: str) -> Iterator[Child]:
    """Start a Proxy, ``store_on`` or ``store_off``; what it stored is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=place.folder) as own:
        folder = str(Path(own) / "store") if name == ON else None
        arguments = json.dumps([str(place.model), upstream, folder, _CONTEXT])
        log = Path(own) / "log"
        child = Child(_CHILD, [arguments], log=log, subject=f"the Proxy with {name}")
        with running(child):
            yield child


# ---------------------------------------------------------------- measurements


def runs_of_steps(repeats: int) -> int:
    """Return how often :func:`time_steps` tells that it goes on."""
    return runs_in((ON, OFF), repeats)


def time_steps(place: Place, load: Load, *, repeats: int, progress: Progress) -> Steps:
    """Time rounds with the store and without, in turn."""
    processor = Timings({ON: [], OFF: []})
    with (
        engine(place, load.tokens) as url,
        proxy(place, url, OFF) as off,
        proxy(place, url, ON) as on,
    ):
        variants = {
            name: _variant(child, name, load, processor.seconds[name])
            for name, child in ((OFF, off), (ON, on))
        }
        wall = interleave(variants, repeats=repeats, steps=load.steps, progress=progress)
    for seconds in processor.seconds.values():
        del seconds[0]  # the round that does not count
    return Steps(wall, processor)


def _variant(child: Child, name: str, load: Load, processor: list[float]) -> Variant:
    agents = Agents(child.ask("url"), name)
    began = [0.0]

    def before() -> None:
        began[0] = child.ask("cpu")

    def after() -> None:
        processor.append((child.ask("cpu") - began[0]) / load.steps)
        agents.discard()

    return Variant(lambda: agents.run(load), before=before, after=after)


def stall(place: Place, load: Load, *, repeats: int, progress: Progress) -> Stalls:
    """Note how late the event loop wakes in rounds with the store; the first does not count."""
    found = Stalls()
    with engine(place, load.tokens) as url, proxy(place, url, ON) as child:
        agents = Agents(child.ask("url"), "stall")
        found.idle.extend(child.ask("idle", _IDLE_S))
        for repeat in range(repeats + 1):
            child.ask("start")
            agents.run(load)
            late = child.ask("stop")
            if repeat:
                found.late.append(late)
            agents.discard()
            progress()
    return found


def runs_of_stall(repeats: int) -> int:
    """Return how often :func:`stall` tells that it goes on."""
    return repeats + 1


def hold(place: Place, load: Load, *, progress: Progress) -> Resident:
    """Measure the memory of sessions that stay open, of one set after another."""
    with engine(place, load.tokens) as url, proxy(place, url, ON) as child:
        agents = Agents(child.ask("url"), "resident")
        agents.run(load)
        progress()
        before = child.ask("memory")
        held = agents.run(load)
        after: Mapping[str, int] = child.ask("memory")
        progress()
        child.ask("trace")
        nothing = child.ask("memory")["traced"]
        agents.run(load)
        traced = child.ask("memory")["traced"] - nothing
        progress()
    return Resident(
        sessions=len(held),
        steps=load.steps,
        tokens=sum(agent.tokens for agent in held),
        anonymous=after["anonymous"] - before["anonymous"],
        rss=after["rss"] - before["rss"],
        traced=traced,
        messages=sum(agent.message_bytes() for agent in held),
    )


RUNS_OF_HOLD = 3
