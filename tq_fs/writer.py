"""StepWriter: takes a Step's selected fields out of the Proxy's memory, without holding it up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from time import perf_counter
from typing import NamedTuple

from tq_fs.budget import ByteBudget
from tq_fs.errors import ObjectExists, SessionClosed, TqFsError
from tq_fs.fields import FieldSpec
from tq_fs.logs import carried, log_context
from tq_fs.metrics import Counter, Metrics, Sample
from tq_fs.steps import FieldArray, StepEntry
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
    metrics
        Counts Steps, bytes, seconds and errors; None counts nothing. The queue is for
        :meth:`~tq_fs.metrics.Metrics.watch`: see :meth:`samples`.
    """

    def __init__(
        self,
        units: Units | None,
        selected: frozenset[str],
        *,
        pool: Executor,
        budget: ByteBudget,
        metrics: Metrics | None = None,
    ) -> None:
        self._units = units
        self._selected = selected if units is not None else frozenset()
        self._pool = pool
        self._budget = budget
        self._meter = None if metrics is None else _Meter(metrics)
        self._failures = nullcontext() if metrics is None else metrics.failures("write")

    @property
    def selected(self) -> frozenset[str]:
        """Fields that go to the store."""
        return self._selected

    def samples(self) -> Iterator[Sample]:
        """Yield what :meth:`tq_fs.metrics.Metrics.watch` wants to know."""
        yield Sample("tqfs_inflight_steps", self._budget.holders)
        yield Sample("tqfs_inflight_bytes", self._budget.used_bytes)
        yield Sample("tqfs_inflight_peak_bytes", self._budget.peak_bytes)
        yield Sample("tqfs_inflight_limit_bytes", self._budget.limit_bytes)
        yield Sample("tqfs_inflight_waiting", self._budget.waiting)

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
        with self._failures:
            return self._submit(trajectory, step)

    def _submit(self, trajectory: Trajectory, step: StepInput) -> Future[StepRecord]:
        since = perf_counter()
        planned = trajectory.plan(step)
        kept = frozenset(planned.record.arrays) - self._selected
        arrays = _selected(trajectory.specs, planned, self._selected)
        if self._units is None or not arrays:
            done: Future[StepRecord] = Future()
            done.set_result(trajectory.commit(planned, None, kept))
            return done
        nbytes = sum(array.values.nbytes for array in arrays)
        self._budget.acquire(nbytes)
        load = [_Load(planned, arrays, kept, since)]
        del planned, arrays
        try:
            future = self._pool.submit(carried(self._write), self._units, trajectory, load)
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

    def _write(self, units: Units, trajectory: Trajectory, load: Sequence[_Load]) -> StepRecord:
        begun = perf_counter()
        key, since = load[0].planned.key, load[0].since
        with log_context(session=key.incarnation.session_id, step=key.step_index), self._failures:
            record = _put_and_commit(units, trajectory, load)
        if self._meter is not None and record.stored is not None:
            self._meter.wrote(record.stored, waited_s=begun - since, took_s=perf_counter() - begun)
        return record


class _Meter:
    """What is counted of a Step that was written."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._targets: dict[str, tuple[Counter, Counter]] = {}
        self._waited = metrics.histogram("tqfs_step_queue_seconds")
        self._took = metrics.histogram("tqfs_step_write_seconds")

    def wrote(self, stored: StepEntry, *, waited_s: float, took_s: float) -> None:
        self._waited.observe(waited_s)
        self._took.observe(took_s)
        steps, nbytes = self._by_target(stored.unit)
        steps.add()
        nbytes.add(stored.nbytes)

    def _by_target(self, unit: str) -> tuple[Counter, Counter]:
        known = self._targets.get(unit)
        if known is None:
            steps = self._metrics.counter("tqfs_steps_written_total", target=unit)
            nbytes = self._metrics.counter("tqfs_written_bytes_total", target=unit)
            known = self._targets[unit] = steps, nbytes
        return known


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
    since: float


def _put_and_commit(units: Units, trajectory: Trajectory, load: Sequence[_Load]) -> StepRecord:
    planned, arrays, kept, _ = load[0]
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
