"""What bounds memory: room for bytes on their way, and decoded chunks that are kept."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import pytest

from tq_fs.budget import ByteBudget
from tq_fs.cache import ChunkCache
from tq_fs.errors import BackpressureTimeout, StepTooLarge
from tq_fs.testing import in_threads


class Clock:
    """Seconds that pass only when they are looked at."""

    def __init__(self, step_s: float) -> None:
        self.now = 0.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def budget(limit: int, deadline_s: float = 20.0, clock: Clock | None = None) -> ByteBudget:
    return ByteBudget(
        limit, deadline_s=deadline_s, clock=clock or time.monotonic, subject="in flight"
    )


def blocked(*futures: Future[None]) -> bool:
    done, _ = wait(futures, timeout=0.1)
    return not done


def in_line(room: ByteBudget, count: int) -> None:
    """Wait until so many wait for room: a thread may be long in coming."""
    deadline = time.monotonic() + 20
    while room.waiting != count:
        assert time.monotonic() < deadline, f"{room.waiting} wait for room, not {count}"
        time.sleep(0.001)


# ---------------------------------------------------------------- budget


def test_room_is_given_until_it_is_used_up() -> None:
    room = budget(100)
    room.acquire(60)
    room.acquire(40)
    assert (room.used_bytes, room.peak_bytes) == (100, 100)
    room.acquire(0)
    room.release(60)
    assert (room.used_bytes, room.peak_bytes) == (40, 100)
    room.acquire(60)


def test_room_is_given_in_the_order_it_is_asked_for() -> None:
    """A small one behind does not overtake a large one, which would starve."""
    room = budget(100)
    room.acquire(50)
    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(room.acquire, 80)
        in_line(room, 1)
        assert blocked(large)
        small = pool.submit(room.acquire, 10)
        assert blocked(large, small)
        room.release(50)
        large.result(20)
        small.result(20)
    assert room.used_bytes == 90


def test_one_release_lets_several_in() -> None:
    room = budget(100)
    room.acquire(100)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(room.acquire, 25) for _ in range(4)]
        assert blocked(*waiting)
        room.release(100)
        for future in waiting:
            future.result(20)
    assert room.used_bytes == 100


def test_the_bound_holds_with_many_threads() -> None:
    room = budget(1000)
    lock = threading.Lock()
    now, peak = 0, 0

    def work(i: int) -> None:
        nonlocal now, peak
        sizes = np.random.default_rng(i).integers(1, 700, 150)
        for size in map(int, sizes):
            room.acquire(size)
            with lock:
                now += size
                peak = max(peak, now)
            time.sleep(0)
            with lock:
                now -= size
            room.release(size)

    in_threads(8, work)
    assert 500 < peak <= 1000
    assert peak <= room.peak_bytes <= 1000
    assert room.used_bytes == 0


def test_a_deadline_passes_with_numbers_and_a_remedy() -> None:
    room = budget(100, deadline_s=5.0, clock=Clock(step_s=4.999))
    room.acquire(70)
    started = time.monotonic()
    with pytest.raises(BackpressureTimeout) as error:
        room.acquire(31)
    assert time.monotonic() - started < 2, "the given clock counts"
    for part in ("31 bytes", "5 s", "70 of 100"):
        assert part in error.value.problem
    assert error.value.subject == "in flight"
    assert "inflight_bytes" in error.value.remedy
    assert room.used_bytes == 70
    room.acquire(30)


def test_a_deadline_does_not_pass_early() -> None:
    room = budget(100, deadline_s=0.3)
    room.acquire(100)
    started = time.monotonic()
    with pytest.raises(BackpressureTimeout):
        room.acquire(1)
    assert time.monotonic() - started >= 0.3


@pytest.mark.parametrize("deadline_s", [math.inf, 1e12])
def test_a_deadline_may_be_as_far_as_never(deadline_s: float) -> None:
    room = budget(100, deadline_s=deadline_s)
    room.acquire(100)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(room.acquire, 1)
        assert blocked(waiting)
        room.release(1)
        waiting.result(20)
    assert room.used_bytes == 100


def test_room_that_is_free_needs_no_time() -> None:
    room = budget(100, deadline_s=0.0, clock=Clock(step_s=1000.0))
    room.acquire(100)
    with pytest.raises(BackpressureTimeout):
        room.acquire(1)


def test_who_gives_up_lets_those_behind_go_on() -> None:
    room = budget(100, deadline_s=0.5)
    room.acquire(50)
    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(room.acquire, 80)
        in_line(room, 1)
        assert blocked(large)
        small = pool.submit(room.acquire, 10)
        assert isinstance(large.exception(20), BackpressureTimeout)
        small.result(20)
    assert room.used_bytes == 60


def test_more_than_the_whole_budget_is_refused_at_once() -> None:
    room = budget(100)
    with pytest.raises(StepTooLarge, match=r"101 bytes, the budget is 100.*inflight_bytes"):
        room.acquire(101)
    room.acquire(100)


# ---------------------------------------------------------------- cache


def chunk(value: int, nbytes: int = 100) -> np.ndarray:
    return np.full(nbytes, value, np.uint8)


def test_the_youngest_chunks_are_kept() -> None:
    cache = ChunkCache(300)
    for key in "abc":
        cache.put(key, chunk(ord(key)))
    assert cache.get("a") is not None  # now younger than b
    cache.put("d", chunk(0))
    assert [cache.get(k) is not None for k in "abcd"] == [True, False, True, True]
    assert cache.used_bytes == 300


def test_a_large_chunk_takes_the_place_of_several() -> None:
    cache = ChunkCache(300)
    for key in "abc":
        cache.put(key, chunk(1))
    cache.put("large", chunk(2, 250))
    assert [cache.get(k) is not None for k in (*"abc", "large")] == [False, False, False, True]
    assert cache.used_bytes == 250


def test_what_is_too_large_is_not_kept_and_drives_nothing_out() -> None:
    cache = ChunkCache(300)
    cache.put("a", chunk(1))
    cache.put("large", chunk(2, 301))
    assert cache.get("large") is None
    assert cache.get("a") is not None
    off = ChunkCache(0)
    off.put("a", chunk(1))
    assert off.get("a") is None
    assert off.used_bytes == 0


def test_a_key_is_counted_once() -> None:
    cache = ChunkCache(300)
    for _ in range(5):
        cache.put("a", chunk(1))
    assert cache.used_bytes == 100
    cache.clear()
    assert cache.used_bytes == 0
    assert cache.get("a") is None


def test_a_kept_chunk_cannot_be_changed() -> None:
    cache = ChunkCache(300)
    mine = chunk(1)
    cache.put("a", mine)
    mine[:] = 9
    kept = cache.get("a")
    assert kept is not None
    assert kept.tolist() == [1] * 100
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 2


def test_a_view_is_kept_without_the_memory_behind_it() -> None:
    cache = ChunkCache(300)
    cache.put("a", np.zeros((1000, 10), np.uint8)[:10])
    kept = cache.get("a")
    assert kept is not None
    assert kept.base is None


def test_hits_and_misses_are_counted() -> None:
    cache = ChunkCache(300)
    cache.get("a")
    cache.put("a", chunk(1))
    cache.get("a")
    cache.get("a")
    assert (cache.hits, cache.misses) == (2, 1)


def test_many_threads_share_one_bound() -> None:
    cache = ChunkCache(1000)

    def work(i: int) -> None:
        for j in range(300):
            key = (i * j) % 37
            kept = cache.get(key)
            assert kept is None or set(kept.tolist()) == {key}
            cache.put(key, chunk(key, 50 + key))
            assert cache.used_bytes <= 1000 + 8 * 100

    in_threads(8, work)
    kept = [c for c in map(cache.get, range(37)) if c is not None]
    assert cache.used_bytes == sum(c.nbytes for c in kept) <= 1000
    assert kept
