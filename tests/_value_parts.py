"""Values in a store without other processes, and chunks of partial rollouts."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests._rollouts import CountingBackend
from tq_fs.cache import ChunkCache
from tq_fs.reader import SegmentReader
from tq_fs.steps import EncodeOptions
from tq_fs.values import Keeper, OnePlace, ValueIndex, ValueStore

torch = pytest.importorskip("torch")
Array = npt.NDArray[Any]


@contextmanager
def open_values(
    root: Path, options: EncodeOptions | None = None, *, cache_bytes: int = 0
) -> Iterator[tuple[ValueStore, CountingBackend]]:
    """Open a store of values in a folder, without other processes."""
    with ExitStack() as opened:
        backend = CountingBackend(root / "store")
        opened.callback(backend.close)
        places = OnePlace(backend)
        index = ValueIndex(root / "index.sqlite", "run-1")
        opened.callback(index.close)
        keeper = Keeper(index, places, "run-1", "a", checkpoints=2, sweep_s=0, check=lambda: None)
        opened.callback(keeper.close)
        threads = opened.enter_context(ThreadPoolExecutor(2))
        reader = SegmentReader(
            lambda _: [],
            places.readers,
            pool=opened.enter_context(ThreadPoolExecutor(1)),
            threads=2,
            cache=ChunkCache(cache_bytes),
        )
        yield (
            ValueStore(
                "run-1",
                "a",
                calls=keeper,
                places=places,
                reader=reader,
                pool=threads,
                options=options or EncodeOptions(compact=True),
                allow_pickle=True,
            ),
            backend,
        )


def bits(tensor: Any) -> bytes:
    data: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, list):
        assert repr(found) == repr(expected)
        assert {*map(type, found)} == {*map(type, expected)}
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert bits(found) == bits(expected)
    else:
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
        assert found.flags.writeable


def chunk(rows: Array, prefix: int, is_first: bool, form: str = "base64") -> dict[str, Any]:
    """Return a generation's reply: `rows` are those of the whole sequence."""
    data: Any = rows
    if form == "base64":
        data = base64.b64encode(rows.astype("<i4").tobytes()).decode()
    elif form == "tensor":
        data = torch.from_numpy(rows)
    return {
        "data": data,
        "prefix_token_count": prefix,
        "output_token_count": len(rows) + 1 - prefix,
        "is_first_chunk": is_first,
    }


def cut_chunk(rows: Array, dtype: str = "int32", form: str = "base64") -> dict[str, Any]:
    """Return rows as a chunk that is cut already."""
    data: Any = rows.astype(np.dtype(dtype).newbyteorder("<"))
    if form != "ndarray":
        data = data.tobytes()
    if form == "base64":
        data = base64.b64encode(data).decode()
    return {"data": data, "row_count": len(rows), "dtype": dtype}


def partial(
    random: np.random.Generator, lengths: list[int], form: str, width: tuple[int, ...] = (4, 2)
) -> tuple[list[dict[str, Any]], Array]:
    """Return chunks that end at these sequence lengths, and the rows that training sees."""
    chunks: list[dict[str, Any]] = []
    kept, prefix = [], 5
    for length in lengths:
        rows = random.integers(0, 256, (length - 1, *width), dtype=np.int32)
        chunks.append(chunk(rows, prefix, not chunks, form))
        kept.append(rows if len(chunks) == 1 else rows[prefix - 1 :])
        prefix = length
    return chunks, np.concatenate(kept)
