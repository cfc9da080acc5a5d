"""``tq-fs demo``: the edge at which optional libraries are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from tq_fs.demo.scenario import DEFAULT, Scale
from tq_fs.errors import DependencyMissing


def run(
    *,
    folder: Path | None = None,
    figure: Path,
    scale: Scale = DEFAULT,
    console: Console,
    settings: Mapping[str, Any] | None = None,
) -> int:
    """Roll out, store, hydrate, train and release on a real mixture-of-experts model.

    Parameters
    ----------
    folder
        Where the stores go; None for a temporary folder that is removed.
    figure
        PNG to write: memory of both paths over time.
    scale
        How large it is.
    console
        Prints, and shows progress.
    settings
        Settings of the stores, as for :func:`tq_fs.open_store`.

    Returns
    -------
    int
        0 if every tensor is bit-identical to the in-memory path's and replay closes the gap to
        the rollout, else 1.

    Raises
    ------
    DependencyMissing
        torch, transformers, matplotlib or psutil is not installed.
    """
    try:
        from tq_fs.demo.stages import Demo  # noqa: PLC0415  # all that needs optional libraries
    except ImportError as error:
        raise DependencyMissing(
            f"{error.name or error} cannot be imported",
            subject="tq-fs demo",
            remedy="pip install 'tq-fs[demo]'",
        ) from error
    return Demo(scale, console, settings or {}).run(folder, figure)
