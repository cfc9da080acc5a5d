"""The first promise: what training gets from the store is, bit for bit, what it gets without it."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tq_fs
from tests._rollouts import (
    VIEWS,
    Array,
    CountingBackend,
    Expected,
    Field,
    Op,
    Random,
    Rollout,
    assert_batch,
    assert_bits,
    assert_segment,
    logprob_bits,
    open_store,
    routes,
    short_rollout,
    small_chunks,
    specs,
    standard_fields,
)
from tq_fs import FieldSpec
from tq_fs.backends import LocalBackend
from tq_fs.keys import Incarnation
from tq_fs.manifests import Mode, Pages
from tq_fs.steps import StepEntry

LAYERS, TOPK = 5, 2
NAMES = ("logprobs", "routed_experts", "entropy", "drafts", "gate")
LARGEST = {"uint8": 256, "uint16": 300, "int32": 2**31 - 1}


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a history is declared, stored and read."""

    mode: Mode = "tito"
    stored: str = "auto"
    experts: int | None = None
    width_known: bool = True
    codec: str = "auto"
    logprobs_codec: str = "auto"
    holes: str = "none"
    extras: bool = True
    transfer: tuple[str, ...] | None = None
    checksum: bool = True
    layer_groups: int = 1
    threads: int = 1
    cache_bytes: int = 0
    prepared: int = 0
    durability: str = "none"
    compact: bool = False

    def fields(self) -> list[Field]:
        """Return the declared fields with what makes their rows."""
        width = {"layers": LAYERS, "topk": TOPK} if self.width_known else {}
        made = [
            Field(
                FieldSpec(
                    name="logprobs",
                    dtype="float32",
                    stored="float32",
                    context_fill=0.0,
                    codec=self.logprobs_codec,
                ),
                logprob_bits,
            ),
            Field(
                tq_fs.routed_experts(
                    **width, experts=self.experts, stored=self.stored, codec=self.codec
                ),
                self._routes,
            ),
        ]
        return made + (extra_fields() if self.extras else [])

    def _routes(self, random: Random, rows: int) -> Array:
        if self.experts is not None:
            below = self.experts
        elif self.stored == "auto":  # the type then follows from each Step's ids
            below = int(random.choice([200, 256, 257, 65536, 65537, 2**31 - 1]))
        else:
            below = int(np.iinfo(self.stored).max) + (self.stored != "int32")
        return routes(random, rows, LAYERS, TOPK, below, self.holes)

    def settings(self) -> dict[str, Any]:
        return {
            "transfer": self.transfer,
            "checksum": self.checksum,
            "layer_groups": self.layer_groups,
            "reader_threads": self.threads,
            "writer_threads": self.threads,
            "cache_bytes": self.cache_bytes,
            "prepared_groups": self.prepared,
            "durability": self.durability,
            "compact": self.compact,
        }


def extra_fields() -> list[Field]:
    """Return fields that nobody foresaw: two axes of floats, ids without -1, a half float."""
    entropy = FieldSpec(name="entropy", dtype="float32", inner=(2,), stored="float32")
    drafts = FieldSpec(name="drafts", dtype="int32", rows="tokens")
    gate = FieldSpec(name="gate", dtype="float16", rows="transitions", codec="zstd")
    return [
        Field(entropy, lambda random, rows: logprob_bits(random, 2 * rows).reshape(rows, 2)),
        Field(drafts, lambda random, rows: random.integers(0, 70_000, rows).astype(np.int32)),
        Field(
            gate,
            lambda random, rows: random.integers(0, 2**16, rows, dtype=np.uint16).view(np.float16),
        ),
    ]


lengths = st.one_of(st.integers(0, 6), st.sampled_from([7, 8, 9, 15, 16, 17, 20]))
op = st.builds(
    Op,
    kind=st.sampled_from(["create", "append", "append", "append", "branch", "boundary"]),
    pick=st.integers(0, 3),
    context=lengths,
    response=lengths,
    only_response=st.booleans(),
    versions=st.sampled_from([1, 1, 2, 3]),
)
transfers = st.one_of(
    st.none(),
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True).map(tuple),
)
cases = st.builds(
    Case,
    mode=st.sampled_from(["tito", "snapshot"]),
    stored=st.sampled_from(["uint8", "uint16", "int32", "auto", "auto"]),
    experts=st.sampled_from([None, None, 200, 256]),
    width_known=st.booleans(),
    codec=st.sampled_from(["auto", "none", "lz4", "zstd"]),
    logprobs_codec=st.sampled_from(["auto", "lz4", "zstd"]),
    holes=st.sampled_from(["none", "rows", "values", "all"]),
    transfer=transfers,
    checksum=st.booleans(),
    layer_groups=st.integers(1, 3),
    threads=st.integers(1, 2),
    cache_bytes=st.sampled_from([0, 300, 2**20]),
    prepared=st.sampled_from([0, 0, 0, 2]),
    compact=st.booleans(),
)


