"""One process writes to a store in an object store: the one that opened it last."""

from __future__ import annotations

import multiprocessing
import random
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests._ways import DRIVERS, ONCE, QUICK, Way, finalized, is_whole, open_small, record
from tq_fs.backends import FsspecBackend, ObjectBackend
from tq_fs.claim import Claim, take_claim
from tq_fs.errors import StorageFailed, StoreBusy, StoreFenced, WrongStore

FORK = multiprocessing.get_context("fork")


def is_valid(claim: Claim) -> bool:
    try:
        claim.check()
    except StoreFenced:
        return False
    return True


def sooner(low: float, high: float) -> float:
    """Wait a fraction of what is usual, so that tests are quick."""
    return random.uniform(low, high / 20)


@pytest.fixture
def backend() -> Iterator[ObjectBackend]:
    backend = FsspecBackend(f"memory://{uuid.uuid4().hex}/store")
    with closing(backend):
        yield backend


# ---------------------------------------------------------------- one after the other


def test_the_first_claim_is_valid_and_the_next_one_fences_it(backend: ObjectBackend) -> None:
    first = take_claim(backend)
    first.check()
    first.check()
    assert first.epoch == 1
    second = take_claim(backend)
    assert second.epoch == 2
    second.check()
    with pytest.raises(
        StoreFenced, match=r"later process \(epoch 2\).*one process writes"
    ) as raised:
        first.check()
    assert "epoch 1" in raised.value.subject
    third = take_claim(backend)
    assert third.epoch == 3
    assert [is_valid(claim) for claim in (first, second, third)] == [False, False, True]


def test_older_claims_are_removed(backend: ObjectBackend) -> None:
    claims = [take_claim(backend) for _ in range(5)]
    (name,) = backend.list("claims")
    assert name.startswith("00000005-")
    assert [is_valid(claim) for claim in claims] == [False] * 4 + [True]


def test_a_claim_that_somebody_removed_is_no_longer_valid(backend: ObjectBackend) -> None:
    claim = take_claim(backend)
    backend.delete("claims")
    assert not is_valid(claim)


def test_a_later_claim_fences_though_older_ones_were_not_removed(backend: ObjectBackend) -> None:
    """Who put it may have died since; it may also be at work."""
    for epoch in (1, 2):  # also the same one, where a listing missed what was put meanwhile
        claim = take_claim(backend)
        assert claim.epoch == epoch
        backend.put(f"claims/{epoch:08d}-0123456789abcdef", b"")
        assert not is_valid(claim)


def test_a_claim_that_is_gone_at_the_second_look_is_put_again(backend: ObjectBackend) -> None:
    put = backend.put

    class Hasty:
        """Its first listing after a put comes too early, or too late."""

        delete, early = backend.delete, True

        def put(self, key: str, data: bytes) -> None:
            put(key, data)
            self.early = not self.early

        def list(self, prefix: str) -> Iterator[str]:
            return iter(()) if not self.early else backend.list(prefix)

    claim = take_claim(Hasty(), sleep=lambda s: None)  # type: ignore[arg-type]
    assert claim.epoch == 1
    assert len(list(backend.list("claims"))) == 1


def test_epochs_go_on_behind_those_of_dead_processes(backend: ObjectBackend) -> None:
    """Each died between putting its claim and removing older ones."""
    names = [f"{epoch:08d}-{epoch:016x}" for epoch in (3, 41, 41)]
    for name in names:
        backend.put(f"claims/{name}", b"")
    claim = take_claim(backend)
    assert claim.epoch == 42
    assert is_valid(claim)
    assert len(list(backend.list("claims"))) == 1


GARBAGE = [
    *(
        "x",
        "a b",
        "-",
        "00000009",
        "00000009-",
        "00000009-xyz",
        "9-0123456789abcdef",
        "Ä-ö-ü",
        "%41",
    ),
    *("٣٣٣٣٣٣٣٣-0123456789abcdef", "00000009-0123456789ABCDEF", "99999999999999999999-zz"),
    *("below/00000009-0123456789abcdef", "try-0123456789abcdef", "00000009-0123456789abcdef.json"),
]


