"""``tq-fs bench s3``: an object store through our drivers, http.client and s3fs.

Everyone writes and reads the same bytes in every round, eight requests at once, from one process
with the server in another; ratios are medians of pairs of one round. What is fair:

* **http.client** is the floor: one connection a thread that stays open, URLs signed beforehand, the
  same buffers sent from where they lie and received where they belong. It signs no payload, checks
  nothing and tries nothing again.
* **s3fs** does what its own calls for many objects do as it comes (``pipe`` and ``cat``, eight at
  once): from bytes that are made beforehand into bytes that are not copied any further.
* **tq-fs** publishes a group from the buffers a Step has, and reads into an array that is used
  again, from threads as a store calls it. Its retry policy and errors are around every request.
* Over plain HTTP our driver and s3fs sign the SHA-256 of what they send, so that the server notices
  damage; s3fs adds a CRC-32. The row *unsigned* leaves the SHA-256 out, as our driver does over
  TLS; over https there is no such row, because it would be the same.
* Writing a Step of three objects, tq-fs and http.client send them one behind the other, the commit
  last; s3fs sends all objects of all Steps as they come.
* Processor time is that of this process with all its threads, Rust's and asyncio's included, and
  with what the kernel does for them. Server and client share the machine, so it says more than
  throughput does where the server is what is slow.

Whatever is read is compared with what was written, bit for bit, outside of the timed part. The
garbage collector works between the runs only; with it nothing but noise changes.

The last part records Steps through a write-back tier in a process of its own, and samples its
resident memory from outside. Its sessions are finalized and released as it goes; the queue of
uploads is so small that waiting for them fills the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tq_fs.bench import _s3_load as loads
from tq_fs.bench._s3_cost import Cost, measure_load, runs_of_load
from tq_fs.bench._s3_load import Load
from tq_fs.bench._s3_place import Place, ServerKind, measuring_bucket
from tq_fs.bench._s3_ways import CONCURRENCY, HTTP, OURS, OURS_S3FS, S3FS, UNSIGNED
from tq_fs.bench._s3_write_back import WriteBack, measure_write_back, steps_in
from tq_fs.bench._targets import Target, at_least, at_most, targets_table

__all__ = ["Measured", "S3Bench", "document", "figures", "measure", "show"]

GiB = 1024**3
MiB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Bench:
    """Settings of the measurement.

    Attributes
    ----------
    url
        ``s3://bucket/prefix``, reached by the environment's settings; None: a server of our own.
    server
        Which one, if it is our own; ``auto``: MinIO's code where it is installed, else moto.
    repeats
        Counted rounds; one more comes before.
    objects
        Objects of 0.66 MB in a timed run; there are half as many Steps, and an eighth of 8 MiB.
    write_back_bytes
        Stored bytes that are recorded through a write-back tier; 0 leaves that out.
    """

    url: str | None = None
    server: ServerKind = "auto"
    repeats: int = 15
    objects: int = 64
    write_back_bytes: int = 8 * GiB


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured.

    Attributes
    ----------
    place
        Where, in words.
    costs
        By load and verb.
    write_back
        Memory of a write-back tier; None where it was left out.
    """

    place: str
    costs: list[tuple[Load, dict[str, Cost]]]
    write_back: WriteBack | None


TARGETS: Mapping[str, Target] = {
    "put.x_http_client": at_least(0.9),
    "get.x_http_client": at_least(0.9),
    "put.vs_s3fs": at_least(1.4),
    "get.vs_s3fs": at_least(1.7),
    "put.cpu_vs_s3fs": at_most(0.25),
    "get.cpu_vs_s3fs": at_most(0.4),
    "s3fs.put.vs_s3fs": at_least(0.9),
    "s3fs.get.vs_s3fs": at_least(0.9),
    "write_back.over_budget_bytes": at_most(128 * MiB, in_bytes=True),
}
_DRIVERS = {"": OURS, "unsigned.": UNSIGNED, "s3fs.": OURS_S3FS}


