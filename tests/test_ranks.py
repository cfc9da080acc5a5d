"""Which layers and tokens each rank uses, and how samples are shared out."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray")

import tq_fs
from tq_fs.errors import InvalidConfig, RanksMissing
from tq_fs.rollout import Parallel, Rank, balance
from tq_fs.rollout._barrier import Barrier
from tq_fs.rollout._object_store import _Rise

LOGPROBS = tq_fs.logprobs()
ROUTING = tq_fs.routed_experts(layers=12, topk=2, experts=8)
SPLITS = st.sampled_from(["zigzag", "contiguous"])


def context_ranks(context: int, split: Any) -> list[Rank]:
    return Parallel(context=context, split=split).ranks()


def picked(ranges: list[tuple[int, int]], stop: int) -> list[int]:
    """The rows that ranges pick of `stop` rows, in order."""
    return [i for first, last in ranges for i in range(first, min(last, stop))]


def slime(rows: list[int], context: int, rank: int, split: str) -> list[int]:
    """What slime's slice_with_cp leaves of rows; -1 is padding."""
    parts = 2 * context if split == "zigzag" else context
    padded = rows + [-1] * (-len(rows) % parts)
    size = len(padded) // parts
    chunks = [padded[i * size : (i + 1) * size] for i in range(parts)]
    mine = [rank, parts - 1 - rank] if split == "zigzag" else [rank]
    return [row for i in mine for row in chunks[i] if row != -1]


# ---------------------------------------------------------------- places


@given(*[st.integers(1, 4)] * 4)
def test_ranks_are_numbered_as_megatron_does(d: int, t: int, p: int, c: int) -> None:
    parallel = Parallel(data=d, tensor=t, pipeline=p, context=c)
    places = [(r.pipeline, r.data, r.context, r.tensor) for r in parallel.ranks()]
    assert places == list(itertools.product(range(p), range(d), range(c), range(t)))
    assert parallel.size == len(places) == d * parallel.shard_size


@given(*[st.integers(1, 4)] * 4)
def test_one_rank_of_each_shard_leads(d: int, t: int, p: int, c: int) -> None:
    ranks = Parallel(data=d, tensor=t, pipeline=p, context=c).ranks()
    assert Counter(r.data for r in ranks if r.leads) == Counter(range(d))


# ---------------------------------------------------------------- layers and fields


@given(st.integers(1, 6), st.integers(1, 9))
def test_equal_stages_have_every_layer_once(pipeline: int, each: int) -> None:
    ranks = Parallel(pipeline=pipeline).ranks()
    layers = [i for r in ranks for i in range(*r.layers(pipeline * each))]
    assert layers == list(range(pipeline * each))


def test_stages_may_be_unequal_where_that_is_said() -> None:
    parallel = Parallel(pipeline=3, stages=(5, 4, 3))
    assert [r.layers(12) for r in parallel.ranks()] == [(0, 5), (5, 9), (9, 12)]
    with pytest.raises(InvalidConfig, match=r"\(5, 4, 3\) for 13 layers"):
        parallel.ranks()[0].layers(13)
    with pytest.raises(InvalidConfig, match="12 layers in 5 equal stages"):
        Parallel(pipeline=5).ranks()[0].layers(12)


def test_only_the_last_stage_uses_what_belongs_to_the_loss() -> None:
    ranks = Parallel(pipeline=2, tensor=2).ranks()
    fields = [r.fields([LOGPROBS, ROUTING]) for r in ranks]
    assert fields == [["routed_experts"]] * 2 + [["logprobs", "routed_experts"]] * 2


@pytest.mark.parametrize(
    "wrong", [{"data": 0}, {"context": -1}, {"pipeline": 2, "stages": (1,)}, {"split": "ring"}]
)
def test_layouts_that_cannot_be_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidConfig, match="parallel"):
        Parallel(**wrong)


# ---------------------------------------------------------------- tokens


