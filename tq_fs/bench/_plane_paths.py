"""The processes of each path of ``tq-fs bench memory``, started on one Ray node."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

import tq_fs.cluster
from tq_fs import rollout
from tq_fs.bench._plane_traffic import Traffic
from tq_fs.cluster import StoreCluster
from tq_fs.config import ClusterConfig, StoreConfig
from tq_fs.demo.played import take_digests
from tq_fs.errors import StorageFailed
from tq_fs.rollout import Parallel, ProxyConfig, Rollout, TrainerConfig, Trainers

MiB = 1024**2
STORE = "plane"
CONSUMER = "train"
_CPUS = 16  # as Ray counts them: how many actors may be
_UNIT_BYTES = 64 * MiB  # of Steps in a unit's memory; one of the defaults' has 1.3 MB
_BATCH_BYTES = 64 * MiB  # of a trainer's micro-batch
_PROXY_BYTES = 64 * MiB
_CACHE_BYTES = 16 * MiB


@dataclass(frozen=True, slots=True)
class Plane:
    """One path, started.

    Attributes
    ----------
    pids
        Processes of each component of the master's data plane.
    trainers
        Processes of trainers.
    generate
        Rolls out the sessions of these names, as the rollout of that number.
    train
        Trains on it and lets go of what it used; returns the digest of each tensor.
    """

    pids: Mapping[str, Sequence[int]]
    trainers: Sequence[int]
    generate: Callable[[int, Sequence[str]], Rollout]
    train: Callable[[Rollout], Mapping[str, str]]


@contextmanager
def ray_node(object_store_bytes: int, environment: Mapping[str, str]) -> Iterator[str]:
    """Start Ray on this machine for a path alone; give the id of its one node."""
    level = logging.getLogger("ray").level
    before = {name: os.environ[name] for name in environment if name in os.environ}
    os.environ.update(environment)  # workers get it from us
    try:
        ray.init(
            address="local",
            num_cpus=_CPUS,
            include_dashboard=False,
            object_store_memory=object_store_bytes,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _system_config={"scheduler_report_pinned_bytes_only": False},  # count copies too
        )
        yield ray.get_runtime_context().get_node_id()
    finally:
        ray.shutdown()
        logging.getLogger("ray").setLevel(level)
        for name in environment:
            del os.environ[name]
        os.environ.update(before)


# ---------------------------------------------------------------- in memory, and tq-fs


def central(traffic: Traffic, ranks: int, node: str) -> AbstractContextManager[Plane]:
    """Start the centralized path: fields travel in the Segments, as narrow as they are stored."""
    return _reference(traffic, ranks, node, None)


@contextmanager
def stored(
    traffic: Traffic, ranks: int, node: str, folder: Path, url: str | None
) -> Iterator[Plane]:
    """Start the path through tq-fs: a unit in a folder, before a bucket if there is a URL."""
    config = StoreConfig(
        url=url,
        store_id=STORE,
        inflight_bytes=_PROXY_BYTES,
        cache_bytes=_CACHE_BYTES,
        cluster=ClusterConfig(
            paths=(str(folder),), host="127.0.0.1", budget_bytes=_UNIT_BYTES, sweep_s=0.0
        ),
    )
    with (
        tq_fs.cluster.start(config) as cluster,
        _reference(traffic, ranks, node, cluster) as plane,
    ):
        yield plane


@contextmanager
def _reference(
    traffic: Traffic, ranks: int, node: str, cluster: StoreCluster | None
) -> Iterator[Plane]:
    """Start the actors of :mod:`tq_fs.rollout`."""
    store_id = None if cluster is None else STORE
    fields = traffic.fields()
    proxies = rollout.start_proxies(
        ProxyConfig(store_id=store_id, fields=fields, consumers=(CONSUMER,), compact=True),
        traffic,
        [node],
    )
    manager = rollout.start_manager(proxies, data=ranks, node=node)
    trainers = Trainers(
        TrainerConfig(
            store_id=store_id,
            fields=fields,
            parallel=Parallel(data=ranks),
            consumer=CONSUMER,
            budget_bytes=_BATCH_BYTES,
        ),
        take_digests,
        [node],
    )

    def train(made: Rollout) -> dict[str, str]:
        trained = trainers.train(made)
        trainers.checkpoint_saved(made.rollout_id)
        return {n: v for rank in trained for found in rank.results for n, v in found.items()}

    try:
        yield Plane(
            pids={
                "proxy": _pids(proxies),
                "rollout_manager": _pids([manager]),
                **({} if cluster is None else _store_pids(cluster)),
            },
            trainers=_pids(trainers.ranks),
            generate=lambda number, names: _first(manager.generate.remote(number, names)),
            train=train,
        )
    finally:
        trainers.stop()
        rollout.stop(proxies)


def _store_pids(cluster: StoreCluster) -> dict[str, list[int]]:
    status = cluster.status()
    units = [int(unit["pid"]) for unit in status["units"]]
    return {"controller": [int(status["pid"])], "storage_unit": _with_children(units)}


def _with_children(pids: Sequence[int]) -> list[int]:
    found = [psutil.Process(pid) for pid in pids]
    return [p.pid for each in found for p in (each, *each.children(recursive=True))]


# ---------------------------------------------------------------- TransferQueue


@contextmanager
def queued(traffic: Traffic, ranks: int, node: str) -> Iterator[Plane]:
    """Start the path through TransferQueue's SimpleStorage, as it is configured by itself."""
    import transfer_queue  # noqa: PLC0415  # of one environment only
    from omegaconf import OmegaConf  # noqa: PLC0415

    from tq_fs.bench._plane_queue import QueueProxy, QueueTrainer, QueueTrainers  # noqa: PLC0415

    transfer_queue.init(OmegaConf.create({"backend": {"storage_backend": "SimpleStorage"}}))
    proxy: Any = ray.remote(QueueProxy).options(num_cpus=0, max_concurrency=4).remote(traffic)
    actors: list[Any] = [
        ray.remote(QueueTrainer).options(num_cpus=0).remote(traffic) for _ in range(ranks)
    ]
    manager = rollout.start_manager([proxy], data=ranks, node=node)
    try:
        yield Plane(
            pids={
                "proxy": _pids([proxy]),
                "rollout_manager": _pids([manager]),
                "controller": _titled("ray::TransferQueueController"),
                "storage_unit": _titled("ray::SimpleStorageUnit"),
            },
            trainers=_pids(actors),
            generate=lambda number, names: _first(manager.generate.remote(number, names)),
            train=QueueTrainers(actors).train,
        )
    finally:
        transfer_queue.close()


def _titled(title: str) -> list[int]:
    """Return the processes below this one that Ray calls so."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if command and command[0].startswith(title):
            found.append(process.pid)
    if not found:
        raise StorageFailed("no process is called that", subject=title)
    return found


def _pids(actors: Sequence[Any]) -> list[int]:
    return rollout.gather([actor.pid.remote() for actor in actors])


def _first(call: Any) -> Any:
    (answer,) = rollout.gather([call])
    return answer
