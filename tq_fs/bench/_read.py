"""Reading Steps back to int32: raw, our reader, zarr-python, tensorstore; and parts of Steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tq_fs.backends import Buffer
from tq_fs.bench._data import Array, Payload, Shape, declared
from tq_fs.bench._timing import Variant
from tq_fs.errors import TqFsError
from tq_fs.reader import Read
from tq_fs.store import Store, open_store
from tq_fs.trajectory import StepInput

ROUTED, LOGPROBS = "routed_experts", "logprobs"


class Destination:
    """Memory that Segments of so many equal Steps are read into, its pages touched before."""

    def __init__(self, shape: Shape, steps: int) -> None:
        rows = steps * shape.tokens
        self.ids = np.ones((rows - 1, shape.layers, shape.topk), np.int32)
        self.logprobs = np.ones(rows, np.float32)


class Recorded:
    """A Segment of equal Steps in a store of its own.

    Parameters
    ----------
    folder
        Of the store.
    shape, payloads, steps
        What it holds; the first Step has one row of routing fewer, as always.
    out
        What it is read into.
    settings
        Of the store.
    """

    def __init__(
        self,
        folder: Path,
        shape: Shape,
        payloads: Sequence[Payload],
        steps: int,
        out: Destination,
        **settings: Any,
    ) -> None:
        self.rows = steps * shape.tokens - 1
        self.ids, self.logprobs = out.ids, out.logprobs
        self.steps = steps
        self.shape = shape
        self.store: Store = open_store(
            f"file://{folder}", fields=declared(shape), cache_bytes=0, **settings
        )
        session = self.store.session("bench")
        parent = None
        for i in range(steps):
            payload = payloads[i % len(payloads)]
            record = session.record(_step(parent, payload))
            parent = record.index
        (self.segment,) = session.finalize()

    def read(self) -> None:
        """Read the whole Segment, resolving and planning included."""
        assert self.store.reader is not None
        (found,) = self.store.reader.resolve((str(self.segment.ref),))
        self.store.reader.fetch(
            [
                Read(found, ROUTED, ((0, self.rows),), self.ids),
                Read(found, LOGPROBS, ((0, self.rows + 1),), self.logprobs),
            ]
        )

    def read_part(self, rows: tuple[int, int], layers: tuple[int, int] | None, out: Array) -> None:
        """Read some rows and layers of the routing."""
        assert self.store.reader is not None
        self.store.reader.read(str(self.segment.ref), ROUTED, rows=rows, layers=layers, out=out)

    def folders(self) -> list[Path]:
        """Return the folders of the Steps, in order."""
        root = Path(str(self.store.location))
        return sorted(p.parent for p in root.glob("steps/*/*/*/*/zarr.json"))

    def expected(self, payloads: Sequence[Payload]) -> tuple[Array, Array]:
        """Return what reading must give."""
        chosen = [payloads[i % len(payloads)] for i in range(self.steps)]
        ids = np.concatenate([p.ids for p in chosen])[1:]
        return ids, np.concatenate([p.logprobs for p in chosen])


def _step(parent: int | None, payload: Payload) -> StepInput:
    ids = payload.ids if parent is not None else payload.ids[1:]
    return StepInput(
        kind="create" if parent is None else "append",
        parent=parent,
        context=[],
        response=np.zeros(len(payload.logprobs), np.int32),
        values={ROUTED: ids, LOGPROBS: payload.logprobs},
    )


@contextmanager
def readers(
    folder: Path, shape: Shape, payloads: Sequence[Payload], steps: int
) -> Iterator[dict[str, Variant]]:
    """Give the variants of reading whole Segments, each checked once against the truth."""
    ways: dict[str, dict[str, Any]] = {
        "none": {"checksum": False},
        "crc32c": {},
        "none, one thread": {"checksum": False, "reader_threads": 1},
        "crc32c, one thread": {"reader_threads": 1},
    }
    out = Destination(shape, steps)
    stores = {
        name: Recorded(folder / str(i), shape, payloads, steps, out, **settings)
        for i, (name, settings) in enumerate(ways.items())
    }
    raw = _Raw(folder / "raw", shape, payloads, steps)
    libraries = _libraries(stores["none"])
    pool = ThreadPoolExecutor(1)
    try:
        variants = {"raw": raw.read, "raw, two threads": lambda: raw.read_shared(pool)}
        for name, recorded in stores.items():
            _check(recorded, recorded.read, payloads)
            variants[name] = recorded.read
        for name, read in libraries.items():
            _check(stores["none"], read, payloads)
            variants[name] = read
        yield {name: Variant(run) for name, run in variants.items()}
    finally:
        pool.shutdown()
        for recorded in stores.values():
            recorded.store.close()


def _check(recorded: Recorded, read: Callable[[], None], payloads: Sequence[Payload]) -> None:
    recorded.ids[...] = -7
    recorded.logprobs[...] = -7
    read()
    ids, logprobs = recorded.expected(payloads)
    if not (np.array_equal(recorded.ids, ids) and np.array_equal(recorded.logprobs, logprobs)):
        raise TqFsError("what was read is not what was written", subject="bench")


class _Raw:
    """One file a Step, both fields in it: the least that reading can be."""

    def __init__(self, folder: Path, shape: Shape, payloads: Sequence[Payload], steps: int) -> None:
        folder.mkdir()
        self._paths = [str(folder / str(i)) for i in range(steps)]
        for i, path in enumerate(self._paths):
            payload = payloads[i % len(payloads)]
            Path(path).write_bytes(payload.narrow.tobytes() + payload.logprobs.tobytes())
        self._tokens = shape.tokens
        self._values = shape.tokens * shape.layers * shape.topk
        self._scratch = [np.ones(self._values, shape.dtype) for _ in range(2)]
        self._ids = np.ones(steps * self._values, np.int32)
        self._logprobs = np.ones(steps * shape.tokens, np.float32)

    def read(self) -> None:
        self._read(range(len(self._paths)), self._scratch[0])

    def read_shared(self, pool: Executor) -> None:
        """Read every second Step in another thread."""
        odd = pool.submit(self._read, range(1, len(self._paths), 2), self._scratch[1])
        self._read(range(0, len(self._paths), 2), self._scratch[0])
        odd.result()

    def _read(self, numbers: range, scratch: Array) -> None:
        for i in numbers:
            ids = self._ids[i * self._values : (i + 1) * self._values]
            logprobs = self._logprobs[i * self._tokens : (i + 1) * self._tokens]
            fd = os.open(self._paths[i], os.O_RDONLY)
            buffers: list[Buffer] = [scratch, logprobs]
            os.preadv(fd, buffers, 0)
            os.close(fd)
            np.copyto(ids, scratch)


def _libraries(recorded: Recorded) -> dict[str, Callable[[], None]]:
    folders = [str(f) for f in recorded.folders()]
    out = {"zarr-python": lambda: _read_each(recorded, folders, _zarr)}
    try:
        import tensorstore  # noqa: F401, PLC0415  # optional
    except ImportError:
        return out
    return {**out, "tensorstore": lambda: _read_each(recorded, folders, _tensorstore)}


def _read_each(
    recorded: Recorded, folders: Sequence[str], read: Callable[[str], tuple[Array, Array]]
) -> None:
    row = token = 0
    for folder in folders:
        ids, logprobs = read(folder)
        recorded.ids[row : row + len(ids)] = ids
        recorded.logprobs[token : token + len(logprobs)] = logprobs
        row, token = row + len(ids), token + len(logprobs)


def _zarr(folder: str) -> tuple[Array, Array]:
    import zarr  # noqa: PLC0415  # only measured when asked for

    group = zarr.open_group(folder, mode="r")
    ids: Any = group[ROUTED]
    logprobs: Any = group[LOGPROBS]
    return ids[:], logprobs[:]


def _tensorstore(folder: str) -> tuple[Array, Array]:
    import tensorstore  # noqa: PLC0415  # optional

    opened = [
        tensorstore.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/{name}/"}},
            open=True,
        )
        for name in (ROUTED, LOGPROBS)
    ]
    values = [array.result().read() for array in opened]
    return values[0].result(), values[1].result()


@contextmanager
def parts(
    folder: Path, shape: Shape, payloads: Sequence[Payload], *, layer_groups: int, reads: int
) -> Iterator[dict[str, Variant]]:
    """Give the variants of reading a Step so many times: whole, and quarters at random places."""
    plain, grouped = (
        Recorded(
            folder / name,
            shape,
            payloads,
            1,
            Destination(shape, 1),
            reader_threads=1,
            layer_groups=groups,
        )
        for name, groups in (("plain", 1), ("grouped", layer_groups))
    )
    rng = np.random.default_rng(1)
    tokens, layers = plain.rows // 4, max(1, shape.layers // layer_groups)
    some_rows = np.ones((tokens, shape.layers, shape.topk), np.int32)
    some_layers = np.ones((grouped.rows, layers, shape.topk), np.int32)

    def quarter_tokens() -> None:
        start = int(rng.integers(0, plain.rows - tokens + 1))
        plain.read_part((start, start + tokens), None, some_rows)

    def quarter_layers() -> None:
        start = int(rng.integers(0, shape.layers // layers)) * layers
        grouped.read_part((0, grouped.rows), (start, start + layers), some_layers)

    ways = {
        "whole": lambda: plain.read_part((0, plain.rows), None, plain.ids),
        "whole, layer groups": lambda: grouped.read_part((0, grouped.rows), None, grouped.ids),
        "quarter of tokens": quarter_tokens,
        "quarter of layers": quarter_layers,
    }
    try:
        yield {name: Variant(_times(reads, read)) for name, read in ways.items()}
    finally:
        plain.store.close()
        grouped.store.close()


def _times(count: int, call: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            call()

    return run
