"""Replies of SGLang's /generate, made up, and read the plain way."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tq_fs.fields import FieldSpec, routed_experts
from tq_fs.ingest import Asked, GenerateReply, ReplyParser


@dataclass(kw_only=True)
class Made:
    """A request and the document that answers it; `meta` and `top` change the document."""

    prompt: int = 5
    generated: int = 4
    layers: int = 3
    topk: int = 2
    start_row: int = 0
    first_row: int | None = None  # of the reply: None is what was asked for
    max_new_tokens: int | None = None
    routing: bool = True
    seed: int = 0
    meta: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    @property
    def spec(self) -> FieldSpec:
        return routed_experts(layers=self.layers, topk=self.topk, experts=64)

    @property
    def asked(self) -> Asked:
        most = self.generated if self.max_new_tokens is None else self.max_new_tokens
        return Asked(
            prompt_tokens=self.prompt,
            start_row=self.start_row,
            max_new_tokens=most,
            routing=self.spec if self.routing else None,
            subject="request 7",
        )

    def rows(self, first: int, last: int | None = None) -> np.ndarray[Any, Any]:
        """Return rows of the sequence, as the engine holds them."""
        total = self.prompt + self.generated - 1
        draw = np.random.default_rng(self.seed).integers
        whole = draw(-1, 64, (max(total, 0), self.layers, self.topk), dtype=np.int32)
        return whole[first:last]

    def ids(self) -> list[int]:
        draw = np.random.default_rng(self.seed + 1).integers
        found: list[int] = draw(0, 150_000, self.generated).tolist()
        return found

    def logprobs(self) -> list[float]:
        draw = np.random.default_rng(self.seed + 2).random
        found: list[float] = (-draw(self.generated)).astype(np.float32).tolist()
        return found

    def document(self) -> dict[str, Any]:
        first = self.start_row if self.first_row is None else self.first_row
        meta = {
            "id": "7",
            "finish_reason": {"type": "length", "length": self.generated},
            "prompt_tokens": self.prompt,
            "weight_version": "12",
            "completion_tokens": self.generated,
            "cached_tokens": 0,
            "e2e_latency": 0.25,
            "input_token_logprobs": [[None, 3, None], [-0.5, 4, None]],
            "output_token_logprobs": [
                [lp, token, None] for lp, token in zip(self.logprobs(), self.ids(), strict=True)
            ],
            "routed_experts": encoded(self.rows(first)),
            **self.meta,
        }
        whole = {"text": 'a "text"', "output_ids": self.ids(), "meta_info": meta, **self.top}
        for name in self.without:
            whole.pop(name, None)
            meta.pop(name, None)
        return whole

    def body(self) -> bytes:
        return json.dumps(self.document()).encode()


def encoded(rows: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(rows, "<i4").tobytes()).decode()


def plain(asked: Asked, body: bytes) -> GenerateReply:
    """Read a reply with json, base64 and numpy; knows no errors of ours."""
    document = json.loads(body.decode())
    meta = document["meta_info"]
    ids = np.array(document["output_ids"], np.int32)
    rows = None
    if asked.routing is not None:
        assert asked.routing.inner is not None
        raw = base64.b64decode(meta["routed_experts"], validate=True)
        total = asked.prompt_tokens + len(ids) - 1
        every = np.frombuffer(raw, "<i4").reshape(-1, *asked.routing.inner)
        wanted = max(total - asked.start_row, 0)
        assert len(every) in (wanted, total)
        rows = every[len(every) - wanted :]
    return GenerateReply(
        output_ids=ids,
        logprobs=np.array([entry[0] for entry in meta["output_token_logprobs"]], np.float32),
        routed_experts=rows,
        start_row=asked.start_row,
        version=meta["weight_version"],
        finish=meta["finish_reason"]["type"],
        text=document.get("text") or "",
    )


def split(asked: Asked, body: bytes, cuts: list[int]) -> GenerateReply:
    """Feed a body in pieces that end at the cuts."""
    parser = ReplyParser(asked)
    ends = sorted(cut for cut in cuts if cut <= len(body))
    for start, end in zip([0, *ends], [*ends, len(body)], strict=True):
        parser.feed(body[start:end])
    return parser.close()


def assert_same(found: GenerateReply, wanted: GenerateReply) -> None:
    for name in ("output_ids", "logprobs", "routed_experts"):
        have, want = getattr(found, name), getattr(wanted, name)
        if want is None:
            assert have is None
            continue
        assert have.dtype == (np.float32 if name == "logprobs" else np.int32)
        assert have.shape == want.shape, name
        assert have.tobytes() == want.tobytes(), name
    for name in ("start_row", "version", "finish", "text"):
        assert getattr(found, name) == getattr(wanted, name), name
