"""Group-relative policy optimization: advantages, and the clipped loss. Pure.

Each prompt is rolled out several times; what a session gets is told from the others of its group
(Shao et al., 2024), and a token's probability is compared with the one it was generated with
(the clipped objective of PPO, Schulman et al., 2017).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from tq_fs.trajectory import Segment

_LOWERCASE = range(ord("a"), ord("z") + 1)  # of the byte-level tokenizer, a byte is its own id


def reward(segments: Sequence[Segment]) -> float:
    """Return the share of lowercase letters among all that a session has generated, 0 to 1."""
    generated = np.concatenate([s.tokens[s.loss_mask == 1] for s in segments])
    letters = (generated >= _LOWERCASE.start) & (generated < _LOWERCASE.stop)
    return float(letters.sum()) / max(1, len(generated))


def advantages(rewards: Mapping[str, float], groups: Mapping[str, str]) -> dict[str, float]:
    """Return how far each session is above its group, in standard deviations of the group.

    Parameters
    ----------
    rewards
        By session id.
    groups
        The group of each session.
    """
    members: dict[str, list[str]] = {}
    for name in sorted(rewards):
        members.setdefault(groups[name], []).append(name)
    found = {}
    for names in members.values():
        values = [rewards[name] for name in names]
        mean = math.fsum(values) / len(values)
        spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
        found.update({n: (v - mean) / (spread + 1e-6) for n, v in zip(names, values, strict=True)})
    return found


def clipped_loss(
    trained: torch.Tensor, rolled_out: torch.Tensor, advantage: float, clip: float
) -> torch.Tensor:
    """Return the loss of some generated tokens, summed.

    Parameters
    ----------
    trained
        Their logprobs in training, float32 ``[n]``, with gradient.
    rolled_out
        Their logprobs in the rollout, float32 ``[n]``.
    advantage
        Of their session.
    clip
        How far from 1 the ratio of both probabilities is followed.
    """
    ratio = torch.exp(trained - rolled_out)
    bounded = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantage, bounded * advantage).sum()
