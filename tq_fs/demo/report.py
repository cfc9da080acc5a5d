"""What the demo prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from tq_fs.demo.measure import Watched
from tq_fs.demo.r3 import Gap
from tq_fs.demo.scenario import MiB


def gap_table(gaps: Sequence[Gap]) -> Table:
    """Return the gap between rollout and training, by precision, without and with replay."""
    table = Table(title="|rollout logprob - training logprob| over generated tokens")
    table.add_column("training in")
    table.add_column("routing")
    for column in ("rows flipped", "mean gap", "largest gap"):
        table.add_column(column, justify="right")
    for gap in gaps:
        routing = "replayed (R3)" if gap.replay else "its own"
        table.add_row(
            gap.dtype, routing, f"{gap.flipped:.2%}", f"{gap.mean:.2e}", f"{gap.largest:.2e}"
        )
    return table


def path_table(memory: Watched, stored: Watched) -> Table:
    """Return both paths side by side."""
    table = Table(title="The same rollouts through both paths")
    table.add_column("")
    table.add_column("in-memory path", justify="right")
    table.add_column("tq-fs", justify="right")
    _count_rows(table, memory, stored)
    table.add_section()
    _byte_rows(table, memory, stored)
    table.add_section()
    _speed_rows(table, memory, stored)
    table.add_section()
    _memory_rows(table, memory, stored)
    return table


def _count_rows(table: Table, memory: Watched, stored: Watched) -> None:
    for name in ("steps", "segments", "microbatches"):
        label = {"steps": "Steps", "segments": "Segments", "microbatches": "micro-batches"}[name]
        table.add_row(label, *(f"{getattr(w.ledger, name):,}" for w in (memory, stored)))


def _byte_rows(table: Table, memory: Watched, stored: Watched) -> None:
    fields = memory.ledger.memory_bytes
    types = stored.ledger.stored_bytes
    for name in sorted(fields):
        kept = ", ".join(
            f"{mib(n)} {dtype}" for (field, dtype), n in types.items() if field == name
        )
        table.add_row(name, mib(fields[name]), kept)
    total = f"{mib(stored.ledger.disk_bytes)} on disk"
    table.add_row("all, with metadata", mib(sum(fields.values())), total)


def _speed_rows(table: Table, memory: Watched, stored: Watched) -> None:
    paths = [w.ledger for w in (memory, stored)]
    written = [per_second(sum(p.memory_bytes.values()), p.write_s) for p in paths]
    read = [per_second(p.hydrated_bytes, p.hydrate_s) for p in paths]
    table.add_row("record and finalize", *written)
    table.add_row("hydrate (page cache warm)", *read)


def _memory_rows(table: Table, memory: Watched, stored: Watched) -> None:
    paths = (memory, stored)
    table.add_row("baseline of the process", *(mib(w.baseline) for w in paths))
    for phase in ("record", "compare", "release"):
        label = {"record": "recorded", "compare": "hydrated", "release": "released"}[phase]
        table.add_row(f"growth once all is {label}", *(mib(w.growth_at(phase)) for w in paths))
    table.add_row("[bold]peak growth", *(f"[bold]{mib(w.peak_growth)}" for w in paths))


def mib(nbytes: float) -> str:
    """Return bytes in MiB, as text."""
    return f"{nbytes / MiB:,.1f} MiB"


def per_second(nbytes: float, seconds: float) -> str:
    """Return a throughput in MiB/s, as text."""
    return f"{nbytes / MiB / max(seconds, 1e-9):,.0f} MiB/s"
