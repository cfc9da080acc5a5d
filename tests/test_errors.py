"""Errors name what happened, cross processes whole, and tell the handler what to do."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from tq_fs import errors
from tq_fs.errors import CapacityError, FatalError, InvalidKey, RetryError, TqFsError

ALL: list[Any] = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
GROUPS = (RetryError, CapacityError, FatalError)

# Codes are in logs, dashboards and HTTP bodies of other people: adding one is fine, no more.
CODES = {
    "TqFsError": "error",
    "RetryError": "retry",
    "StoreBusy": "store_busy",
    "StorageFailed": "storage_failed",
    "StorageThrottled": "storage_throttled",
    "StorageUnreachable": "storage_unreachable",
    "CapacityError": "capacity",
    "StorageFull": "storage_full",
    "BackpressureTimeout": "backpressure_timeout",
    "BudgetTooSmall": "budget_too_small",
    "FatalError": "fatal",
    "InputError": "input",
    "InvalidConfig": "invalid_config",
    "InvalidKey": "invalid_key",
    "InvalidField": "invalid_field",
    "ValueOutOfRange": "value_out_of_range",
    "ValueUnsupported": "value_unsupported",
    "RowCountMismatch": "row_count_mismatch",
    "WidthChanged": "width_changed",
    "EmptyStep": "empty_step",
    "StepTooLarge": "step_too_large",
    "InvalidLineage": "invalid_lineage",
    "InvalidSegment": "invalid_segment",
    "InvalidSelection": "invalid_selection",
    "ConflictError": "conflict",
    "ObjectExists": "object_exists",
    "SessionClosed": "session_closed",
    "WrongProcess": "wrong_process",
    "WrongStore": "wrong_store",
    "StaleReference": "stale_reference",
    "ReadOnlyStore": "read_only",
    "StoreFenced": "store_fenced",
    "MissingError": "missing",
    "ObjectMissing": "object_missing",
    "BucketMissing": "bucket_missing",
    "TrajectoryMissing": "trajectory_missing",
    "StepMissing": "step_missing",
    "SegmentMissing": "segment_missing",
    "FieldMissing": "field_missing",
    "CorruptError": "corrupt",
    "ObjectShort": "object_short",
    "ChunkCorrupt": "chunk_corrupt",
    "ManifestCorrupt": "manifest_corrupt",
    "FormatTooNew": "format_too_new",
    "ProtocolMismatch": "protocol_mismatch",
    "StorageDenied": "storage_denied",
    "CredentialsMissing": "credentials_missing",
    "CredentialsExpired": "credentials_expired",
    "ClockSkewed": "clock_skewed",
    "StorageRefused": "storage_refused",
    "WrongRegion": "wrong_region",
    "UpstreamUnavailable": "upstream_unavailable",
    "UpstreamTimeout": "upstream_timeout",
    "ProxyUnavailable": "proxy_unavailable",
    "TableFull": "table_full",
    "RolloutPaused": "rollout_paused",
    "SessionBusy": "session_busy",
    "InvalidRequest": "invalid_request",
    "ContextOverflow": "context_overflow",
    "VersionSpan": "version_span",
    "SessionMissing": "session_missing",
    "ReplyInvalid": "reply_invalid",
    "RoutingSuspect": "routing_suspect",
    "UpstreamRefused": "upstream_refused",
    "Unauthorized": "unauthorized",
    "DependencyMissing": "dependency_missing",
}

every = pytest.mark.parametrize("kind", ALL, ids=lambda k: k.__name__)


@every
def test_is_ours_and_in_one_group(kind: type[TqFsError]) -> None:
    assert issubclass(kind, TqFsError)
    assert sum(issubclass(kind, g) for g in GROUPS) == (kind is not TqFsError)


@every
def test_has_a_code_of_its_own(kind: type[TqFsError]) -> None:
    assert "code" in vars(kind)
    assert kind.code.replace("_", "").isalpha()
    assert kind.code.islower()
    assert [k for k in ALL if k.code == kind.code] == [kind]


def test_codes_are_stable() -> None:
    assert CODES.items() <= {kind.__name__: kind.code for kind in ALL}.items()


@every
def test_says_subject_problem_and_remedy(kind: type[TqFsError]) -> None:
    assert str(kind("full", subject="disk", remedy="make room")) == "disk: full; make room"
    assert str(kind("full", subject="disk")) == "disk: full"
    assert str(kind("full", remedy="make room")) == "full; make room"
    assert str(kind("full")) == "full"


@every
@pytest.mark.parametrize("clone", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_crosses_processes_whole(kind: type[TqFsError], clone: object) -> None:
    error = kind("full", subject="disk", remedy="make room")
    other = clone(error)  # type: ignore[operator]
    assert type(other) is kind
    assert (other.problem, other.subject, other.remedy) == ("full", "disk", "make room")
    assert str(other) == str(error)
    assert other.args == error.args


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.InputError, ValueError),
        (errors.StepTooLarge, ValueError),
        (errors.MissingError, LookupError),
        (errors.BucketMissing, LookupError),
        (errors.TrajectoryMissing, LookupError),
        (errors.DependencyMissing, ImportError),
    ],
)
def test_is_caught_as_the_builtin_it_resembles(
    kind: type[TqFsError], builtin: type[Exception]
) -> None:
    assert issubclass(kind, builtin)
    with pytest.raises(builtin, match="disk: full"):
        raise kind("full", subject="disk")
    assert issubclass(InvalidKey, ValueError)


def test_no_room_is_waited_for_that_cannot_come() -> None:
    """A handler of CapacityError releases and tries again; a Step too large never fits."""
    assert issubclass(errors.StepTooLarge, errors.InputError)
    assert issubclass(errors.WrongProcess, errors.ConflictError)


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (errors.StorageThrottled, errors.StorageFailed),  # and so it is tried again
        (errors.StorageUnreachable, errors.StorageFailed),
        (errors.CredentialsMissing, errors.StorageDenied),
        (errors.CredentialsExpired, errors.StorageDenied),
        (errors.ClockSkewed, errors.StorageDenied),
    ],
)
def test_a_finer_error_is_caught_as_the_coarser_one(
    kind: type[TqFsError], base: type[TqFsError]
) -> None:
    assert issubclass(kind, base)
