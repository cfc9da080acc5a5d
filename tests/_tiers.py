"""What tests of tiers share: an object store that obeys the test, tiers over it, and groups."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tq_fs.backends import Backend, LocalBackend, ObjectBackend, Retry
from tq_fs.backends._client import Page
from tq_fs.backends._fsspec import FsspecClient
from tq_fs.backends._tiered import TieredBackend
from tq_fs.errors import TqFsError
from tq_fs.storage_options import StorageOptions

POLICIES = ("write-through", "write-back")
KiB = 1024
Members = dict[str, list[bytes]]
GROUP_BYTES = 24 * KiB  # what a group of 8 KiB takes of a disk


class Client:
    """An object store in memory that tells what it was asked, and fails or waits where told to."""

    def __init__(self) -> None:
        self._inner = FsspecClient(f"memory://{uuid.uuid4().hex}", StorageOptions())
        self.asked: list[tuple[str, str]] = []
        self.failure: TqFsError | None = None
        self.refuses: Callable[[str, str], bool] = lambda operation, key: True
        self.closed_for: Callable[[str, str], bool] = lambda operation, key: False
        self.held = 0
        self._gate = threading.Condition()
        self._store = threading.Lock()  # fsspec's memory cannot be listed while it changes

    def hold(self, which: Callable[[str, str], bool] = lambda operation, key: True) -> None:
        """Let requests wait from now on."""
        self.closed_for = which

    def let_go(self) -> None:
        """Let the requests through."""
        with self._gate:
            self.closed_for = lambda operation, key: False
            self._gate.notify_all()

    def keys(self, operation: str) -> list[str]:
        """Return the keys that were asked for by an operation, in order."""
        return [key for kind, key in self.asked if kind == operation]

    def put(self, key: str, buffers: Sequence[Any]) -> None:
        self._pass("put", key)
        with self._store:
            self._inner.put(key, buffers)

    def read(self, key: str, offset: int, nbytes: int) -> Any:
        self._pass("read", key)
        with self._store:
            return self._inner.read(key, offset, nbytes)

    def get(self, key: str) -> Any:
        self._pass("get", key)
        with self._store:
            return self._inner.get(key)

    def size(self, key: str) -> int:
        self._pass("size", key)
        with self._store:
            return self._inner.size(key)

    def modified_ns(self, key: str) -> int:
        self._pass("modified", key)
        with self._store:
            return self._inner.modified_ns(key)

    def pages(self, prefix: str, *, deep: bool, after: str) -> Iterator[Page]:
        self._pass("list", prefix)
        with self._store:
            pages = list(self._inner.pages(prefix, deep=deep, after=after))
        yield from pages

    def delete(self, keys: list[str]) -> None:
        self._pass("delete", keys[0])
        with self._store:
            self._inner.delete(keys)

    def clear(self) -> None:
        """Forget everything: fsspec's memory is one for the whole process, and slow when full."""
        for page in self._inner.pages("", deep=True, after=""):
            self._inner.delete([key for key, _ in page.objects])

    def renew(self) -> None:
        self._inner.renew()

    def close(self) -> None:
        self._inner.close()

    def _pass(self, operation: str, key: str) -> None:
        with self._gate:
            self.asked.append((operation, key))
            self.held += 1
            done = self._gate.wait_for(lambda: not self.closed_for(operation, key), timeout=30)
            self.held -= 1
        assert done, "nobody let go"
        if self.failure is not None and self.refuses(operation, key):
            raise type(self.failure)(self.failure.problem, subject=key)


class Tiers:
    """Makes tiers on one folder and one store, and closes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = Client()
        self._opened = ExitStack()
        self.back = ObjectBackend("memory://store", "", self.client, retry=Retry(deadline_s=0))

    def open(self, policy: str = "write-back", **settings: Any) -> TieredBackend:
        """Return a tier; the one before it is to be closed or crashed first."""
        front = LocalBackend(settings.pop("front", self.folder / "front"), ahead=0)
        self._opened.callback(front.close)
        pause_s = settings.pop("pause_s", (0.01, 0.05))
        tier = TieredBackend(front, self.back, policy=policy, pause_s=pause_s, **settings)
        self._opened.callback(crash, tier)
        return tier

    def close(self) -> None:
        """Stop everything, whatever state it is in."""
        self.client.failure = None
        self.client.let_go()
        self._opened.close()
        self.client.clear()

    def uploaded(self) -> set[str]:
        """Return the places of the groups that the store has whole, by their commits."""
        keys = {key for key, _ in self.back.walk("")}
        return {key.rpartition("/")[0] for key in keys if key.endswith("/zarr.json")}


def crash(tier: TieredBackend) -> None:
    """Stop a tier's threads and finish nothing."""
    if tier._writer is not None:
        tier._writer.queue.stop()
        tier._writer.front.close()


def step(index: int, session: str = "s") -> str:
    """Return a Step's prefix."""
    return f"steps/train/{session}/i/{index:06d}"


def group(index: int, size: int = 8 * KiB) -> Members:
    """Return the members of a group that is like no other."""
    return {"data/c.0": [index.to_bytes(4, "big") * (size // 4)], "zarr.json": [b"%d" % index]}


def content(members: Members) -> dict[str, bytes]:
    return {name: b"".join(buffers) for name, buffers in members.items()}


def held(backend: Backend, place: str, members: Members) -> bool:
    """Tell whether a backend gives a group's members back, bit for bit."""
    return all(backend.get(f"{place}/{n}") == data for n, data in content(members).items())


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)
