"""The model's own template and tokenizer: what they give, also to many threads, and refuse."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from tokenizers import processors

from tq_fs.demo.tokenizer import (
    MARKERS,
    SPECIAL,
    STOP_IDS,
    VOCAB,
    build_tokenizer,
    save_tokenizer,
)
from tq_fs.errors import InvalidConfig, InvalidRequest
from tq_fs.model_config import routed_experts_of_model
from tq_fs.proxy._template import ChatTemplate

TEMPLATE = ChatTemplate.from_model(build_tokenizer())
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a":  1}'}}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def render(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    generation_prompt: bool = False,
    **options: Any,
) -> str:
    return TEMPLATE.render(messages, tools, generation_prompt=generation_prompt, options=options)


# ---------------------------------------------------------------- text and ids


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives_ids(text: str) -> None:
    ids = TEMPLATE.encode(text)
    assert ids.dtype == np.int32
    assert TEMPLATE.decode(ids) == text
    if not any(special in text for special in (*SPECIAL, *MARKERS)):
        assert ids.tolist() == list(text.encode())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1)))
def test_any_ids_have_a_text(ids: list[int]) -> None:
    text = TEMPLATE.decode(ids)
    assert TEMPLATE.decode(np.array(ids, np.int32)) == text
    if all(i < 128 or i >= 256 for i in ids):
        assert TEMPLATE.encode(text).tolist() == ids


def test_special_tokens_in_a_text_are_recognised_and_none_are_added() -> None:
    assert TEMPLATE.encode("").shape == (0,)
    ids = TEMPLATE.encode("a<|im_end|>\n<think></tool_call>")
    assert ids.tolist() == [97, STOP_IDS[0], 10, 259, 262]
    assert TEMPLATE.decode(ids) == "a<|im_end|>\n<think></tool_call>"


def test_a_tokenizer_that_would_add_tokens_adds_none() -> None:
    tokenizer = build_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", STOP_IDS[1])]
    )
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert tokenizer("abc").input_ids[0] == STOP_IDS[1]
    assert ChatTemplate(tokenizer).encode("abc").tolist() == [97, 98, 99]


def test_a_replys_text_is_without_its_stop_token() -> None:
    assert TEMPLATE.text_of([97, STOP_IDS[0]]) == "a"
    assert TEMPLATE.text_of([STOP_IDS[0], 97]) == "<|im_end|>a"
    assert TEMPLATE.text_of([97]) == "a"
    assert TEMPLATE.text_of([]) == ""


def test_long_texts_do_not_stop_other_threads() -> None:
    text = "What a long prompt. " * 50_000
    longest, last, done = 0.0, time.perf_counter(), threading.Event()

    def work() -> None:
        for _ in range(2):
            TEMPLATE.decode(TEMPLATE.encode(text))
        done.set()

    thread = threading.Thread(target=work)
    began = time.perf_counter()
    thread.start()
    while not done.is_set():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
        time.sleep(0)
    thread.join()
    whole = time.perf_counter() - began
    assert longest < whole / 5  # tokenizing once is two fifths of it


def test_many_threads_get_what_one_gets() -> None:
    talks = [[user("x" * n), reply("y" * n), user("z")] for n in range(40)]
    alone = [TEMPLATE.encode(render(talk, TOOLS)) for talk in talks]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            together = list(pool.map(lambda talk: TEMPLATE.encode(render(talk, TOOLS)), talks))
            for ours, theirs in zip(together, alone, strict=True):
                np.testing.assert_array_equal(ours, theirs)


# ---------------------------------------------------------------- messages


def test_the_demo_template_writes_turns_in_qwens_way() -> None:
    talk = [
        {"role": "system", "content": "Be brief."},
        user("1+1?"),
        reply(None, tool_calls=[CALL], reasoning_content="hm"),
        {"role": "tool", "content": "2", "tool_call_id": "x"},
        {"role": "tool", "content": "3", "tool_call_id": "y"},
    ]
    text = render(talk, generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>"
        "\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_stand_in_the_system_turn() -> None:
    text = render([user("hi")], TOOLS)
    assert text.startswith("<|im_start|>system\n")
    assert '"name": "add"' in text.partition("<|im_end|>")[0]
    assert render([user("hi")], []) == render([user("hi")], None)
    assert "system" not in render([user("hi")])


def test_a_conversation_that_goes_on_begins_as_before() -> None:
    talk = [user("a"), reply("b"), user("c"), reply(None, tool_calls=[CALL])]
    talk += [{"role": "tool", "content": "d"}, reply("e"), user("f")]
    for at in (2, 4, 6):
        assert render(talk[: at + 1], TOOLS).startswith(render(talk[:at], TOOLS))


def test_earlier_thinking_goes_once_the_user_asks_again() -> None:
    talk = [user("a"), reply("b", reasoning_content="hm")]
    assert "hm" in render(talk)
    assert "hm" in render([*talk, {"role": "tool", "content": "d"}])
    assert "hm" not in render([*talk, user("c")])


def test_options_reach_the_template() -> None:
    off = render([user("a")], generation_prompt=True, enable_thinking=False)
    on = render([user("a")], generation_prompt=True, enable_thinking=True)
    assert off == on + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "add_generation_prompt", "tools"])
def test_options_do_not_replace_what_is_ours(name: str) -> None:
    plain = render([user("a")], generation_prompt=True)
    options = {name: True}
    assert TEMPLATE.render([user("a")], None, generation_prompt=True, options=options) == plain


def test_messages_are_taken_as_clients_send_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render([user(parts)]) == render([user("ab")])
    decorated = reply("x", refusal=None, tool_calls=None, function_call=None)
    assert render([user("a"), decorated]) == render([user("a"), reply("x")])
    parsed = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}
    texts = {render([user("a"), reply("", tool_calls=[call])]) for call in (CALL, parsed)}
    assert len(texts) == 1
    broken = {**CALL, "function": {"name": "add", "arguments": "{oops"}}
    assert "{oops" in render([user("a"), reply("", tool_calls=[broken])])


def test_rendering_changes_no_message() -> None:
    message = reply(None, tool_calls=[{**CALL, "function": dict(CALL["function"])}])  # type: ignore[arg-type]
    before = repr(message)
    render([user("a"), message])
    assert repr(message) == before


def test_messages_that_the_template_refuses_are_an_input_error() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate(tokenizer).render([user("a")], None, generation_prompt=True)
    tokenizer.chat_template = "{{ messages[0].content + 'x' }}"
    with pytest.raises(InvalidRequest, match="messages"):
        ChatTemplate(tokenizer).render([user(7)], None, generation_prompt=True)
    with pytest.raises(InvalidRequest, match="messages"):
        render([user("a"), reply("", tool_calls=["call"])])


# ---------------------------------------------------------------- a model's folder


def test_a_models_folder_is_read(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model", {"num_hidden_layers": 6})
    template = ChatTemplate.from_model(folder)
    assert template.stop_ids == STOP_IDS
    assert template.vocab == VOCAB
    talk = [user("a"), reply("b")]
    assert template.render(talk, TOOLS, generation_prompt=True) == render(
        talk, TOOLS, generation_prompt=True
    )
    assert routed_experts_of_model(folder).inner == (6, 2)


@pytest.mark.parametrize(
    ("said", "ids"),
    [
        ('{"eos_token_id": 256}', (258, 256)),
        ('{"eos_token_id": [256, 258]}', (258, 256)),
        ("{}", (258,)),
    ],
)
def test_the_generation_configuration_names_stop_tokens(
    tmp_path: Path, said: str, ids: tuple[int, ...]
) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(said)
    assert ChatTemplate.from_model(tmp_path).stop_ids == ids


def test_folders_that_are_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="tokenizer"):
        ChatTemplate.from_model(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("{oops")
    with pytest.raises(InvalidConfig, match="generation_config"):
        ChatTemplate.from_model(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InvalidConfig, match="chat template"):
        ChatTemplate.from_model(tmp_path)


def test_a_tokenizer_without_an_end_is_refused() -> None:
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(InvalidConfig, match="end-of-sequence"):
        ChatTemplate.from_model(tokenizer)
