"""What users and servers get wrong: a typed error or a retry, nothing lost, nothing half-written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace as changed
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import numpy as np
import pytest

import tq_fs
from tests._fault_proxy import (
    Fault,
    FaultProxy,
    Link,
    Message,
    Operation,
    Schedule,
    Verdict,
    error_answer,
)
from tq_fs import Store
from tq_fs.backends import FsspecBackend, ObjectBackend, ObstoreBackend, Retry
from tq_fs.bench.servers import S3Server, juicefs_binary, minio_server
from tq_fs.errors import (
    BucketMissing,
    ClockSkewed,
    CredentialsExpired,
    CredentialsMissing,
    InvalidConfig,
    ObjectMissing,
    StepMissing,
    StorageDenied,
    StorageFailed,
    StorageRefused,
    StorageUnreachable,
    TqFsError,
    WrongRegion,
    WrongStore,
)
from tq_fs.storage_options import StorageOptions

DRIVERS: dict[str, Any] = {"s3fs": FsspecBackend, "obstore": ObstoreBackend}
QUICK = Retry(deadline_s=60, first_s=0.001, most_s=0.01)
ONCE = Retry(deadline_s=0)

pytestmark = pytest.mark.s3


# ---------------------------------------------------------------- a server that says what it should

Answer = Callable[[Message], Message | None]


class Gate(FaultProxy):
    """A proxy that can be told, while it runs, what to answer in the server's place."""

    def __init__(self, server: str, **settings: Any) -> None:
        super().__init__(server, **settings)
        self.answer: Answer = self.forward
        self.asked: list[Message] = []

    @staticmethod
    def forward(request: Message) -> Message | None:
        return None

    def fail(self, operation: Operation, *faults: Fault) -> None:
        """Hit the next requests of an operation with these faults, and forward all else."""
        left = list(faults)

        def decide(asked: Operation, n: int) -> Verdict:
            return Verdict(left.pop(0)) if asked == operation and left else Verdict()

        self.schedule(Schedule(decide))

    def schedule(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def reset(self) -> None:
        """Forward everything, and forget what was asked."""
        self.answer = self.forward
        self.schedule(Schedule())
        self.asked = []
        with self._lock:
            self._seen = []

    def counted(self, *operations: Operation) -> int:
        """Return how many requests came since the last reset, of these operations or of all."""
        return sum(not operations or seen.operation in operations for seen in self.seen())

    def _answer(self, link: Link, request: Message, fault: Fault | None) -> Message | None:
        self.asked.append(request)
        return self.answer(request) or super()._answer(link, request, fault)


@pytest.fixture
def gate(s3_server: S3Server) -> Iterator[Gate]:
    with Gate(s3_server.endpoint) as gate:
        yield gate


def open_backend(
    driver: str, bucket: str, *, retry: Retry = QUICK, timeout_s: float = 30, **options: Any
) -> ObjectBackend:
    url = f"s3://{bucket}/store"
    made = DRIVERS[driver](url, StorageOptions(options), retry=retry, timeout_s=timeout_s)
    assert isinstance(made, ObjectBackend)
    return made


@contextmanager
def backend_at(endpoint: str, driver: str, bucket: str, **settings: Any) -> Iterator[ObjectBackend]:
    with closing(open_backend(driver, bucket, endpoint_url=endpoint, **settings)) as backend:
        yield backend


def small_group() -> dict[str, list[bytes]]:
    return {"a/c.0": [b"a" * 100], "b/c.0": [b"b" * 10, b"c"], "zarr.json": [b"{}"]}


OPERATIONS: dict[str, Callable[[ObjectBackend], Any]] = {
    "put": lambda b: b.put("k", b"value"),
    "get": lambda b: b.get("k"),
    "range": lambda b: b.open("k").readinto([bytearray(3)], 1),
    "head": lambda b: b._is_object("k"),  # alone only within others
    "list": lambda b: list(b.walk("")),
    "names": lambda b: list(b.list("")),
    "delete": lambda b: b._remove(["k"]),
}


def client_of(server: S3Server) -> Any:
    """Return botocore's client, past everything that is tested here."""
    from botocore.config import Config
    from botocore.session import Session

    return Session().create_client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        region_name=server.region,
        config=Config(s3={"addressing_style": "path"}),
    )


