"""One frozen configuration value, parsed once at the edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from tq_fs.errors import InvalidConfig
from tq_fs.storage_options import StorageOptions

MiB = 1024 * 1024
GiB = 1024 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Local NVMe before an object store.

    Attributes
    ----------
    folder
        Absolute folder on the node's NVMe. Every node has its own; runs may share it, because each
        store takes a folder named by its ``store_id`` below it. In a cluster its units' folders
        take its place.
    policy
        ``write-back``: a Step is acknowledged when it is on NVMe and uploaded behind; finalizing
        its session waits for that. ``write-through``: acknowledged when the object store has it.
    capacity_bytes
        What the front may hold; None for as much as its file system has.
    high_water, low_water
        Shares of the capacity: above the first, uploaded Steps leave the front until the second
        is reached; the released and coldest go first.
    upload_threads
        Threads that upload.
    upload_queue_bytes
        Bound of what is on NVMe only. A Step that finds no room waits for the
        ``inflight_deadline_s``.
    upload_memory_bytes
        Bound of the Steps that are in memory while they are uploaded.
    cache_bytes
        Bound of what was read from the object store and is kept on NVMe for all processes of the
        node; 0 keeps nothing.
    """

    folder: str
    policy: str = "write-back"
    capacity_bytes: int | None = None
    high_water: float = 0.9
    low_water: float = 0.7
    upload_threads: int = 4
    upload_queue_bytes: int = 4 * GiB
    upload_memory_bytes: int = 64 * MiB
    cache_bytes: int = 16 * GiB

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if not isinstance(self.folder, str) or not self.folder.startswith("/"):
            raise InvalidConfig(f"{self.folder!r} is no absolute folder", subject="tier.folder")
        _check_choice("tier.policy", self.policy, ("write-back", "write-through"))
        if self.capacity_bytes is not None:
            _check_whole("tier.capacity_bytes", self.capacity_bytes, 1)
        _check_whole("tier.upload_threads", self.upload_threads, 1)
        _check_whole("tier.upload_queue_bytes", self.upload_queue_bytes, 1)
        _check_whole("tier.upload_memory_bytes", self.upload_memory_bytes, 1)
        _check_whole("tier.cache_bytes", self.cache_bytes, 0)
        for name in ("high_water", "low_water"):
            _check_number(f"tier.{name}", getattr(self, name))
        if not 0 < self.low_water <= self.high_water <= 1:
            raise InvalidConfig(
                f"{self.low_water} and {self.high_water}",
                subject="tier.low_water, tier.high_water",
                remedy="0 < low_water <= high_water <= 1",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A store on the nodes of a Ray cluster.

    Attributes
    ----------
    paths
        Absolute folders on each node, one StorageUnit in each: one for each NVMe device. ``{node}``
        stands for the node's name, where nodes share a file system. None without units: Steps go to
        the object store directly.
    nodes
        ``all``: every node, those that join later too; or a list of names, ids or addresses of
        nodes; or a mapping of such to the folders there.
    host
        Address at which units listen for other nodes; empty for the node's own.
    port
        First port of a node's units, which take the following ones; 0 for any that is free.
    encryption
        ``tls``: what crosses nodes is encrypted, and nobody else may ask; ``none``: for private
        networks.
    budget_bytes
        Of each unit: bytes of Steps that it has received and not stored yet.
    deadline_s
        Seconds that a Step waits for its part of that.
    full_deadline_s
        Seconds that a Step waits for room while all units are full.
    writers
        Steps that a unit writes at once.
    lanes
        Connections to a unit: at least one for each thread that writes or reads, of all processes.
    cpus
        Of each unit and of the Controller, as Ray counts them: what it has to find free.
    start_s
        Seconds that the cluster may take to start.
    lease_s
        Seconds for which a process that records, or trains, is believed to live without a sign.
    grace_s
        Seconds after that for which its open sessions are left alone.
    sweep_s
        Seconds between sweeps for what nobody refers to; 0 for none.
    metrics_port
        First port of the node at which its units, and the Controller, serve Prometheus; each takes
        the next that is free. 0 for any, None for none.
    ray_metrics
        Publish their metrics through Ray as well.
    log_format
        How the units and the Controller write their log lines: ``json``, ``text``, or empty for as
        Ray has it.
    retention_s
        Seconds after which a session is deleted that nobody released and no live consumer awaits;
        None for never.
    """

    paths: tuple[str, ...] = ()
    nodes: str | tuple[str, ...] | Mapping[str, tuple[str, ...]] = "all"
    host: str = ""
    port: int = 0
    encryption: str = "tls"
    budget_bytes: int = 512 * MiB
    deadline_s: float = 60.0
    full_deadline_s: float = 60.0
    writers: int = 4
    lanes: int = 1024
    cpus: float = 0.0
    start_s: float = 120.0
    lease_s: float = 30.0
    grace_s: float = 600.0
    sweep_s: float = 600.0
    metrics_port: int | None = None
    ray_metrics: bool = False
    log_format: str = ""
    retention_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        _check_choice("cluster.encryption", self.encryption, ("tls", "none"))
        for name in ("budget_bytes", "writers", "lanes"):
            _check_whole(f"cluster.{name}", getattr(self, name), 1)
        _check_whole("cluster.port", self.port, 0)
        numbers = (
            *("deadline_s", "full_deadline_s", "cpus", "start_s"),
            *("lease_s", "grace_s", "sweep_s"),
        )
        for name in numbers:
            _check_number(f"cluster.{name}", getattr(self, name))
        if self.metrics_port is not None:
            _check_whole("cluster.metrics_port", self.metrics_port, 0)
        _check_flag("cluster.ray_metrics", self.ray_metrics)
        _check_choice("cluster.log_format", self.log_format, ("", "json", "text"))
        if self.retention_s is not None:
            _check_number("cluster.retention_s", self.retention_s)
        for path in (*self.paths, *(p for _, paths in self._by_node() for p in paths)):
            if not isinstance(path, str) or not path.startswith("/"):
                raise InvalidConfig(f"{path!r} is no absolute folder", subject="cluster.paths")
        if isinstance(self.nodes, str):
            _check_choice("cluster.nodes", self.nodes, ("all",))

    def _by_node(self) -> list[tuple[str, tuple[str, ...]]]:
        return list(self.nodes.items()) if isinstance(self.nodes, Mapping) else []

    @property
    def has_units(self) -> bool:
        """Whether Steps lie on nodes at all."""
        return bool(self.paths or self._by_node())

    def folders(self, *names: str) -> tuple[str, ...]:
        """Return the folders for units of a node, by any of its names; the first is its own."""
        chosen: tuple[str, ...] = ()
        if self.nodes == "all" or (isinstance(self.nodes, tuple) and {*names} & {*self.nodes}):
            chosen = self.paths
        for node, paths in self._by_node():
            if node in names:
                chosen = paths
        return tuple(path.replace("{node}", names[0]) for path in chosen)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ClusterConfig:
        """Make one from plain values."""
        plain = _known(cls, values, "cluster")
        if isinstance(plain.get("paths"), list):
            plain["paths"] = tuple(plain["paths"])
        nodes = plain.get("nodes")
        if isinstance(nodes, list):
            plain["nodes"] = tuple(nodes)
        if isinstance(nodes, Mapping):
            plain["nodes"] = {node: tuple(paths) for node, paths in nodes.items()}
        return cls(**plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Settings of a store. Every one has a default that suits one node with local NVMe.

    Attributes
    ----------
    url
        Where the store is, for programs that open what a file names; :func:`tq_fs.open_store` is
        given it.
    store_id
        The run. Opening the same URL and id again continues it.
    transfer
        Fields to take out of memory; None for all declared ones, empty to switch the store off.
    compact
        Keep ids of fields that stay in memory in their stored type: routed experts then take a
        quarter or half of the memory. Hydrated they are int32, as ever.
    durability
        ``none`` (survives a killed process), ``batch`` (one sync for all writers that wait) or
        ``step`` (each Step's own sync): when a Step is acknowledged on a local disk.
    checksum
        Follow each chunk with its CRC-32C and check it on reading.
    layer_groups
        Groups to split the layer axis into: the trainer's pipeline-parallel size.
    layout
        ``compact``: arrays have no ``zarr.json`` of their own, only the group's; fewer objects.
        ``full``: they have. ``auto``: compact in an object store, full on a local disk.
    persist_trajectories
        Keep the resident fields (tokens, versions, messages …) of finalized sessions beside their
        manifest, so that a later run can train on them. None: in an object store only.
    writer_threads
        Threads that encode and write Steps. None: 2 on a local disk, 8 in an object store.
    inflight_bytes
        Bound of the bytes of Steps that are on their way to the disk. The largest Step has to fit:
        256K tokens of 75 layers and top-8 are 600 MiB as int32.
    inflight_deadline_s
        Seconds a writer waits for room before it raises.
    prepared_groups
        Empty Step folders to keep ready for writers, each with about five open descriptors (at
        most an eighth of the process's); 0 makes each when it is needed.
    reader_threads
        Threads that read, the calling one included. None: 2 on a local disk and from units of a
        cluster, 16 in an object store.
    cache_bytes
        Bound of decoded chunks kept for Segments that share Steps.
    manifest_cache_bytes
        Bound of decoded manifests, in bytes of their JSON; in memory about five times that.
    driver
        Of an object store: ``obstore``, ``s3fs`` (fsspec), or ``auto``: obstore where it is
        installed and the URL begins with ``s3://``.
    storage_options
        Of the driver. For S3: ``endpoint_url``, ``region``, ``addressing_style`` (auto, path,
        virtual), ``unsigned_payload``, ``profile``, ``key``, ``secret``, ``token``, ``anon``;
        what is left out comes from the environment and the AWS configuration files.
        For others: fsspec's.
    retry_deadline_s
        Seconds for which a request that fails in a way that may pass is tried again.
    request_timeout_s
        Seconds without an answer after which a request counts as failed.
    tier
        Local NVMe before an object store; None for none.
    cluster
        For :func:`tq_fs.cluster.start`: units on the nodes of a Ray cluster.
    """

    url: str | None = None
    store_id: str = "default"
    transfer: tuple[str, ...] | None = None
    compact: bool = False
    durability: str = "none"
    checksum: bool = True
    layer_groups: int = 1
    layout: str = "auto"
    persist_trajectories: bool | None = None
    writer_threads: int | None = None
    inflight_bytes: int = 1024 * MiB
    inflight_deadline_s: float = 60.0
    prepared_groups: int = 32
    reader_threads: int | None = None
    cache_bytes: int = 64 * MiB
    manifest_cache_bytes: int = 16 * MiB
    driver: str = "auto"
    storage_options: StorageOptions = field(default_factory=StorageOptions)
    retry_deadline_s: float = 60.0
    request_timeout_s: float = 30.0
    tier: TierConfig | None = None
    cluster: ClusterConfig | None = None

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        least = {
            "layer_groups": 1,
            "inflight_bytes": 1,
            "prepared_groups": 0,
            "cache_bytes": 0,
            "manifest_cache_bytes": 0,
        }
        for name, low in least.items():
            _check_whole(name, getattr(self, name), low)
        for name in ("writer_threads", "reader_threads"):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), 1)
        for name in ("inflight_deadline_s", "retry_deadline_s", "request_timeout_s"):
            _check_number(name, getattr(self, name))
        _check_flag("compact", self.compact)
        _check_flag("checksum", self.checksum)
        if self.persist_trajectories is not None:
            _check_flag("persist_trajectories", self.persist_trajectories)
        _check_choice("layout", self.layout, ("auto", "compact", "full"))
        _check_choice("driver", self.driver, ("auto", "s3fs", "obstore"))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> StoreConfig:
        """Make a configuration from plain values.

        Raises
        ------
        InvalidConfig
            An unknown key, or a value that makes no sense.
        """
        plain = _known(cls, values, "store configuration")
        if isinstance(plain.get("transfer"), list):
            plain["transfer"] = tuple(plain["transfer"])
        if isinstance(plain.get("tier"), Mapping):
            tier = _known(TierConfig, plain["tier"], "tier")
            if "folder" not in tier:
                raise InvalidConfig("is missing", subject="tier.folder")
            plain["tier"] = TierConfig(**tier)
        if isinstance(plain.get("cluster"), Mapping):
            plain["cluster"] = ClusterConfig.of(plain["cluster"])
        options = plain.get("storage_options")
        if options is None or isinstance(options, dict):
            plain["storage_options"] = StorageOptions(options)
        return replace(cls(), **plain)

    @classmethod
    def from_yaml(cls, path: str | Path) -> StoreConfig:
        """Read a configuration file: a mapping of the attributes.

        Raises
        ------
        InvalidConfig
        """
        try:
            values = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise InvalidConfig(f"cannot be read: {error}", subject=str(path)) from error
        if not isinstance(values, dict):
            raise InvalidConfig("holds no mapping", subject=str(path))
        return cls.of(values)


