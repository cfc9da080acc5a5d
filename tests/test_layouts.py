"""Samples of Dressage: what is hydrated is what whole values, cut in memory, give."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from tests._layouts import LAYERS, PARTITION, TOPK, Expected, World, selections
from tests._rollouts import CountingBackend
from tests._value_parts import chunk, cut_chunk, open_values
from tq_fs.errors import (
    BudgetTooSmall,
    ChunkCorrupt,
    FieldMissing,
    InvalidConfig,
    InvalidField,
    InvalidSegment,
    InvalidSelection,
    StaleReference,
    ValueMissing,
    WidthChanged,
    WrongStore,
)
from tq_fs.hydrate import Selection
from tq_fs.integrations.dressage import LayoutSample, Source, hydrate, layout_of, refs_of
from tq_fs.steps import EncodeOptions
from tq_fs.values import ValueStore

torch = pytest.importorskip("torch")
Plain = dict[str, Any]


class Stored(NamedTuple):
    """Values in a store, with what keys stand for."""

    values: ValueStore
    backend: CountingBackend
    asked: list[tuple[list[str], str]]

    @property
    def source(self) -> Source:
        return Source(self.values, self.indexes)

    def indexes(self, keys: Sequence[str], partition: str) -> Mapping[str, int]:
        self.asked.append((list(keys), partition))
        return {key: 100 + int(key.partition("-")[2]) for key in keys}

    def put(self, number: int, **fields: Any) -> None:
        self.values.put(PARTITION, [100 + number], {n: [v] for n, v in fields.items()})

    def ref(self, number: int, field: str, *, exact: bool = True) -> Plain:
        (ref,) = refs_of([f"step-{number}"], field, partition_id=PARTITION, source=self.source)
        plain: Plain = msgspec.to_builtins(ref)
        return plain if exact else {**plain, "incarnation_id": "", "store_id": ""}

    def fill(self, world: World) -> dict[tuple[str, str], Plain]:
        refs = {}
        for number, fields in enumerate(world.values.values()):
            self.put(number, **fields)
            for name in fields:
                exact = bool(world.random.random() < 0.5)
                refs[f"step-{number}", name] = self.ref(number, name, exact=exact)
        return refs

    def hydrate(self, samples: Sequence[LayoutSample], **settings: Any) -> dict[str, list[Any]]:
        settings = {"size": max(1, len(samples)), **settings}
        found: dict[str, list[Any]] = {}
        for batch in hydrate(samples, source=self.source, **settings):
            for name, tensors in batch.tensors.items():
                found.setdefault(name, []).extend(t.clone() for t in tensors)
        return found


@pytest.fixture(params=["one group", "layer groups", "cached"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stored]:
    groups = 3 if request.param == "layer groups" else 1
    options = EncodeOptions(compact=True, layer_groups=groups)
    cache_bytes = 64 << 20 if request.param == "cached" else 0
    with open_values(tmp_path, options, cache_bytes=cache_bytes) as (values, backend):
        yield Stored(values, backend, [])


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Stored]:
    with open_values(tmp_path) as (values, backend):
        yield Stored(values, backend, [])


def sample_of(expected: Expected) -> LayoutSample:
    return LayoutSample.of(
        copy.deepcopy(expected.plain),
        tokens=expected.tokens,
        response_length=expected.response_length,
        removed=expected.removed,
    )


def check(found: Mapping[str, list[Any]], expected: Sequence[Mapping[str, Any]]) -> None:
    assert sorted(found) == ["rollout_log_probs", "rollout_routed_experts"]
    for name, tensors in found.items():
        for tensor, want in zip(tensors, (e[name] for e in expected), strict=True):
            assert tensor.numpy().dtype == want.dtype
            assert tensor.shape == want.shape
            assert tensor.numpy().tobytes() == want.tobytes()


@pytest.mark.parametrize("seed", range(12))
def test_what_is_hydrated_is_what_whole_values_give(stored: Stored, seed: int) -> None:
    world = World(np.random.default_rng(seed)).fill(10)
    refs = stored.fill(world)
    for _ in range(4):
        samples = [world.sample(refs) for _ in range(7)]
        tokens, layers = selections(world.random)
        found = stored.hydrate(
            [sample_of(s) for s in samples],
            size=int(world.random.integers(1, 8)),
            reuse=bool(world.random.random() < 0.5),
            select=Selection(tokens=tokens, layers=layers),
        )
        check(found, [s.tensors(tokens, layers) for s in samples])


def test_micro_batches_keep_to_their_budget(stored: Stored) -> None:
    world = World(np.random.default_rng(1)).fill(6)
    refs = stored.fill(world)
    samples = [world.sample(refs) for _ in range(20)]
    ours = [sample_of(s) for s in samples]
    taken = [sum(a.nbytes for a in s.tensors(None, None).values()) for s in samples]
    budget = max(taken) + 128 * len(samples)
    batches = list(hydrate(ours, budget_bytes=budget, source=stored.source))
    assert 1 < len(batches) < len(samples)
    numbers = [int(s.ref or "") for b in batches for s in b.samples]
    assert numbers == list(range(len(samples)))
    for batch in batches:
        tensors = [t for some in batch.tensors.values() for t in some]
        assert sum(t.nbytes for t in tensors) <= budget
    with pytest.raises(BudgetTooSmall):
        hydrate(ours, budget_bytes=max(taken) - 1, source=stored.source)


# ---------------------------------------------------------------- what is read


def layout(name: str, tokens: int, *fragments: tuple[Plain, int, int]) -> Plain:
    """Return a plain layout of ``(ref, source_start, length)``, one after the other."""
    is_routing = name == "routed_experts"
    at, found = 0, []
    for ref, start, length in fragments:
        found.append({"ref": ref, "source_start": start, "target_start": at, "length": length})
        at += length
    shape = [tokens - 1, LAYERS, TOPK] if is_routing else [tokens]
    return {
        "logical_field": name,
        "codec": "",
        "fragments": found,
        "token_count": tokens,
        "shape": shape,
    }


def whole_sample(*layouts: Plain, **settings: Any) -> LayoutSample:
    tokens = layouts[0]["token_count"]
    settings = {"tokens": tokens, "response_length": tokens, **settings}
    return LayoutSample.of(layouts, **settings)


def ids(rows: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (rows, LAYERS, TOPK), dtype=np.int32)


def test_a_value_that_samples_share_is_read_once(plain: Stored) -> None:
    plain.put(0, re=ids(20_000))
    ref = plain.ref(0, "re")
    samples = [whole_sample(layout("routed_experts", 20_001, (ref, 0, 20_000)))] * 5
    plain.backend.requests.clear()
    plain.hydrate(samples)
    once = sum(a.nbytes for a in plain.values.find((PARTITION, 100), "re").entry.arrays)
    assert plain.backend.nbytes <= once


def test_what_micro_batches_share_stays_in_the_cache(tmp_path: Path) -> None:
    with open_values(tmp_path, cache_bytes=64 << 20) as (values, backend):
        stored = Stored(values, backend, [])
        stored.put(0, shared=ids(20_000, 1))
        for number in range(1, 5):
            stored.put(number, own=ids(6000, number))
        shared = stored.ref(0, "shared")
        samples = [
            whole_sample(
                layout(
                    "routed_experts",
                    26_001,
                    (shared, 0, 20_000),
                    (stored.ref(number, "own"), 0, 6000),
                )
            )
            for number in range(1, 5)
        ]
        backend.requests.clear()
        stored.hydrate(samples, size=1)
        arrays = [values.find((PARTITION, 100), "shared").entry.arrays]
        arrays += [values.find((PARTITION, 100 + n), "own").entry.arrays for n in range(1, 5)]
        assert backend.nbytes <= sum(a.nbytes for some in arrays for a in some)
        assert 0 < values.reader.cache.used_bytes < 20_050 * LAYERS * TOPK * 4  # nothing else


def test_only_the_chunks_of_selected_rows_are_read(plain: Stored) -> None:
    rows = ids(60_000)
    plain.put(0, re=rows, lp=np.zeros(60_001, np.float32))
    one = whole_sample(
        layout("routed_experts", 60_001, (plain.ref(0, "re"), 0, 60_000)),
        layout("full_logprobs", 60_001, (plain.ref(0, "lp"), 0, 60_001)),
        response_length=10,
    )
    plain.backend.requests.clear()
    found = plain.hydrate([one], select=Selection(tokens=((30_000, 30_010),)))
    assert found["rollout_routed_experts"][0].numpy().tobytes() == rows[30_000:30_010].tobytes()
    assert plain.backend.nbytes < rows.nbytes / 20
    plain.backend.requests.clear()
    plain.hydrate([one], select=Selection(fields=("logprobs",)))
    assert plain.backend.nbytes <= 60_001 * 4
    assert plain.backend.of("a0") == []


def test_keys_are_looked_up_once_for_all_samples(plain: Stored) -> None:
    for number in range(6):
        plain.put(number, re=ids(10), lp=[0.5] * 11)
    samples = [
        whole_sample(
            layout("routed_experts", 11, (plain.ref(n, "re"), 0, 10)),
            layout("full_logprobs", 11, (plain.ref(n, "lp"), 0, 11)),
        )
        for n in range(6)
    ]
    plain.asked.clear()
    plain.hydrate(samples, size=2)
    assert plain.asked == [([f"step-{n}" for n in range(6)], PARTITION)]


@pytest.mark.parametrize("form", ["base64", "ndarray"])
@pytest.mark.parametrize("rows", [60, 60_000])
def test_rows_of_chunks_that_are_cut_count_from_0(plain: Stored, rows: int, form: str) -> None:
    """A fragment's ``source_start`` is a row of what the chunks make up one after the other."""
    whole = ids(rows)
    one, two = rows // 3, rows // 2
    pieces = [(whole[:one], "uint8"), (whole[one:two], "int32"), (whole[two:], "uint16")]
    plain.put(0, re=[cut_chunk(piece, dtype, form) for piece, dtype in pieces])
    start, length = one - 5, two - one + 9
    sample = whole_sample(layout("routed_experts", length + 1, (plain.ref(0, "re"), start, length)))
    plain.backend.requests.clear()
    found = plain.hydrate([sample], select=Selection(layers=(1, 4)))
    expected = whole[start : start + length, 1:4]
    assert found["rollout_routed_experts"][0].numpy().tobytes() == expected.tobytes()
    if rows == 60_000:
        assert plain.backend.nbytes < whole.nbytes / 4 / 2  # stored as uint8, in chunks of 64 KiB
    with pytest.raises(InvalidSegment, match=rf"rows \[1, {rows + 1}\), the value has \[0, {rows}"):
        plain.hydrate(
            [whole_sample(layout("routed_experts", rows + 1, (plain.ref(0, "re"), 1, rows)))]
        )


