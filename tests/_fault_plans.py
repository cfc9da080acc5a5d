"""What a seed of the fault suite stands for, and the tables that all seeds together fill.

A seed says which cell of a table is aimed at, which request of a life it hits, which other faults
come by chance, and what the life is like. Whether a cell was reached is for the proxy's log to say.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tests._fault_proxy import Crash, Fault, Operation, Schedule, Seen, Verdict
from tests._rollouts import Op, Rollout, standard_fields
from tq_fs.backends import NodeCache, TieredBackend
from tq_fs.manifests import Mode

# ---------------------------------------------------------------- fault x operation x crash point

FAULTS: Mapping[str, tuple[Fault, ...]] = {
    "no fault": (),
    "throttling": ("throttle-503", "throttle-429"),
    "server error": ("error-500", "error-502-html"),
    "reset": ("reset",),
    "lost acknowledgement": ("lost-ack",),
    "time-out": ("timeout",),
    "short body": ("short-body",),
    "corrupt bytes": ("corrupt",),
    "slow": ("slow",),
}
OPERATIONS: tuple[Operation, ...] = (
    "put", "commit", "document", "get", "range", "head", "list", "delete", "bulk-delete",
)  # fmt: skip
CRASHES: Mapping[str, Crash | None] = {
    "none": None,
    "before": "before",
    "unacknowledged": "unacknowledged",
    "after": "after",
}
_ROW_OF = {fault: row for row, faults in FAULTS.items() for fault in faults}


class Cell(NamedTuple):
    """A fault hits an operation, and the process is killed at its next request of that operation.

    That is the second try where the fault made one necessary. Without a crash the process lives on.
    """

    fault: str
    operation: str
    crash: str

    @property
    def impossible(self) -> str:
        """Why it cannot be; empty where it can."""
        if self.fault == "no fault" and self.crash == "none":
            return "nothing happens"
        if self.fault == "corrupt bytes" and self.operation in ("head", "delete"):
            return "neither its request nor its answer has a body"
        return ""


TABLE = [Cell(f, o, c) for f in FAULTS for c in CRASHES for o in OPERATIONS]
CELLS = [cell for cell in TABLE if not cell.impossible]


def reached(seen: Sequence[Seen]) -> set[Cell]:
    """Return the cells that a life reached, by the proxy's log."""
    by_number = {(s.operation, s.n): s for s in seen}
    for s in seen:
        if s.crash is not None:
            before = by_number.get((s.operation, s.n - 1))
            fault = _row(before) if before else ""
            return {Cell(fault or "no fault", s.operation, s.crash)}
    return {Cell(row, s.operation, "none") for s in seen if (row := _row(s))}


def _row(s: Seen) -> str:
    """Return the fault that a request met; empty where there was nothing to spoil: claims."""
    if s.fault is None or (s.fault == "corrupt" and "/claims/" in s.path):
        return ""
    return _ROW_OF[s.fault]


# ---------------------------------------------------------------- tier policy x crash point

POLICIES = ("write-back", "write-through")
POINTS = (*TieredBackend.POINTS, *NodeCache.POINTS)
_BACK_ONLY = ("front published", "upload queued", "uploading", "uploaded")


class TierCell(NamedTuple):
    """A process is killed as its tier passes a point; empty for one that lives on."""

    policy: str
    point: str

    @property
    def impossible(self) -> str:
        """Why it cannot be; empty where it can."""
        if self.policy == "write-through" and self.point in _BACK_ONLY:
            return "nothing is uploaded behind"
        return ""


TIER_TABLE = [TierCell(policy, point) for policy in POLICIES for point in ("", *POINTS)]
TIER_CELLS = [cell for cell in TIER_TABLE if not cell.impossible]

# ---------------------------------------------------------------- plans

TIERED = 1_000_000  # seeds from here on stand for lives with a tier
DRIVERS = ("s3fs", "obstore")
FIELDS = standard_fields(layers=2)
CHANCE = 0.003  # of each sort of fault, at each request that is not aimed at
_order = random.Random(0).sample(CELLS, len(CELLS))  # so that nothing else goes with a cell

