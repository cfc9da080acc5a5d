"""Reading on a unit's own node: its files, as the embedded store reads its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from tq_fs.bench._cluster_place import HERE, Nodes, store_on
from tq_fs.bench._cluster_steps import LOGPROBS, ROUTED, SHAPE, finalize, record
from tq_fs.bench._data import Payload, declared, make_payloads
from tq_fs.bench._read import Destination
from tq_fs.bench._timing import Variant
from tq_fs.errors import TqFsError
from tq_fs.reader import Read
from tq_fs.store import Store, open_store

_STEPS = 64  # of the Segment
_TIMES = 4  # it is read in a run
STEPS = _STEPS * _TIMES
EMBEDDED, OWN_NODE = "embedded", "own node"
TWO = ", two threads"  # for both: what a local disk has, and a cluster has not
_STORE = "read"


@contextmanager
def own_node_reads(nodes: Nodes) -> Iterator[dict[str, Variant]]:
    """Give the variants of reading :data:`STEPS` Steps, resolving included."""
    payloads = make_payloads(SHAPE, 2)
    fields = declared(SHAPE)
    with store_on(nodes, _STORE, HERE) as cluster, ExitStack() as opened:
        stores = {
            EMBEDDED: open_store(f"file://{nodes.folder}/embedded", fields=fields, cache_bytes=0),
            OWN_NODE: cluster.store(fields, cache_bytes=0),
            OWN_NODE + TWO: cluster.store(fields, cache_bytes=0, reader_threads=2),
        }
        for store in stores.values():
            opened.enter_context(store)
        out = Destination(SHAPE, _STEPS)
        refs = {name: _record(stores[name], payloads) for name in (EMBEDDED, OWN_NODE)}
        refs[OWN_NODE + TWO] = refs[OWN_NODE]
        found = {name: _Reading(store, refs[name], out) for name, store in stores.items()}
        for reading in found.values():
            reading.check(payloads)
        yield {name: Variant(reading.run) for name, reading in found.items()}


def _record(store: Store, payloads: Sequence[Payload]) -> str:
    session = store.session("bench")
    record(session, payloads, _STEPS, narrow=False)
    return str(finalize(session).ref)


class _Reading:
    def __init__(self, store: Store, ref: str, out: Destination) -> None:
        assert store.reader is not None
        self.store = store
        self._reader = store.reader
        self._ref = ref
        self._out = out

    def run(self) -> None:
        """Read so many times as a run has."""
        for _ in range(_TIMES):
            self.read()

    def read(self) -> None:
        """Read both fields whole."""
        (found,) = self._reader.resolve((self._ref,))
        reads = [
            Read(found, name, ((0, len(out)),), out)
            for name, out in ((ROUTED, self._out.ids), (LOGPROBS, self._out.logprobs))
        ]
        self._reader.fetch(reads)

    def check(self, payloads: Sequence[Payload]) -> None:
        """Read, and compare that with what was written."""
        out = self._out
        out.ids[...] = -7
        out.logprobs[...] = -7
        self.read()
        chosen: list[Any] = [payloads[i % len(payloads)] for i in range(_STEPS)]
        ids = np.concatenate([p.ids for p in chosen])[1:]
        logprobs = np.concatenate([p.logprobs for p in chosen])
        if not (np.array_equal(out.ids, ids) and np.array_equal(out.logprobs, logprobs)):
            raise TqFsError("what was read is not what was written", subject="bench")
