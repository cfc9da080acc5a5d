"""What the demo's actors do on a Ray cluster. Loads no model: they stay small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tq_fs.demo.compare import digest, name_of
from tq_fs.demo.scenario import Rollout
from tq_fs.session import Session
from tq_fs.trajectory import Segment

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Replay:
    """Plays sessions again that the model has played, under ids of their own."""

    rollouts: Mapping[str, Rollout]

    def play(self, session: Session) -> None:
        """Record every turn, each when the one before is safe."""
        name, _, _copy = session.session_id.rpartition(".")
        for turn in self.rollouts[name].turns:
            session.record(turn.received().step(session))


def take_digests(
    segments: Sequence[Segment], tensors: Mapping[str, Sequence[torch.Tensor]]
) -> dict[str, str]:
    """Return the digest of each tensor of a micro-batch: what this trainer learns."""
    return {
        name_of(segment, field): digest(tensor)
        for field, values in tensors.items()
        for segment, tensor in zip(segments, values, strict=True)
    }
