"""Nodes to measure a cluster on: two raylets of this machine, and stores on them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import tq_fs.cluster
from tq_fs.cluster import StoreCluster
from tq_fs.config import ClusterConfig, StoreConfig

HERE, THERE = "here", "there"
_CPUS = 4  # that Ray believes in, a node: what is asked for has to be free
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's are


class Nodes(NamedTuple):
    """Two nodes by name; this process belongs to the one that is called ``here``.

    Attributes
    ----------
    folder
        For the units, which all lie on this machine.
    ids
        Ray's ids of the nodes.
    raylets
        Process ids of their raylets.
    """

    folder: Path
    ids: Mapping[str, str]
    raylets: Mapping[str, int]

    def on(self, node: str) -> NodeAffinitySchedulingStrategy:
        """Return how Ray is told to run something on a node."""
        return NodeAffinitySchedulingStrategy(self.ids[node], soft=False)

    def object_store_bytes(self) -> dict[str, int]:
        """Return how much memory each node's object store has ever touched.

        That is what the file behind it takes, which never gets smaller: no peak is missed.
        """
        return {node: _plasma_bytes(pid) for node, pid in self.raylets.items()}


def _plasma_bytes(raylet: int) -> int:
    descriptors = Path(f"/proc/{raylet}/fd")
    found = 0
    for link in descriptors.iterdir():
        try:
            if "plasma" in os.readlink(link):
                found += link.stat().st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            continue  # was closed meanwhile
    return found


@contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    """Start two raylets, join the first, and end everything at the end."""
    head = {"num_cpus": _CPUS, "include_dashboard": False, "node_name": HERE}
    level = logging.getLogger("ray").level
    logging.getLogger("ray").setLevel(logging.ERROR)
    raylets = Cluster(initialize_head=True, head_node_args=head)
    try:
        raylets.add_node(num_cpus=_CPUS, node_name=THERE)
        ray.init(address=raylets.address, log_to_driver=False, logging_level=logging.ERROR)
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        ids = {str(node["NodeName"]): str(node["NodeID"]) for node in nodes}
        made: list[Any] = raylets.list_all_nodes()  # type: ignore[no-untyped-call]
        yield Nodes(folder, ids, {_name_of(n, ids): _raylet(n) for n in made})
    finally:
        ray.shutdown()
        raylets.shutdown()  # type: ignore[no-untyped-call]
        logging.getLogger("ray").setLevel(level)


def _name_of(node: Any, ids: Mapping[str, str]) -> str:
    return next(name for name, found in ids.items() if found == node.node_id)


def _raylet(node: Any) -> int:
    pid: int = node.all_processes["raylet"][0].process.pid
    return pid


@contextmanager
def store_on(
    nodes: Nodes, store_id: str, *names: str, encryption: str = "none", **cluster: Any
) -> Iterator[StoreCluster]:
    """Start a store with a unit on each of these nodes."""
    config = StoreConfig(
        store_id=store_id,
        cluster=ClusterConfig(
            paths=(f"{nodes.folder}/{{node}}",),
            nodes=names,
            host="127.0.0.1",
            encryption=encryption,
            sweep_s=0.0,
            **cluster,
        ),
    )
    with tq_fs.cluster.start(config) as started:
        yield started
