"""What a store takes up: by field, by age, by tier. From listings alone; no manifest is read."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tq_fs.backends import Backend, is_attempt
from tq_fs.operate._opened import OpenedStore, opened_ns

_HOUR_S, _DAY_S = 3600, 86400
AGES = ((_HOUR_S, "under 1 hour"), (_DAY_S, "under 1 day"), (7 * _DAY_S, "under 7 days"))
OLDER, UNDATED = "7 days and more", "not dated"
METADATA = "metadata"
_FIELD = 5  # steps / partition / session / incarnation / Step / field / object


@dataclass(slots=True)
class Space:
    """What objects take up.

    Attributes
    ----------
    objects, nbytes
        How many there are, and their bytes.
    """

    objects: int = 0
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        """Count an object."""
        self.objects += 1
        self.nbytes += nbytes


@dataclass(slots=True)
class StoreSpace:
    """What a store takes up.

    Attributes
    ----------
    by_tier
        All of it, by tier (``store``, or ``front`` and ``back``) and by what it is: ``steps``,
        ``manifests``, ``pages``, ``values``, ``quarantine`` …
    by_field
        Steps, by field; ``metadata`` is what Zarr needs beside them. Copies in two tiers count
        twice, as they take room twice.
    by_age
        Steps, by how long ago their session began.
    sessions, finalized
        Incarnations that have Steps, and incarnations that have a manifest.
    steps
        Steps, each once for each tier it lies in.
    disk_free_bytes, disk_bytes
        Of the file system of a local folder; None elsewhere.
    """

    by_tier: dict[str, dict[str, Space]] = field(default_factory=dict)
    by_field: dict[str, Space] = field(default_factory=dict)
    by_age: dict[str, Space] = field(default_factory=dict)
    sessions: int = 0
    finalized: int = 0
    steps: int = 0
    disk_free_bytes: int | None = None
    disk_bytes: int | None = None


def measure_space(
    store: OpenedStore, progress: Callable[[int], None] = lambda _: None
) -> StoreSpace:
    """Return what a store takes up.

    Parameters
    ----------
    progress
        Called with 1 for each object that was counted.
    """
    space = StoreSpace()
    for name, tier in store.tiers.items():
        _Count(space, name, store.now_ns()).walk(tier, progress)
    if store.places.folder is not None:
        disk = shutil.disk_usage(store.places.folder)
        space.disk_free_bytes, space.disk_bytes = disk.free, disk.total
    return space


class _Count:
    """Counts what lies in one tier, object by object."""

    def __init__(self, space: StoreSpace, tier: str, now_ns: int) -> None:
        self._space = space
        self._kinds = space.by_tier.setdefault(tier, {})
        self._now_ns = now_ns
        self._session = self._step = ""

    def walk(self, tier: Backend, progress: Callable[[int], None]) -> None:
        """Count all of it."""
        for key, nbytes in tier.walk(""):
            progress(1)
            kind, below, rest = key.partition("/")
            self._kinds.setdefault(kind if below else "store", Space()).add(nbytes)
            if kind == "steps":
                self._add_step(key.split("/"), nbytes)
            elif kind == "manifests" and rest.endswith("/manifest.json"):
                self._space.finalized += 1

    def _add_step(self, parts: list[str], nbytes: int) -> None:
        if len(parts) <= _FIELD:
            return
        session = "/".join(parts[1 : _FIELD - 1])
        self._space.sessions += session != self._session
        step = f"{session}/{parts[_FIELD - 1]}"
        self._space.steps += step != self._step
        self._session, self._step = session, step
        name = field_of(parts)
        self._space.by_field.setdefault(name, Space()).add(nbytes)
        age = age_of(self._now_ns, opened_ns(session))
        self._space.by_age.setdefault(age, Space()).add(nbytes)


def field_of(parts: list[str]) -> str:
    """Return the field that an object of a Step belongs to, given its key's components."""
    below = parts[_FIELD + is_attempt(parts[_FIELD]) :]
    is_data = len(below) > 1 and below[-1].startswith("c.")
    return below[0] if is_data else METADATA


def age_of(now_ns: int, opened_ns: int) -> str:
    """Return the age class of what began at a time; 0 for a time that is not known."""
    if not opened_ns:
        return UNDATED
    age_s = (now_ns - opened_ns) / 1e9
    return next((name for limit_s, name in AGES if age_s < limit_s), OLDER)


def age_classes(space: StoreSpace) -> dict[str, Space]:
    """Return the age classes from young to old, those that are empty too."""
    order = [name for _, name in AGES] + [OLDER, UNDATED]
    return {name: space.by_age.get(name, Space()) for name in order}


def totals(space: StoreSpace) -> Counter[str]:
    """Return the bytes of each tier."""
    return Counter(
        {tier: sum(s.nbytes for s in kinds.values()) for tier, kinds in space.by_tier.items()}
    )
