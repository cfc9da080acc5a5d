"""Which Steps make up a Segment, and which of their rows. References only: nothing is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tq_fs.errors import InvalidConfig, StepMissing
from tq_fs.fields import FieldSpec
from tq_fs.manifests import Fragment, SegmentEntry, View
from tq_fs.trajectory._records import StepRecord, Tokens
from tq_fs.trajectory._versions import from_token, joined

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A Segment as training sees it; small, apart from the in-memory fields it carries.

    Attributes
    ----------
    ref
        The Segment's reference; None where nothing of it is stored.
    tokens
        Length T of the sample in tokens; shorter than the Segment's where it was truncated.
    response_length
        Tokens of the response, the tail of the sample.
    removed
        Whether training is to ignore it: its fields are zeros and nothing is read.
    arrays
        Fields on the in-memory path, whole as in the Segment.
    """

    ref: str | None
    tokens: int
    response_length: int
    removed: bool = False
    arrays: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """A trainable unit built from one or more Steps.

    Attributes
    ----------
    ref
        Its reference: all that has to travel of the stored fields. None if none is stored.
    session_id, view, index
        Where it comes from.
    steps
        Indexes of its Steps, in order.
    tokens
        int32 ``[T]``.
    loss_mask
        uint8 ``[T]``: 1 on generated tokens.
    versions
        Weight versions by run: ``(version, tokens)``.
    response_length
        Tokens from the first generated one to the end.
    arrays
        Fields on the in-memory path: tokens fields ``[T, …]``, transitions fields ``[T-1, …]``.
    extra
        What the session was finalized with: messages, tools, a label.
    """

    ref: str | None
    session_id: str
    view: View
    index: int
    steps: tuple[int, ...]
    tokens: Tokens
    loss_mask: npt.NDArray[np.uint8]
    versions: tuple[tuple[str, int], ...]
    response_length: int
    arrays: Mapping[str, Array]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def sample(self, *, tokens: int | None = None, removed: bool = False) -> Sample:
        """Return the Segment as a Sample, cut to its first `tokens` tokens where given."""
        length = len(self.tokens) if tokens is None else min(tokens, len(self.tokens))
        return Sample(
            ref=self.ref,
            tokens=length,
            response_length=max(0, self.response_length - (len(self.tokens) - length)),
            removed=removed,
            arrays=self.arrays,
        )


def chains(records: Sequence[StepRecord], view: View) -> list[list[StepRecord]]:
    """Return the Steps of each Segment of a view.

    ``lineage``: each chain once, whole. ``timeline``: in the order of time, a Segment ends
    wherever the session turned to another chain; in snapshot mode every Step is one, because it
    holds its whole sequence.
    """
    open_chain: dict[int, list[StepRecord]] = {}
    whole: list[list[StepRecord]] = []
    runs: list[list[StepRecord]] = []
    last = None
    for record in records:
        if record.opens_chain:
            chain = [record]
            whole.append(chain)
        else:
            assert record.parent is not None
            chain = open_chain[record.parent]
            chain.append(record)
        open_chain[record.index] = chain
        if chain is last and record.prefix:
            runs[-1] = list(chain)
        else:
            runs.append(list(chain) if record.prefix else [record])
        last = chain
    return whole if view == "lineage" else runs


def pieces(
    chain: Sequence[StepRecord], spec: FieldSpec
) -> list[tuple[StepRecord, tuple[int, int], tuple[int, int]]]:
    """Return ``(Step, source rows, target rows)`` of one field, each row of the Segment once.

    A Step gives only rows that no earlier Step of the chain has given, so that a snapshot chain
    keeps each token's values from the invocation that generated it.
    """
    out: list[tuple[StepRecord, tuple[int, int], tuple[int, int]]] = []
    done = 0
    for record in chain:
        first, stop = record.span(spec)
        if stop > done or not out:
            stop = max(stop, done)
            out.append((record, (done - first, stop - first), (done, stop)))
            done = stop
    return out


def segment_entry(
    chain: Sequence[StepRecord], specs: Sequence[FieldSpec], view: View, index: int
) -> SegmentEntry:
    """Describe a Segment for its manifest; `specs` are the stored fields."""
    return SegmentEntry(
        view=view,
        index=index,
        tokens=chain[-1].total,
        response_tokens=response_length(chain),
        fields={spec.name: _fragments(chain, spec) for spec in specs},
    )


def _fragments(chain: Sequence[StepRecord], spec: FieldSpec) -> tuple[Fragment, ...]:
    out = []
    for record, source, target in pieces(chain, spec):
        array = record.stored.fields.get(spec.name) if record.stored is not None else None
        if array is None:  # only where a session is read back
            raise StepMissing(f"its {spec.name} is not there", subject=f"Step {record.index}")
        chunks = array.layout.chunk_range(source)
        out.append(Fragment(step=record.index, source=source, target=target, chunks=chunks))
    return tuple(out)


def build_segment(
    chain: Sequence[StepRecord],
    resident: Sequence[FieldSpec],
    *,
    ref: str | None,
    session_id: str,
    view: View,
    index: int,
    extra: Mapping[str, Any] | None = None,
) -> Segment:
    """Put the resident parts of a chain's Steps together; `resident` are the in-memory fields."""
    new = _new_tokens(chain)
    tokens = np.concatenate([r.tokens[start:] for r, start in new])
    mask = np.concatenate([_loss_mask(r)[start:] for r, start in new])
    return Segment(
        ref=ref,
        session_id=session_id,
        view=view,
        index=index,
        steps=tuple(r.index for r in chain),
        tokens=tokens,
        loss_mask=mask,
        versions=_versions(new),
        response_length=response_length(chain),
        arrays={spec.name: _joined(chain, spec) for spec in resident},
        extra=extra or {},
    )


def response_length(chain: Sequence[StepRecord]) -> int:
    """Return the tokens from the first generated one to the end."""
    first = chain[0]
    return chain[-1].total - (len(first.tokens) - first.response)


def _new_tokens(chain: Sequence[StepRecord]) -> list[tuple[StepRecord, int]]:
    """Return each Step with the place in its tokens where those new to the chain begin."""
    done = 0
    out = []
    for record in chain:
        out.append((record, done - record.prefix))
        done = record.total
    return out


def _loss_mask(record: StepRecord) -> npt.NDArray[np.uint8]:
    mask = np.zeros(len(record.tokens), np.uint8)
    mask[len(mask) - record.response :] = 1
    return mask


def _joined(chain: Sequence[StepRecord], spec: FieldSpec) -> Array:
    parts = [r.arrays[spec.name][a:b] for r, (a, b), _ in pieces(chain, spec)]
    return np.concatenate(parts)


def _versions(new: Sequence[tuple[StepRecord, int]]) -> tuple[tuple[str, int], ...]:
    return joined(run for record, start in new for run in from_token(record.versions, start))


def check_views(views: Sequence[str]) -> tuple[View, ...]:
    """Return the views asked for.

    Raises
    ------
    InvalidConfig
        None, twice the same, or an unknown one.
    """
    known: tuple[View, ...] = ("lineage", "timeline")
    chosen = tuple(v for v in known if v in views)
    if not chosen or len(chosen) != len(views):
        raise InvalidConfig(f"{list(views)} where some of {list(known)} belong", subject="views")
    return chosen
