"""What the runs of ``tq-fs bench memory`` say: peaks, growth, slopes, and whether tensors agree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tq_fs.bench._plane_measured import CENTRAL, COMPONENTS, NVME, PATHS, QUEUE, S3, Measured, Run

SHARES = ((NVME, CENTRAL), (S3, CENTRAL), (NVME, QUEUE))
SLOPES = (NVME, S3)
_SAME_PAYLOAD = 0.01  # how much two payloads may differ that are compared


@dataclass(frozen=True, slots=True)
class Digests:
    """What comparing the trainers' tensors gave.

    Attributes
    ----------
    compared
        How many were held against another path's.
    differing
        Those that are not the same or not there, by path.
    """

    compared: int
    differing: Mapping[str, Sequence[str]]


def by_path(measured: Measured) -> dict[str, list[Run]]:
    """Return each path's runs, the smallest payload first."""
    runs = sorted(measured.runs, key=lambda run: run.payload_bytes)
    found = {path: [run for run in runs if run.path == path] for path in PATHS}
    return {path: those for path, those in found.items() if those}


def firsts(measured: Measured) -> dict[str, Run]:
    """Return the run of each path that all are compared at: that with the first payload."""
    return {path: runs[0] for path, runs in by_path(measured).items()}


def peak(run: Run) -> int:
    """Return the most that the data plane took at one moment [bytes]."""
    return max(sample.total for sample in run.samples)


def component_peaks(run: Run) -> dict[str, int]:
    """Return the most that each component took, each at a moment of its own [bytes]."""
    return {name: max(s.components.get(name, 0) for s in run.samples) for name in COMPONENTS}


def growth(run: Run) -> int:
    """Return what a run's peak is above the same processes without traffic [bytes]."""
    return peak(run) - run.idle.total


def change(value: float, base: float) -> str:
    """Return a change as people read it: ``-64.6%``; ``new`` where there was nothing."""
    if base > 0:
        return f"{value / base - 1:+.1%}"
    return "new" if value and not base else ""


# ---------------------------------------------------------------- figures


def figures(measured: Measured) -> dict[str, float]:
    """Return the figures by name; sizes in bytes.

    ``growth.A_share_of_B`` is what path A grows over what path B does, with the same payload.
    ``slope.PATH`` is by how many bytes the peak rises for each byte of payload.
    """
    first = firsts(measured)
    out: dict[str, float] = {f"peak.{path}": peak(run) for path, run in first.items()}
    out |= {f"growth.{path}": growth(run) for path, run in first.items()}
    for mine, other in SHARES:
        if not _no_share(first, mine, other):
            share = growth(first[mine]) / growth(first[other])
            out[f"growth.{mine}_share_of_{other}"] = round(share, 4)
    for path, runs in by_path(measured).items():
        if path in SLOPES and not _no_slope(runs):
            out[f"slope.{path}"] = round(slope(runs), 5)
    found = digests(measured)
    if found.compared:
        out["identical"] = not found.differing
    return out


def left_out(measured: Measured) -> dict[str, str]:
    """Return why a figure is not there, by its name."""
    first, runs = firsts(measured), by_path(measured)
    why = {f"growth.{a}_share_of_{b}": _no_share(first, a, b) for a, b in SHARES}
    why |= {f"slope.{path}": _no_slope(runs.get(path, ())) for path in SLOPES}
    why["identical"] = "" if digests(measured).compared else "no two paths gave tensors to compare"
    return {name: reason for name, reason in why.items() if reason}


def _no_share(first: Mapping[str, Run], mine: str, other: str) -> str:
    """Return why two paths cannot be compared; empty where they can."""
    missing = [path for path in (mine, other) if path not in first]
    if missing:
        return f"{' and '.join(missing)} did not run"
    payloads = first[mine].payload_bytes, first[other].payload_bytes
    if not math.isclose(*payloads, rel_tol=_SAME_PAYLOAD):
        return f"payloads differ: {payloads[0]:,} and {payloads[1]:,} bytes"
    return "" if growth(first[other]) > 0 else f"{other} did not grow"


def _no_slope(runs: Sequence[Run]) -> str:
    payloads = {run.payload_bytes for run in runs}
    return "" if len(payloads) > 1 else f"needs two payloads, {len(payloads)} ran"


def slope(runs: Sequence[Run]) -> float:
    """Return the least-squares slope of the peaks against the payloads."""
    payloads = [run.payload_bytes for run in runs]
    return statistics.linear_regression(payloads, [peak(run) for run in runs]).slope


# ---------------------------------------------------------------- tensors


def digests(measured: Measured) -> Digests:
    """Compare the tensors of each payload with those of the first path that had it."""
    compared = 0
    differing: dict[str, list[str]] = {path: [] for path in PATHS}
    for base, run in _pairs(measured):
        names = base.digests.keys() | run.digests.keys()
        compared += len(names)
        differing[run.path] += sorted(
            name for name in names if base.digests.get(name) != run.digests.get(name)
        )
    return Digests(compared, {path: names for path, names in differing.items() if names})


def _pairs(measured: Measured) -> Iterator[tuple[Run, Run]]:
    paths = list(by_path(measured).values())
    for nth in range(max(map(len, paths), default=0)):
        base, *others = (runs[nth] for runs in paths if nth < len(runs))
        yield from ((base, run) for run in others)
