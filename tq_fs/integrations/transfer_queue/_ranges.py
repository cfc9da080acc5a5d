"""Parts of values, for programs that know us."""

from __future__ import annotations


def read_range() -> None:
    """Do."""
