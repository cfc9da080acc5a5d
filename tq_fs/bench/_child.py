"""A process that does what it is asked: a line of JSON each way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tq_fs.errors import StorageFailed

_PATIENCE_S = 300.0
_LOG_LINES = 20

Requests = Mapping[str, Callable[..., object]]


class Child:
    """A process of a module of ours, which answers requests until its input ends.

    Parameters
    ----------
    module
        Calls :func:`answer`.
    arguments
        Of its command line.
    log
        File for what it writes to standard error.
    subject
        What it is, for errors.
    environment
        Variables in addition to this process's.
    """

    def __init__(
        self,
        module: str,
        arguments: list[str],
        *,
        log: Path,
        subject: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._subject = subject
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **(environment or {})},
            )

    def ask(self, what: str, *arguments: object) -> Any:
        """Return the answer to a request.

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
        return StorageFailed(f"{problem}; its log ends:\n" + "\n".join(log), subject=self._subject)


@contextmanager
def running(child: Child) -> Iterator[Child]:
    """Give a child that is ready, and end it.

    Raises
    ------
    StorageFailed
        It could not be started or ended; with the end of its log.
    """
    try:
        child.ask("ready")
        yield child
    finally:
        code = child.close()
    if code:
        raise child.failed(f"ended with exit code {code}")


def own_answers() -> IO[str]:
    """Return where answers go; what others print from now on is none of them."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def answer(requests: Requests, asked: IO[str], answers: IO[str]) -> None:
    """Answer requests until there are no more: what a child does."""
    for line in asked:
        name, *arguments = json.loads(line)
        answers.write(json.dumps(requests[name](*arguments)) + "\n")
