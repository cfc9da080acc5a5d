"""A generation through pauses: as if there had been none, but for the weights of its tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests._engine_replies import new_ids
from tests._engines import FakeEngine
from tests._upstreams import (
    PROMPT,
    assert_nothing_left,
    cancelled,
    in_loop,
    same,
    times,
    until,
    upstream,
    wanted,
)
from tq_fs.errors import (
    ContextOverflow,
    ReplyInvalid,
    RolloutPaused,
    UpstreamTimeout,
    UpstreamUnavailable,
    VersionSpan,
)
from tq_fs.proxy._engine import SglangEngine
from tq_fs.proxy._gate import Gate
from tq_fs.proxy._generate import Generated, generate
from tq_fs.proxy._room import Lease
from tq_fs.trajectory import VersionRule

TOKENS = (*PROMPT, *new_ids(PROMPT, 8, seed=5).tolist())


@pytest.fixture
def fake() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


@dataclass
class Rollout:
    """An engine, its client and its gate."""

    fake: FakeEngine
    engine: SglangEngine
    gate: Gate

    def start(
        self,
        *,
        partial_rollout: bool = True,
        max_span: int | None = None,
        lease: Lease | None = None,
        **given: Any,
    ) -> asyncio.Task[Generated]:
        """Begin to generate; what is held at the engine is there on return of :meth:`held`."""
        return asyncio.create_task(
            generate(
                self.engine,
                self.gate,
                wanted(**given),
                partial_rollout=partial_rollout,
                rule=VersionRule(partial_rollout=partial_rollout, max_span=max_span),
                lease=lease,
            )
        )

    async def held(self, count: int = 1) -> None:
        await until(lambda: self.fake.running == count)

    async def updated(self, version: str, *, deadline_s: float = 10) -> int:
        """Pause, change the weights, and resume."""
        aborted = await self.gate.pause(deadline_s)
        assert self.gate.running == 0
        self.fake.version = version
        self.gate.resume()
        return aborted

    def nothing_left(self) -> None:
        assert_nothing_left(self.engine)
        assert (self.gate.running, self.gate.waiting) == (0, 0)


@asynccontextmanager
async def rollout(
    fake: FakeEngine, *, resume_s: float | None = None, **settings: Any
) -> AsyncIterator[Rollout]:
    async with upstream(fake.url, **settings) as engine:
        made = Rollout(fake, engine, Gate(resume_s=resume_s))
        yield made
        made.nothing_left()


def is_as_generated(
    fake: FakeEngine, got: Generated, *runs: tuple[str, int], start: int = 0
) -> None:
    """Every token, and of each the logprob and routing of the weights that generated it."""
    same(got.response, np.array(TOKENS[12:], np.int32))
    assert got.versions == runs
    ends = 12 + np.cumsum([n for _, n in runs])
    begins = [12, *ends[:-1].tolist()]
    spans = [(v, b, e) for (v, _), b, e in zip(runs, begins, ends, strict=True)]
    rows = [fake.rows(TOKENS, version=v)[b - 1 : e - 1] for v, b, e in spans]
    prompt = fake.rows(TOKENS, version=runs[0][0])[start:11]
    same(got.routed_experts, np.concatenate([prompt, *rows]))
    logprobs = [fake.logprobs(TOKENS, b, version=v)[: e - b] for v, b, e in spans]
    same(got.logprobs, np.concatenate(logprobs))


# ---------------------------------------------------------------- whole


@in_loop
async def test_without_a_pause_it_is_the_engines_reply(fake: FakeEngine) -> None:
    async with rollout(fake) as to:
        got = await to.start(start_row=5)
    is_as_generated(fake, got, ("0", 8), start=5)
    assert got.finish == "length"
    assert fake.asked[0].rid == "r0"


@in_loop
async def test_without_routing_there_is_none(fake: FakeEngine) -> None:
    fake.fault("hold", after=3)
    async with rollout(fake) as to:
        running = to.start(routing=None)
        await to.held()
        await to.updated("1")
        got = await running
    assert got.routed_experts is None
    assert got.versions == (("0", 3), ("1", 5))


@in_loop
async def test_a_stop_token_ends_it(fake: FakeEngine) -> None:
    fake.length = 6
    fake.fault("hold", after=3)
    async with rollout(fake) as to:
        running = to.start(sampling={"sampling_seed": 5, "stop_token_ids": [258]})
        await to.held()
        fake.length = 3  # of what is left
        await to.updated("1")
        got = await running
    assert got.finish == "stop"
    assert got.response.tolist() == [*TOKENS[12:17], 258]


# ---------------------------------------------------------------- pauses, partial rollout


@in_loop
async def test_after_a_pause_it_goes_on_where_it_was_under_the_new_weights(
    fake: FakeEngine,
) -> None:
    fake.fault("hold", after=3)
    async with rollout(fake) as to:
        running = to.start(sampling={"sampling_seed": 5, "temperature": 0.5, "stop": ["x"]})
        await to.held()
        assert await to.updated("1") == 1
        got = await running
    is_as_generated(fake, got, ("0", 3), ("1", 5))
    assert got.finish == "length"
    first, second = fake.asked
    assert fake.aborted == [first.rid] == ["r0"]
    assert second.rid == "2.r0"  # which an abort of r0, by its beginning, does not mean
    assert second.input_ids == list(TOKENS[:15])
    assert second.sampling == {**first.sampling, "max_new_tokens": 5}
    assert (first.start_row, second.start_row) == (0, 14)


@in_loop
async def test_the_rows_of_a_continued_step_are_its_own(fake: FakeEngine) -> None:
    fake.fault("hold", "full-rows", after=3)
    async with rollout(fake) as to:
        running = to.start(start_row=11)
        await to.held()
        await to.updated("1")
        is_as_generated(fake, await running, ("0", 3), ("1", 5), start=11)


@in_loop
async def test_it_goes_on_through_many_pauses_and_equal_versions_are_one_run(
    fake: FakeEngine,
) -> None:
    fake.fault("hold", after=2)
    fake.fault("hold", after=1)
    fake.fault("hold", after=0)
    fake.fault("hold", after=3)
    async with rollout(fake) as to:
        running = to.start()
        for version in ("0", "7", "8", "9"):
            await to.held()
            await to.updated(version)
            await until(lambda v=version: len(fake.asked) > ("0", "7", "8", "9").index(v) + 1)  # type: ignore[misc]
        is_as_generated(fake, await running, ("0", 3), ("8", 3), ("9", 2))
    assert [asked.rid for asked in fake.asked] == ["r0", "2.r0", "3.r0", "4.r0", "5.r0"]
    assert [len(asked.input_ids) for asked in fake.asked] == [12, 14, 15, 15, 18]


@in_loop
async def test_what_was_aborted_before_its_first_token_is_asked_for_again(
    fake: FakeEngine,
) -> None:
    fake.fault("hold", after=0)
    async with rollout(fake) as to:
        running = to.start(start_row=4)
        await to.held()
        await to.updated("1")
        is_as_generated(fake, await running, ("1", 8), start=4)
    assert fake.asked[1].start_row == 4


@in_loop
async def test_what_was_aborted_with_its_last_token_is_whole(fake: FakeEngine) -> None:
    fake.fault("hold", after=8)
    async with rollout(fake) as to:
        running = to.start()
        await to.held()
        await to.updated("1")
        got = await running
    is_as_generated(fake, got, ("0", 8))
    assert got.finish == "length"
    assert len(fake.asked) == 1


@in_loop
async def test_all_that_run_go_on_after_a_resume_and_what_comes_meanwhile_waits(
    fake: FakeEngine,
) -> None:
    fake.fault(*times("hold", 20), after=3)
    async with rollout(fake) as to:
        running = [to.start(rid=f"r{i:02}", session_id=f"s{i}") for i in range(20)]
        await to.held(20)
        assert await to.gate.pause(10) == 20
        assert (fake.running, to.engine.running) == (0, 0)
        late = to.start(rid="late")
        await until(lambda: to.gate.waiting == 21)
        await asyncio.sleep(0.03)
        assert len(fake.asked) == 20
        fake.version = "1"
        to.gate.resume()
        for got in await asyncio.gather(*running):
            is_as_generated(fake, got, ("0", 3), ("1", 5))
        is_as_generated(fake, await late, ("1", 8))
    assert sorted(fake.aborted) == [f"r{i:02}" for i in range(20)]


@in_loop
async def test_an_engine_that_does_not_listen_is_cut_off_and_asked_again(fake: FakeEngine) -> None:
    fake.fault("hang")
    async with rollout(fake) as to:
        running = to.start()
        await to.held()
        assert await to.updated("1", deadline_s=0.05) == 1
        is_as_generated(fake, await running, ("1", 8))
        await until(lambda: fake.left == ["r0"])  # its connection was closed


@in_loop
async def test_what_breaks_off_while_it_is_aborted_is_asked_for_again(fake: FakeEngine) -> None:
    """Such as by an engine that is started anew for a weight update."""
    fake.fault("hang")
    async with rollout(fake) as to:
        running = to.start()
        await to.held()
        pausing = asyncio.create_task(to.gate.pause(10))
        await until(lambda: bool(fake.aborted))
        fake.stop()
        assert await pausing == 1
        await until(lambda: to.gate.waiting == 1)
        to.gate.resume()
        with pytest.raises(UpstreamUnavailable, match="Cannot connect"):  # nobody started it
            await running


@in_loop
async def test_a_generation_that_fails_of_itself_fails(fake: FakeEngine) -> None:
    fake.fault("error-500", "error-context", "cut-json", "hang")
    async with rollout(fake, timeout_s=0.2) as to:
        for kind in (UpstreamUnavailable, ContextOverflow, ReplyInvalid, UpstreamTimeout):
            with pytest.raises(kind):
                await to.start()
            to.nothing_left()
        assert await to.gate.pause(10) == 0
        to.gate.resume()
    assert len(fake.asked) == 4


# ---------------------------------------------------------------- without partial rollout


@in_loop
async def test_without_partial_rollout_it_is_generated_anew(fake: FakeEngine) -> None:
    fake.fault("hold", after=3)
    async with rollout(fake) as to:
        running = to.start(partial_rollout=False, start_row=2)
        await to.held()
        await to.updated("1")
        is_as_generated(fake, await running, ("1", 8), start=2)
    first, second = fake.asked
    assert second.input_ids == first.input_ids
    assert second.sampling == first.sampling
    assert (second.rid, second.start_row) == ("2.r0", 2)


# ---------------------------------------------------------------- aborts that nobody here asked for


@in_loop
async def test_what_the_engine_aborts_unasked_goes_on(fake: FakeEngine) -> None:
    fake.fault("abort", "abort", after=2)
    fake.fault("abort", after=0)
    async with rollout(fake) as to:
        is_as_generated(fake, await to.start(), ("0", 8))
    assert [asked.max_new_tokens for asked in fake.asked] == [8, 6, 4, 4]


@in_loop
async def test_aborts_are_in_vain_only_in_a_row(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_fs.proxy._generate._WAIT_S", 0.0001)
    for _ in range(3):
        fake.fault(*times("abort", 4), after=0)
        fake.fault("abort", after=1)
    async with rollout(fake) as to:
        is_as_generated(fake, await to.start(), ("0", 8))


@pytest.mark.parametrize("partial", [True, False])
@in_loop
async def test_pauses_are_never_in_vain(fake: FakeEngine, partial: bool) -> None:
    fake.fault(*times("hold", 8), after=0 if partial else 3)
    async with rollout(fake) as to:
        running = to.start(partial_rollout=partial)
        for count in range(1, 9):
            await until(lambda count=count: len(fake.asked) == count)  # type: ignore[misc]
            await to.updated(str(count))
        is_as_generated(fake, await running, ("8", 8))


@pytest.mark.parametrize("partial", [True, False])
@in_loop
async def test_an_engine_that_only_aborts_is_not_asked_for_ever(
    fake: FakeEngine, partial: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_fs.proxy._generate._WAIT_S", 0.001)
    fake.fault(*times("abort", 20), after=0 if partial else 3)
    async with rollout(fake) as to:
        with pytest.raises(UpstreamUnavailable, match="aborted it 6 times, without a pause"):
            await to.start(partial_rollout=partial)
    assert len(fake.asked) == 6


# ---------------------------------------------------------------- rules


@in_loop
async def test_weights_that_changed_too_far_fail_as_soon_as_it_shows(fake: FakeEngine) -> None:
    fake.fault("hold", after=2)
    fake.fault("hold", after=2)
    async with rollout(fake) as to:
        running = to.start(max_span=1)
        await to.held()
        await to.updated("2")
        await until(lambda: len(fake.asked) == 2)
        await to.gate.pause(10)
        with pytest.raises(VersionSpan, match="generation r0: the weight versions '0', '2'"):
            await running  # while it is paused
    assert len(fake.asked) == 2


@in_loop
async def test_who_waits_too_long_for_a_resume_is_told_so(fake: FakeEngine) -> None:
    fake.fault("hold", after=2)
    async with rollout(fake, resume_s=0.05) as to:
        running = to.start()
        await to.held()
        await to.gate.pause(10)
        with pytest.raises(RolloutPaused):
            await running
    assert len(fake.asked) == 1


# ---------------------------------------------------------------- who goes away


@in_loop
async def test_who_goes_away_between_two_chunks_leaves_nothing(fake: FakeEngine) -> None:
    fake.fault("hold", after=2)
    async with rollout(fake) as to:
        with to.engine.room.lease() as lease:
            running = to.start(lease=lease)
            await to.held()
            await to.gate.pause(10)
            await until(lambda: to.gate.waiting == 1)
            assert lease.held_bytes > 0
            await cancelled(running)
            assert to.gate.waiting == 0
        to.nothing_left()
        to.gate.resume()
        await asyncio.sleep(0.03)
    assert len(fake.asked) == 1


@in_loop
async def test_who_goes_away_while_it_is_paused_leaves_nothing_and_the_pause_ends(
    fake: FakeEngine,
) -> None:
    fake.fault("hang")
    async with rollout(fake) as to:
        running = to.start()
        await to.held()
        pausing = asyncio.create_task(to.gate.pause(10))
        await until(lambda: bool(fake.aborted))
        await cancelled(running)
        assert await pausing == 1
        to.gate.resume()
        await until(lambda: fake.running == 0)
        is_as_generated(fake, await to.start(rid="r1"), ("0", 8))


@in_loop
async def test_who_goes_away_while_it_waits_before_asking_again_leaves_nothing(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_fs.proxy._generate._WAIT_S", 10)
    fake.fault("abort", after=0)
    async with rollout(fake) as to:
        running = to.start()
        await until(lambda: len(fake.asked) == 1 and fake.running == 0)
        await asyncio.sleep(0.03)
        await cancelled(running)


# ---------------------------------------------------------------- room


@in_loop
async def test_a_lease_holds_the_bytes_of_what_is_kept(fake: FakeEngine) -> None:
    fake.fault("hold", after=3)
    async with rollout(fake) as to:
        with to.engine.room.lease() as lease:
            running = to.start(lease=lease)
            await to.held()
            await to.gate.pause(10)
            await until(lambda: to.gate.waiting == 1)
            first = lease.held_bytes
            to.gate.resume()
            await running
            assert lease.held_bytes > first > 0


@in_loop
async def test_a_lease_does_not_hold_what_is_thrown_away(fake: FakeEngine) -> None:
    fake.fault("hold", after=3)
    async with rollout(fake) as to:
        with to.engine.room.lease() as lease:
            running = to.start(lease=lease, partial_rollout=False)
            await to.held()
            await to.gate.pause(10)
            await until(lambda: to.gate.waiting == 1)
            assert lease.held_bytes == 0
            to.gate.resume()
            await running
            assert lease.held_bytes > 0


@in_loop
async def test_many_in_little_room_get_through_pauses(fake: FakeEngine) -> None:
    """None waits for room with some in hand, which would stop all of them."""
    fake.fault(*times("hold", 8), after=3)
    async with rollout(fake, reply_bytes=4000) as to:
        leases = [to.engine.room.lease() for _ in range(8)]
        running = [to.start(rid=f"r{i}", lease=lease) for i, lease in enumerate(leases)]
        await to.held(8)

        async def recorded(task: asyncio.Task[Generated], lease: Lease) -> Generated:
            try:
                return await task
            finally:
                lease.keep(0)

        done = asyncio.gather(*(recorded(t, x) for t, x in zip(running, leases, strict=True)))
        await to.gate.pause(0.2)  # those for whom there was no room are cut off
        fake.version = "1"
        to.gate.resume()
        for got in await done:
            assert got.versions[-1] == ("1", 8 if len(got.versions) == 1 else 5)


# ---------------------------------------------------------------- any order


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_when_every_token_has_what_generated_it(seed: int) -> None:
    """Pauses at any time, of engines that take their time; clients that go away."""
    draw = random.Random(seed)

    async def updates(to: Rollout) -> None:
        for version in range(1, 6):
            await asyncio.sleep(draw.uniform(0, 0.03))
            await to.updated(str(version), deadline_s=draw.choice([10, 10, 0.001]))

    @in_loop
    async def all_of_it() -> None:
        with FakeEngine(token_s=0.002) as fake:
            async with rollout(fake) as to:
                running = [
                    to.start(rid=f"r{i:02}", session_id=f"s{i}", start_row=draw.randint(0, 11))
                    for i in range(12)
                ]
                updating = asyncio.create_task(updates(to))
                for task in draw.sample(running, 3):
                    await asyncio.sleep(draw.uniform(0, 0.02))
                    task.cancel()
                await updating
                await asyncio.wait(running)
                for task in running:
                    if not task.cancelled():
                        got = task.result()
                        rows = got.routed_experts
                        assert rows is not None
                        is_as_generated(fake, got, *got.versions, start=19 - len(rows))
                assert await to.gate.pause(10) == 0
            await until(lambda: fake.running == 0)

    all_of_it()
