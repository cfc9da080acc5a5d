"""The settings of a cluster's store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tq_fs.config import ClusterConfig, StoreConfig
from tq_fs.errors import InvalidConfig


def cluster_of(config: StoreConfig) -> ClusterConfig:
    """Return the part of the settings that is about the cluster."""
    return config.cluster or ClusterConfig()


def settings_of(config: StoreConfig | str | Path) -> StoreConfig:
    """Return settings, from a file where one is named, checked for a cluster.

    Raises
    ------
    InvalidConfig
    """
    found = config if isinstance(config, StoreConfig) else StoreConfig.from_yaml(config)
    cluster = cluster_of(found)
    if found.url is not None and found.url.split(":")[0] in ("file", "tqfs"):
        raise InvalidConfig(
            "a cluster's Steps lie on its units, or in an object store",
            subject=f"url {found.url!r}",
            remedy="leave url out, or give s3://bucket/prefix",
        )
    if found.url is None and not cluster.has_units:
        raise InvalidConfig(
            "names no folder, and there is no object store",
            subject="cluster.paths",
            remedy="give a folder on each node's NVMe, such as [/nvme/tq-fs], or a url",
        )
    if found.url is None and found.tier is not None:
        raise InvalidConfig("is for object stores", subject="tier", remedy="leave it out")
    return replace(found, cluster=cluster)
