"""Replies of a rollout engine that are made before they are asked for.

What an engine says of a generation is text, token ids, a logprob for each, and base64 of routing
rows. Only the number of rows depends on the request: base64 of the rows of three tokens is a whole
number of characters, so that any run of rows is a slice of one long text, but for its end.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

_LETTERS = b"abcdefghijklmnopqrstuvwxyz      \n"  # of replies; a byte is a token of the tokenizer
_TEXTS = 4
_ALIGN = 3  # rows whose bytes end with a base64 group


class RoutingShape(NamedTuple):
    """Layers, experts a token, and experts of the model."""

    layers: int
    topk: int
    experts: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row as int32."""
        return self.layers * self.topk * 4


class Replies:
    """Bodies of replies of up to `tokens` tokens, to prompts of up to `margin`.

    Parameters
    ----------
    shape
        Of the routing.
    tokens
        Of a reply, at most.
    stop_id
        The token that ends every reply.
    margin
        Tokens of context that a reply's rows can cover besides.
    """

    def __init__(
        self, shape: RoutingShape, tokens: int, *, stop_id: int, margin: int = 1024
    ) -> None:
        random = np.random.default_rng(0)
        self._shape = shape
        self._rows = _distinct_ids(shape, tokens + margin + _TEXTS * _ALIGN, random)
        self._coded = base64.b64encode(self._rows.data)
        self._heads = [_Head.of(tokens, stop_id, random) for _ in range(_TEXTS)]
        self._made: dict[tuple[int, int], bytes] = {}

    def body(
        self, number: int, *, prompt: int, start_row: int, tokens: int
    ) -> Sequence[bytes | memoryview]:
        """Return the pieces of a body.

        Parameters
        ----------
        number
            Of the request: texts and rows take turns.
        prompt
            Tokens of the prompt.
        start_row
            First row that is asked for, as ``routed_experts_start_len`` says.
        tokens
            To generate.
        """
        which = number % _TEXTS
        head = self._made.get((which, tokens))
        if head is None:
            head = self._made[which, tokens] = self._heads[which].json(tokens)
        tail = (
            f'","routed_experts_start_len":{start_row},"prompt_tokens":{prompt},'
            f'"completion_tokens":{tokens},"id":"{number}"}}}}'
        )
        return [head, *self._base64(which * _ALIGN, prompt + tokens - 1 - start_row), tail.encode()]

    def _base64(self, first: int, rows: int) -> list[memoryview | bytes]:
        """Return base64 of so many rows, of which the last few bytes are encoded anew."""
        size = self._shape.row_bytes
        whole = rows * size // 3
        start = first * size // 3 * 4
        rest = self._rows.reshape(-1).view(np.uint8)[first * size + whole * 3 :][: rows * size % 3]
        return [
            memoryview(self._coded)[start : start + whole * 4],
            base64.b64encode(rest.tobytes()),
        ]


class _Head(NamedTuple):
    """The beginning of a body, up to the routing."""

    ids: np.ndarray[tuple[int], np.dtype[np.int32]]
    logprobs: np.ndarray[tuple[int], np.dtype[np.float64]]

    @classmethod
    def of(cls, tokens: int, stop_id: int, random: np.random.Generator) -> _Head:
        """Draw one."""
        letters = np.frombuffer(_LETTERS, np.uint8)
        ids = random.choice(letters, tokens).astype(np.int32)
        ids[-2:-1] = ord("w")  # a text that begins and ends with a letter is not trimmed anywhere
        ids[-1] = stop_id
        return cls(ids, -random.random(tokens).round(12))

    def json(self, tokens: int) -> bytes:
        """Return it for the last so many tokens."""
        ids = [ord("w"), *self.ids[1 - tokens :].tolist()] if tokens > 1 else self.ids[-1:].tolist()
        entries = [[p, i, None] for p, i in zip(self.logprobs[-tokens:].tolist(), ids, strict=True)]
        body = {
            "text": bytes(ids[:-1]).decode("ascii"),
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": ids[-1]},
                "weight_version": "1",
                "output_token_logprobs": entries,
                "routed_experts": "",
            },
        }
        return msgspec.json.encode(body).removesuffix(b'"}}')


def _distinct_ids(
    shape: RoutingShape, rows: int, random: np.random.Generator
) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Return ids of which none is twice in a row of a layer, as a router gives them."""
    first = random.integers(0, shape.experts, (rows, shape.layers, 1), dtype=np.int32)
    step = random.integers(1, shape.experts // shape.topk + 1, first.shape, dtype=np.int32)
    return np.ascontiguousarray(
        (first + step * np.arange(shape.topk, dtype=np.int32)) % shape.experts
    )
