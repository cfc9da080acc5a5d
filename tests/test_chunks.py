"""A generation that was cut and gone on with: each token keeps the routing of its own weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tq_fs
from tests._rollouts import Array, assert_bits, open_store, standard_fields
from tq_fs import RolloutChunk, join_chunks
from tq_fs.errors import RowCountMismatch, WidthChanged

LAYERS, TOPK = 3, 2


def rows_of(weights: int, first: int, stop: int) -> Array:
    """Return routing that tells whose it is and where: id = 16 weights + row, in every slot."""
    ids = 16 * weights + np.arange(first, stop, dtype=np.int32) % 16
    return np.ascontiguousarray(
        np.broadcast_to(ids[:, None, None], (max(0, stop - first), LAYERS, TOPK))
    )


@dataclass(frozen=True)
class Cut:
    """One interruption: after how many tokens, and what the engine sent of it."""

    tokens: int
    start_row: int = 0
    silent: bool = False  # cut off before the prompt was read: no rows at all


@dataclass(frozen=True)
class Generation:
    """A Step that was generated in parts, one version of the weights for each."""

    prompt: int
    first_row: int
    cuts: tuple[Cut, ...]

    @property
    def response(self) -> int:
        return sum(cut.tokens for cut in self.cuts)

    @property
    def rows(self) -> int:
        return self.prompt + self.response - 1 - self.first_row

    def chunks(self) -> list[RolloutChunk]:
        """Return what an engine gives that reads everything anew after each interruption."""
        out, given_tokens = [], self.prompt
        for weights, cut in enumerate(self.cuts):
            stop = given_tokens + cut.tokens - 1
            begun = any(not c.silent for c in self.cuts[:weights])
            most = given_tokens - 1 if begun else self.first_row
            start = min(cut.start_row, most)
            silent = cut.silent and cut.tokens == 0
            out.append(
                RolloutChunk(
                    data=rows_of(weights, start, start if silent else stop),
                    prefix_token_count=given_tokens,
                    output_token_count=cut.tokens,
                    is_first_chunk=weights == 0,
                    start_row=start,
                    version=str(weights),
                )
            )
            given_tokens += cut.tokens
        return out

    def expected(self) -> Array:
        """Return the rows one by one: row i belongs to whom generated token i + 1, or read it."""
        made = [w for w, cut in enumerate(self.cuts) for _ in range(cut.tokens)]
        reader = next(w for w, cut in enumerate(self.cuts) if not cut.silent)
        whose = [reader] * (self.prompt - 1) + made
        picked = range(self.first_row, self.prompt + self.response - 1)
        empty = np.empty((0, LAYERS, TOPK), np.int32)
        return np.concatenate([empty, *(rows_of(whose[i], i, i + 1) for i in picked)])


@st.composite
def generations(draw: st.DrawFn) -> Generation:
    prompt = draw(st.integers(1, 12))
    cuts = draw(
        st.lists(
            st.builds(Cut, st.integers(0, 5), st.integers(0, 30), st.booleans()),
            min_size=1,
            max_size=6,
        )
    )
    cuts = [replace(c, silent=c.silent and c.tokens == 0) for c in cuts]
    cuts = [*cuts, Cut(draw(st.integers(0, 5)), draw(st.integers(0, 30)))]
    return Generation(prompt, draw(st.integers(0, prompt - 1)), tuple(cuts))


@settings(max_examples=400, deadline=None)
@given(generations())
def test_any_preemptions_give_each_token_the_routing_of_its_own_weights(made: Generation) -> None:
    joined = join_chunks(made.chunks(), first_row=made.first_row, rows=made.rows)
    assert_bits(joined, made.expected(), made)


@settings(max_examples=300, deadline=None)
@given(generations(), st.data())
def test_chunks_that_are_lost_doubled_or_miscounted_are_refused(
    made: Generation, data: st.DataObject
) -> None:
    chunks = made.chunks()
    at = data.draw(st.integers(0, len(chunks) - 1), label="chunk")
    how = data.draw(st.sampled_from(["row lost", "row more", "start", "prefix", "rows", "first"]))
    first_row, rows, chunk = made.first_row, made.rows, chunks[at]
    if how == "rows":
        rows += data.draw(st.sampled_from([-1, 1]))
    elif how == "first":
        first_row += 1
    elif how == "prefix":
        chunks[at] = replace(chunk, prefix_token_count=chunk.prefix_token_count + 1)
    elif how == "start":
        chunks[at] = replace(chunk, start_row=chunk.start_row + 1)
    elif how == "row more":
        chunks[at] = replace(chunk, data=np.concatenate([chunk.data, rows_of(9, 0, 1)]))
    elif len(chunk.data):
        chunks[at] = replace(chunk, data=chunk.data[:-1])
    says_nothing = chunk.output_token_count == 0 and len(chunks[at].data) == 0
    if how in ("start", "row lost") and says_nothing:
        return  # and has no row that could be elsewhere
    if how == "row more" and len(chunks[at].data) == chunk.stop_row - chunk.start_row:
        return  # of a chunk that was cut off before: now it has what its tokens call for
    with pytest.raises(RowCountMismatch) as caught:
        join_chunks(chunks, first_row=first_row, rows=rows)
    assert caught.value.subject.startswith("chunk ") or "chunks" in caught.value.subject


@settings(max_examples=200, deadline=None)
@given(generations(), st.data())
def test_a_chunk_that_gave_tokens_cannot_be_left_out_or_come_twice(
    made: Generation, data: st.DataObject
) -> None:
    chunks = made.chunks()
    telling = [i for i, cut in enumerate(made.cuts) if cut.tokens]
    if not telling:
        return
    at = data.draw(st.sampled_from(telling), label="chunk")
    for wrong in (chunks[:at] + chunks[at + 1 :], [*chunks[: at + 1], *chunks[at:]]):
        with pytest.raises(RowCountMismatch):
            join_chunks(wrong, first_row=made.first_row, rows=made.rows)


def chunk(data: Array, prefix: int, output: int, **more: Any) -> RolloutChunk:
    return RolloutChunk(
        data=data,
        prefix_token_count=prefix,
        output_token_count=output,
        **{"is_first_chunk": False, **more},
    )


def test_a_known_generation() -> None:
    """Prompt of 4, three tokens by the first weights, two by the second."""
    first = chunk(rows_of(0, 0, 6), 4, 3, is_first_chunk=True)
    second = chunk(rows_of(1, 0, 8), 7, 2)
    joined = join_chunks([first, second], first_row=0, rows=8)
    assert joined[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 16 + 6, 16 + 7]
    assert join_chunks([first, second], first_row=3, rows=5)[:, 0, 0].tolist() == [3, 4, 5, 22, 23]


@pytest.mark.parametrize("first_row", [0, 3])
def test_one_chunk_that_holds_everything_is_not_copied(first_row: int) -> None:
    whole = rows_of(0, 0, 9)
    alone = chunk(whole, 5, 5, is_first_chunk=True)
    joined = join_chunks([alone], first_row=first_row, rows=9 - first_row)
    assert np.shares_memory(joined, whole)
    assert_bits(joined, whole[first_row:])
    cut = chunk(rows_of(1, 0, 9), 10, 0)  # aborted before its first token: adds no row
    silent = chunk(rows_of(1, 0, 0), 10, 0)
    assert np.shares_memory(join_chunks([alone, cut, silent], first_row=0, rows=9), whole)


def test_a_prompt_that_was_read_before_the_cut_keeps_that_routing() -> None:
    read = chunk(rows_of(0, 0, 3), 4, 0, is_first_chunk=True)
    went_on = chunk(rows_of(1, 0, 5), 4, 2)
    joined = join_chunks([read, went_on], first_row=0, rows=5)
    assert joined[:, 0, 0].tolist() == [0, 1, 2, 16 + 3, 16 + 4]


def test_after_a_first_chunk_without_rows_the_next_reads_the_prompt() -> None:
    silent = chunk(rows_of(0, 0, 0), 4, 0, is_first_chunk=True)
    went_on = chunk(rows_of(1, 0, 5), 4, 2)
    assert_bits(join_chunks([silent, went_on], first_row=0, rows=5), rows_of(1, 0, 5))


def test_a_step_without_rows_gives_an_array_without_rows() -> None:
    alone = chunk(rows_of(0, 0, 0), 1, 0, is_first_chunk=True)
    assert join_chunks([alone], first_row=0, rows=0).shape == (0, LAYERS, TOPK)


@pytest.mark.parametrize(
    ("chunks", "match"),
    [
        ([], "0 chunks: rows up to 0 where 5"),
        ([chunk(rows_of(0, 0, 5), 4, 2)], r"chunk 0: keeps rows \[3, 5\).*row 0 comes next"),
        ([chunk(rows_of(0, 2, 5), 4, 2, start_row=2, is_first_chunk=True)], "row 0 comes next"),
        (
            [
                chunk(rows_of(0, 0, 4), 4, 1, is_first_chunk=True),
                chunk(rows_of(1, 0, 5), 4, 2),  # the first one's token was thrown away
            ],
            r"chunk 1: keeps rows \[3, 5\).*row 4 comes next",
        ),
        (
            [
                chunk(rows_of(0, 0, 3), 4, 0, is_first_chunk=True),
                chunk(rows_of(1, 4, 5), 4, 2, start_row=4),  # asked to begin too late
            ],
            r"chunk 1: keeps rows \[3, 5\) of \[4, 5\)",
        ),
        ([chunk(rows_of(0, 0, 5), 0, 6, is_first_chunk=True)] * 2, "chunk 1: keeps"),
        ([chunk(rows_of(0, 0, 5), 7, -1, is_first_chunk=True)], "chunk 0: 5 rows"),
        ([chunk(rows_of(0, 0, 6), 4, 2, start_row=-1, is_first_chunk=True)], "chunk 0: 6 rows"),
    ],
)
def test_gaps_overlaps_and_counts_are_named(chunks: list[RolloutChunk], match: str) -> None:
    with pytest.raises(RowCountMismatch, match=match):
        join_chunks(chunks, first_row=0, rows=5)


def test_chunks_of_two_models_are_refused() -> None:
    other = np.zeros((8, LAYERS + 1, TOPK), np.int32)
    with pytest.raises(WidthChanged, match=r"\(3, 2\), \(4, 2\)"):
        join_chunks(
            [chunk(rows_of(0, 0, 6), 4, 3, is_first_chunk=True), chunk(other, 7, 2)],
            first_row=0,
            rows=8,
        )


@pytest.mark.parametrize("mode", ["tito", "snapshot"])
def test_versions_of_a_segment_tell_whose_routing_each_row_is(tmp_path: Path, mode: Any) -> None:
    """From the engine's parts to tensors: rows and runs say the same."""
    turns = [
        Generation(5, 0, (Cut(3), Cut(0), Cut(2))),
        Generation(13, 0, (Cut(0), Cut(4), Cut(0, silent=True), Cut(1))),
        Generation(21, 0, (Cut(6),)),
    ]
    fields = standard_fields(LAYERS, TOPK)
    with open_store(tmp_path, fields) as store:
        session = store.session("s", mode=mode)
        before = 0
        for i, turn in enumerate(turns):
            kind: Any = "append" if i else "create"
            parent = i - 1 if i else None
            first = session.first_row(kind, parent)
            held = turn.prompt + turn.response - (before if mode == "tito" else 0)
            made = replace(turn, first_row=first)
            rows = join_chunks(made.chunks(), first_row=first, rows=made.rows)
            session.record(
                tq_fs.StepInput(
                    kind=kind,
                    parent=parent,
                    context=np.zeros(turn.prompt - before, np.int32),
                    response=np.ones(turn.response, np.int32),
                    versions=[(str(w), cut.tokens) for w, cut in enumerate(turn.cuts)],
                    values={
                        "logprobs": np.zeros(held, np.float32),
                        "routed_experts": rows,
                    },
                )
            )
            before = turn.prompt + turn.response
        (segment,) = session.finalize()
        (whole,) = store.hydrate([segment])["rollout_routed_experts"]
    versions = [int(v) for v, n in segment.versions for _ in range(n)]
    assert [int(row[0, 0]) // 16 for row in whole] == versions[1:]
    assert set(versions) == {0, 1, 2, 3}
