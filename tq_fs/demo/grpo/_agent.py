"""An agent: a loop of plain OpenAI calls, as any harness makes them.

It lets the model write drafts, measures each with a tool, sums up and starts over with a short
history once (a context compaction), and asks for a last draft. A model with random weights writes
no well-formed tool call, so that the loop itself decides to measure; where the model does call, its
calls are answered.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from tq_fs.demo.grpo._processes import post

Message = dict[str, Any]
SYSTEM = "You write words in lowercase letters."
TOPICS = ("rivers", "glass", "the moon", "bread", "maps", "rain", "clocks", "salt")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "measure",
            "description": "Count the lowercase letters of a text.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}},
                "required": ["text"],
            },
        },
    }
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How a session goes.

    Attributes
    ----------
    drafts
        Drafts before the history is compacted, and after it.
    new_tokens
        Most tokens of a draft.
    seed
        Of the run. What a turn draws depends on it, the session and the turn alone.
    """

    drafts: int = 2
    new_tokens: int = 16
    seed: int = 0


class Agent:
    """Plays one session.

    Parameters
    ----------
    url
        Of the Proxy.
    session_id, group
        The session, and the prompt it belongs to.
    topic
        What the drafts are about.
    script
        How it goes.
    """

    def __init__(self, url: str, session_id: str, group: str, topic: str, script: Script) -> None:
        self._url = url
        self._headers = {"X-Session-Id": session_id, "X-Instance-Id": group}
        self._session_id = session_id
        self._topic = topic
        self._script = script
        self._turn = 0

    def play(self) -> None:
        """Write drafts, compact the history, and write some more."""
        task = f"Write a few words about {self._topic}."
        history = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
        measures = self._drafts(history)
        told = "; ".join(f"draft {n} had {measure}" for n, measure in enumerate(measures, 1))
        compacted = [history[0], {"role": "user", "content": f"{task} So far: {told}. Go on."}]
        self._drafts(compacted)

    def _drafts(self, history: list[Message]) -> list[str]:
        measures = []
        for _ in range(self._script.drafts):
            reply = self._ask(history)
            history.append(reply)
            measures.append(measure(reply.get("content") or ""))
            history += _answers(reply, measures[-1])
        return measures

    def _ask(self, history: list[Message]) -> Message:
        body = {
            "model": "tiny",
            "messages": history,
            "tools": TOOLS,
            "max_tokens": self._script.new_tokens,
            "temperature": 1.0,
            "seed": turn_seed(self._script.seed, self._session_id, self._turn),
        }
        self._turn += 1
        answer = post(self._url, "/v1/chat/completions", body, self._headers)
        message: Message = answer["choices"][0]["message"]
        return message


def measure(text: str) -> str:
    """Count the lowercase letters of a text: the tool."""
    letters = sum("a" <= character <= "z" for character in text)
    return f"{letters} lowercase letters of {len(text)} characters"


def turn_seed(seed: int, session_id: str, turn: int) -> int:
    """Return what a turn draws from: the same in every run, and whoever else is playing."""
    digest = sha256(json.dumps([seed, session_id, turn]).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def _answers(reply: Message, measured: str) -> list[Message]:
    """Return the tool's results: of the calls the model made, else of the one the loop makes."""
    calls = reply.get("tool_calls") or [{"id": "call_0"}]
    return [{"role": "tool", "tool_call_id": c["id"], "content": measured} for c in calls]
