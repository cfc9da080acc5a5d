"""The whole way of the data over an object store: what training gets, and what it costs to get."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import fsspec
import numpy as np
import pytest
import tensorstore
import zarr

import tq_fs
from tests._fault_proxy import FaultProxy, Operation, Schedule
from tests._rollouts import (
    FIELDS,
    VIEWS,
    Field,
    Op,
    Rollout,
    assert_batch,
    assert_bits,
    assert_segment,
    record,
    refs_of,
    short_rollout,
    small_chunks,
    specs,
    standard_fields,
)
from tests.test_identity import Case, record_interleaved
from tq_fs.backends import ObjectBackend, Retry, open_object_backend
from tq_fs.bench.servers import S3Server
from tq_fs.channel import ChannelBackend
from tq_fs.errors import ChunkCorrupt, StepMissing
from tq_fs.manifests import Mode
from tq_fs.served import ServedStore, open_served
from tq_fs.storage_options import StorageOptions

DRIVERS = ("s3fs", "obstore")
ZARR = ["memory", pytest.param("obstore", marks=pytest.mark.s3)]  # zarr has its own way to S3
STORES = [*(pytest.param(driver, marks=pytest.mark.s3) for driver in DRIVERS), "memory"]


@dataclass(frozen=True)
class Where:
    """An object store that is empty at first, and the driver that serves it."""

    url: str
    driver: str

    def open(self, fields: list[Field], **settings: Any) -> tq_fs.Store:
        settings = {"driver": self.driver, "reader_threads": 2, "writer_threads": 2, **settings}
        return tq_fs.open_store(self.url, fields=specs(fields), **settings)

    def backend(self) -> ObjectBackend | ChannelBackend:
        """Return a way to the store's objects that knows of no Steps."""
        if self.url.startswith("tqfs:"):
            return open_served(
                self.url,
                store_id="default",
                options=StorageOptions(),
                retry=Retry(deadline_s=0),
                timeout_s=30,
            )
        return open_object_backend(
            f"{self.url}/default",
            driver=self.driver,
            options=StorageOptions(),
            retry=Retry(deadline_s=0),
            timeout_s=30,
        )

    def sizes(self) -> dict[str, int]:
        """Return all objects of the store."""
        with closing(self.backend()) as backend:
            if isinstance(backend, ObjectBackend):
                return dict(backend.walk(""))
            roots = ("claims", "manifests", "pages", "steps")  # all that is served, but one file
            found = {key: size for root in roots for key, size in backend.walk(root)}
            return {**found, "store.json": len(backend.get("store.json"))}


@pytest.fixture(params=STORES)
def where(request: pytest.FixtureRequest) -> Iterator[Where]:
    if request.param == "served":
        folder = request.getfixturevalue("tmp_path")
        with ServedStore(folder.as_uri(), local=[f"unix:{folder}/socket"]) as served:
            yield Where(served.urls[0], "auto")
        return
    if request.param != "memory":
        yield Where(f"s3://{request.getfixturevalue('bucket')}/some/runs", request.param)
        return
    name = uuid.uuid4().hex
    yield Where(f"memory://{name}", "auto")
    fs = fsspec.filesystem("memory")  # one for the whole process
    if fs.exists(f"/{name}"):
        fs.rm(f"/{name}", recursive=True)


