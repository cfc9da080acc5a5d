"""What a cluster's store does where processes end, pause or are cut off at bad moments.

Each test is of one thing that went wrong once; the seeded suite (test_cluster_faults) found most of
them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests._clusters import STORE, Cluster, Fleet, client_of, cluster, units_of
from tests._rollouts import assert_batch, record, refs_of, short_rollout, specs, standard_fields
from tq_fs import Session, Store
from tq_fs.channel import Fence
from tq_fs.cluster._service import ClusterController
from tq_fs.controller import Leases
from tq_fs.errors import (
    SegmentMissing,
    SessionClosed,
    StorageFull,
    StorageUnreachable,
    StoreFenced,
    TqFsError,
    UnitLost,
    UnitsUnavailable,
)
from tq_fs.keys import Incarnation, SegmentRef
from tq_fs.storage_unit import Inventory
from tq_fs.units import Layout

FIELDS = standard_fields()
SPECS = specs(FIELDS)
OWN = {"store.json"}


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def ns(self) -> int:
        return int(self.now * 1e9)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path, 2, retry_deadline_s=0.5) as made:
        yield made


@contextmanager
def timed(root: Path, nodes: int = 2, **settings: Any) -> Iterator[tuple[Cluster, Time]]:
    """Give a cluster whose Controller has a clock of the test's."""
    time = Time()
    with cluster(root, nodes, **{"retry_deadline_s": 0.5, **settings}) as made:
        made.restart_controller(clock=time, now_ns=time.ns)
        yield made, time


def files(made: Cluster) -> set[str]:
    """Return what lies in the units' folders, but for what each has of its own."""
    found = set()
    for node in made.fleet.units:
        root = made.root / node / STORE
        found |= {str(p.relative_to(root)) for p in root.rglob("*") if not p.is_dir()}
    return {f for f in found - OWN if f not in {".lock", ".staging/reserve"}}


def left_of(made: Cluster, refs: list[str]) -> set[str]:
    """Return what is left of references' sessions."""
    paths = {incarnation_of(ref).path for ref in refs}
    return {f for f in files(made) if any(path in f for path in paths)}


def begun(store: Store, name: str) -> tuple[Session, list[dict[str, Any]]]:
    """Record a session, and leave it open; return also what it must hydrate to."""
    rollout = short_rollout(FIELDS, len(name))
    session = store.session(name)
    rollout.record(session)
    return session, [e.slime(SPECS) for e in rollout.expected("lineage")]


def incarnation_of(ref: str) -> Incarnation:
    return SegmentRef.parse(ref).incarnation


# ---------------------------------------------------------------- units that are away


def on(made: Cluster, store: Store, node: str, name: str = "s") -> tuple[list[str], list[Any]]:
    """Record and finalize a session whose home is on a node."""
    for i in range(64):
        segments, want = record(store, f"{name}{i}", i)
        refs = refs_of(segments)
        if incarnation_of(refs[0]).home == made.unit(node).name:
            return refs, want
    raise AssertionError(node)


def test_a_unit_that_a_new_controller_has_not_seen_yet_does_not_count_as_lost(
    two: Cluster,
) -> None:
    with two.store(SPECS) as store:
        refs, want = on(two, store, "n1")
        two.down("n1")
        two.restart_controller()
        with two.store(SPECS) as other:
            with pytest.raises(StorageUnreachable, match="has not reported to the Controller yet"):
                other.hydrate(refs)
            with pytest.raises(StorageUnreachable):
                other.release(refs)  # nothing is acknowledged that is not noted
            two.join("n1")
            two.controller.look()
            assert_batch(other.hydrate(refs), want)
            assert set(refs) <= set(other.unreleased())
            other.release(refs)
            assert not set(refs) & set(other.unreleased())
            with pytest.raises(SegmentMissing):
                other.hydrate(refs)


def test_a_unit_that_is_gone_for_good_is_told_at_once_and_its_sessions_count_as_released(
    two: Cluster,
) -> None:
    with two.store(SPECS) as store:
        refs, _ = on(two, store, "n1")
        two.down("n1", lost=True)
        two.restart_controller()
        with two.store(SPECS) as other:
            with pytest.raises(UnitLost, match="unit n1-"):
                other.hydrate(refs)
            assert other.release(refs) == 0


