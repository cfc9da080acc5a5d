"""``tq-fs bench cluster``: what a store on the nodes of a cluster costs, in one run.

Five measurements, one after the other; the module of each says what is fair about it:

* **put**, **get** are those of :mod:`tq_fs.bench.channel`. Without an ending they are over TCP;
  ``_unix`` is a socket of the own node, ``_tls`` and ``_curve`` are encrypted (the channel has TLS
  in the place of CURVE), ``_local`` is the backend without a unit.
* **object_store**, **local**, **put.vs_transfer_queue** and **unit** run on two raylets of this
  machine, with the store started by :func:`tq_fs.cluster.start`:
  :mod:`tq_fs.bench._cluster_object_store`, :mod:`~tq_fs.bench._cluster_read`,
  :mod:`~tq_fs.bench._cluster_peer`, :mod:`~tq_fs.bench._cluster_memory`.
* **controller** is :mod:`tq_fs.bench.controller`.

What Ray needs for itself runs beside: on two cores that is felt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tq_fs.bench import channel, controller
from tq_fs.bench._disk import measuring_place
from tq_fs.bench._progress import run_shown
from tq_fs.bench._targets import Target, at_least, at_most, targets_table
from tq_fs.bench._timing import Timings, Variant
from tq_fs.errors import DependencyMissing

if TYPE_CHECKING:
    from tq_fs.bench._cluster_memory import UnitMemory
    from tq_fs.bench._cluster_object_store import ObjectStore
    from tq_fs.bench._cluster_place import Nodes

__all__ = ["TARGETS", "ClusterBench", "Measured", "document", "figures", "measure", "show"]

MiB = 1024**2
GiB = 1024**3
_DISK_BYTES = 6 * GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterBench:
    """Settings of the measurement.

    Attributes
    ----------
    repeats
        Rounds of what is interleaved that count; one more comes before.
    steps
        Steps that the Controller holds.
    nbytes
        Bytes of Steps that pass through a unit.
    sessions
        Sessions that are rolled out and trained on.
    root
        Folder to measure in; None: a journaled file system of our own, where that is permitted.
    """

    repeats: int = 15
    steps: int = 1_000_000
    nbytes: int = 10 * GiB
    sessions: int = 32
    root: Path | None = None

    @property
    def for_controller(self) -> controller.ControllerBench:
        """The Controller's part."""
        return controller.ControllerBench(steps=self.steps, root=self.root)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured.

    Attributes
    ----------
    place
        Where, in words.
    channel, controller
        As their own commands measure them.
    object_store, memory
        Ray's object stores, and a unit's memory.
    reads, puts
        Seconds a Step, by way. No puts where TransferQueue is missing.
    peer
        Its version.
    left_out
        By key why there is no figure.
    """

    place: str
    channel: channel.Measured
    object_store: ObjectStore
    reads: Timings
    puts: Timings | None
    peer: str
    memory: UnitMemory
    controller: controller.Measured
    left_out: Mapping[str, str]


TARGETS: Mapping[str, Target] = {
    "put.x_raw": at_most(2.5),
    "put.vs_transfer_queue": at_least(4),
    "get_0_66mb.x_raw": at_most(2.3),
    "get_8mb.x_raw": at_most(1.3),
    "get_8mb.x_raw_curve": at_most(2.2),
    "local.x_embedded": at_most(1.1),
    "unit.rss_over_budget_mib": at_most(128),
    "unit.rss_rise_mib": at_most(16),
    "controller.bytes_per_step": at_most(600),
    "controller.fragments_per_s": at_least(100_000),
    "controller.x_flat": at_most(2),
    "controller.restart_s": at_most(10),
    "object_store.share_of_payload": at_most(0.01),
}
_ENDINGS = {
    "put": {"tcp": "", "unix": "_unix", "tls": "_tls", "local": "_local"},
    "get": {"tcp": "", "unix": "_unix", "tls": "_curve", "local": "_local"},
}


def measure(bench: ClusterBench, console: Console) -> Measured:
    """Measure everything, one after the other.

    Raises
    ------
    DependencyMissing
        Ray, torch or psutil is not installed.
    InvalidConfig
        The Controller is to hold too few Steps.
    """
    for_controller = bench.for_controller
    _check_installed()
    from tq_fs.bench._cluster_memory import measure_memory  # noqa: PLC0415  # needs Ray
    from tq_fs.bench._cluster_object_store import measure_object_store  # noqa: PLC0415
    from tq_fs.bench._cluster_place import two_nodes  # noqa: PLC0415

    through = channel.ChannelBench(repeats=bench.repeats, root=bench.root)
    channelled = channel.measure(through, console)
    with measuring_place(bench.root, _DISK_BYTES) as place, two_nodes(place.folder) as nodes:
        console.print("rollout and training on two raylets …")
        passed = measure_object_store(nodes, bench.sessions)
        reads = _measure_reads(nodes, bench, console)
        puts, peer, left_out = _measure_puts(nodes, bench, console)
        console.print(f"{bench.nbytes / GiB:.3g} GiB through a unit …")
        memory = measure_memory(nodes, bench.nbytes)
        kind = place.kind
    return Measured(
        place=kind,
        channel=channelled,
        object_store=passed,
        reads=reads,
        puts=puts,
        peer=peer,
        memory=memory,
        controller=controller.measure(for_controller, console),
        left_out=left_out,
    )


def _check_installed() -> None:
    """Tell before anything is measured that it cannot be."""
    for name, remedy in (("ray", "ray"), ("psutil", "'tq-fs[bench]'"), ("torch", "'tq-fs[torch]'")):
        if find_spec(name) is None:
            raise DependencyMissing(
                f"measuring a cluster needs {name}", remedy=f"pip install {remedy}"
            )


def _measure_reads(nodes: Nodes, bench: ClusterBench, console: Console) -> Timings:
    from tq_fs.bench._cluster_read import STEPS, own_node_reads  # noqa: PLC0415  # needs Ray

    with own_node_reads(nodes) as variants:
        return _run(variants, bench, STEPS, console, "read on a unit's node")


def _measure_puts(
    nodes: Nodes, bench: ClusterBench, console: Console
) -> tuple[Timings | None, str, dict[str, str]]:
    from tq_fs.bench._cluster_peer import STEPS, peer_version, puts  # noqa: PLC0415  # needs Ray

    try:
        with puts(nodes) as variants:
            timings = _run(variants, bench, STEPS, console, "put, and TransferQueue")
            return timings, peer_version(), {}
    except DependencyMissing as error:
        console.print(f"put.vs_transfer_queue is left out: {error}")
        return None, "", {"put.vs_transfer_queue": str(error)}


def _run(
    variants: Mapping[str, Variant],
    bench: ClusterBench,
    steps: int,
    console: Console,
    title: str,
) -> Timings:
    return run_shown(variants, repeats=bench.repeats, steps=steps, console=console, title=title)


# ---------------------------------------------------------------- figures


def figures(measured: Measured) -> dict[str, float]:
    """Return the figures by name.

    ``x`` is our time over theirs, ``vs`` theirs over ours. Those with a target are in
    :data:`TARGETS`; the others say what they consist of.
    """
    return {
        **_of_channel(measured.channel),
        **_of_puts(measured.puts),
        **_of_reads(measured.reads),
        **_of_memory(measured.memory),
        **controller.figures(measured.controller),
        **_of_object_store(measured.object_store),
    }


def _of_channel(measured: channel.Measured) -> dict[str, float]:
    out: dict[str, float] = {}
    for verb, sizes in (("put", measured.put), ("get", measured.get)):
        for size, timings in sizes.items():
            name = "put" if (verb, size) == ("put", "0_66mb") else f"{verb}_{size}"
            out[f"{name}.ms_raw"] = _ms(timings, "raw")
            for way, ending in _ENDINGS[verb].items():
                out[f"{name}.x_raw{ending}"] = round(timings.ratio(way, "raw"), 3)
                out[f"{name}.ms{ending}"] = _ms(timings, way)
    return out


def _of_puts(timings: Timings | None) -> dict[str, float]:
    if timings is None:
        return {}
    out = {"put.ms_transfer_queue": _ms(timings, "transfer_queue")}
    for way in timings.seconds:
        if way != "transfer_queue":
            ending = {"tcp": "", "tcp, finalized": "_finalized"}.get(way, f"_{way}")
            ratio = timings.ratio("transfer_queue", way)
            out[f"put.vs_transfer_queue{ending}"] = round(ratio, 3)
            out[f"put.ms_recorded{ending}"] = _ms(timings, way)
    return out


def _of_reads(timings: Timings) -> dict[str, float]:
    out = {"local.ms_embedded": _ms(timings, "embedded")}
    for way, ending in (("own node", ""), ("own node, two threads", "_two_threads")):
        out[f"local.x_embedded{ending}"] = round(timings.ratio(way, "embedded"), 3)
        out[f"local.ms{ending}"] = _ms(timings, way)
    return out


def _of_memory(memory: UnitMemory) -> dict[str, float]:
    return {
        "unit.rss_over_budget_mib": round(memory.over_budget_bytes / MiB, 1),
        "unit.rss_rise_mib": round(memory.rise_bytes / MiB, 1),
        "unit.rss_before_mib": round(memory.before_bytes / MiB, 1),
        "unit.rss_growth_mib": round(memory.growth_bytes / MiB, 1),
        "unit.held_mib": round(memory.held_bytes / MiB, 1),
        "unit.budget_mib": round(memory.budget_bytes / MiB, 1),
        "unit.bytes": memory.nbytes,
        "unit.mb_per_s": round(memory.nbytes / memory.seconds / 1e6, 1),
    }


def _of_object_store(passed: ObjectStore) -> dict[str, float]:
    return {
        "object_store.share_of_payload": round(passed.share, 6),
        "object_store.grown_bytes": passed.grown_bytes,
        "object_store.payload_bytes": passed.payload_bytes,
        "object_store.stored_bytes": passed.stored_bytes,
        "object_store.resident_bytes": passed.resident_bytes,
    }


def _ms(timings: Timings, way: str) -> float:
    return round(timings.median(way) * 1e3, 4)


def document(bench: ClusterBench, measured: Measured) -> dict[str, Any]:
    """Return the figures, what became of their targets, and the settings."""
    found = figures(measured)
    targets = {
        name: {"target": str(target), "met": target.met(found[name])}
        for name, target in TARGETS.items()
        if name in found
    }
    settings = {
        "repeats": bench.repeats,
        "steps": bench.steps,
        "bytes": bench.nbytes,
        "sessions": bench.sessions,
        "place": measured.place,
        "transfer_queue": measured.peer,
    }
    left_out = dict(measured.left_out)
    return {**found, "targets": targets, "left_out": left_out, "settings": settings}


def show(bench: ClusterBench, measured: Measured, console: Console) -> None:
    """Print the tables for people."""
    found = figures(measured)
    through = channel.ChannelBench(repeats=bench.repeats, root=bench.root)
    channel.show(through, measured.channel, console)
    if measured.puts is not None:
        title = f"Put a Step of 0.66 MB, beside TransferQueue {measured.peer}"
        console.print(_table(title, measured.puts, "transfer_queue"))
    console.print(_table("Read on the node that has the Steps", measured.reads, "embedded"))
    controller.show(bench.for_controller, measured.controller, console)
    memory, passed = measured.memory, measured.object_store
    console.print(
        f"{memory.nbytes / GiB:.3g} GiB through a unit: {memory.growth_bytes / MiB:,.0f} MiB of "
        f"resident memory above {memory.before_bytes / MiB:,.0f}, with up to "
        f"{memory.held_bytes / MiB:,.0f} of {memory.budget_bytes / MiB:,.0f} MiB of its budget in "
        f"use\n"
        f"rollout and training: {passed.payload_bytes / MiB:,.0f} MiB read, "
        f"{passed.grown_bytes / MiB:.2f} MiB through Ray's object stores"
    )
    console.print(targets_table(TARGETS, found))
    for name, reason in measured.left_out.items():
        console.print(f"{name} is left out: {reason}")


def _table(title: str, timings: Timings, base: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for head in ("ms a Step", f"x {base}"):
        table.add_column(head, justify="right")
    for name in timings.seconds:
        ratio = f"{timings.ratio(name, base):.3f}"
        table.add_row(name, f"{timings.median(name) * 1e3:.3f}", ratio)
    return table
