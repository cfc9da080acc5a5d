"""Manifests against data, and every chunk against its checksum, side by side."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial

from tq_fs.backends import COMMIT
from tq_fs.errors import CorruptError, FormatTooNew, TqFsError, TrajectoryMissing
from tq_fs.manifests import MANIFEST, TRAJECTORY, Entry, Found, SessionManifest
from tq_fs.operate._findings import WASTE, Finding, Verified
from tq_fs.operate._opened import Held, OpenedStore, held_at, inventory, nbytes_of
from tq_fs.operate._pool import ahead
from tq_fs.operate._sessions import read_session
from tq_fs.operate._step_check import Checked, StepCopy, arrays_of, check_step
from tq_fs.recovery import is_whole
from tq_fs.released import is_over, needed_steps, released_by_all, released_of
from tq_fs.steps import StepEntry
from tq_fs.trajectory import decode_trajectory

Job = Callable[[], Checked]
Progress = Callable[[int, int], None]


def _at_nothing(sessions: int, nbytes: int) -> None:
    """Do nothing: the default for `progress`."""


@dataclass(slots=True)
class _Looked:
    """What was seen of a session without reading its values."""

    segments: int = 0
    steps: int = 0
    is_session: bool = False
    findings: list[Finding] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)


def verify_store(
    store: OpenedStore,
    *,
    data: bool = True,
    only: Collection[str] | None = None,
    progress: Progress = _at_nothing,
) -> Verified:
    """Look at all that lies in a store, and read it.

    Memory: a few chunks for each thread, a number for each session, and what is wrong.

    Parameters
    ----------
    data
        Read the values too, not only what lies there.
    only
        Paths of the sessions to look at; None for all, and what lies beside them.
    progress
        Called with the sessions and the bytes that were done since.
    """
    verified = Verified()
    seen: set[int] = set()

    def entries() -> Iterator[Entry]:
        for entry in store.catalog.entries():
            if only is not None and entry.path not in only:
                continue
            if MANIFEST in entry.names:
                seen.add(hash(entry.path))
            yield entry

    def jobs() -> Iterator[Job]:
        for looked in ahead(store.pool, partial(_look, store), entries(), window=store.window):
            _count(verified, looked)
            progress(1, 0)
            _add(store, verified, looked.findings)
            if data:
                yield from looked.jobs

    for checked in ahead(store.pool, lambda job: job(), jobs(), window=store.window):
        verified.chunks += checked.chunks
        verified.nbytes += checked.nbytes
        verified.unchecked_nbytes += checked.unchecked_nbytes
        progress(0, checked.nbytes)
        _add(store, verified, checked.findings)
    if only is None:
        _add_orphans(store, verified, seen)
    return verified


def waste_of(store: OpenedStore, *, progress: Progress = _at_nothing) -> list[Finding]:
    """Return what lies in a store and is needed by nobody; no values are read."""
    found = verify_store(store, data=False, progress=progress).findings
    return [finding for finding in found if finding.kind in WASTE]


def _count(verified: Verified, looked: _Looked) -> None:
    verified.sessions += looked.is_session
    verified.segments += looked.segments
    verified.steps += looked.steps


def _add(
    store: OpenedStore, verified: Verified, findings: list[Finding] | tuple[Finding, ...]
) -> None:
    """Keep findings that are still true: beside a writer sessions are released meanwhile."""
    verified.findings += [f for f in findings if _is_still_so(store, f)]


def _is_still_so(store: OpenedStore, finding: Finding) -> bool:
    if finding.kind == "leftover":
        return any(held_at_place(store, finding.place))
    if finding.step is None and finding.kind != "no-data":
        return True
    if finding.kind == "missing" and _is_moved(store, finding):
        return False
    found = read_session(store, finding.path)
    if not isinstance(found, Found):
        return False  # released as a whole; or unreadable by now, which is a finding of its own
    return finding.step is None or finding.step in needed_of(found)


def _is_moved(store: OpenedStore, finding: Finding) -> bool:
    """Tell whether a Step has left the front since it was seen there, and lies behind it."""
    if finding.tier != "front":
        return False
    step = "/".join(finding.place.split("/")[:6])  # the attempt: there is one in a tier
    return not any(store.tiers["front"].walk(step)) and any(store.tiers["back"].walk(step))


def held_at_place(store: OpenedStore, place: str) -> Iterator[tuple[str, int]]:
    """Yield what lies below a place, in any tier."""
    for tier in store.tiers.values():
        yield from tier.walk(place)


def needed_of(found: Found) -> set[int]:
    """Return the Steps of a session that unreleased Segments refer to."""
    released = released_of(found.manifest.consumers, found.state)
    return needed_steps(found.manifest, released_by_all(released))


# ---------------------------------------------------------------- one session


def _look(store: OpenedStore, entry: Entry) -> _Looked:
    """Hold a session's documents against what lies there."""
    found = read_session(store, entry.path)
    if found is None:
        return _Looked(findings=_unfinished(store, entry))
    if isinstance(found, TqFsError):
        return _Looked(is_session=True, findings=[_unreadable(entry.path, found)])
    looked = _Looked(is_session=True, segments=len(found.manifest.segments))
    if found.manifest.incarnation.path != entry.path:
        detail = f"is the manifest of {found.manifest.incarnation}"
        looked.findings.append(_of_documents("unreadable", entry.path, detail))
        return looked
    if TRAJECTORY in entry.names:
        looked.jobs.append(partial(_check_trajectory, store, entry.path))
    _look_at_steps(store, found, looked)
    return looked


