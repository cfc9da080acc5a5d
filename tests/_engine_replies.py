"""What the fake engine answers: a pure function of the tokens, the seed and the weight version.

Causal, as a model is: what belongs to a position depends on the tokens up to it alone, so that a
generation that goes on after an abort gives what it would have given without one.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ids = NDArray[np.int32]
LETTERS = 26


def new_ids(before: ArrayLike, count: int, *, seed: int = 0) -> Ids:
    """The tokens that follow `before`: lower-case letters (a byte is its own id)."""
    state = zlib.crc32(np.asarray(before, np.int32).tobytes(), seed & 0xFFFFFFFF)
    found = []
    for _ in range(count):
        found.append(ord("a") + (state >> 7) % LETTERS)
        state = zlib.crc32(np.int32(found[-1]).tobytes(), state)
    return np.array(found, np.int32)


def logprobs_of(tokens: ArrayLike, first: int, *, version: str = "0") -> NDArray[np.float32]:
    """float32 of tokens `first` and on: negative, a function of position, id and version."""
    ids = np.asarray(tokens, np.int64)[first:]
    positions = np.arange(first, first + len(ids))
    mixed = (positions * 31 + ids * 17 + zlib.crc32(version.encode()) % 1000) % 997
    return (-(mixed + 1) / 997).astype(np.float32)


def rows_of(
    tokens: ArrayLike, *, layers: int, topk: int, experts: int, version: str = "0"
) -> NDArray[np.int32]:
    """int32 ``[T - 1, layers, topk]``: distinct experts in a row, of position, id and version."""
    ids = np.asarray(tokens, np.int64)[:-1]
    start = np.arange(len(ids)) * 5 + ids * 3 + zlib.crc32(version.encode()) % experts
    row = start[:, None, None] + 7 * np.arange(layers)[:, None] + np.arange(topk)
    return (row % experts).astype(np.int32)


def encoded(rows: NDArray[np.int32]) -> str:
    """Base64 of little-endian int32, as SGLang sends rows."""
    return base64.b64encode(np.ascontiguousarray(rows.astype("<i4", copy=False)).data).decode()


def reply_body(
    *,
    text: str,
    output_ids: Ids,
    logprobs: NDArray[np.float32],
    rows: NDArray[np.int32] | None,
    start_row: int,
    version: str,
    finish: dict[str, Any],
    prompt_tokens: int,
    rid: str,
    input_logprobs: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """The reply of ``/generate`` as JSON."""
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": finish,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(output_ids),
        "cached_tokens": 0,
        "weight_version": version,
        "e2e_latency": 0.001,
        "output_token_logprobs": [
            [float(value), int(token), None]
            for value, token in zip(logprobs, output_ids, strict=True)
        ],
    }
    if input_logprobs is not None:
        meta["input_token_logprobs"] = list(input_logprobs)
    if rows is not None:
        meta["routed_experts"] = encoded(rows)
        if start_row:
            meta["routed_experts_start_len"] = start_row
    return {"text": text, "output_ids": output_ids.tolist(), "meta_info": meta}
