"""TieredBackend: the suite for both policies, and what two tiers promise together."""

from __future__ import annotations

import logging
import os
import pickle
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests._tiers import (
    GROUP_BYTES,
    POLICIES,
    KiB,
    Tiers,
    crash,
    group,
    held,
    step,
    until,
)
from tq_fs.backends import Backend, FsspecBackend, LocalBackend, NodeCache
from tq_fs.backends._client import Page
from tq_fs.backends._tiered import TieredBackend
from tq_fs.errors import (
    BackpressureTimeout,
    InvalidConfig,
    InvalidKey,
    ObjectExists,
    ObjectMissing,
    ReadOnlyStore,
    SessionClosed,
    StorageDenied,
    StorageFailed,
    StorageFull,
    StorageUnreachable,
    WrongProcess,
)
from tq_fs.testing import MEMBERS, BackendSuite, in_threads, read, tree

DOWN = StorageUnreachable("no answer")


@pytest.mark.parametrize("policy", POLICIES)
class TestTieredBackend(BackendSuite):
    @pytest.fixture
    def backend(self, tmp_path: Path, policy: str) -> Iterator[Backend]:
        tiers = Tiers(tmp_path)
        backend = tiers.open(policy, cache=NodeCache(tmp_path / "cache", 2**30))
        yield backend
        backend.close()
        tiers.close()

    def test_pickles_as_configuration(self, backend: Backend) -> None:
        """It belongs to the process that writes."""
        with pytest.raises(WrongProcess, match="read-only"):
            pickle.dumps(backend)


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    tiers = Tiers(tmp_path)
    yield tiers
    tiers.close()


def publish(tier: TieredBackend, count: int, start: int = 0, *, fresh: bool = True) -> list[str]:
    return [tier.publish(step(i), group(i), fresh=fresh) for i in range(start, start + count)]


def in_front(tier: TieredBackend) -> list[int]:
    """Return the indexes of the Steps in front."""
    assert tier.front is not None
    names = {key.split("/")[4] for key, _ in tier.front.walk("steps")}
    return sorted(map(int, names))


# ---------------------------------------------------------------- acknowledged


def test_write_through_acknowledges_what_the_object_store_has(tiers: Tiers) -> None:
    tier = tiers.open("write-through")
    places = publish(tier, 3)
    assert tiers.uploaded() == set(places)
    assert in_front(tier) == [0, 1, 2]
    asked = len(tiers.client.asked)
    assert all(held(tier, place, group(i)) for i, place in enumerate(places))
    assert read(tier, f"{places[0]}/data/c.0", 8) == bytes(8)
    assert len(tiers.client.asked) == asked, "the front has it"


def test_write_back_acknowledges_what_the_front_has(tiers: Tiers) -> None:
    tier = tiers.open("write-back")
    tiers.client.hold()
    places = publish(tier, 3)
    assert all(held(tier, place, group(i)) for i, place in enumerate(places))
    assert (tier.stats().queued_groups, tier.stats().queued_bytes) == (3, 3 * 8 * KiB + 3)
    tiers.client.let_go()
    tier.settle("steps")
    assert tiers.uploaded() == set(places)
    assert tier.stats().queued_bytes == 0


@pytest.mark.parametrize("member", ["data/c.0", "zarr.json"])
def test_a_failed_write_through_leaves_nothing_in_either_tier(tiers: Tiers, member: str) -> None:
    tier = tiers.open("write-through")
    tiers.client.failure = DOWN
    tiers.client.refuses = lambda operation, key: key.endswith(member)
    with pytest.raises(StorageUnreachable):
        tier.publish(step(0), group(0))
    assert tree(tier) == []
    tiers.client.failure = None
    place = tier.publish(step(0), group(1))
    assert held(tiers.back, place, group(1))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_no_upload_would_take_is_refused_before_it_is_acknowledged(
    tiers: Tiers, policy: str
) -> None:
    tier = tiers.open(policy)
    with pytest.raises(InvalidKey, match="control"):
        tier.publish(step(0), {"line\nbreak": [b"x"]})
    with pytest.raises(InvalidKey, match="control"):
        tier.publish("line\nbreak", group(0))
    assert in_front(tier) == []


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("where", ["front", "both", "back"])
def test_content_is_known_again_in_either_tier(tiers: Tiers, policy: str, where: str) -> None:
    tier = tiers.open(policy)
    if where == "front" and policy == "write-back":
        tiers.client.hold(lambda operation, key: operation == "put")
    place = tier.publish(step(0), group(0))
    if where == "back":
        tier.settle("")
        assert tier.distrust(f"{place}/zarr.json")
        assert in_front(tier) == []
    assert tier.publish(step(0), group(0)) == place
    with pytest.raises(ObjectExists, match=step(0)):
        tier.publish(step(0), group(1))
    tiers.client.let_go()
    tier.settle("")
    assert tiers.uploaded() == {place}


def test_an_unknown_policy_is_refused_with_the_known_ones(tiers: Tiers) -> None:
    with pytest.raises(InvalidConfig, match="write-through, write-back"):
        tiers.open("write-behind")


# ---------------------------------------------------------------- the queue


