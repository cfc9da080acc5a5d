"""SegmentReader: reads what is asked for and no more, within its memory, and never makes it up."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tq_fs
from tests._rollouts import (
    VIEWS,
    Array,
    CountingBackend,
    Field,
    Op,
    Rollout,
    assert_batch,
    assert_bits,
    logprob_bits,
    open_store,
    routes,
    run_child,
    short_rollout,
    small_chunks,
    specs,
    standard_fields,
    turning_rollout,
)
from tq_fs.cache import ChunkCache
from tq_fs.errors import (
    ChunkCorrupt,
    FieldMissing,
    InvalidField,
    InvalidSelection,
    SegmentMissing,
    StepMissing,
    TqFsError,
)
from tq_fs.manifests import Resolved
from tq_fs.plan import SPAN_BYTES, Want, plan_reads
from tq_fs.reader import Read, SegmentReader

FIELDS = standard_fields()


@contextmanager
def counting_reader(
    store: tq_fs.Store,
    folder: Path,
    *,
    threads: int = 1,
    cache_bytes: int = 0,
    kind: type[CountingBackend] = CountingBackend,
) -> Iterator[tuple[SegmentReader, Any]]:
    """Give a reader of a store's Segments that notes what it reads."""
    assert store.reader is not None
    backend = kind(folder / store.config.store_id, read_only=True)
    with ThreadPoolExecutor(threads) as pool:
        yield (
            SegmentReader(
                store.reader.resolve,
                {"local": backend},
                pool=pool if threads > 1 else None,
                threads=threads,
                cache=ChunkCache(cache_bytes),
            ),
            backend,
        )
    backend.close()


def fetch(
    reader: SegmentReader, refs: list[str], field: str, layers: tuple[int, int] | None = None
) -> list[Array]:
    """Read one field of several Segments in one batch."""
    reads = []
    for resolved in reader.resolve(refs):
        entry = resolved.segment.fields[field]
        array = resolved.steps[entry[0].step].fields[field]
        inner = array.shape[1:]
        if layers is not None:
            inner = (layers[1] - layers[0], *inner[1:])
        rows = entry[-1].target[1]
        out = np.empty((rows, *inner), array.memory)
        reads.append(Read(resolved, field, ((0, rows),), out))
    reader.fetch(reads, layers=layers)
    return [r.out for r in reads]


def refs_of(segments: list[tq_fs.Segment]) -> list[str]:
    return [s.ref for s in segments if s.ref is not None]


