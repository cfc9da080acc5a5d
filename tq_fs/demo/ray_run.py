"""``tq-fs demo --ray``: the edge at which Ray is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tq_fs.config import ClusterConfig, StoreConfig
from tq_fs.demo.scenario import Scale
from tq_fs.errors import DependencyMissing


def run_on_ray(
    *,
    address: str | None = None,
    folder: Path | None = None,
    config: StoreConfig | None = None,
    payload_bytes: int,
    console: Console,
    scale: Scale | None = None,
) -> int:
    """Take rollouts through both paths on a Ray cluster, and compare what trainers get.

    Parameters
    ----------
    address
        Of the cluster; None starts two raylets on this machine.
    folder
        Where units lie, on every node; None for a temporary one that is removed.
    config
        Settings of the store; its units' folders go before `folder`.
    payload_bytes
        Routing to replay, as int32.
    console
        Prints.
    scale
        How large it is.

    Returns
    -------
    int
        0 if every tensor is bit-identical and nothing large went through Ray, else 1.

    Raises
    ------
    DependencyMissing
        ray, torch or transformers is not installed.
    """
    try:
        from tq_fs.demo.cluster import PARALLEL, SCALE, RayDemo  # noqa: PLC0415  # all that needs them
        from tq_fs.demo.raylets import folder_everywhere, joined  # noqa: PLC0415
    except ImportError as error:
        raise DependencyMissing(
            f"{error.name or error} cannot be imported",
            subject="tq-fs demo --ray",
            remedy="pip install 'tq-fs[demo,ray,cluster]'",
        ) from error
    with joined(address) as nodes, folder_everywhere(nodes) as own:
        settings = _settings(
            config or StoreConfig(layer_groups=PARALLEL.pipeline), folder or own, own.name
        )
        chosen = replace(scale or SCALE, payload_bytes=payload_bytes)
        return RayDemo(chosen, nodes, console).run(settings)


def _settings(config: StoreConfig, folder: Path, store_id: str) -> StoreConfig:
    """Return settings with units, of a store that nobody else has."""
    cluster = config.cluster or ClusterConfig()
    if not cluster.has_units:
        cluster = replace(cluster, paths=(f"{folder.absolute()}/{{node}}",))
    return replace(config, store_id=store_id, cluster=cluster)
