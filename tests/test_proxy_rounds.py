"""Random histories of several sessions at once: the same tensors whatever the store and its mode.

Agents ask in rounds, all at once within a round: they go on, try again, go back, compact what was
said, change their tools, give up, begin anew; weights change between rounds and, with pauses, in
the middle of generations. What must come out of it is said by the engine (a function of tokens and
weights), not by what was recorded.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests._proxies import TOOL, Message, World, check_tensors, together, user, wait_until, world
from tests._rollouts import assert_bits
from tq_fs.manifests import Mode

ROUNDS = 7
AGENTS = 4
OTHER_TOOL = {"type": "function", "function": {"name": "find", "parameters": {}}}


@dataclass
class Agent:
    """One rollout, as its agent sees it; the same seed does the same.

    `heads` are the conversations it may go on with, each ending with an answer.
    """

    name: str
    random: random.Random
    heads: list[list[Message]] = field(default_factory=list)
    tools: list[Any] | None = None
    kinds: list[str] = field(default_factory=list)
    said: int = 0

    def next(self) -> list[Message]:
        """What it asks now."""
        self.said += 1
        question = user(f"{self.name} {self.said} " + "x" * self.random.randrange(12))
        if not self.heads:
            return [{"role": "system", "content": "be brief"}, question]
        head = self.random.choice(self.heads[-3:])
        way = self.random.randrange(8)
        if way == 0:
            return head[:-1]  # the same again
        if way == 1:
            cut = self.random.randrange(1, len(head))
            return [*head[:cut], question]  # back to somewhere
        if way == 2:
            return [head[0], user(f"in short {self.said}"), head[-1], question]  # compacted
        if way == 3:
            self.tools = self.random.choice([None, [TOOL], [OTHER_TOOL]])
        return [*self.heads[-1], question]

    def ask(self, w: World, messages: list[Message]) -> None:
        seed = self.random.randrange(100)
        answer = w.chat(self.name, messages, tools=self.tools, seed=seed, max_tokens=9)
        assert answer.status == 200, answer.body
        body = answer.json
        self.kinds.append(body["tq_fs"]["kind"])
        self.heads.append([*messages, body["choices"][0]["message"]])

    def begin_anew(self, w: World) -> None:
        w.client.discard(self.name)
        self.heads.clear()


def play(w: World, seed: int) -> list[Agent]:
    """Let agents ask, in rounds."""
    plan = random.Random(seed)
    agents = [Agent(f"agent {i}", random.Random(seed * 100 + i)) for i in range(AGENTS)]
    for number in range(ROUNDS):
        way = plan.randrange(5)
        if way == 0:
            w.engine.version = str(number)
        if way == 1 and number:
            plan.choice(agents).begin_anew(w)
        if way == 2 and number:
            go_away(w, plan.choice(agents))
        asked = [partial(a.ask, w, a.next()) for a in agents]
        if way == 3:
            through_a_pause(w, asked, str(number), after=plan.randrange(5))
        else:
            check(together(asked))
    return agents


def check(found: Sequence[object]) -> None:
    for error in found:
        if isinstance(error, BaseException):
            raise error


def through_a_pause(
    w: World, asked: Sequence[Callable[[], None]], version: str, *, after: int
) -> None:
    """All generations are cut after so many tokens, and go on with other weights."""
    for _ in asked:
        w.engine.fault("hold", after=after)
    before = len(w.engine.asked)

    def pause() -> None:
        w.engine.wait_for(lambda: w.engine.running == len(asked))
        assert len(w.engine.asked) == before + len(asked)
        assert w.client.pause() == len(asked)
        w.engine.version = version
        w.client.resume()

    check(together([*asked, pause]))


def go_away(w: World, agent: Agent) -> None:
    """It asks, and leaves before it is answered."""
    w.engine.fault("hang")
    body = b'{"messages":[{"role":"user","content":"gone"}],"max_tokens":9}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Session-Id: {agent.name}\r\n"
    with socket.create_connection(("127.0.0.1", int(w.proxy.url.split(":")[-1]))) as visitor:
        visitor.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        w.engine.wait_for(lambda: w.engine.running == 1)
    wait_until(lambda: not w.entry(agent.name).working)
    w.engine.wait_for(lambda: w.engine.running == 0)


@dataclass(frozen=True)
class Outcome:
    """All that a Segment is but for its reference, and what training gets of it."""

    what: tuple[Any, ...]
    arrays: tuple[Any, ...]


def outcomes(place: Path | None, mode: Mode, seed: int) -> list[Outcome]:
    views = ("lineage", "timeline")
    with world(place, mode=mode, views=views, engine={"length": 9}) as w:
        agents = play(w, seed)
        assert {k for a in agents for k in a.kinds} >= {"create", "append"}
        for agent in agents:
            w.client.finalize(agent.name)
        segments = w.client.read([agent.name for agent in agents])
        check_tensors(w, segments)
        batch = w.store.hydrate(segments)
        found = [
            Outcome(
                (s.session_id, s.view, s.index, s.steps, s.versions, s.response_length, s.extra),
                (
                    s.tokens,
                    s.loss_mask,
                    batch["rollout_log_probs"][i].numpy().copy(),
                    batch["rollout_routed_experts"][i].numpy().copy(),
                ),
            )
            for i, s in enumerate(segments)
        ]
        w.quiet()
        w.client.release(segments)
        assert w.steps_on_disk() == 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tito", "snapshot"])
@pytest.mark.parametrize("seed", range(5))
def test_the_store_changes_no_tensor(tmp_path: Path, mode: Mode, seed: int) -> None:
    on, off = outcomes(tmp_path, mode, seed), outcomes(None, mode, seed)
    assert [o.what for o in on] == [o.what for o in off]
    for one, other in zip(on, off, strict=True):
        for a, b in zip(one.arrays, other.arrays, strict=True):
            assert_bits(a, np.asarray(b), one.what)


def test_all_kinds_of_steps_are_played() -> None:
    """Of what the test above compares."""
    with world(None, engine={"length": 9}) as w:
        kinds = {k for seed in range(3) for a in play_once(w, seed) for k in a.kinds}
    assert kinds == {"create", "append", "branch", "boundary"}


def play_once(w: World, seed: int) -> list[Agent]:
    agents = play(w, seed)
    for agent in agents:
        w.client.discard(agent.name)
    return agents
