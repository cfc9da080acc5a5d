"""Our backend of TransferQueue in real processes: programs, restarts, and what goes wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transfer_queue", reason="TransferQueue is not installed")

import psutil
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf

import tq_fs.integrations.transfer_queue  # noqa: F401  # registers the backend
from tests._transfer_queue_lives import READY
from tests._transfer_queue_places import PLACES, Place, raylets, settings
from tq_fs.errors import InvalidConfig, TqFsError, UnitsUnavailable

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves its log files to the end
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "03_transfer_queue.py"
ALL = [pytest.param(p, marks=pytest.mark.s3) if p == "s3" else p for p in PLACES]


@pytest.fixture
def root(place: Place, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if place == "s3":
        return f"s3://{request.getfixturevalue('bucket')}/prefix"
    return f"{tmp_path}/values"


# ---------------------------------------------------------------- programs


def test_a_program_gets_the_same_from_both_backends() -> None:
    said = {}
    for backend in ("SimpleStorage", "TqFs"):
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), "--backend", backend],
            capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        said[backend] = done.stdout
    assert said["TqFs"] == said["SimpleStorage"]
    assert said["TqFs"].count("got driver-1") == 4  # by each of its processes


# ---------------------------------------------------------------- restarts


@contextmanager
def life(*arguments: str) -> Iterator[str]:
    """Run a life until it waits; at the end kill all its processes at once."""
    command = [sys.executable, "-m", "tests._transfer_queue_lives", *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            yield child.stdout.readline().strip()
        finally:
            killed = kill_all(child.pid)
    assert any("KeeperActor" in title for title in killed)


def kill_all(pid: int) -> set[str]:
    """Kill a process and all that it has started; return what those were."""
    parent = psutil.Process(pid)
    processes = [parent, *parent.children(recursive=True)]
    titles = {" ".join(p.cmdline()) for p in processes if p.status() != psutil.STATUS_ZOMBIE}
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=30)
    return titles


@pytest.mark.timeout(900)  # nine starts of Python, torch and Ray
@pytest.mark.parametrize("place", ALL)
def test_a_run_that_was_killed_goes_on_from_its_checkpoint(
    place: Place, root: str, tmp_path: Path
) -> None:
    arguments = (place, root, str(tmp_path / "checkpoint"))
    for which in ("first", "again", "again"):
        with life(which, *arguments) as said:
            assert said == READY, which


# ---------------------------------------------------------------- what goes wrong


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    with raylets("units") as address:
        ray.init(address=address, log_to_driver=False)
        yield
        ray.shutdown()


def start(backend: Mapping[str, Any] | None) -> None:
    own = {} if backend is None else {"TqFs": dict(backend)}
    tq.init(OmegaConf.create({"backend": {"storage_backend": "TqFs", **own}}))


Wrong = tuple[Mapping[str, Any] | None, type[TqFsError], str]
WRONG: dict[str, list[Wrong]] = {  # by what finds it
    "settings": [
        (None, InvalidConfig, "backend.TqFs: is missing"),
        ({"store_id": "x"}, InvalidConfig, "url: is missing; give a url"),
        ({"url": "file:///tmp/x", "colour": 1}, InvalidConfig, r"unknown keys \['colour'\]"),
        ({"url": "file:///tmp/x", "sweep_s": "often"}, InvalidConfig, "sweep_s: 'often' where"),
        (
            {"url": "s3://b/x", "tier": {"folder": "/tmp/x", "capacity_bytes": 10**9}},
            InvalidConfig,
            "tier: a tier is one process's.*give cluster.paths",
        ),
    ],
    "keeper": [
        ({"url": "gopher://x"}, InvalidConfig, "Protocol not known: gopher"),
        ({"url": "file:///proc/x"}, TqFsError, "/proc/x"),
    ],
    "units": [
        (
            {"cluster": {"paths": ["/tmp/x"], "nodes": ["c"], "start_s": 1.0}},
            UnitsUnavailable,
            "no node is called 'c'",
        ),
    ],
}


@pytest.mark.parametrize("finder", WRONG)
def test_wrong_configurations_are_told_and_the_next_one_works(
    two_nodes: None, finder: str, tmp_path: Path
) -> None:
    for backend, kind, message in WRONG[finder]:
        with pytest.raises(kind, match=message):
            start(backend)
    start(settings("local", str(tmp_path), "right"))
    try:
        tq.kv_put("key", "train", {"x": torch.arange(3)})
        assert tq.kv_batch_get(["key"], "train")["x"][0].tolist() == [0, 1, 2]
    finally:
        tq.close()
    assert ray.util.list_named_actors(all_namespaces=True) == []


class Elsewhere:
    """Gets a value in a process that has never heard of tq-fs."""

    def get(self) -> list[int]:
        tq.init()
        found: list[int] = tq.kv_batch_get(["key"], "train")["x"][0].tolist()
        return found


def test_a_folder_is_refused_to_other_nodes_which_reach_the_next_queue(
    two_nodes: None, tmp_path: Path
) -> None:
    elsewhere: Any = ray.remote(Elsewhere).options(num_cpus=2).remote()  # the first node has one
    start(settings("local", f"{tmp_path}/folder", "folder"))
    try:
        tq.kv_put("key", "train", {"x": torch.arange(3)})
        for _ in range(2):
            with pytest.raises(InvalidConfig, match=r"is a folder of node .* give cluster.paths"):
                ray.get(elsewhere.get.remote(), timeout=60)
        assert tq.kv_batch_get(["key"], "train")["x"][0].tolist() == [0, 1, 2]
    finally:
        tq.close()
    start(settings("units", f"{tmp_path}/units", "units"))
    try:
        tq.kv_put("key", "train", {"x": torch.arange(4)})
        assert ray.get(elsewhere.get.remote(), timeout=60) == [0, 1, 2, 3]
    finally:
        tq.close()
        ray.kill(elsewhere)
