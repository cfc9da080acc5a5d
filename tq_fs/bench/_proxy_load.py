"""Agents of ``tq-fs bench proxy``: sessions at once, each a turn after the other."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from tq_fs.errors import UpstreamRefused

_TIMEOUT_S = 300.0
NICE = 5  # of agents and engine
_PADDING = "Go on from here, and mind what was said before. "
Message = dict[str, Any]


def step_back() -> None:
    """Let the calling thread run after others: in earnest it would be on another machine."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


class Agent:
    """One session, over a connection of its own."""

    def __init__(self, url: str, session_id: str) -> None:
        where = urlsplit(url)
        self._connection = HTTPConnection(where.hostname or "", where.port, timeout=_TIMEOUT_S)
        self.session_id = session_id
        self.messages: list[Message] = []
        self.tokens = 0

    def turn(self, tokens: int) -> None:
        """Say something, and take an answer of so many tokens.

        Raises
        ------
        UpstreamRefused
            The Proxy answered with an error, or recorded the turn as something else than the
            first one or one that continues the last.
        """
        self.messages.append(
            {"role": "user", "content": f"{_PADDING}This is turn {len(self.messages) // 2}."}
        )
        answer = self._post(
            "/v1/chat/completions", {"messages": self.messages, "max_tokens": tokens}
        )
        kind, expected = answer["tq_fs"]["kind"], "create" if not self.tokens else "append"
        if kind != expected:
            raise UpstreamRefused(
                f"was recorded as {kind} where {expected} was meant: {answer['tq_fs']}",
                subject=f"a turn of session {self.session_id}",
            )
        self.messages.append(answer["choices"][0]["message"])
        self.tokens = answer["usage"]["total_tokens"]

    def discard(self) -> None:
        """End the session; what it stored is deleted."""
        self._post("/session/discard", {"session_id": self.session_id})
        self.close()

    def close(self) -> None:
        """Go away; the session stays open."""
        self._connection.close()

    def message_bytes(self) -> int:
        """Return the memory of its messages: each a dict and strings, once, as CPython has them."""
        return sum(map(_size, self.messages))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", "X-Session-Id": self.session_id}
        self._connection.request("POST", path, msgspec.json.encode(body), headers)
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise UpstreamRefused(
                f"HTTP status {answer.status}: {text[:500].decode('utf-8', 'replace')}",
                subject=f"{path} of session {self.session_id}",
            )
        return msgspec.json.decode(text)


def _size(value: object) -> int:
    below: list[object] = []
    if isinstance(value, dict):
        below = list(value.values())
    elif isinstance(value, list):
        below = value
    return sys.getsizeof(value) + sum(map(_size, below))


class Load(NamedTuple):
    """What a round asks for.

    Attributes
    ----------
    sessions
        At once.
    turns
        Of each.
    tokens
        Of an answer.
    """

    sessions: int
    turns: int
    tokens: int

    @property
    def steps(self) -> int:
        """Model invocations of a round."""
        return self.sessions * self.turns


class Agents:
    """Makes sessions of a Proxy, under names that are never used again."""

    def __init__(self, url: str, label: str) -> None:
        self._url = url
        self._names = (f"{label}-{number:05}" for number in itertools.count())
        self._last: list[Agent] = []

    def run(self, load: Load) -> list[Agent]:
        """Let sessions take their turns, all at once; they are open afterwards."""
        agents = [Agent(self._url, next(self._names)) for _ in range(load.sessions)]
        with ThreadPoolExecutor(load.sessions, initializer=step_back) as threads:
            for done in [threads.submit(_turns, agent, load) for agent in agents]:
                done.result()
        self._last = agents
        return agents

    def discard(self) -> None:
        """End the sessions of the last round."""
        for agent in self._last:
            agent.discard()
        self._last = []


def _turns(agent: Agent, load: Load) -> None:
    for _ in range(load.turns):
        agent.turn(load.tokens)
