"""StepWriter: put and commit are one region, within a bound of memory, whatever fails."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tq_fs
from tests._rollouts import (
    Expected,
    Op,
    Rollout,
    assert_batch,
    empty_folders,
    open_store,
    run_child,
    short_rollout,
    specs,
    standard_fields,
    tree,
    visible_steps,
)
from tq_fs.backends import LocalBackend
from tq_fs.budget import ByteBudget
from tq_fs.errors import (
    BackpressureTimeout,
    CapacityError,
    InputError,
    InvalidLineage,
    ObjectExists,
    SessionClosed,
    StepTooLarge,
    StorageFailed,
    StorageFull,
    WidthChanged,
)
from tq_fs.keys import Incarnation, StepKey
from tq_fs.steps import EncodeOptions, FieldArray
from tq_fs.storage_unit import Located, StorageUnit
from tq_fs.trajectory import Trajectory
from tq_fs.writer import StepWriter

FIELDS = standard_fields()


class Gate:
    """Holds writers at a point of the backend until it is opened."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.arrived = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, point: str) -> None:
        if point == self.point and not self.open.is_set():
            self.arrived.release()
            assert self.open.wait(30)


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Open a store whose backend calls `at`; closed at the end."""
    stores: list[tq_fs.Store] = []

    def open_with(at: Callable[[str], None], **settings: Any) -> tq_fs.Store:
        monkeypatch.setattr("tq_fs.places.LocalBackend", partial(LocalBackend, at=at))
        stores.append(open_store(tmp_path, FIELDS, **settings))
        return stores[-1]

    yield open_with
    for store in stores:
        store.close()


def create(seed: int, response: int = 5) -> Any:
    rollout = short_rollout(FIELDS, seed, turns=1, response=response)
    return rollout.step(rollout.turns[0])


# ---------------------------------------------------------------- one region


def test_of_two_appends_to_one_step_at_the_same_time_one_is_recorded_and_one_cleared(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    gate = Gate("members written")
    gate.open.set()
    store = opened(gate, writer_threads=2)
    session = store.session("s")
    rollout = Rollout(FIELDS, "tito").play([Op("create"), Op("append")], np.random.default_rng(0))
    session.record(rollout.step(rollout.turns[0]))
    gate.open.clear()
    both = [session.submit(rollout.step(rollout.turns[1])) for _ in range(2)]
    for _ in both:
        assert gate.arrived.acquire(timeout=20)
    gate.open.set()
    errors = [f.exception(timeout=20) for f in both]
    assert [type(e) for e in errors if e] == [InvalidLineage]
    assert [r.kind for r in session.records] == ["create", "append"]
    recorded = {f"{r.index:06d}" for r in session.records}
    assert {p.rsplit("/", 1)[1] for p in visible_steps(tmp_path)} == recorded
    (segment,) = session.finalize()
    assert_batch(
        store.hydrate([segment]), [e.slime(specs(FIELDS)) for e in rollout.expected("lineage")]
    )


def test_of_two_widths_at_the_same_time_one_is_recorded_and_one_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate("renamed")
    monkeypatch.setattr("tq_fs.places.LocalBackend", partial(LocalBackend, at=gate))
    with tq_fs.open_store(
        tmp_path.as_uri(), fields=[tq_fs.routed_experts()], prepared_groups=0
    ) as store:
        session = store.session("s")
        both = [
            session.submit(
                tq_fs.StepInput(
                    kind="create",
                    context=[1],
                    response=[2],
                    values={"routed_experts": np.zeros((1, width, 2), np.int32)},
                )
            )
            for width in (3, 4)
        ]
        for _ in both:
            assert gate.arrived.acquire(timeout=20)
        gate.open.set()
        errors = [f.exception(timeout=20) for f in both]
        assert [type(e) for e in errors if e] == [WidthChanged]
        assert len(visible_steps(tmp_path)) == 1
        assert len(session.finalize()) == 1


@pytest.mark.parametrize("point", ["staged", "members written", "renamed", "acknowledged"])
def test_a_session_discarded_while_a_step_is_on_its_way_leaves_nothing(
    opened: Callable[..., Any], tmp_path: Path, point: str
) -> None:
    gate = Gate(point)
    store = opened(gate)
    session = store.session("s")
    future = session.submit(create(0))
    assert gate.arrived.acquire(timeout=20)
    discarding = threading.Thread(target=session.discard)
    discarding.start()
    while session.records == [] and not session._trajectory.closed:
        time.sleep(0.001)
    gate.open.set()
    discarding.join(20)
    assert isinstance(future.exception(timeout=20), SessionClosed)
    assert session.records == []
    assert tree(tmp_path) == {"default/store.json"}
    assert empty_folders(tmp_path) == set()


@pytest.mark.parametrize("point", ["staged", "members written", "renamed", "acknowledged"])
def test_a_device_that_fails_during_a_put_leaves_nothing_visible(
    opened: Callable[..., Any], tmp_path: Path, point: str
) -> None:
    broken = True

    def at(passed: str) -> None:
        if broken and passed == point:
            raise OSError(5, os.strerror(5))

    broken = False
    store = opened(at)
    session = store.session("s")
    session.record(create(0))
    before, broken = tree(tmp_path), True
    with pytest.raises((StorageFailed, OSError)):
        session.record(create(1))
    assert tree(tmp_path) == before
    assert len(session.records) == 1
    broken = False
    session.record(create(1))
    assert len(session.finalize()) == 2


def test_finalize_waits_for_steps_that_are_on_their_way(opened: Callable[..., Any]) -> None:
    gate = Gate("members written")
    store = opened(gate, writer_threads=2)
    session = store.session("s")
    for seed in range(4):
        session.submit(create(seed))
    assert gate.arrived.acquire(timeout=20)
    threading.Timer(0.1, gate.open.set).start()
    assert len(session.finalize()) == 4


# ---------------------------------------------------------------- cancelled requests


def delayed(seed: int) -> Callable[[str], None]:
    """Return a backend's `at` that takes a random while at every point."""
    random = np.random.default_rng(seed)
    lock = threading.Lock()

    def at(point: str) -> None:
        with lock:
            wait_s = float(random.choice([0, 0, 0.0005, 0.002]))
        time.sleep(wait_s)

    return at


