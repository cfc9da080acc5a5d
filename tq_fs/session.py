"""Session: what the Proxy holds of one rollout while it runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy.typing as npt

from tq_fs.controller import ControllerCalls
from tq_fs.logs import log_context
from tq_fs.manifests import View
from tq_fs.trajectory import (
    ClosedSession,
    Segment,
    StepInput,
    StepKind,
    StepRecord,
    Trajectory,
    check_views,
)
from tq_fs.writer import StepWriter


class Session:
    """One incarnation of a rollout session, open until it is finalized or discarded.

    Safe to call from many threads. Made by :meth:`tq_fs.Store.session`.

    Parameters
    ----------
    trajectory
        Its Steps and rules.
    writer
        Takes its Steps' fields; stays the store's.
    controller
        Finalizes it; None where nothing is stored.
    store_id
        For references.
    check_open
        Raises where the store is closed, or not this process's.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        writer: StepWriter,
        controller: ControllerCalls | None,
        store_id: str,
        *,
        check_open: Callable[[], None],
    ) -> None:
        self._trajectory = trajectory
        self._writer = writer
        self._controller = controller
        self._store_id = store_id
        self._check_open = check_open
        self._pending: set[Future[StepRecord]] = set()
        self._lock = threading.Lock()

    @property
    def session_id(self) -> str:
        """The user's id of the session."""
        return self._trajectory.incarnation.session_id

    @property
    def incarnation_id(self) -> str:
        """Which use of the session id this is."""
        return self._trajectory.incarnation.incarnation_id

    @property
    def trajectory(self) -> Trajectory:
        """Its Steps and rules: for what decides how the next one hangs on them."""
        return self._trajectory

    @property
    def records(self) -> list[StepRecord]:
        """The Steps recorded so far."""
        return self._trajectory.records()

    def first_row(self, kind: StepKind = "create", parent: int | None = None) -> int:
        """Return the first row of a whole sequence's routing that belongs to a new Step.

        Engines return rows for the whole sequence; record ``rows[session.first_row(…):]``.
        """
        return self._trajectory.first_row(kind, parent)

    # ------------------------------------------------------------ record

    def create(
        self,
        context: npt.ArrayLike,
        response: npt.ArrayLike,
        *,
        version: str = "",
        **values: npt.ArrayLike,
    ) -> StepRecord:
        """Record a first model invocation; see :class:`tq_fs.StepInput`."""
        return self._step("create", None, context, response, values, version=version)

    def append(
        self,
        parent: int,
        context: npt.ArrayLike,
        response: npt.ArrayLike,
        *,
        version: str = "",
        **values: npt.ArrayLike,
    ) -> StepRecord:
        """Record an invocation that continues `parent` with new messages."""
        return self._step("append", parent, context, response, values, version=version)

    def branch(
        self,
        parent: int,
        context: npt.ArrayLike,
        response: npt.ArrayLike,
        *,
        version: str = "",
        **values: npt.ArrayLike,
    ) -> StepRecord:
        """Record another continuation from inside `parent`, with its whole prompt."""
        return self._step("branch", parent, context, response, values, version=version)

    def boundary(
        self,
        parent: int,
        context: npt.ArrayLike,
        response: npt.ArrayLike,
        *,
        reason: str = "",
        version: str = "",
        **values: npt.ArrayLike,
    ) -> StepRecord:
        """Record the first invocation after `parent`'s history was rewritten."""
        return self._step(
            "boundary", parent, context, response, values, version=version, reason=reason
        )

    def _step(
        self,
        kind: StepKind,
        parent: int | None,
        context: npt.ArrayLike,
        response: npt.ArrayLike,
        values: Mapping[str, npt.ArrayLike],
        *,
        version: str,
        reason: str = "",
    ) -> StepRecord:
        return self.record(
            StepInput(
                kind=kind,
                parent=parent,
                context=context,
                response=response,
                values=values,
                version=version,
                reason=reason,
            )
        )

    def submit(self, step: StepInput) -> Future[StepRecord]:
        """Send a Step off; see :meth:`tq_fs.writer.StepWriter.submit`."""
        self._check_open()
        with log_context(store=self._store_id):
            future = self._writer.submit(self._trajectory, step)
        with self._lock:
            self._pending.add(future)
        future.add_done_callback(self._settled)
        return future

    def record(self, step: StepInput) -> StepRecord:
        """Send a Step off and wait until it is safe and recorded."""
        return self.submit(step).result()

    async def arecord(self, step: StepInput) -> StepRecord:
        """Record a Step from an event loop, without holding it up.

        A cancelled call either leaves nothing behind or records the Step.
        """
        future = await asyncio.to_thread(self.submit, step)
        return await asyncio.wrap_future(future)

    def _settled(self, future: Future[StepRecord]) -> None:
        with self._lock:
            self._pending.discard(future)

    # ------------------------------------------------------------ end

    def finalize(
        self,
        *,
        consumers: Sequence[str] = ("train",),
        views: Sequence[str] = ("lineage",),
        extra: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """Build the session's Segments and write its manifest. No stored field is read.

        Waits for Steps that are on their way, and until they lie where the store's policy wants
        them. If that or writing fails the session is open again.

        Parameters
        ----------
        consumers
            Who will release each Segment; its Steps live until all have.
        views
            Some of ``lineage`` and ``timeline``.
        extra
            Plain values that every Segment carries along, and that are kept with the trajectory
            where the store does that: messages, tools, a label.

        Returns
        -------
        list of Segment
            All Segments of all views; empty where no Step was recorded.
        """
        self._check_open()
        chosen = check_views(views)
        with log_context(store=self._store_id, session=self.session_id):
            self._drain()
            self._trajectory.close("finalized")
            try:
                return self._finalize(chosen, consumers, extra or {})
            except BaseException:
                self._trajectory.reopen()
                raise

    def discard(self) -> None:
        """End the session and delete what it has written; idempotent.

        Where deleting fails it can be tried again; the sweep at the next start is the last chance.
        """
        self._check_open()
        self._trajectory.close("discarded", again=True)
        self._drain()
        if self._controller is not None:
            with log_context(store=self._store_id, session=self.session_id):
                self._controller.discard(self._trajectory.incarnation)

    def _drain(self) -> None:
        with self._lock:
            pending = list(self._pending)
        wait(pending)

    def _finalize(
        self, views: Sequence[View], consumers: Sequence[str], extra: Mapping[str, Any]
    ) -> list[Segment]:
        stored = [s for s in self._trajectory.specs if s.name in self._writer.selected]
        resident = [s for s in self._trajectory.specs if s.name not in self._writer.selected]
        closed = ClosedSession(
            incarnation=self._trajectory.incarnation,
            mode=self._trajectory.mode,
            views=tuple(views),
            consumers=tuple(consumers),
            records=self._trajectory.records(),
            stored=stored,
            resident=resident,
            extra=extra,
        )
        segments = closed.segments(self._store_id if stored else None)
        if self._controller is None or not stored:
            return segments
        if closed.records:
            self._controller.finalize(closed)
        else:
            self._controller.discard(closed.incarnation)
        return segments
