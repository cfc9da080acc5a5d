"""From Proxies to trainers on two real raylets, with a unit on each.

The raylets share a file system. What is of another node is so by Ray's node id: nobody may open its
files, although he could.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("ray")
pytest.importorskip("torch")

import ray

from tests._ray_rollouts import (
    LAYERS,
    SPECS,
    Agent,
    DieOnce,
    Digests,
    FailingAgent,
    FailOnce,
    Look,
    Weigh,
    expected,
    keep_even,
    rollout_of,
)
from tq_fs import ClusterConfig, StoreConfig, cluster, rollout
from tq_fs.cli import main
from tq_fs.demo.raylets import joined
from tq_fs.demo.scenario import TINY
from tq_fs.errors import ActorLost, ValueOutOfRange
from tq_fs.rollout import Parallel, ProxyConfig, Rollout, Trained, TrainerConfig, Trainers

pytestmark = pytest.mark.ray
SESSIONS = [f"s{i}" for i in range(12)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    with joined() as found:
        yield found


@pytest.fixture
def running(nodes: list[str], tmp_path: Path) -> Iterator[cluster.StoreCluster]:
    config = StoreConfig(
        store_id=f"run-{uuid.uuid4().hex[:8]}",
        layer_groups=2,
        cluster=ClusterConfig(paths=(f"{tmp_path}/units/{{node}}",)),
    )
    with cluster.start(config) as found:
        yield found


@contextmanager
def rolled_out(
    nodes: Sequence[str], store_id: str | None, *, data: int, keep: Any = None
) -> Iterator[Rollout]:
    """A rollout of all sessions, recorded by a Proxy on each node."""
    config = ProxyConfig(store_id=store_id, fields=SPECS)
    proxies = rollout.start_proxies(config, Agent(), nodes)
    manager = rollout.start_manager(proxies, data=data, node=nodes[0], keep=keep)
    try:
        (made,) = rollout.gather([manager.generate.remote(0, SESSIONS)])
        yield made
    finally:
        ray.kill(manager)
        rollout.stop(proxies)


@contextmanager
def training(
    nodes: Sequence[str], store_id: str | None, parallel: Parallel, step: Any, **settings: Any
) -> Iterator[Trainers]:
    config = TrainerConfig(
        store_id=store_id, fields=SPECS, parallel=parallel, budget_bytes=2**21, **settings
    )
    trainers = Trainers(config, step, nodes)
    try:
        yield trainers
    finally:
        trainers.stop()


def members(made: Rollout) -> list[list[str]]:
    """The sessions of each shard."""
    shards = [ray.get(shard.segments) for shard in made.shards]
    assert all(s.arrays == {} for segments in shards for s in segments if s.ref is not None)
    return [[segment.session_id for segment in segments] for segments in shards]


def merged(results: Sequence[Digests]) -> Digests:
    return {key: value for result in results for key, value in result.items()}


def payload_bytes() -> int:
    """The large fields of all sessions, as in memory."""
    arrays = [a for s in SESSIONS for a in rollout_of(s).expected("lineage")[0].arrays.values()]
    return sum(array.nbytes for array in arrays)


def steps_in(folder: Path) -> int:
    return len([p for p in folder.glob("*/*/steps/*/*/*/*") if p.is_dir()])


def test_every_rank_gets_its_layers_and_tokens_bit_for_bit_and_only_references_pass_ray(
    nodes: list[str], running: cluster.StoreCluster, tmp_path: Path
) -> None:
    root, store_id = tmp_path / "units", running.config.store_id
    parallel = Parallel(data=1, pipeline=2, context=2)
    with (
        rolled_out(nodes, store_id, data=1) as made,
        training(nodes, store_id, parallel, Look(str(root))) as trainers,
        running.store(SPECS) as store,
    ):
        rollout.gather([rank.pid.remote() for rank in trainers.ranks])
        with rollout.ObjectStoreWatch() as watch:
            trained = trainers.train(made)
        (sessions,) = members(made)
        assert sorted(sessions) == sorted(SESSIONS)
        for rank, found in zip(parallel.ranks(), trained, strict=True):
            assert merged([digests for digests, _ in found.results]) == expected(sessions, rank)
            assert found.micro_batches > 1
        assert_reads_its_share(trained, parallel)
        assert_no_foreign_files(trained, root)
        growth = max(made.object_store_bytes, watch.growth_bytes)
        assert made.object_store_bytes > 0
        assert growth < 0.01 * payload_bytes()

        assert len(list(store.unreleased("train"))) == 0  # noted, and held back
        assert steps_in(root) == 16 * len(SESSIONS)
        assert trainers.checkpoint_saved(0) == 16 * len(SESSIONS)
        assert steps_in(root) == 0


def assert_reads_its_share(trained: Sequence[Trained], parallel: Parallel) -> None:
    rows = sum(len(rollout_of(s).expected("lineage")[0].tokens) - 1 for s in SESSIONS)
    whole = rows * LAYERS * 8  # as uint8
    for found in trained:
        read = found.channel_bytes + found.file_bytes
        assert 0.9 < read * parallel.shard_size / whole < 1.35


def assert_no_foreign_files(trained: Sequence[Trained], root: Path) -> None:
    names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
    assert len({found.node for found in trained}) == 2
    for found in trained:
        assert found.channel_bytes > 0
        assert found.file_bytes > 0
        assert found.foreign_units == ()
        _, opened = found.results[-1]
        assert opened == {names[found.node]}


def test_the_in_memory_path_gives_the_same_and_carries_the_values_through_ray(
    nodes: list[str],
) -> None:
    parallel = Parallel(data=2)
    with (
        rolled_out(nodes, None, data=2) as made,
        training(nodes, None, parallel, Look("/nowhere")) as trainers,
    ):
        trained = trainers.train(made)
        shards = members(made)
        for rank, found in zip(parallel.ranks(), trained, strict=True):
            assert merged([d for d, _ in found.results]) == expected(shards[rank.data], rank)
            assert found.channel_bytes == found.file_bytes == 0
        assert made.object_store_bytes > payload_bytes()
        assert abs(made.shards[0].tokens - made.shards[1].tokens) < 0.1 * made.shards[0].tokens


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "memory"])
def test_removed_samples_are_zeros_on_every_rank_and_go_with_the_checkpoint(
    nodes: list[str], running: cluster.StoreCluster, tmp_path: Path, stored: bool
) -> None:
    store_id = running.config.store_id if stored else None
    with (
        rolled_out(nodes, store_id, data=2, keep=keep_even) as made,
        training(nodes, store_id, Parallel(data=2), Weigh()) as trainers,
        running.store(SPECS) as store,
    ):
        found = [part for rank in trainers.train(made) for part in rank.results]
        weights = {name: weight for part in found for name, weight in part.items()}
        kept = {name for name, (tokens, zeros) in weights.items() if tokens and not zeros}
        assert set(weights) == set(SESSIONS)
        assert kept == {name for name in SESSIONS if int(name[1:]) % 2 == 0}
        assert all(weights[name] == (0, True) for name in set(SESSIONS) - kept)
        if stored:
            assert list(store.unreleased("train")) == []
            assert steps_in(tmp_path / "units") == 16 * len(SESSIONS)  # until it is saved
            assert trainers.checkpoint_saved(0) == 16 * len(SESSIONS)


def test_a_trainer_killed_before_release_trains_on_the_same_data_when_it_is_there_again(
    nodes: list[str], running: cluster.StoreCluster, tmp_path: Path
) -> None:
    store_id = running.config.store_id
    parallel = Parallel(tensor=2)
    with rolled_out(nodes, store_id, data=1) as made:
        once = DieOnce(tmp_path / "first")
        with (
            training(nodes[:1], store_id, Parallel(), once, restarts=0) as trainers,
            pytest.raises(ActorLost),
        ):
            trainers.train(made)
        assert steps_in(tmp_path / "units") == 16 * len(SESSIONS)
        again = DieOnce(tmp_path / "second")
        with training(nodes, store_id, parallel, again, restarts=1) as trainers:
            trained = trainers.train(made)  # Ray starts one of the two anew; the other one waits
            for rank, found in zip(parallel.ranks(), trained, strict=True):
                assert merged(found.results) == expected(SESSIONS, rank)
            assert trainers.checkpoint_saved(0) == 16 * len(SESSIONS)
    assert steps_in(tmp_path / "units") == 0


def test_a_rank_that_fails_is_told_at_once_and_nothing_is_released(
    nodes: list[str], running: cluster.StoreCluster, tmp_path: Path
) -> None:
    store_id, step = running.config.store_id, FailOnce(tmp_path / "failed")
    with rolled_out(nodes, store_id, data=1) as made, running.store(SPECS) as store:
        started = time.monotonic()
        with (
            training(nodes, store_id, Parallel(tensor=2), step) as trainers,
            pytest.raises(ValueOutOfRange, match="the loss is no number"),
        ):
            trainers.train(made)
        assert time.monotonic() - started < 150  # the other rank would wait for 600 s
        assert len(list(store.unreleased("train"))) == len(SESSIONS)


def test_a_session_that_fails_is_told_and_leaves_nothing_behind(
    nodes: list[str], running: cluster.StoreCluster, tmp_path: Path
) -> None:
    config = ProxyConfig(store_id=running.config.store_id, fields=SPECS)
    proxies = rollout.start_proxies(config, FailingAgent(), nodes[:1])
    with pytest.raises(RuntimeError, match="the engine is gone"):
        rollout.gather([proxies[0].rollout.remote("s1")])
    (passed,) = rollout.gather([proxies[0].passed.remote()])
    rollout.stop(proxies)
    assert passed.sent_bytes > 0
    assert steps_in(tmp_path / "units") == 0
    assert running.status()["open_sessions"] == 0


# ---------------------------------------------------------------- demo and example

MODEL = replace(
    TINY, layers=40, experts=8, topk=8, prompt_tokens=200, tool_tokens=100, new_tokens=2
)


@pytest.mark.slow
def test_the_demo_ends_bit_identical_and_tells_what_crossed_the_channel_and_ray(
    nodes: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from tq_fs.demo.cluster import RayDemo

    console = Console(file=io.StringIO(), width=100)
    scale = replace(MODEL, payload_bytes=8 * 2**20, budget_bytes=2**20)
    units = ClusterConfig(paths=(f"{tmp_path}/units/{{node}}",))
    config = StoreConfig(store_id=f"demo-{uuid.uuid4().hex[:8]}", cluster=units)
    code = RayDemo(scale, nodes, console, Parallel(pipeline=2)).run(config)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert code == 0, printed
    assert "bit-identical" in printed.strip().splitlines()[-1]
    over = re.search(r"read over the channel.*?([\d.]+) MiB", printed)
    assert over is not None
    assert float(over[1]) > 0
    assert re.search(r"another node.s unit opened.* 0 ", printed)
    shares = re.search(r"growth of Ray.*\(([\d.]+)%\).*\(([\d.]+)%\)", printed)
    assert shares is not None
    assert float(shares[1]) > 100
    assert 0 < float(shares[2]) < 1


def test_the_demo_says_what_is_not_as_promised() -> None:
    pytest.importorskip("transformers")
    from tq_fs.demo.cluster import Path as OnePath
    from tq_fs.demo.cluster import RayDemo

    def path(value: str) -> OnePath:
        rank = Trained(
            rank=0,
            node="n",
            segments=1,
            micro_batches=1,
            tensor_bytes=1,
            channel_bytes=0,
            file_bytes=9,
            foreign_units=("b-1",),
            results=({"s, rollout_log_probs": value},),
        )
        return OnePath(trained=(rank,), segments=1, deleted=1, ray_bytes=50, ray_by_node={})

    console = Console(file=io.StringIO(), width=200)
    demo = RayDemo(MODEL, ["n", "m"], console)
    assert demo._verdict(path("x"), path("y"), payload=1000, steps=2) == 1
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    for said in (
        "nothing was read from another node",
        "rank 0 opened files of another node's ('b-1',)",
        "Ray's object stores grew by 5.0% of the payload",
        "release deleted 1 of 2 Steps",
        "NOT identical: rank 0, s, rollout_log_probs",
    ):
        assert said in printed
    assert "bit-identical" not in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--address", "auto"], "--address: is for --ray"),
        (["--ray", "--store", "s3://b/p"], "--store: is not for --ray"),
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_example_runs_on_a_cluster_that_is_there(nodes: list[str]) -> None:
    address = ray.get_runtime_context().gcs_address
    example = Path(__file__).parent.parent / "examples" / "02_ray_cluster.py"
    command = [sys.executable, str(example), "--address", address]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "bit-identical" in done.stdout.strip().splitlines()[-1]
    assert "64 Steps deleted" in done.stdout
