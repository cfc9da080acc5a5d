"""What is measured on: ids as skewed as real routing, and memory that was touched before."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tq_fs.backends import Buffer
from tq_fs.fields import FieldSpec, logprobs, narrowest, routed_experts
from tq_fs.keys import Incarnation, StepKey

Array = npt.NDArray[Any]
_EXPERTS = {"uint8": 256, "uint16": 384, "int32": 384}


class Shape(NamedTuple):
    """Size of the Steps that are measured."""

    tokens: int
    layers: int
    topk: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Stored bytes of a Step, both fields."""
        return self.tokens * (self.layers * self.topk * np.dtype(self.dtype).itemsize + 4)


class Payload(NamedTuple):
    """One Step: the caller's int32 ids, the same narrowed, and its logprobs."""

    ids: Array
    narrow: Array
    logprobs: Array

    @property
    def buffers(self) -> list[Buffer]:
        """What a raw write writes."""
        return [self.narrow.reshape(-1), self.logprobs]


def make_payloads(shape: Shape, count: int, seed: int = 0) -> list[Payload]:
    """Return a few different Steps, with expert popularities drawn from a Dirichlet."""
    rng = np.random.default_rng(seed)
    experts = _EXPERTS[shape.dtype]
    shares = np.cumsum(rng.dirichlet(np.full(experts, 0.3), size=shape.layers), axis=1)
    payloads = []
    for _ in range(count):
        draws = rng.random((shape.tokens, shape.layers, shape.topk))
        ids = np.empty(draws.shape, np.int32)
        for layer in range(shape.layers):
            ids[:, layer] = np.searchsorted(shares[layer], draws[:, layer]).clip(0, experts - 1)
        values = rng.normal(size=shape.tokens).astype(np.float32)
        payloads.append(Payload(ids, ids.astype(shape.dtype), values))
    return payloads


def declared(shape: Shape) -> list[FieldSpec]:
    """Return the fields as a user declares them: ids arrive as int32."""
    experts = _EXPERTS[shape.dtype]
    stored = shape.dtype if narrowest(experts - 1) != shape.dtype else "auto"
    ids = routed_experts(
        layers=shape.layers, topk=shape.topk, experts=experts, stored=stored, codec="none"
    )
    return [logprobs(), ids]


def as_encoded(shape: Shape) -> list[FieldSpec]:
    """Return fields whose memory type is the stored one: nothing is left to narrow."""
    inner = (shape.layers, shape.topk)
    return [
        logprobs(),
        FieldSpec(
            name="routed_experts",
            dtype=shape.dtype,
            inner=inner,
            rows="transitions",
            stored=shape.dtype,
            codec="none",
        ),
    ]


def step_key(number: int) -> StepKey:
    """Return a key as long as real ones."""
    return StepKey(Incarnation("train", "bench-session-0001", "18f3c0ffee12345600000001"), number)
