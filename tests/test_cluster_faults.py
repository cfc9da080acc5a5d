"""Seeded faults at every operation of a cluster, with real processes, sockets and kills.

Each schedule is a seed, which aims at two cells of a table; the table that is printed says which
were reached. A seed that fails is printed with the command that runs it again; ``--fault-schedules
N`` runs the first N of them, and ``-m soak`` a great many.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tq_fs.places
from tests._cluster_plans import CELLS, FAULTS, LAP, OPERATIONS, POINTS, Cell, Plan, Point, table
from tests._cluster_runs import Outcome, outcomes, reached_by
from tests._clusters import STORE, Cluster, cluster, units_of
from tests._rollouts import (
    assert_batch,
    open_store,
    record,
    refs_of,
    short_rollout,
    specs,
    standard_fields,
)
from tq_fs import Store
from tq_fs.backends import LocalBackend
from tq_fs.channel import ChannelBackend
from tq_fs.channel import _wire as wire
from tq_fs.cluster import _roster
from tq_fs.cluster._node_unit import NodeUnit
from tq_fs.errors import (
    ProtocolMismatch,
    StorageFull,
    StorageUnreachable,
    StoreBusy,
    WrongStore,
)

SCHEDULES = 110
SOAKED = 1000
SOAK_FROM = 1_000_000  # its first seed
FIELDS = standard_fields()
SPECS = specs(FIELDS)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[Outcome]:
    """Run the schedules; where a cell was missed, further ones that aim at it."""
    one = request.config.getoption("--fault-seed")
    many = request.config.getoption("--fault-schedules") or SCHEDULES
    seeds = [one] if one is not None else list(range(many))
    return list(outcomes(seeds, complete=one is None))


@pytest.mark.slow
@pytest.mark.timeout(0)  # a schedule that hangs ends the run by itself; there can be any number
def test_every_promise_holds_in_every_schedule(
    found: list[Outcome], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "cluster-schedules.txt"
    assert_kept(found, path)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_cell_of_the_table_is_reached(
    request: pytest.FixtureRequest, found: list[Outcome]
) -> None:
    if request.config.getoption("--fault-seed") is not None:
        pytest.skip("a single schedule")
    cells = reached_by(found)
    print(table(cells))
    every: list[Cell | Point] = [*CELLS, *POINTS]
    missed = [cell for cell in every if not cells.get(cell)]
    assert not missed, missed
    assert len(found) >= 100


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_every_promise_holds_for_long(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    many = request.config.getoption("--fault-schedules") or SOAKED
    seeds = range(SOAK_FROM, SOAK_FROM + many)
    path = tmp_path_factory.getbasetemp() / "cluster-soak.txt"
    soaked = list(outcomes(seeds, complete=False))
    print(table(reached_by(soaked)))
    assert_kept(soaked, path)


def assert_kept(found: list[Outcome], path: Path) -> None:
    """Fail with the story of each schedule in which a promise was broken."""
    failed = [outcome for outcome in found if outcome.problems]
    report = "\n\n".join(map(told, failed))
    path.write_text(f"{table(reached_by(found))}\n\n{report}\n")
    print(f"{len(found)} schedules; failed: {[o.seed for o in failed]}")
    assert not failed, report


def told(outcome: Outcome) -> str:
    """Return how a schedule went, for whoever looks for the reason."""
    head = f"seed {outcome.seed} failed; again:\n"
    head += (
        f"  pytest {Path('tests', Path(__file__).name)} --fault-seed={outcome.seed}\n{outcome.plan}"
    )
    return "\n  ".join([head, *outcome.problems, "what happened:", *outcome.story])


# ---------------------------------------------------------------- the suite itself


def test_the_table_is_whole() -> None:
    """Every fault at every operation, each aimed at once in a lap; and every point."""
    assert len(CELLS) == len(set(CELLS)) == len(FAULTS) * len(OPERATIONS)
    plans = [Plan.of(seed) for seed in range(LAP)]
    assert sorted(aim.cell for plan in plans for aim in plan.aims) == sorted(CELLS)
    assert {Plan.of(seed).point for seed in range(3 * len(POINTS))} == {None, *POINTS}


def test_a_seed_stands_for_the_same_plan_for_ever() -> None:
    assert Plan.of(7) == Plan.of(7)
    assert [aim.cell for aim in Plan.of(7).aims] == [a.cell for a in Plan.of(7 + LAP).aims]


def test_what_is_missed_is_printed() -> None:
    text = table({Cell("cut", "record"): 3, Point("unit", "staged"): 2})
    (row,) = [line for line in text.splitlines() if line.startswith("cut")]
    assert row.split()[1:4] == ["MISSED", "3", "MISSED"]
    (row,) = [line for line in text.splitlines() if line.endswith("staged       2")]
    assert row.startswith("unit")


# ---------------------------------------------------------------- full


class Quota:
    """A disk that holds so many bytes of Steps: what comes on top finds no room."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._folder = folder
        self._nbytes = nbytes

    def __call__(self, point: str) -> None:
        if point == "staged" and self._used() > self._nbytes:
            raise OSError(errno.ENOSPC, "no room, says the test")

    def _used(self) -> int:
        used = 0
        for folder, _, names in os.walk(self._folder / STORE / "steps"):
            for name in names:
                with suppress(FileNotFoundError):  # released meanwhile
                    used += Path(folder, name).stat().st_size
        return used


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cluster, Store]]:
    """Give a cluster of one unit that holds a few sessions, and its store."""
    monkeypatch.setattr(_roster, "_FULL_BYTES", 0)
    monkeypatch.setattr(
        tq_fs.places, "LocalBackend", partial(LocalBackend, at=Quota(tmp_path / "n0", 20_000))
    )
    with (
        cluster(tmp_path, 1, cluster={"full_deadline_s": 1.0}) as made,
        made.store(SPECS) as store,
    ):
        yield made, store


