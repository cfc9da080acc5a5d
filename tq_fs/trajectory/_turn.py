"""A request on its way to be a Step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from tq_fs.trajectory._history import Route
from tq_fs.trajectory._input import StepInput
from tq_fs.trajectory._messages import Message
from tq_fs.trajectory._records import StepKind, Tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What is kept of a request until its Step is recorded.

    Attributes
    ----------
    route
        Where it belongs by its messages.
    new
        Its messages that were not recorded before, with their digests.
    tools, options
        Its tool schemas, and further variables of the chat template.
    """

    route: Route
    new: Sequence[tuple[Message, bytes]]
    tools: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """A model invocation that is to be: its prompt, and the Step it will become.

    Attributes
    ----------
    kind, parent, reason
        As in :class:`tq_fs.StepInput`.
    context
        The Step's prompt tokens, int32 ``[c]``: the whole prompt, or for append only what is new
        since the parent.
    input_ids
        The engine's prompt, int32 ``[n]``: for append the parent's sequence and `context`, else
        `context`.
    first_row
        First row of the whole sequence's routing that the Step holds.
    request
        Where it came from; for :class:`Conversation` alone.
    """

    kind: StepKind
    parent: int | None
    reason: str
    context: Tokens
    input_ids: Tokens
    first_row: int
    request: Request = field(repr=False)

    def step(
        self,
        response: npt.ArrayLike,
        values: Mapping[str, npt.ArrayLike],
        *,
        versions: Sequence[tuple[str, int]],
    ) -> StepInput:
        """Return the Step with what was generated.

        Parameters
        ----------
        response
            Generated tokens, int ``[r]``.
        values
            Fields by name, as in :class:`tq_fs.StepInput`.
        versions
            Weight versions of the response by run: ``(version, tokens)``.
        """
        return StepInput(
            kind=self.kind,
            parent=self.parent,
            context=self.context,
            response=response,
            values=values,
            versions=versions,
            reason=self.reason,
        )


def whole_turn(request: Request, ids: Tokens, unconfirmed: str = "") -> Turn:
    """Return a turn with its whole prompt; a boundary where it was to be an append."""
    route = request.route
    return Turn(
        kind="boundary" if unconfirmed else route.kind,
        parent=route.parent,
        reason=unconfirmed or route.reason,
        context=ids,
        input_ids=ids,
        first_row=0,
        request=request,
    )


def appended(request: Request, context: Tokens, ids: Tokens, first_row: int) -> Turn:
    """Return a turn that goes on from its parent's tokens."""
    return Turn(
        kind="append",
        parent=request.route.parent,
        reason="",
        context=context,
        input_ids=ids,
        first_row=first_row,
        request=request,
    )
