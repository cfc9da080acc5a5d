"""Metrics: each says what happened, once, wherever it is looked at, and costs nothing when off."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tq_fs
from tests._clusters import cluster
from tests._proxies import world
from tests._rollouts import (
    VIEWS,
    CountingBackend,
    Rollout,
    open_store,
    run_child,
    short_rollout,
    small_chunks,
    specs,
    standard_fields,
    turning_rollout,
)
from tests._tiers import Tiers, group, step, until
from tq_fs.backends import LocalBackend
from tq_fs.budget import ByteBudget
from tq_fs.cache import ChunkCache
from tq_fs.channel import ChannelBackend, ChannelServer
from tq_fs.errors import (
    DependencyMissing,
    InvalidConfig,
    InvalidSelection,
    ObjectMissing,
    SegmentMissing,
    StepMissing,
    StepTooLarge,
    StorageFailed,
    StorageFull,
    StorageUnreachable,
)
from tq_fs.ingest import RoutingCheck
from tq_fs.keys import Incarnation
from tq_fs.metrics import (
    METRICS,
    Distribution,
    Metrics,
    MetricsServer,
    RayExporter,
    Sample,
)
from tq_fs.reader import SegmentReader
from tq_fs.steps import EncodeOptions
from tq_fs.storage_unit import StorageUnit
from tq_fs.testing import in_threads
from tq_fs.trajectory import Trajectory
from tq_fs.writer import StepWriter

FIELDS = standard_fields()
DOCS = Path(__file__).parent.parent / "docs/metrics.md"


def found(metrics: Metrics) -> dict[str, dict[tuple[str, ...], Any]]:
    """Return all values by name, and by the labels beside the process's own."""
    mine = len(metrics.labels)
    return {
        family.spec.name: {labels[mine:]: value for labels, value in family.series.items()}
        for family in metrics.collect()
    }


def value(metrics: Metrics, name: str, *labels: str) -> Any:
    return found(metrics)[name][labels]


def errors(metrics: Metrics) -> dict[tuple[str, ...], Any]:
    return found(metrics).get("tqfs_errors_total", {})


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("run")


class Writing:
    """A writer on a folder, and a way to hand Steps to it."""

    def __init__(
        self,
        folder: Path,
        metrics: Metrics | None,
        *,
        at: Callable[[str], None] = lambda point: None,
        limit_bytes: int = 10_000,
    ) -> None:
        self.backend = LocalBackend(folder, ahead=0, at=at)
        unit = StorageUnit(self.backend, "run", name="unit-7", options=EncodeOptions())
        self.budget = ByteBudget(limit_bytes, deadline_s=20, clock=time.monotonic, subject="x")
        self.pool = ThreadPoolExecutor(1)
        selected = frozenset({"logprobs", "routed_experts"})
        self.writer = StepWriter(
            unit, selected, pool=self.pool, budget=self.budget, metrics=metrics
        )
        self.trajectory = Trajectory(Incarnation("train", "s", "0"), specs(FIELDS))

    def submit(self, seed: int = 0) -> Any:
        rollout = short_rollout(FIELDS, seed, turns=1)
        return self.writer.submit(self.trajectory, rollout.step(rollout.turns[0]))

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *exc: object) -> None:
        self.pool.shutdown()
        self.backend.close()


# ---------------------------------------------------------------- writing


def test_a_written_step_is_counted_with_its_stored_bytes_at_its_unit(
    tmp_path: Path, metrics: Metrics
) -> None:
    with Writing(tmp_path, metrics) as to:
        records = [to.submit(seed).result(20) for seed in range(3)]
    assert value(metrics, "tqfs_steps_written_total", "unit-7") == 3
    nbytes = sum(record.stored.nbytes for record in records)
    assert nbytes > 0
    assert value(metrics, "tqfs_written_bytes_total", "unit-7") == nbytes
    assert errors(metrics) == {}


def test_a_step_is_timed_in_the_queue_and_in_its_thread_apart(
    tmp_path: Path, metrics: Metrics
) -> None:
    def slow(point: str) -> None:
        if point == "staged":
            time.sleep(0.1)

    with Writing(tmp_path, metrics, at=slow) as to:
        to.pool.submit(time.sleep, 0.3)
        to.submit().result(20)
    waited, took = (
        value(metrics, "tqfs_step_queue_seconds"),
        value(metrics, "tqfs_step_write_seconds"),
    )
    assert waited.observations == took.observations == 1
    assert 0.2 < waited.total < 10
    assert 0.1 <= took.total < waited.total


