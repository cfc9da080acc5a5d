"""The rollouts of ``tq-fs bench memory``: the same Steps in every path, made from their names.

A trajectory has several Segments: after some Steps its history is rewritten, as an agent does that
compacts. What a Step holds is cut out of a few arrays that each process makes once.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from tq_fs.bench._data import Payload, Shape, make_payloads
from tq_fs.bench._plane_measured import MemoryBench
from tq_fs.fields import FieldSpec, logprobs, routed_experts
from tq_fs.trajectory import StepInput, StepRecord

ROUTED, LOGPROBS = "routed_experts", "logprobs"
_PAYLOADS, _WINDOWS = 4, 61  # arrays, and first tokens that a Step of one can have
_PROMPT_SHARE = 4  # of a Step's tokens one in so many is of its prompt
_VOCABULARY = 150_000


class Recorder(Protocol):
    """What Steps are recorded with: a Session, or what looks like one."""

    @property
    def session_id(self) -> str:
        """Its name."""

    def record(self, step: StepInput) -> StepRecord:
        """Record a Step."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Plays trajectories; an :class:`tq_fs.rollout.Agent`.

    Attributes
    ----------
    shape
        Of a Step, as it is stored.
    experts
        Of the model.
    segments, steps
        Of a trajectory, and of each of its Segments.
    """

    shape: Shape
    experts: int
    segments: int
    steps: int

    @classmethod
    def of(cls, bench: MemoryBench) -> Traffic:
        """Return what the settings ask for."""
        shape = Shape(bench.tokens, bench.layers, bench.topk, bench.dtype)
        return cls(shape, bench.experts, bench.segments, bench.steps)

    @property
    def nbytes(self) -> int:
        """Stored bytes of a trajectory's large fields; the first row of a chain has no routing."""
        row = self.shape.nbytes // self.shape.tokens - 4
        return self.segments * (self.steps * self.shape.nbytes - row)

    @property
    def tokens(self) -> int:
        """Tokens of a trajectory."""
        return self.segments * self.steps * self.shape.tokens

    def fields(self) -> tuple[FieldSpec, ...]:
        """Return the fields as they are declared; ids are int32 in tensors."""
        ids = routed_experts(
            layers=self.shape.layers,
            topk=self.shape.topk,
            experts=self.experts,
            stored=self.shape.dtype,
            codec="none",
        )
        return logprobs(), ids

    def play(self, session: Recorder) -> None:
        """Record a trajectory's Steps, each when the one before is safe."""
        for step in self._inputs(session.session_id):
            session.record(step)

    def _inputs(self, session_id: str) -> Iterator[StepInput]:
        for number in range(self.segments * self.steps):
            source = zlib.crc32(f"{session_id}/{number}".encode())
            opens = number % self.steps == 0
            payload = _payloads(self.shape)[source % _PAYLOADS]
            first = source % _WINDOWS
            window = slice(first, first + self.shape.tokens - opens)
            ids = np.arange(self.shape.tokens, dtype=np.int32) * 7919 + source % 9973
            ids %= _VOCABULARY
            prompt = self.shape.tokens // _PROMPT_SHARE
            yield StepInput(
                kind="append" if not opens else "boundary" if number else "create",
                parent=number - 1 if number else None,
                context=ids[:prompt],
                response=ids[prompt:],
                values={
                    LOGPROBS: payload.logprobs[first : first + self.shape.tokens],
                    ROUTED: payload.ids[window] % self.experts,
                },
                version="1",
                reason="" if not opens or not number else "history_rewrite",
            )


@lru_cache(maxsize=1)
def _payloads(shape: Shape) -> list[Payload]:
    return make_payloads(shape._replace(tokens=shape.tokens + _WINDOWS), _PAYLOADS)
