"""Settings of values beside those of the store that they lie in, and how a process finds both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import urlsplit

from tq_fs.channel import Identity
from tq_fs.config import StoreConfig
from tq_fs.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueConfig:
    """Settings of a store of values.

    Attributes
    ----------
    store
        Where and how values are stored. With ``cluster.paths`` on units of every node; else a
        ``file://`` URL for processes of one node, or an object store.
    allow_pickle
        Whether values that have no other form are pickled. What is unpickled can run code: only for
        stores that nobody else writes to.
    checkpoints
        How many of the last checkpoints keep the values they speak of, whatever is cleared.
    sweep_s
        Seconds between sweeps for what nobody refers to; 0 for none.
    index_folder
        Absolute folder, on the node that starts the store, for the index: about 300 bytes a value.
        None: beside the values, where those lie on that node, else in the folder for temporary
        files.
    """

    store: StoreConfig = field(default_factory=StoreConfig)
    allow_pickle: bool = False
    checkpoints: int = 2
    sweep_s: float = 600.0
    index_folder: str | None = None

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if not isinstance(self.allow_pickle, bool):
            raise InvalidConfig(
                f"{self.allow_pickle!r} where true or false belongs", subject="allow_pickle"
            )
        if type(self.checkpoints) is not int or self.checkpoints < 1:
            raise InvalidConfig(
                f"{self.checkpoints!r} where a number >= 1 belongs", subject="checkpoints"
            )
        if type(self.sweep_s) not in (int, float) or not 0 <= self.sweep_s < math.inf:
            raise InvalidConfig(f"{self.sweep_s!r} where a number >= 0 belongs", subject="sweep_s")
        folder = self.index_folder
        if folder is not None and not (isinstance(folder, str) and folder.startswith("/")):
            raise InvalidConfig(f"{folder!r} is no absolute folder", subject="index_folder")
        self._check_place()

    def _check_place(self) -> None:
        if self.kind == "nowhere":
            raise InvalidConfig(
                "is missing",
                subject="url",
                remedy="give a url (file:///folder or s3://bucket/prefix), or cluster.paths",
            )
        if self.store.tier is not None and self.kind != "cluster":
            raise InvalidConfig(
                "a tier is one process's, and values are put by many",
                subject="tier",
                remedy="give cluster.paths: units on the nodes, with the object store behind them",
            )

    @property
    def kind(self) -> str:
        """Where values lie: ``cluster``, ``folder``, ``objects`` or ``nowhere``."""
        if self.store.cluster is not None and self.store.cluster.has_units:
            return "cluster"
        if self.store.url is None:
            return "nowhere"
        return "folder" if urlsplit(self.store.url).scheme == "file" else "objects"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ValueConfig:
        """Make one from plain values: those of a store, and these, side by side.

        ``config`` names a YAML file with the store's settings, which those given here override.

        Raises
        ------
        InvalidConfig
        """
        plain = dict(values)
        mine = {f.name: plain.pop(f.name) for f in fields(cls) if f.name in plain}
        if "store" in mine:
            raise InvalidConfig("is no setting", subject="store", remedy="give its keys here")
        path = plain.pop("config", None)
        store = StoreConfig.of(plain)
        if path is not None:
            base = StoreConfig.from_yaml(path)
            store = replace(base, **{name: getattr(store, name) for name in plain})
        return cls(store=store, **mine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How a process reaches a run's values. Pickles.

    Attributes
    ----------
    config
        The settings.
    run
        Names the run among those of its store.
    node
        Id of the node that the keeper runs on.
    local, remote
        Where it listens for processes of that node, and for others.
    identity
        For others; None where the network is private.
    """

    config: ValueConfig
    run: str
    node: str
    local: str
    remote: str
    identity: Identity | None
