"""Seeded faults at every kind of request, and kills around them: the promises hold.

Each schedule is a seed, and each seed aims at a cell of a table. The table that is printed says
which cells were reached, by the log of the proxy that the faults come from. A seed that fails is
printed with the command that runs it again; ``--fault-schedules N`` runs the first N of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests._fault_plans import (
    BOTH,
    CELLS,
    DRIVERS,
    TABLE,
    TIER_CELLS,
    TIER_TABLE,
    TIERED,
    Cell,
    Plan,
    TierCell,
    reached,
    table,
)
from tests._fault_proxy import Seen
from tests._fault_runs import Outcome, outcomes, reached_by
from tq_fs.bench.servers import S3Server

LEAST = 200  # schedules


@pytest.fixture(scope="module")
def seeds(request: pytest.FixtureRequest) -> list[int]:
    """Give the seeds asked for: by default those that aim at each cell once."""
    one = request.config.getoption("--fault-seed")
    if one is not None:
        return [one]
    many = request.config.getoption("--fault-schedules")
    if many is not None:
        return [*range(many), *range(TIERED, TIERED + many // 10)]
    return [*range(len(CELLS)), *range(TIERED, TIERED + len(TIER_CELLS))]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, s3_server: S3Server, seeds: list[int]) -> list[Outcome]:
    """Run the schedules; where a cell was missed, further ones that aim at it."""
    pytest.importorskip("obstore")
    complete = request.config.getoption("--fault-seed") is None
    return list(outcomes(s3_server, seeds, complete=complete))


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.timeout(0)  # a schedule that hangs ends the run by itself; there can be any number
def test_every_promise_holds_in_every_schedule(
    found: list[Outcome], tmp_path_factory: pytest.TempPathFactory
) -> None:
    failed = [outcome for outcome in found if outcome.problems]
    report = "\n\n".join(map(told, failed))
    path = tmp_path_factory.getbasetemp() / "fault-schedules.txt"
    path.write_text(f"{table(reached_by(found))}\n\n{report}\n")
    print(f"{len(found)} schedules; failed: {[o.seed for o in failed]}")
    assert not failed, report


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_cell_of_the_tables_is_reached(
    request: pytest.FixtureRequest, found: list[Outcome]
) -> None:
    if request.config.getoption("--fault-seed") is not None:
        pytest.skip("a single schedule")
    cells = reached_by(found)
    print(table(cells))
    missed = [cell for cell in BOTH if not cell.impossible and not cells[cell]]
    assert not missed, missed
    assert len(found) >= LEAST


def told(outcome: Outcome) -> str:
    """Return how a schedule went, for whoever looks for the reason."""
    head = f"seed {outcome.seed} failed; again:\n"
    head += (
        f"  pytest {Path('tests', Path(__file__).name)} --fault-seed={outcome.seed}\n{outcome.plan}"
    )
    return "\n  ".join([head, *outcome.problems, "what happened:", *outcome.story])


# ---------------------------------------------------------------- the suite itself


def seen(operation: str, n: int, fault: str | None, crash: str | None, path: str = "/b/k") -> Seen:
    return Seen(operation, "PUT", path, fault, crash, 200, n)  # type: ignore[arg-type]


def test_a_cell_is_reached_by_what_happened() -> None:
    """Not by what was planned: the fault, and then the crash at the next request of its kind."""
    fault = seen("put", 3, "throttle-429", None)
    assert reached([fault]) == {Cell("throttling", "put", "none")}
    assert reached([fault, seen("put", 4, None, "after")]) == {Cell("throttling", "put", "after")}
    assert reached([fault, seen("put", 5, None, "after")]) == {Cell("no fault", "put", "after")}
    assert reached([fault, seen("get", 4, None, "after")]) == {Cell("no fault", "get", "after")}
    assert reached([seen("put", 1, "corrupt", None, "/b/s/claims/1")]) == set()
    assert reached([seen("put", 1, None, None)]) == set()


def test_the_tables_are_whole() -> None:
    """Every fault at every operation with every crash, and every point of every policy."""
    assert len(TABLE) == len(set(TABLE)) == 9 * 9 * 4
    assert len(CELLS) == len(TABLE) - 9 - 8
    assert len(TIER_TABLE) == len(set(TIER_TABLE)) == 2 * 12
    aimed = [Plan.of(seed).cell for seed in range(len(CELLS))]
    assert sorted(map(str, aimed)) == sorted(map(str, CELLS))
    tiers = [Plan.of(TIERED + i).cell for i in range(len(TIER_CELLS))]
    assert set(tiers) == set(TIER_CELLS)


def test_a_seed_stands_for_the_same_plan_for_ever() -> None:
    assert Plan.of(7) == Plan.of(7)
    seven, later = Plan.of(7), Plan.of(7 + len(CELLS))
    assert (seven.fault, seven.driver, seven.burst, seven.threads) == ("lost-ack", "obstore", 4, 4)
    assert seven.cell == later.cell == Cell("lost acknowledgement", "document", "unacknowledged")
    assert {seven.driver, later.driver} == set(DRIVERS)


def test_what_is_missed_and_what_cannot_be_is_printed() -> None:
    text = table({Cell("reset", "put", "none"): 3, TierCell("write-back", "evicted"): 2})
    lines = text.splitlines()
    (row,) = [line for line in lines if line.startswith("reset") and "none" in line]
    assert row.split()[2:4] == ["3", "MISSED"]
    (row,) = [line for line in lines if line.startswith("write-back") and "evicted" in line]
    assert row.split()[-1] == "2"
    reasons = {cell.impossible for cell in BOTH if cell.impossible}
    assert {line.partition(" ")[2] for line in lines[-3:]} == reasons
