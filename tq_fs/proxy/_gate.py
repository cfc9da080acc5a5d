"""The gate that generations pass: closed while weights are updated, and nothing runs behind it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from types import TracebackType

from tq_fs.errors import ConflictError, RolloutPaused, TqFsError, UpstreamUnavailable

_log = logging.getLogger(__name__)

Abort = Callable[[], Awaitable[None]]


class Gate:
    """Lets generations pass, or holds them up while the rollout is paused. For one event loop.

    A generation is *running* from its passing to the end of its context, however it ends: what is
    cancelled or fails has left, and no later pause waits for it.

    Parameters
    ----------
    resume_s
        Seconds for which a generation waits at a closed gate; None for ever.
    again_s
        Seconds after which an abort that did not end its generation is sent again: it may have
        come before the generation itself did.
    cut_s
        Seconds for which a pause waits for generations that were cut off to be gone.
    """

    def __init__(
        self, *, resume_s: float | None = None, again_s: float = 1.0, cut_s: float = 5.0
    ) -> None:
        self._resume_s = resume_s
        self._again_s = again_s
        self._cut_s = cut_s
        self._open = asyncio.Event()
        self._open.set()
        self._running: set[Pass] = set()
        self._waiting = 0
        self._resumes = 0

    @property
    def paused(self) -> bool:
        """Whether it is closed."""
        return not self._open.is_set()

    @property
    def running(self) -> int:
        """Generations that have passed and not left."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Generations that wait for :meth:`resume`."""
        return self._waiting

    def pass_(self, abort: Abort) -> Pass:
        """Return the context of one generation: entering it waits for an open gate.

        Parameters
        ----------
        abort
            Asks the engine to end the generation; called again if it goes on. Its errors are
            logged.
        """
        return Pass(self, abort)

    async def pause(self, deadline_s: float) -> int:
        """Close the gate, abort what runs, and return once nothing runs.

        May be called again, and by several at once: each returns when nothing runs. What has not
        ended by the (earliest) deadline is cut off, which closes its connection, so that a pause
        ends also where an engine does not listen.

        Returns
        -------
        int
            Generations that were running, and were aborted.

        Raises
        ------
        UpstreamUnavailable
            Some are still there `cut_s` after the deadline. The gate stays closed, and `running`
            counts them; pause again to wait on, or resume.
        ConflictError
            It was resumed meanwhile.

        Cancelling leaves the gate closed.
        """
        self._open.clear()
        resumes = self._resumes
        asked = list(self._running)
        for passing in asked:
            passing._ask()
        if late := await self._left(asked, deadline_s):
            _log.warning("%d generations did not end in %g s, and were cut off", late, deadline_s)
            for passing in self._running.intersection(asked):
                passing._cut(deadline_s)
            if late := await self._left(asked, self._cut_s):
                raise UpstreamUnavailable(
                    f"{late} generations could not be cut off",
                    subject="pause",
                    remedy="the gate stays closed: pause again to wait on, or resume",
                )
        if self._resumes != resumes:  # others may run, also if it was closed again
            raise ConflictError(
                "the rollout was resumed while it was being paused",
                subject="pause",
                remedy="let one process alone pause and resume, one after the other",
            )
        return len(asked)

    def resume(self) -> None:
        """Open the gate: all that wait go on. Idempotent."""
        self._resumes += self.paused
        self._open.set()

    async def _left(self, asked: Collection[Pass], timeout_s: float) -> int:
        """Wait for generations to leave; return how many have not, in time."""
        here = [passing._left for passing in asked if not passing._left.done()]
        if not here:
            return 0
        _, late = await asyncio.wait(here, timeout=timeout_s)
        return len(late)

    async def _enter(self, passing: Pass) -> None:
        if self.paused:
            self._waiting += 1
            try:
                async with asyncio.timeout(self._resume_s):
                    while self.paused:  # it may be closed again before this task runs
                        await self._open.wait()
            except TimeoutError as error:
                raise RolloutPaused(
                    f"the rollout was not resumed within {self._resume_s:g} s",
                    subject="generation",
                    remedy="resume it, then ask again",
                ) from error
            finally:
                self._waiting -= 1
        self._running.add(passing)  # nothing was awaited since the gate was seen open


class Pass:
    """One generation's way through a :class:`Gate`; entered once.

    Raises, when it is left, :class:`~tq_fs.errors.UpstreamUnavailable` where a pause cut it off.
    """

    def __init__(self, gate: Gate, abort: Abort) -> None:
        self._gate = gate
        self._abort = abort
        self._scope = asyncio.timeout(None)  # cancels and un-cancels the task as it should be done
        self._asking: asyncio.Task[None] | None = None
        self._is_cut, self._deadline_s = False, 0.0
        self._left: asyncio.Future[None]

    @property
    def aborted(self) -> bool:
        """Whether a pause has asked for its end."""
        return self._asking is not None

    async def __aenter__(self) -> Pass:
        """Wait until the gate is open.

        Raises
        ------
        RolloutPaused
            It was not opened in time.
        """
        self._left = asyncio.get_running_loop().create_future()
        await self._gate._enter(self)
        await self._scope.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave; say so where it was cut off."""
        self._gate._running.discard(self)
        self._left.set_result(None)
        if self._asking is not None:
            self._asking.cancel()
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise UpstreamUnavailable(
                f"the engine did not end an aborted generation within {self._deadline_s:g} s",
                subject="pause",
                remedy="see the engine's log; the generation was cut off",
            ) from late

    def _ask(self) -> None:
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_again())

    async def _ask_again(self) -> None:
        while not self._left.done():
            try:
                await self._abort()
            except TqFsError as error:
                _log.warning("an abort failed: %s", error)
            await asyncio.wait([self._left], timeout=self._gate._again_s)

    def _cut(self, deadline_s: float) -> None:
        if self._is_cut:  # by another pause; it takes its time to leave
            return
        self._is_cut, self._deadline_s = True, deadline_s
        self._scope.reschedule(asyncio.get_running_loop().time())
