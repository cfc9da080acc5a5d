"""``tq-fs bench transfer-queue``: TransferQueue with our backend, beside its own ones, in one run.

The same Steps, by the same calls of TransferQueue, on the same disk:

* **simple** is SimpleStorage as the default configuration has it: two units, in memory.
* **ssd** is SimpleStorage with its SSD offload, which routing is large enough for; it syncs nothing
  and has no checksums.
* **tq_fs** is our backend, with a store in a folder.

:mod:`tq_fs.bench._transfer_queue_sittings` says what is measured and what is fair about it.
Afterwards each variant, alone, is given many Steps to hold:
:mod:`tq_fs.bench._transfer_queue_memory` says which memory is counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tq_fs.bench._disk import measuring_place
from tq_fs.bench._targets import Target, at_least, at_most, targets_table
from tq_fs.bench._ticks import p999
from tq_fs.bench._timing import Timings
from tq_fs.bench._transfer_queue_sittings import BATCH, Held, Sittings, hold, sit
from tq_fs.bench._transfer_queue_variants import OURS, SIMPLE, SSD, VARIANTS
from tq_fs.errors import DependencyMissing

__all__ = ["TARGETS", "Measured", "TransferQueueBench", "document", "figures", "measure", "show"]

MiB = 1024**2
GiB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferQueueBench:
    """Settings of the measurement.

    Attributes
    ----------
    repeats
        Sittings of each variant.
    puts
        Steps of a round.
    nbytes
        Bytes of Steps that are held while memory is measured.
    root
        Folder to measure in; None: a journaled file system of our own, where that is permitted.
    variants
        What to compare.
    """

    repeats: int = 3
    puts: int = 200
    nbytes: int = 4 * GiB
    root: Path | None = None
    variants: tuple[str, ...] = tuple(VARIANTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured.

    Attributes
    ----------
    place
        Where, in words.
    version
        TransferQueue's.
    sittings
        Puts, gets, and the event loop.
    held
        Memory, by variant.
    """

    place: str
    version: str
    sittings: Sittings
    held: Mapping[str, Held]


TARGETS: Mapping[str, Target] = {
    "put.vs_simple": at_least(1.5),
    "get.vs_simple": at_least(1),
    "get.vs_ssd": at_least(1.5),
    "memory.share_of_simple": at_most(0.15),
    "memory.slope": at_most(0.02),
    "loop_stall_ms": at_most(20),
}


def measure(bench: TransferQueueBench, console: Console) -> Measured:
    """Measure everything, one variant after the other.

    Raises
    ------
    DependencyMissing
        TransferQueue or psutil is not installed.
    StorageFailed
        A TransferQueue did not start, or ended.
    """
    _check_installed()
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    names = bench.variants
    with (
        measuring_place(bench.root, bench.nbytes * 2 + 4 * GiB) as place,
        Progress(*columns, console=console, auto_refresh=False) as bar,
    ):
        rounds = bar.add_task("put, get and event loop", total=bench.repeats * len(names))
        holding = bar.add_task(f"hold {bench.nbytes / GiB:.3g} GiB", total=len(names))
        return Measured(
            place=place.kind,
            version=version("TransferQueue"),
            sittings=sit(
                names,
                place.folder,
                repeats=bench.repeats,
                puts=bench.puts,
                progress=lambda: bar.update(rounds, advance=1, refresh=True),
            ),
            held=hold(
                names,
                place.folder,
                bench.nbytes,
                progress=lambda: bar.update(holding, advance=1, refresh=True),
            ),
        )


def _check_installed() -> None:
    """Tell before anything is measured that it cannot be."""
    for module, remedy in (("transfer_queue", "transfer-queue"), ("psutil", "bench")):
        if find_spec(module) is None:
            raise DependencyMissing(
                f"comparing with TransferQueue needs {module}",
                remedy=f"pip install 'tq-fs[{remedy}]'",
            )


# ---------------------------------------------------------------- figures


def figures(measured: Measured) -> dict[str, float]:
    """Return the figures by name.

    ``vs`` is how often our throughput holds another variant's (``ssd_vs``: that of the SSD
    offload). A figure that names no variant is our backend's, and is there if that was measured.
    """
    return {
        **_of_puts(measured.sittings),
        **_of_gets(measured.sittings),
        **_of_memory(measured.held),
        **_of_loop(measured.sittings),
    }


def _of_puts(sittings: Sittings) -> dict[str, float]:
    puts, calls = sittings.timings("put"), sittings.timings("call")
    out = _ratios("put", puts)
    for name in puts.seconds:
        out[f"put.{name}.ms"] = _ms(puts.median(name))
        out[f"put.{name}.call_ms"] = _ms(calls.median(name))
        out[f"put.{name}.steps_per_s"] = round(1 / puts.median(name), 1)
    return out


