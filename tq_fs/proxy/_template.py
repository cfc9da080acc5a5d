"""A model's tokenizer and chat template, by transformers: messages to text, text to ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from numpy.typing import ArrayLike, NDArray
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tq_fs.errors import InvalidConfig, InvalidRequest

Message = Mapping[str, Any]


class ChatTemplate:
    """Renders and tokenizes conversations as the model's own template does.

    Safe to call from many threads. Ids are made by a copy of the tokenizer of its own: the one of
    transformers changes its state in every call (truncation, padding), and must not be shared.
    The interpreter goes on with other threads while long texts are tokenized.

    Parameters
    ----------
    tokenizer
        A fast tokenizer of transformers that has a chat template.
    stop_ids
        Tokens that end a reply besides the tokenizer's own end-of-sequence token.

    Attributes
    ----------
    stop_ids
        Ids of the tokens that end a reply; the tokenizer's end-of-sequence token first.
    vocab
        Ids are in ``[0, vocab)``.

    Raises
    ------
    InvalidConfig
        No chat template, no fast tokenizer, or no end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int] = ()) -> None:
        subject = str(tokenizer.name_or_path) or type(tokenizer).__name__
        if not tokenizer.chat_template:
            raise InvalidConfig(
                "the tokenizer has no chat template",
                subject=subject,
                remedy="take the instruction-tuned model, or put a chat_template.jinja beside it",
            )
        if not tokenizer.is_fast:
            raise InvalidConfig("has no fast tokenizer (tokenizer.json)", subject=subject)
        if tokenizer.eos_token_id is None:
            raise InvalidConfig("the tokenizer names no end-of-sequence token", subject=subject)
        self._tokenizer = tokenizer
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self.stop_ids: tuple[int, ...] = tuple(
            dict.fromkeys([int(tokenizer.eos_token_id), *map(int, stop_ids)])
        )
        self.vocab = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    @classmethod
    def from_model(cls, model: str | Path | PreTrainedTokenizerBase) -> ChatTemplate:
        """Take the tokenizer from a model's folder (or name in the local cache), or as it is.

        The folder's ``generation_config.json`` says which tokens end a reply.

        Raises
        ------
        InvalidConfig
            Nothing there that can be read as a tokenizer with a chat template.
        """
        if isinstance(model, PreTrainedTokenizerBase):
            return cls(model)
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(model))
        except (OSError, ValueError, KeyError) as error:
            raise InvalidConfig(
                f"holds no tokenizer that can be read: {error}",
                subject=str(model),
                remedy="give the folder of the model that the engine serves",
            ) from error
        return cls(tokenizer, _stop_ids_of(Path(model)))

    # ------------------------------------------------------------ messages to text

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        generation_prompt: bool,
        options: Mapping[str, Any] = {},
    ) -> str:
        """Return the text of a conversation.

        Parameters
        ----------
        messages
            OpenAI chat messages. Text parts count as their text, absent content as empty, and
            arguments of tool calls are handed to the template parsed, as engines do.
        tools
            OpenAI tool schemas.
        generation_prompt
            Whether the text ends where the model's next reply begins.
        options
            Further variables of the template (``chat_template_kwargs``).

        Raises
        ------
        InvalidRequest
            The template does not take these messages, or no text came of them.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                [_plain(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **{name: value for name, value in options.items() if name not in _OURS},
            )
        except (jinja2.TemplateError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses them: {error}",
                subject="messages",
                remedy="send roles and contents that the template knows",
            ) from error
        assert isinstance(text, str)
        return text

    # ------------------------------------------------------------ text to ids

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the ids of a text, int32 ``[n]``; special tokens in it count as such.

        None are added.
        """
        # The batch call leaves other threads running, the single one does not.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of ids ``[n]``; special tokens are kept, ids without a token left out.

        Bytes that are no UTF-8 come out as U+FFFD.
        """
        (text,) = self._backend.decode_batch(
            [np.asarray(ids, np.int64).tolist()], skip_special_tokens=False
        )
        return str(text)

    def text_of(self, output_ids: ArrayLike) -> str:
        """Return the text of a reply ``[r]``, without the stop token that it may end with."""
        ids = np.asarray(output_ids, np.int64)
        if ids.size and int(ids[-1]) in self.stop_ids:
            ids = ids[:-1]
        return self.decode(ids)


# What the proxy itself says to transformers, and no client may.
_OURS = frozenset(
    {"conversation", "tools", "add_generation_prompt", "tokenize", "continue_final_message"}
    | {"return_dict", "return_tensors", "chat_template", "messages", "documents"}
    | {"padding", "truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"}
)


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: text contents, parsed arguments, no nulls."""
    plain = {name: value for name, value in message.items() if value is not None}
    plain["content"] = _text_of_content(plain.get("content", ""))
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_parsed_call(call) for call in plain["tool_calls"]]
    return plain


def _text_of_content(content: Any) -> Any:
    """Return the text of text parts; anything else is the template's to judge."""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return content


def _parsed_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return dict(call)
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return {**call, "function": function}


def _stop_ids_of(folder: Path) -> list[int]:
    """Return ``eos_token_id`` of the model's generation configuration: none, an id, or several."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text()).get("eos_token_id", [])
        return [int(i) for i in found] if isinstance(found, list) else [int(found)]
    except (AttributeError, OSError, TypeError, ValueError) as error:
        raise InvalidConfig(f"cannot be read: {error}", subject=str(path)) from error
