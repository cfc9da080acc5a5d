"""A part of a value is what the whole value says there, and only its chunks are read for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests._rollouts import CountingBackend
from tests._value_parts import chunk, cut_chunk, open_values, partial, same
from tq_fs.errors import (
    InvalidField,
    InvalidSelection,
    RowCountMismatch,
    ValueMissing,
    WidthChanged,
)
from tq_fs.steps import EncodeOptions
from tq_fs.values import ValueStore, read_range

torch = pytest.importorskip("torch")
Array = npt.NDArray[Any]
Range = tuple[int, int]
SAMPLE = ("train", 3)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[ValueStore, CountingBackend]]:
    with open_values(tmp_path) as opened:
        yield opened


def put(values: ValueStore, value: Any, field: str = "f") -> None:
    values.put(SAMPLE[0], [SAMPLE[1]], {field: [value]})


ROWS = {"small": 40, "large": 5000}
KINDS: dict[str, Callable[[int, np.random.Generator], Any]] = {
    "float32 tensor": lambda n, r: torch.from_numpy(r.normal(size=(n, 5)).astype(np.float32)),
    "int32 tensor, layered": lambda n, r: torch.from_numpy(
        r.integers(0, 256, (n, 6, 2)).astype(np.int32)
    ),
    "bfloat16 tensor": lambda n, r: torch.from_numpy(r.normal(size=(n, 9))).to(torch.bfloat16),
    "bool tensor": lambda n, r: torch.from_numpy(r.random((n, 4, 4)) < 0.5),
    "float64 vector": lambda n, r: r.normal(size=n * 2),
    "ndarray, four axes": lambda n, r: r.integers(0, 9, (n, 3, 2, 2)),
    "big-endian": lambda n, r: r.integers(0, 9, (n, 4, 3)).astype(">i4"),
    "times": lambda n, r: r.integers(0, 9, (n, 4)).astype("datetime64[ns]"),
    "records": lambda n, r: np.array(
        [(i, i / 7) for i in range(2 * n)], [("a", "<i4"), ("b", "<f8")]
    ),
    "list of floats": lambda n, r: r.normal(size=n * 4).tolist(),
    "list of ints": lambda n, r: r.integers(-(2**40), 2**40, n * 3).tolist(),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_range_is_what_the_whole_value_says_there(
    store: tuple[ValueStore, CountingBackend], kind: str, rows: str
) -> None:
    values, _ = store
    random = np.random.default_rng(len(kind))
    value = KINDS[kind](ROWS[rows], random)
    put(values, value)
    entry = values.find(SAMPLE, "f").entry
    assert bool(entry.arrays) == (rows == "large")
    same(read_range(values, SAMPLE, "f"), value)
    inner = None if isinstance(value, list) or value.ndim < 2 else value.shape[1]
    for _ in range(12):
        start, stop = sorted(random.integers(0, len(value) + 1, 2).tolist())
        same(read_range(values, SAMPLE, "f", tokens=(start, stop)), value[start:stop])
        if inner:
            low, high = sorted(random.integers(0, inner + 1, 2).tolist())
            found = read_range(values, SAMPLE, "f", tokens=(start, stop), layers=(low, high))
            same(found, value[start:stop, low:high])


@pytest.mark.parametrize("value", [[], [1.5, 2, 3.25], [7], list(range(12))])
def test_lists_that_are_no_arrays_are_cut_too(
    store: tuple[ValueStore, CountingBackend], value: list[Any]
) -> None:
    values, _ = store
    put(values, value)
    same(read_range(values, SAMPLE, "f"), value)
    same(read_range(values, SAMPLE, "f", tokens=(0, len(value) // 2)), value[: len(value) // 2])


def test_only_the_chunks_that_are_wanted_are_read(tmp_path: Path) -> None:
    with open_values(tmp_path, EncodeOptions(compact=True, layer_groups=4)) as (values, backend):
        value = np.random.default_rng(0).integers(0, 256, (8192, 40, 8), dtype=np.int32)
        put(values, value)
        backend.requests.clear()
        same(read_range(values, SAMPLE, "f", tokens=(5000, 5100)), value[5000:5100])
        assert backend.nbytes < value.nbytes / 7
        backend.requests.clear()
        found = read_range(values, SAMPLE, "f", tokens=(5000, 5100), layers=(10, 20))
        same(found, value[5000:5100, 10:20])
        assert backend.nbytes < value.nbytes / 28
        backend.requests.clear()
        same(read_range(values, SAMPLE, "f", tokens=(77, 77)), value[77:77])
        assert backend.nbytes == 0


def test_the_other_values_of_a_pack_are_not_read(
    store: tuple[ValueStore, CountingBackend],
) -> None:
    values, backend = store
    rows = [np.full(7000, i, np.int32) for i in range(30)]
    values.put("train", list(range(30)), {"f": rows})
    backend.requests.clear()
    same(read_range(values, ("train", 11), "f", tokens=(3, 9)), rows[11][3:9])
    assert backend.nbytes < 2 * rows[11].nbytes


# ---------------------------------------------------------------- chunks of routed experts


@pytest.mark.parametrize("form", ["base64", "ndarray", "tensor"])
@pytest.mark.parametrize("lengths", [[30], [9000], [20, 33, 50], [30, 9000, 9010], [9000, 12000]])
def test_chunks_of_a_partial_rollout_are_one_array(
    store: tuple[ValueStore, CountingBackend], form: str, lengths: list[int]
) -> None:
    values, _ = store
    random = np.random.default_rng(lengths[-1])
    chunks, expected = partial(random, lengths, form)
    put(values, chunks if len(chunks) > 1 else chunks[0])
    if form == "base64":
        expected = expected.reshape(len(expected), -1)
    same(read_range(values, SAMPLE, "f"), expected)
    for _ in range(12):
        start, stop = sorted(random.integers(0, len(expected) + 1, 2).tolist())
        same(read_range(values, SAMPLE, "f", tokens=(start, stop)), expected[start:stop])
        if form != "base64":
            low, high = sorted(random.integers(0, 5, 2).tolist())
            found = read_range(values, SAMPLE, "f", tokens=(start, stop), layers=(low, high))
            same(found, expected[start:stop, low:high])


def test_what_a_later_generation_says_of_earlier_tokens_is_not_read(
    store: tuple[ValueStore, CountingBackend],
) -> None:
    values, backend = store
    chunks, expected = partial(np.random.default_rng(0), [60_000, 60_100], "ndarray", (8, 4))
    put(values, chunks)
    backend.requests.clear()
    same(read_range(values, SAMPLE, "f", tokens=(59_990, 60_050)), expected[59_990:60_050])
    assert {key.split("/")[-2] for key, _, _ in backend.requests} == {"a0", "a1"}
    assert backend.nbytes < expected.nbytes / 4 / 8  # stored as uint8, two chunks of many


def test_a_generation_that_was_continued_has_the_rows_of_its_own_tokens(
    store: tuple[ValueStore, CountingBackend],
) -> None:
    values, _ = store
    rows = np.random.default_rng(0).integers(0, 256, (99, 3, 2), dtype=np.int32)
    put(values, chunk(rows, 40, False, "ndarray"))
    same(read_range(values, SAMPLE, "f"), rows[39:])
    same(read_range(values, SAMPLE, "f", tokens=(39, 41)), rows[39:41])
    with pytest.raises(InvalidSelection, match=r"\[38, 41\) do not lie in \[39, 99\)"):
        read_range(values, SAMPLE, "f", tokens=(38, 41))


def broken() -> dict[str, list[dict[str, Any]]]:
    rows = np.zeros((29, 4, 2), np.int32)
    first = chunk(rows, 5, True, "ndarray")
    return {
        "gap": [first, chunk(np.zeros((39, 4, 2), np.int32), 32, False, "ndarray")],
        "overlap": [first, chunk(np.zeros((39, 4, 2), np.int32), 29, False, "ndarray")],
        "two firsts": [first, chunk(np.zeros((39, 4, 2), np.int32), 30, True, "ndarray")],
        "no prefix": [chunk(rows, 0, False, "ndarray")],
    }


@pytest.mark.parametrize("case", broken())
def test_chunks_that_do_not_follow_each_other_are_refused(
    store: tuple[ValueStore, CountingBackend], case: str
) -> None:
    values, _ = store
    put(values, broken()[case])
    with pytest.raises(RowCountMismatch, match=r"'f' of sample 3 .*chunk \d goes on at row"):
        read_range(values, SAMPLE, "f", tokens=(0, 1))


def test_chunks_of_different_widths_are_refused(
    store: tuple[ValueStore, CountingBackend],
) -> None:
    values, _ = store
    first = chunk(np.zeros((29, 4, 2), np.int32), 5, True, "ndarray")
    put(values, [first, chunk(np.zeros((39, 5, 2), np.int32), 30, False, "ndarray")])
    with pytest.raises(WidthChanged, match="'f' of sample 3"):
        read_range(values, SAMPLE, "f")


CUTS = {"one": [30], "one, large": [9000], "several": [20, 1, 33], "both": [30, 9000, 10, 9500]}


@pytest.mark.parametrize("form", ["base64", "bytes", "ndarray"])
@pytest.mark.parametrize("dtype", ["int32", "uint16", "uint8"])
@pytest.mark.parametrize("case", CUTS)
def test_chunks_that_are_cut_already_are_one_array(
    store: tuple[ValueStore, CountingBackend], case: str, dtype: str, form: str
) -> None:
    values, _ = store
    random = np.random.default_rng(len(case))
    most = {"int32": 70_000, "uint16": 60_000, "uint8": 256}[dtype]
    pieces = [
        random.integers(0, most if number % 2 else 256, (rows, 4, 2), dtype=np.int32)
        for number, rows in enumerate(CUTS[case])
    ]
    chunks = [cut_chunk(piece, dtype, form) for piece in pieces]
    put(values, chunks if len(chunks) > 1 else chunks[0])
    expected = np.concatenate(pieces)
    if form != "ndarray":
        expected = expected.reshape(len(expected), -1)
    same(read_range(values, SAMPLE, "f"), expected)
    for _ in range(12):
        start, stop = sorted(random.integers(0, len(expected) + 1, 2).tolist())
        same(read_range(values, SAMPLE, "f", tokens=(start, stop)), expected[start:stop])
        if form == "ndarray":
            low, high = sorted(random.integers(0, 5, 2).tolist())
            found = read_range(values, SAMPLE, "f", tokens=(start, stop), layers=(low, high))
            same(found, expected[start:stop, low:high])
    with pytest.raises(InvalidSelection, match=rf"do not lie in \[0, {len(expected)}\)"):
        read_range(values, SAMPLE, "f", tokens=(0, len(expected) + 1))


def test_of_chunks_that_are_cut_only_what_is_wanted_is_read(
    store: tuple[ValueStore, CountingBackend],
) -> None:
    values, backend = store
    rows = np.random.default_rng(0).integers(0, 256, (60_100, 8, 4), dtype=np.int32)
    put(values, [cut_chunk(rows[:60_000]), cut_chunk(rows[60_000:])])
    backend.requests.clear()
    found = read_range(values, SAMPLE, "f", tokens=(59_990, 60_050))
    same(found, rows[59_990:60_050].reshape(60, -1))
    assert backend.nbytes < rows.nbytes / 4 / 8  # stored as uint8, one chunk of many


def test_chunks_that_are_cut_have_one_width(store: tuple[ValueStore, CountingBackend]) -> None:
    values, _ = store
    rows = np.zeros((20, 4, 2), np.int32)
    put(values, [cut_chunk(rows), cut_chunk(rows[:, :3])])
    with pytest.raises(WidthChanged, match=r"'f' of sample 3 .*chunk 1 has rows of \[6\]"):
        read_range(values, SAMPLE, "f")


@pytest.mark.parametrize("other", ["chunk", "cut badly", "text"])
def test_chunks_that_are_cut_do_not_mix_with_others(
    store: tuple[ValueStore, CountingBackend], other: str
) -> None:
    values, _ = store
    rows = np.zeros((20, 4, 2), np.int32)
    others = {
        "chunk": chunk(rows, 5, True),
        "cut badly": {**cut_chunk(rows), "row_count": 19},
        "text": "text",
    }
    put(values, [cut_chunk(rows), others[other]])
    with pytest.raises(InvalidField, match=r"'f' of sample 3 .*is a list"):
        read_range(values, SAMPLE, "f")


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("rows", [20, 9000])
@pytest.mark.parametrize("tokens", [(-1, 4), (4, 3), (0, 10**6)])
def test_rows_outside_of_a_value_are_refused(
    store: tuple[ValueStore, CountingBackend], rows: int, tokens: Range
) -> None:
    values, _ = store
    put(values, np.zeros((rows, 4), np.int64))
    with pytest.raises(InvalidSelection, match=rf"'f' of sample 3 .*\[0, {rows}\)"):
        read_range(values, SAMPLE, "f", tokens=tokens)


@pytest.mark.parametrize("layers", [(-1, 1), (3, 2), (0, 5)])
def test_layers_outside_of_a_value_are_refused(
    store: tuple[ValueStore, CountingBackend], layers: Range
) -> None:
    values, _ = store
    put(values, np.zeros((9000, 4, 2), np.int64))
    with pytest.raises(InvalidSelection, match=r"'f' of sample 3 .*layers.*\[0, 4\)"):
        read_range(values, SAMPLE, "f", layers=layers)


@pytest.mark.parametrize("value", [[1.0, 2.0], np.zeros(9000), torch.zeros(5)])
def test_what_has_no_layers_gives_none(
    store: tuple[ValueStore, CountingBackend], value: Any
) -> None:
    values, _ = store
    put(values, value)
    with pytest.raises(InvalidSelection, match="no axis of layers"):
        read_range(values, SAMPLE, "f", layers=(0, 1))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "NoneType"),
        ("text", "str"),
        ("long" * 99_999, "str"),
        (7, "int"),
        ({"a": np.zeros(99_999)}, "dict"),
        ((1, 2), "tuple"),
        ([1, None], "list"),
        ([True], "list"),
        (np.float32(3), "scalar"),
        (np.zeros(()), "numpy float64"),
        ({"data": "AAAA", "prefix_token_count": 1, "output_token_count": 9,
          "is_first_chunk": True}, "dict"),
        (Path("x"), "pickle"),
    ],
)  # fmt: skip
def test_what_is_no_array_is_refused_by_its_type(
    store: tuple[ValueStore, CountingBackend], value: Any, kind: str
) -> None:
    values, _ = store
    put(values, value)
    with pytest.raises(InvalidField, match=rf"'f' of sample 3 .*is a {kind}"):
        read_range(values, SAMPLE, "f", tokens=(0, 1))


def test_a_value_that_is_not_there_is_missing(store: tuple[ValueStore, CountingBackend]) -> None:
    values, _ = store
    with pytest.raises(ValueMissing, match="'f' of sample 3"):
        read_range(values, SAMPLE, "f")
    put(values, np.zeros(99_999))
    values.clear([(*SAMPLE, None)])
    with pytest.raises(ValueMissing, match="'f' of sample 3"):
        read_range(values, SAMPLE, "f")


def test_a_value_that_is_replaced_meanwhile_is_read_anew(
    store: tuple[ValueStore, CountingBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    values, _ = store
    put(values, np.zeros(99_999))
    stale = values.find(SAMPLE, "f")
    put(values, np.ones(99_999))
    values.bury([stale.place])
    find = values.find
    monkeypatch.setattr(
        values, "find", lambda *a, found=[stale]: found.pop() if found else find(*a)
    )
    same(read_range(values, SAMPLE, "f", tokens=(1, 3)), np.ones(2))


def test_a_value_whose_files_are_gone_is_missing(
    store: tuple[ValueStore, CountingBackend],
) -> None:
    values, _ = store
    put(values, np.zeros(99_999))
    values.bury([values.find(SAMPLE, "f").place])
    with pytest.raises(ValueMissing, match="files were deleted by somebody else"):
        read_range(values, SAMPLE, "f")
