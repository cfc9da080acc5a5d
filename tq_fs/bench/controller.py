"""``tq-fs bench controller``: what it costs a Controller to hold many Steps.

Sessions of ten Steps, each finalized with one Segment over all of them, with logprobs and routing
of 40 layers and top-8 in uint8. Every manifest is made by
:meth:`tq_fs.controller.Controller.finalize` in a local folder. The Steps' own groups are not
written: a million of them are eight million files and folders.

What is included:

* memory: growth of the resident memory of a process, over its first sessions (imports, pools), with
  a full cache of decoded manifests; filled, and opened again; the larger one counts;
* resolve: batches of references in no order. ``fragments_per_s`` is the way from the reference to
  what it stands for, where all of a store's manifests are in memory, packed; ``hot``: decoded, too;
* flatness: finalize as the median of runs of 64 sessions, without the page that one of sixteen
  writes; resolve without a cache of decoded manifests, which would hold all of 10,000 Steps;
* restart: :meth:`tq_fs.controller.Controller.load`, which is what
  :meth:`~tq_fs.controller.Controller.recover` does before it sweeps: read the pages, list all
  manifests, and read those that are in no page.

What is not: the sweep, which looks for every file of every Step (``sweep_us_per_step``, on a few
Steps), taking the folder (:meth:`tq_fs.backends.LocalBackend.sweep`), and cold caches of the
operating system.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from tq_fs.bench._controller_life import BATCH, LAYERS, STEPS_IN_SESSION, TOPK, WINDOW, Life
from tq_fs.bench._disk import measuring_place
from tq_fs.errors import FatalError, InvalidConfig

__all__ = ["ControllerBench", "LifeFailed", "Measured", "document", "figures", "measure", "show"]

EARLY_STEPS = 10_000
SWEPT_STEPS = 4_000
_LEAST_STEPS = EARLY_STEPS + 2 * WINDOW * STEPS_IN_SESSION
_SPARE_BYTES = 1024**3
_SESSION_BYTES = 64 * 1024  # three inodes, for each of which ext4 wants 16 KiB; the image is sparse


class LifeFailed(FatalError):
    """A process that was measured ended with an error, which the message holds."""

    code: ClassVar[str] = "life_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerBench:
    """Settings of the measurement.

    Attributes
    ----------
    steps
        Steps to hold.
    root
        Folder to measure in; None: a journaled file system of our own, where that is permitted.
    """

    steps: int
    root: Path | None = None

    def __post_init__(self) -> None:
        """Refuse fewer Steps than can be compared with 10,000."""
        if self.steps < _LEAST_STEPS:
            raise InvalidConfig(
                f"{self.steps:,} are too few", subject="steps", remedy=f"{_LEAST_STEPS:,} or more"
            )

    @property
    def sessions(self) -> int:
        """Sessions to finalize."""
        return self.steps // STEPS_IN_SESSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What each life said of itself.

    Attributes
    ----------
    place
        Where, in words.
    began, few
        A few Steps more than 10,000: filled, and opened without a cache.
    filled
        All Steps, until it was killed.
    killed, closed
        Opened after a kill, and after that was closed.
    cold
        Opened without a cache.
    swept
        Real Steps, looked for.
    """

    place: str
    began: dict[str, float]
    few: dict[str, float]
    filled: dict[str, float]
    killed: dict[str, float]
    closed: dict[str, float]
    cold: dict[str, float]
    swept: dict[str, float]


def measure(bench: ControllerBench, console: Console) -> Measured:
    """Measure everything, one process after the other."""
    early = EARLY_STEPS // STEPS_IN_SESSION
    nbytes = _SPARE_BYTES + bench.sessions * _SESSION_BYTES
    with measuring_place(bench.root, nbytes) as place, console.status("") as status:

        def live(name: str, epoch: int, task: Any, *rest: Any) -> dict[str, float]:
            status.update(f"{name}: {task}, life {epoch}")
            return _live(Life(str(place.folder / name), epoch, task, *rest))

        began = live("few", 1, "fill", early + 2 * WINDOW, early)
        few = live("few", 2, "open", 0, 0, False)
        filled = live("all", 1, "fill", bench.sessions, early)
        return Measured(
            place=place.kind,
            began=began,
            few=few,
            filled=filled,
            killed=live("all", 2, "open"),
            closed=live("all", 3, "open"),
            cold=live("all", 4, "open", 0, 0, False),
            swept=live("swept", 1, "sweep", SWEPT_STEPS // STEPS_IN_SESSION),
        )


def _live(life: Life) -> dict[str, float]:
    command = [sys.executable, "-m", "tq_fs.bench._controller_life", json.dumps(life)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != (-signal.SIGKILL if life.task == "fill" else 0) or not done.stdout:
        raise LifeFailed(f"{done.returncode}\n{done.stderr[-2000:]}", subject=f"to {life.task}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def figures(measured: Measured) -> dict[str, float]:
    """Return the figures by name; ``x_flat`` is the worse of two costs over 10,000 Steps'."""
    filled, killed, closed = measured.filled, measured.killed, measured.closed
    early_s = min(life["early_finalize_s"] for life in (measured.began, filled))
    x_finalize = filled["late_finalize_s"] / early_s
    x_resolve = measured.few["cold_per_s"] / measured.cold["cold_per_s"]
    lives = (filled, killed, closed)
    return {
        "controller.bytes_per_step": round(max(life["bytes_per_step"] for life in lives), 1),
        "controller.fragments_per_s": round(killed["cold_per_s"]),
        "controller.fragments_per_s_hot": round(killed["hot_per_s"]),
        "controller.x_flat": round(max(x_finalize, x_resolve), 3),
        "controller.x_flat_finalize": round(x_finalize, 3),
        "controller.x_flat_resolve": round(x_resolve, 3),
        "controller.finalize_us_per_step": round(filled["late_finalize_s"] * 1e6, 1),
        "controller.restart_s": round(max(killed["restart_s"], closed["restart_s"]), 3),
        "controller.restart_killed_s": round(killed["restart_s"], 3),
        "controller.restart_closed_s": round(closed["restart_s"], 3),
        "controller.sweep_us_per_step": round(measured.swept["sweep_s"] * 1e6, 1),
    }


def show(bench: ControllerBench, measured: Measured, console: Console) -> None:
    """Print the figures for people."""
    table = Table(title=f"{bench.steps:,} Steps on {measured.place}", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in figures(measured).items():
        table.add_row(name, f"{value:,}")
    console.print(table)


def document(bench: ControllerBench, measured: Measured) -> dict[str, Any]:
    """Return the figures with the settings they were measured with."""
    settings = {
        "steps": bench.steps,
        "steps_in_session": STEPS_IN_SESSION,
        "layers": LAYERS,
        "topk": TOPK,
        "dtype": "uint8",
        "early_steps": EARLY_STEPS,
        "batch": BATCH,
        "swept_steps": SWEPT_STEPS,
        "place": measured.place,
    }
    return {**figures(measured), "settings": settings}
