"""StepWriter: takes a Step's selected fields out of the Proxy's memory, without holding it up."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

from tq_fs.budget import ByteBudget
from tq_fs.errors import ObjectExists, SessionClosed, TqFsError
from tq_fs.fields import FieldSpec
from tq_fs.steps import FieldArray
from tq_fs.storage_unit import Units
from tq_fs.trajectory import PlannedStep, StepInput, StepRecord, Trajectory


class StepWriter:
    """Offloads Steps. Safe to call from many threads.

    Putting a Step and recording it in its session are one short region: if recording fails, what
    was put is cleared. A Step that is cancelled before a thread took it up is never written; after
    that it is put and recorded, whether or not anybody still waits.

    Parameters
    ----------
    units
        Take the Steps. None keeps every field in memory: the reference path.
    selected
        Names of the fields to take out of the way.
    pool
        Writer threads; stays the caller's.
    budget
        Bounds the bytes of Steps that are on their way; stays the caller's.
    """

    def __init__(
        self,
        units: Units | None,
        selected: frozenset[str],
        *,
        pool: Executor,
        budget: ByteBudget,
    ) -> None:
        self._units = units
        self._selected = selected if units is not None else frozenset()
        self._pool = pool
        self._budget = budget

    @property
    def selected(self) -> frozenset[str]:
        """Fields that go to the store."""
        return self._selected

    def submit(self, trajectory: Trajectory, step: StepInput) -> Future[StepRecord]:
        """Check a Step and send its selected fields off.

        Waits, up to the budget's deadline, until there is room for them. The arrays are not copied:
        they must not change before the future is done, nor at all where their field stays in
        memory.

        Returns
        -------
        Future of StepRecord
            Done when the fields are as durable as the policy says and the Step is recorded.

        Raises
        ------
        InputError
            The Step breaks a rule; nothing was written.
        BackpressureTimeout, StepTooLarge
            No room; nothing was written.
        """
        planned = trajectory.plan(step)
        kept = frozenset(planned.record.arrays) - self._selected
        arrays = _selected(trajectory.specs, planned, self._selected)
        if self._units is None or not arrays:
            done: Future[StepRecord] = Future()
            done.set_result(trajectory.commit(planned, None, kept))
            return done
        nbytes = sum(array.values.nbytes for array in arrays)
        self._budget.acquire(nbytes)
        load = [_Load(planned, arrays, kept)]
        del planned, arrays
        try:
            future = self._pool.submit(_put_and_commit, self._units, trajectory, load)
        except BaseException as error:
            self._budget.release(nbytes)
            if isinstance(error, RuntimeError):  # how a pool says that it was shut down
                name = str(load[0].planned.key)
                raise SessionClosed("its store was closed", subject=name) from error
            raise

        def settled(_: Future[StepRecord]) -> None:
            load.clear()  # a cancelled Step stays in the pool's queue: let its arrays go
            self._budget.release(nbytes)

        future.add_done_callback(settled)
        return future


def _selected(
    specs: Sequence[FieldSpec], planned: PlannedStep, names: frozenset[str]
) -> list[FieldArray]:
    arrays = planned.record.arrays
    return [FieldArray(spec, arrays[spec.name]) for spec in specs if spec.name in names]


class _Load(NamedTuple):
    """What a writer thread needs of a Step."""

    planned: PlannedStep
    arrays: Sequence[FieldArray]
    kept: frozenset[str]


def _put_and_commit(units: Units, trajectory: Trajectory, load: Sequence[_Load]) -> StepRecord:
    planned, arrays, kept = load[0]
    try:
        stored = units.put(planned.key, len(planned.record.tokens), arrays, fresh=True)
        return trajectory.commit(planned, stored, kept)
    except ObjectExists:
        raise  # what is there is somebody else's
    except BaseException as error:
        _withdraw(units, planned, error)
        raise


def _withdraw(units: Units, planned: PlannedStep, because: BaseException) -> None:
    """Remove what may have been put; the sweep is the second chance."""
    try:
        units.withdraw(planned.key)
    except TqFsError as error:
        because.add_note(f"and what was put could not be cleared: {error}")
