"""The Ray cluster that the demo runs on: one that is there, or two raylets of its own."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NAMES = ("a", "b")
_CPUS = 8  # as Ray counts them: how many actors may be, not how fast they are
_STORE_BYTES = 2 * 1024**3
# Otherwise Ray does not count what an object store has fetched from another one.
_COUNT_COPIES = {"scheduler_report_pinned_bytes_only": False}


@contextmanager
def joined(address: str | None = None) -> Iterator[list[str]]:
    """Join a Ray cluster; without an address one of two raylets, which are ended again.

    Yields
    ------
    list of str
        The ids of its nodes, in the order of their names.
    """
    with _raylets() if address is None else _there(address) as found:
        ray.init(address=found, logging_level=logging.WARNING)
        try:
            nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
            yield [node["NodeID"] for node in sorted(nodes, key=lambda n: str(n["NodeName"]))]
        finally:
            ray.shutdown()


@contextmanager
def _there(address: str) -> Iterator[str]:
    yield address


@contextmanager
def _raylets() -> Iterator[str]:
    """Start two raylets on this machine: nodes to Ray, though they share a file system."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415  # for those who want raylets

    options: dict[str, Any] = {
        "num_cpus": _CPUS,
        "object_store_memory": _STORE_BYTES,
        "include_dashboard": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        cluster = Cluster()
        try:
            for number, name in enumerate(NAMES):
                own: dict[str, Any] = {"_system_config": _COUNT_COPIES} if number == 0 else {}
                cluster.add_node(node_name=name, **options, **own)
            yield cluster.address
        finally:
            cluster.shutdown()  # type: ignore[no-untyped-call]


@contextmanager
def folder_everywhere(nodes: Sequence[str]) -> Iterator[Path]:
    """Give a path that nobody has, and remove what lies there on every node at the end."""
    folder = Path(tempfile.gettempdir()) / f"tq-fs-{os.urandom(8).hex()}"
    try:
        yield folder
    finally:
        remove: Any = ray.remote(shutil.rmtree)
        places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        on = [remove.options(num_cpus=0, scheduling_strategy=place) for place in places]
        ray.get([each.remote(folder, ignore_errors=True) for each in on])
