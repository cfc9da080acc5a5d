"""Where the trajectories of a run lie: nowhere, in a folder, or in a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tq_fs.config import StoreConfig
from tq_fs.fields import FieldSpec
from tq_fs.store import Store, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A store's URL; None where it is off and values travel in the Segments.

    Attributes
    ----------
    url
        ``file:///folder`` or ``s3://bucket/prefix``.
    store_id
        The run.
    """

    url: str | None
    store_id: str

    def flags(self, folder: Path) -> list[str]:
        """Return the flags that tell the Proxy; writes their configuration file into a folder."""
        replay = ["--use-rollout-routing-replay", "--routed-experts-dtype", "auto"]
        if self.url is None:
            return replay
        config = {"url": self.url, "store_id": self.store_id, "persist_trajectories": True}
        path = folder / "store.yaml"
        path.write_text(yaml.safe_dump(config))
        return [*replay, "--enable-transfer-queue", "--transfer-queue-config", str(path)]

    def open(self, fields: Sequence[FieldSpec]) -> Store:
        """Open the store for the trainer, beside the Proxy that writes it."""
        if self.url is None:
            return open_store(None, fields=fields)
        config = StoreConfig(store_id=self.store_id)
        return open_store(self.url, fields=fields, config=config, read_only=True)