@pytest.mark.parametrize("error", [OSError(5, "EIO"), ValueError("a bug")], ids=["ours", "bug"])
def test_a_step_that_fails_in_its_thread_is_an_error_by_its_code_and_no_step(
    tmp_path: Path, metrics: Metrics, error: Exception
) -> None:
    def at(point: str) -> None:
        raise error

    with Writing(tmp_path, metrics, at=at) as to, pytest.raises((StorageFailed, ValueError)):
        to.submit().result(20)
    code = "storage_failed" if isinstance(error, OSError) else "unexpected"
    assert errors(metrics) == {("write", code): 1}
    assert found(metrics).get("tqfs_steps_written_total") is None
    assert value(metrics, "tqfs_step_write_seconds").observations == 0


def test_a_step_that_is_refused_is_an_error_by_its_code(tmp_path: Path, metrics: Metrics) -> None:
    with Writing(tmp_path, metrics, limit_bytes=10) as to:
        for _ in range(2):
            with pytest.raises(StepTooLarge):
                to.submit()
    assert errors(metrics) == {("write", "step_too_large"): 2}


def test_the_queue_shows_steps_bytes_and_who_waits_for_room(
    tmp_path: Path, metrics: Metrics
) -> None:
    opened = threading.Event()

    def at(point: str) -> None:
        assert opened.wait(20)

    with Writing(tmp_path, metrics, at=at) as to:
        metrics.watch(to.writer.samples)
        first = to.submit()
        nbytes = value(metrics, "tqfs_inflight_bytes")
        assert nbytes == to.budget.used_bytes > 0
        to.budget.limit_bytes = 2 * nbytes
        second = to.submit()
        waiting = threading.Thread(target=to.submit)
        waiting.start()
        until(lambda: value(metrics, "tqfs_inflight_waiting") == 1)
        assert value(metrics, "tqfs_inflight_steps") == 2
        assert value(metrics, "tqfs_inflight_bytes") == 2 * nbytes
        assert value(metrics, "tqfs_inflight_limit_bytes") == 2 * nbytes
        opened.set()
        waiting.join(20)
        first.result(20)
        second.result(20)
    names = ("steps", "bytes", "waiting", "peak_bytes")
    assert [value(metrics, f"tqfs_inflight_{n}") for n in names] == [0, 0, 0, 2 * nbytes]


def test_without_metrics_a_writer_goes_through_the_same_and_counts_nothing(tmp_path: Path) -> None:
    with Writing(tmp_path, None) as to:
        assert to.submit().result(20).stored is not None
        assert next(iter(to.writer.samples())).name == "tqfs_inflight_steps"


# ---------------------------------------------------------------- reading


def absent(refs: Sequence[str]) -> str:
    return f"{refs[0].rpartition('/')[0]}/99"


@contextmanager
def reading(
    folder: Path, metrics: Metrics, rollout: Rollout, *, cache_bytes: int = 0, threads: int = 1
) -> Iterator[tuple[SegmentReader, CountingBackend, list[str]]]:
    """Give a reader of a rollout that was recorded, its backend, and the references."""
    with open_store(folder, rollout.fields) as store:
        session = store.session("s")
        rollout.record(session)
        refs = [s.ref for s in session.finalize(views=VIEWS) if s.ref is not None]
        assert store.reader is not None
        backend = CountingBackend(folder / store.config.store_id, read_only=True)
        with ThreadPoolExecutor(threads) as pool:
            yield (
                SegmentReader(
                    store.reader.resolve,
                    {"local": backend, "elsewhere": backend},
                    pool=pool if threads > 1 else None,
                    threads=threads,
                    cache=ChunkCache(cache_bytes),
                    metrics=metrics,
                ),
                backend,
                refs,
            )
        backend.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_read_is_counted_at_the_unit_it_comes_from(
    tmp_path: Path, metrics: Metrics, threads: int
) -> None:
    with (
        small_chunks(),
        reading(tmp_path, metrics, short_rollout(FIELDS, 0), threads=threads) as parts,
    ):
        reader, backend, refs = parts
        reader.read(refs[0], "logprobs")
        reader.read(refs[0], "routed_experts")
    assert value(metrics, "tqfs_read_spans_total", "local") > 2
    nbytes = value(metrics, "tqfs_read_bytes_total", "local")
    gaps = 64 * len(backend.requests) * 4  # between chunks, read and not counted
    assert 0 < nbytes <= backend.nbytes <= nbytes + gaps
    assert ("elsewhere",) not in found(metrics)["tqfs_read_bytes_total"]
    assert value(metrics, "tqfs_read_seconds").observations == 2


