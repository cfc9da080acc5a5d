"""Backends over object stores keep the promises that all backends keep, and some of their own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tq_fs.backends import Backend, FsspecBackend, ObstoreBackend
from tq_fs.bench.servers import S3Server
from tq_fs.testing import BackendSuite

DRIVERS: dict[str, Any] = {"s3fs": FsspecBackend, "obstore": ObstoreBackend}


@pytest.mark.s3
@pytest.mark.parametrize("driver", DRIVERS)
class TestS3(BackendSuite):
    @pytest.fixture
    def backend(self, bucket: str, driver: str) -> Iterator[Backend]:
        backend = DRIVERS[driver](f"s3://{bucket}/some/prefix")
        yield backend
        backend.close()

    def test_a_value_is_replaced_at_once(  # type: ignore[override]
        self, backend: Backend, s3_server: S3Server
    ) -> None:
        try:
            super().test_a_value_is_replaced_at_once(backend)
        except AssertionError:
            if s3_server.kind != "minio":
                raise
            pytest.xfail("the gateway opens a replaced object after it has taken its size")


class Files(dict[str, Any]):
    """What fsspec keeps in memory, for several threads.

    Its own is a plain dictionary: ``tuple(store.items())`` fails when a thread adds something.
    """

    def items(self) -> Any:
        while True:
            try:
                return list(super().items())
            except RuntimeError:
                continue


class TestMemory(BackendSuite):
    @pytest.fixture
    def backend(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
        monkeypatch.setattr(MemoryFileSystem, "store", Files())
        backend = FsspecBackend(f"memory://{uuid.uuid4().hex}/root")
        yield backend
        backend.close()


class TestFiles(BackendSuite):
    @pytest.fixture
    def backend(self, tmp_path: Any) -> Iterator[Backend]:
        backend = FsspecBackend(f"file://{tmp_path}/root")
        yield backend
        backend.close()
