"""Random conversations against a model that compares plain lists of messages.

Clients of one session start, go on, ask again, cut back, change what was said, leave reasoning out
and change their tools, several at once; some requests fail. What every request is told to be, and
each id that the engine is given, must be what a simple model says that knows no trie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests._talks import Message, Talk, said, schema, system, text_of, tool, user
from tests._templates import Manner, call
from tq_fs.manifests import Mode
from tq_fs.trajectory import Turn, messages_of

END = "<|im_end|>"
TOOLS: list[Any] = [None, [schema("weather")], [schema("weather"), schema("town")]]
CONTEXT = [user("the tool?"), user("and then?"), tool("fine"), system("be fine")]
CONTEXT += [said("the answer"), said("I said so", "hm")]  # what a client lets the model have said
REPLIES = [said("the answer"), said("the answer", "hm"), said("the answer", "well"), said("")]
REPLIES += [said(None, "hm", [call("weather", {"city": "Oslo"})]), said("let me see")]
OPTIONS: list[dict[str, Any]] = [{}, {"brief": True}, {"hint": "well: "}]


@dataclass(frozen=True)
class Op:
    """One request: which conversation it takes up, what it makes of it, and how it ends.

    `pick` 0 is the latest conversation; tools and options are its own where they are None.
    """

    what: Literal["start", "go on", "again", "cut", "change", "drop"]
    pick: int
    place: int
    new: Sequence[int]
    reply: int
    tools: int | None
    options: int | None
    stop: Literal["<|im_end|>", "", "<|end|>"]
    letters: bool
    keeps_reasoning: bool
    fails: bool
    wait: int


ops = st.builds(
    Op,
    what=st.sampled_from(["go on"] * 5 + ["start", "again", "cut", "change", "drop"]),
    pick=st.sampled_from([0, 0, 0, 1, 2, 5]),
    place=st.integers(0, 7),
    new=st.lists(st.integers(0, len(CONTEXT) - 1), min_size=0, max_size=2),
    reply=st.integers(0, len(REPLIES) - 1),
    tools=st.sampled_from([None] * 8 + [0, 1, 2]),
    options=st.sampled_from([None] * 5 + [0, 1, 2]),
    stop=st.sampled_from([END, END, END, "", "<|end|>"]),
    letters=st.sampled_from([False, False, False, True]),
    keeps_reasoning=st.booleans(),
    fails=st.sampled_from([False, False, False, False, True]),
    wait=st.sampled_from([0, 0, 0, 1, 2]),
)


# ---------------------------------------------------------------- the model


@dataclass
class Told:
    """A Step as the model knows it."""

    index: int
    conversation: list[Message]
    tools: int
    options: dict[str, Any]
    stop: str
    canonical: bool
    continued: bool = False


NOTHING = Told(-1, [], 0, {}, "", canonical=True)


@dataclass
class Expected:
    kind: str
    parent: int | None
    reason: str
    messages: list[Message]


@dataclass
class Model:
    """Recorded Steps as lists of messages, and the rules by comparing them all."""

    talk: Talk
    steps: dict[int, Told] = field(default_factory=dict)
    claimed: set[int] = field(default_factory=set)

    def generated_by(self, prefix: list[Message]) -> int | None:
        return max((s.index for s in self.steps.values() if s.conversation == prefix), default=None)

    def shared(self, told: Told, request: list[Message]) -> int:
        count = 0
        for mine, theirs in zip(told.conversation, request, strict=False):
            here = told.conversation[: count + 1]
            bare = {k: v for k, v in mine.items() if k != "reasoning_content"}
            if mine != theirs and (bare != theirs or self.generated_by(here) is None):
                break
            count += 1
        return count

    def expect(self, request: list[Message], tools: int, options: dict[str, Any]) -> Expected:
        best = max(
            ((self.shared(t, request), t) for t in self.steps.values()),
            key=lambda c: (c[0], c[0] == len(c[1].conversation), c[1].index),
            default=(0, None),
        )
        k, told = best
        if k == 0 or told is None:
            return Expected("create", None, "", request)
        messages = told.conversation[:k] + request[k:]
        kind, parent = self.rule(told, k, ends=k == len(request))
        if kind == "boundary":
            return Expected(kind, parent, "history rewritten", messages)
        if self.steps[parent].tools != tools:
            return Expected("boundary", parent, "tools changed", messages)
        if kind == "append" and not self.confirmed(told, messages, tools, options):
            tito = self.talk.trajectory.mode == "tito"
            reason = "template rewrote the history" if tito else "tokens changed"
            return Expected("boundary", parent, reason, messages)
        return Expected(kind, parent, "", messages)

    def rule(self, told: Told, k: int, *, ends: bool) -> tuple[str, int]:
        if k == len(told.conversation):
            free = not told.continued and told.index not in self.claimed
            return ("append" if free else "branch"), told.index
        following = self.generated_by(told.conversation[: k + 1])
        if following is not None:
            return ("branch", following) if ends else ("boundary", told.index)
        replies = [self.generated_by(told.conversation[:i]) for i in range(k, 0, -1)]
        known = [r for r in replies if r is not None]
        return ("branch", known[0]) if known else ("boundary", told.index)

    def confirmed(
        self, told: Told, messages: list[Message], tools: int, options: dict[str, Any]
    ) -> bool:
        prompt = self.render(messages, tools, options)
        if self.talk.trajectory.mode == "tito":
            return prompt.startswith(self.before(told))
        ids, old = self.talk.template.ids(prompt), self.talk.trajectory.sequence(told.index)
        return bool(np.array_equal(ids[: len(old)], old))

    def render(self, messages: list[Message], tools: int, options: dict[str, Any]) -> str:
        return self.talk.template.render(
            messages, TOOLS[tools], generation_prompt=True, options=options
        )

    def before(self, told: Told) -> str:
        return self.talk.template.render(
            told.conversation, TOOLS[told.tools], generation_prompt=False, options=told.options
        )


# ---------------------------------------------------------------- the world


@dataclass
class Held:
    """A request whose answer has not come yet."""

    op: Op
    turn: Turn
    expected: Expected
    tools: int
    due: int


class World:
    """Clients that do what the operations say, and what is checked at each."""

    def __init__(self, manner: Manner, mode: Mode) -> None:
        self.talk = Talk(manner, mode)
        self.model = Model(self.talk)
        self.held: list[Held] = []
        self.told: list[Told] = []
        self.options = OPTIONS if manner == "options" else OPTIONS[:1]
        self.sequences: dict[int, Any] = {}

    def play(self, operations: Sequence[Op]) -> None:
        for now, op in enumerate(operations):
            self.ask(op, now)
            for held in [h for h in self.held if h.due <= now]:
                self.end(held)
        for held in list(self.held):
            self.end(held)

    def taken(self, op: Op) -> Told | None:
        """Return the conversation that a client takes up."""
        return (
            self.told[-1 - op.pick % len(self.told)] if self.told and op.what != "start" else None
        )

    def request(self, op: Op) -> list[Message]:
        new = [CONTEXT[i] for i in op.new]
        told = self.taken(op)
        if told is None:
            return new or [CONTEXT[0]]
        taken = list(told.conversation)
        place = op.place % len(taken)
        if op.what == "again":
            return taken[:-1]
        if op.what == "cut":
            return taken[: place + 1] + new
        if op.what == "change":
            taken[place] = {**taken[place], "content": "changed"}
        if op.what == "drop":
            del taken[place]
        return taken + new or [CONTEXT[0]]

    def ask(self, op: Op, now: int) -> None:
        request, told = self.request(op), self.taken(op) or NOTHING
        tools = told.tools if op.tools is None else op.tools
        options = (
            told.options if op.options is None else self.options[op.options % len(self.options)]
        )
        sent = request if op.keeps_reasoning else [without_reasoning(m) for m in request]
        expected = self.model.expect(sent, tools, options)
        self.talk.template.encoded.clear()
        turn = self.talk.begin([decorated(m) for m in sent], TOOLS[tools], **options)
        encoded = list(self.talk.template.encoded)
        assert (turn.kind, turn.parent, turn.reason) == (
            expected.kind,
            expected.parent,
            expected.reason,
        )
        self.check_ids(turn, encoded, self.model.render(expected.messages, tools, options))
        if turn.kind == "append" and turn.parent is not None:
            self.model.claimed.add(turn.parent)
        self.held.append(Held(op, turn, expected, tools, now + op.wait))

    def check_ids(self, turn: Turn, encoded: list[str], prompt: str) -> None:
        ids = self.talk.template.ids(prompt)
        if turn.kind != "append":
            assert np.array_equal(turn.context, ids)
            assert np.array_equal(turn.input_ids, ids)
            return
        assert turn.parent is not None
        told = self.model.steps[turn.parent]
        before = self.sequences[turn.parent]
        assert np.array_equal(turn.input_ids[: len(before)], before)
        if self.talk.trajectory.mode == "tito":
            closing = "\n" if told.stop == END else END + "\n"
            new = closing + prompt[len(self.model.before(told)) :]
            assert encoded == [new]
            ids = np.concatenate([before, self.talk.template.ids(new)])
        assert np.array_equal(turn.input_ids, ids)
        assert np.array_equal(turn.context, ids[len(before) :])

    def end(self, held: Held) -> None:
        self.held.remove(held)
        op, turn = held.op, held.turn
        if turn.kind == "append" and turn.parent is not None:
            self.model.claimed.remove(turn.parent)
        if op.fails:
            self.talk.conversation.cancel(turn)
            return
        reply = REPLIES[op.reply]
        response = self.talk.generated(reply, op.stop, letters=op.letters)
        record = self.talk.record(turn, response)
        self.talk.conversation.commit(turn, record, decorated(reply))
        self.talk.conversation.cancel(turn)
        self.sequences[record.index] = np.concatenate([turn.input_ids, response])
        if turn.kind == "append" and turn.parent is not None:
            self.model.steps[turn.parent].continued = True
        canonical = response.tolist() == self.talk.template.ids(text_of(reply) + END).tolist()
        conversation = [*held.expected.messages, reply]
        self.model.steps[record.index] = Told(
            index=record.index,
            conversation=conversation,
            tools=held.tools,
            options=turn.request.options,  # type: ignore[arg-type]
            stop=op.stop,
            canonical=canonical,
        )
        self.told.append(self.model.steps[record.index])

    # ------------------------------------------------------------ in the end

    def check(self) -> None:
        document = self.talk.conversation.document()
        for index, told in self.model.steps.items():
            assert np.array_equal(self.talk.trajectory.sequence(index), self.sequences[index])
            assert [plain(m) for m in messages_of(document, index)] == told.conversation
        assert [s["step"] for s in document["steps"]] == sorted(self.model.steps)
        self.check_segments()

    def check_segments(self) -> None:
        for segment in self.talk.segments():
            last = self.model.steps[segment.steps[-1]]
            assert np.array_equal(segment.tokens, self.sequences[last.index])
            steps = [self.model.steps[i] for i in segment.steps]
            if all(s.canonical and not s.options.get("hint") for s in steps):
                text = self.talk.template.decode(segment.tokens)
                assert text + "\n" == self.model.before(last)


def without_reasoning(message: Message) -> Message:
    return {k: v for k, v in message.items() if k != "reasoning_content"}


def decorated(message: Message) -> Message:
    """Return a message as a client's library may send it."""
    extra: Message = {"refusal": None, "annotations": []} if message["role"] == "assistant" else {}
    calls = [
        {**c, "id": "another", "index": i} for i, c in enumerate(message.get("tool_calls", ()))
    ]
    return {**message, **extra, **({"tool_calls": calls} if calls else {})}


def plain(message: Message) -> Message:
    """Undo `decorated`."""
    kept = {k: v for k, v in message.items() if k not in ("refusal", "annotations")}
    calls = [
        call(c["function"]["name"], c["function"]["arguments"]) for c in kept.get("tool_calls", ())
    ]
    return {**kept, **({"tool_calls": calls} if calls else {})}


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    operations=st.lists(ops, min_size=5, max_size=20),
    manner=st.sampled_from(["plain", "plain", "thinking", "options"]),
    mode=st.sampled_from(["tito", "tito", "snapshot"]),
)
def test_conversations_are_what_a_plain_model_says(
    operations: list[Op], manner: Manner, mode: Mode
) -> None:
    world = World(manner, mode)
    world.play(operations)
    world.check()
