"""A store's cluster without Ray: its units and its Controller are objects of this process.

The channel between them is real, and so are the folders. Nodes are names: a unit's files are opened
by readers of its own node only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tq_fs import ClusterConfig, FieldSpec, Store, StoreConfig
from tq_fs.cache import ChunkCache
from tq_fs.channel import Identity
from tq_fs.cluster._client import ControllerClient, open_attached
from tq_fs.cluster._node_unit import NodeUnit, UnitReport
from tq_fs.cluster._service import ClusterController
from tq_fs.embedded import Parts
from tq_fs.errors import StorageUnreachable, TqFsError, UnitLost
from tq_fs.fields import select
from tq_fs.metrics import Metrics
from tq_fs.units import RemoteUnits, UnitReaders

STORE = "run"


class Fleet:
    """Units by the name of their node; one that is None restarts, one that is "lost" is."""

    def __init__(self) -> None:
        self.units: dict[str, NodeUnit | str | None] = {}

    def reports(self) -> Mapping[str, UnitReport | TqFsError]:
        return {node: self._report(unit) for node, unit in list(self.units.items())}

    def _report(self, unit: NodeUnit | str | None) -> UnitReport | TqFsError:
        if isinstance(unit, NodeUnit):
            return unit.report()
        if unit == "lost":
            return UnitLost("its node is gone", subject="a unit")
        return StorageUnreachable("is being started", subject="a unit")


class Cluster:
    """Units on nodes ``n0``, ``n1`` …, a Controller, and stores that are attached to it."""

    def __init__(self, root: Path, nodes: int, opened: ExitStack, **settings: Any) -> None:
        self.root = root
        self.identity: Identity | None = settings.pop("identity", None)
        cluster = ClusterConfig(
            **{
                "paths": (str(root / "{node}"),),
                "host": "127.0.0.1",
                "encryption": "none" if self.identity is None else "tls",
                "sweep_s": 0.0,
                "full_deadline_s": 1.0,
                **settings.pop("cluster", {}),
            }
        )
        self.config = StoreConfig(
            **{
                "store_id": STORE,
                "cluster": cluster,
                "retry_deadline_s": 3.0,
                "prepared_groups": 0,
                **settings,
            }
        )
        self.fleet = Fleet()
        self._opened = opened
        for i in range(nodes):
            self.join(f"n{i}")
        self.controller = self.start_controller()

    def join(self, node: str) -> NodeUnit:
        unit = NodeUnit(
            str(self.root / node),
            self.config,
            self.identity,
            node=node,
            node_name=node,
            address="127.0.0.1",
        )
        self.fleet.units[node] = unit
        self._opened.callback(unit.close)
        return unit

    def unit(self, node: str) -> NodeUnit:
        unit = self.fleet.units[node]
        assert isinstance(unit, NodeUnit)
        return unit

    def down(self, node: str, *, lost: bool = False) -> None:
        self.unit(node).close()
        self.fleet.units[node] = "lost" if lost else None
        self.controller.look()

    def start_controller(self, **clocks: Any) -> ClusterController:
        found = ClusterController(self.config, self.identity, self.fleet, node="n0", **clocks)
        self._opened.callback(found.close)
        return found

    def restart_controller(self, **clocks: Any) -> ClusterController:
        self.controller.close()
        self.controller = self.start_controller(**clocks)
        return self.controller

    def store(
        self,
        fields: Sequence[FieldSpec],
        node: str = "far",
        consumers: Sequence[str] = (),
        metrics: Metrics | None = None,
        **settings: Any,
    ) -> Store:
        config = replace(self.config, **settings)

        def parts(cache: ChunkCache, opened: ExitStack) -> Parts:
            return open_attached(
                _Current(self),
                config,
                self.identity,
                node=node,
                consumers=consumers,
                metrics=metrics,
                cache=cache,
                opened=opened,
            )

        return Store(config, fields, select(fields, None), parts, remote=True, metrics=metrics)


class _Current:
    """Calls whatever Controller the cluster has at the moment."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            return getattr(self._cluster.controller, name)(*arguments)

        return call


@contextmanager
def cluster(root: Path, nodes: int = 2, **settings: Any) -> Iterator[Cluster]:
    with ExitStack() as opened:
        yield Cluster(root, nodes, opened, **settings)


def client_of(store: Store) -> ControllerClient:
    client = store._controller
    assert isinstance(client, ControllerClient)
    return client


def units_of(store: Store) -> RemoteUnits:
    return client_of(store)._units


def readers_of(store: Store) -> UnitReaders:
    assert store.reader is not None
    readers = store.reader._backends
    assert isinstance(readers, UnitReaders)
    return readers
