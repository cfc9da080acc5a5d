"""What lies on the front only: uploaded behind, in the order of publishing."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tq_fs.backends._group_files import Upload
from tq_fs.backends._places import Places, place_of
from tq_fs.backends._seldom import Seldom
from tq_fs.errors import (
    BackpressureTimeout,
    RetryError,
    SessionClosed,
    StorageFailed,
    TqFsError,
)

_log = logging.getLogger(__name__)
_NEVER = float("inf")


class UploadQueue:
    """Uploads groups in the order they are put, by threads of its own. Thread-safe.

    A failed upload keeps its turn, after a pause that doubles with every failure. The threads start
    with the first upload.

    Parameters
    ----------
    upload
        Uploads one group, or stops early once it is cancelled.
    threads
        How many groups are uploaded at once.
    limit_bytes
        Bound of the bytes that wait; a group larger than that waits alone.
    deadline_s
        How long :meth:`reserve` waits for room.
    pause_s
        Seconds before a group is tried again: after its first failure, and at most.
    subject
        Where the groups lie meanwhile, for messages.
    clock
        Monotonic seconds.
    """

    def __init__(
        self,
        upload: Callable[[Upload], None],
        *,
        threads: int,
        limit_bytes: int,
        deadline_s: float,
        pause_s: tuple[float, float],
        subject: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures = 0
        self._upload = upload
        self._trouble = Seldom(_log)
        self._most_threads = threads
        self._limit = limit_bytes
        self._deadline_s = deadline_s
        self._pause_s = pause_s
        self._subject = subject
        self._clock = clock
        self._turn = threading.Condition()
        self._line: deque[object] = deque()  # of those who wait for room
        self._writers = 0  # who have room and may still put
        self._used = 0
        self._all: Places[Upload] = Places()
        self._waiting: OrderedDict[str, Upload] = OrderedDict()
        self._paused: dict[str, Upload] = {}
        self._running: set[Upload] = set()
        self._bars: list[tuple[str, list[Upload]]] = []
        self._threads: list[threading.Thread] = []
        self._closing = self._stopped = False
        self._last_error: TqFsError | None = None

    @property
    def groups(self) -> int:
        """Groups that are not uploaded yet."""
        return len(self._all)

    @property
    def used_bytes(self) -> int:
        """Bytes that are not uploaded yet, and those that writers were promised room for."""
        return self._used

    @property
    def limit_bytes(self) -> int:
        """Bound of those."""
        return self._limit

    # ------------------------------------------------------------ writers

    def reserve(self, nbytes: int) -> None:
        """Wait for room, in the order of asking; :meth:`put` or :meth:`release` must follow.

        Raises
        ------
        BackpressureTimeout
            None came free before the deadline.
        SessionClosed
            The queue is closed.
        """
        ticket = object()
        with self._turn:
            self._line.append(ticket)
            until = self._clock() + self._deadline_s
            try:
                while self._check_open() and not self._may_enter(ticket, nbytes):
                    left = until - self._clock()
                    if left <= 0:
                        raise self._timeout(nbytes)
                    self._turn.wait(min(left, threading.TIMEOUT_MAX))
                self._used += nbytes
                self._writers += 1
            finally:
                self._line.remove(ticket)
                self._turn.notify_all()

    def _may_enter(self, ticket: object, nbytes: int) -> bool:
        fits = self._used == 0 or self._used + nbytes <= self._limit
        return fits and self._line[0] is ticket

    def _check_open(self) -> bool:
        if self._closing:
            raise SessionClosed("is closed", subject=self._subject)
        return True

    def _timeout(self, nbytes: int) -> BackpressureTimeout:
        why = f"; the last failure: {self._last_error}" if self._last_error else ""
        return BackpressureTimeout(
            f"no room for {nbytes} bytes within {self._deadline_s:g} s: {self._used} of "
            f"{self._limit} wait for their upload{why}",
            subject=self._subject,
            remedy="the object store is too slow: raise upload_threads, upload_queue_bytes or "
            "inflight_deadline_s",
        )

    def release(self, nbytes: int) -> None:
        """Give room back that nothing will be put into."""
        with self._turn:
            self._used -= nbytes
            self._writers -= 1
            self._turn.notify_all()

    def put(self, upload: Upload, *, reserved: bool = True) -> None:
        """Queue a group; without a reservation it is counted on top of the bound."""
        with self._turn:
            if reserved:
                self._writers -= 1
            else:
                self._used += upload.nbytes
            self._all[upload.place] = upload
            self._waiting[upload.place] = upload
            for beginning, out in self._bars:
                if f"{upload.place}/".startswith(beginning):
                    out.append(upload)
                    self._cancel(upload)
                    return
            if len(self._threads) < self._most_threads and not self._stopped:
                name = f"tq-fs-upload-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            self._turn.notify_all()

    # ------------------------------------------------------------ those who wait or remove

    def settle(self, prefix: str) -> None:
        """Return once all groups at or below a prefix are uploaded; they come first from now on.

        Raises
        ------
        TqFsError
            A try failed meanwhile; the group stays in the queue.
        """
        with self._turn:
            mine = [upload for _, upload in self._all.below(place_of(prefix) or prefix)]
            start = seen = self.failures
            for upload in reversed(mine):
                self._hasten(upload)
            self._turn.notify_all()
            while mine:
                if mine[-1].done:
                    mine.pop()
                    continue
                if self.failures > seen:
                    seen = self.failures
                    _raise_failure(mine, start)
                if self._stopped:
                    raise self._left_over(mine)
                self._turn.wait()

    def _hasten(self, upload: Upload) -> None:
        if self._paused.pop(upload.place, None):
            self._waiting[upload.place] = upload
        if upload.place in self._waiting:
            self._waiting.move_to_end(upload.place, last=False)

    @contextmanager
    def barred(self, prefix: str) -> Iterator[list[Upload]]:
        """Take groups at or below a prefix out, also those that are put meanwhile.

        An upload in flight stops at its next member.

        Yields
        ------
        list of Upload
            What was taken out, up to now.
        """
        with self._turn:
            out = [upload for _, upload in self._all.below(prefix)]
            bar = (f"{prefix}/", out)
            self._bars.append(bar)
            for upload in out:
                self._cancel(upload)
        try:
            yield out
        finally:
            with self._turn:
                self._bars = [other for other in self._bars if other is not bar]

    def _cancel(self, upload: Upload) -> None:
        upload.cancelled = True
        self._end(upload)
        self._turn.notify_all()

    def _end(self, upload: Upload) -> None:
        """Forget a group that is uploaded or cancelled."""
        if not upload.done:
            upload.done = True
            self._used -= upload.nbytes
            self._all.pop(upload.place)
            self._waiting.pop(upload.place, None)
            self._paused.pop(upload.place, None)

    # ------------------------------------------------------------ threads

    def _work(self) -> None:
        while (upload := self._take()) is not None:
            error: TqFsError | None = None
            try:
                self._upload(upload)
            except TqFsError as failure:
                error = failure
            except Exception as failure:  # a thread's edge: nobody else would hear of it
                _log.exception("uploading %s", upload.place)
                error = StorageFailed(repr(failure), subject=upload.place)
                error.__cause__ = failure
            self._finish(upload, error)

    def _take(self) -> Upload | None:
        """Return the next group, once there is one; None when the thread is to end."""
        with self._turn:
            while not self._stopped:
                upload = self._next()
                if upload is not None:
                    self._running.add(upload)
                    return upload
                pause = min((u.due for u in self._paused.values()), default=_NEVER)
                left = max(pause - self._clock(), 0.0)
                self._turn.wait(min(left, threading.TIMEOUT_MAX))
            return None

    def _next(self) -> Upload | None:
        now = self._clock()
        due = next((u for u in self._paused.values() if u.due <= now), None)
        if due is not None:
            return self._paused.pop(due.place)
        if self._waiting:
            return self._waiting.popitem(last=False)[1]
        return None

    def _finish(self, upload: Upload, error: TqFsError | None) -> None:
        with self._turn:
            self._running.discard(upload)
            if error is None:
                self._last_error = None
                self._end(upload)
            elif not upload.done:
                self._pause(upload, error)
            self._turn.notify_all()

    def _pause(self, upload: Upload, error: TqFsError) -> None:
        """Keep a group that failed for another try."""
        first, most = self._pause_s
        pause = min(first * 2.0 ** min(upload.tries, 30), most)
        self.failures += 1
        upload.tries += 1
        upload.failed_at = self.failures
        upload.error = self._last_error = error
        if self._closing:
            self._stopped |= isinstance(error, RetryError)  # the others would fare no better
            pause = _NEVER
        else:
            self._trouble.warn("an upload failed, and is tried again", error)
        upload.due = self._clock() + pause
        self._paused[upload.place] = upload

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """Upload what waits, and stop the threads in any case; idempotent.

        Raises
        ------
        TqFsError
            Something could not be uploaded; says how much, and is of the kind of the failure.
        """
        with self._turn:
            if self._closing:
                return
            self._closing = True
            for upload in [*self._paused.values()]:
                self._hasten(upload)
            self._turn.notify_all()
        try:
            with self._turn:
                while (self._waiting or self._running or self._writers) and not self._stopped:
                    self._turn.wait()
        finally:
            self.stop()
        left = [upload for _, upload in self._all.below("")]
        if left:
            raise self._left_over(left)

    def stop(self) -> None:
        """Stop the threads, each after the upload it is at; what waits is not uploaded."""
        with self._turn:
            self._closing = self._stopped = True
            self._turn.notify_all()
        for thread in self._threads:
            thread.join()

    def _left_over(self, left: list[Upload]) -> TqFsError:
        why = next((u.error for u in left if u.error), self._last_error)
        error = StorageFailed("closed before it was tried") if why is None else why
        return type(error)(
            f"{len(left)} Steps ({sum(u.nbytes for u in left)} bytes) lie here only, and were not "
            f"uploaded: {error}",
            subject=self._subject,
            remedy="keep the folder: the next start on it uploads them",
        )


def _raise_failure(uploads: list[Upload], start: int) -> None:
    for upload in uploads:
        error = upload.error
        if error is not None and upload.failed_at > start and not upload.done:
            raise type(error)(error.problem, subject=error.subject, remedy=error.remedy) from error