def test_strange_names_among_the_claims_do_no_harm(backend: ObjectBackend) -> None:
    for name in GARBAGE:
        backend.put(f"claims/{name}", b"strange")
    before = {name for name, _ in backend.walk("claims")}
    first, second = take_claim(backend), take_claim(backend)
    assert [first.epoch, second.epoch] == [1, 2]
    assert [is_valid(first), is_valid(second)] == [False, True]
    for name in GARBAGE:
        backend.put(f"claims/{name}", b"and later")
    assert is_valid(second)
    assert before <= {name for name, _ in backend.walk("claims")}  # and none is taken away


def test_whoever_finds_a_rival_each_time_gives_up(backend: ObjectBackend) -> None:
    put, waits = backend.put, []
    rivals = iter(range(1000))

    class Crowd:
        """Puts another claim of the same epoch beside each."""

        list, delete = backend.list, backend.delete

        def put(self, key: str, data: bytes) -> None:
            put(key, data)
            put(f"{key.partition('-')[0]}-{next(rivals):016x}", b"")

    def uniform(low: float, high: float) -> float:
        waits.append((low, high))
        return high

    slept: list[float] = []
    with pytest.raises(StoreBusy, match="12 times in a row"):
        take_claim(Crowd(), sleep=slept.append, uniform=uniform)  # type: ignore[arg-type]
    assert [low for low, _ in waits] == [0.0] * 12
    assert (
        slept
        == [high for _, high in waits]
        == pytest.approx([min(0.05 * 2**n, 1.0) for n in range(12)])
    )


# ---------------------------------------------------------------- side by side, in every order


@dataclass
class Turns:
    """Lets threads do one request each time it is their turn, in an order given beforehand."""

    order: Sequence[int]
    objects: dict[str, bytes] = field(default_factory=dict)
    waiting: dict[int, threading.Semaphore] = field(default_factory=dict)
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    alive: set[int] = field(default_factory=set)

    def run(self, works: Sequence[Callable[[Any], None]]) -> None:
        """Run all to their end; where the order ends they go on one after the other."""
        self.waiting = {i: threading.Semaphore(0) for i in range(len(works))}
        threads = [
            threading.Thread(target=self._live, args=(i, work)) for i, work in enumerate(works)
        ]
        self.alive = set(self.waiting)
        for thread in threads:
            thread.start()
        for _ in works:
            self.arrived.acquire()
        step = 0
        while self.alive:
            wanted = self.order[step] if step < len(self.order) else 0
            ready = sorted(self.alive)
            self.waiting[ready[wanted % len(ready)]].release()
            self.arrived.acquire()
            step += 1
        for thread in threads:
            thread.join()

    def _live(self, i: int, work: Callable[[Any], None]) -> None:
        try:
            work(View(self, i))
        finally:
            self.alive.discard(i)
            self.arrived.release()

    def turn(self, i: int) -> None:
        self.arrived.release()
        self.waiting[i].acquire()


@dataclass
class View:
    """What one process sees of a store whose requests are atomic."""

    turns: Turns
    i: int

    def list(self, prefix: str) -> Iterator[str]:
        self.turns.turn(self.i)
        return iter(sorted(key.partition("/")[2] for key in self.turns.objects))

    def put(self, key: str, data: bytes) -> None:
        self.turns.turn(self.i)
        self.turns.objects[key] = data

    def delete(self, prefix: str) -> bool:
        self.turns.turn(self.i)
        return self.turns.objects.pop(prefix, None) is not None


@settings(max_examples=150, deadline=None)
@given(order=st.lists(st.integers(0, 11), max_size=60), takers=st.integers(2, 4))
def test_of_processes_that_take_a_store_at_once_one_keeps_it(order: list[int], takers: int) -> None:
    """Whatever the order in which their requests come to the server."""
    turns = Turns(order)
    claims: list[Claim] = []

    def take(view: Any) -> None:
        with suppress(StoreBusy):  # in step with others, twelve times
            claims.append(take_claim(view, sleep=lambda s: None))

    turns.run([take] * takers)
    valid: list[bool] = []
    turns.run([lambda view: valid.extend(is_in(view, claim) for claim in claims)])
    assert claims
    assert valid.count(True) == 1
    assert len({claim.epoch for claim in claims}) == len(claims)
    assert claims[valid.index(True)].epoch == max(claim.epoch for claim in claims)


