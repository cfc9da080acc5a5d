"""A trainer's place in a parallel layout, and what of each sample it uses. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tq_fs.errors import InvalidConfig
from tq_fs.fields import FieldSpec

Range = tuple[int, int]
Split = Literal["zigzag", "contiguous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How training is spread over ranks.

    Attributes
    ----------
    data
        Shards of the samples.
    tensor
        Ranks that share a layer; all of them use the same routing.
    pipeline
        Stages, each with layers of its own.
    context
        Ranks that share a sample's tokens.
    stages
        Layers of each pipeline stage; empty where all have equally many.
    split
        ``zigzag``: a sample is cut into twice as many chunks as there are context ranks, and rank r
        gets chunks r and 2·context - 1 - r, so that causal attention costs all the same (slime and
        Megatron). ``contiguous``: each gets one.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    stages: tuple[int, ...] = ()
    split: Split = "zigzag"

    def __post_init__(self) -> None:
        """Refuse layouts that cannot be."""
        for name in ("data", "tensor", "pipeline", "context"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{getattr(self, name)} ranks", subject=f"parallel.{name}")
        if self.stages and (len(self.stages) != self.pipeline or min(self.stages) < 0):
            raise InvalidConfig(
                f"{self.stages} for {self.pipeline} stages",
                subject="parallel.stages",
                remedy="give the layers of each stage",
            )
        if self.split not in ("zigzag", "contiguous"):
            raise InvalidConfig(f"{self.split!r}", subject="parallel.split")

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.data * self.shard_size

    @property
    def shard_size(self) -> int:
        """How many ranks train on the same samples."""
        return self.tensor * self.pipeline * self.context

    def ranks(self) -> list[Rank]:
        """Return all ranks by their number."""
        return [Rank(self, number) for number in range(self.size)]


@dataclass(frozen=True, slots=True)
class Rank:
    """One trainer's place. Tensor ranks follow each other, then context, data and pipeline ranks.

    Attributes
    ----------
    parallel
        The layout.
    number
        The place in it, from 0.
    """

    parallel: Parallel
    number: int

    @property
    def tensor(self) -> int:
        """Place among the ranks that share a layer."""
        return self.number % self.parallel.tensor

    @property
    def context(self) -> int:
        """Place among the ranks that share a sample's tokens."""
        return self.number // self.parallel.tensor % self.parallel.context

    @property
    def data(self) -> int:
        """Which shard of the samples it trains on."""
        inner = self.parallel.tensor * self.parallel.context
        return self.number // inner % self.parallel.data

    @property
    def pipeline(self) -> int:
        """Which stage it runs."""
        p = self.parallel
        return self.number // (p.tensor * p.context * p.data)

    @property
    def leads(self) -> bool:
        """Whether it releases its shard's Segments: one rank of each shard does."""
        return self.tensor == self.context == self.pipeline == 0

    def fields(self, specs: Sequence[FieldSpec]) -> list[str]:
        """Return the fields it uses: those with layers; on the last stage, of the loss, all."""
        last = self.pipeline == self.parallel.pipeline - 1
        return [spec.name for spec in specs if spec.layered or last]

    def layers(self, count: int) -> Range:
        """Return which of `count` recorded layers its stage runs, half-open.

        Raises
        ------
        InvalidConfig
            They cannot be shared out equally, or `stages` has other ones.
        """
        stages = self.parallel.stages or self._equal(count)
        if sum(stages) != count:
            raise InvalidConfig(f"{stages} for {count} layers", subject="parallel.stages")
        first = sum(stages[: self.pipeline])
        return first, first + stages[self.pipeline]

    def _equal(self, count: int) -> tuple[int, ...]:
        each, left = divmod(count, self.parallel.pipeline)
        if left:
            raise InvalidConfig(
                f"{count} layers in {self.parallel.pipeline} equal stages",
                subject="parallel.pipeline",
                remedy="give the layers of each stage: parallel.stages",
            )
        return (each,) * self.parallel.pipeline

    def tokens(self, length: int, spec: FieldSpec) -> list[Range]:
        """Return which tokens of a sample its part of a field belongs to, half-open.

        Routing belongs to the tokens that a rank feeds to the model; what is of tokens, such as
        logprobs, to those that it predicts, which come one later. Nobody predicts the first token:
        the first rank has it. Together the ranks have every row once.

        Parameters
        ----------
        length
            Of the sample, in tokens.
        spec
            The field.
        """
        ahead = 0 if spec.rows == "transitions" else 1
        count = self.parallel.context * (2 if self.parallel.split == "zigzag" else 1)
        size = -(-length // count)  # of a chunk; the last ones may be shorter, or empty
        mine = [self.context]
        if self.parallel.split == "zigzag":
            mine.append(count - 1 - self.context)
        return [(i * size + ahead * (i > 0), (i + 1) * size + ahead) for i in mine]
