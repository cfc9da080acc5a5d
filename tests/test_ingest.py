"""Replies of the engine: read as json and base64 read them, in any pieces, or refused."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests._replies import Made, assert_same, encoded, plain, split
from tq_fs.errors import InputError, InvalidConfig, ReplyInvalid, RoutingSuspect
from tq_fs.fields import routed_experts
from tq_fs.ingest import (
    Asked,
    GenerateReply,
    ReplyParser,
    RoutingCheck,
    RoutingReport,
    parse_reply,
)
from tq_fs.metrics import Metrics

# ---------------------------------------------------------------- what is read

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NASTY = st.sampled_from(['],["', "]]", '"', "\\", '\\"', "[", "}", "é", "😀", "\x00", "\\u12"])
TOKEN = st.none() | NASTY | WORDS
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS | NASTY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.integers(-9, 0)


@st.composite
def replies(draw: st.DrawFn) -> tuple[Asked, bytes]:
    """A reply as any JSON library might write it, keys in any order."""
    prompt, generated = draw(st.integers(1, 6)), draw(st.integers(0, 12))
    start = draw(st.integers(0, prompt))
    made = Made(
        prompt=prompt,
        generated=generated,
        layers=draw(st.integers(1, 3)),
        topk=draw(st.integers(1, 3)),
        start_row=start,
        first_row=draw(st.sampled_from([start, 0])),
        max_new_tokens=generated + draw(st.integers(0, 3)),
        routing=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )
    document = made.document()
    document["text"] = draw(st.just("") | WORDS | st.lists(NASTY, max_size=4).map("".join))
    meta = document["meta_info"]
    for entry in meta["output_token_logprobs"]:
        entry[0], entry[2] = draw(FLOATS), draw(TOKEN)
    for where in (document, meta):
        extra = draw(st.dictionaries(WORDS.map(lambda word: f"x{word}"), ANY, max_size=2))
        where.update(extra)
    document["meta_info"] = dict(draw(st.permutations(list(meta.items()))))
    document = dict(draw(st.permutations(list(document.items()))))
    text = json.dumps(
        document,
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 1])),
        separators=draw(st.sampled_from([None, (",", ":")])),
    )
    if draw(st.booleans()):
        text = text.replace("/", "\\/")
    return made.asked, text.encode()


@given(replies(), st.lists(st.integers(0, 3000), max_size=30))
def test_a_reply_in_any_pieces_is_what_json_and_base64_read(
    reply: tuple[Asked, bytes], cuts: list[int]
) -> None:
    asked, body = reply
    assert_same(split(asked, body, cuts), plain(asked, body))


@given(replies())
def test_a_reply_byte_by_byte_is_the_reply_at_once(reply: tuple[Asked, bytes]) -> None:
    asked, body = reply
    assert_same(split(asked, body, list(range(len(body)))), parse_reply(asked, body))


def test_what_is_fed_may_be_any_kind_of_bytes() -> None:
    made = Made()
    for kind in (bytes, bytearray, memoryview):
        assert_same(parse_reply(made.asked, kind(made.body())), plain(made.asked, made.body()))


@given(st.floats(-1e30, 0))
@example(-0.1)
@example(-16777217.0)
@example(-5e-324)
def test_a_logprob_is_the_float32_nearest_to_its_number(value: float) -> None:
    made = Made(generated=1)
    made.meta["output_token_logprobs"] = [[value, made.ids()[0], None]]
    found = parse_reply(made.asked, made.body()).logprobs
    assert found.tobytes() == np.array([value], np.float32).tobytes()


def test_keys_may_be_written_with_escapes() -> None:
    made = Made()
    body = made.body().replace(b'"routed_experts"', b'"routed\\u005fexperts"')
    assert_same(parse_reply(made.asked, body), plain(made.asked, made.body()))


# ---------------------------------------------------------------- which rows are kept


@pytest.mark.parametrize("first", ["delta", "full"])
@pytest.mark.parametrize("start", [0, 1, 7, 19, 20])
@pytest.mark.parametrize("ids_first", [True, False])
@pytest.mark.parametrize("piece", [1, 13, 100_000])
def test_rows_from_the_start_row_on_are_kept_where_the_engine_sends_all(
    first: str, start: int, ids_first: bool, piece: int
) -> None:
    made = Made(
        prompt=20,
        generated=6,
        start_row=start,
        first_row=start if first == "delta" else 0,
        max_new_tokens=9,
    )
    document = made.document()
    if not ids_first:
        document = dict(reversed(document.items()))
    body = json.dumps(document).encode()
    found = split(made.asked, body, list(range(0, len(body), piece)))
    assert found.start_row == start
    assert found.routed_experts is not None
    np.testing.assert_array_equal(found.routed_experts, made.rows(start))


@pytest.mark.parametrize("generated", [0, 1])
@pytest.mark.parametrize("first", [0, 3])
def test_the_row_that_is_missing_when_no_token_is_asked_for_is_not_known(
    generated: int, first: int
) -> None:
    made = Made(generated=generated, start_row=3, first_row=first, max_new_tokens=0)
    made.meta["routed_experts"] = encoded(made.rows(first, -1))
    found = parse_reply(made.asked, made.body()).routed_experts
    assert found is not None
    np.testing.assert_array_equal(found[:-1], made.rows(3, -1))
    np.testing.assert_array_equal(found[-1], -1)


def test_a_missing_row_is_refused_where_tokens_were_asked_for() -> None:
    made = Made(generated=0, max_new_tokens=1)
    made.meta["routed_experts"] = encoded(made.rows(0, -1))
    with pytest.raises(ReplyInvalid, match="3 rows of 3 x 2 ids, where the tokens call for 4"):
        parse_reply(made.asked, made.body())


def test_an_abort_before_the_prompt_was_read_has_nothing() -> None:
    body = json.dumps(
        {
            "text": "",
            "meta_info": {
                "id": "7",
                "finish_reason": {"type": "abort", "message": "Abort before prefill"},
                "prompt_tokens": 0,
                "completion_tokens": 0,
            },
        }
    ).encode()
    found = parse_reply(Made().asked, body)
    assert (len(found.output_ids), len(found.logprobs)) == (0, 0)
    assert found.routed_experts is None
    assert (found.version, found.finish, found.text) == ("", "abort", "")


ABORT = {"finish_reason": {"type": "abort"}}


def test_an_abort_that_generated_nothing_keeps_its_rows_if_they_are_all_there() -> None:
    made = Made(generated=0, max_new_tokens=4, meta=ABORT)
    assert_same(parse_reply(made.asked, made.body()), plain(made.asked, made.body()))
    made.meta = {**ABORT, "routed_experts": encoded(made.rows(0, 2))}
    assert parse_reply(made.asked, made.body()).routed_experts is None


def test_an_abort_that_generated_tokens_must_have_their_rows() -> None:
    made = Made(meta=ABORT, max_new_tokens=9)
    assert_same(parse_reply(made.asked, made.body()), plain(made.asked, made.body()))
    made.meta = {**ABORT, "routed_experts": encoded(made.rows(0, 2))}
    with pytest.raises(ReplyInvalid, match="2 rows"):
        parse_reply(made.asked, made.body())


def test_routing_that_was_not_asked_for_is_passed_over() -> None:
    made = Made(routing=False)
    assert parse_reply(made.asked, made.body()).routed_experts is None


# ---------------------------------------------------------------- what is refused


def changed(**how: Any) -> Callable[[], tuple[Asked, bytes]]:
    def make() -> tuple[Asked, bytes]:
        made = Made(**how)
        return made.asked, made.body()

    return make


def replaced(old: bytes, new: bytes, **how: Any) -> Callable[[], tuple[Asked, bytes]]:
    def make() -> tuple[Asked, bytes]:
        made = Made(**how)
        assert old in made.body()
        return made.asked, made.body().replace(old, new, 1)

    return make


def entries(*values: Any) -> dict[str, Any]:
    ids = Made().ids()
    lps = [-0.5] * len(ids)
    made = [[lp, token, None] for lp, token in zip(lps, ids, strict=True)]
    for at, value in enumerate(values):
        made[at] = value
    return {"output_token_logprobs": made}


ROWS = Made().rows(0)
REFUSED: dict[str, tuple[Callable[[], tuple[Asked, bytes]], str]] = {
    "a list": (lambda: (Made().asked, b"[" + Made().body() + b"]"), "list of replies.*one seq"),
    "no object": (lambda: (Made().asked, b'"ok"'), "the reply is no object"),
    "nothing": (lambda: (Made().asked, b""), "ends after 0 bytes"),
    "more": (lambda: (Made().asked, Made().body() + b" {}"), "more follows"),
    "an error": (lambda: (Made().asked, b'{"error": {"message": "x"}}'), "nothing where one of"),
    "no meta_info": (changed(without=("meta_info",)), "finish_reason.*nothing where"),
    "meta_info no object": (changed(top={"meta_info": [1]}), "meta_info is no object"),
    "no ids": (changed(without=("output_ids",)), "output_ids: is missing"),
    "ids no array": (changed(top={"output_ids": "1"}), "output_ids is no array"),
    "ids no numbers": (replaced(b'"output_ids": [', b'"output_ids": [1.5,'), "Expected `int`"),
    "ids negative": (replaced(b'"output_ids": [', b'"output_ids": [-'), "`int` >= 0"),
    "ids too large": (replaced(b'"output_ids": [', b'"output_ids": [9999999'), "`int` <="),
    "a comma too many": (replaced(b'"output_ids": [', b'"output_ids": [,'), "no element of|middle"),
    "a comma at the end": (replaced(b'], "meta_info"', b',], "meta_info"'), "one of|element|midd"),
    "more than asked": (changed(max_new_tokens=2), r"\d tokens or more where 2 were asked"),
    "no logprobs": (changed(without=("output_token_logprobs",)), "return_logprob"),
    "null logprobs": (changed(meta={"output_token_logprobs": None}), "return_logprob"),
    "fewer logprobs": (
        changed(meta={"output_token_logprobs": entries()["output_token_logprobs"][:3]}),
        "4 output_ids and 3 output_token_logprobs",
    ),
    "other ids": (changed(meta=entries([-0.5, 1, None])), r"token 0 is \d+ .* and 1 in"),
    "NaN": (changed(meta=entries([math.nan, 1, None])), "malformed"),
    "infinity": (changed(meta=entries([-math.inf, 1, None])), "malformed"),
    "no number": (changed(meta=entries([None, 1, None])), "Expected `float`, got `null`"),
    "too large": (changed(meta=entries([-1e39, Made().ids()[0], None])), "token 0 is -inf"),
    "far too large": (replaced(b"[[-0.5", b"[[-1e999", meta=entries()), "out of range"),
    "a short entry": (changed(meta=entries([-0.5])), "at least length 2, got 1"),
    "a nested entry": (changed(meta=entries([[-0.5], 1, None])), "no element|middle"),
    "finish unknown": (changed(meta={"finish_reason": {"type": "tired"}}), "'tired' where one of"),
    "finish null": (changed(meta={"finish_reason": None}), "nothing where one of.*streamed"),
    "finish a word": (changed(meta={"finish_reason": "stop"}), "Expected `object"),
    "no version": (changed(without=("weight_version",)), "weight_version: is missing"),
    "null version": (changed(meta={"weight_version": None}), "weight_version: is missing"),
    "empty version": (changed(meta={"weight_version": ""}), "weight_version: is missing"),
    "version a number": (changed(meta={"weight_version": 12}), "Expected `str`, got `int`"),
    "prompt": (changed(meta={"prompt_tokens": 4}), "prompt_tokens: 4 where 5 is"),
    "completion": (changed(meta={"completion_tokens": 5}), "completion_tokens: 5 where 4 is"),
    "no routing": (changed(without=("routed_experts",)), "enable-return-routed-experts"),
    "null routing": (changed(meta={"routed_experts": None}), "enable-return-routed-experts"),
    "routing no text": (changed(meta={"routed_experts": [1]}), "'\\[' where one of"),
    "empty routing": (changed(meta={"routed_experts": ""}), "0 bytes are 0 rows of 3 x 2 ids"),
    "rows short": (changed(meta={"routed_experts": encoded(ROWS[1:])}), "7 rows.*call for 8"),
    "rows too many": (
        changed(meta={"routed_experts": encoded(np.concatenate([ROWS, ROWS[:1]]))}),
        "more than the 8 rows",
    ),
    "rows between delta and full": (
        changed(start_row=3, first_row=2),
        r"6 rows of 3 x 2 ids, where the tokens call for 5 \(or 8 from row 0 on\)",
    ),
    "narrow": (
        changed(meta={"routed_experts": encoded(ROWS[:, :2])}),
        "rows of 4 ids would fit; check layers and top-k",
    ),
    "a part of a row": (
        changed(meta={"routed_experts": encoded(ROWS.reshape(-1)[:-1])}),
        "188 bytes are 7 rows of 3 x 2 ids and 20 bytes",
    ),
    "base64 cut": (changed(meta={"routed_experts": encoded(ROWS)[:-1]}), "base64 has 3 char"),
    "no base64": (changed(meta={"routed_experts": "!" + encoded(ROWS)[1:]}), "that are none"),
    "url-safe base64": (changed(meta={"routed_experts": "-_8A" * 64}), "that are none"),
    "padding inside": (changed(meta={"routed_experts": "AAA=" + encoded(ROWS)[4:]}), "none|after"),
    "twice": (replaced(b'{"id"', b'{"prompt_tokens": 5, "id"'), "prompt_tokens: is there twice"),
    "twice at the top": (replaced(b'{"text"', b'{"output_ids": [], "text"'), "output_ids: is the"),
    "deep": (changed(top={"x": json.loads("[" * 65 + "]" * 65)}), "more than 64 deep"),
    "a long key": (changed(top={"x" * 1100: 1}), "a key: is longer than 1024"),
    "a long value": (changed(top={"x": "y" * 1100000}), "x: is longer than 1048576 bytes"),
    "a long text": (changed(top={"text": "y" * 1100000}), "text: is longer than"),
    "a long element": (
        replaced(b"[[-0.5", b"[[-0." + b"5" * 100_000, meta=entries()),
        "no element",
    ),
    "a key no text": (lambda: (Made().asked, b"{1: 2}"), "a key is no string"),
    "no key": (replaced(b'"cached_tokens": 0', b': 0'), "a key is no string"),
    "no value": (replaced(b'"cached_tokens": 0', b'"cached_tokens": '), "cannot be read"),
    "brackets": (replaced(b'"cached_tokens": 0', b'"cached_tokens": [}'), "malformed"),
    "a word": (replaced(b'"cached_tokens": 0', b'"cached_tokens": zero'), "malformed"),
    "no UTF-8": (replaced(b'"id": "7"', b'"id": "\xff"'), "utf-8"),
    "no UTF-8 text": (replaced(b'"a ', b'"a \xc3'), "UTF-8"),
    "an escape": (replaced(b'"a ', b'"a \\u12'), "no character of a string"),
    "half a pair": (replaced(b'"a ', b'"a \\ud83d '), "no character of a string"),
}  # fmt: skip


@pytest.mark.parametrize("piece", [1, 7, 100_000])
@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_itself_or_the_request_is_refused_with_numbers_and_remedy(
    name: str, piece: int
) -> None:
    make, message = REFUSED[name]
    asked, body = make()
    if piece == 1 and len(body) > 100_000:
        piece = 4000
    with pytest.raises(ReplyInvalid, match=message) as caught:
        split(asked, body, list(range(0, len(body), piece)))
    assert caught.value.subject.startswith("request 7")
    assert caught.value.remedy


def test_layers_and_topk_must_be_known() -> None:
    asked = Asked(prompt_tokens=5, start_row=0, max_new_tokens=4, routing=routed_experts())
    with pytest.raises(ReplyInvalid, match=r"give the model's config\.json"):
        parse_reply(asked, Made().body())


@pytest.mark.parametrize("wrong", [{"prompt": 0}, {"start_row": 6}, {"start_row": -1}])
def test_a_request_that_cannot_be_is_the_callers_error(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match="request 7"):
        _ = Made(**wrong).asked  # type: ignore[arg-type]


def test_a_parser_that_refused_says_the_same_again() -> None:
    parser = ReplyParser(Made().asked)
    with pytest.raises(ReplyInvalid, match="list of replies") as first:
        parser.feed(b"[")
    for again in (lambda: parser.feed(b"{"), parser.close):
        with pytest.raises(ReplyInvalid) as caught:
            again()
        assert caught.value is first.value


# ---------------------------------------------------------------- broken on the way

FUZZED = Made(prompt=4, generated=3, layers=2, topk=2, top={"text": 'é "\\ ü😀'})


def outcome(asked: Asked, body: bytes, cuts: list[int]) -> GenerateReply | None:
    try:
        return split(asked, body, cuts)
    except ReplyInvalid:
        return None


def allowed(found: GenerateReply, body: bytes) -> None:
    """What was taken is what json and base64 read of the same bytes; or what was sent."""
    try:
        wanted = plain(FUZZED.asked, body)
    except (ValueError, KeyError, TypeError, AssertionError):
        wanted = plain(FUZZED.asked, FUZZED.body())
    assert_same(found, wanted)


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_reply_cut_anywhere_is_refused(ascii_only: bool) -> None:
    body = json.dumps(FUZZED.document(), ensure_ascii=ascii_only).encode()
    assert_same(parse_reply(FUZZED.asked, body), plain(FUZZED.asked, body))
    for end in range(len(body)):
        with pytest.raises(ReplyInvalid):
            split(FUZZED.asked, body[:end], [end // 2])


def test_a_reply_with_any_bit_flipped_is_refused_or_read_as_json_reads_it() -> None:
    body, taken = FUZZED.body(), 0
    for at in range(len(body)):
        for bit in range(8):
            flipped = bytearray(body)
            flipped[at] ^= 1 << bit
            found = outcome(FUZZED.asked, bytes(flipped), [at])
            if found is not None:
                taken += 1
                allowed(found, bytes(flipped))
    assert taken > 100


@given(
    st.lists(
        st.tuples(st.integers(0, 2000), st.integers(0, 40), st.binary(max_size=6)), max_size=4
    ),
    st.lists(st.integers(0, 2000), max_size=6),
)
def test_a_reply_with_parts_replaced_is_refused_or_read_as_json_reads_it(
    splices: list[tuple[int, int, bytes]], cuts: list[int]
) -> None:
    body = FUZZED.body()
    for at, length, new in splices:
        at %= len(body) + 1  # noqa: PLW2901
        body = body[:at] + new + body[at + length :]
    found = outcome(FUZZED.asked, body, cuts)
    if found is not None:
        allowed(found, body)


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_no_bytes_at_all_make_another_error(body: bytes, cuts: list[int]) -> None:
    assert outcome(FUZZED.asked, body, cuts) is None
    assert outcome(FUZZED.asked, b'{"text":"' + body, cuts) is None
    assert outcome(FUZZED.asked, b'{"meta_info":{"output_token_logprobs":[' + body, cuts) is None


# ---------------------------------------------------------------- memory and time


def long_body(generated: int, *, layers: int, topk: int = 8, prompt: int = 1) -> tuple[Made, bytes]:
    made = Made(prompt=prompt, generated=generated, layers=layers, topk=topk)
    return made, made.body()


@pytest.mark.parametrize(("prompt", "start", "first"), [
    (30_001, 30_000, 30_000),
    (30_001, 30_000, 0),
    (8001, 1000, 0),
])  # fmt: skip
def test_memory_is_that_of_the_rows_that_were_asked_for(
    prompt: int, start: int, first: int
) -> None:
    made = Made(prompt=prompt, generated=2000, layers=20, topk=4, start_row=start, first_row=first)
    body = memoryview(made.body())
    kept = (prompt + 2000 - 1 - start) * 20 * 4 * 4
    tracemalloc.start()
    parser = ReplyParser(made.asked)
    for at in range(0, len(body), 30_000):
        parser.feed(body[at : at + 30_000])
    found = parser.close()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.routed_experts is not None
    assert found.routed_experts.nbytes == kept
    np.testing.assert_array_equal(found.routed_experts, made.rows(start))
    assert peak < kept + 600_000


def test_more_than_was_asked_for_is_refused_before_it_is_all_there() -> None:
    made = Made(generated=4, max_new_tokens=4)
    head, _, tail = made.body().partition(b'"routed_experts": "')
    parser = ReplyParser(made.asked)
    parser.feed(head + b'"routed_experts": "' + tail[:-10].replace(b'"', b""))
    with pytest.raises(ReplyInvalid, match="more than the 8 rows"):
        parser.feed(b"AAAA" * 1000)


def longest_step(work: Callable[[], object]) -> float:
    """Return the most processor seconds between two moments at which another thread could run.

    Those are at most as far apart as what a profiler is told of: Python's calls and returns, and
    those of C. Other than a thread that ticks, it does not see how busy the machine is.
    """
    moments = []

    def look(frame: object, event: str, arg: object) -> None:
        moments.append(time.thread_time())

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return float(np.diff(moments).max())


@pytest.mark.slow
def test_nothing_holds_the_interpreter_for_long_while_a_long_reply_is_parsed() -> None:
    made, body = long_body(65_536, layers=10)
    assert longest_step(lambda: json.loads(body)) > 0.02
    assert min(longest_step(lambda: parse_reply(made.asked, body)) for _ in range(3)) < 0.005


# ---------------------------------------------------------------- routing that is none


def by_hand(rows: np.ndarray[Any, Any]) -> RoutingReport:
    counts = {"unknown": 0, "constant": 0, "repeated": 0}
    for row in rows.tolist():
        ids = {i for layer in row for i in layer}
        known = [[i for i in layer if i != -1] for layer in row]
        if ids == {-1}:
            counts["unknown"] += 1
        elif len(ids) == 1 and (rows.shape[2] > 1 or rows.shape[1] >= 8):
            counts["constant"] += 1
        elif any(len(set(layer)) < len(layer) for layer in known):
            counts["repeated"] += 1
    return RoutingReport(rows=len(rows), **counts)


@st.composite
def routings(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Rows of which some are wrong, of ids that are equal in their lower bits."""
    tokens, topk = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    layers = draw(st.sampled_from([1, 2, 7, 8, 9]))
    sets = (range(9), range(-1, 9), range(0, 257 * 9, 256), range(-1, 9 << 16, 1 << 16))
    ids = draw(st.sampled_from(sets))
    draws = np.random.default_rng(draw(st.integers(0, 999)))
    order = [draws.permutation(ids)[:topk] for _ in range(tokens * layers)]
    rows = np.array(order, np.int32).reshape(tokens, layers, topk)
    for at in draw(st.lists(st.integers(0, tokens - 1), max_size=3)):
        rows[at] = draw(st.sampled_from([-1, 0, 5]))
    for at in draw(st.lists(st.integers(0, tokens - 1), max_size=3)):
        layer, slots = draw(st.integers(0, layers - 1)), draw(st.permutations(range(topk)))
        rows[at, layer, slots[-1]] = rows[at, layer, slots[0]]
    return rows