def _unfinished(store: OpenedStore, entry: Entry) -> list[Finding]:
    if MANIFEST in entry.names or store.may_be_recorded(entry.path):
        return []  # released since it was listed, or being finalized
    names = ", ".join(sorted(entry.names))
    return [_of_documents("unfinished", entry.path, f"holds {names} and no {MANIFEST}")]


def _unreadable(path: str, error: TqFsError) -> Finding:
    kind = "too-new" if isinstance(error, FormatTooNew) else "unreadable"
    return _of_documents(kind, path, str(error))


def _of_documents(kind: str, path: str, detail: str) -> Finding:
    return Finding(kind=kind, path=path, place=f"manifests/{path}", detail=detail)


def _check_trajectory(store: OpenedStore, path: str) -> Checked:
    place = f"manifests/{path}/{TRAJECTORY}"
    try:
        store.catalog.trajectory(path, lambda data: decode_trajectory(data, place))
    except TrajectoryMissing:
        return Checked()  # released since
    except CorruptError as error:
        kind = "too-new" if isinstance(error, FormatTooNew) else "trajectory"
        return Checked(findings=(Finding(kind=kind, path=path, place=place, detail=error.problem),))
    return Checked()


# ---------------------------------------------------------------- its Steps


def _look_at_steps(store: OpenedStore, found: Found, looked: _Looked) -> None:
    manifest, path = found.manifest, found.manifest.incarnation.path
    needed = [step for step in manifest.steps if step.index in needed_of(found)]
    held = {name: held_at(tier, path) for name, tier in store.tiers.items()}
    looked.steps = len(needed)
    done = released_by_all(released_of(manifest.consumers, found.state))
    if is_over(manifest, done):
        detail = "every consumer has released all of its Segments"
        looked.findings.append(_of_documents("leftover", path, detail))
    missing = [s for s in needed if not any(s.place(path) in there for there in held.values())]
    if needed and len(missing) == len(needed):
        detail = f"none of its {len(needed)} Steps is there"
        looked.findings.append(_of_documents("no-data", path, detail))
    else:
        looked.findings += [_missing(step, path) for step in missing]
        looked.findings += _lost_behind(path, needed, held)
    for step in needed:
        for name, there in held.items():
            if step.place(path) in there:
                _look_at_copy(store, manifest, step, name, there[step.place(path)], looked)
    _look_for_strays(path, needed, held, looked)


def _missing(step: StepEntry, path: str) -> Finding:
    detail = f"Step {step.index} is not there: {step.nbytes} bytes"
    return Finding(
        kind="missing", path=path, place=step.place(path), detail=detail, step=step.index
    )


def _lost_behind(path: str, needed: list[StepEntry], held: dict[str, Held]) -> Iterator[Finding]:
    """Yield Steps that the object store lacks, which had them before the session was finalized."""
    for step in needed:
        place = step.place(path)
        if place in held.get("front", {}) and place not in held["back"]:
            detail = f"Step {step.index} lies in front only, and goes with its node"
            yield Finding(
                kind="missing", path=path, place=place, detail=detail, step=step.index, tier="back"
            )


def _look_at_copy(
    store: OpenedStore,
    manifest: SessionManifest,
    step: StepEntry,
    tier: str,
    members: dict[str, int],
    looked: _Looked,
) -> None:
    copy = StepCopy(manifest, step, tier, store.tiers[tier], frozenset(members))
    for name, size in step.objects().items():
        if name not in members:
            looked.findings.append(copy.finding("missing", name, f"{size} bytes are not there"))
        elif members[name] != size:
            detail = f"has {members[name]} bytes where {size} were written"
            looked.findings.append(copy.finding("truncated", name, detail))
    kept = [f"{name}/{COMMIT}" for name, _ in arrays_of(step)]
    lost = [name for name in kept if name not in members]
    if len(lost) < len(kept):  # else it is compact
        looked.findings += [copy.finding("missing", n, "its metadata is not there") for n in lost]
    if is_whole(step.objects(), members):
        looked.jobs.append(partial(check_step, copy))
    elif COMMIT not in members:
        looked.findings.append(copy.finding("missing", COMMIT, "its metadata is not there"))


def _look_for_strays(
    path: str, needed: list[StepEntry], held: dict[str, Held], looked: _Looked
) -> None:
    """Note Steps, and attempts to write one, that no unreleased Segment refers to."""
    wanted = {step.place(path) for step in needed}
    kept = {*wanted, *(place.rpartition("/")[0] for place in wanted)}
    for tier, there in held.items():
        for place, members in there.items():
            if place not in kept and place.split("/")[4].isdecimal():
                looked.findings.append(
                    Finding(
                        kind="leftover",
                        path=path,
                        place=place,
                        detail="no unreleased Segment refers to it",
                        tier=tier,
                        nbytes=sum(members.values()),
                    )
                )


# ---------------------------------------------------------------- sessions without a manifest


def _add_orphans(store: OpenedStore, verified: Verified, seen: set[int]) -> None:
    for tier, backend in store.tiers.items():
        for path, held in inventory(backend):
            if hash(path) in seen:
                continue
            if store.may_be_recorded(path):
                verified.open_sessions += 1
                seen.add(hash(path))
            elif read_session(store, path) is None:  # not finalized since the listing
                verified.findings.append(_orphan(path, tier, held))


def _orphan(path: str, tier: str, held: Held) -> Finding:
    return Finding(
        kind="orphan",
        path=path,
        place=f"steps/{path}",
        detail=f"{len(held)} Steps of a session without a manifest",
        tier=tier,
        nbytes=nbytes_of(held),
    )