def test_a_whole_array_counts_as_many_bytes_as_its_object_has(
    tmp_path: Path, metrics: Metrics
) -> None:
    with reading(tmp_path, metrics, short_rollout(FIELDS, 0, turns=1)) as (reader, _, refs):
        (resolved,) = reader.resolve(refs[:1])
        reader.read(refs[0], "routed_experts")
    (entry,) = resolved.steps.values()
    assert value(metrics, "tqfs_read_bytes_total", "local") == entry.fields["routed_experts"].nbytes


def test_a_mask_of_unknown_values_counts_too(tmp_path: Path, metrics: Metrics) -> None:
    rollout = short_rollout(FIELDS, 0, turns=1)
    rollout.turns[0].whole["routed_experts"][1, 2, 0] = -1
    with reading(tmp_path, metrics, rollout) as (reader, backend, refs):
        reader.read(refs[0], "routed_experts")
    assert {key.split("/")[-2] for key, _, _ in backend.requests} == {
        "routed_experts",
        "routed_experts_unknown",
    }
    assert value(metrics, "tqfs_read_spans_total", "local") == 2


def test_what_the_cache_has_is_a_hit_and_is_not_read(tmp_path: Path, metrics: Metrics) -> None:
    with reading(tmp_path, metrics, turning_rollout(), cache_bytes=2**20) as (reader, _, refs):
        metrics.watch(reader.cache.samples)
        reader.read(refs[0], "routed_experts")
        first = found(metrics)
        reader.read(refs[0], "routed_experts")
        second = found(metrics)
    assert first["tqfs_cache_hits_total"][()] == 0
    misses = first["tqfs_cache_misses_total"][()]
    assert misses > 0
    assert second["tqfs_cache_hits_total"][()] == misses
    assert second["tqfs_read_bytes_total"] == first["tqfs_read_bytes_total"]
    assert second["tqfs_cache_bytes"][()] == reader.cache.used_bytes > 0
    assert second["tqfs_cache_limit_bytes"][()] == 2**20


def test_a_read_that_fails_is_one_error_by_its_code(tmp_path: Path, metrics: Metrics) -> None:
    with reading(tmp_path, metrics, short_rollout(FIELDS, 0)) as (reader, backend, refs):
        with pytest.raises(SegmentMissing):
            reader.read(absent(refs), "logprobs")
        with pytest.raises(SegmentMissing):
            reader.resolve([absent(refs)])
        with pytest.raises(InvalidSelection):
            reader.read(refs[0], "logprobs", rows=(0, 10_000))

        def gone(key: str) -> Any:
            raise ObjectMissing("is gone", subject=key)

        backend.open = gone  # type: ignore[method-assign]
        with pytest.raises(StepMissing):
            reader.read(refs[0], "logprobs")
    assert errors(metrics) == {
        ("read", "segment_missing"): 2,
        ("read", "invalid_selection"): 1,
        ("read", "step_missing"): 1,
    }
    assert value(metrics, "tqfs_read_seconds").observations == 0


# ---------------------------------------------------------------- tiers, and the channel


