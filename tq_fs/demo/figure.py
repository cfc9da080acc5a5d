"""The picture of the demo: memory of both paths over time."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tq_fs.demo.measure import Watched, ordered
from tq_fs.demo.scenario import MiB

# Of the palette by Okabe and Ito, which the colour-blind can tell apart.
IN_MEMORY, STORED, INK = "#D55E00", "#0072B2", "#444444"
MARKERS = {"record": "^", "hydrate": "o", "compare": "s", "release": "v"}
ENDED = {
    "record": "all recorded",
    "hydrate": "all hydrated",
    "compare": "all compared",
    "release": "all released",
}


def draw(memory: Watched, stored: Watched, payload_bytes: int, path: Path) -> None:
    """Write a PNG with both paths' resident memory over time."""
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    axes = figure.add_subplot()
    _payload(axes, payload_bytes)
    _line(axes, memory, IN_MEMORY, "in-memory path")
    _line(axes, stored, STORED, "tq-fs")
    for phase, marker in MARKERS.items():
        axes.plot([], [], marker, color=INK, markerfacecolor="white", label=ENDED[phase])
    _dress(axes, max(w.samples[-1].clock_s - w.start_s for w in (memory, stored)))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)


def _line(axes: Axes, watched: Watched, color: str, label: str) -> None:
    seconds = [s.clock_s - watched.start_s for s in watched.samples]
    growth = [(s.rss - watched.baseline) / MiB for s in watched.samples]
    peak = watched.peak_growth / MiB
    axes.plot(seconds, growth, color=color, linewidth=2.2, label=f"{label}: peak {peak:,.0f} MiB")
    for name, _, end in ordered(watched.phases):
        at = (end - watched.start_s, watched.growth_at(name) / MiB)
        axes.plot(*at, MARKERS[name], color=color, markerfacecolor="white", markersize=8, zorder=3)


def _payload(axes: Axes, payload_bytes: int) -> None:
    payload = payload_bytes / MiB
    axes.axhline(payload, color=INK, linewidth=1, linestyle=(0, (5, 4)))
    axes.annotate(
        f"all fields of all Segments: {payload:,.0f} MiB",
        (0.995, payload),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        color=INK,
    )


def _dress(axes: Axes, seconds: float) -> None:
    axes.set_title("The same rollouts, recorded, hydrated and released on either path", pad=12)
    axes.set_xlabel("time [s]")
    axes.set_ylabel("resident memory over the baseline [MiB]")
    axes.set_xlim(0, seconds * 1.03)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]), top=axes.get_ylim()[1] * 1.12)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center right", frameon=True, framealpha=0.95, edgecolor="#DDDDDD")
