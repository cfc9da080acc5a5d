"""``tq-fs bench proxy``: the Proxy with a store and without, before an engine that answers at once.

:mod:`tq_fs.bench._proxy_sittings` says what is measured and how.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tq_fs.bench._disk import measuring_place
from tq_fs.bench._targets import Target, at_most, targets_table
from tq_fs.bench._ticks import p999
from tq_fs.errors import DependencyMissing

if TYPE_CHECKING:
    from tq_fs.bench._proxy_sittings import Resident, Stalls, Steps

__all__ = ["TARGETS", "Measured", "ProxyBench", "document", "figures", "measure", "show"]

MiB = 1024**2
_DISK_BYTES = 4 * 1024**3
_LONG_SESSIONS, _LONG_TURNS = 4, 3
_STALL_TURNS = 4  # times those that are timed
ON, OFF = "store_on", "store_off"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyBench:
    """Settings of the measurement.

    Attributes
    ----------
    repeats
        Counted rounds of each measurement; of those of the event loop half, of long replies a
        third of them.
    sessions
        At once.
    turns
        Of a session in a round; four times as many while the event loop is watched.
    tokens, long_tokens
        Of a reply.
    layers, topk, experts
        Of the model.
    held_sessions, held_turns, held_tokens
        Sessions whose memory is measured, after as many others; their turns, and tokens of a turn's
        reply.
    root
        Folder to measure in; None for a journaled file system of our own.
    """

    repeats: int = 10
    sessions: int = 8
    turns: int = 8
    tokens: int = 2048
    long_tokens: int = 65536
    layers: int = 40
    topk: int = 8
    experts: int = 256
    held_sessions: int = 8
    held_turns: int = 100
    held_tokens: int = 1910  # with the turn's question about 2,000
    root: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured.

    Attributes
    ----------
    place
        Where, in words.
    steps
        Times.
    stalls, long_stalls
        Of the event loop, with ordinary and with long replies.
    resident
        Memory.
    """

    place: str
    steps: Steps
    stalls: Stalls
    long_stalls: Stalls
    resident: Resident


TARGETS: Mapping[str, Target] = {
    "step.x_store_off": at_most(1.2),
    "loop_stall_ms": at_most(20),
    "loop_stall_64k_ms": at_most(100),
    "resident.bytes_per_token": at_most(16),
}