@contextmanager
def both_stores(case: Case) -> Iterator[tuple[tq_fs.Store, tq_fs.Store]]:
    """Open the in-memory path and a store for one case."""
    fields = case.fields()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        off = stack.enter_context(
            tq_fs.open_store(None, fields=specs(fields), compact=case.compact)
        )
        yield off, stack.enter_context(open_store(folder, fields, **case.settings()))


def record_interleaved(
    store: tq_fs.Store, rollouts: Sequence[Rollout], turns: Sequence[int], mode: Mode
) -> list[tq_fs.Segment]:
    """Record several sessions at the same time; `turns` says whose turn it is."""
    sessions = [store.session(f"s{i}", mode=mode) for i in range(len(rollouts))]
    places = [0] * len(rollouts)
    for who in turns:
        sessions[who].record(rollouts[who].step(rollouts[who].turns[places[who]]))
        places[who] += 1
    return [seg for session in sessions for seg in session.finalize(views=VIEWS)]


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    case=cases,
    histories=st.lists(st.lists(op, min_size=1, max_size=7), min_size=1, max_size=2),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_every_history_hydrates_bit_for_bit_as_without_the_store(
    case: Case, histories: list[list[Op]], seed: int, data: st.DataObject
) -> None:
    fields = case.fields()
    rollouts = [
        Rollout(fields, case.mode).play(ops, np.random.default_rng([seed, i]))
        for i, ops in enumerate(histories)
    ]
    turns = data.draw(
        st.permutations([i for i, r in enumerate(rollouts) for _ in r.turns]), label="turns"
    )
    expected = [e for r in rollouts for view in VIEWS for e in r.expected(view)]
    with small_chunks(), both_stores(case) as (off, on):
        kept = record_interleaved(off, rollouts, turns, case.mode)
        stored = record_interleaved(on, rollouts, turns, case.mode)
        for memory, segment, want in zip(kept, stored, expected, strict=True):
            assert_segment(memory, want)
            assert_segment(segment, want)
            assert memory.ref is None
            assert segment.ref is not None
            assert not set(segment.arrays) & set(case.transfer or NAMES)
        compare(off, on, kept, stored, expected, data)


def in_order(bounds: tuple[int, int]) -> tuple[int, int]:
    return min(bounds), max(bounds)


def compare(
    off: tq_fs.Store,
    on: tq_fs.Store,
    kept: Sequence[tq_fs.Segment],
    stored: Sequence[tq_fs.Segment],
    expected: Sequence[Expected],
    data: st.DataObject,
) -> None:
    """Hydrate whole, then samples cut at the end and selected, from both, and compare."""
    assert_all(off, on, kept, stored, [e.slime(SPECS) for e in expected], {})
    tokens = data.draw(st.one_of(st.none(), st.integers(0, 40)), label="sample tokens")
    ranges = data.draw(
        st.one_of(
            st.none(),
            st.lists(
                st.tuples(st.integers(0, 40), st.integers(0, 40)).map(in_order),
                min_size=1,
                max_size=3,
            ),
        ),
        label="tokens",
    )
    layers = data.draw(
        st.one_of(
            st.none(),
            st.tuples(st.integers(0, LAYERS), st.integers(0, LAYERS)).map(in_order),
        ),
        label="layers",
    )
    chosen = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True), label="fields")
    picked = [s for s in SPECS if s.name in chosen]
    want = [e.slime(picked, tokens=tokens, ranges=ranges, layers=layers) for e in expected]
    select = {"fields": chosen, "tokens": ranges, "layers": layers}
    assert_all(
        off,
        on,
        [s.sample(tokens=tokens) for s in kept],
        [s.sample(tokens=tokens) for s in stored],
        want,
        select,
    )


