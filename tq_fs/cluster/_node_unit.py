"""A StorageUnit of a cluster: a folder, served to all processes of its store. Knows no Ray."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec

from tq_fs.backends import TieredBackend
from tq_fs.channel import ChannelServer, Fence, Identity, Limits, private_socket
from tq_fs.cluster._exports import export
from tq_fs.cluster._settings import cluster_of
from tq_fs.config import StoreConfig
from tq_fs.errors import InvalidConfig
from tq_fs.metrics import Metrics, Sample
from tq_fs.places import UnitPlace, open_unit_place
from tq_fs.store_folder import write_claim

ROOTS = frozenset({"steps", "manifests", "pages", "tombstones", "values", "checkpoints"})
_MOST_NAME = 24
_PORTS = 64  # tried from the first one on


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReport:
    """What a unit says of itself.

    Attributes
    ----------
    name
        In manifests; stays with its folder.
    node, node_name
        Where it runs.
    local, remote
        Endpoints for its own node, and for others.
    folder
        Where its files lie.
    epoch
        Of the Controller that it obeys.
    free_bytes, total_bytes
        Of its device.
    held_bytes
        Of Steps that it has received and not stored yet.
    lanes
        Connections that are open.
    counts
        What has passed, by name.
    pid
        Its process.
    metrics_url
        Where Prometheus asks it; empty for nowhere.
    """

    name: str
    node: str
    node_name: str
    local: str
    remote: str
    folder: str
    epoch: int
    free_bytes: int
    total_bytes: int
    held_bytes: int
    lanes: int
    pid: int
    counts: dict[str, int] = field(default_factory=dict)
    metrics_url: str = ""


class NodeUnit:
    """Takes a folder and serves it until it is closed; a context manager.

    Parameters
    ----------
    folder
        Absolute; the store's own is made in it.
    config
        The store's settings.
    identity
        The store's certificate; None where the network is private.
    node, node_name, address
        Where it runs: id, name, and the address that other nodes reach it at.

    Raises
    ------
    StoreBusy
        Another unit has the folder.
    WrongStore
        It is something else.
    InvalidConfig
        No port is free.
    """

    def __init__(
        self,
        folder: str,
        config: StoreConfig,
        identity: Identity | None,
        *,
        node: str,
        node_name: str,
        address: str,
    ) -> None:
        self._node = (node, node_name)
        settings = cluster_of(config)
        with ExitStack() as opened:
            self.place = open_unit_place(folder, config, _new_name(node_name), opened=opened)
            self.name = self.place.claim.unit
            self._fence = _fence(self.place)
            self.server = self._serve(config, identity, settings.host or address)
            opened.callback(self.server.close)
            metrics = Metrics(config.store_id, unit=self.name, role="unit")
            for samples in self._sources():
                opened.callback(metrics.watch(samples))
            self._metrics_url = export(metrics, settings, settings.host or address, opened)
            self._opened = opened.pop_all()

    def _sources(self) -> Iterator[Callable[[], Iterable[Sample]]]:
        yield self.server.samples
        yield self._samples
        if isinstance(self.place.steps, TieredBackend):
            yield self.place.steps.samples

    def _samples(self) -> Iterator[Sample]:
        disk = os.statvfs(self.place.front.root)
        yield Sample("tqfs_unit_free_bytes", disk.f_bavail * disk.f_frsize)

    def _serve(self, config: StoreConfig, identity: Identity | None, host: str) -> ChannelServer:
        settings = cluster_of(config)
        limits = Limits(
            budget_bytes=settings.budget_bytes,
            deadline_s=settings.deadline_s,
            writers=settings.writers,
            lanes=settings.lanes,
        )
        ports = range(settings.port, settings.port + _PORTS) if settings.port else (0,)
        host = f"[{host}]" if ":" in host else host
        failed: InvalidConfig | None = None
        for port in ports:
            try:
                return ChannelServer(
                    self.place.steps,
                    store_id=config.store_id,
                    unit=self.name,
                    local=[f"unix:{private_socket(str(self.place.front.root))}"],
                    remote=[f"tcp:{host}:{port}"],
                    identity=identity,
                    roots=ROOTS,
                    limits=limits,
                    fence=self._fence,
                )
            except InvalidConfig as error:
                failed = error
        assert failed is not None
        raise failed

    def report(self) -> UnitReport:
        """Return what the unit says of itself."""
        root = self.place.front.root
        disk = os.statvfs(root)
        local, remote = self.server.endpoints
        return UnitReport(
            name=self.name,
            node=self._node[0],
            node_name=self._node[1],
            local=local,
            remote=remote,
            folder=str(root),
            epoch=self._fence.epoch,
            free_bytes=disk.f_bavail * disk.f_frsize,
            total_bytes=disk.f_blocks * disk.f_frsize,
            held_bytes=self.server.held_bytes,
            lanes=self.server.lanes,
            pid=os.getpid(),
            counts=self.server.counts,
            metrics_url=self._metrics_url,
        )

    def close(self) -> None:
        """End what is under way, and let go of the folder; idempotent."""
        self._opened.close()

    def __enter__(self) -> NodeUnit:
        """Return it."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        self.close()


def _fence(place: UnitPlace) -> Fence:
    claim = place.claim

    def write(epoch: int, holder: str) -> None:
        write_claim(place.front, msgspec.structs.replace(claim, epoch=epoch, holder=holder))

    return Fence(claim.epoch, claim.holder, unit=claim.unit, write=write)


def _new_name(node_name: str) -> str:
    """Return a name that no other unit has, and that says where it was made."""
    plain = re.sub(r"[^a-z0-9]+", "-", node_name.lower()).strip("-")[:_MOST_NAME]
    return f"{plain or 'unit'}-{os.urandom(4).hex()}"
