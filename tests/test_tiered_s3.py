"""TieredBackend before a real S3 server, with outages; and how much memory uploads take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests._fault_proxy import FaultProxy, Schedule, Verdict
from tests._rollouts import run_child
from tests._tiers import GROUP_BYTES, POLICIES, crash, group, held, step, until
from tq_fs.backends import FsspecBackend, LocalBackend, NodeCache, ObstoreBackend, Retry
from tq_fs.backends._tiered import TieredBackend
from tq_fs.bench.servers import S3Server
from tq_fs.errors import StorageFailed

DRIVERS: dict[str, Any] = {"s3fs": FsspecBackend, "obstore": ObstoreBackend}
IMPATIENT = Retry(deadline_s=0)

pytestmark = pytest.mark.s3


class Node:
    """A node's disk before a bucket."""

    def __init__(self, folder: Path, back: Any) -> None:
        self.back = back
        self._folder = folder
        self._fronts: list[LocalBackend] = []

    def open(self, policy: str = "write-back", **settings: Any) -> TieredBackend:
        front = LocalBackend(self._folder / "front", ahead=0)
        self._fronts.append(front)
        cache = NodeCache(self._folder / "cache", 2**20)
        settings = {"pause_s": (0.05, 0.2), **settings}
        return TieredBackend(front, self.back, policy=policy, cache=cache, **settings)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *exc: object) -> None:
        for front in self._fronts:
            front.close()


def publish(tier: TieredBackend, start: int, stop: int) -> list[str]:
    return [tier.publish(step(i), group(i), fresh=True) for i in range(start, stop)]


