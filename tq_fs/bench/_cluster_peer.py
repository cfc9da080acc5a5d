"""Putting the same Step into a unit of a cluster, and by ``kv_put`` into TransferQueue.

Both stores run on the same Ray, and this process puts, one Step after the other:

* **transfer_queue** is :func:`transfer_queue.kv_put` of one key with both fields, as its default
  configuration has it: SimpleStorage, two units, in memory, without encryption.
* **unix**, **tcp** and **tls** are :meth:`tq_fs.session.Session.record` with a unit of the own
  node, and of the other one. The ids are uint8 for everybody, so that nothing is left to narrow.
* **tcp, finalized** opens the session and finalizes it as well: the Segment can be resolved then,
  as a key of TransferQueue can once it is put.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version

import torch

from tq_fs.bench._cluster_place import HERE, THERE, Nodes, store_on
from tq_fs.bench._cluster_steps import LOGPROBS, ROUTED, SHAPE, finalize, record
from tq_fs.bench._data import Payload, as_encoded, make_payloads
from tq_fs.bench._timing import Variant
from tq_fs.errors import DependencyMissing
from tq_fs.session import Session
from tq_fs.store import Store
from tq_fs.trajectory import Segment

STEPS = 16
PEER = "transfer_queue"
WAYS = {"unix": (HERE, "none"), "tcp": (THERE, "none"), "tls": (THERE, "tls")}
FINALIZED = ", finalized"
_PARTITION = "bench"


@contextmanager
def puts(nodes: Nodes) -> Iterator[dict[str, Variant]]:
    """Give the variants of putting :data:`STEPS` Steps; each deletes what it put.

    Raises
    ------
    DependencyMissing
        TransferQueue is not installed.
    """
    payloads = make_payloads(SHAPE, 2)
    with ExitStack() as opened:
        variants = {PEER: opened.enter_context(_peer(payloads))}
        for way, (node, encryption) in WAYS.items():
            running = store_on(nodes, f"put-{way}", node, encryption=encryption)
            cluster = opened.enter_context(running)
            store = opened.enter_context(cluster.store(as_encoded(SHAPE)))
            variants[way] = _Recording(store, payloads).variant()
            if way == "tcp":
                variants[way + FINALIZED] = _Finalizing(store, payloads).variant()
        yield variants


def peer_version() -> str:
    """Return the version of TransferQueue that is installed."""
    return version("TransferQueue")


@contextmanager
def _peer(payloads: list[Payload]) -> Iterator[Variant]:
    try:
        import transfer_queue  # noqa: PLC0415  # optional
    except ImportError as error:
        raise DependencyMissing(
            "TransferQueue is not installed", remedy="pip install 'tq-fs[bench-peers]'"
        ) from error
    for name in list(logging.Logger.manager.loggerDict):
        if name.startswith("transfer_queue."):  # each has a level; on few cores each put warns
            logging.getLogger(name).setLevel(logging.ERROR)
    transfer_queue.init()
    numbers = itertools.count()
    fields = [
        {ROUTED: torch.from_numpy(p.narrow), LOGPROBS: torch.from_numpy(p.logprobs)}
        for p in payloads
    ]
    keys: list[str] = []

    def put() -> None:
        for i in range(STEPS):
            keys.append(str(next(numbers)))
            transfer_queue.kv_put(keys[-1], _PARTITION, fields[i % len(fields)])

    def clear() -> None:
        transfer_queue.kv_clear(keys, _PARTITION)
        keys.clear()

    try:
        yield Variant(put, after=clear)
    finally:
        transfer_queue.close()


class _Recording:
    """Records the Steps of a session that is open before, and is discarded afterwards."""

    def __init__(self, store: Store, payloads: list[Payload]) -> None:
        self._store = store
        self._payloads = payloads
        self._numbers = itertools.count()
        self._session: Session | None = None

    def variant(self) -> Variant:
        """Return it."""
        return Variant(self._run, self._open, self._discard)

    def _open(self) -> None:
        self._session = self._store.session(f"session-{next(self._numbers)}")

    def _run(self) -> None:
        assert self._session is not None
        record(self._session, self._payloads, STEPS, narrow=True)

    def _discard(self) -> None:
        assert self._session is not None
        self._session.discard()


class _Finalizing:
    """Opens a session, records its Steps and finalizes it; it is released afterwards."""

    def __init__(self, store: Store, payloads: list[Payload]) -> None:
        self._store = store
        self._payloads = payloads
        self._numbers = itertools.count()
        self._segment: Segment | None = None

    def variant(self) -> Variant:
        """Return it."""
        return Variant(self._run, after=self._release)

    def _run(self) -> None:
        session = self._store.session(f"whole-{next(self._numbers)}")
        record(session, self._payloads, STEPS, narrow=True)
        self._segment = finalize(session)

    def _release(self) -> None:
        assert self._segment is not None
        self._store.release([self._segment])
