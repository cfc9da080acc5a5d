"""Runs of ``tq-fs bench memory``: each path and payload with a Ray of its own, one after the other.

Rollout after rollout is generated as fast as it goes, and trained on in order; training waits at
the end of each, so that it takes as long as the settings say, and rollouts pile up before it. What
is counted, and how, says :mod:`tq_fs.bench._plane_watch`.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tq_fs.bench._disk import measuring_place
from tq_fs.bench._plane_measured import (
    CENTRAL,
    NVME,
    QUEUE,
    S3,
    Measured,
    MemoryBench,
    Phase,
    Run,
)
from tq_fs.bench._plane_paths import Plane, central, queued, ray_node, stored
from tq_fs.bench._plane_traffic import Traffic
from tq_fs.bench._plane_watch import PlaneWatch
from tq_fs.bench._s3_place import Place as Bucket
from tq_fs.bench._s3_place import measuring_bucket
from tq_fs.bench.servers import s3_server
from tq_fs.errors import DependencyMissing
from tq_fs.rollout import Rollout

GiB = 1024**3
_OBJECT_STORE_BYTES = 1 * GiB  # beside what the centralized path holds there
_CENTRAL_SHARE = 2.5  # of the payload, that it may hold: what a Proxy returns, and shards
_DISK_SHARE = 2.2  # of the payload: nothing goes before it was trained on
_SETTLE_S = 2.0
_WARM = "warm"

Progress = Callable[[str], None]


class _Order(NamedTuple):
    """A run to be made."""

    path: str
    payload: int


def measure(bench: MemoryBench, progress: Progress) -> Measured:
    """Take every path that can be taken, with its payloads.

    Raises
    ------
    TqFsError
        What a path raised.
    """
    absent = _absent(bench)
    runs = []
    disk = int(max(bench.payloads) * _DISK_SHARE) + GiB
    with (
        measuring_place(bench.root, disk) as place,
        _bucket(wanted=S3 in {*bench.paths} - {*absent}) as bucket,
    ):
        for number, order in enumerate(o for o in _orders(bench) if o.path not in absent):
            progress(f"{order.path} with {order.payload / GiB:.3g} GiB")
            folder = place.folder / f"run-{number}"
            runs.append(_run(bench, order, folder, bucket))
        kind = place.kind if bucket is None else f"{place.kind}, {bucket.kind}"
    return Measured(bench=bench, place=kind, runs=runs, absent=absent)


def _absent(bench: MemoryBench) -> dict[str, str]:
    """Return the paths that lack what they need, and what."""
    found = {}
    if QUEUE in bench.paths and find_spec("transfer_queue") is None:
        found[QUEUE] = "TransferQueue is not installed: pip install 'tq-fs[transfer-queue]'"
    if S3 in bench.paths:
        try:
            s3_server("auto")
        except DependencyMissing as error:
            found[S3] = str(error)
    return found


def _orders(bench: MemoryBench) -> Iterator[_Order]:
    for path in bench.paths:
        payloads = bench.payloads if path in (NVME, S3) else bench.payloads[:1]
        yield from (_Order(path, payload) for payload in payloads)


def _bucket(*, wanted: bool) -> AbstractContextManager[Bucket | None]:
    return measuring_bucket(None, "auto") if wanted else nullcontext()


# ---------------------------------------------------------------- one run


def _run(bench: MemoryBench, order: _Order, folder: Path, bucket: Bucket | None) -> Run:
    traffic = Traffic.of(bench)
    each = max(1, round(order.payload / bench.rollouts / traffic.nbytes))
    size = _OBJECT_STORE_BYTES + (
        int(_CENTRAL_SHARE * order.payload) if order.path == CENTRAL else 0
    )
    environment = bucket.environment if bucket is not None and order.path == S3 else {}
    with (
        ray_node(size, environment) as node,
        _plane(bench, order, traffic, node, folder, bucket) as plane,
    ):
        _warm_up(plane, bench)
        on_disk = folder if order.path in (NVME, S3) else None
        with PlaneWatch(plane.pids, plane.trainers, on_disk) as watch:
            idle = watch.look()
            drive = _Drive(plane, watch, bench, each)
            watch.start()
            digests = drive.run()
    count = bench.rollouts * each
    return Run(
        path=order.path,
        payload_bytes=count * traffic.nbytes,
        trajectories=count,
        segments=count * bench.segments,
        tokens=count * traffic.tokens,
        most_waiting=drive.most_waiting,
        idle=idle,
        samples=watch.samples,
        phases=drive.phases,
        digests=digests,
    )


def _plane(
    bench: MemoryBench,
    order: _Order,
    traffic: Traffic,
    node: str,
    folder: Path,
    bucket: Bucket | None,
) -> AbstractContextManager[Plane]:
    """Start a path's processes."""
    if order.path == CENTRAL:
        return central(traffic, bench.trainers, node)
    if order.path == QUEUE:
        return queued(traffic, bench.trainers, node)
    url = f"{bucket.url}/{folder.name}" if bucket is not None and order.path == S3 else None
    return stored(traffic, bench.trainers, node, folder, url)


def _warm_up(plane: Plane, bench: MemoryBench) -> None:
    """Take a small rollout through everything: what is loaded and made once is there then."""
    names = [f"{_WARM}-{number}" for number in range(bench.trainers)]
    plane.train(plane.generate(0, names))
    gc.collect()
    time.sleep(_SETTLE_S)


class _Drive:
    """Generates in a thread, and trains in this one."""

    def __init__(self, plane: Plane, watch: PlaneWatch, bench: MemoryBench, each: int) -> None:
        self._plane = plane
        self._watch = watch
        self._bench = bench
        self._each = each
        self._made: queue.SimpleQueue[Rollout | BaseException] = queue.SimpleQueue()
        self._pace_s = 0.0  # of a rollout
        self.phases: list[Phase] = []
        self.most_waiting = 0

    def run(self) -> dict[str, str]:
        """Return the digests of all tensors."""
        thread = threading.Thread(target=self._generate_all, name="tq-fs-rollouts", daemon=True)
        thread.start()
        digests: dict[str, str] = {}
        for _ in range(self._bench.rollouts):
            made = self._made.get()
            if isinstance(made, BaseException):
                raise made
            self.most_waiting = max(self.most_waiting, self._made.qsize() + 1)
            digests |= self._train(made)
        thread.join()
        return digests

    def _generate_all(self) -> None:
        try:
            for number in range(1, self._bench.rollouts + 1):
                begin = self._watch.clock()
                names = [f"{number}-{at}" for at in range(self._each)]
                made = self._plane.generate(number, names)
                self._pace_s = self._watch.clock() - begin
                self._note("rollout", number, begin)
                self._made.put(made)
        except BaseException as error:  # raised where it is waited for
            self._made.put(error)

    def _train(self, made: Rollout) -> dict[str, str]:
        begin = self._watch.clock()
        found = dict(self._plane.train(made))
        wanted = self._pace_s / self._bench.train_share
        time.sleep(max(0.0, begin + wanted - self._watch.clock()))
        self._note("training", made.rollout_id, begin)
        return found

    def _note(self, name: str, rollout: int, begin: float) -> None:
        end = self._watch.clock()
        self.phases.append(Phase(name=name, rollout=rollout, begin_s=begin, end_s=end))