def test_uploads_go_in_the_order_of_publishing_and_commits_last(tiers: Tiers) -> None:
    tier = tiers.open(upload_threads=1)
    tiers.client.hold()
    places = publish(tier, 8)
    tiers.client.let_go()
    tier.settle("")
    wanted = [f"{place}/{name}" for place in places for name in ("data/c.0", "zarr.json")]
    assert tiers.client.keys("put") == wanted


def test_what_is_settled_is_uploaded_before_all_else(tiers: Tiers) -> None:
    tier = tiers.open(upload_threads=1)
    tiers.client.hold()
    places = publish(tier, 6)
    until(lambda: tiers.client.held == 1)
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(tier.settle, step(4))
        until(lambda: tier._writer and next(iter(tier._writer.queue._waiting)) == places[4])
        tiers.client.let_go()
        settled.result(timeout=20)
    tier.settle("")
    commits = [k for k in tiers.client.keys("put") if k.endswith("zarr.json")]
    assert commits == [f"{places[i]}/zarr.json" for i in (0, 4, 1, 2, 3, 5)]


def test_settle_raises_a_failure_and_the_upload_is_tried_again(tiers: Tiers) -> None:
    tier = tiers.open()
    tiers.client.failure = DOWN
    (place,) = publish(tier, 1)
    with pytest.raises(StorageUnreachable, match="no answer"):
        tier.settle(step(0))
    assert held(tier, place, group(0))
    assert tier.stats().queued_groups == 1
    assert tier.stats().upload_failures > 0
    tiers.client.failure = None
    until(lambda: tier.stats().queued_groups == 0)  # by itself
    assert tiers.uploaded() == {place}
    tier.settle("")


def test_settle_does_not_wait_for_other_sessions(tiers: Tiers) -> None:
    tier = tiers.open(upload_threads=2)
    tiers.client.hold(lambda operation, key: "/slow/" in key)
    tier.publish(step(0, "slow"), group(0), fresh=True)
    place = tier.publish(step(0, "fast"), group(1), fresh=True)
    tier.settle("steps/train/fast")
    assert tiers.uploaded() == {place}
    assert tier.stats().queued_groups == 1


def test_one_group_that_is_refused_does_not_hold_up_the_others(tiers: Tiers) -> None:
    tier = tiers.open(upload_threads=1)
    tiers.client.failure = StorageDenied("not this one")
    tiers.client.refuses = lambda operation, key: step(0) in key
    places = publish(tier, 4)
    for i in (1, 2, 3):
        tier.settle(step(i))
    with pytest.raises(StorageDenied, match="not this one"):
        tier.settle(step(0))
    with pytest.raises(StorageDenied, match=r"1 Steps \(8193 bytes\) lie here only") as error:
        tier.close()
    assert str(tiers.folder / "front") in error.value.subject
    assert "next start" in error.value.remedy
    assert tiers.uploaded() == set(places[1:])


def test_a_group_whose_files_are_gone_is_reported(tiers: Tiers) -> None:
    tier = tiers.open()
    tiers.client.hold()
    (place,) = publish(tier, 1)
    until(lambda: tiers.client.held)
    shutil.rmtree(tiers.folder / "front" / place)
    tiers.client.let_go()
    with pytest.raises(ObjectMissing, match=r"zarr\.json"):
        tier.settle("")


def test_close_uploads_what_waits(tiers: Tiers) -> None:
    threads = threading.active_count()
    tier = tiers.open()
    places = publish(tier, 20)
    tier.close()
    assert tiers.uploaded() == set(places)
    assert threading.active_count() == threads
    tier.close()
    for call in (lambda: publish(tier, 1), lambda: tier.delete(step(0)), tier.recover):
        with pytest.raises(SessionClosed):
            call()


def test_what_close_cannot_upload_is_told_and_the_next_start_uploads_it(tiers: Tiers) -> None:
    threads = threading.active_count()
    tier = tiers.open()
    before = publish(tier, 2)
    tier.settle("")
    tiers.client.failure = DOWN
    places = publish(tier, 5, 2)
    with pytest.raises(StorageUnreachable, match=r"5 Steps \(40965 bytes\) lie here only") as error:
        tier.close()
    assert error.value.subject == str(tiers.folder / "front")
    assert "no answer" in error.value.problem
    assert threading.active_count() == threads
    tier.close()  # said once

    tiers.client.failure = None
    tier = tiers.open()
    assert tier.recover() == 5
    tier.settle("")
    assert tiers.uploaded() == {*before, *places}
    assert all(held(tiers.back, p, group(i)) for i, p in enumerate([*before, *places]))


def test_writers_wait_for_room_in_the_queue(tiers: Tiers) -> None:
    tier = tiers.open(queue_bytes=3 * 8 * KiB + 100, deadline_s=0.1)
    tiers.client.hold()
    publish(tier, 3)
    with pytest.raises(BackpressureTimeout, match="wait for their upload"):
        publish(tier, 1, 3)
    assert in_front(tier) == [0, 1, 2], "nothing of it is visible"
    tiers.client.let_go()
    publish(tier, 10, 3)
    tier.settle("")
    assert len(tiers.uploaded()) == 13


