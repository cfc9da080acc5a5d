"""One session while it is open: which Steps it has, and what may follow them.

Knows nothing of stores. The writer plans a Step here, puts its fields away, and commits it here;
planning and committing are two calls, so that a Step exists only once its fields are safe.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np

from tq_fs import fields as f
from tq_fs import narrow
from tq_fs.errors import InvalidConfig, InvalidLineage, SessionClosed
from tq_fs.fields import FieldSpec
from tq_fs.keys import Incarnation, StepKey
from tq_fs.manifests import Mode
from tq_fs.steps import StepEntry
from tq_fs.trajectory._input import PlannedStep, StepInput, checked_record
from tq_fs.trajectory._records import Array, StepKind, StepRecord, Tokens
from tq_fs.trajectory._versions import ANY_VERSIONS, VersionRule


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
        self._room: dict[int, Tokens] = {}
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
            record = checked_record(step, parent, key, self.specs, self.mode)
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
            appended = record.parent if record.kind == "append" else None
            if appended is not None:
                self._check_tip(appended)
            versions = self._check_versions(record)
            specs = tuple(_fixed(s, planned) for s in self.specs)
            if appended is not None:
                record = self._in_chain(record, appended)
                self._continued.add(appended)
            self._versions, self.specs = versions, specs
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

    def _in_chain(self, record: StepRecord, parent: int) -> StepRecord:
        """Return an append Step with its tokens in memory that its chain shares, each token once.

        In snapshot mode it begins with its parent's tokens, and nothing else follows those in the
        parent's memory: a Step is appended to once.
        """
        if self.mode != "snapshot":
            return record
        old, new = len(self._records[parent].tokens), len(record.tokens)
        room = self._room.get(parent, _NO_ROOM)
        if new <= len(room):
            room[old:new] = record.tokens[old:]
        else:
            room = np.empty(new + new // 2, np.int32)
            room[:new] = record.tokens
            self._move(parent, room)
        self._room.pop(parent, None)
        self._room[record.index] = room
        return replace(record, tokens=room[:new])

    def _move(self, last: int | None, room: Tokens) -> None:
        """Let a chain's Steps, up to `last`, refer to memory that begins with their tokens."""
        while last is not None:
            record = self._records[last]
            self._records[last] = replace(record, tokens=room[: len(record.tokens)])
            last = record.parent if record.kind == "append" else None

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


def _fixed(spec: FieldSpec, planned: PlannedStep) -> FieldSpec:
    """Return `spec` with the row shape that the session's first Step gives it."""
    array = planned.record.arrays[spec.name]
    f.check_rows(spec, array, len(array), str(planned.key))
    return f.with_inner(spec, array)


_NO_ROOM: Tokens = np.empty(0, np.int32)
