"""Random sessions through the Proxy, with the store off and on: every tensor is the same.

Several sessions are played at once. What the engine does to a request (how long its reply is,
whether it is cut and goes on under other weights, whether it hangs until the client goes away) is
told by the request's seed, so that both Proxies see the same whatever the order of arrival. The
tensors are compared with each other, and with what the engine says of the recorded tokens.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tq_fs
from tests._engine_replies import logprobs_of, rows_of
from tests._engines import AskedRequest, Planned
from tests._proxies import EXPERTS, LAYERS, TOOL, TOPK, Message, World, together, user, world
from tests._rollouts import assert_bits
from tq_fs.trajectory import messages_of

What = Literal["ask", "tool", "retry", "edit", "branch", "rewrite", "tools", "leave", "discard"]
MODES = ("tito", "snapshot")
OTHER_TOOL = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
_names = itertools.count()


class Op(NamedTuple):
    """One thing that an agent does.

    Attributes
    ----------
    what
        See `_Player`.
    pick
        Chooses among earlier turns.
    words
        Tells texts apart.
    cut
        After how many tokens the engine cuts the reply, for new weights; 0: not at all.
    version
        Of the weights before that.
    """

    what: What
    pick: int
    words: int
    cut: int
    version: int

    @property
    def seed(self) -> int:
        """What tells the engine: the same for both Proxies."""
        return self.words * 1000 + self.version * 100 + self.cut


def planned() -> Any:
    """An engine's plan: a request is cut once, and goes on under the next version."""
    cut: set[str] = set()  # rids; a part that follows is called "2.RID"
    lock = threading.Lock()

    def plan(asked: AskedRequest) -> Planned:
        version, after = asked.seed // 100 % 10, asked.seed % 100
        if after == 99:
            return Planned("hold", 1, str(version))
        first = asked.rid.rpartition(".")[2]
        with lock:
            if after and first not in cut:
                cut.add(first)
                return Planned("abort", after - 1, str(version))
        return Planned(version=str(version + (after > 0)))

    return plan


ops = st.builds(
    Op,
    what=st.sampled_from(
        [
            *("ask", "ask", "ask", "tool", "retry", "edit", "branch", "rewrite"),
            *("tools", "leave", "discard"),
        ]
    ),
    pick=st.integers(0, 7),
    words=st.integers(0, 99),
    cut=st.sampled_from((0, 0, 0, 1, 2, 4)),
    version=st.integers(0, 3),
)
sessions = st.lists(st.lists(ops, min_size=1, max_size=7), min_size=1, max_size=3)


class Player:
    """An agent that does what it is told, in one world."""

    def __init__(self, world: World, session_id: str, instance: str) -> None:
        self.world = world
        self.session_id = session_id
        self.headers = {"X-Instance-Id": instance}
        self._begin()

    def _begin(self) -> None:
        self.done: list[list[Message]] = []  # conversations, each with its reply
        self.given: list[Any] | None = None

    def play(self, plan: Sequence[Op]) -> None:
        for op in plan:
            getattr(self, op.what)(op)
        if not self.done:
            self.ask(plan[0])

    def ask(self, op: Op) -> None:
        before = self.done[-1] if self.done else []
        self._send([*before, user(f"question {op.words}")], op)

    def tool(self, op: Op) -> None:
        before = self.done[-1] if self.done else [user("begin")]
        self._send([*before, {"role": "tool", "content": f"result {op.words}"}], op)

    def retry(self, op: Op) -> None:
        if self.done:
            self._send(self.done[op.pick % len(self.done)][:-1], op)

    def edit(self, op: Op) -> None:
        if self.done:
            asked = self.done[op.pick % len(self.done)][:-2]
            self._send([*asked, user(f"instead {op.words}")], op)

    def branch(self, op: Op) -> None:
        if self.done:
            self._send([*self.done[op.pick % len(self.done)], user(f"or {op.words}")], op)

    def rewrite(self, op: Op) -> None:
        first = self.done[0][:1] if self.done and op.pick % 2 else []
        self._send([*first, user(f"summary {op.words}")], op)

    def tools(self, op: Op) -> None:
        self.given = [TOOL, OTHER_TOOL][: op.pick % 3] or None
        self.ask(op)

    def leave(self, op: Op) -> None:
        """Go away while the engine generates: nothing is recorded."""
        seed = op.seed // 100 * 100 + 99
        before = self.done[-1] if self.done else []
        seen = len(self.world.engine.asked)
        body = self._body([*before, user(f"never {op.words}")], seed)
        connection = http.client.HTTPConnection(self.world.proxy.url.removeprefix("http://"))
        connection.request("POST", "/v1/chat/completions", json.dumps(body), self._headers())

        def came() -> bool:
            return any(asked.seed == seed for asked in self.world.engine.asked[seen:])

        self.world.engine.wait_for(came)
        connection.close()
        self.world.quiet(self.session_id)

    def discard(self, _op: Op) -> None:
        if self.done:
            answer = self.world.send("POST", "/session/discard", {"session_id": self.session_id})
            assert answer.status == 200, answer.body
            self._begin()

    # ------------------------------------------------------------ wire

    def _send(self, messages: list[Message], op: Op) -> None:
        self.done.append([*messages, self._ask(messages, op)])

    def _ask(self, messages: list[Message], op: Op) -> Message:
        answer = self.world.send(
            "POST", "/v1/chat/completions", self._body(messages, op.seed), self._headers()
        )
        assert answer.status == 200, answer.body
        reply: Message = answer.json["choices"][0]["message"]
        return reply

    def _body(self, messages: list[Message], seed: int) -> dict[str, Any]:
        chosen = {} if self.given is None else {"tools": self.given}
        return {"messages": messages, "max_tokens": 6, "seed": seed, **chosen}

    def _headers(self) -> dict[str, str]:
        return {"X-Session-Id": self.session_id, **self.headers}


