"""The end of sessions and of Segments: finalize, discard, release, sweep."""

from __future__ import annotations

import json
import os
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests._rollouts import (
    FIELDS,
    VIEWS,
    Op,
    assert_batch,
    contents,
    empty_folders,
    open_store,
    record,
    refs_of,
    sealed,
    short_rollout,
    specs,
    tree,
    turning_rollout,
    visible_steps,
)
from tq_fs.backends import LocalBackend
from tq_fs.errors import (
    InvalidConfig,
    InvalidKey,
    SegmentMissing,
    StorageFailed,
    StorageFull,
    TqFsError,
    WrongStore,
)

# ---------------------------------------------------------------- release


@pytest.mark.parametrize("order", [range(6), [5, 4, 3, 2, 1, 0], [2, 0, 4, 1, 5, 3]])
def test_release_deletes_exactly_what_no_other_segment_needs(
    tmp_path: Path, order: list[int]
) -> None:
    rollout = turning_rollout()
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        rollout.record(session)
        segments = session.finalize(views=VIEWS)
        want = [e.slime(specs(FIELDS)) for view in VIEWS for e in rollout.expected(view)]
        assert [s.steps for s in segments] == [
            (0, 2, 4),
            (1, 3),
            (0,),
            (1,),
            (0, 2),
            (1, 3),
            (0, 2, 4),
        ]
        empty = 4  # holds no rows, so no Segment refers to it
        live = set(range(7))
        deleted = 0
        for i in [*order, 6]:
            deleted += store.release([segments[i]])
            live.discard(i)
            needed = {n for j in live for n in segments[j].steps} - {empty}
            on_disk = {int(p.rsplit("/", 1)[1]) for p in visible_steps(tmp_path)}
            assert on_disk == needed
            chosen = sorted(live)
            assert_batch(
                store.hydrate([segments[j] for j in chosen]), [want[j] for j in chosen], live
            ) if live else None
        assert deleted == 4
    assert tree(tmp_path) == {"default/store.json"}
    assert empty_folders(tmp_path) == set()


