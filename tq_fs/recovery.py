"""What a start finds: the catalog held against what really lies in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tq_fs.backends import COMMIT
from tq_fs.manifests import SessionManifest
from tq_fs.steps import StepEntry
from tq_fs.storage_unit import Inventory

Objects = Mapping[str, int]  # names below a Step's place, and their sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What a start found, and what it removed.

    Attributes
    ----------
    sessions, segments, unreleased
        Finalized sessions, their Segments, and those of them that a consumer has still to release.
    steps, nbytes
        Steps that unreleased Segments refer to, and their stored bytes.
    swept_sessions
        Incarnations that were never finalized, and are removed now.
    swept_steps
        Steps that no unreleased Segment refers to, and are removed now.
    incomplete
        Steps that a manifest refers to and that are not there, or not whole. Nothing that is left
        of them is removed.
    unreadable
        Paths of incarnations whose manifest cannot be used; they were left as they are.
    rebuilt
        Paths of incarnations whose manifest was made anew.
    """

    sessions: int = 0
    segments: int = 0
    unreleased: int = 0
    steps: int = 0
    nbytes: int = 0
    swept_sessions: int = 0
    swept_steps: int = 0
    incomplete: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    rebuilt: tuple[str, ...] = ()


class Sweep:
    """Holds what lies on a unit against what manifests refer to. Pure: deletes nothing.

    Parameters
    ----------
    wanted
        For each incarnation with a manifest: its Steps' places with what has to lie there. None
        for one whose manifest cannot be used, where everything is kept.
    """

    def __init__(self, wanted: Mapping[str, Mapping[str, Objects] | None]) -> None:
        self.sessions = 0
        self.steps = 0
        self._wanted = wanted
        self._missing: dict[str, set[str]] = {}

    def strays(self, held: Inventory) -> list[str]:
        """Return what may be removed of an incarnation, prefixes of single Steps."""
        if held.path not in self._wanted:
            self.sessions += 1
            self.steps += len(held.places)
            return [f"steps/{held.path}"]
        places = self._wanted[held.path]
        if places is None:
            return []
        self._missing[held.path] = {
            place
            for place, want in places.items()
            if not is_whole(want, held.places.get(place, {}))
        }
        # A stranger's object beside a needed attempt seems to lie at the Step's own place.
        kept = {*places, *(place.rpartition("/")[0] for place in places)}
        strays = [place for place in held.places if place not in kept and _is_step(place)]
        self.steps += len(strays)
        return strays

    def incomplete(self) -> tuple[str, ...]:
        """Return the places that manifests refer to and that were not seen whole."""
        return tuple(
            sorted(
                place
                for path, places in self._wanted.items()
                for place in self._missing.get(path, places or ())
            )
        )


def _is_step(place: str) -> bool:
    """Tell whether it is named as a unit names its Steps, and so no stranger."""
    return place.split("/")[4].isdecimal()


def is_whole(wanted: Objects, members: Objects) -> bool:
    """Tell whether a Step's group has its commit and every object in its full size."""
    return COMMIT in members and all(members.get(n) == size for n, size in wanted.items())


def wanted_places(manifest: SessionManifest, steps: Sequence[StepEntry]) -> dict[str, Objects]:
    """Return where a manifest's Steps lie, and what has to lie there."""
    path = manifest.incarnation.path
    return {step.place(path): step.objects() for step in steps}
