"""A store on several units: recorded, read and released, also when one of them ends."""

from __future__ import annotations

import shutil
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests._clusters import Cluster, client_of, cluster, readers_of, units_of
from tests._rollouts import (
    VIEWS,
    assert_batch,
    assert_segment,
    open_store,
    record,
    refs_of,
    short_rollout,
    specs,
    standard_fields,
    tree,
    turning_rollout,
    visible_steps,
)
from tq_fs import Store
from tq_fs.channel import Identity
from tq_fs.errors import (
    SegmentMissing,
    SessionClosed,
    StaleReference,
    StorageDenied,
    StorageFull,
    StoreBusy,
    StoreFenced,
    TrajectoryMissing,
    UnitLost,
    UnitsUnavailable,
    WrongStore,
)
from tq_fs.keys import SegmentRef
from tq_fs.manifests import SessionManifest
from tq_fs.metrics import Metrics

FIELDS = standard_fields()
SPECS = specs(FIELDS)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path, 2) as made:
        yield made


def home_of(ref: str) -> str:
    return SegmentRef.parse(ref).incarnation.home


def on(made: Cluster, node: str, store: Store, seed: int = 0) -> tuple[list[str], list[Any]]:
    """Record sessions until one is at home on a node; return its references and what they hold."""
    for i in range(100):
        segments, want = record(store, f"{node}-{seed}-{i}", seed)
        if home_of(refs_of(segments)[0]) == made.unit(node).name:
            return refs_of(segments), want
        store.release(segments)
    raise AssertionError("no session ever came to a node of two")


def files(made: Cluster) -> dict[str, set[str]]:
    """Return what lies in the folders of the units, but for what a folder always has."""
    return {
        node: {p for p in tree(made.root / node / "run") if p not in (".lock", "store.json")}
        for node in ("n0", "n1")
        if (made.root / node / "run").exists()
    }


def steps_on(made: Cluster, node: str) -> set[str]:
    return {path for path in files(made)[node] if path.startswith("steps/")}


# ---------------------------------------------------------------- record and read


def test_what_was_recorded_on_many_units_is_read_bit_for_bit_from_any_node(two: Cluster) -> None:
    with two.store(SPECS) as writer, two.store(SPECS, "n0") as near, two.store(SPECS) as far:
        recorded = [record(writer, f"s{i}", i) for i in range(12)]
        refs = [ref for segments, _ in recorded for ref in refs_of(segments)]
        wants = [want for _, found in recorded for want in found]
        for store in (near, far):
            assert_batch(store.hydrate(refs), wants)
        assert {home_of(ref) for ref in refs} == {two.unit("n0").name, two.unit("n1").name}
        assert set(readers_of(near).files) == {two.unit("n0").name}
        assert not readers_of(far).files
        assert units_of(far).received_bytes > units_of(near).received_bytes > 0
        assert near.passed().files == {two.unit("n0").name: "n0"}
        assert far.passed().files == {}
        whole = far.passed().received_bytes
        assert whole == near.passed().received_bytes + near.passed().file_bytes


@pytest.mark.parametrize("node", ["n0", "far"])
def test_views_layers_and_tokens_are_what_the_embedded_store_gives(
    two: Cluster, tmp_path: Path, node: str
) -> None:
    rollout = turning_rollout(FIELDS)
    with two.store(SPECS, node) as store, open_store(tmp_path / "embedded", FIELDS) as embedded:
        for made in (store, embedded):
            session = made.session("s")
            rollout.record(session)
            segments = session.finalize(views=VIEWS)
            expected = [e for view in VIEWS for e in rollout.expected(view)]
            for segment, want in zip(segments, expected, strict=True):
                assert_segment(segment, want)
            for layers, tokens in [(None, None), ((1, 3), None), (None, [(0, 3), (5, 9)])]:
                have = made.hydrate(segments, layers=layers, tokens=tokens)
                assert_batch(have, [e.slime(SPECS, layers=layers, ranges=tokens) for e in expected])


def test_over_tls_the_same_is_read_and_strangers_are_refused(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, identity=Identity.new("run")) as made:
        with made.store(SPECS) as store:
            segments, want = record(store, "s")
            assert_batch(store.hydrate(segments), want)
            assert units_of(store).sent_bytes > 0
        made.identity = Identity.new("run")  # of somebody else
        with (
            made.store(SPECS, retry_deadline_s=0.2) as stranger,
            pytest.raises(StorageDenied, match="identity"),
        ):
            stranger.hydrate(refs_of(segments))


