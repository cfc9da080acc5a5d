"""The keeper of values without Ray: taking a store, being killed, and how others reach it."""

from __future__ import annotations

import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests._values import keeper_of, spawn_child
from tq_fs.errors import (
    InvalidConfig,
    StorageUnreachable,
    StoreBusy,
    StoreFenced,
    ValueMissing,
    WrongStore,
)
from tq_fs.keeper import Connection, ValueConfig, open_keeper, open_values
from tq_fs.keeper._open import Spot

pytestmark = pytest.mark.usefixtures("private_tmp")

HERE = Spot("n0", "node-0", "127.0.0.1")
ELSEWHERE = "n1"
QUICK = {"sweep_s": 0, "retry_deadline_s": 20}


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> ValueConfig:
    if request.param == "folder":
        return folder_config(tmp_path)
    return bucket_config(request.getfixturevalue("bucket"))


def folder_config(folder: Path, **settings: Any) -> ValueConfig:
    url = (folder / "store").as_uri()
    return ValueConfig.of({"url": url, "store_id": "run", **QUICK, **settings})


def bucket_config(bucket: str, **settings: Any) -> ValueConfig:
    url = f"s3://{bucket}/p"
    return ValueConfig.of({"url": url, "store_id": "run", **QUICK, **settings})


def columns(version: int) -> dict[str, list[Any]]:
    return {"small": [[version, 1]], "large": [torch.full((20_000,), version)]}


def holds(values: Any, version: int, sample: int = 0) -> bool:
    found = values.get([("train", sample)], ["small", "large"])
    want = columns(version)
    return found["small"] == want["small"] and torch.equal(found["large"][0], want["large"][0])


# ---------------------------------------------------------------- taking a store


def test_values_go_through_the_keeper_and_back(config: ValueConfig) -> None:
    with ExitStack() as opened:
        connection = open_keeper(config, "r1", HERE, again=False, opened=opened)
        again: Connection = pickle.loads(pickle.dumps(connection))
        values = open_values(again, "n0", opened=opened)
        assert values.put("train", [0], columns(1)) == 1
        assert holds(values, 1)
        values.clear([("train", 0, None)])
        with pytest.raises(ValueMissing):
            holds(values, 1)
        assert values.calls.totals()["groups"] == 0


def test_a_second_keeper_of_a_folder_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    config = folder_config(tmp_path)
    with ExitStack() as first:
        connection = open_keeper(config, "r1", HERE, again=False, opened=first)
        for again in (False, True):
            with ExitStack() as second, pytest.raises(StoreBusy):
                open_keeper(config, "r2", HERE, again=again, opened=second)
        values = open_values(connection, "n0", opened=first)
        values.put("train", [0], columns(1))
        assert holds(values, 1)
    with ExitStack() as third:
        open_keeper(config, "r2", HERE, again=False, opened=third)


@pytest.mark.s3
def test_a_keeper_whose_bucket_another_run_has_taken_deletes_nothing_more(
    bucket: str, private_tmp: Path
) -> None:
    config = bucket_config(bucket)
    with ExitStack() as first, ExitStack() as second:
        open_keeper(config, "r1", HERE, again=False, opened=first)
        other = replace(config, index_folder=str(private_tmp / "other"))
        open_keeper(other, "r2", HERE, again=False, opened=second)
        with pytest.raises(StoreFenced):
            keeper_of(first).sweep()
        keeper_of(second).sweep()


def test_a_folder_of_another_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store/run").mkdir(parents=True)
    (tmp_path / "store/run/mine.txt").write_text("not yours")
    with ExitStack() as opened, pytest.raises(WrongStore):
        open_keeper(folder_config(tmp_path), "r1", HERE, again=False, opened=opened)
    assert [path.name for path in (tmp_path / "store/run").iterdir()] == ["mine.txt"]


def test_indexes_of_earlier_runs_are_removed(tmp_path: Path) -> None:
    config = folder_config(tmp_path)
    for run in ("r1", "r1.sqlite", "r"):
        with ExitStack() as opened:
            open_keeper(config, run, HERE, again=False, opened=opened)
            names = {path.name for path in (tmp_path / "store/run/.values").iterdir()}
            assert {name.partition(".sqlite")[0] for name in names} == {run.partition(".")[0]}


