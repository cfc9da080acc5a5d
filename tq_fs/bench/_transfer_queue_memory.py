"""The memory of what stores for a TransferQueue: the processes that hold values, and the client.

Which processes those are is told by what Ray calls them: all its actors but TransferQueue's
Controller, and whatever else was started since TransferQueue was. Counted is PSS, so that what
processes share (libraries, shared memory) is there once. Files in the page cache are in none.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import psutil

_KIB = 1024
_RAY = "ray::"
_NO_STORAGE = ("TransferQueueController", "DashboardAgent", "RuntimeEnvAgent", "IDLE")
_WORKER = "default_worker.py"  # has no title yet


class Memory(NamedTuple):
    """Proportional resident memory [bytes], now.

    Attributes
    ----------
    storage
        Of all processes that store.
    client
        Of this process, which puts.
    names
        What the processes are called that store.
    """

    storage: int
    client: int
    names: list[str]


def started() -> set[int]:
    """Return the ids of all processes below this one, Ray's among them."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def memory_now(before: Collection[int]) -> Memory:
    """Look at this process and at those that store.

    Parameters
    ----------
    before
        What was :func:`started` when TransferQueue was not.
    """
    storing: dict[int, str] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            command = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if stores(command, new=process.pid not in before):
            storing[process.pid] = command[0].removeprefix(_RAY)
    found = [_pss(pid) for pid in storing]
    return Memory(sum(found), _pss(psutil.Process().pid), sorted(storing.values()))


def stores(command: list[str], *, new: bool) -> bool:
    """Tell whether a process is one that stores, by its command line.

    An actor may run in a worker that Ray had started before: only others have to be `new`.
    """
    if not command:
        return False  # has ended, and nobody asked for its exit code yet
    if command[0].startswith(_RAY):
        return not command[0].removeprefix(_RAY).startswith(_NO_STORAGE)
    return new and not any(_WORKER in part for part in command)


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * _KIB
    return 0