@pytest.fixture(scope="module", params=MODES)
def worlds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[World]]:
    """A Proxy with the store off, and one with it on, each before an engine of its own."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                world(
                    folder,
                    mode=request.param,
                    views=("lineage", "timeline"),
                    engine={"plan": planned()},
                )
            )
            for folder in (None, tmp_path_factory.mktemp("store"))
        ]


@contextmanager
def pausing(world: World) -> Iterator[None]:
    """Pause and resume generation all the while; agents notice nothing but the time."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.02):
            for what in ("pause", "resume"):
                assert world.send("POST", f"/v1/rollout/{what}", {}).status == 200

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(30)


def finalized(world: World, session_id: str) -> list[tq_fs.Segment]:
    answer = world.send("POST", "/session/finalize", {"session_id": session_id})
    assert answer.status == 200, answer.body
    segments = world.client.read(session_ids=[session_id])
    told = [(s["view"], s["index"], s["tokens"]) for s in answer.json["segments"]]
    assert told == [(s.view, s.index, len(s.tokens)) for s in segments]
    return segments


def versions_by_token(segment: tq_fs.Segment) -> list[str]:
    return [version for version, count in segment.versions for _ in range(count)]


def assert_as_the_engine_said(segment: tq_fs.Segment, logprobs: Any, rows: Any) -> None:
    """Compare with functions of the tokens and of the weights that generated them."""
    tokens, versions = segment.tokens.tolist(), versions_by_token(segment)
    first = len(tokens) - segment.response_length
    want_logprobs = np.zeros(len(tokens), np.float32)
    want_rows = np.zeros((len(tokens) - 1, LAYERS, TOPK), np.int32)
    for version in set(versions):
        mine = np.array([v == version for v in versions])
        said = logprobs_of(tokens, 0, version=version)
        want_logprobs[mine] = said[mine]
        routed = rows_of(tokens, layers=LAYERS, topk=TOPK, experts=EXPERTS, version=version)
        want_rows[mine[1:]] = routed[mine[1:]]  # a row belongs to the token that it led to
    want_logprobs[segment.loss_mask == 0] = 0.0
    assert_bits(logprobs, want_logprobs[first:], segment.session_id)
    assert_bits(rows, want_rows, segment.session_id)


def assert_same(stored: tq_fs.Segment, kept: tq_fs.Segment) -> None:
    for name in ("session_id", "view", "index", "steps", "versions", "response_length"):
        assert getattr(stored, name) == getattr(kept, name), name
    assert_bits(stored.tokens, kept.tokens, "tokens")
    assert_bits(stored.loss_mask, kept.loss_mask, "loss mask")
    assert stored.extra["conversation"] == kept.extra["conversation"]
    assert stored.ref is not None
    assert kept.ref is None
    assert not stored.arrays
    assert set(kept.arrays) == {"logprobs", "routed_experts"}


@pytest.mark.slow
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plans=sessions)
def test_tensors_are_the_same_with_the_store_off_and_on(
    worlds: list[World], plans: list[list[Op]]
) -> None:
    number = next(_names)
    names = [f"rollout {number}/{i}" for i in range(len(plans))]
    segments: list[list[tq_fs.Segment]] = []
    for one in worlds:
        players = [Player(one, name, f"prompt {number}") for name in names]
        with pausing(one):
            ended = together(
                [partial(p.play, plan) for p, plan in zip(players, plans, strict=True)]
            )
        assert ended == [None] * len(plans)
        segments.append([s for name in names for s in finalized(one, name)])
    kept, stored = segments
    memory, disk = worlds
    theirs, ours = memory.store.hydrate(kept), disk.store.hydrate(stored)
    for place, (mine, other) in enumerate(zip(stored, kept, strict=True)):
        assert_same(mine, other)
        for name in theirs:
            assert_bits(ours[name][place], theirs[name][place].numpy(), f"{name} of {mine.ref}")
        assert_as_the_engine_said(
            mine, ours["rollout_log_probs"][place], ours["rollout_routed_experts"][place]
        )
        said = messages_of(mine.extra["conversation"], mine.steps[-1])
        assert said[-1]["role"] == "assistant"
    disk.store.release(stored, "train")
    assert disk.steps_on_disk() == 0
    for one in worlds:
        one.client.forget(names)
        assert not one.tasks()