@given(st.integers(1, 90), st.integers(1, 5), SPLITS)
def test_a_context_rank_uses_the_routing_rows_that_slime_cuts(
    length: int, context: int, split: Any
) -> None:
    padded = [*range(length - 1), -1]  # the last token has no row: slime pads one
    for r in context_ranks(context, split):
        rows = picked(r.tokens(length, ROUTING), length - 1)
        assert rows == slime(padded, context, r.context, split)


@given(st.integers(1, 90), st.integers(1, 5), SPLITS, st.data())
def test_a_context_rank_uses_the_logprobs_of_the_tokens_it_predicts(
    length: int, context: int, split: Any, data: st.DataObject
) -> None:
    prompt = data.draw(st.integers(1, length))
    for r in context_ranks(context, split):
        fed = slime(list(range(length)), context, r.context, split)
        want = [p + 1 for p in fed if prompt <= p + 1 < length]
        got = [p for p in picked(r.tokens(length, LOGPROBS), length) if p >= prompt]
        assert got == want


@given(st.integers(0, 90), st.integers(1, 5), SPLITS)
def test_context_ranks_together_use_every_row_once(length: int, context: int, split: Any) -> None:
    for spec in (LOGPROBS, ROUTING):
        ranks = context_ranks(context, split)
        assert all(0 <= a <= b for r in ranks for a, b in r.tokens(length, spec))
        rows = [i for r in ranks for i in picked(r.tokens(length, spec), length)]
        assert sorted(rows) == list(range(length))


# ---------------------------------------------------------------- shards


@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_no_shard_has_far_more_tokens_than_it_must(lengths: list[int], parts: int) -> None:
    if len(lengths) < parts:
        with pytest.raises(InvalidConfig, match="data-parallel ranks"):
            balance(lengths, parts)
        return
    chosen = balance(lengths, parts)
    assert sorted(i for part in chosen for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) and part for part in chosen)
    fullest = max(sum(lengths[i] for i in part) for part in chosen)
    ways = itertools.product(range(parts), repeat=len(lengths))
    best = min(
        max(sum(n for n, p in zip(lengths, way, strict=True) if p == part) for part in range(parts))
        for way in ways
    )
    assert fullest <= math.ceil(best * 4 / 3)


# ---------------------------------------------------------------- barrier


def test_ranks_pass_the_barrier_once_all_are_there() -> None:
    async def meet() -> list[int]:
        barrier, passed = Barrier(10.0), []

        async def rank(number: int) -> None:
            await barrier.arrive("shard 0", 7, number, 3)
            passed.append(number)

        early = [asyncio.create_task(rank(0)), asyncio.create_task(rank(1))]
        again = asyncio.create_task(rank(1))  # it was started anew, and counts once
        await asyncio.sleep(0.05)
        assert passed == []
        await asyncio.gather(rank(2), again, *early)
        await rank(0)  # started anew after all have passed
        await barrier.arrive("shard 0", 6, 0, 3)  # at a rollout that all are done with
        return passed

    assert sorted(asyncio.run(meet())) == [0, 0, 1, 1, 2]


def test_a_rank_that_waits_in_vain_is_told_who_came_and_does_not_count_later() -> None:
    async def meet() -> None:
        barrier = Barrier(0.05)
        with pytest.raises(RanksMissing, match=r"only ranks \[4\] of 2 came"):
            await barrier.arrive("shard 1", 0, 4, 2)
        with pytest.raises(RanksMissing, match=r"only ranks \[5\] of 2 came"):
            await barrier.arrive("shard 1", 0, 5, 2)
        with pytest.raises(RanksMissing, match="shard 1, rollout 1"):
            await barrier.arrive("shard 1", 1, 4, 2)

    asyncio.run(meet())


def test_growth_is_a_rise_and_not_hidden_by_what_goes_away() -> None:
    rise = _Rise()
    for level in (90, 100, 20, 70, 10, 30):
        rise.take(level)
    assert rise.most == 50
