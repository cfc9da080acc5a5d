"""Preemption: processes are killed and disks are lost, and what was finalized is trained on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

import fsspec
import numpy as np
import pytest

import tq_fs
from tests._fault_proxy import FaultProxy, Operation, Schedule, Verdict
from tests._rollouts import (
    Array,
    Field,
    Op,
    Rollout,
    assert_batch,
    assert_segment,
    refs_of,
    routes,
    run_child,
    spawn_child,
    specs,
)
from tests._tiers import GROUP_BYTES, until
from tq_fs import StoreConfig, TierConfig, recover_store
from tq_fs.backends import Retry, TieredBackend, open_object_backend
from tq_fs.backends._fsspec import FsspecClient
from tq_fs.bench.servers import S3Server
from tq_fs.keys import SegmentRef
from tq_fs.storage_options import StorageOptions

LAYERS, TOPK, EXPERTS = 4, 2, 256
FIELDS = [
    Field(tq_fs.logprobs(), lambda random, rows: -random.random(rows, np.float32)),
    Field(
        tq_fs.routed_experts(layers=LAYERS, topk=TOPK, experts=EXPERTS),
        lambda random, rows: routes(random, rows, LAYERS, TOPK, EXPERTS),
    ),
]
STEPS = 3  # of each session


# ---------------------------------------------------------------- runs, here and in children


def open_node(url: str, folder: str | Path | None, **settings: Any) -> tq_fs.Store:
    """Open a store from a node whose disk is at `folder`; without one, from no disk at all."""
    tier = settings.pop("tier", {})
    if folder is not None:
        settings["tier"] = TierConfig(folder=str(folder), **tier)
    settings = {"prepared_groups": 0, "retry_deadline_s": 30, **settings}
    return tq_fs.open_store(url, fields=specs(FIELDS), **settings)


def rollout_of(name: str) -> Rollout:
    """Return what is recorded as a session; its name says all."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    ops = [Op("create", 0, 3, 40), Op("append", 0, 2, 30), Op("branch", 0, 5, 20)]
    return Rollout(FIELDS, "tito").play(ops, np.random.default_rng(seed))


def extra_of(name: str) -> dict[str, Any]:
    return {"reward": len(name) / 7, "messages": [{"content": name}]}


def finalize(store: tq_fs.Store, name: str) -> list[tq_fs.Segment]:
    session = store.session(name)
    rollout_of(name).record(session)
    return session.finalize(extra=extra_of(name))


def tier_of(store: tq_fs.Store) -> TieredBackend:
    assert store.reader is not None
    tier = store.reader._backends["local"]
    assert isinstance(tier, TieredBackend)
    return tier


def name_of(ref: str) -> str:
    return SegmentRef.parse(ref).incarnation.session_id


def want(ref: str) -> dict[str, Array]:
    """Return what training must get for a reference."""
    found = SegmentRef.parse(ref)
    return rollout_of(name_of(ref)).expected("lineage")[found.index].slime(specs(FIELDS))


def check(store: tq_fs.Store, refs: Sequence[str]) -> None:
    """Compare tensors and resident fields with what was recorded."""
    assert_batch(store.hydrate(list(refs)), [want(ref) for ref in refs])
    for segment in store.segments(refs):
        assert segment.ref is not None
        expected = rollout_of(segment.session_id).expected("lineage")[segment.index]
        assert_segment(segment, expected)
        assert segment.extra == extra_of(segment.session_id)


def bucket_keys(url: str) -> set[str]:
    """Return all keys of the store's objects, but for who holds it."""
    backend = open_object_backend(
        f"{url}/default",
        driver="auto",
        options=StorageOptions(),
        retry=Retry(deadline_s=0),
        timeout_s=30,
    )
    with closing(backend):
        return {key for key, _ in backend.walk("") if not key.startswith("claims/")}


def front_keys(folder: Path) -> set[str]:
    """Return the keys of the Steps' objects on a node's front."""
    root = folder / "default"
    return {str(p.relative_to(root)) for p in root.glob("steps/**/*") if p.is_file()}


def sessions_in(keys: set[str]) -> set[str]:
    return {key.split("/")[2] for key in keys if key.startswith(("steps/", "manifests/"))}