def test_a_timeout_says_what_holds_the_uploads_up(tiers: Tiers) -> None:
    tier = tiers.open(queue_bytes=1, deadline_s=0.05)
    tiers.client.failure = DOWN
    publish(tier, 1)
    until(lambda: tier.stats().upload_failures)
    with pytest.raises(BackpressureTimeout, match="no answer"):
        publish(tier, 1, 1)


def test_a_group_larger_than_the_queue_waits_alone(tiers: Tiers) -> None:
    tier = tiers.open(queue_bytes=10 * KiB, deadline_s=20, upload_memory_bytes=5 * KiB)
    most = 0

    def watch(operation: str, key: str) -> bool:
        nonlocal most
        most = max(most, tier.stats().queued_groups)
        return False

    tiers.client.hold(watch)
    in_threads(4, lambda i: tier.publish(step(i), group(i, 64 * KiB), fresh=True))
    tier.settle("")
    assert most == 1
    assert len(tiers.uploaded()) == 4


def test_writers_that_wait_when_it_is_closed_are_told(tiers: Tiers) -> None:
    tier = tiers.open(queue_bytes=1, deadline_s=20)
    tiers.client.hold()
    publish(tier, 1)
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(publish, tier, 1, 1)
        until(lambda: tier._writer and tier._writer.queue._line)
        closing = pool.submit(tier.close)
        with pytest.raises(SessionClosed):
            waits.result(timeout=20)
        tiers.client.let_go()
        closing.result(timeout=20)
    assert len(tiers.uploaded()) == 1


# ---------------------------------------------------------------- no room in front


def test_a_front_full_of_what_is_not_uploaded_is_gone_past(
    tiers: Tiers, caplog: pytest.LogCaptureFixture
) -> None:
    tier = tiers.open(capacity_bytes=3 * GROUP_BYTES, high_water=1.0, low_water=1.0)
    tiers.client.hold(lambda operation, key: operation == "put" and key < step(3))
    with caplog.at_level(logging.WARNING, "tq_fs"):
        places = publish(tier, 8)
    assert in_front(tier) == [0, 1, 2]
    assert tiers.uploaded() == set(places[3:]), "acknowledged: it has to be somewhere"
    assert (tier.stats().spilled, tier.stats().front_failures) == (5, 5)
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 1, "not one with every put"
    assert "no room for" in warnings[0]
    assert all(held(tier, place, group(i)) for i, place in enumerate(places))
    tiers.client.let_go()
    tier.settle("")
    assert tiers.uploaded() == set(places)


def test_a_group_that_goes_past_the_front_and_fails_leaves_nothing(tiers: Tiers) -> None:
    tier = tiers.open(capacity_bytes=1)
    tiers.client.failure = DOWN
    tiers.client.refuses = lambda operation, key: key.endswith("zarr.json")
    with pytest.raises(StorageUnreachable):
        publish(tier, 1)
    assert tree(tier) == []
    assert tier.stats().queued_bytes == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_larger_than_the_front_evicts_nothing(tiers: Tiers, policy: str) -> None:
    tier = tiers.open(policy, capacity_bytes=3 * GROUP_BYTES, high_water=1.0, low_water=1.0)
    publish(tier, 2)
    tier.settle("")
    place = tier.publish(step(9), group(9, 100 * KiB), fresh=True)
    assert in_front(tier) == [0, 1]
    assert held(tier, place, group(9, 100 * KiB))
    assert tier.stats().front_failures == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_front_that_fails_fails_no_put(tiers: Tiers, policy: str) -> None:
    tier = tiers.open(policy)
    publish(tier, 1)
    shutil.rmtree(tiers.folder / "front" / ".staging")
    (place,) = publish(tier, 1, 1)
    assert held(tiers.back, place, group(1))
    assert tier.stats().front_failures == 1


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a small file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("has no mount command")

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"may not mount a file system: {done.stderr.strip()}")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("options", ["size=400k", "size=4m,nr_inodes=60"])
@pytest.mark.parametrize("policy", POLICIES)
def test_puts_go_on_when_the_disk_is_full(
    tiers: Tiers, disk: Callable[[str], Path], policy: str, options: str
) -> None:
    """Also where only the disk knows: it has bytes left, and no inodes."""
    tier = tiers.open(policy, front=disk(options), queue_bytes=300 * KiB)
    places = publish(tier, 60)
    assert tier.stats().evicted > 0, "what is uploaded makes room"
    assert 0 < len(in_front(tier)) < 60
    assert all(held(tier, place, group(i)) for i, place in enumerate(places))
    tier.settle("")
    assert tiers.uploaded() == set(places)


@pytest.mark.root
def test_a_full_disk_of_what_is_not_uploaded_is_gone_past(
    tiers: Tiers, disk: Callable[[str], Path]
) -> None:
    tier = tiers.open(front=disk("size=4m,nr_inodes=60"))
    tiers.client.hold(lambda operation, key: operation == "put" and key < step(5))
    places = publish(tier, 5)
    with ThreadPoolExecutor(1) as pool:
        more = pool.submit(publish, tier, 25, 5)
        places += more.result(timeout=20)
    assert tier.stats().spilled > 0
    assert all(held(tier, place, group(i)) for i, place in enumerate(places))
    tiers.client.let_go()
    tier.settle("")
    assert tiers.uploaded() == set(places)


