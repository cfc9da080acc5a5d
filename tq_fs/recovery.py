"""What a start finds: the catalog held against what really lies in the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tq_fs.backends import COMMIT
from tq_fs.keys import Incarnation
from tq_fs.manifests import SessionManifest
from tq_fs.steps import StepEntry
from tq_fs.storage_unit import Inventory, Located

Objects = Mapping[str, int]  # names below a Step's place, and their sizes


class WantedStep(NamedTuple):
    """A Step that a manifest refers to.

    Attributes
    ----------
    unit
        Where the manifest says it is.
    objects
        What has to lie at its place.
    """

    unit: str
    objects: Objects


Places = Mapping[str, WantedStep]  # by the Step's place


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


class Wanted(Mapping[str, Places | None]):
    """For each incarnation's path its Steps' places with what has to lie there, when it is asked.

    None for one whose manifest cannot be used, where everything is kept.

    Parameters
    ----------
    places
        Says it of an incarnation that has a manifest.
    """

    def __init__(self, places: Callable[[Incarnation], Places]) -> None:
        self._places = places
        self._known: dict[str, Incarnation | None] = {}

    def add(self, path: str, incarnation: Incarnation | None) -> None:
        """Want the Steps of an incarnation; all that lies there where it is None."""
        self._known[path] = incarnation

    def discard(self, path: str) -> None:
        """Want nothing of an incarnation any more; idempotent."""
        self._known.pop(path, None)

    def __getitem__(self, path: str) -> Places | None:
        """Return the places of an incarnation's Steps."""
        incarnation = self._known[path]
        return None if incarnation is None else self._places(incarnation)

    def __contains__(self, path: object) -> bool:
        """Tell whether an incarnation is finalized, without asking for its Steps."""
        return path in self._known

    def __iter__(self) -> Iterator[str]:
        """Iterate over the paths."""
        return iter(self._known)

    def __len__(self) -> int:
        """Return the number of incarnations."""
        return len(self._known)


@dataclass(slots=True)
class Loaded:
    """What the manifests say, while a start makes use of it.

    Attributes
    ----------
    wanted
        What has to lie where, by path of the incarnation.
    abandoned
        Paths where a finalize was not finished.
    ended
        Incarnations by path of which nothing is needed any more.
    sessions, segments, unreleased, steps, nbytes
        As in :class:`Recovery`.
    """

    wanted: Wanted
    abandoned: set[str] = field(default_factory=set)
    ended: dict[str, Incarnation] = field(default_factory=dict)
    sessions: int = 0
    segments: int = 0
    unreleased: int = 0
    steps: int = 0
    nbytes: int = 0

    def add(self, *, segments: int, released: int, steps: int, nbytes: int) -> None:
        """Count a session of which something is still needed."""
        self.sessions += 1
        self.segments += segments
        self.unreleased += segments - released
        self.steps += steps
        self.nbytes += nbytes

    def summary(self) -> Recovery:
        """Return the counts."""
        return Recovery(
            sessions=self.sessions,
            segments=self.segments,
            unreleased=self.unreleased,
            steps=self.steps,
            nbytes=self.nbytes,
        )


class Sweep:
    """Holds what lies on units against what manifests refer to. Pure: deletes nothing.

    Parameters
    ----------
    wanted
        For each incarnation with a manifest: its Steps' places with what has to lie there. None
        for one whose manifest cannot be used, where everything is kept.
    spare
        Tells of the path of an incarnation without a manifest whether it is to be left alone: its
        session may still be open, or its manifest lies where nobody can look.
    """

    def __init__(
        self, wanted: Mapping[str, Places | None], spare: Callable[[str], bool] = lambda _: False
    ) -> None:
        self.sessions = 0
        self.steps = 0
        self._wanted = wanted
        self._spare = spare
        self._seen: set[str] = set()
        self._missing: list[str] = []
        self._elsewhere: dict[str, dict[str, WantedStep]] = {}  # what other units have to hold

    def strays(self, held: Inventory) -> list[Located]:
        """Return what may be removed of an incarnation on a unit, single Steps or all of it."""
        if held.path not in self._wanted:
            if self._spare(held.path):
                return []
            self.sessions += 1
            self.steps += len(held.places)
            return [Located(held.unit, f"steps/{held.path}")]
        places = self._wanted[held.path]
        if places is None:
            return []
        mine = {place: want for place, want in places.items() if _is_on(held.unit, want)}
        self._check(held, places, mine)
        # A stranger's object beside a needed attempt seems to lie at the Step's own place.
        kept = {*mine, *(place.rpartition("/")[0] for place in mine)}
        strays = [place for place in held.places if place not in kept and _is_step(place)]
        self.steps += len(strays)
        return [Located(held.unit, place) for place in strays]

    def _check(self, held: Inventory, places: Places, mine: Places) -> None:
        """Note which of the Steps are not there, or not whole."""
        if held.path not in self._seen:
            self._seen.add(held.path)
            if len(mine) < len(places):
                self._elsewhere[held.path] = {p: w for p, w in places.items() if p not in mine}
        elif held.path in self._elsewhere:
            for place in mine:
                self._elsewhere[held.path].pop(place, None)
        self._missing += (
            place
            for place, want in mine.items()
            if not is_whole(want.objects, held.places.get(place, {}))
        )

    def incomplete(self) -> tuple[str, ...]:
        """Return the places that manifests refer to and that were not seen whole."""
        unseen = (self._wanted[path] for path in self._wanted if path not in self._seen)
        left = [*self._elsewhere.values(), *(places or {} for places in unseen)]
        return tuple(sorted([*self._missing, *(place for places in left for place in places)]))


def _is_on(unit: str, want: WantedStep) -> bool:
    """Tell whether a Step has to lie on a unit; one without a name is all there is."""
    return not unit or unit == want.unit


def _is_step(place: str) -> bool:
    """Tell whether it is named as a unit names its Steps, and so no stranger."""
    return place.split("/")[4].isdecimal()


def is_whole(wanted: Objects, members: Objects) -> bool:
    """Tell whether a Step's group has its commit and every object in its full size."""
    return COMMIT in members and all(members.get(n) == size for n, size in wanted.items())


def wanted_places(manifest: SessionManifest, steps: Sequence[StepEntry]) -> dict[str, WantedStep]:
    """Return where a manifest's Steps lie, and what has to lie there."""
    path = manifest.incarnation.path
    return {step.place(path): WantedStep(step.unit, step.objects()) for step in steps}
