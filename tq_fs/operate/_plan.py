"""What is done about findings: mend what can be mended, set aside what cannot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from tq_fs.manifests import MANIFEST, Found, SegmentEntry
from tq_fs.operate._findings import Finding
from tq_fs.operate._mend import mending
from tq_fs.operate._opened import OpenedStore
from tq_fs.operate._quarantine import (
    QUARANTINE,
    lost_segments,
    set_aside_segments,
    set_aside_session,
    set_aside_trajectory,
)
from tq_fs.operate._sessions import UNUSABLE, read_session
from tq_fs.operate._verify import needed_of

_FAILED = "the disk does not give all of its Steps back: see to disk and permissions first"
_WHOLE_SESSION = frozenset({"unreadable", "no-data"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing that a repair does, or would do.

    Attributes
    ----------
    kind
        ``remove``: nothing needs it. ``set aside``: moved below ``quarantine/``. ``mend``: made
        whole again from a good copy, or from what the manifest says. ``leave``: not touched.
    place
        What it is about.
    detail
        Why, and what follows.
    refs
        References of Segments that can be trained on no more.
    nbytes
        Bytes that come free.
    """

    kind: str
    place: str
    detail: str
    refs: tuple[str, ...] = ()
    nbytes: int = 0


Step = tuple[Callable[[], object], Action]
"""What does it, and what it is."""


def plan_repair(store: OpenedStore, findings: Sequence[Finding]) -> Iterator[Step]:
    """Yield what is to be done about findings, session by session.

    Each is to be done before the next is asked for, or none is.
    """
    by_path: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        by_path[finding.path].append(finding)
    for path, mine in by_path.items():
        yield from _plan_session(store, path, mine)


def _plan_session(store: OpenedStore, path: str, mine: Sequence[Finding]) -> Iterator[Step]:
    found = read_session(store, path)
    kinds = {finding.kind for finding in mine}
    if "too-new" in kinds:
        detail = "written by a later version of tq-fs, which has to look after it"
        yield _nothing, Action(kind="leave", place=f"manifests/{path}", detail=detail)
        return
    if not isinstance(found, Found) or kinds & _WHOLE_SESSION:
        whole = found if isinstance(found, Found) else _manifest_alone(store, path)
        yield _session_aside(store, path, mine, whole)
        return
    for finding in mine:
        if finding.kind == "trajectory":
            detail = "its resident fields cannot be used; its Segments can still be trained on"
            action = Action(kind="set aside", place=finding.place, detail=detail)
            yield partial(set_aside_trajectory, store, path), action
    yield from _plan_steps(store, found, [f for f in mine if f.step is not None])


def _manifest_alone(store: OpenedStore, path: str) -> Found | None:
    """Return a session's manifest, as if nothing were released, where only that is unknown."""
    try:
        return store.catalog.read(path, (MANIFEST,))
    except UNUSABLE:
        return None


def _nothing() -> None:
    """Do nothing."""


def _session_aside(
    store: OpenedStore, path: str, mine: Sequence[Finding], found: Found | None
) -> Step:
    lost = lost_segments(found, needed_of(found)) if found is not None else ()
    detail = f"{mine[0].detail}; the whole session goes to {QUARANTINE}/{path}"
    action = Action(
        kind="set aside", place=f"manifests/{path}", detail=detail, refs=_refs(found, lost)
    )
    return partial(set_aside_session, store, path), action


def _refs(found: Found | None, segments: Iterable[SegmentEntry]) -> tuple[str, ...]:
    return tuple(str(found.manifest.ref(segment)) for segment in segments) if found else ()


def _plan_steps(store: OpenedStore, found: Found, mine: Sequence[Finding]) -> Iterator[Step]:
    by_step: dict[int, list[Finding]] = defaultdict(list)
    for finding in mine:
        by_step[finding.step or 0].append(finding)
    broken = set()
    for entry in found.manifest.steps:
        findings = by_step.get(entry.index)
        if not findings:
            continue
        mend = mending(store, found.manifest, entry, findings)
        if mend is None:
            broken.add(entry.index)
        else:
            place = entry.place(found.manifest.incarnation.path)
            yield mend.act, Action(kind="mend", place=place, detail=mend.detail)
    if any(finding.kind == "failed" for step in broken for finding in by_step[step]):
        path = found.manifest.incarnation.path
        yield _nothing, Action(kind="leave", place=f"manifests/{path}", detail=_FAILED)
    elif broken:
        yield _segments_aside(store, found, broken)


def _segments_aside(store: OpenedStore, found: Found, broken: set[int]) -> Step:
    path = found.manifest.incarnation.path
    lost = lost_segments(found, broken)
    steps = ", ".join(map(str, sorted(broken)))
    detail = (
        f"Steps {steps} cannot be read, nor the {len(lost)} Segments that need them, which go to "
        f"{QUARANTINE}/{path} with what only they need"
    )
    action = Action(kind="set aside", place=f"steps/{path}", detail=detail, refs=_refs(found, lost))
    return partial(set_aside_segments, store, found, broken), action