@pytest.mark.root
def test_a_stranger_s_files_on_the_disk_drive_groups_out_and_never_refuse_a_put(
    tiers: Tiers, disk: Callable[[str], Path]
) -> None:
    folder = disk("size=1m")
    tier = tiers.open("write-through", front=folder, high_water=1.0, low_water=1.0)
    publish(tier, 10)
    assert len(in_front(tier)) == 10
    free = os.statvfs(folder).f_bavail * 4096
    (folder / "stranger").write_bytes(bytes(free))
    publish(tier, 10, 10)
    assert in_front(tier)[-1] == 19, "the coldest made room"
    assert len(in_front(tier)) <= 10
    assert tier.stats().front_failures == 0
    (folder / "stranger").unlink()
    publish(tier, 10, 20)
    assert len(in_front(tier)) >= 19


@pytest.mark.root
def test_the_water_marks_are_shares_of_what_others_leave(
    tiers: Tiers, disk: Callable[[str], Path]
) -> None:
    folder = disk("size=1m")
    tier = tiers.open("write-through", front=folder, high_water=0.9, low_water=0.5)
    publish(tier, 10)
    free = os.statvfs(folder).f_bavail * 4096
    (folder / "stranger").write_bytes(bytes(free - GROUP_BYTES))
    publish(tier, 1, 10)
    until(lambda: tier.stats().front_bytes <= 4 * GROUP_BYTES)
    assert in_front(tier)[-1] == 10
    assert tier.stats().front_failures == 0


def test_files_that_were_removed_behind_its_back_refuse_no_put(tiers: Tiers) -> None:
    tier = tiers.open("write-through", capacity_bytes=4 * GROUP_BYTES)
    publish(tier, 3)
    shutil.rmtree(tiers.folder / "front" / "steps")
    publish(tier, 20, 3)
    assert tier.stats().front_failures == 0
    assert in_front(tier)[-1] == 22
    assert tier.stats().front_bytes <= 4 * GROUP_BYTES


# ---------------------------------------------------------------- eviction


def test_above_the_high_water_mark_groups_leave_down_to_the_low_one(tiers: Tiers) -> None:
    tier = tiers.open(
        "write-through", capacity_bytes=10 * GROUP_BYTES, high_water=0.8, low_water=0.5
    )
    publish(tier, 8)
    assert in_front(tier) == [*range(8)]
    publish(tier, 1, 8)
    until(lambda: tier.stats().front_bytes == 5 * GROUP_BYTES)
    assert in_front(tier) == [4, 5, 6, 7, 8]
    assert tier.stats().evicted == 4


def test_cooled_groups_leave_first_and_then_the_coldest(tiers: Tiers) -> None:
    tier = tiers.open("write-through", capacity_bytes=8 * GROUP_BYTES, high_water=1, low_water=1)
    places = publish(tier, 8)
    tier.cool([step(6), "steps/train/nobody"])
    tier.get(f"{places[0]}/zarr.json")
    read(tier, f"{places[1]}/data/c.0", 4)
    left = []
    for i in range(8, 16):
        before = set(in_front(tier))
        publish(tier, 1, i)
        left += sorted(before - set(in_front(tier)))
    assert left == [6, 2, 3, 4, 5, 7, 0, 1]


def test_a_session_is_cooled_as_a_whole(tiers: Tiers) -> None:
    tier = tiers.open("write-through", capacity_bytes=6 * GROUP_BYTES, high_water=1, low_water=1)
    publish(tier, 3)
    for i in range(3):
        tier.publish(step(i, "other"), group(i), fresh=True)
    tier.cool(["steps/train/other"])
    publish(tier, 3, 3)
    assert list(tier.front.list("steps/train") if tier.front else ()) == ["s"]


def test_what_is_not_uploaded_never_leaves(tiers: Tiers) -> None:
    tier = tiers.open(capacity_bytes=6 * GROUP_BYTES, high_water=0.5, low_water=0.1)
    tiers.client.hold(lambda operation, key: operation == "put" and key < step(4))
    publish(tier, 4)
    tier.cool(["steps"])
    publish(tier, 6, 4)
    assert set(in_front(tier)) >= {0, 1, 2, 3}
    assert not tier.distrust(f"{step(0)}/try-0123456789abcdef/zarr.json")
    tiers.client.let_go()
    tier.settle("")
    until(lambda: tier.stats().front_bytes <= GROUP_BYTES)


def test_a_reader_keeps_what_it_has_open_and_finds_the_rest_in_the_object_store(
    tiers: Tiers,
) -> None:
    tier = tiers.open("write-through", capacity_bytes=2 * GROUP_BYTES, high_water=1, low_water=1)
    (place,) = publish(tier, 1)
    with tier.open(f"{place}/data/c.0") as source:
        publish(tier, 4, 1)
        assert 0 not in in_front(tier)
        buffer = bytearray(8 * KiB)
        source.readinto([buffer], 0)
    assert buffer == group(0)["data/c.0"][0]
    assert tiers.client.keys("read") == []
    assert read(tier, f"{place}/data/c.0", 8 * KiB) == bytes(buffer)
    assert len(tiers.client.keys("read")) == 1