def is_in(view: Any, claim: Claim) -> bool:
    claim._backend = view
    return is_valid(claim)


@settings(max_examples=100, deadline=None)
@given(order=st.lists(st.integers(0, 11), max_size=60), checks=st.integers(1, 6))
def test_two_never_find_themselves_valid_at_once(order: list[int], checks: int) -> None:
    """A process that checks after another took the store over finds it has lost it."""
    turns = Turns(order)
    log: list[tuple[int, str]] = []

    def live(view: Any) -> None:
        with suppress(StoreBusy):
            claim = take_claim(view, sleep=lambda s: None)
            log.append((claim.epoch, "took"))
            for _ in range(checks):
                found = "valid" if is_valid(claim) else "fenced"
                log.append((claim.epoch, found))

    turns.run([live] * 3)
    taken = 0
    for epoch, what in log:
        if what == "took":
            taken = max(taken, epoch)
        assert what != "valid" or epoch >= taken


# ---------------------------------------------------------------- side by side, on backends


def race(make: Callable[[], ObjectBackend], takers: int, rounds: int) -> None:
    """Let threads take a store at once, again and again."""
    backends = [make() for _ in range(takers)]
    start, last = threading.Barrier(takers, timeout=60), 0

    def take(backend: ObjectBackend) -> Claim | None:
        start.wait()
        try:
            return take_claim(backend, uniform=sooner)
        except StoreBusy:
            return None

    with ThreadPoolExecutor(takers) as pool:
        for _ in range(rounds):
            claims = [c for c in pool.map(take, backends) if c is not None]
            epochs = [claim.epoch for claim in claims]
            valid = [claim for claim in claims if is_valid(claim)]
            assert len(valid) == 1
            assert valid[0].epoch == max(epochs) > last
            assert len(set(epochs)) == len(epochs)
            last = max(epochs)
            assert len(list(backends[0].list("claims"))) == 1
    for backend in backends:
        backend.close()


def test_threads_that_race_leave_one_valid() -> None:
    url = f"memory://{uuid.uuid4().hex}/store"
    race(lambda: FsspecBackend(url), takers=6, rounds=40)


@pytest.mark.s3
@pytest.mark.parametrize("driver", DRIVERS)
def test_threads_that_race_on_a_server_leave_one_valid(bucket: str, driver: str) -> None:
    shared = DRIVERS[driver](f"s3://{bucket}/store", retry=QUICK)
    race(lambda: shared, takers=4, rounds=4)


def take_in_turn(url: str, rounds: int, barrier: Any, results: Any) -> None:
    """Take the store at once with others, wait for all, and say whether it is still ours."""
    try:
        with closing(FsspecBackend(url)) as backend:
            for n in range(rounds):
                barrier.wait(30)
                try:
                    claim = take_claim(backend, uniform=sooner)
                except StoreBusy:
                    claim = None
                barrier.wait(30)
                results.put((n, claim.epoch if claim else 0, claim is not None and is_valid(claim)))
    except BaseException:
        results.put((-1, 0, traceback.format_exc()))
        raise


def test_processes_that_race_leave_one_valid(tmp_path: Path) -> None:
    takers, rounds = 4, 25
    barrier, results = FORK.Barrier(takers), FORK.SimpleQueue()
    url = f"file://{tmp_path}/store"
    children = [
        FORK.Process(target=take_in_turn, args=(url, rounds, barrier, results))
        for _ in range(takers)
    ]
    for child in children:
        child.start()
    found: list[tuple[int, int, Any]] = []
    while len(found) < takers * rounds:
        found.append(results.get())
        assert found[-1][0] >= 0, found[-1][2]
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    last = 0
    for n in range(rounds):
        mine = [(epoch, valid) for m, epoch, valid in found if m == n]
        assert len(mine) == takers
        assert [epoch for epoch, valid in mine if valid] == [max(mine)[0]]
        assert max(mine)[0] > last
        last = max(mine)[0]


# ---------------------------------------------------------------- on a server