class Client:
    """A driver that notes what is read of Steps, and obeys the test."""

    def __init__(self, inner: Any) -> None:
        self.reads: list[tuple[str, int, int]] = []
        self.check: Callable[[str], None] = lambda key: None
        self._inner = inner

    @classmethod
    def of(cls, store: tq_fs.Store) -> Client:
        """Put itself before a store's driver."""
        assert store.reader is not None
        backend = cast("Any", store.reader._backends["local"])
        backend._client = client = cls(backend._client)
        return client

    def read(self, key: str, offset: int, nbytes: int) -> Any:
        self.check(key)
        self.reads.append((key, offset, nbytes))
        return self._inner.read(key, offset, nbytes)

    def get(self, key: str) -> Any:
        self.check(key)
        return self._inner.get(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def place_of(store: tq_fs.Store, segment: tq_fs.Segment, step: int = 0) -> str:
    """Return where a Step's group lies below the store."""
    assert store.reader is not None
    assert segment.ref is not None
    (resolved,) = store.reader.resolve([segment.ref])
    return resolved.steps[step].place(resolved.ref.incarnation.path)


# ---------------------------------------------------------------- bit for bit

case_of = partial(Case, extras=False)

# name: layout, mode, and how it is declared and stored
CASES: dict[str, tuple[str, Mode, Case]] = {
    "uint8": ("compact", "tito", case_of(stored="uint8", experts=256, layer_groups=2)),
    "uint8, routes unknown here and there": (
        "compact", "snapshot", case_of(stored="uint8", experts=256, holes="values")),
    "uint16, rows unknown": ("compact", "tito", case_of(stored="uint16", holes="rows")),
    "int32 in full layout": (
        "full", "snapshot", case_of(stored="int32", codec="lz4", layer_groups=3)),
    "uint16 in full layout, some routes unknown": (
        "full", "tito", case_of(stored="uint16", holes="values", logprobs_codec="zstd")),
}  # fmt: skip
OPS = [
    Op("create", 0, 3, 20),
    Op("create", 0, 1, 4),
    Op("append", 0, 2, 14),
    Op("branch", 0, 9, 7),
    Op("boundary", 2, 5, 6, only_response=True),
    Op("append", 0, 0, 0),
]


@pytest.mark.parametrize("where", [*STORES, "served"], indirect=True)
@pytest.mark.parametrize("case", CASES)
def test_training_gets_bit_for_bit_what_it_gets_without_the_store_and_nothing_is_left(
    where: Where, case: str
) -> None:
    layout, mode, how = CASES[case]
    fields = how.fields()
    rollouts = [
        Rollout(fields, mode).play(ops, np.random.default_rng(i))
        for i, ops in enumerate([OPS, OPS[:2]])
    ]
    turns = [i for i, rollout in enumerate(rollouts) for _ in rollout.turns][::-1]
    expected = [e for rollout in rollouts for view in VIEWS for e in rollout.expected(view)]
    select: dict[str, Any] = {"layers": (1, 4), "tokens": [(0, 5), (7, 19), (30, 99)]}
    whole = [e.slime(specs(fields)) for e in expected]
    parts = [
        e.slime(specs(fields), ranges=select["tokens"], layers=select["layers"]) for e in expected
    ]
    with small_chunks(), tq_fs.open_store(None, fields=specs(fields)) as off:
        kept = record_interleaved(off, rollouts, turns, mode)
        assert_batch(off.hydrate(kept), whole, "in memory")
        assert_batch(off.hydrate(kept, **select), parts, "in memory")
        settings: dict[str, Any] = {"layout": layout, "layer_groups": how.layer_groups}
        with where.open(fields, **settings) as store:
            stored = record_interleaved(store, rollouts, turns, mode)
            for segment, want in zip(stored, expected, strict=True):
                assert_segment(segment, want)
                assert segment.arrays == {}
            assert_batch(store.hydrate(stored), whole)
        with where.open(fields, read_only=True) as reader:
            assert_batch(reader.hydrate(refs_of(stored)), whole)
            assert_batch(reader.hydrate(stored, **select), parts)
            batches = reader.micro_batches(stored, size=3, reuse=True, **select)
            for i, batch in enumerate(batches):
                assert_batch(dict(batch.tensors), parts[3 * i : 3 * i + 3])
        with where.open(fields) as store:
            assert store.recovery.swept_steps == 0
            assert store.release(stored[::-1]) > 0
            assert list(store.unreleased()) == []
    claims = {key for key in where.sizes() if key.startswith("claims/")}
    assert len(claims) == 1
    assert set(where.sizes()) == {"store.json", *claims}


# ---------------------------------------------------------------- what is read

LAYERS, GROUPS = 8, 4
CHUNK = 4 * 2 * 2 + 4  # rows x layers of a group x top-k, and the checksum
GAP = 64 - CHUNK  # between chunks that one request reads


@pytest.mark.s3
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_selection_requests_the_chunks_that_hold_it_and_nothing_else(
    bucket: str, s3_server: S3Server, driver: str
) -> None:
    """A Step of 8 row chunks by 4 layer groups; the chunks of a group lie side by side."""
    fields = standard_fields(LAYERS, topk=2)
    rollout = Rollout(fields, "tito").play([Op("create", 0, 1, 32)], np.random.default_rng(0))
    (want,) = rollout.expected("lineage")
    with FaultProxy(s3_server.endpoint) as proxy, small_chunks(8, 4, 2**20):
        options = {"endpoint_url": proxy.endpoint}
        with Where(f"s3://{bucket}", driver).open(
            fields, layer_groups=GROUPS, storage_options=options, cache_bytes=0
        ) as store:
            session = store.session("s")
            rollout.record(session)
            segments = session.finalize()
            client = Client.of(store)
            for tokens, layers, chunks, requests in [
                (None, None, 32, 1),
                ((0, 8), None, 8, 4),  # a quarter of the tokens: a read for each layer group
                ((7, 9), None, 8, 4),  # two rows on a border
                ((7, 8), None, 4, 4),
                (None, (2, 4), 8, 1),  # a quarter of the layers
                (None, (1, 3), 16, 1),
                ((4, 12), (4, 6), 2, 1),
                ([(0, 1), (31, 32)], (7, 8), 2, 2),
                ((0, 0), None, 0, 0),
                (None, (3, 3), 0, 0),
            ]:
                before = len(proxy.seen())
                client.reads.clear()
                have = store.hydrate(
                    segments, fields=["routed_experts"], tokens=tokens, layers=layers
                )
                ranges: Any = [tokens] if isinstance(tokens, tuple) else tokens
                expected = want.slime(specs(fields[1:]), ranges=ranges, layers=layers)
                assert_batch(have, [expected])
                about = (tokens, layers)
                assert len(client.reads) == requests, about
                nbytes = sum(n for _, _, n in client.reads)
                assert nbytes == chunks * CHUNK + (chunks - requests) * GAP, about
                seen = proxy.seen()[before:]
                assert [s.operation for s in seen] == ["range"] * requests, about


def test_recording_branching_and_finalizing_read_no_stored_field(where: Where) -> None:
    def never(key: str) -> None:
        assert "steps/" not in key

    rollout = Rollout(FIELDS, "tito").play(OPS, np.random.default_rng(0))
    assert {turn.kind for turn in rollout.turns} == {"create", "append", "branch", "boundary"}
    with where.open(FIELDS) as store:
        client = Client.of(store)
        client.check = never
        session, other = store.session("s"), store.session("other")
        rollout.record(session)
        short_rollout(FIELDS, 1).record(other)
        segments = session.finalize(views=VIEWS, consumers=["train", "eval"])
        other.discard()
        again = list(store.segments(store.unreleased()))
        assert [s.ref for s in again] == refs_of(segments)
        store.release(segments, "eval")
        assert client.reads == []
        with pytest.raises(AssertionError, match="steps/"):
            store.hydrate(segments)
        client.check = lambda key: None
        want = [e.slime(specs(FIELDS)) for view in VIEWS for e in rollout.expected(view)]
        assert_batch(store.hydrate(segments), want)
        assert store.release(segments) > 0


# ---------------------------------------------------------------- other readers


def array_of(group: Any, name: str) -> Any:
    return np.asarray(group[name][:])


@pytest.mark.parametrize("where", ZARR, indirect=True)
def test_a_compact_step_is_three_objects_and_opens_as_a_group(where: Where) -> None:
    with where.open(FIELDS) as store:
        (segment,), _ = record(store, "a", 1)
        place = place_of(store, segment)
        names = [key for key in where.sizes() if key.startswith(f"{place}/")]
        assert sorted(name[len(place) + 1 :] for name in names) == [
            "logprobs/c.0",
            "routed_experts/c.0.0.0",
            "zarr.json",
        ]
        first = short_rollout(FIELDS, 1).turns[0]
        group = zarr.open_group(f"{store.url}/{place}", mode="r")
        assert group.metadata.consolidated_metadata is not None
        assert sorted(group.array_keys()) == ["logprobs", "routed_experts"]
        routed = first.whole["routed_experts"]
        assert_bits(array_of(group, "routed_experts"), routed.astype(np.uint8))
        assert_bits(array_of(group, "logprobs"), first.whole["logprobs"])


@pytest.mark.parametrize("where", ZARR, indirect=True)
def test_each_array_of_a_full_step_opens_by_itself(where: Where) -> None:
    with where.open(FIELDS, layout="full") as store:
        (segment,), _ = record(store, "a", 1)
        place = place_of(store, segment)
        assert sum(key.startswith(f"{place}/") for key in where.sizes()) == 5
        first = short_rollout(FIELDS, 1).turns[0]
        url = f"{store.url}/{place}"
        group = zarr.open_group(url, mode="r")
        for name, stored in (("logprobs", "float32"), ("routed_experts", "uint8")):
            want = first.whole[name].astype(stored)
            assert_bits(array_of(group, name), want)
            assert_bits(np.asarray(zarr.open_array(f"{url}/{name}", mode="r")[:]), want)


@pytest.mark.s3
@pytest.mark.parametrize("holes", ["none", "values"])
def test_tensorstore_reads_a_full_step_by_its_own_s3_driver(
    bucket: str, s3_server: S3Server, holes: str
) -> None:
    case = Case(stored="uint8", experts=200, holes=holes, extras=False)
    rollout = Rollout(case.fields(), "tito").play(
        [Op("create", 0, 3, 30)], np.random.default_rng(0)
    )
    with (
        small_chunks(),
        Where(f"s3://{bucket}", "auto").open(case.fields(), layout="full") as store,
    ):
        session = store.session("s")
        rollout.record(session)
        place = place_of(store, session.finalize()[0])

        def array(name: str) -> Any:
            spec = {
                "driver": "zarr3",
                "kvstore": {
                    "driver": "s3",
                    "bucket": bucket,
                    "path": f"default/{place}/{name}/",
                    "endpoint": s3_server.endpoint,
                    "aws_region": s3_server.region,
                    "aws_credentials": {"type": "environment"},
                },
            }
            return np.asarray(tensorstore.open(spec, open=True, read=True).result().read().result())

        routed = rollout.turns[0].whole["routed_experts"]
        known = np.where(routed < 0, 0, routed).astype(np.uint8)
        assert_bits(array("routed_experts"), known)
        if holes == "values":
            assert_bits(array("routed_experts_unknown").astype(bool), routed < 0)


# ---------------------------------------------------------------- what goes wrong


NAMES = ("logprobs/c.0", "routed_experts/c.0.0.0")


def test_an_object_deleted_behind_our_back_is_missed_by_name(where: Where) -> None:
    with where.open(FIELDS) as store, closing(where.backend()) as backend:
        others, want = record(store, "whole", 2)
        for step, name in enumerate(NAMES):
            segments, _ = record(store, "a", 1)
            key = f"{place_of(store, segments[0], step)}/{name}"
            assert backend.delete(key)
            for _ in range(2):  # an error does not cure it
                about = rf"Step {step} of session 'a'.*{re.escape(key)} is gone"
                with pytest.raises(StepMissing, match=about):
                    store.hydrate(segments)
            assert store.release(segments) == 3
        assert_batch(store.hydrate(others), want)


def test_a_byte_that_changed_at_rest_is_corrupt_after_a_second_look(where: Where) -> None:
    with where.open(FIELDS) as store, closing(where.backend()) as backend:
        client = Client.of(store)
        segments, want = record(store, "a", 1)
        for name, other in zip(NAMES, NAMES[::-1], strict=True):
            key = f"{place_of(store, segments[0], 1)}/{name}"
            whole = backend.get(key)
            data = bytearray(whole)
            data[len(data) // 2] ^= 0x10
            backend.put(key, bytes(data))
            client.reads.clear()
            field, intact = name.partition("/")[0], other.partition("/")[0]
            about = rf"Step 1 of session 'a' .*{field}, chunk 0 of 1"
            with pytest.raises(ChunkCorrupt, match=about):
                store.hydrate(segments, fields=[field])
            assert sum(read[0].endswith(key) for read in client.reads) == 2
            store.hydrate(segments, fields=[intact])
            backend.put(key, whole)
        assert_batch(store.hydrate(segments), want)


@pytest.mark.s3
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("operation", "n", "what"),
    [
        ("range", 1, "/c.0"),
        ("get", 1, "/store.json"),
        ("get", 2, "/manifest.json"),
        ("get", 3, "/trajectory.msgpack"),
    ],
)
def test_a_byte_that_changes_on_the_way_is_read_again(
    bucket: str, s3_server: S3Server, driver: str, operation: Operation, n: int, what: str
) -> None:
    where = Where(f"s3://{bucket}", driver)
    with where.open(FIELDS) as store:
        segments, want = record(store, "a", 1)
    schedule = Schedule.at(operation, n, "corrupt")
    with FaultProxy(s3_server.endpoint, schedule) as proxy:
        options = {"endpoint_url": proxy.endpoint}
        with where.open(FIELDS, read_only=True, storage_options=options) as reader:
            assert reader.recovery.unreadable == ()
            (again,) = reader.segments(refs_of(segments))
            assert_bits(again.tokens, segments[0].tokens)
            assert_batch(reader.hydrate([again]), want)
        (spoiled,) = [seen for seen in proxy.seen() if seen.fault]
        assert what in spoiled.path
        assert [seen.path for seen in proxy.seen()].count(spoiled.path) == 2
