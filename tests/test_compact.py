"""Ids that stay in memory in their stored type: a quarter of the bytes, and the same tensors."""

from __future__ import annotations

import functools
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tq_fs
from tests._rollouts import (
    VIEWS,
    Array,
    Field,
    Op,
    Rollout,
    assert_batch,
    assert_bits,
    assert_segment,
    logprob_bits,
    routes,
    specs,
    visible_steps,
)
from tq_fs import FieldSpec
from tq_fs.errors import ValueOutOfRange
from tq_fs.manifests import Mode
from tq_fs.micro_batches import MicroBatch

MODES: tuple[Mode, ...] = ("tito", "snapshot")
LAYERS, TOPK = 4, 2
OPS = [
    Op("create", 0, 3, 4, versions=2),
    Op("create", 0, 2, 2),
    Op("append", 0, 2, 3),
    Op("append", 1, 0, 0),  # without rows, which must not widen the others
    Op("append", 0, 1, 4),
    Op("branch", 0, 5, 2),
    Op("boundary", 2, 4, 1, only_response=True),
    Op("append", 2, 1, 1, only_response=True),
]


def declared(stored: str, below: int, holes: str = "none", **more: Any) -> list[Field]:
    """Return logprobs, routes with ids up to `below`, and plain numbers, some of them negative."""
    return [
        Field(tq_fs.logprobs(), logprob_bits),
        Field(
            tq_fs.routed_experts(stored=stored, **more),
            lambda random, rows: topped(routes(random, rows, LAYERS, TOPK, below, holes), below),
        ),
        Field(
            FieldSpec(name="rewards", dtype="int32"),
            lambda random, rows: -random.integers(1, 5, rows).astype(np.int32),
        ),
    ]


def topped(ids: Array, below: int) -> Array:
    """Put the largest id in, so that the type that follows from the ids is known."""
    if len(ids):
        ids[-1, -1, -1] = below - 1
    return ids