def _of_gets(sittings: Sittings) -> dict[str, float]:
    gets = sittings.timings("get")
    out = _ratios("get", gets)
    for name in gets.seconds:
        out[f"get.{name}.ms"] = _ms(gets.median(name))
        out[f"get.{name}.steps_per_s"] = round(BATCH / gets.median(name), 1)
    return out


_RATIOS = {"vs_simple": (SIMPLE, OURS), "vs_ssd": (SSD, OURS), "ssd_vs_simple": (SIMPLE, SSD)}


def _ratios(verb: str, timings: Timings) -> dict[str, float]:
    """Compare what was measured: the throughput of the second over that of the first."""
    return {
        f"{verb}.{name}": round(timings.ratio(base, mine), 3)
        for name, (base, mine) in _RATIOS.items()
        if {base, mine} <= timings.seconds.keys()
    }


def _of_memory(held: Mapping[str, Held]) -> dict[str, float]:
    out: dict[str, float] = {}
    if {OURS, SIMPLE} <= held.keys():
        out["memory.share_of_simple"] = round(held[OURS].late / held[SIMPLE].late, 4)
    if {SSD, SIMPLE} <= held.keys():
        out["memory.ssd_share_of_simple"] = round(held[SSD].late / held[SIMPLE].late, 4)
    if OURS in held:
        out["memory.slope"] = round(held[OURS].slope, 5)
    for name, found in held.items():
        out[f"memory.{name}.growth_mib"] = round(found.late / MiB, 1)
        out[f"memory.{name}.growth_at_quarter_mib"] = round(found.early / MiB, 1)
        out[f"memory.{name}.slope"] = round(found.slope, 5)
        out[f"memory.{name}.client_growth_mib"] = round(found.client / MiB, 1)
        out[f"memory.{name}.processes"] = len(found.processes)
    return out


def _of_loop(sittings: Sittings) -> dict[str, float]:
    out: dict[str, float] = {}
    if OURS in sittings.of:
        out["loop_stall_ms"] = _ms(p999(sittings.late(OURS)))
    for name in sittings.of:
        late = sittings.late(name)
        every = [seconds for sitting in late for seconds in sitting]
        out[f"loop_stall.{name}.ms"] = _ms(p999(late))
        out[f"loop_stall.{name}.median_ms"] = _ms(statistics.median(every))
        out[f"loop_stall.{name}.max_ms"] = _ms(max(every))
        out[f"loop_stall.{name}.wakeups"] = len(every)
    out["loop_stall.idle.ms"] = _ms(p999(sittings.idle()))
    out["loop_stall.idle.max_ms"] = _ms(max(map(max, sittings.idle())))
    return out


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def document(bench: TransferQueueBench, measured: Measured) -> dict[str, Any]:
    """Return the figures, what became of their targets, and the settings."""
    found = figures(measured)
    targets = {
        name: {"target": str(target), "met": target.met(found[name])}
        for name, target in TARGETS.items()
        if name in found
    }
    settings = {
        "repeats": bench.repeats,
        "puts": bench.puts,
        "bytes": bench.nbytes,
        "variants": list(bench.variants),
        "place": measured.place,
        "transfer_queue": measured.version,
        "processes": {name: held.processes for name, held in measured.held.items()},
    }
    return {**found, "targets": targets, "settings": settings}


def show(bench: TransferQueueBench, measured: Measured, console: Console) -> None:
    """Print the tables for people."""
    found = figures(measured)
    console.print(f"TransferQueue {measured.version}, on {measured.place}")
    console.print(_table(bench, found))
    idle = found["loop_stall.idle.ms"]
    console.print(f"the event loop without load: {idle:.2f} ms late at the 99.9th percentile")
    console.print(targets_table(TARGETS, found))


_ROWS = {
    "put a Step, 8 at once, ms": "put.{}.ms",
    f"get {BATCH} Steps, ms": "get.{}.ms",
    "event loop late, p99.9, ms": "loop_stall.{}.ms",
    "event loop late, most, ms": "loop_stall.{}.max_ms",
    "memory of what stores, MiB": "memory.{}.growth_mib",
    "a byte more for each byte held": "memory.{}.slope",
    "memory of the client, MiB": "memory.{}.client_growth_mib",
}


def _table(bench: TransferQueueBench, found: Mapping[str, float]) -> Table:
    title = f"0.66 MB a Step; memory with {bench.nbytes / GiB:.3g} GiB held"
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in bench.variants:
        table.add_column(name, justify="right")
    for row, key in _ROWS.items():
        table.add_row(row, *(f"{found[key.format(name)]:,.4g}" for name in bench.variants))
    return table
