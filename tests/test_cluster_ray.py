"""A store on several real raylets of this machine: actors that start, end and are found."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster as Raylets
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import tq_fs.cluster
from tests._clusters import readers_of, units_of
from tests._rollouts import (
    assert_batch,
    record,
    refs_of,
    run_child,
    short_rollout,
    specs,
    standard_fields,
)
from tests.test_docs import ROOT, commands
from tq_fs import ClusterConfig, StoreConfig
from tq_fs.cli import main
from tq_fs.cluster import StoreCluster
from tq_fs.cluster._actors import NAMESPACE, nodes
from tq_fs.cluster._node_unit import NodeUnit
from tq_fs.errors import InvalidConfig, StoreBusy, UnitLost, UnitsUnavailable
from tq_fs.keys import SegmentRef

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves its log files to the end
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SPECS = specs(standard_fields())


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    """Give a head called a and a second node called b; this process joins the head."""
    made = Raylets(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "node_name": "a"},
    )
    made.add_node(num_cpus=2, node_name="b")
    ray.init(address=made.address, namespace="tests", log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()  # type: ignore[no-untyped-call]


def config(root: Path, store_id: str, **settings: Any) -> StoreConfig:
    cluster = {
        "paths": (str(root / "{node}"),),
        "start_s": 30.0,
        "sweep_s": 0.0,
        **settings.pop("cluster", {}),
    }
    return StoreConfig(
        **{
            "store_id": store_id,
            "prepared_groups": 0,
            "retry_deadline_s": 30.0,
            "cluster": ClusterConfig(**cluster),
            **settings,
        }
    )


@pytest.fixture
def running(raylets: Raylets, tmp_path: Path, request: Any) -> Iterator[StoreCluster]:
    with tq_fs.cluster.start(config(tmp_path, request.node.name[:40])) as made:
        yield made


def actors() -> set[str]:
    names = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in names if actor["namespace"] == NAMESPACE}


def node_of(name: str) -> str:
    return next(str(n["NodeID"]) for n in nodes() if n["NodeName"] == name and n["Alive"])


def read_there(store_id: str, refs: list[str]) -> tuple[Any, int, list[str]]:
    """Hydrate in whatever process this runs; return also what came over the channel, and files."""
    with tq_fs.cluster.attach(store_id).store(SPECS) as store:
        batch = {k: [t.numpy() for t in v] for k, v in store.hydrate(refs).items()}
        return batch, units_of(store).received_bytes, sorted(readers_of(store).files)


class Reader:
    def read(self, store_id: str, refs: list[str]) -> tuple[Any, int, list[str]]:
        return read_there(store_id, refs)


@pytest.mark.parametrize("node", ["a", "b"])
@pytest.mark.parametrize("kind", ["task", "actor"])
def test_tasks_and_actors_of_any_node_find_the_store_and_read_it_bit_for_bit(
    running: StoreCluster, node: str, kind: str
) -> None:
    with running.store(SPECS) as store:
        recorded = [record(store, f"s{i}", i) for i in range(8)]
    refs = [ref for segments, _ in recorded for ref in refs_of(segments)]
    there = NodeAffinitySchedulingStrategy(node_of(node), soft=False)
    arguments = (running.config.store_id, refs)
    if kind == "task":
        found = ray.remote(read_there).options(scheduling_strategy=there).remote(*arguments)
    else:
        actor: Any = ray.remote(Reader).options(scheduling_strategy=there).remote()
        found = actor.read.remote(*arguments)
    batch, received, files = ray.get(found)
    assert_batch(batch, [w for _, want in recorded for w in want])
    homes = {u.name: u.node_name for u in running.layout().units}
    assert {homes[SegmentRef.parse(ref).incarnation.home] for ref in refs} == {"a", "b"}
    assert [homes[unit] for unit in files] == [node]  # none of the other node's
    assert received > 0


_PLAIN = """
import sys, ray, pickle
from tests.test_cluster_ray import read_there
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
batch, received, files = read_there(sys.argv[2], sys.argv[3:])
sys.stdout.buffer.write(pickle.dumps(batch))
"""


def test_a_plain_process_that_joins_finds_the_store(
    raylets: Raylets, running: StoreCluster
) -> None:
    import pickle

    with running.store(SPECS) as store:
        segments, want = record(store, "s")
    command = [sys.executable, "-c", _PLAIN, raylets.address, running.config.store_id]
    done = subprocess.run(
        [*command, *refs_of(segments)],
        check=True,
        stdout=subprocess.PIPE,
        timeout=120,
        cwd=Path(__file__).parent.parent,
    )
    assert_batch(pickle.loads(done.stdout), want)


def test_a_controller_that_is_killed_comes_back_and_goes_on(running: StoreCluster) -> None:
    with running.store(SPECS) as store:
        recorded = [record(store, f"s{i}", i) for i in range(4)]
        refs = [ref for segments, _ in recorded for ref in refs_of(segments)]
        session = store.session("open")
        rollout = short_rollout(standard_fields(), 7)
        rollout.record(session)
        before = running.status()
        os.kill(before["pid"], signal.SIGKILL)
        assert list(store.unreleased()) == refs
        after = running.status()
        assert after["pid"] != before["pid"]
        assert after["epoch"] > before["epoch"]
        segments = session.finalize()
        assert_batch(store.hydrate(segments), [e.slime(SPECS) for e in rollout.expected("lineage")])
        assert_batch(store.hydrate(refs), [w for _, want in recorded for w in want])
        assert store.release(refs) == 12


def test_a_unit_that_is_killed_comes_back_and_has_what_it_acknowledged(
    running: StoreCluster,
) -> None:
    with running.store(SPECS) as store:
        first = [record(store, f"s{i}", i) for i in range(4)]
        for unit in running.status()["units"]:
            os.kill(unit["pid"], signal.SIGKILL)
        second = [record(store, f"t{i}", i) for i in range(4)]  # waits for them
        recorded = first + second
        refs = [ref for segments, _ in recorded for ref in refs_of(segments)]
        assert_batch(store.hydrate(refs), [w for _, want in recorded for w in want])


def test_a_store_that_was_stopped_goes_on_when_it_is_started_again(
    raylets: Raylets, tmp_path: Path
) -> None:
    settings = config(tmp_path, "again")
    with tq_fs.cluster.start(settings) as made, made.store(SPECS) as store:
        segments, want = record(store, "s")
    assert not any("again" in name for name in actors())
    with tq_fs.cluster.start(settings) as made, made.store(SPECS) as store:
        assert list(store.unreleased()) == refs_of(segments)
        assert_batch(store.hydrate(segments), want)
        same = tq_fs.cluster.start(settings)  # attaches
        same.__exit__()
        assert_batch(store.hydrate(segments), want)
        with pytest.raises(InvalidConfig, match=r"other settings of \['checksum'\]"):
            tq_fs.cluster.start(config(tmp_path, "again", checksum=False))


def test_a_start_that_fails_says_why_and_leaves_nothing_running(
    raylets: Raylets, running: StoreCluster, tmp_path: Path
) -> None:
    before = actors()
    with pytest.raises(UnitsUnavailable, match="no node is called 'c'"):
        tq_fs.cluster.start(
            config(tmp_path / "x", "x", cluster={"nodes": ("a", "c"), "start_s": 3.0})
        )
    assert actors() == before
    with pytest.raises(UnitsUnavailable, match="did not answer"):
        tq_fs.cluster.start(config(tmp_path / "y", "y", cluster={"cpus": 1.5, "start_s": 5.0}))
    wait_until(lambda: actors() == before)
    with pytest.raises(UnitsUnavailable, match="no Controller of it runs"):
        tq_fs.cluster.attach("nobody")


def test_a_cluster_on_a_folder_that_another_one_has_is_refused(
    raylets: Raylets, tmp_path: Path
) -> None:
    before = actors()
    settings = config(tmp_path, "taken")
    other = {"node": "elsewhere", "node_name": "b", "address": "127.0.0.1"}
    with (
        NodeUnit(str(tmp_path / "b"), settings, None, **other),
        pytest.raises(StoreBusy, match=f"process {os.getpid()}"),
    ):
        tq_fs.cluster.start(settings)
    wait_until(lambda: actors() == before)
    tq_fs.cluster.start(settings).stop()


def wait_until(condition: Any, timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.1)


def test_the_command_line_starts_shows_drains_sweeps_and_stops(
    raylets: Raylets, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"store_id: cli\ncluster:\n  paths: ['{tmp_path}/{{node}}']\n  sweep_s: 0\n")
    assert main(["cluster", "start", str(file)]) == 0
    try:
        assert "live" in capsys.readouterr().out
        assert main(["cluster", "status", "cli", "--json", "-"]) == 0
        status = json.loads(capsys.readouterr().out)
        assert [u["node_name"] for u in status["units"]] == ["a", "b"]
        unit = status["units"][0]["name"]
        assert main(["cluster", "drain", "cli", unit]) == 0
        assert _state(tq_fs.cluster.attach("cli"), unit) == "draining"
        assert main(["cluster", "drain", "cli", unit, "--undo"]) == 0
        assert _state(tq_fs.cluster.attach("cli"), unit) == "live"
        assert main(["cluster", "drain", "cli", "nobody"]) == 1
        assert "[unit_lost]" in capsys.readouterr().err
        assert main(["cluster", "sweep", "cli"]) == 0
        os.kill(status["units"][1]["pid"], signal.SIGKILL)
        wait_until(lambda: main(["cluster", "status", "cli"]) == 1)
    finally:
        assert main(["cluster", "stop", "cli"]) == 0
    capsys.readouterr()
    assert main(["cluster", "status", "cli"]) == 1
    assert "[units_unavailable]" in capsys.readouterr().err


def test_the_commands_of_the_documentation_run(raylets: Raylets, tmp_path: Path) -> None:
    """In the order in which they make sense, with a folder and a unit of the test's own."""
    said = commands(cluster=True)
    order = ("start", "status", "drain", "sweep", "stop")
    words = sorted((shlex.split(c) for c in said), key=lambda w: order.index(w[2]))
    assert {w[2] for w in words} >= {"start", "status", "drain", "stop"}
    for command in words:
        if command[2] == "start":
            text = (ROOT / command[3]).read_text()
            command[3] = str(tmp_path / "config.yaml")
            (tmp_path / "config.yaml").write_text(
                text.replace("[/mnt/nvme/tq-fs]", f"['{tmp_path}/{{node}}']")
            )
        elif command[2] == "drain":
            command[4] = tq_fs.cluster.attach(command[3]).layout().units[0].name
        assert main(command[1:]) == 0, command


