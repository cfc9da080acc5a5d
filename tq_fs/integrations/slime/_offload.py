"""A rollout's samples into the store: all of them, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeVar

from tq_fs.errors import FieldMissing, InvalidField, RowCountMismatch, TqFsError
from tq_fs.fields import LOGPROBS, ROUTED_EXPERTS, FieldSpec, check_routed
from tq_fs.integrations.slime._settings import ATTRIBUTES, CONSUMER
from tq_fs.keys import Incarnation
from tq_fs.session import Session
from tq_fs.store import Store
from tq_fs.trajectory import Sample, StepInput, Trajectory

_THREADS = 8  # in a cluster and an object store each session costs some round trips

Item = TypeVar("Item")
Made = TypeVar("Made")


class _Job(NamedTuple):
    """One sample on its way."""

    name: str
    step: StepInput


def offload(
    store: Store,
    samples: Sequence[Any],
    fields: Sequence[FieldSpec],
    *,
    rollout_id: int | None,
    routed_layers: Sequence[int] = (),
) -> list[Sample]:
    """Record a session for each sample and finalize it.

    Samples that are marked removed are not written: training gets zeros for them.

    Parameters
    ----------
    samples
        slime's samples of one rollout.
    fields
        What is stored of each.
    rollout_id
        Hold the release of what was written until this rollout's checkpoint is saved; None for a
        release by somebody else.
    routed_layers
        Layers in which a sample's routing may not be all zeros.

    Returns
    -------
    list of Sample
        A reference for each sample, small enough to travel.

    Raises
    ------
    FieldMissing, RowCountMismatch, WidthChanged, InvalidField, ValueOutOfRange, EmptyStep
        A sample is malformed, by name; nothing is visible.
    StorageFull, BackpressureTimeout, StorageFailed
        Nothing is visible.
    """
    jobs = [_job(s, at, fields, rollout_id, routed_layers) for at, s in enumerate(samples)]
    written = iter(_write(store, [job for job in jobs if job is not None], rollout_id))
    return [
        Sample(
            ref=None if job is None else next(written),
            tokens=len(sample.tokens),
            response_length=sample.response_length,
            removed=job is None,
        )
        for sample, job in zip(samples, jobs, strict=True)
    ]


# ---------------------------------------------------------------- checks


def _job(
    sample: Any,
    position: int,
    fields: Sequence[FieldSpec],
    rollout_id: int | None,
    routed_layers: Sequence[int],
) -> _Job | None:
    """Check a sample; None where it is removed. Keeps no copy of its arrays."""
    name = f"rollout {rollout_id}, sample {sample.index}, position {position}"
    if not 0 <= sample.response_length <= len(sample.tokens):
        raise InvalidField(
            f"a response of {sample.response_length} in {len(sample.tokens)} tokens", subject=name
        )
    if getattr(sample, "remove_sample", False):
        return None
    prompt = len(sample.tokens) - sample.response_length
    step = StepInput(
        kind="create",
        context=sample.tokens[:prompt],
        response=sample.tokens[prompt:],
        values={spec.name: _values(sample, spec, name) for spec in fields},
        version=str((getattr(sample, "weight_versions", None) or [""])[-1]),
    )
    planned = Trajectory(Incarnation("train", name, "checked"), fields).plan(step)
    if ROUTED_EXPERTS in planned.record.arrays:
        check_routed(planned.record.arrays[ROUTED_EXPERTS], routed_layers, name)
    return _Job(name, step)


def _values(sample: Any, spec: FieldSpec, name: str) -> Any:
    attribute = ATTRIBUTES[spec.name]
    values = getattr(sample, attribute, None)
    if values is None:
        raise FieldMissing(
            f"has no {attribute}",
            subject=name,
            remedy="make the engine return it, or name in `transfer` only what it returns",
        )
    if spec.name == LOGPROBS and len(values) != sample.response_length:
        raise RowCountMismatch(
            f"{len(values)} rows for a response of {sample.response_length}",
            subject=f"{name}, {attribute}",
        )
    return values


# ---------------------------------------------------------------- writing


def _write(store: Store, jobs: Sequence[_Job], rollout_id: int | None) -> list[str]:
    open_sessions: dict[str, Session] = {}
    refs: dict[str, str] = {}

    def record(job: _Job) -> None:
        session = open_sessions[job.name] = store.session(job.name)
        session.record(job.step)

    def finish(job: _Job) -> str:
        (segment,) = open_sessions[job.name].finalize(consumers=[CONSUMER])
        assert segment.ref is not None
        refs[job.name] = segment.ref
        if rollout_id is not None:
            store.release([segment.ref], CONSUMER, rollout_id=rollout_id)
        return segment.ref

    with ThreadPoolExecutor(_THREADS, "tq-fs-slime") as pool:
        try:
            _each(pool, record, jobs)
            return _each(pool, finish, jobs)
        except BaseException as error:
            for name, session in open_sessions.items():
                _withdraw(store, session, refs.get(name), error)
            raise


def _each(
    pool: ThreadPoolExecutor, call: Callable[[Item], Made], items: Sequence[Item]
) -> list[Made]:
    """Return what the calls return; after a failure none is begun, and none still runs."""
    futures = [pool.submit(call, item) for item in items]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


def _withdraw(store: Store, session: Session, ref: str | None, because: BaseException) -> None:
    """Take back what was written of a sample; what resists is swept, or named."""
    try:
        if ref is None:
            session.discard()
        else:
            store.release([ref], CONSUMER)
    except TqFsError as error:
        because.add_note(f"and {session.session_id} could not be taken back: {error}")