def test_a_tier_shows_its_front_its_queue_and_its_troubles(
    tmp_path: Path, metrics: Metrics
) -> None:
    with closing(Tiers(tmp_path)) as tiers:
        tier = tiers.open("write-back", capacity_bytes=10**7, queue_bytes=10**6)
        metrics.watch(tier.samples)
        tiers.client.hold()
        for i in range(3):
            tier.publish(step(i), group(i), fresh=True)
        stats = tier.stats()
        assert stats.queued_groups == 3
        assert value(metrics, "tqfs_tier_queued_groups") == 3
        assert value(metrics, "tqfs_tier_queued_bytes") == stats.queued_bytes > 0
        assert value(metrics, "tqfs_tier_queue_limit_bytes") == 10**6
        assert value(metrics, "tqfs_tier_front_bytes") == stats.front_bytes > 0
        assert value(metrics, "tqfs_tier_front_limit_bytes") == 10**7
        tiers.client.failure = StorageUnreachable("no answer")
        tiers.client.let_go()
        until(lambda: value(metrics, "tqfs_tier_upload_failures_total") >= 3)
        tiers.client.failure = None
        tier.settle("steps")
        assert value(metrics, "tqfs_tier_queued_groups") == 0


def test_a_tier_for_reading_shows_what_it_promoted_only(tmp_path: Path, metrics: Metrics) -> None:
    with closing(Tiers(tmp_path)) as tiers:
        front = LocalBackend(tmp_path / "front", ahead=0)
        tier = tq_fs.backends.TieredBackend(None, tiers.back)
        metrics.watch(tier.samples)
        assert found(metrics) == {"tqfs_tier_promoted_objects_total": {(): 0}}
        front.close()


def test_the_units_end_of_the_channel_shows_bytes_lanes_and_errors(
    tmp_path: Path, metrics: Metrics
) -> None:
    backend = LocalBackend(tmp_path / "unit", ahead=0)
    endpoint = f"unix:{tmp_path}/socket"
    server = ChannelServer(backend, store_id="s", unit="u", local=[endpoint], roots=None)
    metrics.watch(server.samples)
    client = ChannelBackend(endpoint, store_id="s", unit="u")
    client.put("a/b", b"12345")
    assert client.get("a/b") == b"12345"
    with pytest.raises(ObjectMissing):
        client.get("a/c")
    assert value(metrics, "tqfs_channel_received_bytes_total") == 5
    assert value(metrics, "tqfs_channel_sent_bytes_total") == 5
    assert value(metrics, "tqfs_channel_requests_total") == 4  # the first one says hello
    assert value(metrics, "tqfs_channel_lanes") == 1
    assert value(metrics, "tqfs_channel_held_bytes") == 0
    assert errors(metrics) == {("serve", "object_missing"): 1}
    client.close()
    server.close()
    backend.close()


# ---------------------------------------------------------------- the value


class Slow(float):
    """A number that lets other threads run while it is added."""

    def __radd__(self, other: float) -> float:
        time.sleep(0)
        return other + float(self)


def test_threads_lose_no_count(metrics: Metrics) -> None:
    def work(i: int) -> None:
        for _ in range(500):
            metrics.counter("tqfs_read_bytes_total", source=f"u{i % 2}").add(Slow(3))
            metrics.histogram("tqfs_read_seconds").observe(Slow(0.25))

    in_threads(4, work)
    assert found(metrics)["tqfs_read_bytes_total"] == {("u0",): 3_000, ("u1",): 3_000}
    seen = value(metrics, "tqfs_read_seconds")
    assert (seen.observations, seen.total) == (2_000, 500)


def test_a_bucket_holds_what_does_not_exceed_its_bound(metrics: Metrics) -> None:
    histogram = metrics.histogram("tqfs_read_seconds")
    for seconds in (0.0, 0.0001, 0.00011, 60.0, 61.0):
        histogram.observe(seconds)
    seen = value(metrics, "tqfs_read_seconds")
    assert isinstance(seen, Distribution)
    buckets = dict(seen.buckets())
    assert (buckets["0.0001"], buckets["0.00025"], buckets["30.0"]) == (2, 3, 3)
    assert (buckets["60.0"], buckets["+Inf"], seen.observations) == (4, 5, 5)
    assert seen.total == pytest.approx(121.00021)


def test_sources_of_one_name_are_added_up(metrics: Metrics) -> None:
    metrics.failed("serve", StorageFull("x"))
    for count in (2, 5):
        labels = {"operation": "serve", "code": "storage_full"}
        metrics.watch(lambda n=count, of=labels: [Sample("tqfs_errors_total", n, of)])  # type: ignore[misc]
    assert errors(metrics) == {("serve", "storage_full"): 8}


