"""What commands print for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tq_fs.recovery import Recovery

_MOST_LINES = 20


def recovery(found: Recovery, console: Console, *, dry_run: bool) -> None:
    """Print what a recovery found and removed, or would remove."""
    removed = "would be removed" if dry_run else "removed"
    table = Table(box=None, show_header=False)
    table.add_column(justify="right")
    table.add_column()
    for count, what in (
        (f"{found.sessions:,}", "finalized sessions"),
        (f"{found.segments:,}", f"Segments, {found.unreleased:,} of them unreleased"),
        (f"{found.steps:,}", f"Steps that they need, {found.nbytes:,} bytes"),
        (f"{found.swept_sessions:,}", f"sessions that were never finalized: {removed}"),
        (f"{found.swept_steps:,}", f"Steps that nothing refers to: {removed}"),
        (f"{len(found.rebuilt):,}", "manifests made anew"),
        (f"{len(found.incomplete):,}", "Steps that are needed and not there, or not whole"),
        (f"{len(found.unreadable):,}", "manifests that cannot be used, left alone"),
    ):
        table.add_row(count, what)
    console.print(table)
    _names(found, console)


def swept(found: Recovery, console: Console) -> None:
    """Print what a sweep has removed, and what it did not find."""
    console.print(
        f"removed {found.swept_sessions:,} sessions that nobody records any more, and "
        f"{found.swept_steps:,} Steps that nothing refers to",
        highlight=False,
        soft_wrap=True,
    )
    _names(found, console)


def _names(found: Recovery, console: Console) -> None:
    for kind, names in (
        ("not whole", found.incomplete),
        ("unreadable", found.unreadable),
        ("made anew", found.rebuilt),
    ):
        for name in names[:_MOST_LINES]:
            console.print(f"{kind}: {name}", highlight=False, markup=False, soft_wrap=True)
        if len(names) > _MOST_LINES:
            console.print(f"and {len(names) - _MOST_LINES:,} more", highlight=False)
