"""A session's requests as they come: routed, made into prompts, and kept once they are recorded."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from tq_fs.errors import InvalidRequest
from tq_fs.trajectory._history import History, Route
from tq_fs.trajectory._messages import Message, digest_of_tools, digests
from tq_fs.trajectory._prompt import Asked, Renderer, rest_of_ids, text_to_append
from tq_fs.trajectory._records import StepRecord, Tokens
from tq_fs.trajectory._session import Trajectory
from tq_fs.trajectory._trie import messages_to
from tq_fs.trajectory._turn import Request, Turn, appended, whole_turn

TEMPLATE_REWROTE = "template rewrote the history"
TOKENS_CHANGED = "tokens changed"


@dataclass(frozen=True, slots=True)
class _Rendered:
    """How a Step was asked, and the text of the stop token that ends its reply, if one does."""

    options: Mapping[str, Any]
    ended: str


class Conversation:
    """The messages of one session incarnation. Safe to call from many threads.

    Every turn that was begun is either committed, once its Step is recorded, or cancelled. Until
    then a turn that appends claims its parent: other requests of the session become branches.

    Keeps each message once, and some hundred bytes a Step besides. What it is given is not copied,
    and must not be changed afterwards.

    Parameters
    ----------
    trajectory
        The session's Steps.
    renderer
        The model's chat template and tokenizer.
    """

    def __init__(self, trajectory: Trajectory, renderer: Renderer) -> None:
        self._trajectory = trajectory
        self._renderer = renderer
        self._stops = {i: renderer.decode([i]) for i in renderer.stop_ids}
        self._history = History()
        self._rendered: dict[int, _Rendered] = {}
        self._claims: dict[int, Route] = {}
        self._lock = threading.Lock()

    def begin(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        options: Mapping[str, Any] = {},
    ) -> Turn:
        """Decide which Step a request will be, and make its prompt.

        Renders and tokenizes: call it in a thread, and cancel the turn it returns also where
        nobody waits for it any more.

        The kind is chosen by the table of rules in ``_history``, by messages alone. An append is
        then confirmed, or becomes a boundary:

        ========  ============================================  ==============================
        mode      an append is confirmed where                  reason of the boundary
        ========  ============================================  ==============================
        tito      the request's rendering begins with that of   "template rewrote the history"
                  the parent's conversation, with its options
        snapshot  the prompt's ids begin with the parent's      "tokens changed"
                  whole sequence
        ========  ============================================  ==============================

        Raises
        ------
        InvalidRequest
            No messages, or none that the chat template takes; nothing is claimed.
        """
        if not messages:
            raise InvalidRequest("holds none", subject="messages", remedy="send at least one")
        request = self._route(messages, tools or (), options)
        with ExitStack() as undo:
            undo.callback(self._release, request.route)
            known = messages_to(request.route.node)
            fresh = [message for message, _ in request.new]
            turn = self._turn(
                request, Asked(messages=[*known, *fresh], tools=request.tools, options=options)
            )
            if turn.kind == "append":
                undo.pop_all()
        return turn

    def commit(self, turn: Turn, record: StepRecord, reply: Message) -> None:
        """Keep a turn whose Step is recorded; a second time it does nothing.

        Parameters
        ----------
        record
            The Step.
        reply
            The assistant's message as it is returned to the client.
        """
        request = turn.request
        continues = turn.parent if turn.kind == "append" else None
        with self._lock:
            if record.index not in self._history:
                self._history.add(
                    record.index,
                    request.route.node,
                    request.new,
                    reply,
                    request.tools,
                    continues=continues,
                )
                self._rendered[record.index] = self._as_rendered(turn, record)
        self._release(request.route)

    def cancel(self, turn: Turn) -> None:
        """Give up a turn, so that another may append to its parent.

        Does nothing where it was cancelled or committed before.
        """
        self._release(turn.request.route)

    def document(self) -> dict[str, Any]:
        """Return what was asked and said, JSON-able, to be kept with the trajectory.

        Returns
        -------
        dict
            ``schema``; ``messages``, each once; ``parents``, for each the number of the one before
            it, None for a first one; ``tools``, the different lists of schemas; ``steps``, for each
            ``step``, its index, and the numbers of the last message of its ``prompt``, of its
            ``reply`` and of its ``tools``.
        """
        with self._lock:
            return self._history.document()

    # ------------------------------------------------------------ routes

    def _route(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> Request:
        """Decide where a request belongs, and claim its parent where it is to append to it."""
        marks, mark_of_tools = digests(messages), digest_of_tools(tools)
        with self._lock:
            route = self._history.route(marks, mark_of_tools, self._claims)
            if route.parent is not None and route.kind in ("append", "branch"):
                tools = self._history.tools_of(route.parent)
            if route.parent is not None and route.kind == "append":
                self._claims[route.parent] = route
        new = list(zip(messages, marks, strict=True))[route.shared :]
        return Request(route=route, new=new, tools=tools, options=options)

    def _release(self, route: Route) -> None:
        with self._lock:
            if route.parent is not None and self._claims.get(route.parent) is route:
                del self._claims[route.parent]

    def _as_rendered(self, turn: Turn, record: StepRecord) -> _Rendered:
        options = turn.request.options
        if turn.parent is not None and self._rendered[turn.parent].options == options:
            options = self._rendered[turn.parent].options  # kept once
        ended = self._stops.get(int(record.tokens[-1]), "") if record.response else ""
        return _Rendered(options, ended)

    # ------------------------------------------------------------ prompts

    def _turn(self, request: Request, asked: Asked) -> Turn:
        prompt = asked.prompt(self._renderer)
        parent = request.route.parent
        if request.route.kind != "append" or parent is None:
            return whole_turn(request, self._renderer.encode(prompt))
        before = self._trajectory.sequence(parent)
        if self._trajectory.mode == "tito":
            return self._spliced(request, asked, prompt, parent, before)
        return self._compared(request, prompt, parent, before)

    def _spliced(
        self, request: Request, asked: Asked, prompt: str, parent: int, before: Tokens
    ) -> Turn:
        was = self._rendered[parent]
        beginning = asked.beginning(self._renderer, request.route.shared, was.options)
        new = text_to_append(prompt, beginning, self._stops.values(), was.ended)
        if new is None:
            return whole_turn(request, self._renderer.encode(prompt), TEMPLATE_REWROTE)
        context = self._renderer.encode(new)
        first_row = self._trajectory.first_row("append", parent)
        return appended(request, context, np.concatenate((before, context)), first_row)

    def _compared(self, request: Request, prompt: str, parent: int, before: Tokens) -> Turn:
        ids = self._renderer.encode(prompt)
        context = rest_of_ids(ids, before)
        if context is None:
            return whole_turn(request, ids, TOKENS_CHANGED)
        first_row = self._trajectory.first_row("append", parent)
        return appended(request, context, ids, first_row)
