"""Memory that trainers take while they hydrate."""

from __future__ import annotations

from dataclasses import dataclass

from tq_fs.planner._checks import sample_bytes
from tq_fs.planner._deployment import Deployment
from tq_fs.planner._fields import LOGPROB_BYTES
from tq_fs.planner._sizes import MiB
from tq_fs.planner._workload import Workload

LEAST_BUDGET_BYTES = 256 * MiB
CACHE_BYTES = 64 * MiB  # of a reader: decoded chunks of Steps that Segments share
BLOCKS = 2  # a micro-batch in use, and the next one that is read meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Hydration:
    """What hydrated fields take in the host memory of trainers, in bytes.

    Attributes
    ----------
    shard
        A whole data-parallel shard with all rows and layers, as int32 and float32: what a rank
        takes that hydrates at once.
    shard_node
        The same for a node's ranks, each of which has a copy.
    sample
        A rank's part of one sample.
    budget
        A rank's micro-batch.
    rank
        What a rank takes that hydrates micro-batch by micro-batch: two of them and its cache.
    node
        The same for a node's ranks.
    """

    shard: float
    shard_node: float
    sample: int
    budget: int
    rank: int
    node: int


def hydration(work: Workload, place: Deployment) -> Hydration:
    """Plan the memory of trainers."""
    shards = min(place.data, work.trajectories * work.segments)  # a Segment is not cut for them
    shard = (work.r3_bytes("int32") + work.tokens * LOGPROB_BYTES) / shards
    sample = sample_bytes(work, place)
    budget = place.micro_batch_bytes or max(LEAST_BUDGET_BYTES, sample)
    rank = BLOCKS * budget + CACHE_BYTES
    return Hydration(
        shard=shard,
        shard_node=shard * place.node_ranks,
        sample=sample,
        budget=budget,
        rank=rank,
        node=rank * place.node_ranks,
    )
