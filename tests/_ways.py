"""Backends behind a gate that answers in the server's place, and a small store to try them with."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from dataclasses import replace as changed
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
)
from tq_fs import Store
from tq_fs.backends import FsspecBackend, ObjectBackend, ObstoreBackend, Retry
from tq_fs.bench.servers import S3Server

DRIVERS: dict[str, Any] = {"s3fs": FsspecBackend, "obstore": ObstoreBackend}
QUICK = Retry(deadline_s=60, first_s=0.001, most_s=0.01)
ONCE = Retry(deadline_s=0)


# ---------------------------------------------------------------- a server that says what it should

Answer = Callable[[Message], Message | None]


class Gate(FaultProxy):
    """A proxy that can be told, while it runs, what to answer in the server's place."""

    def __enter__(self) -> Gate:
        self.start()
        return self

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


@contextmanager
def gate_before(server: S3Server) -> Iterator[Gate]:
    """Give a gate that the environment leads clients to."""
    with Gate(server.endpoint) as gate, pytest.MonkeyPatch.context() as patch:
        for name, value in changed(server, endpoint=gate.endpoint).environment().items():
            patch.setenv(name, value)
        yield gate


@dataclass(frozen=True, slots=True)
class Way:
    """A backend in a bucket of its own behind a gate; connecting takes long, so tests share it."""

    driver: str
    bucket: str
    server: S3Server
    gate: Gate
    backend: ObjectBackend
    client: Any

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys below a prefix, as others see them."""
        return keys_below(self.client, self.bucket, prefix)

    def objects(self, prefix: str) -> dict[str, bytes]:
        """Return what lies below a prefix, as others see it."""
        get = self.client.get_object
        return {k: get(Bucket=self.bucket, Key=k)["Body"].read() for k in self.keys(prefix)}

    def put_object(self, key: str, data: bytes) -> None:
        """Put an object as somebody else."""
        self.client.put_object(Bucket=self.bucket, Key=key, Body=data)

    def delete_objects(self, prefix: str) -> int:
        """Delete what lies below a prefix as somebody else; return how many objects."""
        keys = self.keys(prefix)
        for key in keys:
            self.client.delete_object(Bucket=self.bucket, Key=key)
        return len(keys)


@contextmanager
def way_to(server: S3Server, driver: str) -> Iterator[Way]:
    bucket = f"shared-{uuid.uuid4().hex[:12]}"
    server.make_bucket(bucket)
    with (
        gate_before(server) as gate,
        client_of(server) as client,
        closing(DRIVERS[driver](f"s3://{bucket}/shared", retry=QUICK)) as backend,
    ):
        yield Way(driver, bucket, server, gate, backend, client)


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


@contextmanager
def client_of(server: S3Server) -> Iterator[Any]:
    """Give botocore's client, past everything that is tested here."""
    from botocore.config import Config
    from botocore.session import Session

    client = Session().create_client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        region_name=server.region,
        config=Config(s3={"addressing_style": "path"}),
    )
    with closing(client):
        yield client


def keys_below(client: Any, bucket: str, prefix: str = "") -> list[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [o["Key"] for page in pages for o in page.get("Contents", ())]


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


def ref_of(segments: list[tq_fs.Segment]) -> str:
    (segment,) = segments
    assert segment.ref is not None
    return segment.ref


def finalized(store: Store) -> dict[str, str]:
    """Return the references of Segments that are to be trained on, by session."""
    return {ref.split("/")[2]: ref for ref in store.unreleased("train")}
