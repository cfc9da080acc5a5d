"""Which Step a request follows: the rules of routing.

The conversation of a Step is its prompt and its reply. A request shares *k* messages with it where
the first *k* of both are the same. Let C be the recorded conversation that it shares most with; of
several, one that it shares whole, else the latest Step's. The first line that is true decides:

====================================================  ========  ===========================
the request                                           kind      parent
====================================================  ========  ===========================
no Step yet, or k = 0                                 create    none
shares C whole; its Step is a tip, and not claimed    append    the Step of C
shares C whole                                        branch    the Step of C
ends where C goes on with a reply: asked again        branch    the Step that generated it
C goes on with another context message, and some      branch    the Step of the last shared
reply is shared                                                 reply
else: a reply was dropped or changed, or none shared  boundary  the Step of C
====================================================  ========  ===========================

The boundary's reason is "history rewritten". Where the tools are not the parent's, append and
branch become a boundary, "tools changed". A Step is a tip until a Step is appended to it, and
claimed while a request is on its way to be that Step.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tq_fs.errors import StepMissing
from tq_fs.trajectory._messages import (
    Message,
    digest,
    digest_of_tools,
    digest_without_reasoning,
)
from tq_fs.trajectory._records import StepKind
from tq_fs.trajectory._trie import Node, Trie, way_up

CONVERSATION_SCHEMA = "tq-fs/conversation/1"
HISTORY_REWRITTEN = "history rewritten"
TOOLS_CHANGED = "tools changed"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """Where a request belongs.

    Attributes
    ----------
    kind, parent, reason
        As in :class:`tq_fs.StepInput`.
    node
        The last message it shares with what is recorded.
    shared
        How many messages those are.
    """

    kind: StepKind
    parent: int | None
    reason: str = ""
    node: Node
    shared: int


@dataclass(frozen=True, slots=True)
class _Told:
    """What is kept of a Step: the node of its reply, and the number of its tools."""

    reply: Node
    tools: int


class History:
    """The messages and tools of a session, and which Step said what. Not thread-safe.

    Messages are not copied, and must not be changed afterwards.
    """

    def __init__(self) -> None:
        self._trie = Trie()
        self._steps: dict[int, _Told] = {}
        self._continued: set[int] = set()
        self._tools: dict[bytes, int] = {}
        self._tool_lists: list[list[Any]] = []

    # ------------------------------------------------------------ route

    def route(self, asked: Sequence[bytes], tools: bytes, claimed: Container[int]) -> Route:
        """Decide by the module's table.

        Parameters
        ----------
        asked
            Digests of the request's messages.
        tools
            Digest of its tools.
        claimed
            Steps to which a Step is about to be appended.
        """
        node, shared = self._trie.deepest(asked)
        kind, parent = self._decide(node, shared == len(asked), claimed)
        reason = HISTORY_REWRITTEN if kind == "boundary" else ""
        if kind in ("append", "branch") and not self._has_tools(parent, tools):
            kind, reason = "boundary", TOOLS_CHANGED
        return Route(kind=kind, parent=parent, reason=reason, node=node, shared=shared)

    def _decide(
        self, node: Node, ends: bool, claimed: Container[int]
    ) -> tuple[StepKind, int | None]:
        if node is self._trie.root:
            return "create", None
        if node.by is not None:
            free = node.by not in self._continued and node.by not in claimed
            return ("append" if free else "branch"), node.by
        following = self._following(node)
        if following.by is not None:
            return ("branch", following.by) if ends else ("boundary", node.latest)
        reply = next((n.by for n in way_up(node) if n.by is not None), None)
        return ("boundary", node.latest) if reply is None else ("branch", reply)

    def _has_tools(self, step: int | None, tools: bytes) -> bool:
        return step is not None and self._steps[step].tools == self._tools.get(tools)

    def _following(self, node: Node) -> Node:
        """Return the message after `node` in the latest conversation that goes through it."""
        ways = way_up(self._steps[node.latest].reply)
        return next(n for n in ways if n.parent is node)

    # ------------------------------------------------------------ record

    def add(
        self,
        step: int,
        node: Node,
        new: Sequence[tuple[Message, bytes]],
        reply: Message,
        tools: Sequence[Mapping[str, Any]],
        *,
        continues: int | None,
    ) -> None:
        """Keep what a recorded Step was asked and said.

        Parameters
        ----------
        step
            Its index.
        node, new
            Its prompt: the last message that it shared, and those after it with their digests.
        continues
            The Step that it was appended to, which is no tip any more.
        """
        for message, one in new:
            node = self._trie.child(node, one, message)
        said = self._trie.child(node, digest(reply, "reply"), reply)
        self._trie.find_also(said, digest_without_reasoning(reply))
        said.by = step if said.by is None else max(step, said.by)
        for passed in way_up(said):
            passed.latest = max(step, passed.latest)
        self._steps[step] = _Told(said, self._number_of(tools))
        if continues is not None:
            self._continued.add(continues)

    def _number_of(self, tools: Sequence[Mapping[str, Any]]) -> int:
        number = self._tools.setdefault(digest_of_tools(tools), len(self._tool_lists))
        if number == len(self._tool_lists):
            self._tool_lists.append(list(tools))
        return number

    # ------------------------------------------------------------ tell

    def __contains__(self, step: int) -> bool:
        """Tell whether a Step's conversation is kept."""
        return step in self._steps

    def tools_of(self, step: int) -> list[Any]:
        """Return the tool schemas of a Step, as they were when they came first."""
        return self._tool_lists[self._steps[step].tools]

    def document(self) -> dict[str, Any]:
        """Return all of it, JSON-able; see :meth:`Conversation.document`."""
        return {
            "schema": CONVERSATION_SCHEMA,
            "messages": [node.message for node in self._trie.nodes],
            "parents": [_number(node.parent) for node in self._trie.nodes],
            "tools": list(self._tool_lists),
            "steps": [
                {
                    "step": step,
                    "prompt": _number(told.reply.parent),
                    "reply": told.reply.number,
                    "tools": told.tools,
                }
                for step, told in sorted(self._steps.items())
            ],
        }


def messages_of(document: Mapping[str, Any], step: int) -> list[dict[str, Any]]:
    """Return the conversation up to and with a Step's reply.

    Parameters
    ----------
    document
        Of :meth:`Conversation.document`, also where it was JSON in between.

    Raises
    ------
    StepMissing
        It does not tell of that Step.
    """
    at = next((s["reply"] for s in document["steps"] if s["step"] == step), None)
    if at is None:
        raise StepMissing("its messages are not there", subject=f"Step {step}")
    messages = []
    while at is not None:
        messages.append(document["messages"][at])
        at = document["parents"][at]
    return messages[::-1]


def _number(node: Node | None) -> int | None:
    return None if node is None or node.parent is None else node.number
