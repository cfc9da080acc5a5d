"""Memory of the data plane, sampled from outside: PSS, the object store's bytes, the page cache.

What processes share through Ray's object store is memory of a file that each maps, and would be
counted to them in parts. It is counted once, by the bytes that the object store says it uses, and
left out of the processes: their ``Pss_Shmem``. tq-fs shares no memory of that kind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tq_fs.bench._plane_measured import COMPONENTS, Sample
from tq_fs.rollout import object_store_bytes

_KIB = 1024
_EVERY_S = 0.15
_CACHE_EVERY_S = 3.0
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_FAILED = ctypes.c_void_p(-1).value


def process_bytes(pid: int) -> int:
    """Return the PSS of a process without shared memory [bytes].

    Raises
    ------
    ProcessLookupError, FileNotFoundError
        It has ended: a run whose processes die measures nothing.
    """
    found = {"Pss": 0, "Pss_Shmem": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = int(rest.split()[0]) * _KIB
    return found["Pss"] - found["Pss_Shmem"]


def page_cache_bytes(folder: Path) -> int:
    """Return how many bytes of the files below a folder the kernel keeps in memory.

    A file that goes meanwhile counts for nothing.
    """
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                found += cached_bytes(os.path.join(place, name))
            except FileNotFoundError:
                continue
    return found


def cached_bytes(path: str) -> int:
    """Return the bytes of a file that are in the page cache; asks and touches nothing."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        return _resident(descriptor, size) if size else 0
    finally:
        os.close(descriptor)


def _resident(descriptor: int, size: int) -> int:
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    start = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if start == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap failed")
    try:
        if _LIBC.mincore(start, size, pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore failed")
    finally:
        _LIBC.munmap(start, size)
    return min(size, sum(page & 1 for page in pages.raw) * mmap.PAGESIZE)


class PlaneWatch:
    """Samples from :meth:`start` until the context is left.

    Parameters
    ----------
    pids
        Processes of each component; ``object_store`` needs none.
    trainers
        Processes beside them.
    folder
        Of the store's files; None for none.
    """

    def __init__(
        self, pids: Mapping[str, Sequence[int]], trainers: Sequence[int], folder: Path | None
    ) -> None:
        self._pids = pids
        self._trainers = trainers
        self._folder = folder
        self._begin = time.monotonic()
        self._cache = (float("-inf"), 0)
        self._ended = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tq-fs-plane", daemon=True)
        self.samples: list[Sample] = []

    def clock(self) -> float:
        """Return the seconds since :meth:`start`."""
        return time.monotonic() - self._begin

    def look(self) -> Sample:
        """Return what there is now."""
        sizes = {name: sum(map(process_bytes, self._pids.get(name, ()))) for name in COMPONENTS}
        sizes["object_store"] += sum(object_store_bytes().values())
        return Sample(
            clock_s=self.clock(),
            components=sizes,
            trainers=sum(map(process_bytes, self._trainers)),
            page_cache=self._page_cache(),
        )

    def _page_cache(self) -> int:
        """Look at the files now and then only: there are many."""
        if self._folder is not None and self.clock() - self._cache[0] > _CACHE_EVERY_S:
            self._cache = (self.clock(), page_cache_bytes(self._folder))
        return self._cache[1]

    def start(self) -> None:
        """Begin; the clock is 0 now."""
        self._begin = time.monotonic()
        self._cache = (float("-inf"), self._cache[1])
        self.samples.append(self.look())
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ended.wait(_EVERY_S):
                self.samples.append(self.look())
        except BaseException as error:  # raised where the block is left
            self._failed = error

    def __enter__(self) -> PlaneWatch:
        """Return it."""
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        """End; raise what sampling ended with."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._failed is not None and kind is None:
            raise self._failed
