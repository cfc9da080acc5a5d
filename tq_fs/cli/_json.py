"""JSON for programs: one document, or one that grows as it is found out."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, TypeVar

from tq_fs.errors import InvalidConfig

STDOUT = "-"
T = TypeVar("T")


def check_json(where: str | None) -> None:
    """Refuse a file that cannot be written, before the work whose report it is to hold.

    Raises
    ------
    InvalidConfig
    """
    folder = None if where in {None, STDOUT} else Path(str(where)).parent
    if folder is not None and not folder.is_dir():
        raise InvalidConfig(
            "its folder is not there", subject=f"--json {where}", remedy="name another file"
        )


def write_json(document: dict[str, Any], where: str) -> None:
    """Write a document to a file, or to standard output for ``-``."""
    with _opened(where) as file:
        file.write(json.dumps(document, indent=2) + "\n")


def stream_json(
    head: dict[str, Any],
    name: str,
    items: Iterable[dict[str, Any]],
    where: str,
    *,
    is_complete: Callable[[], bool],
) -> None:
    """Write a document whose list `name` is not held.

    Parameters
    ----------
    is_complete
        Asked when the items are over: whether that was all, which ``complete`` then says.
    """
    with _opened(where) as file:
        file.write(json.dumps(head)[:-1] + f', "{name}": [')
        for n, item in enumerate(items):
            file.write((",\n" if n else "\n") + json.dumps(item))
        file.write(f'\n], "complete": {json.dumps(is_complete())}}}\n')


class Interruptible:
    """Ends what is iterated over at the first Ctrl-C, between two items; a context manager.

    A line is thus never cut. The second Ctrl-C is an ordinary one.

    Attributes
    ----------
    is_interrupted
        Whether it has come.
    """

    def __init__(self) -> None:
        self.is_interrupted = False

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items until the interrupt."""
        for item in items:
            if self.is_interrupted:
                return
            yield item

    def is_whole(self) -> bool:
        """Tell whether nothing was interrupted."""
        return not self.is_interrupted

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.is_interrupted = True
        signal.signal(signal.SIGINT, self._before)

    def __enter__(self) -> Interruptible:
        """Take the signal, where this is the main thread."""
        self._before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        """Give the signal back."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)


@contextmanager
def _opened(where: str) -> Iterator[TextIO]:
    if where == STDOUT:
        yield sys.stdout
        return
    with ExitStack() as opened:
        try:
            file = opened.enter_context(Path(where).open("w", encoding="utf-8"))
        except OSError as error:
            raise InvalidConfig(
                error.strerror or str(error), subject=f"--json {where}", remedy="name another file"
            ) from error
        yield file
