"""TransferQueue with one backend after another, each in a process tree of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from tq_fs.errors import StorageFailed

OURS, SIMPLE, SSD = "tq_fs", "simple", "ssd"
_SSD_THRESHOLD_BYTES = 65536  # below the 0.66 MB of a Step's routing, above its logprobs
_CHILD = "tq_fs.bench._transfer_queue_child"
_PATIENCE_S = 300.0
_LOG_LINES = 20


class Variant(NamedTuple):
    """A backend.

    Attributes
    ----------
    backend
        Its section of the configuration, for a folder.
    module
        What registers it, where TransferQueue does not know it.
    """

    backend: Callable[[Path], Mapping[str, Any]]
    module: str | None = None


def _simple(folder: Path) -> Mapping[str, Any]:  # noqa: ARG001  # keeps nothing there
    return {"storage_backend": "SimpleStorage"}


def _ssd(folder: Path) -> Mapping[str, Any]:
    offload = {"enabled": True, "path": str(folder), "threshold_bytes": _SSD_THRESHOLD_BYTES}
    return {"storage_backend": "SimpleStorage", "SimpleStorage": {"ssd_offload": offload}}


def _ours(folder: Path) -> Mapping[str, Any]:
    section = {"url": folder.absolute().as_uri(), "store_id": "bench"}
    return {"storage_backend": "TqFs", "TqFs": section}


VARIANTS: Mapping[str, Variant] = {
    SIMPLE: Variant(_simple),
    SSD: Variant(_ssd),
    OURS: Variant(_ours, "tq_fs.integrations.transfer_queue"),
}


@contextmanager
def queue_with(name: str, folder: Path) -> Iterator[Queue]:
    """Start a TransferQueue with a backend of :data:`VARIANTS`; what it stored is gone afterwards.

    Raises
    ------
    StorageFailed
        It could not be started or ended; with the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder) as own:
        queue = Queue(name, Path(own))
        try:
            queue.ask("ready")
            yield queue
        finally:
            code = queue.close()
        if code:
            raise queue.failed(f"ended with exit code {code}")


class Queue:
    """A process with a TransferQueue, which does what it is asked for."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._log = folder / "log"
        values = folder / "values"
        values.mkdir()
        variant = VARIANTS[name]
        command = [sys.executable, "-m", _CHILD, json.dumps(variant.backend(values))]
        command += [variant.module] if variant.module is not None else []
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "TQ_LOGGING_LEVEL": "ERROR"},  # on few cores each put warns
            )

    def ask(self, what: str, *arguments: float) -> Any:
        """Return the answer to a request of :mod:`tq_fs.bench._transfer_queue_child`.

        Raises
        ------
        StorageFailed
            The process ended, or had to be ended because it took too long.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._patience(), suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([what, *arguments]) + "\n")
            self._process.stdin.flush()
            if answer := self._process.stdout.readline():
                return json.loads(answer)
        raise self.failed(f"gave no answer to {what!r}")

    def close(self) -> int:
        """End it; return its exit code."""
        assert self._process.stdout is not None
        with self._patience(), self._process.stdout:
            self._close_input()
            return self._process.wait()

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    @contextmanager
    def _patience(self) -> Iterator[None]:
        """Kill it when the context lasts too long."""
        end = threading.Timer(_PATIENCE_S, self._process.kill)
        end.start()
        try:
            yield
        finally:
            end.cancel()

    def failed(self, problem: str) -> StorageFailed:
        """Return an error with the end of its log."""
        log = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return StorageFailed(
            f"{problem}; its log ends:\n" + "\n".join(log),
            subject=f"TransferQueue with {self._name}",
        )
