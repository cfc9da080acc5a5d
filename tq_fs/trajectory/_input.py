"""A model invocation as it arrives, and the record that is made of it once it was checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tq_fs import fields as f
from tq_fs.errors import EmptyStep, InvalidField
from tq_fs.fields import FieldSpec
from tq_fs.keys import StepKey
from tq_fs.manifests import Mode
from tq_fs.trajectory._records import Array, StepKind, StepRecord, Tokens
from tq_fs.trajectory._versions import step_runs


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


def checked_record(
    step: StepInput,
    parent: StepRecord | None,
    key: StepKey,
    specs: Sequence[FieldSpec],
    mode: Mode,
) -> StepRecord:
    """Return the record of a Step that follows `parent`, with all fields in memory.

    Raises
    ------
    EmptyStep, RowCountMismatch, WidthChanged, InvalidField, ValueOutOfRange
    """
    context, response = _token_ids(step.context, key), _token_ids(step.response, key)
    own = np.concatenate((context, response))
    appended = step.kind == "append"
    if not appended and not len(own):
        raise EmptyStep(f"a {step.kind} Step has at least one token", subject=str(key))
    prefix = parent.total if appended and parent else 0
    if prefix and parent is not None and mode == "snapshot":
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
    return replace(record, arrays=_arrays(step, record, specs, str(key)))


def _arrays(
    step: StepInput, record: StepRecord, specs: Sequence[FieldSpec], about: str
) -> dict[str, Array]:
    names = {spec.name for spec in specs}
    if set(step.values) != names:
        raise InvalidField(
            f"fields {sorted(step.values)} where {sorted(names)} are declared", subject=about
        )
    arrays = {}
    for spec in specs:
        array = f.coerce(spec, step.values[spec.name], about)
        array = _with_context(spec, array, record)
        rows = spec.row_count(len(record.tokens), opens_chain=record.prefix == 0)
        f.check_rows(spec, array, rows, about)
        arrays[spec.name] = array
    return arrays


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
