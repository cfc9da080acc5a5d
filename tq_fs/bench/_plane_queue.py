"""The path through TransferQueue's SimpleStorage: Proxy and trainers that keep fields there.

Built like those of :mod:`tq_fs.rollout`. The Proxy puts a Step's large fields under a key when the
Step is made; Segments carry tokens, masks and the numbers of their Steps, which are the keys;
trainers get them after sharding, and clear them once all have.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import ray
import torch

from tq_fs.bench._plane_traffic import LOGPROBS, ROUTED, Traffic
from tq_fs.demo.played import take_digests
from tq_fs.rollout import Rollout, Shard, gather
from tq_fs.session import Session
from tq_fs.store import open_store
from tq_fs.trajectory import Segment, StepInput, StepRecord

PARTITION = "plane"


class QueueSession:
    """A session whose large fields go to the queue; see :class:`Recorder`."""

    def __init__(self, inner: Session, dtype: str) -> None:
        self._inner = inner
        self._dtype = np.dtype(dtype)

    @property
    def session_id(self) -> str:
        """Its name."""
        return self._inner.session_id

    def record(self, step: StepInput) -> StepRecord:
        """Record a Step's tokens, and put its fields, as narrow as they are stored."""
        import transfer_queue  # noqa: PLC0415  # of one environment only

        record = self._inner.record(replace(step, values={}))
        routed = np.asarray(step.values[ROUTED]).astype(self._dtype)
        fields = {
            ROUTED: torch.from_numpy(routed.view(np.uint8)),  # torch knows uint16 in part only
            LOGPROBS: torch.from_numpy(np.array(step.values[LOGPROBS])),
        }
        transfer_queue.kv_put(_key(self.session_id, record.index), PARTITION, fields)
        return record


def _key(session_id: str, step: int) -> str:
    return f"{session_id}/{step}"


class QueueProxy:
    """An actor: a Proxy that puts."""

    def __init__(self, traffic: Traffic) -> None:
        _join()
        self._traffic = traffic
        self._store = open_store(None, fields=())

    def pid(self) -> int:
        """Return the process."""
        return os.getpid()

    def rollout(self, session_id: str) -> list[Segment]:
        """Play one session and return its Segments, without large fields."""
        session = self._store.session(session_id)
        self._traffic.play(QueueSession(session, self._traffic.shape.dtype))
        return session.finalize()


class QueueTrainer:
    """An actor: a data-parallel rank that gets."""

    def __init__(self, traffic: Traffic) -> None:
        _join()
        self._dtype = np.dtype(traffic.shape.dtype)

    def pid(self) -> int:
        """Return the process."""
        return os.getpid()

    def train(self, shard: Shard) -> dict[str, str]:
        """Return the digests of a shard's tensors."""
        found: dict[str, str] = {}
        segments: list[Segment] = ray.get(shard.segments)
        for segment in segments:
            tensors = {name: [value] for name, value in self._tensors(segment).items()}
            found |= take_digests([segment], tensors)
        return found

    def _tensors(self, segment: Segment) -> Mapping[str, torch.Tensor]:
        """Return Slime's fields."""
        import transfer_queue  # noqa: PLC0415

        keys = [_key(segment.session_id, step) for step in segment.steps]
        got = transfer_queue.kv_batch_get(keys, PARTITION, [ROUTED, LOGPROBS])
        routed = [part.numpy().view(self._dtype) for part in got[ROUTED].unbind()]
        values = [part.numpy() for part in got[LOGPROBS].unbind()]
        return {
            "rollout_routed_experts": torch.from_numpy(np.concatenate(routed).astype(np.int32)),
            "rollout_log_probs": torch.from_numpy(
                np.concatenate(values)[len(segment.tokens) - segment.response_length :]
            ),
        }

    def clear(self, shard: Shard) -> None:
        """Remove what a shard's Segments refer to."""
        import transfer_queue  # noqa: PLC0415

        segments: list[Segment] = ray.get(shard.segments)
        transfer_queue.kv_clear(
            [_key(s.session_id, i) for s in segments for i in s.steps], PARTITION
        )


class QueueTrainers(NamedTuple):
    """All ranks of the path."""

    ranks: Sequence[Any]

    def train(self, rollout: Rollout) -> dict[str, str]:
        """Train on a rollout and clear it; return all digests."""
        pairs = list(zip(self.ranks, rollout.shards, strict=True))
        results = gather([rank.train.remote(shard) for rank, shard in pairs])
        gather([rank.clear.remote(shard) for rank, shard in pairs])
        return {name: value for found in results for name, value in found.items()}


def _join() -> None:
    import transfer_queue  # noqa: PLC0415

    transfer_queue.init()
