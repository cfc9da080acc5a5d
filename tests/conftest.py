"""What tests share: the S3 server of those marked `s3`, moto's, or MinIO's with
``--s3-server=minio``; settings of Hypothesis; logging that is put back.
"""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests._ways import DRIVERS, Way, way_to
from tq_fs.bench.servers import S3Server
from tq_fs.bench.servers import s3_server as start_server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--s3-server", choices=("moto", "minio"), default="moto")
    parser.addoption("--fault-seed", type=int, help="run this one fault schedule only")
    parser.addoption("--fault-schedules", type=int, help="run the first so many fault schedules")


# How long an example takes says more of what else the machine does than of the code. All runs try
# the same examples, so that a change is judged by itself: --hypothesis-profile=explore tries more.
hypothesis.settings.register_profile("tq-fs", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("tq-fs")


@pytest.fixture(scope="session")
def s3_server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    """Give a server, with the environment that leads clients to it."""
    with (
        start_server(request.config.getoption("--s3-server")) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    """Give the name of a bucket of the test's own."""
    name = f"b{uuid.uuid4().hex[:12]}"
    s3_server.make_bucket(name)
    return name


@pytest.fixture
def private_tmp(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Give a folder for temporary files of the test's own: keepers have their sockets there."""
    tmp_path_factory.getbasetemp()  # which is made where it is asked for first
    with tempfile.TemporaryDirectory(prefix="tq") as folder:  # sockets' paths are short
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


@pytest.fixture(scope="module", params=DRIVERS)
def shared_way(request: pytest.FixtureRequest, s3_server: S3Server) -> Iterator[Way]:
    """Give a backend of each driver to a module: connecting takes long."""
    with way_to(s3_server, request.param) as way:
        yield way


@pytest.fixture
def way(shared_way: Way) -> Iterator[Way]:
    """Give the shared backend, with its gate open; what was asked before is forgotten."""
    shared_way.gate.reset()
    yield shared_way
    shared_way.gate.reset()


@pytest.fixture
def untouched_logs() -> Iterator[None]:
    """Put the process's logging back."""
    root, ours = logging.getLogger(), logging.getLogger("tq_fs")
    before = list(root.handlers), root.level, ours.level
    yield
    root.handlers[:], level, our_level = before
    root.setLevel(level)
    ours.setLevel(our_level)
