"""What consumers have released of a session, and what is still needed then. Pure."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from tq_fs.manifests import SegmentEntry, SessionManifest, SessionState

Released = Mapping[str, frozenset[str]]
"""For each consumer the Segments it has released, as ``view/index``; never changed."""


def _name(segment: SegmentEntry) -> str:
    return f"{segment.view}/{segment.index}"


def is_pending(segment: SegmentEntry, released: Released, consumer: str | None) -> bool:
    """Tell whether a consumer, or any where it is None, has still to release a Segment."""
    names = released if consumer is None else [c for c in released if c == consumer]
    return any(_name(segment) not in released[c] for c in names)


@functools.lru_cache(256)
def nothing_released(consumers: tuple[str, ...]) -> Released:
    """Return that nothing was released yet: one object for all sessions with these consumers."""
    return {consumer: frozenset() for consumer in consumers}


def released_of(consumers: tuple[str, ...], state: SessionState | None) -> Released:
    """Return what a session's note says; None where it has none."""
    if state is None or not any(state.released.values()):
        return nothing_released(consumers)
    return {c: frozenset(state.released.get(c, ())) for c in consumers}


def released_by_all(released: Released) -> frozenset[str]:
    """Return the Segments that every consumer has released."""
    return frozenset.intersection(*released.values()) if released else frozenset()


def is_over(manifest: SessionManifest, done: frozenset[str]) -> bool:
    """Tell whether nothing of a session is needed any more."""
    return all(_name(segment) in done for segment in manifest.segments)


def needed_steps(manifest: SessionManifest, done: frozenset[str]) -> set[int]:
    """Return the Steps that Segments outside of `done` refer to."""
    return {
        fragment.step
        for segment in manifest.segments
        if _name(segment) not in done
        for fragments in segment.fields.values()
        for fragment in fragments
    }