@pytest.fixture(params=["off", "only logprobs stored"])
def opening(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Open a store that leaves ids in memory."""
    if request.param == "off":
        return functools.partial(tq_fs.open_store, None)
    return functools.partial(
        tq_fs.open_store,
        tmp_path.as_uri(),
        transfer=("logprobs",),
        prepared_groups=0,
        persist_trajectories=True,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("holes", ["none", "rows", "values", "all"])
@pytest.mark.parametrize(
    ("stored", "below", "more", "kept"),
    [
        ("uint8", 256, {}, "uint8"),
        ("uint16", 65536, {}, "uint16"),
        ("uint16", 200, {}, "uint16"),
        ("int32", 256, {}, "int32"),
        ("int32", 2**31 - 1, {}, "int32"),
        ("auto", 256, {}, "uint8"),
        ("auto", 257, {}, "uint16"),
        ("auto", 70_000, {}, "int32"),
        ("auto", 200, {"experts": 200}, "uint8"),
        ("auto", 200, {"experts": 384}, "uint16"),
    ],
)
def test_hydrated_they_are_int32_again_bit_for_bit(
    opening: Any, mode: Mode, holes: str, stored: str, below: int, more: dict[str, Any], kept: str
) -> None:
    fields = declared(stored, below, holes, **more)
    rollout = Rollout(fields, mode).play(OPS, np.random.default_rng(2))
    with opening(fields=specs(fields), compact=True) as store:
        session = store.session("s", mode=mode)
        for record in rollout.record(session):
            for name, plain in (("routed_experts", kept), ("rewards", "int32")):
                array = record.arrays[name]
                if array.size:
                    assert array.dtype == (plain if array.min() >= 0 else "int32"), name
                else:
                    assert array.dtype in (plain, "uint8"), name
        segments = session.finalize(views=VIEWS)
        expected = [e for view in VIEWS for e in rollout.expected(view)]
        for segment, want in zip(segments, expected, strict=True):
            assert_segment(segment, want)
            if holes == "none":
                assert segment.arrays["routed_experts"].dtype == kept
        assert_batch(store.hydrate(segments), [e.slime(specs(fields)) for e in expected])


@pytest.mark.parametrize("mode", MODES)
def test_they_are_cut_as_wide_ones_are(opening: Any, mode: Mode) -> None:
    """By layers, tokens and length, into an arena, and as zeros of removed samples."""
    fields = declared("auto", 256)
    plain = specs(fields)
    rollout = Rollout(fields, mode).play(OPS, np.random.default_rng(5))
    expected = [e for view in VIEWS for e in rollout.expected(view)]
    with opening(fields=plain, compact=True) as store:
        session = store.session("s", mode=mode)
        rollout.record(session)
        samples = [s.sample(tokens=9) for s in session.finalize(views=VIEWS)]
        select: dict[str, Any] = {"layers": (1, 3), "tokens": [(2, 4), (5, 20)]}
        want = [e.slime(plain, tokens=9, ranges=select["tokens"], layers=(1, 3)) for e in expected]
        assert_batch(store.hydrate(samples, **select), want)
        zeros = [{name: np.zeros_like(array) for name, array in sample.items()} for sample in want]
        removed = [replace(sample, removed=True) for sample in samples]
        assert_batch(store.hydrate(removed, **select), zeros)
        batches: list[MicroBatch] = []
        have: dict[str, list[Array]] = {}
        for batch in store.micro_batches(samples, budget_bytes=2000, **select):
            batches.append(batch)
            for name, tensors in batch.tensors.items():
                have.setdefault(name, []).extend(t.numpy().copy() for t in tensors)
        assert len(batches) > 1
        assert_batch(have, want)


def test_steps_of_one_segment_may_be_of_different_types(opening: Any) -> None:
    random = np.random.default_rng(0)
    fields = [tq_fs.logprobs(), tq_fs.routed_experts()]
    blocks = [
        topped(routes(random, 6 + (i > 0), LAYERS, TOPK, below), below)
        for i, below in enumerate([256, 65536, 100, 2**31 - 1])
    ]
    blocks[2][3] = -1
    with opening(fields=fields, compact=True) as store:
        ones = np.ones(7, np.float32)
        session = store.session("s")
        session.create([1, 2, 3], [4, 5, 6, 7], logprobs=ones, routed_experts=blocks[0])
        for i in (1, 2, 3):
            session.append(i - 1, [1], [2] * 6, logprobs=ones, routed_experts=blocks[i])
        kept = [r.arrays["routed_experts"].dtype.name for r in session.records]
        assert kept == ["uint8", "uint16", "int32", "int32"]
        (segment,) = session.finalize()
        assert segment.arrays["routed_experts"].dtype == "int32"
        (have,) = store.hydrate([segment])["rollout_routed_experts"]
        assert_bits(have, np.concatenate(blocks))


@pytest.mark.parametrize(
    ("spec", "bad"),
    [
        (tq_fs.routed_experts(stored="uint8"), 256),
        (tq_fs.routed_experts(stored="uint8"), -2),
        (tq_fs.routed_experts(stored="uint16"), 65536),
        (tq_fs.routed_experts(stored="int32", experts=100), 100),
        (tq_fs.routed_experts(stored="int32", experts=100), -2),
        (tq_fs.routed_experts(experts=100), 100),
        (tq_fs.routed_experts(experts=100), 2**31 - 1),
        (tq_fs.routed_experts(), -2),
        (tq_fs.routed_experts(stored="int32"), -(2**31)),
    ],
)
def test_an_id_that_does_not_fit_is_refused_and_nothing_is_recorded(
    opening: Any, tmp_path: Path, spec: FieldSpec, bad: int
) -> None:
    good, wrong = np.zeros((2, 4, 2), np.int32), np.zeros((2, 4, 2), np.int32)
    wrong[0] = -1  # which is legal, and no excuse
    wrong[1, 3, 1] = bad
    three = np.zeros(3, np.float32)
    with opening(fields=[tq_fs.logprobs(), spec], compact=True) as store:
        session = store.session("s")
        with pytest.raises(ValueOutOfRange, match=f"id {bad} at row 1, layer 3, slot 1"):
            session.create([1, 2], [3], logprobs=three, routed_experts=wrong)
        assert session.records == []
        assert visible_steps(tmp_path) == set()  # what was put beside it is gone
        session.create([1, 2], [3], logprobs=three, routed_experts=good)
        (segment,) = session.finalize()
        assert_bits(store.hydrate([segment])["rollout_routed_experts"][0], good)


def test_a_refused_id_does_not_fix_the_width(opening: Any) -> None:
    spec = tq_fs.routed_experts(experts=8)
    with opening(fields=[tq_fs.logprobs(), spec], compact=True) as store:
        session = store.session("s")
        three = np.zeros(3, np.float32)
        with pytest.raises(ValueOutOfRange):
            session.create(
                [1, 2], [3], logprobs=three, routed_experts=np.full((2, 3, 3), 8, np.int32)
            )
        session.create([1, 2], [3], logprobs=three, routed_experts=np.zeros((2, 4, 2), np.int32))


def test_unless_it_is_asked_for_ids_stay_as_they_are(opening: Any) -> None:
    fields = declared("uint8", 256)
    rollout = Rollout(fields, "tito").play(OPS, np.random.default_rng(2))
    with opening(fields=specs(fields)) as store:
        session = store.session("s")
        for record in rollout.record(session):
            assert {a.dtype.name for n, a in record.arrays.items() if n != "logprobs"} == {"int32"}


def test_what_is_kept_is_a_quarter_and_holds_nothing_else(opening: Any) -> None:
    """The array that came is let go: the engine's reply is not kept alive by its small copy."""
    fields = declared("auto", 256, experts=256)
    rollout = Rollout(fields, "tito").play([Op("create", 0, 10, 90)], np.random.default_rng(2))
    given = rollout.step(rollout.turns[0])
    wide = np.array(given.values["routed_experts"])
    came = weakref.ref(wide)
    with opening(fields=specs(fields), compact=True) as store:
        session = store.session("s")
        record = session.record(
            tq_fs.StepInput(
                kind="create",
                context=given.context,
                response=given.response,
                values={**given.values, "routed_experts": wide},
            )
        )
        ids = record.arrays["routed_experts"]
        assert ids.nbytes == wide.nbytes // 4
        assert ids.base is None
        del wide
        gc.collect()
        assert came() is None
