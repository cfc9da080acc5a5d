"""An iteration's rollouts: what the store already has of them, and the rest from the agents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tq_fs.demo.grpo._agent import TOPICS, Agent, Script
from tq_fs.errors import VersionSpan
from tq_fs.keys import SegmentRef
from tq_fs.store import Store
from tq_fs.trajectory import Segment

if TYPE_CHECKING:
    from tq_fs.proxy import ProxyClient

CONSUMER = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """How many rollouts an iteration has.

    Attributes
    ----------
    prompts, samples
        Prompts, and sessions of each.
    at_once
        Sessions that are played at the same time.
    """

    prompts: int = 2
    samples: int = 4
    at_once: int = 8

    def sessions(self, number: int) -> list[str]:
        """Return the sessions of an iteration in their order."""
        return [
            f"{_prefix(number)}prompt-{p}/sample-{s}"
            for p in range(self.prompts)
            for s in range(self.samples)
        ]


def group_of(session_id: str) -> str:
    """Return the group of a session: its iteration and prompt."""
    return session_id.rpartition("/")[0]


def _prefix(number: int) -> str:
    return f"iteration-{number:04d}/"


class Rollouts:
    """Rolls out each session once, also where the run was killed and started anew.

    Parameters
    ----------
    client
        Of the Proxy.
    url
        Of the Proxy, for agents.
    store
        What the trainer has open. Finalized Segments that were not released when it was opened
        are taken from it.
    batch, script
        What is played.
    """

    def __init__(
        self, client: ProxyClient, url: str, store: Store, batch: Batch, script: Script
    ) -> None:
        self._client = client
        self._url = url
        self._batch = batch
        self._script = script
        self._left = _unreleased(store)

    def forget_before(self, number: int) -> int:
        """Release what a run that was killed had trained on and not released yet.

        Its checkpoint of iteration `number` is there, so that earlier ones are not needed.
        Returns how many Segments were released.
        """
        old = [name for name in self._left if name < _prefix(number)]
        refs = [segment.ref for name in old for segment in self._left.pop(name) if segment.ref]
        if refs:
            self._client.release(refs, CONSUMER)
        if number:
            self._client.checkpoint_saved(number - 1)
        return len(refs)

    def collect(self, number: int) -> tuple[dict[str, list[Segment]], int]:
        """Return the Segments of an iteration's sessions, and how many the store had of these.

        Raises
        ------
        VersionSpan
            A token is of other weights than the iteration's.
        """
        wanted = self._batch.sessions(number)
        found = {name: self._left.pop(name) for name in wanted if name in self._left}
        taken = len(found)
        missing = [name for name in wanted if name not in found]
        self._play(missing)
        for segment in self._read(missing):
            found.setdefault(segment.session_id, []).append(segment)
        for segments in found.values():
            _check_versions(segments, str(number))
        return {name: found[name] for name in wanted}, taken

    def release(self, segments: Sequence[Segment], number: int) -> int:
        """Let an iteration's Segments go, now that the checkpoint that has used them is saved.

        Returns how many Steps were deleted.
        """
        refs = [segment.ref for segment in segments if segment.ref]
        if not refs:
            return 0
        self._client.release(refs, CONSUMER, rollout_id=number)
        return self._client.checkpoint_saved(number)

    # ------------------------------------------------------------ inside

    def _play(self, names: Sequence[str]) -> None:
        """Play sessions, many at once: which comes first changes nothing."""

        def one(name: str) -> None:
            group = group_of(name)
            topic = TOPICS[int(group.rpartition("-")[2]) % len(TOPICS)]
            Agent(self._url, name, group, topic, self._script).play()
            self._client.finalize(name)

        with ThreadPoolExecutor(self._batch.at_once, "agent") as pool:
            for done in [pool.submit(one, name) for name in names]:
                done.result()

    def _read(self, names: Sequence[str]) -> Iterator[Segment]:
        if names:
            yield from self._client.read(session_ids=names, forget=True)


def _unreleased(store: Store) -> dict[str, list[Segment]]:
    """Return the Segments that were finalized and not released, by session."""
    found: dict[str, list[Segment]] = {}
    refs = sorted(store.unreleased(CONSUMER), key=_in_order)
    for segment in store.segments(refs) if refs else ():
        found.setdefault(segment.session_id, []).append(segment)
    return found


def _in_order(ref: str) -> tuple[str, str, str, int]:
    parsed = SegmentRef.parse(ref)
    where = parsed.incarnation
    return where.session_id, where.incarnation_id, parsed.view, parsed.index


def _check_versions(segments: Sequence[Segment], version: str) -> None:
    for segment in segments:
        others = [found for found, _ in segment.versions if found != version]
        if others:
            raise VersionSpan(
                f"has tokens of the weights {others}, in iteration {version}",
                subject=segment.session_id,
                remedy="start with another --work",
            )
