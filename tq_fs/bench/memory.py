"""``tq-fs bench memory``: what trajectories take on the master node, by path and component.

The same rollouts go the centralized way, through TransferQueue, and with tq-fs on NVMe and in an
object store; :mod:`tq_fs.bench._plane_sittings` says how they are run and what is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.table import Table

from tq_fs.bench._plane_compare import (
    by_path,
    change,
    component_peaks,
    digests,
    figures,
    firsts,
    growth,
    left_out,
    peak,
)
from tq_fs.bench._plane_figure import draw_pictures, prepare_pictures
from tq_fs.bench._plane_measured import (
    CENTRAL,
    PATH_NAMES,
    PATHS,
    Measured,
    MemoryBench,
    Run,
)
from tq_fs.bench._targets import Target, at_least, at_most, targets_table
from tq_fs.errors import DependencyMissing
from tq_fs.planner import size_text

__all__ = [
    "PATHS",
    "TARGETS",
    "Measured",
    "MemoryBench",
    "document",
    "draw_pictures",
    "figures",
    "measure",
    "prepare_pictures",
    "show",
]

COMPONENT_NAMES = {
    "proxy": "Proxy",
    "rollout_manager": "RolloutManager",
    "object_store": "Ray object store",
    "controller": "Controller",
    "storage_unit": "StorageUnit",
}
TARGETS: Mapping[str, Target] = {
    "growth.nvme_share_of_central": at_most(0.08),
    "growth.s3_share_of_central": at_most(0.08),
    "growth.nvme_share_of_transfer_queue": at_most(0.25),
    "slope.nvme": at_most(0.02),
    "slope.s3": at_most(0.02),
    "identical": at_least(1),
}
_MOST_NAMES = 5


def measure(bench: MemoryBench, console: Console) -> Measured:
    """Measure all paths, one after the other.

    Raises
    ------
    DependencyMissing
        Ray is not installed.
    """
    if find_spec("ray") is None:
        raise DependencyMissing(
            "measuring the data plane needs ray", remedy="pip install 'tq-fs[ray,cluster]'"
        )
    from tq_fs.bench import _plane_sittings as sittings  # noqa: PLC0415  # needs the extra

    return sittings.measure(bench, _telling(console))


def _telling(console: Console) -> Callable[[str], None]:
    """Return what prints a line with the time; whole lines, for a run of minutes and its log."""
    begin = time.monotonic()

    def tell(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - begin), 60)
        _say(console, f"{minutes:3d}:{seconds:02d}  {text}")

    return tell


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


# ---------------------------------------------------------------- for programs


def document(bench: MemoryBench, measured: Measured) -> dict[str, Any]:
    """Return the figures, what became of their targets, and the settings.

    ``tq-fs plan --calibrate`` reads it: ``settings.tokens`` are those of all Segments.
    """
    found, first = figures(measured), firsts(measured)
    targets = {
        name: {"target": str(target), "met": target.met(found[name])}
        for name, target in TARGETS.items()
        if name in found
    }
    return {
        **found,
        **{f"idle.{path}": dict(run.idle.components) for path, run in first.items()},
        **{f"components.{path}": component_peaks(run) for path, run in first.items()},
        "runs": [_run(run) for run in measured.runs],
        "absent": _absent(measured),
        "left_out": left_out(measured),
        "targets": targets,
        "settings": _settings(bench, measured),
    }


def _settings(bench: MemoryBench, measured: Measured) -> dict[str, Any]:
    settings = asdict(bench)
    settings["root"] = None if bench.root is None else str(bench.root)
    settings["step_tokens"] = settings.pop("tokens")
    settings |= {"place": measured.place, "nodes": 1, "units": 1}
    for run in firsts(measured).values():
        return settings | {"tokens": run.tokens, "payload_bytes": run.payload_bytes}
    return settings


def _run(run: Run) -> dict[str, Any]:
    names = ("path", "payload_bytes", "trajectories", "segments", "tokens", "most_waiting")
    return {
        **{name: getattr(run, name) for name in names},
        "seconds": round(run.samples[-1].clock_s, 3),
        "samples": len(run.samples),
        "idle": run.idle.total,
        "peak": peak(run),
        "growth": growth(run),
        "components": component_peaks(run),
        **_beside(run),
    }


def _beside(run: Run) -> dict[str, int]:
    """Return the peaks of what is not the data plane's [bytes]."""
    return {
        "trainers": max(sample.trainers for sample in run.samples),
        "page_cache": max(sample.page_cache for sample in run.samples),
    }