@pytest.fixture(scope="module")
def long_segment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Give a store with one Step of 8 row chunks by 4 layer groups; a row has 8x2 bytes."""
    folder = tmp_path_factory.mktemp("long")
    fields = standard_fields(layers=8, topk=2)
    rollout = Rollout(fields, "tito").play([Op("create", 0, 1, 8 * 1024)], np.random.default_rng(0))
    with open_store(folder, fields, layer_groups=4) as store:
        session = store.session("s")
        rollout.record(session)
        (ref,) = refs_of(session.finalize())
        (want,) = rollout.expected("lineage")
        yield store, folder, ref, want.arrays


CHUNK = 1024 * 2 * 2 + 4  # rows x layers of a group x top-k, and the checksum
GAP = 60  # between chunks that one request reads


# ---------------------------------------------------------------- pure and minimal


def test_a_plan_is_a_pure_function(long_segment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _, ref, _ = long_segment
    (resolved,) = store.reader.resolve([ref])
    wants = [Want(resolved, "routed_experts", ((0, 10), (5000, 8192)), 0)]

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a plan touches nothing")

    with monkeypatch.context() as patched:
        for name in ("open", "preadv", "stat", "read"):
            patched.setattr(f"os.{name}", never)
        first = plan_reads(wants, (2, 5))
        again = plan_reads(wants, (2, 5))
    assert again == first
    (read,) = first
    assert read.layers == (2, 5)
    chunks = {p for span in read.spans for p in range(span.first, span.last)}
    # groups 1 and 2 of row blocks 0 and 4 to 7; position = group * 8 + block
    assert chunks == {8, 16} | set(range(12, 16)) | set(range(20, 24))


@pytest.mark.parametrize(
    ("rows", "layers", "chunks", "requests"),
    [
        (None, None, 32, 1),
        ((0, 2048), None, 8, 4),  # a quarter of the tokens: one read per layer group
        ((2048, 4096), None, 8, 4),
        ((2047, 2049), None, 8, 4),  # two rows on a border
        ((2047, 2048), None, 4, 4),
        (None, (0, 2), 8, 1),  # a quarter of the layers: one read
        (None, (2, 4), 8, 1),
        (None, (1, 3), 16, 1),
        ((1024, 3072), (4, 6), 2, 1),
        ((0, 0), None, 0, 0),
        ((8192, 8192), (0, 8), 0, 0),
        ((0, 1), (7, 8), 1, 1),
        ((0, 8192), (3, 3), 0, 0),
    ],
)
def test_a_selection_reads_the_chunks_that_hold_it_and_no_others(
    long_segment: Any, rows: Any, layers: Any, chunks: int, requests: int
) -> None:
    store, folder, ref, arrays = long_segment
    with counting_reader(store, folder) as (reader, backend):
        have = reader.read(ref, "routed_experts", rows=rows, layers=layers)
        first, last = rows or (0, 8192)
        left, right = layers or (0, 8)
        assert_bits(have, np.ascontiguousarray(arrays["routed_experts"][first:last, left:right]))
        assert backend.nbytes == chunks * CHUNK + (chunks - requests) * GAP
        assert len(backend.requests) == requests


def test_neighbouring_chunks_are_joined_into_requests_of_at_most_4_mib(tmp_path: Path) -> None:
    fields = [
        Field(
            tq_fs.routed_experts(layers=16, topk=8, experts=256),
            lambda random, rows: routes(random, rows, 16, 8, 256),
        )
    ]
    rollout = Rollout(fields, "tito").play([Op("create", 0, 1, 70_000)], np.random.default_rng(0))
    with open_store(tmp_path, fields) as store:
        session = store.session("s")
        rollout.record(session)
        (ref,) = refs_of(session.finalize())
        with counting_reader(store, tmp_path) as (reader, backend):
            have = reader.read(ref, "routed_experts")
            assert_bits(have, rollout.turns[0].whole["routed_experts"])
            sizes = [n for _, _, n in backend.requests]
            assert backend.request_bytes <= SPAN_BYTES == 4 * 1024 * 1024
            assert max(sizes) <= backend.request_bytes
            (resolved,) = reader.resolve([ref])
            layout = resolved.steps[0].fields["routed_experts"].layout
            chunk = layout.offsets(None)[1]
            assert layout.chunks == 69
            assert min(sizes[:-1]) > backend.request_bytes - chunk  # none could take one more
            places = sorted((offset, n) for _, offset, n in backend.requests)
            for (left, n), (right, _) in itertools.pairwise(places):
                assert right - left == -(-n // chunk) * chunk  # all bytes once


def test_steps_that_segments_of_a_batch_share_are_read_once(tmp_path: Path) -> None:
    rollout = turning_rollout()
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        rollout.record(session)
        segments = session.finalize(views=VIEWS)
        want = [e for view in VIEWS for e in rollout.expected(view)]
        with counting_reader(store, tmp_path) as (reader, backend):
            have = fetch(reader, refs_of(segments), "routed_experts")
            for array, expected in zip(have, want, strict=True):
                assert_bits(array, expected.arrays["routed_experts"])
            keys = [key for key, _, _ in backend.requests]
            assert len(keys) == len(set(keys)) == 4  # of 12 uses


def test_a_row_that_is_wanted_twice_is_read_once(long_segment: Any) -> None:
    store, folder, ref, arrays = long_segment
    with counting_reader(store, folder) as (reader, backend):
        (resolved,) = reader.resolve([ref])
        out = np.empty((20, 8, 2), np.int32)
        ranges = ((5, 15), (0, 10))
        reader.fetch([Read(resolved, "routed_experts", ranges, out)])
        routed = arrays["routed_experts"]
        assert_bits(out, np.concatenate([routed[5:15], routed[0:10]]))
        assert backend.nbytes == 4 * CHUNK  # each a request of its own


def test_only_the_fields_asked_for_are_read(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        short_rollout(FIELDS, 0).record(session)
        (ref,) = refs_of(session.finalize())
        with counting_reader(store, tmp_path) as (reader, backend):
            reader.read(ref, "logprobs", rows=(9, 12))
            assert {key.split("/")[-2] for key, _, _ in backend.requests} == {"logprobs"}
            assert len(backend.requests) == 1  # of three Steps


@pytest.mark.parametrize("holes", ["rows", "values"])
def test_marks_of_unknown_routes_are_read_where_they_are_needed(tmp_path: Path, holes: str) -> None:
    fields = [
        Field(
            tq_fs.routed_experts(layers=2, topk=2, experts=256),
            lambda random, rows: routes(random, rows, 2, 2, 256, holes),
        )
    ]
    rollout = Rollout(fields, "tito").play([Op("create", 0, 1, 64)], np.random.default_rng(0))
    with small_chunks(8, 4), open_store(tmp_path, fields, layer_groups=2) as store:
        session = store.session("s")
        rollout.record(session)
        (ref,) = refs_of(session.finalize())
        with counting_reader(store, tmp_path) as (reader, backend):
            have = reader.read(ref, "routed_experts", rows=(20, 23), layers=(1, 2))
            want = rollout.turns[0].whole["routed_experts"][20:23, 1:2]
            assert_bits(have, np.ascontiguousarray(want))
            assert len(backend.of("routed_experts")) == 1
            assert len(backend.of("routed_experts_unknown")) == (holes == "values")


# ---------------------------------------------------------------- cache


def test_chunks_that_segments_share_come_from_the_cache(tmp_path: Path) -> None:
    rollout = turning_rollout()
    want = [e.arrays["routed_experts"] for view in VIEWS for e in rollout.expected(view)]
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        rollout.record(session)
        refs = refs_of(session.finalize(views=VIEWS))
        with counting_reader(store, tmp_path, cache_bytes=2**20) as (reader, backend):
            for ref, array in zip(refs, want, strict=True):
                assert_bits(reader.read(ref, "routed_experts"), array)
            keys = [key for key, _, _ in backend.requests]
            assert len(keys) == len(set(keys)) == 4
            assert reader.cache.hits > 0
        with counting_reader(store, tmp_path, cache_bytes=0) as (reader, backend):
            for ref in refs:
                reader.read(ref, "routed_experts")
            assert len(backend.requests) == 12
            assert reader.cache.used_bytes == 0


def test_chunks_of_one_segment_alone_are_not_kept(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        short_rollout(FIELDS, 0).record(session)
        (ref,) = refs_of(session.finalize())
        with counting_reader(store, tmp_path, cache_bytes=2**20) as (reader, backend):
            for _ in range(2):
                reader.read(ref, "routed_experts")
            assert len(backend.requests) == 6
            assert reader.cache.used_bytes == 0


@pytest.mark.parametrize("limit", [1, 100, 700, 5000])
def test_the_cache_stays_within_its_bound(tmp_path: Path, limit: int) -> None:
    with small_chunks(8, 4), open_store(tmp_path, FIELDS, layer_groups=2) as store:
        refs: list[str] = []
        want: list[Array] = []
        for seed in range(4):
            rollout = turning_rollout(seed=seed)
            session = store.session(f"s{seed}")
            rollout.record(session)
            refs += refs_of(session.finalize(views=VIEWS))
            want += [e.arrays["routed_experts"] for v in VIEWS for e in rollout.expected(v)]
        with counting_reader(store, tmp_path, cache_bytes=limit, threads=2) as (reader, _):
            peak = 0
            for i in np.random.default_rng(0).permutation(len(refs) * 3) % len(refs):
                assert_bits(reader.read(refs[i], "routed_experts"), want[i])
                peak = max(peak, reader.cache.used_bytes)
                assert peak <= limit
            assert (peak > 0) == (limit >= 28)


# ---------------------------------------------------------------- destinations and refusals


def test_a_destination_is_used_again(long_segment: Any) -> None:
    store, _, ref, arrays = long_segment
    out = np.full((100, 2, 2), -7, np.int32)
    for first in (0, 1000, 8092):
        rows = (first, first + 100)
        have = store.reader.read(ref, "routed_experts", rows=rows, layers=(3, 5), out=out)
        assert have is out
        assert_bits(out, np.ascontiguousarray(arrays["routed_experts"][rows[0] : rows[1], 3:5]))
    wide = np.full((100, 4, 2), -7, np.int32)  # a part of something larger
    store.reader.read(ref, "routed_experts", rows=(0, 100), layers=(3, 5), out=wide[:, 1:3])
    assert (wide[:, [0, 3]] == -7).all()
    assert_bits(
        np.ascontiguousarray(wide[:, 1:3]),
        np.ascontiguousarray(arrays["routed_experts"][:100, 3:5]),
    )
    backwards = np.empty((100,), np.float32)[::-1]
    store.reader.read(ref, "logprobs", rows=(50, 150), out=backwards)
    assert_bits(np.ascontiguousarray(backwards), arrays["logprobs"][50:150])


@pytest.mark.parametrize(
    "out",
    [
        np.empty((99, 8, 2), np.int32),
        np.empty((100, 8), np.int32),
        np.empty((100, 8, 2), np.uint8),
        np.empty((100, 8, 2), np.int64),
        np.empty((100, 8, 2), ">i4"),
    ],
    ids=["rows", "axes", "narrow", "wide", "byte order"],
)
def test_a_destination_that_does_not_fit_is_refused(long_segment: Any, out: Any) -> None:
    store, folder, ref, _ = long_segment
    with counting_reader(store, folder) as (reader, backend):
        with pytest.raises(InvalidField, match=r"int32 \[100, 8, 2\] is needed"):
            reader.read(ref, "routed_experts", rows=(0, 100), out=out)
        assert backend.requests == []


@pytest.mark.parametrize("field", ["logprobs", "routed_experts"])
def test_a_destination_that_may_not_be_written_is_refused(long_segment: Any, field: str) -> None:
    store, _, ref, arrays = long_segment
    out = np.zeros_like(arrays[field])
    out.flags.writeable = False
    with pytest.raises(InvalidField):
        store.reader.read(ref, field, out=out)
    assert not out.any()


def test_a_selection_outside_of_the_segment_is_refused(long_segment: Any) -> None:
    store, _, ref, _ = long_segment
    read = store.reader.read
    for rows in [(0, 8193), (-1, 5), (5, 4), (8193, 8193)]:
        with pytest.raises(InvalidSelection, match=r"rows of routed_experts.*\[0, 8192\)"):
            read(ref, "routed_experts", rows=rows)
    for layers in [(0, 9), (-1, 5), (5, 4)]:
        with pytest.raises(InvalidSelection, match=r"layers of routed_experts.*\[0, 8\)"):
            read(ref, "routed_experts", layers=layers)
    with pytest.raises(FieldMissing, match="does not hold 'entropy'"):
        read(ref, "entropy")
    assert read(ref, "logprobs", layers=(0, 3)).shape == (8193,)  # it has no layers


# ---------------------------------------------------------------- threads


class Breaking(CountingBackend):
    """Fails at its fifth object, and counts what is opened afterwards."""

    opened = 0
    working = True

    def open(self, key: str) -> Any:
        with Breaking.lock:
            Breaking.opened += 1
            mine = Breaking.opened
        if not Breaking.working and mine == 5:
            raise ChunkCorrupt("on purpose", subject=key)
        time.sleep(0.002)
        return super().open(key)

    lock = threading.Lock()


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_in_one_thread_stops_the_others_and_is_raised_once(
    tmp_path: Path, threads: int
) -> None:
    fields = FIELDS[1:]
    ops = [Op("create")] + [Op("append")] * 79
    rollout = Rollout(fields, "tito").play(ops, np.random.default_rng(0))
    (want,) = rollout.expected("lineage")
    with open_store(tmp_path, fields) as store:
        session = store.session("s")
        rollout.record(session)
        (ref,) = refs_of(session.finalize())
        with counting_reader(store, tmp_path, threads=threads, kind=Breaking) as (reader, _):
            for _ in range(3):
                Breaking.opened, Breaking.working = 0, False
                with pytest.raises(ChunkCorrupt, match="on purpose"):
                    reader.read(ref, "routed_experts")
                assert Breaking.opened <= 5 + threads
                at_once = Breaking.opened
                time.sleep(0.02)
                assert Breaking.opened == at_once  # nobody reads on
            Breaking.working = True
            assert_bits(reader.read(ref, "routed_experts"), want.arrays["routed_experts"])


def test_many_threads_hydrate_at_once_and_get_what_is_theirs(tmp_path: Path) -> None:
    rollouts = [turning_rollout(seed=seed) for seed in range(6)]
    with (
        small_chunks(8, 4),
        open_store(tmp_path, FIELDS, reader_threads=3, cache_bytes=3000, manifest_cache_bytes=1)
        as store,
    ):  # fmt: skip
        segments: list[tq_fs.Segment] = []
        want: list[Any] = []
        for i, rollout in enumerate(rollouts):
            session = store.session(f"s{i}")
            rollout.record(session)
            segments += session.finalize(views=VIEWS)
            want += [e.slime(specs(FIELDS)) for v in VIEWS for e in rollout.expected(v)]

        def work(seed: int) -> int:
            random = np.random.default_rng(seed)
            for _ in range(15):
                chosen = random.permutation(len(segments))[:9]
                batch = store.hydrate([segments[i] for i in chosen])
                assert_batch(batch, [want[i] for i in chosen])
            return seed

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(8))) == list(range(8))


# ---------------------------------------------------------------- released while it is read


def test_a_segment_that_is_released_while_it_is_read_is_missing_never_zeros(
    tmp_path: Path,
) -> None:
    rollout = short_rollout(FIELDS, 0, turns=6)
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        rollout.record(session)
        segments = session.finalize()
        (ref,) = refs_of(segments)

        class Releasing(CountingBackend):
            def open(self, key: str) -> Any:
                if "000003" in key:
                    store.release(segments)
                return super().open(key)

        with counting_reader(store, tmp_path, kind=Releasing) as (reader, _):
            with pytest.raises(StepMissing, match=r"Step 3 .*released while it was read"):
                reader.read(ref, "routed_experts")
            with pytest.raises(SegmentMissing):
                reader.read(ref, "routed_experts")


@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_readers_that_race_with_a_release_get_the_right_bits_or_an_error(
    tmp_path: Path, cache_bytes: int
) -> None:
    outcomes: dict[str, int] = {}
    with open_store(tmp_path, FIELDS, reader_threads=2, cache_bytes=cache_bytes) as store:
        for seed in range(25):
            rollout = turning_rollout(seed=seed)
            session = store.session("s")
            rollout.record(session)
            segments = session.finalize(views=VIEWS)
            want = [e.slime(specs(FIELDS)) for v in VIEWS for e in rollout.expected(v)]
            begun = threading.Event()

            def read(
                segments: list[tq_fs.Segment] = segments,
                want: list[Any] = want,
                begun: threading.Event = begun,
            ) -> str:
                while True:
                    try:
                        batch = store.hydrate(segments)
                    except TqFsError as error:
                        begun.set()
                        return type(error).__name__
                    assert_batch(batch, want)
                    begun.set()

            with ThreadPoolExecutor(3) as pool:
                futures = [pool.submit(read) for _ in range(3)]
                assert begun.wait(20)
                store.release(segments)
                for future in futures:
                    name = future.result(20)
                    outcomes[name] = outcomes.get(name, 0) + 1
    assert set(outcomes) <= {"StepMissing", "SegmentMissing", "StaleReference"}, outcomes
    assert sum(outcomes.values()) == 75


# ---------------------------------------------------------------- memory

MEASURE = """
import json, sys
from pathlib import Path
import numpy as np
import tq_fs

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

