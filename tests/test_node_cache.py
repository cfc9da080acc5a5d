"""NodeCache: one download for all processes of a node, within a bound, and never in the way."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from tests._rollouts import spawn_child
from tests._tiers import KiB, Tiers, group, held, step, until
from tq_fs.backends import NodeCache
from tq_fs.backends._files import LocalObject
from tq_fs.backends._tiered import TieredBackend
from tq_fs.errors import InvalidConfig, ObjectMissing, StorageDenied, StorageUnreachable
from tq_fs.testing import in_threads

MiB = 1024 * KiB


class Store:
    """Objects whose bytes follow from their keys, written down part by part."""

    def __init__(self, size: int = 10 * KiB, parts: int = 3) -> None:
        self.size = size
        self.parts = parts
        self.downloads: list[str] = []
        self.failure: Exception | None = None
        self.go = threading.Event()
        self.go.set()

    def body(self, key: str) -> bytes:
        return random.Random(key).randbytes(self.size)

    def download(self, key: str, file: BinaryIO) -> int:
        self.downloads.append(key)
        body = self.body(key)
        part = -(-len(body) // self.parts)
        for start in range(0, len(body), part):
            file.write(body[start : start + part])
            assert self.go.wait(20)
            if self.failure is not None:
                raise self.failure
        return len(body)


@pytest.fixture
def store() -> Store:
    return Store()


def key_of(i: int) -> str:
    return f"steps/train/s/i/{i:06d}/try-0123456789abcdef/data/c.0"


def files(folder: Path) -> list[str]:
    """Return the files of a cache, without the one that counts."""
    found = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    return sorted(set(found) - {".used"})


def used(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in files(folder))


def counted(folder: Path) -> int:
    return int((folder / ".used").read_text())


def whole(source: LocalObject | None, size: int) -> bytes | None:
    if source is None:
        return None
    buffer = bytearray(size)
    with source:
        source.readinto([buffer], 0)
    return bytes(buffer)


# ---------------------------------------------------------------- one download


def test_an_object_is_downloaded_once_and_kept(tmp_path: Path, store: Store) -> None:
    cache = NodeCache(tmp_path, MiB)
    for i in (0, 1, 0, 1):
        assert whole(cache.open(key_of(i), store.download), store.size) == store.body(key_of(i))
        assert cache.get(key_of(i), store.download) == store.body(key_of(i))
    assert store.downloads == [key_of(0), key_of(1)]
    assert cache.promoted == 2
    assert files(tmp_path) == [key_of(0), key_of(1)]
    assert counted(tmp_path) == used(tmp_path) == 2 * store.size


def test_an_empty_object_is_kept(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, MiB)

    def nothing(key: str, file: BinaryIO) -> int:
        return file.write(b"")

    assert cache.get("a", nothing) == b""
    assert cache.get("a", nothing) == b""
    assert cache.promoted == 1


def test_threads_that_ask_at_once_share_a_download(tmp_path: Path, store: Store) -> None:
    cache = NodeCache(tmp_path, MiB)
    found = in_threads(8, lambda _: cache.get(key_of(0), store.download))
    assert found == [store.body(key_of(0))] * 8
    assert store.downloads == [key_of(0)]


RANK = """
import os, sys, time
from pathlib import Path
from tq_fs.backends import NodeCache, ObjectBackend, Retry
from tq_fs.backends._fsspec import FsspecClient
from tq_fs.backends._tiered import TieredBackend
from tq_fs.storage_options import StorageOptions

folder, limit, *keys = sys.argv[1:]

class Counting:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def read(self, key, offset, nbytes):
        with open(f"{folder}/requests", "a") as log:
            log.write(f"{key} {offset}\\n")
        time.sleep(0.02)  # the others come meanwhile
        return self.inner.read(key, offset, nbytes)

client = Counting(FsspecClient(f"file://{folder}/store", StorageOptions()))
back = ObjectBackend("file://store", "", client, retry=Retry(deadline_s=0))
tier = TieredBackend(None, back, cache=NodeCache(f"{folder}/cache", int(limit)))
print("ready", flush=True)
sys.stdin.readline()
for key in keys:
    want = Path(folder, "store", key).read_bytes()
    assert tier.get(key) == want
    buffer = bytearray(100)
    with tier.open(key) as source:
        source.readinto([buffer], 7)
    assert buffer == want[7:107]