SPECS = specs(Case().fields())


def assert_all(
    off: tq_fs.Store,
    on: tq_fs.Store,
    kept: Sequence[Any],
    stored: Sequence[Any],
    want: list[dict[str, Array]],
    select: dict[str, Any],
) -> None:
    assert_batch(off.hydrate(kept, **select), want, "in memory")
    assert_batch(on.hydrate(stored, **select), want, "stored")
    again = on.hydrate(stored[::-1], **select)  # another order, and a warm cache
    assert_batch(again, want[::-1], "stored, backwards")


# ---------------------------------------------------------------- real chunk sizes


@pytest.mark.parametrize("layer_groups", [1, 2, 3])
@pytest.mark.parametrize(
    ("stored", "experts", "holes"),
    [
        ("uint8", 256, "none"),
        ("uint8", 256, "values"),
        ("uint16", None, "rows"),
        ("int32", None, "none"),
        ("auto", None, "values"),
    ],
)
def test_lengths_around_the_real_chunk_borders(
    tmp_path: Path, stored: str, experts: int | None, holes: str, layer_groups: int
) -> None:
    case = Case(
        stored=stored, experts=experts, holes=holes, layer_groups=layer_groups, extras=False,
        threads=2,
    )  # fmt: skip
    fields = case.fields()
    declared = specs(fields)
    ops = [
        Op("create", 0, 2000, 47),  # 2,046 rows
        Op("append", 0, 100, 1948),  # 2,048 rows: the last that are one chunk
        Op("append", 0, 1, 2048),  # 2,049: two chunks
        Op("create", 0, 1, 3072),  # 3,072: three whole ones
        Op("create", 0, 4, 3070),
    ]
    rollout = Rollout(fields, "tito").play(ops, np.random.default_rng(5))
    with open_store(tmp_path, fields, **case.settings()) as store:
        session = store.session("s")
        rollout.record(session)
        segments = session.finalize(views=VIEWS)
        expected = [e for view in VIEWS for e in rollout.expected(view)]
        assert_batch(store.hydrate(segments), [e.slime(declared) for e in expected])
        select: dict[str, Any] = {"layers": (1, 4), "tokens": [(2040, 2060), (0, 5), (4090, 9000)]}
        want = [
            e.slime(declared, ranges=select["tokens"], layers=select["layers"]) for e in expected
        ]
        assert_batch(store.hydrate(segments, **select), want)


def test_steps_of_one_segment_may_be_stored_in_different_types(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    with open_store(tmp_path, Case(extras=False).fields()) as store:
        session = store.session("s")
        blocks = [
            routes(random, 6 + (i > 0), LAYERS, TOPK, below)
            for i, below in enumerate([200, 60_000, 2**31 - 1])
        ]
        blocks[1][0] = 59_999
        blocks[2][0] = 2**31 - 1
        ones = np.ones(7, np.float32)
        session.create([1, 2, 3], [4, 5, 6, 7], logprobs=ones, routed_experts=blocks[0])
        for i in (1, 2):
            session.append(i - 1, [1], [2] * 6, logprobs=ones, routed_experts=blocks[i])
        types = [r.stored.fields["routed_experts"].dtype for r in session.records if r.stored]
        assert types == ["uint8", "uint16", "int32"]
        (have,) = store.hydrate(session.finalize())["rollout_routed_experts"]
        assert_bits(have, np.concatenate(blocks))


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_every_bit_of_a_nan_survives(tmp_path: Path, codec: str) -> None:
    bits = np.array(
        [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FA12345,
         0x7F800000, 0xFF800000, 0x80000000, 0x00000001],
        np.uint32,
    )  # fmt: skip
    spec = FieldSpec(
        name="logprobs", dtype="float32", stored="float32", context_fill=0.0, codec=codec
    )
    with tq_fs.open_store(tmp_path.as_uri(), fields=[spec], prepared_groups=0) as store:
        session = store.session("s")
        session.create([], np.arange(len(bits)), logprobs=bits.view(np.float32))
        session.append(0, [1, 2], np.arange(len(bits)), logprobs=bits.view(np.float32))
        (have,) = store.hydrate(session.finalize())["rollout_log_probs"]
    zeros = np.zeros(2, np.uint32)
    assert have.numpy().view(np.uint32).tolist() == [*bits, *zeros, *bits]


# ---------------------------------------------------------------- removed samples


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("width_known", [True, False])
def test_a_removed_sample_is_zeros_and_nothing_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: bool, width_known: bool
) -> None:
    monkeypatch.setattr("tq_fs.places.LocalBackend", CountingBackend)
    case = Case(width_known=width_known, extras=False)
    rollout = short_rollout(case.fields(), 1)
    url = tmp_path.as_uri() if stored else None
    with tq_fs.open_store(url, fields=specs(case.fields()), prepared_groups=0) as store:
        session = store.session("s")
        rollout.record(session)
        (segment,) = session.finalize()
        (want,) = rollout.expected("lineage")
        backends = list(store.reader._backends.values()) if store.reader else []
        samples = [segment.sample(removed=True), segment.sample(tokens=9, removed=True)]
        batch = store.hydrate(samples, layers=(1, 3))
        shapes = [
            want.slime(specs(case.fields()), layers=(1, 3)),
            want.slime(specs(case.fields()), layers=(1, 3), tokens=9),
        ]
        zeros = [{n: np.zeros_like(a) for n, a in sample.items()} for sample in shapes]
        assert_batch(batch, zeros)
        for backend in backends:
            assert isinstance(backend, CountingBackend)
            assert backend.requests == []
        mixed = store.hydrate([samples[0], segment.sample()], layers=(1, 3))
        assert_batch(mixed, [zeros[0], shapes[0]])