# Appending nothing records a Step without rows, which finalizing deletes again.
TURNS: Mapping[str, Sequence[Op]] = {
    "many": (Op("create"), Op("create", 0, 2, 3), Op("append", 0, 0, 0)),
    "few": (Op("create", 0, 2, 2), Op("append", 0, 1, 3)),
    "dropped": (Op("create"), Op("create", 0, 1, 1)),
    "empty": (),
}
CONSUMERS = {"many": ("train", "eval"), "few": ("train",)}  # of the sessions that are finalized


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to happen to a life.

    Attributes
    ----------
    cell
        What is aimed at; None for a life without faults.
    fault
        The sort of fault, where the row has several.
    place
        Which of the operation's requests is hit, as a share of those that a life makes.
    burst
        How many of them in a row.
    lasting
        The burst outlasts the retries, so that callers hear of it.
    restarts
        The store is closed and opened again half-way, which sweeps what failures left.
    threads
        Threads that read; above 1 sessions are recorded side by side, too.
    nth
        At which passing of the tier's point the process is killed.
    """

    seed: int
    cell: Cell | TierCell | None
    driver: str
    mode: Mode
    threads: int
    fault: Fault | None = None
    place: float = 0.0
    burst: int = 0
    lasting: bool = False
    restarts: bool = True
    nth: int = 0

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Return what a seed stands for."""
        draw = random.Random(f"life {seed}")
        if seed < 0:
            return cls(seed=seed, cell=None, driver=DRIVERS[seed % 2], mode="tito", threads=1)
        if seed >= TIERED:
            return cls._tiered(seed, draw)
        lap, i = divmod(seed, len(_order))
        cell = _order[i]
        faults = FAULTS[cell.fault]
        lasting = bool(faults) and cell.fault != "slow" and draw.random() < 0.25
        undone = cell.crash == "none" and cell.operation in ("put", "commit", "document")
        if undone and cell.fault != "slow" and draw.random() < 0.5:
            lasting = True
        return cls(
            seed=seed,
            cell=cell,
            driver="s3fs" if cell.operation == "bulk-delete" else DRIVERS[(i + lap) % 2],
            mode="snapshot" if draw.random() < 0.25 else "tito",
            threads=draw.choice([1, 2, 4]),
            fault=faults[(i // 2 + lap) % len(faults)] if faults else None,
            place=draw.random(),
            burst=_burst(cell) if lasting else bool(faults),
            lasting=lasting,
            restarts=not (lasting and undone),
        )

    @classmethod
    def _tiered(cls, seed: int, draw: random.Random) -> Plan:
        lap, i = divmod(seed - TIERED, len(TIER_CELLS))
        return cls(
            seed=seed,
            cell=TIER_CELLS[i],
            driver=DRIVERS[(i + lap) % 2],
            mode="snapshot" if draw.random() < 0.25 else "tito",
            threads=draw.choice([1, 2, 4]),
            nth=draw.choice([1, 1, 2]),
        )

    @property
    def tier(self) -> TierCell | None:
        """What is aimed at in a life with a tier."""
        return self.cell if isinstance(self.cell, TierCell) else None

    @property
    def leaves_strays(self) -> bool:
        """Deleting may fail for good, so that something is left for the next start."""
        deletes = ("head", "list", "delete", "bulk-delete")
        return self.lasting and self.cell is not None and self.cell[1] in deletes

    def schedule(self, counts: Mapping[str, int]) -> Schedule:
        """Return when the proxy is to do what; `counts` are the requests of a quiet life."""
        if self.cell is None:
            return Schedule()
        chances = {fault: CHANCE for faults in FAULTS.values() for fault in faults}
        chance = Schedule.seeded(self.seed, chances)
        if isinstance(self.cell, TierCell):
            return chance
        operation, crash = self.cell.operation, CRASHES[self.cell.crash]
        first = 2 if operation == "put" else 1  # the first one is a claim, and empty
        last = counts[operation] - bool(crash and self.fault)
        start = first + int(self.place * max(last - first + 1, 1))
        end = start + self.burst

        def decide(asked: Operation, n: int) -> Verdict:
            if asked != operation or not start <= n <= end:
                return Verdict()
            return Verdict(self.fault) if n < end else Verdict(crash=crash)

        return Schedule(decide) | chance

    def session_id(self, name: str) -> str:
        """Return a session's id: long or short, so that the bit in the middle is any bit."""
        return f"{name}-{'x' * random.Random(f'{name} {self.seed}').randrange(60)}"

    def rollout(self, name: str) -> Rollout:
        """Return what is recorded as a session."""
        draw = np.random.default_rng([self.seed % 2**32, list(TURNS).index(name)])
        return Rollout(FIELDS, self.mode).play(TURNS[name], draw)


def _burst(cell: Cell) -> int:
    """Return how many requests a lasting fault hits: before a crash those of about one call."""
    if cell.fault == "time-out":
        return 3 if cell.crash == "none" else 1
    return 12 if cell.crash == "none" else 4


# ---------------------------------------------------------------- printed

BOTH: list[Cell | TierCell] = [*TABLE, *TIER_TABLE]
_REASONS = dict.fromkeys(cell.impossible for cell in BOTH if cell.impossible)
_MARKS = {reason: f"({mark})" for mark, reason in zip("abc", _REASONS, strict=True)}


def table(cells: Mapping[Any, int]) -> str:
    """Return how often each cell was reached, in columns; the cells that cannot be with why."""
    lines = [f"{'fault':21}{'then killed':15}" + "".join(f"{o:>12}" for o in OPERATIONS)]
    for fault in FAULTS:
        for crash in CRASHES:
            row = [Cell(fault, operation, crash) for operation in OPERATIONS]
            lines.append(f"{fault:21}{crash:15}" + "".join(f"{_shown(c, cells):>12}" for c in row))
    lines += ["", f"{'tier':21}{'killed at':20}{'':>10}"]
    lines += [f"{c.policy:21}{c.point or 'none':20}{_shown(c, cells):>7}" for c in TIER_TABLE]
    return "\n".join([*lines, "", *(f"{mark} {reason}" for reason, mark in _MARKS.items())])


def _shown(cell: Cell | TierCell, cells: Mapping[Any, int]) -> str:
    return _MARKS.get(cell.impossible) or str(cells.get(cell) or "MISSED")