def measure(bench: S3Bench, console: Console) -> Measured:
    """Measure everything in one run, interleaved.

    Raises
    ------
    TqFsError
        The place cannot be used, or gives back what was not written.
    """
    chosen = (
        loads.small_objects(bench.objects),
        loads.steps(max(1, bench.objects // 2)),
        loads.large_objects(max(1, bench.objects // 8)),
    )
    with measuring_bucket(bench.url, bench.server) as place:
        costs = [(load, _measure_load(place, load, bench, console)) for load in chosen]
        return Measured(place.kind, costs, _write_back(place, bench, console))


def figures(measured: Measured) -> dict[str, float]:
    """Return the figures by name.

    ``x_http_client`` and ``vs_s3fs`` are throughputs over theirs, ``cpu_ms`` is the client's
    processor time an object (or Step), ``cpu_vs_s3fs`` that over theirs. Without a further name
    they are those of our obstore driver and of objects of 0.66 MB.
    """
    out: dict[str, float] = {}
    for load, costs in measured.costs:
        for driver, way in _DRIVERS.items():
            for verb, cost in costs.items():
                if way in cost.wall.seconds:
                    out |= _figures(f"{load.key}{driver}{verb}", cost, way)
    if (memory := measured.write_back) is not None:
        out["write_back.bytes"] = memory.nbytes
        out["write_back.budget_bytes"] = memory.budget_bytes
        out["write_back.inflight_bytes"] = memory.inflight_bytes
        out["write_back.growth_bytes"] = memory.growth_bytes
        out["write_back.over_budget_bytes"] = memory.over_budget_bytes
    return out


def _figures(name: str, cost: Cost, way: str) -> dict[str, float]:
    return {
        f"{name}.x_http_client": round(cost.throughput(way, HTTP), 3),
        f"{name}.vs_s3fs": round(cost.throughput(way, S3FS), 3),
        f"{name}.cpu_ms": round(cost.cpu.median(way) * 1e3, 3),
        f"{name}.cpu_vs_s3fs": round(cost.cpu.ratio(way, S3FS), 3),
    }


def document(bench: S3Bench, measured: Measured) -> dict[str, Any]:
    """Return the figures and the settings they were measured with, all in one level."""
    settings = {
        "place": measured.place,
        "repeats": bench.repeats,
        "objects": bench.objects,
        "concurrency": CONCURRENCY,
    }
    return {**figures(measured), **{f"settings.{name}": v for name, v in settings.items()}}


def show(bench: S3Bench, measured: Measured, console: Console) -> None:
    """Print the tables for people."""
    console.print(
        f"{CONCURRENCY} requests at once on {measured.place}; {bench.repeats} repeats; runs of "
        + ", ".join(f"{len(load.groups)} {load.title}" for load, _ in measured.costs)
    )
    for load, costs in measured.costs:
        for verb, cost in costs.items():
            console.print(_table(f"{verb.capitalize()} {load.title}", cost, load.group_bytes(verb)))
    console.print(targets_table(TARGETS, figures(measured)))


def _table(title: str, cost: Cost, nbytes: int) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for head in ("ms", "MB/s", "x http.client", "vs s3fs", "CPU ms", "CPU vs s3fs"):
        table.add_column(head, justify="right")
    for way in cost.wall.seconds:
        seconds = cost.wall.median(way)
        table.add_row(
            way,
            f"{seconds * 1e3:.2f}",
            f"{nbytes / seconds / 1e6:,.0f}",
            f"{cost.throughput(way, HTTP):.2f}",
            f"{cost.throughput(way, S3FS):.2f}",
            f"{cost.cpu.median(way) * 1e3:.2f}",
            f"{cost.cpu.ratio(way, S3FS):.2f}",
        )
    return table


def _measure_load(place: Place, load: Load, bench: S3Bench, console: Console) -> dict[str, Cost]:
    with _progress(console, load.title, runs_of_load(bench.repeats)) as advance:
        return measure_load(place, load, repeats=bench.repeats, progress=advance)


def _write_back(place: Place, bench: S3Bench, console: Console) -> WriteBack | None:
    if not bench.write_back_bytes:
        return None
    with _progress(console, "Write-back", steps_in(bench.write_back_bytes)) as advance:
        return measure_write_back(place, bench.write_back_bytes, advance)


@contextmanager
def _progress(console: Console, title: str, total: int) -> Iterator[Callable[..., None]]:
    """Give what moves a bar on; it is drawn then only, and by no thread of its own."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task(title, total=total)

        def advance(by: int = 1) -> None:
            bar.advance(task, by)
            bar.refresh()

        yield advance