def test_nothing_is_read_of_removed_samples(plain: Stored) -> None:
    gone = {"store_id": "", "partition": PARTITION, "key": "step-9", "field": "re"}
    removed = whole_sample(layout("routed_experts", 11, (gone, 0, 10)), removed=True)
    bare = LayoutSample.of(None, tokens=4, response_length=2, removed=True)
    found = plain.hydrate([removed, bare])
    assert plain.asked == []
    assert [t.tolist() for t in found["rollout_routed_experts"]] == [
        np.zeros((n, LAYERS, TOPK)).tolist() for n in (10, 3)
    ]


def test_nothing_is_looked_up_for_fields_that_are_not_selected(plain: Stored) -> None:
    plain.put(0, lp=[0.5] * 11)
    gone = {"store_id": "", "partition": PARTITION, "key": "step-9", "field": "re"}
    one = whole_sample(
        layout("routed_experts", 11, (gone, 0, 10)),
        layout("full_logprobs", 11, (plain.ref(0, "lp"), 0, 11)),
    )
    plain.asked.clear()
    found = plain.hydrate([one], select=Selection(fields=("logprobs",)))
    assert found["rollout_log_probs"][0].tolist() == [0.5] * 11
    assert plain.asked == [(["step-0"], PARTITION)]


def test_values_of_one_group_are_not_taken_for_each_other(plain: Stored) -> None:
    """A Sample may bring all Steps in fields of its own, which lie in one group."""
    plain.put(0, one=ids(9000, 1), two=ids(9000, 2))
    places = {plain.values.find((PARTITION, 100), f).place for f in ("one", "two")}
    assert len(places) == 1
    fragments = [(plain.ref(0, "two"), 100, 500), (plain.ref(0, "one"), 0, 700)]
    found = plain.hydrate([whole_sample(layout("routed_experts", 1201, *fragments))])
    expected = np.concatenate([ids(9000, 2)[100:600], ids(9000, 1)[:700]])
    assert found["rollout_routed_experts"][0].numpy().tobytes() == expected.tobytes()


