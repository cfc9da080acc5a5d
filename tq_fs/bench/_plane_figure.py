"""The pictures of ``tq-fs bench memory``: peaks by component, and memory over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tq_fs.bench._plane_compare import change, component_peaks, firsts, peak
from tq_fs.bench._plane_measured import CENTRAL, NVME, PATH_NAMES, QUEUE, S3, Measured, Run
from tq_fs.errors import DependencyMissing, InvalidConfig
from tq_fs.planner import GiB, MiB, size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of the palette by Okabe and Ito, which the colour-blind can tell apart.
COLORS = {CENTRAL: "#D55E00", QUEUE: "#E69F00", NVME: "#0072B2", S3: "#009E73"}
COMPONENT_LABELS = {
    "proxy": "Proxy",
    "rollout_manager": "Rollout-\nManager",
    "object_store": "Ray object\nstore",
    "controller": "Controller",
    "storage_unit": "Storage-\nUnit",
}
PEAKS, OVER_TIME = "memory-peaks.png", "memory-over-time.png"
INK = "#444444"
_DASHES = {CENTRAL: "-", QUEUE: "-", NVME: "-", S3: "--"}  # where two agree, both are seen
_BARS = 0.8  # of a component's room


class Scale(NamedTuple):
    """Unit of an axis."""

    bytes: int
    name: str


def prepare_pictures(folder: Path) -> None:
    """Make the folder; refuse, before anything is measured, what could not be drawn afterwards.

    Raises
    ------
    DependencyMissing
        matplotlib is not installed.
    InvalidConfig
        The folder cannot be made.
    """
    _figure((1.0, 1.0))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(
            error.strerror or str(error), subject=str(folder), remedy="name another folder"
        ) from error


def draw_pictures(measured: Measured, folder: Path) -> list[Path]:
    """Write both pictures, of the runs with the first payload, into a folder that is there."""
    runs = firsts(measured)
    if not runs:
        return []
    drawn = {PEAKS: _peaks(runs), OVER_TIME: _over_time(runs)}
    for name, figure in drawn.items():
        figure.savefig(folder / name, format="png", dpi=150)
    return [folder / name for name in drawn]


def _figure(inches: tuple[float, float]) -> Figure:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # only a figure needs it
    except ImportError as error:
        raise DependencyMissing(
            "matplotlib is not installed", subject="figures", remedy="pip install 'tq-fs[demo]'"
        ) from error
    return Figure(figsize=inches, layout="constrained")


def _scale(runs: Mapping[str, Run]) -> Scale:
    most = max(peak(run) for run in runs.values())
    return Scale(GiB, "GiB") if most >= 2 * GiB else Scale(MiB, "MiB")


def _title(runs: Mapping[str, Run]) -> str:
    run = next(iter(runs.values()))
    return (
        f"{run.trajectories:,} trajectories on the master node: {run.segments:,} Segments, "
        f"{run.tokens:,} tokens, {size_text(run.payload_bytes)} of logprobs and routed experts"
    )


# ---------------------------------------------------------------- peaks


def _peaks(runs: Mapping[str, Run]) -> Figure:
    figure = _figure((11.0, 5.0))
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    scale = _scale(runs)
    _totals(left, runs, scale)
    _components(right, runs, scale)
    figure.suptitle(_title(runs), fontsize="medium")
    return figure


def _totals(axes: Axes, runs: Mapping[str, Run], scale: Scale) -> None:
    """Draw a bar for each path, with what it saves against the centralized one."""
    for at, (path, run) in enumerate(runs.items()):
        color = COLORS[path]
        axes.bar(at, peak(run) / scale.bytes, width=0.65, color=color)
        text = size_text(peak(run))
        if path != CENTRAL and CENTRAL in runs:
            text += f"\n{change(peak(run), peak(runs[CENTRAL]))}"
        _above(axes, at, peak(run) / scale.bytes, text)
    axes.set_xticks(range(len(runs)), [_narrow(PATH_NAMES[path]) for path in runs])
    _dress(axes, "(a) peak of the data plane", scale)


def _narrow(label: str) -> str:
    return label.replace(" ", "\n").replace("rQ", "r-\nQ")


def _components(axes: Axes, runs: Mapping[str, Run], scale: Scale) -> None:
    """Draw each component's own peak, paths side by side."""
    width = _BARS / len(runs)
    for nth, (path, run) in enumerate(runs.items()):
        color, label = COLORS[path], PATH_NAMES[path]
        peaks = component_peaks(run)
        for at, name in enumerate(COMPONENT_LABELS):
            x, size = at + (nth - (len(runs) - 1) / 2) * width, peaks[name]
            told = label if at == 0 else None
            axes.bar(x, size / scale.bytes, width=width * 0.92, color=color, label=told)
            if size:
                _above(axes, x, size / scale.bytes, size_text(size), small=True)
    axes.set_xticks(range(len(COMPONENT_LABELS)), list(COMPONENT_LABELS.values()))
    _dress(axes, "(b) peak of each component, at a moment of its own", scale)
    _legend(axes)


