"""The benchmark of object stores: its figures, its checks, and that it leaves nothing behind."""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest
from rich.console import Console

pytest.importorskip("obstore")
pytest.importorskip("psutil")
pytest.importorskip("s3fs")

from tq_fs.backends import ObstoreBackend
from tq_fs.bench import _s3_load, _s3_ways, s3
from tq_fs.bench._s3_cost import measure_load
from tq_fs.bench._s3_load import Destination
from tq_fs.bench._s3_place import Place, measuring_bucket
from tq_fs.bench._s3_ways import HTTP, UNSIGNED, WAYS, WrongBytes, ways
from tq_fs.bench._s3_write_back import RecorderFailed, measure_write_back, steps_in
from tq_fs.bench._targets import targets_table
from tq_fs.bench.servers import S3Server
from tq_fs.cli import main
from tq_fs.errors import BucketMissing, StorageFailed
from tq_fs.storage_options import StorageOptions

pytestmark = pytest.mark.s3

KEYS = {
    f"{load}{driver}{verb}.{figure}"
    for load in ("", "step.", "large.")
    for driver in ("", "s3fs.")
    for verb in ("put", "get")
    for figure in ("x_http_client", "vs_s3fs", "cpu_ms", "cpu_vs_s3fs")
}
MEMORY = {
    f"write_back.{name}"
    for name in ("bytes", "budget_bytes", "inflight_bytes", "growth_bytes", "over_budget_bytes")
}
TINY = ["--repeats", "1", "--objects", "2"]
NO_MEMORY = ["--write-back-bytes", "0"]


@pytest.fixture
def place(bucket: str) -> Iterator[Place]:
    with measuring_bucket(f"s3://{bucket}/some", "auto") as place:
        yield place


def left_in(bucket: str) -> list[tuple[str, int]]:
    backend = ObstoreBackend(f"s3://{bucket}")
    try:
        return list(backend.walk(""))
    finally:
        backend.close()


