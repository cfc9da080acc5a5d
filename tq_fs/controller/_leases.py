"""Who still records a session, and who still trains: known for as long as they say so.

A holder is a process. It renews all that it holds by one call; what it does not renew in time may
be taken away. Nothing is written down: after a start all holders say it anew, and until they had
time for that nothing counts as given up.

What was held without a break since it began is whole. What a holder claims that was silent, or that
another Controller knew, may have been swept in the meantime: whoever relies on it has to look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Holder:
    until: float
    paths: set[str] = field(default_factory=set)
    consumers: frozenset[str] = frozenset()
    is_complete: bool = False  # it has said what it holds


class Leases:
    """Open sessions and live consumers. Safe to call from many threads.

    Parameters
    ----------
    lease_s
        Seconds for which a holder is believed to be alive.
    grace_s
        Seconds after that for which its sessions are left alone.
    clock
        Monotonic seconds.
    """

    def __init__(self, *, lease_s: float, grace_s: float, clock: Callable[[], float]) -> None:
        self.lease_s = lease_s
        self.grace_s = grace_s
        self._clock = clock
        self._lock = threading.Lock()
        self._holders: dict[str, _Holder] = {}
        self._holder_of: dict[str, str] = {}
        self._unbroken: set[str] = set()  # held since they began
        self._condemned: set[str] = set()  # being swept
        self._heard_at = clock() + lease_s
        self._complete_at = clock() + lease_s + grace_s

    def renew(
        self, holder: str, *, consumers: Iterable[str] = (), paths: Iterable[str] | None = None
    ) -> bool:
        """Hear that a holder is alive.

        Parameters
        ----------
        consumers
            In whose name it reads.
        paths
            Of all sessions it holds; None where those that are known already have not changed.

        Returns
        -------
        bool
            Whether all that the holder holds is known; if not, it has to say it.
        """
        with self._lock:
            found = self._holders.setdefault(holder, _Holder(0.0))
            found.until = self._clock() + self.lease_s
            found.consumers = frozenset(consumers)
            if paths is not None:
                self._hold(holder, found, paths)
                found.is_complete = True
            return found.is_complete

    def open(self, path: str, holder: str) -> None:
        """Note that a holder records a session."""
        with self._lock:
            found = self._holders.setdefault(holder, _Holder(0.0))
            found.until = max(found.until, self._clock() + self.lease_s)
            self._hold(holder, found, (path,))
            self._unbroken.add(path)

    def pin(self, path: str) -> bool:
        """Keep a session from being swept while it is finalized; return False where it is now."""
        with self._lock:
            if path in self._condemned:
                return False
            holder = self._holder_of.get(path)
            if holder is None or not self._is_held(path):
                self._unbroken.discard(path)
                holder = f"\0{path}"  # nobody's: it lapses by itself
            found = self._holders.setdefault(holder, _Holder(0.0))
            found.until = max(found.until, self._clock() + self.lease_s)
            self._hold(holder, found, (path,))
            return True

    def is_unbroken(self, path: str) -> bool:
        """Tell whether a session was held without a break since it began."""
        with self._lock:
            return path in self._unbroken and self._is_held(path)

    def condemn(self, path: str) -> bool:
        """Take a session from its holder to sweep it; False where it is recorded, or swept now."""
        with self._lock:
            if path in self._condemned or self._is_held(path):
                return False
            self._drop(path)
            self._condemned.add(path)
            return True

    def swept(self, path: str) -> None:
        """Note that the sweep of a session has ended, whatever it did."""
        with self._lock:
            self._condemned.discard(path)

    def close(self, path: str) -> None:
        """Note that a session was finalized or discarded; idempotent."""
        with self._lock:
            self._drop(path)

    def leave(self, holder: str) -> None:
        """Forget a holder that has ended; what it left open is an orphan at once."""
        with self._lock:
            gone = self._holders.get(holder)
            for path in list(gone.paths) if gone else ():
                self._drop(path)
            self._holders.pop(holder, None)

    def is_open(self, path: str) -> bool:
        """Tell whether a session is recorded by somebody who is alive, or was a moment ago."""
        with self._lock:
            return self._is_held(path)

    def is_live(self, consumer: str) -> bool:
        """Tell whether a process is alive that reads in a consumer's name."""
        with self._lock:
            now = self._clock()
            return any(now < h.until and consumer in h.consumers for h in self._holders.values())

    def is_heard(self) -> bool:
        """Tell whether all who are alive have renewed, since this began."""
        return self._clock() >= self._heard_at

    def is_complete(self) -> bool:
        """Tell whether all who are alive had time to say what they hold."""
        return self._clock() >= self._complete_at

    def expire(self) -> list[str]:
        """Forget holders that have been silent for too long; return what they held."""
        with self._lock:
            now = self._clock()
            over = [n for n, h in self._holders.items() if now >= h.until + self.grace_s]
            paths = [path for name in over for path in self._holders[name].paths]
            for path in paths:
                self._drop(path)
            for name in over:
                del self._holders[name]
            return paths

    def counts(self) -> tuple[int, int]:
        """Return how many holders and open sessions there are."""
        with self._lock:
            return len(self._holders), len(self._holder_of)

    def _is_held(self, path: str) -> bool:
        if path not in self._holder_of:
            return False
        holder = self._holders.get(self._holder_of[path])
        return holder is not None and self._clock() < holder.until + self.grace_s

    def _drop(self, path: str) -> None:
        holder = self._holder_of.pop(path, "")
        self._unbroken.discard(path)
        if holder in self._holders:
            self._holders[holder].paths.discard(path)

    def _hold(self, name: str, holder: _Holder, paths: Iterable[str]) -> None:
        for path in paths:
            before = self._holders.get(self._holder_of.get(path, ""))
            if before is not None:
                before.paths.discard(path)
            self._holder_of[path] = name
            holder.paths.add(path)