@pytest.mark.s3
def test_stores_of_one_name_in_two_buckets_do_not_share_their_indexes(
    s3_server: Any, private_tmp: Path
) -> None:
    for name in ("one-bucket", "another-bucket"):
        s3_server.make_bucket(name)
    with ExitStack() as opened:
        first = bucket_config("one-bucket")
        connection = open_keeper(first, "r1", HERE, again=False, opened=opened)
        values = open_values(connection, "n0", opened=opened)
        values.put("train", [0], columns(1))
        with ExitStack() as other:
            open_keeper(bucket_config("another-bucket"), "r2", HERE, again=False, opened=other)
        assert len(list(private_tmp.rglob("r1.sqlite"))) == 1
        assert holds(values, 1)


# ---------------------------------------------------------------- who reaches it


def test_a_process_of_another_node_cannot_use_a_folder(tmp_path: Path) -> None:
    with ExitStack() as opened:
        connection = open_keeper(folder_config(tmp_path), "r1", HERE, again=False, opened=opened)
        assert connection.remote == ""
        with pytest.raises(InvalidConfig, match=r"is a folder of node n0.*units on every node"):
            open_values(connection, ELSEWHERE, opened=opened)


@pytest.mark.s3
def test_a_process_of_another_node_uses_a_bucket_encrypted(bucket: str, private_tmp: Path) -> None:
    with ExitStack() as opened:
        connection = open_keeper(bucket_config(bucket), "r1", HERE, again=False, opened=opened)
        assert connection.remote.startswith("tcp:127.0.0.1:")
        values = open_values(connection, ELSEWHERE, opened=opened)
        values.put("train", [0], columns(1))
        assert holds(values, 1)
        store = replace(connection.config.store, retry_deadline_s=0.2, request_timeout_s=2)
        stranger = replace(
            connection, identity=None, config=replace(connection.config, store=store)
        )
        with pytest.raises(StorageUnreachable):
            open_values(stranger, ELSEWHERE, opened=opened).calls.now()
        key_files = list(private_tmp.rglob("*-identity"))
        assert [path.stat().st_mode & 0o077 for path in key_files] == [0]


# ---------------------------------------------------------------- a keeper that is killed

KEEPER = """
import pickle, sys
from contextlib import ExitStack
from tq_fs.keeper import open_keeper
from tq_fs.keeper._open import Spot

config, again = pickle.load(open(sys.argv[1], "rb")), sys.argv[2] == "True"
with ExitStack() as opened:
    spot = Spot("n0", "node-0", "127.0.0.1")
    connection = open_keeper(config, "r1", spot, again=again, opened=opened)
    with open(sys.argv[3], "wb") as file:
        pickle.dump(connection, file)
    print("ready", flush=True)
    sys.stdin.readline()
"""


