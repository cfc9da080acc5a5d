"""What a generation is asked of the engine, in SGLang's words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tq_fs.errors import ReplyInvalid
from tq_fs.fields import FieldSpec
from tq_fs.ingest import Asked

Tokens = npt.NDArray[np.int32]

_SLICE = 16384  # ids that are turned to text in one call, which holds the interpreter for 1 ms
_REST_BYTES = 1 << 20  # of a reply: everything that does not grow with its tokens
_PROMPT_BYTES = 128  # a token of the prompt, where the engine sends its logprob unasked
_OUTPUT_BYTES = 1024  # a generated token: its id, logprob and text, escapes included


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """One generation, as it is asked for.

    Attributes
    ----------
    rid
        Names the request, and aborts it. An engine aborts whatever *begins* with it: give all
        requests ids of one length.
    session_id
        Requests of one session go to one engine, for its prefix cache.
    input_ids
        The prompt, int32 ``[p]``, ``p >= 1``.
    sampling
        ``sampling_params`` beside ``max_new_tokens`` (temperature, top_p, top_k, stop,
        stop_token_ids, sampling_seed …), passed on as they are; those that are None are left out.
    max_new_tokens
        Most tokens to generate.
    start_row
        First routing row that is wanted, in the whole sequence.
    routing
        Declaration of ``routed_experts``; None does not ask for it.
    """

    rid: str
    session_id: str
    input_ids: Tokens
    sampling: Mapping[str, Any]
    max_new_tokens: int
    start_row: int = 0
    routing: FieldSpec | None = None

    def asked(self) -> Asked:
        """Return what the reply is checked against.

        Raises
        ------
        InputError
            An empty prompt, or rows that are no part of it.
        """
        return Asked(
            prompt_tokens=len(self.input_ids),
            start_row=self.start_row,
            max_new_tokens=self.max_new_tokens,
            routing=self.routing,
            subject=f"reply to {self.rid}",
        )


def request_body(wanted: Wanted) -> bytes:
    """Return the body of ``POST /generate``.

    Runs in a thread: a prompt of 100,000 tokens takes 10 ms, in slices between which others run.
    """
    body: dict[str, Any] = {
        "rid": wanted.rid,
        "sampling_params": {
            **{name: value for name, value in wanted.sampling.items() if value is not None},
            "max_new_tokens": wanted.max_new_tokens,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }
    if wanted.routing is not None:
        body["return_routed_experts"] = True
        body["routed_experts_start_len"] = wanted.start_row
    head = msgspec.json.encode(body)
    return b'%b,"input_ids":[%b]}' % (head[:-1], b",".join(_numbers(wanted.input_ids)))


def _numbers(ids: Tokens) -> Iterator[bytes]:
    for start in range(0, len(ids), _SLICE):
        yield msgspec.json.encode(ids[start : start + _SLICE].tolist())[1:-1]


def largest_reply(asked: Asked) -> int:
    """Return the bytes of the largest body that can be a reply to this.

    An engine may send all rows where later ones were asked for, and logprobs of the prompt.
    """
    tokens = asked.prompt_tokens + asked.most_tokens
    spec = asked.routing
    row_bytes = 0 if spec is None or spec.inner is None else 4 * int(np.prod(spec.inner))
    base64 = 4 * (-(-tokens * row_bytes // 3))
    return (
        base64
        + _PROMPT_BYTES * asked.prompt_tokens
        + _OUTPUT_BYTES * asked.most_tokens
        + _REST_BYTES
    )


def checked_length(declared: int | None, asked: Asked, limit_bytes: int) -> int:
    """Return how many bytes a body may take: as it says, else as many as a reply may have.

    Parameters
    ----------
    declared
        Its ``Content-Length``, if it has one.
    limit_bytes
        Of all replies together; bounds those that do not say.

    Raises
    ------
    ReplyInvalid
        It says more than a reply may have.
    """
    largest = largest_reply(asked)
    if declared is None:
        return min(largest, limit_bytes)
    if declared > largest:
        raise too_large(asked, declared, largest)
    return declared


def too_large(asked: Asked, nbytes: int, most_bytes: int) -> ReplyInvalid:
    """Return the error of a body that is longer than it may be."""
    return asked.invalid(
        f"{nbytes} bytes or more, where {most_bytes} were expected at most",
        remedy="check layers and topk against the model that the engine serves, and reply_bytes",
    )