def _known(kind: type, values: Mapping[str, Any], subject: str) -> dict[str, Any]:
    known = {f.name for f in fields(kind)}
    unknown = set(values) - known
    if unknown:
        raise InvalidConfig(
            f"unknown keys {sorted(unknown)}",
            subject=subject,
            remedy=f"known are {sorted(known)}",
        )
    return dict(values)


def _check_whole(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InvalidConfig(f"{value!r} where an integer >= {low} belongs", subject=name)


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise InvalidConfig(f"{value!r} where a number >= 0 belongs", subject=name)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidConfig(f"{value!r} where true or false belongs", subject=name)


def _check_choice(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise InvalidConfig(f"{value!r}", subject=name, remedy=f"known are {list(known)}")


def folder_of(url: str) -> Path:
    """Return the folder that a ``file://`` URL names.

    Raises
    ------
    InvalidConfig
        Another scheme, another host, or no absolute path.
    """
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise InvalidConfig(
            "no such kind of store", subject=repr(url), remedy="known: file:///absolute/folder"
        )
    if not parts.path.startswith("/") or parts.query or parts.fragment:
        raise InvalidConfig(
            "not an absolute folder", subject=repr(url), remedy="write file:///absolute/folder"
        )
    return Path(unquote(parts.path))
