"""Lets clusters live and suffer, side by side, and tells what became of each.

One process imports everything and forks workers, which fork the processes of one world after the
other. Asked for seeds on stdin, it prints an outcome a line; :func:`outcomes` is the other side.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import tq_fs
from tests._cluster_checks import JudgedWorld
from tests._cluster_plans import LAP, POINTS, Cell, Plan, Point
from tests._cluster_processes import Nursery, die_with_parent
from tests._cluster_worlds import LIFE_S

FORK = multiprocessing.get_context("fork")


@dataclass(kw_only=True)
class Outcome:
    """How a schedule went; plain values."""

    seed: int
    plan: str
    cells: list[Cell | Point]
    problems: list[str]
    story: list[str]
    seconds: float


# ---------------------------------------------------------------- many

_nursery: Nursery | None = None


def run(plan: Plan) -> Outcome:
    """Let a world live, and look at what it left."""
    global _nursery  # noqa: PLW0603  # forked before this process has threads
    if _nursery is None:
        _nursery = Nursery()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tq-world-", ignore_cleanup_errors=True) as folder:
        world = JudgedWorld(plan, folder, _nursery)
        try:
            world.live()
            world.settle()
            world.check()
            cells = world.cells()
        except BaseException:
            world.blame(f"the test itself: {traceback.format_exc()}")
            cells = set()
        finally:
            world.close()
    return Outcome(
        seed=plan.seed,
        plan=str(plan),
        cells=[*cells],
        problems=world.problems,
        story=world.story,
        seconds=time.monotonic() - start,
    )


def main() -> None:
    """Run the seeds that are asked for on stdin; print an outcome a line."""
    die_with_parent()
    import torch  # what the lives need is imported before they fork

    assert torch
    asked = json.loads(sys.stdin.readline())
    logging.disable()
    gc.disable()
    gc.freeze()
    cells: set[Cell | Point] = set()
    with ProcessPoolExecutor(
        asked["slots"], mp_context=FORK, initializer=die_with_parent
    ) as workers:
        try:

            def run_all(seeds: Iterable[int]) -> None:
                futures = [workers.submit(run, Plan.of(seed)) for seed in seeds]
                for future in as_completed(futures):
                    faulthandler.dump_traceback_later(3 * LIFE_S, exit=True)
                    outcome = future.result()
                    cells.update(outcome.cells)
                    sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
                    sys.stdout.flush()

            run_all(asked["seeds"])
            for lap in range(2, 5 if asked["complete"] else 0):
                run_all([s for s in range(lap * LAP, (lap + 1) * LAP) if _misses(s, cells)])
        finally:
            workers.shutdown(cancel_futures=True)


def _misses(seed: int, cells: set[Cell | Point]) -> bool:
    plan = Plan.of(seed)
    return any(aim.cell not in cells for aim in plan.aims) or (
        plan.point is not None and plan.point not in cells
    )


_START = """
import sys, types
tests = types.ModuleType("tests")
tests.__path__ = [sys.argv[1]]
sys.modules["tests"] = tests
from tests._cluster_runs import main
main()
"""


def outcomes(seeds: Sequence[int], *, complete: bool, slots: int = 0) -> Iterator[Outcome]:
    """Run seeds; with `complete` also further ones, for cells that were missed."""
    asked = {"seeds": list(seeds), "complete": complete, "slots": slots or 6}
    here = Path(__file__).parent
    path = os.pathsep.join([str(Path(tq_fs.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", _START, str(here)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.close()
        for line in process.stdout:
            found = json.loads(line)
            found["cells"] = [
                Point(*c) if Point(*c) in POINTS else Cell(*c) for c in found["cells"]
            ]
            yield Outcome(**found)
    assert process.returncode == 0, f"the runs ended with {process.returncode}"


def _cell_of(first: str, second: str) -> Cell | Point:
    point = Point(first, second)
    return point if point in POINTS else Cell(first, second)


def reached_by(all_of_them: Iterable[Outcome]) -> Mapping[Cell | Point, int]:
    """Count how often each cell was reached."""
    return Counter(cell for outcome in all_of_them for cell in outcome.cells)
