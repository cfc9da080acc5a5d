"""What the Controller knows of its units, from what they report. Pure but for its lock."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tq_fs.cluster._node_unit import UnitReport
from tq_fs.errors import TqFsError, UnitLost
from tq_fs.placement import weight_of
from tq_fs.units import Layout, State, UnitAddress

MiB = 1024**2
_FULL_BYTES = 256 * MiB  # with less room a unit takes no new sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a round of reports has changed.

    Attributes
    ----------
    came, went
        Names of units that can be asked now, and of those that cannot any more.
    """

    came: tuple[str, ...]
    went: tuple[str, ...]


class Roster:
    """The units of a store, as they reported last. Safe to call from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: dict[str, UnitReport] = {}
        self._units: dict[str, UnitAddress] = {}
        self._draining: set[str] = set()
        self._unnamed: set[str] = set()  # keys of units that may be any that is not known
        self._version = 0

    def observe(self, reports: Mapping[str, UnitReport | TqFsError]) -> Change:
        """Take in what units reported, or why they did not, by any key that stays the same."""
        with self._lock:
            before = dict(self._units)
            self._unnamed = {
                key
                for key, report in reports.items()
                if key not in self._reports and not isinstance(report, UnitReport | UnitLost)
            }
            for key, report in reports.items():
                if isinstance(report, UnitReport):
                    self._take(key, report)
                elif key in self._reports:
                    name = self._reports[key].name
                    state: State = "lost" if isinstance(report, UnitLost) else "restarting"
                    self._units[name] = replace(self._units[name], state=state, weight=0)
            if _known_to_clients(before) != _known_to_clients(self._units):
                self._version += 1
            return _change(before, self._units)

    def drain(self, name: str, *, on: bool = True) -> None:
        """Give a unit no new sessions, or give it some again.

        Raises
        ------
        UnitLost
            There is none of this name.
        """
        with self._lock:
            if name not in self._units:
                raise UnitLost("the store has no such unit", subject=f"unit {name}")
            if on:
                self._draining.add(name)
            else:
                self._draining.discard(name)
            unit = self._units[name]
            if unit.state in ("live", "draining"):
                self._units[name] = replace(unit, state="draining" if on else "live")
            self._version += 1

    def layout(self, epoch: int) -> Layout:
        """Return the units as they are known now."""
        with self._lock:
            units = tuple(self._units[name] for name in sorted(self._units))
            return Layout(
                epoch=epoch, version=self._version, units=units, unnamed=len(self._unnamed)
            )

    def reports(self) -> dict[str, UnitReport]:
        """Return the last report of each unit, by its name."""
        with self._lock:
            return {report.name: report for report in self._reports.values()}

    def weights(self) -> dict[str, int]:
        """Return the shares of new sessions, by unit."""
        with self._lock:
            return {u.name: u.weight for u in self._units.values() if u.state == "live"}

    def _take(self, key: str, report: UnitReport) -> None:
        self._reports[key] = report
        before = self._units.get(report.name)
        weight = weight_of(report.free_bytes, before.weight if before else 0)
        self._units[report.name] = UnitAddress(
            name=report.name,
            node=report.node,
            node_name=report.node_name,
            state="draining" if report.name in self._draining else "live",
            local=report.local,
            remote=report.remote,
            folder=report.folder,
            weight=weight if report.free_bytes >= _FULL_BYTES else 0,
            free_bytes=report.free_bytes,
        )


def _known_to_clients(units: Mapping[str, UnitAddress]) -> dict[str, UnitAddress]:
    """Return the units without what changes all the time."""
    return {name: replace(unit, free_bytes=0) for name, unit in units.items()}


def _change(before: Mapping[str, UnitAddress], after: Mapping[str, UnitAddress]) -> Change:
    there = {name for name, unit in before.items() if _can_be_asked(unit)}
    here = {name for name, unit in after.items() if _can_be_asked(unit)}
    return Change(came=tuple(sorted(here - there)), went=tuple(sorted(there - here)))


def _can_be_asked(unit: UnitAddress) -> bool:
    return unit.state in ("live", "draining")
