"""A store on units in front of an object store, or on none: what a lost node cannot take."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import tq_fs
from tests._clusters import Cluster, cluster, readers_of, units_of
from tests._rollouts import (
    assert_batch,
    assert_segment,
    record,
    refs_of,
    short_rollout,
    specs,
    standard_fields,
    tree,
)
from tq_fs import StoreConfig, TierConfig
from tq_fs.backends import TieredBackend
from tq_fs.errors import SegmentMissing, StoreFenced, UnitLost
from tq_fs.keys import SegmentRef

pytestmark = pytest.mark.s3
FIELDS = standard_fields()
SPECS = specs(FIELDS)
FAST: dict[str, Any] = {"writer_threads": 2, "reader_threads": 2}


@pytest.fixture
def url(bucket: str) -> str:
    return f"s3://{bucket}/runs"


def tiered(folder: Path, url: str, **settings: Any) -> Any:
    tier = TierConfig(folder="/unused", cache_bytes=0, **settings.pop("tier", {}))
    return cluster(folder, 2, url=url, tier=tier, **FAST, **settings)


def objects(store: tq_fs.Store) -> set[str]:
    backend = units_of(store).objects
    assert backend is not None
    return {key for key, _ in backend.walk("steps")}


def steps_on(node: Path) -> set[str]:
    return {path for path in tree(node) if "/steps/" in f"/{path}"}


def node_of(made: Cluster, ref: str) -> str:
    home = SegmentRef.parse(ref).incarnation.home
    return next(n for n in ("n0", "n1") if made.unit(n).name == home)


def test_steps_lie_on_their_unit_and_in_the_object_store_and_read_alike(
    tmp_path: Path, url: str
) -> None:
    with (
        tiered(tmp_path, url) as made,
        made.store(SPECS) as store,
        made.store(SPECS, "n1") as near,
    ):
        recorded = [record(store, f"s{i}", i) for i in range(6)]
        refs = [ref for segments, _ in recorded for ref in refs_of(segments)]
        wants = [w for _, want in recorded for w in want]
        assert {node_of(made, ref) for ref in refs} == {"n0", "n1"}
        for reader in (store, near):
            assert_batch(reader.hydrate(refs), wants)
        assert steps_on(tmp_path / "n0")
        assert steps_on(tmp_path / "n1")
        assert len({key.rpartition("/")[0] for key in objects(store)}) >= 18
        assert set(readers_of(near).files) == {made.unit("n1").name}
        assert store.release(refs) == 18
        assert not objects(store)
        assert not (steps_on(tmp_path / "n0") | steps_on(tmp_path / "n1"))


def test_what_a_lost_unit_held_is_read_from_the_object_store(tmp_path: Path, url: str) -> None:
    with tiered(tmp_path, url) as made, made.store(SPECS) as store, made.store(SPECS) as late:
        recorded = [record(store, f"s{i}", i) for i in range(6)]
        refs = [ref for segments, _ in recorded for ref in refs_of(segments)]
        wants = [w for _, want in recorded for w in want]
        session = store.session("open")
        rollout = short_rollout(FIELDS, 9)
        home = session._trajectory.incarnation.home
        node = next(n for n in ("n0", "n1") if made.unit(n).name == home)
        rollout.record(session)
        _wait_for_uploads(made.unit(node).place.steps)
        made.down(node, lost=True)
        for reader in (store, late):
            assert_batch(reader.hydrate(refs), wants)
        segments = session.finalize()  # its Steps are in the object store
        expected = rollout.expected("lineage")
        for segment, one in zip(segments, expected, strict=True):
            assert_segment(segment, one)
        assert_batch(late.hydrate(segments), [e.slime(SPECS) for e in expected])
        more, want = record(store, "more", 3)
        assert_batch(late.hydrate(more), want)
        made.restart_controller()
        assert_batch(store.hydrate(refs), wants)
        assert store.release([*refs, *refs_of(segments), *refs_of(more)]) == 24
        assert not objects(store)


def _wait_for_uploads(backend: Any) -> None:
    assert isinstance(backend, TieredBackend)
    backend.settle("steps")


def test_steps_that_were_lost_before_they_were_uploaded_are_named(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiered(tmp_path, url) as made, made.store(SPECS) as store:
        session = store.session("s")
        home = session._trajectory.incarnation.home
        node = next(n for n in ("n0", "n1") if made.unit(n).name == home)
        steps = made.unit(node).place.steps
        assert isinstance(steps, TieredBackend)
        monkeypatch.setattr(steps.back, "upload", _never)
        short_rollout(FIELDS, 0).record(session)
        if objects(store):
            pytest.fail("it was uploaded after all: the test has lost its way")
        made.unit(node).server.close()
        made.fleet.units[node] = "lost"
        made.controller.look()
        with pytest.raises(UnitLost, match="before it was uploaded"):
            session.finalize()
        monkeypatch.undo()
        steps.settle("steps")  # what is left is uploaded before the unit ends


def _never(*args: Any, **kwargs: Any) -> Any:
    raise tq_fs.errors.StorageUnreachable("no way to the object store", subject="a test")


def test_without_units_steps_go_to_the_object_store(tmp_path: Path, url: str) -> None:
    with (
        cluster(tmp_path, 0, url=url, cluster={"paths": ()}, **FAST) as made,
        made.store(SPECS) as store,
    ):
        segments, want = record(store, "s")
        assert SegmentRef.parse(refs_of(segments)[0]).incarnation.home == ""
        assert_batch(store.hydrate(segments), want)
        made.restart_controller()
        assert list(store.unreleased()) == refs_of(segments)
        assert_batch(store.hydrate(segments), want)
        assert store.release(segments) == 3
        assert not objects(store)


def test_a_run_that_lost_every_node_is_trained_from_the_bucket_by_one_process(
    tmp_path: Path, url: str
) -> None:
    with tiered(tmp_path, url) as made, made.store(SPECS) as store:
        recorded = [record(store, f"s{i}", i) for i in range(4)]
    config = StoreConfig(store_id="run", **FAST)
    with tq_fs.open_store(url, fields=SPECS, config=config) as alone:
        refs = list(alone.unreleased())
        assert refs == [ref for segments, _ in recorded for ref in refs_of(segments)]
        found = list(alone.segments(refs))
        assert [s.ref for s in found] == refs
        assert_batch(alone.hydrate(found), [w for _, want in recorded for w in want])
        assert alone.recovery.incomplete == ()
        assert alone.recovery.swept_steps == 0
        assert alone.release(refs) == 12


def test_a_later_controller_or_process_fences_the_cluster(tmp_path: Path, url: str) -> None:
    with tiered(tmp_path, url) as made, made.store(SPECS) as store:
        segments, want = record(store, "s")
        config = StoreConfig(store_id="run", **FAST)
        tq_fs.open_store(url, fields=SPECS, config=config).close()
        with pytest.raises(StoreFenced):
            store.release(segments)
        with pytest.raises(StoreFenced):
            record(store, "t")
        made.restart_controller()
        assert_batch(store.hydrate(segments), want)
        store.release(segments)
        with pytest.raises(SegmentMissing):
            store.hydrate(segments)


def test_orphans_are_swept_from_both(tmp_path: Path, url: str) -> None:
    settings = {"lease_s": 0.2, "grace_s": 0.1}
    with tiered(tmp_path, url, cluster=settings) as made, made.store(SPECS) as store:
        dead = made.store(SPECS)
        short_rollout(FIELDS, 0).record(dead.session("dead"))
        for node in ("n0", "n1"):
            _wait_for_uploads(made.unit(node).place.steps)
        dead.close()
        assert objects(store)
        time.sleep(0.5)
        assert made.controller.sweep().swept_sessions == 1
        assert not objects(store)
        assert not (steps_on(tmp_path / "n0") | steps_on(tmp_path / "n1"))
