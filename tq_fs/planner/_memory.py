"""Peak memory of a batch's trajectories on each of three paths, by component."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tq_fs.planner._calibration import HOLDERS, UNIT, Calibration, Traffic
from tq_fs.planner._deployment import Deployment
from tq_fs.planner._fields import CENTRAL_TOKEN_BYTES, LOGPROB_BYTES
from tq_fs.planner._sizes import MiB
from tq_fs.planner._workload import Workload

# Bounds that tq-fs is held to by its benchmarks; what was measured is below them.
UNIT_EXTRA_BYTES = 128 * MiB  # of a StorageUnit, beyond its budget
STEP_BYTES = 600  # of the Controller, for each Step that it knows


@dataclass(frozen=True, slots=True, kw_only=True)
class PathMemory:
    """Peaks of one path.

    Attributes
    ----------
    master
        Peak of each component on the master node [bytes].
    total
        Peak of their sum on the master node [bytes].
    worker
        Peak on any other node [bytes].
    """

    master: Mapping[str, float]
    total: float
    worker: float


def central_memory(work: Workload, place: Deployment, known: Calibration) -> PathMemory:
    """Plan the centralized path: large fields in the Proxy, the RolloutManager and Ray's store."""
    del place  # everything is on the master, however many nodes there are
    base, tokens = known.traffic, _tokens_factor(work, known.traffic)
    routed = CENTRAL_TOKEN_BYTES["logprobs"]
    share = base.row_bytes / (base.row_bytes + routed)
    rows = work.model.row_bytes(work.central_type) / base.row_bytes
    large = tokens * (share * rows + 1 - share)
    master = {
        name: known.central.idle.get(name, 0.0)
        + known.resident(name) * tokens
        + known.large(name) * large
        for name in HOLDERS
    }
    return PathMemory(
        master=master, total=sum(master.values()) * known.central.together, worker=0.0
    )


def queue_memory(work: Workload, place: Deployment, known: Calibration) -> PathMemory:
    """Plan a queue in memory: the large fields lie in StorageUnits over all nodes."""
    tokens = _tokens_factor(work, known.traffic)
    master = {
        name: known.queue.idle.get(name, 0.0) + known.resident(name) * tokens for name in HOLDERS
    }
    unit = unit_factor(work, place, known.traffic) * known.queue.grown(UNIT)
    master[UNIT] = unit + known.queue.idle.get(UNIT, 0.0)
    return PathMemory(
        master=master, total=sum(master.values()) * known.queue.together, worker=master[UNIT]
    )


def unit_factor(work: Workload, place: Deployment, base: Traffic) -> float:
    """Return how many times what it held when measured the master's StorageUnit holds."""
    share = base.row_bytes / (base.row_bytes + LOGPROB_BYTES)
    rows = work.model.row_bytes(work.stored_type) / base.row_bytes
    before = math.ceil(base.units / base.nodes) / base.units  # of all data, on the master
    after = place.master_units / place.all_units
    return _tokens_factor(work, base) * (share * rows + 1 - share) * after / before


def store_memory(work: Workload, place: Deployment, known: Calibration) -> PathMemory:
    """Plan tq-fs: the large fields are on disk; memory is bounded by configuration."""
    peaks = known.store or known.queue
    tokens = _tokens_factor(work, known.store_traffic or known.traffic)
    master = {n: peaks.idle.get(n, 0.0) + peaks.grown(n) * tokens for n in HOLDERS}
    resident = sum(master.values()) * peaks.together
    bounded = {
        "writer": float(place.writer_bytes),
        "controller": STEP_BYTES * work.steps * place.checkpoint_batches,
        UNIT: float(place.master_units * (place.unit_bytes + UNIT_EXTRA_BYTES)),
    }
    return PathMemory(
        master=master | bounded, total=resident + sum(bounded.values()), worker=bounded[UNIT]
    )


Planned = Callable[[Workload, Deployment, Calibration], PathMemory]
PATHS: Mapping[str, Planned] = {
    "central": central_memory,
    "transfer_queue": queue_memory,
    "tq_fs": store_memory,
}


def exceeding_batch(path: str, work: Workload, place: Deployment, known: Calibration) -> int | None:
    """Return the smallest batch whose peak on the master exceeds the node's memory.

    None where none does. Peaks are linear in the batch.
    """
    one, two = (PATHS[path](replace(work, batch=batch), place, known).total for batch in (1, 2))
    return first_above(place.host_bytes, each=two - one, constant=2 * one - two)


def first_above(limit: float, *, each: float, constant: float = 0.0) -> int | None:
    """Return the smallest n, at least 1, with ``constant + n * each > limit``."""
    if each <= 0:
        return 1 if constant > limit else None
    return max(1, math.floor((limit - constant) / each) + 1)


def _tokens_factor(work: Workload, base: Traffic) -> float:
    return work.tokens / base.tokens
