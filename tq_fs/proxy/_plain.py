"""Which JSON can be kept, and handed on in every form that prompts and answers have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tq_fs.errors import InvalidRequest

DEEPEST = 100  # far below what the interpreter's stack, templates' ``tojson`` and readers bear
_LEAST, _END = -(2**63), 2**64  # of msgpack's integers


def check_plain(value: object, subject: str) -> None:
    """Refuse what is nested too deep for others, or holds an integer too long for msgpack.

    Raises
    ------
    InvalidRequest
    """
    for depth, level in enumerate(_levels(value)):
        if depth > DEEPEST:
            problem = f"is nested more than {DEEPEST} deep"
        elif any(type(found) is int and not _LEAST <= found < _END for found in level):
            problem = "holds an integer of more than 64 bits"
        else:
            continue
        raise InvalidRequest(problem, subject=subject, remedy="send it as text")


def too_deep(value: object, most: int) -> bool:
    """Tell whether values lie more than `most` lists and mappings deep."""
    return any(depth > most for depth, _ in enumerate(_levels(value)))


def _levels(value: Any) -> Iterator[list[Any]]:
    """Yield what lies at each depth, the whole first."""
    level = [value]
    while level:
        yield level
        level = [inner for outer in level for inner in _inside(outer)]


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