def test_a_source_that_ends_leaves_its_counts_and_takes_its_gauges(metrics: Metrics) -> None:
    """A counter may not fall: it would look like a restart."""
    caches = [ChunkCache(100) for _ in range(2)]
    ends = [metrics.watch(cache.samples) for cache in caches]
    for cache in caches:
        cache.get("absent")
    ends[0]()
    ends[0]()
    caches[0].get("absent")
    assert value(metrics, "tqfs_cache_misses_total") == 2
    assert value(metrics, "tqfs_cache_limit_bytes") == 100
    ends[1]()
    assert value(metrics, "tqfs_cache_misses_total") == 2
    assert "tqfs_cache_limit_bytes" not in found(metrics)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (StorageFailed("the disk does not answer"), "storage_failed"),
        (Sample("tqfs_no_such_total", 1), "unexpected"),
        (Sample("tqfs_read_seconds", 1), "unexpected"),
        (Sample("tqfs_errors_total", 1, {"code": "x"}), "unexpected"),
    ],
    ids=str,
)
def test_a_source_that_fails_takes_none_of_the_others_away(
    metrics: Metrics, caplog: pytest.LogCaptureFixture, fault: Exception | Sample, code: str
) -> None:
    def broken() -> Iterator[Sample]:
        yield Sample("tqfs_channel_lanes", 3)
        if isinstance(fault, Exception):
            raise fault
        yield fault

    metrics.watch(broken)
    metrics.watch(ChunkCache(7).samples)
    seen = found(metrics)
    assert seen["tqfs_channel_lanes"] == {(): 3}
    assert seen["tqfs_cache_limit_bytes"] == {(): 7}
    assert seen["tqfs_errors_total"] == {("watch", code): 1}
    assert "tqfs_read_seconds" not in seen
    assert "a source of metrics failed" in caplog.text


def test_two_values_share_nothing() -> None:
    one, other = Metrics("a"), Metrics("b")
    one.histogram("tqfs_read_seconds").observe(1)
    assert found(other) == {}


# ---------------------------------------------------------------- the table


def test_names_say_their_units_as_prometheus_wants_it() -> None:
    assert len({spec.name for spec in METRICS}) == len(METRICS) > 30
    for spec in METRICS:
        assert re.fullmatch(r"tqfs_[a-z_]+", spec.name)
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        assert spec.name.endswith("_seconds") == (spec.kind == "histogram"), spec.name
        assert not set(spec.labels) & {"store", "unit", "role", "le"}


def test_the_operators_table_is_that_of_the_code() -> None:
    table = DOCS.read_text().partition("| metric |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    assert rows == [
        [f"`{m.name}`", m.kind, ", ".join(f"`{label}`" for label in m.labels), m.help]
        for m in METRICS
    ]


def told_by_a_proxy(folder: Path) -> set[str]:
    """Play a turn that a pause cuts, and return the names of what was counted."""
    with world(folder) as w, ThreadPoolExecutor(1) as client:
        w.engine.fault("hold", after=1)
        playing = client.submit(w.play, "s", 1)
        w.engine.wait_for(lambda: w.engine.running == 1)
        assert w.client.pause() == 1
        w.client.resume()
        playing.result(20)
        return set(found(w.metrics))


def test_every_metric_of_the_table_is_told_by_something(tmp_path: Path, metrics: Metrics) -> None:
    backend = LocalBackend(tmp_path / "unit", ahead=0)
    server = ChannelServer(backend, store_id="s", unit="u")
    with closing(Tiers(tmp_path / "tiers")) as tiers:
        tier = tiers.open()
        with Writing(tmp_path / "writing", metrics) as to:
            ends = [metrics.watch(x.samples) for x in (server, tier, to.writer)]
            to.submit().result(20)
            with reading(tmp_path, metrics, short_rollout(FIELDS, 0)) as (reader, _, refs):
                ends.append(metrics.watch(reader.cache.samples))
                with pytest.raises(SegmentMissing):
                    reader.resolve([absent(refs)])
                reader.read(refs[0], "logprobs")
            RoutingCheck("warn", metrics).check(np.zeros((1, 2, 2), np.int32), "r")
            with cluster(tmp_path / "cluster", 1) as made:
                ends.append(metrics.watch(made.controller.samples))
                ends += map(metrics.watch, made.unit("n0")._sources())
                told = set(found(metrics)) | told_by_a_proxy(tmp_path / "proxy")
            assert told == {spec.name for spec in METRICS}
    for end in ends:
        end()
    server.close()
    backend.close()


