"""One session: its lineage, its Segments, and where each Step lies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from tq_fs.backends import COMMIT
from tq_fs.errors import CorruptError, ObjectMissing, SessionMissing, TqFsError, TrajectoryMissing
from tq_fs.keys import Incarnation, SegmentRef, component
from tq_fs.manifests import Found, SegmentEntry, SessionManifest
from tq_fs.operate._opened import Held, OpenedStore, held_at, nbytes_of
from tq_fs.operate._sessions import listed_session, read_session
from tq_fs.operate._shown import ShownSegment, ShownSession, ShownStep
from tq_fs.operate._verify import needed_of
from tq_fs.recovery import is_whole
from tq_fs.released import Released, released_of
from tq_fs.steps import StepEntry, read_attributes
from tq_fs.trajectory import TrajectoryDocument, decode_trajectory

_REF = "tqfs1:"
_INDEX = 4  # steps / partition / session / incarnation / Step


def show_session(
    store: OpenedStore, name: str, *, partition: str | None = None
) -> Iterator[ShownSession]:
    """Yield the incarnations of a session, the oldest first.

    Parameters
    ----------
    name
        The session's id, a reference of one of its Segments, or ``partition/session@incarnation``
        as ``tq-fs ls`` prints it.
    partition
        Only of this partition.

    Raises
    ------
    SessionMissing
    """
    found = False
    for path in _paths(store, name, partition):
        shown = _shown(store, path)
        if shown is not None:
            found = True
            yield shown
    if not found:
        raise SessionMissing(
            f"store {store.store_id!r} holds nothing of it: never recorded, or released",
            subject=f"session {name!r}",
            remedy="tq-fs ls names all sessions",
        )


def _paths(store: OpenedStore, name: str, partition: str | None) -> list[str]:
    """Return where something of the session may lie."""
    if name.startswith(_REF):
        return [SegmentRef.parse(name).incarnation.path]
    partitions = sorted({*_names(store, "")}) if partition is None else [component(partition)]
    paths = _incarnations(store, partitions, name)
    if paths:
        return paths
    place, _, incarnation = name.rpartition("@")
    mine, _, session = place.partition("/")
    if session:
        return [Incarnation(mine, session, incarnation).path]
    return []


def _incarnations(store: OpenedStore, partitions: list[str], session_id: str) -> list[str]:
    session = component(session_id)
    return [
        f"{partition}/{session}/{incarnation}"
        for partition in partitions
        for incarnation in sorted({*_names(store, f"/{partition}/{session}")})
    ]


def _names(store: OpenedStore, below: str) -> Iterator[str]:
    yield from store.places.documents.list(f"manifests{below}")
    for tier in store.tiers.values():
        yield from tier.list(f"steps{below}")


def _shown(store: OpenedStore, path: str) -> ShownSession | None:
    found = read_session(store, path)
    held = {name: held_at(tier, path) for name, tier in store.tiers.items()}
    if isinstance(found, Found):
        return _finalized(store, path, found, held)
    there = {place for mine in held.values() for place in mine}
    if found is None and not there:
        return None
    steps = tuple(_alone(store, place, held) for place in sorted(there))
    nbytes = sum(map(nbytes_of, held.values()))
    summary = listed_session(store, path, found, steps=len(steps), nbytes=nbytes)
    return ShownSession(summary=summary, steps=steps)


def _finalized(store: OpenedStore, path: str, found: Found, held: dict[str, Held]) -> ShownSession:
    manifest = found.manifest
    trajectory = _trajectory(store, path)
    is_kept = isinstance(trajectory, TrajectoryDocument)
    steps = _recorded(manifest, trajectory, held) if is_kept else _derived(manifest, held)
    needed = needed_of(found)
    released = released_of(manifest.consumers, found.state)
    return ShownSession(
        summary=listed_session(store, path, found),
        mode=manifest.mode,
        steps=tuple(replace(step, needed=step.index in needed) for step in steps),
        segments=tuple(_segment(manifest, s, released) for s in manifest.segments),
        recorded=is_kept,
        problem=str(trajectory) if isinstance(trajectory, TqFsError) else "",
    )


def _trajectory(store: OpenedStore, path: str) -> TrajectoryDocument | CorruptError | None:
    try:
        return store.catalog.trajectory(path, lambda data: decode_trajectory(data, path))
    except TrajectoryMissing:
        return None
    except CorruptError as error:
        return error


# ---------------------------------------------------------------- Steps


def _recorded(
    manifest: SessionManifest,
    trajectory: TrajectoryDocument | CorruptError | None,
    held: dict[str, Held],
) -> Iterator[ShownStep]:
    """Yield the Steps as they were recorded, those too that no Segment refers to."""
    assert isinstance(trajectory, TrajectoryDocument)
    stored = {step.index: step for step in manifest.steps}
    for record in trajectory.steps:
        tokens = sum(n for _, n in record.versions)
        entry = stored.get(record.index, StepEntry(index=record.index, tokens=tokens, fields={}))
        yield _step(
            entry,
            manifest.incarnation.path,
            held,
            kind=record.kind,
            parent=record.parent,
            versions=record.versions,
        )


def _derived(manifest: SessionManifest, held: dict[str, Held]) -> Iterator[ShownStep]:
    """Yield the Steps of the manifest, each behind the one before it in a Segment."""
    parents: dict[int, int] = {}
    for segment in manifest.segments:
        for before, after in itertools.pairwise(steps_of(segment)):
            parents.setdefault(after, before)
    for entry in manifest.steps:
        yield _step(entry, manifest.incarnation.path, held, parent=parents.get(entry.index))


def _step(
    entry: StepEntry,
    path: str,
    held: dict[str, Held],
    *,
    kind: str = "",
    parent: int | None = None,
    versions: tuple[tuple[str, int], ...] = (),
) -> ShownStep:
    place = entry.place(path)
    whole = [n for n, mine in held.items() if is_whole(entry.objects(), mine.get(place, {}))]
    return ShownStep(
        index=entry.index,
        tokens=entry.tokens,
        kind=kind,
        parent=parent,
        versions=versions,
        unit=entry.unit if entry.fields else "",
        place=place if entry.fields else "",
        tiers=tuple(whole) if entry.fields else (),
        nbytes=entry.nbytes,
        fields={n: f"{a.dtype}[{','.join(map(str, a.shape))}]" for n, a in entry.fields.items()},
    )


def _alone(store: OpenedStore, place: str, held: dict[str, Held]) -> ShownStep:
    """Return what a Step that no manifest speaks of says of itself."""
    for name, mine in held.items():
        if COMMIT in mine.get(place, {}):
            key = f"{place}/{COMMIT}"
            try:
                entry = read_attributes(store.tiers[name].get(key), key).step
            except (CorruptError, ObjectMissing):
                continue
            attempt = "/".join(place.split("/")[_INDEX + 1 :])
            known = StepEntry(
                index=entry.index, tokens=entry.tokens, fields=entry.fields, attempt=attempt
            )
            return _step(known, "/".join(place.split("/")[1:_INDEX]), held)
    index = place.split("/")[_INDEX]
    return ShownStep(index=int(index) if index.isdecimal() else -1, tokens=0, place=place)


def steps_of(segment: SegmentEntry) -> tuple[int, ...]:
    """Return the Steps that a Segment's fields come from, in the order of its rows."""
    at: dict[int, int] = {}
    for fragments in segment.fields.values():
        for fragment in fragments:
            at[fragment.step] = min(at.get(fragment.step, segment.tokens), fragment.target[0])
    return tuple(sorted(at, key=lambda step: (at[step], step)))


def _segment(manifest: SessionManifest, segment: SegmentEntry, released: Released) -> ShownSegment:
    name = f"{segment.view}/{segment.index}"
    return ShownSegment(
        ref=str(manifest.ref(segment)),
        view=segment.view,
        index=segment.index,
        tokens=segment.tokens,
        response_tokens=segment.response_tokens,
        steps=steps_of(segment),
        released_by=tuple(c for c, names in released.items() if name in names),
    )
