"""Room for replies: first come first served, and whoever goes away leaves nothing behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests._upstreams import cancelled, in_loop, until
from tq_fs.errors import BackpressureTimeout, ReplyInvalid
from tq_fs.proxy._room import Lease, Room


def room(limit_bytes: int = 10, deadline_s: float = 10.0) -> Room:
    return Room(limit_bytes, deadline_s=deadline_s)


def takes(of: Room, nbytes: int) -> tuple[Lease, asyncio.Task[None]]:
    lease = of.lease()
    return lease, asyncio.create_task(lease.take(nbytes))


@in_loop
async def test_who_finds_no_room_waits_until_some_is_given_back() -> None:
    of = room()
    with of.lease() as first:
        await first.take(7)
        second, taking = takes(of, 4)
        await until(lambda: of.waiting == 1)
        assert of.used_bytes == 7
    await taking
    assert (of.used_bytes, of.waiting, of.peak_bytes) == (4, 0, 7)
    second.keep(0)
    assert of.used_bytes == 0


@in_loop
async def test_the_first_is_served_first_also_where_a_later_one_would_fit() -> None:
    of = room()
    holding, taking = takes(of, 6)
    await taking
    _, large = takes(of, 8)
    await until(lambda: of.waiting == 1)
    small_lease, small = takes(of, 1)
    await until(lambda: of.waiting == 2)
    assert not small.done()
    holding.keep(0)
    await large
    await small
    assert of.used_bytes == 9
    small_lease.keep(0)


@in_loop
async def test_all_that_fit_are_let_in_at_once() -> None:
    of = room()
    holding, taking = takes(of, 10)
    await taking
    waiting = [takes(of, 3)[1] for _ in range(4)]
    await until(lambda: of.waiting == 4)
    holding.keep(0)
    await asyncio.gather(*waiting[:3])
    assert (of.used_bytes, of.waiting, waiting[3].done()) == (9, 1, False)
    await cancelled(waiting[3])


@in_loop
async def test_a_lease_that_keeps_less_makes_room() -> None:
    of = room()
    holding, taking = takes(of, 10)
    await taking
    _, waiting = takes(of, 6)
    holding.keep(20)
    assert holding.held_bytes == 10
    holding.keep(4)
    await waiting
    assert (holding.held_bytes, of.used_bytes) == (4, 10)


@in_loop
async def test_a_lease_that_holds_something_does_not_wait() -> None:
    """Two that hold a half each and wait for the other half would wait for ever."""
    of = room()
    leases = [takes(of, 5) for _ in range(2)]
    await asyncio.gather(*(taking for _, taking in leases))
    for lease, _ in leases:
        await lease.take(5)
    assert of.used_bytes == 20
    for lease, _ in leases:
        lease.keep(0)
    assert of.used_bytes == 0


@pytest.mark.parametrize("held", [0, 3])
@in_loop
async def test_more_than_the_whole_room_is_refused(held: int) -> None:
    of = room()
    with of.lease() as lease:
        await lease.take(held)
        with pytest.raises(ReplyInvalid, match=r"11 bytes, .* may have 10; raise reply_bytes"):
            await lease.take(11)
        assert of.used_bytes == held


@in_loop
async def test_room_that_does_not_come_in_time_is_an_error_and_lets_those_behind_move_up() -> None:
    of = room(deadline_s=0.8)
    holding, taking = takes(of, 6)
    await taking
    large, failing = takes(of, 8)
    await until(lambda: of.waiting == 1)
    await asyncio.sleep(0.4)
    _, small = takes(of, 4)
    with pytest.raises(BackpressureTimeout, match=r"8 bytes within 0\.8 s; 6 of 10 are taken"):
        await failing
    await small
    assert (large.held_bytes, of.used_bytes, of.waiting) == (0, 10, 0)
    holding.keep(0)


@in_loop
async def test_who_is_cancelled_while_waiting_lets_those_behind_move_up() -> None:
    of = room()
    _, taking = takes(of, 6)
    await taking
    _, large = takes(of, 8)
    await until(lambda: of.waiting == 1)
    _, small = takes(of, 4)
    await until(lambda: of.waiting == 2)
    await cancelled(large)
    await small
    assert (of.used_bytes, of.waiting) == (10, 0)


@in_loop
async def test_who_is_cancelled_in_the_moment_of_getting_room_gives_it_back() -> None:
    of = room()
    holding, taking = takes(of, 10)
    await taking
    lease, waiting = takes(of, 10)
    await until(lambda: of.waiting == 1)
    holding.keep(0)
    assert of.used_bytes == 10  # given to the waiting task, which has not run since
    await cancelled(waiting)
    assert (of.used_bytes, lease.held_bytes) == (0, 0)


@in_loop
async def test_room_is_not_given_to_who_was_cancelled_a_moment_before() -> None:
    of = room()
    holding, taking = takes(of, 10)
    await taking
    _, first = takes(of, 10)
    await until(lambda: of.waiting == 1)
    _, second = takes(of, 10)
    await until(lambda: of.waiting == 2)
    first.cancel()
    holding.keep(0)
    await second
    assert first.cancelled()
    assert (of.used_bytes, of.waiting) == (10, 0)


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_events_loses_room_or_passes_the_bound(seed: int) -> None:
    draw = random.Random(seed)

    async def one(of: Room) -> None:
        with of.lease() as lease:
            await lease.take(draw.randint(0, 10))
            await asyncio.sleep(draw.uniform(0, 0.002))
            lease.keep(draw.randint(0, 10))
            await asyncio.sleep(draw.uniform(0, 0.002))

    @in_loop
    async def all_of_it() -> None:
        of = room(deadline_s=draw.choice([0.003, 10]))
        made = []
        for _ in range(100):
            made.append(asyncio.create_task(one(of)))
            if draw.random() < 0.3:
                draw.choice(made).cancel()
            if draw.random() < 0.5:
                await asyncio.sleep(draw.uniform(0, 0.001))
        await asyncio.wait(made)
        ends = [task.exception() for task in made if not task.cancelled()]
        assert {type(end) for end in ends} <= {type(None), BackpressureTimeout}
        assert (of.used_bytes, of.waiting) == (0, 0)
        assert of.peak_bytes <= 10

    all_of_it()