def test_it_prints_one_flat_json_object_and_leaves_nothing_in_the_bucket(
    bucket: str, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"s3://{bucket}/some/prefix"
    code = main(["bench", "s3", "--url", url, *TINY, "--write-back-bytes", "1", "--json", "-"])
    out, err = capfd.readouterr()
    document: dict[str, Any] = json.loads(out)
    figures = {k: v for k, v in document.items() if not k.startswith("settings.")}
    assert code == 0
    assert set(figures) >= KEYS | MEMORY
    assert all(math.isfinite(value) for value in figures.values())
    assert all(figures[key] > 0 for key in KEYS)
    assert {k for k in figures if "unsigned." in k} == {
        k.replace("put", "unsigned.put") for k in KEYS if "put" in k and "s3fs.put" not in k
    }
    assert "Targets" in err
    assert left_in(bucket) == []


def test_it_starts_a_server_of_its_own_and_speaks_to_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody answers there
    with measuring_bucket(None, "moto") as place:
        assert "moto server" in place.kind
        cost = measure_load(place, _s3_load.small_objects(1), repeats=1, progress=lambda: None)
        assert set(cost["put"].wall.seconds) == set(WAYS)
        assert set(cost["get"].cpu.seconds) == {*WAYS} - {UNSIGNED}
        backend = place.backend("obstore")
        assert list(backend.list("")) == ["probe"]
        backend.close()


def test_every_way_gives_back_what_was_written(place: Place) -> None:
    for load in (_s3_load.small_objects(3), _s3_load.steps(2)):
        destination = Destination(load)
        with ways(place, load, destination) as found:
            assert set(found) == set(WAYS)
            for way in found.values():
                way.put(load.groups)
                way.get(load.groups)
                way.check(destination)


@pytest.mark.parametrize("name", WAYS)
def test_wrong_bytes_are_noticed(name: str, place: Place) -> None:
    load = _s3_load.steps(2)
    destination = Destination(load)
    other = [g._replace(members={n: [g.content(n)[::-1]] for n in g.members}) for g in load.groups]
    with ways(place, load._replace(groups=other), destination) as found:
        found[name].put(other)
        found[name].get(other)
    with ways(place, load, destination) as found:
        if name == _s3_ways.S3FS:
            found[name].get(load.groups)
        with pytest.raises(WrongBytes):
            found[name].check(destination)


def test_what_http_client_is_refused_is_an_error(place: Place) -> None:
    load = _s3_load.small_objects(1)
    with (
        ways(place, load, Destination(load)) as found,
        pytest.raises(StorageFailed, match="answered 404"),
    ):
        found[HTTP].get(load.groups)


class Listener(BaseHTTPRequestHandler):
    """Answers every PUT, and keeps what it says of its payload."""

    heard: ClassVar[list[str]] = []

    def do_PUT(self) -> None:
        self.heard.append(self.headers["x-amz-content-sha256"])
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("ETag", '"0"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def test_over_plain_http_payloads_are_signed_unless_told_otherwise(s3_server: S3Server) -> None:
    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        options = {
            "endpoint_url": f"http://127.0.0.1:{server.server_port}",
            "key": "env:AWS_ACCESS_KEY_ID",
            "secret": "env:AWS_SECRET_ACCESS_KEY",
        }
        for given in ({}, {"unsigned_payload": False}, {"unsigned_payload": True}):
            backend = ObstoreBackend("s3://bucket/x", StorageOptions({**options, **given}))
            copy = pickle.loads(pickle.dumps(backend))
            copy.put("key", b"data")
            copy.close()
        server.shutdown()
        thread.join()
    signed = hashlib.sha256(b"data").hexdigest()
    assert Listener.heard == [signed, signed, "UNSIGNED-PAYLOAD"]


def test_a_recorder_that_fails_tells_why(place: Place) -> None:
    lost = Place(url="s3://no-such-bucket/x", kind="", options=StorageOptions(), environment={})
    with pytest.raises(RecorderFailed, match="BucketMissing"):
        measure_write_back(lost, 1, lambda steps: None)


def test_memory_is_measured_over_all_steps(place: Place) -> None:
    seen: list[int] = []
    found = measure_write_back(place, 3 * 10**6, seen.append)
    assert sum(seen) == steps_in(3 * 10**6) == 2
    assert found.nbytes >= 3 * 10**6
    assert found.inflight_bytes > found.nbytes
    assert found.over_budget_bytes == found.growth_bytes - found.budget_bytes


def test_a_target_is_met_or_missed_and_both_are_shown() -> None:
    assert s3.TARGETS["put.x_http_client"].met(0.9)
    assert not s3.TARGETS["put.x_http_client"].met(0.89)
    assert s3.TARGETS["put.cpu_vs_s3fs"].met(0.25)
    assert not s3.TARGETS["put.cpu_vs_s3fs"].met(0.26)
    console = Console(file=io.StringIO(), width=100)
    console.print(targets_table(s3.TARGETS, {"put.vs_s3fs": 1.5, "get.vs_s3fs": 1.5}))
    assert isinstance(console.file, io.StringIO)
    assert "missed" in console.file.getvalue()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--url", "file:///somewhere"], 2),
        (["--url", "s3://"], 2),
        (["--url", "s3://no-such-bucket/x"], 1),
    ],
)
def test_a_place_that_cannot_be_used_is_an_error_with_its_code(
    arguments: list[str], code: int, s3_server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "s3", *arguments, *TINY, *NO_MEMORY]) == code
    assert capsys.readouterr().err.startswith("tq-fs: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--objects", "0"],
        ["--write-back-bytes", "-1"],
        ["--server", "other"],
        ["--server", "moto", "--url", "s3://bucket/x"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "s3", *arguments])
    assert exit_.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_bucket_that_is_not_there_is_told_at_once(s3_server: S3Server) -> None:
    with (
        pytest.raises(BucketMissing),
        measuring_bucket("s3://no-such-bucket/x", "auto"),
    ):
        pytest.fail("it was given")