def test_what_a_client_has_not_heard_of_yet_is_asked_for_at_once(two: Cluster) -> None:
    """A unit joins, and takes a session a moment after the client's layout was fetched."""
    with two.store(SPECS) as store:
        record(store, "before")
        units_of(store).directory.layout(0.0)
        two.join("n2")
        two.controller.look()
        for node in ("n0", "n1"):
            two.controller.drain(two.unit(node).name)
        segments, want = record(store, "after")
        refs = refs_of(segments)
        assert incarnation_of(refs[0]).home == two.unit("n2").name
        assert_batch(store.hydrate(refs), want)


def test_the_controller_does_not_wait_for_a_unit_that_it_knows_to_be_away(two: Cluster) -> None:
    """Ten sessions of a unit that restarts are released by one call, not in ten deadlines."""
    with two.store(SPECS) as store:
        refs = [on(two, store, "n1", f"s{i}-")[0][0] for i in range(10)]
        name = two.unit("n1").name
        two.down("n1")
        timer = threading.Timer(5.0, lambda: two.join("n1"))
        timer.start()
        try:
            store.release(refs)
        finally:
            assert timer.is_alive()
            timer.cancel()
        assert not set(refs) & set(store.unreleased())
        assert two.join("n1").name == name
        two.controller.look()
        two.controller.sweep()
        assert not left_of(two, refs)