print("done", tier.stats().promoted, flush=True)
"""


def ranks(folder: Path, limit: int, orders: list[list[str]]) -> list[int]:
    """Read objects in processes that begin at once; return how many each promoted."""
    processes = [spawn_child(RANK, folder, limit, *keys) for keys in orders]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    ended = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        out, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
        assert "cannot be kept" not in error
        ended.append(int(out.split()[-1]))
    return ended


def make_objects(folder: Path, count: int, size: int) -> list[str]:
    numbers = random.Random(0)
    for i in range(count):
        path = folder / "store" / key_of(i)
        path.parent.mkdir(parents=True)
        path.write_bytes(numbers.randbytes(size))
    return [key_of(i) for i in range(count)]


def test_processes_that_ask_at_once_share_a_download(tmp_path: Path) -> None:
    keys = make_objects(tmp_path, 3, 20 * MiB)
    promoted = ranks(tmp_path, 100 * MiB, [keys] * 4)
    requests = (tmp_path / "requests").read_text().splitlines()
    part = 8 * MiB
    assert sorted(requests) == sorted(f"{key} {n * part}" for key in keys for n in range(3))
    assert sum(promoted) == 3
    assert counted(tmp_path / "cache") == used(tmp_path / "cache") == 60 * MiB


def test_processes_keep_within_the_bound_together(tmp_path: Path) -> None:
    keys = make_objects(tmp_path, 40, 50 * KiB)
    limit = 500 * KiB
    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            try:
                most = max(most, used(tmp_path / "cache"))
            except FileNotFoundError:
                continue  # evicted while it was counted

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            numbers = random.Random(0)
            ranks(tmp_path, limit, [numbers.sample(keys, len(keys)) for _ in range(3)])
        finally:
            done.set()
        watching.result()
    assert 0 < most <= limit
    assert counted(tmp_path / "cache") == used(tmp_path / "cache") <= limit
    assert not [name for name in files(tmp_path / "cache") if name.endswith(".part")]


# ---------------------------------------------------------------- downloads that do not end

STUCK = """
import os, sys, time
from tq_fs.backends import NodeCache

folder, key = sys.argv[1:]

def wait(point):
    if os.fork() == 0:  # as a data loader does at any moment
        os.write(1, f"{point} {os.getpid()}\\n".encode())
    time.sleep(600)

NodeCache(folder, 2**20, at=wait).get(key, lambda key, file: file.write(b"only a part"))
"""


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has downloaded a part of an object, and does not go on; nor does its fork."""
    process = spawn_child(STUCK, tmp_path, key_of(0))
    assert process.stdout is not None
    point, child = process.stdout.readline().split()
    assert point == "promoting"
    yield process
    os.kill(int(child), signal.SIGKILL)
    process.kill()
    process.communicate()


def test_who_waits_for_a_process_that_is_killed_takes_over(
    tmp_path: Path, store: Store, stuck: subprocess.Popen[str]
) -> None:
    cache = NodeCache(tmp_path, MiB)
    assert used(tmp_path) == 11
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(cache.get, key_of(0), store.download) for _ in range(2)]
        time.sleep(0.1)
        assert not any(future.done() for future in waiting)
        assert store.downloads == []
        stuck.kill()
        assert [f.result(timeout=20) for f in waiting] == [store.body(key_of(0))] * 2
    assert store.downloads == [key_of(0)]
    assert files(tmp_path) == [key_of(0)]
    assert counted(tmp_path) == store.size


def test_who_waits_for_a_process_that_is_stopped_goes_on_without(
    tmp_path: Path, store: Store, stuck: subprocess.Popen[str]
) -> None:
    stuck.send_signal(signal.SIGSTOP)
    cache = NodeCache(tmp_path, MiB, wait_s=0.1)
    assert cache.open(key_of(0), store.download) is None
    assert cache.get(key_of(1), store.download) == store.body(key_of(1)), "others are not held up"
    assert store.downloads == [key_of(1)]
    stuck.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("when", ["start", "full"])
def test_parts_of_killed_processes_are_swept(
    tmp_path: Path, store: Store, stuck: subprocess.Popen[str], when: str
) -> None:
    cache = NodeCache(tmp_path, 3 * store.size)
    assert len(files(tmp_path)) == 1, "it may still go on"
    stuck.kill()
    stuck.wait()
    if when == "start":
        cache = NodeCache(tmp_path, 3 * store.size)
        assert files(tmp_path) == []
        assert counted(tmp_path) == 0
    for i in range(1, 4):
        assert cache.get(key_of(i), store.download)
    assert files(tmp_path) == [key_of(i) for i in range(1, 4)], "there is room for all three"
    assert counted(tmp_path) == used(tmp_path)