@pytest.mark.parametrize("stored", [True, False])
def test_a_removed_sample_needs_nothing_from_a_store_that_lost_it(
    tmp_path: Path, stored: bool
) -> None:
    case = Case(extras=False)
    rollout = short_rollout(case.fields(), 1)
    url = tmp_path.as_uri() if stored else None
    with tq_fs.open_store(url, fields=specs(case.fields()), prepared_groups=0) as store:
        session = store.session("s")
        rollout.record(session)
        segments = session.finalize()
        store.release(segments)
        batch = store.hydrate([s.sample(removed=True) for s in segments])
        assert not batch["rollout_routed_experts"][0].any()


# ---------------------------------------------------------------- samples that make no sense


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(
    ("tokens", "response"),
    [(99, 4), (8, 4), (6, 7), (-1, 0)],
    ids=["far too long", "a token too long", "response longer than it", "negative"],
)
def test_a_sample_that_its_segment_cannot_fill_is_refused_on_both_paths(
    tmp_path: Path, stored: bool, tokens: int, response: int
) -> None:
    url = tmp_path.as_uri() if stored else None
    fields = Case(extras=False).fields()
    rollout = Rollout(fields, "tito").play([Op("create", 0, 3, 4)], np.random.default_rng(0))
    with tq_fs.open_store(url, fields=specs(fields), prepared_groups=0) as store:
        session = store.session("s")
        rollout.record(session)
        (segment,) = session.finalize()
        sample = tq_fs.Sample(
            ref=segment.ref, tokens=tokens, response_length=response, arrays=segment.arrays
        )
        with pytest.raises(tq_fs.errors.InvalidSelection):
            store.hydrate([sample])


@pytest.mark.parametrize("stored", [True, False])
def test_a_selection_that_makes_no_sense_is_refused_on_both_paths(
    tmp_path: Path, stored: bool
) -> None:
    url = tmp_path.as_uri() if stored else None
    fields = Case(extras=False).fields()
    with tq_fs.open_store(url, fields=specs(fields), prepared_groups=0) as store:
        session = store.session("s")
        short_rollout(fields, 1).record(session)
        segments = session.finalize()
        for layers in [(0, LAYERS + 1), (-1, 2), (3, 2)]:
            with pytest.raises(tq_fs.errors.InvalidSelection):
                store.hydrate(segments, layers=layers)
        for tokens in [(-1, 2), (3, 2)]:
            with pytest.raises(tq_fs.errors.InvalidSelection):
                store.hydrate(segments, tokens=tokens)
            with pytest.raises(tq_fs.errors.InvalidSelection):
                store.hydrate(segments, tokens=[(0, 1), tokens])
        with pytest.raises(tq_fs.errors.FieldMissing):
            store.hydrate(segments, fields=["entropy"])