def objects(server: S3Server, bucket: str) -> dict[str, bytes]:
    """Return all that a bucket holds."""
    with closing(client_of(server)) as client:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        keys = [o["Key"] for page in pages for o in page.get("Contents", ())]
        return {k: client.get_object(Bucket=bucket, Key=k)["Body"].read() for k in keys}


def put_object(server: S3Server, bucket: str, key: str, data: bytes = b"foreign") -> None:
    with closing(client_of(server)) as client:
        client.put_object(Bucket=bucket, Key=key, Body=data)


def delete_objects(server: S3Server, bucket: str, part: str) -> int:
    """Delete all objects whose key holds `part`; return how many."""
    with closing(client_of(server)) as client:
        keys = [key for key in objects(server, bucket) if part in key]
        for key in keys:
            client.delete_object(Bucket=bucket, Key=key)
        return len(keys)


# ---------------------------------------------------------------- a small store

FIELDS = [tq_fs.logprobs(), tq_fs.routed_experts(layers=2, topk=2, experts=16)]


def open_small(url: str, driver: str, **settings: Any) -> Store:
    """Open a store with short patience, for Steps that `record` makes."""
    settings = {"retry_deadline_s": 30, "writer_threads": 2, "reader_threads": 2, **settings}
    return tq_fs.open_store(url, fields=FIELDS, driver=driver, **settings)


def logprobs_of(name: str, rows: int) -> Any:
    seed = np.frombuffer(name.encode().ljust(8)[:8], np.uint64)
    return np.random.default_rng(seed).random(rows, np.float32)


def record(store: Store, name: str) -> list[tq_fs.Segment]:
    """Record and finalize a session of two Steps."""
    session = store.session(name)
    values, experts = logprobs_of(name, 3), np.arange(24, dtype=np.int32).reshape(6, 2, 2) % 16
    first = session.create(
        context=[1, 2, 3], response=[4, 5], logprobs=values[:2], routed_experts=experts[:4]
    )
    session.append(
        first.index, context=[6], response=[7], logprobs=values[2:], routed_experts=experts[4:]
    )
    return list(session.finalize(consumers=["train"]))


def is_whole(store: Store, name: str, items: list[Any]) -> bool:
    """Say whether a session that `record` made reads as it was recorded."""
    found = store.hydrate(items)
    (logprobs,), (experts,) = found["rollout_log_probs"], found["rollout_routed_experts"]
    values = logprobs_of(name, 3)
    return (
        logprobs.tolist() == [values[0], values[1], 0.0, values[2]]
        and experts.flatten().tolist() == (np.arange(24) % 16).tolist()
    )


def finalized(store: Store) -> dict[str, str]:
    """Return the references of Segments that are to be trained on, by session."""
    return {ref.split("/")[2]: ref for ref in store.unreleased("train")}


# ---------------------------------------------------------------- bucket, region, endpoint


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("operation", ["put", "get", "range", "list", "names", "delete"])
def test_a_missing_bucket_is_named_at_once(
    gate: Gate, driver: str, operation: str
) -> None:
    with backend_at(gate.endpoint, driver, "no-such-bucket") as backend:
        with pytest.raises(BucketMissing, match="create the bucket") as raised:
            OPERATIONS[operation](backend)
        assert "no-such-bucket" in raised.value.subject
        assert gate.counted() == 1


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_store_in_a_missing_bucket_is_not_opened(s3_server: S3Server, driver: str) -> None:
    for read_only in (False, True):
        with pytest.raises(BucketMissing, match="correct the store's URL"):
            open_small("s3://no-such-bucket/runs", driver, read_only=read_only)
