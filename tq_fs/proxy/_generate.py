"""One generation through the gate, put together where pauses cut it into chunks.

===============  ===============================  ========================================
a pause aborts   with partial rollout             without
===============  ===============================  ========================================
what was made    is kept, with its version        is thrown away
after resume     goes on from there: prompt and   starts anew
                 kept tokens, what is left of
                 ``max_new_tokens``, and the
                 same ``sampling_seed``
===============  ===============================  ========================================

A chunk without tokens, and one that was cut off or broke off while it was aborted, leaves nothing.
An abort that no pause of the gate's asked for, but somebody at the engine, means the same.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tq_fs.errors import UpstreamUnavailable
from tq_fs.ingest import GenerateReply
from tq_fs.proxy._gate import Gate
from tq_fs.proxy._room import Lease
from tq_fs.proxy._wanted import Tokens, Wanted
from tq_fs.trajectory import RolloutChunk, VersionRule, join_chunks

_P = ParamSpec("_P")
_T = TypeVar("_T")
_N = TypeVar("_N", bound=np.generic)
_log = logging.getLogger(__name__)

_TRIES = 6  # of generations that the engine aborts unasked, before their first token
_WAIT_S = 0.05  # doubled after each of them


class Engine(Protocol):
    """What generates; :class:`~tq_fs.proxy._engine.SglangEngine` does."""

    async def generate(self, wanted: Wanted, *, lease: Lease | None = None) -> GenerateReply:
        """Return the reply; cancelling aborts the generation."""

    async def abort(self, rid: str) -> None:
        """Ask for a reply with what there is; nothing where no such request runs."""

    async def in_pool(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run `call` off the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generated:
    """A whole generation.

    Attributes
    ----------
    response
        Generated token ids, int32 ``[r]``.
    logprobs
        Of these tokens, float32 ``[r]``, under the weights that generated each.
    routed_experts
        int32 ``[rows, layers, topk]`` for the rows ``[start_row, T - 1)`` of the sequence of
        ``T`` tokens, prompt and response; None where they were not asked for.
    versions
        Weight versions over the response: ``(version, tokens)``, equal neighbours put together.
    finish
        ``stop`` or ``length``.
    """

    response: Tokens
    logprobs: npt.NDArray[np.float32]
    routed_experts: Tokens | None
    versions: tuple[tuple[str, int], ...]
    finish: str


async def generate(
    engine: Engine,
    gate: Gate,
    wanted: Wanted,
    *,
    partial_rollout: bool,
    rule: VersionRule,
    lease: Lease | None = None,
) -> Generated:
    """Generate, through as many pauses as come. Cancelling leaves nothing behind.

    Parameters
    ----------
    partial_rollout
        Whether a generation that was aborted goes on, or starts anew.
    rule
        Which versions a response may hold; checked after each chunk, so that it fails early. The
        session's other Steps are checked where it is recorded.
    lease
        Holds the bytes of the replies beyond the return, until their fields are safe; None gives
        them back at once.

    Raises
    ------
    RolloutPaused
        It waited too long for a resume.
    VersionSpan
        The weights changed further than the rule allows.
    UpstreamUnavailable
        As the engine raises it, unless a pause was aborting the generation; or the engine aborted
        it several times, unasked and before its first token.
    TqFsError
        What :meth:`SglangEngine.generate` raises.
    """
    made = _Made(wanted, rule)
    fruitless = 0
    while not made.whole:
        part = made.rest()
        before = lease.held_bytes if lease is not None else 0
        reply, paused = await _through(engine, gate, part, lease)
        if reply is not None and (reply.finish != "abort" or (partial_rollout and _tokens(reply))):
            made.add(part, reply)
            fruitless = 0
            continue
        if lease is not None:
            lease.keep(before)
        if not paused:
            fruitless += 1
            await _wait_after(fruitless, wanted)
    return await engine.in_pool(made.joined) if made.in_parts else made.joined()


async def _through(
    engine: Engine, gate: Gate, part: Wanted, lease: Lease | None
) -> tuple[GenerateReply | None, bool]:
    """Ask for one chunk; None where a pause broke it off. Whether a pause aborted it."""
    passing = gate.pass_(lambda: engine.abort(part.rid))
    try:
        async with passing:
            return await engine.generate(part, lease=lease), passing.aborted
    except UpstreamUnavailable as error:
        if not passing.aborted:
            raise
        _log.info("%s broke off in a pause, and is asked for again: %s", part.rid, error)
        return None, True


async def _wait_after(fruitless: int, wanted: Wanted) -> None:
    if fruitless == _TRIES:
        raise UpstreamUnavailable(
            f"aborted it {_TRIES} times, without a pause of this Proxy's",
            subject=f"generation {wanted.rid}",
            remedy="pause and resume the rollout here instead of at the engine",
        )
    await asyncio.sleep(_WAIT_S * 2**fruitless)


class _Made:
    """What there is of a generation so far: the replies that are kept, and their prompts' lengths.

    Every request has an id of its own, so that an abort which comes late does not meet the next;
    and none begins with another's, for an engine aborts all that begin with an id.
    """

    def __init__(self, wanted: Wanted, rule: VersionRule) -> None:
        self._wanted = wanted
        self._rule = rule
        self._requests = 0
        self._parts: list[tuple[int, GenerateReply]] = []

    @property
    def in_parts(self) -> bool:
        """Whether it is more than one reply."""
        return len(self._parts) > 1

    @property
    def whole(self) -> bool:
        """Whether nothing more is to be generated."""
        return bool(self._parts) and self._finish != "abort"

    def add(self, part: Wanted, reply: GenerateReply) -> None:
        """Keep a reply.

        Raises
        ------
        VersionSpan
        """
        self._parts.append((len(part.input_ids), reply))
        versions = [reply.version for _, reply in self._parts]
        self._rule.check(versions, f"generation {self._wanted.rid}")

    def rest(self) -> Wanted:
        """Return what is to be asked for next."""
        self._requests += 1
        if self._requests == 1:
            return self._wanted
        rid = f"{self._requests}.{self._wanted.rid}"
        if not self._parts:
            return replace(self._wanted, rid=rid)
        ids = [self._wanted.input_ids, *(reply.output_ids for _, reply in self._parts)]
        input_ids = np.concatenate(ids)
        return replace(
            self._wanted,
            rid=rid,
            input_ids=input_ids,
            max_new_tokens=self._wanted.max_new_tokens - self._tokens,
            start_row=len(input_ids) - 1,
        )

    def joined(self) -> Generated:
        """Return all of it; one reply as it is, without a copy."""
        replies = [reply for _, reply in self._parts]
        return Generated(
            response=_together([reply.output_ids for reply in replies]),
            logprobs=_together([reply.logprobs for reply in replies]),
            routed_experts=self._routing(),
            versions=_runs(replies),
            finish=self._finish,
        )

    @property
    def _tokens(self) -> int:
        return sum(_tokens(reply) for _, reply in self._parts)

    @property
    def _finish(self) -> str:
        """The last reply's, unless it was aborted when it had all its tokens."""
        finish = self._parts[-1][1].finish
        full = self._tokens >= self._wanted.max_new_tokens
        return "length" if finish == "abort" and full else finish

    def _routing(self) -> Tokens | None:
        if self._wanted.routing is None:
            return None
        start = self._wanted.start_row
        return join_chunks(
            [
                RolloutChunk(
                    data=_rows(reply),
                    prefix_token_count=prefix,
                    output_token_count=_tokens(reply),
                    is_first_chunk=number == 0,
                    start_row=reply.start_row,
                    version=reply.version,
                )
                for number, (prefix, reply) in enumerate(self._parts)
            ],
            first_row=start,
            rows=len(self._wanted.input_ids) + self._tokens - 1 - start,
        )


def _tokens(reply: GenerateReply) -> int:
    return len(reply.output_ids)


def _runs(replies: Sequence[GenerateReply]) -> tuple[tuple[str, int], ...]:
    """Return runs of versions; one of no tokens where nothing was generated."""
    by_version = itertools.groupby(replies, key=lambda reply: reply.version)
    return tuple((version, sum(map(_tokens, run))) for version, run in by_version)


def _rows(reply: GenerateReply) -> Tokens:
    assert reply.routed_experts is not None  # the parser sees to it wherever there are tokens
    return reply.routed_experts


def _together(parts: list[npt.NDArray[_N]]) -> npt.NDArray[_N]:
    return np.concatenate(parts) if len(parts) > 1 else parts[0]
