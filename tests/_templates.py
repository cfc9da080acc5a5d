"""A small real tokenizer and chat templates of several manners, as a Renderer for tests.

The tokenizer is trained on a few lines: it has merges, so that a text has many tokenizations and
only one that it makes itself.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jinja2
import numpy as np
from numpy.typing import ArrayLike, NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tq_fs.errors import InvalidRequest

Tokens = NDArray[np.int32]
Manner = Literal["plain", "thinking", "shown", "unclosed", "strict", "options", "bare"]

SPECIAL = ("<|end|>", "<|start|>", "<|im_end|>", "<|user|>", "<|tool|>", "<|assistant|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CORPUS = [
    "the weather in the town is fine, and the weather there is not",
    "call the tool, then tell the answer to the user; the answer is the tool's",
    "system user assistant tool name arguments city result think thinking",
    '{"name": "weather", "arguments": {"city": "Oslo"}}',
] * 4

# What Qwen's templates do: "thinking" leaves reasoning out before the last question of a user, and
# "shown" shows it in a last reply also where it is empty.
QWEN = """\
{%- set ns = namespace(question=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set ns.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
  {{- '<|start|>tools\\n' ~ (tools | tojson) ~ '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'refused' -%}{{- raise_exception('a role that nobody knows') -}}{%- endif -%}
  {{- '<|start|>' ~ m.role ~ '\\n' -}}
  {%- if m.reasoning_content and (not STRIP or loop.index0 > ns.question) -%}
    {{- '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n' -}}
  {%- elif SHOW and m.role == 'assistant' and loop.last -%}
    {{- '<think>\\n\\n</think>\\n\\n' -}}
  {%- endif -%}
  {{- m.content -}}
  {%- for call in m.tool_calls or [] -%}
    {{- '<tool_call>' ~ call.function.name ~ call.function.arguments ~ '</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant\\n' ~ hint -}}{%- endif -%}
"""
# What GLM's does: no turn is closed, and a reply ends with the token that opens the next turn.
UNCLOSED = """\
{%- for m in messages -%}{{- '<|' ~ m.role ~ '|>' ~ m.content -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
# Does not take a conversation that ends with a reply.
STRICT = (
    "{%- if messages[-1].role == 'assistant' -%}{{- raise_exception('ends with a reply') -}}"
    "{%- endif -%}" + QWEN
)
TEMPLATES: Mapping[Manner, str] = {
    "plain": QWEN,
    "thinking": QWEN.replace("STRIP", "true"),
    "shown": QWEN.replace("STRIP", "true").replace("SHOW", "true"),
    "unclosed": UNCLOSED,
    "strict": STRICT,
    "options": "{%- if brief -%}{{- 'be brief' -}}{%- endif -%}" + QWEN,
    "bare": "{%- for m in messages -%}{{- m.content ~ '<|im_end|>' -}}{%- endfor -%}",
}
STOPS: Mapping[str, tuple[str, ...]] = {"unclosed": ("<|user|>", "<|tool|>")}


@functools.cache
def trained() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKS])
    return backend


class SmallTemplate:
    """A Renderer by transformers; remembers every text it was given to tokenize."""

    def __init__(self, manner: Manner = "plain") -> None:
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained())  # type: ignore[no-untyped-call]
        self._tokenizer.chat_template = TEMPLATES[manner]
        self._backend = trained()
        self.stop_ids: list[int] = [
            self._backend.token_to_id(t) or 0 for t in STOPS.get(manner, ("<|im_end|>", "<|end|>"))
        ]
        self.encoded: list[str] = []
        self.rendered = 0

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        generation_prompt: bool,
        options: Mapping[str, Any] = {},
    ) -> str:
        self.rendered += 1
        try:
            text = self._tokenizer.apply_chat_template(
                [
                    {"content": "", **{k: v for k, v in m.items() if v is not None}}
                    for m in messages
                ],
                tools=[dict(t) for t in tools] if tools else None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **options,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(str(error), subject="messages") from error
        assert isinstance(text, str)
        return text

    def encode(self, text: str) -> Tokens:
        self.encoded.append(text)
        return self.ids(text)

    def ids(self, text: str) -> Tokens:
        """Tokenize, without being remembered."""
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def letters(self, text: str) -> Tokens:
        """Tokenize otherwise than the tokenizer would: each letter for itself."""
        parts = [self.ids(letter) for letter in text]
        return np.concatenate([*parts, np.empty(0, np.int32)])

    def decode(self, ids: ArrayLike) -> str:
        return str(self._backend.decode(np.asarray(ids).tolist(), skip_special_tokens=False))


def call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    """Return a tool call as an OpenAI client has it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": name, "arguments": text},
    }
