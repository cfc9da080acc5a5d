"""The resident memory of another process, sampled from outside."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import numpy as np

from tq_fs.errors import DependencyMissing

_INTERVAL_S = 0.01


class _Sample(NamedTuple):
    seconds: float
    nbytes: int


class ResidentMemory:
    """Samples the resident memory of a process from :meth:`start` until the context ends.

    RSS, as the kernel counts it: pages of mapped files, such as libraries, are in it.

    Raises
    ------
    DependencyMissing
        psutil is not installed.
    """

    def __init__(self, pid: int) -> None:
        try:
            import psutil  # noqa: PLC0415  # optional
        except ImportError as error:
            raise DependencyMissing(
                "measuring memory needs psutil", remedy="pip install 'tq-fs[bench]'"
            ) from error
        self._gone = psutil.NoSuchProcess
        self._seen = psutil.Process(pid)
        self._samples: list[_Sample] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="tq-fs-memory", daemon=True)

    @property
    def before(self) -> int:
        """Bytes at the start."""
        return self._samples[0].nbytes

    @property
    def growth(self) -> int:
        """Most bytes over those at the start."""
        if not self._samples:
            return 0
        return max(sample.nbytes for sample in self._samples) - self.before

    def drift(self) -> float:
        """Return by how many bytes the second half rose, by the line of least squares through it.

        Memory that follows what is under way goes up and down; what stays is in the line.
        """
        half = self._samples[len(self._samples) // 2 :]
        if len(half) < 2:
            return 0.0
        seconds, nbytes = np.array(half, float).T
        slope = float(np.polyfit(seconds - seconds[0], nbytes, 1)[0])
        return slope * float(seconds[-1] - seconds[0])

    def start(self) -> None:
        """Note what there is now, and go on sampling."""
        self._note()
        self._thread.start()

    def stop(self) -> None:
        """End sampling; idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _note(self) -> None:
        self._samples.append(_Sample(time.perf_counter(), self._seen.memory_info().rss))

    def _sample(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            try:
                self._note()
            except self._gone:
                return

    def __enter__(self) -> ResidentMemory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
