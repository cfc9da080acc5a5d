"""The error tree: what happened, to which object, and what to do about it.

Errors are grouped by what a handler does next:

* :class:`RetryError`: the same call can succeed later, unchanged;
* :class:`CapacityError`: somebody has to make room first;
* :class:`FatalError`: the call, the data or the configuration must change.

Every class has a stable ``code`` for logs, metrics and HTTP bodies. A message reads
``subject: problem; remedy``.
"""

from __future__ import annotations

from typing import ClassVar


class TqFsError(Exception):
    """Base of everything this package raises on purpose.

    Parameters
    ----------
    problem
        What happened, with the numbers.
    subject
        The object it happened to: a Step, a field, a chunk, a file, a setting.
    remedy
        What the reader of the message can do.
    """

    code: ClassVar[str] = "error"

    def __init__(self, problem: str, *, subject: str = "", remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.subject = subject
        self.remedy = remedy

    def __str__(self) -> str:
        """Return ``subject: problem; remedy`` without the parts that are empty."""
        head = f"{self.subject}: {self.problem}" if self.subject else self.problem
        return f"{head}; {self.remedy}" if self.remedy else head

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle all three parts, so that an error crosses processes whole."""
        return _rebuild, (type(self), self.problem, self.subject, self.remedy)


def _rebuild(kind: type[TqFsError], problem: str, subject: str, remedy: str) -> TqFsError:
    return kind(problem, subject=subject, remedy=remedy)


# ---------------------------------------------------------------- retry


class RetryError(TqFsError):
    """The same call can succeed later."""

    code = "retry"


class StoreBusy(RetryError):
    """Another process holds the store's directory for writing."""

    code = "store_busy"


class StorageFailed(RetryError):
    """The file system or server failed in a way that may pass (EIO, ETIMEDOUT …)."""

    code = "storage_failed"


class StorageThrottled(StorageFailed):
    """The server asked for fewer requests (503 SlowDown, 429)."""

    code = "storage_throttled"


class StorageUnreachable(StorageFailed):
    """No answer: refused, reset or timed out, or the name of the host is not known."""

    code = "storage_unreachable"


class UnitsUnavailable(RetryError):
    """StorageUnits, or the Controller, could not be started or reached in time."""

    code = "units_unavailable"


class ActorLost(RetryError):
    """A process of the rollout or of training ended; what it read is still stored."""

    code = "actor_lost"


class RanksMissing(RetryError):
    """Ranks did not come to the barrier in time; nothing was released."""

    code = "ranks_missing"


class UpstreamUnavailable(RetryError):
    """The rollout engine gave no answer: refused, broken off, timed out, or an error of its own."""

    code = "upstream_unavailable"


class UpstreamTimeout(UpstreamUnavailable):
    """The rollout engine did not answer in time."""

    code = "upstream_timeout"


class ProxyUnavailable(RetryError):
    """The Proxy gave no answer, or one that is none of its own."""

    code = "proxy_unavailable"


class RolloutPaused(RetryError):
    """Generation is paused, and was not resumed in time."""

    code = "rollout_paused"


class SessionBusy(RetryError):
    """Requests of the session are still running; nothing has changed."""

    code = "session_busy"


# ---------------------------------------------------------------- make room


class CapacityError(TqFsError):
    """Something is full; nothing was written and nothing is lost."""

    code = "capacity"


class StorageFull(CapacityError):
    """No room on the device, or the quota is used up; nothing is visible."""

    code = "storage_full"


class BackpressureTimeout(CapacityError):
    """Writers outran the disk: no in-flight room came free before the deadline."""

    code = "backpressure_timeout"


class BudgetTooSmall(CapacityError):
    """One sample is larger than the byte budget it has to be hydrated in."""

    code = "budget_too_small"


class TableFull(CapacityError):
    """The Proxy holds as many sessions, open or finalized, as it may."""

    code = "table_full"


# ---------------------------------------------------------------- give up


class FatalError(TqFsError):
    """The call cannot succeed as it is."""

    code = "fatal"


class InputError(FatalError, ValueError):
    """The caller's data or arguments are wrong; nothing was written."""

    code = "input"


class InvalidConfig(InputError):
    """A setting, flag or URL makes no sense."""

    code = "invalid_config"


class InvalidKey(InputError):
    """An id or reference cannot name anything in a store."""

    code = "invalid_key"


class InvalidField(InputError):
    """A field's array has the wrong type or shape."""

    code = "invalid_field"


class ValueOutOfRange(InputError):
    """A value does not fit the field's stored type or its declared limit."""

    code = "value_out_of_range"


class ValueUnsupported(InputError):
    """A value, or a part of one, is of a type that is stored as a pickle only, or not at all."""

    code = "value_unsupported"


class RowCountMismatch(InputError):
    """The number of rows is not the number the Step's tokens call for."""

    code = "row_count_mismatch"


class WidthChanged(InputError):
    """The shape of a row differs from earlier Steps of the session, or from the model's."""

    code = "width_changed"


class EmptyStep(InputError):
    """A Step that opens a chain has no tokens."""

    code = "empty_step"


class StepTooLarge(InputError):
    """One Step is larger than the whole in-flight budget: no waiting makes room for it."""

    code = "step_too_large"


class InvalidLineage(InputError):
    """A Step hangs on a Step that cannot carry it."""

    code = "invalid_lineage"


class InvalidSegment(InputError):
    """A Segment's fragments overlap, leave a gap or point outside of their Step."""

    code = "invalid_segment"


class InvalidSelection(InputError):
    """A token or layer range lies outside of the Segment."""

    code = "invalid_selection"


class InvalidRequest(InputError):
    """A request's body or headers are not what the endpoint takes; nothing has changed."""

    code = "invalid_request"


class ContextOverflow(InputError):
    """Prompt and asked for tokens are longer than the model's context; nothing was generated."""

    code = "context_overflow"


class ConflictError(FatalError):
    """The store holds something that forbids the call."""

    code = "conflict"


class ObjectExists(ConflictError):
    """The key is taken by other content, which is unchanged."""

    code = "object_exists"


class SessionClosed(ConflictError):
    """The session was finalized or discarded, or its store was closed."""

    code = "session_closed"


class VersionSpan(ConflictError):
    """A trajectory would hold tokens of more weight versions than is allowed."""

    code = "version_span"


class WrongProcess(ConflictError):
    """The store was opened in another process, of which this one is a fork."""

    code = "wrong_process"


class WrongStore(ConflictError):
    """A reference, Step or directory belongs to another store."""

    code = "wrong_store"


class StaleReference(ConflictError):
    """The reference is of an older incarnation of its session."""

    code = "stale_reference"


class ReadOnlyStore(ConflictError):
    """The store was opened for reading only."""

    code = "read_only"


class StoreFenced(ConflictError):
    """A later process has opened the store for writing, and owns it now."""

    code = "store_fenced"


class MissingError(FatalError, LookupError):
    """What was asked for is not there."""

    code = "missing"


class ObjectMissing(MissingError):
    """No such object in the backend."""

    code = "object_missing"


class BucketMissing(MissingError):
    """The bucket or container of the store does not exist."""

    code = "bucket_missing"


class TrajectoryMissing(MissingError):
    """The resident fields of a session were not kept with its manifest."""

    code = "trajectory_missing"


class StepMissing(MissingError):
    """A Step that a manifest refers to is gone."""

    code = "step_missing"


class UnitLost(MissingError):
    """The StorageUnit that holds it is gone with its node, and nobody else has it."""

    code = "unit_lost"


class SegmentMissing(MissingError):
    """No finalized Segment has this reference: unknown, discarded or released."""

    code = "segment_missing"


class SessionMissing(MissingError):
    """No such session is open or kept."""

    code = "session_missing"


class ValueMissing(MissingError):
    """A value was never put, or it was cleared."""

    code = "value_missing"


class CheckpointMissing(MissingError):
    """The store does not keep what a checkpoint speaks of any more."""

    code = "checkpoint_missing"


class FieldMissing(MissingError):
    """The Segment does not hold this field."""

    code = "field_missing"


class CorruptError(FatalError):
    """Stored bytes are not what was written."""

    code = "corrupt"


class ObjectShort(CorruptError):
    """An object ends before the bytes that should be there."""

    code = "object_short"


class ChunkCorrupt(CorruptError):
    """A chunk fails its checksum, or does not decode to its declared size."""

    code = "chunk_corrupt"


class ManifestCorrupt(CorruptError):
    """A manifest or Step description cannot be read."""

    code = "manifest_corrupt"


class ReplyInvalid(CorruptError):
    """A reply of the rollout engine is short, or contradicts itself; it was not recorded."""

    code = "reply_invalid"


class RoutingSuspect(CorruptError):
    """Routing rows that no router gives: all one id, or an id twice; they were not recorded."""

    code = "routing_suspect"


class ProtocolMismatch(FatalError):
    """A message over the channel is none of this version, or breaks its rules."""

    code = "protocol_mismatch"


class FormatTooNew(CorruptError):
    """Written by a later version of tq-fs than this one."""

    code = "format_too_new"


class StorageDenied(FatalError):
    """No permission, wrong credentials, or a read-only file system."""

    code = "storage_denied"


class CredentialsMissing(StorageDenied):
    """No credentials were found."""

    code = "credentials_missing"


class CredentialsExpired(StorageDenied):
    """The credentials were good, and are no more."""

    code = "credentials_expired"


class ClockSkewed(StorageDenied):
    """The clocks of this machine and of the server differ too much for a signature."""

    code = "clock_skewed"


class StorageRefused(FatalError):
    """The server does not take the request as it is."""

    code = "storage_refused"


class UpstreamRefused(FatalError):
    """The rollout engine refuses the request; asking again is in vain."""

    code = "upstream_refused"


class Unauthorized(FatalError):
    """The request carries no token, or a wrong one."""

    code = "unauthorized"


class WrongRegion(FatalError):
    """The bucket lies in another region, or the endpoint does not serve it."""

    code = "wrong_region"


class DependencyMissing(FatalError, ImportError):
    """An optional library is needed for this."""

    code = "dependency_missing"
