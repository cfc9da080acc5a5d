"""Local NVMe before an object store."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tq_fs.backends._base import Buffer, ObjectReader
from tq_fs.backends._copies import Measure, measures_nothing
from tq_fs.backends._errors import check_key
from tq_fs.backends._front import Front
from tq_fs.backends._local import LocalBackend, _at_nothing
from tq_fs.backends._node_cache import NodeCache
from tq_fs.backends._objects import ObjectBackend
from tq_fs.backends._places import place_of
from tq_fs.backends._tier_writer import TierWriter, check_policy
from tq_fs.errors import ObjectMissing, ReadOnlyStore, WrongProcess
from tq_fs.metrics import Sample

MiB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """What a tier holds and did since it was made.

    Attributes
    ----------
    queued_groups, queued_bytes
        On the front only, and writers that were promised room there.
    front_bytes
        What groups take of the front's disk, in whole blocks.
    evicted
        Groups removed from the front to make room.
    spilled
        Groups that went to the object store directly, because the front took none.
    promoted
        Objects that this process brought into the node's cache.
    upload_failures
        Tries to upload a group that failed.
    front_failures
        Writes that the front did not take, for whatever reason.
    """

    queued_groups: int = 0
    queued_bytes: int = 0
    front_bytes: int = 0
    evicted: int = 0
    spilled: int = 0
    promoted: int = 0
    upload_failures: int = 0
    front_failures: int = 0


class TieredBackend:
    """A :class:`~tq_fs.backends.Backend` for Steps: a local disk in front of an object store.

    A group has the same place in both, so a manifest is right wherever the group is. Writing,
    ``write-through`` acknowledges a group when the object store has it and keeps a copy in front;
    ``write-back`` acknowledges it when it is in front and uploads it behind, within a bound on
    what is in front only. A front that takes no more is no failure: the group goes to the object
    store at once. Above the high-water mark groups that were uploaded leave the front; what was
    not uploaded never does. Reading looks in front, then in the node's cache, then in the object
    store.

    Without a front, or with one that is read-only (another process's), it only reads, and pickles
    as its configuration. Otherwise it belongs to its process.

    Parameters
    ----------
    front
        The local disk; groups on it are written by this object alone.
    back
        The object store. Front, back and cache stay the caller's, who closes them afterwards.
    policy
        When a group is acknowledged.
    capacity_bytes
        What groups may take of the front's disk; None for as much as it has.
    high_water, low_water
        Shares of that.
    upload_threads
        Groups uploaded at once.
    queue_bytes
        Bound of what is in front only; a larger group waits for all others.
    upload_memory_bytes
        Bound of members in memory while they are uploaded; a larger one waits for all others.
        obstore sends them from there; s3fs and fsspec make copies, up to three times as much.
    deadline_s
        How long a write waits for room in the queue.
    pause_s
        Seconds before a failed upload is tried again: after its first failure, and at most.
    cache
        Keeps what was read from the object store; None for none.
    at
        Called with the name of each point that is passed; for tests that kill the process there.
    measure
        Says from a group's commit what its members measure: which of two copies is right where
        they differ in size. Where it says nothing, a front that is shorter is wrong.
    """

    POINTS = (
        "front published",
        "upload queued",
        "uploading",
        "uploaded",
        *Front.POINTS,
        "delete begun",
        "front deleted",
        "delete done",
    )

    def __init__(
        self,
        front: LocalBackend | None,
        back: ObjectBackend,
        *,
        policy: str = "write-back",
        capacity_bytes: int | None = None,
        high_water: float = 0.9,
        low_water: float = 0.7,
        upload_threads: int = 4,
        queue_bytes: int = 4096 * MiB,
        upload_memory_bytes: int = 64 * MiB,
        deadline_s: float = 60.0,
        pause_s: tuple[float, float] = (1.0, 60.0),
        cache: NodeCache | None = None,
        at: Callable[[str], None] = _at_nothing,
        measure: Measure = measures_nothing,
    ) -> None:
        self.front = front
        self.back = back
        self.cache = cache
        self.policy = check_policy(policy)
        self.request_bytes = back.request_bytes if cache is None else LocalBackend.request_bytes
        self._at = at
        self._owned = False
        self._distrusted: set[str] = set()
        self._writer: TierWriter | None = None
        if front is not None and not front.read_only:
            self._writer = TierWriter(
                Front(
                    front,
                    capacity_bytes=capacity_bytes,
                    high_water=high_water,
                    low_water=low_water,
                    at=at,
                ),
                back,
                policy=self.policy,
                threads=upload_threads,
                queue_bytes=queue_bytes,
                memory_bytes=upload_memory_bytes,
                deadline_s=deadline_s,
                pause_s=pause_s,
                at=at,
                measure=measure,
            )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as configuration; the copy opens tiers of its own, and closes them.

        Raises
        ------
        WrongProcess
            It writes, which one process does.
        """
        if self._writer is not None:
            raise WrongProcess(
                "belongs to the process that writes",
                subject=self._name,
                remedy="make one with a read-only front, or none, for other processes",
            )
        return _reopen, (self.front, self.back, self.cache, self.policy)

    # ------------------------------------------------------------ write

    def publish(
        self, prefix: str, members: Mapping[str, Sequence[Buffer]], *, fresh: bool = False
    ) -> str:
        """Make all members readable below the place returned; see the protocol and the policies.

        Raises
        ------
        BackpressureTimeout
            Uploads were too slow to make room in the queue.
        StorageFailed
            The object store failed where it was needed.
        """
        return self._writing().publish(prefix, members, fresh=fresh)

    def put(self, key: str, data: bytes, *, urgent: bool = False) -> None:
        """Write one small object whole, into the object store only."""
        self._writing()
        self.back.put(key, data, urgent=urgent)

    def delete(self, prefix: str) -> bool:
        """Remove an object or everything below a prefix from both tiers and the node's cache.

        Uploads of it are cancelled; one in flight ends with the member it is at, and is waited
        for, so that nothing comes behind the removal.
        """
        writer = self._writing()
        check_key(prefix)
        found = writer.delete(prefix)
        if self.cache is not None:
            self.cache.drop(prefix)
        self._at("delete done")
        return found

    # ------------------------------------------------------------ read

    def open(self, key: str) -> ObjectReader:
        """Open an object for ranged reads, where it is nearest."""
        check_key(key)
        place = place_of(key)
        if place is None:  # of no group: it may be replaced
            return self.back.open(key)
        if (near := self._near(place)) is not None:
            with suppress(ObjectMissing):
                return near.open(key)
        kept = self.cache.open(key, self.back.download) if self.cache is not None else None
        return kept or self.back.open(key)

    def get(self, key: str) -> bytes:
        """Return a small object."""
        check_key(key)
        place = place_of(key)
        if place is None:
            return self.back.get(key)
        if (near := self._near(place)) is not None:
            with suppress(ObjectMissing):
                return near.get(key)
        kept = self.cache.get(key, self.back.download) if self.cache is not None else None
        return self.back.get(key) if kept is None else kept

    def _near(self, place: str) -> LocalBackend | None:
        """Return the front, where it may hold a group that is read now."""
        if self._writer is not None:
            self._writer.front.touch(place)
        return None if place in self._distrusted else self.front

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names right below `prefix` in either tier, sorted."""
        # The front first: what leaves it meanwhile is in the object store.
        names = set(self.front.list(prefix)) if self.front is not None else set()
        names.update(self.back.list(prefix))
        yield from sorted(names)

    def walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield key and bytes of every object below `prefix` in either tier, each once."""
        near = sorted(self.front.walk(prefix)) if self.front is not None else []
        known = {key for key, _ in near}
        far = (item for item in self.back.walk(prefix) if item[0] not in known)
        yield from heapq.merge(near, far, key=lambda item: item[0])

    def distrust(self, key: str) -> bool:
        """Drop the copies of an object that turned out to be wrong, if the object store has it.

        Returns
        -------
        bool
            Whether reading it again may help; not where the front holds the only copy.
        """
        place = place_of(key)
        if place is None:
            return self.back.distrust(key)
        if not any(there == key for there, _ in self.back.walk(place)):
            return False
        if self._writer is None:
            self._distrusted.add(place)  # its front is another process's
        elif not self._writer.front.discard(place):
            return False
        if self.cache is not None:
            self.cache.drop(key)
        return True

    # ------------------------------------------------------------ policy

    def cool(self, prefixes: Iterable[str]) -> None:
        """Let groups leave the front before others."""
        if self._writer is not None:
            for prefix in prefixes:
                self._writer.front.cool(prefix)

    def settle(self, prefix: str) -> None:
        """Return once everything published below `prefix` is in the object store; see the protocol.

        What is asked for is uploaded before all else.
        """
        if self._writer is not None:
            self._writer.queue.settle(prefix)

    def sync(self) -> None:
        """Return once what is in front is as durable as its disk can make it."""
        if self._writer is not None:
            self._writer.front.local.sync()

    def stats(self) -> TierStats:
        """Return what the tier holds and did so far."""
        promoted = self.cache.promoted if self.cache is not None else 0
        if (writer := self._writer) is None:
            return TierStats(promoted=promoted)
        return TierStats(
            queued_groups=writer.queue.groups,
            queued_bytes=writer.queue.used_bytes,
            front_bytes=writer.front.used_bytes,
            evicted=writer.front.evicted,
            spilled=writer.spills.count,
            promoted=promoted,
            upload_failures=writer.queue.failures,
            front_failures=writer.spills.count + writer.misses.count,
        )

    def samples(self) -> Iterator[Sample]:
        """Yield what :meth:`tq_fs.metrics.Metrics.watch` wants to know."""
        stats = self.stats()
        yield Sample("tqfs_tier_promoted_objects_total", stats.promoted)
        if (writer := self._writer) is None:
            return
        yield Sample("tqfs_tier_front_bytes", stats.front_bytes)
        yield Sample("tqfs_tier_queued_groups", stats.queued_groups)
        yield Sample("tqfs_tier_queued_bytes", stats.queued_bytes)
        yield Sample("tqfs_tier_queue_limit_bytes", writer.queue.limit_bytes)
        yield Sample("tqfs_tier_evicted_groups_total", stats.evicted)
        yield Sample("tqfs_tier_spilled_groups_total", stats.spilled)
        yield Sample("tqfs_tier_upload_failures_total", stats.upload_failures)
        yield Sample("tqfs_tier_front_failures_total", stats.front_failures)
        yield Sample("tqfs_tier_front_limit_bytes", writer.front.limit_bytes)  # asks the disk: last

    # ------------------------------------------------------------ start and end

    def recover(self) -> int:
        """Count what earlier processes left in front, and queue what the object store lacks.

        Called once, before anything is written.

        Returns
        -------
        int
            Groups that are queued again.

        Raises
        ------
        StorageFailed
            The object store does not answer.
        """
        return self._writing().recover()

    def close(self) -> None:
        """Upload what is in front only, and stop all threads in any case; idempotent.

        Raises
        ------
        TqFsError
            Something could not be uploaded; says how much, and where it is.
        """
        if self._writer is not None:
            self._writer.close()
        if self._owned:
            self.back.close()
            if self.front is not None:
                self.front.close()

    def _writing(self) -> TierWriter:
        if self._writer is None:
            raise ReadOnlyStore("is open for reading only", subject=self._name)
        return self._writer

    @property
    def _name(self) -> str:
        return str(self.front.root) if self.front is not None else self.back.url


def _reopen(
    front: LocalBackend | None, back: ObjectBackend, cache: NodeCache | None, policy: str
) -> TieredBackend:
    copy = TieredBackend(front, back, policy=policy, cache=cache)
    copy._owned = True
    return copy
