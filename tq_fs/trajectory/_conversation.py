"""A session's requests as they come: routed, made into prompts, and kept once they are recorded."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from tq_fs.errors import InvalidRequest
from tq_fs.trajectory._history import History, Route
from tq_fs.trajectory._messages import Message, digest_of_tools, digests
from tq_fs.trajectory._prompt import Asked, Renderer, rest_of_ids, text_to_append
from tq_fs.trajectory._records import StepRecord, Tokens
from tq_fs.trajectory._session import Trajectory
from tq_fs.trajectory._trie import messages_to
from tq_fs.trajectory._turn import Request, Turn, whole_turn

TEMPLATE_REWROTE = "template rewrote the history"
TOKENS_CHANGED = "tokens changed"


class Conversation:
    """The messages of one session incarnation. Safe to call from many threads.

    Every turn that was begun is either committed, once its Step is recorded, or cancelled. Until
    then a turn that appends claims its parent: other requests of the session become branches.

    Keeps each message once, and some hundred bytes a Step besides. Messages are not copied and must
    not be changed afterwards.

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
        self._ended: dict[int, str] = {}
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
                  the parent's conversation
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
        marks = digests(messages)
        schemas = tools or ()
        mark_of_tools = digest_of_tools(schemas)
        with self._lock:
            route = self._history.route(marks, mark_of_tools, self._claims)
            if route.kind == "append" and route.parent is not None:
                self._claims[route.parent] = route
        with ExitStack() as undo:
            undo.callback(self._release, route)
            known = messages_to(route.node)
            asked = Asked(
                messages=[*known, *messages[route.shared :]], tools=schemas, options=options
            )
            new = list(zip(messages, marks, strict=True))[route.shared :]
            turn = self._turn(asked, Request(route=route, new=new, tools=schemas))
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
        with self._lock:
            if record.index not in self._history:
                self._history.add(
                    record.index,
                    request.route.node,
                    request.new,
                    reply,
                    request.tools,
                    continues=turn.parent if turn.kind == "append" else None,
                )
                self._ended[record.index] = self._stop_of(record)
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

    # ------------------------------------------------------------ prompts

    def _turn(self, asked: Asked, request: Request) -> Turn:
        prompt = asked.prompt(self._renderer)
        parent = request.route.parent
        if request.route.kind != "append" or parent is None:
            return whole_turn(request, self._renderer.encode(prompt))
        before = self._trajectory.sequence(parent)
        if self._trajectory.mode == "tito":
            return self._spliced(asked, request, prompt, before)
        return self._compared(request, prompt, before)

    def _spliced(self, asked: Asked, request: Request, prompt: str, before: Tokens) -> Turn:
        route = request.route
        assert route.parent is not None
        new = text_to_append(
            prompt,
            asked.beginning(self._renderer, route.shared),
            self._stops.values(),
            self._ended[route.parent],
        )
        if new is None:
            return whole_turn(request, self._renderer.encode(prompt), TEMPLATE_REWROTE)
        context = self._renderer.encode(new)
        return self._append(request, context, np.concatenate((before, context)))

    def _compared(self, request: Request, prompt: str, before: Tokens) -> Turn:
        ids = self._renderer.encode(prompt)
        context = rest_of_ids(ids, before)
        return (
            whole_turn(request, ids, TOKENS_CHANGED)
            if context is None
            else self._append(request, context, ids)
        )

    def _append(self, request: Request, context: Tokens, ids: Tokens) -> Turn:
        parent = request.route.parent
        return Turn(
            kind="append",
            parent=parent,
            reason="",
            context=context,
            input_ids=ids,
            first_row=self._trajectory.first_row("append", parent),
            request=request,
        )

    def _stop_of(self, record: StepRecord) -> str:
        """Return the text of the stop token that ends what a Step generated; empty without one."""
        return self._stops.get(int(record.tokens[-1]), "") if record.response else ""

    def _release(self, route: Route) -> None:
        with self._lock:
            if route.parent is not None and self._claims.get(route.parent) is route:
                del self._claims[route.parent]
