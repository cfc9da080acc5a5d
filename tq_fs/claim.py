"""Who writes to a store in an object store, where there is no lock: the one with the last epoch.

Whoever opens the store for writing puts a claim with an epoch above all others, under a key that
nobody else uses, and looks again. Where two claim the same epoch, both see it (listings of S3 and
MinIO are strongly consistent), step back and claim anew. Whoever finds a later claim than its own
has been replaced and writes no more. Conditional requests, which some servers ignore, are not
needed.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Collection

from tq_fs.backends import Backend
from tq_fs.errors import StoreBusy, StoreFenced

_ROOT = "claims"
_TRIES = 12
_MOST_S = 1.0  # between two tries
_NAME = re.compile(r"([0-9]{8,12})-[0-9a-f]{16}")


class Claim:
    """The right to write to a store. Safe to call from many threads.

    Attributes
    ----------
    epoch
        Stands in all that is written.
    """

    def __init__(self, backend: Backend, name: str, epoch: int) -> None:
        self.epoch = epoch
        self._backend = backend
        self._name = name

    def check(self) -> None:
        """Return where no later claim was put; costs one request.

        Raises
        ------
        StoreFenced
            There is one; nothing more may be written.
        """
        names = list(self._backend.list(_ROOT))
        if not _leads(self._name, names):
            raise StoreFenced(
                f"was taken by a later process (epoch {max(map(_epoch, names), default=0)})",
                subject=f"the store, which this process opened in epoch {self.epoch}",
                remedy="close it here: one process writes to a store",
            )


def take_claim(
    backend: Backend,
    *,
    sleep: Callable[[float], None] = time.sleep,
    uniform: Callable[[float, float], float] = random.uniform,
) -> Claim:
    """Become the one that writes to a store.

    Raises
    ------
    StoreBusy
        Others try at the same time, again and again.
    """
    for tries in range(_TRIES):
        epoch = max(map(_epoch, backend.list(_ROOT)), default=0) + 1
        name = f"{epoch:08d}-{os.urandom(8).hex()}"
        backend.put(f"{_ROOT}/{name}", b"")
        names = list(backend.list(_ROOT))
        if _leads(name, names):
            for older in names:
                if older != name and _NAME.fullmatch(older):
                    backend.delete(f"{_ROOT}/{older}")
            return Claim(backend, name, epoch)
        backend.delete(f"{_ROOT}/{name}")
        sleep(uniform(0.0, min(0.05 * 2**tries, _MOST_S)))
    raise StoreBusy(
        f"other processes opened it at the same time, {_TRIES} times in a row",
        subject="the store",
        remedy="let one process open it for writing",
    )


def _leads(name: str, names: Collection[str]) -> bool:
    """Tell whether a claim is there, and alone with the highest epoch."""
    return name in names and all(_epoch(n) < _epoch(name) for n in names if n != name)


def _epoch(name: str) -> int:
    """Return a claim's epoch; 0 for what is no claim."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else 0
