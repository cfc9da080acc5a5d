"""Rollout routing replay (R3): training takes the experts that the rollout took.

A mixture of experts routes by a top-k, so a rounding error can send a token elsewhere in training
than in the rollout; its logprobs then differ by more than rounding. Replaying the recorded expert
ids takes the jump away, and the gradient still reaches the router through the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tq_fs.demo.compare import Tensors
from tq_fs.demo.engine import TinyMoe
from tq_fs.demo.scenario import Rollout
from tq_fs.trajectory import Segment

REPRODUCED = 1e-3  # logits; float32 sums in another order move them by about 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One Segment as training gets it.

    Attributes
    ----------
    segment
        For its tokens and loss mask.
    rollout
        The session it comes from, to check against.
    logprobs
        Hydrated ``rollout_log_probs``, float32 ``[response_length]``.
    routing
        Hydrated ``rollout_routed_experts``, int32 ``[T-1, layers, topk]``.
    """

    segment: Segment
    rollout: Rollout
    logprobs: torch.Tensor
    routing: torch.Tensor


def examples(rollout: Rollout, segments: Sequence[Segment], batch: Tensors) -> list[Example]:
    """Return the Segments of one rollout with what was hydrated for them."""
    fields = (batch["rollout_log_probs"], batch["rollout_routed_experts"])
    return [
        Example(segment=segment, rollout=rollout, logprobs=logprobs, routing=routing)
        for segment, logprobs, routing in zip(segments, *fields, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far training is from the rollout.

    Attributes
    ----------
    dtype
        Of the training forward pass.
    replay
        Whether it replayed the recorded routing.
    flipped
        Share of (token, layer) rows whose set of experts is not the rollout's.
    mean, largest
        Difference of rollout and training logprob over generated tokens.
    """

    dtype: str
    replay: bool
    flipped: float
    mean: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduced:
    """Whether float32 replay gives the logits that the rollout sampled from.

    Attributes
    ----------
    largest
        Largest difference of any logit.
    steps, skipped
        Steps compared, and Steps left out because the engine itself, when it read the history
        again, took another expert at a near-tie than the one recorded.
    """

    largest: float
    steps: int
    skipped: int

    @property
    def ok(self) -> bool:
        """Whether anything was compared, and all of it agreed."""
        return self.steps > 0 and self.largest < REPRODUCED


def reproduce(moe: TinyMoe, examples: Sequence[Example]) -> Reproduced:
    """Replay in float32 and compare with the logits each response was sampled from."""
    largest, steps, skipped = 0.0, 0, 0
    for example in examples:
        with torch.no_grad():
            logits = moe.forward(example.segment.tokens, routing=example.routing.numpy())
        for difference in _logit_differences(example, logits.numpy()):
            skipped += difference is None
            steps += difference is not None
            largest = max(largest, difference or 0.0)
    return Reproduced(largest=largest, steps=steps, skipped=skipped)


def _logit_differences(example: Example, logits: NDArray[np.float32]) -> Iterator[float | None]:
    """Yield, for each Step of a Segment, the largest difference; None where not comparable."""
    routing = np.sort(example.routing.numpy())
    for index in example.segment.steps:
        turn = example.rollout.turns[index]
        rows, new = len(turn.routed_experts), len(turn.response)
        if np.array_equal(np.sort(turn.routed_experts), routing[:rows]):
            yield float(np.abs(logits[rows - new : rows] - turn.logits).max())
        else:
            yield None


def gap(moe: TinyMoe, examples: Sequence[Example], dtype: torch.dtype, *, replay: bool) -> Gap:
    """Compare training's logprobs of generated tokens with the rollout's."""
    flips, gaps = [], []
    for example in examples:
        flips.append(0.0 if replay else flip_rate(moe, example, dtype))
        gaps.append(_gaps(moe, example, dtype, replay=replay))
    every = np.concatenate(gaps)
    return Gap(
        dtype=str(dtype).removeprefix("torch."),
        replay=replay,
        flipped=float(np.average(flips, weights=[len(e.routing) for e in examples])),
        mean=float(every.mean()),
        largest=float(every.max()),
    )


def flip_rate(moe: TinyMoe, example: Example, dtype: torch.dtype) -> float:
    """Return the share of (token, layer) rows that training by itself sends elsewhere."""
    chosen = moe.routing_of(example.segment.tokens, dtype)
    return float((np.sort(chosen) != np.sort(example.routing.numpy())).any(-1).mean())


def _gaps(
    moe: TinyMoe, example: Example, dtype: torch.dtype, *, replay: bool
) -> NDArray[np.float32]:
    tokens, routing = example.segment.tokens, example.routing.numpy() if replay else None
    with torch.no_grad():
        logits = moe.forward(tokens, routing=routing, dtype=dtype)
        logprobs = moe.token_logprobs(logits, tokens)[-len(example.logprobs) :]
    generated = example.segment.loss_mask[-len(example.logprobs) :] == 1
    gaps: NDArray[np.float32] = (logprobs - example.logprobs).abs().numpy()[generated]
    return gaps
