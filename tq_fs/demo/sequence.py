"""One sequence, generated a token at a time, so that it can be ended at any of them.

`TinyMoe.generate` computes a batch, whose shape changes the order of float sums. Here a sequence is
always computed by itself: what comes of it depends on its tokens, its settings and the weights, and
not on what else runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tq_fs.demo.engine import TinyMoe
from tq_fs.demo.routers import recorded, stacked


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes
    ----------
    temperature
        0 takes the most probable token.
    top_p
        Draw among the fewest tokens that together are at least so probable, in ``(0, 1]``.
    top_k
        Draw among so many tokens; -1: all.
    seed
        Of the draws, at least 0. The draw for a position depends on this and the position alone: a
        sequence that was cut off and goes on draws what it would have drawn.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """One forward pass: the prompt's first, then one for each token.

    Attributes
    ----------
    token, logprob
        What was drawn after it, and its log-probability at temperature 1.
    fed_logprobs
        float32 ``[fed - 1]``: of the tokens that went in, but the first.
    routed_experts
        int32 ``[fed, layers, topk]``: experts of the tokens that went in.
    """

    token: int
    logprob: np.float32
    fed_logprobs: NDArray[np.float32]
    routed_experts: NDArray[np.int32]


def passes(moe: TinyMoe, prompt: NDArray[Any], sampling: Sampling) -> Iterator[Pass]:
    """Continue a prompt without end.

    Several threads may do so with one model at once, each with torch in one thread: sums are the
    same to the bit only where they are split in the same way.

    Parameters
    ----------
    moe
        Not changed before the iterator is left.
    prompt
        Integers ``[P]``, P at least 1, all in the model's vocabulary.
    """
    ids, cache, length = torch.from_numpy(np.asarray(prompt, np.int64)), None, len(prompt)
    while True:
        with torch.no_grad(), recorded(moe.layers) as chosen:
            out = moe.model(input_ids=ids[None], cache=cache, use_cache=True)
            logits, cache = out.logits[0], out.cache
            token = _drawn(logits[-1], sampling, length)
            after = torch.cat([ids[1:], torch.tensor([token])])
            logprobs = torch.log_softmax(logits, dim=-1).gather(1, after[:, None])[:, 0].numpy()
        yield Pass(
            token=token,
            logprob=logprobs[-1],
            fed_logprobs=logprobs[:-1],
            routed_experts=stacked(chosen, 1)[0],
        )
        ids, length = after[-1:], length + 1


def _drawn(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """Return the token at a position of the sequence, drawn from logits ``[vocab]``."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    probable = torch.softmax(logits.double() / sampling.temperature, dim=-1)
    order = torch.argsort(probable, descending=True, stable=True)
    sorted_ = probable[order]
    sorted_[sorted_.cumsum(0) - sorted_ >= sampling.top_p] = 0.0
    if sampling.top_k > 0:
        sorted_[sampling.top_k :] = 0.0
    kept = int(torch.count_nonzero(sorted_))
    cumulative = sorted_[:kept].cumsum(0)
    draw = np.random.default_rng((sampling.seed, position)).random()
    rank = int(torch.searchsorted(cumulative, draw * cumulative[-1], right=True))
    return int(order[min(rank, kept - 1)])
