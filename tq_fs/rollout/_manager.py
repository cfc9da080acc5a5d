"""RolloutManager: asks the Proxies for a rollout, and shards its Segments."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from tq_fs.errors import InvalidConfig
from tq_fs.rollout._calls import gather
from tq_fs.rollout._object_store import ObjectStoreWatch
from tq_fs.rollout._shards import Shard, balance
from tq_fs.trajectory import Segment


class Keep(Protocol):
    """Decides which of a rollout's Segments are trained on: groups of equal rewards teach nothing.

    Those it leaves out stay in the rollout as removed ones, so that each rank has as many as it
    waits for, and their Steps are released with the others'.
    """

    def __call__(self, segments: Sequence[Segment]) -> Sequence[bool]:
        """Return for each of all Segments of a rollout whether it is trained on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """A rollout, ready to be trained on.

    Attributes
    ----------
    rollout_id
        Its number.
    shards
        One for each data-parallel rank.
    object_store_bytes
        By how much Ray's object stores grew while it was made, on all nodes together.
    """

    rollout_id: int
    shards: tuple[Shard, ...]
    object_store_bytes: int


class RolloutManager:
    """An actor. Holds Segments only until they are sharded; shards live as long as they are used.

    Parameters
    ----------
    proxies
        Actors of :class:`Proxy`.
    data
        Data-parallel ranks.
    at_once
        Sessions that each Proxy is asked for at a time.
    keep
        Which Segments are trained on; None for all.
    """

    def __init__(
        self, proxies: Sequence[Any], *, data: int, at_once: int = 2, keep: Keep | None = None
    ) -> None:
        self._proxies = list(proxies)
        self._data = data
        self._at_once = at_once
        self._keep = keep

    def generate(self, rollout_id: int, session_ids: Sequence[str]) -> Rollout:
        """Roll out sessions and return them in shards that are balanced by tokens.

        Raises
        ------
        ActorLost
            A Proxy ended.
        InvalidConfig
            There are fewer Segments than data-parallel ranks, or `keep` did not speak of all.
        TqFsError
            What a Proxy raised.
        """
        with ObjectStoreWatch() as watch:
            segments = self._collect(session_ids)
            removed = self._removed(segments)
            parts = balance([len(segment.tokens) for segment in segments], self._data)
            shards = tuple(
                _shard(rollout_id, data, [segments[i] for i in part], [removed[i] for i in part])
                for data, part in enumerate(parts)
            )
        return Rollout(rollout_id=rollout_id, shards=shards, object_store_bytes=watch.growth_bytes)

    def pid(self) -> int:
        """Return the process, for operators and benchmarks."""
        return os.getpid()

    def _removed(self, segments: Sequence[Segment]) -> list[bool]:
        if self._keep is None:
            return [False] * len(segments)
        kept = self._keep(segments)
        if len(kept) != len(segments):
            raise InvalidConfig(
                f"spoke of {len(kept)} Segments of {len(segments)}",
                subject="keep",
                remedy="return one bool for each Segment it is given, in their order",
            )
        return [not keep for keep in kept]

    def _collect(self, session_ids: Sequence[str]) -> list[Segment]:
        """Return the Segments of all sessions in the order of these."""
        waiting = deque(enumerate(session_ids))
        idle = deque(self._proxies * self._at_once)
        asked: dict[Any, tuple[int, Any]] = {}
        found: dict[int, list[Segment]] = {}
        while waiting or asked:
            while waiting and idle:
                number, session_id = waiting.popleft()
                proxy = idle.popleft()
                asked[proxy.rollout.remote(session_id)] = number, proxy
            (ready, *_), _ = ray.wait(list(asked), num_returns=1)
            number, proxy = asked.pop(ready)
            (found[number],) = gather([ready])
            idle.append(proxy)
        return [segment for number in sorted(found) for segment in found[number]]


def _shard(rollout_id: int, data: int, segments: list[Segment], removed: Sequence[bool]) -> Shard:
    return Shard(
        rollout_id=rollout_id,
        data=data,
        count=len(segments),
        tokens=sum(len(segment.tokens) for segment in segments),
        segments=ray.put(segments),
        removed=frozenset(place for place, gone in enumerate(removed) if gone),
    )
