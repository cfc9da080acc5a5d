"""A process that records Steps through a write-back tier, for :mod:`tq_fs.bench._s3_write_back`.

Its argument is a :class:`Task` as JSON; it says ``ready`` on standard output once the store is
open, waits for a line, says how many bytes are finalized after each session, and how it went at
its end.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from tq_fs.bench._data import Array, Shape, declared, make_payloads
from tq_fs.session import Session
from tq_fs.store import Store, open_store
from tq_fs.trajectory import StepInput

STEP = Shape(8192, 40, 8, "uint8")
_SESSION_STEPS = 16
_SESSIONS = 16  # open at once: more than the queue of uploads and the budget take together
_DEADLINE_S = 600.0


class Task(NamedTuple):
    """What is to be recorded, and where.

    Attributes
    ----------
    url
        Of the store.
    folder
        Of the tier's front.
    steps
        How many.
    budget_bytes
        ``inflight_bytes`` of the store.
    queue_bytes
        ``upload_queue_bytes`` of the tier.
    """

    url: str
    folder: str
    steps: int
    budget_bytes: int
    queue_bytes: int


class InFlight:
    """Counts the bytes of arrays that a store has and has not let go of."""

    def __init__(self) -> None:
        self.peak = 0
        self._now = 0
        self._lock = threading.Lock()

    def watch(self, future: Future[Any], nbytes: int) -> None:
        """Count a Step until it is done."""
        with self._lock:
            self._now += nbytes
            self.peak = max(self.peak, self._now)
        future.add_done_callback(lambda _: self._done(nbytes))

    def _done(self, nbytes: int) -> None:
        with self._lock:
            self._now -= nbytes


def main(task: Task) -> None:
    """Record, finalize and release sessions, some of them at once."""
    (payload,) = make_payloads(STEP, 1)
    with open_store(
        task.url,
        fields=declared(STEP),
        inflight_bytes=task.budget_bytes,
        inflight_deadline_s=_DEADLINE_S,
        tier={
            "folder": task.folder,
            "policy": "write-back",
            "upload_queue_bytes": task.queue_bytes,
        },
    ) as store:
        _say({"ready": True})
        sys.stdin.readline()
        peak = _record(store, payload.ids[1:], payload.logprobs, task.steps)
    _say({"peak": peak})


def _record(store: Store, ids: Array, logprobs: Array, steps: int) -> int:
    """Return the most bytes of arrays that were on their way at once."""
    flight = InFlight()
    running: deque[tuple[Session, Sequence[Future[Any]]]] = deque()
    for start in range(0, steps, _SESSION_STEPS):
        session = store.session(f"bench-{start:06d}")
        count = min(_SESSION_STEPS, steps - start)
        running.append((session, [_submit(session, ids, logprobs, flight) for _ in range(count)]))
        if len(running) == _SESSIONS:
            _end(store, *running.popleft())
    while running:
        _end(store, *running.popleft())
    return flight.peak


def _submit(session: Session, ids: Array, logprobs: Array, flight: InFlight) -> Future[Any]:
    """Send a Step off whose arrays are new, as an engine's are."""
    step = StepInput(
        kind="create",
        context=[],
        response=np.zeros(len(logprobs), np.int32),
        values={"routed_experts": ids.copy(), "logprobs": logprobs.copy()},
    )
    future = session.submit(step)
    flight.watch(future, ids.nbytes + logprobs.nbytes)
    return future


def _end(store: Store, session: Session, futures: Sequence[Future[Any]]) -> None:
    """Finalize a session and release it, so that server and front stay small."""
    for future in futures:
        future.result()
    store.release(session.finalize())
    _say({"steps": len(futures)})


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
