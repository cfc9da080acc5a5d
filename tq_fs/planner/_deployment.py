"""The machines, and how training is spread over them."""

from __future__ import annotations

from dataclasses import dataclass

from tq_fs.errors import InvalidConfig
from tq_fs.planner._sizes import MiB, above_zero, at_least_one


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How training is spread over ranks.

    Attributes
    ----------
    data
        Shards of the samples; 0 for as many as the GPUs allow.
    tensor
        Ranks that share a layer, all of which use the same routing.
    pipeline
        Stages with equally many of the recorded layers.
    context
        Ranks that share a sample's tokens.
    """

    data: int = 0
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes below one."""
        for name in ("tensor", "pipeline", "context"):
            at_least_one(f"parallel {name}", getattr(self, name))
        if self.data < 0:
            raise InvalidConfig(f"{self.data} is below 0", subject="parallel data")

    @property
    def share(self) -> int:
        """Ranks that train on the same samples."""
        return self.tensor * self.pipeline * self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The machines, and the bounds that a store is configured with.

    Attributes
    ----------
    nodes
        Nodes of the cluster, the master one of them.
    units
        StorageUnits over all nodes; 0 for one a node.
    gpus
        GPUs of a node, each a trainer's rank.
    host_bytes
        Memory of a node [bytes].
    ranks
        How training is spread over the GPUs.
    micro_batch_bytes
        Budget of a micro-batch's tensors on a rank [bytes]; 0 for what one sample needs, and
        256 MiB at least.
    unit_bytes
        Budget of a StorageUnit: Steps received and not on disk yet [bytes].
    writer_bytes
        The same in the Proxy's writer [bytes].
    checkpoint_batches
        Batches whose Steps are kept until a model checkpoint is saved.
    rollout_s, train_s
        Seconds for a batch's rollout, and for training on it.
    """

    nodes: int = 8
    units: int = 0
    gpus: int = 8
    host_bytes: int = 2 * 10**12
    ranks: Ranks = Ranks()
    micro_batch_bytes: int = 0
    unit_bytes: int = 512 * MiB
    writer_bytes: int = 1024 * MiB
    checkpoint_batches: int = 1
    rollout_s: float = 1800.0
    train_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse machines that cannot be."""
        names = ("nodes", "gpus", "host_bytes", "unit_bytes", "writer_bytes", "checkpoint_batches")
        for name in names:
            at_least_one(name, getattr(self, name))
        for name in ("units", "micro_batch_bytes"):
            if getattr(self, name) < 0:
                raise InvalidConfig(f"{getattr(self, name)} is below 0", subject=name)
        for name in ("rollout_s", "train_s"):
            above_zero(name, getattr(self, name))

    @property
    def all_units(self) -> int:
        """StorageUnits over all nodes."""
        return self.units or self.nodes

    @property
    def master_units(self) -> int:
        """StorageUnits of the fullest node, which the plan takes the master to be."""
        return -(-self.all_units // self.nodes)

    @property
    def data(self) -> int:
        """Shards of the samples."""
        return self.ranks.data or self.nodes * self.gpus // self.ranks.share

    @property
    def node_ranks(self) -> int:
        """Trainer ranks of a node that is full of them, at most one a GPU."""
        return min(self.gpus, self.data * self.ranks.share)