def measure(bench: ProxyBench, console: Console) -> Measured:
    """Measure everything, one after the other.

    Raises
    ------
    DependencyMissing
        The extra ``proxy`` is not installed.
    StorageFailed
        One of the processes did not start, or ended.
    UpstreamRefused
        The Proxy refused a request.
    """
    _check_installed()
    from tq_fs.bench import _proxy_sittings as sit  # noqa: PLC0415  # needs the extra
    from tq_fs.bench._proxy_load import Load  # noqa: PLC0415
    from tq_fs.bench._proxy_replies import RoutingShape  # noqa: PLC0415

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    stall_repeats, long_repeats = max(1, bench.repeats // 2), max(1, bench.repeats // 3)
    with (
        measuring_place(bench.root, _DISK_BYTES) as found,
        Progress(*columns, console=console, auto_refresh=False) as bar,
    ):
        place = sit.Place.of(found.folder, RoutingShape(bench.layers, bench.topk, bench.experts))
        advance = _advancing(bar)
        load = Load(bench.sessions, bench.turns, bench.tokens)
        more = Load(bench.sessions, bench.turns * _STALL_TURNS, bench.tokens)
        long = Load(min(_LONG_SESSIONS, bench.sessions), _LONG_TURNS, bench.long_tokens)
        held = Load(bench.held_sessions, bench.held_turns, bench.held_tokens)
        return Measured(
            place=found.kind,
            steps=sit.time_steps(
                place,
                load,
                repeats=bench.repeats,
                progress=advance("time of a Step", sit.runs_of_steps(bench.repeats)),
            ),
            stalls=sit.stall(
                place,
                more,
                repeats=stall_repeats,
                progress=advance("event loop", sit.runs_of_stall(stall_repeats)),
            ),
            long_stalls=sit.stall(
                place,
                long,
                repeats=long_repeats,
                progress=advance("event loop, long replies", sit.runs_of_stall(long_repeats)),
            ),
            resident=sit.hold(place, held, progress=advance("memory", sit.RUNS_OF_HOLD)),
        )


def _advancing(bar: Progress) -> Any:
    def task(title: str, total: int) -> Any:
        number = bar.add_task(title, total=total)
        return lambda: bar.update(number, advance=1, refresh=True)

    return task


def _check_installed() -> None:
    """Tell before anything is measured that it cannot be."""
    for module in ("fastapi", "uvicorn", "aiohttp", "transformers"):
        if find_spec(module) is None:
            raise DependencyMissing(
                f"measuring the Proxy needs {module}", remedy="pip install 'tq-fs[proxy]'"
            )


# ---------------------------------------------------------------- figures


def figures(measured: Measured) -> dict[str, float]:
    """Return the figures by name."""
    steps, resident = measured.steps, measured.resident
    out = {
        "step.x_store_off": round(steps.wall.ratio(ON, OFF), 3),
        "step.processor_x_store_off": round(steps.processor.ratio(ON, OFF), 3),
        "loop_stall_ms": _ms(p999(measured.stalls.late)),
        "loop_stall_64k_ms": _ms(p999(measured.long_stalls.late)),
        "resident.bytes_per_token": round(resident.bytes_per_token, 2),
        "resident.growth_mib": round(resident.anonymous / MiB, 2),
        "resident.rss_growth_mib": round(resident.rss / MiB, 2),
        "resident.traced_mib": round(resident.traced / MiB, 2),
        "resident.messages_mib": round(resident.messages / MiB, 2),
        "resident.tokens": resident.tokens,
        "resident.sessions": resident.sessions,
    }
    for name in (OFF, ON):
        out[f"step.{name}.ms"] = _ms(steps.wall.median(name))
        out[f"step.{name}.processor_ms"] = _ms(steps.processor.median(name))
    return {
        **out,
        **_of_stalls("loop_stall", measured.stalls),
        **_of_stalls("loop_stall_64k", measured.long_stalls),
    }


def _of_stalls(name: str, stalls: Stalls) -> dict[str, float]:
    every = [seconds for late in stalls.late for seconds in late]
    return {
        f"{name}.median_ms": _ms(statistics.median(every)),
        f"{name}.max_ms": _ms(max(every)),
        f"{name}.wakeups": len(every),
        f"{name}.idle_ms": _ms(p999([stalls.idle])),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def document(bench: ProxyBench, measured: Measured) -> dict[str, Any]:
    """Return the figures, what became of their targets, and the settings."""
    found = figures(measured)
    targets = {
        name: {"target": str(target), "met": target.met(found[name])}
        for name, target in TARGETS.items()
    }
    settings = {**asdict(bench), "place": measured.place}
    settings["root"] = None if bench.root is None else str(bench.root)
    return {**found, "targets": targets, "settings": settings}


def show(bench: ProxyBench, measured: Measured, console: Console) -> None:
    """Print the tables for people."""
    found = figures(measured)
    console.print(f"{bench.repeats} repeats, on {measured.place}")
    title = f"A Step of {bench.tokens:,} tokens, {bench.layers} layers, {bench.sessions} sessions"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for head in ("ms", "ms of the Proxy's processor"):
        table.add_column(head, justify="right")
    for name in (OFF, ON):
        values = (found[f"step.{name}.ms"], found[f"step.{name}.processor_ms"])
        table.add_row(name.replace("_", " "), *(f"{value:,.2f}" for value in values))
    console.print(table)
    console.print(
        f"event loop without load: {found['loop_stall.idle_ms']:.2f} ms late at the 99.9th "
        f"percentile; memory of {measured.resident.sessions} open sessions with "
        f"{measured.resident.tokens:,} tokens: {found['resident.growth_mib']:.1f} MiB, by Python's "
        f"count {found['resident.traced_mib']:.1f}, of which "
        f"messages {found['resident.messages_mib']:.1f}"
    )
    console.print(targets_table(TARGETS, found))
