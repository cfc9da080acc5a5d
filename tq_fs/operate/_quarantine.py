"""Setting aside what cannot be used: out of the sessions' way, and deleted by nobody."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

import msgspec

from tq_fs.backends import COMMIT, Backend
from tq_fs.manifests import (
    MANIFEST,
    TRAJECTORY,
    Found,
    SegmentEntry,
    SessionManifest,
)
from tq_fs.operate._opened import OpenedStore, held_at
from tq_fs.operate._verify import needed_of
from tq_fs.released import is_over, released_by_all, released_of

_K = TypeVar("_K")
QUARANTINE = "quarantine"


def lost_segments(found: Found, broken: Collection[int]) -> tuple[SegmentEntry, ...]:
    """Return the unreleased Segments that some broken Step is needed for."""
    done = released_by_all(released_of(found.manifest.consumers, found.state))
    return tuple(
        segment
        for segment in found.manifest.segments
        if _name(segment) not in done and _steps(segment) & set(broken)
    )


def without(manifest: SessionManifest, lost: Collection[SegmentEntry]) -> SessionManifest:
    """Return a manifest without some Segments, and without the Steps that only those need."""
    gone = {_name(segment) for segment in lost}
    kept = tuple(s for s in manifest.segments if _name(s) not in gone)
    needed = {step for segment in kept for step in _steps(segment)}
    steps = tuple(step for step in manifest.steps if step.index in needed)
    return msgspec.structs.replace(manifest, segments=kept, steps=steps)


def _name(segment: SegmentEntry) -> str:
    return f"{segment.view}/{segment.index}"


def _steps(segment: SegmentEntry) -> set[int]:
    return {fragment.step for fragments in segment.fields.values() for fragment in fragments}


def set_aside_segments(store: OpenedStore, found: Found, broken: Collection[int]) -> list[str]:
    """Take the Segments that broken Steps are needed for out of a session, with those Steps.

    Steps that Segments which stay refer to are left where they are, and as they are.

    Returns
    -------
    list of str
        What was set aside: places, as they were.
    """
    lost = lost_segments(found, broken)
    manifest = without(found.manifest, lost)
    done = released_by_all(released_of(manifest.consumers, found.state))
    path = manifest.incarnation.path
    if is_over(manifest, done):
        return set_aside_session(store, path)
    left = needed_of(Found(manifest, found.state))
    moved = needed_of(found) - left
    places = [step.place(path) for step in found.manifest.steps if step.index in moved]
    copied = _copy(store, path, (MANIFEST,), set(places))
    _keep_state(store, found, {_name(segment) for segment in lost})
    store.places.fence()
    store.catalog.publish(msgspec.structs.replace(manifest, epoch=store.places.epoch))
    for place in places:
        store.places.steps.delete(place)
    return copied


def _keep_state(store: OpenedStore, found: Found, lost: Collection[str]) -> None:
    """Forget what was released, or is held, of Segments that are gone."""
    state, path = found.state, found.manifest.incarnation.path
    mentioned = {n for names in state.released.values() for n in names}
    mentioned |= {n for held in state.held.values() for names in held.values() for n in names}
    if not mentioned & set(lost):
        return
    documents = store.places.documents
    older = [n for n in documents.list(f"manifests/{path}") if n.startswith("state-")]
    mine = msgspec.structs.replace(
        state,
        epoch=store.places.epoch,
        released=_less(state.released, lost),
        held={c: _less(held, lost) for c, held in state.held.items()},
    )
    store.catalog.put_state(found.manifest.incarnation, mine)
    for name in older:
        if int(name[len("state-") : -len(".json")]) != store.places.epoch:
            documents.delete(f"manifests/{path}/{name}")


def _less(names: Mapping[_K, tuple[str, ...]], lost: Collection[str]) -> dict[_K, tuple[str, ...]]:
    return {key: tuple(n for n in some if n not in lost) for key, some in names.items()}


def set_aside_session(store: OpenedStore, path: str) -> list[str]:
    """Take a session out of the store: its documents, and all that lies of its Steps.

    Returns
    -------
    list of str
        What was set aside: places, as they were.
    """
    documents = store.places.documents
    names = list(documents.list(f"manifests/{path}"))
    copied = _copy(store, path, names, None)
    store.places.fence()
    documents.delete(f"manifests/{path}")  # first: Steps without a manifest are nothing
    store.places.steps.delete(f"steps/{path}")
    return copied


def set_aside_trajectory(store: OpenedStore, path: str) -> list[str]:
    """Take a session's resident fields out of the store; its stored fields stay."""
    copied = _copy(store, path, (TRAJECTORY,), set())
    store.places.fence()
    store.places.documents.delete(f"manifests/{path}/{TRAJECTORY}")
    return copied


# ---------------------------------------------------------------- copies


def _copy(
    store: OpenedStore, path: str, names: Collection[str], places: Collection[str] | None
) -> list[str]:
    """Copy documents and Steps of a session into the quarantine; all its Steps where None."""
    documents = store.places.documents
    for name in names:
        data = documents.get(f"manifests/{path}/{name}")
        documents.put(f"{QUARANTINE}/{path}/{name}", data)
    copied = [f"manifests/{path}/{name}" for name in names]
    for tier in store.tiers.values():
        for place, members in held_at(tier, path).items():
            if places is None or place in places:
                copy_step(tier, documents, place, members)
                copied += [place] if place not in copied else []
    return copied


def copy_step(source: Backend, target: Backend, place: str, members: Collection[str]) -> None:
    """Copy what lies of a Step, whole or not, whatever was copied of it before."""
    prefix = f"{QUARANTINE}/{place.partition('/')[2]}"
    for name in sorted(members, key=lambda name: name == COMMIT):  # the commit last
        target.put(f"{prefix}/{name}", source.get(f"{place}/{name}"))
