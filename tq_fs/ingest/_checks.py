"""Whether the parts of a reply agree with each other, and with what was asked."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tq_fs.ingest._reply import Asked, GenerateReply, Tokens
from tq_fs.ingest._rows import RowBuffer

_FINISHES = ("stop", "length", "abort")
_SPEAKS = "check that the engine speaks SGLang's /generate"
_AGAIN = "generate again; if it happens often, look for a bug of the engine"


@dataclass(slots=True, kw_only=True)
class Parts:
    """What a reply says; None where it says nothing.

    Attributes
    ----------
    output_ids, logprob_ids
        int32 ``[r]``: from ``output_ids``, and from the entries of the logprobs.
    logprobs
        float32 ``[r]``; infinite where the number was too large.
    rows
        Routing that was taken in.
    text
        In pieces.
    version, finish
        ``weight_version``, and ``finish_reason.type``.
    prompt_tokens, completion_tokens
        As the engine counted.
    """

    output_ids: Tokens | None = None
    logprobs: npt.NDArray[np.float32] | None = None
    logprob_ids: Tokens | None = None
    rows: RowBuffer | None = None
    text: list[str] = field(default_factory=list)
    version: str | None = None
    finish: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def checked(asked: Asked, parts: Parts) -> GenerateReply:
    """Return the reply that the parts make.

    Raises
    ------
    ReplyInvalid
        A part is missing, or two of them contradict each other or what was asked.
    """
    finish = _finish(asked, parts)
    nothing = finish == "abort" and (parts.output_ids is None or not len(parts.output_ids))
    output_ids, logprobs = _tokens(asked, parts, nothing=nothing)
    _counts(asked, parts, len(output_ids), nothing=nothing)
    return GenerateReply(
        output_ids=output_ids,
        logprobs=logprobs,
        routed_experts=_routing(asked, parts, len(output_ids), nothing=nothing),
        start_row=asked.start_row,
        version=_version(asked, parts, nothing=nothing),
        finish=finish,
        text="".join(parts.text),
    )


def _finish(asked: Asked, parts: Parts) -> str:
    if parts.finish not in _FINISHES:
        raise asked.invalid(
            f"{'nothing' if parts.finish is None else repr(parts.finish[:80])} where one of "
            f"{', '.join(_FINISHES)} is expected",
            at="meta_info.finish_reason",
            remedy=f"{_SPEAKS}, and that the reply is not streamed",
        )
    return parts.finish


def _tokens(asked: Asked, parts: Parts, *, nothing: bool) -> tuple[Tokens, npt.NDArray[np.float32]]:
    ids, logprobs, others = parts.output_ids, parts.logprobs, parts.logprob_ids
    if nothing:
        ids = np.empty(0, np.int32)
        if logprobs is None:
            return ids, np.empty(0, np.float32)
    if ids is None:
        raise asked.invalid("is missing", at="output_ids", remedy=_SPEAKS)
    if logprobs is None or others is None:
        raise asked.invalid(
            "is missing", at="meta_info.output_token_logprobs", remedy="ask with return_logprob"
        )
    if len(ids) != len(logprobs):
        raise asked.invalid(
            f"{len(ids)} output_ids and {len(logprobs)} output_token_logprobs", remedy=_AGAIN
        )
    if len(wrong := np.flatnonzero(ids != others)):
        at = int(wrong[0])
        raise asked.invalid(
            f"token {at} is {ids[at]} in output_ids and {others[at]} in output_token_logprobs",
            remedy=_AGAIN,
        )
    if len(wrong := np.flatnonzero(~np.isfinite(logprobs))):
        at = int(wrong[0])
        raise asked.invalid(
            f"the logprob of token {at} is {logprobs[at]} as float32",
            at="meta_info.output_token_logprobs",
            remedy=_AGAIN,
        )
    return ids, logprobs


def _counts(asked: Asked, parts: Parts, generated: int, *, nothing: bool) -> None:
    """Compare with what the engine counted; one that had not begun counts 0 prompt tokens."""
    expected = (
        ("prompt_tokens", parts.prompt_tokens, asked.prompt_tokens),
        ("completion_tokens", parts.completion_tokens, generated),
    )
    for name, found, wanted in expected:
        if found is None or found == wanted or (nothing and found == 0):
            continue
        raise asked.invalid(
            f"{found} where {wanted} is expected",
            at=f"meta_info.{name}",
            remedy="check that the reply is that of this request",
        )


def _version(asked: Asked, parts: Parts, *, nothing: bool) -> str:
    if not parts.version and not nothing:
        raise asked.invalid(
            "is missing, so that nobody knows which weights generated",
            at="meta_info.weight_version",
            remedy="start the engine with --weight-version, or take a later SGLang",
        )
    return parts.version or ""


def _routing(asked: Asked, parts: Parts, generated: int, *, nothing: bool) -> Tokens | None:
    if asked.routing is None:
        return None
    rows = None if parts.rows is None else parts.rows.rows(generated, partly=nothing)
    if rows is not None or nothing:
        return rows
    raise asked.invalid(
        "is missing",
        at="meta_info.routed_experts",
        remedy="start the engine with --enable-return-routed-experts",
    )
