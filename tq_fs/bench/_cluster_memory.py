"""Memory of a unit while many Steps pass through it.

The unit is the Ray actor. Writers are actors of both nodes, so that half of the Steps come over a
socket and half over TLS. Each has three threads that record Steps of 31 to 65 MiB, which together
exceed the budget, and one with Steps of 0.66 MB; sessions are finalized and released, which deletes
their Steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import ray

import tq_fs.cluster
from tq_fs.bench._cluster_place import HERE, THERE, Nodes, store_on
from tq_fs.bench._cluster_steps import SHAPE, finalize, record
from tq_fs.bench._data import Payload, as_encoded, make_payloads
from tq_fs.bench._memory import ResidentMemory
from tq_fs.cluster import StoreCluster
from tq_fs.store import Store

MiB = 1024**2
BUDGET_BYTES = 512 * MiB
LARGE_TOKENS = (100_000, 210_000)  # 31 to 65 MiB
_WRITERS = 4
_LARGE_THREADS = 3  # of a writer; another one records small Steps
_SMALL_STEPS = 8  # of a session; one of large Steps has one
_STORE = "memory"
_LOOK_S = 0.25


class UnitMemory(NamedTuple):
    """What passed, and the memory that took.

    Attributes
    ----------
    nbytes
        Stored bytes of all Steps.
    seconds
        How long it took.
    budget_bytes
        Of the unit.
    held_bytes
        Most of it that was seen in use.
    before_bytes
        Resident memory before the first Step.
    growth_bytes
        Most resident memory over that.
    rise_bytes
        By how much the peak of the second half was above that of the first.
    """

    nbytes: int
    seconds: float
    budget_bytes: int
    held_bytes: int
    before_bytes: int
    growth_bytes: int
    rise_bytes: int

    @property
    def over_budget_bytes(self) -> int:
        """Growth beyond the budget; negative where it stayed below."""
        return self.growth_bytes - self.budget_bytes


def measure_memory(nodes: Nodes, nbytes: int) -> UnitMemory:
    """Let Steps of so many bytes pass through a unit."""
    running = store_on(nodes, _STORE, HERE, encryption="tls", budget_bytes=BUDGET_BYTES)
    with running as cluster:
        pid = cluster.status()["units"][0]["pid"]
        writers: list[Any] = [
            ray.remote(_Writer).options(num_cpus=1, scheduling_strategy=nodes.on(node)).remote()
            for node in (HERE, THERE) * (_WRITERS // 2)
        ]
        ray.get([writer.ready.remote() for writer in writers])
        with ResidentMemory(pid) as memory:
            memory.start()
            start = time.perf_counter()
            pending = [writer.write.remote(nbytes // _WRITERS) for writer in writers]
            held = _most_held(cluster, pending)
            seconds = time.perf_counter() - start
            memory.stop()
            passed = sum(ray.get(pending))
        ray.get([writer.close.remote() for writer in writers])
        for writer in writers:
            ray.kill(writer)
    return UnitMemory(
        nbytes=passed,
        seconds=seconds,
        budget_bytes=BUDGET_BYTES,
        held_bytes=held,
        before_bytes=memory.before,
        growth_bytes=memory.growth,
        rise_bytes=memory.rise(),
    )


def _most_held(cluster: StoreCluster, pending: Sequence[Any]) -> int:
    """Wait for all writers; return the most bytes that the unit said it held."""
    most, left = 0, list(pending)
    while left:
        _, left = ray.wait(left, num_returns=len(left), timeout=_LOOK_S)
        cluster.layout()
        most = max(most, cluster.status()["units"][0]["held_bytes"])
    return most


class _Writer:
    """Records sessions in threads of its own until enough bytes have passed."""

    def __init__(self) -> None:
        self._name = ray.get_runtime_context().get_actor_id()
        self._store: Store = tq_fs.cluster.attach(_STORE).store(as_encoded(SHAPE))
        self._large = _Step.of(LARGE_TOKENS[1])
        self._small = _Step.of(SHAPE.tokens)
        self._lock = threading.Lock()
        self._left = 0
        self._passed = 0
        self._sessions = 0

    def ready(self) -> None:
        """Return once it is there."""

    def write(self, nbytes: int) -> int:
        """Record, and return how many bytes that were in the end."""
        self._left = nbytes
        with ThreadPoolExecutor(_LARGE_THREADS + 1) as pool:
            pending = [pool.submit(self._record_large, i) for i in range(_LARGE_THREADS)]
            pending.append(pool.submit(self._record_small))
            for future in pending:
                future.result()
        return self._passed

    def _record_large(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        while self._session(self._large.first(int(random.integers(*LARGE_TOKENS))), 1):
            pass

    def _record_small(self) -> None:
        while self._session(self._small, _SMALL_STEPS):
            pass

    def _session(self, step: _Step, steps: int) -> bool:
        """Record, finalize and release a session, unless enough has passed."""
        name = self._next(step.nbytes * steps)
        if name is None:
            return False
        session = self._store.session(name)
        record(session, [step.payload], steps, narrow=True)
        self._store.release([finalize(session)])
        return True

    def _next(self, nbytes: int) -> str | None:
        """Take a share of what is left; return a name for its session, None at the end."""
        with self._lock:
            if self._left <= 0:
                return None
            self._left -= nbytes
            self._passed += nbytes
            self._sessions += 1
            return f"{self._name}-{self._sessions}"

    def close(self) -> None:
        """Close its store."""
        self._store.close()


class _Step(NamedTuple):
    """A Step that is recorded again and again."""

    payload: Payload

    @property
    def nbytes(self) -> int:
        """Its stored bytes."""
        return self.payload.narrow.nbytes + self.payload.logprobs.nbytes

    def first(self, tokens: int) -> _Step:
        """Return its first tokens."""
        return _Step(Payload(*(array[:tokens] for array in self.payload)))

    @classmethod
    def of(cls, tokens: int) -> _Step:
        """Make one whose rows repeat those of a small one: drawing a large one takes long."""
        (small,) = make_payloads(SHAPE, 1)
        rows = np.arange(tokens) % SHAPE.tokens
        return cls(Payload(small.ids[:0], small.narrow[rows], small.logprobs[rows]))
