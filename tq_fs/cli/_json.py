"""JSON for programs: one document, or one that grows as it is found out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from tq_fs.errors import InvalidConfig

STDOUT = "-"


def write_json(document: dict[str, Any], where: str) -> None:
    """Write a document to a file, or to standard output for ``-``."""
    with _opened(where) as file:
        file.write(json.dumps(document, indent=2) + "\n")


def stream_json(
    head: dict[str, Any], name: str, items: Iterable[dict[str, Any]], where: str
) -> bool:
    """Write a document whose list `name` is not held; it is whole JSON also when interrupted.

    Returns
    -------
    bool
        Whether all items were written; ``complete`` in the document says so too.
    """
    is_complete = False
    with _opened(where) as file:
        file.write(json.dumps(head)[:-1] + (", " if head else "") + f'"{name}": [')
        try:
            for n, item in enumerate(items):
                file.write((",\n" if n else "\n") + json.dumps(item))
            is_complete = True
        except KeyboardInterrupt:
            is_complete = False
        finally:
            file.write(f'\n], "complete": {json.dumps(is_complete)}}}\n')
    return is_complete


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
