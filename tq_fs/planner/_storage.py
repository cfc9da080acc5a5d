"""Space, bandwidth and requests that a batch needs where it is stored."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tq_fs.planner._deployment import Deployment
from tq_fs.planner._fields import LOGPROB_BYTES, stored_fields
from tq_fs.planner._sizes import KiB, MiB
from tq_fs.planner._workload import Workload

STEP_FILES_BYTES = 32 * KiB  # five files and three folders of a Step, in blocks of 4 KiB
RUN_BYTES = 4 * MiB  # longest range of one GET
MANIFEST_PUTS = 2  # of a finalized trajectory: its resident fields, and its manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Bytes on NVMe until a model checkpoint lets them go.

    Attributes
    ----------
    total, node
        Of all nodes, and of the fullest one.
    tito, snapshot
        What `total` is, or would be, in either mode.
    """

    total: float
    node: float
    tito: float
    snapshot: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bytes a second, on average: of all nodes, and of the fullest one."""

    write: float
    write_node: float
    read: float
    read_node: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Requests of one batch to an object store, in the compact layout.

    Attributes
    ----------
    put
        One object for each field and the group's ``zarr.json`` a Step; two for each trajectory.
    get
        Of trainers without a cache on their nodes.
    list
        One to finalize a trajectory, three to release it.
    objects
        That lie there, and are deleted later.
    """

    put: int
    get: int
    list: int
    objects: int


def space(work: Workload, place: Deployment) -> Space:
    """Plan the room on NVMe."""
    total = _kept(work, place)
    return Space(
        total=total,
        node=total * place.master_units / place.all_units,
        tito=_kept(replace(work, mode="tito"), place),
        snapshot=_kept(replace(work, mode="snapshot"), place),
    )


def _kept(work: Workload, place: Deployment) -> float:
    batch = sum(stored_fields(work).values()) + work.steps * STEP_FILES_BYTES
    return batch * place.checkpoint_batches


def bandwidth(work: Workload, place: Deployment) -> Bandwidth:
    """Plan the bandwidth of the disks; every tensor rank reads what its layers need."""
    stored, share = sum(stored_fields(work).values()), place.master_units / place.all_units
    write = stored / place.rollout_s
    read = stored * place.ranks.tensor / place.train_s
    return Bandwidth(write=write, write_node=write * share, read=read, read_node=read * share)


def requests(work: Workload, place: Deployment) -> Requests:
    """Plan the requests to an object store."""
    fields = len(stored_fields(work))
    put = math.ceil(work.steps * (fields + 1)) + MANIFEST_PUTS * work.trajectories
    tokens = work.tokens / work.steps
    routed = tokens * work.model.row_bytes(work.stored_type) / place.ranks.pipeline
    reads = place.ranks.pipeline * _runs(routed) + _runs(tokens * LOGPROB_BYTES)
    return Requests(
        put=put,
        get=math.ceil(work.steps * reads * place.ranks.tensor),
        list=4 * work.trajectories,
        objects=put,
    )


def _runs(nbytes: float) -> int:
    return max(1, math.ceil(nbytes / RUN_BYTES))