def fill(store: Store) -> list[str]:
    """Record sessions until a Step finds no room; return the references of those before."""
    refs: list[str] = []
    for i in range(200):
        try:
            segments, _ = record(store, f"fill{i}", i)
        except StorageFull:
            return refs
        refs += refs_of(segments)
    raise AssertionError("it is not full")


def test_a_rollout_that_waits_for_room_hears_of_its_deadline(full: tuple[Cluster, Store]) -> None:
    """It is a typed error that names the remedy; what was finalized before stays, and is read."""
    _, store = full
    refs = fill(store)
    start = time.monotonic()
    with pytest.raises(StorageFull, match=r"no unit had room for it within 1 s.*release trained"):
        record(store, "waits")
    assert 0.4 < time.monotonic() - start < 4.0
    assert len(store.hydrate(refs)["rollout_routed_experts"]) == len(refs)


def test_a_rollout_that_waits_for_room_goes_on_once_training_has_made_some(
    full: tuple[Cluster, Store],
) -> None:
    made, store = full
    refs = fill(store)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(record, store, "waits", 7)
        time.sleep(0.3)
        assert not waiting.done()
        store.release(refs)
        segments, want = waiting.result(10)
    assert_batch(store.hydrate(segments), want)
    store.release(segments)
    made.controller.sweep()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("has no mount command")
    if done.returncode:
        pytest.skip(f"may not mount a file system: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.root
def test_a_disk_that_is_really_full_is_relieved_by_releases_also_after_a_restart(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no room is left for who controls the unit, and for any note."""
    monkeypatch.setattr(_roster, "_FULL_BYTES", 0)
    with cluster(small_disk, 1, cluster={"full_deadline_s": 0.2}) as made:
        with made.store(SPECS) as store:
            refs = fill(store)
            assert len(refs) > 5
            store.release(refs[:1], "train")
            fill(store)
        for i in range(1000):  # not a byte is left
            try:
                (small_disk / f"ballast{i}").write_bytes(bytes(4096))
            except OSError:
                break
        (small_disk / "n0" / STORE / ".staging/reserve").unlink(missing_ok=True)
        for i in range(1000, 2000):
            try:
                (small_disk / f"ballast{i}").write_bytes(bytes(4096))
            except OSError:
                break
        made.restart_controller()
        with made.store(SPECS) as store:
            left = list(store.unreleased())
            assert set(refs[1:]) <= set(left)
            store.release(left)
            assert not list(store.unreleased())
            made.controller.sweep()
            segments, want = record(store, "after", 3)
            assert_batch(store.hydrate(segments), want)


# ---------------------------------------------------------------- slow, or not at all


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path, 2, request_timeout_s=0.5, retry_deadline_s=1.5) as made:
        yield made


def test_a_slow_unit_holds_up_its_own_sessions_only(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two.store(SPECS) as store:
        slow = two.unit("n0")
        publish = slow.place.steps.publish
        gate = threading.Event()

        def slowly(*args: Any, **named: Any) -> str:
            gate.wait(10)
            return publish(*args, **named)

        sessions: dict[str, Any] = {}
        for i in range(64):
            session = store.session(f"s{i}")
            sessions.setdefault(session.incarnation_id.partition(".")[2], session)
        monkeypatch.setattr(slow.place.steps, "publish", slowly)
        rollout = short_rollout(FIELDS, 1)
        with ThreadPoolExecutor(2) as pool:
            held = pool.submit(rollout.record, sessions[slow.name])
            free = pool.submit(rollout.record, sessions[two.unit("n1").name])
            free.result(5)
            assert not held.done()
            gate.set()
            held.result(10)
        want = [e.slime(SPECS) for e in rollout.expected("lineage")]
        for session in (sessions[slow.name], sessions[two.unit("n1").name]):
            assert_batch(store.hydrate(session.finalize()), want)


def test_a_unit_that_takes_connections_and_is_silent_is_given_up_in_time(two: Cluster) -> None:
    """A host behind a broken switch: who reads from it hears so, by its name, within bounds."""
    with ExitStack() as opened, two.store(SPECS) as store:
        segments, want = record(store, "s")
        mute = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        directory = units_of(store).directory
        layout = directory.layout()
        port = mute.getsockname()[1]
        cut = [replace(u, remote=f"tcp:127.0.0.1:{port}") for u in layout.units]
        directory._ask = lambda: replace(layout, units=tuple(cut))
        directory.tell(directory._ask())
        for backend in units_of(store)._backends.values():
            backend._lanes.get().close()
            backend._lanes.forget()
        start = time.monotonic()
        with pytest.raises(StorageUnreachable, match="unit n"):
            store.hydrate(segments)
        assert time.monotonic() - start < 6.0
        directory._ask = lambda: layout
        directory.tell(layout)
        assert_batch(store.hydrate(segments), want)


# ---------------------------------------------------------------- who has no business here


def test_two_clusters_do_not_share_a_folder(tmp_path: Path) -> None:
    with cluster(tmp_path / "a", 1) as first, first.store(SPECS) as store:
        segments, want = record(store, "s")
        node = first.root / "n0"
        with pytest.raises(StoreBusy, match="has it open for writing"):
            NodeUnit(str(node), first.config, None, node="x", node_name="x", address="127.0.0.1")
        with pytest.raises((StoreBusy, WrongStore)):
            open_store(node, FIELDS, store_id=STORE)
        with cluster(tmp_path / "a", 1, store_id="other") as second, second.store(SPECS) as other:
            others, wanted = record(other, "s")  # its own folder in the same one
            for store_, refs in ((store, others), (other, segments)):
                with pytest.raises(WrongStore):
                    store_.hydrate(refs)
            assert_batch(other.hydrate(others), wanted)
        assert_batch(store.hydrate(segments), want)
    with pytest.raises(WrongStore, match="StorageUnit"):
        open_store(node, FIELDS, store_id=STORE)


def test_a_store_of_one_process_is_no_units_folder(tmp_path: Path) -> None:
    open_store(tmp_path / "n0", FIELDS, store_id=STORE).close()
    with pytest.raises(WrongStore, match="a store of one process"), cluster(tmp_path, 1):
        pass


def test_strangers_are_refused_counted_and_do_no_harm(two: Cluster) -> None:
    """Another store, another version, and bytes that mean nothing."""
    with two.store(SPECS) as store:
        segments, want = record(store, "s")
        unit = two.unit("n0")
        endpoint = unit.report().remote
        port = int(endpoint.rpartition(":")[2])
        with (
            closing(ChannelBackend(endpoint, store_id="other", unit="n0")) as stranger,
            pytest.raises(WrongStore, match="this client wants 'other'"),
        ):
            stranger.delete("steps/train")
        later = wire.encoder.encode(wire.Hello(wire.VERSION + 1, STORE))
        with socket.create_connection(("127.0.0.1", port), 5) as sock:
            sock.sendall(wire.PREFIX.pack(wire.MAGIC, len(later), 0) + later)
            head = wire.PREFIX.unpack(sock.recv(wire.PREFIX.size, socket.MSG_WAITALL))
            answer = wire.decode_answer(sock.recv(head[1], socket.MSG_WAITALL), "n0")
            assert isinstance(answer, wire.Failed)
            assert isinstance(wire.error_of(answer), ProtocolMismatch)
        before = unit.report().counts.get("malformed", 0)
        for i in range(20):
            with socket.create_connection(("127.0.0.1", port), 5) as sock:
                sock.sendall(bytes([i]) * 64)
        until = time.monotonic() + 5
        while unit.report().counts.get("malformed", 0) < before + 20:
            assert time.monotonic() < until
            time.sleep(0.01)
        counts = unit.report().counts
        assert (counts["error:wrong_store"], counts["error:protocol_mismatch"]) == (1, 1)
        assert_batch(store.hydrate(segments), want)