# ---------------------------------------------------------------- Prometheus


TEXT, OPEN = "text/plain", "application/openmetrics-text"


def scrape(url: str, kind: str = TEXT) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return what Prometheus would see, in the format that it asks for."""
    from prometheus_client import parser
    from prometheus_client.openmetrics import parser as strict

    request = urllib.request.Request(url, headers={"Accept": f"{kind};version=1.0.0"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith(kind)
        text = answer.read().decode()
    parsing = {TEXT: parser, OPEN: strict}[kind]
    families = parsing.text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


@pytest.mark.parametrize("kind", [TEXT, OPEN])
def test_the_endpoint_serves_what_is_counted_at_each_moment(kind: str) -> None:
    pytest.importorskip("prometheus_client")
    metrics = Metrics('r"1', unit="u", role="unit")
    mine = {("store", 'r"1'), ("unit", "u"), ("role", "unit")}
    metrics.histogram("tqfs_read_seconds").observe(0.25)
    metrics.failed("read", StorageFull("x"))
    error = frozenset({*mine, ("operation", "read"), ("code", "storage_full")})
    with closing(MetricsServer(metrics)) as server:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", server.url)
        seen = scrape(server.url, kind)
        assert seen["tqfs_errors_total", error] == 1
        assert seen["tqfs_read_seconds_count", frozenset(mine)] == 1
        assert seen["tqfs_read_seconds_sum", frozenset(mine)] == 0.25
        assert seen["tqfs_read_seconds_bucket", frozenset({*mine, ("le", "0.25")})] == 1
        assert seen["tqfs_read_seconds_bucket", frozenset({*mine, ("le", "0.1")})] == 0
        assert seen["tqfs_read_seconds_bucket", frozenset({*mine, ("le", "+Inf")})] == 1
        metrics.watch(ChunkCache(7).samples)
        metrics.failed("read", StorageFull("x"))
        seen = scrape(server.url, kind)
        assert seen["tqfs_errors_total", error] == 2
        assert seen["tqfs_cache_limit_bytes", frozenset(mine)] == 7
        assert seen["tqfs_cache_misses_total", frozenset(mine)] == 0


def test_a_closed_endpoint_listens_no_more_and_leaves_no_thread(metrics: Metrics) -> None:
    pytest.importorskip("prometheus_client")
    before = set(threading.enumerate())
    server = MetricsServer(metrics)
    port = int(server.url.split(":")[2].split("/")[0])
    assert set(threading.enumerate()) > before
    server.close()
    server.close()
    until(lambda: set(threading.enumerate()) <= before)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


def test_two_endpoints_of_a_process_do_not_meet() -> None:
    pytest.importorskip("prometheus_client")
    one, other = Metrics("a"), Metrics("b")
    for metrics in (one, other):
        metrics.failed("read", StorageFull("x"))
    with closing(MetricsServer(one)) as first, closing(MetricsServer(other)) as second:
        stores = [{dict(labels)["store"] for _, labels in scrape(s.url)} for s in (first, second)]
    assert stores == [{"a"}, {"b"}]


def test_a_port_that_is_taken_is_named(metrics: Metrics) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=f"127.0.0.1:{port}.*0 for a free one"):
            MetricsServer(metrics, port=port)
    with pytest.raises(InvalidConfig, match=r"no\.such\.host\.invalid"):
        MetricsServer(metrics, "no.such.host.invalid")


def test_what_is_missing_for_an_export_is_named(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("prometheus_client", "ray"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DependencyMissing, match=r"pip install 'tq-fs\[metrics\]'"):
        MetricsServer(metrics)
    with pytest.raises(DependencyMissing, match="pip install ray"):
        RayExporter(metrics)


def test_counting_needs_no_optional_library() -> None:
    done = run_child(
        "import sys\n"
        "sys.modules['prometheus_client'] = sys.modules['ray'] = None\n"
        "from tq_fs.metrics import Metrics\n"
        "metrics = Metrics('s')\n"
        "metrics.counter('tqfs_read_bytes_total', source='u').add(5)\n"
        "print(metrics.collect()[0].series)"
    )
    assert done.stdout == "{('s', 'u'): 5}\n", done.stderr


# ---------------------------------------------------------------- Ray

RAY_LIFE = """
import json, sys, time
import ray
from tq_fs.metrics import Metrics, RayExporter, Sample

