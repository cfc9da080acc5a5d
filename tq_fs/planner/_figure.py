"""The picture of a plan: the master node's peak over the batch size, on three paths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tq_fs.errors import DependencyMissing
from tq_fs.planner._memory import PATHS
from tq_fs.planner._plan import Plan
from tq_fs.planner._sizes import TiB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of the palette by Okabe and Ito, which the colour-blind can tell apart.
STYLES = {
    "central": ("#D55E00", "centralized"),
    "transfer_queue": ("#E69F00", "queue in memory"),
    "tq_fs": ("#0072B2", "tq-fs"),
}
BOUNDED = ("transfer_queue", "tq_fs")  # drawn again, on a scale of their own
INK = "#444444"


def draw_plan(planned: Plan, path: Path) -> None:
    """Write a PNG with the peaks of all paths, up to the planned batch.

    Raises
    ------
    DependencyMissing
        matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # only a figure needs it
    except ImportError as error:
        raise DependencyMissing(
            "matplotlib is not installed", subject="figure", remedy="pip install 'tq-fs[demo]'"
        ) from error
    figure = Figure(figsize=(11.0, 5.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for name in PATHS:
        _line(left, planned, name)
    for name in BOUNDED:
        _line(right, planned, name)
    _limit(left, planned)
    _dress(left, planned, "all paths")
    _dress(right, planned, "without the centralized one")
    figure.suptitle(_title(planned), fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)


def curve(planned: Plan, name: str, points: int = 17) -> list[tuple[int, float]]:
    """Return batch sizes up to the planned one, and a path's peak on the master at each [TiB]."""
    top = planned.work.batch
    batches = sorted({max(1, round(top * i / (points - 1))) for i in range(points)})
    made = (
        PATHS[name](replace(planned.work, batch=b), planned.place, planned.calibration)
        for b in batches
    )
    return [(b, memory.total / TiB) for b, memory in zip(batches, made, strict=True)]


def _line(axes: Axes, planned: Plan, name: str) -> None:
    color, label = STYLES[name]
    batches, peaks = zip(*curve(planned, name), strict=True)
    axes.plot(batches, peaks, color=color, linewidth=2.2, label=f"{label}: {peaks[-1]:.2f} TiB")
    first = planned.exceeding[name]
    if first is not None and first <= planned.work.batch:
        axes.plot(first, planned.place.host_bytes / TiB, "o", color=color, zorder=3)
        axes.annotate(
            f"batch {first}",
            (first, planned.place.host_bytes / TiB),
            xytext=(8, -14),
            textcoords="offset points",
            color=color,
        )


def _limit(axes: Axes, planned: Plan) -> None:
    host = planned.place.host_bytes / TiB
    axes.axhline(host, color=INK, linewidth=1, linestyle=(0, (5, 4)))
    axes.annotate(
        f"memory of a node: {host:.2f} TiB",
        (0.99, host),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        color=INK,
    )


def _title(planned: Plan) -> str:
    work, place = planned.work, planned.place
    return (
        f"Trajectories on the master node: {work.model.layers} layers, top-{work.model.topk}, "
        f"context {work.context:,}, {work.samples} samples, {place.nodes} nodes, "
        f"stored as {work.stored_type}"
    )


def _dress(axes: Axes, planned: Plan, title: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("batch [prompts]")
    axes.set_ylabel("peak memory [TiB]")
    axes.set_xlim(0, planned.work.batch)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=True, framealpha=0.95, edgecolor="#DDDDDD")
