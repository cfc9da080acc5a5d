"""Trainer: one rank, which reads its part of its shard micro-batch by micro-batch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import ray

from tq_fs.fields import FieldSpec
from tq_fs.rollout._calls import gather
from tq_fs.rollout._ranks import Parallel, Rank
from tq_fs.rollout._reading import ShardReader
from tq_fs.rollout._shards import Shard
from tq_fs.rollout._store import open_here
from tq_fs.trajectory import Segment
from tq_fs.units import Passed

if TYPE_CHECKING:
    import torch

MiB = 1024**2


class Step(Protocol):
    """What a rank does with a micro-batch."""

    def __call__(
        self, segments: Sequence[Segment], tensors: Mapping[str, Sequence[torch.Tensor]]
    ) -> Any:
        """Train on some Segments; what it returns is small, and reported.

        Parameters
        ----------
        segments
            The Segments, with their tokens and loss masks; the loss mask of one that training
            ignores is all 0, as its fields are.
        tensors
            Slime's fields, this rank's layers and tokens of them: a tensor for each Segment, which
            is overwritten as soon as the next micro-batch is taken.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Settings of all trainers.

    Attributes
    ----------
    store_id
        The store on this Ray cluster; None for the in-memory path.
    fields
        Declared per-token fields.
    parallel
        How training is spread over ranks.
    consumer
        In whose name Segments are released.
    budget_bytes
        Bytes of a micro-batch's tensors; a rank holds two.
    routed_layers
        Layers of the model that have a router, and whose routes may not be all 0; None for all
        that are recorded.
    barrier_s
        Seconds for which ranks wait for each other.
    restarts
        How often Ray starts a rank again that ended, with the rollout it was at.
    cpus
        Of each rank, as Ray counts them.
    """

    store_id: str | None
    fields: tuple[FieldSpec, ...]
    parallel: Parallel
    consumer: str = "train"
    budget_bytes: int = 64 * MiB
    routed_layers: tuple[int, ...] | None = None
    barrier_s: float = 600.0
    restarts: int = 1
    cpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What one rank did with a rollout.

    Attributes
    ----------
    rank
        Its number.
    node
        Id of its node.
    segments, micro_batches, tensor_bytes
        What it trained on.
    channel_bytes, file_bytes
        What it read for that from units of other nodes, and from files of its own.
    foreign_units
        Units of other nodes whose files it opened: none.
    results
        What its step returned, by micro-batch.
    """

    rank: int
    node: str
    segments: int
    micro_batches: int
    tensor_bytes: int
    channel_bytes: int
    file_bytes: int
    foreign_units: tuple[str, ...]
    results: tuple[Any, ...]


class Trainer:
    """An actor: one rank.

    Parameters
    ----------
    config
        Settings.
    number
        The rank.
    step
        Is called with each micro-batch.
    """

    def __init__(self, config: TrainerConfig, number: int, step: Step) -> None:
        self._config = config
        self._rank = Rank(config.parallel, number)
        self._step = step
        self._node = ray.get_runtime_context().get_node_id()
        self._store = open_here(config.store_id, config.fields, consumers=[config.consumer])
        self._reader = ShardReader(
            self._store,
            config.fields,
            self._rank,
            budget_bytes=config.budget_bytes,
            routed_layers=config.routed_layers,
        )

    def train(self, shard: Shard, barrier: Any) -> Trained:
        """Train on a shard; return once all ranks have, and every shard was released.

        The release is held back until a checkpoint was saved: until then a run that starts again
        finds everything still there.

        Parameters
        ----------
        shard
            Of this rank's data-parallel place.
        barrier
            An actor of :class:`Barrier`, the same for all ranks.

        Raises
        ------
        RanksMissing
            Others did not come in time; nothing of the shard was released.
        RowCountMismatch, WidthChanged, InvalidField
            What was read is not what training asks of a Segment; nothing was released.
        TqFsError
        """
        segments: list[Segment] = ray.get(shard.segments)
        before = self._store.passed()
        tensor_bytes, results = 0, []
        about = f"rollout {shard.rollout_id}"
        for mine, tensors in self._reader.read(segments, removed=shard.removed, about=about):
            tensor_bytes += sum(t.nbytes for values in tensors.values() for t in values)
            results.append(self._step(mine, tensors))
        passed = self._store.passed()
        self._meet(barrier, f"shard {shard.data}", shard, self._config.parallel.shard_size)
        if self._rank.leads:
            self._store.release(segments, self._config.consumer, rollout_id=shard.rollout_id)
        self._meet(barrier, "all shards", shard, self._config.parallel.size)
        return Trained(
            rank=self._rank.number,
            node=self._node,
            segments=len(segments),
            micro_batches=len(results),
            tensor_bytes=tensor_bytes,
            channel_bytes=passed.received_bytes - before.received_bytes,
            file_bytes=passed.file_bytes - before.file_bytes,
            foreign_units=_foreign(passed, self._node),
            results=tuple(results),
        )

    def _meet(self, barrier: Any, group: str, shard: Shard, count: int) -> None:
        gather([barrier.arrive.remote(group, shard.rollout_id, self._rank.number, count)])

    def checkpoint_saved(self, rollout_id: int) -> int:
        """Let go of what a checkpoint has used; return how many Steps that deleted."""
        return self._store.checkpoint_saved(rollout_id)

    def pid(self) -> int:
        """Return the process, for operators and tests."""
        return os.getpid()

    def close(self) -> None:
        """Close the store; idempotent."""
        self._store.close()


def _foreign(passed: Passed, node: str) -> tuple[str, ...]:
    return tuple(sorted(unit for unit, where in passed.files.items() if where != node))
