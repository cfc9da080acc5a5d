"""What figures should be, and the table that says which of them are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rich.table import Table

MiB = 1024**2
_LARGE = 1000


class Target(NamedTuple):
    """What a figure should be; one that is `in_bytes` is shown in MiB."""

    bound: float
    at_least: bool
    in_bytes: bool = False

    def met(self, value: float) -> bool:
        """Tell whether a figure is as it should be."""
        return value >= self.bound if self.at_least else value <= self.bound

    def show(self, value: float) -> str:
        """Return a figure as people read it."""
        if self.in_bytes:
            return f"{value / MiB:,.0f} MiB"
        return f"{value:,.0f}" if abs(value) >= _LARGE else f"{value:.4g}"

    def __str__(self) -> str:
        """Show the bound."""
        return f"{'≥' if self.at_least else '≤'} {self.show(self.bound)}"


def at_least(bound: float) -> Target:
    """Return a target that larger figures meet."""
    return Target(bound, at_least=True)


def at_most(bound: float, *, in_bytes: bool = False) -> Target:
    """Return a target that smaller figures meet."""
    return Target(bound, at_least=False, in_bytes=in_bytes)


def targets_table(targets: Mapping[str, Target], found: Mapping[str, float]) -> Table:
    """Return a table of the figures that have a target."""
    table = Table(title="Targets", title_justify="left")
    table.add_column("", no_wrap=True)
    for head in ("measured", "target", ""):
        table.add_column(head, justify="right")
    for name, target in targets.items():
        if name in found:
            mark = "met" if target.met(found[name]) else "missed"
            table.add_row(name, target.show(found[name]), str(target), mark)
    return table
