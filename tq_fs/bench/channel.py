"""``tq-fs bench channel``: Steps to and from a unit of another process, and files without it.

The unit's process and this one share the machine and its page cache, so that nothing but the way
between them is added. Everyone writes and reads the same bytes in every round. What is fair:

* **raw** writes the files of a group into a folder and renames it; it reads by ``preadv`` in parts
  of 512 KiB and widens each to int32. One thread, nothing checked.
* **local** is the backend on the own disk, without a unit.
* **unix**, **tcp** and **tls** are the same calls of a :class:`~tq_fs.channel.ChannelBackend`: one
  lane, one request at a time, and long reads asked for ahead as the SegmentReader does.

tls is what units on other hosts speak by default: its handshake, then sealed frames.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from tq_fs.backends import Backend, LocalBackend
from tq_fs.bench._channel_unit import IDENTITY, STORE, UNIT
from tq_fs.bench._disk import measuring_place
from tq_fs.bench._progress import run_shown
from tq_fs.bench._timing import Timings, Variant
from tq_fs.channel import ChannelBackend, Identity
from tq_fs.memory import aligned_empty

__all__ = ["ChannelBench", "Measured", "document", "measure", "show"]

MiB = 1024**2
_TILE = 512 * 1024
_DISK_BYTES = 4 * 1024**3
SIZES = {"0_66mb": 2048 * 40 * 8, "8mb": 8 * MiB}
_OPERATIONS = {"0_66mb": 32, "8mb": 8}
WAYS = ("local", "unix", "tcp", "tls")
_SUFFIX = {"tcp": "", "unix": "_unix", "tls": "_tls", "local": "_local"}

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelBench:
    """Settings of the measurement.

    Attributes
    ----------
    repeats
        Rounds that count.
    root
        Folder to measure in; None for a journaled file system of our own.
    """

    repeats: int = 15
    root: Path | None = None


class Measured(NamedTuple):
    """What was measured, and where.

    Attributes
    ----------
    place
        Where, in words.
    put, get
        By size: seconds per object.
    """

    place: str
    put: dict[str, Timings]
    get: dict[str, Timings]


def measure(bench: ChannelBench, console: Console) -> Measured:
    """Measure everything in one run, interleaved."""
    put, get = {}, {}
    with measuring_place(bench.root, _DISK_BYTES) as place, ways(place.folder) as backends:
        for size in SIZES:
            load = Load(place.folder, size)
            put[size] = _run(load.puts(backends), bench, size, console, "put")
            get[size] = _run(load.gets(backends), bench, size, console, "get")
            load.check()
        return Measured(place.kind, put, get)


@contextmanager
def ways(folder: Path) -> Iterator[dict[str, Backend]]:
    """Start a unit, and give all ways to it and the one without it."""
    identity = Identity.new(STORE)
    identity.save(folder / IDENTITY)
    command = [sys.executable, "-m", "tq_fs.bench._channel_unit", str(folder)]
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child,
        ExitStack() as opened,
    ):
        assert child.stdout is not None
        said = json.loads(child.stdout.readline())
        backends: dict[str, Backend] = {"local": LocalBackend(folder / "local")}
        for way in ("unix", "tcp", "tls"):
            backends[way] = ChannelBackend(
                said[way],
                store_id=STORE,
                unit=UNIT,
                identity=identity if way == "tls" else None,
            )
        for backend in backends.values():
            opened.enter_context(closing(backend))
        yield backends


class Load:
    """Groups of one size, and what reads and writes them.

    Parameters
    ----------
    folder
        For raw files.
    size
        A key of :data:`SIZES`.
    """

    def __init__(self, folder: Path, size: str) -> None:
        self._folder = folder / f"raw-{size}"
        self._folder.mkdir()
        self._size = size
        self._data = np.random.default_rng(0).integers(0, 256, SIZES[size], dtype=np.uint8)
        small = bytes(1500)
        self._members: dict[str, list[Any]] = {
            "routed_experts/c.0.0.0": [self._data, b"\0\0\0\0"],
            "routed_experts/zarr.json": [small],
            "logprobs/c.0": [bytes(8192)],
            "logprobs/zarr.json": [small],
            "zarr.json": [small],
        }
        self._part: Bytes = aligned_empty(_TILE)
        self._out = np.zeros(SIZES[size], np.int32)
        self._count = 0

    def puts(self, backends: Mapping[str, Backend]) -> dict[str, Variant]:
        """Return what writes groups; they are deleted between the runs."""
        times = _OPERATIONS[self._size]
        prefix = f"steps/put-{self._size}"

        def put(backend: Backend) -> None:
            for _ in range(times):
                self._count += 1
                backend.publish(f"{prefix}/{self._count}", self._members, fresh=True)

        def through(backend: Backend) -> Variant:
            return Variant(lambda: put(backend), after=lambda: backend.delete(prefix))

        raw = Variant(lambda: _repeat(self._raw_put, times), after=self._clear)
        return {"raw": raw, **{way: through(backends[way]) for way in WAYS}}

    def gets(self, backends: Mapping[str, Backend]) -> dict[str, Variant]:
        """Return what reads the large array of a group, widened."""
        times = _OPERATIONS[self._size]
        place = f"steps/get-{self._size}"
        for name in ("local", "unix"):
            backends[name].publish(place, self._members)
        path = self._folder / "get"
        path.write_bytes(self._data.tobytes())

        def again(read: Callable[[], None]) -> Variant:
            return Variant(lambda: _repeat(read, times))

        def through(backend: Backend) -> Variant:
            return again(lambda: self._get(backend, f"{place}/routed_experts/c.0.0.0"))

        raw = again(lambda: self._raw_get(path))
        return {"raw": raw, **{way: through(backends[way]) for way in WAYS}}

    def check(self) -> None:
        """Compare what was read last."""
        assert np.array_equal(self._out, self._data)

    def _raw_put(self) -> None:
        self._count += 1
        staged = f"{self._folder}/.{self._count}"
        os.mkdir(staged)
        for i, buffers in enumerate(self._members.values()):
            fd = os.open(f"{staged}/{i}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            os.writev(fd, buffers)
            os.close(fd)
        os.rename(staged, f"{self._folder}/{self._count}")

    def _clear(self) -> None:
        for group in self._folder.glob("[0-9]*"):
            shutil.rmtree(group)

    def _raw_get(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY)
        for start, part in self._parts():
            os.preadv(fd, [part], start)
            np.copyto(self._out[start : start + len(part)], part)
        os.close(fd)

    def _get(self, backend: Backend, key: str) -> None:
        with backend.open(key) as source:
            if len(self._data) > _TILE:
                source.ahead(0, len(self._data))
            for start, part in self._parts():
                source.readinto([part], start)
                np.copyto(self._out[start : start + len(part)], part)

    def _parts(self) -> Iterator[tuple[int, Any]]:
        for start in range(0, len(self._data), _TILE):
            yield start, self._part[: min(_TILE, len(self._data) - start)]


def _repeat(work: Callable[[], None], times: int) -> None:
    for _ in range(times):
        work()


def figures(measured: Measured) -> dict[str, float]:
    """Return the ratios to raw files by name; without an ending they are those over TCP."""
    out = {}
    for way in WAYS:
        for size, timings in measured.put.items():
            out[f"put_{size}.x_raw{_SUFFIX[way]}"] = timings.ratio(way, "raw")
        for size, timings in measured.get.items():
            out[f"get_{size}.x_raw{_SUFFIX[way]}"] = timings.ratio(way, "raw")
    return {name: round(out[name], 3) for name in sorted(out)}


def document(bench: ChannelBench, measured: Measured) -> dict[str, Any]:
    """Return the ratios with the settings they were measured with."""
    settings = {"repeats": bench.repeats, "place": measured.place}
    return {**figures(measured), "settings": settings}


def show(bench: ChannelBench, measured: Measured, console: Console) -> None:
    """Print the tables for people."""
    console.print(f"{bench.repeats} repeats, on {measured.place}")
    for title, by_size in (("Put a group", measured.put), ("Read and widen", measured.get)):
        for size, timings in by_size.items():
            console.print(_table(f"{title} of {SIZES[size] / 1e6:.2f} MB", timings, SIZES[size]))


def _table(title: str, timings: Timings, nbytes: int) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for head in ("ms", "MB/s", "x raw"):
        table.add_column(head, justify="right")
    for name in timings.seconds:
        seconds = timings.median(name)
        ratio = f"{timings.ratio(name, 'raw'):.2f}"
        table.add_row(name, f"{seconds * 1e3:.3f}", f"{nbytes / seconds / 1e6:,.0f}", ratio)
    return table


def _run(
    variants: Mapping[str, Variant], bench: ChannelBench, size: str, console: Console, title: str
) -> Timings:
    return run_shown(
        variants,
        repeats=bench.repeats,
        steps=_OPERATIONS[size],
        console=console,
        title=f"{title} {size:6}",
    )
