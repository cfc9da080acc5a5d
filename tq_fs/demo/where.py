"""Where the demo's stores lie: a folder, or below a URL of an object store."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from tq_fs.backends import ObjectBackend, Retry, open_object_backend
from tq_fs.config import StoreConfig, folder_of
from tq_fs.errors import InvalidConfig

IN_MEMORY_FILES = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Where:
    """One store of the demo: its URL, and its settings."""

    url: str
    config: StoreConfig

    def disk_bytes(self) -> int:
        """Return the bytes of all its objects, metadata and manifests included."""
        if self.url.startswith("file:"):
            files = folder_of(self.url).rglob("*")
            return sum(path.stat().st_size for path in files if path.is_file())
        return sum(nbytes for _, nbytes in _backend(self.url, self.config).walk(""))


@dataclass(frozen=True, slots=True)
class Base:
    """What the demo's stores lie below."""

    url: str
    config: StoreConfig

    def below(self, name: str) -> Where:
        """Return where one store lies; with a folder of its own where there is a local tier."""
        tier = self.config.tier
        if tier is not None:
            tier = replace(tier, folder=f"{tier.folder}/{self._own}/{name}")
        return Where(f"{self.url}/{name}", replace(self.config, tier=tier))

    @property
    def _own(self) -> str:
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        """Return the URL, with the kind of file system: one in memory would make figures lie."""
        if not self.url.startswith("file:"):
            return self.url
        folder = folder_of(self.url)
        mounts = psutil.disk_partitions(all=True)
        mounts = [m for m in mounts if folder.is_relative_to(m.mountpoint)]
        kind = max(mounts, key=lambda m: len(m.mountpoint)).fstype if mounts else "unknown"
        note = ": its files take memory too" if kind in IN_MEMORY_FILES else ""
        return f"{self.url} ({kind}{note})"

    def remove(self) -> None:
        """Remove all that lies below."""
        backend = _backend(self.url, self.config)
        for name in list(backend.list("")):
            backend.delete(name)
        if self.config.tier is not None:
            shutil.rmtree(f"{self.config.tier.folder}/{self._own}", ignore_errors=True)


@contextmanager
def base_of(folder: Path | None, url: str | None, config: StoreConfig) -> Iterator[Base]:
    """Give where the stores go; what is not the user's folder is removed at the end.

    Below the URL of an object store each run has a name of its own, so that it meets nothing.

    Raises
    ------
    InvalidConfig
        Both a folder and a URL are given.
    """
    if url is not None:
        if folder is not None:
            raise InvalidConfig("give either --folder or --store", subject="tq-fs demo")
        base = Base(f"{url.rstrip('/')}/tq-fs-demo-{os.urandom(4).hex()}", config)
        try:
            yield base
        finally:
            base.remove()
    elif folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield Base(folder.resolve().as_uri(), config)
    else:
        with tempfile.TemporaryDirectory(prefix="tq-fs-demo-") as temporary:
            yield Base(Path(temporary).resolve().as_uri(), config)


def _backend(url: str, config: StoreConfig) -> ObjectBackend:
    return open_object_backend(
        url,
        driver=config.driver,
        options=config.storage_options,
        retry=Retry(deadline_s=config.retry_deadline_s),
        timeout_s=config.request_timeout_s,
    )
