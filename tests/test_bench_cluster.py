"""``tq-fs bench cluster``: its figures and targets, and what it measures them with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("psutil")

from tq_fs.bench import channel, cluster
from tq_fs.bench._memory import ResidentMemory
from tq_fs.bench._targets import at_least, at_most, targets_table
from tq_fs.bench._timing import Timings
from tq_fs.errors import DependencyMissing

MiB = 1024**2
SMALL = ["--repeats", "1", "--steps", "30500", "--bytes", "300000000", "--sessions", "2"]
OF_PEER = {
    *("put.ms_transfer_queue", "put.vs_transfer_queue"),
    *(f"put.vs_transfer_queue{ending}" for ending in ("_unix", "_tls", "_finalized")),
    *(f"put.ms_recorded{ending}" for ending in ("", "_unix", "_tls", "_finalized")),
}
MAY_BE_NONE = {"unit.rss_over_budget_mib", "unit.rss_rise_mib", "unit.held_mib"}
NEEDS_RAY = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves its log files to the end
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def with_ray(test: Any) -> Any:
    for mark in NEEDS_RAY:
        test = mark(test)
    return test


@pytest.mark.timeout(900)  # a dozen processes start, each of which imports torch
@with_ray
def test_it_prints_one_json_object_with_every_figure_and_leaves_nothing(tmp_path: Path) -> None:
    command = ["bench", "cluster", *SMALL, "--root", str(tmp_path / "place"), "--json", "-"]
    done = subprocess.run(
        [sys.executable, "-m", "tq_fs.cli", *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    targets, left_out, settings = (found.pop(n) for n in ("targets", "left_out", "settings"))
    has_peer = find_spec("transfer_queue") is not None
    assert set(left_out) == (set() if has_peer else {"put.vs_transfer_queue"})
    assert set(found) >= (OF_PEER if has_peer else set())
    assert set(targets) == set(cluster.TARGETS) - set(left_out)
    assert set(targets) <= set(found)
    assert [n for n, v in found.items() if v <= 0 and n not in MAY_BE_NONE] == []
    assert found["unit.bytes"] >= 290_000_000
    assert found["object_store.payload_bytes"] == 2 * (8191 * 320 * 4 + 8192 * 4)
    assert (settings["steps"], settings["sessions"]) == (30500, 2)
    assert all(name in done.stderr for name in targets)
    assert list((tmp_path / "place").iterdir()) == []


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Any]:
    from tq_fs.bench._cluster_place import two_nodes

    with two_nodes(tmp_path) as found:
        yield found


@with_ray
def test_the_object_stores_are_seen_to_grow_by_what_is_put_into_them(nodes: Any) -> None:
    import ray

    before = nodes.object_store_bytes()
    assert set(before) == {"here", "there"}
    assert max(before.values()) < 100_000
    kept = ray.put(np.ones(8 * MiB, np.uint8))
    grown = nodes.object_store_bytes()
    assert 8 * MiB <= grown["here"] - before["here"] < 9 * MiB
    assert grown["there"] == before["there"]
    del kept  # the file keeps its size: a peak cannot be missed
    time.sleep(0.5)
    assert nodes.object_store_bytes() == grown


@with_ray
def test_what_is_read_on_a_units_node_comes_from_its_files(nodes: Any) -> None:
    from tests._clusters import readers_of, units_of
    from tq_fs.bench import _cluster_read as reads

    with reads.own_node_reads(nodes) as variants:
        assert list(variants) == ["embedded", "own node", "own node, two threads"]
        own: Any = variants["own node"].run
        store = own.__self__.store
        before = units_of(store).received_bytes
        own()
        assert units_of(store).received_bytes == before
        assert len(readers_of(store).files) == 1


def test_without_transfer_queue_its_figure_is_left_out_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setitem(sys.modules, "transfer_queue", None)
    bench = cluster.ClusterBench(repeats=1)
    nodes: Any = SimpleNamespace()
    console = Console(quiet=True)
    timings, version, left_out = cluster._measure_puts(nodes, bench, console)
    assert (timings, version) == (None, "")
    assert "pip install 'tq-fs[bench-peers]'" in left_out["put.vs_transfer_queue"]


def test_it_says_what_is_not_installed_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None if name == "ray" else name)
    with pytest.raises(DependencyMissing, match="needs ray"):
        cluster.measure(cluster.ClusterBench(), Console(quiet=True))


def timings(**seconds: float) -> Timings:
    return Timings({name.replace("__", ", "): [value] * 3 for name, value in seconds.items()})


def test_figures_of_the_channel_are_named_by_verb_size_and_way() -> None:
    ways = timings(raw=1e-3, local=1.1e-3, unix=2e-3, tcp=3e-3, tls=4e-3)
    sizes = dict.fromkeys(channel.SIZES, ways)
    found = cluster._of_channel(channel.Measured("", put=sizes, get=sizes))
    assert found["put.x_raw"] == found["put_8mb.x_raw"] == found["get_8mb.x_raw"] == 3.0
    assert found["get_0_66mb.x_raw_unix"] == found["put.x_raw_unix"] == 2.0
    assert found["get_8mb.x_raw_curve"] == found["put.x_raw_tls"] == 4.0
    assert found["get_0_66mb.ms_raw"] == 1.0
    assert "get_8mb.x_raw_tls" not in found


def test_vs_is_how_often_the_peers_time_holds_ours() -> None:
    found = cluster._of_puts(timings(transfer_queue=6e-3, tcp=1e-3, unix=2e-3))
    assert found["put.vs_transfer_queue"] == 6.0
    assert found["put.vs_transfer_queue_unix"] == 3.0
    assert found["put.ms_transfer_queue"] == 6.0


def test_targets_are_met_at_their_bound() -> None:
    assert at_least(4).met(4)
    assert not at_least(4).met(3.99)
    assert at_most(2.5).met(2.5)
    assert not at_most(2.5).met(2.51)
    assert [str(t) for t in (at_least(100_000), at_most(0.01))] == ["≥ 100,000", "≤ 0.01"]
    assert str(at_most(128 * MiB, in_bytes=True)) == "≤ 128 MiB"


def test_the_table_says_which_targets_are_missed(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"put.x_raw": 2.6, "local.x_embedded": 1.0, "something.else": 1.0}
    Console(width=100).print(targets_table(cluster.TARGETS, found))
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[1]: line for line in lines if "≤" in line}
    assert set(rows) == {"put.x_raw", "local.x_embedded"}
    assert "missed" in rows["put.x_raw"]
    assert "met" in rows["local.x_embedded"]


def test_the_rise_is_that_of_the_peak_from_one_half_to_the_other() -> None:
    memory = ResidentMemory(os.getpid())
    assert memory.rise() == 0
    memory._samples = [0, 90, 10, 80, 90, 90, 20, 85]
    assert memory.rise() == 0
    memory._samples = [0, 90, 10, 80, 90, 97, 20, 85]
    assert memory.rise() == 7


def test_memory_that_a_process_takes_is_seen_at_its_peak() -> None:
    with ResidentMemory(os.getpid()) as memory:
        assert memory.growth == 0
        memory.start()
        taken = np.ones(64 * MiB, np.uint8)
        time.sleep(0.1)
        del taken
        time.sleep(0.05)
        memory.stop()
    assert 60 * MiB < memory.growth < 80 * MiB