def test_samples_of_one_token_have_no_rows(plain: Stored) -> None:
    plain.put(0, lp=[0.5])
    one = whole_sample(
        layout("routed_experts", 1), layout("full_logprobs", 1, (plain.ref(0, "lp"), 0, 1))
    )
    found = plain.hydrate([one])
    assert found["rollout_routed_experts"][0].shape == (0, LAYERS, TOPK)
    assert found["rollout_log_probs"][0].tolist() == [0.5]
    assert plain.hydrate([]) == {}


# ---------------------------------------------------------------- refusals


def test_a_reference_to_a_replaced_value_is_stale(plain: Stored) -> None:
    plain.put(0, re=ids(10, 1))
    exact, loose = plain.ref(0, "re"), plain.ref(0, "re", exact=False)
    plain.put(0, other=[1.0])
    plain.hydrate([whole_sample(layout("routed_experts", 11, (exact, 0, 10)))])
    plain.put(0, re=ids(10, 2))
    with pytest.raises(StaleReference, match=r"'re' of key 'step-0' \(train\)"):
        plain.hydrate([whole_sample(layout("routed_experts", 11, (exact, 0, 10)))])
    found = plain.hydrate([whole_sample(layout("routed_experts", 11, (loose, 0, 10)))])
    assert found["rollout_routed_experts"][0].tolist() == ids(10, 2).tolist()