def test_every_consumer_has_to_release(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        segments, want = record(store, "a", 1, consumers=["train", "eval", "again"])
        assert store.release(segments, "train") == 0
        assert store.release(segments, "train") == 0  # idempotent
        assert store.release(segments, "again") == 0
        assert list(store.unreleased("train")) == []
        assert list(store.unreleased("eval")) == refs_of(segments)
        with pytest.raises(
            InvalidConfig, match=r"'tests' is not among \['again', 'eval', 'train'\]"
        ):
            store.release(segments, "tests")
        assert_batch(store.hydrate(segments), want)
    with open_store(tmp_path, FIELDS) as store:
        assert list(store.unreleased("train")) == []
        assert list(store.unreleased()) == refs_of(segments)
        assert_batch(store.hydrate(segments), want)
        assert store.release(segments, "eval") == 3
        for consumer in ("train", "eval", "anybody"):
            assert store.release(segments, consumer) == 0
        assert list(store.unreleased()) == []
    assert tree(tmp_path) == {"default/store.json"}


def test_what_a_replaced_controller_noted_late_counts_too(tmp_path: Path) -> None:
    """Each epoch has a note of its own, and none undoes another."""
    rollout = turning_rollout()
    for i in range(2):
        with open_store(tmp_path, FIELDS) as store:
            if i == 0:
                session = store.session("s")
                rollout.record(session)
                segments = session.finalize(views=VIEWS)
            assert store.release(segments[i : i + 1]) == 0
    notes = sorted(tmp_path.glob("default/manifests/*/*/*/state-*.json"))
    assert [note.name for note in notes] == ["state-00000001.json", "state-00000002.json"]
    said = [json.loads(note.read_bytes()) for note in notes]
    assert [s["epoch"] for s in said] == [1, 2]
    assert said[0]["released"] == {"train": ["lineage/0"]}
    said[0]["released"]["train"].append("timeline/0")  # the second knows nothing of it
    notes[0].write_bytes(sealed(said[0]))
    for read_only in (True, False):
        with open_store(tmp_path, FIELDS, read_only=read_only) as store:
            assert list(store.unreleased()) == refs_of(segments)[3:]
            assert store.recovery.unreleased == 4
    with open_store(tmp_path, FIELDS) as store:
        assert store.release(segments[3:]) == 4
    assert tree(tmp_path) == {"default/store.json"}


def test_unreleased_are_told_by_consumer_and_partition(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        a, _ = record(store, "a", 1, consumers=["train", "eval"])
        b, _ = record(store, "b", 2, partition="eval")
        assert set(store.unreleased()) == set(refs_of(a + b))
        assert list(store.unreleased(partition="eval")) == refs_of(b)
        assert list(store.unreleased("eval", partition="train")) == refs_of(a)
        assert list(store.unreleased("eval", partition="eval")) == []
        store.release(a, "train")
        assert list(store.unreleased("train")) == refs_of(b)
        assert set(store.unreleased()) == set(refs_of(a + b))


def test_consumers_are_named_once_each(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        rollout = short_rollout(FIELDS, 1)
        rollout.record(session)
        for consumers in ([], ["train", "train"]):
            with pytest.raises(InvalidConfig):
                session.finalize(consumers=consumers)
        session.finalize(consumers=["train"])


def test_many_threads_release_everything_once(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        rollouts = [turning_rollout() for _ in range(12)]
        segments = []
        for i, rollout in enumerate(rollouts):
            session = store.session(f"s{i}")
            rollout.record(session)
            segments += session.finalize(views=VIEWS, consumers=["a", "b"])
        errors: list[BaseException] = []

        def work(consumer: str, seed: int) -> None:
            order = np.random.default_rng(seed).permutation(len(segments))
            try:
                for i in order:
                    store.release([segments[i]], consumer)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(c, s)) for c in "ab" for s in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert errors == []
        assert list(store.unreleased()) == []
    assert tree(tmp_path) == {"default/store.json"}


def test_a_release_that_is_repeated_while_the_first_deletes_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others come while the first has the manifest, and then the Steps, in the trash.

    Whoever could write a note down at that moment would do so late: when there is nothing left.
    """
    late = threading.Event()
    started = threading.Event()
    others: list[threading.Thread] = []
    ended: list[bool] = []
    deletes: list[str] = []
    errors: list[BaseException] = []

    def again(count: int) -> None:
        try:
            assert store.release(segments[:count]) == 0
        except BaseException as error:
            errors.append(error)

    def at(point: str) -> None:
        if not armed:
            return
        mine = threading.current_thread() not in others
        if point == "value written" and not mine:
            started.set()
            late.wait(5)
        if point == "delete renamed" and mine:
            deletes.append(point)
            if len(deletes) == 1:
                others.extend(threading.Thread(target=again, args=[n]) for n in (1, len(segments)))
                for thread in others:
                    thread.start()
                started.wait(0.3)
            else:
                late.set()
                for thread in others:
                    thread.join(20)
                ended.append(not any(thread.is_alive() for thread in others))

    armed = False
    monkeypatch.setattr("tq_fs.places.LocalBackend", partial(LocalBackend, at=at))
    store = open_store(tmp_path, FIELDS)
    with store:
        session = store.session("s")
        turning_rollout().record(session)
        segments = session.finalize(views=VIEWS)
        armed = True
        assert store.release(segments) == 4
        armed = False
        assert errors == []
        assert ended == [True]
    assert tree(tmp_path) == {"default/store.json"}


class Stuck(LocalBackend):
    """A backend whose deletes below a prefix fail some times."""

    prefix, times = "", 0

    def delete(self, prefix: str) -> bool:
        if Stuck.times and prefix.startswith(Stuck.prefix):
            Stuck.times -= 1
            raise StorageFailed("the device said no", subject=prefix)
        return super().delete(prefix)


@pytest.mark.parametrize("then", ["a release", "a start"])
def test_steps_that_cannot_be_deleted_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, then: str
) -> None:
    monkeypatch.setattr("tq_fs.places.LocalBackend", Stuck)
    monkeypatch.setattr(Stuck, "prefix", "steps/")
    with open_store(tmp_path, FIELDS) as store:
        first, _ = record(store, "a", 1)
        second, want = record(store, "b", 2)
        monkeypatch.setattr(Stuck, "times", 1)
        store.release(first)
        assert Stuck.times == 0
        assert caplog.text.count("could not be deleted yet") == 1
        assert list(store.unreleased()) == refs_of(second)
        assert len(visible_steps(tmp_path)) == 3 + 3
        with pytest.raises(SegmentMissing):
            store.hydrate(first)
        if then == "a release":
            assert store.release(first) == 0
            assert len(visible_steps(tmp_path)) == 3
    with open_store(tmp_path, FIELDS) as store:
        assert store.recovery.swept_steps == (3 if then == "a start" else 0)
        assert_batch(store.hydrate(second), want)
        store.release(second)
    assert tree(tmp_path) == {"default/store.json"}


def test_an_orphan_that_cannot_be_deleted_does_not_stop_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_fs.places.LocalBackend", Stuck)
    monkeypatch.setattr(Stuck, "prefix", "steps/")
    with open_store(tmp_path, FIELDS) as store:
        segments, want = record(store, "a", 1)
        short_rollout(FIELDS, 2).record(store.session("left open"))
    monkeypatch.setattr(Stuck, "times", 1)
    with open_store(tmp_path, FIELDS) as store:
        assert Stuck.times == 0
        assert_batch(store.hydrate(segments), want)
    with open_store(tmp_path, FIELDS) as store:
        assert store.recovery.swept_sessions == 1
        store.release(segments)
    assert tree(tmp_path) == {"default/store.json"}


def test_a_release_whose_manifest_cannot_be_dropped_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_fs.places.LocalBackend", Stuck)
    monkeypatch.setattr(Stuck, "prefix", "manifests/")
    with open_store(tmp_path, FIELDS) as store:
        segments, want = record(store, "a", 1)
        before = contents(tmp_path)
        monkeypatch.setattr(Stuck, "times", 1)
        with pytest.raises(StorageFailed):
            store.release(segments)
        assert contents(tmp_path) == before
        assert list(store.unreleased()) == refs_of(segments)
        assert_batch(store.hydrate(segments), want)
        assert store.release(segments) == 3
    assert tree(tmp_path) == {"default/store.json"}


@pytest.mark.parametrize("backwards", [False, True])
def test_a_release_is_checked_as_a_whole_before_anything_is_done(
    tmp_path: Path, backwards: bool
) -> None:
    with open_store(tmp_path, FIELDS) as store:
        a, _ = record(store, "a", 1, consumers=["eval"])
        b, _ = record(store, "b", 2, consumers=["train"])
        before = contents(tmp_path)
        unknown = refs_of(b)[0].rsplit("/", 1)[0] + "/7"
        for refs, consumer, error in [
            (refs_of([*a, *b]), "eval", InvalidConfig),
            (refs_of([*b, *a]), "train", InvalidConfig),
            ([*refs_of(a), unknown], "eval", SegmentMissing),
            ([*refs_of(a), "tqfs1:other/train/b/0/lineage/0"], "eval", WrongStore),
            ([*refs_of(a), "nonsense"], "eval", InvalidKey),
        ]:
            with pytest.raises(error):
                store.release(refs[::-1] if backwards else refs, consumer)
            assert contents(tmp_path) == before
            assert list(store.unreleased()) == refs_of([*a, *b])
        assert store.release(a, "eval") + store.release(b) == 6


def test_one_reference_is_released_as_it_is(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        segments, _ = record(store, "a", 1)
        assert store.release(refs_of(segments)[0]) == 3
        assert list(store.unreleased()) == []


def test_references_that_are_no_longer_there_count_as_released(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        segments, _ = record(store, "a", 1)
        store.release(segments)
        assert store.release([*segments, *refs_of(segments)]) == 0
        assert store.release([segments[0].sample()]) == 0
        assert store.release([]) == 0


# ---------------------------------------------------------------- end of a session


def test_discard_deletes_what_was_written(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        kept, want = record(store, "a", 1)
        before = tree(tmp_path)
        session = store.session("b")
        short_rollout(FIELDS, 2).record(session)
        assert tree(tmp_path) != before
        session.discard()
        assert tree(tmp_path) == before
        assert empty_folders(tmp_path) == set()
        assert_batch(store.hydrate(kept), want)
        store.session("never used").discard()


def test_a_session_without_steps_has_no_segments(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        assert store.session("s").finalize() == []
        assert list(store.unreleased()) == []
    assert tree(tmp_path) == {"default/store.json"}


def test_steps_without_rows_of_their_own_are_deleted_at_finalize(tmp_path: Path) -> None:
    rollout = turning_rollout()
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        rollout.record(session)
        assert len(visible_steps(tmp_path)) == 5
        session.finalize(views=VIEWS)
        assert len(visible_steps(tmp_path)) == 4


@pytest.mark.parametrize("code", [28, 5])  # ENOSPC, EIO
@pytest.mark.parametrize("point", ["value written", "value renamed", "value acknowledged"])
@pytest.mark.parametrize(
    ("persist", "nth"), [(False, 1), (True, 1), (True, 2)], ids=["alone", "before", "behind"]
)
def test_a_finalize_that_fails_leaves_the_session_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, code: int, persist: bool, nth: int
) -> None:
    """With the manifest alone, or with the trajectory that is written before it."""
    armed = 0

    def at(passed: str) -> None:
        nonlocal armed
        if armed and passed == point:
            armed -= 1
            if not armed:
                raise OSError(code, os.strerror(code))

    monkeypatch.setattr("tq_fs.places.LocalBackend", partial(LocalBackend, at=at))
    rollout = turning_rollout()
    with open_store(tmp_path, FIELDS, persist_trajectories=persist) as store:
        session = store.session("s")
        for turn in rollout.turns:
            session.record(rollout.step(turn))
        steps = visible_steps(tmp_path)
        armed = nth
        with pytest.raises(StorageFull if code == 28 else StorageFailed):
            session.finalize(views=VIEWS)
        assert not armed
        assert list(store.unreleased()) == []
        assert not list(tmp_path.glob("default/manifests/*/*/*/*"))
        assert visible_steps(tmp_path) == steps
        rollout.play([Op("create", 0, 1, 3)], np.random.default_rng(1))
        session.record(rollout.step(rollout.turns[-1]))
        segments = session.finalize(views=VIEWS)
        want = [e.slime(specs(FIELDS)) for view in VIEWS for e in rollout.expected(view)]
        assert_batch(store.hydrate(segments), want)
        store.release(segments)
    assert tree(tmp_path) == {"default/store.json"}


def test_a_step_that_cannot_be_deleted_does_not_leave_a_session_half_finalized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finalized, with the Step left to the next sweep, or open again: but one of the two."""
    armed = False

    def at(passed: str) -> None:
        nonlocal armed
        if armed and passed == "delete renamed":
            armed = False
            raise OSError(5, os.strerror(5))

    monkeypatch.setattr("tq_fs.places.LocalBackend", partial(LocalBackend, at=at))
    rollout = turning_rollout()
    want = [e.slime(specs(FIELDS)) for view in VIEWS for e in rollout.expected(view)]
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        rollout.record(session)
        armed = True
        try:
            segments = session.finalize(views=VIEWS)
        except TqFsError:
            assert list(store.unreleased()) == []
            segments = session.finalize(views=VIEWS)
        assert not armed
        assert list(store.unreleased()) == refs_of(segments)
        assert_batch(store.hydrate(segments), want)
    with open_store(tmp_path, FIELDS) as store:
        assert_batch(store.hydrate(segments), want)
        store.release(segments)
    assert tree(tmp_path) == {"default/store.json"}


def test_sessions_left_open_are_swept_when_the_store_is_opened_again(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        kept, want = record(store, "kept", 1)
        before = tree(tmp_path)
        for i in range(3):
            rollout = short_rollout(FIELDS, i, turns=2)
            rollout.record(store.session("left", partition=f"p{i}"))
        record(store, "gone", 5)
        store.release(list(store.unreleased()))
        kept, want = record(store, "kept", 1)
        assert len(visible_steps(tmp_path)) == 3 + 6
        before = tree(tmp_path)
    with open_store(tmp_path, FIELDS) as store:
        assert (store.recovery.swept_sessions, store.recovery.swept_steps) == (3, 6)
        assert tree(tmp_path) == {p for p in before if "/p" not in p}
        assert empty_folders(tmp_path) == set()
        assert_batch(store.hydrate(kept), want)
    with open_store(tmp_path, FIELDS) as store:
        assert (store.recovery.swept_sessions, store.recovery.swept_steps) == (0, 0)
