"""What operators see of a store, and what is found when it is damaged by hand."""

from __future__ import annotations

import fcntl
import functools
import json
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tq_fs
from tests._rollouts import (
    FIELDS,
    Field,
    assert_batch,
    contents,
    open_store,
    record,
    refs_of,
    routes,
    sealed,
    short_rollout,
    small_chunks,
    specs,
    turning_rollout,
)
from tq_fs.backends import Backend, LocalBackend
from tq_fs.config import StoreConfig
from tq_fs.errors import (
    SessionMissing,
    StorageDenied,
    StorageFailed,
    StoreBusy,
    StoreFenced,
    TqFsError,
)
from tq_fs.operate import (
    OLDER,
    Finding,
    OpenedStore,
    Repaired,
    Verified,
    check_quiet,
    collect_waste,
    list_sessions,
    measure_space,
    opened_store,
    repair_store,
    show_session,
    verify_store,
)
from tq_fs.served import ServedStore

# ---------------------------------------------------------------- stores that are damaged by hand


@dataclass
class Cold:
    """A store that nobody has open, and a backend to damage it with."""

    url: str
    config: StoreConfig

    @contextmanager
    def raw(self) -> Iterator[Backend]:
        with opened_store(self.url, self.config, write=True) as store:
            yield store.places.steps

    def keys(self, words: str) -> list[str]:
        with self.raw() as backend:
            return sorted(key for key, _ in backend.walk("") if words in key)

    def change(self, key: str, how: Callable[[bytes], bytes]) -> None:
        with self.raw() as backend:
            backend.put(key, how(backend.get(key)))

    def delete(self, key: str) -> None:
        with self.raw() as backend:
            backend.delete(key)

    @contextmanager
    def opened(self, grace_s: float = 0) -> Iterator[OpenedStore]:
        with opened_store(self.url, self.config, grace_s=grace_s) as store:
            yield store

    def findings(self) -> list[Finding]:
        with self.opened() as store:
            return verify_store(store).findings

    def open(self, **more: Any) -> tq_fs.Store:
        return tq_fs.open_store(self.url, fields=specs(FIELDS), config=self.config, **more)


def fill(cold: Cold) -> list[str]:
    """Write two finalized sessions; return the references of the first."""
    with cold.open() as store:
        refs = refs_of(record(store, "a", 1)[0])
        record(store, "b", 2)
    return refs


@pytest.fixture(params=["local", "served", pytest.param("s3", marks=pytest.mark.s3)])
def cold(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cold]:
    """Give a store of two finalized sessions with several chunks in each object."""
    config = StoreConfig.of({"persist_trajectories": True, "prepared_groups": 0, "layer_groups": 2})
    with small_chunks(), ExitStack() as opened:
        url = tmp_path.as_uri()
        if request.param == "s3":
            url = f"s3://{request.getfixturevalue('bucket')}/runs"
        elif request.param == "served":
            served = ServedStore(url, local=[f"unix:{tmp_path}/socket"])
            url = opened.enter_context(served).urls[0]
        made = Cold(url, config)
        fill(made)
        yield made


def flipped(data: bytes, at: int = 0) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 0x10
    return bytes(changed)


def first(cold: Cold, *words: str) -> str:
    return next(k for k in cold.keys(words[0]) if all(w in k for w in words))