def test_readers_never_miss_a_group_that_moves(tiers: Tiers) -> None:
    """Published, uploaded and evicted while they read."""
    tier = tiers.open(capacity_bytes=4 * GROUP_BYTES, high_water=0.5, low_water=0.25)
    places: list[str] = []
    done = threading.Event()

    def look(seed: int) -> int:
        numbers = random.Random(seed)
        seen = 0
        while not done.is_set():
            if places:
                i = numbers.randrange(len(places))
                assert held(tier, places[i], group(i))
                seen += 1
        return seen

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(look, seed) for seed in range(3)]
        try:
            for i in range(100):
                places += publish(tier, 1, i)
        finally:
            done.set()
        assert sum(reader.result() for reader in readers) > 0
    assert tier.stats().evicted > 0


# ---------------------------------------------------------------- both tiers seen as one


def test_listing_and_walking_show_what_is_in_either_tier_once(tiers: Tiers) -> None:
    tier = tiers.open(capacity_bytes=2 * GROUP_BYTES, high_water=1, low_water=1)
    places = publish(tier, 4)
    tier.settle("")
    places += publish(tier, 2, 4)
    tier.settle("")  # so that the front has room, which only uploaded groups make
    tiers.client.hold(lambda operation, key: operation == "put")
    places.append(tier.publish("steps/train/s.t/i/000000", group(7), fresh=True))
    keys = [key for key, _ in tier.walk("steps")]
    assert keys == sorted(f"{place}/{name}" for place in places for name in group(0))
    assert dict(tier.walk(places[0])) == {
        f"{places[0]}/data/c.0": 8 * KiB,
        f"{places[0]}/zarr.json": 1,
    }
    assert list(tier.list("steps/train/s/i")) == [f"{i:06d}" for i in range(6)]
    assert list(tier.list("steps/train")) == ["s", "s.t"]
    tiers.client.let_go()


def test_a_group_that_moves_while_it_is_listed_is_listed(tiers: Tiers) -> None:
    """Looked for in the object store before it came, and in front after it left."""
    tier = tiers.open()
    tiers.client.hold(lambda operation, key: operation == "put")
    (place,) = publish(tier, 1)
    listing = tiers.client.pages

    def move_then_answer(prefix: str, *, deep: bool, after: str) -> Iterator[Page]:
        found = list(listing(prefix, deep=deep, after=after))
        tiers.client.let_go()
        tier.settle("")
        assert tier._writer
        assert tier._writer.front.discard(place)
        yield from found

    tiers.client.pages = move_then_answer  # type: ignore[method-assign]
    assert list(tier.list("steps/train")) == ["s"]


def test_small_objects_go_to_the_object_store_alone(tiers: Tiers) -> None:
    tier = tiers.open()
    tier.put("steps/note", b"v")
    assert tiers.back.get("steps/note") == b"v"
    assert in_front(tier) == []
    tiers.back.put("steps/note", b"w")
    assert tier.get("steps/note") == b"w"
    assert read(tier, "steps/note", 1) == b"w"


# ---------------------------------------------------------------- delete


def test_deleting_cancels_uploads_that_wait(tiers: Tiers) -> None:
    tier = tiers.open(upload_threads=1)
    tiers.client.hold()
    places = publish(tier, 5)
    until(lambda: tiers.client.held == 1)
    with ThreadPoolExecutor(1) as pool:
        removing = pool.submit(tier.delete, "steps/train/s/i")
        until(lambda: tier.stats().queued_groups == 0)
        tiers.client.let_go()
        assert removing.result(timeout=20)
    assert {key.split("/")[4] for key in tiers.client.keys("put")} == {"000000"}
    assert not any(tier.walk(""))
    assert not any(tiers.back.walk(""))
    with pytest.raises(ObjectMissing):
        tier.get(f"{places[3]}/zarr.json")
    tier.settle("")


@pytest.mark.parametrize("member", ["data/c.0", "zarr.json"])
def test_deleting_waits_for_the_upload_in_flight_and_leaves_nothing_behind(
    tiers: Tiers, member: str
) -> None:
    tier = tiers.open()
    tiers.client.hold(lambda operation, key: operation == "put" and key.endswith(member))
    publish(tier, 1)
    until(lambda: tiers.client.held == 1)
    with ThreadPoolExecutor(1) as pool:
        removing = pool.submit(tier.delete, step(0))
        until(lambda: tier.stats().queued_groups == 0)
        assert not removing.done()
        tiers.client.let_go()
        assert removing.result(timeout=20)
    assert not any(tiers.back.walk(""))
    assert in_front(tier) == []
    assert len(tiers.client.keys("put")) == (1 if member == "data/c.0" else 2)


