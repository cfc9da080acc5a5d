"""What ``tq-fs bench memory`` is asked for, and what it saw: plain values, which pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

GiB = 1024**3

CENTRAL, QUEUE, NVME, S3 = "central", "transfer_queue", "nvme", "s3"
PATHS = (CENTRAL, QUEUE, NVME, S3)
PATH_NAMES = {
    CENTRAL: "centralized",
    QUEUE: "TransferQueue",
    NVME: "tq-fs NVMe",
    S3: "tq-fs S3",
}
# The master's data plane, as the seed of this project defines it; trainers are seen beside it.
COMPONENTS = ("proxy", "rollout_manager", "object_store", "controller", "storage_unit")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBench:
    """Settings of the experiment.

    Attributes
    ----------
    payloads
        Stored bytes of the large fields that pass, for each run of tq-fs's paths, ascending. The
        other paths are run with the first only, which all are compared at.
    paths
        Which are taken, of :data:`PATHS`.
    rollouts
        That follow each other; the payload is spread over them evenly.
    segments
        Of a trajectory: its history is rewritten in between.
    steps
        Of a Segment.
    tokens
        Of a Step.
    layers, topk, experts
        Of the model; ids are stored in `dtype`.
    dtype
        ``uint8`` or ``uint16``, in all paths.
    trainers
        Data-parallel ranks.
    train_share
        How fast training is against rollout, below 1: rollouts outrun it and wait.
    root
        Folder for everything; None for a temporary one.
    """

    payloads: tuple[int, ...] = (1 * GiB, 2 * GiB, 4 * GiB)
    paths: tuple[str, ...] = PATHS
    rollouts: int = 8
    segments: int = 3
    steps: int = 4
    tokens: int = 2048
    layers: int = 40
    topk: int = 8
    experts: int = 256
    dtype: str = "uint16"
    trainers: int = 2
    train_share: float = 0.5
    root: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Memory at one time.

    Attributes
    ----------
    clock_s
        Since the first rollout began; of the idle sample since the watch was made.
    components
        Bytes of each of :data:`COMPONENTS`: PSS of its processes, of the object store its used
        bytes; 0 where a path has no such component.
    trainers
        PSS of all trainers.
    page_cache
        Bytes of the store's files that the kernel keeps in memory.
    """

    clock_s: float
    components: Mapping[str, int]
    trainers: int
    page_cache: int

    @property
    def total(self) -> int:
        """The master's data plane."""
        return sum(self.components.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One rollout's generation or training: begin and end on the samples' clock."""

    name: str  # "rollout" or "training"
    rollout: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One path with one payload.

    Attributes
    ----------
    path
        Of :data:`PATHS`.
    payload_bytes
        Stored bytes of the large fields that passed, each once.
    trajectories, segments, tokens
        Counts over all rollouts.
    most_waiting
        Most rollouts that were generated and not yet trained on.
    idle
        The same processes, started and warm, before the first rollout.
    samples
        In order of time.
    phases
        What happened when.
    digests
        Digest (BLAKE2b) of each tensor that a trainer got, by Segment and field.
    """

    path: str
    payload_bytes: int
    trajectories: int
    segments: int
    tokens: int
    most_waiting: int
    idle: Sample
    samples: Sequence[Sample]
    phases: Sequence[Phase]
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything that was seen.

    Attributes
    ----------
    bench
        Its settings.
    place
        The file system and the object store, in words.
    runs
        In the order in which they ran.
    absent
        Why a path that was asked for was not taken, by its name.
    """

    bench: MemoryBench
    place: str
    runs: Sequence[Run]
    absent: Mapping[str, str] = field(default_factory=dict)
