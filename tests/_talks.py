"""A session's conversation with an engine that says what the test wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import tq_fs
from tests._templates import Manner, SmallTemplate, Tokens
from tq_fs.keys import Incarnation
from tq_fs.manifests import Mode
from tq_fs.trajectory import Conversation, Renderer, Segment, StepRecord, Trajectory, Turn, chains
from tq_fs.trajectory import build_segment as build

Message = dict[str, Any]


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def tool(content: str, number: int = 0) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": f"call_{number}"}


def said(content: str | None, reasoning: str | None = None, calls: Sequence[Any] = ()) -> Message:
    reply: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        reply["reasoning_content"] = reasoning
    if calls:
        reply["tool_calls"] = list(calls)
    return reply


def schema(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def text_of(reply: Mapping[str, Any]) -> str:
    """Return what a model writes for a reply, as the templates render it."""
    thinking = reply.get("reasoning_content")
    calls = [c["function"] for c in reply.get("tool_calls", ())]
    return "".join(
        [f"<think>\n{thinking}\n</think>\n" if thinking else "", reply["content"] or ""]
        + [f"<tool_call>{c['name']}{c['arguments']}</tool_call>" for c in calls]
    )


class Talk:
    """A Conversation and the Trajectory that it speaks of."""

    def __init__(
        self, manner: Manner = "plain", mode: Mode = "tito", renderer: Renderer | None = None
    ) -> None:
        self.template = SmallTemplate(manner)
        fields = [tq_fs.logprobs(), tq_fs.routed_experts(layers=1, topk=1, experts=8)]
        self.trajectory = Trajectory(Incarnation("train", "s", "i"), fields, mode)
        self.conversation = Conversation(self.trajectory, renderer or self.template)

    def begin(self, messages: Sequence[Message], tools: Any = None, **options: Any) -> Turn:
        return self.conversation.begin(messages, tools, options=options)

    def generated(
        self, reply: Mapping[str, Any], stop: str = "<|im_end|>", *, letters: bool = False
    ) -> Tokens:
        """Return the ids of a reply and its stop token; with `letters` not the tokenizer's own."""
        text = text_of(reply)
        ids = self.template.letters(text) if letters else self.template.ids(text)
        return np.concatenate([ids, self.template.ids(stop)])

    def record(self, turn: Turn, response: Tokens, version: str = "v0") -> StepRecord:
        """Record a turn as the Proxy does; rows that do not fit are refused here."""
        total = len(turn.input_ids) + len(response)
        values = {
            "logprobs": np.zeros(len(response), np.float32),
            "routed_experts": np.zeros((total - 1 - turn.first_row, 1, 1), np.int32),
        }
        step = turn.step(response, values, versions=[(version, len(response))])
        planned = self.trajectory.plan(step)
        return self.trajectory.commit(planned, None, frozenset(values))

    def answer(
        self, turn: Turn, reply: Message, stop: str = "<|im_end|>", *, letters: bool = False
    ) -> StepRecord:
        """Record a turn with a reply, and commit it."""
        record = self.record(turn, self.generated(reply, stop, letters=letters))
        self.conversation.commit(turn, record, reply)
        return record

    def say(self, messages: Sequence[Message], reply: Message, tools: Any = None) -> StepRecord:
        """Ask and answer."""
        return self.answer(self.begin(messages, tools), reply)

    def text(self, step: int) -> str:
        """Return the text of a Step's whole sequence."""
        return self.template.decode(self.trajectory.sequence(step))

    def segments(self) -> list[Segment]:
        """Return the lineage view."""
        return [
            build(c, (), ref=None, session_id="s", view="lineage", index=i)
            for i, c in enumerate(chains(self.trajectory.records(), "lineage"))
        ]
