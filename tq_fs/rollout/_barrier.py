"""Barrier: ranks wait for each other, so that nobody releases what others still read."""

from __future__ import annotations

import asyncio

from tq_fs.errors import RanksMissing


class _Meeting:
    """One rollout's turn at the barrier of a group."""

    def __init__(self, rollout_id: int) -> None:
        self.rollout_id = rollout_id
        self.here: set[int] = set()
        self.complete = asyncio.Event()


class Barrier:
    """An actor. A rank that ended and was started again may come again.

    Parameters
    ----------
    timeout_s
        Seconds for which a rank waits for the others.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._meetings: dict[str, _Meeting] = {}

    async def arrive(self, group: str, rollout_id: int, rank: int, count: int) -> None:
        """Return once `count` ranks of a group have arrived with this rollout.

        Raises
        ------
        RanksMissing
            Some have not, in time.
        """
        meeting = self._meetings.get(group)
        if meeting is None or meeting.rollout_id < rollout_id:
            meeting = self._meetings[group] = _Meeting(rollout_id)
        if meeting.rollout_id > rollout_id:
            return  # all were here, or nobody would be further
        meeting.here.add(rank)
        if len(meeting.here) == count:
            meeting.complete.set()
        try:
            await asyncio.wait_for(meeting.complete.wait(), self._timeout_s)
        except TimeoutError as error:
            here = sorted(meeting.here)
            meeting.here.discard(rank)
            raise RanksMissing(
                f"only ranks {here} of {count} came within {self._timeout_s:g} s",
                subject=f"{group}, rollout {rollout_id}",
                remedy="see the logs of the others; nothing was released",
            ) from error
