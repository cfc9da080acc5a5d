"""The resident memory of another process, sampled from outside."""

from __future__ import annotations

import threading

from tq_fs.errors import DependencyMissing

_INTERVAL_S = 0.01


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
        self._samples: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="tq-fs-memory", daemon=True)

    @property
    def before(self) -> int:
        """Bytes at the start."""
        return self._samples[0]

    @property
    def growth(self) -> int:
        """Most bytes over those at the start."""
        if not self._samples:
            return 0
        return max(self._samples) - self.before

    def rise(self) -> int:
        """Return by how many bytes the peak of the second half is above that of the first.

        Peaks, because memory that follows what is under way goes up and down.
        """
        half = len(self._samples) // 2
        if not half:
            return 0
        first, second = self._samples[:half], self._samples[half:]
        return max(second) - max(first)

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
        self._samples.append(self._seen.memory_info().rss)

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
