"""Counts and sizes as people write them."""

from __future__ import annotations

import math
import re

from tq_fs.errors import InvalidConfig

KiB = 1024
MiB = 1024**2
GiB = 1024**3
TiB = 1024**4
MOST = 10**18

_NUMBER = r"(\d+(?:\.\d+)?(?:e\d+)?)"
_COUNT = re.compile(rf"{_NUMBER}\s*([km]?)", re.IGNORECASE)
_SIZE = re.compile(rf"{_NUMBER}\s*([kmgt]i?b|b)?", re.IGNORECASE)


def parse_count(text: str, subject: str) -> int:
    """Return how many tokens are meant: ``64k`` are 65,536, ``1m`` 1,048,576.

    Raises
    ------
    InvalidConfig
    """
    found = _COUNT.fullmatch(text.strip())
    value = float(found[1]) * {"": 1, "k": KiB, "m": MiB}[found[2].lower()] if found else math.nan
    if not math.isfinite(value) or value != int(value):
        raise InvalidConfig(
            f"{text!r} is no count", subject=subject, remedy="write 65536, 64k (times 1024) or 1m"
        )
    return int(value)


def parse_size(text: str, subject: str) -> int:
    """Return bytes: ``2TB`` are 2·10¹², ``1.82TiB`` are binary, a bare number is bytes.

    Raises
    ------
    InvalidConfig
    """
    found = _SIZE.fullmatch(text.strip())
    value = float(found[1]) * _unit_bytes(found[2] or "b") if found else math.nan
    if not math.isfinite(value):
        raise InvalidConfig(
            f"{text!r} is no size", subject=subject, remedy="write 2TB, 1.82TiB, 512MiB or bytes"
        )
    return round(value)


def _unit_bytes(unit: str) -> int:
    power = "bkmgt".index(unit[0].lower())
    return int((KiB if "i" in unit.lower() else 1000) ** power)


def size_text(nbytes: float) -> str:
    """Return a size for people, in binary units: ``3.84 TiB``."""
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(nbytes) >= unit:
            value = nbytes / unit
            return f"{value:,.{2 if abs(value) < 10 else 1}f} {name}"
    return f"{nbytes:,.0f} B"


def at_least_one(name: str, value: int) -> None:
    """Refuse less than one of something, and more than there can be."""
    if value < 1:
        raise InvalidConfig(f"{value} is not at least 1", subject=name)
    if value > MOST:
        raise InvalidConfig(f"is more than {MOST:.0e}", subject=name)


def above_zero(name: str, value: float) -> None:
    """Refuse what is not a number above zero, or too near to zero to divide by."""
    if not 1 / MOST <= value <= MOST:
        raise InvalidConfig(f"{value} is not above 0, or not below {MOST:.0e}", subject=name)