def test_deleting_what_was_never_uploaded_asks_nothing_of_the_object_store(tiers: Tiers) -> None:
    tier = tiers.open(upload_threads=1)
    tiers.client.hold()
    publish(tier, 3)
    until(lambda: tiers.client.held == 1)
    asked = len(tiers.client.asked)
    assert tier.delete(step(2))
    assert len(tiers.client.asked) == asked
    tiers.client.let_go()
    tier.settle("")
    tier.publish(step(2), group(2))
    tiers.client.asked.clear()
    assert tier.delete(step(2))
    assert tiers.client.asked, "it looked before it published: something may be there"


@pytest.mark.parametrize("policy", POLICIES)
def test_deleting_waits_for_who_publishes_below(tiers: Tiers, policy: str) -> None:
    """Else the store would list half of a group, and the other half would come behind."""
    tier = tiers.open(policy, capacity_bytes=1)
    tiers.client.hold(lambda operation, key: operation == "put" and key.endswith("zarr.json"))
    with ThreadPoolExecutor(2) as pool:
        publishing = pool.submit(tier.publish, step(0), group(0), fresh=True)
        until(lambda: tiers.client.held == 1)
        removing = pool.submit(tier.delete, "steps/train")
        tiers.client.let_go()
        publishing.result(timeout=20)
        assert removing.result(timeout=20)
    assert not any(tiers.back.walk(""))


def test_deleting_does_not_wait_for_writers_who_wait_for_uploads_that_wait_for_it(
    tiers: Tiers,
) -> None:
    tier = tiers.open(queue_bytes=1, deadline_s=30)  # one at a time
    tiers.client.hold()
    tier.publish(step(0, "other"), group(0), fresh=True)
    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(publish, tier, 1, i) for i in range(3)]
        until(lambda: tier._writer and len(tier._writer.queue._line) == 3)
        removing = pool.submit(tier.delete, "steps/train/s")
        until(lambda: tier._writer and len(tier._writer._traffic._works) == 5)
        tiers.client.let_go()
        assert removing.result(timeout=10)
        assert len([w.result(timeout=10) for w in writing]) == 3
    tier.settle("")
    assert {place.split("/")[2] for place in tiers.uploaded()} == {"other"}
    assert list(tier.list("steps/train")) == ["other"]


def test_a_delete_that_fails_in_the_object_store_can_be_repeated(tiers: Tiers) -> None:
    tier = tiers.open()
    publish(tier, 2)
    tier.settle("")
    tiers.client.failure = DOWN
    with pytest.raises(StorageUnreachable):
        tier.delete("steps/train/s")
    tiers.client.failure = None
    assert tier.delete("steps/train/s")
    assert not tier.delete("steps/train/s")
    assert not any(tier.walk(""))


def test_a_delete_that_fails_before_it_removes_anything_loses_no_upload(tiers: Tiers) -> None:
    failing = True

    def at(point: str) -> None:
        if point == "delete begun" and failing:
            raise StorageFailed("the device is gone for a moment")

    tier = tiers.open(at=at, upload_threads=1)
    tiers.client.hold()
    places = publish(tier, 3)
    until(lambda: tiers.client.held == 1)
    with ThreadPoolExecutor(1) as pool:
        removing = pool.submit(tier.delete, "steps")
        until(lambda: tier.stats().queued_groups == 0)
        tiers.client.let_go()
        with pytest.raises(StorageFailed):
            removing.result(timeout=20)
    tier.settle("")
    assert tiers.uploaded() == set(places)


def test_a_part_of_a_group_is_removed_once_the_group_is_uploaded(tiers: Tiers) -> None:
    tier = tiers.open()
    (place,) = publish(tier, 1)
    assert tier.delete(f"{place}/data")
    assert tree(tier) == [f"{place}/zarr.json"]
    tier.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_publishing_uploading_evicting_and_deleting_at_once_mix_nothing_up(
    tiers: Tiers, policy: str
) -> None:
    tier = tiers.open(policy, capacity_bytes=5 * GROUP_BYTES, high_water=0.8, low_water=0.4)

    def come_and_go(worker: int) -> list[tuple[int, str]]:
        numbers = random.Random(worker)
        mine: list[tuple[int, str]] = []
        for i in range(40):
            index = 1000 * worker + i
            prefix = step(index, f"s{numbers.randrange(2)}")
            mine.append((index, tier.publish(prefix, group(index), fresh=i % 2 == 0)))
            index, place = numbers.choice(mine)
            assert held(tier, place, group(index))
            if numbers.random() < 0.4:
                assert tier.delete(place.rpartition("/")[0])
                mine.remove((index, place))
        return mine

    left = [item for mine in in_threads(4, come_and_go) for item in mine]
    tier.settle("")
    places = {place for _, place in left}
    assert tiers.uploaded() == places
    assert {key for key, _ in tiers.back.walk("")} == {
        f"{place}/{name}" for place in places for name in group(0)
    }
    assert all(held(tier, place, group(index)) for index, place in left)
    tier.delete("steps")
    assert not any(tier.walk(""))
    assert tier.stats().front_bytes == 0


# ---------------------------------------------------------------- distrust


