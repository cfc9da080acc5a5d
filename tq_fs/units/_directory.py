"""What a process knows of a store's units, and when it asks anew."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from tq_fs.errors import StorageUnreachable, TqFsError, UnitLost
from tq_fs.keys import Incarnation
from tq_fs.placement import rank
from tq_fs.units._layout import Layout, UnitAddress

_log = logging.getLogger(__name__)
_AGAIN_S = 0.25  # between two questions on account of failures


class _Question:
    """What was asked and is not answered yet; nobody waits for longer than `until`."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.answered = threading.Event()


class Directory:
    """Finds units. Safe to call from many threads.

    Parameters
    ----------
    ask
        Returns the layout as it is now (the Controller's).
    node
        Id of the node that this process runs on.
    clock
        Monotonic seconds.
    fresh_s
        Seconds after which a layout is too old to place a session by.
    patience_s
        Seconds to wait for an answer where an older layout would do: no Step waits for a Controller
        that is away. None: `ask` answers at once.
    """

    def __init__(
        self,
        ask: Callable[[], Layout],
        *,
        node: str,
        clock: Callable[[], float],
        fresh_s: float = 5.0,
        patience_s: float | None = None,
    ) -> None:
        self.node = node
        self._ask = ask
        self._clock = clock
        self._fresh_s = fresh_s
        self._patience_s = patience_s
        self._question: _Question | None = None
        self._lock = threading.Lock()
        self._layout = Layout()
        self._units: dict[str, UnitAddress] = {}
        self._unknown: set[str] = set()  # names that were asked for in vain
        self._asked = float("-inf")
        self._told: set[str] = set()  # units whose endpoint was given out since

    def layout(self, older_s: float | None = None) -> Layout:
        """Return the layout, asked anew where it is older than that many seconds.

        Where that fails, or takes too long, it is the one that was known before.
        """
        limit = self._fresh_s if older_s is None else older_s
        with self._lock:
            now = self._clock()
            if now - self._asked < limit:
                return self._layout
            if self._patience_s is None or not self._is_known:
                self._take(self._ask())
                return self._layout
            if self._question is None:
                self._question = _Question(now + self._patience_s)
                threading.Thread(
                    target=self._put, args=(self._question,), name="tq-fs-layout", daemon=True
                ).start()
            question = self._question
        question.answered.wait(max(0.0, question.until - now))
        return self._layout

    @property
    def _is_known(self) -> bool:
        return self._asked > float("-inf")

    def _put(self, question: _Question) -> None:
        """Put a question to whoever knows the layout, and let others wait for the answer."""
        try:
            self.tell(self._ask())
        except TqFsError:
            _log.warning("the units are taken to be where they were", exc_info=True)
        finally:
            with self._lock:
                self._question = None
            question.answered.set()

    def tell(self, layout: Layout) -> None:
        """Hear of a layout, from whoever knows it without being asked."""
        with self._lock:
            self._take(layout)

    def _take(self, layout: Layout) -> None:
        self._layout = layout
        self._units = {unit.name: unit for unit in layout.units}
        self._unknown -= self._units.keys()
        self._asked = self._clock()
        self._told.clear()

    def find(self, name: str) -> UnitAddress:
        """Return a unit, whatever its state.

        Raises
        ------
        UnitLost
            There is none of this name.
        StorageUnreachable
            It may be one that has not reported to the Controller yet.
        """
        found = self._units.get(name)
        if found is None:
            # A unit that has just joined is in references sooner than in a layout of a moment ago.
            older_s = _AGAIN_S if name in self._unknown else 0.0
            since = self._clock() - older_s
            self.layout(older_s)
            found = self._units.get(name)
            if found is None and self._asked < since:
                raise StorageUnreachable(
                    "is not known, and the Controller does not answer", subject=f"unit {name}"
                )
            if found is None:
                self._unknown.add(name)
        if found is None and self._layout.unnamed:
            raise StorageUnreachable(
                "has not reported to the Controller yet", subject=f"unit {name}"
            )
        if found is None:
            raise UnitLost(
                "the store's cluster has no such unit",
                subject=f"unit {name}",
                remedy="bring back the node that has its folder; else discard what is on it",
            )
        return found

    def check(self, name: str) -> None:
        """Refuse the name of a unit that there is none of; one that may report yet passes.

        Raises
        ------
        UnitLost
        """
        with suppress(StorageUnreachable):
            self.find(name)

    def is_lost(self, name: str) -> bool:
        """Tell whether a unit is gone for good, as far as is known."""
        try:
            return self.find(name).state == "lost"
        except UnitLost:
            return True
        except StorageUnreachable:
            return False

    def is_here(self, name: str) -> bool:
        """Tell whether a unit is of this process's node."""
        return self.find(name).node == self.node

    def endpoint(self, name: str) -> str:
        """Return where a unit listens for this process.

        Asked anew where that was told before: the connection did not come about, or has ended.

        Raises
        ------
        UnitLost
            It will not come back.
        StorageUnreachable
            It may.
        """
        if name in self._told:
            self.layout(_AGAIN_S)
        unit = self.find(name)
        self._told.add(name)
        if unit.state == "lost":
            raise lost(unit)
        if unit.state == "restarting":
            raise StorageUnreachable(
                f"is being started anew on node {unit.node_name}", subject=f"unit {name}"
            )
        return unit.local if unit.node == self.node else unit.remote

    def live(self) -> list[str]:
        """Return the names of units that can be asked, sorted."""
        units = self.layout().units
        return sorted(u.name for u in units if u.state in ("live", "draining"))

    def others(self, incarnation: Incarnation) -> list[str]:
        """Return the units that may take a session's Steps when its home cannot, in their order."""
        weights = {u.name: u.weight for u in self.layout().units if u.state == "live"}
        weights.pop(incarnation.home, None)
        return rank(incarnation.path, weights)


def lost(unit: UnitAddress) -> UnitLost:
    """Return the error of a unit that will not come back."""
    return UnitLost(
        f"was lost with node {unit.node_name}",
        subject=f"unit {unit.name}",
        remedy=f"bring back the node that has {unit.folder}; else discard what was on it",
    )