def test_a_unit_that_is_cut_off_is_waited_for_once_and_not_for_each_session(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still reports: only the way between it and the Controller is cut."""
    with two.store(SPECS) as store:
        refs = [on(two, store, "n1", f"s{i}-")[0][0] for i in range(10)]
        units: Any = two.controller._units
        backend = units.backend(two.unit("n1").name)
        lanes = backend._lanes.get()

        def cut() -> Any:
            raise StorageUnreachable("no answer", subject="unit n1")

        with monkeypatch.context() as patch:
            patch.setattr(lanes, "take", cut)
            start = monotonic()
            store.release(refs)
            assert monotonic() - start < 5.0  # half of ten sessions with two requests each
        backend._retry._until = 0.0
        two.controller.sweep()
        assert not left_of(two, refs)


def test_what_could_not_be_learnt_of_a_unit_is_learnt_later(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two.store(SPECS) as store:
        refs, _ = on(two, store, "n1")
        two.down("n1")
        two.restart_controller()
        learn, calls = two.controller.controller.learn, []

        def fails(documents: Any) -> Any:
            calls.append(documents)
            if len(calls) == 1:
                raise StorageUnreachable("was cut off", subject="a unit")
            return learn(documents)

        monkeypatch.setattr(two.controller.controller, "learn", fails)
        two.join("n1")
        two.controller.look()
        two.controller.look()
        assert len(calls) == 2
        assert set(refs) <= set(store.unreleased())


def test_a_checkpoint_counts_for_a_unit_that_was_away_as_it_was_saved(two: Cluster) -> None:
    with two.store(SPECS) as store:
        refs, _ = on(two, store, "n1")
        store.release(refs, rollout_id=3)
        two.down("n1")
        two.restart_controller()
        store.checkpoint_saved(3)
        two.join("n1")
        two.controller.look()
        assert not left_of(two, refs)
    with two.store(SPECS) as store:
        refs, want = on(two, store, "n1", "later")
        store.release(refs, rollout_id=4)
        two.controller.look()
        assert_batch(store.hydrate(refs), want)


def test_a_step_is_not_recorded_elsewhere_once_the_sessions_home_is_lost(two: Cluster) -> None:
    with two.store(SPECS) as store:
        homes: dict[str, Session] = {}
        for i in range(64):
            session = store.session(f"s{i}")
            homes.setdefault(session.incarnation_id.partition(".")[2], session)
        session = homes[two.unit("n1").name]
        two.down("n1", lost=True)
        units_of(store).directory.layout(0.0)
        with pytest.raises(UnitLost, match="unit n1-"):
            short_rollout(FIELDS, 1).record(session)
        assert not [f for f in files(two) if f.startswith("steps/")]


def test_a_full_home_is_relieved_by_whoever_can_where_another_unit_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(tmp_path, 3, retry_deadline_s=0.3) as made, made.store(SPECS) as store:
        units = units_of(store)
        asked = []

        def put(name: str, *args: Any, **named: Any) -> Any:
            asked.append(name)
            if name == session.incarnation_id.partition(".")[2]:
                raise StorageFull("no room", subject=name)
            if len(asked) == 2:
                raise StorageUnreachable("was cut off", subject=name)
            return real(name, *args, **named)

        real = units._put
        monkeypatch.setattr(units, "_put", put)
        session = store.session("s")
        rollout = short_rollout(FIELDS, 1, turns=1)
        rollout.record(session)
        assert len(asked) == 3
        want = [e.slime(SPECS) for e in rollout.expected("lineage")]
        assert_batch(store.hydrate(session.finalize()), want)


# ---------------------------------------------------------------- leases and the sweep


def test_who_was_silent_for_too_long_cannot_finalize_what_was_swept(tmp_path: Path) -> None:
    """A paused process wakes up and says that it lives, before it finalizes."""
    with timed(tmp_path) as (made, time), made.store(SPECS) as store:
        session, _ = begun(store, "paused")
        time.now += 10_000
        assert made.controller.sweep().swept_sessions == 1
        client_of(store).renew()
        with pytest.raises(SessionClosed, match="its lease ran out, and Steps"):
            session.finalize()
        assert list(store.unreleased()) == []


def test_what_is_finalized_while_the_sweep_looks_at_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with timed(tmp_path) as (made, time), made.store(SPECS) as store:
        early, first = begun(store, "early")
        late, second = begun(store, "late!!")
        wants = {"early": (early, first), "late!!": (late, second)}
        done: dict[str, list[str]] = {}
        time.now += 10_000
        client_of(store).renew()

        def finalize(name: str) -> None:
            if name not in done:
                done[name] = refs_of(wants[name][0].finalize())

        controller = made.controller.controller
        inventory, look_again = controller._writable().inventory, controller._start.look_again

        def listed() -> Iterator[Inventory]:
            for held in inventory():
                if "early" in held.path:
                    finalize("early")  # after the sweep has asked what is known
                yield held

        def looked(path: str, loaded: Any) -> None:
            look_again(path, loaded)
            if "late" in path:
                finalize("late!!")  # after it has looked for a manifest

        monkeypatch.setattr(controller._writable(), "inventory", listed)
        monkeypatch.setattr(controller._start, "look_again", looked)
        assert made.controller.sweep().swept_sessions == 0
        finalize("late!!")
        for name, refs in done.items():
            assert_batch(store.hydrate(refs), wants[name][1])


def test_what_a_sweep_could_not_delete_is_not_deleted_once_it_is_finalized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with timed(tmp_path) as (made, time), made.store(SPECS) as store:
        session, want = begun(store, "paused")
        time.now += 10_000
        units = made.controller.controller._writable()

        def fails(place: Any) -> bool:
            raise StorageUnreachable("was cut off", subject=str(place))

        with monkeypatch.context() as patch:
            patch.setattr(units, "clear", fails)
            made.controller.sweep()
        client_of(store).renew()
        refs = refs_of(session.finalize())
        made.controller.sweep()
        assert_batch(store.hydrate(refs), want)


def test_nothing_is_left_of_a_session_whose_finalize_failed_half_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its resident fields were kept already; its process dies, or discards it."""
    with timed(tmp_path, persist_trajectories=True) as (made, time):

        def fails(draft: bytes) -> bytes:
            raise UnitsUnavailable("is gone", subject="the Controller")

        for end in ("dies", "discards"):
            with made.store(SPECS) as store, monkeypatch.context() as patch:
                session, _ = begun(store, end)
                patch.setattr(made.controller, "publish", fails)
                with pytest.raises(UnitsUnavailable):
                    session.finalize()
                assert any("trajectory" in f for f in files(made))
                if end == "discards":
                    session.discard()
                    assert not files(made)
            time.now += 10_000
            made.controller.sweep()
            assert not files(made)


def test_who_discards_after_a_lost_acknowledgement_leaves_nothing(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = two.controller.publish

    def loses(draft: bytes) -> bytes:
        publish(draft)
        raise UnitsUnavailable("is gone", subject="the Controller")

    with two.store(SPECS) as store:
        session, _ = begun(store, "s")
        monkeypatch.setattr(two.controller, "publish", loses)
        with pytest.raises(UnitsUnavailable):
            session.finalize()
        session.discard()
        assert list(store.unreleased()) == []
        assert not files(two)
        two.restart_controller()
        assert list(store.unreleased()) == []


def test_what_a_live_consumer_awaits_outlives_a_new_controllers_first_sweep(
    tmp_path: Path,
) -> None:
    """Nobody has told the new one yet who trains."""
    with timed(tmp_path, cluster={"retention_s": 100.0}) as (made, time):
        with made.store(SPECS, consumers=("train",)) as store:
            segments, want = record(store, "s")
            time.now += 1000
            made.restart_controller(clock=time, now_ns=time.ns)
            made.controller.sweep()
            assert_batch(store.hydrate(segments), want)
            client_of(store).renew()
            time.now += 700
            client_of(store).renew()
            made.controller.sweep()
            assert_batch(store.hydrate(segments), want)
        made.controller.sweep()
        assert made.controller.controller.count() == 0


def test_a_session_is_swept_by_one_sweep_at_a_time() -> None:
    leases = Leases(lease_s=1, grace_s=1, clock=Time())
    assert leases.condemn("p")
    assert not leases.condemn("p")
    assert not leases.pin("p")
    leases.swept("p")
    assert leases.pin("p")
    assert not leases.condemn("p")


# ---------------------------------------------------------------- releases


def test_what_another_controller_has_finalized_is_released_too(two: Cluster) -> None:
    """Its manifest was written when this one had read them all."""
    with two.store(SPECS) as store:
        segments, _ = record(store, "s")
        refs = refs_of(segments)
        controller = two.controller.controller
        incarnation = incarnation_of(refs[0])
        controller._releases._set(incarnation, None, {})
        controller._catalog.forget(incarnation)
        store.release(refs)
        assert not files(two)


def test_no_tombstone_is_left_whose_acknowledgement_was_lost(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two.store(SPECS) as store:
        segments, _ = record(store, "s")
        units: Any = two.controller._units
        desk = units.backend(units.directory.live()[0])
        put = desk.put

        def loses(key: str, data: bytes, **named: Any) -> None:
            put(key, data, **named)
            if key.startswith("tombstones/"):
                raise StorageUnreachable("no answer", subject=key)

        monkeypatch.setattr(desk, "put", loses)
        store.release(segments)
        assert not files(two)


def test_no_other_thread_takes_a_tombstone_away_while_a_session_is_being_deleted(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two.store(SPECS) as store:
        segments, _ = record(store, "s")
        controller = two.controller.controller
        stones: list[bool] = []

        def at(point: str) -> None:
            if point in ("tombstone written", "manifest dropped"):
                controller._removing().try_again()  # as any release and any sweep does
                stones.append(any(f.startswith("tombstones/") for f in files(two)))

        monkeypatch.setattr(controller._removing(), "_at", at)
        store.release(segments)
        assert stones == [True, True]
        assert not files(two)


# ---------------------------------------------------------------- who a unit obeys


def fence(write: Callable[[int, str], None] = lambda epoch, holder: None) -> Fence:
    return Fence(1, "a", unit="u", write=write)


def test_all_lanes_of_a_new_controller_wait_for_the_writes_of_the_old_one() -> None:
    ours = fence()
    admitted: list[int] = []

    def admit() -> None:
        ours.admit(2, "b")
        admitted.append(2)

    with ours.writing(1, "a"):
        lanes = [threading.Thread(target=admit) for _ in range(2)]
        for lane in lanes:
            lane.start()
            lane.join(0.1)
        assert not admitted
        with pytest.raises(StoreFenced), ours.writing(1, "a"):
            pass
    for lane in lanes:
        lane.join(10)
    assert admitted == [2, 2]


def test_a_controller_that_was_overtaken_while_it_waited_is_not_written_down() -> None:
    noted: list[int] = []
    ours = fence(lambda epoch, holder: noted.append(epoch))
    failed: list[TqFsError] = []

    def admit(epoch: int) -> None:
        try:
            ours.admit(epoch, f"of {epoch}")
        except StoreFenced as error:
            failed.append(error)

    with ours.writing(1, "a"):
        waiting = [threading.Thread(target=admit, args=(epoch,)) for epoch in (2, 3)]
        for thread in waiting:
            thread.start()
            thread.join(0.1)
    for thread in waiting:
        thread.join(10)
    assert (noted, len(failed), ours.epoch) == ([3], 1, 3)


def test_a_full_disk_keeps_no_controller_away_that_could_make_room() -> None:
    noted: list[int] = []

    def write(epoch: int, holder: str) -> None:
        if not room:
            raise StorageFull("no room", subject="u")
        noted.append(epoch)

    room: list[bool] = []
    ours = fence(write)
    ours.admit(2, "b")
    with ours.writing(2, "b"), pytest.raises(StoreFenced):
        ours.admit(1, "a")
    room.append(True)
    ours.admit(2, "b")
    assert noted == [2]


def test_a_controller_that_a_unit_obeys_no_more_is_told_to_end(two: Cluster) -> None:
    """Also where it came last: the unit was away then, and had met a higher epoch before."""
    away = two.unit("n1")
    two.down("n1")
    ended: list[bool] = []
    two.restart_controller(replaced=lambda: ended.append(True))
    two.join("n1")
    elsewhere = Fleet()
    elsewhere.units["n1"] = two.unit("n1")
    for _ in range(2):
        other = ClusterController(two.config, None, elsewhere, node="n1")
        other.close()
    assert other.epoch > two.controller.epoch
    assert two.unit("n1").name == away.name
    two.controller.look()
    assert ended
    last = two.restart_controller()
    assert last.epoch > other.epoch


def test_a_controller_whose_units_all_obey_another_one_is_told_to_end(two: Cluster) -> None:
    ended: list[bool] = []
    first = two.restart_controller(replaced=lambda: ended.append(True))
    two.start_controller()
    assert not ended
    first.look()
    assert ended


# ---------------------------------------------------------------- without a Controller


@pytest.mark.parametrize("how", ["hangs", "is gone"])
def test_steps_are_recorded_and_read_while_the_controller_is_away(
    two: Cluster, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    back = threading.Event()

    def away() -> Layout:
        if how == "hangs":
            back.wait(20)
        raise UnitsUnavailable("is away", subject="the Controller")

    with two.store(SPECS) as store:
        segments, want = record(store, "before")
        session = store.session("now")
        directory = units_of(store).directory
        monkeypatch.setattr(directory, "_ask", away)
        monkeypatch.setattr(directory, "_fresh_s", 0.0)
        for backend in units_of(store)._backends.values():
            backend._lanes.get().close()
            backend._lanes.forget()  # new connections have to be made, too
        start = monotonic()
        rollout = short_rollout(FIELDS, 3)
        rollout.record(session)
        assert_batch(store.hydrate(segments), want)
        with pytest.raises(StorageUnreachable, match="the Controller does not answer"):
            directory.find("unheard-of")
        assert monotonic() - start < 5
        back.set()
        monkeypatch.undo()
        want = [e.slime(SPECS) for e in rollout.expected("lineage")]
        assert_batch(store.hydrate(session.finalize()), want)


def test_closing_does_not_wait_for_a_controller_that_is_away(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = threading.Event()

    def hangs(*_: object) -> None:
        back.wait(20)

    store = two.store(SPECS)
    record(store, "s")
    monkeypatch.setattr(two.controller, "leave", hangs)
    start = monotonic()
    store.close()
    assert monotonic() - start < 4.0
    back.set()
