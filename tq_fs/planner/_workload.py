"""What is rolled out in a batch."""

from __future__ import annotations

from dataclasses import dataclass

from tq_fs.errors import InvalidConfig
from tq_fs.planner._models import RoutedModel
from tq_fs.planner._sizes import above_zero, at_least_one


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The trajectories of one training step.

    Attributes
    ----------
    model
        Whose routing is recorded.
    context
        Tokens of a Segment; the plan takes every Segment to be this long.
    batch
        Prompts of a batch.
    samples
        Trajectories for each prompt.
    segments
        Mean Segments of a trajectory, each `context` long.
    turns
        Model invocations, Steps, that make a Segment up.
    mode
        ``tito``: a Step stores the tokens it adds. ``snapshot``: all tokens so far, so that the
        stored tokens grow with the square of the turns.
    stored
        Type of the stored ids: ``uint8``, ``uint16``, ``int32``, or ``auto`` for the narrowest.
    central
        Type of the ids on the centralized path. The same choice, independent of the store.
    """

    model: RoutedModel
    context: int
    batch: int = 512
    samples: int = 8
    segments: float = 1.0
    turns: int = 16
    mode: str = "tito"
    stored: str = "auto"
    central: str = "int32"

    def __post_init__(self) -> None:
        """Refuse workloads that contradict themselves."""
        for name in ("context", "batch", "samples", "turns"):
            at_least_one(name, getattr(self, name))
        above_zero("segments", self.segments)
        if self.mode not in ("tito", "snapshot"):
            raise InvalidConfig(f"{self.mode!r}", subject="mode", remedy="tito or snapshot")
        if self.turns > self.context:
            raise InvalidConfig(
                f"{self.turns:,} turns in a Segment of {self.context:,} tokens",
                subject="turns",
                remedy="each turn has at least one token",
            )
        for name in (self.stored, self.central):
            self.model.stored_type(name)

    @property
    def trajectories(self) -> int:
        """Rollout sessions of a batch."""
        return self.batch * self.samples

    @property
    def stored_type(self) -> str:
        """Type of the stored ids."""
        return self.model.stored_type(self.stored)

    @property
    def central_type(self) -> str:
        """Type of the ids on the centralized path."""
        return self.model.stored_type(self.central)

    @property
    def growth(self) -> float:
        """Tokens recorded for each token of a Segment: 1, or (turns + 1) / 2 in snapshot mode.

        There turn k of n records k/n of the Segment, and each Step is a Segment of its own.
        """
        return 1.0 if self.mode == "tito" else (self.turns + 1) / 2

    @property
    def tokens(self) -> float:
        """Tokens recorded for a batch."""
        return self.context * self.trajectories * self.segments * self.growth

    @property
    def steps(self) -> float:
        """Model invocations of a batch."""
        return self.trajectories * self.segments * self.turns

    def r3_bytes(self, dtype: str) -> float:
        """Return the bytes of a batch's routed-expert ids [bytes]."""
        return self.tokens * self.model.row_bytes(dtype)
