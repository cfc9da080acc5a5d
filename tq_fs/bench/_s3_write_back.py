"""Memory of a process that records through a write-back tier, seen from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tq_fs.bench._s3_place import Place
from tq_fs.bench._s3_recorder import STEP, Task
from tq_fs.errors import DependencyMissing, FatalError

MiB = 1024 * 1024
BUDGET_BYTES = 512 * MiB
QUEUE_BYTES = 256 * MiB  # so small that waiting for uploads reaches the budget
_INTERVAL_S = 0.01
_LOG_LINES = 30


class RecorderFailed(FatalError):
    """The process that recorded ended with an error, which the message holds."""

    code: ClassVar[str] = "recorder_failed"


class WriteBack(NamedTuple):
    """What was recorded, and the memory that took.

    Attributes
    ----------
    nbytes
        Stored bytes of all Steps.
    budget_bytes
        Bound of the arrays that are on their way.
    inflight_bytes
        Most bytes of arrays that were on their way at once, as the process counted them.
    growth_bytes
        Most resident memory over that before the first Step.
    """

    nbytes: int
    budget_bytes: int
    inflight_bytes: int
    growth_bytes: int

    @property
    def over_budget_bytes(self) -> int:
        """Growth beyond the budget; negative where it stayed below."""
        return self.growth_bytes - self.budget_bytes


def steps_in(nbytes: int) -> int:
    """Return how many Steps add up to so many stored bytes."""
    return -(-nbytes // STEP.nbytes)


def measure_write_back(place: Place, nbytes: int, progress: Callable[[int], object]) -> WriteBack:
    """Record Steps that add up to `nbytes` in a process of its own.

    Parameters
    ----------
    progress
        Called with a number of Steps when they are finalized and released.

    Raises
    ------
    RecorderFailed
        With the end of what the process said.
    DependencyMissing
        psutil is not installed.
    """
    steps = steps_in(nbytes)
    with tempfile.TemporaryDirectory(prefix="tq-fs-bench-") as folder:
        task = Task(f"{place.url}/write-back", f"{folder}/front", steps, BUDGET_BYTES, QUEUE_BYTES)
        log = Path(folder) / "log"
        with _recorder(task, place.environment, log) as process, _Memory(process.pid) as memory:
            peak = _follow(process, memory, progress)
            if process.wait() or peak is None:
                lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
                raise RecorderFailed("\n" + "\n".join(lines), subject="recording")
    return WriteBack(steps * STEP.nbytes, BUDGET_BYTES, peak, memory.growth)


def _follow(
    process: subprocess.Popen[str], memory: _Memory, progress: Callable[[int], object]
) -> int | None:
    """Read what the process says; return what it says at its end, None if it did not get there."""
    assert process.stdin is not None
    assert process.stdout is not None
    for line in process.stdout:
        message: dict[str, Any] = json.loads(line)
        if "ready" in message:
            memory.start()
            process.stdin.write("\n")
            process.stdin.flush()
        elif "steps" in message:
            progress(message["steps"])
        else:
            peak: int = message["peak"]
            return peak
    return None


@contextmanager
def _recorder(
    task: Task, environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tq_fs.bench._s3_recorder", json.dumps(task._asdict())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **environment},
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()


class _Memory:
    """Samples the resident memory of a process from :meth:`start` until the context ends."""

    def __init__(self, pid: int) -> None:
        try:
            import psutil  # noqa: PLC0415  # optional
        except ImportError as error:
            raise DependencyMissing(
                "measuring memory needs psutil", remedy="pip install 'tq-fs[bench]'"
            ) from error
        self._gone = psutil.NoSuchProcess
        self._seen = psutil.Process(pid)
        self._before = self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="tq-fs-memory", daemon=True)

    @property
    def growth(self) -> int:
        """Most bytes over those at the start."""
        return self._peak - self._before

    def start(self) -> None:
        """Note what there is now, and go on sampling."""
        self._before = self._peak = self._seen.memory_info().rss
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            try:
                self._peak = max(self._peak, self._seen.memory_info().rss)
            except self._gone:
                return

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
