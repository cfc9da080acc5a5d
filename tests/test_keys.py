"""Ids of any text become safe, unique paths and short references, and come back."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tq_fs.errors import InvalidKey
from tq_fs.keys import Incarnation, SegmentRef, StepKey, component, escape, unescape

SAFE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
NASTY = [
    "",
    "/",
    ":",
    "%",
    "[",
    "..",
    ".",
    "_",
    "__",
    "_2e",
    "_h",
    "é",
    "日本",
    "a/b",
    "\0",
    "\n",
    " ",
]
LONG = ["x" * 201, "/" * 67, "é" * 150, "_" * 101, "." * 1000, "x" * 1000, "a" * 63 + "é" * 100]

ids = st.text(max_size=250) | st.text("_./h2e", max_size=80) | st.sampled_from(NASTY + LONG)
long_ids = st.builds(
    lambda a, b: a + "é" * 40 + b, st.text("ab_é.", min_size=55, max_size=75), st.text(max_size=150)
)
any_text = st.text(st.characters(exclude_categories=())) | st.text("_h0123456789abcdef./")


@given(ids)
def test_escape_is_reversible(text: str) -> None:
    assert unescape(escape(text)) == text


@given(ids)
@example("x" * 1000)
@example("é" * 500)
def test_components_are_safe_and_short(text: str) -> None:
    name = component(text)
    assert SAFE.fullmatch(name)
    assert len(name) <= 200


@given(ids, ids)
def test_different_ids_have_different_components(left: str, right: str) -> None:
    assert (component(left) == component(right)) == (left == right)


@given(long_ids)
@example("a" * 63 + "é" * 100)
@example("_" * 150)
def test_no_id_has_the_component_of_a_hashed_one(text: str) -> None:
    """Else somebody who knows one id could choose another that falls on its path."""
    name = component(text)
    if name == escape(text):
        return
    try:
        other = unescape(name)
    except InvalidKey:
        return
    assert component(other) != name, f"{other!r} falls on the path of {text!r}"


def test_long_ids_with_an_equal_start_or_end_do_not_collide() -> None:
    texts = ["s" * 200 + "a", "s" * 200 + "b", "s" * 201 + "a", "s" * 999, "a" + "s" * 200]
    assert len({component(t) for t in texts}) == len(texts)


def test_paths_differ_wherever_ids_do() -> None:
    """No id can shift the border between components."""
    keys = [
        ("a", "b", "c"),
        ("a/b", "", "c"),
        ("a", "b/c", ""),
        ("", "a", "b/c"),
        ("a", "", "b_2fc"),
    ]
    paths = [Incarnation(*k).path for k in keys]
    assert len(set(paths)) == len(keys)
    assert all(p.count("/") == 2 and "//" not in p and not p.startswith("/") for p in paths)
    assert StepKey(Incarnation("a", "b", "c"), 7).path == "steps/a/b/c/000007"


@pytest.mark.parametrize("text", [*NASTY, *LONG, "x" * 300, "é" * 500])
def test_reference_of_a_nasty_id_comes_back(text: str) -> None:
    ref = SegmentRef(text, Incarnation(text, text, text), text, 3)
    assert SegmentRef.parse(str(ref)) == ref
    assert str(ref).isascii()
    assert re.fullmatch(r"tqfs1:([A-Za-z0-9._-]+/){5}3", str(ref))


@given(ids, ids, ids, ids, ids, st.integers(0, 10**9))
def test_references_come_back(
    store: str, partition: str, session: str, incarnation: str, view: str, index: int
) -> None:
    ref = SegmentRef(store, Incarnation(partition, session, incarnation), view, index)
    assert SegmentRef.parse(str(ref)) == ref


@pytest.mark.parametrize(
    ("text", "size"), [("x" * 1001, 1001), ("x" * 2000, 2000), ("é" * 501, 1002)]
)
def test_ids_over_a_thousand_bytes_are_refused_with_their_size(text: str, size: int) -> None:
    for call in (escape, component):
        with pytest.raises(InvalidKey, match=str(size)) as error:
            call(text)
        assert len(str(error.value)) < 300
    with pytest.raises(InvalidKey, match=str(size)):
        str(SegmentRef("s", Incarnation("p", text, "i"), "lineage", 0))


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_lone_surrogates_are_refused(text: str) -> None:
    for call in (escape, component, unescape):
        with pytest.raises(InvalidKey):
            call(text)


@pytest.mark.parametrize("value", [None, 7, b"id", ["id"]])
def test_what_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(InvalidKey):
        escape(value)  # type: ignore[arg-type]
    with pytest.raises(InvalidKey):
        SegmentRef.parse(value)  # type: ignore[arg-type]


@given(any_text)
@example("_")
@example("_2E")
@example("_61")
@example(".a")
@example("_c3")
@example("é")
@example("\ud800")
@example("_78" * 1001)
def test_only_what_escape_returns_is_unescaped(name: str) -> None:
    try:
        text = unescape(name)
    except InvalidKey:
        return
    assert escape(text) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tqfs1:",
        "tqfs1:s/p/x/i/lineage",
        "tqfs1:s/p/x/i/lineage/0/0",
        "tqfs2:s/p/x/i/lineage/0",
        "s/p/x/i/lineage/0",
        "tqfs1:s/p/x/i/lineage/",
        "tqfs1:s/p/x/i/lineage/-1",
        "tqfs1:s/p/x/i/lineage/1.0",
        "tqfs1:s/p/x/i/lineage/0x1",
        "tqfs1:s/p/x/i/lineage/\u0661",
        "tqfs1:s/p/x/i/lineage/\xb2",
        "tqfs1:s/p/x/i/lineage/ 1",
        "tqfs1:s/p/x/i/lineage/1\n",
        "tqfs1:s/p/x/i/lineage/01",
        "tqfs1:s/p/x/i/lineage/" + "1" * 5000,
        "tqfs1:s//x/i/lineage/0",
        "tqfs1:s/p/_2F/i/lineage/0",
        "tqfs1:s/p/../i/lineage/0",
        "tqfs1:s/p/\ud800/i/lineage/0",
        " tqfs1:s/p/x/i/lineage/0",
    ],
)
def test_garbage_references_are_refused(text: str) -> None:
    with pytest.raises(InvalidKey) as error:
        SegmentRef.parse(text)
    assert len(error.value.subject) <= 200


@given(any_text | st.from_regex(r"tqfs1:([a._/]{0,4}/){5}[0-9]{1,3}", fullmatch=True))
@example("tqfs1:s/p/x/i/lineage/01")
def test_a_segment_has_one_reference_only(text: str) -> None:
    """What parses is what the Segment's own reference reads."""
    try:
        ref = SegmentRef.parse(text)
    except InvalidKey:
        return
    assert str(ref) == text
