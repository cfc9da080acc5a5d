"""The sessions of a store, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tq_fs.errors import ConflictError, CorruptError, InvalidKey, InvalidSegment, TqFsError
from tq_fs.keys import unescape
from tq_fs.manifests import MANIFEST, Entry, Found
from tq_fs.operate._opened import OpenedStore, inventory, nbytes_of, opened_ns
from tq_fs.operate._pool import ahead
from tq_fs.released import needed_steps, released_by_all, released_of

UNUSABLE = (CorruptError, ConflictError, InvalidSegment, InvalidKey)
"""Why a manifest that was read cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSession:
    """One incarnation of a session, as ``tq-fs ls`` shows it.

    Attributes
    ----------
    partition, session, incarnation
        Whose it is.
    path
        Below ``steps/`` and ``manifests/``.
    state
        ``finalized``; ``open``: no manifest, may still be recorded; ``orphan``: no manifest, and
        nobody records it; ``unreadable``: its manifest cannot be used.
    segments, unreleased
        Its Segments, and those that a consumer has still to release.
    steps, nbytes
        Steps that are needed (that lie there, where there is no manifest), and their stored bytes.
    opened_ns, finalized_ns
        Nanoseconds since 1970; 0 where not known.
    released
        For each consumer how many Segments it has released.
    problem
        Why its manifest cannot be used.
    """

    partition: str
    session: str
    incarnation: str
    path: str
    state: str
    segments: int = 0
    unreleased: int = 0
    steps: int = 0
    nbytes: int = 0
    opened_ns: int = 0
    finalized_ns: int = 0
    released: dict[str, int] = field(default_factory=dict)
    problem: str = ""


def list_sessions(store: OpenedStore, *, finalized_only: bool = False) -> Iterator[ListedSession]:
    """Yield the finalized sessions in the order of the store's listing, then all others.

    Holds a number for each session, and the sessions that are being read.

    Parameters
    ----------
    finalized_only
        Leave out those without a manifest, for which all Steps are looked through.
    """
    seen: set[int] = set()

    def entries() -> Iterator[Entry]:
        for entry in store.catalog.entries():
            if MANIFEST in entry.names:
                seen.add(hash(entry.path))
            yield entry

    def read(entry: Entry) -> ListedSession | None:
        found = read_session(store, entry.path)
        return None if found is None else listed_session(store, entry.path, found)

    for listed in ahead(store.pool, read, entries(), window=store.window):
        if listed is not None:
            yield listed
    if not finalized_only:
        yield from _without_manifest(store, seen)


def read_session(store: OpenedStore, path: str) -> Found | TqFsError | None:
    """Return what a session's documents say, or why they cannot be used; None without any."""
    try:
        return store.catalog.read(path)
    except UNUSABLE as error:
        return error


def _without_manifest(store: OpenedStore, seen: set[int]) -> Iterator[ListedSession]:
    for tier in store.tiers.values():
        for path, held in inventory(tier):
            if hash(path) in seen:
                continue
            seen.add(hash(path))
            found = read_session(store, path)  # it may be finalized since the listing
            yield listed_session(store, path, found, steps=len(held), nbytes=nbytes_of(held))


def listed_session(
    store: OpenedStore,
    path: str,
    found: Found | TqFsError | None,
    *,
    steps: int = 0,
    nbytes: int = 0,
) -> ListedSession:
    """Return what is to be told of a session.

    Parameters
    ----------
    found
        What its documents say (:func:`read_session`).
    steps, nbytes
        What lies there, for one without a manifest.
    """
    if isinstance(found, Found):
        return _finalized(path, found)
    partition, session, incarnation = names_of(path)
    state = "open" if store.may_be_recorded(path) else "orphan"
    return ListedSession(
        partition=partition,
        session=session,
        incarnation=incarnation,
        path=path,
        state=state if found is None else "unreadable",
        steps=steps,
        nbytes=nbytes,
        opened_ns=opened_ns(path),
        problem="" if found is None else str(found),
    )


def _finalized(path: str, found: Found) -> ListedSession:
    manifest = found.manifest
    released = released_of(manifest.consumers, found.state)
    done = released_by_all(released)
    needed = needed_steps(manifest, done)
    return ListedSession(
        partition=manifest.partition,
        session=manifest.session_id,
        incarnation=manifest.incarnation_id,
        path=path,
        state="finalized",
        segments=len(manifest.segments),
        unreleased=len(manifest.segments) - len(done),
        steps=len(needed),
        nbytes=sum(step.nbytes for step in manifest.steps if step.index in needed),
        opened_ns=manifest.incarnation.opened_ns,
        finalized_ns=manifest.created_ns,
        released={consumer: len(names) for consumer, names in released.items()},
    )


def names_of(path: str) -> tuple[str, str, str]:
    """Return partition, session and incarnation of a path; those that are hashed as they lie."""
    partition, session, incarnation = [*path.split("/"), "", ""][:3]
    return _name(partition), _name(session), _name(incarnation)


def _name(component: str) -> str:
    try:
        return unescape(component)
    except InvalidKey:
        return component