def _absent(measured: Measured) -> dict[str, str]:
    ran = {run.path for run in measured.runs}
    silent = {path: "did not run" for path in measured.bench.paths if path not in ran}
    return silent | dict(measured.absent)


# ---------------------------------------------------------------- for people


def show(bench: MemoryBench, measured: Measured, console: Console) -> None:
    """Print the tables for people."""
    found, first = figures(measured), firsts(measured)
    _say(
        console,
        f"{bench.rollouts} rollouts, {bench.segments} Segments a trajectory, {bench.layers} "
        f"layers, top-{bench.topk}, {bench.dtype}; {bench.trainers} trainers; on {measured.place}",
    )
    if first:
        console.print(_components(first))
        console.print(_runs(measured))
    _say_identical(measured, console)
    for name, why in {**_absent(measured), **left_out(measured)}.items():
        _say(console, f"left out: {name}: {why}")
    console.print(targets_table(TARGETS, found))


def _components(first: Mapping[str, Run]) -> Table:
    """Return a table of peaks, each with its change against the centralized path."""
    table = Table(
        title=f"Peak memory with {size_text(next(iter(first.values())).payload_bytes)} of payload",
        title_justify="left",
    )
    table.add_column("", no_wrap=True)
    for path in first:
        table.add_column(PATH_NAMES[path], justify="right", no_wrap=True)
        if path != CENTRAL and CENTRAL in first:
            table.add_column("change", justify="right", no_wrap=True)
    rows = {path: _rows(run) for path, run in first.items()}
    for name in next(iter(rows.values())):
        table.add_row(name, *_cells({path: values[name] for path, values in rows.items()}))
        if name in {COMPONENT_NAMES["storage_unit"], _GROWTH}:
            table.add_section()
    return table


_GROWTH = "growth over idle"


def _rows(run: Run) -> dict[str, int]:
    beside = _beside(run)
    return {
        **{COMPONENT_NAMES[name]: size for name, size in component_peaks(run).items()},
        "all, at one moment": peak(run),
        "the same, idle": run.idle.total,
        _GROWTH: growth(run),
        "beside: trainers": beside["trainers"],
        "beside: page cache": beside["page_cache"],
    }


def _cells(sizes: Mapping[str, int]) -> list[str]:
    cells = []
    for path, size in sizes.items():
        cells.append(size_text(size) if size else "")
        if path != CENTRAL and CENTRAL in sizes:
            cells.append(change(size, sizes[CENTRAL]))
    return cells


def _runs(measured: Measured) -> Table:
    """Return a table with each run, from which the slopes come."""
    table = Table(title="Each run", title_justify="left")
    table.add_column("", no_wrap=True)
    heads = ("payload", "Segments", "tokens", "waiting", "idle", "peak", "growth")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for path, runs in by_path(measured).items():
        for run in runs:
            sizes = (size_text(size) for size in (run.idle.total, peak(run), growth(run)))
            counts = (f"{n:,}" for n in (run.segments, run.tokens, run.most_waiting))
            table.add_row(PATH_NAMES[path], size_text(run.payload_bytes), *counts, *sizes)
    return table


def _say_identical(measured: Measured, console: Console) -> None:
    found = digests(measured)
    if found.compared and not found.differing:
        _say(console, f"{found.compared:,} tensors compared with another path's: all identical")
    for path, names in found.differing.items():
        more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
        _say(console, f"not identical on {path}: {', '.join(names[:_MOST_NAMES])}{more}")
