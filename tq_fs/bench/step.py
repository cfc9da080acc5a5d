"""``tq-fs bench step``: how far from the physical limit one Step is written and read."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tq_fs.bench._data import Shape, make_payloads
from tq_fs.bench._disk import Place, measuring_place
from tq_fs.bench._progress import run_shown
from tq_fs.bench._read import parts, readers
from tq_fs.bench._timing import Timings, Variant
from tq_fs.bench._write import Writers

__all__ = ["Measured", "Shape", "StepBench", "document", "measure", "ratios", "show"]

PART_TOKENS = 16384
PART_READS = 4  # in a timed run
_DISK_BYTES = 6 * 1024**3
_WRITE_BYTES = 24 * 1024 * 1024
_READ_BYTES = 48 * 1024 * 1024  # so long that waking a second thread does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBench:
    """Settings of the measurement.

    Attributes
    ----------
    shape
        Size of a Step.
    layer_groups
        Groups of the layer axis, for the row that reads a share of the layers.
    repeats
        Counted rounds; one more comes before.
    root
        Folder to measure in; None: a journaled file system of our own, where that is permitted.
    """

    shape: Shape
    layer_groups: int = 4
    repeats: int = 15
    root: Path | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured.

    Attributes
    ----------
    place
        Where, in words.
    steps, read_steps
        Steps in a timed run of writing and of reading.
    write, churn, read, part
        Seconds per Step.
    """

    place: str
    steps: int
    read_steps: int
    write: Timings
    churn: Timings
    read: Timings
    part: Timings


def measure(bench: StepBench, console: Console) -> Measured:
    """Measure everything in one run, interleaved."""
    shape = bench.shape
    steps = max(4, min(16, _WRITE_BYTES // shape.nbytes))
    read_steps = max(4, min(64, _READ_BYTES // shape.nbytes))
    payloads = make_payloads(shape, 2)
    part_shape = shape._replace(tokens=max(shape.tokens, PART_TOKENS))
    part_payloads = make_payloads(part_shape, 1)
    with measuring_place(bench.root, _DISK_BYTES) as place, _quiet():
        writers = Writers(_sub(place, "write"), shape, payloads, steps)
        try:
            write = _run(writers.variants(), bench, steps, console, "write")
            churn = _run(writers.churn(), bench, steps, console, "churn")
        finally:
            writers.close()
        with readers(_sub(place, "read"), shape, payloads, read_steps) as variants:
            read = _run(variants, bench, read_steps, console, "read")
        with parts(
            _sub(place, "part"),
            part_shape,
            part_payloads,
            layer_groups=bench.layer_groups,
            reads=PART_READS,
        ) as variants:
            part = _run(variants, bench, PART_READS, console, "parts")
        return Measured(place.kind, steps, read_steps, write, churn, read, part)


def ratios(measured: Measured) -> dict[str, float]:
    """Return the ratios by name: our time over theirs, except for ``vs``, theirs over ours.

    ``read.x_raw`` is the reader as it comes, with two threads, over raw reading in one; the keys
    that end in a number of threads compare equals.
    """
    write, read, part, churn = measured.write, measured.read, measured.part, measured.churn
    out = {
        "write.x_raw": write.ratio("none", "raw"),
        "write.x_raw_crc32c": write.ratio("crc32c", "raw"),
        "write.x_raw_sustained": write.ratio("crc32c, sustained", "raw"),
        "write.x_raw_on_demand": write.ratio("crc32c, no prepared groups", "raw"),
        "write.x_floor": write.ratio("int32 crc32c", "floor"),
        "write.vs_zarr_python": write.ratio("zarr-python", "none"),
        "write.x_raw_durable": write.ratio("crc32c, durable step", "raw + fdatasync"),
        "write.x_raw_churn": churn.ratio("crc32c, churn", "raw, churn"),
        "read.x_raw": read.ratio("none", "raw"),
        "read.x_raw_crc32c": read.ratio("crc32c", "raw"),
        "read.x_raw_one_thread": read.ratio("none, one thread", "raw"),
        "read.x_raw_crc32c_one_thread": read.ratio("crc32c, one thread", "raw"),
        "read.x_raw_two_threads": read.ratio("none", "raw, two threads"),
        "read.x_raw_crc32c_two_threads": read.ratio("crc32c", "raw, two threads"),
        "read.vs_zarr_python": read.ratio("zarr-python", "none"),
        "partial.quarter_tokens": part.ratio("quarter of tokens", "whole"),
        "partial.quarter_layers": part.ratio("quarter of layers", "whole, layer groups"),
    }
    if "tensorstore" in write.seconds:
        out["write.vs_tensorstore"] = write.ratio("tensorstore", "none")
        out["read.vs_tensorstore"] = read.ratio("tensorstore", "none")
    return {name: round(value, 3) for name, value in out.items()}


def show(bench: StepBench, measured: Measured, console: Console) -> None:
    """Print the tables for people."""
    shape = bench.shape
    console.print(
        f"T={shape.tokens}, {shape.layers} layers, top-{shape.topk}, {shape.dtype}: "
        f"{shape.nbytes / 1e6:.2f} MB a Step; runs of {measured.steps} Steps written and of "
        f"{measured.read_steps} read, {bench.repeats} repeats, on {measured.place}"
    )
    nbytes = shape.nbytes
    for title, timings, base in (
        ("Write", measured.write, "raw"),
        ("Write and delete", measured.churn, "raw, churn"),
        ("Read to int32", measured.read, "raw"),
    ):
        console.print(_table(title, timings, base, nbytes))
    whole = shape._replace(tokens=max(shape.tokens, PART_TOKENS))
    title = f"Parts of a Step of {whole.tokens} tokens, crc32c, {bench.layer_groups} layer groups"
    console.print(_table(title, measured.part, "whole", whole.nbytes))


def document(bench: StepBench, measured: Measured) -> dict[str, Any]:
    """Return the ratios with the settings they were measured with."""
    shape = bench.shape
    settings = {
        "tokens": shape.tokens,
        "layers": shape.layers,
        "topk": shape.topk,
        "dtype": shape.dtype,
        "layer_groups": bench.layer_groups,
        "part_tokens": max(shape.tokens, PART_TOKENS),
        "repeats": bench.repeats,
        "place": measured.place,
    }
    return {**ratios(measured), "settings": settings}


def _table(title: str, timings: Timings, base: str, nbytes: int) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for head in ("ms a Step", "MB/s", f"x {base}"):
        table.add_column(head, justify="right")
    for name in timings.seconds:
        seconds = timings.median(name)
        table.add_row(
            name,
            f"{seconds * 1e3:.3f}",
            f"{nbytes / seconds / 1e6:,.0f}",
            f"{timings.ratio(name, base):.2f}",
        )
    return table


def _run(
    variants: Mapping[str, Variant], bench: StepBench, steps: int, console: Console, title: str
) -> Timings:
    return run_shown(
        variants, repeats=bench.repeats, steps=steps, console=console, title=f"{title:6}"
    )


@contextmanager
def _quiet() -> Any:
    """Keep the garbage collector out of the measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _sub(place: Place, name: str) -> Path:
    folder = place.folder / name
    folder.mkdir()
    return folder
