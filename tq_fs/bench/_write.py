"""Writing one Step: raw, ours in its variants, zarr-python, tensorstore."""

from __future__ import annotations

import itertools
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tq_fs.backends import LocalBackend
from tq_fs.bench._data import Array, Payload, Shape, as_encoded, declared, step_key
from tq_fs.bench._timing import Variant
from tq_fs.config import StoreConfig
from tq_fs.fields import FieldSpec
from tq_fs.narrow import narrow_into
from tq_fs.steps import EncodeOptions, FieldArray, Scratch, encode_step

_CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY
SETTLE_S = 0.05


class Writers:
    """All ways of writing, over one folder.

    Parameters
    ----------
    folder
        Where to write.
    shape, payloads
        What to write; payloads are taken in turn.
    steps
        Steps that one run writes.
    """

    def __init__(self, folder: Path, shape: Shape, payloads: Sequence[Payload], steps: int) -> None:
        self._folder = folder
        self._shape = shape
        self._payloads = payloads
        self._steps = steps
        self._numbers = itertools.count()
        self._backends: list[LocalBackend] = []
        self._narrow = np.empty_like(payloads[0].narrow)

    def close(self) -> None:
        """Close the backends."""
        for backend in self._backends:
            backend.close()

    def variants(self) -> dict[str, Variant]:
        """Return the variants by name."""
        raw = self._plain("raw", self._raw)
        floor = self._plain("floor", self._floor)
        return {
            "raw": raw,
            "raw + fdatasync": self._plain("raw-sync", lambda i: self._raw(i, sync=True)),
            "floor": floor,
            "none": self._ours("none", encoded=True, checksum=False),
            "crc32c": self._ours("crc32c", encoded=True),
            "crc32c, sustained": self._ours("sustained", encoded=True, sustained=True),
            "crc32c, no prepared groups": self._ours("on-demand", encoded=True, ahead=0),
            "crc32c, durable step": self._ours("step", encoded=True, durability="step"),
            "crc32c, durable batch": self._ours("batch", encoded=True, sync=True),
            "int32 none": self._ours("int32-none", checksum=False),
            "int32 crc32c": self._ours("int32"),
            **self._libraries(),
        }

    def churn(self) -> dict[str, Variant]:
        """Return variants that delete a Step for each one they write."""
        backend = self._backend("churn", ahead=16)
        write = self._write_ours(backend, as_encoded(self._shape), EncodeOptions())
        folder = self._make("raw-churn")

        def ours(number: int) -> None:
            write(number)
            backend.delete(step_key(number - self._steps).path)

        def raw(number: int) -> None:
            self._raw_at(folder, number)
            (folder / str(number - self._steps)).unlink(missing_ok=True)

        return {
            "raw, churn": Variant(self._loop(raw), self._warm),
            "crc32c, churn": Variant(self._loop(ours), self._warm, _settle),
        }

    # ------------------------------------------------------------ raw

    def _raw(self, number: int, *, sync: bool = False) -> None:
        self._raw_at(self._folder / ("raw-sync" if sync else "raw"), number, sync=sync)

    def _raw_at(self, folder: Path, number: int, *, sync: bool = False) -> None:
        payload = self._payloads[number % len(self._payloads)]
        fd = os.open(folder / str(number), _CREATE, 0o644)
        os.writev(fd, payload.buffers)
        if sync:
            os.fdatasync(fd)
        os.close(fd)

    def _floor(self, number: int) -> None:
        """Do the least that can be done from int32: one pass of check and narrowing, one write."""
        payload = self._payloads[number % len(self._payloads)]
        narrow: Array = payload.narrow
        if self._shape.dtype != "int32":
            narrow = self._narrow
            bound = int(np.iinfo(narrow.dtype).max) + 1
            if not narrow_into(payload.ids, narrow, bound):
                raise AssertionError("the payload's ids are in range")
        fd = os.open(self._folder / "floor" / str(number), _CREATE, 0o644)
        os.writev(fd, Payload(payload.ids, narrow, payload.logprobs).buffers)
        os.close(fd)

    def _plain(self, name: str, write: Callable[[int], None]) -> Variant:
        folder = self._make(name)
        return Variant(self._loop(write), self._warm, lambda: _empty(folder))

    # ------------------------------------------------------------ ours

    def _ours(
        self,
        name: str,
        *,
        encoded: bool = False,
        checksum: bool = True,
        durability: str = "none",
        sync: bool = False,
        sustained: bool = False,
        ahead: int | None = None,
    ) -> Variant:
        """Time our writer as the store makes it.

        A run is a burst that finds prepared groups, which are refilled after it; with `sustained`
        there are so few that nearly all of them are made while it runs.
        """
        if ahead is None:
            ahead = max(1, self._steps // 4) if sustained else StoreConfig().prepared_groups
        backend = self._backend(name, durability=durability, ahead=ahead)
        specs = as_encoded(self._shape) if encoded else declared(self._shape)
        write = self._write_ours(backend, specs, EncodeOptions(checksum=checksum))
        write(next(self._numbers))  # the session's folders, which every later Step finds

        written: list[int] = []

        def run() -> None:
            for _ in range(self._steps):
                written.append(next(self._numbers))
                write(written[-1])
            if sync:
                backend.sync()

        def after() -> None:
            while written:
                backend.delete(step_key(written.pop()).path)
            _settle()

        return Variant(run, self._warm, after)

    def _write_ours(
        self, backend: LocalBackend, specs: Sequence[FieldSpec], options: EncodeOptions
    ) -> Callable[[int], None]:
        scratch = Scratch()
        encoded = specs[1].dtype == self._shape.dtype

        def write(number: int) -> None:
            payload = self._payloads[number % len(self._payloads)]
            ids = payload.narrow if encoded else payload.ids
            arrays = [FieldArray(specs[0], payload.logprobs), FieldArray(specs[1], ids)]
            key = step_key(number)
            step = encode_step("bench", key, len(ids), arrays, options, scratch)
            backend.publish(key.path, step.members)
            scratch.reset()

        return write

    def _backend(self, name: str, *, durability: str = "none", ahead: int) -> LocalBackend:
        backend = LocalBackend(self._make(name), durability=durability, ahead=ahead)
        self._backends.append(backend)
        return backend

    # ------------------------------------------------------------ libraries

    def _libraries(self) -> dict[str, Variant]:
        out = {"zarr-python": self._plain("zarr", self._zarr)}
        try:
            import tensorstore  # noqa: F401, PLC0415  # optional
        except ImportError:
            return out
        return {**out, "tensorstore": self._plain("tensorstore", self._tensorstore)}

    def _zarr(self, number: int) -> None:
        import zarr  # noqa: PLC0415  # only measured when asked for
        from zarr.errors import ZarrUserWarning  # noqa: PLC0415

        payload = self._payloads[number % len(self._payloads)]
        path = str(self._folder / "zarr" / str(number))
        group = zarr.create_group(path, attributes={"step": number})
        for name, values in (("routed_experts", payload.narrow), ("logprobs", payload.logprobs)):
            array = group.create_array(
                name, shape=values.shape, dtype=values.dtype, chunks=values.shape, compressors=None
            )
            array[...] = values
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ZarrUserWarning)  # that consolidating is an extension
            zarr.consolidate_metadata(path)

    def _tensorstore(self, number: int) -> None:
        import tensorstore  # noqa: PLC0415  # optional

        payload = self._payloads[number % len(self._payloads)]
        pending: list[Any] = []
        for name, values in (("routed_experts", payload.narrow), ("logprobs", payload.logprobs)):
            path = f"{self._folder / 'tensorstore'}/{number}/{name}/"
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
            metadata = {
                "shape": list(values.shape),
                "data_type": values.dtype.name,
                "chunk_grid": {
                    "name": "regular",
                    "configuration": {"chunk_shape": list(values.shape)},
                },
            }
            opened = tensorstore.open({**spec, "metadata": metadata}, create=True)
            pending.append(opened.result().write(values))
        for write in pending:
            write.result()

    # ------------------------------------------------------------ around

    def _make(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        return folder

    def _loop(self, write: Callable[[int], None]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(self._steps):
                write(next(self._numbers))

        return run

    def _warm(self) -> None:
        """Touch as many page-cache pages as a run will need, so that it gets recycled ones."""
        fd = os.open(self._folder / "warm", os.O_CREAT | os.O_WRONLY, 0o644)
        block = self._payloads[0].buffers[0]
        for _ in range(self._steps):
            os.write(fd, block)
        os.write(fd, bytes(self._steps * 65536))
        os.ftruncate(fd, 0)
        os.close(fd)


def _settle() -> None:
    """Give the staging thread time to refill, so that the next run does not pay for this one."""
    time.sleep(SETTLE_S)


def _empty(folder: Path) -> None:
    for entry in _entries(folder):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _entries(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.iterdir())
