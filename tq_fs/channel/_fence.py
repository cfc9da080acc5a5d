"""Which Controller may still change what a unit holds: the one with the highest epoch."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tq_fs.errors import StorageFull, StoreFenced

_log = logging.getLogger(__name__)


class Fence:
    """Lets the last Controller write, and those who are none. Safe to call from many threads.

    Parameters
    ----------
    epoch, holder
        Of the Controller that came last.
    unit
        The unit's name, in messages.
    write
        Writes down who comes; called before that one may do anything.
    """

    def __init__(
        self, epoch: int, holder: str, *, unit: str, write: Callable[[int, str], None]
    ) -> None:
        self._now = (epoch, holder)
        self._unit = unit
        self._write = write
        self._noted = True  # who it obeys is written down
        self._writing: Counter[int] = Counter()  # by epoch
        self._room = threading.Condition()

    @property
    def epoch(self) -> int:
        """Of the Controller that came last."""
        return self._now[0]

    def admit(self, epoch: int, holder: str) -> None:
        """Hear of a Controller; one of a higher epoch takes over.

        Returns once writes of the one before have ended: what it changes is seen from then on.

        Raises
        ------
        StoreFenced
            A later one was here, or another one has this epoch.
        """
        if not epoch:
            return
        with self._room:
            if epoch > self._now[0]:
                self._now = (epoch, holder)  # no more writes of another one
                self._noted = False
            self._check(epoch, holder)
            self._room.wait_for(lambda: not self._of_others(epoch))
            self._check(epoch, holder)  # a later one may have come meanwhile
            if not self._noted:
                self._note(epoch, holder)

    def _note(self, epoch: int, holder: str) -> None:
        try:
            self._write(epoch, holder)
        except StorageFull:  # the next one that it says hello to tries again: it has to make room
            _log.warning("unit %s: no room for whom it obeys", self._unit, exc_info=True)
        else:
            self._noted = True

    @contextmanager
    def writing(self, epoch: int, holder: str) -> Iterator[None]:
        """Change something in a Controller's name; epoch 0 is for those who are none.

        Raises
        ------
        StoreFenced
        """
        if not epoch:
            yield
            return
        with self._room:
            self._check(epoch, holder)
            self._writing[epoch] += 1
        try:
            yield
        finally:
            with self._room:
                self._writing[epoch] -= 1
                self._writing += Counter()  # forgets what is at 0
                self._room.notify_all()

    def _of_others(self, epoch: int) -> bool:
        return any(other != epoch for other in self._writing)

    def _check(self, epoch: int, holder: str) -> None:
        if (epoch, holder) != self._now:
            raise StoreFenced(
                f"was taken over by a later Controller (epoch {self._now[0]})",
                subject=f"unit {self._unit}, for the Controller of epoch {epoch}",
                remedy="let that one end: it was replaced",
            )
