"""One path, alone in a process of its own: record, hydrate, compare, release.

The process is told which rollouts to replay; it has no model. Its parent watches its memory.
"""

from __future__ import annotations

import ctypes
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from tq_fs.demo.compare import digest, name_of
from tq_fs.demo.scenario import Rollout, Scale
from tq_fs.demo.where import Where
from tq_fs.fields import ROUTED_EXPERTS
from tq_fs.store import Store, open_store
from tq_fs.trajectory import Segment, StepRecord

PHASES = ("record", "hydrate", "compare", "release")
CONSUMER = "train"
REST_S = 0.25  # so that what release gave back shows in the samples
Tell = Callable[[str, float], None]  # phase, and how much of it is done [0, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to replay, and into which store.

    Attributes
    ----------
    where
        The store; None for the in-memory path.
    rollouts
        Played sessions.
    copies
        How many times to replay each, under session ids of their own.
    scale
        For the declared fields and the micro-batch's budget.
    """

    where: Where | None
    rollouts: Sequence[Rollout]
    copies: int
    scale: Scale

    def open(self) -> Store:
        """Open the store."""
        if self.where is None:
            return open_store(None, fields=self.scale.fields())
        return open_store(self.where.url, fields=self.scale.fields(), config=self.where.config)


class Phase(NamedTuple):
    """A message to the parent: how far a phase is, on the clock that all processes share."""

    name: str
    done: float
    clock_s: float


@dataclass(slots=True)
class Ledger:
    """What a path did, for the report.

    Attributes
    ----------
    steps, segments, deleted
        Counts; `deleted` are Steps that release removed.
    memory_bytes
        By field, as recorded in memory types.
    stored_bytes
        By field and stored type; empty on the in-memory path.
    disk_bytes
        All files of the store, metadata and manifests included.
    hydrated_bytes, microbatches
        Of one pass over all Segments.
    write_s, hydrate_s
        Seconds in record and finalize, and of that pass.
    digests
        Of each tensor by its name.
    """

    steps: int = 0
    segments: int = 0
    deleted: int = 0
    memory_bytes: Counter[str] = field(default_factory=Counter)
    stored_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    disk_bytes: int = 0
    hydrated_bytes: int = 0
    microbatches: int = 0
    write_s: float = 0.0
    hydrate_s: float = 0.0
    digests: dict[str, str] = field(default_factory=dict)

    def enter(self, records: Sequence[StepRecord]) -> None:
        """Count the Steps of one session."""
        self.steps += len(records)
        for record in records:
            for name, array in record.arrays.items():
                self.memory_bytes[name] += array.nbytes
            for name, entry in (record.stored.fields if record.stored else {}).items():
                self.memory_bytes[name] += prod(entry.shape) * np.dtype(entry.memory).itemsize
                self.stored_bytes[name, entry.dtype] += entry.nbytes


@dataclass(frozen=True, slots=True)
class Failure:
    """A message to the parent: the traceback of what went wrong."""

    trace: str


def main(parent: Connection, task: Task) -> None:
    """Run a task and send phases, then a Ledger or a Failure: the entry point of the process."""

    def tell(phase: str, done: float) -> None:
        parent.send(Phase(phase, done, time.monotonic()))

    try:
        parent.send(replay(task, tell))
    except Exception:  # the edge of the process: the parent shows it and fails
        parent.send(Failure(traceback.format_exc()))


def replay(task: Task, tell: Tell) -> Ledger:
    """Take every phase of one path, one after the other."""
    import torch  # noqa: F401, PLC0415  # part of the baseline, not of what the path needs

    ledger = Ledger()
    with task.open() as store:
        segments = record(store, task, ledger, tell)
        ledger.disk_bytes = task.where.disk_bytes() if task.where is not None else 0
        hydrate(store, segments, task.scale, ledger, tell)
        compare(store, segments, task.scale, ledger, tell)
        tell("release", 0.0)
        ledger.deleted = store.release(segments, CONSUMER)
        segments.clear()
        _trim()
        time.sleep(REST_S)
        tell("release", 1.0)
    return ledger


def record(store: Store, task: Task, ledger: Ledger, tell: Tell) -> list[Segment]:
    """Record and finalize all sessions; their Segments pile up, as rollouts outrun training."""
    segments: list[Segment] = []
    tell("record", 0.0)
    for copy in range(task.copies):
        for rollout in task.rollouts:
            session = store.session(f"{rollout.session_id}.{copy}")
            received = Rollout(rollout.session_id, [turn.received() for turn in rollout.turns])
            start = time.perf_counter()
            received.record(session)
            segments += session.finalize(consumers=[CONSUMER])
            ledger.write_s += time.perf_counter() - start
            ledger.enter(session.records)
        tell("record", (copy + 1) / task.copies)
    ledger.segments = len(segments)
    return segments


def hydrate(
    store: Store, segments: Sequence[Segment], scale: Scale, ledger: Ledger, tell: Tell
) -> None:
    """Hydrate every micro-batch in turn, as fast as it goes."""
    tell("hydrate", 0.0)
    start = time.perf_counter()
    batches = store.micro_batches(segments, budget_bytes=scale.budget_bytes, reuse=True)
    for number, batch in enumerate(batches, start=1):
        for tensors in batch.tensors.values():
            ledger.hydrated_bytes += sum(t.nbytes for t in tensors)
        tell("hydrate", number / len(batches))
    ledger.hydrate_s = time.perf_counter() - start
    ledger.microbatches = len(batches)


def compare(
    store: Store, segments: Sequence[Segment], scale: Scale, ledger: Ledger, tell: Tell
) -> None:
    """Hydrate every micro-batch again and digest its tensors; apart, so that it costs no speed."""
    tell("compare", 0.0)
    batches = store.micro_batches(segments, budget_bytes=scale.budget_bytes, reuse=True)
    left = iter(segments)
    for number, batch in enumerate(batches, start=1):
        mine = [next(left) for _ in batch.samples]
        for name, tensors in batch.tensors.items():
            for segment, tensor in zip(mine, tensors, strict=True):
                ledger.digests[name_of(segment, name)] = digest(tensor)
        tell("compare", number / len(batches))


def copies_for(rollouts: Sequence[Rollout], scale: Scale) -> int:
    """Return how often to replay the rollouts so that their int32 routing fills the payload."""
    with open_store(None, fields=scale.fields()) as store:
        once = sum(_routing_bytes(store, rollout) for rollout in rollouts)
    return max(1, -(-scale.payload_bytes // once))


def _routing_bytes(store: Store, rollout: Rollout) -> int:
    session = store.session(rollout.session_id)
    rollout.record(session)
    return sum(record.arrays[ROUTED_EXPERTS].nbytes for record in session.records)


def _trim() -> None:
    """Give freed memory back, where the C library would keep it: what stays resident is held."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