class Child:
    """A process that tells what it does, line by line."""

    def __init__(self, code: str, *arguments: object) -> None:
        self.process = spawn_child(code, *arguments)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)

    def hear(self) -> Any:
        """Return what it says next."""
        line = self._out.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def kill(self) -> list[Any]:
        """Kill it; return what it has said since."""
        self.process.kill()
        left = self._out.read()
        assert self.process.wait(30) == -signal.SIGKILL
        return [json.loads(line) for line in left.splitlines() if line.endswith("]")]

    @property
    def _out(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout


# ---------------------------------------------------------------- killed while uploads are queued

RECORDER = """
import itertools, json, sys, threading, time
from tests.test_preemption import finalize, open_node, refs_of, rollout_of

url, folder, settings = sys.argv[1:]
store = open_node(url, folder, writer_threads=4, **json.loads(settings))
lock = threading.Lock()

def say(*words):
    with lock:
        print(json.dumps(words), flush=True)

def finalize_forever(kind):
    for i in itertools.count():
        name = f"{kind}-{i}"
        say("begun", name)
        say("finalized", name, refs_of(finalize(store, name)))
        time.sleep(0.05)

for kind in ("a", "b"):
    threading.Thread(target=finalize_forever, args=(kind,), daemon=True).start()
for i in itertools.count():
    session = store.session(f"open-{i}")
    for turn in (rollout := rollout_of(f"open-{i}")).turns:
        session.record(rollout.step(turn))
        time.sleep(0.05)
"""
TRAINER = """
import json, sys
from tests.test_preemption import open_node

url, folder = sys.argv[1:]
with open_node(url, folder, read_only=True) as store:
    print(json.dumps(["open"]), flush=True)
    while True:
        with open_node(url, folder, read_only=True) as again:
            again.hydrate(list(again.unreleased()))
"""
ENOUGH = 6  # groups that wait for their upload


def waiting(url: str, node: Path) -> int:
    """Count the Steps that are on a node's front and not in the bucket."""
    return sum(key.endswith("/zarr.json") for key in front_keys(node) - bucket_keys(url))


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.parametrize(
    ("driver", "again"), [("obstore", "open_store"), ("s3fs", "recover_store")]
)
def test_every_process_killed_while_uploads_are_queued_loses_nothing_acknowledged(
    tmp_path: Path, bucket: str, s3_server: S3Server, driver: str, again: str
) -> None:
    url, node = f"s3://{bucket}/runs", tmp_path / "nvme"
    stalled = threading.Event()
    uploads: Sequence[Operation] = ("put", "commit")

    def decide(operation: Operation, n: int) -> Verdict:
        return Verdict("timeout" if operation in uploads and stalled.is_set() else None)

    said: list[Any] = []
    with ExitStack() as stack:
        proxy = FaultProxy(s3_server.endpoint, Schedule(decide), stall_s=60)
        options = {"endpoint_url": stack.enter_context(proxy).endpoint}
        more = {"driver": driver, "storage_options": options, "tier": {"policy": "write-back"}}
        recorder = stack.enter_context(Child(RECORDER, url, node, json.dumps(more)))
        while sum(words[0] == "finalized" for words in said) < 6:
            said.append(recorder.hear())
        with Child(TRAINER, url, node) as trainer:
            assert trainer.hear() == ["open"]
            stalled.set()
            until(lambda: waiting(url, node) >= ENOUGH)
            said += recorder.kill()
            trainer.kill()
        assert waiting(url, node) >= ENOUGH  # queued when it was killed: here, and nowhere else
        only_here = front_keys(node) - bucket_keys(url)
        assert any("/open-" in key for key in only_here)
    finalized = {words[1]: words[2] for words in said if words[0] == "finalized"}
    begun = {words[1] for words in said if words[0] == "begun"}
    assert len(finalized) >= 6
    assert begun > set(finalized)  # they wait for their uploads
    assert not sessions_in(only_here) & set(finalized)  # these have no need of the disk

    if again == "recover_store":
        config = StoreConfig(tier=TierConfig(folder=str(node)), driver=driver)
        found = recover_store(url, config)
        assert found.incomplete == found.unreadable == ()
        assert found.swept_sessions >= 1
    with open_node(url, node, driver=driver) as store:
        if again == "open_store":
            assert store.recovery.swept_sessions >= 1
        live = list(store.unreleased())
        assert set(finalized) <= {name_of(ref) for ref in live} <= begun
        assert {ref for refs in finalized.values() for ref in refs} <= set(live)
        check(store, live)
        kept = {name_of(ref) for ref in live}
        assert sessions_in(front_keys(node)) == kept
        assert sessions_in(bucket_keys(url)) == kept
        check(store, refs_of(finalize(store, "goes-on")))
    with open_node(url, None, read_only=True) as elsewhere:  # the bucket alone
        assert set(elsewhere.unreleased()) > set(live)
        check(elsewhere, list(elsewhere.unreleased()))
    assert_nothing_stray(url)


def assert_nothing_stray(url: str) -> None:
    """Check that a recovery finds nothing to remove, and all that is needed."""
    found = recover_store(url, dry_run=True)
    assert found.swept_sessions == found.swept_steps == 0
    assert found.incomplete == found.unreadable == ()
    keys = bucket_keys(url)
    assert sum(key.startswith("steps/") for key in keys) == 3 * found.steps
    assert found.steps == STEPS * found.sessions


# ---------------------------------------------------------------- the disk is lost too


def train(store: tq_fs.Store, segments: Sequence[tq_fs.Segment]) -> dict[str, str]:
    """Train a small policy for one step; return digests of all that went in, and of the weights.

    Routing is replayed, the policy's ratio to the rollout's logprobs is weighed by the reward.
    """
    import torch

    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    tokens = torch.nn.Parameter(torch.randn(97, 8, generator=random))
    experts = torch.nn.Parameter(torch.randn(EXPERTS, 8, generator=random))
    digests = {}
    loss = torch.zeros(())
    left = iter(segments)
    for batch in store.micro_batches(segments, budget_bytes=16 * 1024, reuse=True):
        for i, _ in enumerate(batch.samples):
            segment = next(left)
            old = batch.tensors["rollout_log_probs"][i]
            routing = batch.tensors["rollout_routed_experts"][i]
            ids = torch.from_numpy(segment.tokens.astype(np.int64) % 97)
            hidden = tokens[ids[:-1]] + experts[routing.long()].mean((1, 2))
            new = (hidden @ tokens.T).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            ratio = (new[-len(old) :] - old).exp()
            mask = torch.from_numpy(segment.loss_mask[-len(old) :])
            loss = loss - (ratio * mask).sum() * segment.extra["reward"]
            arrays = [old.numpy(), routing.numpy(), segment.tokens, segment.loss_mask]
            said = [segment.versions, segment.response_length, segment.steps, segment.extra]
            data = [json.dumps(said).encode()]
            data += [f"{a.dtype} {a.shape}".encode() + a.tobytes() for a in arrays]
            digests[f"{segment.session_id}/{segment.index}"] = digest(data)
    loss.backward()  # type: ignore[no-untyped-call]
    assert len(digests) == len(segments)
    torch.optim.SGD([tokens, experts], lr=0.01).step()
    weights = [tokens.detach().numpy(), experts.detach().numpy()]
    assert all(np.isfinite(w).all() for w in weights)
    return {**digests, "weights": digest([w.tobytes() for w in weights])}


def digest(data: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(data)).hexdigest()


NEW_NODE = """
import json, sys
from tests.test_preemption import open_node, train

url, folder, transfer = sys.argv[1:]
transfer = json.loads(transfer)
with open_node(url, folder, transfer=transfer) as store:
    segments = list(store.segments(sorted(store.unreleased("train"))))
    print(json.dumps([s.ref for s in segments]))
    print(json.dumps(train(store, segments)))
    store.release(segments)
"""


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.parametrize(
    ("driver", "transfer"),
    [("obstore", ["routed_experts"]), ("s3fs", ["logprobs", "routed_experts"])],
)
def test_a_new_process_trains_on_all_that_was_finalized_when_every_node_is_lost(
    tmp_path: Path, bucket: str, driver: str, transfer: list[str]
) -> None:
    url, node = f"s3://{bucket}", tmp_path / "nvme"
    more = {"driver": driver, "transfer": transfer, "tier": {"policy": "write-through"}}
    said: list[Any] = []
    with Child(RECORDER, url, node, json.dumps(more)) as recorder:
        while sum(words[0] == "finalized" for words in said) < 6:
            said.append(recorder.hear())
        said += recorder.kill()
    assert front_keys(node)  # a copy of what is in the bucket
    assert front_keys(node) <= bucket_keys(url)
    shutil.rmtree(node)

    done = run_child(NEW_NODE, url, tmp_path / "another", json.dumps(transfer))
    assert done.returncode == 0, done.stderr
    refs, trained = map(json.loads, done.stdout.splitlines())
    finalized = {words[1] for words in said if words[0] == "finalized"}
    assert finalized <= {name_of(ref) for ref in refs}
    assert bucket_keys(url) == {"store.json"}

    with tq_fs.open_store(None, fields=specs(FIELDS)) as memory:
        names = list(dict.fromkeys(map(name_of, refs)))
        segments = [segment for name in names for segment in finalize(memory, name)]
        wanted = train(memory, segments)
    assert trained == wanted


def test_another_step_of_training_tells_the_weights_apart() -> None:
    """The comparison above sees a reward, a token and a logprob."""
    with tq_fs.open_store(None, fields=specs(FIELDS)) as memory:
        first, second = (train(memory, finalize(memory, name)) for name in ("a-1", "a-22"))
        assert first["weights"] == train(memory, finalize(memory, "a-1"))["weights"]
    assert first["weights"] != second["weights"]


@pytest.mark.s3
def test_a_node_that_comes_back_late_brings_nothing_back(tmp_path: Path, bucket: str) -> None:
    """Its front still holds Steps that were released from elsewhere meanwhile."""
    url, node = f"s3://{bucket}", tmp_path / "nvme"
    done = run_child(
        """
import os, sys
from tests.test_preemption import finalize, open_node, rollout_of
store = open_node(*sys.argv[1:])
finalize(store, "a"), finalize(store, "b")
rollout_of("open").record(store.session("open"))
os.kill(os.getpid(), 9)
""",
        url,
        node,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with open_node(url, tmp_path / "elsewhere") as store:
        store.release([ref for ref in store.unreleased() if name_of(ref) == "a"])
    assert sessions_in(bucket_keys(url)) == {"b"}
    assert sessions_in(front_keys(node)) == {"a", "b", "open"}
    with open_node(url, node) as store:
        assert {name_of(ref) for ref in store.unreleased()} == {"b"}
        check(store, list(store.unreleased()))
        assert sessions_in(front_keys(node)) == {"b"}
    assert sessions_in(bucket_keys(url)) == {"b"}
    assert_nothing_stray(url)


# ---------------------------------------------------------------- fronts that are small or full


@pytest.fixture
def memory_url() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield f"memory://{name}"
    with suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


@pytest.mark.parametrize("policy", ["write-back", "write-through"])
@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_what_leaves_a_small_front_in_mid_run_stays_readable(
    tmp_path: Path,
    memory_url: str,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    cache_bytes: int,
) -> None:
    put = FsspecClient.put

    def slowly(self: FsspecClient, key: str, buffers: Any) -> None:
        time.sleep(0.01)  # so that Steps wait for their upload
        put(self, key, buffers)

    monkeypatch.setattr(FsspecClient, "put", slowly)
    capacity = 4 * GROUP_BYTES
    tier = {"policy": policy, "capacity_bytes": capacity, "cache_bytes": cache_bytes}
    refs: list[str] = []
    with open_node(memory_url, tmp_path, tier=tier) as store:
        for i in range(8):
            open_session = store.session(f"open-{i}")
            rollout_of(f"open-{i}").record(open_session)
            refs += refs_of(finalize(store, f"s-{i}"))
            check(store, refs[:: max(1, len(refs) // 4)])
            check(store, refs_of(open_session.finalize(extra=extra_of(f"open-{i}"))))
        stats = tier_of(store).stats()
        assert stats.evicted > 8
        assert stats.front_bytes <= capacity
        assert stats.queued_groups == 0
        assert bool(stats.promoted) == bool(cache_bytes)
        check(store, list(store.unreleased()))
        assert len(list(store.unreleased())) == 32
        store.release(list(store.unreleased()))
    assert front_keys(tmp_path) == set()
    assert bucket_keys(memory_url) == {"store.json"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tq-fs-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.root
@pytest.mark.parametrize("policy", ["write-back", "write-through"])
def test_a_front_without_room_is_passed_by_and_nothing_fails(
    small_disk: Path, memory_url: str, policy: str
) -> None:
    tier = {"policy": policy}
    with open_node(memory_url, small_disk, tier=tier) as store:
        fill(small_disk / "filler")
        refs = [ref for i in range(20) for ref in refs_of(finalize(store, f"full-{i}"))]
        stats = tier_of(store).stats()
        assert stats.front_failures > 0
        assert (stats.spilled > 0) == (policy == "write-back")
        check(store, refs)
    with open_node(memory_url, small_disk, tier=tier) as store:  # and it starts on a full disk
        assert sorted(store.unreleased()) == sorted(refs)
        check(store, refs)
        refs += refs_of(finalize(store, "again"))
        (small_disk / "filler").unlink()
        after = refs_of(finalize(store, "after"))
        until(lambda: "after" in sessions_in(front_keys(small_disk)))
        check(store, [*refs, *after])
        store.release([*refs, *after])
    assert front_keys(small_disk) == set()
    assert bucket_keys(memory_url) == {"store.json"}


@pytest.mark.root
def test_a_run_larger_than_its_disk_goes_on(small_disk: Path, memory_url: str) -> None:
    with open_node(memory_url, small_disk) as store:
        refs = [ref for i in range(40) for ref in refs_of(finalize(store, f"s-{i}"))]
        assert 40 * STEPS * GROUP_BYTES > 2 * 2**20
        assert tier_of(store).stats().queued_groups == 0
        check(store, refs)


# ---------------------------------------------------------------- trainers

READER = """
import json, sys
from tests.test_preemption import check, open_node

url, folder, endpoint = sys.argv[1:]
options = {"endpoint_url": endpoint}
with open_node(url, folder, read_only=True, storage_options=options) as store:
    import torch  # before they begin together
    refs = sorted(store.unreleased())
    print(json.dumps(["ready", len(refs)]), flush=True)
    sys.stdin.readline()
    check(store, refs)
    print(json.dumps(["done"]), flush=True)
"""


def downloads(proxy: FaultProxy) -> Counter[str]:
    """Return how often each object of a Step was asked for."""
    return Counter(
        unquote(seen.path.partition("?")[0]).partition("/default/")[2]
        for seen in proxy.seen()
        if "/steps/" in seen.path and seen.operation in ("range", "get")
    )


@pytest.mark.s3
def test_trainers_of_a_node_download_each_object_once(
    tmp_path: Path, bucket: str, s3_server: S3Server
) -> None:
    url = f"s3://{bucket}"
    with open_node(url, tmp_path / "nvme") as store:
        refs = [ref for i in range(4) for ref in refs_of(finalize(store, f"s-{i}"))]
        with FaultProxy(s3_server.endpoint) as proxy, ExitStack() as stack:
            arguments = (url, tmp_path / "trainers", proxy.endpoint)
            trainers = [stack.enter_context(Child(READER, *arguments)) for _ in range(3)]
            for trainer in trainers:
                assert trainer.hear() == ["ready", len(refs)]
            for trainer in trainers:
                trainer.say("go")
            for trainer in trainers:
                assert trainer.hear() == ["done"]
            asked = downloads(proxy)
    objects = {key for key in bucket_keys(url) if "/c." in key}
    assert len(objects) == 4 * STEPS * 2
    assert asked == Counter(objects)


@pytest.mark.s3
@pytest.mark.parametrize("where", ["the recorder's node", "no disk"])
def test_a_trainer_reads_what_is_in_front_and_from_the_bucket_where_there_is_none(
    tmp_path: Path, bucket: str, s3_server: S3Server, where: str
) -> None:
    url, node = f"s3://{bucket}", tmp_path / "nvme"
    folder = node if where == "the recorder's node" else None
    with open_node(url, node) as store, FaultProxy(s3_server.endpoint) as proxy:
        refs = [ref for i in range(2) for ref in refs_of(finalize(store, f"s-{i}"))]
        options = {"endpoint_url": proxy.endpoint}
        for _ in range(2):
            with open_node(url, folder, read_only=True, storage_options=options) as trainer:
                check(trainer, refs)
        objects = {key for key in bucket_keys(url) if "/c." in key}
        times = 0 if folder else 2
        assert downloads(proxy) == Counter({key: times for key in objects if times})
        assert not (tmp_path / "default").exists()
