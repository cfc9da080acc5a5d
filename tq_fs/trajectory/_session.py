"""One session while it is open: which Steps it has, and what may follow them.

Knows nothing of stores. The writer plans a Step here, puts its fields away, and commits it here;
planning and committing are two calls, so that a Step exists only once its fields are safe.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from tq_fs import fields as f
from tq_fs import narrow
from tq_fs.errors import EmptyStep, InvalidConfig, InvalidField, InvalidLineage, SessionClosed
from tq_fs.fields import FieldSpec
from tq_fs.keys import Incarnation, StepKey
from tq_fs.manifests import Mode
from tq_fs.steps import StepEntry
from tq_fs.trajectory._records import Array, StepKind, StepRecord, Tokens
from tq_fs.trajectory._versions import ANY_VERSIONS, VersionRule, step_runs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInput:
    """A model invocation as it arrives.

    Attributes
    ----------
    kind
        ``create``: a first prompt. ``append``: new messages after `parent`. ``branch``: another
        continuation from inside an earlier Step's sequence. ``boundary``: the history was
        rewritten (compaction) or the tools changed.
    parent
        Index of the Step it follows; None for create.
    context
        Prompt tokens: the whole prompt, or for append only those new since the parent
        (tool result, user turn, template tokens). int ``[c]``.
    response
        Generated tokens, int ``[r]``.
    values
        Fields by name: one row for each row the Step holds. A field with a `context_fill` may
        come with rows for the response only. Not copied: what stays in memory must not be changed
        afterwards, what goes to the store not before the Step is recorded.
    version
        Weight version, where there is one.
    versions
        Weight versions of the response, where there are several: ``(version, tokens)`` for each run
        of tokens, in order. A run may be empty: a version that was cut off after the prompt, whose
        routing it gave.
    reason
        Why a boundary was drawn.
    """

    kind: StepKind
    parent: int | None = None
    context: npt.ArrayLike
    response: npt.ArrayLike
    values: Mapping[str, npt.ArrayLike]
    version: str = ""
    versions: Sequence[tuple[str, int]] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """A checked Step that is not recorded yet: its record with all fields in memory."""

    key: StepKey
    record: StepRecord


class Trajectory:
    """Steps of one session incarnation. Safe to call from many threads.

    Parameters
    ----------
    incarnation
        Which session it is.
    specs
        Declared fields; every Step has all of them.
    mode
        ``tito`` or ``snapshot``.
    versions
        Which weight versions its Steps may hold together.
    compact
        Keep ids of fields that stay in memory in their stored type.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        specs: Sequence[FieldSpec],
        mode: Mode = "tito",
        *,
        versions: VersionRule = ANY_VERSIONS,
        compact: bool = False,
    ) -> None:
        if mode not in ("tito", "snapshot"):
            raise InvalidConfig(f"{mode!r} is neither tito nor snapshot", subject="mode")
        self.incarnation = incarnation
        self.mode: Mode = mode
        self.specs = tuple(specs)
        self.rule = versions
        self._compact = compact
        self._versions: frozenset[str] = frozenset()
        self._records: dict[int, StepRecord] = {}
        self._continued: set[int] = set()
        self._next = 0
        self._closed = ""
        self._lock = threading.Lock()

    # ------------------------------------------------------------ plan and commit

    def plan(self, step: StepInput) -> PlannedStep:
        """Check a Step against the rules and give it its index. Nothing is recorded yet.

        Raises
        ------
        EmptyStep, InvalidLineage, RowCountMismatch, WidthChanged, InvalidField
            Nothing has changed.
        VersionSpan
            Its weight versions may not stand beside those of earlier Steps; nothing has changed.
        SessionClosed
            Finalized or discarded.
        """
        with self._lock:
            self._check_open()
            parent = self._parent(step)
            key = StepKey(self.incarnation, self._next)
            record = self._record(step, parent, key)
            self._check_versions(record)
            self._next += 1
        return PlannedStep(key, record)

    def commit(
        self, planned: PlannedStep, stored: StepEntry | None, kept: frozenset[str]
    ) -> StepRecord:
        """Record a Step whose fields are safe.

        Parameters
        ----------
        stored
            What the store says of the fields it took.
        kept
            Names of the fields that stay in memory; the others' arrays are let go.

        Raises
        ------
        InvalidLineage
            Another Step was appended to the same parent in the meantime.
        WidthChanged
            Another Step fixed another row shape in the meantime.
        VersionSpan
            Another Step of other weights was recorded in the meantime.
        ValueOutOfRange
            An id that is to be kept in its stored type does not fit it.
        SessionClosed
            Finalized or discarded in the meantime.
        """
        arrays = self._kept(planned, kept)
        record = replace(planned.record, arrays=arrays, stored=stored)
        with self._lock:
            self._check_open()
            if record.kind == "append":
                assert record.parent is not None
                self._check_tip(record.parent)
            self._versions = self._check_versions(record)
            self.specs = tuple(_fixed(s, planned) for s in self.specs)
            if record.parent is not None and record.kind == "append":
                self._continued.add(record.parent)
            self._records[record.index] = record
        return record

    def records(self) -> list[StepRecord]:
        """Return the recorded Steps by index."""
        with self._lock:
            return [self._records[i] for i in sorted(self._records)]

    def close(self, why: str, *, again: bool = False) -> None:
        """Let no further Step in.

        Parameters
        ----------
        again
            It may have been closed before for the same reason.

        Raises
        ------
        SessionClosed
            It was closed before.
        """
        with self._lock:
            if not (again and self._closed == why):
                self._check_open()
            self._closed = why

    def reopen(self) -> None:
        """Let Steps in again, after a finalize that failed."""
        with self._lock:
            self._closed = ""

    @property
    def closed(self) -> bool:
        """Whether it was finalized or discarded."""
        return bool(self._closed)

    def first_row(self, kind: StepKind, parent: int | None) -> int:
        """Return which row of the whole sequence's routing is the Step's first.

        An engine returns rows for the whole sequence; ``rows[first_row:]`` are the Step's own.
        """
        if kind != "append" or self.mode == "snapshot" or parent is None:
            return 0
        with self._lock:
            record = self._records.get(parent)
        if record is None:
            raise InvalidLineage(f"Step {parent} is not recorded", subject=str(self.incarnation))
        return max(0, record.total - 1)

    def sequence(self, index: int) -> Tokens:
        """Return all tokens up to and including a recorded Step's, int32 ``[total]``.

        Not a copy where the Step holds them all: it must not be changed.

        Raises
        ------
        InvalidLineage
            No such Step is recorded.
        """
        parts: list[Tokens] = []
        with self._lock:
            record = self._records.get(index)
            while record is not None:
                parts.append(record.tokens)
                before = record.parent if record.prefix else None
                record = None if before is None else self._records[before]
        if not parts:
            raise InvalidLineage(f"Step {index} is not recorded", subject=str(self.incarnation))
        return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])

    # ------------------------------------------------------------ rules

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed(f"was {self._closed}", subject=str(self.incarnation))

    def _parent(self, step: StepInput) -> StepRecord | None:
        about = f"Step {self._next} of {self.incarnation}"
        if step.kind not in get_args(StepKind):
            raise InvalidLineage(f"{step.kind!r} is no kind of Step", subject=about)
        if (step.kind == "create") != (step.parent is None):
            raise InvalidLineage("create has no parent, every other kind has one", subject=about)
        if step.parent is None:
            return None
        parent = self._records.get(step.parent)
        if parent is None:
            raise InvalidLineage(f"its parent, Step {step.parent}, is not recorded", subject=about)
        if step.kind == "append":
            self._check_tip(step.parent)
        return parent

    def _check_tip(self, parent: int) -> None:
        if parent in self._continued:
            raise InvalidLineage(
                f"another Step was appended to Step {parent} already",
                subject=str(self.incarnation),
                remedy="record it as a branch, with its whole prompt",
            )

    def _check_versions(self, record: StepRecord) -> frozenset[str]:
        """Return the versions of all Steps with those of one more, or refuse it."""
        versions = self._versions.union(version for version, _ in record.versions)
        if versions != self._versions:
            self.rule.check(versions, f"Step {record.index} of {self.incarnation}")
        return versions

    def _kept(self, planned: PlannedStep, names: frozenset[str]) -> dict[str, Array]:
        """Return the arrays that stay in memory, in the types they are kept in."""
        arrays = {n: a for n, a in planned.record.arrays.items() if n in names}
        if not self._compact:
            return arrays
        about = str(planned.key)
        by_name = {spec.name: spec for spec in self.specs}
        return {n: narrow.narrowed(by_name[n], a, about) for n, a in arrays.items()}

    def _record(self, step: StepInput, parent: StepRecord | None, key: StepKey) -> StepRecord:
        context, response = _token_ids(step.context, key), _token_ids(step.response, key)
        own = np.concatenate((context, response))
        appended = step.kind == "append"
        if not appended and not len(own):
            raise EmptyStep(f"a {step.kind} Step has at least one token", subject=str(key))
        prefix = parent.total if appended and parent else 0
        if prefix and parent is not None and self.mode == "snapshot":
            own, prefix = np.concatenate((parent.tokens, own)), 0
        record = StepRecord(
            index=key.step_index,
            kind=step.kind,
            parent=step.parent,
            prefix=prefix,
            tokens=own,
            response=len(response),
            versions=step_runs(step.version, step.versions, len(own), len(response), str(key)),
            reason=step.reason,
            arrays={},
        )
        return replace(record, arrays=self._arrays(step, record, str(key)))

    def _arrays(self, step: StepInput, record: StepRecord, about: str) -> dict[str, Array]:
        names = {spec.name for spec in self.specs}
        if set(step.values) != names:
            raise InvalidField(
                f"fields {sorted(step.values)} where {sorted(names)} are declared", subject=about
            )
        arrays = {}
        for spec in self.specs:
            array = f.coerce(spec, step.values[spec.name], about)
            array = _with_context(spec, array, record)
            rows = spec.row_count(len(record.tokens), opens_chain=record.prefix == 0)
            f.check_rows(spec, array, rows, about)
            arrays[spec.name] = array
        return arrays


def _fixed(spec: FieldSpec, planned: PlannedStep) -> FieldSpec:
    """Return `spec` with the row shape that the session's first Step gives it."""
    array = planned.record.arrays[spec.name]
    f.check_rows(spec, array, len(array), str(planned.key))
    return f.with_inner(spec, array)


_TOKENS = FieldSpec(name="tokens", dtype="int32", stored="int32")


def _token_ids(values: npt.ArrayLike, key: StepKey) -> Tokens:
    array = f.coerce(_TOKENS, values if np.size(values) else np.empty(0, np.int32), str(key))
    if array.ndim != 1:
        raise InvalidField(f"token ids of shape {list(array.shape)}", subject=str(key))
    return array


def _with_context(spec: FieldSpec, array: Array, record: StepRecord) -> Array:
    """Fill in the rows of context tokens, where the engine reports only generated ones."""
    missing = len(record.tokens) - record.response
    if spec.context_fill is None or array.ndim == 0 or len(array) != record.response or not missing:
        return array
    whole: npt.NDArray[Any] = np.empty((len(record.tokens), *array.shape[1:]), array.dtype)
    whole[:missing] = spec.context_fill
    whole[missing:] = array
    return whole
