"""A rollout's Segments, shared out among data-parallel ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tq_fs.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """What one data-parallel rank trains on; small: its Segments are fetched through Ray.

    Attributes
    ----------
    rollout_id
        Number of the rollout; rises.
    data
        The data-parallel rank.
    count, tokens
        Of its Segments.
    segments
        Ray's reference of the list of them.
    removed
        Places in that list of those that training ignores: they are read by nobody, have zeros in
        place of their fields, and are released with the others.
    """

    rollout_id: int
    data: int
    count: int
    tokens: int
    segments: Any
    removed: frozenset[int] = frozenset()


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Share out samples so that all parts have about equally many tokens.

    The longest goes first, always to the part that has least: no part has more than 4/3 of what
    the best way would give the fullest (Graham, 1969).

    Returns
    -------
    list of list of int
        Indexes of each part, ascending.

    Raises
    ------
    InvalidConfig
        There are fewer samples than parts: ranks without samples would wait in vain for others.
    """
    if len(lengths) < parts:
        raise InvalidConfig(
            f"{len(lengths)} samples for {parts} data-parallel ranks",
            subject="a rollout",
            remedy="roll out more sessions, or train on fewer ranks",
        )
    heap = [(0, 0, part) for part in range(parts)]
    chosen: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens, count, part = heap[0]
        heapq.heapreplace(heap, (tokens + lengths[index], count + 1, part))
        chosen[part].append(index)
    return [sorted(part) for part in chosen]