@given(routings(), st.sampled_from([1, 50, 1 << 18]))
def test_suspect_rows_are_counted_exactly(rows: np.ndarray[Any, Any], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tq_fs.ingest._routing._BLOCK_IDS", block)
        assert RoutingCheck("warn").check(rows, "s") == by_hand(rows)


GOOD = np.tile(np.arange(8, dtype=np.int32), (6, 5, 1))


def suspect() -> np.ndarray[Any, Any]:
    rows = GOOD.copy()
    rows[0] = 0
    rows[1, 4, 7] = rows[1, 4, 0]
    rows[2, 0, 3] = rows[2, 0, 4]
    rows[3] = -1
    return rows


def counted(metrics: Metrics) -> dict[tuple[str, ...], Any]:
    return {
        (family.spec.name, *labels[1:]): value
        for family in metrics.collect()
        for labels, value in family.series.items()
    }


def test_warn_logs_one_line_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics("run")
    check = RoutingCheck("warn", metrics)
    with caplog.at_level(logging.WARNING, "tq_fs"):
        report = check.check(suspect(), "request 7")
    assert report == RoutingReport(rows=6, unknown=1, constant=1, repeated=2)
    assert [r.getMessage() for r in caplog.records] == [str(caplog.records[0].args[0])]  # type: ignore[index]
    assert "request 7, routed_experts: of 6 rows 1 are one id" in caplog.text
    assert "2 have an id twice" in caplog.text
    assert counted(metrics) == {
        ("tqfs_routing_rows_total",): 6,
        ("tqfs_routing_suspect_rows_total", "constant"): 1,
        ("tqfs_routing_suspect_rows_total", "repeated"): 2,
        ("tqfs_routing_suspect_rows_total", "unknown"): 1,
    }


def test_reject_refuses_and_counts() -> None:
    metrics = Metrics("run")
    with pytest.raises(RoutingSuspect, match=r"of 6 rows 1 are one id .* 2 have an id twice"):
        RoutingCheck("reject", metrics).check(suspect(), "request 7")
    assert counted(metrics)["tqfs_routing_suspect_rows_total", "repeated"] == 2


def test_off_does_not_look() -> None:
    metrics = Metrics("run")
    assert RoutingCheck("off", metrics).check(suspect(), "s") == RoutingReport()
    assert counted(metrics) == {}


@pytest.mark.parametrize("policy", ["warn", "reject"])
def test_good_rows_and_rows_that_are_not_known_pass_in_silence(
    policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = GOOD.copy()
    rows[2:4] = -1
    rows[4, 0, 3:] = -1
    with caplog.at_level(logging.WARNING, "tq_fs"):
        assert RoutingCheck(policy).check(rows, "s") == RoutingReport(rows=6, unknown=2)
    assert caplog.records == []


def test_dense_layers_are_not_looked_at() -> None:
    rows = GOOD.copy()
    rows[:, :2] = 0
    assert RoutingCheck("reject", dense_layers=range(2)).check(rows, "s").suspect == 0
    assert RoutingCheck("warn").check(rows, "s").repeated == 6


def test_no_rows_are_none() -> None:
    assert RoutingCheck("reject").check(GOOD[:0], "s") == RoutingReport()


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="choose from warn, reject, off"):
        RoutingCheck("loud")  # type: ignore[arg-type]