def test_a_reference_into_another_store_is_refused(plain: Stored) -> None:
    plain.put(0, re=ids(10))
    ref = {**plain.ref(0, "re"), "store_id": "run-2"}
    with pytest.raises(WrongStore, match=r"'re' of key 'step-0'.*'run-2'"):
        plain.hydrate([whole_sample(layout("routed_experts", 11, (ref, 0, 10)))])


@pytest.mark.parametrize("rows", [10, 20_000])
def test_a_value_that_is_cleared_is_missing(plain: Stored, rows: int) -> None:
    plain.put(0, re=ids(rows))
    one = whole_sample(layout("routed_experts", 11, (plain.ref(0, "re"), 0, 10)))
    plain.values.bury([plain.values.find((PARTITION, 100), "re").place])
    with pytest.raises(ValueMissing, match="cleared or replaced while it was read"):
        plain.hydrate([one])
    plain.values.clear([(PARTITION, 100, None)])
    with pytest.raises(ValueMissing, match="'re' of key 'step-0'"):
        plain.hydrate([one])
    with pytest.raises(ValueMissing, match="'re' of key 'step-0'"):
        plain.ref(0, "re")


def test_damage_names_the_value(plain: Stored) -> None:
    plain.put(0, re=ids(20_000))
    found = plain.values.find((PARTITION, 100), "re")
    (path,) = (plain.backend.root / found.place.path).glob("a0/c*")
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChunkCorrupt, match="'re' of sample step-0"):
        plain.hydrate([whole_sample(layout("routed_experts", 11, (plain.ref(0, "re"), 0, 10)))])