@pytest.mark.s3
def test_a_check_costs_one_request_and_does_not_guess(way: Way) -> None:
    way.backend.delete("claims")
    claim = take_claim(way.backend)
    way.gate.reset()
    claim.check()
    assert way.gate.counted() == way.gate.counted("list") == 1
    way.gate.fail("list", "reset", "throttle-503", "short-body")
    claim.check()
    with closing(DRIVERS[way.driver](f"{way.url}/shared", retry=ONCE)) as impatient:
        claim._backend = impatient
        claim.check()
        way.gate.fail("list", "error-500")
        with pytest.raises(StorageFailed):
            claim.check()  # neither valid nor fenced


@pytest.mark.s3
def test_a_claim_whose_acknowledgement_is_lost_is_taken_once(way: Way) -> None:
    way.backend.delete("claims")
    way.gate.fail("put", "lost-ack", "lost-ack")
    claim = take_claim(way.backend)
    assert claim.epoch == 1
    assert is_valid(claim)
    assert len(way.keys("shared/claims/")) == 1


@pytest.mark.s3
def test_strange_keys_among_the_claims_on_a_server_do_no_harm(way: Way) -> None:
    way.backend.delete("claims")
    names = [*GARBAGE, ".hidden"]
    if way.driver == "s3fs":  # obstore cannot list such keys
        names += ["tab\tand\x7f"]
        if way.server.kind == "moto":  # MinIO's gateway takes them for others
            names += ["double//slash", "/slash"]
    for name in names:
        way.put_object(f"shared/claims/{name}", b"strange")
    claims = [take_claim(way.backend) for _ in range(2)]
    assert [is_valid(claim) for claim in claims] == [False, True]
    left = way.objects("shared/claims/")
    assert [left.get(f"shared/claims/{name}") for name in names] == [b"strange"] * len(names)
    assert len(left) == len(names) + 1
    way.delete_objects("shared/claims/")


@pytest.mark.s3
def test_the_store_that_was_opened_later_is_the_one_that_writes(way: Way) -> None:
    url = f"{way.url}/fenced"
    with open_small(url, way.driver) as old:
        mine = record(old, "old")
        half = old.session("half")
        with open_small(url, way.driver) as new:
            assert finalized(new).keys() == {"old"}
            kept = record(new, "new")
            before = way.objects("fenced/default/")
            with pytest.raises(StoreFenced, match="one process writes to a store"):
                record(old, "late")
            with pytest.raises(StoreFenced):
                half.finalize(consumers=["train"])
            for segments in (mine, kept):
                with pytest.raises(StoreFenced):
                    old.release(segments)
            after = way.objects("fenced/default/")
            assert {key: after.get(key) for key in before} == before  # nothing of it was touched
            assert not [k for k in after.keys() - before.keys() if "/steps/" not in k]
            assert is_whole(old, "old", mine)  # reading goes on
            assert is_whole(new, "old", [finalized(new)["old"]])
            assert is_whole(new, "new", kept)
            assert is_whole(new, "newer", record(new, "newer"))
    with open_small(url, way.driver) as again:
        left = finalized(again)
        assert sorted(left) == ["new", "newer", "old"]
        assert all(is_whole(again, name, [ref]) for name, ref in left.items())
        assert not [key for key in way.keys("fenced/default/steps/") if "/late/" in key]
        assert again.release(left["new"]) == 2


@pytest.mark.s3
def test_a_reader_fences_nobody_and_is_fenced_by_nobody(way: Way) -> None:
    url = f"{way.url}/read"
    with open_small(url, way.driver) as store:
        segments = record(store, "s")
        with (
            open_small(url, way.driver, read_only=True) as reader,
            open_small(url, way.driver, read_only=True) as other,
        ):
            assert is_whole(store, "t", record(store, "t"))
            assert is_whole(reader, "s", [finalized(other)["s"]])
        assert store.release(segments) == 2


@pytest.mark.s3
def test_what_is_no_store_is_not_claimed(way: Way) -> None:
    way.put_object("strange/default/model.safetensors", b"dear")
    with pytest.raises(WrongStore, match="use an empty prefix"):
        open_small(f"{way.url}/strange", way.driver)
    assert way.keys("strange/") == ["strange/default/model.safetensors"]