def test_references_of_another_store_and_unknown_ones_are_refused(two: Cluster) -> None:
    with two.store(SPECS) as store:
        (ref,) = refs_of(record(store, "s")[0])
        with pytest.raises(WrongStore):
            store.hydrate([ref.replace(":run/", ":other/")])
        with pytest.raises(SegmentMissing):
            store.hydrate([ref[:-1] + "7"])
        record(store, "t")
        store.release([ref])
        with pytest.raises(SegmentMissing):
            store.hydrate([ref])
        record(store, "s")
        with pytest.raises(StaleReference):
            store.hydrate([ref])


def test_nothing_is_left_of_a_discarded_or_released_session(two: Cluster) -> None:
    with two.store(SPECS) as store:
        before = files(two)
        session = store.session("s")
        short_rollout(FIELDS, 0).record(session)
        session.discard()
        segments = [s for i in range(6) for s in record(store, f"s{i}", i)[0]]
        assert store.release(segments) == 3 * 6
        assert store.release(segments) == 0
        assert list(store.unreleased()) == []
        assert files(two) == before


def test_resident_fields_come_back_where_they_are_kept(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, persist_trajectories=True) as made:
        with made.store(SPECS) as store:
            segments = [s for i in range(4) for s in record(store, f"s{i}", i)[0]]
        made.restart_controller()
        with made.store(SPECS) as store:
            found = list(store.segments(store.unreleased()))
            assert [s.ref for s in found] == [s.ref for s in segments]
            for have, want in zip(found, segments, strict=True):
                assert np.array_equal(have.tokens, want.tokens)
    with cluster(tmp_path / "without", 2) as made, made.store(SPECS) as store:
        segments, _ = record(store, "s")
        with pytest.raises(TrajectoryMissing):
            list(store.segments(refs_of(segments)))


