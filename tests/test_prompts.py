"""What the engine is given: whole prompts, and ids spliced to those that the model generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests._talks import Message, Talk, said, schema, system, text_of, tool, user
from tests._templates import call
from tq_fs.demo.tokenizer import build_tokenizer
from tq_fs.errors import InvalidLineage
from tq_fs.proxy._template import ChatTemplate
from tq_fs.trajectory import Turn

S, U, V, W = system("be fine"), user("the tool?"), user("and then?"), user("the town?")
A, B = said("the answer"), said("another answer")
END = "<|im_end|>"
REWROTE, CHANGED = "template rewrote the history", "tokens changed"


def rendered(
    talk: Talk, messages: Sequence[Message], tools: Any = None, *, ask: bool = True
) -> str:
    return talk.template.render(messages, tools, generation_prompt=ask)


def is_whole(talk: Talk, turn: Turn, text: str) -> bool:
    ids = talk.template.ids(text)
    return (
        turn.first_row == 0
        and np.array_equal(turn.context, ids)
        and np.array_equal(turn.input_ids, ids)
    )


# ---------------------------------------------------------------- whole prompts


@pytest.mark.parametrize("mode", ["tito", "snapshot"])
def test_a_step_that_opens_a_chain_has_its_whole_prompt(mode: Any) -> None:
    talk = Talk(mode=mode)
    tools = [schema("weather")]
    turn = talk.begin([S, U], tools)
    assert is_whole(talk, turn, rendered(talk, [S, U], tools))
    assert turn.context.dtype == turn.input_ids.dtype == np.int32
    talk.answer(turn, A)
    for request in ([S, U], [S, V], [S, U, B, V]):
        assert is_whole(talk, talk.begin(request, tools), rendered(talk, request, tools))
    others = talk.begin([S, U, A, V])
    assert others.reason == "tools changed"
    assert is_whole(talk, others, rendered(talk, [S, U, A, V]))


def test_options_reach_the_template() -> None:
    talk = Talk("options")
    assert "be brief" not in rendered(talk, [U])
    turn = talk.begin([U], brief=True)
    assert talk.template.decode(turn.input_ids).startswith("be brief")


# ---------------------------------------------------------------- splicing


@pytest.mark.parametrize(
    ("stop", "closing"),
    [
        (END, "\n"),  # the stop token was generated: only what the template puts after it
        ("", END + "\n"),  # cut by length
        (" fine", END + "\n"),  # a stop text of the request
        ("<|end|>", END + "\n"),  # another stop token than the template's
    ],
)
def test_the_closing_text_is_what_the_generated_ids_lack(stop: str, closing: str) -> None:
    talk = Talk()
    talk.answer(talk.begin([U]), A, stop)
    before = talk.trajectory.sequence(0)
    talk.template.encoded.clear()
    turn = talk.begin([U, A, V])
    assert (turn.kind, turn.parent, turn.reason) == ("append", 0, "")
    new = closing + "<|start|>user\nand then?<|im_end|>\n<|start|>assistant\n"
    assert talk.template.encoded == [new]
    assert np.array_equal(turn.context, talk.template.ids(new))
    assert np.array_equal(turn.input_ids, np.concatenate([before, turn.context]))
    assert turn.first_row == len(before) - 1


def test_ids_stay_as_they_were_generated() -> None:
    """Also where the tokenizer would make others of the same text, or the template other text."""
    talk = Talk()
    letters = talk.template.letters("the answer is the tool")
    assert len(letters) > len(talk.template.ids("the answer is the tool"))
    odd = talk.template.ids('<tool_call>weather{"city":   "Oslo"}</tool_call>')
    response = np.concatenate([letters, odd, talk.template.ids(END)])
    reply = said("the answer is the tool", calls=[call("weather", {"city": "Oslo"})])
    turn = talk.begin([U])
    talk.conversation.commit(turn, talk.record(turn, response), reply)
    follow = talk.begin([U, reply, tool("fine")])
    assert follow.kind == "append"
    begun = len(turn.input_ids)
    assert np.array_equal(follow.input_ids[begun : begun + len(response)], response)
    talk.answer(follow, A, letters=True)
    last = talk.begin([U, reply, tool("fine"), A, V])
    assert last.kind == "append"
    assert np.array_equal(last.input_ids[: len(follow.input_ids)], follow.input_ids)


def test_the_stop_token_counts_only_where_it_was_generated() -> None:
    """A Step without generated tokens may end with one that stands in its prompt."""
    talk = Talk("bare")
    turn = talk.begin([U])
    assert talk.template.decode(turn.input_ids).endswith(END)
    talk.conversation.commit(turn, talk.record(turn, turn.context[:0]), said(""))
    follow = talk.begin([U, said(""), V])
    assert follow.kind == "append"
    assert talk.template.decode(follow.context).startswith(END)


def test_a_reply_that_spells_a_stop_token_does_not_end_there() -> None:
    talk = Talk()
    reply = said("write <|im_end|> to end")
    turn = talk.begin([U])
    talk.conversation.commit(
        turn, talk.record(turn, talk.template.letters("write it to end")), reply
    )
    follow = talk.begin([U, reply, V])
    assert follow.kind == "append"
    assert talk.template.decode(follow.context).startswith(END + "\n<|start|>user")


# ---------------------------------------------------------------- confirmation


def test_a_template_that_leaves_reasoning_out_draws_a_boundary_at_the_next_question() -> None:
    talk = Talk("thinking")
    reply = said("let me see", "the tool knows", [call("weather", {})])
    talk.say([U], reply)
    turn = talk.begin([U, reply, tool("fine")])
    assert turn.kind == "append"
    talk.answer(turn, said("fine", "it is"))
    request = [U, reply, tool("fine"), said("fine", "it is"), V]
    turn = talk.begin(request)
    assert (turn.kind, turn.parent, turn.reason) == ("boundary", 1, REWROTE)
    assert is_whole(talk, turn, rendered(talk, request))
    assert "it is" not in rendered(talk, request)


def test_without_reasoning_the_same_template_confirms() -> None:
    talk = Talk("thinking")
    talk.say([U], A)
    assert talk.begin([U, A, V]).kind == "append"


@pytest.mark.parametrize("follow", [tool("fine"), V, tool("<think>\n</think>\n\nfine")])
def test_a_thought_without_words_that_the_template_shows_last_only_is_no_rewriting(
    follow: Message,
) -> None:
    talk = Talk("shown")
    talk.say([S, U], A)
    talk.say([S, U, A, V], B)
    request = [S, U, A, V, B, follow]
    shown = rendered(talk, request[:-1], ask=False)
    assert not rendered(talk, request).startswith(shown)
    turn = talk.begin(request)
    assert (turn.kind, turn.parent) == ("append", 1)
    new = f"\n<|start|>{follow['role']}\n{follow['content']}{END}\n<|start|>assistant\n"
    assert np.array_equal(turn.context, talk.template.ids(new))


def test_a_thought_with_words_that_is_shown_last_only_is_a_rewriting() -> None:
    talk = Talk("shown")
    reply = said("fine", "it is")
    talk.say([U], reply)
    turn = talk.begin([U, reply, V])
    assert (turn.kind, turn.reason) == ("boundary", REWROTE)


def test_options_may_differ_from_the_parents_where_the_rendering_goes_on() -> None:
    talk = Talk("options")
    talk.answer(talk.begin([U]), A)
    turn = talk.begin([U, A, V], hint="to the point")  # after the generation prompt alone
    assert turn.kind == "append"
    assert talk.template.decode(turn.input_ids).endswith("assistant\nto the point")
    talk.answer(turn, B)
    assert talk.begin([U, A, V, B, W]).kind == "append"


def test_options_that_change_what_came_before_draw_a_boundary() -> None:
    talk = Talk("options")
    talk.answer(talk.begin([U]), A)
    turn = talk.begin([U, A, V], brief=True)
    assert (turn.kind, turn.reason) == ("boundary", REWROTE)
    talk.answer(turn, B)
    turn = talk.begin([U, A, V, B, W], brief=True)
    assert (turn.kind, turn.parent) == ("append", 1)
    assert talk.template.decode(turn.input_ids).startswith("be brief")


@pytest.mark.parametrize("mode", ["tito", "snapshot"])
def test_tools_whose_keys_come_in_another_order_are_rendered_as_before(mode: Any) -> None:
    talk = Talk(mode=mode)
    tools = [schema("weather")]
    talk.say([U], A, tools)
    turned = [dict(reversed(list(tools[0].items())))]
    assert rendered(talk, [U], tools) != rendered(talk, [U], turned)
    for request, kind in (([U, A, V], "append"), ([U], "branch")):
        turn = talk.begin(request, turned)
        assert turn.kind == kind
        assert talk.template.decode(turn.input_ids) == rendered(talk, request, tools)


def test_a_template_that_takes_no_reply_at_the_end_draws_a_boundary() -> None:
    talk = Talk("strict")
    talk.say([U], A)
    turn = talk.begin([U, A, V])
    assert (turn.kind, turn.parent, turn.reason) == ("boundary", 0, REWROTE)
    assert is_whole(talk, turn, rendered(talk, [U, A, V]))


@pytest.mark.parametrize(
    ("stop", "follow", "kind"),
    [
        ("<|user|>", V, "append"),  # the reply's stop token opens the next turn
        ("<|tool|>", tool("fine"), "append"),
        ("<|tool|>", V, "boundary"),  # it opened another turn than what came
        ("", V, "append"),  # cut by length
    ],
)
def test_a_template_that_closes_no_turn(stop: str, follow: Message, kind: str) -> None:
    talk = Talk("unclosed")
    talk.answer(talk.begin([U]), A, stop)
    turn = talk.begin([U, A, follow])
    assert turn.kind == kind
    assert talk.template.decode(turn.input_ids) == rendered(talk, [U, A, follow])


# ---------------------------------------------------------------- snapshot


def test_a_snapshot_stays_an_append_where_its_ids_go_on() -> None:
    talk = Talk(mode="snapshot")
    talk.say([U], A)
    talk.template.encoded.clear()
    turn = talk.begin([U, A, V])
    assert (turn.kind, turn.parent, turn.first_row) == ("append", 0, 0)
    assert talk.template.encoded == [rendered(talk, [U, A, V])]
    assert np.array_equal(turn.input_ids, talk.template.ids(rendered(talk, [U, A, V])))
    before = talk.trajectory.sequence(0)
    assert np.array_equal(np.concatenate([before, turn.context]), turn.input_ids)
    record = talk.answer(turn, B)
    assert len(record.tokens) == len(talk.trajectory.sequence(1)) == record.total


@pytest.mark.parametrize("manner", ["plain", "thinking"])
def test_a_snapshot_whose_ids_are_made_otherwise_starts_anew(manner: Any) -> None:
    talk = Talk(manner, mode="snapshot")
    reply = said("the answer", "hm") if manner == "thinking" else A
    talk.answer(talk.begin([U]), reply, letters=manner == "plain")
    turn = talk.begin([U, reply, V])
    assert (turn.kind, turn.parent, turn.reason) == ("boundary", 0, CHANGED)
    assert is_whole(talk, turn, rendered(talk, [U, reply, V]))


def test_a_snapshot_shorter_than_its_parent_starts_anew() -> None:
    talk = Talk(mode="snapshot")
    turn = talk.begin([U])
    long = np.concatenate([talk.generated(A), talk.template.letters("the rest of it" * 20)])
    talk.conversation.commit(turn, talk.record(turn, long), A)
    assert talk.begin([U, A, V]).reason == CHANGED


# ---------------------------------------------------------------- the project's own template


def test_a_conversation_with_the_template_of_the_examples() -> None:
    """Thinking, a tool, the next question; replies are rendered as they were written."""
    template = ChatTemplate.from_model(build_tokenizer())
    talk = Talk(renderer=template)
    tools = [schema("weather")]

    def answer(turn: Turn, text: str, reply: Message) -> Message:
        record = talk.record(turn, template.encode(text + END))
        talk.conversation.commit(turn, record, reply)
        return {k: v for k, v in reply.items() if k != "reasoning_content"}  # as clients keep it

    def wanted(messages: Sequence[Message]) -> str:
        return template.render(messages, tools, generation_prompt=True)

    thought = "<think>\nthe tool knows\n</think>\n\n"
    text = thought + '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    thinking = said("", "the tool knows", [call("weather", {})])
    called = answer(talk.begin([S, U], tools), text, thinking)
    turn = talk.begin([S, U, called, tool("fine")], tools)
    assert turn.kind == "append"
    given = template.decode(turn.input_ids)
    assert given == wanted([S, U, thinking, tool("fine")])
    told = answer(turn, "It is fine.", said("It is fine."))
    request = [S, U, called, tool("fine"), told, V]
    turn = talk.begin(request, tools)
    assert (turn.kind, turn.parent, turn.reason) == ("boundary", 1, REWROTE)
    assert template.decode(turn.input_ids) == wanted(request)
    more = answer(turn, "Yes.", said("Yes."))
    turn = talk.begin([*request, more, W], tools, enable_thinking=False)
    assert (turn.kind, turn.parent) == ("append", 2)
    assert (
        template.decode(turn.input_ids) == wanted([*request, more, W]) + "<think>\n\n</think>\n\n"
    )


# ---------------------------------------------------------------- sequences


@pytest.mark.parametrize("mode", ["tito", "snapshot"])
def test_the_sequence_of_a_step_is_all_that_the_model_has_read_and_said(mode: Any) -> None:
    talk = Talk(mode=mode)
    wanted, messages = [], [U]
    for question in (V, W, U):
        turn = talk.begin(messages)
        talk.answer(turn, A)
        wanted.append(np.concatenate([turn.input_ids, talk.generated(A)]))
        messages = [*messages, A, question]
    turn = talk.begin([U])
    talk.answer(turn, B)
    wanted.append(np.concatenate([turn.input_ids, talk.generated(B)]))
    for step, tokens in enumerate(wanted):
        assert np.array_equal(talk.trajectory.sequence(step), tokens)
    assert talk.text(2) == rendered(talk, [U, A, V, A, W]) + text_of(A) + END
    with pytest.raises(InvalidLineage, match="Step 4 is not recorded"):
        talk.trajectory.sequence(4)


def test_a_turn_becomes_the_step_it_tells_of() -> None:
    talk = Talk()
    talk.say([U], A)
    turn = talk.begin([U, A, V])
    step = turn.step([1, 2], {"logprobs": [0.0, 0.0]}, versions=[("7", 1), ("8", 1)])
    assert (step.kind, step.parent, step.reason) == ("append", 0, "")
    assert step.context is turn.context
    assert step.versions == [("7", 1), ("8", 1)]
    record = talk.record(talk.begin([W]), talk.generated(A), "9")
    assert record.version == "9"
