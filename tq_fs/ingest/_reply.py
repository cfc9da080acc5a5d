"""What was asked of the engine, and what it answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tq_fs.errors import InputError, ReplyInvalid
from tq_fs.fields import FieldSpec

Tokens = npt.NDArray[np.int32]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The request that a reply answers, as far as the reply is checked against it.

    Attributes
    ----------
    prompt_tokens
        Tokens of ``input_ids``.
    start_row
        First routing row that is wanted, in the whole sequence: what was asked for as
        ``routed_experts_start_len``.
    max_new_tokens
        As it was asked; with the prompt it bounds what a reply may hold.
    routing
        Declaration of ``routed_experts``, with layers and top-k; None: not asked for, and passed
        over where it is sent.
    subject
        What messages of errors call the reply, such as a request's id.

    Raises
    ------
    InputError
        No prompt, a row behind the prompt, or a negative number.
    """

    prompt_tokens: int
    start_row: int
    max_new_tokens: int
    routing: FieldSpec | None
    subject: str = "reply of the engine"

    def __post_init__(self) -> None:
        """Refuse what no request can ask."""
        if self.prompt_tokens < 1 or self.max_new_tokens < 0:
            raise InputError(
                f"{self.prompt_tokens} prompt tokens and {self.max_new_tokens} new ones make no "
                "request",
                subject=self.subject,
                remedy="send at least one token",
            )
        if not 0 <= self.start_row <= self.prompt_tokens:
            raise InputError(
                f"routing rows from {self.start_row} on are no part of a prompt of "
                f"{self.prompt_tokens} tokens",
                subject=self.subject,
                remedy="ask for rows from 0 to the length of the prompt",
            )

    @property
    def most_tokens(self) -> int:
        """Most tokens that a reply may hold. An engine that is asked for none may give one."""
        return max(self.max_new_tokens, 1)

    def invalid(self, problem: str, *, at: str = "", remedy: str) -> ReplyInvalid:
        """Return the error that names this reply, and a part of it."""
        subject = f"{self.subject}, {at}" if at else self.subject
        return ReplyInvalid(problem, subject=subject, remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateReply:
    """A reply of ``/generate`` that agrees with itself and with what was asked.

    Attributes
    ----------
    output_ids
        Generated token ids, int32 ``[r]``.
    logprobs
        Of these tokens, float32 ``[r]``, finite: the nearest to the double that the JSON number is.
    routed_experts
        int32 ``[rows, layers, topk]`` for the rows ``[start_row, prompt + r - 1)`` of the sequence.
        None where they were not asked for, and in an abort that generated nothing and has not got
        them all.
    start_row
        First of these rows; that of the request.
    version
        Weight version of the engine at the end of the generation; empty in an abort that generated
        nothing and names none.
    finish
        ``stop``, ``length`` or ``abort``.
    text
        What the tokens say; empty where the engine does not tell.
    """

    output_ids: Tokens
    logprobs: npt.NDArray[np.float32]
    routed_experts: Tokens | None
    start_row: int
    version: str
    finish: str
    text: str
