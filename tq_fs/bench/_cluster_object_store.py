"""How much of the rollouts' large fields passes through Ray's object store.

Rollouts are tasks on both nodes: each records one session and returns its Segment. Training is an
actor on each node, which is handed half of the Segments and reads their fields. What travels of a
Segment are its reference and its resident fields: tokens, loss mask, versions.

The payload is what training reads, int32 ids and float32 logprobs: without the store it would
travel in the Segments. All that the object stores ever took counts, from Ray's start on: of the
tasks, the actors and the store's own calls as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import ray

import tq_fs.cluster
from tq_fs.bench._cluster_place import HERE, THERE, Nodes, store_on
from tq_fs.bench._cluster_steps import ROUTED, SHAPE, finalize, record
from tq_fs.bench._data import Payload, declared, make_payloads
from tq_fs.errors import TqFsError
from tq_fs.trajectory import Segment

STEPS_IN_SESSION = 4
_STORE = "object-store"
_AT_ONCE = 4  # Segments that training reads together


class ObjectStore(NamedTuple):
    """What passed.

    Attributes
    ----------
    payload_bytes, stored_bytes
        Of the large fields, as training reads them, and as they are stored.
    resident_bytes
        Of the Segments' other fields, which do travel.
    grown_bytes
        What the object stores of both nodes took for it.
    """

    payload_bytes: int
    stored_bytes: int
    resident_bytes: int
    grown_bytes: int

    @property
    def share(self) -> float:
        """Growth over payload."""
        return self.grown_bytes / self.payload_bytes


def measure_object_store(nodes: Nodes, sessions: int) -> ObjectStore:
    """Roll out and train, on both nodes."""
    where = [(HERE, THERE)[i % 2] for i in range(sessions)]
    with store_on(nodes, _STORE, HERE, THERE, encryption="tls"):
        rollout = ray.remote(_roll_out)
        pending = [
            rollout.options(num_cpus=1, scheduling_strategy=nodes.on(node)).remote(number)
            for number, node in enumerate(where)
        ]
        segments: list[Segment] = ray.get(pending)
        trainers: list[Any] = [
            ray.remote(_Trainer).options(num_cpus=1, scheduling_strategy=nodes.on(node)).remote()
            for node in (HERE, THERE)
        ]
        shards = [(trainer, segments[i::2]) for i, trainer in enumerate(trainers)]
        payload = sum(ray.get([trainer.train.remote(shard) for trainer, shard in shards]))
        grown = sum(nodes.object_store_bytes().values())
        for trainer in trainers:
            ray.kill(trainer)
    return ObjectStore(
        payload_bytes=payload,
        stored_bytes=sessions * STEPS_IN_SESSION * SHAPE.nbytes,
        resident_bytes=sum(s.tokens.nbytes + s.loss_mask.nbytes for s in segments),
        grown_bytes=grown,
    )


def _payloads() -> list[Payload]:
    return make_payloads(SHAPE, 2)


def _roll_out(number: int) -> Segment:
    with tq_fs.cluster.attach(_STORE).store(declared(SHAPE)) as store:
        session = store.session(f"rollout-{number}")
        record(session, _payloads(), STEPS_IN_SESSION, narrow=False)
        return finalize(session)


class _Trainer:
    """One rank: reads what it is handed, some Segments at a time, and releases it."""

    def train(self, segments: Sequence[Segment]) -> int:
        """Return the bytes that were read."""
        payloads = [_payloads()[i % 2] for i in range(STEPS_IN_SESSION)]
        ids = np.concatenate([payload.ids for payload in payloads])[1:]
        nbytes = 0
        with tq_fs.cluster.attach(_STORE).store(declared(SHAPE)) as store:
            for start in range(0, len(segments), _AT_ONCE):
                batch = store.hydrate(segments[start : start + _AT_ONCE])
                for routing in batch[f"rollout_{ROUTED}"]:
                    if not np.array_equal(routing.numpy(), ids):
                        raise TqFsError("what was read is not what was written", subject="bench")
                nbytes += sum(t.numpy().nbytes for tensors in batch.values() for t in tensors)
            store.release(segments)
        return nbytes
