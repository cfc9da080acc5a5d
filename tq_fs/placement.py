"""On which unit a session is recorded: rendezvous hashing, weighted by free space. Pure.

Every process that knows the same weights comes to the same order, and a unit that joins or leaves
changes nothing for sessions that it does not take or had. Weights are coarse, powers of two, so
that they change seldom. Source of the score: J. Schindelhauer and G. Schomaker, "Weighted
Distributed Hash Tables", SPAA 2005.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

GiB = 1024**3
_SLACK = 1.25  # how far free space passes a bound before the weight follows
_MOST = 1 << 14


def rank(key: str, weights: Mapping[str, int]) -> list[str]:
    """Return the units in the order in which they are to be asked to take a session.

    Parameters
    ----------
    key
        Names the session.
    weights
        By unit; one of 0 takes nothing.
    """
    scores = {unit: _score(unit, key, weight) for unit, weight in weights.items() if weight}
    return sorted(scores, key=lambda unit: (scores[unit], unit))


def _score(unit: str, key: str, weight: int) -> float:
    digest = hashlib.blake2b(f"{unit}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8)
    uniform = (int.from_bytes(digest.digest()) + 0.5) / 2**64
    return -math.log(uniform) / weight


def weight_of(free_bytes: int, before: int = 0) -> int:
    """Return a unit's weight: the power of two at or below its free GiB, and 1 below one.

    Parameters
    ----------
    before
        The weight it had, which is kept while the free space is near its bounds.
    """
    free = free_bytes / GiB
    if before and before / _SLACK <= free < 2 * before * _SLACK:
        return before
    return min(_MOST, 1 << max(0, math.floor(math.log2(free)))) if free >= 1 else 1