@pytest.mark.parametrize("stored", [True, False])
def test_ranges_may_be_pairs_of_whole_numbers_of_any_kind(tmp_path: Path, stored: bool) -> None:
    url = tmp_path.as_uri() if stored else None
    fields = Case(extras=False).fields()
    rollout = short_rollout(fields, 1)
    (expected,) = rollout.expected("lineage")
    with tq_fs.open_store(url, fields=specs(fields), prepared_groups=0) as store:
        session = store.session("s")
        rollout.record(session)
        segments = session.finalize()
        pairs: list[Any] = [(1, 3), [1, 3], (np.int64(1), np.int64(3)), np.array([1, 3])]
        for pair in pairs:
            by_layers = expected.slime(specs(fields), layers=(1, 3))
            assert_batch(store.hydrate(segments, layers=pair), [by_layers])
            one = expected.slime(specs(fields), ranges=[(1, 3)])
            assert_batch(store.hydrate(segments, tokens=pair), [one])
            two = expected.slime(specs(fields), ranges=[(1, 3), (5, 8)])
            assert_batch(store.hydrate(segments, tokens=[pair, (5, 8)]), [two])
        none = expected.slime(specs(fields), ranges=[])
        assert_batch(store.hydrate(segments, tokens=[]), [none])


NO_RANGES: list[Any] = [(1,), (1, 2, 3), (1.0, 3.0), ("a", "b"), (None, 3), 5, "12", (1, [2])]


@pytest.mark.parametrize("nonsense", NO_RANGES, ids=repr)
def test_what_is_no_range_is_refused(tmp_path: Path, nonsense: Any) -> None:
    fields = Case(extras=False).fields()
    with tq_fs.open_store(None, fields=specs(fields)) as store:
        session = store.session("s")
        short_rollout(fields, 1).record(session)
        segments = session.finalize()
        selections: list[dict[str, Any]] = [
            {"layers": nonsense}, {"tokens": nonsense}, {"tokens": [(0, 1), nonsense]},
        ]  # fmt: skip
        for select in selections:
            with pytest.raises(tq_fs.errors.InvalidSelection):
                store.hydrate(segments, **select)
            with pytest.raises(tq_fs.errors.InvalidSelection):
                store.micro_batches(segments, size=1, **select)


# ---------------------------------------------------------------- micro-batches and arenas


class Blocks:
    """Gives memory, and remembers how much."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, nbytes: int) -> npt.NDArray[np.uint8]:
        self.sizes.append(nbytes)
        return np.full(nbytes, 0xAB, np.uint8)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Give a store with 12 samples of different lengths, some of them removed or cut."""
    fields = standard_fields(LAYERS, TOPK)
    with open_store(tmp_path_factory.mktemp("shard"), fields) as store:
        samples, want = [], []
        for i in range(12):
            rollout = short_rollout(fields, i, turns=1 + i % 4, response=3 + 5 * i)
            session = store.session(f"s{i}")
            rollout.record(session)
            (segment,) = session.finalize()
            cut = 7 if i % 5 == 0 else None
            samples.append(segment.sample(tokens=cut, removed=i == 4))
            (expected,) = rollout.expected("lineage")
            arrays = expected.slime(specs(fields), tokens=cut)
            want.append({n: np.zeros_like(a) if i == 4 else a for n, a in arrays.items()})
        yield store, samples, want