def test_many_references_come_in_parts(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tq_fs.cluster._service._PAGE", 3)
    with two.store(SPECS) as store:
        recorded = [record(store, f"s{i}", i, "train" if i % 2 else "eval")[0] for i in range(8)]
        everything = [ref for segments in recorded for ref in refs_of(segments)]
        train = [ref for segments in recorded[1::2] for ref in refs_of(segments)]
        assert list(store.unreleased()) == everything
        assert list(store.unreleased(partition="train")) == train
        store.release(everything[:5])
        assert list(store.unreleased("train")) == everything[5:]


# ---------------------------------------------------------------- the Controller ends


def test_a_controller_that_is_there_again_knows_all_sessions(two: Cluster) -> None:
    with two.store(SPECS) as store:
        recorded = [record(store, f"s{i}", i) for i in range(10)]
        refs = [ref for segments, _ in recorded for ref in refs_of(segments)]
        store.release(refs[:3])
        epoch = two.controller.epoch
        found = two.restart_controller()
        assert found.epoch > epoch
        assert found.recovery.sessions == 7
        assert list(store.unreleased()) == refs[3:]
        assert_batch(store.hydrate(refs[3:]), [w for _, want in recorded[3:] for w in want])
        assert store.release(refs) == 3 * 7


def test_a_session_outlives_the_controller_that_opened_it(two: Cluster) -> None:
    with two.store(SPECS) as store:
        session = store.session("s")
        rollout = short_rollout(FIELDS, 1)
        rollout.record(session)
        two.restart_controller()
        segments = session.finalize()
        want = [e.slime(SPECS) for e in rollout.expected("lineage")]
        assert_batch(store.hydrate(segments), want)
        two.controller.sweep()
        assert_batch(store.hydrate(segments), want)


class Dead:
    """A Controller that nobody can reach."""

    def __getattr__(self, name: str) -> Any:
        raise UnitsUnavailable("is gone", subject="the Controller")


def test_steps_are_recorded_and_known_references_read_without_a_controller(two: Cluster) -> None:
    with two.store(SPECS) as store:
        segments, want = record(store, "known")
        assert_batch(store.hydrate(segments), want)
        session = store.session("s")
        rollout = short_rollout(FIELDS, 1)
        alive, two.controller = two.controller, cast("Any", Dead())
        try:
            rollout.record(session)
            assert_batch(store.hydrate(segments), want)
            with pytest.raises(UnitsUnavailable):
                store.session("t")
        finally:
            two.controller = alive
        found = session.finalize()
        assert_batch(store.hydrate(found), [e.slime(SPECS) for e in rollout.expected("lineage")])


def test_a_finalize_whose_acknowledgement_was_lost_succeeds_when_it_is_tried_again(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two.store(SPECS) as store:
        session = store.session("s")
        short_rollout(FIELDS, 1).record(session)
        client = client_of(store)
        publish = client._publish
        sent: list[SessionManifest] = []

        def send(draft: SessionManifest) -> SessionManifest:
            sent.append(draft)
            return publish(draft)

        monkeypatch.setattr(client, "_publish", send)
        refs = refs_of(session.finalize(views=VIEWS))
        two.restart_controller()
        store.release(refs[:1])
        again = publish(sent[0])
        assert again.segments == sent[0].segments
        assert list(store.unreleased()) == refs[1:]  # what was released stays so
        store.release(refs)
        assert list(store.unreleased()) == []


def test_an_older_controller_that_wakes_up_can_change_nothing(two: Cluster) -> None:
    with two.store(SPECS) as store:
        segments, want = record(store, "s")
        session = store.session("t")
        short_rollout(FIELDS, 1).record(session)
        old = two.controller
        two.controller = two.start_controller()
        before = files(two)
        with pytest.raises(StoreFenced):
            old.controller.release(refs_of(segments), "train")
        with pytest.raises(StoreFenced):
            old.discard("train", "t", session.incarnation_id)
        with pytest.raises(StoreFenced):
            old.publish(_draft_of(session))
        assert files(two) == before
        assert_batch(store.hydrate(segments), want)
        session.finalize()
        old.close()  # its pages are refused too
        assert files(two) != before


def _draft_of(session: Any) -> bytes:
    from tq_fs import manifests
    from tq_fs.controller import draft_manifest
    from tq_fs.trajectory import ClosedSession

    trajectory = session._trajectory
    closed = ClosedSession(
        incarnation=trajectory.incarnation,
        mode="tito",
        views=("lineage",),
        consumers=("train",),
        records=trajectory.records(),
        stored=SPECS,
        resident=[],
        extra={},
    )
    return manifests.encode(draft_manifest(closed, "run"))


def test_two_controllers_that_start_at_once_get_different_epochs(two: Cluster) -> None:
    first, second = two.start_controller(), two.start_controller()
    assert two.controller.epoch < first.epoch < second.epoch
    assert {unit.report().epoch for unit in map(two.unit, ("n0", "n1"))} == {second.epoch}


def test_a_deletion_that_a_crash_has_interrupted_goes_on(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two.store(SPECS) as store:
        before = files(two)
        kept, want = record(store, "kept", 5)
        left = {n: files(two)[n] - before[n] for n in before}
        segments = [s for i in range(4) for s in record(store, f"s{i}", i)[0]]
        with monkeypatch.context() as patch:
            patch.setattr("tq_fs.controller._removal.Removal.clear", lambda *_: None)
            patch.setattr("tq_fs.controller._removal.Removal._lay_to_rest", lambda *_: None)
            store.release(segments)
            two.controller.close()
        assert any("tombstones" in p for found in files(two).values() for p in found)
        two.controller = two.start_controller()
        assert {n: files(two)[n] - before[n] for n in before} == left
        with pytest.raises(SegmentMissing):
            store.hydrate(segments)
        assert_batch(store.hydrate(kept), want)


# ---------------------------------------------------------------- units end, join and leave


def test_a_unit_that_is_there_again_has_all_that_was_acknowledged(two: Cluster) -> None:
    with two.store(SPECS) as store:
        refs, want = on(two, "n1", store)
        name = two.unit("n1").name
        two.down("n1")
        two.join("n1")
        assert two.unit("n1").name == name
        two.controller.look()
        assert_batch(store.hydrate(refs), want)


def test_steps_of_a_lost_unit_are_reported_at_once_and_by_name(two: Cluster) -> None:
    with two.store(SPECS) as store, two.store(SPECS) as late:
        here, want = on(two, "n0", store)
        gone, _ = on(two, "n1", store)
        name = two.unit("n1").name
        opened = (store.session(f"open{i}") for i in range(100))
        session = next(s for s in opened if s._trajectory.incarnation.home == name)
        rollout = short_rollout(FIELDS, 3)
        rollout.record(session)
        two.down("n1", lost=True)
        began = time.monotonic()
        for reader in (store, late):
            with pytest.raises(UnitLost, match=f"{name}.*lost with node n1"):
                reader.hydrate(gone)
            assert_batch(reader.hydrate(here), want)
        with pytest.raises(UnitLost, match=name):
            session.create([1], [2], **{f.name: v for f, v in zip(SPECS, _rows(1), strict=True)})
        with pytest.raises(UnitLost, match=name):
            session.finalize()
        assert time.monotonic() - began < 2.0
        segments, want = record(store, "next", 9)
        assert home_of(refs_of(segments)[0]) == two.unit("n0").name
        assert_batch(store.hydrate(segments), want)
        two.restart_controller()
        with pytest.raises(UnitLost, match=name):
            two.store(SPECS).hydrate(gone)


def _rows(count: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [f.make(rng, count + (f.spec.rows == "tokens")) for f in FIELDS]


def test_what_is_released_while_its_unit_is_away_goes_once_it_is_there(two: Cluster) -> None:
    with two.store(SPECS) as store:
        before = files(two)
        refs, _ = on(two, "n1", store)
        two.down("n1")
        assert store.release(refs) == 3
        with pytest.raises(SegmentMissing):
            store.hydrate(refs)
        assert list(store.unreleased()) == []
        two.join("n1")
        two.controller.look()
        with pytest.raises(SegmentMissing):
            store.hydrate(refs)
        two.controller.sweep()
        assert files(two) == before


def test_a_unit_that_joins_takes_sessions_and_one_that_drains_does_not(two: Cluster) -> None:
    with two.store(SPECS) as store:
        two.join("n2")
        two.controller.look()
        homes = {home_of(refs_of(record(store, f"s{i}", i)[0])[0]) for i in range(24)}
        names = {n: two.unit(n).name for n in ("n0", "n1", "n2")}
        assert homes == set(names.values())
        two.controller.drain(names["n0"])
        homes = {home_of(refs_of(record(store, f"t{i}", i)[0])[0]) for i in range(24)}
        assert homes == {names["n1"], names["n2"]}
        assert sum(1 for _ in store.unreleased()) == 48
        two.controller.drain(names["n0"], on=False)
        homes = {home_of(refs_of(record(store, f"u{i}", i)[0])[0]) for i in range(24)}
        assert homes == set(names.values())


def test_manifests_of_a_unit_that_comes_late_are_found(two: Cluster) -> None:
    with two.store(SPECS) as store:
        refs, want = on(two, "n1", store)
        two.controller.close()
        two.unit("n1").close()
        two.fleet.units["n1"] = None
        two.controller = two.start_controller()
        assert list(store.unreleased()) == []
        two.join("n1")
        two.controller.look()
        assert list(store.unreleased()) == refs
        assert_batch(store.hydrate(refs), want)


def test_without_any_unit_there_is_an_error_that_says_so(two: Cluster) -> None:
    with two.store(SPECS) as store:
        session = store.session("s")
        for node in ("n0", "n1"):
            two.down(node)
        with pytest.raises(UnitsUnavailable, match="no unit takes a new session"):
            store.session("t")
        for node in ("n0", "n1"):
            two.join(node)
        two.controller.look()
        short_rollout(FIELDS, 0).record(session)
        session.finalize()


def test_a_unit_on_the_port_of_another_one_is_not_taken_for_it(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as made, made.store(SPECS) as store:
        refs, want = on(made, "n1", store)
        swapped = {made.unit(n).name: made.unit(n).report().remote for n in ("n0", "n1")}
        names, ports = list(swapped), list(swapped.values())
        wrong = dict(zip(names, reversed(ports), strict=True))
        directory = units_of(store).directory
        right = directory.layout()
        units = tuple(replace(u, remote=wrong[u.name]) for u in right.units)
        with made.store(SPECS) as led_astray:
            lost_way = units_of(led_astray).directory
            lost_way.tell(replace(right, units=units))
            assert_batch(led_astray.hydrate(refs), want)  # is refused once, and asks anew
            session = led_astray.session("s")
            rollout = short_rollout(FIELDS, 0)
            lost_way.tell(replace(right, units=units))
            rollout.record(session)
            found = session.finalize()
        assert_batch(store.hydrate(found), [e.slime(SPECS) for e in rollout.expected("lineage")])
        home = session._trajectory.incarnation.home
        (node,) = [n for n in ("n0", "n1") if made.unit(n).name == home]
        assert len(visible_steps(made.root / node)) >= 3


def test_a_second_unit_on_a_folder_is_refused(two: Cluster) -> None:
    with pytest.raises(StoreBusy):
        two.join("n0")


def test_a_unit_refuses_a_folder_of_another_kind_and_so_does_an_embedded_store(
    tmp_path: Path,
) -> None:
    open_store(tmp_path / "n0", FIELDS, store_id="run").close()
    with pytest.raises(WrongStore, match="a store of one process"), cluster(tmp_path, 1):
        pass
    shutil.rmtree(tmp_path / "n0")
    with cluster(tmp_path, 1):
        pass
    with pytest.raises(WrongStore, match="StorageUnit"):
        open_store(tmp_path / "n0", FIELDS, store_id="run")


def test_a_unit_without_room_passes_steps_on_to_another(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> str:
        raise StorageFull("no room", subject="a disk")

    with two.store(SPECS) as store:
        session = store.session("s")
        home = session._trajectory.incarnation.home
        (node,) = [n for n in ("n0", "n1") if two.unit(n).name == home]
        other = "n0" if node == "n1" else "n1"
        monkeypatch.setattr(two.unit(node).place.front, "publish", full)
        rollout = short_rollout(FIELDS, 4)
        rollout.record(session)
        segments = session.finalize()
        assert {r.stored.unit for r in session.records if r.stored} == {two.unit(other).name}
        assert_batch(store.hydrate(segments), [e.slime(SPECS) for e in rollout.expected("lineage")])
        assert not steps_on(two, node)
        monkeypatch.setattr(two.unit(other).place.front, "publish", full)
        began = time.monotonic()
        with pytest.raises(StorageFull, match="no unit had room for it within 1 s"):
            record(store, "t")
        assert 0.5 < time.monotonic() - began < 3.0
        monkeypatch.undo()
        assert store.release(segments) == 3
        two.controller.sweep()
        assert not steps_on(two, "n0") | steps_on(two, "n1")


# ---------------------------------------------------------------- leases


def wait_for(condition: Any, timeout_s: float = 5.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.01)


def test_sessions_of_a_process_that_is_gone_are_swept_and_others_are_not(tmp_path: Path) -> None:
    settings = {"lease_s": 0.3, "grace_s": 0.1}
    with cluster(tmp_path, 2, cluster=settings) as made, made.store(SPECS) as alive:
        wait_for(made.controller.leases.is_complete)
        before = files(made)
        dead = made.store(SPECS)
        abandoned = dead.session("dead")
        short_rollout(FIELDS, 0).record(abandoned)
        client_of(dead)._ended.set()  # no more signs of life
        client_of(dead)._thread.join()
        living = alive.session("alive")
        rollout = short_rollout(FIELDS, 1)
        rollout.record(living)
        assert made.controller.sweep().swept_sessions == 0
        time.sleep(0.7)
        assert made.controller.sweep().swept_sessions == 1
        with pytest.raises(SessionClosed, match="lease ran out"):
            abandoned.finalize()
        segments = living.finalize()
        want = [e.slime(SPECS) for e in rollout.expected("lineage")]
        assert_batch(alive.hydrate(segments), want)
        alive.release(segments)
        dead.close()
        assert files(made) == before


def test_after_a_start_nothing_is_swept_before_all_had_time_to_say_what_they_hold(
    tmp_path: Path,
) -> None:
    with (
        cluster(tmp_path, 2, cluster={"lease_s": 0.6, "grace_s": 0.0}) as made,
        made.store(SPECS) as store,
    ):
        session = store.session("s")
        rollout = short_rollout(FIELDS, 1)
        rollout.record(session)
        time.sleep(0.7)
        made.restart_controller()
        assert made.controller.sweep().swept_sessions == 0
        wait_for(made.controller.leases.is_complete)
        assert made.controller.sweep().swept_sessions == 0
        segments = session.finalize()
        assert_batch(store.hydrate(segments), [e.slime(SPECS) for e in rollout.expected("lineage")])


# ---------------------------------------------------------------- checkpoints and retention


def test_a_release_is_held_until_the_checkpoint_is_saved_also_over_a_restart(two: Cluster) -> None:
    with two.store(SPECS) as store:
        recorded = [record(store, f"s{i}", i) for i in range(4)]
        refs = [refs_of(segments)[0] for segments, _ in recorded]
        for rollout_id, ref in enumerate(refs):
            assert store.release([ref], rollout_id=rollout_id) == 0
        assert list(store.unreleased()) == []  # nothing is left to train on …
        assert list(store.unreleased(held=True)) == refs
        assert_batch(store.hydrate(refs), [w for _, want in recorded for w in want])  # … yet
        assert store.checkpoint_saved(0) == 3
        two.restart_controller()
        assert list(store.unreleased("train", held=True)) == refs[1:]
        assert_batch(store.hydrate(refs[1:]), [w for _, want in recorded[1:] for w in want])
        assert store.checkpoint_saved(2) == 6
        assert store.checkpoint_saved(2) == 0
        with pytest.raises(SegmentMissing):
            store.hydrate(refs[:1])
        assert_batch(store.hydrate(refs[3:]), recorded[3][1])
        assert store.release(refs[3:]) == 3  # without waiting after all


def test_a_held_release_of_one_consumer_waits_for_the_other(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        segments, want = record(store, "s", consumers=("train", "eval"))
        assert store.release(segments, "train", rollout_id=5) == 0
        assert list(store.unreleased("train")) == []
        assert list(store.unreleased("eval")) == refs_of(segments)
        assert store.checkpoint_saved(7) == 0
        assert_batch(store.hydrate(segments), want)
        assert store.release(segments, "eval", rollout_id=8) == 0
    with open_store(tmp_path, FIELDS) as store:
        assert list(store.unreleased()) == []
        assert list(store.unreleased("train", held=True)) == []  # 7 is past 5
        assert list(store.unreleased("eval", held=True)) == refs_of(segments)
        assert_batch(store.hydrate(segments), want)
        assert store.checkpoint_saved(7) == 0
        assert store.checkpoint_saved(8) == 3


def test_what_is_too_old_goes_unless_a_live_consumer_awaits_it(tmp_path: Path) -> None:
    now = time.time_ns()
    with cluster(tmp_path, 2, cluster={"retention_s": 3600.0, "lease_s": 0.3}) as made:
        made.restart_controller(now_ns=lambda: now)
        with made.store(SPECS) as store:
            train, _ = record(store, "train")
            evaluation, want = record(store, "eval", consumers=("eval",))
            with made.store(SPECS, consumers=["eval"]):
                wait_for(lambda: made.controller.leases.is_live("eval"))
                wait_for(made.controller.leases.is_heard)
                made.controller.sweep()
                assert {*store.unreleased()} == {*refs_of(train), *refs_of(evaluation)}
                now += 3601 * 10**9
                made.controller.sweep()
                assert list(store.unreleased()) == refs_of(evaluation)
                assert_batch(store.hydrate(evaluation), want)
            made.controller.sweep()
            assert list(store.unreleased()) == []


# ---------------------------------------------------------------- what operators see


def test_units_and_the_controller_serve_prometheus_and_clients_count_by_unit(
    tmp_path: Path,
) -> None:
    pytest.importorskip("prometheus_client")
    metrics = Metrics("run", role="trainer")
    with (
        cluster(tmp_path, 2, cluster={"metrics_port": 0}) as made,
        made.store(SPECS, metrics=metrics) as store,
    ):
        refs, _ = on(made, "n1", store)
        store.hydrate(refs)
        status = made.controller.status()
        names = {u["node_name"]: u["name"] for u in status["units"]}
        pages = {u["node_name"]: _page(u["metrics_url"]) for u in status["units"]}
        for node, page in pages.items():
            labels = f'role="unit",store="run",unit="{names[node]}"'
            assert f"tqfs_unit_free_bytes{{{labels}}}" in page
        received = (
            f'tqfs_channel_received_bytes_total{{role="unit",store="run",unit="{names["n1"]}"}}'
        )
        (line,) = [x for x in pages["n1"].splitlines() if x.startswith(received)]
        assert float(line.split()[-1]) > 0
        page = _page(status["metrics_url"])
        assert 'tqfs_finalized_sessions{role="controller",store="run"} 1.0' in page
        assert 'tqfs_units{role="controller",state="live",store="run"} 2.0' in page
        read = {
            labels: value
            for family in metrics.collect()
            if family.spec.name == "tqfs_read_bytes_total"
            for labels, value in family.series.items()
        }
        assert [labels[-1] for labels in read] == [names["n1"]]


def _page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())