_LOGGING = """
import sys
from pathlib import Path
from tests.test_cluster_ray import config
from tq_fs.cluster._actors import UnitActor
from tq_fs.cluster._node_unit import NodeUnit

settings = config(Path(sys.argv[1]), "logged", cluster={"log_format": "json"})
UnitActor(sys.argv[1], settings, None)
here = {"node": "n", "node_name": "n", "address": "127.0.0.1"}
with NodeUnit(sys.argv[1], settings, None, **here) as unit:
    import socket
    host, port = unit.server.endpoints[1].removeprefix("tcp:").rsplit(":", 1)
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1" * 10)
        stranger.recv(1)
"""


def test_units_write_their_log_lines_as_json_where_that_is_wanted(tmp_path: Path) -> None:
    done = run_child(_LOGGING, tmp_path)
    assert done.returncode == 0, done.stderr
    line = json.loads(next(x for x in done.stderr.splitlines() if "closed a lane" in x))
    assert line["store"] == "logged"
    assert line["unit"].startswith("n-")
    assert line["level"] == "WARNING"


def test_a_node_that_joins_gets_a_unit_and_one_that_is_lost_is_reported(
    raylets: Raylets, running: StoreCluster
) -> None:
    with running.store(SPECS) as store:
        kept, want = record(store, "kept")
        node = raylets.add_node(num_cpus=1, node_name="c")
        try:
            wait_until(lambda: len(running.layout().units) == 3)
            name = next(u.name for u in running.layout().units if u.node_name == "c")
            lost: list[str] = []
            for i in range(100):
                refs = refs_of(record(store, f"s{i}", i)[0])
                if SegmentRef.parse(refs[0]).incarnation.home == name:
                    lost = refs
                    break
            assert lost
        finally:
            raylets.remove_node(node, allow_graceful=False)
        wait_until(lambda: _state(running, name) == "lost", 60.0)
        began = time.monotonic()
        with pytest.raises(UnitLost, match=name):
            store.hydrate(lost)
        assert time.monotonic() - began < 5.0
        assert_batch(store.hydrate(kept), want)
        record(store, "next")


def _state(running: StoreCluster, name: str) -> str:
    return next(u.state for u in running.layout().units if u.name == name)