def flip_bit(cold: Cold) -> None:
    cold.change(first(cold, "/a/", "routed_experts/c."), lambda data: flipped(data, len(data) // 3))


def flip_bit_of_the_index(cold: Cold) -> None:
    key = next(k for k in cold.keys("routed_experts/c.") if "/000000/" in k and "/a/" in k)
    cold.change(key, lambda data: flipped(data, len(data) - 10))


def flip_bit_of_the_metadata(cold: Cold) -> None:
    cold.change(first(cold, "steps/", "/a/", "zarr.json"), lambda data: flipped(data, 1))


def lie_in_the_metadata(cold: Cold) -> None:
    key = next(k for k in cold.keys("zarr.json") if "/a/" in k and b"tq_fs" in _get(cold, k))
    cold.change(key, lambda data: data.replace(b'"tokens":', b'"tokens":1'))


def _get(cold: Cold, key: str) -> bytes:
    with cold.raw() as backend:
        return backend.get(key)


def truncate(cold: Cold) -> None:
    cold.change(first(cold, "/a/", "logprobs/c.0"), lambda data: data[:-3])


def lengthen(cold: Cold) -> None:
    cold.change(first(cold, "/a/", "logprobs/c.0"), lambda data: data + b"abc")


def lose_an_object(cold: Cold) -> None:
    cold.delete(first(cold, "/a/", "logprobs/c.0"))


def lose_a_step(cold: Cold) -> None:
    cold.delete(first(cold, "/a/", "/000001/").partition("/000001/")[0] + "/000001")


def lose_all_steps(cold: Cold) -> None:
    cold.delete(first(cold, "steps/train/a/").partition("/0000")[0])


def lose_the_manifest(cold: Cold) -> None:
    cold.delete(first(cold, "manifests/train/a/", "manifest.json").rpartition("/")[0])


def lose_only_the_manifest(cold: Cold) -> None:
    cold.delete(first(cold, "manifests/train/a/", "manifest.json"))


def flip_bit_of_the_manifest(cold: Cold) -> None:
    cold.change(first(cold, "train/a/", "manifest.json"), lambda data: flipped(data, 200))


def make_the_manifest_newer(cold: Cold) -> None:
    def newer(data: bytes) -> bytes:
        return sealed({**json.loads(data), "schema": "tq-fs/manifest/99"})

    cold.change(first(cold, "train/a/", "manifest.json"), newer)


def flip_bit_of_the_trajectory(cold: Cold) -> None:
    cold.change(first(cold, "train/a/", "trajectory"), lambda data: flipped(data, 100))


def add_a_step(cold: Cold) -> None:
    source = first(cold, "steps/train/a/", "/000000/").partition("/000000/")[0]
    with cold.raw() as backend:
        for key, _ in list(backend.walk(f"{source}/000000")):
            backend.put(key.replace("/000000/", "/000009/"), backend.get(key))


DAMAGES: dict[Callable[[Cold], None], set[str]] = {
    flip_bit: {"corrupt"},
    flip_bit_of_the_index: {"corrupt"},
    flip_bit_of_the_metadata: {"corrupt"},
    lie_in_the_metadata: {"mismatch"},
    truncate: {"truncated"},
    lengthen: {"truncated"},
    lose_an_object: {"missing"},
    lose_a_step: {"missing"},
    lose_all_steps: {"no-data"},
    lose_the_manifest: {"orphan"},
    lose_only_the_manifest: {"orphan", "unfinished"},
    flip_bit_of_the_manifest: {"unreadable"},
    make_the_manifest_newer: {"too-new"},
    flip_bit_of_the_trajectory: {"trajectory"},
    add_a_step: {"leftover"},
}


def named(damage: Callable[[Cold], None]) -> str:
    return damage.__name__


# ---------------------------------------------------------------- verify


def test_a_whole_store_verifies_and_all_of_it_was_read(cold: Cold) -> None:
    done: list[tuple[int, int]] = []
    with cold.opened() as store:
        found = verify_store(store, progress=lambda s, n: done.append((s, n)))
    assert found.findings == []
    assert (found.sessions, found.segments, found.steps) == (2, 2, 6)
    assert found.chunks > 12
    stored = sum(size for key, size in sizes(cold).items() if "/c." in key)
    assert found.nbytes == stored == sum(n for _, n in done)
    assert sum(s for s, _ in done) == 2


def sizes(cold: Cold) -> dict[str, int]:
    with cold.raw() as backend:
        return dict(backend.walk("steps"))


@pytest.mark.parametrize("damage", DAMAGES, ids=named)
def test_verify_finds_each_damage_alone(cold: Cold, damage: Callable[[Cold], None]) -> None:
    damage(cold)
    findings = cold.findings()
    assert {f.kind for f in findings} == DAMAGES[damage], findings
    assert all("train/a/" in f.path and f.path in f.place for f in findings)
    assert all(f.detail for f in findings)


def test_verify_changes_nothing(tmp_path: Path) -> None:
    cold = Cold(tmp_path.as_uri(), StoreConfig())
    fill(cold)
    for damage in (flip_bit, lose_a_step):
        damage(cold)
    before = contents(tmp_path)
    cold.findings()
    assert contents(tmp_path) == before


def test_every_flipped_byte_of_a_step_is_found(tmp_path: Path) -> None:
    cold = Cold(tmp_path.as_uri(), StoreConfig.of({"layer_groups": 2, "prepared_groups": 0}))
    with small_chunks():
        fill(cold)
        (folder,) = tmp_path.glob("default/steps/train/a/*/000000")
        for path in sorted(folder.glob("*/c.*")):
            whole = path.read_bytes()
            for at in range(len(whole)):
                path.write_bytes(flipped(whole, at))
                assert [f.kind for f in cold.findings()] == ["corrupt"], (path, at)
            path.write_bytes(whole)
    assert cold.findings() == []


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("checksum", [True, False])
def test_chunks_of_every_codec_are_verified(tmp_path: Path, codec: str, checksum: bool) -> None:
    fields = [tq_fs.routed_experts(layers=4, topk=2, experts=256, stored="uint16", codec=codec)]
    config = StoreConfig.of({"checksum": checksum})
    url = tmp_path.as_uri()
    with tq_fs.open_store(url, fields=fields, config=config) as store:
        rollout = short_rollout([FIELDS[1]], 3)
        session = store.session("a")
        rollout.record(session)
        session.finalize()
    with opened_store(url, config) as store_:
        found = verify_store(store_)
    assert found.findings == []
    assert bool(found.unchecked_nbytes) == (codec == "none" and not checksum)


def test_unknown_routes_beside_the_array_are_verified(tmp_path: Path) -> None:
    holes = Field(
        tq_fs.routed_experts(layers=4, topk=2, experts=256),
        lambda random, rows: routes(random, rows, 4, 2, 256, "values"),
    )
    with open_store(tmp_path, [holes]) as store:
        session = store.session("a")
        short_rollout([holes], 4).record(session)
        session.finalize()
    cold = Cold(tmp_path.as_uri(), StoreConfig())
    assert cold.findings() == []
    key = first(cold, "routed_experts_unknown/c.")
    cold.change(key, lambda data: flipped(data, len(data) - 1))
    assert [f.place for f in cold.findings()] == [key]


# ---------------------------------------------------------------- beside a writer


def test_beside_a_writer_sessions_that_are_recorded_are_no_findings(tmp_path: Path) -> None:
    cold = Cold(tmp_path.as_uri(), StoreConfig())
    fill(cold)
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("open")
        short_rollout(FIELDS, 3).record(session)
        with cold.opened() as looked:
            found = verify_store(looked)
            assert (found.findings, found.open_sessions) == ([], 1)
            assert [s.state for s in list_sessions(looked)] == ["finalized", "finalized", "open"]
        session.finalize()
    assert cold.findings() == []


def test_a_writer_that_comes_while_somebody_looks_has_no_orphans(tmp_path: Path) -> None:
    cold = Cold(tmp_path.as_uri(), StoreConfig())
    fill(cold)
    with cold.opened() as looked, cold.open() as store:
        short_rollout(FIELDS, 3).record(store.session("live"))
        found = verify_store(looked)
        assert (found.findings, found.open_sessions) == ([], 1)


def test_looking_takes_no_lock_from_a_writer(tmp_path: Path) -> None:
    cold = Cold(tmp_path.as_uri(), StoreConfig())
    fill(cold)
    with cold.opened() as looked, open_store(tmp_path, FIELDS) as store:
        record(store, "c", 3)
        assert len(list(list_sessions(looked))) == 3


def test_a_writer_that_starts_just_when_somebody_looks_gets_the_store(tmp_path: Path) -> None:
    cold = Cold(tmp_path.as_uri(), StoreConfig())
    fill(cold)
    with (tmp_path / "default" / ".lock").open() as asking, ThreadPoolExecutor(1) as pool:
        fcntl.flock(asking, fcntl.LOCK_SH)
        begun = pool.submit(lambda: cold.open().close())
        time.sleep(0.02)
        fcntl.flock(asking, fcntl.LOCK_UN)
        begun.result(timeout=20)


def test_a_session_released_while_it_is_verified_is_no_finding(tmp_path: Path) -> None:
    cold = Cold(tmp_path.as_uri(), StoreConfig())
    with open_store(tmp_path, FIELDS) as store:
        refs = refs_of(record(store, "a", 1)[0])
        released = False

        def release(sessions: int, nbytes: int) -> None:
            nonlocal released
            if not released:
                store.release(refs, "train")
                released = True

        with cold.opened() as looked:
            assert verify_store(looked, progress=release).findings == []
        assert released


@pytest.mark.s3
def test_in_a_bucket_the_time_of_grace_tells_open_sessions_from_orphans(bucket: str) -> None:
    cold = Cold(f"s3://{bucket}/runs", StoreConfig())
    with cold.open() as store:
        short_rollout(FIELDS, 3).record(store.session("open"))
    with cold.opened(grace_s=60) as looked:
        found = verify_store(looked)
        assert (found.findings, found.open_sessions) == ([], 1)
        assert [s.state for s in list_sessions(looked)] == ["open"]
    assert [f.kind for f in cold.findings()] == ["orphan"]


@pytest.mark.s3
@pytest.mark.parametrize("driver", ["obstore", "s3fs"])
def test_in_a_bucket_a_long_session_that_goes_on_is_no_orphan(bucket: str, driver: str) -> None:
    """It began before the time of grace, and has just written a Step."""
    cold = Cold(f"s3://{bucket}/runs", StoreConfig(driver=driver))
    with cold.open() as store:
        short_rollout(FIELDS, 3).record(store.session("long"))
    long_ago = f"{time.time_ns() - 10**15:016x}"
    with cold.raw() as backend:
        for key, _ in list(backend.walk("steps")):
            parts = key.split("/")
            parts[3] = long_ago + parts[3][16:]
            backend.put("/".join(parts), backend.get(key))
            backend.delete(key)
    with cold.opened(grace_s=60) as looked:
        found = verify_store(looked)
        assert (found.findings, found.open_sessions) == ([], 1)
        with pytest.raises(StoreBusy, match="--grace-s 0"):
            check_quiet(looked)
    assert [f.kind for f in cold.findings()] == ["orphan"]


@pytest.mark.parametrize("error", [StorageFailed, StorageDenied])
@pytest.mark.parametrize("name", ["logprobs/c.0", "/000001/zarr.json"])
def test_what_the_disk_does_not_give_back_is_found_and_holds_up_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type[TqFsError]
) -> None:
    cold = Cold(tmp_path.as_uri(), StoreConfig())
    fill(cold)
    bad = next(k for k in cold.keys(name) if "/a/" in k and "/000001/" in k)
    worse = next(k for k in cold.keys("logprobs/c.0") if "/b/" in k)
    cold.change(worse, flipped)

    def failing(method: str) -> Callable[..., Any]:
        act = getattr(LocalBackend, method)

        def fail(self: LocalBackend, key: str) -> Any:
            if key == bad:
                raise error("Input/output error (errno 5)", subject=key)
            return act(self, key)

        return fail

    for method in ("open", "get"):
        monkeypatch.setattr(LocalBackend, method, failing(method))
    assert {(f.kind, f.place) for f in cold.findings()} == {("failed", bad), ("corrupt", worse)}
    done = repair(cold)
    assert {a.kind for a in done.actions} == {"leave", "set aside"}
    assert [f.kind for f in done.left] == [f.kind for f in cold.findings()] == ["failed"]
    monkeypatch.undo()
    assert cold.findings() == []


@pytest.mark.s3
def test_both_tiers_are_verified(bucket: str, tmp_path: Path) -> None:
    config = StoreConfig.of({"tier": {"folder": str(tmp_path), "policy": "write-through"}})
    cold = Cold(f"s3://{bucket}/runs", config)
    fill(cold)
    assert cold.findings() == []
    (path,) = tmp_path.glob("default/steps/train/a/*/000001/try-*/logprobs/c.0")
    path.write_bytes(flipped(path.read_bytes()))
    (finding,) = cold.findings()
    assert (finding.kind, finding.tier, finding.step) == ("corrupt", "front", 1)
    with cold.opened() as store:
        assert set(measure_space(store).by_tier) == {"front", "back"}


# ---------------------------------------------------------------- ls, stat


def test_sessions_are_listed_with_what_is_left_of_them(cold: Cold) -> None:
    with cold.open() as store:
        session = store.session("two views")
        short_rollout(FIELDS, 3).record(session)
        refs = refs_of(session.finalize(consumers=("actor", "critic")))
        store.release(refs, "actor")
        lost = store.session("lost", partition="eval")
        short_rollout(FIELDS, 4).record(lost)
    with cold.opened() as looked:
        found = {s.session: s for s in list_sessions(looked)}
        assert "lost" not in {s.session for s in list_sessions(looked, finalized_only=True)}
    assert set(found) == {"a", "b", "two views", "lost"}
    assert found["two views"].released == {"actor": 1, "critic": 0}
    assert (found["a"].state, found["a"].segments, found["a"].unreleased) == ("finalized", 1, 1)
    assert found["a"].steps == 3
    assert found["a"].nbytes == sum(n for k, n in sizes(cold).items() if "/a/" in k and "/c." in k)
    assert (found["lost"].state, found["lost"].partition) == ("orphan", "eval")
    assert found["lost"].steps == 3
    assert all(s.opened_ns > 0 for s in found.values())


def test_a_session_with_a_damaged_manifest_is_listed_with_the_reason(cold: Cold) -> None:
    flip_bit_of_the_manifest(cold)
    with cold.opened() as looked:
        found = {s.session: s for s in list_sessions(looked)}
    assert found["a"].state == "unreadable"
    assert "checksum" in found["a"].problem


def test_listing_holds_neither_sessions_nor_manifests(tmp_path: Path) -> None:
    cold = Cold(tmp_path.as_uri(), StoreConfig())
    fill(cold)
    (source,) = tmp_path.glob("default/manifests/train/a/*")
    document = json.loads((source / "manifest.json").read_text())
    for n in range(3000):
        folder = source.parents[1] / f"s{n:05d}" / source.name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_bytes(sealed({**document, "session_id": f"s{n:05d}"}))
    with cold.opened() as looked, pytest.MonkeyPatch.context() as patch:
        read = looked.catalog.read
        reads: list[str] = []

        def noted(path: str) -> Any:
            reads.append(path)
            return read(path)

        patch.setattr(looked.catalog, "read", noted)
        listing = list_sessions(looked)
        for taken in range(1, 10):
            next(listing)
            assert len(reads) <= taken + looked.window  # as many are read ahead, and no more
        tracemalloc.start()
        count = sum(1 for _ in listing)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert count == 3002 - 9
    assert peak < 9e6, peak  # most of it the cache of decoded manifests


def test_space_adds_up_to_all_that_is_there(cold: Cold) -> None:
    with cold.raw() as backend:
        want = {k: n for k, n in backend.walk("") if not k.startswith("claims/")}
    with cold.opened() as looked:
        found = measure_space(looked)
    kinds = found.by_tier["store"]
    assert sum(s.nbytes for s in kinds.values()) == sum(want.values())
    steps = {k: n for k, n in want.items() if k.startswith("steps/")}
    for name in ("logprobs", "routed_experts"):
        mine = [n for k, n in steps.items() if f"/{name}/c." in k]
        assert (found.by_field[name].objects, found.by_field[name].nbytes) == (6, sum(mine))
    assert sum(s.nbytes for s in found.by_field.values()) == sum(steps.values())
    assert found.by_age["under 1 hour"].nbytes == sum(steps.values())
    assert (found.sessions, found.finalized, found.steps) == (2, 2, 6)
    assert (found.disk_bytes is None) == (not cold.url.startswith("file:"))


def test_space_tells_old_sessions_from_young_ones(tmp_path: Path) -> None:
    cold = Cold(tmp_path.as_uri(), StoreConfig())
    fill(cold)
    days = 86400 * 10**9
    for ago, name in ((0, "under 1 hour"), (days // 2, "under 1 day"), (30 * days, OLDER)):
        now_ns = functools.partial(int, time.time_ns() + ago)
        with opened_store(cold.url, cold.config, now_ns=now_ns) as looked:
            assert list(measure_space(looked).by_age) == [name]


def test_a_store_that_is_copied_verifies_there(tmp_path: Path) -> None:
    cold = Cold((tmp_path / "one").as_uri(), StoreConfig())
    fill(cold)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert Cold((tmp_path / "two").as_uri(), StoreConfig()).findings() == []


# ---------------------------------------------------------------- show


def test_a_session_is_shown_by_id_by_reference_and_as_it_is_listed(cold: Cold) -> None:
    with cold.opened() as looked:
        (shown,) = show_session(looked, "a")
        (ref,) = (segment.ref for segment in shown.segments)
        listed = f"train/a@{shown.summary.incarnation}"
        for name in (ref, listed):
            assert list(show_session(looked, name)) == [shown]
        assert list(show_session(looked, "a", partition="train")) == [shown]
        for name, more in (("c", {}), ("a", {"partition": "eval"}), ("train/c@1", {})):
            with pytest.raises(SessionMissing, match="tq-fs ls"):
                list(show_session(looked, name, **more))
    assert shown.recorded
    assert [(s.kind, s.parent, s.tiers) for s in shown.steps] == [
        ("create", None, ("store",)),
        ("append", 0, ("store",)),
        ("append", 1, ("store",)),
    ]
    with cold.raw() as backend:
        assert all(any(backend.walk(step.place)) for step in shown.steps)
    assert shown.segments[0].steps == (0, 1, 2)


def test_ids_of_any_text_are_shown(tmp_path: Path) -> None:
    names = ["a/b@c", "", "é" * 400, "tqfs", "_", "x@y"]
    with open_store(tmp_path, FIELDS) as store:
        for name in names:
            record(store, name, 1)
    with opened_store(tmp_path.as_uri(), StoreConfig()) as looked:
        assert {s.session for s in list_sessions(looked)} == set(names)
        for name in names:
            (shown,) = show_session(looked, name)
            assert shown.summary.session == name


def test_without_a_trajectory_the_tree_comes_from_the_segments(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("a")
        turning_rollout().record(session)
        session.finalize()
    with opened_store(tmp_path.as_uri(), StoreConfig()) as looked:
        (shown,) = show_session(looked, "a")
    assert not shown.recorded
    assert {s.index: s.parent for s in shown.steps} == {0: None, 1: None, 2: 0, 3: 1}


@pytest.mark.parametrize("damage", DAMAGES, ids=named)
def test_a_damaged_session_is_shown_as_far_as_can_be(
    tmp_path: Path, damage: Callable[[Cold], None]
) -> None:
    cold = Cold(tmp_path.as_uri(), StoreConfig.of({"persist_trajectories": True}))
    with small_chunks():
        fill(cold)
    damage(cold)
    with cold.opened() as looked:
        (shown,) = show_session(looked, "a")
    broken = [s.index for s in shown.steps if not s.tiers]
    if damage in (truncate, lengthen, lose_an_object, lose_a_step):
        assert len(broken) == 1
    assert bool(shown.problem) == (damage is flip_bit_of_the_trajectory)


# ---------------------------------------------------------------- repair


def repair(cold: Cold, *, dry_run: bool = False) -> Repaired:
    with opened_store(cold.url, cold.config, write=not dry_run, grace_s=0) as store:
        return repair_store(store, dry_run=dry_run, progress=lambda s, n: None)


@pytest.mark.parametrize("damage", DAMAGES, ids=named)
def test_repair_leaves_a_store_that_verifies_and_says_what_it_did(
    cold: Cold, damage: Callable[[Cold], None]
) -> None:
    before = everything(cold)
    damage(cold)
    would = repair(cold, dry_run=True)
    assert would.actions
    done = repair(cold)
    findings = cold.findings()
    if damage is make_the_manifest_newer:
        assert [a.kind for a in done.actions] == ["leave"]
        assert {f.kind for f in findings} == {f.kind for f in done.left} == {"too-new"}
        return
    assert (findings, done.left) == ([], [])
    assert done.actions or done.rebuilt
    after = everything(cold)
    whole = {k: v for k, v in before.items() if "/b/" in k and k.startswith(("steps", "manif"))}
    assert {k: after.get(k) for k in whole} == whole
    gone = {k for k in before if k.startswith(("steps/", "manifests/"))} - set(after)
    told = [a.place for a in done.actions]
    assert all(any("/a/" in place for place in told) for _ in gone)
    with cold.open() as store:  # and it is a store
        record(store, "after", 5)
        refs = sorted(store.unreleased())
        store.hydrate(refs)
    assert repair(cold).actions == []


def everything(cold: Cold) -> dict[str, bytes]:
    with cold.raw() as backend:
        return {k: backend.get(k) for k, _ in backend.walk("") if not k.startswith("claims/")}


def test_metadata_is_mended_to_the_byte(cold: Cold) -> None:
    before = everything(cold)
    flip_bit_of_the_metadata(cold)
    done = repair(cold)
    assert [a.kind for a in done.actions] == ["mend"]
    after = everything(cold)
    assert {k: v for k, v in after.items() if k.startswith("steps/")} == {
        k: v for k, v in before.items() if k.startswith("steps/")
    }


def test_a_damaged_manifest_is_made_anew(cold: Cold) -> None:
    flip_bit_of_the_manifest(cold)
    (would,) = repair(cold, dry_run=True).actions
    assert would.kind == "mend"
    assert "made anew" in would.detail
    done = repair(cold)
    assert len(done.rebuilt) == 1
    with cold.opened() as looked:
        assert {s.state for s in list_sessions(looked)} == {"finalized"}


def test_a_session_whose_state_is_damaged_is_set_aside_and_its_segments_are_named(
    tmp_path: Path,
) -> None:
    cold = Cold(tmp_path.as_uri(), StoreConfig())
    with cold.open() as store:
        session = store.session("a")
        turning_rollout().record(session)
        good, bad = refs_of(session.finalize())
        store.release([bad], "train")
    cold.change(first(cold, "train/a/", "state-"), flipped)
    for dry_run in (True, False):
        (action,) = repair(cold, dry_run=dry_run).actions
        assert (action.kind, action.refs) == ("set aside", (good, bad))
    assert cold.findings() == []


def test_segments_that_can_be_read_stay_and_the_others_are_set_aside(cold: Cold) -> None:
    with cold.open() as store:
        session = store.session("two chains")
        rollout = turning_rollout(seed=9)
        rollout.record(session)
        want = [e.slime(specs(FIELDS)) for e in rollout.expected("lineage")]
        good, bad = refs_of(session.finalize())
    key = next(k for k in cold.keys("/two_20chains/") if "/000003/" in k and "logprobs/c.0" in k)
    before = everything(cold)
    cold.change(key, flipped)
    done = repair(cold)
    (action,) = done.actions
    assert (action.kind, action.refs) == ("set aside", (bad,))
    assert cold.findings() == []
    after = everything(cold)
    moved = {k: v for k, v in after.items() if k.startswith("quarantine/")}
    for place in ("/000001/", "/000003/"):  # of which the first was whole
        names = [k for k in before if "/two_20chains/" in k and place in k]
        assert names
        assert not set(names) & set(after)
        for name in names:
            if name != key:
                assert moved["quarantine/" + name.partition("/")[2]] == before[name]
    with cold.open() as store:
        assert bad not in set(store.unreleased())
        assert_batch(store.hydrate([good]), [want[0]])
        with pytest.raises(tq_fs.errors.SegmentMissing):
            store.hydrate([bad])
    assert cold.findings() == []


def test_what_was_released_of_segments_set_aside_releases_nothing_else(tmp_path: Path) -> None:
    cold = Cold(tmp_path.as_uri(), StoreConfig())
    with cold.open() as store:
        session = store.session("a")
        turning_rollout().record(session)
        good, bad = refs_of(session.finalize(consumers=("actor", "critic")))
        store.release([bad], "actor")
        store.release([bad], "critic", rollout_id=7)  # held until a checkpoint
    key = next(k for k in cold.keys("/a/") if "/000003/" in k and "logprobs/c.0" in k)
    cold.change(key, flipped)
    assert [a.refs for a in repair(cold).actions] == [(bad,)]
    with cold.open() as store:
        store.checkpoint_saved(7)
        store.hydrate([good])
    with cold.open() as store:
        store.hydrate([good])
        assert list(store.unreleased()) == [good]
    assert cold.findings() == []


def test_a_release_of_a_segment_that_was_set_aside_ends_no_session(tmp_path: Path) -> None:
    """A writer that was fenced may still write what it had noted."""
    cold = Cold(tmp_path.as_uri(), StoreConfig())
    with cold.open() as store:
        session = store.session("a")
        turning_rollout().record(session)
        good, bad = refs_of(session.finalize(consumers=("actor", "critic")))
        store.release([bad], "actor")
    noted = first(cold, "train/a/", "state-")
    document = json.loads(_get(cold, noted))
    document["released"]["critic"] = document["released"]["actor"]
    key = next(k for k in cold.keys("/a/") if "/000003/" in k and "logprobs/c.0" in k)
    cold.change(key, flipped)
    repair(cold)
    with cold.raw() as backend:
        backend.put(noted, sealed(document))
    with cold.open() as store:
        assert list(store.unreleased()) == [good]
        store.hydrate([good])


def test_a_dry_run_of_a_repair_changes_nothing(tmp_path: Path) -> None:
    cold = Cold(tmp_path.as_uri(), StoreConfig.of({"persist_trajectories": True}))
    with small_chunks():
        fill(cold)
    flip_bit(cold)
    add_a_step(cold)
    before = contents(tmp_path)
    would = repair(cold, dry_run=True)
    assert contents(tmp_path) == before
    assert [a.kind for a in would.actions] == [a.kind for a in repair(cold).actions]


@pytest.mark.parametrize("at", range(12))
def test_a_repair_that_is_killed_goes_on_where_it_was(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at its n-th write or delete, and run again."""
    cold = Cold(tmp_path.as_uri(), StoreConfig())
    with cold.open() as store:
        session = store.session("a")
        turning_rollout().record(session)
        good, bad = refs_of(session.finalize())
    key = next(k for k in cold.keys("/a/") if "/000003/" in k and "logprobs/c.0" in k)
    cold.change(key, flipped)
    left = at

    def limited(name: str) -> Callable[..., Any]:
        act = getattr(LocalBackend, name)

        def limit(self: LocalBackend, *args: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                raise Killed
            return act(self, *args, **more)

        return limit

    with (
        opened_store(cold.url, cold.config, write=True) as store_,
        monkeypatch.context() as patch,
        suppress(Killed),
    ):
        for name in ("put", "delete"):
            patch.setattr(LocalBackend, name, limited(name))
        repair_store(store_, dry_run=False, progress=lambda s, n: None)
    repair(cold)
    assert cold.findings() == []
    with cold.open() as store:
        assert list(store.unreleased()) == [good]
        store.hydrate([good])
    assert any("logprobs/c.0" in k and "/000003/" in k for k in cold.keys("quarantine/"))
    assert bad != good


class Killed(BaseException):
    """The process ends."""


@pytest.mark.s3
def test_a_bad_copy_is_made_anew_from_the_other_tier(bucket: str, tmp_path: Path) -> None:
    config = StoreConfig.of({"tier": {"folder": str(tmp_path), "policy": "write-through"}})
    cold = Cold(f"s3://{bucket}/runs", config)
    refs = fill(cold)
    (path,) = tmp_path.glob("default/steps/train/a/*/000001/try-*/logprobs/c.0")
    whole = path.read_bytes()
    path.write_bytes(flipped(whole))
    done = repair(cold)
    assert [a.kind for a in done.actions] == ["mend"], done
    assert path.read_bytes() == whole
    with opened_store(cold.url, cold.config, write=True) as store:
        key = str(path.relative_to(tmp_path / "default"))
        store.tiers["back"].put(key, flipped(whole))
    assert [(f.kind, f.tier) for f in cold.findings()] == [("corrupt", "back")]
    done = repair(cold)
    assert [a.kind for a in done.actions] == ["mend"], done
    assert cold.findings() == []
    with cold.open(read_only=True) as store_:
        store_.hydrate(refs)


@pytest.mark.s3
def test_a_step_that_the_bucket_has_lost_is_found_though_the_front_has_it(
    bucket: str, tmp_path: Path
) -> None:
    """A node that is lost would take the only copy with it."""
    config = StoreConfig.of({"tier": {"folder": str(tmp_path), "policy": "write-back"}})
    cold = Cold(f"s3://{bucket}/runs", config)
    refs = fill(cold)
    with opened_store(cold.url, StoreConfig(), write=True) as bare:  # as a lifecycle rule would
        key = next(k for k, _ in bare.places.steps.walk("steps/train/a") if "/000001/" in k)
        place = key.partition("/try-")[0]
        bare.places.steps.delete(place)
    (finding,) = cold.findings()
    assert (finding.kind, finding.tier, finding.step) == ("missing", "back", 1)
    assert [a.kind for a in repair(cold, dry_run=True).actions] == ["mend"]
    repair(cold)
    assert cold.findings() == []
    shutil.rmtree(tmp_path / "default")
    with cold.open(read_only=True) as store_:
        store_.hydrate(refs)


@pytest.mark.s3
@pytest.mark.parametrize("damage", [flip_bit, flip_bit_of_the_manifest, add_a_step], ids=named)
def test_a_repair_touches_nothing_of_a_job_that_has_taken_the_bucket_since(
    bucket: str, damage: Callable[[Cold], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It verifies for hours, and a supervisor starts the job again meanwhile."""
    cold = Cold(f"s3://{bucket}/runs", StoreConfig.of({"persist_trajectories": True}))
    with small_chunks(), ExitStack() as opened:
        fill(cold)
        damage(cold)
        live: list[tq_fs.Session] = []

        def verify(*args: Any, **more: Any) -> Verified:
            found = verify_store(*args, **more)
            if not live:
                job = opened.enter_context(cold.open())
                live.append(job.session("live"))
                short_rollout(FIELDS, 3).record(live[0])
            return found

        monkeypatch.setattr("tq_fs.operate._repair.verify_store", verify)
        with (
            opened_store(cold.url, cold.config, write=True) as store,
            pytest.raises(StoreFenced),
        ):
            repair_store(store, dry_run=False, progress=lambda s, n: None)
        refs = refs_of(live[0].finalize())
        opened.close()
        with cold.open(read_only=True) as store_:
            store_.hydrate(refs)
    assert damage is add_a_step or [f.path for f in cold.findings()]


@pytest.mark.s3
@pytest.mark.parametrize("policy", ["write-through", "write-back"])
@pytest.mark.parametrize("name", ["logprobs/c.0", "zarr.json"])
def test_a_copy_that_was_cut_in_the_bucket_is_made_anew_from_the_front(
    bucket: str, tmp_path: Path, name: str, policy: str
) -> None:
    config = StoreConfig.of({"tier": {"folder": str(tmp_path), "policy": policy}})
    cold = Cold(f"s3://{bucket}/runs", config)
    refs = fill(cold)
    (path,) = tmp_path.glob(f"default/steps/train/a/*/000001/try-*/{name}")
    whole, key = path.read_bytes(), str(path.relative_to(tmp_path / "default"))
    with opened_store(cold.url, cold.config, write=True) as store:
        store.tiers["back"].put(key, whole[:-5])
    assert {(f.kind, f.tier) for f in cold.findings()} <= {
        ("truncated", "back"),
        ("corrupt", "back"),
    }
    assert cold.findings()
    repair(cold)
    assert cold.findings() == []
    assert path.read_bytes() == whole
    with opened_store(cold.url, cold.config) as store:
        assert store.tiers["back"].get(key) == whole
    with cold.open(read_only=True) as store_:
        store_.hydrate(refs)


@pytest.mark.s3
def test_a_copy_that_was_cut_in_front_is_dropped_when_the_store_is_opened(
    bucket: str, tmp_path: Path
) -> None:
    config = StoreConfig.of({"tier": {"folder": str(tmp_path), "policy": "write-through"}})
    cold = Cold(f"s3://{bucket}/runs", config)
    refs = fill(cold)
    (path,) = tmp_path.glob("default/steps/train/a/*/000001/try-*/logprobs/c.0")
    path.write_bytes(path.read_bytes()[:-5])
    assert [(f.kind, f.tier) for f in cold.findings()] == [("truncated", "front")]
    with cold.open() as store:
        assert not path.exists()
        store.hydrate(refs)
    assert cold.findings() == []


@pytest.mark.s3
@pytest.mark.parametrize("policy", ["write-through", "write-back"])
def test_a_step_that_is_cut_in_both_tiers_is_set_aside(
    bucket: str, tmp_path: Path, policy: str
) -> None:
    config = StoreConfig.of({"tier": {"folder": str(tmp_path), "policy": policy}})
    cold = Cold(f"s3://{bucket}/runs", config)
    refs = fill(cold)
    (path,) = tmp_path.glob("default/steps/train/a/*/000001/try-*/logprobs/c.0")
    key = str(path.relative_to(tmp_path / "default"))
    with opened_store(cold.url, StoreConfig(), write=True) as bare:
        bare.places.steps.put(key, path.read_bytes()[:-5])
    path.write_bytes(path.read_bytes()[:-9])
    assert {(f.kind, f.tier) for f in cold.findings()} == {
        ("truncated", "front"),
        ("truncated", "back"),
    }
    (action,) = repair(cold).actions
    assert (action.kind, list(action.refs)) == ("set aside", refs)
    assert cold.findings() == []
    assert not path.exists()


# ---------------------------------------------------------------- gc


def collect(cold: Cold, *, dry_run: bool = False, quarantine: bool = False) -> Repaired:
    with opened_store(cold.url, cold.config, write=not dry_run, grace_s=0) as store:
        looked: list[int] = []
        done = collect_waste(
            store,
            dry_run=dry_run,
            quarantine=quarantine,
            progress=lambda sessions, nbytes: looked.append(sessions),
        )
        assert sum(looked) >= sum(1 for _ in store.catalog.entries()), "the bar gets to its end"
        return done


def test_gc_removes_what_nobody_needs_and_nothing_else(cold: Cold) -> None:
    before = everything(cold)
    lost = {k for k in before if k.startswith("steps/train/a/")}
    lose_the_manifest(cold)
    with cold.raw() as backend:  # of b a Step that nothing refers to
        for key in [k for k in before if k.startswith("steps/train/b/") and "/000000/" in k]:
            backend.put(key.replace("/000000/", "/000008/"), before[key])
    would = collect(cold, dry_run=True)
    done = collect(cold)
    assert done.actions == would.actions
    assert (done.left, cold.findings()) == ([], [])
    after = everything(cold)
    assert sum(a.nbytes for a in done.actions) > sum(len(before[k]) for k in lost)
    want = {k: v for k, v in before.items() if "/a/" not in k and not k.endswith("store.json")}
    assert {k: v for k, v in after.items() if not k.endswith("store.json")} == want
    assert collect(cold).actions == []


def test_gc_leaves_what_is_broken_and_what_was_set_aside(cold: Cold) -> None:
    flip_bit(cold)
    assert collect(cold).actions == []
    assert [f.kind for f in cold.findings()] == ["corrupt"]
    repair(cold)
    assert collect(cold).actions == []
    kept = cold.keys("quarantine/")
    assert kept
    done = collect(cold, quarantine=True)
    assert [a.place for a in done.actions] == ["quarantine"]
    assert cold.keys("quarantine/") == []


@pytest.mark.s3
def test_a_bucket_in_which_somebody_may_record_is_not_taken(bucket: str) -> None:
    cold = Cold(f"s3://{bucket}/runs", StoreConfig())
    with cold.open() as store:
        session = store.session("live")
        short_rollout(FIELDS, 3).record(session)
        with cold.opened(grace_s=60) as looked, pytest.raises(StoreBusy, match="--grace-s 0"):
            check_quiet(looked)
        session.finalize()
        with cold.opened(grace_s=60) as looked:
            check_quiet(looked)
