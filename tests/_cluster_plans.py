"""What a seed of the cluster's fault suite stands for, and the tables that all seeds together fill.

A seed aims at two cells of fault x operation, and some at a named point where a process kills
itself, too. Whether a cell was reached is for the clock to say: the fault was there while the
operation was under way, at the unit that the operation needed where it needs a certain one.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests._rollouts import Rollout, short_rollout, standard_fields, turning_rollout
from tq_fs.backends import LocalBackend
from tq_fs.controller import Controller

FAULTS = (
    "kill unit", "kill controller", "kill writer", "kill trainer", "kill unit and controller",
    "lose unit", "cut", "reset", "hang", "slow", "full", "stop unit", "replace controller",
    "second unit", "stranger", "garbage",
)  # fmt: skip
OPERATIONS = (
    "open", "record", "finalize", "discard", "hydrate", "release", "hold", "checkpoint",
    "sweep", "join", "takeover",
)  # fmt: skip


class Cell(NamedTuple):
    """A fault is there while an operation is under way."""

    fault: str
    operation: str


class Point(NamedTuple):
    """A process kills itself as it passes a point."""

    process: str
    name: str


CELLS = [Cell(f, o) for f in FAULTS for o in OPERATIONS]
POINTS = [
    *(Point("unit", name) for name in LocalBackend.POINTS),
    *(Point("controller", name) for name in Controller.POINTS),
]
LAP = len(CELLS) // 2  # seeds that aim at each cell once
_order = random.Random(0).sample(CELLS, len(CELLS))
FIELDS = standard_fields(layers=2)


@dataclass(frozen=True, kw_only=True)
class Aim:
    """A fault that is to meet an operation.

    Attributes
    ----------
    nth
        Which one of its kind.
    before
        Whether the fault comes before the operation begins, or in the middle of it.
    delay_s
        Seconds after its beginning, where it comes in the middle.
    lasts_s
        Seconds until what was cut, or is full, is whole again.
    """

    cell: Cell
    nth: int
    before: bool
    delay_s: float
    lasts_s: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to happen to a cluster.

    Attributes
    ----------
    point, nth
        Where a process kills itself, and at which passing.
    units
        At the start.
    near
        The trainer runs on a unit's node, and reads its files.
    restart_s
        Seconds until a process that was killed is started again.
    sessions
        Of each of the two writers.
    ends
        Everything is released in the end, and nothing may be left.
    """

    seed: int
    aims: tuple[Aim, ...]
    point: Point | None
    nth: int
    units: int
    near: bool
    durability: str
    persist: bool
    restart_s: float
    sessions: int
    ends: bool

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Return what a seed stands for."""
        draw = random.Random(f"cluster {seed}")
        i = seed % LAP
        aims = tuple(_aim(cell, draw) for cell in (_order[2 * i], _order[2 * i + 1]))
        point = POINTS[seed // 3 % len(POINTS)] if seed % 3 == 0 else None
        synced = point is not None and point.name == "members synced"
        return cls(
            seed=seed,
            aims=aims,
            point=point,
            nth=draw.choice([1, 1, 2]),
            units=3 if any(a.cell.fault == "lose unit" for a in aims) else draw.choice([2, 2, 3]),
            near=draw.random() < 0.3,
            durability="step" if synced else draw.choice(["none", "none", "batch"]),
            persist=draw.random() < 0.5,
            restart_s=draw.choice([0.0, 0.1, 0.3]),
            sessions=3,
            ends=draw.random() < 0.3,
        )

    def wants(self, operation: str) -> bool:
        """Tell whether an operation that not every life has is to be in this one."""
        aimed = any(aim.cell.operation == operation for aim in self.aims)
        return aimed or random.Random(f"{self.seed} {operation}").random() < 0.3


def _aim(cell: Cell, draw: random.Random) -> Aim:
    seldom = cell.operation in ("hold", "checkpoint", "sweep", "join", "takeover")
    return Aim(
        cell=cell,
        nth=1 if seldom else draw.choice([1, 1, 2]),
        before=draw.random() < 0.5,
        delay_s=draw.choice([0.0, draw.uniform(0, 0.003), draw.uniform(0, 0.02)]),
        lasts_s=draw.uniform(0.1, 0.6),
    )


def rollout_of(name: str) -> Rollout:
    """Return what is recorded as a session."""
    number = zlib.crc32(name.encode())
    if number % 3 == 0:
        return turning_rollout(FIELDS, number)
    return short_rollout(FIELDS, number, turns=1 + number % 3)


# ---------------------------------------------------------------- printed


def table(cells: Mapping[Any, int]) -> str:
    """Return how often each cell was reached, in columns."""
    lines = [f"{'fault':26}" + "".join(f"{o:>11}" for o in OPERATIONS)]
    lines += [
        f"{fault:26}" + "".join(f"{cells.get(Cell(fault, o)) or 'MISSED':>11}" for o in OPERATIONS)
        for fault in FAULTS
    ]
    lines += ["", f"{'killed itself':26}{'at':>28}"]
    lines += [f"{p.process:26}{p.name:>28}{cells.get(p) or 'MISSED':>8}" for p in POINTS]
    return "\n".join(lines)
