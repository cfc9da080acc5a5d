"""Random values and layouts of them, and what must come out, computed on whole values in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests._value_parts import chunk, cut_chunk, partial

torch = pytest.importorskip("torch")
Array = npt.NDArray[Any]
Range = tuple[int, int]
Random = np.random.Generator
PARTITION = "train"
LAYERS, TOPK = 6, 2
SMALL, LARGE = (20, 90), (17_000, 20_000)  # rows
WIDTH = LAYERS * TOPK


# ---------------------------------------------------------------- values


def _logprobs(random: Random, rows: int) -> Array:
    return -random.random(rows, dtype=np.float32)


def _ids(random: Random, rows: int, below: int = 256) -> Array:
    ids = random.integers(0, below, (rows, LAYERS, TOPK), dtype=np.int32)
    ids[random.random(rows) < 0.1] = -1
    return ids


LOGPROBS: dict[str, Callable[[Random, int], Any]] = {
    "float32 tensor": lambda r, n: torch.from_numpy(_logprobs(r, n)),
    "list": lambda r, n: _logprobs(r, n).tolist(),
    "wide list": lambda r, n: (-r.random(n)).tolist(),
    "float64 array": lambda r, n: -r.random(n),
    "bfloat16 tensor": lambda r, n: torch.from_numpy(_logprobs(r, n)).to(torch.bfloat16),
    "column": lambda r, n: _logprobs(r, n)[:, None],
}
ROUTING: dict[str, Callable[[Random, int], Any]] = {
    "int32 tensor": lambda r, n: torch.from_numpy(_ids(r, n)),
    "uint8 array": lambda r, n: r.integers(0, 256, (n, LAYERS, TOPK), dtype=np.uint8),
    "int64 array": lambda r, n: _ids(r, n).astype(np.int64),
    "flat rows": lambda r, n: _ids(r, n).reshape(n, -1),
    "flat list": lambda r, n: _ids(r, n, 70_000).reshape(-1).tolist(),
    "chunk": lambda r, n: chunk(np.abs(_ids(r, n)), 5, True),
    "own rows": lambda r, n: chunk(_ids(r, n), n // 3, False, "ndarray"),
    "flat chunks": lambda r, n: partial(r, [7, n // 2, n + 1], "base64", (LAYERS, TOPK))[0],
    "chunks": lambda r, n: partial(r, [n // 2, n // 2 + 3, n + 1], "tensor", (LAYERS, TOPK))[0],
    "cut chunk": lambda r, n: cut_chunk(np.abs(_ids(r, n)), "uint8"),
    "cut chunks": lambda r, n: [
        cut_chunk(_ids(r, 7), "int32", "bytes"),
        cut_chunk(np.abs(_ids(r, n - 9, 60_000)), "uint16"),
        cut_chunk(_ids(r, 2)),
    ],
    "cut arrays": lambda r, n: [
        cut_chunk(_ids(r, rows), "int32", "ndarray") for rows in (n // 2, n - n // 2)
    ],
}


def rows_of(kind: str, value: Any) -> tuple[int, Array]:
    """Return a whole value as training would see it, and which row its first one is."""
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return _of_chunks(value)
    if kind == "logprobs":
        whole = value if isinstance(value, torch.Tensor) else torch.tensor(np.asarray(value))
        return 0, whole.to(torch.float32).numpy().reshape(-1)
    return 0, np.asarray(value).astype(np.int32).reshape(-1, LAYERS, TOPK)


def _of_chunks(chunks: Sequence[dict[str, Any]]) -> tuple[int, Array]:
    import base64

    found: list[Array] = []
    begin = 0
    for number, one in enumerate(chunks):
        data = one["data"]
        if isinstance(data, str):
            data = base64.b64decode(data)
        if isinstance(data, bytes):
            data = np.frombuffer(data, np.dtype(one.get("dtype", "int32")).newbyteorder("<"))
        rows = np.asarray(data).astype(np.int32).reshape(-1, LAYERS, TOPK)
        is_whole = "row_count" in one or one["is_first_chunk"]
        low = 0 if is_whole else one["prefix_token_count"] - 1
        begin = begin if number else low
        found.append(rows[low:])
    return begin, np.concatenate(found)


# ---------------------------------------------------------------- worlds


@dataclass
class World:
    """Values by key and field, and samples whose layouts refer to them."""

    random: Random
    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def fill(self, steps: int, large: float = 0.4) -> World:
        """Add Steps, each with logprobs and routing of some kind."""
        for number in range(steps):
            kinds = {"logprobs": LOGPROBS, "routing": ROUTING}
            self.values[f"step-{number}"] = {
                name: self._value(table, large) for name, table in kinds.items()
            }
        return self

    def _value(self, table: Mapping[str, Callable[[Random, int], Any]], large: float) -> Any:
        kind = list(table)[self.random.integers(len(table))]
        rows = int(self.random.integers(*(LARGE if self.random.random() < large else SMALL)))
        return table[kind](self.random, rows)

    def layout(
        self, name: str, tokens: int, refs: Mapping[tuple[str, str], dict[str, Any]]
    ) -> tuple[dict[str, Any], Array]:
        """Return a random layout as a plain dict, and its rows."""
        rows = tokens if name == "logprobs" else max(0, tokens - 1)
        whole: list[Array] = []
        fragments: list[dict[str, Any]] = []
        at = 0
        while at < rows:
            key = f"step-{self.random.integers(len(self.values))}"
            low, found = rows_of(name, self.values[key][name])
            start = int(self.random.integers(len(found)))
            length = min(int(self.random.integers(1, 1 + len(found) - start)), rows - at)
            whole.append(found[start : start + length])
            fragments.append(
                {
                    "ref": refs[key, name],
                    "source_start": low + start,
                    "target_start": at,
                    "length": length,
                }
            )
            at += length
        self.random.shuffle(fragments)
        inner = () if name == "logprobs" else (LAYERS, TOPK)
        plain = {
            "logical_field": "full_logprobs" if name == "logprobs" else "routed_experts",
            "codec": "v1",
            "fragments": fragments,
            "token_count": tokens,
            "shape": [rows, *inner],
        }
        dtype = np.float32 if name == "logprobs" else np.int32
        return plain, np.concatenate([np.empty((0, *inner), dtype), *whole])

    def sample(self, refs: Mapping[tuple[str, str], dict[str, Any]]) -> Expected:
        """Return a random sample."""
        random = self.random
        whole = int(random.integers(1, 30_000 if random.random() < 0.3 else 200))
        tokens = int(random.integers(1, whole + 1)) if random.random() < 0.5 else whole
        logprobs, routing = (self.layout(n, whole, refs) for n in ("logprobs", "routing"))
        return Expected(
            plain=[logprobs[0], routing[0]],
            tokens=tokens,
            response_length=int(random.integers(0, tokens + 1)),
            removed=bool(random.random() < 0.15),
            logprobs=logprobs[1],
            routing=routing[1],
        )


@dataclass(frozen=True)
class Expected:
    """A sample, and all rows of its layouts."""

    plain: list[dict[str, Any]]
    tokens: int
    response_length: int
    removed: bool
    logprobs: Array
    routing: Array

    def tensors(self, tokens: Sequence[Range] | None, layers: Range | None) -> dict[str, Array]:
        """Return what training has to see of a selection."""
        first = self.tokens - self.response_length
        if tokens is None:
            logprobs, routing = [(first, self.tokens)], [(0, self.tokens - 1)]
        else:
            logprobs = [(max(a, first), min(b, self.tokens)) for a, b in tokens]
            routing = [(a, min(b, self.tokens - 1)) for a, b in tokens]
        across = slice(*(layers or (None,)))
        found = {
            "rollout_log_probs": _joined(self.logprobs, logprobs),
            "rollout_routed_experts": _joined(self.routing, routing)[:, across],
        }
        return {n: np.zeros_like(a) if self.removed else a for n, a in found.items()}


def _joined(rows: Array, ranges: Sequence[Range]) -> Array:
    return np.concatenate([rows[:0], *(rows[a:b] for a, b in ranges if a < b)])


def selections(random: Random) -> tuple[tuple[Range, ...] | None, Range | None]:
    """Return random ranges of tokens and layers."""
    layers = None
    if random.random() < 0.6:
        low, high = sorted(random.integers(0, LAYERS + 1, 2).tolist())
        layers = (low, high)
    tokens = None
    if random.random() < 0.6:
        ends = sorted(random.integers(0, 400, 4).tolist())
        tokens = ((ends[2], ends[3]), (ends[0], ends[1]))
    return tokens, layers
