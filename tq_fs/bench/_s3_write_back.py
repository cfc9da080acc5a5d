"""Memory of a process that records through a write-back tier, seen from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tq_fs.bench._memory import ResidentMemory
from tq_fs.bench._s3_place import Place
from tq_fs.bench._s3_recorder import STEP, Task
from tq_fs.errors import FatalError

MiB = 1024 * 1024
BUDGET_BYTES = 512 * MiB
QUEUE_BYTES = 256 * MiB  # so small that waiting for uploads reaches the budget
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
        with (
            _recorder(task, place.environment, log) as process,
            ResidentMemory(process.pid) as memory,
        ):
            peak = _follow(process, memory, progress)
            if process.wait() or peak is None:
                lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
                raise RecorderFailed("\n" + "\n".join(lines), subject="recording")
    return WriteBack(steps * STEP.nbytes, BUDGET_BYTES, peak, memory.growth)


def _follow(
    process: subprocess.Popen[str], memory: ResidentMemory, progress: Callable[[int], object]
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