class Process:
    """A keeper in a process of its own."""

    def __init__(self, folder: Path, config: ValueConfig) -> None:
        self.folder = folder
        (folder / "config").write_bytes(pickle.dumps(config))
        self.connection = self.start(again=False)

    def start(self, *, again: bool) -> Connection:
        where = self.folder / "connection"
        self.process: subprocess.Popen[str] = spawn_child(
            KEEPER, self.folder / "config", again, where
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line != "ready\n":
            raise AssertionError(self.process.communicate()[1])
        found: Connection = pickle.loads(where.read_bytes())
        return found

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def process(config: ValueConfig, tmp_path: Path) -> Iterator[Process]:
    found = Process(tmp_path, config)
    yield found
    found.kill()


def test_calls_wait_for_a_keeper_that_was_killed_and_nothing_is_lost(
    process: Process, config: ValueConfig
) -> None:
    """By the socket of its node, and by the port that other nodes know."""
    nodes = ["n0", "n0"] if config.kind == "folder" else ["n0", ELSEWHERE]
    done: list[list[int]] = [[], []]
    stop = threading.Event()
    failed: list[BaseException] = []

    def work(which: int, node: str) -> None:
        try:
            with ExitStack() as opened:
                values = open_values(process.connection, node, opened=opened)
                for version in range(100_000):
                    if stop.is_set():
                        return
                    values.put("train", [which], columns(version))
                    assert holds(values, version, which)
                    done[which].append(version)
        except BaseException as error:
            failed.append(error)

    def go_on() -> None:
        before = [len(versions) for versions in done]
        until(lambda: failed or all(len(v) > n + 3 for v, n in zip(done, before, strict=True)))

    threads = [
        threading.Thread(target=work, args=item, daemon=True) for item in enumerate(nodes)
    ]  # which would wait for long where this fails
    for thread in threads:
        thread.start()
    for _ in range(3):
        go_on()
        process.kill()
        time.sleep(0.2)
        assert process.start(again=True) == process.connection
    go_on()
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed, failed
    with ExitStack() as opened:
        values = open_values(process.connection, "n0", opened=opened)
        for which, versions in enumerate(done):
            assert versions == list(range(len(versions)))
            assert holds(values, versions[-1], which)


def test_what_a_client_prepared_outlives_the_keeper(process: Process, config: ValueConfig) -> None:
    with ExitStack() as opened:
        values = open_values(process.connection, "n0", opened=opened)
        prepared = values.prepare("train", [0], columns(1))
        process.kill()
        process.start(again=True)
        values.commit("train", [prepared])
        assert holds(values, 1)


def test_a_keeper_that_does_not_come_back_is_said_to_be_away(tmp_path: Path) -> None:
    config = folder_config(tmp_path, retry_deadline_s=0.3)
    process = Process(tmp_path, config)
    with ExitStack() as opened:
        values = open_values(process.connection, "n0", opened=opened)
        values.put("train", [0], columns(1))
        process.kill()
        with pytest.raises(StorageUnreachable, match="unit keeper"):
            values.get([("train", 0)], ["small"])
        with pytest.raises(StorageUnreachable):
            values.put("train", [0], columns(2))


def test_checkpoints_are_saved_and_loaded_through_the_keeper(
    process: Process, tmp_path: Path
) -> None:
    with ExitStack() as opened:
        values = open_values(process.connection, "n0", opened=opened)
        values.put("train", [0], columns(1))
        name = values.save(tmp_path / "saved")
        values.put("train", [0], columns(2))
        process.kill()
        process.start(again=True)
        assert holds(values, 2)
        assert values.load(tmp_path / "saved") == name
        assert holds(values, 1)


# ---------------------------------------------------------------- settings


def test_settings_of_values_and_of_their_store_lie_side_by_side() -> None:
    config = ValueConfig.of(
        {"url": "file:///data", "store_id": "s", "checkpoints": 3, "allow_pickle": True}
    )
    assert (config.checkpoints, config.allow_pickle, config.sweep_s) == (3, True, 600.0)
    assert (config.store.url, config.store.store_id, config.kind) == ("file:///data", "s", "folder")
    assert ValueConfig.of({"url": "s3://b/p"}).kind == "objects"
    paths = {"paths": ["/nvme"]}
    assert ValueConfig.of({"cluster": paths}).kind == "cluster"
    assert ValueConfig.of({"cluster": paths, "url": "s3://b/p"}).kind == "cluster"


def test_a_settings_file_is_overridden_by_what_is_given_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "store.yaml"
    path.write_text("url: file:///data\nstore_id: s\nwriter_threads: 3\n")
    config = ValueConfig.of({"config": str(path), "store_id": "mine", "checkpoints": 1})
    assert (config.store.url, config.store.store_id) == ("file:///data", "mine")
    assert (config.store.writer_threads, config.checkpoints) == (3, 1)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"url": "file:///d", "colour": 1}, "colour"),
    ({}, "url: is missing; give a url"),
    ({"cluster": {"encryption": "none"}}, "url: is missing"),
    ({"url": "s3://b/p", "tier": {"folder": "/x"}}, "tier: a tier is one process's"),
    ({"url": "file:///d", "store": {}}, "store: is no setting"),
    ({"url": "file:///d", "allow_pickle": "yes"}, "allow_pickle: 'yes'"),
    ({"url": "file:///d", "checkpoints": 0}, "checkpoints: 0 where a number >= 1"),
    ({"url": "file:///d", "checkpoints": 1.5}, "checkpoints: 1.5"),
    ({"url": "file:///d", "checkpoints": True}, "checkpoints: True"),
    ({"url": "file:///d", "sweep_s": -1}, "sweep_s: -1 where a number >= 0"),
    ({"url": "file:///d", "sweep_s": "soon"}, "sweep_s: 'soon'"),
    ({"url": "file:///d", "sweep_s": True}, "sweep_s: True"),
    ({"url": "file:///d", "sweep_s": float("nan")}, "sweep_s: nan"),
    ({"url": "file:///d", "index_folder": "here"}, "index_folder: 'here' is no absolute folder"),
    ({"config": "/none.yaml"}, "/none.yaml"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=range(len(REFUSED)))
def test_settings_that_make_no_sense_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        ValueConfig.of(given)
    assert words in str(caught.value)


# ---------------------------------------------------------------- helpers


def until(is_so: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "did not come about"
        time.sleep(0.01)
