"""What is deleted, and what of it would not go yet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from tq_fs.controller._releases import Freed
from tq_fs.controller._tombstones import Tombstones
from tq_fs.errors import StoreFenced, TqFsError
from tq_fs.keys import Incarnation, StepKey
from tq_fs.manifests import Catalog, SessionManifest
from tq_fs.storage_unit import Located, Units

_log = logging.getLogger(__name__)


class Removal:
    """Deletes sessions and Steps, and tries again what will not go. Safe to call from many threads.

    Parameters
    ----------
    catalog, units
        Where manifests and Steps are; stay the caller's.
    tombstones
        Where deletions are written down. None: a start sweeps what one has left.
    at
        Called with the name of each point that is passed.
    """

    def __init__(
        self,
        catalog: Catalog,
        units: Units,
        tombstones: Tombstones | None,
        *,
        at: Callable[[str], None],
    ) -> None:
        self._catalog = catalog
        self._units = units
        self._tombstones = tombstones
        self._at = at
        self._lock = threading.Lock()
        self._leftover: dict[Located, None] = {}
        self._dying: dict[Incarnation, set[Located]] = {}
        self._unfinished: set[Incarnation] = set()  # of those, whose deletion was gone through

    def is_dying(self, incarnation: Incarnation) -> bool:
        """Tell whether a session is being deleted, whatever may still be found of it."""
        return incarnation in self._dying

    def bury(self, manifest: SessionManifest) -> None:
        """Remove the manifest of a session that is over; its Steps are what is left then."""
        incarnation = manifest.incarnation
        units = {step.unit for step in manifest.steps}
        if self._tombstones is None:
            self._catalog.drop(incarnation)
            return
        is_noted = True
        try:
            self._tombstones.put(incarnation, units)
        except StoreFenced:
            raise
        except TqFsError:  # it may lie there all the same, and is removed with the others
            _log.warning("no tombstone for %s: a sweep has to find it", incarnation, exc_info=True)
            is_noted = False
        self._at("tombstone written")
        with self._lock:
            self._dying[incarnation] = {Located(u, f"steps/{incarnation.path}") for u in units}
        try:
            self._catalog.drop(incarnation)
            self._at("manifest dropped")
        except TqFsError:
            if not is_noted:
                with self._lock:
                    del self._dying[incarnation]
                raise
            _log.warning("the manifest of %s goes later", incarnation, exc_info=True)
            self._catalog.forget(incarnation)
            with self._lock:
                self._dying[incarnation].add(Located("", f"manifests/{incarnation.path}"))

    def delete(self, incarnation: Incarnation, freed: Freed) -> int:
        """Delete the Steps that a release has freed; return how many."""
        if freed.is_over:
            # One listing, where a listing is a request.
            units = {step.unit for step in freed.steps}
            self.clear([Located(unit, f"steps/{incarnation.path}") for unit in units])
            self._at("steps deleted")
            self._lay_to_rest(incarnation)
        else:
            self._at("release written")
            self.clear([_at(incarnation, s.unit, s.index) for s in freed.steps])
        self._units.cool(_at(incarnation, s.unit, s.index) for s in freed.cold)
        return len(freed.steps)

    def clear(self, places: Sequence[Located]) -> None:
        """Delete Steps; what will not go now is tried again at later releases and at a start."""
        for place in places:
            try:
                self._units.clear(place)
            except TqFsError:
                _log.warning("%s could not be deleted yet", place, exc_info=True)
                self._leftover[place] = None
            else:
                self._leftover.pop(place, None)

    def try_again(self) -> None:
        """Delete what would not go before."""
        self.clear(list(self._leftover))
        with self._lock:
            unfinished = list(self._unfinished)  # another thread may be at the others
        for incarnation in unfinished:
            self._lay_to_rest(incarnation)

    def _lay_to_rest(self, incarnation: Incarnation) -> None:
        """Remove a tombstone, once nothing that it stands for is left."""
        with self._lock:
            left = self._dying.get(incarnation)
            if left is not None:
                self._unfinished.add(incarnation)
        if left is None or self._tombstones is None or any(p in self._leftover for p in left):
            return
        path = incarnation.path
        try:
            if any(place.path.startswith("manifests/") for place in left):
                self._catalog.drop(incarnation)
            self._tombstones.remove(incarnation)
            self._at("tombstone removed")
        except TqFsError:
            _log.warning("what is left of %s could not be deleted yet", path, exc_info=True)
            return
        with self._lock:
            self._dying.pop(incarnation, None)
            self._unfinished.discard(incarnation)

    def resume(self) -> None:
        """Go on with deletions that another Controller has begun."""
        if self._tombstones is not None:
            for stone in list(self._tombstones.all()):
                self._resume(stone.incarnation, stone.units)

    def _resume(self, incarnation: Incarnation, units: Collection[str]) -> None:
        steps = {Located(unit, f"steps/{incarnation.path}") for unit in units}
        manifest = Located("", f"manifests/{incarnation.path}")
        with self._lock:
            self._dying[incarnation] = {*steps, manifest}
        self.clear(sorted(steps))
        self._lay_to_rest(incarnation)

    def sweep(self, places: Iterable[Located]) -> None:
        """Delete what a sweep has found, which the next one finds again where that fails."""
        for place in places:
            try:
                self._units.clear(place)
            except TqFsError:
                _log.warning("%s could not be swept yet", place, exc_info=True)

    def tidy(self, path: str, remove: Callable[[], None]) -> None:
        """Remove what a session left in the catalog; what will not go now, at a later start."""
        try:
            remove()
        except TqFsError:
            _log.warning("what is left of %s could not be deleted yet", path, exc_info=True)


def _at(incarnation: Incarnation, unit: str, step: int) -> Located:
    return Located(unit, StepKey(incarnation, step).path)
