"""Bytes of a batch by field: in memory on the centralized path, and stored."""

from __future__ import annotations

from tq_fs.planner._workload import Workload

# Bytes a token on the centralized path, besides the ids. A float of Python's in a list is 8 + 24;
# the others are the whole numbers that give the published shares of Qwen3.6-35B-A3B with int32 ids:
# 92.4 % routed experts, 2.3 logprobs, 2.1 token ids, 2.3 messages, 0.9 others.
CENTRAL_TOKEN_BYTES = {"logprobs": 32, "token_ids": 29, "messages": 32, "others": 12}
LOGPROB_BYTES = 4  # stored as float32


def central_fields(work: Workload) -> dict[str, float]:
    """Return the bytes of a batch's fields on the centralized path, one copy of each."""
    routed = work.r3_bytes(work.central_type)
    return {
        "routed_experts": routed,
        **{name: work.tokens * size for name, size in CENTRAL_TOKEN_BYTES.items()},
    }


def stored_fields(work: Workload) -> dict[str, float]:
    """Return the bytes of a batch's stored fields, before any compression."""
    return {
        "routed_experts": work.r3_bytes(work.stored_type),
        "logprobs": work.tokens * LOGPROB_BYTES,
    }


def shares(fields: dict[str, float]) -> dict[str, float]:
    """Return each field's share of all."""
    total = sum(fields.values())
    return {name: size / total for name, size in fields.items()}
