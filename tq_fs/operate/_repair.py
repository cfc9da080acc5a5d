"""From findings to what is done about them, and the doing of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tq_fs.controller import Controller
from tq_fs.embedded import UNIT
from tq_fs.errors import StoreBusy
from tq_fs.manifests import TRAJECTORY
from tq_fs.operate._findings import WASTE, Finding
from tq_fs.operate._opened import OpenedStore
from tq_fs.operate._plan import Action, plan_repair
from tq_fs.operate._quarantine import QUARANTINE
from tq_fs.operate._verify import Progress, verify_store, waste_of
from tq_fs.steps import EncodeOptions
from tq_fs.storage_unit import StorageUnit

_ANEW = (
    "made anew from what lies beside it; where that is damaged too, the whole session is set aside"
)


@dataclass(slots=True, kw_only=True)
class Repaired:
    """What a repair, or a gc, found and did.

    Attributes
    ----------
    dry_run
        Nothing was changed: the actions are what would be done.
    actions
        What was done.
    found
        What verify said before.
    left
        What it says afterwards; before where nothing was changed.
    rebuilt
        Paths of sessions whose manifest was made anew.
    """

    dry_run: bool
    actions: list[Action] = field(default_factory=list)
    found: list[Finding] = field(default_factory=list)
    left: list[Finding] = field(default_factory=list)
    rebuilt: tuple[str, ...] = ()


def repair_store(store: OpenedStore, *, dry_run: bool, progress: Progress) -> Repaired:
    """Leave a store that verifies: remove what nobody needs, set aside what cannot be used.

    What a manifest refers to is never deleted: what is whole stays, or is moved with the Segments
    that cannot be read without something else.

    Parameters
    ----------
    dry_run
        Change nothing; `store` may then be open for reading.
    progress
        Of the verifying, which comes first.
    """
    found = verify_store(store, progress=progress).findings
    if dry_run:
        return Repaired(dry_run=True, actions=_would(store, found), found=found, left=found)
    done = _remove(store, found)
    rebuilt = _rebuild(store) if any(f.kind == "unreadable" for f in found) else ()
    broken = [f for f in _broken(found) if f.path not in rebuilt]
    if rebuilt:
        again = verify_store(store, only=rebuilt).findings
        done += _remove(store, again)
        broken += _broken(again)
    for act, action in plan_repair(store, broken):
        store.places.fence()
        act()
        done.append(action)
    left = verify_store(store, data=False).findings
    alone = {action.place for action in done if action.kind == "leave"}
    left += [f for f in broken if f.kind == "failed" and f"manifests/{f.path}" in alone]
    return Repaired(dry_run=False, actions=done, found=found, left=left, rebuilt=rebuilt)


def _would(store: OpenedStore, found: Sequence[Finding]) -> list[Action]:
    """Return what a repair would do, as far as that is known without doing it."""
    removals = [_removal(f) for f in found if f.kind in WASTE]
    kept = {f.path for f in found if f.kind == "unreadable" and _keeps_trajectory(store, f.path)}
    anew = [Action(kind="mend", place=f"manifests/{p}", detail=_ANEW) for p in sorted(kept)]
    rest = [f for f in _broken(found) if f.path not in kept]
    return [*removals, *anew, *(action for _, action in plan_repair(store, rest))]


def _keeps_trajectory(store: OpenedStore, path: str) -> bool:
    return TRAJECTORY in set(store.places.documents.list(f"manifests/{path}"))


def _broken(findings: Iterable[Finding]) -> list[Finding]:
    return [f for f in findings if f.kind not in WASTE]


def collect_waste(
    store: OpenedStore, *, dry_run: bool, quarantine: bool, progress: Progress
) -> Repaired:
    """Remove what nobody needs: Steps without a manifest, and what was released.

    Parameters
    ----------
    dry_run
        Change nothing; `store` may then be open for reading.
    quarantine
        Remove what repairs have set aside, too.
    progress
        Is told how many sessions more were looked at.
    """
    found = waste_of(store, progress=progress)
    actions = [_removal(f) for f in found]
    documents = store.places.documents
    set_aside = sum(n for _, n in documents.walk(QUARANTINE)) if quarantine else 0
    if set_aside:
        detail = "what repairs have set aside"
        actions.append(Action(kind="remove", place=QUARANTINE, detail=detail, nbytes=set_aside))
    if not dry_run:
        _remove(store, found)
        if set_aside:
            store.places.fence()
            documents.delete(QUARANTINE)
    left = found if dry_run else waste_of(store)
    return Repaired(dry_run=dry_run, actions=actions, found=found, left=left)


def check_quiet(store: OpenedStore) -> None:
    """Refuse to take an object store in which sessions may still be recorded.

    Raises
    ------
    StoreBusy
    """
    if store.ask_written() is not None:
        return  # the folder's lock tells
    found = verify_store(store, data=False)
    if found.open_sessions:
        raise StoreBusy(
            f"{found.open_sessions} sessions without a manifest began, or wrote a Step, less than "
            f"{store.grace_s:g} s ago: a process may still record them",
            subject=store.places.url,
            remedy="end the run first; --grace-s 0 where nobody writes",
        )


# ---------------------------------------------------------------- waste


def _removal(finding: Finding) -> Action:
    return Action(kind="remove", place=finding.place, detail=finding.detail, nbytes=finding.nbytes)


def _remove(store: OpenedStore, findings: Iterable[Finding]) -> list[Action]:
    """Remove what findings say is needed by nobody; return what was done."""
    waste = [finding for finding in findings if finding.kind in WASTE]
    for finding in waste:
        store.places.fence()
        if finding.place.startswith("manifests/"):
            store.places.documents.delete(finding.place)
            store.places.steps.delete(f"steps/{finding.path}")
        else:
            store.places.steps.delete(finding.place)
    return [_removal(finding) for finding in waste]


def _rebuild(store: OpenedStore) -> tuple[str, ...]:
    """Make manifests that cannot be used anew, where trajectory and Steps are whole.

    A controller's start would do so too, and sweep; another process may record by now.
    """
    places = store.places
    controller = Controller(
        store.catalog,
        StorageUnit(places.steps, store.store_id, name=UNIT, options=EncodeOptions()),
        epoch=places.epoch,
        now_ns=store.now_ns,
        fence=places.fence,
        pool=store.pool if places.remote else None,
    )
    return controller.rebuild()
