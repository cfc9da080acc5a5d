"""What writes to a tier: front, queue and object store in step with each other."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Literal, get_args

from tq_fs.backends._base import Buffer
from tq_fs.backends._copies import Measure, Verdict, measures_nothing, verdict
from tq_fs.backends._files import nbytes
from tq_fs.backends._front import Found, Front
from tq_fs.backends._group_files import GroupFiles, Upload, UploadCancelled
from tq_fs.backends._objects import ObjectBackend, new_attempt
from tq_fs.backends._places import parent_of, place_of
from tq_fs.backends._seldom import Seldom
from tq_fs.backends._traffic import Traffic
from tq_fs.backends._uploads import UploadQueue
from tq_fs.budget import ByteBudget
from tq_fs.errors import (
    InvalidConfig,
    ObjectMissing,
    SessionClosed,
    StorageDenied,
    StorageFailed,
    StorageFull,
    TqFsError,
)

_log = logging.getLogger(__name__)
_LISTED = 64  # sessions whose objects are compared with the front's at once
_FRONT_FAILURES = (StorageFull, StorageFailed, StorageDenied, ObjectMissing)  # or removed

Policy = Literal["write-through", "write-back"]


def check_policy(text: str) -> Policy:
    """Return `text` as a policy.

    Raises
    ------
    InvalidConfig
    """
    for known in get_args(Policy):
        if text == known:
            return known  # type: ignore[no-any-return]
    raise InvalidConfig(f"{text!r} is none of {', '.join(get_args(Policy))}", subject="policy")


class TierWriter:
    """Publishes to, and deletes from, a front and the object store behind it. Thread-safe.

    Parameters
    ----------
    front
        The local disk; the writer's own from here on.
    back
        The object store; stays the caller's.
    policy
        When a group is acknowledged.
    threads, queue_bytes, deadline_s, pause_s
        Of the :class:`~tq_fs.backends._uploads.UploadQueue`.
    memory_bytes
        Bound of members in memory while they are uploaded.
    at
        Called with the name of each point that is passed.
    measure
        Says from a group's commit what its members measure.

    Attributes
    ----------
    front, queue
        The parts.
    misses, spills
        Copies that the front did not take, and groups that went past it.
    """

    def __init__(
        self,
        front: Front,
        back: ObjectBackend,
        *,
        policy: Policy,
        threads: int,
        queue_bytes: int,
        memory_bytes: int,
        deadline_s: float,
        pause_s: tuple[float, float],
        at: Callable[[str], None],
        measure: Measure = measures_nothing,
    ) -> None:
        self.front = front
        self.misses, self.spills = Seldom(_log), Seldom(_log)
        self._back = back
        self._policy = policy
        self._at = at
        self._measure = measure
        self._threads = threads
        self._traffic = Traffic()
        self._closed = False
        self._memory = ByteBudget(
            memory_bytes, deadline_s=float("inf"), clock=lambda: 0.0, subject="uploads"
        )
        self.queue = UploadQueue(
            self._upload,
            threads=threads,
            limit_bytes=queue_bytes,
            deadline_s=deadline_s,
            pause_s=pause_s,
            subject=self._name,
        )

    # ------------------------------------------------------------ publish

    def publish(self, prefix: str, members: Mapping[str, Sequence[Buffer]], *, fresh: bool) -> str:
        """Make a group readable as the policy says; return its place."""
        self._check_open()
        self._back.check(prefix, members)
        with self._traffic.on(prefix):
            if not fresh and (there := self._published(prefix, members)):
                return there
            sizes = {name: sum(map(nbytes, buffers)) for name, buffers in members.items()}
            upload = Upload(f"{prefix}/{new_attempt()}", sizes, fresh)
            if self._policy == "write-through":
                self._write_through(upload, members)
            else:
                self._write_back(upload, members)
            return upload.place

    def _published(self, prefix: str, members: Mapping[str, Sequence[Buffer]]) -> str | None:
        place = self.front.published(prefix, members)
        if place is None:
            return self._back.published(prefix, members)
        if self._policy == "write-through":
            self.queue.settle(place)  # left by an earlier process with another policy
        return place

    def _write_through(self, upload: Upload, members: Mapping[str, Sequence[Buffer]]) -> None:
        with self._whole_or_not(upload.place):
            self._back.upload(upload.place, members)
            try:
                self.front.add(upload.place, members, upload.sizes, clean=True)
            except _FRONT_FAILURES as error:
                self.misses.warn("the front takes no copy", error)

    def _write_back(self, upload: Upload, members: Mapping[str, Sequence[Buffer]]) -> None:
        self.queue.reserve(upload.nbytes)
        try:
            self.front.add(upload.place, members, upload.sizes, clean=False)
            self._at("front published")
        except BaseException as error:
            self.queue.release(upload.nbytes)
            if not isinstance(error, _FRONT_FAILURES):
                self.front.withdraw(upload.place)
                raise
            self.spills.warn("the front takes nothing; uploading at once", error)
            with self._whole_or_not(upload.place):
                self._back.upload(upload.place, members)
            return
        self.queue.put(upload)
        self._at("upload queued")

    @contextmanager
    def _whole_or_not(self, place: str) -> Iterator[None]:
        """Remove what was written to a place where not all of it was."""
        try:
            yield
        except BaseException as error:
            self.front.withdraw(place)
            try:
                self._back.delete(place)  # the commit may be there though the call failed
            except TqFsError as left:
                error.add_note(f"and what was uploaded to {place} is still there: {left}")
            raise

    def _upload(self, upload: Upload) -> None:
        """Upload a group from the front, in a thread of the queue."""
        with self._traffic.on(upload.place):
            if upload.cancelled:
                return
            upload.begun = True
            try:
                with GroupFiles(self.front.local, upload, self._memory, self._at) as files:
                    self._back.upload(upload.place, files)
            except UploadCancelled:
                return
            self._at("uploaded")
            self.front.clean(upload.place)

    # ------------------------------------------------------------ delete

    def delete(self, prefix: str) -> bool:
        """Remove everything at or below a prefix; see :meth:`TieredBackend.delete`."""
        self._check_open()
        if place_of(prefix) not in (None, prefix):
            self.queue.settle(prefix)  # a part of a group, the rest of which stays
        cancelled: list[Upload] = []
        try:
            # Out of the queue before its turn: who publishes below may wait for room there.
            with self.queue.barred(prefix) as cancelled, self._traffic.on(prefix, below=True):
                return self._delete(prefix, cancelled)
        except BaseException:
            for upload in cancelled:
                if self.front.is_only_here(upload.place):
                    self.queue.put(Upload(upload.place, upload.sizes), reserved=False)
            raise

    def _delete(self, prefix: str, cancelled: Sequence[Upload]) -> bool:
        self._at("delete begun")
        found = self.front.remove(prefix)  # first: what stays here would be uploaded again
        self._at("front deleted")
        if not _never_left(prefix, cancelled):
            found |= self._back.delete(prefix)
        return found

    # ------------------------------------------------------------ start and end

    def recover(self) -> int:
        """Count what lies in front and queue what the object store lacks; return how much."""
        self._check_open()
        judged: list[tuple[Found, Verdict]] = []
        sessions = (list(g) for _, g in itertools.groupby(self.front.found(), _session_of))
        with ThreadPoolExecutor(self._threads, "tq-fs-recover") as pool:
            while some := list(itertools.islice(sessions, _LISTED)):
                judged += itertools.chain.from_iterable(pool.map(self._judge, some))
        judged.sort(key=lambda item: item[0].written_ns)
        for found, judgement in judged:
            self._take_in(found, judgement)
        return sum(judgement == "only here" for _, judgement in judged)

    def _judge(self, groups: Sequence[Found]) -> list[tuple[Found, Verdict]]:
        """Tell for groups of one session what the object store has of them."""
        there = dict(self._back.walk(_session_of(groups[0])))
        front = self.front.local
        return [(g, verdict(g, there, front, self._back, self._measure)) for g in groups]

    def _take_in(self, found: Found, judgement: Verdict) -> None:
        """Count a group that was found, or remove it."""
        if judgement == "damaged":
            _log.warning("%s was cut on the front, and is whole in the object store", found.place)
            self.front.local.delete(found.place)
            return
        if judgement == "unclear":
            _log.error("%s differs in size in front and behind: tq-fs repair", found.place)
        self.front.adopt(found, clean=judgement == "clean")
        if judgement == "only here":
            self.queue.put(Upload(found.place, found.sizes), reserved=False)

    def close(self) -> None:
        """Upload what is in front only, and stop all threads in any case; idempotent."""
        self._closed = True
        try:
            self.queue.close()
        finally:
            self.front.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed("is closed", subject=self._name)

    @property
    def _name(self) -> str:
        return str(self.front.local.root)


def _session_of(found: Found) -> str:
    return parent_of(found.place)


def _never_left(prefix: str, cancelled: Iterable[Upload]) -> bool:
    """Tell whether nothing at or below a prefix can be in the object store."""
    prefixes = {upload.place.rpartition("/")[0] for upload in cancelled}
    return prefixes == {prefix} and all(u.fresh and not u.begun for u in cancelled)