@contextmanager
def behind(proxy: FaultProxy, bucket: str, driver: str, retry: Retry) -> Iterator[Any]:
    """Give a backend that reaches its server through the proxy."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            patch.setenv(name, proxy.endpoint)
        backend = DRIVERS[driver](f"s3://{bucket}/store", retry=retry)
        yield backend
        backend.close()


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_life_over_s3(tmp_path: Path, bucket: str, driver: str, policy: str) -> None:
    """Published, uploaded, evicted, promoted, deleted and started again."""
    capacity = 6 * GROUP_BYTES
    with (
        closing(DRIVERS[driver](f"s3://{bucket}/store")) as back,
        Node(tmp_path, back) as node,
    ):
        tier = node.open(policy, capacity_bytes=capacity)
        places = publish(tier, 0, 20)
        tier.settle("steps/train/s")
        assert all(held(tier, place, group(i)) for i, place in enumerate(places))
        assert all(held(back, place, group(i)) for i, place in enumerate(places))
        assert tier.stats().evicted > 0
        assert tier.stats().promoted > 0
        assert tier.publish(step(3), group(3)) == places[3]
        assert tier.delete(step(3))
        tier.close()
        tier = node.open(policy, capacity_bytes=capacity)
        assert tier.recover() == 0
        assert list(tier.list("steps/train/s/i")) == [f"{i:06d}" for i in range(20) if i != 3]
        assert tier.delete("steps")
        assert not any(tier.walk("steps"))
        tier.close()


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_outage_holds_up_nobody_but_those_who_settle(
    tmp_path: Path, bucket: str, s3_server: S3Server, driver: str
) -> None:
    with (
        FaultProxy(s3_server.endpoint) as proxy,
        behind(proxy, bucket, driver, IMPATIENT) as back,
        Node(tmp_path, back) as node,
    ):
        tier = node.open()
        places = publish(tier, 0, 1)
        tier.settle("")
        proxy.stop()
        places += publish(tier, 1, 5)
        assert all(held(tier, place, group(i)) for i, place in enumerate(places))
        with pytest.raises(StorageFailed):
            tier.settle("steps/train/s")
        proxy.start()
        until(lambda: tier.stats().queued_groups == 0)
        assert all(held(back, place, group(i)) for i, place in enumerate(places))

        proxy.stop()
        places += publish(tier, 5, 8)
        with pytest.raises(StorageFailed, match="3 Steps"):
            tier.close()
        proxy.start()
        tier = node.open()
        assert tier.recover() == 3
        tier.settle("")
        assert all(held(back, place, group(i)) for i, place in enumerate(places))
        tier.close()


@pytest.mark.parametrize("driver", DRIVERS)
def test_uploads_get_through_a_server_that_throttles_fails_and_loses_answers(
    tmp_path: Path, bucket: str, s3_server: S3Server, driver: str
) -> None:
    uploads: Any = ("put", "commit", "get", "range", "list")
    rates: Any = {"throttle-503": 0.1, "error-500": 0.1, "reset": 0.1, "lost-ack": 0.1}
    patient = Retry(deadline_s=20, first_s=0.01, most_s=0.05)
    with (
        FaultProxy(s3_server.endpoint, Schedule.seeded(1, rates, operations=uploads)) as proxy,
        behind(proxy, bucket, driver, patient) as back,
        Node(tmp_path, back) as node,
    ):
        tier = node.open(capacity_bytes=6 * GROUP_BYTES)
        places = publish(tier, 0, 20)
        tier.settle("")
        assert all(held(tier, place, group(i)) for i, place in enumerate(places))
        assert sum(seen.fault is not None for seen in proxy.seen()) > 5
        tier.delete("steps/train")
        assert not any(back.walk("steps"))
        tier.close()


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_commit_whose_answer_was_lost_is_found_at_the_start(
    tmp_path: Path, bucket: str, s3_server: S3Server, driver: str
) -> None:
    # s3fs repeats a request whose connection was reset, once.
    schedule = Schedule(lambda what, n: Verdict("lost-ack" if what == "commit" and n < 3 else None))
    with (
        FaultProxy(s3_server.endpoint, schedule) as proxy,
        behind(proxy, bucket, driver, IMPATIENT) as back,
        Node(tmp_path, back) as node,
    ):
        tier = node.open(pause_s=(600.0, 600.0))
        (place,) = publish(tier, 0, 1)
        until(lambda: tier.stats().upload_failures)
        crash(tier)
        tier = node.open()
        assert tier.recover() == 0
        assert tier.publish(step(0), group(0)) == place
        tier.close()


MEMORY = """
import sys
import numpy as np
from tq_fs.backends import FsspecBackend, LocalBackend, ObstoreBackend
from tq_fs.backends._tiered import TieredBackend

folder, url, budget = sys.argv[1:]
MiB = 2**20

def resident(name):
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith(name)]
    return int(line.split()[1]) * 1024

kind = ObstoreBackend if url.startswith("s3") else FsspecBackend
tier = TieredBackend(
    LocalBackend(folder, ahead=0), kind(url), upload_threads=4,
    upload_memory_bytes=int(budget), queue_bytes=2**40,
)
data = np.random.default_rng(0).integers(0, 256, 16 * MiB, np.uint8)
for i in range(32):
    data[:4] = i
    tier.publish(f"steps/t/s/i/{i:06d}", {"a/c": [data], "zarr.json": [b"{}"]}, fresh=True)
    if i == 0:
        tier.settle("")
        open("/proc/self/clear_refs", "w").write("5")
        before = resident("VmRSS")
queued = tier.stats().queued_bytes
tier.close()
print(queued, resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["obstore", "fsspec"])
def test_memory_is_bounded_however_much_is_queued(
    tmp_path: Path, bucket: str, s3_server: S3Server, driver: str
) -> None:
    """512 MiB are published; fsspec joins what it sends, and the allocator keeps some of that."""
    budget = 32 * 2**20
    url = f"s3://{bucket}" if driver == "obstore" else f"file://{tmp_path}/store"
    done = run_child(MEMORY, tmp_path / "front", url, budget)
    assert done.returncode == 0, done.stderr
    _, grown = map(int, done.stdout.split())
    assert grown < (budget + 24 * 2**20 if driver == "obstore" else 6 * budget)