@pytest.mark.parametrize("size", [1, 2, 5, 12, 100])
def test_micro_batches_by_size_give_the_shard_in_order(shard: Any, size: int) -> None:
    store, samples, want = shard
    blocks = Blocks()
    batches = store.micro_batches(samples, size=size, allocate=blocks, reuse=True)
    assert len(batches) == -(-12 // size)
    batches.prefetch()
    at = 0
    for batch in batches:
        assert batch.samples == tuple(samples[at : at + size])
        assert_batch(batch.tensors, want[at : at + size])
        batches.prefetch()  # must not touch the batch in hand
        store._ahead.submit(int).result(20)  # its only thread is through with it
        assert_batch(batch.tensors, want[at : at + size])
        at += size
    assert at >= 12
    assert len(blocks.sizes) == min(2, len(batches))


@pytest.mark.parametrize("more", [0, 1000, 10_000, 10**9])
def test_micro_batches_by_budget_stay_within_it(shard: Any, more: int) -> None:
    store, samples, want = shard
    one = max(sum(-(-a.nbytes // 64) * 64 for a in sample.values()) for sample in want)
    blocks = Blocks()
    batches = store.micro_batches(samples, budget_bytes=one + more, allocate=blocks, reuse=True)
    seen = 0
    for batch in batches:
        assert_batch(batch.tensors, want[seen : seen + len(batch.samples)])
        seen += len(batch.samples)
    assert seen == 12
    assert max(blocks.sizes) <= one + more
    assert len(blocks.sizes) <= 2
    assert (len(batches) == 1) == (more == 10**9)


def assert_shard(batches: Sequence[Any], want: Sequence[dict[str, Array]]) -> None:
    """Compare all micro-batches at once, after the last one was taken."""
    at = 0
    for batch in batches:
        assert_batch(batch.tensors, want[at : at + len(batch.samples)])
        at += len(batch.samples)
    assert at == len(want)


@pytest.mark.parametrize("prefetched", [True, False])
@pytest.mark.parametrize("size", [1, 5, 12])
def test_each_micro_batch_owns_its_memory_and_is_valid_as_long_as_it_is_held(
    shard: Any, size: int, prefetched: bool
) -> None:
    store, samples, want = shard
    blocks = Blocks()
    batches = store.micro_batches(samples, size=size, allocate=blocks)
    if prefetched:
        batches.prefetch()
    assert_shard(list(batches), want)
    assert len(blocks.sizes) == len(batches)


def test_the_memory_of_a_micro_batch_goes_with_its_tensors(shard: Any) -> None:
    store, samples, _ = shard
    made: list[weakref.ref[Any]] = []

    def allocate(nbytes: int) -> npt.NDArray[np.uint8]:
        block = np.empty(nbytes, np.uint8)
        made.append(weakref.ref(block))
        return block

    most = 0
    for _batch in store.micro_batches(samples, size=1, allocate=allocate):
        gc.collect()
        most = max(most, sum(block() is not None for block in made))
    assert len(made) == 12
    assert most <= 3  # the one in hand, the one ahead, and the one that was just let go


@pytest.mark.parametrize("reuse", [True, False])
def test_every_iteration_over_micro_batches_begins_anew(shard: Any, reuse: bool) -> None:
    store, samples, want = shard
    batches = store.micro_batches(samples, size=5, reuse=reuse)
    for left_at in (None, 0, 1, 2, None):
        at = 0
        for number, batch in enumerate(batches):
            assert_batch(batch.tensors, want[at : at + len(batch.samples)])
            at += len(batch.samples)
            if number == left_at:
                break
        assert at == (12 if left_at is None else min(12, 5 * (left_at + 1)))
    batches.prefetch()  # of what the next loop begins with
    for number, batch in enumerate(batches):
        assert_batch(batch.tensors, want[5 * number : 5 * number + 5])


class Failing(LocalBackend):
    """A backend whose next reads fail."""

    fails = 0

    def open(self, key: str) -> Any:
        if Failing.fails and "/s3/" in key:
            Failing.fails -= 1
            raise tq_fs.errors.StorageFailed("the device said no", subject=key)
        return super().open(key)


@pytest.mark.parametrize("reuse", [True, False])
def test_after_an_error_an_iteration_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reuse: bool
) -> None:
    monkeypatch.setattr("tq_fs.places.LocalBackend", Failing)
    fields = standard_fields(LAYERS, TOPK)
    with open_store(tmp_path, fields, reader_threads=1) as store:
        segments, want = [], []
        for i in range(5):
            rollout = short_rollout(fields, i, turns=1)
            session = store.session(f"s{i}")
            rollout.record(session)
            segments += session.finalize()
            want += [e.slime(specs(fields)) for e in rollout.expected("lineage")]
        batches = store.micro_batches(segments, size=1, reuse=reuse)
        monkeypatch.setattr(Failing, "fails", 1)
        loop = iter(batches)
        for sample in want[:3]:
            assert_batch(dict(next(loop).tensors), [sample])
        with pytest.raises(tq_fs.errors.StorageFailed):
            next(loop)
        for batch, sample in zip(batches, want, strict=True):
            assert_batch(dict(batch.tensors), [sample])


@pytest.mark.parametrize("begun", [True, False])
def test_micro_batches_of_a_closed_store_say_so(tmp_path: Path, begun: bool) -> None:
    fields = standard_fields(LAYERS, TOPK)
    with open_store(tmp_path, fields) as store:
        session = store.session("s")
        for i in range(4):
            rollout = short_rollout(fields, i, turns=1)
            rollout.record(session)
        batches = store.micro_batches(session.finalize(), size=1)
        loop = iter(batches)
        if begun:
            next(loop)
    with pytest.raises(tq_fs.errors.SessionClosed):
        list(loop)
    with pytest.raises(tq_fs.errors.SessionClosed):
        list(batches)
    with pytest.raises(tq_fs.errors.SessionClosed):
        batches.prefetch()


def test_sizing_a_shard_keeps_no_more_manifests_than_a_few_beside_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []

    def watching(self: Pages, incarnation: Incarnation) -> bytes | None:
        alive.append(sum(type(o) is StepEntry for o in gc.get_objects()))
        return get(self, incarnation)

    get = Pages.get
    monkeypatch.setattr(Pages, "get", watching)
    fields = standard_fields(LAYERS, TOPK)
    with open_store(tmp_path, fields, manifest_cache_bytes=1) as store:
        segments = []
        for i in range(60):
            session = store.session(f"s{i}")
            short_rollout(fields, i, turns=1).record(session)
            segments += session.finalize()
        gc.collect()
        before = sum(type(o) is StepEntry for o in gc.get_objects())
        store.micro_batches(segments, budget_bytes=10**6)
        assert len(alive) >= 59
        assert max(alive) <= before + 2 + 16


def test_micro_batches_select_layers_and_tokens(shard: Any) -> None:
    store, samples, _ = shard
    select: dict[str, Any] = {"layers": (1, 3), "tokens": [(0, 4), (8, 20)]}
    whole = store.hydrate(samples, **select)
    parts: dict[str, list[Any]] = {name: [] for name in whole}
    for batch in store.micro_batches(samples, size=5, **select):
        for name, tensors in batch.tensors.items():
            parts[name] += [t.clone() for t in tensors]
    for name, tensors in whole.items():
        assert [t.shape for t in tensors] == [t.shape for t in parts[name]]
        for left, right in zip(tensors, parts[name], strict=True):
            assert_bits(left, right.numpy())


def test_a_budget_below_one_sample_is_refused(shard: Any) -> None:
    store, samples, want = shard
    one = max(sum(-(-a.nbytes // 64) * 64 for a in sample.values()) for sample in want)
    with pytest.raises(tq_fs.errors.BudgetTooSmall, match=rf"sample 11: takes {one} bytes"):
        store.micro_batches(samples, budget_bytes=one - 1)
    with pytest.raises(tq_fs.errors.InvalidConfig):
        store.micro_batches(samples)
    with pytest.raises(tq_fs.errors.InvalidConfig):
        store.micro_batches(samples, size=1, budget_bytes=1)
    with pytest.raises(tq_fs.errors.InvalidConfig):
        store.micro_batches(samples, size=0)


def test_an_arena_that_is_too_small_is_refused_and_one_that_fits_is_reused() -> None:
    arena = tq_fs.Arena(256)
    first = arena.take((3, 5), np.dtype(np.int32))
    first[...] = 7
    second = arena.take((48,), np.dtype(np.float32))
    second[...] = 1
    assert (first == 7).all()
    with pytest.raises(tq_fs.errors.BudgetTooSmall, match="the arena has 256"):
        arena.take((1,), np.dtype(np.uint8))
    arena.reset()
    again = arena.take((3, 5), np.dtype(np.int32))
    assert again.ctypes.data == first.ctypes.data


def test_a_micro_batch_that_fails_says_so_and_the_next_ones_go_on(shard: Any) -> None:
    store, samples, want = shard
    lost = tq_fs.Sample(ref=samples[0].ref.rsplit("/", 1)[0] + "/9", tokens=3, response_length=1)
    with pytest.raises(tq_fs.errors.SegmentMissing):
        store.micro_batches([*samples, lost], budget_bytes=10**9)
    batches = iter(store.micro_batches(samples[:4], size=2))
    assert_batch(next(batches).tensors, want[:2])
