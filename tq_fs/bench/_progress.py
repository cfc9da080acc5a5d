"""Interleaved timing with a bar that does not disturb it."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tq_fs.bench._timing import Timings, Variant, interleave, runs_in


def run_shown(
    variants: Mapping[str, Variant], *, repeats: int, steps: int, console: Console, title: str
) -> Timings:
    """Do what :func:`tq_fs.bench._timing.interleave` does, with a bar for people.

    It is drawn between runs only: a thread that draws would take the interpreter's lock in them.
    """
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task(title, total=runs_in(list(variants), repeats))

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        return interleave(variants, repeats=repeats, steps=steps, progress=advance)
