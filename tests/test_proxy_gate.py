"""The gate: nothing runs behind it while it is closed, and no generation holds up a later pause."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

import pytest

from tests._upstreams import cancelled, in_loop, until
from tq_fs.errors import ConflictError, RolloutPaused, UpstreamUnavailable
from tq_fs.proxy._gate import Gate


class Generation:
    """A task behind a gate that ends by itself, by abort, or not at all."""

    def __init__(
        self,
        gate: Gate,
        *,
        listens: bool = True,
        after: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.gate = gate
        self.aborts = 0
        self.passed = asyncio.Event()
        self.end = asyncio.Event()
        self._listens = listens
        self._after = after
        self.task = asyncio.create_task(self.run())

    async def abort(self) -> None:
        self.aborts += 1
        if self._listens:
            self.end.set()

    async def run(self) -> bool:
        passing = self.gate.pass_(self.abort)
        async with passing:
            self.passed.set()
            try:
                await self.end.wait()
            finally:
                if self._after is not None:
                    await self._after()
        return passing.aborted


async def started(gate: Gate, count: int = 1, *, listens: bool = True) -> list[Generation]:
    made = [Generation(gate, listens=listens) for _ in range(count)]
    for generation in made:
        await generation.passed.wait()
    return made


# ---------------------------------------------------------------- pause and resume


@in_loop
async def test_a_pause_aborts_what_runs_and_returns_when_it_has_left() -> None:
    gate = Gate()
    running = await started(gate, 3)
    assert gate.running == 3
    assert await gate.pause(10) == 3
    assert [g.aborts for g in running] == [1, 1, 1]
    assert [await g.task for g in running] == [True, True, True]
    assert (gate.paused, gate.running) == (True, 0)


@in_loop
async def test_what_comes_to_a_closed_gate_waits_and_a_resume_lets_all_go_on() -> None:
    gate = Gate()
    assert await gate.pause(10) == 0
    late = [Generation(gate) for _ in range(3)]
    await until(lambda: gate.waiting == 3)
    await asyncio.sleep(0.02)
    assert (gate.running, [g.passed.is_set() for g in late]) == (0, [False] * 3)
    gate.resume()
    gate.resume()
    for generation in late:
        await generation.passed.wait()
    assert (gate.waiting, gate.running, gate.paused) == (0, 3, False)
    for generation in late:
        generation.end.set()
        assert await generation.task is False
    assert gate.running == 0


@in_loop
async def test_a_pause_waits_for_those_that_end_late() -> None:
    gate = Gate(again_s=0.02)
    [slow] = await started(gate, listens=False)
    pausing = asyncio.create_task(gate.pause(10))
    await until(lambda: slow.aborts >= 3)  # asked again: the first may have come too early
    assert not pausing.done()
    slow.end.set()
    assert await pausing == 1
    asked = slow.aborts
    await asyncio.sleep(0.05)
    assert slow.aborts == asked


@in_loop
async def test_a_pause_may_be_said_again() -> None:
    gate = Gate()
    await started(gate, 2)
    assert [await gate.pause(10), await gate.pause(10)] == [2, 0]
    gate.resume()
    assert not gate.paused


@in_loop
async def test_pauses_at_once_all_return_when_nothing_runs() -> None:
    gate = Gate(again_s=60)
    running = await started(gate, 2, listens=False)
    pausing = [asyncio.create_task(gate.pause(10)) for _ in range(3)]
    await until(lambda: all(g.aborts for g in running))
    running[0].end.set()
    await asyncio.sleep(0.02)
    assert not any(p.done() for p in pausing)
    running[1].end.set()
    assert await asyncio.gather(*pausing) == [2, 2, 2]
    assert [g.aborts for g in running] == [1, 1]  # once each, however many pause


@in_loop
async def test_a_gate_that_closes_again_at_once_lets_nobody_slip_through() -> None:
    gate = Gate()
    await gate.pause(10)
    late = Generation(gate)
    await until(lambda: gate.waiting == 1)
    gate.resume()
    assert await gate.pause(10) == 0  # before the waiting task had its turn
    await asyncio.sleep(0.02)
    assert (gate.running, gate.waiting) == (0, 1)
    gate.resume()
    await late.passed.wait()
    await cancelled(late.task)


@in_loop
async def test_a_resume_in_the_middle_of_a_pause_is_told_to_who_paused() -> None:
    gate = Gate()
    [slow] = await started(gate, listens=False)
    pausing = asyncio.create_task(gate.pause(10))
    await until(lambda: bool(slow.aborts))
    gate.resume()
    later = await started(gate)
    slow.end.set()
    with pytest.raises(ConflictError, match="resumed while it was being paused"):
        await pausing
    assert gate.running == 1
    later[0].end.set()
    await later[0].task


@in_loop
async def test_a_pause_does_not_take_a_later_one_for_its_own() -> None:
    gate = Gate()
    [first] = await started(gate, listens=False)
    pausing = asyncio.create_task(gate.pause(10))
    await until(lambda: bool(first.aborts))
    gate.resume()
    [second] = await started(gate, listens=False)
    again = asyncio.create_task(gate.pause(10))
    await until(lambda: bool(second.aborts))
    first.end.set()
    with pytest.raises(ConflictError):  # it is closed, and yet the second one runs
        await pausing
    assert not again.done()
    second.end.set()
    assert await again <= 2


@in_loop
async def test_a_pause_that_nobody_waits_for_leaves_the_gate_closed() -> None:
    gate = Gate()
    [slow] = await started(gate, listens=False)
    pausing = asyncio.create_task(gate.pause(10))
    await until(lambda: bool(slow.aborts))
    await cancelled(pausing)
    assert gate.paused
    slow.end.set()
    assert await gate.pause(10) <= 1
    gate.resume()


@in_loop
async def test_a_generation_does_not_wait_for_a_resume_for_ever() -> None:
    gate = Gate(resume_s=0.05)
    await gate.pause(10)
    with pytest.raises(RolloutPaused, match=r"not resumed within 0\.05 s; resume it"):
        await Generation(gate).task
    assert (gate.waiting, gate.running) == (0, 0)


# ---------------------------------------------------------------- ends of all kinds


@in_loop
async def test_what_fails_or_is_cancelled_holds_up_no_later_pause() -> None:
    gate = Gate()

    async def fail() -> None:
        raise UpstreamUnavailable("broken")

    failing = Generation(gate, after=fail)
    await failing.passed.wait()
    failing.end.set()
    with pytest.raises(UpstreamUnavailable, match="broken"):
        await failing.task
    [left] = await started(gate)
    await cancelled(left.task)
    assert gate.running == 0
    assert await gate.pause(10) == 0


@in_loop
async def test_what_is_cancelled_while_it_waits_leaves_nothing() -> None:
    gate = Gate()
    await gate.pause(10)
    late = [Generation(gate) for _ in range(2)]
    await until(lambda: gate.waiting == 2)
    await cancelled(late[0].task)
    assert (gate.waiting, gate.running) == (1, 0)
    gate.resume()
    await late[1].passed.wait()
    assert gate.running == 1
    await cancelled(late[1].task)


@in_loop
async def test_what_is_cancelled_in_the_moment_of_the_resume_leaves_nothing() -> None:
    gate = Gate()
    await gate.pause(10)
    late = Generation(gate)
    await until(lambda: gate.waiting == 1)
    gate.resume()
    await cancelled(late.task)
    assert (gate.waiting, gate.running) == (0, 0)


@in_loop
async def test_what_is_cancelled_while_it_is_aborted_ends_the_pause() -> None:
    gate = Gate()
    [deaf] = await started(gate, listens=False)
    pausing = asyncio.create_task(gate.pause(10))
    await until(lambda: bool(deaf.aborts))
    await cancelled(deaf.task)
    assert await pausing == 1


@in_loop
async def test_who_does_not_listen_is_cut_off_at_the_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate()
    deaf = await started(gate, 2, listens=False)
    assert await gate.pause(0.05) == 2
    assert gate.running == 0
    for generation in deaf:
        with pytest.raises(UpstreamUnavailable, match=r"did not end .* within 0\.05 s"):
            await generation.task
        assert not generation.task.cancelled()
    assert "2 generations did not end in 0.05 s, and were cut off" in caplog.text


@in_loop
async def test_an_abort_that_fails_or_hangs_holds_up_no_pause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate(again_s=0.01)
    asked = 0

    async def fail() -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            await asyncio.Event().wait()
        raise UpstreamUnavailable("no way there")

    async def run() -> None:
        async with gate.pass_(fail):
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await until(lambda: gate.running == 1)
    assert await gate.pause(0.1) == 1
    with pytest.raises(UpstreamUnavailable):
        await task
    assert asked == 2
    assert "no way there" in caplog.text


@in_loop
async def test_who_cannot_be_cut_off_is_an_error_and_the_gate_stays_closed() -> None:
    gate = Gate(cut_s=0.05)
    stuck = asyncio.Event()

    async def hold() -> None:
        await stuck.wait()

    deaf = Generation(gate, listens=False, after=hold)
    await deaf.passed.wait()
    with pytest.raises(UpstreamUnavailable, match="1 generations could not be cut off; the gate"):
        await gate.pause(0.02)
    assert (gate.paused, gate.running) == (True, 1)
    stuck.set()
    assert await gate.pause(10) <= 1
    assert gate.running == 0
    with pytest.raises(UpstreamUnavailable):
        await deaf.task


@in_loop
async def test_a_client_that_goes_away_in_the_moment_of_the_cut_is_gone() -> None:
    """The cut must not make an ordinary error of its cancelling."""
    gate = Gate()
    [deaf] = await started(gate, listens=False)
    pausing = asyncio.create_task(gate.pause(0.03))
    await until(lambda: bool(deaf.aborts))
    while not deaf.task.cancelling():
        await asyncio.sleep(0)
    deaf.task.cancel()
    await pausing
    await asyncio.wait([deaf.task])
    assert deaf.task.cancelled()
    assert gate.running == 0


@in_loop
async def test_a_generation_behind_a_cut_one_goes_on_in_the_same_task() -> None:
    """Being cut leaves the task as it was: it may wait, and pass again."""
    gate = Gate()

    async def twice() -> str:
        try:
            async with gate.pass_(nothing):
                await asyncio.Event().wait()
        except UpstreamUnavailable:
            async with gate.pass_(nothing):
                await asyncio.sleep(0.01)
                task = asyncio.current_task()
                assert task is not None
                assert task.cancelling() == 0
                return "went on"
        return "was not cut"

    async def nothing() -> None:
        return

    task = asyncio.create_task(twice())
    await until(lambda: gate.running == 1)
    assert await gate.pause(0.02) == 1
    await until(lambda: gate.waiting == 1)
    gate.resume()
    assert await task == "went on"
    assert gate.running == 0


@in_loop
async def test_two_pauses_may_cut_the_same_generation() -> None:
    gate = Gate()

    async def leaves_late() -> None:
        async with gate.pass_(nothing):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)

    async def nothing() -> None:
        return

    task = asyncio.create_task(leaves_late())
    await until(lambda: gate.running == 1)
    first = asyncio.create_task(gate.pause(0.01))
    one_pause, other = await asyncio.gather(first, gate.pause(0))
    assert (one_pause, other) == (1, 1)
    with pytest.raises(UpstreamUnavailable, match="was cut off"):
        await task
    assert gate.running == 0


async def one(gate: Gate, draw: random.Random) -> None:
    end = asyncio.Event()

    async def abort() -> None:
        if draw.random() < 0.7:
            end.set()
        elif draw.random() < 0.5:
            raise UpstreamUnavailable("an abort")

    try:
        async with gate.pass_(abort):
            async with asyncio.timeout(draw.uniform(0, 0.03)):
                await end.wait()
            if draw.random() < 0.2:
                raise UpstreamUnavailable("a generation")
    except (UpstreamUnavailable, RolloutPaused, TimeoutError):
        pass


async def pauses(gate: Gate, draw: random.Random) -> None:
    for _ in range(6):
        await asyncio.sleep(draw.uniform(0, 0.01))
        try:
            await gate.pause(draw.choice([0, 0.001, 0.02]))
            assert gate.running == 0
        except ConflictError:
            pass
        await asyncio.sleep(draw.uniform(0, 0.005))
        gate.resume()


@pytest.mark.parametrize("seed", range(30))
def test_no_order_of_events_leaves_anything(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Generations come, end, fail, are cancelled and cut, between pauses and resumes."""
    caplog.set_level(logging.CRITICAL)
    draw = random.Random(seed)

    @in_loop
    async def all_of_it() -> None:
        gate = Gate(again_s=0.003, resume_s=draw.choice([0.002, None]))
        tasks = [asyncio.create_task(pauses(gate, draw)) for _ in range(2)]
        made = []
        for _ in range(60):
            made.append(asyncio.create_task(one(gate, draw)))
            if draw.random() < 0.3:
                draw.choice(made).cancel()
            await asyncio.sleep(draw.uniform(0, 0.001))
        await asyncio.gather(*tasks)
        gate.resume()
        await asyncio.wait(made)
        assert (gate.running, gate.waiting) == (0, 0)
        assert await gate.pause(0) == 0

    all_of_it()
