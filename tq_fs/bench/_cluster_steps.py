"""The Steps that a cluster is measured with: as they are recorded, and in sessions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tq_fs.bench._data import Payload, Shape
from tq_fs.session import Session
from tq_fs.trajectory import Segment, StepInput

SHAPE = Shape(2048, 40, 8, "uint8")
ROUTED, LOGPROBS = "routed_experts", "logprobs"


def record(session: Session, payloads: Sequence[Payload], steps: int, *, narrow: bool) -> None:
    """Record a chain of Steps, one after the other.

    Parameters
    ----------
    narrow
        Whether the ids come in their stored type; else as engines give them, in int32.
    """
    parent = None
    for i in range(steps):
        payload = payloads[i % len(payloads)]
        ids = payload.narrow if narrow else payload.ids
        step = StepInput(
            kind="create" if parent is None else "append",
            parent=parent,
            context=[],
            response=np.arange(len(payload.logprobs), dtype=np.int32),
            values={ROUTED: ids if parent is not None else ids[1:], LOGPROBS: payload.logprobs},
        )
        parent = session.record(step).index


def finalize(session: Session) -> Segment:
    """Finalize a session that is one chain."""
    (segment,) = session.finalize()
    return segment