def _above(axes: Axes, x: float, y: float, text: str, *, small: bool = False) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        color=INK,
        fontsize="x-small" if small else "small",
        rotation=90 if small else 0,
    )


# ---------------------------------------------------------------- over time


def _over_time(runs: Mapping[str, Run]) -> Figure:
    figure = _figure((11.0, 6.0))
    above, below = figure.subplots(
        2, 1, sharex=True, height_ratios=(6, 0.35 + 0.35 * len(runs)), squeeze=True
    )
    scale = _scale(runs)
    for row, (path, run) in enumerate(runs.items()):
        _line(above, path, run, scale)
        _phases(below, path, run, row)
    above.plot([], [], ":", color=INK, linewidth=1, label="page cache of the store's files")
    _dress(above, "The data plane's memory over time", scale)
    _legend(above)
    _dress_phases(below, runs)
    figure.suptitle(_title(runs), fontsize="medium")
    return figure


def _line(axes: Axes, path: str, run: Run, scale: Scale) -> None:
    color, label = COLORS[path], PATH_NAMES[path]
    seconds = [sample.clock_s for sample in run.samples]
    totals = [sample.total / scale.bytes for sample in run.samples]
    cached = [sample.page_cache / scale.bytes for sample in run.samples]
    told = f"{label}: peak {size_text(peak(run))}"
    axes.plot(seconds, totals, _DASHES[path], color=color, linewidth=1.8, label=told, zorder=3)
    if any(cached):
        axes.plot(seconds, cached, ":", color=color, linewidth=1)


def _phases(axes: Axes, path: str, run: Run, row: int) -> None:
    """Draw when a path generated, pale, and when it trained, below it."""
    color = COLORS[path]
    for name, lower, alpha in (("rollout", row - 0.4, 0.35), ("training", row + 0.02, 1.0)):
        spans = [(p.begin_s, p.end_s - p.begin_s) for p in run.phases if p.name == name]
        axes.broken_barh(
            spans, (lower, 0.38), facecolor=color, alpha=alpha, edgecolor="white", linewidth=0.5
        )


def _dress_phases(axes: Axes, runs: Mapping[str, Run]) -> None:
    axes.set_yticks(range(len(runs)), [PATH_NAMES[path] for path in runs])
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.set_xlabel("time since the first rollout began [s]; pale: rollouts, full: training")
    axes.set_xlim(
        min(run.samples[0].clock_s for run in runs.values()),
        max(run.samples[-1].clock_s for run in runs.values()),
    )
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


# ---------------------------------------------------------------- both


def _dress(axes: Axes, title: str, scale: Scale) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_ylabel(f"memory [{scale.name}]")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: Axes) -> None:
    axes.legend(loc="best", frameon=True, framealpha=0.95, edgecolor="#DDDDDD", fontsize="small")
