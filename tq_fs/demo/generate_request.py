"""What the demo's engine is asked: bodies of ``/generate``, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tq_fs.demo.sequence import Sampling
from tq_fs.errors import ContextOverflow, InvalidRequest

DEFAULT_SEED = 42  # of requests without one, as SGLang's deterministic mode
DEFAULT_NEW_TOKENS = 128

# Sampling parameters of SGLang that this engine knows; those it does not have, with the values that
# ask for nothing; and those that say how the reply's text is cut.
_KNOWN = frozenset(
    {"max_new_tokens", "temperature", "top_p", "top_k", "sampling_seed"}
    | {"stop", "stop_token_ids", "ignore_eos"}
)
_NEUTRAL = {"n": 1, "min_p": 0, "min_new_tokens": 0, "repetition_penalty": 1} | {
    "frequency_penalty": 0, "presence_penalty": 0
}  # fmt: skip
_OF_TEXT = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What ``/generate`` is asked.

    Attributes
    ----------
    rid
        Of the client, or made up; by it a request is aborted.
    input_ids
        int64 ``[P]``.
    max_new_tokens
        At least 0.
    sampling
        How tokens are drawn.
    stop_ids, stops
        Tokens, and texts, that end the generation; they are part of what is generated.
    routing
        Whether the reply has routing rows.
    first_row
        The first of them.
    logprob_start
        First token of the prompt whose logprob is in the reply; None: none.
    """

    rid: str
    input_ids: NDArray[np.int64]
    max_new_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    stops: tuple[str, ...]
    routing: bool
    first_row: int
    logprob_start: int | None


def read_request(
    body: Any, *, rid: str, vocab: int, context: int, eos_ids: Collection[int]
) -> Request:
    """Check the body of ``/generate``.

    Parameters
    ----------
    rid
        The request's id, where it has none of its own.
    vocab, context
        Of the model: ids are below `vocab`, and a sequence has at most `context` tokens.
    eos_ids
        Tokens that end a generation unless the request ignores them.

    Raises
    ------
    InvalidRequest
        Something is missing, of another type, or out of range.
    ContextOverflow
        Prompt and reply do not fit.
    """
    body = _mapping(body, "the body")
    params = _mapping(body.get("sampling_params") or {}, "sampling_params")
    _check_names(params)
    ids = _ids(body.get("input_ids"), "input_ids", vocab)
    if not ids:
        raise InvalidRequest("is empty", subject="input_ids", remedy="send at least one token")
    new = _whole(params, "max_new_tokens", DEFAULT_NEW_TOKENS, least=0)
    if len(ids) + new > context:
        raise ContextOverflow(
            f"The input ({len(ids)} tokens) and max_new_tokens ({new}) are longer than the "
            f"model's context length ({context} tokens).",
            subject="input_ids",
        )
    stop_ids = _ids(params.get("stop_token_ids") or [], "stop_token_ids", vocab)
    ending = () if params.get("ignore_eos") else eos_ids
    start = _whole(body, "logprob_start_len", -1, least=-1)
    return Request(
        rid=str(body.get("rid") or rid),
        input_ids=np.array(ids, np.int64),
        max_new_tokens=new,
        sampling=_sampling(params),
        stop_ids=frozenset((*stop_ids, *ending)),
        stops=_stops(params.get("stop")),
        routing=bool(body.get("return_routed_experts")),
        first_row=_whole(body, "routed_experts_start_len", 0, least=0, most=len(ids) - 1),
        logprob_start=start if start >= 0 and body.get("return_logprob") else None,
    )


def _sampling(params: Mapping[str, Any]) -> Sampling:
    seed = params.get("sampling_seed")
    return Sampling(
        temperature=_number(params, "temperature", 1.0, lambda x: x >= 0, "at least 0"),
        top_p=_number(params, "top_p", 1.0, lambda x: 0 < x <= 1, "above 0 and at most 1"),
        top_k=_whole(params, "top_k", -1, least=-1),
        # Any whole number is a seed to clients; our draws take those of 64 bits without a sign.
        seed=DEFAULT_SEED if seed is None else _integer(seed, "sampling_seed") % 2**64,
    )


def _check_names(params: Mapping[str, Any]) -> None:
    for name, value in params.items():
        asks = name not in _NEUTRAL or value not in (None, _NEUTRAL[name])
        if asks and name not in _KNOWN | _OF_TEXT:
            raise InvalidRequest(
                f"{value!r} is nothing that this engine does",
                subject=f"sampling_params.{name}",
                remedy="leave it out",
            )


def _mapping(value: Any, subject: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest("is no JSON object", subject=subject)
    return value


def _integer(value: Any, subject: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{value!r} is no whole number", subject=subject)
    return value


def _whole(
    body: Mapping[str, Any], name: str, default: int, *, least: int, most: int | None = None
) -> int:
    value = body.get(name)
    number = default if value is None else _integer(value, name)
    if number < least or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"in {least}..{most}"
        raise InvalidRequest(f"{number} is not {bounds}", subject=name)
    return number


def _number(
    params: Mapping[str, Any],
    name: str,
    default: float,
    fits: Callable[[float], bool],
    bounds: str,
) -> float:
    value = params.get(name)
    if value is None:
        return default
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not fits(value):
        raise InvalidRequest(f"{value!r} is not {bounds}", subject=name)
    return float(value)


def _ids(value: Any, subject: str, vocab: int) -> list[int]:
    if not isinstance(value, list):
        raise InvalidRequest("is no list of token ids", subject=subject)
    for at, token in enumerate(value):
        if not 0 <= _integer(token, f"{subject}[{at}]") < vocab:
            raise InvalidRequest(f"{token} is not in 0..{vocab - 1}", subject=f"{subject}[{at}]")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise InvalidRequest("is neither a text nor a list of some", subject="stop")
    return tuple(stops)
