"""Whether a Segment's fragments say what they must: every row once, in order, inside its Step."""

from __future__ import annotations

from collections.abc import Mapping

from tq_fs.errors import InvalidSegment
from tq_fs.manifests._models import Fragment, SegmentEntry, SessionManifest
from tq_fs.steps import ArrayEntry, StepEntry


def check_manifest(manifest: SessionManifest) -> None:
    """Refuse a manifest with a Segment that could not be read whole.

    Raises
    ------
    InvalidSegment
    """
    steps = {step.index: step for step in manifest.steps}
    for segment in manifest.segments:
        check_segment(segment, steps, str(manifest.ref(segment)))


def check_segment(segment: SegmentEntry, steps: Mapping[int, StepEntry], subject: str) -> None:
    """Refuse fragments that overlap, leave a gap or leave their Step.

    Raises
    ------
    InvalidSegment
        Names the Segment, field and rows.
    """
    for field, fragments in segment.fields.items():
        about = f"{subject}, {field}"
        at = 0
        for fragment in fragments:
            _check_place(fragment, at, about)
            _check_source(fragment, steps, field, about)
            at = fragment.target[1]
        if at not in (segment.tokens, segment.tokens - 1):
            raise InvalidSegment(
                f"fragments end at row {at} of a Segment of {segment.tokens} tokens", subject=about
            )


def _check_place(fragment: Fragment, at: int, about: str) -> None:
    start, stop = fragment.target
    if start != at:
        what = "overlap" if start < at else "leave a gap"
        raise InvalidSegment(
            f"fragments {what} between rows {min(start, at)} and {max(start, at)}", subject=about
        )
    if stop - start != fragment.source[1] - fragment.source[0] or stop < start:
        raise InvalidSegment(
            f"rows {list(fragment.source)} cannot fill rows {list(fragment.target)}", subject=about
        )


def _check_source(
    fragment: Fragment, steps: Mapping[int, StepEntry], field: str, about: str
) -> None:
    step = steps.get(fragment.step)
    array: ArrayEntry | None = step.fields.get(field) if step else None
    if array is None:
        raise InvalidSegment(f"Step {fragment.step} does not hold the field", subject=about)
    if not 0 <= fragment.source[0] <= fragment.source[1] <= array.shape[0]:
        raise InvalidSegment(
            f"rows {list(fragment.source)} of Step {fragment.step}, which has {array.shape[0]}",
            subject=about,
        )
    if fragment.chunks != array.layout.chunk_range(fragment.source):
        raise InvalidSegment(
            f"chunks {list(fragment.chunks)} do not cover rows {list(fragment.source)}",
            subject=about,
        )