url, layers, topk, rows, threads, codec = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
spec = tq_fs.routed_experts(layers=layers, topk=topk, experts=256, codec=codec)
with tq_fs.open_store(url, fields=[spec], read_only=True, reader_threads=threads) as store:
    (ref,) = list(store.unreleased())
    store.reader.read(ref, "routed_experts", rows=(0, 1))  # imports and first allocations
    out = np.empty((rows, layers, topk), np.int32)
    out[...] = -5
    before = peak_bytes()
    store.reader.read(ref, "routed_experts", out=out)
    extra = peak_bytes() - before
    print(json.dumps([extra, int(out.min()), int(out.sum(dtype=np.int64))]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_reading_takes_little_memory_beyond_the_destination(tmp_path: Path, codec: str) -> None:
    """64K tokens of 40 layers and top-8: 20 MiB stored, 80 MiB hydrated."""
    layers, topk, tokens, threads = 40, 8, 65_536, 4
    spec = tq_fs.routed_experts(layers=layers, topk=topk, experts=256, codec=codec)
    ids = np.arange((tokens - 1) * layers * topk, dtype=np.int32).reshape(-1, layers, topk)
    np.remainder(ids, 251, out=ids)
    with tq_fs.open_store(tmp_path.as_uri(), fields=[spec], prepared_groups=0) as store:
        session = store.session("s")
        session.create([], np.zeros(tokens, np.int32), routed_experts=ids)
        session.finalize()
    done = run_child(MEASURE, tmp_path.as_uri(), layers, topk, tokens - 1, threads, codec)
    assert done.returncode == 0, done.stderr
    extra, least, total = json.loads(done.stdout)
    assert (least, total) == (0, int(ids.sum(dtype=np.int64)))
    assert extra <= 64 * 1024 * 1024


def test_a_segment_of_float_fields_lands_in_the_destination_itself(tmp_path: Path) -> None:
    """Plain bytes of the memory type are read to their place, chunk by chunk, and checked there."""
    fields = [Field(tq_fs.logprobs(), logprob_bits)]
    rollout = Rollout(fields, "tito").play([Op("create", 0, 0, 5000)], np.random.default_rng(0))
    with open_store(tmp_path, fields) as store:
        session = store.session("s")
        rollout.record(session)
        (ref,) = refs_of(session.finalize())
        for rows in [(0, 5000), (1000, 3000), (999, 1001)]:
            with counting_reader(store, tmp_path) as (reader, backend):
                have = reader.read(ref, "logprobs", rows=rows)
                assert_bits(have, rollout.turns[0].whole["logprobs"][rows[0] : rows[1]])
                assert len(backend.requests) == 1


def test_what_is_shared_is_told_by_the_manifest(tmp_path: Path) -> None:
    with open_store(tmp_path, FIELDS) as store:
        session = store.session("s")
        turning_rollout().record(session)
        segments = session.finalize(views=VIEWS)
        assert store.reader is not None
        resolved: list[Resolved] = store.reader.resolve(refs_of(segments))
        assert {r.shared for r in resolved} == {frozenset({0, 1, 2, 3})}
        lonely = store.session("t")
        short_rollout(FIELDS, 0).record(lonely)
        (one,) = store.reader.resolve(refs_of(lonely.finalize()))
        assert one.shared == frozenset()