def test_who_downloads_in_vain_says_so_and_who_waits_goes_on_without(
    tmp_path: Path, store: Store
) -> None:
    cache = NodeCache(tmp_path, MiB)
    store.go.clear()
    with ThreadPoolExecutor(2) as pool:
        downloads = pool.submit(cache.get, key_of(0), store.download)
        until(lambda: store.downloads)
        waits = pool.submit(cache.get, key_of(0), store.download)
        time.sleep(0.05)
        store.failure = StorageUnreachable("no answer")
        store.go.set()
        with pytest.raises(StorageUnreachable):
            downloads.result(timeout=20)
        assert waits.result(timeout=20) is None
    assert files(tmp_path) == []
    assert counted(tmp_path) == 0
    store.failure = None
    assert cache.get(key_of(0), store.download) == store.body(key_of(0))


def test_a_fork_does_not_keep_its_parent_s_locks(tmp_path: Path, store: Store) -> None:
    cache = NodeCache(tmp_path, MiB, wait_s=5)
    store.go.clear()
    with ThreadPoolExecutor(2) as pool:
        downloads = pool.submit(cache.get, key_of(0), store.download)
        until(lambda: store.downloads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: the child does nothing but sleep
            child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        try:
            store.failure = StorageUnreachable("no answer")
            store.go.set()
            assert downloads.exception(timeout=20)
            store.failure = None
            start = time.monotonic()
            assert cache.get(key_of(0), store.download) == store.body(key_of(0))
            assert time.monotonic() - start < 2
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# ---------------------------------------------------------------- the bound


def test_what_was_not_read_for_longest_leaves_first(tmp_path: Path, store: Store) -> None:
    cache = NodeCache(tmp_path, 5 * store.size)
    for i in range(5):
        cache.get(key_of(i), store.download)
    for i in (0, 3, 1):
        with cache.open(key_of(i), store.download) or pytest.fail("it is kept"):
            pass
    left = []
    for i in range(5, 10):
        before = set(files(tmp_path))
        cache.get(key_of(i), store.download)
        left += sorted(before - set(files(tmp_path)))
    assert left == [key_of(i) for i in (2, 4, 0, 3, 1)]
    assert counted(tmp_path) == used(tmp_path) == 5 * store.size


def test_a_reader_keeps_what_it_has_open(tmp_path: Path, store: Store) -> None:
    cache = NodeCache(tmp_path, store.size)
    source = cache.open(key_of(0), store.download)
    assert cache.get(key_of(1), store.download)
    assert files(tmp_path) == [key_of(1)]
    assert whole(source, store.size) == store.body(key_of(0))


def test_an_object_larger_than_the_cache_evicts_nothing_and_is_tried_once(
    tmp_path: Path,
) -> None:
    small, large = Store(10 * KiB), Store(50 * KiB)
    cache = NodeCache(tmp_path, 30 * KiB)
    cache.get(key_of(0), small.download)
    for _ in range(3):
        assert cache.open(key_of(1), large.download) is None
    assert large.downloads == [key_of(1)]
    assert files(tmp_path) == [key_of(0)]
    assert counted(tmp_path) == used(tmp_path)


def test_downloads_that_leave_no_room_for_each_other_go_on_without(tmp_path: Path) -> None:
    store = Store(20 * KiB, parts=4)
    cache = NodeCache(tmp_path, 25 * KiB)
    found = in_threads(4, lambda i: cache.get(key_of(i), store.download))
    assert all(f in (None, store.body(key_of(i))) for i, f in enumerate(found))
    assert used(tmp_path) <= 25 * KiB
    assert counted(tmp_path) == used(tmp_path)


@pytest.mark.parametrize("text", [None, "", "garbage", "99999999999", "0"])
def test_a_wrong_count_is_put_right(tmp_path: Path, store: Store, text: str | None) -> None:
    cache = NodeCache(tmp_path, 5 * store.size)
    for i in range(4):
        cache.get(key_of(i), store.download)
    if text is None:
        (tmp_path / ".used").unlink()
    else:
        (tmp_path / ".used").write_text(text)
    for i in range(4, 10):
        assert cache.get(key_of(i), store.download)
    cache = NodeCache(tmp_path, 5 * store.size)
    assert counted(tmp_path) == used(tmp_path) <= 5 * store.size


def test_nothing_but_objects_is_left(tmp_path: Path, store: Store) -> None:
    """No lock files, and no folders of what is gone."""
    cache = NodeCache(tmp_path, 3 * store.size)
    for i in range(50):
        cache.get(key_of(i), store.download)
    assert len(files(tmp_path)) == 3
    assert cache.drop("steps/train/s/i")
    assert not cache.drop("steps/train/s/i")
    assert sorted(os.listdir(tmp_path)) == [".used"]
    assert counted(tmp_path) == 0


def test_dropping_takes_what_is_below_a_prefix(tmp_path: Path, store: Store) -> None:
    cache = NodeCache(tmp_path, MiB)
    for i in range(4):
        cache.get(key_of(i), store.download)
    assert cache.drop(key_of(0))
    assert cache.drop("steps/train/s/i/000001")
    assert not cache.drop("steps/train/s/i/00000")
    assert files(tmp_path) == [key_of(2), key_of(3)]
    assert counted(tmp_path) == used(tmp_path)


def test_dropping_leaves_a_download_in_flight_alone(tmp_path: Path, store: Store) -> None:
    cache = NodeCache(tmp_path, MiB)
    store.go.clear()
    with ThreadPoolExecutor(1) as pool:
        downloads = pool.submit(cache.get, key_of(0), store.download)
        until(lambda: store.downloads and used(tmp_path))
        assert not cache.drop("steps")
        store.go.set()
        assert downloads.result(timeout=20) == store.body(key_of(0))
    assert counted(tmp_path) == used(tmp_path) == store.size


def test_threads_that_promote_evict_and_drop_at_once_mix_nothing_up(tmp_path: Path) -> None:
    store = Store(3 * KiB)
    cache = NodeCache(tmp_path, 30 * KiB)
    most = 0

    def work(seed: int) -> None:
        nonlocal most
        numbers = random.Random(seed)
        for _ in range(150):
            key = key_of(numbers.randrange(20))
            assert cache.get(key, store.download) in (None, store.body(key))
            most = max(most, counted(tmp_path))
            if numbers.random() < 0.2:
                cache.drop(key.rpartition("/try-")[0])

    in_threads(6, work)
    assert most <= 30 * KiB
    assert counted(tmp_path) == used(tmp_path)


# ---------------------------------------------------------------- never in the way


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("has no mount command")

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 and not folder.is_mount():
            pytest.skip(f"may not mount a file system: {done.stderr.strip()}")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    tiers = Tiers(tmp_path)
    yield tiers
    tiers.close()


@pytest.mark.root
def test_a_full_disk_keeps_nothing_and_fails_no_read(
    tiers: Tiers, disk: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = disk("size=128k")
    places = [tiers.back.publish(step(i), group(i, 40 * KiB)) for i in range(8)]
    cache = NodeCache(folder, MiB)
    tier = TieredBackend(None, tiers.back, cache=cache)
    for _ in range(2):
        assert all(held(tier, place, group(i, 40 * KiB)) for i, place in enumerate(places))
    assert cache.promoted > 0, "as long as there was room"
    assert not [name for name in files(folder) if name.endswith(".part")]
    assert counted(folder) == used(folder)
    assert len([r for r in caplog.records if "cannot be kept" in r.getMessage()]) == 1
    disk("remount,ro")
    assert all(held(tier, place, group(i, 40 * KiB)) for i, place in enumerate(places))
    disk("remount,rw")


def test_a_folder_that_is_gone_fails_no_read(tiers: Tiers) -> None:
    places = [tiers.back.publish(step(i), group(i)) for i in range(2)]
    tier = TieredBackend(None, tiers.back, cache=NodeCache(tiers.folder / "cache", MiB))
    assert held(tier, places[0], group(0))
    shutil.rmtree(tiers.folder / "cache")
    assert all(held(tier, place, group(i)) for i, place in enumerate(places))


def test_what_is_nowhere_is_missing_and_leaves_no_trace(tiers: Tiers) -> None:
    tier = TieredBackend(None, tiers.back, cache=NodeCache(tiers.folder / "cache", MiB))
    for call in (tier.get, tier.open):
        with pytest.raises(ObjectMissing):
            call(key_of(0))
    assert files(tiers.folder / "cache") == []


def test_small_objects_that_may_be_replaced_are_not_kept(tiers: Tiers) -> None:
    tier = TieredBackend(None, tiers.back, cache=NodeCache(tiers.folder / "cache", MiB))
    for value in (b"a", b"b"):
        tiers.back.put("steps/note", value)
        assert tier.get("steps/note") == value
    assert files(tiers.folder / "cache") == []


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="0 bytes"):
        NodeCache(tmp_path, 0)
    (tmp_path / "file").touch()
    with pytest.raises((StorageDenied, ObjectMissing)):
        NodeCache(tmp_path / "file" / "cache", 1)


def test_pickles_as_configuration(tmp_path: Path, store: Store) -> None:
    cache = NodeCache(tmp_path, MiB, wait_s=3)
    cache.get(key_of(0), store.download)
    copy: Any = pickle.loads(pickle.dumps(cache))
    assert (copy.folder, copy.limit_bytes, copy.promoted) == (tmp_path, MiB, 0)
    assert copy.get(key_of(0), store.download) == store.body(key_of(0))
    assert len(store.downloads) == 1
