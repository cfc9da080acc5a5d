"""What the agents do: multi-turn sessions, played on the engine once and kept as plain arrays.

Imports no torch, so that a process that only replays them stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tq_fs.fields import LOGPROBS, ROUTED_EXPERTS, FieldSpec, logprobs, routed_experts
from tq_fs.session import Session
from tq_fs.trajectory import StepInput, StepKind

if TYPE_CHECKING:
    from tq_fs.demo.engine import Reply, TinyMoe

MiB = 1024 * 1024
Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large the demo is.

    Attributes
    ----------
    layers, experts, topk, hidden
        Of the model.
    sessions
        Rollout sessions that the model plays.
    prompt_tokens, tool_tokens, new_tokens
        Length of a first prompt, of a tool result and of a response; prompts and tool results
        vary by a quarter.
    payload_bytes
        Routing, as int32, to replay through each path when memory is measured.
    budget_bytes
        Bytes of a micro-batch.
    replayed_segments
        Segments to replay in the training forward pass.
    """

    layers: int = 12
    experts: int = 64
    topk: int = 8
    hidden: int = 64
    sessions: int = 6
    prompt_tokens: int = 512
    tool_tokens: int = 320
    new_tokens: int = 24
    payload_bytes: int = 256 * MiB
    budget_bytes: int = 16 * MiB
    replayed_segments: int = 3

    def model(self) -> dict[str, int]:
        """Return the arguments of :class:`tq_fs.demo.engine.TinyMoe`."""
        return {
            "layers": self.layers,
            "experts": self.experts,
            "topk": self.topk,
            "hidden": self.hidden,
        }

    def fields(self) -> list[FieldSpec]:
        """Declare what is recorded of every Step."""
        experts = routed_experts(layers=self.layers, topk=self.topk, experts=self.experts)
        return [logprobs(), experts]


DEFAULT = Scale()
TINY = Scale(
    layers=3,
    experts=16,
    topk=2,
    hidden=32,
    sessions=3,
    prompt_tokens=40,
    tool_tokens=12,
    new_tokens=8,
    payload_bytes=MiB // 2,
    budget_bytes=MiB // 8,
)


class Cue(NamedTuple):
    """One turn of a script: how it hangs on an earlier one, as in :class:`tq_fs.StepInput`."""

    kind: StepKind
    parent: int | None = None
    reason: str = ""


SCRIPTS = (
    # Calls a tool twice, then tries again from inside its second response.
    (Cue("create"), Cue("append", 0), Cue("append", 1), Cue("branch", 1), Cue("append", 3)),
    # Comes near the context limit: its history is rewritten, and it goes on from the summary.
    (
        Cue("create"),
        Cue("append", 0),
        Cue("append", 1),
        Cue("boundary", 2, "compaction"),
        Cue("append", 3),
    ),
    # Calls tools until it is done.
    (Cue("create"), Cue("append", 0), Cue("append", 1), Cue("append", 2)),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One model invocation: what went in that is new, and what the engine returned.

    Attributes
    ----------
    kind, parent, reason
        As in :class:`tq_fs.StepInput`.
    context
        int32 ``[c]``: the whole prompt, or for append what is new since the parent.
    response
        int32 ``[r]``.
    logprobs
        float32 ``[r]``.
    routed_experts
        int32 ``[T - 1, layers, topk]``: rows of the whole sequence of T tokens, as engines
        return them.
    logits
        float32 ``[r, vocab]`` that the response was sampled from, to check replay against.
    """

    kind: StepKind
    parent: int | None
    reason: str
    context: Tokens
    response: Tokens
    logprobs: NDArray[np.float32]
    routed_experts: NDArray[np.int32]
    logits: NDArray[np.float32]

    def received(self) -> Turn:
        """Return the turn with large fields in memory of their own, as each reply brings them."""
        return replace(
            self, logprobs=self.logprobs.copy(), routed_experts=self.routed_experts.copy()
        )

    def step(self, session: Session) -> StepInput:
        """Return the Step to record: of the routing, only the rows it does not share."""
        own = self.routed_experts[session.first_row(self.kind, self.parent) :]
        return StepInput(
            kind=self.kind,
            parent=self.parent,
            reason=self.reason,
            context=self.context,
            response=self.response,
            values={LOGPROBS: self.logprobs, ROUTED_EXPERTS: own},
        )


@dataclass(frozen=True, slots=True)
class Rollout:
    """One session that was played: its id and its turns, in order."""

    session_id: str
    turns: list[Turn] = field(default_factory=list)

    def record(self, session: Session) -> None:
        """Record every turn, each when the one before is safe."""
        for turn in self.turns:
            session.record(turn.step(session))


def play(
    moe: TinyMoe,
    scale: Scale,
    *,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> list[Rollout]:
    """Play the sessions, all of them one turn further at a time.

    Parameters
    ----------
    seed
        Of prompts, tool results and sampling.
    advance
        Is called after each of :func:`rounds` rounds.
    """
    actors = [_Actor(index, moe.vocab, scale, seed) for index in range(scale.sessions)]
    for number in range(rounds(scale)):
        playing = [actor for actor in actors if number < len(actor.script)]
        prompts = [actor.prompt(number) for actor in playing]
        seeds = [1000 * seed + 100 * actor.index + number for actor in playing]
        replies = moe.generate(prompts, max_new_tokens=scale.new_tokens, seeds=seeds)
        for actor, reply in zip(playing, replies, strict=True):
            actor.take(number, reply)
        advance()
    return [actor.rollout for actor in actors]


def rounds(scale: Scale) -> int:
    """Return how many turns the longest session has."""
    return max(len(script) for script in SCRIPTS[: scale.sessions])


class _Actor:
    """One session while it is played: its user and its tools."""

    def __init__(self, index: int, vocab: int, scale: Scale, seed: int) -> None:
        self.index = index
        self.script: Sequence[Cue] = SCRIPTS[index % len(SCRIPTS)]
        self.rollout = Rollout(f"session-{index}")
        self._scale = scale
        self._vocab = vocab
        self._random = np.random.default_rng([seed, index])
        self._sequences: list[Tokens] = []
        self._known = 0  # tokens of the prompt that the parent's Step has recorded already

    def prompt(self, number: int) -> Tokens:
        """Return the whole prompt of the session's next turn."""
        kind, parent, _ = self.script[number]
        self._known = 0
        if parent is None:
            return self._words(self._scale.prompt_tokens)
        if kind == "boundary":  # the summary that takes the place of the history
            return self._words(self._scale.prompt_tokens // 2)
        history = self._sequences[parent]
        if kind == "append":
            self._known = len(history)
        else:
            history = history[: len(history) - self._scale.new_tokens // 2]
        return np.concatenate([history, self._words(self._scale.tool_tokens)])

    def take(self, number: int, reply: Reply) -> None:
        """Keep the engine's reply as a turn."""
        cue = self.script[number]
        self._sequences.append(reply.tokens)
        self.rollout.turns.append(
            Turn(
                kind=cue.kind,
                parent=cue.parent,
                reason=cue.reason,
                context=reply.prompt_ids[self._known :],
                response=reply.output_ids,
                logprobs=reply.output_logprobs,
                routed_experts=reply.routed_experts,
                logits=reply.output_logits,
            )
        )

    def _words(self, about: int) -> Tokens:
        count = about - about // 8 + int(self._random.integers(about // 4 + 1))
        return self._random.integers(0, self._vocab, count, dtype=np.int32)