REF = {"store_id": "", "partition": PARTITION, "key": "step-0", "field": "re"}
GOOD = layout("routed_experts", 11, (REF, 0, 4), (REF, 7, 6))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p.pop("fragments"), "missing required field `fragments`"),
        (lambda p: p.update(logical_field="values"), "logical_field"),
        (lambda p: p["fragments"][1].update(length="6"), r"\$.fragments\[1\].length"),
        (lambda p: p["fragments"][1].update(source_start=-1), r"\$.fragments\[1\].source_start"),
        (lambda p: p["fragments"][1]["ref"].pop("key"), r"missing required field `key`"),
        (lambda p: p["fragments"][1].update(target_start=5), "leave a gap.*row 5, row 4"),
        (lambda p: p["fragments"][1].update(target_start=3), "overlap.*row 3, row 4"),
        (lambda p: p["fragments"].pop(), "make up 4 rows, its shape says 10"),
        (lambda p: p.update(shape=[11, LAYERS, TOPK]), r"shape \[11, 6, 2\].*T = 11"),
        (lambda p: p.update(shape=[10]), r"shape \[10\]"),
        (lambda p: p.update(token_count=12), "T = 12"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(change: Any, says: str) -> None:
    plain = copy.deepcopy(GOOD)
    layout_of(plain)
    change(plain)
    with pytest.raises(InvalidSegment, match=f"layout of .*{says}"):
        layout_of(plain)


def test_two_layouts_of_one_field_are_refused() -> None:
    with pytest.raises(InvalidSegment, match="layout of routed_experts: is there twice"):
        whole_sample(GOOD, GOOD)


def test_layouts_may_come_by_name_and_as_objects() -> None:
    expected = whole_sample(GOOD)
    assert LayoutSample.of({"x": GOOD}, tokens=11, response_length=11) == expected
    assert LayoutSample.of([layout_of(GOOD)], tokens=11, response_length=11) == expected


def test_rows_that_a_value_does_not_have_are_refused(plain: Stored) -> None:
    plain.put(0, re=ids(9), own=chunk(ids(29), 10, False, "ndarray"))
    with pytest.raises(InvalidSegment, match=r"'re' of key.*\[0, 10\), the value has \[0, 9\)"):
        plain.hydrate([whole_sample(layout("routed_experts", 11, (plain.ref(0, "re"), 0, 10)))])
    with pytest.raises(InvalidSegment, match=r"rows \[8, 18\), the value has \[9, 29\)"):
        plain.hydrate([whole_sample(layout("routed_experts", 11, (plain.ref(0, "own"), 8, 10)))])


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (np.zeros((10, LAYERS + 1, TOPK), np.int32), WidthChanged, r"rows of \[7, 2\].*\[6, 2\]"),
        (np.zeros((10, TOPK, LAYERS), np.int32), WidthChanged, r"rows of \[2, 6\].*\[6, 2\]"),
        (np.zeros(121, np.int32), InvalidField, "121 numbers are no rows of"),
        (np.zeros((10, LAYERS, TOPK), np.float32), InvalidField, "float32"),
        (np.zeros((10_000, LAYERS, TOPK), np.float32), InvalidField, "float32"),
        ("text", InvalidField, "is a str, which has no rows"),
    ],
)
def test_values_that_are_no_rows_of_the_field_are_refused(
    plain: Stored, value: Any, error: type[Exception], says: str
) -> None:
    plain.put(0, re=value)
    with pytest.raises(error, match=f"'re' of .*step-0.*{says}"):
        plain.hydrate([whole_sample(layout("routed_experts", 11, (plain.ref(0, "re"), 0, 10)))])


def test_layouts_that_disagree_are_refused(plain: Stored) -> None:
    other = {**copy.deepcopy(GOOD), "shape": [10, TOPK, LAYERS]}
    with pytest.raises(WidthChanged, match="layout of routed_experts of sample 1"):
        plain.hydrate([whole_sample(GOOD), whole_sample(other)])
    logprobs = layout("full_logprobs", 11, (REF, 0, 11))
    with pytest.raises(InvalidSegment, match="is of another field"):
        plain.hydrate([whole_sample(GOOD, logprobs)])


def test_selections_outside_of_a_sample_are_refused(plain: Stored) -> None:
    plain.put(0, re=ids(20))
    one = layout("routed_experts", 11, (plain.ref(0, "re"), 0, 10))
    with pytest.raises(InvalidSelection, match="12 tokens"):
        plain.hydrate([whole_sample(one, tokens=12)])
    with pytest.raises(InvalidSelection, match=r"\[3, 9\)"):
        plain.hydrate([whole_sample(one)], select=Selection(layers=(3, 9)))
    with pytest.raises(FieldMissing, match="logprobs"):
        plain.hydrate([whole_sample(one)], select=Selection(fields=("logprobs",)))
    lp = layout("full_logprobs", 11, (REF | {"field": "lp"}, 0, 11))
    with pytest.raises(FieldMissing, match="routed_experts"):
        plain.hydrate([whole_sample(one, lp), whole_sample(lp)])
    with pytest.raises(InvalidConfig, match="size or budget_bytes"):
        hydrate([whole_sample(one)], source=plain.source)
