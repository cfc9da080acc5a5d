"""The engine's prompt: whole, or spliced to the tokens that the parent ends with (TITO).

A prompt that is spliced is never tokenized again: the parent's ids stay as the model generated
them, and only the text after them becomes ids. What that text is, two renderings tell: that of the
request must begin with that of the parent's conversation, and goes on with what is new. Thoughts
without words do not count in this: some templates (Qwen3's) show them in a last reply only. Between
the generated ids and the new text stands the *closing text* of the parent's turn:

======================================  ===================================  ====================
the parent's rendering ends with        its generated ids end with           closing text
======================================  ===================================  ====================
a stop token and white space            that stop token                      the white space
a stop token and white space            another token: cut, or a stop text   both
no stop token: turns are not closed     a stop token that opens the new      none, and the new
                                        text (the next turn's first)         text without it
no stop token: turns are not closed     another stop token                   (not confirmed)
no stop token: turns are not closed     another token                        none
======================================  ===================================  ====================
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from tq_fs.errors import InvalidRequest
from tq_fs.trajectory._messages import Message
from tq_fs.trajectory._records import Tokens

_NO_THOUGHT = re.compile(r"<think>\s*</think>\n*")


class Renderer(Protocol):
    """A model's chat template and tokenizer. Safe to call from many threads."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Tokens that end a reply."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        generation_prompt: bool,
        options: Mapping[str, Any] = {},
    ) -> str:
        """Return the text of a conversation; with `generation_prompt`, up to where a reply begins.

        Takes messages as clients send them: content in parts, arguments as JSON text. Gives the
        same text for the same arguments.

        Raises
        ------
        InvalidRequest
            The template refuses them.
        """

    def encode(self, text: str) -> Tokens:
        """Return ids, int32 ``[n]``: special tokens in the text are recognised, none are added."""

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of ids ``[n]``; special tokens are kept."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """What a request asks for, as it is rendered.

    Attributes
    ----------
    messages
        The whole conversation, recorded replies in the place of those the client sent back.
    tools
        Tool schemas: the recorded ones where they are the same.
    options
        Further variables of the chat template.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]

    def prompt(self, renderer: Renderer) -> str:
        """Return the text of the prompt, up to where the reply begins."""
        return renderer.render(
            self.messages, self.tools, generation_prompt=True, options=self.options
        )

    def beginning(self, renderer: Renderer, count: int, options: Mapping[str, Any]) -> str | None:
        """Return the text of the first messages alone; None where the template takes no such.

        Parameters
        ----------
        options
            Those that they were asked with.
        """
        try:
            return renderer.render(
                self.messages[:count], self.tools, generation_prompt=False, options=options
            )
        except InvalidRequest:
            return None


def text_to_append(
    prompt: str, before: str | None, stops: Collection[str], ended: str
) -> str | None:
    """Return what follows the parent's generated text; see the module's table.

    Parameters
    ----------
    prompt
        The request's rendering.
    before
        The rendering of the parent's conversation.
    stops
        The texts of the stop tokens.
    ended
        The text of the one that ends what the parent generated; empty where none does.

    Returns
    -------
    str or None
        None where the request cannot follow the parent's tokens: the template shows earlier
        messages in another way by now.
    """
    new = None if before is None else _after(prompt, before)
    if before is None or new is None:
        return None
    stop, space = _close(before, stops)
    if stop:
        return (space if ended == stop else stop + space) + new
    return new[len(ended) :] if new.startswith(ended) else None


def _after(prompt: str, before: str) -> str | None:
    """Return what a prompt goes on with; None where it does not begin with `before`."""
    if prompt.startswith(before):
        return prompt[len(before) :]
    left, at = _NO_THOUGHT.sub("", before), 0
    ends = [*(match.span() for match in _NO_THOUGHT.finditer(prompt)), (len(prompt), len(prompt))]
    for end, further in ends:
        words = prompt[at:end]
        if len(words) >= len(left):
            return prompt[at + len(left) :] if words.startswith(left) else None
        if not left.startswith(words):
            return None
        left, at = left[len(words) :], further
    return None


def _close(text: str, stops: Collection[str]) -> tuple[str, str]:
    """Return the stop token that a rendering ends with, and the white space after it."""
    at, stop = max(((text.rfind(stop), stop) for stop in stops if stop), default=(-1, ""))
    space = text[at + len(stop) :]
    return ("", "") if at < 0 or space.strip() else (stop, space)


def rest_of_ids(prompt: Tokens, before: Tokens) -> Tokens | None:
    """Return the ids after `before`; None where the prompt does not begin with them."""
    if not np.array_equal(prompt[: len(before)], before):
        return None
    return prompt[len(before) :]
