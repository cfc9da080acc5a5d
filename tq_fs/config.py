"""One frozen configuration value, parsed once at the edge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from tq_fs.errors import InvalidConfig

MiB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Settings of a store. Every one has a default that suits one node with local NVMe.

    Attributes
    ----------
    store_id
        The run. Opening the same URL and id again continues it.
    transfer
        Fields to take out of memory; None for all declared ones, empty to switch the store off.
    durability
        ``none`` (survives a killed process), ``batch`` (one sync for all writers that wait) or
        ``step`` (each Step's own sync): when a Step is acknowledged.
    checksum
        Follow each chunk with its CRC-32C and check it on reading.
    layer_groups
        Groups to split the layer axis into: the trainer's pipeline-parallel size.
    writer_threads
        Threads that encode and write Steps.
    inflight_bytes
        Bound of the bytes of Steps that are on their way to the disk. The largest Step has to fit:
        256K tokens of 75 layers and top-8 are 600 MiB as int32.
    inflight_deadline_s
        Seconds a writer waits for room before it raises.
    prepared_groups
        Empty Step folders to keep ready for writers, each with about five open descriptors (at
        most an eighth of the process's); 0 makes each when it is needed.
    reader_threads
        Threads that read, the calling one included.
    cache_bytes
        Bound of decoded chunks kept for Segments that share Steps.
    manifest_cache_bytes
        Bound of decoded manifests, in bytes of their JSON; in memory about five times that.
    """

    store_id: str = "default"
    transfer: tuple[str, ...] | None = None
    durability: str = "none"
    checksum: bool = True
    layer_groups: int = 1
    writer_threads: int = 2
    inflight_bytes: int = 1024 * MiB
    inflight_deadline_s: float = 60.0
    prepared_groups: int = 32
    reader_threads: int = 2
    cache_bytes: int = 64 * MiB
    manifest_cache_bytes: int = 16 * MiB

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        least = {
            "layer_groups": 1,
            "writer_threads": 1,
            "inflight_bytes": 1,
            "prepared_groups": 0,
            "reader_threads": 1,
            "cache_bytes": 0,
            "manifest_cache_bytes": 0,
        }
        for name, low in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise InvalidConfig(f"{value!r} where an integer >= {low} belongs", subject=name)
        deadline = self.inflight_deadline_s
        if not isinstance(deadline, int | float) or not deadline >= 0:
            raise InvalidConfig(f"{self.inflight_deadline_s!r} s", subject="inflight_deadline_s")
        if not isinstance(self.checksum, bool):
            raise InvalidConfig(
                f"{self.checksum!r} where true or false belongs", subject="checksum"
            )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> StoreConfig:
        """Make a configuration from plain values.

        Raises
        ------
        InvalidConfig
            An unknown key, or a value that makes no sense.
        """
        known = {f.name for f in fields(cls)}
        unknown = set(values) - known
        if unknown:
            raise InvalidConfig(
                f"unknown keys {sorted(unknown)}",
                subject="store configuration",
                remedy=f"known are {sorted(known)}",
            )
        plain = dict(values)
        if isinstance(plain.get("transfer"), list):
            plain["transfer"] = tuple(plain["transfer"])
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