def test_a_cancelled_request_either_commits_or_leaves_nothing_visible(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    store = opened(delayed(0), writer_threads=1)
    outcomes = {"answered": 0, "recorded": 0, "nothing": 0}
    for seed in range(40):
        rollouts = [short_rollout(FIELDS, 10 * seed + i, turns=1) for i in range(4)]
        session = store.session(f"s{seed}")
        answers = asyncio.run(cancel_some(session, rollouts, seed))
        assert_whole(store, session, rollouts, tmp_path)
        recorded = {r.tokens.tobytes() for r in session.records}
        for rollout, answer in zip(rollouts, answers, strict=True):
            there = rollout.turns[0].own.tobytes() in recorded
            if isinstance(answer, tq_fs.StepRecord):
                assert there
                outcomes["answered"] += 1
            else:
                assert isinstance(answer, asyncio.CancelledError)
                outcomes["recorded" if there else "nothing"] += 1
    assert min(outcomes.values()) > 5, outcomes  # every case was met


async def cancel_some(session: tq_fs.Session, rollouts: list[Rollout], seed: int) -> list[Any]:
    """Send Steps off and cancel each after a random while; return what each call ended with."""
    random = np.random.default_rng(seed)
    tasks = [asyncio.create_task(session.arecord(r.step(r.turns[0]))) for r in rollouts]
    for task in tasks:
        await asyncio.sleep(float(random.choice([0, 0, 0.001, 0.004, 0.02])))
        task.cancel()
    return list(await asyncio.gather(*tasks, return_exceptions=True))


def assert_whole(
    store: tq_fs.Store, session: tq_fs.Session, rollouts: list[Rollout], folder: Path
) -> None:
    """Finalize, and compare what is recorded, what is on the disk and what is hydrated."""
    segments = session.finalize()
    on_disk = {p.rsplit("/", 1)[1] for p in visible_steps(folder)}
    assert on_disk == {f"{r.index:06d}" for r in session.records}
    whole: dict[bytes, Expected] = {}
    for rollout in rollouts:
        (expected,) = rollout.expected("lineage")
        whole[expected.tokens.tobytes()] = expected
    want = [whole[s.tokens.tobytes()].slime(specs(FIELDS)) for s in segments]
    assert_batch(store.hydrate(segments), want) if segments else None
    store.release(segments)
    assert tree(folder) == {"default/store.json"}


def test_recording_does_not_hold_up_the_event_loop(opened: Callable[..., Any]) -> None:
    gate = Gate("members written")
    size = sum(a.nbytes for a in create(0).values.values())
    store = opened(gate, inflight_bytes=size, writer_threads=1)

    async def run() -> int:
        session = store.session("s")
        tasks = [asyncio.create_task(session.arecord(create(i))) for i in range(3)]
        turns = 0
        while turns < 20:  # the second waits for room, the first for the disk
            await asyncio.sleep(0.002)
            turns += 1
        assert not any(t.done() for t in tasks)
        gate.open.set()
        return len([await t for t in tasks])

    assert asyncio.run(run()) == 3


# ---------------------------------------------------------------- bounded


def unit_on(folder: Path, at: Callable[[str], None]) -> StorageUnit:
    backend = LocalBackend(folder, ahead=0, at=at)
    return StorageUnit(backend, "run", options=EncodeOptions())


@pytest.mark.parametrize("most", [1, 3])
def test_bytes_on_their_way_are_bounded_and_writers_wait(tmp_path: Path, most: int) -> None:
    nbytes = sum(a.nbytes for a in create(0).values.values())
    budget = ByteBudget(most * nbytes, deadline_s=30, clock=time.monotonic, subject="x")
    gate = Gate("staged")
    unit = unit_on(tmp_path, gate)
    trajectory = Trajectory(Incarnation("train", "s", "0"), specs(FIELDS))
    selected = frozenset({"logprobs", "routed_experts"})
    submitted: list[int] = []
    with ThreadPoolExecutor(4) as pool:
        writer = StepWriter(unit, selected, pool=pool, budget=budget)

        def submit_all() -> None:
            for i in range(8):
                writer.submit(trajectory, create(i))
                submitted.append(i)

        sender = threading.Thread(target=submit_all)
        sender.start()
        assert gate.arrived.acquire(timeout=20)
        sender.join(0.2)
        assert sender.is_alive()  # waits for room
        assert len(submitted) == most
        assert budget.used_bytes == most * nbytes
        gate.open.set()
        sender.join(20)
    assert len(trajectory.records()) == 8
    assert budget.peak_bytes <= most * nbytes
    assert budget.used_bytes == 0
    unit.backend.close()


def test_a_writer_that_finds_no_room_before_the_deadline_is_told(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    nbytes = sum(a.nbytes for a in create(0).values.values())
    gate = Gate("staged")
    store = opened(gate, inflight_bytes=nbytes, inflight_deadline_s=0.1)
    session = store.session("s")
    first = session.submit(create(0))
    began = time.monotonic()
    with pytest.raises(BackpressureTimeout, match=r"within 0\.1 s.*inflight"):
        session.record(create(1))
    assert 0.1 <= time.monotonic() - began < 5
    gate.open.set()
    assert first.result(20).index == 0
    session.record(create(2))  # goes on
    assert len(session.records) == len(visible_steps(tmp_path)) == 2


def test_a_step_larger_than_the_budget_is_refused_and_named(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    nbytes = sum(a.nbytes for a in create(0).values.values())
    store = opened(lambda _: None, inflight_bytes=nbytes)
    session = store.session("s")
    with pytest.raises(StepTooLarge, match=f"the budget is {nbytes}.*inflight_bytes") as caught:
        session.record(create(0, response=6))
    assert isinstance(caught.value, InputError)  # waiting does not help
    assert not isinstance(caught.value, CapacityError)
    assert visible_steps(tmp_path) == set()
    session.record(create(0))


def test_room_is_given_back_whatever_becomes_of_a_step(tmp_path: Path) -> None:
    broken = True

    def at(point: str) -> None:
        if broken:
            raise OSError(5, os.strerror(5))

    budget = ByteBudget(10_000, deadline_s=1, clock=time.monotonic, subject="x")
    unit = unit_on(tmp_path, at)
    trajectory = Trajectory(Incarnation("train", "s", "0"), specs(FIELDS))
    pool = ThreadPoolExecutor(1)
    writer = StepWriter(unit, frozenset({"logprobs"}), pool=pool, budget=budget)
    with pytest.raises(StorageFailed):
        writer.submit(trajectory, create(0)).result(20)
    broken = False
    begun = threading.Event()
    pool.submit(begun.wait, 20)
    waiting = writer.submit(trajectory, create(1))
    assert budget.used_bytes > 0
    assert waiting.cancel()
    begun.set()
    pool.shutdown()
    assert budget.used_bytes == 0
    with pytest.raises((RuntimeError, SessionClosed)):  # the pool is closed
        writer.submit(trajectory, create(2))
    assert budget.used_bytes == 0
    assert visible_steps(tmp_path) == set()
    unit.backend.close()


def plain_step() -> tuple[tq_fs.StepInput, list[weakref.ref[Any]]]:
    """Return a Step whose arrays are in the fields' own types, and references that do not hold."""
    logprobs, routed = np.zeros(3, np.float32), np.zeros((2, 4, 2), np.int32)
    step = tq_fs.StepInput(
        kind="create",
        context=[1],
        response=[2, 3],
        values={"logprobs": logprobs, "routed_experts": routed},
    )
    return step, [weakref.ref(logprobs), weakref.ref(routed)]


def test_a_cancelled_step_lets_go_of_its_arrays_and_its_room_at_once(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    gate = Gate("staged")
    step, arrays = plain_step()
    nbytes = sum(np.asarray(a).nbytes for a in step.values.values())
    store = opened(gate, writer_threads=1, inflight_bytes=2 * nbytes, inflight_deadline_s=0.1)
    session = store.session("s")
    first = session.submit(plain_step()[0])
    assert gate.arrived.acquire(timeout=20)  # the only writer is held
    queued = session.submit(step)
    del step
    assert all(a() is not None for a in arrays)
    with pytest.raises(BackpressureTimeout):
        session.submit(plain_step()[0])
    assert queued.cancel()
    assert [a() for a in arrays] == [None, None]
    third = session.submit(plain_step()[0])
    gate.open.set()
    recorded = [f.result(20) for f in (first, third)]
    assert session.records == recorded
    assert len(visible_steps(tmp_path)) == 2


def test_a_step_that_is_written_lets_go_of_its_arrays(opened: Callable[..., Any]) -> None:
    session = opened(lambda _: None).session("s")
    step, arrays = plain_step()
    future = session.submit(step)
    future.result(20)
    del step
    until = time.monotonic() + 20
    while any(a() is not None for a in arrays) and time.monotonic() < until:
        time.sleep(0.001)  # the writer's own frame goes a moment later
    assert [a() for a in arrays] == [None, None]


def test_a_writer_may_wait_for_room_without_end(opened: Callable[..., Any]) -> None:
    nbytes = sum(a.nbytes for a in create(0).values.values())
    gate = Gate("staged")
    store = opened(gate, inflight_bytes=nbytes, inflight_deadline_s=float("inf"))
    session = store.session("s")
    first = session.submit(create(0))
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(session.record, create(1))
        assert not wait([second], 0.1).done
        gate.open.set()
        assert [first.result(20).index, second.result(20).index] == [0, 1]


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tq-fs-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("prepared", [0, 4])
def test_a_full_disk_is_said_and_after_room_is_made_the_rollout_goes_on(
    small_disk: Path, prepared: int
) -> None:
    with open_store(small_disk, FIELDS, prepared_groups=prepared, writer_threads=1) as store:
        old = store.session("old")
        first = short_rollout(FIELDS, 0, turns=2, response=2000)
        first.record(old)
        old_segments = old.finalize()
        session = store.session("s")
        rollout = Rollout(FIELDS, "tito")
        random = np.random.default_rng(1)
        rollout.play([Op("create", 0, 1, 2000)], random)
        session.record(rollout.step(rollout.turns[0]))
        while True:
            rollout.play([Op("append", 0, 1, 2000)], random)
            before = visible_steps(small_disk)
            try:
                session.record(rollout.step(rollout.turns[-1]))
            except CapacityError:
                break
            assert len(rollout.turns) < 100
        assert visible_steps(small_disk) == before
        assert len(session.records) == len(rollout.turns) - 1
        with pytest.raises(StorageFull, match="release"):  # nothing has changed
            session.record(rollout.step(rollout.turns[-1]))
        assert_batch(
            store.hydrate(old_segments),
            [e.slime(specs(FIELDS)) for e in first.expected("lineage")],
        )
        assert store.release(old_segments) == 2
        session.record(rollout.step(rollout.turns[-1]))
        segments = session.finalize()
        assert len(segments[0].steps) == len(rollout.turns)
        (want,) = rollout.expected("lineage")
        have = store.hydrate(segments)
        assert_batch(have, [want.slime(specs(FIELDS))])
        store.release(segments)
    assert tree(small_disk) == {"default/store.json"}


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.root
def test_a_finalize_on_a_full_disk_can_be_repeated_once_there_is_room(small_disk: Path) -> None:
    with open_store(small_disk, FIELDS) as store:
        session = store.session("s")
        rollout = short_rollout(FIELDS, 0, turns=2)
        rollout.record(session)
        filler = small_disk / "filler"
        fill(filler)
        with pytest.raises(StorageFull):
            session.finalize()
        assert list(store.unreleased()) == []
        filler.unlink()
        segments = session.finalize()
        assert_batch(
            store.hydrate(segments), [e.slime(specs(FIELDS)) for e in rollout.expected("lineage")]
        )


def finalized(store: tq_fs.Store, name: str, seed: int) -> list[tq_fs.Segment]:
    """Record two chains of one Step each, of some pages."""
    session = store.session(name)
    rollout = Rollout(FIELDS, "tito").play(
        [Op("create", response=1000)] * 2, np.random.default_rng(seed)
    )
    rollout.record(session)
    return session.finalize()


@pytest.mark.root
@pytest.mark.parametrize("reserved", [True, False])
def test_whole_sessions_are_released_on_a_disk_without_a_free_page(
    small_disk: Path, reserved: bool
) -> None:
    with open_store(small_disk, FIELDS) as store:
        first, second = finalized(store, "a", 1), finalized(store, "b", 2)
        if not reserved:
            (small_disk / "default/.staging/reserve").unlink()
        fill(small_disk / "filler")
        assert os.statvfs(small_disk).f_bavail == 0
        with pytest.raises(StorageFull):
            finalized(store, "c", 3)
        assert store.release([*first, *second]) == 4
        assert os.statvfs(small_disk).f_bavail > 0
        store.release(finalized(store, "c", 3))
    assert tree(small_disk) == {"filler", "default/store.json"}


@pytest.mark.root
def test_a_part_of_a_session_is_released_on_a_full_disk_and_stays_released(
    small_disk: Path,
) -> None:
    with open_store(small_disk, FIELDS) as store:
        first, second = finalized(store, "a", 1)
        fill(small_disk / "filler")
        assert os.statvfs(small_disk).f_bavail == 0
        assert store.release([first]) == 1
        assert list(store.unreleased()) == [second.ref]
    with open_store(small_disk, FIELDS) as store:
        assert list(store.unreleased()) == [second.ref]
        assert store.release([second]) == 1
    assert tree(small_disk) == {"filler", "default/store.json"}


@pytest.mark.root
def test_room_for_releases_is_kept_again_once_there_is_some(small_disk: Path) -> None:
    reserve = small_disk / "default/.staging/reserve"
    with open_store(small_disk, FIELDS) as store:
        assert reserve.stat().st_blocks * 512 == 256 * 1024
        sessions = [finalized(store, f"s{i}", i) for i in range(12)]
        fill(small_disk / "filler")
        store.release(sessions[0][:1])
        (small_disk / "filler").unlink()
        store.release(sessions[0][1:])
        assert reserve.stat().st_blocks * 512 == 256 * 1024
        fill(small_disk / "filler")
        assert store.release([s for pair in sessions for s in pair[:1]]) == 11
    assert not reserve.exists()


FILL = """
import os, sys
from contextlib import suppress
from pathlib import Path
from _rollouts import open_store, short_rollout, standard_fields

fields = standard_fields()
store = open_store(Path(sys.argv[1]), fields)
done = store.session("done")
short_rollout(fields, 1, turns=2, response=1000).record(done)
print(done.finalize()[0].ref)
short_rollout(fields, 2).record(store.session("left open"))
with open(sys.argv[1] + "/filler", "wb", buffering=0) as file, suppress(OSError):
    while True:
        file.write(bytes(4096))
if sys.argv[2] == "killed":
    sys.stdout.flush()
    os.kill(os.getpid(), 9)
store.close()
"""


@pytest.mark.root
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_store_that_filled_its_disk_is_opened_again(small_disk: Path, how: str) -> None:
    done = run_child(FILL, small_disk, how)
    assert done.returncode == (0 if how == "closed" else -signal.SIGKILL), done.stderr
    (ref,) = done.stdout.split()
    with open_store(small_disk, FIELDS) as store:
        assert list(store.unreleased()) == [ref]
        (want,) = short_rollout(FIELDS, 1, turns=2, response=1000).expected("lineage")
        assert_batch(store.hydrate([ref]), [want.slime(specs(FIELDS))])
        assert store.release([ref]) == 2
        store.release(finalized(store, "b", 2))
    assert tree(small_disk) == {"filler", "default/store.json"}


@pytest.mark.root
def test_a_start_on_a_disk_without_a_free_page_sweeps_and_goes_on(small_disk: Path) -> None:
    with open_store(small_disk, FIELDS) as store:
        segments = finalized(store, "a", 1)
        short_rollout(FIELDS, 2, response=500).record(store.session("left open"))
    fill(small_disk / "filler")
    assert os.statvfs(small_disk).f_bavail == 0
    with open_store(small_disk, FIELDS) as store:
        assert list(store.unreleased()) == [s.ref for s in segments]
        assert store.release(segments) == 2


# ---------------------------------------------------------------- written once


def test_a_step_is_written_once_but_for_a_lost_acknowledgement(tmp_path: Path) -> None:
    unit = unit_on(tmp_path, lambda _: None)
    key = StepKey(Incarnation("train", "s", "0"), 0)
    values = {f.spec.name: f.make(np.random.default_rng(0), 6) for f in FIELDS}
    arrays = [FieldArray(f.spec, values[f.spec.name]) for f in FIELDS]
    entry = unit.put(key, 7, arrays)
    before = {p: (tmp_path / p).read_bytes() for p in tree(tmp_path)}
    assert unit.put(key, 7, arrays) == entry  # equal content
    for name in values:
        changed = {n: a.copy() for n, a in values.items()}
        changed[name].reshape(-1).view(np.int32)[-1] ^= 1
        with pytest.raises(ObjectExists, match="written once"):
            unit.put(key, 7, [FieldArray(f.spec, changed[f.spec.name]) for f in FIELDS])
    with pytest.raises(ObjectExists):
        unit.put(key, 8, arrays)  # another token count
    with pytest.raises(ObjectExists):
        unit.put(key, 7, arrays[:1])
    assert {p: (tmp_path / p).read_bytes() for p in tree(tmp_path)} == before
    assert unit.clear(Located("local", key.path))
    assert not unit.clear(Located("local", key.path))
    unit.put(key, 7, [FieldArray(f.spec, changed[f.spec.name]) for f in FIELDS])
    unit.backend.close()


def test_a_taken_step_is_not_cleared_by_the_writer_it_refuses(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    store = opened(lambda _: None)
    session = store.session("s")
    session.record(create(0))
    (there,) = tmp_path.glob("default/steps/*/*/*/000000")
    other = there.parent / "000001"
    other.mkdir()
    (other / "zarr.json").write_text("somebody else's")
    with pytest.raises(ObjectExists):
        session.record(create(1))
    assert (other / "zarr.json").read_text() == "somebody else's"
    assert len(session.records) == 1