def test_a_damaged_copy_is_dropped_where_the_object_store_has_the_group(tiers: Tiers) -> None:
    cache = NodeCache(tiers.folder / "cache", 2**20)
    tier = tiers.open(cache=cache)
    (place,) = publish(tier, 1)
    tier.settle("")
    key = f"{place}/data/c.0"
    (tiers.folder / "front" / key).write_bytes(b"damaged")
    assert tier.get(key) == b"damaged"
    assert tier.distrust(key)
    assert held(tier, place, group(0))
    assert cache.promoted > 0
    (tiers.folder / "cache" / key).write_bytes(b"damaged")
    assert tier.get(key) == b"damaged"
    assert tier.distrust(key)
    assert held(tier, place, group(0))


def test_the_only_copy_is_kept_however_damaged(tiers: Tiers) -> None:
    tier = tiers.open()
    tiers.client.hold(lambda operation, key: operation == "put" and key.endswith("zarr.json"))
    (place,) = publish(tier, 1)
    until(lambda: tiers.client.held)
    assert not tier.distrust(f"{place}/data/c.0"), "uploaded, but not with its group"
    assert not tier.distrust(f"{place}/zarr.json")
    assert held(tier, place, group(0))
    tiers.client.let_go()


# ---------------------------------------------------------------- other processes that read


def test_without_a_front_it_reads_and_refuses_to_write(tiers: Tiers) -> None:
    writer = tiers.open()
    places = publish(writer, 2)
    writer.settle("")
    cache = NodeCache(tiers.folder / "cache", 2**20)
    tier = TieredBackend(None, tiers.back, cache=cache)
    for _ in range(2):
        assert all(held(tier, place, group(i)) for i, place in enumerate(places))
    assert cache.promoted == 4
    assert len(tiers.client.keys("read")) == 4, "once an object"
    for call in (
        lambda: publish(tier, 1, 5),
        lambda: tier.delete(step(0)),
        lambda: tier.put("k", b""),
        tier.recover,
    ):
        with pytest.raises(ReadOnlyStore):
            call()
    tier.cool(["steps"])
    tier.sync()
    tier.settle("")
    assert tier.stats().promoted == 4
    tier.close()


def test_with_the_writer_s_front_it_reads_what_is_not_uploaded_yet(tiers: Tiers) -> None:
    writer = tiers.open()
    tiers.client.hold(lambda operation, key: operation == "put")
    places = publish(writer, 2)
    front = LocalBackend(tiers.folder / "front", read_only=True)
    tier = TieredBackend(front, tiers.back)
    assert all(held(tier, place, group(i)) for i, place in enumerate(places))
    tiers.client.let_go()
    writer.settle("")
    key = f"{places[0]}/data/c.0"
    (tiers.folder / "front" / key).write_bytes(b"damaged")
    assert tier.distrust(key)
    assert tier.get(key) == group(0)["data/c.0"][0], "from the object store, from now on"
    tier.close()
    front.close()


def test_a_reader_pickles_as_its_configuration(tmp_path: Path) -> None:
    back = FsspecBackend(f"file://{tmp_path}/store")
    place = back.publish(step(0), MEMBERS)
    LocalBackend(tmp_path / "front").close()
    front = LocalBackend(tmp_path / "front", read_only=True)
    cache = NodeCache(tmp_path / "cache", 2**20)
    descriptors = len(os.listdir("/proc/self/fd"))
    copy = pickle.loads(pickle.dumps(TieredBackend(front, back, cache=cache)))
    assert copy.get(f"{place}/part/data") == b"0123456789"
    assert copy.stats().promoted == 1
    copy.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    back.close()
    front.close()


# ---------------------------------------------------------------- start


def test_a_start_counts_what_is_there_and_queues_what_the_object_store_lacks(tiers: Tiers) -> None:
    tier = tiers.open()
    places = publish(tier, 2)
    tier.settle("")
    tiers.client.hold(lambda operation, key: operation == "put" and key.endswith("zarr.json"))
    places += publish(tier, 2, 2)
    until(lambda: tiers.client.held == 2)
    tiers.client.failure = DOWN
    tiers.client.let_go()
    crash(tier)
    tiers.client.failure = None
    assert len(tiers.uploaded()) == 2
    assert len(list(tiers.back.walk(""))) == 6, "two groups are there in part"

    tier = tiers.open()
    assert tier.recover() == 2
    assert tier.stats().front_bytes == 4 * GROUP_BYTES
    tier.settle("")
    assert tiers.uploaded() == set(places)


def test_a_start_goes_by_the_time_of_writing(tiers: Tiers) -> None:
    tier = tiers.open("write-through")
    places = publish(tier, 4)
    for age, i in enumerate((2, 0, 3, 1)):
        os.utime(tiers.folder / "front" / places[i], ns=(0, 10**9 * (age + 1)))
    tier.close()
    tier = tiers.open("write-through", capacity_bytes=4 * GROUP_BYTES, high_water=1, low_water=1)
    assert tier.recover() == 0
    publish(tier, 2, 4)
    assert in_front(tier) == [1, 3, 4, 5]


def test_a_start_with_less_room_evicts(tiers: Tiers) -> None:
    tier = tiers.open("write-through")
    publish(tier, 10)
    tier.close()
    tier = tiers.open("write-through", capacity_bytes=4 * GROUP_BYTES, high_water=1, low_water=0.5)
    tier.recover()
    until(lambda: tier.stats().front_bytes == 2 * GROUP_BYTES)
    assert in_front(tier) == [8, 9]


