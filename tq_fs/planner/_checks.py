"""A workload and machines that contradict each other are refused."""

from __future__ import annotations

from tq_fs.errors import InvalidConfig
from tq_fs.planner._deployment import Deployment, Ranks
from tq_fs.planner._models import TYPE_BYTES
from tq_fs.planner._sizes import size_text
from tq_fs.planner._workload import Workload


def check_together(work: Workload, place: Deployment) -> None:
    """Refuse a workload and machines that contradict each other.

    Raises
    ------
    InvalidConfig
    """
    _check_layers(work, place.ranks)
    _check_ranks(work, place)
    if place.all_units > work.trajectories:
        raise InvalidConfig(
            f"{place.all_units:,} StorageUnits for {work.trajectories:,} trajectories",
            subject="units",
            remedy="a trajectory's Steps lie on one unit: have at most as many units",
        )
    least = sample_bytes(work, place)
    if 0 < place.micro_batch_bytes < least:
        raise InvalidConfig(
            f"{size_text(place.micro_batch_bytes)} hold no sample: a rank's part of one has "
            f"{size_text(least)}",
            subject="micro_batch_bytes",
            remedy="raise it, or use more pipeline or context ranks",
        )


def _check_layers(work: Workload, ranks: Ranks) -> None:
    layers = work.model.layers
    if layers % ranks.pipeline:
        fit = [str(n) for n in range(1, min(layers, 1000) + 1) if layers % n == 0]
        raise InvalidConfig(
            f"{layers} recorded layers in {ranks.pipeline} equal stages",
            subject="parallel pipeline",
            remedy=f"choose one of {', '.join(fit)}",
        )


def _check_ranks(work: Workload, place: Deployment) -> None:
    ranks, gpus = place.ranks, place.nodes * place.gpus
    needed = ranks.share * max(1, ranks.data)
    if needed > gpus:
        raise InvalidConfig(
            f"{needed:,} ranks on {gpus:,} GPUs",
            subject="parallel",
            remedy="use more nodes, or smaller parallel sizes",
        )
    if ranks.context > work.context:
        raise InvalidConfig(
            f"{ranks.context:,} ranks share {work.context:,} tokens", subject="parallel context"
        )
    if ranks.data > work.trajectories * work.segments:
        raise InvalidConfig(
            f"{ranks.data:,} shards of {work.trajectories * work.segments:,.0f} Segments",
            subject="parallel data",
            remedy="have at most as many shards as Segments",
        )


def sample_bytes(work: Workload, place: Deployment) -> int:
    """Return what a rank's part of one sample takes, hydrated [bytes].

    int32 ids of the rank's layers and tokens, and float32 logprobs.
    """
    ranks = place.ranks
    row = work.model.row_bytes("int32") // ranks.pipeline + TYPE_BYTES["int32"]
    return -(-work.context // ranks.context) * row
