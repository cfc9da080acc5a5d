"""A byte-level tokenizer with a chat template in Qwen's style, made without any download.

Ids 0 to 255 are the bytes, the markers of the template come after them. The template is our own;
what it does is what Qwen3's does: tools are described in the system turn, tool results come back
inside a user turn, and the model's own thinking is left out before the last question of the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
# Recognised as one token each, but part of the text that the model writes.
MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
VOCAB = 256 + len(SPECIAL) + len(MARKERS)
STOP_IDS = (256 + SPECIAL.index(TURN_END), 256 + SPECIAL.index(END_OF_TEXT))

CHAT_TEMPLATE = """\
{%- set ns = namespace(question=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set leading = messages and messages[0].role == 'system' -%}
{%- if leading or tools -%}
  {{- '<|im_start|>system\\n' -}}
  {{- messages[0].content if leading else '' -}}
  {%- if tools -%}
    {{- '\\n\\n' if leading else '' -}}
    {{- 'You may call functions. Their schemas, one a line:\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) -}}{%- endfor -%}
    {{- '\\n</tools>\\nA call is a JSON object with name and arguments:\\n' -}}
    {{- '<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' -}}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
      {{- '<|im_start|>user' -}}
    {%- endif -%}
    {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
      {{- '<|im_end|>\\n' -}}
    {%- endif -%}
  {%- elif message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if message.reasoning_content and loop.index0 > ns.question -%}
      {{- '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- message.content -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '\\n' if message.content or not loop.first else '' -}}
      {{- '<tool_call>\\n{"name": ' ~ (call.function.name | tojson) -}}
      {{- ', "arguments": ' -}}
      {{- call.function.arguments if call.function.arguments is string
          else (call.function.arguments | tojson) -}}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- elif not (leading and loop.first) -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}
    {{- '<think>\\n\\n</think>\\n\\n' -}}
  {%- endif -%}
{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: a byte is its own id, special tokens and markers follow."""
    letters = _letters_of_bytes()
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token=TURN_END, pad_token=END_OF_TEXT
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(folder: str | Path, config: Mapping[str, Any] | None = None) -> Path:
    """Write the tokenizer, and the configuration of a tiny model, as a model's folder has them.

    Parameters
    ----------
    folder
        Made where it does not exist.
    config
        Values for ``config.json`` in place of the default ones (4 layers, top-2 of 16 experts).

    Returns
    -------
    pathlib.Path
        The folder; `ChatTemplate.from_model` and `routed_experts_of_model` read it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save_pretrained(folder)
    values = {**_CONFIG, **(config or {})}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    generation = {"eos_token_id": list(STOP_IDS)}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return folder


_CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "hidden_size": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32768,
    "eos_token_id": STOP_IDS[0],
}


def _letters_of_bytes() -> list[str]:
    """Return the printable letter that byte-level tokenizers write for each byte (GPT-2's table).

    Printable Latin-1 characters stand for themselves; the others are counted on from U+0100.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in plain)
    moved = {byte: chr(0x100 + rank) for rank, byte in enumerate(others)}
    return [moved.get(byte, chr(byte)) for byte in range(256)]
