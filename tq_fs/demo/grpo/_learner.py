"""The trainer: replays the rollout's routing, and takes one optimizer step an iteration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from tq_fs.demo.engine import TinyMoe
from tq_fs.demo.grpo._policy import clipped_loss
from tq_fs.trajectory import Segment

Tensors = Mapping[str, Sequence[torch.Tensor]]
MicroBatch = tuple[Sequence[Segment], Tensors]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far training's logprobs of generated tokens are from the rollout's.

    Attributes
    ----------
    mean, largest
        Absolute difference, in nats.
    """

    mean: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What one step was like.

    Attributes
    ----------
    loss
        Mean over the generated tokens, before the step.
    replayed, free
        Logprob gap with the rollout's routing, and with the router's own choice.
    tokens, micro_batches
        Generated tokens it was taken on, and in how many parts they were hydrated.
    """

    loss: float
    replayed: Gap
    free: Gap
    tokens: int
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration.

    Attributes
    ----------
    number
        From 0; the weight version that generated its rollouts.
    reward
        Mean over the sessions.
    taken
        Sessions that were found in the store, instead of being rolled out.
    learned
        What training on them was like.
    """

    number: int
    reward: float
    taken: int
    learned: Learned

    def plain(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Iteration:
        """Make one from plain values."""
        learned = dict(values["learned"])
        gaps = {name: Gap(**learned[name]) for name in ("replayed", "free")}
        return cls(**{**values, "learned": Learned(**{**learned, **gaps})})


class Learner:
    """A model in training, on one thread: the same rollouts give the same weights, to the bit.

    Sequences go through the model one by one and in the order given, so that gradients are summed
    in that order, however the micro-batches are cut.

    Parameters
    ----------
    moe
        The model; its float32 weights are trained.
    learning_rate, clip
        Of Adam, and of the clipped objective.
    dtype
        Of the training forward pass.
    """

    def __init__(
        self,
        moe: TinyMoe,
        *,
        learning_rate: float,
        clip: float,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.moe = moe
        self.optimizer = torch.optim.Adam(moe.model.parameters(), lr=learning_rate)
        self._clip = clip
        self._dtype = dtype

    def learn(
        self, batches: Iterable[MicroBatch], advantages: Mapping[str, float], *, tokens: int
    ) -> Learned:
        """Take one step on micro-batches of Segments.

        Parameters
        ----------
        batches
            Segments with their hydrated ``rollout_log_probs`` and ``rollout_routed_experts``; each
            is done with before the next is taken.
        advantages
            By session id.
        tokens
            Generated tokens of all of them, over which the loss is averaged.
        """
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[float] = []
        gaps: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        count = 0
        for segments, tensors in batches:
            count += 1
            columns = tensors["rollout_log_probs"], tensors["rollout_routed_experts"]
            for segment, rolled_out, routing in zip(segments, *columns, strict=True):
                advantage = advantages[segment.session_id]
                theirs = _generated(segment, rolled_out)
                with torch.no_grad():
                    gaps[False].append((self._logprobs(segment, None) - theirs).abs())
                ours = self._logprobs(segment, routing)
                gaps[True].append((ours.detach() - theirs).abs())
                loss = clipped_loss(ours, theirs, advantage, self._clip) / tokens
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(float(loss.detach()))
        self.optimizer.step()
        return Learned(
            loss=float(np.sum(losses)),
            replayed=_gap(gaps[True]),
            free=_gap(gaps[False]),
            tokens=tokens,
            micro_batches=count,
        )

    def _logprobs(self, segment: Segment, routing: torch.Tensor | None) -> torch.Tensor:
        """Return training's logprobs of a Segment's generated tokens, float32 ``[n]``."""
        logits = self.moe.forward(
            segment.tokens,
            routing=None if routing is None else routing.numpy(),
            dtype=self._dtype,
        )
        every = self.moe.token_logprobs(logits, segment.tokens)
        return _generated(segment, every[-segment.response_length :])


def _generated(segment: Segment, response: torch.Tensor) -> torch.Tensor:
    """Return what belongs to generated tokens of something ``[response_length]``; a copy."""
    mask = torch.from_numpy(segment.loss_mask[-segment.response_length :] == 1)
    return response[mask]


def _gap(parts: Sequence[torch.Tensor]) -> Gap:
    every = torch.cat(list(parts)).double()
    return Gap(mean=float(every.mean()), largest=float(every.max()))