settings = json.loads(sys.argv[1])
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, **settings)

def work():
    import ray.util.metrics as kinds
    given = []

    def noting(kind, method):
        before = getattr(kind, method)
        def call(self, value, tags):
            given.append([self.info["name"], method, value, tags])
            before(self, value, tags)
        setattr(kind, method, call)

    noting(kinds.Counter, "inc")
    noting(kinds.Gauge, "set")
    metrics = Metrics("run", role="trainer")
    gauge = [5]
    metrics.watch(lambda: [Sample("tqfs_inflight_bytes", gauge[0])])
    steps = metrics.counter("tqfs_steps_written_total", target="u")
    steps.add(3)
    metrics.histogram("tqfs_read_seconds").observe(0.25)
    exporter = RayExporter(metrics, interval_s=0.05)
    until = time.monotonic() + 30
    while len(given) < 10 and time.monotonic() < until:
        time.sleep(0.01)
    steps.add(4)
    gauge[0] = 7
    exporter.close()
    exporter.close()
    return given
"""


def ray_life(code: str, tmp_path: Path, **settings: Any) -> Any:
    """Run code beside a Ray of its own, at home in a folder of the test's own."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))  # where Ray keeps a token
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        done = run_child(RAY_LIFE + code, json.dumps(settings), timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.ray
@pytest.mark.slow
def test_a_ray_worker_gives_its_metrics_to_ray_as_counters_of_what_is_new_and_gauges(
    tmp_path: Path,
) -> None:
    """Shows what Ray is given, and that it takes it; not what Ray does with it."""
    given = ray_life("print(json.dumps(ray.get(ray.remote(work).remote())))", tmp_path)
    tags = {"store": "run", "role": "trainer"}
    steps = [g for g in given if g[0] == "tqfs_steps_written_total"]
    assert steps == [
        ["tqfs_steps_written_total", "inc", more, {**tags, "target": "u"}] for more in (3, 4)
    ]
    gauges = [g for g in given if g[0] == "tqfs_inflight_bytes"]
    assert gauges[0] == ["tqfs_inflight_bytes", "set", 5, tags]
    assert gauges[-1] == ["tqfs_inflight_bytes", "set", 7, tags]
    buckets = [g for g in given if g[0] == "tqfs_read_seconds_bucket"]
    reached = ["0.25", "0.5", "1.0", "2.5", "5.0", "10.0", "30.0", "60.0", "+Inf"]
    assert buckets == [
        ["tqfs_read_seconds_bucket", "inc", 1, {**tags, "le": bound}] for bound in reached
    ]
    totals = {g[0]: g[2] for g in given if g[0].endswith(("_sum", "_count"))}
    assert totals == {"tqfs_read_seconds_sum": 0.25, "tqfs_read_seconds_count": 1}


SCRAPE = """
import urllib.request
work()
until = time.monotonic() + 120
lines = []
while len(lines) < 2 and time.monotonic() < until:
    time.sleep(1)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
            text = page.read().decode()
    except OSError:
        continue
    wanted = ("ray_tqfs_steps_written_total{", "ray_tqfs_read_seconds_count_total{")
    lines = [line for line in text.splitlines() if line.startswith(wanted)]
print(json.dumps(lines))
"""


@pytest.mark.ray
@pytest.mark.slow
def test_ray_shows_the_metrics_at_the_port_of_its_node(tmp_path: Path) -> None:
    """Needs what `ray[default]` brings: without it Ray has no port for metrics."""
    if not all(map(find_spec, ("opentelemetry", "opencensus", "aiohttp_cors"))):
        pytest.skip("ray[default] is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lines = ray_life(f"port = {port}\n{SCRAPE}", tmp_path, _metrics_export_port=port)
    steps, reads = sorted(lines, reverse=True)
    assert steps.endswith(" 7.0")
    assert {'role="trainer"', 'store="run"', 'target="u"'} <= set(re.findall(r'\w+="[^"]*"', steps))
    assert reads.endswith(" 1.0")