def test_a_start_counts_queued_groups_on_the_queue_s_bound(tiers: Tiers) -> None:
    tier = tiers.open()
    tiers.client.failure = DOWN
    publish(tier, 4)
    crash(tier)
    tiers.client.failure = None
    tier = tiers.open(queue_bytes=4 * 8 * KiB, deadline_s=0.05)
    tiers.client.hold(lambda operation, key: operation == "put")
    assert tier.recover() == 4
    with pytest.raises(BackpressureTimeout):
        publish(tier, 1, 4)
    tiers.client.let_go()
    tier.settle("")
    publish(tier, 1, 4)


def test_a_start_with_another_policy_uploads_what_was_left(tiers: Tiers) -> None:
    tier = tiers.open("write-back")
    tiers.client.failure = DOWN
    (place,) = publish(tier, 1)
    crash(tier)
    tiers.client.failure = None
    tier = tiers.open("write-through")
    tiers.client.hold(lambda operation, key: operation == "put")
    assert tier.recover() == 1
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(tier.publish, step(0), group(0))
        until(lambda: tiers.client.held)
        assert not again.done(), "acknowledged when the object store has it"
        tiers.client.let_go()
        assert again.result(timeout=20) == place
    assert tiers.uploaded() == {place}


# ---------------------------------------------------------------- copies that differ in size


def measured(commit: bytes, names: Collection[str]) -> dict[str, int]:
    """Say what a group's members measure, as :func:`group` made it."""
    assert "data/c.0" in names
    return {"data/c.0": 8 * KiB} if commit.isdigit() else {}


Damage = tuple[str, str, Callable[[bytes], bytes]]

BACK_IS_SHORT: list[Damage] = [
    ("back", "data/c.0", lambda data: data[:-7]),
    ("back", "data/c.0", lambda data: b""),
    ("back", "data/c.0", lambda data: data + b"more"),
    ("back", "zarr.json", lambda data: b""),
]
FRONT_IS_SHORT: list[Damage] = [
    ("front", "data/c.0", lambda data: data[:-7]),
    ("front", "data/c.0", lambda data: data + b"more"),
    ("front", "zarr.json", lambda data: b""),
]


def damage(tiers: Tiers, place: str, harm: Damage) -> None:
    where, name, how = harm
    if where == "back":
        tiers.back.put(f"{place}/{name}", how(tiers.back.get(f"{place}/{name}")))
    else:
        path = tiers.folder / "front" / place / name
        path.write_bytes(how(path.read_bytes()))


@pytest.mark.parametrize("harm", BACK_IS_SHORT)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_start_keeps_what_is_whole_in_front_and_uploads_it_again(
    tiers: Tiers, policy: str, harm: Damage
) -> None:
    tier = tiers.open(policy)
    places = publish(tier, 2)
    tier.close()
    damage(tiers, places[0], harm)
    tier = tiers.open(policy, measure=measured)
    assert tier.recover() == 1
    assert held(tier, places[0], group(0))
    tier.settle("")
    assert in_front(tier) == [0, 1]
    assert all(held(tiers.back, place, group(i)) for i, place in enumerate(places))


@pytest.mark.parametrize("harm", FRONT_IS_SHORT)
def test_a_start_drops_what_a_power_cut_has_damaged_in_front(tiers: Tiers, harm: Damage) -> None:
    tier = tiers.open("write-through")
    places = publish(tier, 2)
    tier.close()
    damage(tiers, places[0], harm)
    tier = tiers.open("write-through", measure=measured)
    assert tier.recover() == 0
    assert in_front(tier) == [1]
    assert held(tier, places[0], group(0))


def test_a_start_drops_and_uploads_nothing_where_neither_copy_is_right(tiers: Tiers) -> None:
    tier = tiers.open("write-through")
    (place,) = publish(tier, 1)
    tier.close()
    damage(tiers, place, ("back", "data/c.0", lambda data: data[:-7]))
    damage(tiers, place, ("front", "data/c.0", lambda data: data[:-9]))
    tier = tiers.open("write-through", measure=measured, capacity_bytes=GROUP_BYTES)
    assert tier.recover() == 0
    with suppress(StorageFull):
        publish(tier, 1, 1)  # and it is not evicted
    assert len(tier.get(f"{place}/data/c.0")) == 8 * KiB - 9
    assert len(tiers.back.get(f"{place}/data/c.0")) == 8 * KiB - 7


@pytest.mark.parametrize(
    ("harm", "in_front_still"),
    [(FRONT_IS_SHORT[0], False), (FRONT_IS_SHORT[1], True), (BACK_IS_SHORT[0], True)],
)
def test_where_a_commit_says_no_sizes_only_a_shorter_front_is_dropped(
    tiers: Tiers, harm: Damage, in_front_still: bool
) -> None:
    tier = tiers.open("write-through")
    (place,) = publish(tier, 1)
    tier.close()
    damage(tiers, place, harm)
    tier = tiers.open("write-through")
    assert tier.recover() == 0
    assert (in_front(tier) == [0]) is in_front_still
