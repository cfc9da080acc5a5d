"""``tq-fs demo``: the edge at which optional libraries are asked for."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from tq_fs.config import StoreConfig
from tq_fs.demo.scenario import DEFAULT, Scale
from tq_fs.errors import DependencyMissing


def run(
    *,
    folder: Path | None = None,
    url: str | None = None,
    figure: Path,
    scale: Scale = DEFAULT,
    console: Console,
    config: StoreConfig | None = None,
) -> int:
    """Roll out, store, hydrate, train and release on a real mixture-of-experts model.

    Parameters
    ----------
    folder
        Where the stores go; None for a temporary folder that is removed.
    url
        Where they go instead, an object store; removed at the end.
    figure
        PNG to write: memory of both paths over time.
    scale
        How large it is.
    console
        Prints, and shows progress.
    config
        Settings of the stores.

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
        from tq_fs.demo.where import base_of  # noqa: PLC0415
    except ImportError as error:
        raise DependencyMissing(
            f"{error.name or error} cannot be imported",
            subject="tq-fs demo",
            remedy="pip install 'tq-fs[demo]'",
        ) from error
    with base_of(folder, url, config or StoreConfig()) as base:
        return Demo(scale, console).run(base, figure)
