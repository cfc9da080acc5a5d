"""What a rank reads of its shard, and what of it training refuses. Without Ray's processes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

import torch

import tq_fs
from tests._rollouts import (
    FIELDS,
    Field,
    assert_bits,
    open_store,
    refs_of,
    routes,
    short_rollout,
    specs,
    standard_fields,
)
from tq_fs import Segment, Store
from tq_fs.errors import InvalidConfig, InvalidField, RowCountMismatch, TqFsError, WidthChanged
from tq_fs.rollout import Parallel, Rank, RolloutManager
from tq_fs.rollout._checks import TensorCheck
from tq_fs.rollout._reading import ShardReader

LAYERS, TOPK = 4, 2
SPECS = specs(FIELDS)
LAYOUTS = [
    Parallel(),
    Parallel(pipeline=2),
    Parallel(context=2),
    Parallel(context=3, split="contiguous", pipeline=2, stages=(1, 3)),
]
Read = dict[str, tuple[Segment, dict[str, Any]]]


def recorded(store: Store, count: int = 3, fields: list[Field] = FIELDS) -> list[Segment]:
    segments = []
    for number in range(count):
        session = store.session(f"s{number}")
        short_rollout(fields, number, turns=3, response=5 + number).record(session)
        segments += session.finalize()
    return segments


def read(
    store: Store, segments: Sequence[Segment], rank: Rank, *, removed: Sequence[int] = ()
) -> Read:
    """All that a rank is given, by session; copies, because the tensors are overwritten."""
    reader = ShardReader(store, SPECS, rank, budget_bytes=1200)
    found: Read = {}
    for mine, tensors in reader.read(segments, removed=removed, about="rollout 7"):
        for place, segment in enumerate(mine):
            own = {name: values[place].numpy().copy() for name, values in tensors.items()}
            found[segment.session_id] = segment, own
    return found


def expected(number: int, rank: Rank) -> Mapping[str, Any]:
    (want,) = short_rollout(FIELDS, number, turns=3, response=5 + number).expected("lineage")
    out: dict[str, Any] = {}
    for spec in SPECS:
        if spec.name in rank.fields(SPECS):
            ranges = rank.tokens(len(want.tokens), spec)
            out |= want.slime([spec], ranges=ranges, layers=rank.layers(LAYERS))
    return out


# ---------------------------------------------------------------- what a rank gets


@pytest.mark.parametrize("stored", [False, True], ids=["memory", "stored"])
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_a_rank_gets_its_part_to_the_bit_and_zeros_of_removed_samples(
    parallel: Parallel, stored: bool, tmp_path: Path
) -> None:
    opened = open_store(tmp_path, FIELDS) if stored else tq_fs.open_store(None, fields=SPECS)
    with opened as store:
        segments = recorded(store)
        for rank in parallel.ranks():
            found = read(store, segments, rank, removed=[1])
            assert list(found) == ["s0", "s1", "s2"]
            for number, (name, (segment, own)) in enumerate(found.items()):
                want = expected(number, rank)
                assert set(own) == set(want)
                for field, array in own.items():
                    bits = want[field].view(np.int32)  # of any float: NaN times 0 is no zero
                    assert_bits(array.view(np.int32), bits * (number != 1), (name, field))
                assert segment.loss_mask.any() == (number != 1)


def test_of_a_removed_sample_nothing_is_read(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS, cache_bytes=0) as store:
        segments = recorded(store)
        assert store.location is not None
        (folder,) = store.location.glob("steps/*/*s1*")
        shutil.rmtree(folder)
        rank = Parallel().ranks()[0]
        with pytest.raises(TqFsError):
            read(store, segments, rank)
        assert set(read(store, segments, rank, removed=[1])) == {"s0", "s1", "s2"}


def test_removed_samples_are_released_with_the_others(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        segments = recorded(store)
        read(store, segments, Parallel().ranks()[0], removed=[0, 2])
        assert store.release(segments, "train", rollout_id=0) == 0
        assert list(store.unreleased("train")) == []
        assert store.checkpoint_saved(0) == 9
        assert refs_of(segments) != []


# ---------------------------------------------------------------- what training refuses


def tensors_of(segment: Segment, rank: Rank) -> dict[str, Any]:
    with tq_fs.open_store(None, fields=SPECS) as store:
        reader = ShardReader(store, SPECS, rank, budget_bytes=2**20)
        ((_, tensors),) = reader.read([segment])
        return {name: values[0].clone() for name, values in tensors.items()}


@pytest.fixture(scope="module")
def segment() -> Segment:
    with tq_fs.open_store(None, fields=SPECS) as store:
        return recorded(store, 1)[0]


def of(name: str, change: Any) -> Any:
    return lambda tensors: tensors | {name: change(tensors[name])}


ROUTING, LOGPROBS = "rollout_routed_experts", "rollout_log_probs"
WRONG: list[tuple[Any, type[TqFsError], str]] = [
    (of(ROUTING, lambda t: t[:-1]), RowCountMismatch, ROUTING + ": {rows_1} rows where {tokens} "),
    (of(ROUTING, lambda t: torch.cat([t, t[:1]])), RowCountMismatch, ROUTING),
    (of(LOGPROBS, lambda t: t[1:]), RowCountMismatch, LOGPROBS),
    (of(ROUTING, lambda t: t[:, :-1]), WidthChanged, r"rows of shape \[\d, 2\]"),
    (of(ROUTING, lambda t: t[:, :, :1]), WidthChanged, r"rows of shape \[\d, 1\]"),
    (of(ROUTING, lambda t: t.long()), InvalidField, "torch.int64 where int32"),
    (of(LOGPROBS, lambda t: t.double()), InvalidField, "torch.float64 where float32"),
]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
@pytest.mark.parametrize(("change", "error", "said"), WRONG)
def test_another_shape_than_training_asks_for_is_refused_by_sample_field_and_numbers(
    segment: Segment, parallel: Parallel, change: Any, error: type[TqFsError], said: str
) -> None:
    rank = parallel.ranks()[-1]
    layers = None if parallel.pipeline == 1 else rank.layers(LAYERS)
    check = TensorCheck(SPECS, rank, layers)
    good = tensors_of(segment, rank)
    check.check(segment, good, removed=False, about="rollout 7")
    rows = len(good[ROUTING])
    pattern = said.format(rows_1=rows - 1, tokens=len(segment.tokens))
    with pytest.raises(error, match=f"rollout 7, 's0' lineage 0, .*{pattern}"):
        check.check(segment, change(good), removed=False, about="rollout 7")
    with pytest.raises(error):  # removed samples have zeros, of the same shape
        check.check(segment, change(good), removed=True, about="rollout 7")


def test_values_of_another_model_are_refused_on_the_in_memory_path_too(segment: Segment) -> None:
    array = segment.arrays["routed_experts"]
    other = replace(segment, arrays={**segment.arrays, "routed_experts": array[:, :3]})
    with pytest.raises(WidthChanged, match=r"\[3, 2\] where \[4, 2\]"):
        tensors_of(other, Parallel().ranks()[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"response_length": 99}, "a response of 99 in"),
        ({"loss_mask": np.ones(3, np.uint8)}, "a loss mask of 3 for"),
        ({"response_length": 2}, "tokens before the response are in the loss mask"),
    ],
)
def test_a_loss_mask_that_does_not_fit_is_refused(segment: Segment, change: Any, said: str) -> None:
    check = TensorCheck([], Parallel().ranks()[0], None)
    with pytest.raises(InvalidField, match=said):
        check.check(replace(segment, **change), {}, removed=False, about="rollout 0")


def zeroed(segment: Segment, layer: int, topk: int = TOPK) -> Segment:
    array = segment.arrays["routed_experts"][:, :, :topk].copy()
    array[:, layer] = 0
    return replace(segment, arrays={**segment.arrays, "routed_experts": array})


@pytest.mark.parametrize("number", [0, 1])
def test_a_layer_of_zeros_is_refused_by_the_rank_that_has_it(segment: Segment, number: int) -> None:
    parallel = Parallel(pipeline=2)
    bad = zeroed(segment, 3 if number else 0)
    (own, other) = (parallel.ranks()[number], parallel.ranks()[1 - number])
    with pytest.raises(InvalidField, match=rf"layers \[{number}\] are all 0"):
        tensors_of(bad, own)
    tensors_of(bad, other)


def test_a_layer_without_a_router_and_a_removed_sample_may_be_zeros(segment: Segment) -> None:
    rank = Parallel().ranks()[0]
    bad = zeroed(segment, 1)
    with tq_fs.open_store(None, fields=SPECS) as store:
        dense = ShardReader(store, SPECS, rank, budget_bytes=2**20, routed_layers=(0, 2, 3))
        assert len(list(dense.read([bad]))) == 1
        every = ShardReader(store, SPECS, rank, budget_bytes=2**20)
        assert len(list(every.read([bad], removed=[0]))) == 1
        with pytest.raises(InvalidField):
            list(every.read([bad]))


def test_a_router_that_takes_one_expert_may_always_take_the_first() -> None:
    one = standard_fields(layers=2, topk=1)
    one[1] = Field(one[1].spec, lambda random, rows: 0 * routes(random, rows, 2, 1, 4))
    with tq_fs.open_store(None, fields=specs(one)) as store:
        segments = recorded(store, 1, one)
        reader = ShardReader(store, specs(one), Parallel().ranks()[0], budget_bytes=2**20)
        assert len(list(reader.read(segments))) == 1


# ---------------------------------------------------------------- who removes


def test_keep_must_speak_of_every_segment(segment: Segment) -> None:
    manager = RolloutManager([], data=1, keep=lambda segments: [True] * (len(segments) - 1))
    with pytest.raises(InvalidConfig, match="spoke of 1 Segments of 2"):
        manager._removed([segment, segment])
